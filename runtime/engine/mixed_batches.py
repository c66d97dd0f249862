"""Steps in which some sequences decode and others are prefilled, as one forward.

Apart, a step's gap is the decode step and the chunk, one after the other, and both read the weights. Together it is
little more than the chunk. A step is captured for a number of tokens in all and a decode batch among them; the chunk
has what is left, and is filled up as short prefills are (prefill_graphs.py).
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
    """size: tokens in all; batch: rows that decode; way: how they choose."""

    size: int
    batch: int
    mode: SamplingMode

    @property
    def chunk(self) -> int:
        """Tokens that are prefilled."""
        return self.size - self.batch


@dataclass(frozen=True, slots=True)
class MixedBatchShapes:
    """The joint steps that there are. captured: None where forwards are handed in as they are, of any shape."""

    captured: frozenset[Shape] | None = frozenset()

    @property
    def most_chunks(self) -> int | None:
        """Chunks of a joint step at most; None for any."""
        return None if self.captured is None else SEQUENCES - 1

    def least(self, rows: int, mode: SamplingMode) -> Shape | None:
        """That so many rows decode in where next to nothing is prefilled, None where none serves."""
        if self.captured is None:
            return Shape(rows + 1, rows, mode)
        fitting = (shape for shape in self.captured if shape.batch >= rows and shape.mode == mode)
        return min(fitting, key=lambda shape: (shape.batch, shape.size), default=None)

    def find(self, tokens: int, chunks: int, rows: int, mode: SamplingMode) -> Shape | None:
        """The least that serves so many tokens of so many chunks beside so many rows, None where nothing does."""
        if self.captured is None:
            return Shape(tokens + rows, rows, mode)
        if chunks >= SEQUENCES or (least := self.least(rows, mode)) is None:
            return None
        fitting = [s for s in self.captured if s.batch == least.batch and s.mode == mode and s.chunk >= tokens]
        return min(fitting, default=None)


ANY_SHAPE = MixedBatchShapes(None)


class MixedBatchGraphs:
    """Those of one engine that are captured; a replay leaves what Runner.joint_step gives."""

    def __init__(self) -> None:
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]] = {}
        self.captured = MixedBatchShapes()

    @staticmethod
    def shapes(sizes: Sequence[int], batches: Sequence[int], modes: Sequence[SamplingMode]) -> list[Shape]:
        """That are worth capturing, of these sizes: every third batch will do for those below it."""
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
