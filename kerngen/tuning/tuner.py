"""Finds the best configuration of every problem of a workload, and writes down everything that it tried.

All problems are searched together, in rounds. A round asks every open search for its next configurations, compiles
what is new (identical sources once, in worker processes), judges each by prediction or by measurement, and tells the
searches. So every problem has its default before any has its second try, a time budget may end the run after any
round with an answer for all, and the answer does not depend on how many workers there were or which was first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from kerngen.arch import Target
from kerngen.cache import CachedCompiler
from kerngen.compile import Cubin
from kerngen.errors import CompileError, ConfigRefused, KerngenError
from kerngen.predict import predict
from kerngen.render import render
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning.checks import why_not_cubin, why_unlaunchable
from kerngen.tuning.ledger import Entry, Ledger
from kerngen.tuning.plan import candidates
from kerngen.tuning.report import Report, Result
from kerngen.tuning.study import Outcome, Search
from kerngen.tuning_db.records import Build, Measurement, digest
from kerngen.workload import Item

if TYPE_CHECKING:
    from kerngen.tuning.worker import Measurer
    from kerngen.tuning_db import Store

TRIALS = {"predicted": 12, "measured": 24}  # configurations a problem, the default included
# Asked of each search in a round. Constants, not the number of workers: the answer must not depend on it.
BATCH = {"predicted": 2, "measured": 6}
FINALISTS = 4
FINAL_BAND = 1.10  # what takes longer than this times the best is no finalist


class Progress(Protocol):
    """What a tuner reports to. `total` shrinks as searches end before their last trial."""

    def update(self, done: int, total: int, text: str) -> None: ...


@dataclass(slots=True)
class _Target:
    """One problem of the run."""

    item: Item
    kernel: Kernel
    entry: Entry
    search: Search
    builds: dict[Any, Build] = field(default_factory=dict)  # of the configurations tried
    noted: set[Any] = field(default_factory=set)  # refused proposals that have their row

    @property
    def problem(self) -> Any:
        return self.item.problem


@dataclass(slots=True)
class _Trial:
    target: _Target
    config: Any
    source: str
    build: Build | None = None
    cubin: Future[Cubin] | None = None


class OutOfTime(Exception):
    """The time budget is spent. Never leaves this module."""


class Tuner:
    """Tunes problems for one arch and device. Its caller owns store, compiler and measurer, and closes them.

    trials: configurations a problem. measurer: None to predict. time_budget_s: None for no limit.
    """

    def __init__(
        self,
        target: Target,
        store: Store,
        compiler: CachedCompiler,
        *,
        trials: int | None = None,
        seed: int = 0,
        measurer: Measurer | None = None,
        time_budget_s: float | None = None,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        objective = "measured" if measurer is not None else "predicted"
        self.target, self.store, self.compiler, self.measurer = target, store, compiler, measurer
        self.trials, self.seed = trials or TRIALS[objective], seed
        self.report = Report(target, objective, uuid4().hex[:12])
        self.ledger = Ledger(store, target, objective, self.report.run, [self.trials, seed])
        if measurer is not None:
            self.ledger.environment = measurer.environment()
        self._progress, self._clock = progress, clock
        self._start = clock()
        self._deadline = None if time_budget_s is None else self._start + time_budget_s
        self._left = 0
        self._compiled: set[str] = set()  # sources that were not in the cache

    # -- the run

    def run(self, items: Sequence[Item]) -> Report:
        """Tune every item. What cannot be tuned has its reason in the report.

        Raises DatabaseError if the store takes no more rows, ToolchainError if NVRTC cannot target the arch.
        """
        targets = [t for t in map(self._target, items) if t is not None]
        try:
            opened = [t for t in targets if t.entry.closed is None]
            while opened:
                trials = self._ask(opened)
                self._evaluate(trials)
                for t in opened:
                    if not t.search.num_left:
                        self._finish(t)
                opened = [t for t in opened if t.search.num_left]
                self._share_winners(opened)
        except OutOfTime:
            self.report.out_of_time = True
        except KeyboardInterrupt:  # what is known by now is worth its winners
            self.report.interrupted = True
        finally:
            self.ledger.flush()
        self._conclude(targets)
        self.report.num_compiled = len(self._compiled)
        self.report.seconds = self._clock() - self._start
        return self.report

    def _target(self, item: Item) -> _Target | None:
        kernel = find_kernel(item.kernel)
        try:
            found = candidates(kernel, item.problem, self.target, self.seed)
        except ConfigRefused as e:
            self.report.results.append(Result(item, note=e.message))
            return None
        entry = self.ledger.entry(kernel, item.problem)
        search = Search(
            kernel, item.problem, self.target, found, trials=self.trials,
            seed=int(digest([entry.key.id, self.seed])[:8], 16), measured=self.measurer is not None,
        )  # fmt: skip
        return _Target(item, kernel, entry, search)

    def _ask(self, opened: list[_Target]) -> list[_Trial]:
        """The round's trials, each with its build where it is known, or a compile under way."""
        trials = []
        for t in opened:
            for config in t.search.ask(BATCH[self.report.objective]):
                trial = _Trial(t, config, render(t.kernel, t.problem, config, self.target))
                trial.build = self.ledger.build_of(t.kernel, t.problem, config, trial.source)
                if trial.build is None or self.measurer is not None:
                    trial.cubin = self.compiler.submit(trial.source, self.target.arch)
                    if not trial.cubin.done():
                        self._compiled.add(trial.source)
                trials.append(trial)
            for config, outcome in t.search.refused.items():
                if config not in t.noted:
                    t.noted.add(config)
                    self.ledger.add(t.entry, config, outcome.kind, build_id=None, reason=outcome.reason)
        self._left = sum(t.search.num_left for t in opened)
        return trials

    def _evaluate(self, trials: list[_Trial]) -> None:
        """Judge and tell them in order. Out of time, what is compiled already is still judged: it costs no more."""
        late = False
        for trial in trials:
            self._tick(f"{trial.target.kernel.name}: {trial.target.item.where}")
            if late and not self._is_at_hand(trial):
                trial.target.search.abandon(trial.config)
                continue
            try:
                outcome = self._judge(trial)
            except OutOfTime:
                late = True
                trial.target.search.abandon(trial.config)
                continue
            trial.target.search.tell(trial.config, outcome)
            self.report.num_trials += 1
            self._left -= 1
            if outcome.kind in ("compile_failed", "wrong_result", "launch_failed", "timed_out"):
                failure = (trial.target.kernel.name, describe(trial.config), outcome.reason)
                if failure not in self.report.failures:
                    self.report.failures.append(failure)
        if late:
            raise OutOfTime

    def _is_at_hand(self, trial: _Trial) -> bool:
        compiled = trial.build is not None or (trial.cubin is not None and trial.cubin.done())
        return self.measurer is None and compiled

    def _tick(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self.report.num_trials, self.report.num_trials + self._left, text)

    def _check_time(self) -> None:
        if self._deadline is not None and self._clock() >= self._deadline:
            raise OutOfTime

    # -- one trial

    def _judge(self, trial: _Trial) -> Outcome:
        """Compile if need be, then predict or measure. Every outcome is a row."""
        t, build = trial.target, trial.build
        if build is None:
            build = self._built(trial)
        t.builds[trial.config] = build
        if build.status != "ok":
            reason = build.log.strip().splitlines()[0] if build.log.strip() else "NVRTC rejected the source"
            return self._note(t, trial.config, build, Outcome("compile_failed", reason=reason, excess=1.0))
        if (why := why_unlaunchable(t.kernel, t.problem, trial.config, self.target, build)) is not None:
            return self._note(t, trial.config, build, Outcome("invalid", reason=why, excess=1.0))
        if self.measurer is not None:
            return self._measured(trial, build)
        us = predict(t.kernel, t.problem, trial.config, self.target, build.entries).latency_us
        outcome = Outcome("ok", us, registers=build.registers, spill_bytes=build.spill_bytes, excess=build.spill_bytes)
        return self._note(t, trial.config, build, outcome, p50_us=us)

    def _built(self, trial: _Trial) -> Build:
        if trial.cubin is None:
            raise KerngenError("a trial without a build needs a compile")
        made: Cubin | CompileError
        while True:
            if not trial.cubin.done():
                self._check_time()
            try:
                made = trial.cubin.result(timeout=0.5)
                break
            except TimeoutError:
                self._tick(f"compiling {trial.target.kernel.name}")
            except CompileError as e:
                made = e
                break
        t = trial.target
        return self.ledger.add_build(t.kernel, t.problem, trial.config, trial.source, made)

    def _note(self, t: _Target, config: Any, build: Build, outcome: Outcome, **values: Any) -> Outcome:
        """Write the outcome's row, unless an earlier run wrote the same."""
        known = self.ledger.recall(t.entry, config, build)
        if known is not None and (known.outcome, known.p50_us) == (outcome.kind, values.get("p50_us")):
            self.report.num_from_database += 1
        else:
            self.ledger.add(t.entry, config, outcome.kind, build_id=build.id, reason=outcome.reason, **values)
        return outcome

    def _measured(self, trial: _Trial, build: Build) -> Outcome:
        t = trial.target
        if (known := self.ledger.recall(t.entry, trial.config, build)) is not None:
            self.report.num_from_database += 1
            return _recalled(known, build)
        if self.measurer is None or trial.cubin is None:
            raise KerngenError("a measured trial needs a measurer and a compile")
        self._check_time()
        seen = self.measurer.measure(t.kernel, t.problem, trial.config, trial.cubin.result().image)
        self.ledger.add(t.entry, trial.config, seen.outcome, build_id=build.id, **seen.values())
        return Outcome(seen.outcome, seen.p50_us, seen.reason, build.registers, build.spill_bytes,
                       0.0 if seen.outcome == "ok" else 1.0)  # fmt: skip

    def _share_winners(self, opened: list[_Target]) -> None:
        """Put each search's best before its neighbours: the same compiled-in fields, other tokens or batch."""
        best: dict[str, list[Any]] = {}
        for t in opened:
            if t.search.best is not None:
                best.setdefault(t.entry.key.static_key, []).append(t.search.best)
        for t in opened:
            t.search.suggest(dict.fromkeys(best.get(t.entry.key.static_key, [])))

    # -- the end of a search

    def _finish(self, t: _Target) -> None:
        """Time the finalists again together, if measuring, and write down that the search is over."""
        summary = {"closed": self._summary(t)}
        if self.measurer is None:
            if t.search.best is not None:
                o = t.search.outcomes[t.search.best]
                reason = (
                    f"best of a search of {self.trials} trials at most, seed {self.seed} ({t.entry.fingerprint[:12]})"
                )
                build_id = t.builds[t.search.best].id
                self.ledger.add(t.entry, t.search.best, "ok", build_id=build_id, p50_us=o.latency_us, reason=reason,
                                tags=summary)  # fmt: skip
        else:
            self._finals(t, self.measurer, summary)

    def _finals(self, t: _Target, measurer: Measurer, summary: dict[str, Any]) -> None:
        ranked = sorted(
            ((o.latency_us, i, c) for i, (c, o) in enumerate(t.search.outcomes.items()) if o.latency_us is not None),
            key=lambda r: r[:2],
        )
        near = [c for us, _, c in ranked if us <= ranked[0][0] * FINAL_BAND][:FINALISTS]
        if not near:
            return
        if t.search.outcomes[t.search.candidates.default].ok and t.search.candidates.default not in near:
            near.append(t.search.candidates.default)
        self._check_time()
        self._tick(f"{t.kernel.name}: finalists of {t.item.where}")
        builds = [t.builds[c] for c in near]
        sources = [render(t.kernel, t.problem, c, self.target) for c in near]
        images = [self.compiler.submit(s, self.target.arch).result().image for s in sources]
        seen = measurer.finals(t.kernel, t.problem, list(zip(near, images, strict=True)))
        for config, build, observed in zip(near, builds, seen, strict=True):
            self.ledger.add(t.entry, config, observed.outcome, build_id=build.id, stage="final", tags=summary,
                            **observed.values())  # fmt: skip

    def _summary(self, t: _Target) -> dict[str, Any]:
        outcomes = t.search.outcomes
        default = outcomes.get(t.search.candidates.default)
        return {
            "tried": len(outcomes),
            "failed": sum(o.kind not in ("ok", "invalid") for o in outcomes.values()),
            "default_us": None if default is None else default.latency_us,
            "spilled": sum(o.spill_bytes > 0 for o in outcomes.values()),
        }

    def _conclude(self, targets: list[_Target]) -> None:
        """Derive the winners, check and keep their cubins, and fill the report in the workload's order."""
        winners = self.ledger.winners([t.entry for t in targets])
        for t in targets:
            found = t.search.candidates
            summary = t.entry.closed or self._summary(t)
            result = Result(
                t.item, winners.get(t.entry.key.id), summary["default_us"], num_valid=len(found.valid),
                num_refused=found.num_refused, num_tried=summary["tried"], num_failed=summary["failed"],
            )  # fmt: skip
            self.report.results.append(result)
            if t.entry.closed is not None:
                self.report.num_from_database += summary["tried"]
            if result.winner is None:
                tried = [o.reason for o in t.search.outcomes.values() if not o.ok]
                result.note = tried[-1] if tried else "time ran out before its first trial"
                continue
            self._inspect(t, result, summary)

    def _inspect(self, t: _Target, result: Result, summary: dict[str, Any]) -> None:
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


def _recalled(m: Measurement, build: Build) -> Outcome:
    excess = 0.0 if m.outcome == "ok" else 1.0
    return Outcome(m.outcome, m.p50_us, m.reason, build.registers, build.spill_bytes, excess)
