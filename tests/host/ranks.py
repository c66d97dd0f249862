"""Ranks of one world as threads of a process, for what is to give the same divided as whole."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from kerngen.errors import KerngenError
from kerngen.runtime.executors.collectives import Collectives, added, best
from kerngen.runtime.world import World

PATIENCE_S = 60.0  # that a rank waits for the others


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
        return added(torch.stack([x for (x,) in self._threads.exchange(self.world.rank, "all_reduce", x)]))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x for (x,) in self._threads.exchange(self.world.rank, f"all_gather({dim})", x)], dim)

    def best_of_ranks(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        given = self._threads.exchange(self.world.rank, "best_of_ranks", values, indices)
        return best(torch.stack([v for v, _ in given]), torch.stack([i for _, i in given]))
