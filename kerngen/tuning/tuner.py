"""Finds the best configuration of every problem of a workload, and writes down everything that it tried.

All problems are searched together, in rounds. A round asks every open search for its next configurations, compiles
what is new (identical sources once, in worker processes), has the objective judge them, and tells the searches. So
every problem has its default before any has its second try, and the answer does not depend on how many workers there
were or which was first. Within a round the most urgent problems come first, and a time budget ends the run wherever it
is: what is compiled by then and costs nothing to judge still is, and the report names what was not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kerngen.cache import CachedCompiler
from kerngen.compile import Cubin
from kerngen.errors import CompileError, ConfigRefused, KerngenError
from kerngen.predict import predict
from kerngen.progress import Progress
from kerngen.render import render
from kerngen.templates import find_kernel
from kerngen.templates.kernel import describe, fields_of
from kerngen.tuning.checks import why_not_cubin, why_unlaunchable
from kerngen.tuning.describing import Describer
from kerngen.tuning.ledger import Ledger
from kerngen.tuning.objective import Objective, Outcome
from kerngen.tuning.plan import urgency
from kerngen.tuning.report import Report, Result
from kerngen.tuning.space import candidates
from kerngen.tuning.study import Search
from kerngen.tuning.task import Task, Trial
from kerngen.tuning_db.serve.canonical import digest
from kerngen.tuning_db.serve.values import Build
from kerngen.workload import Item

if TYPE_CHECKING:
    from kerngen.tuning_db import Store


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

    trials: configurations a problem; by default the objective's. time_budget_s: None for no limit.
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
    ) -> None:
        self.objective, self.target = objective, objective.target
        self.store, self.compiler = store, compiler
        self.trials, self.seed = trials or objective.trials, seed
        self.report = Report(self.target, objective.name, objective.how, uuid4().hex[:12])
        self.ledger = Ledger(store, objective, self.report.run, [self.trials, seed])
        self._progress, self._clock = progress, clock
        self._start = clock()
        self._deadline = None if time_budget_s is None else self._start + time_budget_s
        self._left = 0
        self._compiled: set[str] = set()  # sources that were not in the cache
        objective.say = self._tick
        self._describer = Describer() if objective.takes_time else None  # whose GPU would wait

    # -- the run

    def run(self, items: Sequence[Item]) -> Report:
        """Tune every item. What cannot be tuned has its reason in the report.

        Raises DatabaseError if the store takes no more rows, ToolchainError if NVRTC cannot target the arch.
        """
        tasks = [t for t in map(self._task, items) if t is not None]
        try:
            opened = [t for t in tasks if t.entry.closed is None]
            while opened and not self.report.out_of_time:
                opened = self._round(opened)
        except KeyboardInterrupt:  # what is known by now is worth its winners
            self.report.interrupted = True
        finally:
            if self._describer is not None:
                self._describer.close()
            self.ledger.flush()
        self._conclude(tasks)
        self.report.num_compiled = len(self._compiled)
        self.report.seconds = self._clock() - self._start
        return self.report

    def _task(self, item: Item) -> Task | None:
        kernel = find_kernel(item.kernel)
        try:
            found = candidates(kernel, item.problem, self.target)
        except ConfigRefused as e:
            self.report.results.append(Result(item, note=e.message))
            return None
        entry = self.ledger.entry(kernel, item.problem)
        seed = int(digest([entry.key.id, self.seed])[:8], 16)
        search = Search(
            kernel, item.problem, found, self.objective, trials=self.trials, seed=seed, describer=self._describer
        )
        about = f"search of {self.trials} trials at most, seed {self.seed} ({entry.fingerprint[:12]})"
        return Task(item, kernel, entry, search, about, urgency(item, kernel, found.default, self.target))

    # -- a round

    def _round(self, opened: list[Task]) -> list[Task]:
        """One round of these searches. Returns those that go on; none that the time cut short is closed."""
        self._evaluate(self._ask(opened))
        if self.report.out_of_time:
            return opened
        self._close([t for t in opened if not t.search.num_left])
        opened = [t for t in opened if t.search.num_left]
        self._share_winners(opened)
        if opened and self._is_late():
            self.report.out_of_time = True
        return opened

    def _ask(self, opened: list[Task]) -> list[_Asked]:
        """What every open search asks for next, the most urgent first. What must be compiled is under way then."""
        round_ = []
        for t in opened:
            for config in t.search.ask(self.objective.batch):
                source = render(t.kernel, t.problem, config, self.target)
                round_.append(_Asked(t, config, source, self.ledger.build_of(t.kernel, t.problem, config, source)))
        round_.sort(key=lambda a: a.task.urgency)
        for a in round_:
            if a.build is None or self.objective.needs_image:
                a.cubin = self.compiler.submit(a.source, self.target.arch)
                if not a.cubin.done():
                    self._compiled.add(a.source)
        self._left = sum(t.search.num_left for t in opened)
        return round_

    def _evaluate(self, asked: Iterable[_Asked]) -> None:
        for trial, outcome in self.objective.judge(self._to_judge(asked)):
            self.ledger.add(trial.task.entry, trial.config, outcome, build_id=trial.build.id)
            self._tell(trial, outcome)

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
            elif self.objective.takes_time and self._is_late():
                self._abandon(a)
            else:
                yield trial

    def _trial(self, task: Task, config: Any, cubin: Future[Cubin] | None = None) -> Trial:
        def image() -> bytes:
            if cubin is not None:
                return cubin.result().image
            source = render(task.kernel, task.problem, config, self.target)
            return self.compiler.submit(source, self.target.arch).result().image

        return Trial(task, config, task.builds[config], image)

    def _build(self, a: _Asked) -> Build | None:
        """What came of compiling `a`, once that is done; None if the time is over before."""
        if a.build is not None:
            return a.build
        if a.cubin is None:
            raise KerngenError("what was asked has neither a build nor a compile")
        made: Cubin | CompileError | None = None
        while made is None:
            if not a.cubin.done() and self._is_late():
                return None
            try:
                made = a.cubin.result(timeout=0.5)
            except TimeoutError:
                self._tick(f"compiling {a.task.kernel.name}")
            except CompileError as e:
                made = e
        return self.ledger.add_build(a.task.kernel, a.task.problem, a.config, a.source, made)

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
        trial.task.search.tell(trial.config, outcome)
        self.report.num_trials += 1
        self._left -= 1
        if outcome.kind in ("compile_failed", "wrong_result", "launch_failed", "timed_out"):
            failure = (trial.kernel.name, describe(trial.config), outcome.reason)
            if failure not in self.report.failures:
                self.report.failures.append(failure)

    def _abandon(self, a: _Asked) -> None:
        a.task.search.abandon(a.config)
        self.report.out_of_time = True

    def _tick(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self.report.num_trials, self.report.num_trials + self._left, text)

    def _is_late(self) -> bool:
        return self._deadline is not None and self._clock() - self.objective.waited_s >= self._deadline

    def _share_winners(self, opened: list[Task]) -> None:
        """Put each search's best before its neighbours: the same compiled-in fields, other tokens or batch."""
        best: dict[str, list[Any]] = {}
        for t in opened:
            if t.search.best is not None:
                best.setdefault(t.entry.key.static_key, []).append(t.search.best)
        for t in opened:
            t.search.suggest(dict.fromkeys(best.get(t.entry.key.static_key, [])))

    # -- the end of a search

    def _close(self, ended: list[Task]) -> None:
        """Have the finalists decided, and write down that these searches are over."""
        for t in ended:
            t.search.let_go()
        for trial, outcome in self.objective.decide(self._finalists(ended)):
            self.ledger.add(trial.task.entry, trial.config, outcome, build_id=trial.build.id,
                            stage=self.objective.final_stage, tags={"closed": self._summary(trial.task)})  # fmt: skip

    def _finalists(self, ended: list[Task]) -> Iterator[list[Trial]]:
        for t in ended:
            if self.objective.takes_time and self._is_late():
                self.report.out_of_time = True
                return
            if finalists := self.objective.finalists(t.search):
                self._tick(f"{t.kernel.name}: finalists of {t.item.where}")
                yield [self._trial(t, c) for c in finalists]

    def _summary(self, t: Task) -> dict[str, Any]:
        outcomes = t.search.outcomes
        default = outcomes.get(t.search.candidates.default)
        return {
            "tried": len(outcomes),
            "failed": sum(o.kind not in ("ok", "invalid") for o in outcomes.values()),
            "default_us": None if default is None else default.latency_us,
            "spilled": sum(o.spill_bytes > 0 for o in outcomes.values()),
        }

    def _conclude(self, tasks: list[Task]) -> None:
        """Derive the winners, check and keep their cubins, and fill the report in the workload's order."""
        winners = self.ledger.winners([t.entry for t in tasks])
        ended = not self.report.out_of_time and not self.report.interrupted
        # a space that nobody has looked at by the end of the time is not looked at now
        looked_at = {t for t in tasks if ended or t.search.candidates.are_known}
        spaces = dict.fromkeys(t.search.candidates.points for t in tasks if t in looked_at)
        self.report.num_spaces, self.report.num_refused = len(spaces), sum(s.num_refused for s in spaces)
        for t in tasks:
            found = t.search.candidates
            summary = t.entry.closed or self._summary(t)
            result = Result(
                t.item, winners.get(t.entry.key.id), fields_of(found.default), summary["default_us"],
                num_tried=summary["tried"], num_failed=summary["failed"],
            )  # fmt: skip
            if t in looked_at:
                result.num_valid, result.num_refused = len(found.valid), found.points.num_refused
            self.report.results.append(result)
            if t.entry.closed is not None:
                self.report.num_from_database += summary["tried"]
            if result.winner is None:
                failed = [o.reason for o in t.search.outcomes.values() if not o.ok]
                why = "stopped" if self.report.interrupted else "the time was over"
                result.note = failed[-1] if failed else f"{why} before its default configuration was tried"
                continue
            self._inspect(t, result, summary)

    def _inspect(self, t: Task, result: Result, summary: dict[str, Any]) -> None:
        """The winner's resources, its machine code checked and kept, and what the user should know about it."""
        if (winner := result.winner) is None:
            return
        build = self.store.build(winner.build_id)
        config = t.kernel.config_type(**winner.config)
        launches = t.kernel.launches(t.problem, config, self.target)
        result.registers, result.spill_bytes = build.registers, build.spill_bytes
        result.smem_bytes = max(x.smem_bytes + build.entries[x.entry].static_smem_bytes for x in launches)
        result.explanation = predict(t.kernel, t.problem, config, self.target, build.entries).explain()
        notes = []
        if build.spill_bytes:
            every = summary["spilled"] == summary["tried"]
            rest = "as does every configuration tried" if every else "and is still the fastest that was tried"
            notes.append(f"spills {build.spill_bytes} B a thread, {rest}")
        if self.store.image(build) is None:
            try:
                source = render(t.kernel, t.problem, config, self.target)
                cubin = self.compiler.submit(source, self.target.arch).result()
                if (why := why_not_cubin(cubin.image, self.target.arch)) is not None:
                    notes.append(why)
                else:
                    self.store.keep_image(cubin)
            except KerngenError as e:
                notes.append(f"its machine code is not in the database: {e.message}")
        result.note = "; ".join(notes)
