"""The tuned points of one kernel with one set of compiled-in fields, read once and answered from memory.

Who is asked, in this order; the answer names who spoke. An override store is asked all of it before the others, and as
a last resort whatever else it has of the arch:
    1. this very device, measured              2. one that differs by no more than two of a kind do, measured
    3. what is carried of this device          4. what was predicted for it
    5. one of its kind, measured (ranks.py)    6. what is carried of such a one
    7. what was predicted for such a one
    8. as 1 to 7, but tuned on a source of an older revision of its body: the configuration
What is carried was chosen on that device by steps and sweeps, of which only the configuration is left.
What was tuned on another source of the revision that the body has today (Body.revision) is as good as what was tuned
on today's. Machine code is served of today's source alone, where there is any, or compiled.
None of them: None, and the caller uses the default configuration.

Tuned points lie along the dynamic field (tokens, KV length). A point serves itself and what lies between it and the
next lower one, but where that lower one, or the default, was judged faster there (store/crossovers.py); nothing is
served below the lowest or above the highest, nor, of what is measured or predicted, where the size is less than the
point's by more than Problem.REACH: a tune that was cut short leaves gaps. Where a runtime field has finer buckets
than powers of two (Problem.FINER), the problem's own cell is asked first, then those above it up to the power of two;
what is carried serves its own cell alone. Points that are measured and carried of this very device lie on one line,
whichever databases they are in: a measured one takes the place of a carried one, and serves no size that another
carried one is nearer to.

Everything is checked before it is served: the configuration must still be valid, the image must match its digest,
nothing revoked counts. What fails is skipped with a warning that names it, once, and the next in order is asked.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from kerngen.arch import Arch, Target, find_arch
from kerngen.boards import distance
from kerngen.compiler import source_digest
from kerngen.compiler.compile import Cubin
from kerngen.errors import CorruptRecord, DatabaseError, KerngenError
from kerngen.templates.kernel import Kernel, describe, fields_of
from kerngen.tuning_db.read.boards import PerBoard, at_hand
from kerngen.tuning_db.read.canonical_fields import finer
from kerngen.tuning_db.read.freshness import Freshness
from kerngen.tuning_db.read.ids import bucketed, buckets_above, coordinates, problem_key
from kerngen.tuning_db.read.kernel_index import KernelIndex, Point
from kerngen.tuning_db.read.ranks import BEYOND, how, is_exact, rank_of
from kerngen.tuning_db.read.source import Source
from kerngen.tuning_db.read.values import PROVENANCES, Build, Winner

log = logging.getLogger(__name__)


class _Read:
    """The line of one source, and which of its builds are current."""

    def __init__(self, source: Source, line: KernelIndex, kernel: Kernel, here: str, arch: Arch) -> None:
        self.source, self.line, self.kernel, self._arch = source, line, kernel, arch
        self._fresh = Freshness(kernel, here, line.closures, line.builds.values())
        self._images: dict[str, Cubin | None] = {}  # by build: several points have one

    def is_current(self, problem: Any, build: Build) -> bool:
        return self._fresh.is_current(problem, build)

    def holds(self, build: Build) -> bool:
        return self._fresh.holds(build)

    def image(self, build: Build) -> Cubin | None:
        """Its machine code, if it was kept, and for this very GPU. Raises DatabaseError."""
        if build.id not in self._images:
            image = self.source.image(build) if build.target == self._arch.nvrtc_target else None
            if isinstance(image, Cubin) and (lacking := self._entry_points(build) - image.entries.keys()):
                raise CorruptRecord(f"{self.source.where}: the machine code of build {build.id} has no "
                                    f"{', '.join(sorted(lacking))}: it is of another kernel")  # fmt: skip
            self._images[build.id] = image if isinstance(image, Cubin) else None
        return self._images[build.id]

    def _entry_points(self, build: Build) -> set[str]:
        """What the kernel launches in that configuration; nothing where it has no such body any more."""
        try:
            return set(self.kernel.body(self.kernel.config_type(**build.config), find_arch(build.arch)).args)
        except (KerngenError, TypeError, LookupError):
            return set()

    def code(self, problem: Any, config: dict[str, Any]) -> Cubin | None:
        """The machine code of a current build of this configuration. Raises DatabaseError."""
        for build in self.line.builds.values():
            if build.config == config and self.is_current(problem, build) and (image := self.image(build)) is not None:
                return image
        return None


@dataclass(slots=True)
class _Choice:
    """A stored winner, and what verifying it gave once it was first asked for."""

    read: _Read
    point: Point
    how: str
    config: Any = None
    answer: Winner | None = None
    is_verified: bool = False


@dataclass(slots=True)
class _Row:
    """What one board has tuned of one cell in one way; `at` is None for a kernel that has no dynamic field.

    choices: at each point, those for the kernel's code of today first. is_carried: it has points that are carried, and
    serves its own cell alone. reach: how many times a size the point may be that serves it; what is carried lies at
    each size where another configuration begins.
    """

    at: list[int] | None = None
    choices: list[list[_Choice]] = field(default_factory=list)
    is_carried: bool = False
    reach: float = inf

    def serving(self, dynamic: int | None) -> list[_Choice]:
        """Those of the lowest point at or above `dynamic`, none if that lies outside all points."""
        if self.at is None or dynamic is None:
            return self.choices[0] if self.at is None and dynamic is None else []
        index = bisect_left(self.at, dynamic)
        if dynamic < self.at[0] or index == len(self.at):
            return []
        is_near = self.at[index] <= self.reach * dynamic
        return [c for c in self.choices[index] if is_near or c.point.winner.provenance == "carried"]

    def is_carried_below(self, dynamic: int) -> bool:
        """Whether the next lower point is carried."""
        index = bisect_left(self.at or [], dynamic)
        return self.is_carried and index > 0 and self.choices[index - 1][0].point.winner.provenance == "carried"

    def choices_at(self, dynamic: int) -> list[_Choice]:
        """Those of that very point."""
        index = bisect_left(self.at or [], dynamic)
        return self.choices[index] if self.at and index < len(self.at) and self.at[index] == dynamic else []


class WinnerTable:
    """The winners of `kernel` for the compiled-in fields of `problem` on `target`, from `sources` in their order.

    Reads each source once, here, and each winner's image when it is first served: nothing after that touches a
    database. Threads may share one.
    """

    def __init__(
        self,
        sources: Sequence[Source | PerBoard],
        kernel: Kernel,
        problem: Any,
        target: Target,
        source_digest_of: Callable[[Kernel], str] | None = None,
    ) -> None:
        """source_digest_of: source_digest.py's, which reads all files of a kernel, or what remembers its answers."""
        self.kernel, self.target = kernel, target
        self._digest_of = source_digest_of or source_digest.source_digest_of
        self._static_key = problem_key(kernel, problem).static_key
        self._closure = ""
        here = at_hand(sources, target)
        self._reads = list(self._read(here))
        self._revoked = _revoked(here) if self._reads else set()
        self._cells: dict[tuple[Any, ...], list[_Row]] = {}
        self._above: dict[tuple[Any, ...], list[_Row]] = {}  # of cells that were asked for, with those above them
        for cell, row in self._ordered():
            self._cells.setdefault(cell, []).append(row)

    def answer(self, problem: Any) -> Winner | None:
        """The winner that serves `problem`, with its cubin if that is there and current; None if there is none.

        The same object each time that it is the answer.
        """
        dynamic = getattr(problem, problem.DYNAMIC) if problem.DYNAMIC else None
        older: Winner | None = None
        for row in self._rows(problem):
            for choice in row.serving(dynamic):
                if not self._serves(choice, problem) or choice.answer is None:
                    continue
                if not choice.answer.stale:
                    return self._judged(row, choice, problem, dynamic) if choice.point.switch else choice.answer
                older = older or choice.answer
        return older

    def lengths(self, problem: Any) -> list[int]:
        """Where it has points along the dynamic field that may serve problems with these other runtime fields."""
        return sorted({at for row in self._rows(problem) for at in row.at or ()})

    def passed_over(self, problem: Any) -> Winner | None:
        """The winner that does not serve `problem` because the default was judged to be faster; None if none is."""
        dynamic = getattr(problem, problem.DYNAMIC) if problem.DYNAMIC else None
        for row in self._rows(problem):
            for choice in row.serving(dynamic):
                if self._serves(choice, problem) and choice.answer is not None and not choice.answer.stale:
                    return choice.answer if self.answer(problem) is None else None
        return None

    def code(self, problem: Any, config: Any) -> Cubin | None:
        """The machine code of a configuration that no winner has, a default's, where a source has it; else None."""
        wanted = fields_of(config) if self._reads else {}
        for read in self._reads:
            try:
                if (found := read.code(problem, wanted)) is not None:
                    return found
            except DatabaseError as e:
                log.warning("%s; skipped", e)
        return None

    # ---- reading

    def _read(self, sources: Sequence[Source]) -> Iterator[_Read]:
        for source in sources:
            try:
                line = source.line(self.kernel.name, self._static_key, self.target.arch.name)
            except DatabaseError as e:
                log.warning("%s; looking on without it", e)
                continue
            if line is not None:
                self._closure = self._closure or self._digest_of(self.kernel)
                yield _Read(source, line, self.kernel, self._closure, self.target.arch)

    def _ordered(self) -> Iterator[tuple[tuple[Any, ...], _Row]]:
        """(cell, row) in the order of the module's docstring.

        What is carried of this very device fills a row up whose other points it has measured: these serve no size that
        a carried point lies nearer to.
        """
        here = self.target.device
        for overriding in (True, False):
            reads = [r for r in self._reads if r.source.override == overriding]
            exact = [p.winner for r in reads for p in r.line.points if is_exact(p.winner.device, here)]
            has_carried = any(w.provenance == "carried" for w in exact)
            rows: dict[tuple[Any, ...], dict[int | None, list[_Choice]]] = {}
            places: dict[tuple[Any, ...], tuple[int, int, float, str]] = {}
            for number, read in enumerate(reads):
                for point in read.line.points:
                    w = point.winner
                    if (rank := rank_of(w, here)) == BEYOND and not overriding:
                        continue
                    rank += PROVENANCES.index(w.provenance) if rank == BEYOND else 0
                    place = (rank, number, distance(w.device, here), w.device.name)
                    choice, cell = _Choice(read, point, how(w, here)), coordinates(w.problem.runtime)
                    keys: list[tuple[Any, ...]] = [(cell, number, w.device, w.provenance)]
                    if has_carried and w.provenance != "predicted" and is_exact(w.device, here):
                        keys = [(cell, None, here, "carried")] + keys * (w.provenance == "measured")
                    for key in keys:
                        places[key] = min(places.get(key, place), place)
                        rows.setdefault(key, {}).setdefault(w.problem.dynamic, []).append(choice)
            for key in sorted(rows, key=places.__getitem__):
                if (row := self._row(rows[key])) is not None:
                    yield key[0], row

    def _row(self, points: dict[int | None, list[_Choice]]) -> _Row | None:
        """Measured before carried; stable: then the newest."""
        for choices in points.values():
            choices.sort(
                key=lambda c: (c.point.winner.provenance == "carried", c.point.winner.closure != self._closure)
            )
        is_carried = any(c.point.winner.provenance == "carried" for choices in points.values() for c in choices)
        if not self.kernel.problem_type.DYNAMIC:
            return _Row(None, [points[None]], is_carried) if None in points else None
        at, reach = sorted(d for d in points if d is not None), getattr(self.kernel.problem_type, "REACH", inf)
        return _Row(at, [points[d] for d in at], is_carried, reach) if at else None

    # ---- what is served

    def _rows(self, problem: Any) -> Sequence[_Row]:
        """Those of its cell; of a problem with finer buckets (Problem.FINER) then those of the cells above it."""
        cell = coordinates(bucketed(self.kernel, problem))
        if not finer(problem):
            return self._cells.get(cell, ())
        if (known := self._above.get(cell)) is None:
            cells = map(coordinates, buckets_above(self.kernel, problem))
            found = [(at, row) for at in cells for row in self._cells.get(at, ())]
            known = self._above[cell] = [row for at, row in found if at == cell or not row.is_carried]
        return known

    def _judged(self, row: _Row, choice: _Choice, problem: Any, dynamic: int | None) -> Winner | None:
        """What serves a size between two points: the upper's winner, the lower's, or None for the default.

        Where a carried point lies between those that were judged, the upper's.
        """
        w, switch = choice.point.winner, choice.point.switch
        if (
            dynamic is None
            or dynamic == w.problem.dynamic
            or w.closure != self._closure
            or row.is_carried_below(dynamic)
        ):
            return choice.answer
        upto = bisect_left(switch, dynamic, key=lambda s: s[0])
        at = w.problem.dynamic if upto == len(switch) else switch[upto][1]
        if at is None:
            return None
        for other in row.choices_at(at):
            if self._serves(other, problem) and other.answer is not None and not other.answer.stale:
                return other.answer
        return choice.answer

    def _serves(self, choice: _Choice, problem: Any) -> bool:
        if not choice.is_verified:
            self._verify(choice, problem)
        return choice.answer is not None and self._can_run(choice, problem)

    def _can_run(self, choice: _Choice, problem: Any) -> bool:
        if (why := why_unfit(self.kernel, problem, choice.config, self.target)) is not None:
            log.warning("%s cannot run %s: %s; skipped", _here(choice, self.kernel), describe(problem), why)
        return why is None

    def _verify(self, choice: _Choice, problem: Any) -> None:
        """Check the winner's build and image; the answer stays None, with a warning, if it must not be served."""
        choice.is_verified = True
        here, w, read = _here(choice, self.kernel), choice.point.winner, choice.read
        if w.build_id in self._revoked or choice.point.measurement_id in self._revoked:
            log.warning("%s is revoked; skipped", here)
            return
        try:
            build = read.line.builds[w.build_id]
            choice.config = self.kernel.config_type(**build.config)
            is_current = read.is_current(problem, build)
            stale = not is_current and not read.holds(build)
            cubin = read.image(build) if is_current else None
            cubin = cubin or read.code(problem, build.config)  # of another build of it, by another NVRTC perhaps
        except DatabaseError as e:
            kind = "" if isinstance(e, CorruptRecord) else "unreadable: "
            log.warning("%s%s; winner %s for %s skipped", kind, e, w.id[:16], self.kernel.name)
            return
        except Exception as e:  # whatever an older Config's values do to today's spec
            log.warning("%s cannot be served (%s: %s); skipped", here, type(e).__name__, e)
            return
        how = choice.how + (", on an older source" if stale else "" if is_current else ", on an earlier source")
        choice.answer = replace(
            w, config=build.config, cubin=cubin, stale=stale, source=f"{read.source.name}: {how}"
        )  # fmt: skip


def why_unfit(kernel: Kernel, problem: Any, config: Any, target: Target) -> str | None:
    """Kernel.why_invalid of what a database has: an older Config's values may do anything to today's spec."""
    try:
        return kernel.why_invalid(problem, config, target)
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def _here(choice: _Choice, kernel: Kernel) -> str:
    return f"{choice.read.source.where}: winner {choice.point.winner.id[:16]} for {kernel.name}"


def _revoked(sources: Sequence[Source]) -> set[str]:
    revoked: set[str] = set()
    for source in sources:
        try:
            revoked |= source.revoked().keys()
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
    for source in sources if revoked else ():
        try:
            revoked |= source.renamed(revoked)
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
    return revoked
