"""On the GPU: how long does a step of a model take with these configurations, against those?

The model's own code runs the step, as in `kerngen run`, on generated weights and a cache of random keys, and is
captured as one CUDA graph; configurations are exchanged by capturing it anew with other functions. Two graphs are
replayed in turn, and the ratio of neighbours' times is what counts: boards differ by 2 % and clocks drift, a ratio
does neither.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

from kerngen.runtime.cache import KVCache
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.executors.launch import Launch
from kerngen.runtime.launcher import Function, Launcher, shares_sms
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel
from kerngen.templates.common.attention.kv_formats_torch import randomize
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.kernel import Kernel
from kerngen.workload.forwards import Forwards
from kerngen.workload.generated import generated_model
from kerngen.workload.steps import Fuses, Ratio, Step, launch_counts
from kerngen.workload.workload import Model

LEAST_MS = 3.0  # of a sample: shorter steps are replayed several times in one

Called = tuple[str, Any]  # a kernel's name, and the problem that the step calls it with
Chosen = Mapping[Called, Function]


class Exchanging(Launcher):
    """A launcher that runs `chosen` where it has something, and default configurations for the rest. decide: where
    `chosen` has nothing, whether one kernel runs or those that it replaces; None: the default configurations say so.
    """

    def __init__(self, *, index: int) -> None:
        super().__init__(index=index)
        self.chosen: Chosen = {}
        self.decide: Fuses | None = None

    def fuses(self, kernel: Kernel, problem: Any) -> bool:
        if (found := self.chosen.get((kernel.name, problem))) is not None:
            return bool(found.config.fused)
        return (self.decide or super().fuses)(kernel, problem)

    def function(self, kernel: Kernel, problem: Any) -> Function:
        found = self.chosen.get((kernel.name, problem))
        return super().function(kernel, problem) if found is None else found


class Graph:
    """A captured step. It holds what it launches."""

    def __init__(self, graph: torch.cuda.CUDAGraph, chosen: Chosen) -> None:
        self._graph, self._chosen = graph, dict(chosen)

    def replay(self) -> None:
        self._graph.replay()


class Stage:
    """A model with generated weights on the current GPU, for any number of steps of it. Made from `seed`. collectives:
    of the rank whose part `model` is; None for a whole one.
    """

    def __init__(self, model: Model, *, seed: int = 0, collectives: Collectives | None = None) -> None:
        self.model = model
        self.launcher = Exchanging(index=torch.cuda.current_device())
        self.target = self.launcher.target
        executor = self.executor = Launch(self.launcher, in_forwards=True, collectives=collectives)
        executor.alone = not shares_sms()  # graphs are replayed on one stream, whichever stage they are of
        ops = KernelOps(executor, TORCH_DTYPE[self.target.arch.dtype])
        with torch.inference_mode():
            self.made, self.drafter = generated_model(model.name, model.target, model.drafter, ops, seed)
        self.pool: Any = None  # of memory that its graphs share


class StepGraph:
    """`step` of the model on `stage`, whose keys are random.

    Raises UsageError for a step that the model cannot take.
    """

    def __init__(self, stage: Stage, step: Step) -> None:
        self.stage, self.step = stage, step
        self._density: torch.Tensor | None = None  # of its cache
        with torch.inference_mode():
            self._run, _ = Forwards(stage.made, stage.drafter, self._cache).prepare(step)
        self._warm: WeakSet[Function] = WeakSet()

    def _cache(self, step: Step) -> KVCache:
        model = self.stage.made
        last = model.config.window + max(step.chunk, step.q_len)
        of_drafter = () if self.stage.drafter is None else self.stage.drafter.policy.cache_layers
        cache = KVCache.whole(model.config, model.ops, batch=step.batch, max_len=step.context, last=last,
                              drafter_layers=of_drafter)  # fmt: skip
        for layer in (*model.config.layers, *of_drafter):
            if layer.owns_kv:
                randomize(cache.pages(layer))
                if (means := cache.means(layer)) is not None:
                    means.normal_(std=1 / 5)  # about that of a mean of 32 such keys
        self._density = cache.density
        return cache

    @property
    def density(self) -> dict[int, float]:
        """Of each layer whose prompts choose the keys that they read: the share of tiles that they have read; of random
        keys. Waits for the device.
        """
        counted = [] if self._density is None else self._density.tolist()
        return {layer: kept / of_all for layer, (kept, of_all) in enumerate(counted) if of_all}

    @property
    def calls(self) -> dict[Called, int]:
        """(kernel, problem) -> launches in the step by default configurations."""
        return self.calls_by(default_selector(self.stage.target).fuses)

    def calls_by(self, fuses: Fuses) -> dict[Called, int]:
        """The same where `fuses` says which of them are one kernel in place of several."""
        return launch_counts(self.stage.model, self.step, self.stage.target.arch, fuses)

    def chosen_by(self, launcher: Launcher) -> Chosen:
        """What `launcher` would run for each call that it would make. Raises ConfigRefused, TuningMiss."""
        calls = self.calls_by(launcher.fuses)
        return {(kernel, problem): launcher.function(find_kernel(kernel), problem) for kernel, problem in calls}

    def capture(self, chosen: Chosen, fuses: Fuses | None = None) -> Graph:
        """The step with `chosen` in place of what the launcher would run. Of a kernel that replaces several and is not
        in `chosen` `fuses` says whether it is asked; None: its default configuration does. Raises LaunchError,
        ConfigRefused.
        """
        self.stage.launcher.chosen, self.stage.launcher.decide = chosen, fuses
        stream = torch.cuda.Stream()
        with torch.inference_mode():
            functions = self.chosen_by(self.stage.launcher).values()
            if not self._warm.issuperset(functions):
                # workspaces and arrays of addresses are made before anything is captured
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    self._run()
                    self._run()
                torch.cuda.synchronize()
                self._warm.update(functions)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.stage.pool, stream=stream):
                self._run()
        self.stage.pool = graph.pool()
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
        quartiles = ratios[-1 - len(ratios) // 4] - ratios[len(ratios) // 4]
        spread = 1.253 * quartiles / 1.349 / len(ratios) ** 0.5  # as if they were normally distributed
        return Ratio(statistics.median(ratios), spread, statistics.median(base_us))

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
