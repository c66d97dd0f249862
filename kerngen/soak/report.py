"""A whole soak: its phases, the answers asked again alone, and what of it is a failure."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kerngen.errors import UsageError
from kerngen.soak.check import Check, check_phase
from kerngen.soak.drafts import RememberingDrafter
from kerngen.soak.drive import Answer, Phase, Settings, run_phase
from kerngen.soak.faults import growth, parts_at
from kerngen.soak.models import Opened
from kerngen.soak.samples import Sample

WITHOUT, WITH = "without drafts", "with drafts"
PHASES = {"off": (WITHOUT,), "on": (WITH,), "both": (WITHOUT, WITH)}

Advance = Callable[[float, float, str], None]  # seconds that are over, of how many at most, and what there is to say


@dataclass(slots=True)
class Report:
    """max_growth_mb: what memory may grow by after the warm-up. is_exact: a difference is a failure."""

    opened: Opened
    settings: Settings
    max_growth_mb: float
    phases: list[Phase] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        return self.settings.reproducible or self.opened.ops.dtype == torch.float32

    @property
    def stopped(self) -> bool:
        return any(p.stopped for p in self.phases) or any(c.stopped for c in self.checks)

    @property
    def failures(self) -> list[str]:
        """What is wrong, a line each; empty if nothing is."""
        found = []
        for phase in self.phases:
            found += [f"{phase.name}: {error}" for error in phase.faults.lines()]
            found += [f"{phase.name}: {count} pages of the {kind} cache were not given back"
                      for kind, count in phase.leaked.items()]  # fmt: skip
            count = _captured(phase.samples)
            captured = f"; {count} graphs were captured meanwhile" if count else ""
            found += [
                f"{phase.name}: {kind} memory grew by {mb:.0f} MB after the warm-up, more than {self.max_growth_mb:g}"
                f"{captured}"
                for kind, mb in _growth(phase).items()
                if mb > self.max_growth_mb
            ]
            if not (phase.answers or phase.stopped or phase.broken):
                found.append(f"{phase.name}: no request was answered")
        for check in self.checks:
            found += [f"{check.phase}: asked alone: {error}" for error in check.errors]
            if check.different and self.is_exact:
                found.append(f"{check.phase}: {len(check.different)} greedy answers differ from the ones alone")
            if check.unchecked and not (check.equal or check.different or check.errors or check.stopped):
                found.append(f"{check.phase}: no answer was compared")
        return found

    @property
    def between_phases(self) -> tuple[int, int] | None:
        """(equal, different) greedy answers of requests that both phases answered, as far as the shorter one goes."""
        if len(self.phases) < 2:
            return None
        first = {a.number: a for a in self.phases[0].answers if a.is_greedy}
        pairs = [(first[a.number], a) for a in self.phases[1].answers if a.number in first and a.is_greedy]
        equal = sum(_agree(a, b) for a, b in pairs)
        return equal, len(pairs) - equal

    def as_dict(self) -> dict[str, Any]:
        ops = self.opened.ops
        return {
            "model": self.opened.name, "weights": self.opened.weights, "backend": ops.name, "device": board(ops.device),
            "tensor_parallel": ops.collectives.world.size,
            "dtype": str(ops.dtype).removeprefix("torch."), "opened_s": self.opened.seconds,
            "settings": asdict(self.settings), "max_growth_mb": self.max_growth_mb, "is_exact": self.is_exact,
            "phases": [_phase(p) for p in self.phases], "checks": [asdict(c) for c in self.checks],
            "between_phases": self.between_phases, "stopped": self.stopped, "failures": self.failures,
            "configurations": ops.sources(), "outside": ops.outside(),
        }  # fmt: skip


def board(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def soak(opened: Opened, settings: Settings, drafting: str, max_growth_mb: float, advance: Advance) -> Report:
    """Half of the time without and half with drafts where `drafting` is "both", with "off" or "on" all of it; then the
    check. Ctrl-C ends it with the report so far. Raises UsageError for what cannot be.

    The second phase asks what the first one asked, and its drafter knows most of the answers: drafts of every number
    are accepted, though weights be random.
    """
    names = PHASES[drafting]
    if WITH in names and settings.reproducible and settings.num_draft_tokens is None:
        raise UsageError("a number of drafts that adapts depends on time: no run is reproducible with it",
                         hint="--num-draft-tokens 3")  # fmt: skip
    drafter = opened.drafter
    report = Report(opened, settings, max_growth_mb)
    total = settings.seconds + settings.check_seconds
    over = 0.0

    def say(elapsed: float, text: str) -> None:
        advance(over + elapsed, total, text)

    def drafter_of(name: str) -> RememberingDrafter | None:
        return drafter if name == WITH else None

    for name in names:
        phase = run_phase(name, settings, opened, drafter_of(name), settings.seconds / len(names), say)
        report.phases.append(phase)
        over += settings.seconds / len(names)
        if phase.stopped or phase.broken:
            return report
        _let_go(opened)
        if drafter is not None and name == WITHOUT:
            for answer in phase.answers:
                drafter.remember(answer.num_prompt_tokens, answer.tokens.tolist())
    for phase in report.phases if settings.check_seconds else ():
        seconds = settings.check_seconds / len(names)
        report.checks.append(check_phase(phase, settings, opened, drafter_of(phase.name), seconds, say))
        over += seconds
        if report.checks[-1].stopped or report.checks[-1].errors:
            break
        _let_go(opened)
    return report


def _let_go(opened: Opened) -> None:
    """The memory of an engine that is gone."""
    gc.collect()
    if opened.ops.device.type == "cuda":
        torch.cuda.empty_cache()


def _captured(samples: list[Sample]) -> int:
    """Steps captured in the second half."""
    return samples[-1].num_graphs - samples[len(samples) // 2 - 1].num_graphs if len(samples) > 1 else 0


def _growth(phase: Phase) -> dict[str, float]:
    return growth([asdict(s.memory) for s in phase.samples if s.memory is not None])


def _agree(a: Answer, b: Answer) -> bool:
    """As far as the shorter one goes."""
    return parts_at(a.tokens, b.tokens) in (None, min(len(a.tokens), len(b.tokens)))


def _phase(phase: Phase) -> dict[str, Any]:
    ended = [a for a in phase.answers if a.stop_reason != "cancelled"]
    samples = [asdict(s) | {"tokens_per_s": s.tokens_per_s, "mean_running": s.mean_running} for s in phase.samples]
    return {
        "name": phase.name, "num_pages": phase.num_pages, "cache_gb": phase.cache_bytes / 1e9,
        "asked": phase.num_asked, "finished": len(ended), "cancelled": len(phase.answers) - len(ended),
        "sampled": sum(not a.is_greedy for a in phase.answers),
        "preemptions": sum(s.num_preemptions for s in phase.samples),
        "preempted": sum(a.num_preemptions > 0 for a in phase.answers),
        "steps": sum(s.num_steps for s in phase.samples), "tokens": sum(s.num_tokens for s in phase.samples),
        "found_in_cache": sum(a.num_cached_tokens for a in phase.answers),
        "longest_prompt": max((a.num_prompt_tokens for a in phase.answers), default=0),
        "drafted": phase.drafted, "accepted": phase.accepted,
        "errors": phase.faults.shown, "num_errors": phase.faults.count, "leaked": phase.leaked,
        "stopped": phase.stopped, "broken": phase.broken,
        "growth_mb": _growth(phase), "samples": samples,
    }  # fmt: skip
