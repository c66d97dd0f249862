"""The result of a tuning run, and figures for its reader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.templates.kernel import fields_of, static_fields
from kerngen.tuning_db.read.values import Winner
from kerngen.workload.workload import Item, Workload

if TYPE_CHECKING:
    from kerngen.tuning.gains import Gain

STEP_BATCHES, STEP_CONTEXT = (1, 32), 512  # of the decode steps that a report adds up
SHOWN_CONTEXT = 8192  # of the problem that stands for its group


@dataclass(slots=True)
class Result:
    """What came of one problem. winner: None where nothing could be tuned, and `note` says why.

    note: also what the user should know of the winner (it spills, it could not be kept). explanation: the cost
    model's view of it. default, default_us: the default configuration's fields, and its time by the same objective.
    """

    item: Item
    winner: Winner | None = None
    default: dict[str, Any] = field(default_factory=dict)
    default_us: float | None = None
    note: str = ""
    explanation: str = ""
    registers: int = 0
    smem_bytes: int = 0
    spill_bytes: int = 0
    num_valid: int = 0
    num_refused: int = 0
    num_tried: int = 0
    num_failed: int = 0

    @property
    def provenance(self) -> str:
        """How its winner is known: "measured", "carried" or "predicted"; "" where there is none."""
        return "" if self.winner is None else self.winner.provenance

    @property
    def speedup(self) -> float | None:
        """Time of the default configuration over the winner's."""
        us = None if self.winner is None else self.winner.latency_us
        return None if us is None or not self.default_us else self.default_us / us

    @property
    def changes(self) -> dict[str, Any]:
        """The winner's fields that are not the default's."""
        if self.winner is None:
            return {}
        return {k: v for k, v in self.winner.config.items() if self.default.get(k) != v}


@dataclass(slots=True)
class Report:
    """A whole run. objective, how: its objective's name, and the same in words.

    failures: kernel, configuration and reason of each compile that failed or result that was wrong. num_refused:
    points of `num_spaces` spaces that why_invalid refused, those of a space that several problems share counted once;
    spaces that were not looked at before the time was over are not among them. gains: after each minute.
    """

    target: Target
    objective: str
    how: str
    run: str
    results: list[Result] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    num_trials: int = 0
    num_compiled: int = 0
    num_from_database: int = 0
    num_spaces: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    out_of_time: bool = False
    interrupted: bool = False
    remarks: list[str] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)

    def num_of(self, provenance: str) -> int:
        """Of how many problems the winner is known like that; "" of how many there is none."""
        return sum(r.provenance == provenance for r in self.results)


@dataclass(frozen=True, slots=True)
class Group:
    """The results that share a kernel and compiled-in fields: they differ in tokens, batch or context.

    where: the places in the model, with the compiled-in fields that tell this group from others of the same places.
    shown: the one that stands for the others, with a winner where any has one.
    """

    kernel: str
    where: str
    results: tuple[Result, ...]
    shown: Result

    @property
    def num_won(self) -> int:
        return sum(r.winner is not None for r in self.results)

    @property
    def num_changed(self) -> int:
        """How many winners are not the default configuration."""
        return sum(bool(r.changes) for r in self.results)

    @property
    def point(self) -> str:
        """The fields of the shown problem that its group does not share: "batch=1 kv_len=8192"."""
        problem = self.shown.item.problem
        return " ".join(f"{k}={v}" for k, v in fields_of(problem).items() if k in problem.RUNTIME)


def groups(report: Report, load: Workload) -> list[Group]:
    """By kernel, then in the workload's order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for r in report.results:
        found.setdefault((r.item.kernel, str(static_fields(r.item.problem))), []).append(r)
    steps = dict.fromkeys((u.phase, u.q_len, u.chunk) for i in load.items for u in i.uses)
    usual = {
        (i.kernel, i.problem)
        for phase, q_len, chunk in steps
        for i, _ in load.step(phase, 1, SHOWN_CONTEXT, q_len, chunk=chunk)
    }
    alike: dict[tuple[str, str], list[Result]] = {}
    chosen = []
    for rows in found.values():
        phases = {u.phase for r in rows for u in r.item.uses}
        ordered = rows[::-1] if phases == {"prefill"} else rows  # of chunks the longest
        shown = min(ordered, key=lambda r: (r.winner is None, (r.item.kernel, r.item.problem) not in usual))
        alike.setdefault((shown.item.kernel, shown.item.where), []).append(shown)
        chosen.append((shown, tuple(rows)))
    made = [
        Group(shown.item.kernel, _named(shown, alike[shown.item.kernel, shown.item.where]), rows, shown)
        for shown, rows in chosen
    ]
    return sorted(made, key=lambda g: g.kernel)


def _named(result: Result, alike: list[Result]) -> str:
    """Where `result` stands, told from the others `alike` that stand there too."""
    fields = [static_fields(r.item.problem) for r in alike]
    own = static_fields(result.item.problem)
    differing = (f"{k}={v}" for k, v in own.items() if any(other[k] != v for other in fields))
    return " ".join([_places(result.item), *differing]).strip()


def _places(item: Item) -> str:
    """Its places, those that differ in kind alone as one: "o_proj (sliding, full)"."""
    kinds: dict[str, dict[str, None]] = {}  # of "o_proj (" and of "embedding", which has none
    for use in item.uses:
        place, opened, kind = use.where.partition(" (")
        kinds.setdefault(place + opened, {})[kind.removesuffix(")")] = None
    return ", ".join(f"{place}{', '.join(ks)})" if place.endswith(" (") else place for place, ks in kinds.items())


def notes(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    """Each note once, with the kernels and how many of their problems it concerns."""
    where: dict[str, dict[str, int]] = {}
    for r in results:
        if r.note:
            kernels = where.setdefault(r.note, {})
            kernels[r.item.kernel] = kernels.get(r.item.kernel, 0) + 1
    return where


def step_us(report: Report, load: Workload) -> dict[int, dict[str, float]]:
    """Microseconds in one decode step at STEP_CONTEXT, by batch and kernel, where all of `load` has a winner's time."""
    latency = {(r.item.kernel, r.item.problem): r.winner.latency_us for r in report.results
               if r.winner is not None and r.winner.latency_us is not None}  # fmt: skip
    found = {}
    for batch in STEP_BATCHES:
        step = list(load.step("decode", batch, STEP_CONTEXT))
        if step and all((i.kernel, i.problem) in latency for i, _ in step):
            parts = found[batch] = dict[str, float]()
            for item, count in step:
                us = count * latency[item.kernel, item.problem]
                parts[item.kernel] = parts.get(item.kernel, 0.0) + us
    return found
