"""Linears of encoders, some of which bound what they take and what they give.

Source: Gemma4ClippableLinear of transformers' modeling_gemma4.py, whose linears each have four bounds of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.errors import CheckpointError

NO_BOUNDS = (-math.inf, math.inf)


class TowerSource(Protocol):
    """The weights of what encodes images and sound, by the names that a checkpoint has, without its `model.`."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A float tensor in the activations' dtype, or in `dtype`."""

    def bound(self, name: str) -> float:
        """A number that may be infinite, and is not NaN."""


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """Linears with one input, one under the other: clamp(clamp(x; inputs) W^T; outputs).

    weight [out, in]. inputs: (rows of W, lowest, highest) of each linear, or once for all where they take the same.
    outputs: the lowest and the highest [out], None where nothing is bounded.
    """

    weight: Tensor
    inputs: tuple[tuple[int, float, float], ...]
    outputs: tuple[Tensor, Tensor] | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in]. Returns [..., out]."""
        weights = self.weight.split([rows for rows, _, _ in self.inputs])
        parts = [
            F.linear(x if (low, high) == NO_BOUNDS else x.clamp(low, high), weight)
            for weight, (_, low, high) in zip(weights, self.inputs, strict=True)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.outputs is None else y.clamp_(*self.outputs)


def clipped_linear(
    source: TowerSource, modules: Sequence[tuple[str, int]], in_features: int, *, clips: bool
) -> ClippedLinear:
    """The linears called `modules`, with their out_features, as one. clips: the checkpoint holds bounds of each.

    Raises CheckpointError for a lower bound above the upper one.
    """
    matrices = [source.tensor(f"{module}.linear.weight", rows, in_features) for module, rows in modules]
    weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    every_row = sum(rows for _, rows in modules)
    if not clips:
        return ClippedLinear(weight, ((every_row, *NO_BOUNDS),), None)
    inputs = [(rows, *_bounds(source, module, "input", weight.dtype)) for module, rows in modules]
    outputs = [(rows, *_bounds(source, module, "output", weight.dtype)) for module, rows in modules]
    if len({(low, high) for _, low, high in inputs}) == 1:
        inputs = [(every_row, *inputs[0][1:])]
    limits = None
    if any((low, high) != NO_BOUNDS for _, low, high in outputs):
        lowest = [low for rows, low, _ in outputs for _ in range(rows)]
        highest = [high for rows, _, high in outputs for _ in range(rows)]
        limits = weight.new_tensor(lowest), weight.new_tensor(highest)
    return ClippedLinear(weight, tuple(inputs), limits)


def _bounds(source: TowerSource, module: str, which: str, dtype: torch.dtype) -> tuple[float, float]:
    """Of a linear's input or output. What `dtype` cannot hold is infinite: it bounds nothing there."""
    low, high = (source.bound(f"{module}.{which}_{end}") for end in ("min", "max"))
    if low > high:
        raise CheckpointError(f"{module}.{which}_min is {low:g}, above {which}_max {high:g}")
    largest = torch.finfo(dtype).max
    return (low if low >= -largest else -math.inf), (high if high <= largest else math.inf)
