"""Faults that a soak reports, of an engine or a server: errors, answers that differ, memory that grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHOWN = 20


@dataclass(slots=True)
class Faults:
    """The first SHOWN in words, and how many there were."""

    shown: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, message: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(message)

    def lines(self) -> Iterator[str]:
        yield from self.shown
        if (more := self.count - len(self.shown)) > 0:
            yield f"and {more} more errors"


def parts_at(answer: Sequence[Any], alone: Sequence[Any]) -> int | None:
    """Where two answers, tokens or text, first differ: at the end of one, if it begins the other. None: they do not."""
    least = min(len(answer), len(alone))
    found = next((i for i in range(least) if answer[i] != alone[i]), least)
    return None if found == len(answer) == len(alone) else found


def growth(seen: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By how many MB the most of the second half of `seen` exceeds that of the first, by what holds it.

    The first half is the warm-up: graphs are captured, caches and allocators fill. What holds memory counts where it
    does at the end and did in the first half. {} for fewer than four samples.
    """
    if len(seen) < 4:
        return {}
    before, after = _most(seen[: len(seen) // 2]), _most(seen[len(seen) // 2 :])
    return {name: after[name] - before[name] for name in seen[-1] if name in before}


def _most(seen: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(s[name] for s in seen if name in s) for name in {n for s in seen for n in s}}
