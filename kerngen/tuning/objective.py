"""Objectives of a tuning run: an `Objective` judges compiled configurations, by the cost model or by the clock.

The tuner asks searches for configurations, compiles them, tells the searches what became of them and writes rows.
Whatever differs between a cost model and a GPU it asks of the objective: how deep a search goes, what may be skipped,
what an earlier row is worth, how the finalists are told apart, what a row and a report say. `Predicted` and `Measured`
are two answers. Tuner, Search and Ledger take any other that keeps the Protocol.
A third, `Stepped` (step_objective.py), measures as `Measured` does, and decides between the finalists of all
problems together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from kerngen.arch import Target
from kerngen.cost.predict import MODEL, predict
from kerngen.templates.kernel import Kernel
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.plan import expected_least
from kerngen.tuning_db.store.winners import PREDICTED_MARGIN

if TYPE_CHECKING:
    from kerngen.runtime.selection import Choice, Selector
    from kerngen.timing.gpu import GpuLock
    from kerngen.tuning.study import Search
    from kerngen.tuning.task import Trial
    from kerngen.tuning.worker import GpuWorker, Observed
    from kerngen.tuning_db.read.values import Build, Measurement, StepKey

FINALISTS = 4
FINAL_BAND = 1.10  # what takes longer than this times the best is no finalist
FIGURES = ("p10_us", "p90_us", "min_us", "samples", "error_abs", "error_rel")  # that a measurement has beside its time
_NEVER_REUSED = ("launch_failed", "timed_out")  # the machine may have been at fault: try again


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one configuration. `kind` is one of tuning_db's outcomes.

    latency_us: set if kind is "ok". excess: how far over a limit it was, as Optuna's constraint; 0 if it was
    not. registers: per thread, of the compiled kernel; 0 if there is none. figures, tags: further fields and tags of
    its row. stage: of its row, where that is not what it was asked for. step: that it was judged in. decides: False
    for a last word on a search that a run with more time may take back.
    """

    kind: str
    latency_us: float | None = None
    reason: str = ""
    registers: int = 0
    spill_bytes: int = 0
    excess: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""
    step: StepKey | None = None
    decides: bool = True

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


@dataclass(frozen=True, slots=True)
class Selections:
    """What a run of a model would choose. before: as the tune began. now: by all rows that are written so far, which
    takes about `now_s` seconds. image: the machine code of a choice, compiled if need be; raises OutOfTime as a
    Trial's.
    """

    before: Selector
    now: Callable[[], Selector]
    now_s: float
    image: Callable[[Choice], bytes]


class Objective(Protocol):
    """What the tuner asks.

    name: as --objective and the reports have it; another name is another search. how: the same in words, for a
    report's head. provenance, row: of the rows that it causes, and further fields of each (model, environment).
    target: what it judges on. trials: configurations a problem, the default included, unless the user says
    otherwise. batch: asked of each search in a round; a constant, since answers must not depend on the number of
    workers. sampler: what proposes configurations. "model" goes down the cost model's ranking, and the search
    ends when nothing that is left can win. "residual" learns what the model gets wrong (sampler.py).
    margin: how much longer the default has to take for another to win, as a part of that one's time. settings: what
    else decides how its searches go. needs_image: judging launches the kernel; otherwise the figures of a build are
    enough, and a known one is not compiled. takes_time: judging does, beyond the compile, so that nothing is judged
    once the time is over. final_stage: of the rows that end a search. final_s: seconds that deciding between a
    problem's finalists takes, before any was decided; finals_s: that deciding between all takes at least. waited_s:
    what judging has spent so far waiting for others, which is not on the run's time. remarks: on the whole run, for
    the report. The tuner sets `say`, which is told what is going on, and `left`, which gives the seconds that are
    left of the run's time, and `selections`.
    """

    name: str
    how: str
    provenance: str
    row: Mapping[str, Any]
    target: Target
    trials: int
    batch: int
    sampler: str
    margin: float
    needs_image: bool
    takes_time: bool
    final_stage: str
    final_s: float
    finals_s: float
    settings: Sequence[Any]
    remarks: Sequence[str]
    waited_s: float
    say: Callable[[str], None]
    left: Callable[[], float]
    selections: Selections | None

    def can_win(self, kernel: Kernel, problem: Any, config: Any, best_us: float) -> bool:
        """Whether `config` is worth a compile where another takes `best_us`."""

    def answer(self, trial: Trial, rows: Sequence[Measurement]) -> Outcome | None:
        """What earlier rows of this very build say, the newest first; None if it has to be judged."""

    def judge(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        """One outcome for each trial. `trials` waits for the compiles: who judges one at a time takes one at a time.
        Raises OutOfTime where one would take longer than is left.
        """

    def finalists(self, search: Search) -> list[Any]:
        """The configurations between which a search that is over has to decide; none if it found nothing."""

    def decide(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """The last word on the finalists of each search. Their rows say that it is closed. Raises as `judge`."""

    def undecided(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """What to write down of finalists between which nothing will decide, since the run was stopped."""


class Predicted:
    """By the cost model, for a board that need not be here. Costs nothing but the compiles, so it prunes those."""

    name = provenance = "predicted"
    how = f"predicted by {MODEL}, not measured"
    trials, batch = 12, 1  # what is predicted first is mostly the best: a second would be compiled in vain
    sampler, margin = "model", PREDICTED_MARGIN
    needs_image = takes_time = False
    final_stage = "trial"
    final_s = finals_s = waited_s = 0.0
    settings: Sequence[Any] = ()
    remarks: Sequence[str] = ()
    selections: Selections | None = None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.say: Callable[[str], None] = unsaid
        self.left: Callable[[], float] = forever
        self.row: Mapping[str, Any] = {"model": MODEL}
        self._asked: tuple[Kernel, Any] | None = None  # whose bounds are at hand: a search asks about all it has left
        self._least: Callable[[Any], float] = lambda config: 0.0

    def can_win(self, kernel: Kernel, problem: Any, config: Any, best_us: float) -> bool:
        if self._asked != (kernel, problem):
            self._asked, self._least = (kernel, problem), expected_least(kernel, problem, self.target)
        return self._least(config) < best_us

    def answer(self, trial: Trial, rows: Sequence[Measurement]) -> Outcome | None:
        """A row answers if it says what the model says today: that sees more than the build, and costs nothing."""
        said = {r.p50_us for r in rows if r.outcome == "ok" and r.model == MODEL}
        outcome = self._predict(trial) if said else None
        return outcome if outcome is not None and outcome.latency_us in said else None

    def judge(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in trials:
            yield trial, self._predict(trial)

    def _predict(self, trial: Trial) -> Outcome:
        build = trial.build
        us = predict(trial.kernel, trial.problem, trial.config, self.target, build.entries).latency_us
        return Outcome("ok", us, "", build.registers, build.spill_bytes, build.spill_bytes)

    def finalists(self, search: Search) -> list[Any]:
        return [] if search.best is None else [search.best]

    def decide(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """Nothing is left to decide: the best is written down as such."""
        for trials in finalists:
            for trial in trials:
                yield trial, replace(trial.task.search.outcomes[trial.config], reason=f"best of a {trial.task.about}")

    def undecided(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        return iter(())


class Measured:
    """By the clock of the GPU that `worker` holds, after a check against the reference.

    lock: taken before the first measurement, waiting for whoever has it, and left to the caller to release: two that
    measured on one GPU would time each other.
    """

    name = how = provenance = "measured"
    trials, batch = 40, 6
    sampler, margin = "residual", 0.0
    needs_image = takes_time = True
    final_stage, final_s, finals_s = "final", 0.5, 0.0
    selections: Selections | None = None

    def __init__(self, worker: GpuWorker, lock: GpuLock | None = None) -> None:
        self._worker, self._lock = worker, lock
        self.waited_s = 0.0
        self.settings: Sequence[Any] = ()
        self.remarks: Sequence[str] = ()
        self.say: Callable[[str], None] = unsaid
        self.left: Callable[[], float] = forever
        self.target = worker.target()
        self.row: Mapping[str, Any] = {"environment": worker.environment()}

    def can_win(self, kernel: Kernel, problem: Any, config: Any, best_us: float) -> bool:
        return True  # the cost model is no bound of what a clock shows

    def answer(self, trial: Trial, rows: Sequence[Measurement]) -> Outcome | None:
        usable = (r for r in rows if r.outcome not in _NEVER_REUSED)
        if (row := next(usable, None)) is None:
            return None
        seen = {name: getattr(row, name) for name in FIGURES}
        return replace(_outcome(row.outcome, row.p50_us, row.reason, trial.build), figures=seen)

    def judge(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in trials:
            self._take_gpu()
            image = trial.image()
            seen = self._worker.measure(trial.kernel, trial.problem, trial.config, image, within_s=self.left())
            yield trial, _observed(seen, trial.build)

    def finalists(self, search: Search) -> list[Any]:
        """The fastest, as far as a second look may turn them over, and the default."""
        return finalists([(c, o.latency_us) for c, o in search.outcomes.items()], search.candidates.default)

    def decide(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """Those of a search are timed again together, in rotated order. None is begun that there is no time for."""
        for trials in finalists:
            self._take_gpu()
            first, left = trials[0], self.left()
            if left <= self.final_s:
                raise OutOfTime
            images = [(t.config, t.image()) for t in trials]
            seen = self._worker.finals(first.kernel, first.problem, images, within_s=self.left())
            yield from ((t, _observed(s, t.build)) for t, s in zip(trials, seen, strict=True))
            if left < inf:
                took = left - self.left()
                self.final_s = max(took, self.final_s + (took - self.final_s) / 8)

    def undecided(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """The fastest of single trials stand."""
        return iter(())

    def _take_gpu(self) -> None:
        if self._lock is not None:
            self.waited_s += self._lock.acquire(self.say)


def finalists(tried: Iterable[tuple[Any, float | None]], default: Any) -> list[Any]:
    """Of configurations with their times, None where one failed: the fastest, as far as a second look may turn them
    over, and the default. Of equals the one that was tried first.
    """
    ok = sorted(((c, us) for c, us in tried if us is not None), key=lambda pair: pair[1])
    near = [c for c, us in ok if us <= ok[0][1] * FINAL_BAND][:FINALISTS]
    return near + [c for c, _ in ok if c == default and c not in near]


def unsaid(text: str) -> None:
    """Nobody listens."""


def forever() -> float:
    """Nobody counts."""
    return float("inf")


def _observed(seen: Observed, build: Build) -> Outcome:
    tags = {"gpu": seen.gpu} if seen.gpu else {}
    return replace(_outcome(seen.outcome, seen.p50_us, seen.reason, build), figures=seen.figures(), tags=tags)


def _outcome(kind: str, p50_us: float | None, reason: str, build: Build) -> Outcome:
    return Outcome(kind, p50_us, reason, build.registers, build.spill_bytes, 0.0 if kind == "ok" else 1.0)
