"""Calls on the GPU: the winners' cubins, launched on torch's stream."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from kerngen.arch import Target
from kerngen.errors import DeviceError
from kerngen.runtime.executors import Say, run_inline
from kerngen.runtime.executors.collectives import Collectives, Distributed, OneRank
from kerngen.runtime.executors.peer_memory import PeerMemory
from kerngen.runtime.launcher import Launcher, shares_sms
from kerngen.runtime.world import most_rows
from kerngen.system.cores import usable_cores
from kerngen.templates import find_kernel
from kerngen.templates.call import Call
from kerngen.templates.decode_layers.spec import PEER_ROWS
from kerngen.templates.exchange_best.spec import POSTED
from kerngen.templates.kernel import Kernel
from kerngen.templates.values import Peers

R = TypeVar("R")

# By GPU, whose kernels' blocks may wait for each other without being started together.
_alone: WeakValueDictionary[int, Launch] = WeakValueDictionary()
_alone_lock = Lock()


class Launch:
    """See `kerngen.runtime.executors.Executor`. launcher: of the GPU whose tensors the calls hold.

    in_forwards: the calls are those of forwards that begin with `embed`, so that kernels may read ahead. An executor's
    forwards run one after the other, on one stream and what may `overlap` with it: those of the first such executor on
    a GPU are alone there, in the sense of Function.run, unless other processes share its SMs. collectives: of this
    rank; None for a world of one.
    """

    name = "cuda"
    supports_graphs = True

    def __init__(
        self, launcher: Launcher, *, in_forwards: bool = False, collectives: Collectives | None = None
    ) -> None:
        self.collectives: Collectives = collectives or OneRank()
        self.peers: Mapping[int, Peers] = {}
        self.layer_peers: Mapping[int, Peers] = {}
        self._agreed: dict[tuple[str, Any], bool] = {}  # of ranks' fused kernels
        self.launcher = launcher
        self._in_forwards = in_forwards
        with _alone_lock:
            self.alone = in_forwards and not shares_sms() and _alone.setdefault(launcher.index, self) is self
        self.device = torch.device("cuda", launcher.index)
        self.target: Target | None = launcher.target
        self._aside: torch.cuda.Stream | None = None

    def share_memory(self, hidden: int) -> None:
        """Have rows of `hidden` elements and choices of tokens exchanged through memory that the ranks' GPUs share, on
        all ranks or on none: where one does not reach another's, NCCL serves, and a warning says why. Nothing in a
        world of one.
        """
        ranks = self.collectives
        if not isinstance(ranks, Distributed) or hidden in self.peers:
            return

        def shared(width: int, max_rows: int) -> Peers:
            memory = PeerMemory(ranks.world, ranks.gather_bytes, hidden=width, max_rows=max_rows, device=self.device)
            ranks.when_given_up.append(memory.abort)
            return memory.peers

        try:
            rows, layers = shared(hidden, most_rows(hidden)), shared(hidden, PEER_ROWS)
            choices = self.peers.get(POSTED) or shared(POSTED, most_rows(POSTED))
        except DeviceError as e:
            warnings.warn(f"{e.message}; {e.hint}", stacklevel=2)
            return
        self.peers = {**self.peers, hidden: rows, POSTED: choices}
        self.layer_peers = {**self.layer_peers, hidden: layers}

    def run(self, call: Call[R], where: str) -> R:
        if call.problem is not None:
            self.launcher.launch(call, in_forward=self._in_forwards, alone=self.alone)
        return call.result

    def fuses(self, call: Call[Any], where: str) -> bool:
        """As what is chosen on this GPU says: a row of the tuning databases, or the default configuration. Of
        a kernel that posts partial sums to other ranks they must have chosen the same on all: asked once a problem.
        """
        if call.problem is None:
            return False
        kernel = find_kernel(call.kernel)
        fused = self.launcher.fuses(kernel, call.problem)
        if getattr(call.problem, "ranks", 1) == 1 or not isinstance(self.collectives, Distributed):
            return fused
        asked = call.kernel, call.problem
        if asked not in self._agreed:
            mine = self._cut_of(kernel, call.problem).encode() if fused else b""
            self._agreed[asked] = fused and set(self.collectives.gather_bytes(mine)) == {mine}
        return self._agreed[asked]

    def _cut_of(self, kernel: Kernel, problem: Any) -> str:
        """What says which blocks make which sums: parts of ranks may differ in size."""
        config, target = self.launcher.choice(kernel, problem).config, self.launcher.target
        return f"{config} by {[launch.grid for launch in kernel.launches(problem, config, target)]}"

    def overlap(self, work: Callable[[], R]) -> Callable[[], R]:
        """In a graph that is being captured a branch of its own: elsewhere the host is what takes the time."""
        if not torch.cuda.is_current_stream_capturing():
            return run_inline(work)
        stream = torch.cuda.current_stream(self.device)
        if self._aside is None:
            self._aside = torch.cuda.Stream(self.device)
        aside = self._aside
        aside.wait_stream(stream)
        try:
            with torch.cuda.stream(aside):
                result = work()
        except BaseException:
            stream.wait_stream(aside)  # a branch that nobody joins would spoil the capture, and hide what went wrong
            raise

        def joined(_keeps: Callable[[], R] = work) -> R:
            # until here nobody else gets the memory of what `work` reads
            stream.wait_stream(aside)
            return result

        return joined

    def outside(self, name: str) -> None:
        """Nothing to do: torch's own kernels run on the same stream."""

    def sources(self) -> dict[str, int]:
        return dict(Counter(function.source for _, _, function in self.launcher.functions).most_common())

    def build(self, groups: Iterable[Iterable[tuple[str, Any]]], say: Say, meanwhile: Callable[[], None]) -> None:
        kernels = ([(find_kernel(name), problem) for name, problem in group] for group in groups)
        self.launcher.build(kernels, max(usable_cores() - 1, 1), say, meanwhile)  # one core is for `meanwhile`
