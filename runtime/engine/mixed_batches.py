"""Mixed batches: decode tokens ride in the forward that prefills other sequences (chunked prefill).

With two forwards, the gap between two tokens is the decode step plus the chunk, and both read the weights. With one it
is little more than the chunk. A graph is captured for a total number of tokens and a decode batch; the chunk has the
rest and is padded as short prefills are (prefill_graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.engine.prefill_graphs import SEQUENCES

MOST_SHARE = 0.5  # of a step's tokens, that decode at most


class Shape(NamedTuple):
    """size: tokens in all; batch: rows that decode; mode: how their tokens are chosen."""

    size: int
    batch: int
    mode: SamplingMode

    @property
    def chunk(self) -> int:
        """Tokens that are prefilled."""
        return self.size - self.batch


@dataclass(frozen=True, slots=True)
class MixedBatchShapes:
    """Shapes that a mixed batch may have. captured: None if forwards run without graphs, in any shape."""

    captured: frozenset[Shape] | None = frozenset()

    @property
    def most_chunks(self) -> int | None:
        """The most chunks of a mixed batch; None for any number."""
        return None if self.captured is None else SEQUENCES - 1

    def least(self, rows: int, mode: SamplingMode) -> Shape | None:
        """The smallest shape in which so many rows decode; None if none fits."""
        if self.captured is None:
            return Shape(rows + 1, rows, mode)
        fitting = (shape for shape in self.captured if shape.batch >= rows and shape.mode == mode)
        return min(fitting, key=lambda shape: (shape.batch, shape.size), default=None)

    def find(self, tokens: int, chunks: int, rows: int, mode: SamplingMode) -> Shape | None:
        """The smallest shape for so many tokens of so many chunks beside so many rows; None if none fits."""
        if self.captured is None:
            return Shape(tokens + rows, rows, mode)
        if chunks >= SEQUENCES or (least := self.least(rows, mode)) is None:
            return None
        fitting = [s for s in self.captured if s.batch == least.batch and s.mode == mode and s.chunk >= tokens]
        return min(fitting, default=None)


ANY_SHAPE = MixedBatchShapes(None)


class MixedBatchGraphs:
    """The captured mixed batches of one engine. A replay returns what Runner.mixed_step does."""

    def __init__(self) -> None:
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self.captured = MixedBatchShapes()

    @staticmethod
    def shapes(sizes: Sequence[int], batches: Sequence[int], modes: Sequence[SamplingMode]) -> list[Shape]:
        """Shapes worth capturing, of these sizes: every third batch size, which also serves those below it."""
        some = batches[::-3][::-1]
        return [Shape(*s) for s in product(sizes, some, modes) if s[1] <= MOST_SHARE * s[0]]

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._captured

    def keep(self, shape: Shape, captured: tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]) -> None:
        self._captured[shape] = captured
        self.captured = MixedBatchShapes(frozenset(self._captured))

    def replay(self, shape: Shape) -> tuple[Tensor, Tensor]:
        graph, results = self._captured[shape]
        graph.replay()
        return results
