"""Databases that are asked by board, and the boards that kerngen ships results for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from kerngen.arch import Device, Target
from kerngen.boards import NEAR, distance
from kerngen.tuning_db.read import places
from kerngen.tuning_db.read.canonical_fields import device_from
from kerngen.tuning_db.read.source import Source

log = logging.getLogger(__name__)

SUFFIX = ".txt"
_HEAD_BYTES = 4096  # a results file names its board in its second line


@runtime_checkable
class PerBoard(Protocol):
    """Stands among the databases of a run for those that depend on the board: opened once that is known."""

    def on(self, target: Target) -> Sequence[Source]:
        """What there is for `target`, always the same; nothing where no board is near enough."""


def at_hand(sources: Sequence[Source | PerBoard], target: Target) -> list[Source]:
    """`sources` in their order, as they are asked on `target`."""
    found: list[Source] = []
    for source in sources:
        found += source.on(target) if isinstance(source, PerBoard) else [source]
    return found


@dataclass(frozen=True, slots=True)
class Board:
    """A folder of results files. device: of the first of them."""

    folder: Path
    device: Device

    @property
    def name(self) -> str:
        return self.folder.name

    def files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SUFFIX}"))


def shipped_boards() -> tuple[Board, ...]:
    """Boards that this installation has results of, by name. One whose files cannot be read is left out, with a
    warning.
    """
    return _boards_in(places.PREBUILT)


@cache
def _boards_in(folder: Path) -> tuple[Board, ...]:
    found = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not place.is_dir() or not (files := sorted(place.glob(f"*{SUFFIX}"))):
            continue
        try:
            found.append(Board(place, _device_of(files[0])))
        except (OSError, ValueError, TypeError, KeyError) as e:
            log.warning("%s is no results file of a board (%s); looking on without %s", files[0], e, place.name)
    return tuple(found)


def _device_of(path: Path) -> Device:
    with path.open("rb") as f:
        second = f.read(_HEAD_BYTES).split(b"\n")[1]
    stated = json.loads(second.removeprefix(b"board "))
    return device_from(stated)


def nearest_board(device: Device) -> Board | None:
    """The board whose results serve `device`; None if all are of another kind."""
    near = min(shipped_boards(), key=lambda b: distance(b.device, device), default=None)
    return near if near is not None and distance(near.device, device) <= NEAR else None
