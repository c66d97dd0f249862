"""Times candidates beside a problem's default, alone and in whole steps of a model, on this machine's GPU.

Alone: the GPU's process compares each candidate with the fp32 reference and times it. One that is wrong, faults or
waits for ever is an outcome, and the next goes on. The fastest, the default and whatever is patched are then timed
again together, by replays in turn, so that all meet the same clocks.

In the step, where a kernel's time is not what it is alone: the step is replayed with each candidate that ran alone, in
turn with the step as it is so far. A gain is measured once more, since the best of many looks is partly the luckiest;
then the candidate stays for all problems after it. Another round begins with the best of each: what gains beside one
configuration may lose beside another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from random import Random
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from kerngen.arch import Device, Target
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin
from kerngen.errors import CompileError, LaunchError
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.timing.gpu import Clocks, Seen
from kerngen.tuning.ab_plan import Candidate, Entry
from kerngen.tuning.checks import why_unlaunchable
from kerngen.tuning.plan import rank
from kerngen.tuning.worker import Observed
from kerngen.workload.steps import Ratio, Step, fused_as, launch_counts, unasked
from kerngen.workload.workload import Model, require_among

if TYPE_CHECKING:
    from kerngen.tuning.ab_rows import Rows
    from kerngen.tuning.step_worker import Exchanged

AHEAD = 256  # candidates whose compiles may be under way or done before the GPU gets to them
SAMPLES, TARGET_MS = 8, 1.0  # of each candidate: graph replays, and how long one of them is to take
SAMPLES_AGAIN = 24  # of those that are timed again, together
PAIRS = 6  # replays of a step for a look, with and without in turn
SURE_PAIRS = 18  # of the look that decides
SURE_LOOKS = 2  # of the best of a place's, how many get one where the one before did not stand it
KEPT = 12  # of a place's candidates, those that come into the next round

_Called = tuple[str, Any]  # kernel and problem


class Gpu(Protocol):
    """What an A/B asks of a GPU: `worker.GpuWorker`, or a test's own."""

    def device(self) -> Device: ...
    def target(self) -> Target: ...
    def environment(self) -> dict[str, Any]: ...
    def uuid(self) -> str: ...
    def clocks(self) -> Clocks | None: ...

    def measure(
        self, kernel: Kernel, problem: Any, config: Any, image: bytes, *, samples: int, target_ms: float
    ) -> Observed: ...

    def in_turn(
        self, kernel: Kernel, problem: Any, candidates: Sequence[tuple[Any, bytes, bool]], *, samples: int
    ) -> list[Observed]: ...

    def compare(
        self, model: Model, step: Step, base: Sequence[Exchanged], other: Sequence[Exchanged], *, pairs: int,
        fused: Mapping[tuple[str, Any], bool],
    ) -> Ratio | Observed: ...  # fmt: skip


@dataclass(slots=True, eq=False)
class Trial:
    """A candidate and what came of it alone. made: its machine code, or why there is none. again: of the second look.

    same_code: it is patched, and has the machine code of its configuration unpatched.
    """

    entry: Entry
    candidate: Candidate
    source: str
    made: Cubin | str
    seen: Observed
    again: Observed | None = None
    same_code: bool = False

    @property
    def best(self) -> Observed:
        """What the best look there was says."""
        return self.seen if self.again is None else self.again

    @property
    def us(self) -> float | None:
        return self.best.p50_us

    @property
    def failed(self) -> bool:
        """Whether it is wrong, though it was not known to be, or did not run."""
        return self.best.outcome != "ok" and not (self.candidate.wrong and self.best.outcome == "wrong_result")

    @property
    def image(self) -> bytes:
        """Of one that has been launched."""
        assert isinstance(self.made, Cubin)
        return self.made.image


@dataclass(slots=True, eq=False)
class Compared:
    """All trials of a problem, the default's first. complete: False where the time was over before. clocks: of the GPU,
    as it began and ended.
    """

    entry: Entry
    trials: list[Trial]
    complete: bool
    clocks: tuple[Mapping[str, Any], ...] = ()

    def ratio(self, trial: Trial) -> float | None:
        """Its time over the default's, by looks of one kind; None where one of the two has none."""
        base = self.trials[0]
        mine, its = (
            (trial.again, base.again) if trial.again is not None and base.again is not None else (trial.seen, base.seen)
        )
        return None if mine.p50_us is None or its.p50_us is None else mine.p50_us / its.p50_us


class Alone:
    """Candidates of problems, each kernel alone. again: how many of the fastest are timed again. late: whether the time
    is over. rows: takes what was seen, and gives what earlier runs saw, where it is to.
    """

    def __init__(
        self, gpu: Gpu, compiler: CachedCompiler, target: Target, rows: Rows, *, again: int, seed: int,
        late: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._gpu, self._compiler, self._target, self._rows = gpu, compiler, target, rows
        self._again, self._seed, self._late = again, seed, late

    def run(self, entries: Sequence[Entry]) -> Iterator[Trial | Compared]:
        """Each trial as it is done, behind those of a problem what they came to. All are compiled meanwhile.

        Raises as Entry.candidates and Entry.source do.
        """
        listed = [(entry, self._ordered(entry)) for entry in entries]
        made = self._compiled((entry, c) for entry, candidates in listed for c in candidates)
        for entry, candidates in listed:
            clocks, trials = [self._gpu.clocks()], list[Trial]()
            for _ in candidates:
                if self._late():
                    break
                trials.append(self._trial(*next(made), trials))
                yield trials[-1]
            if complete := len(trials) == len(candidates):
                self._time_again(entry, trials)
            clocks.append(self._gpu.clocks())
            yield Compared(entry, trials, complete, tuple(said for c in clocks if (said := Seen(None, c).noted())))
            if not complete:
                return

    def _ordered(self, entry: Entry) -> list[Candidate]:
        """The default first; of a grid the others shuffled, so that a GPU that warms up favours no part of it."""
        default, *rest = entry.candidates(self._target, self._seed)
        if entry.grid or entry.sample:
            Random(f"{self._seed} {entry.about}").shuffle(rest)
        return [default, *rest]

    def _compiled(
        self, wanted: Iterable[tuple[Entry, Candidate]]
    ) -> Iterator[tuple[Entry, Candidate, str, Future[Cubin]]]:
        ahead: deque[tuple[Entry, Candidate, str, Future[Cubin]]] = deque()
        for entry, candidate in wanted:
            source = entry.source(candidate, self._target)
            ahead.append((entry, candidate, source, self._compiler.submit(source, self._target.arch)))
            if len(ahead) > AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _trial(
        self, entry: Entry, candidate: Candidate, source: str, made: Future[Cubin], before: Sequence[Trial]
    ) -> Trial:
        try:
            cubin = made.result()
        except CompileError as e:
            trial = Trial(entry, candidate, source, f"{e.message}\n{e.log}".strip(),
                          Observed("compile_failed", e.message))  # fmt: skip
            self._rows.add(trial, trial.seen)
            return trial
        trial = Trial(entry, candidate, source, cubin, Observed("invalid"))
        trial.same_code = bool(candidate.replace) and any(
            isinstance(t.made, Cubin) and t.made.image == cubin.image and t.candidate.config == candidate.config
            for t in before
            if not t.candidate.replace
        )
        if (why := why_unlaunchable(entry.kernel, entry.problem, candidate.config, self._target, cubin)) is not None:
            trial.seen = Observed("invalid", why)
        elif (known := self._rows.known(trial)) is not None:
            trial.seen = known
            return trial
        else:
            trial.seen = self._gpu.measure(entry.kernel, entry.problem, candidate.config, cubin.image,
                                           samples=SAMPLES, target_ms=TARGET_MS)  # fmt: skip
        self._rows.add(trial, trial.seen)
        return trial

    def _time_again(self, entry: Entry, trials: Sequence[Trial]) -> None:
        """The fastest, the default and what is patched, together. What one of them takes down stands as first seen."""
        ran = [t for t in trials if not t.failed]
        fastest = sorted(ran, key=lambda t: t.seen.p50_us or inf)[: self._again]
        chosen = [t for t in ran if t in fastest or t is trials[0] or t.candidate.name]
        if len(chosen) < 2 or not self._again:
            return
        asked = [(t.candidate.config, t.image, t.candidate.wrong) for t in chosen]
        seen = self._gpu.in_turn(entry.kernel, entry.problem, asked, samples=SAMPLES_AGAIN)
        if all(s.p50_us is None for s in seen):
            return
        for trial, s in zip(chosen, seen, strict=True):
            trial.again = s
            self._rows.add(trial, s, stage="final")


# -- in a step of a model


@dataclass(slots=True, eq=False)
class Place:
    """A problem of the step, how often it is launched there, and what was tried on it alone, the default's first."""

    entry: Entry
    launches: int
    trials: list[Trial] = field(default_factory=list)

    @property
    def called(self) -> tuple[str, Any]:
        return self.entry.kernel.name, self.entry.problem

    @property
    def about(self) -> str:
        return f"{self.entry.about}, {self.launches} launches"


@dataclass(frozen=True, slots=True)
class Look:
    """One exchange: the step's time with it over the time without, or what came in the way. kept: it stays."""

    place: Place
    trial: Trial
    seen: Ratio | Observed
    kept: bool = False


def places_of(
    model: Model, step: Step, target: Target, kernels: Sequence[str] = (),
    fused: Mapping[tuple[str, Any], bool] = MappingProxyType({}),
) -> list[Place]:  # fmt: skip
    """The problems of `step` that `kernels` serve (none named: all), those of most bytes first, without candidates.

    fused: of (kernel, problem) that replaces several, whether the step asks it; of others the default says so. Raises
    UsageError for a kernel that the step does not launch, and as `sequence` does.
    """
    launches = launch_counts(model, step, target.arch, fused_as(fused, target))
    require_among(kernels, sorted({name for name, _ in launches}), f"{step.name} of {model.name}", "launches")
    found = [
        Place(Entry(find_kernel(name), problem), count)
        for (name, problem), count in launches.items()
        if not kernels or name in kernels
    ]
    return sorted(found, key=lambda p: -p.launches * p.entry.kernel.cost(p.entry.problem).bytes)


def apart_for(model: Model, step: Step, target: Target, wanted: Iterable[tuple[str, Any]]) -> dict[_Called, bool]:
    """Which kernels `step` must not ask, so that it launches the `wanted` (kernel, problem)s in place: each False.
    Those that it launches by default need none.
    """
    default = default_selector(target).fuses
    lacking = set(wanted) - launch_counts(model, step, target.arch, default).keys()
    found: dict[_Called, bool] = {}

    def listen(kernel: Kernel, problem: Any) -> bool:
        if fused := default(kernel, problem):
            found[kernel.name, problem] = lacking.isdisjoint(kernel.replaces(problem))
        return fused

    launch_counts(model, step, target.arch, listen)
    return {called: fused for called, fused in found.items() if not fused}


def unasked_places(model: Model, step: Step, target: Target) -> list[Place]:
    """The problems of kernels that `step` might ask in place of several, and does not by default: what exchanges one of
    them for a configuration that is `fused` has the step ask it.
    """
    found = unasked(model, step, target.arch, default_selector(target).fuses)
    return [Place(Entry(find_kernel(name), problem), count) for (name, problem), count in found.items()]


class InStep:
    """A step, and what has been kept in it so far. least: of the step's time, what must be gained at least. fused: as
    in places_of.
    """

    def __init__(
        self, model: Model, step: Step, places: Sequence[Place], gpu: Gpu, rows: Rows, least: float,
        fused: Mapping[tuple[str, Any], bool] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._model, self._step, self._gpu, self._rows, self._least = model, step, gpu, rows, least
        self._fused = dict(fused)
        self._places = [p for p in places if not p.trials[0].failed]
        self._left = {p.called: sorted((t for t in p.trials if not t.failed), key=_us) for p in self._places}
        self._default = {p.called: p.trials[0] for p in self._places}
        self.kept: dict[tuple[str, Any], Trial] = {}  # where it is not the default
        self.complete = True  # False where the time was over before all had been looked at

    def begin(self) -> None:
        """Make the model and look at the step as it is. Raises LaunchError where it does not run."""
        seen = self._compare({}, {}, PAIRS)
        if isinstance(seen, Observed):
            raise LaunchError(f"{self._step.name} of {self._model.name} does not run by default: {seen.reason}",
                              hint="give the first look more time with --timeout")  # fmt: skip

    def round(self, end: float | None = None) -> Iterator[Look]:
        """All places once, each with what was kept so far. Leaves each with the best of those that work. end: by
        monotonic(); until then each place has an equal share of what is left, and what is fastest alone comes first.
        """
        for index, place in enumerate(self._places):
            default = self._default[place.called]
            now = self.kept.get(place.called, default)
            looks: list[tuple[float, Trial]] = []
            began = monotonic()
            until = inf if end is None else began + (end - began) / (len(self._places) - index)
            for trial in self._left[place.called]:
                if trial is now:
                    continue
                if monotonic() >= until:
                    self.complete = False
                    break
                look = self._look(place, trial, PAIRS)
                yield look
                if isinstance(look.seen, Ratio):
                    looks.append((look.seen.median, trial))
            looks.sort(key=lambda seen: seen[0])
            for ratio, trial in looks[:SURE_LOOKS]:
                if ratio >= 1 - self._least:
                    break
                look = self._look(place, trial, SURE_PAIRS, may_stay=True)
                if look.kept or isinstance(look.seen, Observed):
                    yield look
                if look.kept:
                    break
            best = [trial for _, trial in looks if not trial.candidate.wrong][:KEPT]
            self._left[place.called] = list(dict.fromkeys((default, now, *best)))

    def against_defaults(self) -> Ratio | Observed:
        """The step with all that was kept, over the step by default."""
        return self._compare({}, self.kept, 2 * SURE_PAIRS)

    def _compare(self, base: Mapping[_Called, Trial], other: Mapping[_Called, Trial], pairs: int) -> Ratio | Observed:
        return self._gpu.compare(self._model, self._step, _exchanged(base), _exchanged(other), pairs=pairs,
                                 fused=self._fused)  # fmt: skip

    def _look(self, place: Place, trial: Trial, pairs: int, *, may_stay: bool = False) -> Look:
        """may_stay: keep it where this confirms that it gains, unless its results are known to be wrong."""
        before = dict(self.kept)
        seen = self._compare(before, {**before, place.called: trial}, pairs)
        if isinstance(seen, Observed):
            return Look(place, trial, seen)
        now = before.get(place.called, self._default[place.called])
        self._rows.add_step(trial, now, seen, self._model, self._step, before, self._fused)
        gains = seen.median < 1 - self._least and seen.median + 2 * seen.spread < 1
        if not (may_stay and gains) or trial.candidate.wrong:
            return Look(place, trial, seen)
        self.kept[place.called] = trial
        if trial is self._default[place.called]:
            del self.kept[place.called]
        return Look(place, trial, seen, kept=True)


def _us(trial: Trial) -> float:
    return inf if trial.us is None else trial.us


def _exchanged(chosen: Mapping[tuple[str, Any], Trial]) -> list[Exchanged]:
    from kerngen.tuning.step_worker import Exchanged  # which loads torch

    return [Exchanged(name, (problem,), t.candidate.config, t.image) for (name, problem), t in chosen.items()]


# -- without a GPU


def expected_us(entry: Entry, candidate: Candidate, target: Target) -> float:
    """What the cost model says of the configuration before it is compiled."""
    return rank(entry.kernel, entry.problem, target, [candidate.config])[0][0]
