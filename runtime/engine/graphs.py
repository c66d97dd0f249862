"""CUDA graphs that share one pool of memory, since no two of them run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kerngen.runtime.executors.layer_dedup import OneOfEachKind
from kerngen.runtime.executors.trace import RunsOnce

Captured = tuple[torch.cuda.CUDAGraph, Tensor]
Left = TypeVar("Left")


class Graphs:
    def __init__(self, layers: OneOfEachKind) -> None:
        """layers: of what is captured."""
        self._layers = layers
        self._captured: list[torch.cuda.CUDAGraph] = []
        self._memory: Any = None  # the pool

    @property
    def count(self) -> int:
        """That were captured."""
        return len(self._captured)

    def reset(self) -> None:
        """Free all of them: none is replayed again."""
        for graph in self._captured:
            graph.reset()

    def capture(self, run: Callable[[], Left], written: Sequence[Tensor]) -> tuple[torch.cuda.CUDAGraph, Left]:
        """`run` as a graph, and the tensors that a replay leaves its results in. written: what `run` changes that must
        stay as it was; it is run twice before, so that whatever is loaded or chosen at first use is there: one layer of
        each kind does. What that leaves in the cache a replay writes anew.
        """
        saved = [tensor.clone() for tensor in written]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                with self._layers(RunsOnce()):
                    run()
                for tensor, was in zip(written, saved, strict=True):
                    tensor.copy_(was)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = run()
        self._memory = graph.pool()
        self._captured.append(graph)
        return graph, result
