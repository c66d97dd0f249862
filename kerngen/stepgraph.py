"""On the GPU: how long does a step of a model take with these configurations, against those?

The model's own code runs the step, as in `kerngen run`, on generated weights and a cache of random keys, and is
captured as one CUDA graph; configurations are exchanged by capturing it anew with other functions. Two graphs are
replayed in turn, and the ratio of neighbours' times is what counts: boards differ by 2 % and clocks drift, a ratio
does neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kerngen.cache import CompileCache
from kerngen.forwards import Forwards
from kerngen.generated import generated_model
from kerngen.runtime.cache import KVCache
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.launcher import Function, Launcher
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.steps import Step, sequence
from kerngen.templates.common.row_torch import TORCH_DTYPE
from kerngen.templates.kernel import Kernel
from kerngen.workload import Model

LEAST_MS = 3.0  # of a sample: shorter steps are replayed several times in one

Called = tuple[str, Any]  # a kernel's name, and the problem that the step calls it with
Chosen = Mapping[Called, Function]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two steps' times, sample by sample. low, high: quartiles. us, base_us: medians of the steps themselves."""

    median: float
    low: float
    high: float
    us: float
    base_us: float


class Exchanging(Launcher):
    """A launcher that runs `chosen` where it has something, and what it would run anyway for the rest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chosen: Chosen = {}

    def function(self, kernel: Kernel, problem: Any) -> Function:
        found = self.chosen.get((kernel.name, problem))
        return super().function(kernel, problem) if found is None else found


class Graph:
    """A captured step. It holds what it launches."""

    def __init__(self, graph: torch.cuda.CUDAGraph, chosen: Chosen) -> None:
        self._graph, self._chosen = graph, dict(chosen)

    def replay(self) -> None:
        self._graph.replay()


class StepGraph:
    """`step` of `model` on the current GPU. Weights and keys are made once, from `seed`.

    calls: (kernel, problem) -> launches in the step. A model may be a shortened one (steps.shortened). Raises
    UsageError for a step that the model cannot take.
    """

    def __init__(self, model: Model, step: Step, *, stores: Any = (), cache: CompileCache | None = None,
                 seed: int = 0) -> None:  # fmt: skip
        self.model, self.step = model, step
        self._launcher = Exchanging(stores, cache, index=torch.cuda.current_device())
        self.target = self._launcher.target
        self.calls: dict[Called, int] = {}
        for launched in sequence(model, step, self.target.arch):
            self.calls[launched.kernel, launched.problem] = self.calls.get((launched.kernel, launched.problem), 0) + 1
        ops = KernelOps(Launch(self._launcher, in_forwards=True), TORCH_DTYPE[self.target.arch.dtype])
        drafter = model.drafter if step.phase == "draft" else None
        with torch.inference_mode():
            made, drafting = generated_model(model.name, model.target, drafter, ops, seed)
            self._run, _ = Forwards(made, drafting, self._cache_of(made)).prepare(step)
        self._warm: set[Function] = set()
        self._pool: Any = None

    @staticmethod
    def _cache_of(model: Any) -> Any:
        def cache_of(step: Step) -> KVCache:
            cache = KVCache.whole(model.config, model.ops, batch=step.batch, max_len=step.context)
            for layer in model.config.layers:
                if layer.owns_kv:
                    cache.pages(layer).k.normal_()
                    cache.pages(layer).v.normal_()
            return cache

        return cache_of

    def capture(self, chosen: Chosen) -> Graph:
        """The step with `chosen` in place of what the launcher would run. Raises LaunchError, ConfigRefused."""
        self._launcher.chosen = chosen
        stream = torch.cuda.Stream()
        with torch.inference_mode():
            if self._pool is None or not self._warm.issuperset(chosen.values()):
                # workspaces and arrays of addresses are made before anything is captured
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    self._run()
                    self._run()
                torch.cuda.synchronize()
                self._warm.update(chosen.values())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                self._run()
        self._pool = graph.pool()
        return Graph(graph, chosen)

    def compare(self, base: Graph, other: Graph, *, pairs: int = 12) -> Ratio:
        """How long `other` takes, over what `base` takes: replayed in turn, in the order base other other base."""
        repeat = self._repeat(base)
        self._sampled(other, repeat)
        timed: tuple[list[_Events], list[_Events]] = [], []
        for i in range(pairs):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                start, end = _events()
                start.record()
                for _ in range(repeat):
                    (base, other)[which].replay()
                end.record()
                timed[which].append((start, end))
        torch.cuda.synchronize()
        base_us, us = ([s.elapsed_time(e) * 1e3 / repeat for s, e in samples] for samples in timed)
        ratios = sorted(o / b for b, o in zip(base_us, us, strict=True))
        return Ratio(
            statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4],
            statistics.median(us), statistics.median(base_us),
        )  # fmt: skip

    def _repeat(self, graph: Graph) -> int:
        self._sampled(graph, 1)
        return max(1, min(64, round(1e3 * LEAST_MS / self._sampled(graph, 1))))

    def _sampled(self, graph: Graph, repeat: int) -> float:
        """Microseconds of a replay."""
        start, end = _events()
        start.record()
        for _ in range(repeat):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / repeat


_Events = tuple[torch.cuda.Event, torch.cuda.Event]


def _events() -> _Events:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
