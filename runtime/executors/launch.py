"""Calls on the GPU: the winners' cubins, launched on torch's stream."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import torch

from kerngen.arch import Target
from kerngen.runtime.launcher import Launcher
from kerngen.templates.call import Call

R = TypeVar("R")


class Launch:
    """See `kerngen.runtime.executors.Executor`. launcher: of the GPU whose tensors the calls hold.

    in_forwards: the calls are those of forwards that begin with `embed`, so that kernels may read ahead.
    """

    name = "cuda"
    supports_graphs = True

    def __init__(self, launcher: Launcher, *, in_forwards: bool = False) -> None:
        self.launcher = launcher
        self._in_forwards = in_forwards
        self.device = torch.device("cuda", launcher.index)
        self.target: Target | None = launcher.target

    def run(self, call: Call[R], where: str) -> R:
        if call.problem is not None:
            self.launcher.launch(call, in_forward=self._in_forwards)
        return call.result

    def outside(self, name: str) -> None:
        """Nothing to do: torch's own kernels run on the same stream."""

    def sources(self) -> dict[str, int]:
        return dict(Counter(function.source for _, _, function in self.launcher.functions).most_common())
