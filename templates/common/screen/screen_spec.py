"""Sizes of a matrix in few bits, for specs and for screen.py, without torch."""

from __future__ import annotations

from kerngen.errors import ProblemError

ROWS, COLUMNS = 16, 64  # of a tile of codes
# A token is fixed-point too, see greedy_head's source: of its largest element's size there are this many steps.
TOKEN_STEPS = 32512
# Bits of a code, and how many tiles side by side are a group: so many that each plane of it is 16 bytes a lane.
GROUP_TILES = {4: 1, 6: 2, 7: 4, 8: 1}
# Of which bits the last one lies apart: how many come first, and have bounds of their own.
FIRST_BITS = {7: 6}


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def require_bits(bits: int) -> None:
    if bits not in GROUP_TILES:
        raise ProblemError(f"bits={bits} is not one of: {', '.join(map(str, GROUP_TILES))}")


def group_loads(bits: int) -> int:
    """Of 16 bytes a lane, in a group of tiles: of nibbles, then of two bits, then of one; of rows where bits are 8."""
    return GROUP_TILES[bits] * bits // 4


def num_bounds(bits: int) -> int:
    """Numbers a row: a scale and a bound, and those of the first bits where they have some."""
    return 4 if bits in FIRST_BITS else 2


def bits_of(loads: int) -> int:
    """The bits of codes that have so many loads a group. Raises ProblemError where none have."""
    for bits in GROUP_TILES:
        if group_loads(bits) == loads:
            return bits
    known = ", ".join(str(group_loads(bits)) for bits in GROUP_TILES)
    raise ProblemError(f"codes have {loads} loads a group; there are {known}")


def screen_bytes(rows: int, columns: int, bits: int = 8, first_bits: int | None = None) -> int:
    """Of codes and bounds of a matrix [rows, columns]. first_bits: of so many bits of each code, in place of all."""
    each = padded(columns, COLUMNS * GROUP_TILES[bits]) * (first_bits or bits) // 8
    return padded(rows, ROWS) * (each + 4 * num_bounds(bits))


def least_bytes(rows: int, columns: int, bits: int) -> int:
    """Of those, what whoever looks for one row cannot but read: of a code the first bits."""
    return screen_bytes(rows, columns, bits, FIRST_BITS.get(bits))
