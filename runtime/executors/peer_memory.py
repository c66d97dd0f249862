"""Memory that the ranks of one host see of each other: what `exchange_norm` and `exchange_best` post their words to.

Each rank is a process with a GPU. It allocates a workspace, and opens its peers' by CUDA IPC, with peer access. No more
is needed: no multicast, no symmetric-memory library, no handle that is exchanged later. Where GPUs do not see each
other's memory (another host, MIG, a virtual machine without peer access) it is refused, and NCCL serves.
"""

from __future__ import annotations

import ctypes
import json
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kerngen.errors import DeviceError, KerngenError
from kerngen.runtime.launcher import _check, _driver, gpu_uuid, probe_device
from kerngen.runtime.world import World
from kerngen.templates.exchange_norm.spec import MOST_RANKS, exchange_bytes
from kerngen.templates.values import Peers

# bytes of this rank -> those of all ranks, in their order, once all have given theirs
Gather = Callable[[bytes], list[bytes]]
GRANULE = 2 << 20  # an IPC handle is of whole pages of the driver: a smaller allocation may share one
WORD = 16
NCCL_SERVES = "NCCL serves: exchanges go through torch.distributed, at some 15 us more each"
# Predicted, not measured: what a second trip between the GPUs takes, and what a rank sends to its peers by NVLink.
TRIP_US, LINK_GBPS = 2.0, 300.0


class Memory(Protocol):
    """The GPU's memory as peers see it. Addresses are ints. Every method raises KerngenError."""

    board: str  # name and identity, for messages

    def allocate(self, num_bytes: int) -> int:
        """Zeroed, outside of every pool."""

    def free(self, address: int) -> None: ...

    def handle(self, address: int) -> bytes:
        """By which another process opens the allocation."""

    def open(self, handle: bytes) -> int: ...

    def close(self, address: int) -> None: ...

    def write(self, address: int, data: bytes) -> None:
        """Returns when it is done, as `read`."""

    def read(self, address: int, num_bytes: int) -> bytes: ...

    def host_word(self) -> tuple[int, int]:
        """(host address, device address) of 16 zero bytes in the host's memory, which kernels read."""

    def free_host_word(self, address: int) -> None: ...


class CudaMemory:
    """`Memory` of torch's current GPU, by the driver."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes torch's primary context current
        self.board = f"{probe_device().name} {gpu_uuid()}"

    def allocate(self, num_bytes: int) -> int:
        size = -(-num_bytes // GRANULE) * GRANULE
        address = int(_check(_driver().cuMemAlloc(size), f"cuMemAlloc of {size:,} B"))
        _check(_driver().cuMemsetD8(address, 0, size), "cuMemsetD8")
        _check(_driver().cuCtxSynchronize(), "cuCtxSynchronize")
        return address

    def free(self, address: int) -> None:
        _check(_driver().cuMemFree(address), "cuMemFree")

    def handle(self, address: int) -> bytes:
        return ctypes.string_at(_check(_driver().cuIpcGetMemHandle(address), "cuIpcGetMemHandle").getPtr(), 64)

    def open(self, handle: bytes) -> int:
        driver = _driver()
        given = driver.CUipcMemHandle()
        ctypes.memmove(given.getPtr(), handle, 64)
        flags = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(_check(driver.cuIpcOpenMemHandle(given, flags), "cuIpcOpenMemHandle"))

    def close(self, address: int) -> None:
        _check(_driver().cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")

    def write(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        _check(_driver().cuMemcpyHtoD(address, ctypes.addressof(source), len(data)), "a copy to the GPU")
        _check(_driver().cuCtxSynchronize(), "cuCtxSynchronize")

    def read(self, address: int, num_bytes: int) -> bytes:
        into = ctypes.create_string_buffer(num_bytes)
        _check(_driver().cuMemcpyDtoH(ctypes.addressof(into), address, num_bytes), "a copy from the GPU")
        return into.raw

    def host_word(self) -> tuple[int, int]:
        driver = _driver()
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(_check(driver.cuMemHostAlloc(WORD, flags), "cuMemHostAlloc"))
        ctypes.memset(address, 0, WORD)
        return address, int(_check(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))

    def free_host_word(self, address: int) -> None:
        _check(_driver().cuMemFreeHost(address), "cuMemFreeHost")


class PeerMemory:
    """This rank's workspace for rows of one width, and its peers'. `peers` is what the ops take.

    Every rank makes one with the same hidden, max_rows and two_shot_from, in the same order among what it gathers.
    """

    def __init__(
        self,
        world: World,
        gather: Gather,
        *,
        hidden: int,
        max_rows: int,
        two_shot_from: int | None = None,
        memory: Memory | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        """hidden: 16-bit elements of a row. max_rows: of an exchange; a token takes one, with experts two.
        two_shot_from: see Peers; None for what the sizes say. memory: of torch's current GPU where none is given.

        Raises DeviceError on every rank, with the boards of the two, where one rank cannot reach another's memory.
        """
        if not 2 <= world.size <= MOST_RANKS:
            raise DeviceError(f"{world.size} ranks; memory is shared by 2 to {MOST_RANKS}", hint=NCCL_SERVES)
        self.world, self._gather = world, gather
        self._own = self._host = 0
        self._opened: dict[int, int] = {}
        if two_shot_from is None:
            two_shot_from = cheaper_in_two_shots(world.size, hidden)
        shape = [hidden, max_rows, two_shot_from]
        self._slot, self._bytes = 2 * hidden * max_rows, exchange_bytes(world.size, max_rows, hidden)
        try:
            self._memory = self._each("", lambda: memory or CudaMemory())
            told = self._told(shape)
            self._each("peers", lambda: self._require_alike(told, shape))
            self._each("open", lambda: self._open(told))
            self._each("write", self._write_to_peers)
            self._each("read", lambda: self._require_written(told))
            self._each("zero", lambda: self._memory.write(self._own, bytes(self._bytes)))
            addresses = [self._own if r == world.rank else self._opened[r] for r in range(world.size)]
        except BaseException:
            self._release()
            raise
        given = torch.tensor([*addresses, self._abort_on_gpu], dtype=torch.int64, device=device)
        self.peers = Peers(given, world.rank, max_rows, two_shot_from)

    def abort(self) -> None:
        """Exchanges that are under way end within a millisecond, and those behind them: what has not arrived is NaN.

        For when a rank has died: from any thread, at any time before `close`. The memory is of no use afterwards.
        """
        if self._host:
            ctypes.c_uint32.from_address(self._host).value = 1

    def close(self, together: bool = True) -> None:
        """Gives the memory back. No launch of this rank or of a peer may be under way. together: waits until all ranks
        have closed what they opened; False where a rank has died.
        """
        for rank in list(self._opened):
            self._memory.close(self._opened.pop(rank))
        if together and self._own:
            self._gather(b"closed")
        self._release()

    def _release(self) -> None:
        for rank in list(self._opened):
            self._memory.close(self._opened.pop(rank))
        if self._own:
            self._memory.free(self._own)
        if self._host:
            self._memory.free_host_word(self._host)
        self._own = self._host = 0

    def _each(self, step: str, work: Callable[[], Any]) -> Any:
        """What `work` gives, once it is done on all ranks. Raises DeviceError on each where it fails on one, so that
        none waits for another that has given up.
        """
        wrong, found = "", None
        try:
            found = work()
        except (KerngenError, OSError, RuntimeError) as e:
            wrong = getattr(e, "message", str(e))
        said = [json.loads(text) for text in self._gather(json.dumps([step, wrong]).encode())]
        if mixed := {s for s, _ in said} - {step}:
            raise DeviceError(f"ranks do different things with peers' memory: {step!r} and {mixed.pop()!r}")
        if failed := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(said) if why]:
            raise DeviceError("; ".join(failed), hint=NCCL_SERVES)
        return found

    def _told(self, shape: list[int]) -> list[dict[str, Any]]:
        """What each rank says of itself, its memory allocated."""

        def allocated() -> str:
            self._host, self._abort_on_gpu = self._memory.host_word()
            self._own = self._memory.allocate(self._bytes)
            return self._memory.handle(self._own).hex()

        handle = self._each("allocate", allocated)
        mine = {"host": socket.gethostname(), "board": self._memory.board, "shape": shape, "handle": handle}
        return [json.loads(text) for text in self._gather(json.dumps(mine).encode())]

    def _require_alike(self, told: list[dict[str, Any]], shape: list[int]) -> None:
        mine = told[self.world.rank]
        for rank, other in enumerate(told):
            if other["shape"] != shape:
                raise DeviceError(
                    f"[hidden, max_rows, two_shot_from] is {shape} here and {other['shape']} on rank {rank}"
                )
            if other["host"] != mine["host"]:
                raise DeviceError(f"{mine['board']} is in {mine['host']}, {other['board']} in {other['host']}")

    def _open(self, told: list[dict[str, Any]]) -> None:
        for rank, other in enumerate(told):
            if rank != self.world.rank:
                try:
                    self._opened[rank] = self._memory.open(bytes.fromhex(other["handle"]))
                except KerngenError as e:
                    raise self._unreachable(told, rank, e.message) from e

    def _unreachable(self, told: list[dict[str, Any]], rank: int, why: str) -> DeviceError:
        mine, other = told[self.world.rank]["board"], told[rank]["board"]
        return DeviceError(f"{mine} cannot reach the memory of rank {rank}'s {other}: {why}")

    def _pattern(self, source: int, target: int) -> bytes:
        return bytes([0xA5, source, target, 0x5A]) * (WORD // 4)

    def _write_to_peers(self) -> None:
        rank = self.world.rank
        for peer, address in self._opened.items():
            self._memory.write(address + rank * self._slot, self._pattern(rank, peer))

    def _require_written(self, told: list[dict[str, Any]]) -> None:
        """What this rank wrote to its peers is there, and what they wrote is here."""
        rank = self.world.rank
        for peer, address in self._opened.items():
            there = self._memory.read(address + rank * self._slot, WORD)
            here = self._memory.read(self._own + peer * self._slot, WORD)
            if there != self._pattern(rank, peer):
                raise self._unreachable(told, peer, "what was written there is not what is read there")
            if here != self._pattern(peer, rank):
                raise self._unreachable(told, peer, "what it wrote here has not arrived")


def gather_by(group: Any = None) -> Gather:
    """Of the ranks of a group of torch.distributed that has a CPU backend; None for the default group."""
    import torch.distributed as dist

    def gather(mine: bytes) -> list[bytes]:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        return found

    return gather


def cheaper_in_two_shots(ranks: int, hidden: int) -> int:
    """Tokens from which a sum of parts and its parts' return are sent sooner than whole rows; 0 for never.

    A rank sends (ranks - 1) rows a token in one shot and 2 (ranks - 1) / ranks in two: of two ranks the same.
    """
    saved = 2 * hidden * (ranks - 1) * (ranks - 2) / ranks  # bytes a token
    return -(-int(TRIP_US * LINK_GBPS * 1e3) // int(saved)) if saved >= 1 else 0
