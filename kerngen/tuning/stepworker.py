"""What the GPU's process (worker.py) does to compare two choices of configurations in a whole step of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from kerngen.errors import KerngenError
from kerngen.measure import target_here
from kerngen.runtime.launcher import Function
from kerngen.stepgraph import Graph, Stage, StepGraph
from kerngen.steps import Ratio, Step
from kerngen.templates import find_kernel
from kerngen.workload import Model

GRAPHS_KEPT = 4  # of a step: what is compared with many others, and those
FUNCTIONS_KEPT = 256  # of a step, each with its module and its workspace


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A configuration and its machine code, for every call of `kernel` with one of `problems`."""

    kernel: str
    problems: tuple[Any, ...]
    config: Any
    image: bytes

    @property
    def identity(self) -> tuple[str, Any, str]:
        return self.kernel, self.config, sha256(self.image).hexdigest()


class HeldStep:
    """A step on the GPU, with the functions that it was given and the graphs of the last few choices."""

    def __init__(self, stage: Stage, step: Step) -> None:
        self._graph = StepGraph(stage, step)
        self._functions: dict[Any, Function] = {}
        self._captured: dict[Any, Graph] = {}

    def compare(self, base: Sequence[Exchanged], other: Sequence[Exchanged], pairs: int) -> Ratio:
        return self._graph.compare(self._of(base), self._of(other), pairs=pairs)

    def _of(self, chosen: Sequence[Exchanged]) -> Graph:
        key = frozenset((e.identity, e.problems) for e in chosen)
        if (graph := self._captured.pop(key, None)) is None:
            functions = {(e.kernel, p): self._function(e) for e in chosen for p in e.problems}
            graph = self._graph.capture(functions)
        self._captured[key] = graph  # as the latest
        while len(self._captured) > GRAPHS_KEPT:
            del self._captured[next(iter(self._captured))]
        return graph

    def _function(self, e: Exchanged) -> Function:
        if (found := self._functions.pop(e.identity, None)) is None:
            index = torch.cuda.current_device()
            found = Function(find_kernel(e.kernel), e.config, target_here(), e.image, index=index)
        self._functions[e.identity] = found  # as the latest
        while len(self._functions) > FUNCTIONS_KEPT:  # graphs hold what they launch
            del self._functions[next(iter(self._functions))]
        return found


# Stages are most of the memory; the steps of one model share one.
_stages: dict[Model, Stage] = {}
_held: dict[tuple[Model, Step], HeldStep] = {}


def compare(model: Model, step: Step, base: Sequence[Exchanged], other: Sequence[Exchanged], pairs: int) -> Ratio | str:
    """The ratio, or why there is none. RuntimeError where a kernel faulted: nothing runs in this process any more."""
    for _ in range(2):
        try:
            return _held_step(model, step).compare(base, other, pairs)
        except KerngenError as e:
            return e.message
        except torch.OutOfMemoryError:
            pass  # only now, without its traceback, does what it was to hold go
        let_go()  # of other steps, for the second try
    return f"{step.name} of {model.name} does not fit in this GPU's memory"


def _held_step(model: Model, step: Step) -> HeldStep:
    if (model, step) not in _held:
        if model not in _stages:
            _stages[model] = Stage(model)
        _held[model, step] = HeldStep(_stages[model], step)
    return _held[model, step]


def let_go() -> None:
    """Free what steps hold: something else needs the memory."""
    if _stages:
        _held.clear()
        _stages.clear()
        torch.cuda.empty_cache()
