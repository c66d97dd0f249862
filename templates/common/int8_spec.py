"""Sizes of a matrix in eight bits: what specs and int8_screen share, without torch."""

from __future__ import annotations

ROWS, COLUMNS = 16, 64  # of a tile of codes
# A token is fixed-point too, see greedy_head's source: of its largest element's size there are this many steps.
TOKEN_STEPS = 32512


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def screen_bytes(rows: int, columns: int) -> int:
    """Of codes and bounds of a matrix [rows, columns]."""
    return padded(rows, ROWS) * (padded(columns, COLUMNS) + 8)
