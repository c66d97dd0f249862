"""Executors of a `Call`: four behind one interface.

`Launch` runs it on the GPU. `Record` writes down what was asked, on tensors without storage: a model's workload is the
record of its forward. `Trace` writes down what an engine that is at hand would ask. `Reference` answers it on the CPU
with the folder's fp32 reference, so that everything above runs and is tested where there is no GPU.

collectives.py is what the ranks of a divided model ask of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from kerngen.arch import Target
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.values import Peers

R = TypeVar("R")
Say = Callable[[int, int, str], None]  # done, of all, what


class Executor(Protocol):
    """Executes calls one after the other, but for what is said to go `overlap` others, on tensors of `device`."""

    name: str  # as `kerngen run` says it
    device: torch.device
    target: Target | None  # whose kernels are called; None for those that every arch has
    supports_graphs: bool  # calls may be captured in a CUDA graph
    collectives: Collectives  # what this rank computes with the others of a divided model
    peers: Mapping[int, Peers]  # by the width of rows that it is for, memory that kernels share with the other ranks
    layer_peers: Mapping[int, Peers]  # the same, of PEER_ROWS rows, for decode_layers alone

    def run(self, call: Call[R], where: str) -> R:
        """Execute `call` and return its result. A call with nothing to compute does nothing.

        where: its place in the model ("qkv (sliding)"), for records and profiles.
        """

    def fuses(self, call: Call[Any], where: str) -> bool:
        """Whether to run `call`, of a kernel that replaces several; else the caller asks those: all ranks the same.
        where: as in `run`.
        """

    def overlap(self, work: Callable[[], R]) -> Callable[[], R]:
        """Begins `work`, which waits for what was run before, while what is run next need not wait for it. The function
        that is returned gives its result: what is run after that waits for it. It is called in any case, also where
        something fails meanwhile. Of `work` and of what is run until then one alone may launch kernels whose blocks
        wait for each other: two half-resident grids would wait for ever.
        """

    def share_memory(self, hidden: int) -> None:
        """Have `peers` and `layer_peers` for rows of `hidden` elements, and `peers` for what exchange_best posts: on
        all ranks or on none, where their memory is within reach.
        """

    def outside(self, name: str) -> None:
        """Told that the model computes `name` (of `runtime.fallbacks.FALLBACKS`) without a kernel of ours."""

    def sources(self) -> dict[str, int]:
        """Who chose the configurations that ran so far ("user: exact device (measured)"), and of how many kernels."""

    def build(self, groups: Iterable[Iterable[tuple[str, Any]]], say: Say, meanwhile: Callable[[], None]) -> None:
        """Have what serves these (kernel, problem) compiled before it is asked for, where anything is compiled: the
        first group before `meanwhile` is called, all when this returns. say: done, of all, what.
        """


def run_inline(work: Callable[[], R]) -> Callable[[], R]:
    """Executor.overlap where calls are executed one after the other."""
    result = work()
    return lambda: result


class InOrder:
    """What executors share that take calls one after the other and compile nothing."""

    target: Target | None
    peers: Mapping[int, Peers] = MappingProxyType({})
    layer_peers: Mapping[int, Peers] = MappingProxyType({})

    def fuses(self, call: Call[Any], where: str) -> bool:
        """As the default configuration on `target` says."""
        if self.target is None or call.problem is None:
            return False
        return default_selector(self.target).fuses(find_kernel(call.kernel), call.problem)

    def overlap(self, work: Callable[[], R]) -> Callable[[], R]:
        return run_inline(work)

    def share_memory(self, hidden: int) -> None:
        """Nothing to do: no kernel reaches another rank's memory."""

    def outside(self, name: str) -> None:
        """Nothing to do: torch computes it here too."""

    def sources(self) -> dict[str, int]:
        return {}

    def build(self, groups: Iterable[Iterable[tuple[str, Any]]], say: Say, meanwhile: Callable[[], None]) -> None:
        """Nothing is compiled, and no group is looked at."""
        meanwhile()
