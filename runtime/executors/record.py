"""Calls written down: what a model asks of the kernels, found by running its real code on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch

from kerngen.arch import Target
from kerngen.errors import ProblemError
from kerngen.runtime.executors import InOrder
from kerngen.runtime.executors.collectives import Collectives, Noted
from kerngen.runtime.executors.peer_memory import cheaper_in_two_shots
from kerngen.runtime.selection import default_selector
from kerngen.runtime.world import ONE_RANK, World, most_rows
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.decode_layers.spec import PEER_ROWS
from kerngen.templates.kernel import Kernel
from kerngen.templates.values import Peers

R = TypeVar("R")
_Told = tuple[Callable[..., None], tuple[Any, ...]]


class _Everywhere(Mapping[int, Peers]):
    """Memory that ranks share for rows of any width, as shapes alone."""

    def __init__(self, world: World, rows: Callable[[int], int]) -> None:
        """rows: of memory for rows of a width."""
        self._world, self._rows = world, rows

    def __getitem__(self, hidden: int) -> Peers:
        addresses = torch.empty(self._world.size + 1, dtype=torch.int64, device="meta")
        return Peers(addresses, self._world.rank, self._rows(hidden), cheaper_in_two_shots(self._world.size, hidden))

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Record(InOrder):
    """See `kerngen.runtime.executors.Executor`. note: told the kernel, problem and place of each call, in order.
    target: what the kernels would run on; without it what every arch can run is asked for. world: whose rank it is;
    note_other: told, where a step asks a kernel or those that it replaces, the ones that it does not ask, each once;
    note_collective: told the kind of each collective and the bytes that this rank gives; nothing in a world of one.

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
        world: World = ONE_RANK,
        note_collective: Callable[[str, int], None] = lambda *_: None,
        note_other: Callable[[str, Any, str], None] = lambda *_: None,
    ) -> None:
        self._note, self._note_fallback, self._note_other = note, note_outside, note_other
        self.decide: Callable[[Kernel, Any], bool] | None = None  # see `fuses`; None: the default configurations do
        self.collectives: Collectives = Noted(world, lambda *told: self._tell(note_collective, *told))
        self._known: dict[Hashable, tuple[list[_Told], Any]] = {}
        self._telling: list[_Told] | None = None  # what is told meanwhile, where it is to be told again
        self.target: Target | None = target
        self.peers = _Everywhere(world, most_rows) if world.size > 1 else {}
        self.layer_peers = _Everywhere(world, lambda _: PEER_ROWS) if world.size > 1 else {}

    def run(self, call: Call[R], where: str) -> R:
        if call.problem is not None:
            self._tell(self._note, call.kernel, call.problem, where)
        return call.result

    def fuses(self, call: Call[Any], where: str) -> bool:
        if self.target is None or call.problem is None:
            return False
        kernel = find_kernel(call.kernel)
        decide = self.decide or default_selector(self.target).fuses
        if fused := decide(kernel, call.problem):
            with suppress(ProblemError):  # where no other kernel serves it, there is no other way
                for name, problem in dict.fromkeys(kernel.replaces(call.problem)):
                    self._tell(self._note_other, name, problem, where)
        elif kernel.why_unsupported(call.problem, self.target) is None:
            self._tell(self._note_other, call.kernel, call.problem, where)
        return fused

    def once(self, key: Hashable, make: Callable[[], R]) -> R:
        """What `make` returns. Where it was made with an equal key before, nothing runs: its calls and collectives are
        told again, in order, and the same tensors are returned, which hold no values.
        """
        if key in self._known:
            told, result = self._known[key]
            for note, values in told:
                self._tell(note, *values)
            return result
        outer, told = self._telling, []
        self._telling = told
        try:
            made = make()
        finally:
            self._telling = outer
        if outer is not None:
            outer += told
        self._known[key] = told, made
        return made

    def _tell(self, note: Callable[..., None], *values: Any) -> None:
        if self._telling is not None:
            self._telling.append((note, values))
        note(*values)

    def forget(self) -> None:
        """What `once` knows is of one step."""
        self._known.clear()

    def outside(self, name: str) -> None:
        self._note_fallback(name)
