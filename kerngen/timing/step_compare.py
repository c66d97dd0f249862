"""Databases side by side: how long the steps of a model take with each one's winners, on this GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kerngen.runtime.launcher import Launcher
from kerngen.runtime.selection import DEFAULT
from kerngen.timing.step_graph import Graph, Stage, StepGraph
from kerngen.workload.steps import STEPS, Ratio, Step
from kerngen.workload.workload import Model

if TYPE_CHECKING:
    from kerngen.tuning_db import PerBoard, Source

log = logging.getLogger(__name__)

PAIRS = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """One step. weight: its exponent in the mean. base_us: with the first contender's winners, in microseconds. ratios:
    of each other contender's time to that, by its name. num_tuned: (kernel, problem)s of the step that a database of
    the contender's has an answer for, of num_calls at most; by name, the first's included.
    """

    step: Step
    weight: float
    base_us: float
    ratios: Mapping[str, Ratio]
    num_tuned: Mapping[str, int]
    num_calls: int


def side_by_side(
    model: Model, contenders: Mapping[str, Sequence[Source | PerBoard]], *, pairs: int = PAIRS, seed: int = 0,
    steps: Sequence[tuple[Step, float]] = STEPS,
) -> Iterator[Compared]:  # fmt: skip
    """`steps` of `model`, all layers, on generated weights: those by which tuning is judged, or others with weights.

    contenders: databases in lookup order, by a name to show; none of them means default configurations. Each is run in
    turn with the first. A step whose cache does not fit beside the model is left out, with a warning. Raises
    LaunchError, and torch.OutOfMemoryError where the model does not fit.
    """
    stage = Stage(model, seed=seed)
    launchers = {name: Launcher(sources, index=stage.launcher.index) for name, sources in contenders.items()}
    for step, weight in steps:
        if (step.phase == "draft" and stage.drafter is None) or step.context > model.target.max_positions:
            continue
        try:
            yield _compared(StepGraph(stage, step), launchers, step, weight, pairs)
        except torch.OutOfMemoryError:
            log.warning("%s: its cache does not fit beside the model; left out", step.name)
            torch.cuda.empty_cache()


def _compared(held: StepGraph, launchers: Mapping[str, Launcher], step: Step, weight: float, pairs: int) -> Compared:
    graphs: dict[str, Graph] = {}
    tuned: dict[str, int] = {}
    num_calls: list[int] = []
    for name, launcher in launchers.items():
        chosen = held.chosen_by(launcher)
        tuned[name] = sum(f.source != DEFAULT for f in chosen.values())
        graphs[name] = held.capture(chosen, launcher.fuses)
        num_calls.append(len(chosen))
    base, *others = launchers
    ratios = {name: held.compare(graphs[base], graphs[name], pairs=pairs) for name in others}
    base_us = next(iter(ratios.values())).base_us
    return Compared(step, weight, base_us, ratios, tuned, max(num_calls))


def means(rows: Iterable[Compared]) -> dict[str, float]:
    """Of each contender, the weighted geometric mean of its steps' ratios to the first's."""
    rows = list(rows)
    whole = sum(r.weight for r in rows)
    names = rows[0].ratios if rows else {}
    return {n: math.exp(sum(r.weight * math.log(r.ratios[n].median) for r in rows) / whole) for n in names}
