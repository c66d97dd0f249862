"""Linears of encoders, some of which bound what they take and what they give.

Source: Gemma4ClippableLinear of transformers' modeling_gemma4.py, whose linears each have four bounds of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.errors import CheckpointError

NO_BOUNDS = (-math.inf, math.inf)
Interval = tuple[float, float]


class TowerSource(Protocol):
    """The weights of what encodes images and sound, by the names that a checkpoint has, without its `model.`."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A float tensor in the activations' dtype, or in `dtype`."""

    def bound(self, name: str) -> float:
        """A number that may be infinite, and is not NaN."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and the highest value of each of several tensors, or parts of one, in their dtype or infinite.

    table: the same for kernels, [tensors, 2] in fp32.
    """

    each: tuple[Interval, ...]
    table: Tensor

    @staticmethod
    def of(each: Sequence[Interval], like: Tensor) -> Bounds | None:
        """On the device of `like`; None where nothing is bounded."""
        return None if all(interval == NO_BOUNDS for interval in each) else Bounds.table_of(each, like)

    @staticmethod
    def table_of(each: Sequence[Interval], like: Tensor) -> Bounds:
        """As `of`, where nothing is bounded too."""
        return Bounds(tuple(each), torch.tensor(each, dtype=torch.float32, device=like.device))


def within(interval: Interval, largest: float) -> Interval:
    """What clamps as `interval` and then -largest to largest do."""
    low, high = (max(-largest, min(bound, largest)) for bound in interval)
    return low, high


def clamp_(x: Tensor, interval: Interval) -> Tensor:
    """x, clamped in place."""
    return x if interval == NO_BOUNDS else x.clamp_(*interval)


def clamped(x: Tensor, interval: Interval) -> Tensor:
    """As clamp_, of a tensor that others read too."""
    return x if interval == NO_BOUNDS else x.clamp(*interval)


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """Linears with one input, one under the other: clamp(clamp(x; inputs) W^T; outputs).

    weight [out, in]. inputs: (rows of W, lowest, highest) of each linear, or once for all where they take the same.
    outputs: of each linear. All bounds are numbers of the weight's dtype, or infinite: those bound nothing.
    """

    weight: Tensor
    inputs: tuple[tuple[int, float, float], ...]
    outputs: tuple[tuple[int, float, float], ...]

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in]. Returns [..., out]."""
        weights = self.weight.split([rows for rows, _, _ in self.inputs])
        parts = [
            F.linear(clamped(x, (low, high)), weight)
            for weight, (_, low, high) in zip(weights, self.inputs, strict=True)
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if len(intervals := set(self.gives)) == 1:
            return clamp_(y, intervals.pop())
        for part, interval in zip(y.split([rows for rows, _, _ in self.outputs], -1), self.gives, strict=True):
            clamp_(part, interval)
        return y

    @property
    def takes(self) -> Interval:
        """What bounds the input where it is the same for all linears; else each bounds its own."""
        return self.inputs[0][1:] if len(self.inputs) == 1 else NO_BOUNDS

    @property
    def gives(self) -> tuple[Interval, ...]:
        """What bounds the outputs of each linear."""
        return tuple((low, high) for _, low, high in self.outputs)

    def between(self) -> ClippedLinear:
        """The same where others clamp to `takes` and `gives`."""
        whole = ((len(self.weight), *NO_BOUNDS),)
        return replace(self, inputs=whole if len(self.inputs) == 1 else self.inputs, outputs=whole)

    def before(self) -> ClippedLinear:
        """The same where others clamp to `gives`."""
        return replace(self, outputs=((len(self.weight), *NO_BOUNDS),))


def clipped_linear(
    source: TowerSource, modules: Sequence[tuple[str, int]], in_features: int, *, clips: bool
) -> ClippedLinear:
    """The linears called `modules`, with their out_features, as one. clips: the checkpoint holds bounds of each.

    Raises CheckpointError for a lower bound above the upper one.
    """
    matrices = [source.tensor(f"{module}.linear.weight", rows, in_features) for module, rows in modules]
    weight = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    if not clips:
        free = tuple((rows, *NO_BOUNDS) for _, rows in modules)
        return ClippedLinear(weight, ((len(weight), *NO_BOUNDS),), free)
    inputs = [(rows, *_bounds(source, module, "input", weight.dtype)) for module, rows in modules]
    outputs = [(rows, *_bounds(source, module, "output", weight.dtype)) for module, rows in modules]
    if len({(low, high) for _, low, high in inputs}) == 1:
        inputs = [(len(weight), *inputs[0][1:])]
    return ClippedLinear(weight, tuple(inputs), tuple(outputs))


def _bounds(source: TowerSource, module: str, which: str, dtype: torch.dtype) -> Interval:
    """Of a linear's input or output, the nearest in `dtype`. What that cannot hold is infinite: it bounds nothing."""
    low, high = (source.bound(f"{module}.{which}_{end}") for end in ("min", "max"))
    if low > high:
        raise CheckpointError(f"{module}.{which}_min is {low:g}, above {which}_max {high:g}")
    largest = torch.finfo(dtype).max
    low, high = (low if low >= -largest else -math.inf), (high if high <= largest else math.inf)
    low, high = torch.tensor((low, high), dtype=dtype).tolist()
    return low, high
