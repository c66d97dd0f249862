"""Forwards of an encoder as CUDA graphs, one of each shape: launching hundreds of short kernels one by one takes the
host longer than the GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

MOST_GRAPHS = 16

Shape = TypeVar("Shape")


class ShapeGraphs(Generic[Shape]):
    """Runs `forward(input, shape)`; a shape that comes again is captured, and replayed from then on.

    Of shapes the MOST_GRAPHS that were used last are kept. All graphs share their memory, as one runs at a time.
    """

    def __init__(self, forward: Callable[[Tensor, Shape], Tensor]) -> None:
        self._forward = forward
        self._seen: OrderedDict[Shape, tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None] = OrderedDict()
        self._memory: Any = None

    def __call__(self, given: Tensor, shape: Shape) -> Tensor:
        """given: the input, on the GPU; of a shape always as large. Returns a tensor that later calls leave alone."""
        if shape not in self._seen:
            self._keep(shape, None)
            return self._forward(given, shape)
        self._seen.move_to_end(shape)
        if (captured := self._seen[shape]) is None:
            self._keep(shape, captured := self._capture(given, shape))
        graph, taken, left = captured
        taken.copy_(given)
        graph.replay()
        return left.clone()

    def _keep(self, shape: Shape, captured: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None) -> None:
        self._seen[shape] = captured
        if len(self._seen) > MOST_GRAPHS:
            _, oldest = self._seen.popitem(last=False)
            if oldest is not None:
                torch.cuda.current_stream().synchronize()  # it may still run
                oldest[0].reset()

    def _capture(self, given: Tensor, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """The graph, where it reads its input, and where it leaves its result."""
        taken = given.clone()
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, such as loading a kernel, is not part of it.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            left = self._forward(taken, shape)
        self._memory = graph.pool()
        return graph, taken, left
