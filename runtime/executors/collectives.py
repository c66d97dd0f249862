"""Collectives of a model that is divided among ranks: sum, gather, and best of all ranks.

Each executor has `collectives`, of a world of ranks. A world of one rank gives back what it is given, and costs
nothing. Every rank calls the same collectives in the same order, on tensors of the same shape and dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kerngen.errors import KerngenError, UsageError

PATIENCE_S = 60.0  # that a rank in this process waits for the others


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


class Threads:
    """The ranks of one world as threads of this process: `of(rank)` is what the executor of each is given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        self._disagree = ""  # in what

    def of(self, rank: int) -> Collectives:
        return _Thread(self, World(rank, self.size))

    def stop(self) -> None:
        """No rank goes on, now or later: what one calls that fails, since the others would wait for it."""
        self._barrier.abort()

    def exchange(self, rank: int, kind: str, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """What all ranks give, in their order, once all have given it. Raises KerngenError where a rank has stopped or
        stays away, or asks for something else.
        """
        form = kind, *((tuple(t.shape), t.dtype) for t in tensors)
        self._given[rank] = form, tensors
        try:
            self._barrier.wait(PATIENCE_S)
            given = list(self._given)
            self._barrier.wait(PATIENCE_S)  # until all have looked nobody gives anything new
        except threading.BrokenBarrierError:
            raise KerngenError(self._disagree or f"rank {rank} waits in vain for the others in {kind}") from None
        for other, (asked, _) in enumerate(given):
            if asked != form:
                self._disagree = f"rank {rank} asks for {form} where rank {other} asks for {asked}"
                raise KerngenError(self._disagree)
        return [tensors for _, tensors in given]


class _Thread:
    """Collectives of one rank of `Threads`."""

    def __init__(self, threads: Threads, world: World) -> None:
        self.world, self._threads = world, threads

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = torch.stack([x for (x,) in self._threads.exchange(self.world.rank, "all_reduce", x)])
        return (parts.float() if x.is_floating_point() else parts).sum(0).to(x.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x for (x,) in self._threads.exchange(self.world.rank, f"all_gather({dim})", x)], dim)

    def best_of_ranks(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        given = self._threads.exchange(self.world.rank, "best_of_ranks", values, indices)
        each = torch.stack([v for v, _ in given]), torch.stack([i for _, i in given])  # [ranks, n]
        best = each[0].max(0).values  # NaN where any is
        lowest = each[1].masked_fill(each[0] != best, torch.iinfo(torch.int64).max).min(0).values
        return best, _or_none(best, lowest)


def _or_none(values: Tensor, indices: Tensor) -> Tensor:
    return torch.where(values.isfinite(), indices, -1)
