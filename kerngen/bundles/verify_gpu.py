"""Verifies a database on the GPU at hand: its machine code loads, is correct, and is as fast as its rows say.

The last levels of `kerngen db verify`. All of it happens in the process that the tuner measures in (tuning/worker.py),
so that a kernel that faults takes that with it and no more, and by the checks and the clock that the tuner has.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerngen.arch import Arch, Device, Target
from kerngen.bundles.verify_cpu import source_today
from kerngen.errors import CorruptRecord, UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe
from kerngen.timing.gpu import GpuLock, throttled_by
from kerngen.tuning.worker import GpuWorker, Observed
from kerngen.tuning_db.dist.verify import Verdict
from kerngen.tuning_db.read.ranks import ALIKE, EXACT, rank_of
from kerngen.tuning_db.read.values import Build, Winner
from kerngen.tuning_db.store.store import Store
from kerngen.tuning_db.store.winners import NOISE_LEAST

if TYPE_CHECKING:
    from kerngen.system.progress import Progress

LEVELS = ("loads", "correct", "fast")
LOOKS = 3  # at a winner that seems too slow: the median of so many counts


def not_done(levels: Iterable[str], why: str) -> list[Verdict]:
    """Of levels that were asked for and cannot be carried out here: none of them is proved."""
    return [Verdict(level, False, f"not done: {why}", done=False) for level in levels]


def why_not_here(store: Store, arch: Arch) -> str | None:
    """Why nothing of `store` can be tried on a GPU of `arch`; None if something can."""
    arches = {w.arch.name for w in store.winners()} | {b.arch for b in store.kept_builds()}
    if arch.name in arches:
        return None
    return f"it is for {', '.join(sorted(arches)) or 'no arch'}, and this machine's GPU is {arch}"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A winner with its machine code, as today's kernel takes it."""

    winner: Winner
    kernel: Kernel
    problem: Any
    config: Any
    image: bytes

    @property
    def name(self) -> str:
        return f"{self.kernel.name}{describe(self.problem)}"


def on_gpu(
    store: Store,
    levels: Sequence[str],
    worker: GpuWorker,
    lock: GpuLock,
    *,
    tolerance: float,
    left: Callable[[], float],
    bar: Progress,
) -> list[Verdict]:
    """Those of LEVELS that were asked for, in their order, on the worker's GPU, whose lock is taken before it is timed.

    tolerance: how much longer than the database says a winner may take, as a part of that, beside its noise. left:
    seconds that are left; what was not reached by then is named, and its level not proved. Raises DeviceError.
    """
    here = worker.target()
    found = []
    if "loads" in levels:
        found.append(_loads(store, here, worker, left, bar))
    if "correct" in levels or "fast" in levels:
        run = _Run(here, worker, lock, tolerance, left, bar, times="fast" in levels)
        run.all(store)
        found += [v for v in (run.correct(), run.fast()) if v.level in levels]
    return found


def _loads(store: Store, here: Target, worker: GpuWorker, left: Callable[[], float], bar: Progress) -> Verdict:
    kept = [b for b in store.kept_builds() if b.status == "ok"]
    own = [b for b in kept if b.target == here.arch.nvrtc_target]
    others = Counter(b.arch for b in kept if b.target != here.arch.nvrtc_target)
    faults: list[str] = []
    done = entries = 0
    for i, build in enumerate(own):
        if left() <= 0:
            break
        bar.update(i, len(own), f"load {build.kernel}")
        done += 1
        if (why := _why_not_loaded(store, build, worker)) is None:
            entries += len(build.entries)
        else:
            faults.append(why)
    text = (
        f"{done - len(faults)} of {len(own)} images for {here.arch} load on this {here.device}, {entries} kernels found"
    )
    if others:
        text += f"; {sum(others.values())} for {', '.join(sorted(others))} are not for it"
    faults += _unreached(f"{b.kernel} {b.id[:12]}" for b in own[done:])
    is_done = done == len(own) > 0
    return Verdict(
        "loads", is_done and not faults, text, faults, is_done, {"images": len(own), "loaded": done - len(faults)}
    )


def _why_not_loaded(store: Store, build: Build, worker: GpuWorker) -> str | None:
    try:
        image = store.image(build)
    except CorruptRecord as e:
        return e.message
    if image is None:
        return f"{build.kernel} {build.id[:12]}: its machine code is gone"
    return worker.load(f"{build.kernel} {build.id[:12]}", image.image, tuple(build.entries)) or None


class _Run:
    """Each winner for this arch, on the worker's GPU: once if it is checked alone, again if it seems too slow."""

    def __init__(
        self, here: Target, worker: GpuWorker, lock: GpuLock, tolerance: float, left: Callable[[], float],
        bar: Progress, *, times: bool,
    ) -> None:  # fmt: skip
        self._bar, self._at = bar, 0
        self._here, self._worker, self._lock = here, worker, lock
        self._tolerance, self._left, self._times = tolerance, left, times
        self._num = self._num_timed = self._num_right = self._num_fast = 0
        self._wrong: list[str] = []
        self._slow: list[str] = []
        self._late: list[_Wanted] = []
        self._ratios: list[tuple[float, str]] = []

    def all(self, store: Store) -> None:
        winners = [w for w in store.winners() if w.arch == self._here.arch]
        winners.sort(key=lambda w: rank_of(w, self._here.device))  # stable: this board's first, then by problem
        self._num = len(winners)
        for i, winner in enumerate(winners):
            self._num_timed += self._is_timed(winner)
            wanted = _wanted(store, winner)
            if isinstance(wanted, str):
                self._wrong.append(wanted)
                continue
            if self._left() <= 0:
                self._late.append(wanted)
                continue
            self._at = i
            self._say(wanted.name)
            self._try(wanted)

    def _say(self, text: str) -> None:
        self._bar.update(self._at, self._num, text)

    def _is_timed(self, w: Winner) -> bool:
        """Whether this board should take what it took."""
        return rank_of(w, self._here.device) in (EXACT, ALIKE)

    def _try(self, wanted: _Wanted) -> None:
        if not (self._times and self._is_timed(wanted.winner)):
            seen = self._worker.check(wanted.kernel, wanted.problem, wanted.config, wanted.image)
            self._note(wanted, seen)
            return
        if (seen := self._timed(wanted)).outcome == "ok":
            self._compare(wanted, seen)
        self._note(wanted, seen)

    def _timed(self, wanted: _Wanted) -> Observed:
        self._lock.acquire(self._say)
        return self._worker.measure(wanted.kernel, wanted.problem, wanted.config, wanted.image)

    def _note(self, wanted: _Wanted, seen: Observed) -> None:
        if seen.outcome == "ok":
            self._num_right += 1
        else:
            self._wrong.append(f"{wanted.name}: {seen.outcome}: {seen.reason.partition(chr(10))[0]}")

    def _compare(self, wanted: _Wanted, seen: Observed) -> None:
        if (said := wanted.winner.latency_us) is None:  # carried, and so not timed (_is_timed)
            return
        noise = float(wanted.winner.why.get("noise", NOISE_LEAST))
        limit = 1 + noise + self._tolerance
        looks = [seen]
        while _ratio(looks, said) > limit and len(looks) < LOOKS and self._left() > 0:
            looks.append(self._timed(wanted))
            if looks[-1].outcome != "ok":
                self._slow.append(f"{wanted.name}: {looks[-1].outcome} at another look: {looks[-1].reason}")
                return
        if reasons := throttled_by(looks[-1].gpu):
            self._slow.append(f"{wanted.name}: not compared: this GPU is held back ({', '.join(sorted(reasons))})")
            return
        ratio = _ratio(looks, said)
        self._ratios.append((ratio, wanted.name))
        if ratio <= limit:
            self._num_fast += 1
            return
        took = f"{said:.2f} us there, {ratio * said:.2f} us here"
        self._slow.append(f"{wanted.name}: {took} ({ratio:.3f} of it, noise {noise:.1%})")

    def correct(self) -> Verdict:
        which = f"winners for {self._here.arch}"
        text = f"{self._num_right} of {self._num} {which} agree with the reference on this {self._here.device}"
        is_done = self._num > 0 and not self._late
        faults = self._wrong + _unreached(w.name for w in self._late)
        return Verdict("correct", is_done and not faults, text, faults, is_done,
                       {"winners": self._num, "correct": self._num_right})  # fmt: skip

    def fast(self) -> Verdict:
        device: Device = self._here.device
        if not self._num_timed:
            return not_done(["fast"], f"no winner was measured on a board like this {device}")[0]
        late = [w for w in self._late if self._is_timed(w.winner)]
        text = f"{self._num_fast} of {self._num_timed} winners that were measured take what it says"
        figures: dict[str, Any] = {"winners": self._num_timed, "fast": self._num_fast, "tolerance": self._tolerance}
        if self._ratios:
            middle, (worst, where) = statistics.median(r for r, _ in self._ratios), max(self._ratios)
            text += f": {middle:.3f} of it in the median, {worst:.3f} at worst ({where})"
            figures |= {"median": middle, "worst": worst, "worst_of": where}
        text += f"; up to {self._tolerance:.1%} longer, beside the noise, is as fast"
        faults = self._slow + _unreached(w.name for w in late)
        is_all = self._num_fast == self._num_timed
        return Verdict("fast", is_all and not faults, text, faults, not late, figures)


def _wanted(store: Store, winner: Winner) -> _Wanted | str:
    """What is run of it, or why nothing can be."""
    name = f"{winner.kernel} {winner.id[:12]}"
    try:
        kernel = find_kernel(winner.kernel)
        build = store.build(winner.build_id)
        image = store.image(build)
    except UnknownName:
        return f"{name}: {winner.kernel} is not installed here"
    except CorruptRecord as e:
        return e.message
    if source_today(build, winner.problem.fields) is None:
        return f"{name}: today's kernel renders another source, and it is not run (kerngen db rebuild)"
    if image is None:
        return f"{name}: its machine code is not in the database (kerngen db rebuild)"
    problem, config = kernel.problem_type(**winner.problem.fields), kernel.config_type(**winner.config)
    return _Wanted(winner, kernel, problem, config, image.image)


def _ratio(looks: Sequence[Observed], said_us: float) -> float:
    return statistics.median(o.p50_us for o in looks if o.p50_us is not None) / said_us


def _unreached(names: Iterable[str]) -> list[str]:
    return [f"not reached in the time: {name}" for name in names]
