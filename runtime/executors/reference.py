"""Calls answered by their folders' fp32 references: the whole kernel path on any machine, slow and right."""

from __future__ import annotations

from typing import TypeVar

import torch

from kerngen.arch import Target
from kerngen.runtime.executors import InOrder
from kerngen.runtime.executors.collectives import Collectives, OneRank
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.kernel import spread

R = TypeVar("R")


class Reference(InOrder):
    """See `kerngen.runtime.executors.Executor`. Outputs are rounded to the dtypes of the call's own tensors.

    target: whose calls are answered; without it those that every arch can run. collectives: of this rank; None for a
    world of one.
    """

    name = "reference"
    supports_graphs = False

    def __init__(
        self,
        device: torch.device | str = "cpu",
        target: Target | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.target: Target | None = target
        self.collectives: Collectives = collectives or OneRank()

    def run(self, call: Call[R], where: str) -> R:
        if call.problem is not None:
            kernel = find_kernel(call.kernel)
            kernel.require_arguments(call.arguments)
            given = {shown: value for _, shown, value in spread(call.arguments)}
            for _, shown, value in spread(kernel.reference.expected(call.problem, dict(call.arguments))):
                given[shown].copy_(value.view(given[shown].shape))
        return call.result
