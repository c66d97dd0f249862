"""The GPU process's side of a step A/B: compares two choices of configurations in a whole step of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import torch

from kerngen.errors import KerngenError
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.timing.measure import target_here
from kerngen.timing.step_graph import Called, Graph, Stage, StepGraph
from kerngen.workload.steps import Ratio, Step, fused_as
from kerngen.workload.workload import Model

T = TypeVar("T")

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

    def compare(
        self, base: Sequence[Exchanged], other: Sequence[Exchanged], pairs: int, fused: Mapping[Called, bool]
    ) -> Ratio:
        return self._graph.compare(self._of(base, fused), self._of(other, fused), pairs=pairs)

    def _of(self, chosen: Sequence[Exchanged], fused: Mapping[Called, bool]) -> Graph:
        def captured() -> Graph:
            functions = {(e.kernel, p): self._function(e) for e in chosen for p in e.problems}
            return self._graph.capture(functions, fused_as(fused, self._graph.stage.target))

        key = frozenset((e.identity, e.problems) for e in chosen), frozenset(fused.items())
        return _latest(self._captured, key, captured, GRAPHS_KEPT)

    def _function(self, e: Exchanged) -> Function:
        def loaded() -> Function:
            index = torch.cuda.current_device()
            return Function(find_kernel(e.kernel), e.config, target_here(), e.image, index=index)

        return _latest(self._functions, e.identity, loaded, FUNCTIONS_KEPT)  # graphs hold what they launch


def _latest(held: dict[Any, T], key: Any, make: Callable[[], T], most: int) -> T:
    """What `held` has for `key`, or what `make` gives, as the latest; of the others those asked for longest ago go."""
    found = held.pop(key) if key in held else make()
    held[key] = found
    while len(held) > most:
        del held[next(iter(held))]
    return found


# Stages are most of the memory; the steps of one model share one.
_stages: dict[Model, Stage] = {}
_held: dict[tuple[Model, Step], HeldStep] = {}


def compare(
    model: Model, step: Step, base: Sequence[Exchanged], other: Sequence[Exchanged], pairs: int,
    fused: Mapping[Called, bool],
) -> Ratio | str:  # fmt: skip
    """The ratio, or why there is none. fused: as in GpuWorker.compare. RuntimeError where a kernel faulted: nothing
    runs in this process any more.
    """
    for _ in range(2):
        try:
            return _held_step(model, step).compare(base, other, pairs, fused)
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
