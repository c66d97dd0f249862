"""The tracing executor: writes down each call of a live engine, with its tensors, and executes none."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kerngen.runtime.executors import Executor, InOrder
from kerngen.runtime.executors.collectives import Collectives, Noted
from kerngen.templates.call import Call

R = TypeVar("R")


class RunsOnce:
    """Of forwards whose results nobody reads: what has run with an equal key does not run again."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, tuple[dict[str, Any], str]] = {}  # what `once` returned

    def once(self, key: Hashable, make: Callable[[], tuple[Tensor, str]]) -> tuple[Tensor, str]:
        """What `make` returns, or, with a key that was there before, zeros of its tensor's form and nothing run: what
        comes next meets numbers. No tensor is kept: it would have the size of a forward's.
        """
        if (known := self._forms.get(key)) is not None:
            form, place = known
            return torch.empty_strided(**form).zero_(), place
        made, place = make()
        form = {"size": made.shape, "stride": made.stride(), "dtype": made.dtype, "device": made.device}
        self._forms[key] = form, place
        return made, place


class Trace(InOrder):
    """Stands for `of`, another executor. Results are what their memory holds, numbers that stand for tokens or places
    zeros: torch reads at those.

    asked: (kernel, problem), each once, in the order in which they came.
    """

    def __init__(self, of: Executor) -> None:
        self._of = of
        self.name, self.device, self.target, self.supports_graphs = of.name, of.device, of.target, of.supports_graphs
        self.peers, self.layer_peers = of.peers, of.layer_peers
        self.collectives: Collectives = Noted(of.collectives.world, lambda *_: None)
        self.asked: dict[tuple[str, Any], None] = {}
        self.once = RunsOnce().once

    def fuses(self, call: Call[Any], where: str) -> bool:
        return self._of.fuses(call, where)

    def run(self, call: Call[R], where: str) -> R:
        if call.problem is not None:
            self.asked[call.kernel, call.problem] = None
        _clear(call.result)
        return call.result


def _clear(result: Any) -> None:
    if isinstance(result, Tensor):
        if not result.is_floating_point():
            result.zero_()
    elif isinstance(result, (tuple, list)):
        for part in result:
            _clear(part)
