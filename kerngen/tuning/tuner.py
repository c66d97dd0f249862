"""Finds the best configuration of every problem of a workload, and writes down everything that it tried.

All problems are searched together, in rounds: each of some searches is asked for its next configurations, what is new
is compiled (identical sources once, in worker processes), the objective judges, the searches are told. Which searches
those are, budget.py says; the answer does not depend on how many workers there were or which was first. A time budget
ends the run wherever it is: nothing that is under way then is waited for. What is compiled by then and costs nothing to
judge still is, and what was not reached has no row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import render
from kerngen.errors import CompileError, ConfigRefused, KerngenError
from kerngen.runtime.selection import Selector
from kerngen.system.interrupts import heed, held, result_of
from kerngen.system.progress import Progress
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe, fields_of
from kerngen.tuning.budget import LEAST_GAIN, PORTIONS, Budget, OutOfTime, Weights, portions
from kerngen.tuning.checks import why_unlaunchable
from kerngen.tuning.describe import Describer
from kerngen.tuning.finish import Conclusion, summary_of
from kerngen.tuning.gains import Gain, Gains
from kerngen.tuning.ledger import Ledger
from kerngen.tuning.neighbours import Neighbours
from kerngen.tuning.objective import Objective, Outcome, Selections
from kerngen.tuning.plan import lower_bound_us
from kerngen.tuning.report import Report, Result
from kerngen.tuning.space import candidates
from kerngen.tuning.study import GUESSED_GAIN, Search
from kerngen.tuning.task import Task, Trial
from kerngen.tuning_db.read.ids import digest
from kerngen.tuning_db.read.values import Build, Winner
from kerngen.workload.workload import Item

if TYPE_CHECKING:
    from kerngen.runtime.selection import Choice, Selector
    from kerngen.tuning_db import Store
    from kerngen.tuning_db.read.boards import PerBoard
    from kerngen.tuning_db.read.source import Source


AHEAD = 64  # configurations that compile while others are judged
FIRST_TRIALS = 64  # a round, of searches that get no portion: as long as spaces are described for those that do


@dataclass(slots=True, eq=False)
class _Asked:
    """What a search asked for: with its build where that is known, or a compile under way, or both."""

    task: Task
    config: Any
    source: str
    build: Build | None = None
    cubin: Future[Cubin] | None = None


class Tuner:
    """Tunes problems for one objective, on its target. Its caller owns store, compiler and objective, and closes them.

    trials: configurations a problem; by default the objective's. time_budget_s: None for no limit. began: when the time
    began to run, by `clock`; None for now. sources: opens what a run of a model looks in, in lookup order; by default
    `store` alone. A measured search begins with what they have for its problem today. tell: is given what was gained,
    each minute.
    """

    def __init__(
        self,
        objective: Objective,
        store: Store,
        compiler: CachedCompiler,
        *,
        trials: int | None = None,
        seed: int = 0,
        time_budget_s: float | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
        sources: Callable[[], Sequence[Source | PerBoard]] | None = None,
        tell: Callable[[Gain], None] = lambda gain: None,
    ) -> None:
        self.objective, self.target = objective, objective.target
        self.store, self.compiler = store, compiler
        self.trials, self.seed = trials or objective.trials, seed
        self.report = Report(self.target, objective.name, objective.how, uuid4().hex[:12])
        self.ledger = Ledger(store, objective, self.report.run, [self.trials, seed, LEAST_GAIN])
        self._progress = progress
        since = clock() if began is None else began
        self._budget = Budget(time_budget_s, clock, since, objective.final_s, objective.finals_s)
        self._tasks: list[Task] = []
        self._weights, self._neighbours = Weights(()), Neighbours(())
        self._left = 0
        self._contested: set[int] = set()  # searches, by id, that have more than their default to decide between
        self._texts: dict[tuple[str, Any], str] = {}  # sources, by static key and configuration
        self._compiled: set[str] = set()  # those that were not in the cache
        self._sources = sources or (lambda: (store,))
        objective.say = self._tick
        objective.left = self._time_left
        self._before: Selector | None = None
        self._gains = Gains(self._gained, objective.provenance, clock, self._budget.began)
        self._tell_gain = tell
        self._describer = Describer() if objective.takes_time else None  # whose GPU would wait

    # -- the run

    def run(self, items: Sequence[Item]) -> Report:
        """Tune every item. What cannot be tuned has its reason in the report. An interrupt comes between two steps of
        the search, ends it, and leaves what is known by then concluded.

        Raises DatabaseError if the store takes no more rows, ToolchainError if NVRTC cannot target the arch.
        """
        with held():
            return self._run(items)

    def _run(self, items: Sequence[Item]) -> Report:
        if self.objective.takes_time:
            self._before = self._selector()
        tasks = self._tasks = [t for t in map(self._task, items) if t is not None]
        self._budget.num_problems = len(tasks)
        self._weights = Weights([t.item for t in tasks])
        self._neighbours = Neighbours([t.entry.key for t in tasks])
        self._gains.begin(tasks, self._weights)
        if self._before is not None:
            how_long = self._budget.conclusion_s
            self.objective.selections = Selections(self._before, self._selected_now, how_long, self._image_of)
        try:
            self._suggest_stored()
            self._search()
            self._decide()
        except KeyboardInterrupt:  # what is known by now is worth its winners
            self.report.interrupted = True
            with suppress(KeyboardInterrupt):
                self._write_last(self.objective.undecided(self._finalists()))
        finally:
            if self._describer is not None:
                self._describer.close()
            self.ledger.flush()
        Conclusion(self.ledger, self.compiler, self.report, self._budget).of(tasks)
        self.report.remarks = list(self.objective.remarks)
        self.report.num_compiled = len(self._compiled)
        self.report.seconds = self._budget.clock() - self._budget.began
        try:
            heed()
        except KeyboardInterrupt:  # while it was concluded
            self.report.interrupted = True
        return self.report

    def _task(self, item: Item) -> Task | None:
        heed()
        if self._time_left() <= 0:  # a long workload on a slow host
            self.report.out_of_time = True
            self.report.results.append(Result(item, note="the time was over before it was looked at"))
            return None
        kernel = find_kernel(item.kernel)
        try:
            found = candidates(kernel, item.problem, self.target, self._fused(kernel, item.problem))
        except ConfigRefused as e:
            self.report.results.append(Result(item, note=e.message))
            return None
        entry = self.ledger.entry(kernel, item.problem)
        seed = int(digest([entry.key.id, self.seed])[:8], 16)
        search = Search(
            kernel, item.problem, found, self.objective,
            trials=self.trials, seed=seed, describer=self._describer, least_gain=LEAST_GAIN,
        )  # fmt: skip
        if entry.closed is not None:
            search.let_go()
        elif self._before is not None:
            search.begin_with(self._before.choice(kernel, item.problem).config)
        about = f"search of {self.trials} trials at most, seed {self.seed} ({entry.fingerprint[:12]})"
        us = lower_bound_us(kernel, item.problem, found.default, self.target)
        return Task(item, kernel, entry, search, entry.key.static_key, about, us)

    def _fused(self, kernel: Kernel, problem: Any) -> bool | None:
        """Whether steps ask a kernel that replaces several; None where it replaces none, and where its default says.

        What is timed alone leaves that as it is.
        """
        return self._before.fuses(kernel, problem) if self._before is not None and kernel.is_fused else None

    # -- what runs without this run, and with it

    def _selector(self) -> Selector:
        from kerngen.runtime.selection import Selector

        return Selector(self._sources(), self.target)

    def _selected_now(self) -> Selector:
        self.ledger.winners([t.entry for t in self._tasks])
        return self._selector()

    # -- the search

    def _suggest_stored(self) -> None:
        """What earlier runs chose for a problem and its neighbours, on this board if it was there, else on another."""
        stored: dict[str, Winner] = {}
        for kernel in {t.kernel.name: None for t in self._tasks}:
            found = self.store.winners(kernel, arch=self.target.arch)
            stored |= {w.problem.id: w for w in sorted(found, key=lambda w: w.device == self.target.device)}
        for place, t in enumerate(self._tasks):
            near = [t, *(self._tasks[i] for i in self._neighbours.of(place))]
            known = [stored[n.entry.key.id] for n in near if n.entry.key.id in stored]
            configs = [_as_config(t.kernel, w.config) for w in known]
            t.search.suggest([c for c in configs if c is not None], GUESSED_GAIN)

    def _search(self) -> None:
        """Portions for those that weigh most for what is hoped of them, until nothing is hoped for. Beside them the
        first trials of some others, which wait for nothing.
        """
        while not self.report.out_of_time:
            weights, searches = self._weigh(), [t.search for t in self._tasks]
            values = {i: weights[i] * s.expected_gain for i, s in enumerate(searches) if s.num_left}
            most = PORTIONS if self.objective.takes_time else len(values)  # compilers wait at the end of a round
            chosen = portions(values, most)
            if not chosen:
                return
            untried = {i: value for i, value in values.items() if not searches[i].outcomes}
            chosen += portions({i: v for i, v in untried.items() if i not in chosen}, FIRST_TRIALS)
            before = {i: searches[i].best for i in chosen}
            self._round([self._tasks[i] for i in chosen])
            for i in chosen:
                if not searches[i].num_left:
                    searches[i].let_go()
            self._share_winners([i for i in chosen if searches[i].best != before[i]])

    def _weigh(self) -> list[float]:
        """What each problem counts, by the best time that is known of it."""
        return self._weights.of([t.guessed_us if t.search.best is None else t.search.best_us for t in self._tasks])

    def _share_winners(self, changed: Iterable[int]) -> None:
        """Put the best of these searches before their neighbours."""
        for i in changed:
            search = self._tasks[i].search
            if search.best is None:
                continue
            for other in (self._tasks[j].search for j in self._neighbours.of(i)):
                there = search.outcomes.get(other.best)
                beaten_us = None if there is None else there.latency_us
                other.suggest([search.best], max(1 - search.best_us / beaten_us, 0.0) if beaten_us else GUESSED_GAIN)

    # -- a round

    def _round(self, tasks: Sequence[Task]) -> None:
        """What these ask for next, judged."""
        self._left = sum(t.search.num_left for t in self._tasks)
        asked: list[_Asked] = []
        try:
            for trial, outcome in self.objective.judge(self._to_judge(self._asked_ahead(tasks, asked))):
                self.ledger.add(trial.task.entry, trial.config, outcome, build_id=trial.build.id)
                self._tell(trial, outcome)
        except OutOfTime:  # what was under way has no row: nothing is known of it
            for a in asked:
                if a.config not in a.task.search.outcomes:
                    self._abandon(a)
        if tasks and self._is_late():
            self.report.out_of_time = True

    def _asked_ahead(self, tasks: Sequence[Task], asked: list[_Asked]) -> Iterator[_Asked]:
        """What these ask for, AHEAD of what is judged, so that compilers have work. One that waits for the description
        of its space holds up no other: what a search asks for does not depend on who of a round was first. asked: is
        given all of it.
        """
        waiting, ahead = list(tasks), deque[_Asked]()
        while waiting or ahead:
            while waiting and len(ahead) < AHEAD and not self._is_late():
                ready = next((i for i, t in enumerate(waiting) if t.search.is_ready), None if ahead else 0)
                if ready is None:
                    break
                new = self._ask(waiting.pop(ready))
                ahead.extend(new)
                asked.extend(new)
            if ahead:
                yield ahead.popleft()
            elif self._is_late():
                return

    def _ask(self, t: Task) -> list[_Asked]:
        """What its search asks for next. What must be compiled is under way then."""
        self._tick(f"{t.kernel.name}: what to try for {t.item.where}")
        found = []
        for config in t.search.ask(self.objective.batch):
            source = self._source(t, config)
            asked = _Asked(t, config, source, self.ledger.build_of(t.kernel, t.problem, config, source))
            if asked.build is None or self.objective.needs_image:
                asked.cubin = self.compiler.submit(source, self.target.arch)
                if not asked.cubin.done():
                    self._compiled.add(source)
            found.append(asked)
        return found

    def _source(self, t: Task, config: Any) -> str:
        """Rendered once for all problems that share what is compiled in."""
        key = t.static_key, config
        if key not in self._texts:
            self._texts[key] = render(t.kernel, t.problem, config, self.target)
        return self._texts[key]

    def _to_judge(self, asked: Iterable[_Asked]) -> Iterator[Trial]:
        """The trials that need the objective's judgement, in order, each when it is compiled.

        What its compile or an earlier run decides is told at once. Out of time, what costs none still goes on.
        """
        for a in asked:
            self._tick(f"{a.task.kernel.name}: {a.task.item.where}")
            if (build := self._build(a)) is None:
                self._abandon(a)
                continue
            a.task.builds[a.config] = build
            trial = self._trial(a.task, a.config, a.cubin)
            if (outcome := self._known(trial)) is not None:
                self._tell(trial, outcome)
            elif self.objective.takes_time and (self._is_late() or not self._awaited(a)):
                self._abandon(a)
            else:
                yield trial

    def _trial(self, task: Task, config: Any, cubin: Future[Cubin] | None = None) -> Trial:
        def image() -> bytes:
            return self._compiled_image(cubin or self.compiler.submit(self._source(task, config), self.target.arch))

        return Trial(task, config, task.builds[config], image)

    def _image_of(self, choice: Choice) -> bytes:
        if choice.cubin is not None:
            return choice.cubin.image
        return self._compiled_image(self.compiler.submit(choice.text, self.target.arch))

    def _compiled_image(self, cubin: Future[Cubin]) -> bytes:
        left_s = max(self._time_left(), 0.0)
        try:
            return result_of(cubin, None if left_s == inf else left_s).image
        except TimeoutError:
            raise OutOfTime from None

    def _build(self, a: _Asked) -> Build | None:
        """What came of compiling `a`, once that is done; None if the time is over before."""
        if a.build is not None:
            return a.build
        if a.cubin is None:
            raise KerngenError("what was asked has neither a build nor a compile")
        if not self._awaited(a):
            return None
        made: Cubin | CompileError
        try:
            made = a.cubin.result()
        except CompileError as e:
            made = e
        return self.ledger.add_build(a.task.kernel, a.task.problem, a.config, a.source, made)

    def _awaited(self, a: _Asked) -> bool:
        """Whether its compile is done, once it is or the time is over."""
        while a.cubin is not None and not a.cubin.done():
            if self._is_late():
                return False
            self._tick(f"compiling {a.task.kernel.name}")
            with suppress(TimeoutError):
                a.cubin.exception(timeout=0.5)
        return True

    def _known(self, trial: Trial) -> Outcome | None:
        """What is known of `trial` without judging it: from its compile alone, or from an earlier run."""
        rows = self.ledger.rows(trial.task.entry, trial.config, trial.build)
        fault = self._fault(trial)
        if fault is not None and all(r.outcome != fault.kind for r in rows):
            self.ledger.add(trial.task.entry, trial.config, fault, build_id=trial.build.id)
            return fault
        outcome = fault or self.objective.answer(trial, rows)
        if outcome is not None:
            self.report.num_from_database += 1
        return outcome

    def _fault(self, trial: Trial) -> Outcome | None:
        """The outcome of what did not compile, or compiled to what cannot be launched."""
        if trial.build.status != "ok":
            log = trial.build.log.strip().splitlines()
            return Outcome("compile_failed", reason=log[0] if log else "NVRTC rejected the source", excess=1.0)
        why = why_unlaunchable(trial.kernel, trial.problem, trial.config, self.target, trial.build)
        return None if why is None else Outcome("invalid", reason=why, excess=1.0)

    def _tell(self, trial: Trial, outcome: Outcome) -> None:
        search = trial.task.search
        search.tell(trial.config, outcome)
        if outcome.ok and self.objective.takes_time and trial.config != search.candidates.default:
            self._contested.add(id(search))
        self.report.num_trials += 1
        self._left -= 1
        if outcome.kind in ("compile_failed", "wrong_result", "launch_failed", "timed_out"):
            failure = (trial.kernel.name, describe(trial.config), outcome.reason)
            if failure not in self.report.failures:
                self.report.failures.append(failure)

    def _gained(self, gain: Gain) -> None:
        self.report.gains.append(gain)
        self._tell_gain(gain)

    def _abandon(self, a: _Asked) -> None:
        a.task.search.abandon(a.config)
        self.report.out_of_time = True

    def _tick(self, text: str) -> None:
        heed()
        self._gains.look()
        if self._progress is not None:
            self._progress.update(self.report.num_trials, self.report.num_trials + self._left, text)

    def whole_left(self) -> float:
        """Seconds until the run's time is over; infinite without a budget."""
        return self._budget.whole_left(self.objective.waited_s)

    def _time_left(self) -> float:
        return self._budget.left(self.objective.waited_s)

    def _is_late(self) -> bool:
        """Whether the time for trials is over: what is left of it, the finals need."""
        return self._time_left() <= self._budget.reserve(len(self._contested))

    # -- the finals

    def _decide(self) -> None:
        """Have the finalists of every search decided, and write down which searches are over."""
        try:
            self._write_last(self.objective.decide(self._finalists()))
        except OutOfTime:
            self.report.out_of_time = True
        if self.objective.takes_time and self._time_left() <= 0:
            self.report.out_of_time = True

    def _write_last(self, words: Iterable[tuple[Trial, Outcome]]) -> None:
        for trial, outcome in words:
            ends = trial.task.search.is_over and outcome.decides
            tags = {"closed": summary_of(trial.task)} if ends else {}
            stage = self.objective.final_stage
            self.ledger.add(trial.task.entry, trial.config, outcome, build_id=trial.build.id, stage=stage, tags=tags)

    def _finalists(self) -> Iterator[list[Trial]]:
        """Of each search, those that weigh most first. One that has only its default and was cut short is no matter."""
        weights = self._weigh()
        for i in sorted(range(len(self._tasks)), key=lambda i: -weights[i]):
            t = self._tasks[i]
            finalists = self.objective.finalists(t.search)
            if not finalists or (len(finalists) == 1 and not t.search.is_over):
                continue
            self._tick(f"{t.kernel.name}: finalists of {t.item.where}")
            yield [self._trial(t, c) for c in finalists]


def _as_config(kernel: Kernel, fields: dict[str, Any]) -> Any | None:
    """None where an older kernel had other fields."""
    names = fields_of(kernel.config_type())
    return kernel.config_type(**fields) if names.keys() == fields.keys() else None
