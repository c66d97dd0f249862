"""Ranks of boards for a board: whose winners come first, and whose do not count (kerngen/boards.py has the distance).

What was measured on this very board is best. What was on one that differs by no more than two of a kind do (SAME) comes
next, then what was predicted for this board. What was measured on one of its kind (NEAR) is better than what was
predicted for such a one; beyond that the kernel's default is better than either.
"""

from __future__ import annotations

from kerngen.boards import NEAR, SAME, Device, distance
from kerngen.tuning_db.read.values import Winner

EXACT, ALIKE, PREDICTED, KIND, PREDICTED_KIND, BEYOND = range(6)


def is_exact(a: Device, b: Device) -> bool:
    """True for two boards of one name with the same figures: 40 GB are not 80 GB of memory that was called the same."""
    return (a.name, a.num_sms) == (b.name, b.num_sms) and distance(a, b) <= SAME


def rank_of(winner: Winner, here: Device) -> int:
    """How well `winner` serves on `here`: the lower the better; BEYOND where it does not."""
    far = distance(winner.device, here)
    measured = winner.provenance == "measured"
    if is_exact(winner.device, here):
        return EXACT if measured else PREDICTED
    if far <= SAME:
        return ALIKE if measured else PREDICTED
    if far <= NEAR:
        return KIND if measured else PREDICTED_KIND
    return BEYOND


def how(winner: Winner, here: Device) -> str:
    """In words, for an answer's source."""
    if winner.provenance != "measured":
        return f"predicted for {winner.device}"
    return "exact device" if is_exact(winner.device, here) else f"measured on {winner.device}, the same arch"
