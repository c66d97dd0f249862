"""The end of a run: winners derived, their machine code checked and kept, and the report filled.

What the time did not suffice for gets no row: what ran before still does, which is the default or what won near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from kerngen.compiler.render import render
from kerngen.cost.predict import predict
from kerngen.errors import KerngenError
from kerngen.system.interrupts import result_of
from kerngen.templates.kernel import fields_of
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning.report import Result

if TYPE_CHECKING:
    from kerngen.compiler.cache import CachedCompiler
    from kerngen.tuning.budget import Budget
    from kerngen.tuning.ledger import Ledger
    from kerngen.tuning.report import Report
    from kerngen.tuning.task import Task


class Conclusion:
    """Of one run. Reads and writes through `ledger`, and puts what came of it into `report`. budget: of its time;
    nothing is compiled after that.
    """

    def __init__(self, ledger: Ledger, compiler: CachedCompiler, report: Report, budget: Budget) -> None:
        self.ledger, self.store, self.target = ledger, ledger.store, ledger.target
        self.compiler, self.report, self.budget = compiler, report, budget

    def of(self, tasks: Sequence[Task]) -> None:
        """Derive the winners, check and keep their cubins, and fill the report in the workload's order."""
        winners = self.ledger.winners([t.entry for t in tasks])
        ended = not self.report.out_of_time and not self.report.interrupted
        # a space that the search had no need to know whole is not looked at now
        whole = ended and not self.ledger.objective.takes_time
        looked_at = {t for t in tasks if t.search.candidates.are_known or (whole and not t.search.candidates.is_large)}
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

    @property
    def _why(self) -> str:
        return "stopped" if self.report.interrupted else "the time was over"

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
