"""PeerMemory without a GPU: ranks are threads, memory is one process's, and what a driver may refuse is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from kerngen.errors import DeviceError, LaunchError
from kerngen.runtime.executors.peer_memory import Gather, PeerMemory, cheaper_in_two_shots
from kerngen.runtime.world import World
from kerngen.templates.exchange_norm.spec import exchange_bytes

HIDDEN, MAX_ROWS = 64, 5


class Host:
    """Memory of a host's GPUs, by address. Bytes of an allocation are not zero where it forgets to zero them."""

    def __init__(self) -> None:
        self.blocks: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.opened: list[tuple[str, int]] = []

    def block(self, num_bytes: int) -> int:
        made = ctypes.create_string_buffer(num_bytes)
        self.blocks[ctypes.addressof(made)] = made
        return ctypes.addressof(made)


class FakeMemory:
    """wrong: what fails, by method: an error, or for `write` that it goes astray."""

    def __init__(self, host: Host, rank: int, wrong: dict[str, str]) -> None:
        self.board, self._host, self._wrong = f"H200 GPU-{rank}", host, wrong

    def _may_fail(self, what: str) -> None:
        if what in self._wrong:
            raise LaunchError(self._wrong[what])

    def allocate(self, num_bytes: int) -> int:
        self._may_fail("allocate")
        return self._host.block(num_bytes)

    def free(self, address: int) -> None:
        del self._host.blocks[address]

    def handle(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        self._may_fail("open")
        self._host.opened.append((self.board, address := int.from_bytes(handle, "little")))
        return address

    def close(self, address: int) -> None:
        self._host.opened.remove((self.board, address))

    def write(self, address: int, data: bytes) -> None:
        if "write" not in self._wrong:
            ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def host_word(self) -> tuple[int, int]:
        address = self._host.block(16)
        return address, address

    def free_host_word(self, address: int) -> None:
        del self._host.blocks[address]


def gathers(size: int) -> Callable[[int], Gather]:
    barrier, given = Barrier(size, timeout=20), [b""] * size

    def of(rank: int) -> Gather:
        def gather(mine: bytes) -> list[bytes]:
            given[rank] = mine
            barrier.wait()
            found = list(given)
            barrier.wait()
            return found

        return gather

    return of


def on_ranks(size: int, wrong: dict[int, dict[str, str]] | None = None, **given: Any) -> tuple[Host, list[Any]]:
    """What each rank has: its PeerMemory, or the error."""
    host, of = Host(), gathers(size)

    def make(rank: int) -> Any:
        memory = FakeMemory(host, rank, (wrong or {}).get(rank, {}))
        of_rank = {"hidden": HIDDEN, "max_rows": MAX_ROWS} | {n: v[rank] for n, v in given.items()}
        try:
            return PeerMemory(World(rank, size), of(rank), memory=memory, device="cpu", **of_rank)
        except DeviceError as e:
            return e

    with ThreadPoolExecutor(size) as pool:
        return host, list(pool.map(make, range(size)))


def close_all(made: list[PeerMemory]) -> None:
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda m: m.close(), made))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_rank_has_all_workspaces_zeroed_and_gives_them_back(size: int) -> None:
    host, made = on_ranks(size)
    num_bytes = exchange_bytes(size, MAX_ROWS, HIDDEN)
    workspaces = {tuple(m.peers.addresses.tolist()[:size]) for m in made}
    assert len(workspaces) == 1, "all see the same memory in the order of the ranks"
    assert len(set(*workspaces)) == size
    for rank, m in enumerate(made):
        assert m.peers.addresses.dtype == torch.int64
        assert m.peers.rank == rank
        assert m.peers.max_rows == MAX_ROWS
        assert ctypes.string_at(m.peers.addresses.tolist()[rank], num_bytes) == bytes(num_bytes)
        abort = m.peers.addresses.tolist()[size]
        assert ctypes.c_uint32.from_address(abort).value == 0
        m.abort()
        assert ctypes.c_uint32.from_address(abort).value == 1
    close_all(made)
    assert not host.blocks
    assert not host.opened
    made[0].abort()  # of closed memory: nothing happens


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({1: {"allocate": "cuMemAlloc: OUT_OF_MEMORY"}}, "rank 1: cuMemAlloc: OUT_OF_MEMORY"),
        ({0: {"open": "cuIpcOpenMemHandle: INVALID_VALUE"}},
         "rank 0: H200 GPU-0 cannot reach the memory of rank 1's H200 GPU-1: cuIpcOpenMemHandle: INVALID_VALUE"),
        ({2: {"write": ""}}, "rank 2: H200 GPU-2 cannot reach the memory of rank 0's H200 GPU-0: what was written"),
        ({2: {"write": ""}}, "rank 0: H200 GPU-0 cannot reach the memory of rank 2's H200 GPU-2: what it wrote here"),
    ],
)  # fmt: skip
def test_all_ranks_refuse_what_one_cannot_do(wrong: dict[int, dict[str, str]], says: str) -> None:
    host, errors = on_ranks(3, wrong)
    for error in errors:
        assert isinstance(error, DeviceError)
        assert says in error.message
        assert "NCCL serves" in str(error.hint)
    assert not host.blocks, "what was allocated is given back"
    assert not host.opened


def test_ranks_that_differ_are_refused_by_what_differs() -> None:
    _, errors = on_ranks(2, max_rows=[5, 6])
    assert all(isinstance(e, DeviceError) and "[64, 5, 0] here and [64, 6, 0] on rank 1" in e.message for e in errors)


def test_one_rank_or_nine_share_no_memory() -> None:
    for size in (1, 9):
        with pytest.raises(DeviceError, match=f"{size} ranks; memory is shared by 2 to 8"):
            PeerMemory(World(0, size), lambda mine: [mine], hidden=HIDDEN, max_rows=1)


def test_two_shots_are_never_cheaper_for_two_ranks_and_sooner_for_more() -> None:
    """Of n ranks a row travels n - 1 times in one shot, 2 (n - 1) / n times in two."""
    assert cheaper_in_two_shots(2, 5376) == 0
    tokens = [cheaper_in_two_shots(n, 5376) for n in (3, 4, 6, 8)]
    assert tokens == sorted(tokens, reverse=True)
    for n, from_tokens in zip((3, 4, 6, 8), tokens, strict=True):
        saved_us = from_tokens * 2 * 5376 * ((n - 1) - 2 * (n - 1) / n) / 300e3
        assert saved_us == pytest.approx(2.0, rel=0.1), n
