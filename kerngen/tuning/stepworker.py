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
from kerngen.stepgraph import Graph, Ratio, StepGraph
from kerngen.steps import Step
from kerngen.templates import find_kernel
from kerngen.workload import Model

GRAPHS_KEPT = 4  # of a step: what is compared with many others, and those


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

    def __init__(self, model: Model, step: Step) -> None:
        self.model, self.step = model, step
        self._graph = StepGraph(model, step)
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
        if (found := self._functions.get(e.identity)) is None:
            index = torch.cuda.current_device()
            found = Function(find_kernel(e.kernel), e.config, target_here(), e.image, index=index)
            self._functions[e.identity] = found
        return found


_held: list[HeldStep] = []  # the one that was asked for last: a step's weights may be most of the memory


def compare(model: Model, step: Step, base: Sequence[Exchanged], other: Sequence[Exchanged], pairs: int) -> Ratio | str:
    """The ratio, or why there is none. RuntimeError where a kernel faulted: nothing runs in this process any more."""
    try:
        if not _held or (_held[0].model, _held[0].step) != (model, step):
            _held.clear()
            torch.cuda.empty_cache()
            _held.append(HeldStep(model, step))
        return _held[0].compare(base, other, pairs)
    except KerngenError as e:
        return e.message
    except torch.OutOfMemoryError:
        pass  # only now, without its traceback, does what it was to hold go
    _held.clear()
    torch.cuda.empty_cache()
    return f"{step.name} of {model.name} does not fit in this GPU's memory"


def let_go() -> None:
    """Free what a step holds: something else needs the memory."""
    if _held:
        _held.clear()
        torch.cuda.empty_cache()
