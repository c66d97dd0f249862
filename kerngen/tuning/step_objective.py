"""The objective that judges by whole steps of a model: kernels alone pick the finalists, the step decides.

Alone, a kernel is not what it is in the step: what it leaves to its successor counts too, in caches, in SMs that are
still busy, in memory traffic that overlaps. So trials are judged as `Measured` does, alone and by the clock, and
between the finalists of all problems together decides coordinate descent with joint moves (descent.py) over whole
steps, of which a `StepTimer` gives the ratio of two assignments, run side by side.

What is written down needs no trust in the descent: once it is over, every finalist is exchanged, alone, in what was
chosen, and each such look is a row (stage "step") with the step's time with it and without. From those rows the winners
are derived (tuning_db/store/step_trials.py). p50_us stays the kernel's time alone. At last the steps are looked at as a
run of the model would choose before and now (step_end.py); what made one slower is taken back. Where no step could be
judged in time, what ran before stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, exp, inf, log, prod
from typing import TYPE_CHECKING, Any, Protocol

from kerngen.arch import Target
from kerngen.cost.predict import occupancy
from kerngen.errors import KerngenError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe, fields_of
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.descent import Descent, Place, Spent, descend
from kerngen.tuning.objective import Measured, Outcome, Selections
from kerngen.tuning.step_end import End, outcome_in
from kerngen.tuning_db.read.ids import digest
from kerngen.tuning_db.read.values import StepKey
from kerngen.tuning_db.store.step_trials import STEP_NOISE
from kerngen.workload.steps import Ratio

if TYPE_CHECKING:
    from kerngen.runtime.selection import Selector
    from kerngen.timing.gpu import GpuLock
    from kerngen.tuning.study import Search
    from kerngen.tuning.task import Trial
    from kerngen.tuning.worker import GpuWorker
    from kerngen.workload.workload import Item

BAND = 1.30  # what takes longer alone than this times the best is not looked at in a step
MOST = 8  # finalists of a problem
PAIRS = 9  # of runs, base and other in turn, for a look in the descent
FIRST_PAIRS = 2  # that warm up
LAST_PAIRS = 15  # for what is written down
LOOKS_AT_THE_END = 3  # as long as so many in the descent: of more pairs, and again where something is taken back
FOR_OTHERS = 0.25  # of the time that is left when the steps are looked at, kept for problems that no step launches
NOISE_MOST = 0.02  # of a step's time: what differs by more is no noise
MOST_EVALUATIONS = 2000
KEPT = 5  # interactions that are written down, the largest


@dataclass(frozen=True, slots=True)
class StepPoint:
    """What can be exchanged in a step: a kernel at a problem. launches: of it in the step that is run. us: each takes
    alone, in microseconds, with what the timer was made with. times: launches of the whole model's step that one of
    these stands for; more than one where layers that repeat are not all run.
    """

    kernel: str
    problem: Any
    launches: int
    us: float
    times: float = 1.0


Choice = Mapping[StepPoint, tuple[Any, bytes]]  # configuration and cubin image


class StepTimer(Protocol):
    """One step of a model, on a GPU, as one graph."""

    def points(self) -> tuple[StepPoint, ...]:
        """What can be exchanged, in the order of the step."""

    def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
        """`other`'s step over `base`'s, of the step that is run. What a choice leaves out keeps what the timer was made
        with.

        Raises KerngenError where one of them cannot run, OutOfTime where that takes longer than `within_s`.
        """


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that counts, by `key.weight`, and who times it."""

    key: StepKey
    timer: StepTimer


Name = tuple[str, Any]  # of a place: kernel and tuned problem
Assignment = Mapping[Name, Any]  # place -> configuration


class Stepped(Measured):
    """Trials by the clock, alone; the finalists by `steps`. serving: the tuned problem whose winner serves a call."""

    name = "step"
    how = "measured, and chosen by the steps of the model"
    final_s = 1.0
    finals_s = 40.0  # to make the steps' model, look at each step, and derive winners in between

    def __init__(
        self,
        worker: GpuWorker,
        steps: Sequence[TimedStep],
        serving: Callable[[str, Any], Item | None],
        lock: GpuLock | None = None,
    ) -> None:
        super().__init__(worker, lock)
        self._steps = [JudgedStep(s, serving) for s in steps]
        self._names = {name for s in self._steps for name in s.points}
        self.settings = ["whole", *(fields_of(s.key) for s in steps)]  # whose time is judged, and in which steps
        self.descent: Descent[Name, Any] | None = None
        self._kept = 0.0  # seconds, for problems that no step launches

    def finalists(self, search: Search) -> list[Any]:
        """Of a problem that a step launches: the fastest alone, one of each footprint, and the default, which the step
        may like for reasons of its own. Of others as by the clock.
        """
        if (search.kernel.name, search.problem) not in self._names:
            return super().finalists(search)
        tried = sorted(
            ((c, o.latency_us, o) for c, o in search.outcomes.items() if o.latency_us is not None), key=lambda t: t[1]
        )
        near = [(c, o) for c, us, o in tried if us <= tried[0][1] * BAND]
        kept = dict[Any, None]()
        classes = set[tuple[Any, ...]]()
        for config, outcome in near:
            kind = footprint(search.kernel, search.problem, config, self.target, outcome.registers)
            if kind not in classes and len(kept) < MOST:
                classes.add(kind)
                kept[config] = None
        always = [search.candidates.default, search.stored]
        return list(kept | {c: None for c, _, _ in tried if c in always})

    def decide(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """Those of problems that steps launch, together, in the steps; then the others alone, as far as time suffices.

        The steps are what people wait for: they have the time first, and leave a part of it to the others.
        """
        in_step: dict[Name, dict[Any, Trial]] = {}
        alone: list[Sequence[Trial]] = []
        for trials in finalists:
            name = trials[0].kernel.name, trials[0].problem
            if name in self._names:
                in_step[name] = {t.config: t for t in trials}
            else:
                alone.append(trials)
        if in_step:
            self._take_gpu()
            left = self.left()
            self._kept = FOR_OTHERS * left if alone and left < inf else 0.0
            try:
                yield from self._decide_together(in_step)
            except OutOfTime:
                self.remarks = ["the time was over before the steps could choose: what ran before stands"]
                yield from self.undecided([list(configs.values()) for configs in in_step.values()])
        yield from super().decide(alone)

    def undecided(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        """Of a problem that a step launches what ran before, as the only finalist: no other may win unjudged."""
        for trials in finalists:
            search = trials[0].task.search
            before = search.candidates.default if search.stored is None else search.stored
            for trial in trials:
                if trial.config == before and (trial.kernel.name, trial.problem) in self._names:
                    yield trial, replace(search.outcomes[before], decides=False)

    def _left_for_steps(self) -> float:
        """Without what the others have, and what the end takes: to derive the winners, and to look at the steps."""
        now_s = self.selections.now_s if self.selections is not None else 0.0
        return self.left() - self._kept - now_s - LOOKS_AT_THE_END * sum(s.look_s for s in self._steps)

    # -- all finalists together

    def _decide_together(self, trials: Mapping[Name, Mapping[Any, Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        starts = self._starts(trials)
        steps = [s for s in self._steps if trials.keys() & s.points.keys()]
        if self.selections is None:
            raise ValueError("whoever has it judge says what a run would choose")
        looks = Looks(steps, trials, self.selections, self.say, self._left_for_steps)
        try:
            looks.begin(starts[0])
        except KerngenError as e:
            self.remarks = [f"the steps could not be timed, and the finalists were timed alone: {e.message}"]
            yield from super().decide([list(configs.values()) for configs in trials.values()])
            return
        shares = looks.shares()
        places = [
            Place(name, tuple(sorted(configs, key=lambda c: _us(configs[c]))), shares[name])
            for name, configs in trials.items()
        ]
        self.descent = descend(places, looks.neighbours(), looks.judge, starts, noise=looks.noise,
                               max_evaluations=looks.affordable(places))  # fmt: skip
        chosen = self.descent.chosen
        looks.settle(chosen)
        noise = looks.noise(trials)
        self.remarks = [_in_words(self.descent, noise, len(places))]
        base = digest(["whole", sorted((k, describe(p), fields_of(c)) for (k, p), c in chosen.items())])
        for name, configs in sorted(trials.items(), key=lambda kv: -shares[kv[0]]):
            tags = {"descent": _as_json(self.descent, name, noise)}
            for step in looks.steps:
                if name not in step.points:
                    continue
                for config, trial in configs.items():
                    if config != chosen[name] and self._left_for_steps() <= 0:
                        continue  # it was not looked at in what was chosen: the chosen one stands
                    ratio = looks.last(step, chosen, name, config)
                    if ratio is not None:
                        yield trial, outcome_in(trial, step.key, ratio, base, tags if config == chosen[name] else {})
        end = End(looks, trials, self.selections, lambda: self.left() - self._kept)
        yield from end.rows()
        self.remarks = [*self.remarks, *end.in_words()]

    def _starts(self, trials: Mapping[Name, Mapping[Any, Trial]]) -> list[Assignment]:
        """The defaults, the fastest alone, and what the database had; whatever of these is no finalist, the fastest."""
        fastest = {name: min(configs, key=lambda c: _us(configs[c])) for name, configs in trials.items()}
        defaults, stored = dict(fastest), dict(fastest)
        for name, configs in trials.items():
            search = next(iter(configs.values())).task.search
            if search.candidates.default in configs:
                defaults[name] = search.candidates.default
            if search.stored in configs:
                stored[name] = search.stored
        return [defaults, fastest, *([stored] if stored != fastest else [])]


class JudgedStep:
    """points: by the tuned problem that serves them; several of a step's may be one. look_s: that a look takes. noise:
    that two at the same differ by, as a part of the step's time. before: what ran before the tune.
    """

    def __init__(self, timed: TimedStep, serving: Callable[[str, Any], Item | None]) -> None:
        self.key, self.timer = timed.key, timed.timer
        self.order: list[Name] = []
        self.points: dict[Name, list[StepPoint]] = {}
        self.names: dict[StepPoint, Name | None] = {}  # of all points
        self.base_us = self.look_s = self.noise = 0.0
        self.before: Choice = {}
        for point in timed.timer.points():
            self.names[point] = None
            if (item := serving(point.kernel, point.problem)) is not None:
                name = self.names[point] = item.kernel, item.problem
                self.order.append(name)
                self.points.setdefault(name, []).append(point)


class Looks:
    """At the steps, with this or that exchanged. What nothing is tried for runs what `selections` had before."""

    def __init__(
        self,
        steps: Sequence[JudgedStep],
        trials: Mapping[Name, Mapping[Any, Trial]],
        selections: Selections,
        say: Callable[[str], None],
        left: Callable[[], float],
    ) -> None:
        self.steps, self._trials, self._say, self._left = steps, trials, say, left
        self._selections = selections
        self._weight = sum(s.key.weight for s in steps)
        self._images: dict[tuple[Name, Any], bytes] = {}
        self._done = 0
        self._for_last_looks = 0.0  # seconds

    def begin(self, start: Assignment) -> None:
        """Find out what a look takes, and what two at the same differ by: STEP_NOISE of a step at least, since what is
        run in one process has its memory where it has it. The first look at a step makes its model. Raises OutOfTime
        where none is left for the next one, or for one more at each step.
        """
        for step in self.steps:
            step.before = self.running(step, self._selections.before)
            self._compare(step, start, start, FIRST_PAIRS)
        for step in self.steps:
            before = self._left()
            ratio = self._compare(step, start, start, PAIRS)
            step.look_s = before - self._left() if before < inf else 0.0
            step.noise = min(max(STEP_NOISE, 3 * ratio.spread, abs(ratio.median - 1)), NOISE_MOST)
        self._require(sum(s.look_s for s in self.steps))  # what will be chosen is looked at again

    def noise(self, names: Collection[Name]) -> float:
        """What `judge` may be off by where these have changed."""
        errors = (s.key.weight / self._weight * s.noise for s in self.steps if not s.points.keys().isdisjoint(names))
        return sum(e * e for e in errors) ** 0.5

    def _require(self, seconds: float) -> None:
        if self._left() <= seconds:
            raise OutOfTime

    def settle(self, chosen: Assignment) -> None:
        """How long the steps take with what was chosen: what the last looks are compared with."""
        for step in self.steps:
            step.base_us = self._compare(step, chosen, chosen, LAST_PAIRS).base_us

    def affordable(self, places: Sequence[Place[Name, Any]]) -> int:
        """Evaluations of the descent in half of the time that is left; the other half is for the last looks.

        An evaluation looks at the steps that its place is a part of; a place has as many as it has configurations.
        """
        seconds = [sum(s.look_s for s in self.steps if p.name in s.points) for p in places]
        weights = [len(p.configs) for p in places]
        mean = sum(w * s for w, s in zip(weights, seconds, strict=True)) / sum(weights)
        if self._left() == inf:
            return MOST_EVALUATIONS
        self._for_last_looks = self._left() / 2
        return MOST_EVALUATIONS if mean <= 0 else int(max(min(MOST_EVALUATIONS, self._for_last_looks / mean), 1))

    def shares(self) -> dict[Name, float]:
        """Of the steps' time that each place has, by its time alone."""
        found = dict.fromkeys(self._trials, 0.0)
        for step in self.steps:
            times = {name: sum(p.launches * p.times * p.us for p in ps) for name, ps in step.points.items()}
            whole = sum(times.values())
            for name in times.keys() & found.keys():
                found[name] += step.key.weight / self._weight * times[name] / whole
        return found

    def neighbours(self) -> list[tuple[Name, Name]]:
        """What follows what; the step's last is followed by the next step's first."""
        return [pair for s in self.steps for pair in pairwise([*s.order, *s.order[:1]])]

    def judge(self, base: Assignment, other: Assignment) -> float:
        """The weighted geometric mean of the steps' ratios; those that what differs is no part of are not run."""
        changed = {name for name in other if other[name] != base[name]}
        if self._left() <= self._for_last_looks:  # looks take longer than the first ones did
            self._for_last_looks = 0.0  # what was chosen by now is judged once more
            raise Spent
        total = 0.0
        for step in self.steps:
            if changed & step.points.keys():
                try:
                    total += step.key.weight / self._weight * log(self._compare(step, base, other, PAIRS).median)
                except KerngenError:
                    return inf
                except OutOfTime:
                    raise Spent from None
        return exp(total)

    def last(self, step: JudgedStep, chosen: Assignment, name: Name, config: Any) -> Ratio | None:
        """What exchanging one configuration in what was chosen does to one step; None where it cannot run."""
        if config == chosen[name]:
            return Ratio(1.0, 0.0, step.base_us)
        try:
            return self._compare(step, chosen, {**chosen, name: config}, LAST_PAIRS)
        except (KerngenError, OutOfTime):
            return None

    def running(self, step: JudgedStep, selector: Selector) -> Choice:
        """What a run of the model chooses for each call of the step."""
        chosen = {point: selector.choice(find_kernel(point.kernel), point.problem) for point in step.names}
        return {point: (c.config, self._selections.image(c)) for point, c in chosen.items()}

    def compare(self, step: JudgedStep, base: Choice, other: Choice, pairs: int, within_s: float) -> Ratio:
        """Of the whole model's step, by what each kernel takes alone with what the timer was made with."""
        seen = self._look(step, base, other, pairs, within_s)
        changed = {p for p in step.names if base[p][0] != other[p][0]}
        return of_whole_step(seen, [(p, p.us) for p in step.names], changed)

    def _look(self, step: JudgedStep, base: Choice, other: Choice, pairs: int, within_s: float) -> Ratio:
        self._done += 1
        self._say(f"{step.key.name}: look {self._done}")
        before = self._left() if step.look_s else inf
        seen = step.timer.compare(base, other, pairs=pairs, within_s=within_s)
        if before < inf:
            took = before - self._left()
            step.look_s = max(took, step.look_s + (took - step.look_s) / 4)
        return seen

    def _compare(self, step: JudgedStep, base: Assignment, other: Assignment, pairs: int) -> Ratio:
        self._require(0.0)
        seen = self._look(step, self._choice(step, base), self._choice(step, other), pairs, self._left())
        changed = {name for name in step.points.keys() & other.keys() if other[name] != base[name]}
        points = [(p, self._us(name, p, base)) for p, name in step.names.items()]
        return of_whole_step(seen, points, {p for name in changed for p in step.points[name]})

    def _us(self, name: Name | None, point: StepPoint, chosen: Assignment) -> float:
        """What it takes alone with what was chosen, where that was timed."""
        us = _us(self._trials[name][chosen[name]]) if name in chosen and name is not None else inf
        return point.us if us == inf else us

    def _choice(self, step: JudgedStep, of: Assignment) -> Choice:
        found = dict(step.before)
        for name in of.keys() & step.points.keys():
            config = of[name]
            if (name, config) not in self._images:
                self._images[name, config] = self._trials[name][config].image()
            found |= dict.fromkeys(step.points[name], (config, self._images[name, config]))
        return found


def of_whole_step(seen: Ratio, points: Sequence[tuple[StepPoint, float]], changed: Set[StepPoint]) -> Ratio:
    """What a comparison in a step of few layers is in the whole model's: an estimate, and exact where all are run.

    points: with what each takes alone in the base, in microseconds. changed: those that the comparison exchanged. What
    is run is taken to be made of its kernels' times, in proportion: so the base's time grows as their sum does where
    each launch counts `times`. What an exchange gains, it gains as often; where several were exchanged that stand for
    different numbers of launches, as often as they do in the mean, by their time.
    """
    run = sum(p.launches * us for p, us in points)
    if not run or all(p.times == 1 for p, _ in points):
        return seen
    growth = sum(p.launches * p.times * us for p, us in points) / run
    weights = [(p.launches * us, p.times) for p, us in points if p in changed]
    share = sum(w for w, _ in weights)
    times = sum(w * t for w, t in weights) / share if share else growth
    scale = times / growth
    return Ratio(1 + (seen.median - 1) * scale, seen.spread * scale, seen.base_us * growth)


def footprint(kernel: Kernel, problem: Any, config: Any, target: Target, registers: int) -> tuple[Any, ...]:
    """What a configuration leaves of an SM to others, roughly: those of one class do to their neighbours much the same.

    Blocks an SM, their shared memory in 32 KiB, their registers in eighths of an SM's, whether one wave is all.
    """
    launch = max(kernel.launches(problem, config, target), key=lambda x: prod(x.grid) * prod(x.block))
    blocks = occupancy(target.arch, prod(launch.block), registers, launch.smem_bytes).blocks_per_sm
    resident = min(blocks, ceil(prod(launch.grid) / target.device.num_sms))
    few = prod(launch.grid) <= target.device.num_sms
    of_registers = ceil(8 * resident * prod(launch.block) * registers / target.arch.regs_per_sm)
    return resident, ceil(resident * launch.smem_bytes / 32768), of_registers, few


def _us(trial: Trial) -> float:
    us = trial.task.search.outcomes[trial.config].latency_us
    return inf if us is None else us


def _in_words(found: Descent[Name, Any], noise: float, num_places: int) -> str:
    gain = 1 - found.ratio
    moved = f"{len(found.moves)} exchanges adopted" if found.moves else "nothing exchanged is faster"
    rest = "" if found.complete else "; the time ended it"
    return (
        f"in the steps {gain:.1%} faster than with the defaults: {moved}, of {num_places} problems in "
        f"{found.num_evaluations} looks, noise {noise:.2%}{rest}"
    )


def _as_json(found: Descent[Name, Any], name: Name, noise: float) -> dict[str, Any]:
    """What a place's chosen row says of the descent: the largest interactions that it has a part in among it."""
    own = [i for i in found.interactions if any(place == name for (place, _) in i.pair)]
    largest = sorted(own, key=lambda i: -abs(i.excess))[:KEPT]
    return {
        "ratio": found.ratio, "evaluations": found.num_evaluations, "complete": found.complete, "noise": noise,
        "interactions": [
            {"excess": i.excess, "of": [[k, describe(p), fields_of(c)] for (k, p), c in i.pair]} for i in largest
        ],
    }  # fmt: skip
