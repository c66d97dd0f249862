"""Executors of a `Call`: four behind one interface.

`Launch` runs it on the GPU. `Record` writes down what was asked, on tensors without storage: a model's workload is the
record of its forward. `Trace` writes down what an engine that is at hand would ask. `Reference` answers it on the CPU
with the folder's fp32 reference, so that everything above runs and is tested where there is no GPU.

collectives.py is what the ranks of a divided model ask of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kerngen.arch import Target
from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel
from kerngen.templates.call import Call

R = TypeVar("R")
Say = Callable[[int, int, str], None]  # done, of all, what


class Peers(Protocol):
    """The memory of a divided model's other ranks, where this rank's kernels reach it."""

    def takes(self, num_tokens: int, hidden: int, dtype: torch.dtype) -> bool:
        """Whether so many rows are exchanged in one launch; of others the sum is a collective."""

    def exchange_norm(
        self, residual: Tensor, h: Tensor, post_weight: Tensor, layer_scalar: Tensor | None, next_weight: Tensor,
        eps: float,
    ) -> Call[Tensor]:  # fmt: skip
        """add_norm's call (templates/add_norm/op.py) with the sum of h over the ranks in place of h."""


class Executor(Protocol):
    """Executes calls one after the other, but for what is said to go `overlap` others, on tensors of `device`."""

    name: str  # as `kerngen run` says it
    device: torch.device
    target: Target | None  # whose kernels are called; None for those that every arch has
    supports_graphs: bool  # calls may be captured in a CUDA graph
    collectives: Collectives  # what this rank computes with the others of a divided model
    peers: Peers | None  # None where kernels see this rank's memory alone

    def run(self, call: Call[R], where: str) -> R:
        """Execute `call` and return its result. A call with nothing to compute does nothing.

        where: its place in the model ("qkv (sliding)"), for records and profiles.
        """

    def fuses(self, call: Call[Any], where: str) -> bool:
        """Whether to run `call`, of a kernel that replaces several; else the caller asks those. where: as in `run`."""

    def overlap(self, work: Callable[[], R]) -> Callable[[], R]:
        """Begins `work`, which waits for what was run before, while what is run next need not wait for it. The function
        that is returned gives its result: what is run after that waits for it. It is called in any case, also where
        something fails meanwhile. Of `work` and of what is run until then one alone may launch kernels whose blocks
        wait for each other: two half-resident grids would wait for ever.
        """

    def outside(self, name: str) -> None:
        """Told that the model computes `name` (of `runtime.fallbacks.FALLBACKS`) without a kernel of ours."""

    def sources(self) -> dict[str, int]:
        """Who chose the configurations that ran so far ("user: exact device (measured)"), and of how many kernels."""

    def build(self, asked: Iterable[tuple[str, Any]], say: Say) -> None:
        """Have what serves these (kernel, problem) compiled before it is asked for, where anything is compiled."""


def run_inline(work: Callable[[], R]) -> Callable[[], R]:
    """Executor.overlap where calls are executed one after the other."""
    result = work()
    return lambda: result


class InOrder:
    """What executors share that take calls one after the other and compile nothing."""

    target: Target | None
    peers: Peers | None = None

    def fuses(self, call: Call[Any], where: str) -> bool:
        """As the default configuration on `target` says."""
        if self.target is None or call.problem is None:
            return False
        return default_selector(self.target).fuses(find_kernel(call.kernel), call.problem)

    def overlap(self, work: Callable[[], R]) -> Callable[[], R]:
        return run_inline(work)

    def outside(self, name: str) -> None:
        """Nothing to do: torch computes it here too."""

    def sources(self) -> dict[str, int]:
        return {}

    def build(self, asked: Iterable[tuple[str, Any]], say: Say) -> None:
        """Nothing is compiled."""
