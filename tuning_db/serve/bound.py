"""The tuned points of one kernel with one set of compiled-in fields, read once and answered from memory.

Who is asked, in this order; the answer names who spoke:
    1. an override store, whatever it has      2. this very device, measured
    3. the same arch, measured on the device with the nearest SM count
    4. the same arch, predicted (this device first, then the nearest SM count)
    5. as 1 to 4, but tuned on an older source of the kernel: the configuration alone, to be compiled anew
None of them: None, and the caller uses the default configuration.

Tuned points lie along the dynamic field (tokens, KV length). A point serves itself and what lies between it and the
next lower one; nothing is served below the lowest or above the highest. Everything is checked before it is served: the
configuration must still be valid, the image must match its digest, nothing revoked counts. What fails is skipped with a
warning that names it, once, and the next in order is asked.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerngen import closure
from kerngen.arch import Target
from kerngen.compile import Cubin
from kerngen.errors import CorruptRecord, DatabaseError
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning_db.serve.canonical import bucketed, coordinates, problem_key
from kerngen.tuning_db.serve.freshness import Freshness
from kerngen.tuning_db.serve.source import Source
from kerngen.tuning_db.serve.values import Build, Winner

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Point:
    """A stored winner, and what verifying it gave once it was first asked for."""

    store: Source
    winner: Winner
    how: str
    config: Any = None
    answer: Winner | None = None
    is_verified: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    """One board's points of one cell, by their dynamic value; `at` is None for a kernel that has none."""

    at: list[int] | None
    points: list[_Point]

    def serving(self, dynamic: int | None) -> _Point | None:
        """The lowest point at or above `dynamic`, unless it lies outside all points."""
        if self.at is None or dynamic is None:
            return self.points[0] if self.at is None and dynamic is None else None
        index = bisect_left(self.at, dynamic)
        return None if dynamic < self.at[0] or index == len(self.at) else self.points[index]


class Bound:
    """The winners of `kernel` for the compiled-in fields of `problem` on `target`, from `stores` in their order.

    Reads each store once, here, and each winner's build and image when it is first served: nothing after that touches
    a database. Threads may share one.
    """

    def __init__(self, stores: Sequence[Source], kernel: Kernel, problem: Any, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self._cells: dict[tuple[Any, ...], list[_Line]] = {}
        self._static_key = problem_key(kernel, problem).static_key
        self._fresh: dict[str, Freshness] = {}  # by store, whose builds alone it knows
        found = list(_read(stores, kernel, self._static_key, target))
        self._revoked = _revoked(stores) if found else set()
        for cell, line in _ordered(found, kernel, target):
            self._cells.setdefault(cell, []).append(line)

    def answer(self, problem: Any) -> Winner | None:
        """The winner that serves `problem`, with its cubin if that was kept and is current; None if there is none.

        The same object each time that it is the answer.
        """
        lines = self._cells.get(coordinates(bucketed(self.kernel, problem)))
        if lines is None:
            return None
        dynamic = getattr(problem, problem.DYNAMIC) if problem.DYNAMIC else None
        older: Winner | None = None
        for line in lines:
            if (point := line.serving(dynamic)) is None:
                continue
            if not point.is_verified:
                self._verify(point, problem)
            if point.answer is None or not self._can_run(point, problem):
                continue
            if not point.answer.stale:
                return point.answer
            older = older or point.answer
        return older

    def _can_run(self, point: _Point, problem: Any) -> bool:
        try:
            why = self.kernel.why_invalid(problem, point.config, self.target)
        except Exception as e:  # whatever an older Config's values do to today's spec
            why = f"{type(e).__name__}: {e}"
        if why is not None:
            log.warning("%s cannot run %s: %s; skipped", _here(point, self.kernel), describe(problem), why)
        return why is None

    def _verify(self, point: _Point, problem: Any) -> None:
        """Check the winner's build and image; the answer stays None, with a warning, if it must not be served."""
        point.is_verified = True
        here, w = _here(point, self.kernel), point.winner
        if w.build_id in self._revoked:
            log.warning("%s is revoked; skipped", here)
            return
        cubin: Cubin | None = None
        try:
            build = point.store.build(w.build_id)
            point.config = self.kernel.config_type(**build.config)
            stale = not self._is_current(point.store, problem, build)
            if not stale:
                image = point.store.image(build)
                cubin = image if isinstance(image, Cubin) else None
        except DatabaseError as e:
            kind = "" if isinstance(e, CorruptRecord) else "unreadable: "
            log.warning("%s%s; winner %s for %s skipped", kind, e, w.id[:16], self.kernel.name)
            return
        except Exception as e:  # whatever an older Config's values do to today's spec
            log.warning("%s cannot be served (%s: %s); skipped", here, type(e).__name__, e)
            return
        how = point.how + (", on an older source" if stale else "")
        point.answer = replace(
            w, config=build.config, cubin=cubin, stale=stale, source=f"{point.store.name}: {how}"
        )  # fmt: skip

    def _is_current(self, store: Source, problem: Any, build: Build) -> bool:
        if (fresh := self._fresh.get(store.where)) is None:
            known = store.rendered(self._static_key, closure.closure_of(self.kernel))
            fresh = self._fresh[store.where] = Freshness(self.kernel, known)
        return fresh.is_current(problem, build)


def _here(point: _Point, kernel: Kernel) -> str:
    return f"{point.store.where}: winner {point.winner.id[:16]} for {kernel.name}"


def _read(
    stores: Sequence[Source], kernel: Kernel, static_key: str, target: Target
) -> Iterator[tuple[Source, list[Winner]]]:
    for store in stores:
        try:
            winners = store.winners(kernel.name, arch=target.arch, static_key=static_key)
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
            continue
        if here := [w for w in winners if w.device.arch == target.arch.name]:
            yield store, here


def _revoked(stores: Sequence[Source]) -> set[str]:
    revoked: set[str] = set()
    for store in stores:
        try:
            revoked |= store.revoked().keys()
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
    for store in stores if revoked else ():
        try:
            revoked |= store.renamed(revoked)
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
    return revoked


def _ordered(
    found: list[tuple[Source, list[Winner]]], kernel: Kernel, target: Target
) -> Iterator[tuple[tuple[Any, ...], _Line]]:
    """(cell, line) in the order of the module's docstring."""

    def exact(w: Winner) -> bool:
        return w.device.name == target.device.name and w.device.num_sms == target.device.num_sms

    def distance(w: Winner) -> tuple[bool, int, str]:
        return (not exact(w), abs(w.device.num_sms - target.device.num_sms), w.device.name)

    steps: tuple[tuple[str, bool | None, str], ...] = (
        ("measured", True, "exact device"),
        ("measured", False, "measured on {device}, the same arch"),
        ("predicted", None, "predicted for {device}"),
    )
    for overriding in (True, False):
        scope = [(s, ws) for s, ws in found if s.override == overriding]
        for provenance, same_device, how in steps:
            for store, winners in scope:
                lines: dict[tuple[Any, ...], list[Winner]] = {}
                for w in sorted(winners, key=distance):
                    if w.provenance == provenance and same_device in (None, exact(w)):
                        cell = coordinates(w.problem.runtime)
                        lines.setdefault((cell, w.device.name, w.device.num_sms), []).append(w)
                for (cell, _, _), line in lines.items():
                    tuned = [w for w in line if w.problem.dynamic is not None]
                    if not kernel.problem_type.DYNAMIC:
                        tuned = [w for w in line if w.problem.dynamic is None][:1]
                    if tuned:
                        tuned.sort(key=lambda w: w.problem.dynamic or 0)
                        at = [w.problem.dynamic or 0 for w in tuned] if kernel.problem_type.DYNAMIC else None
                        yield cell, _Line(at, [_Point(store, w, how.format(device=w.device)) for w in tuned])
