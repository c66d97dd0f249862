"""The end of a run: winners derived, their machine code checked and kept, and the report filled.

What the time did not suffice for is answered here by the cost model, from whatever was compiled that can run it; such
an answer is a prediction in the database too, and the next measurement outranks it. Where the model does not see that
it is better than the default, the default runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from kerngen.compiler.render import render
from kerngen.cost.choose import ranked
from kerngen.cost.predict import predict
from kerngen.errors import KerngenError
from kerngen.runtime.selection import DEFAULT
from kerngen.system.interrupts import result_of
from kerngen.templates.kernel import fields_of
from kerngen.tuning.checks import why_not_cubin, why_unlaunchable
from kerngen.tuning.objective import Predicted
from kerngen.tuning.report import Result
from kerngen.tuning.task import Trial
from kerngen.tuning_db.store.winners import PREDICTED_MARGIN

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.runtime.selection import Selector
    from kerngen.tuning.budget import Budget
    from kerngen.tuning.ledger import Ledger
    from kerngen.tuning.report import Report
    from kerngen.tuning.task import Task
    from kerngen.tuning_db.read.values import Build


class Conclusion:
    """Of one run. Reads and writes through `ledger`, and puts what came of it into `report`. before: what ran before
    it, where that matters. budget: of its time; nothing is compiled after that.
    """

    def __init__(
        self, ledger: Ledger, compiler: CachedCompiler, report: Report, before: Selector | None, budget: Budget
    ) -> None:
        self.ledger, self.store, self.target = ledger, ledger.store, ledger.target
        self.compiler, self.report = compiler, report
        self.before, self.budget = before, budget

    def of(self, tasks: Sequence[Task]) -> None:
        """Derive the winners, check and keep their cubins, and fill the report in the workload's order."""
        untried = [t for t in tasks if not _has_answer(t)]
        if self.before is not None:
            ran = [self.before.choice(t.kernel, t.problem).source for t in untried]
            untried = [t for t, source in zip(untried, ran, strict=True) if source == DEFAULT]
        answered = self._answer_by_the_model(untried, tasks)
        winners = self.ledger.winners([t.entry for t in tasks])
        ended = not self.report.out_of_time and not self.report.interrupted
        # a space that nobody has looked at by the end of the time is not looked at now
        looked_at = {t for t in tasks if ended or t.search.candidates.are_known}
        spaces = dict.fromkeys(t.search.candidates.points for t in tasks if t in looked_at)
        self.report.num_spaces, self.report.num_refused = len(spaces), sum(s.num_refused for s in spaces)
        for t in tasks:
            found = t.search.candidates
            summary = t.entry.closed or summary_of(t)
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
                result.note = failed[-1] if failed else f"{self._why} before it was tried: what ran before still does"
                continue
            self._inspect(t, result, summary)
            if t in answered:
                how = f"{self._why} before it was tried: {_BY_THE_MODEL}"
                result.note = f"{how}; {result.note}" if result.note else how

    @property
    def _why(self) -> str:
        return "stopped" if self.report.interrupted else "the time was over"

    # -- what was not tried

    def _answer_by_the_model(self, untried: Sequence[Task], tasks: Sequence[Task]) -> list[Task]:
        """Predict for each what of its builds can run it, and write the best down. Returns those that have one."""
        keys = {t.static_key for t in untried}
        builds: dict[str, dict[Any, Build]] = {key: {} for key in keys}
        for t in tasks:
            if t.static_key in keys:
                builds[t.static_key] |= _offered_by(t)
        by = Predicted(self.target)
        answered = []
        for t in untried:
            trials = [
                Trial(t, c, b, lambda: b"") for c, b in builds[t.static_key].items() if _can_run(t, c, b, self.target)
            ]
            predicted = [(o.latency_us or float("inf"), i, o) for i, (_, o) in enumerate(by.judge(trials))]
            if predicted and self._is_better(t, trials, min(predicted)[0]):
                _, i, outcome = min(predicted)
                self.ledger.add(t.entry, trials[i].config, outcome, build_id=trials[i].build.id, by=by)
                answered.append(t)
        return answered

    def _is_better(self, t: Task, trials: Sequence[Trial], us: float) -> bool:
        """Whether the best of `trials`, which takes `us`, may stand for `t`: the default is among them, which then
        decides as ever, or is predicted to take so much longer.
        """
        default = t.search.candidates.default
        if any(trial.config == default for trial in trials):
            return True
        ((default_us, _),) = ranked(t.kernel, t.problem, self.target, [default])
        return default_us > us * (1 + PREDICTED_MARGIN)

    # -- winners

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
                left_s = max(self.budget.whole_left(self.ledger.objective.waited_s), 0.0)
                cubin = result_of(self.compiler.submit(source, self.target.arch), None if left_s == inf else left_s)
                if (why := why_not_cubin(cubin.image, self.target.arch)) is not None:
                    notes.append(why)
                else:
                    self.store.keep_image(cubin)
            except (KerngenError, TimeoutError) as e:
                why = e.message if isinstance(e, KerngenError) else f"{self._why} before it was compiled anew"
                notes.append(f"its machine code is not in the database: {why}")
        result.note = "; ".join(notes)


_BY_THE_MODEL = "the cost model chose among what was compiled"


def summary_of(t: Task) -> dict[str, Any]:
    """A search in figures, for the row that ends it and for the report."""
    outcomes = t.search.outcomes
    default = outcomes.get(t.search.candidates.default)
    return {
        "tried": len(outcomes),
        "failed": sum(o.kind not in ("ok", "invalid") for o in outcomes.values()),
        "default_us": None if default is None else default.latency_us,
        "spilled": sum(o.spill_bytes > 0 for o in outcomes.values()),
    }


def _has_answer(t: Task) -> bool:
    """Whether it was tried in this run, or in an earlier one that had an answer."""
    known = (row.outcome == "ok" for rows in t.entry.known.values() for row in rows)
    return bool(t.search.outcomes) or t.entry.closed is not None or any(known)


def _offered_by(t: Task) -> dict[Any, Build]:
    """What `t` has for others: its best, and where nothing was judged what was compiled for it."""
    if (best := t.search.best) is not None:
        return {best: t.builds[best]}
    return {c: b for c, b in t.builds.items() if b.status == "ok"}


def _can_run(t: Task, config: Any, build: Build, target: Any) -> bool:
    if t.kernel.why_invalid(t.problem, config, target) is not None:
        return False
    return why_unlaunchable(t.kernel, t.problem, config, target, build) is None
