"""Collectives of a model that is divided among ranks: sum, gather, and best of all ranks.

Each executor has `collectives`, of a world of ranks. A world of one rank gives back what it is given, and costs
nothing. Every rank calls the same collectives in the same order, on tensors of the same shape and dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kerngen.runtime.world import ONE_RANK, World

MOST_GATHERED = 512 << 10  # bytes of a tensor on a GPU that is gathered to be added: latency is what counts there
# torch 2.13 has another name for it, and warns of the old one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(Protocol):
    """Executed in the order of the calls around them. Results are the same on every rank."""

    world: World

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its shape and dtype; floating-point numbers are added in fp32, in the order of
        the ranks, but see Distributed. It may be x itself, which is not to be used otherwise.
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


class Distributed:
    """Collectives by torch.distributed's default group, one process a rank: gloo where tensors lie on the CPU, NCCL
    where they lie on GPUs.

    Sums are made of what all ranks gave, gathered in their order and added in fp32 by one code, so that they are
    bitwise equal on all ranks. On a GPU that moves size - 1 times the tensor to each rank, and takes passes over
    memory: beyond MOST_GATHERED bytes NCCL adds. Those sums are equal on all ranks, too, since each part is added once,
    in one order of ranks, and then copied; but the order is NCCL's, and of more than two ranks partial sums are rounded
    to x's dtype.

    when_given_up: is called, from any thread, once a rank has ended: what waits for it on the device is to go on.
    begun: collectives that were asked for. waiting_since: time.monotonic() when the host began to wait in one; None
    where it does not wait. On a GPU it never does.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.when_given_up: list[Callable[[], None]] = []
        self.begun = 0
        self.waiting_since: float | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.numel() * x.element_size() > MOST_GATHERED:
            self.begun += 1
            dist.all_reduce(x)
            return x
        return added(self._gathered(x))

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(tuple(self._gathered(x)), dim)

    def best_of_ranks(self, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.stack((values.view(torch.int32).long(), indices))  # one gather of both
        bits, ids = self._gathered(pairs).unbind(1)
        return best(bits.to(torch.int32).view(torch.float32), ids)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """All ranks' data, in their order, once all have given theirs."""
        found: list[bytes] = [b""] * self.world.size
        dist.all_gather_object(found, data)
        return found

    def _gathered(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]. As bytes, since backends do not know all dtypes."""
        out = torch.empty((self.world.size, *x.shape), dtype=x.dtype, device=x.device)
        if not x.numel():
            return out
        self.begun += 1
        self.waiting_since = None if x.is_cuda else time.monotonic()
        try:
            _gather(_as_bytes(out), _as_bytes(x.contiguous()))
        finally:
            self.waiting_since = None
        return out


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


def added(parts: Tensor) -> Tensor:
    """The sum over ranks of parts [ranks, ...], of floating-point numbers in fp32 in the order of ranks, in their
    dtype.
    """
    if not parts.is_floating_point():
        return parts.sum(0)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part  # which promotes it: one pass, and an order that no library chooses
    return total.to(parts.dtype)


def best(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """What best_of_ranks gives of all ranks' values and indices, both [ranks, n]."""
    top = values.max(0).values  # NaN where any is
    lowest = indices.masked_fill(values != top, torch.iinfo(torch.int64).max).min(0).values
    return top, _or_none(top, lowest)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _or_none(values: Tensor, indices: Tensor) -> Tensor:
    return torch.where(values.isfinite(), indices, -1)
