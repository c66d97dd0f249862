"""Collectives of a model that is divided among ranks: sum, gather, and best of all ranks.

Each executor has `collectives`, of a world of ranks. A world of one rank gives back what it is given, and costs
nothing. Every rank calls the same collectives in the same order, on tensors of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kerngen.errors import UsageError


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that a model is divided among, and which of them this is."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} of a world of {self.size}; there are 0 to {self.size - 1}")


ONE_RANK = World()


class Collectives(Protocol):
    """Executed in the order of the calls around them. Results are the same on every rank."""

    world: World

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its shape and dtype; floating-point numbers are added in fp32, in the order of
        the ranks. It may be x itself.
        """

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' x, one behind the other along `dim`."""

    def best_of_ranks(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The largest of all ranks' values [n] fp32 in each row, and its index [n] int64: of equal values the lowest
        index, and -1 where the largest is NaN or infinite, as sampling.likeliest has it. Ranks that hold parts of a
        vocabulary choose a token so, and no logits travel.
        """


class OneRank:
    """Collectives of a world of one."""

    world = ONE_RANK

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def best_of_ranks(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return values, _or_none(values, indices)


class Noted:
    """Collectives that are written down in place of being executed: results have the right shapes and stand for no
    values. note: told the kind ("all_reduce") and the bytes that this rank gives.
    """

    def __init__(self, world: World, note: Callable[[str, int], None]) -> None:
        self.world, self._note = world, note

    def all_reduce(self, x: Tensor) -> Tensor:
        self._given("all_reduce", x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self._given("all_gather", x)
        shape = list(x.shape)
        shape[dim] *= self.world.size
        return x.new_zeros(shape)

    def best_of_ranks(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        self._given("best_of_ranks", values, indices)
        return values, indices

    def _given(self, kind: str, *tensors: Tensor) -> None:
        if self.world.size > 1:
            self._note(kind, sum(t.numel() * t.element_size() for t in tensors))


def _or_none(values: Tensor, indices: Tensor) -> Tensor:
    return torch.where(values.isfinite(), indices, -1)
