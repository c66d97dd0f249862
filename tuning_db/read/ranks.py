"""Ranks of boards for a board: whose winners come first, and whose do not count (kerngen/boards.py has the distance).

What was measured on this very board is best. What was on one that differs by no more than two of a kind do (SAME) comes
next, then what is carried of this board (chosen on it by steps and sweeps, of which no time is left), then what was
predicted for it. Of what is of another of its kind (NEAR), what was measured is better than what is carried, and that
than what was predicted; beyond that the kernel's default is better than either.
"""

from __future__ import annotations

from kerngen.boards import NEAR, SAME, Device, distance
from kerngen.tuning_db.read.values import Winner

EXACT, ALIKE, CARRIED, PREDICTED, KIND, CARRIED_KIND, PREDICTED_KIND, BEYOND = range(8)
_OF_THIS = {"measured": ALIKE, "carried": CARRIED, "predicted": PREDICTED}
_OF_ITS_KIND = {"measured": KIND, "carried": CARRIED_KIND, "predicted": PREDICTED_KIND}


def is_exact(a: Device, b: Device) -> bool:
    """True for two boards of one name with the same figures: 40 GB are not 80 GB of memory that was called the same."""
    return (a.name, a.num_sms) == (b.name, b.num_sms) and distance(a, b) <= SAME


def rank_of(winner: Winner, here: Device) -> int:
    """How well `winner` serves on `here`: the lower the better; BEYOND where it does not."""
    far = distance(winner.device, here)
    if winner.provenance == "measured" and is_exact(winner.device, here):
        return EXACT
    if far <= SAME:
        return _OF_THIS[winner.provenance]
    return _OF_ITS_KIND[winner.provenance] if far <= NEAR else BEYOND


def how(winner: Winner, here: Device) -> str:
    """In words, for an answer's source."""
    if winner.provenance == "predicted":
        return f"predicted for {winner.device}"
    if winner.provenance == "carried":
        return f"carried, of {winner.device}"
    return "exact device" if is_exact(winner.device, here) else f"measured on {winner.device}, the same arch"
