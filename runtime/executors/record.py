"""Calls written down: what a model asks of the kernels, found by running its real code on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from kerngen.arch import Target
from kerngen.runtime.executors import Say, at_once
from kerngen.templates.call import Call

R = TypeVar("R")


class Record:
    """See `kerngen.runtime.executors.Executor`. note: told the kernel, problem and place of each call, in order.
    target: what the kernels would run on; without it what every arch can run is asked for.

    Tensors live on the meta device, so results have shapes and no values, and a whole model takes no memory.
    """

    name = "record"
    supports_graphs = False
    device = torch.device("meta")

    def __init__(
        self,
        note: Callable[[str, Any, str], None],
        note_outside: Callable[[str], None],
        target: Target | None = None,
    ) -> None:
        self._note, self._note_outside = note, note_outside
        self._known: dict[Hashable, tuple[list[tuple[str, Any, str]], Any]] = {}
        self.target: Target | None = target

    def run(self, call: Call[R], where: str) -> R:
        if call.problem is not None:
            self._note(call.kernel, call.problem, where)
        return call.result

    def once(self, key: Hashable, make: Callable[[], R]) -> R:
        """What `make` returns. Where it was made with an equal key before, nothing runs: its calls are told again, in
        order, and the same tensors are returned, which hold no values.
        """
        if key in self._known:
            calls, result = self._known[key]
            for call in calls:
                self._note(*call)
            return result
        calls, note = [], self._note

        def noted(*call: Any) -> None:
            calls.append(call)
            note(*call)

        self._note = noted
        try:
            made = make()
        finally:
            self._note = note
        self._known[key] = calls, made
        return made

    def forget(self) -> None:
        """What `once` knows is of one step."""
        self._known.clear()

    def beside(self, work: Callable[[], R]) -> Callable[[], R]:
        return at_once(work)

    def outside(self, name: str) -> None:
        self._note_outside(name)

    def sources(self) -> dict[str, int]:
        return {}

    def build(self, asked: Iterable[tuple[str, Any]], say: Say) -> None:
        """Nothing is compiled."""
