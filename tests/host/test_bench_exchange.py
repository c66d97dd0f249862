"""tools.bench_exchange without GPUs: ranks meet, a rank that fails ends all, rows are the slowest rank's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kerngen.errors import KerngenError
from kerngen.runtime.executors.collectives import World
from kerngen.runtime.executors.peer_memory import gather_by
from tools.bench_exchange import PRODUCT, Row, in_ranks, slowest, table


def met(world: World, word: str) -> list[str]:
    if word == "fails" and world.rank == 1:
        raise ValueError("this rank fails")
    return [text.decode() for text in gather_by()(f"{word} {world.rank}".encode())]


def test_ranks_are_processes_that_gather_each_others_bytes() -> None:
    assert in_ranks(2, "gloo", met, "rank") == [["rank 0", "rank 1"]] * 2


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(KerngenError, match="this rank fails"):
        in_ranks(2, "gloo", met, "fails")


def test_a_row_is_the_slowest_ranks_time() -> None:
    one, other = ("exchange_norm", 1, False), (PRODUCT, 1, True)
    rows = slowest([{one: 3.0, other: 20.0}, {one: 3.5, other: 19.0}])
    assert rows == [Row("exchange_norm", 1, False, 3.5), Row(PRODUCT, 1, True, 20.0)]
    head, line = table([*rows, Row("exchange_norm", 1, True, 24.25)]).splitlines()
    assert head.split("  ")[1:] == ["exchange_norm", PRODUCT, "exchange_norm, behind"]
    assert line.split() == ["1", "3.50", "20.00", "24.25"]


def test_it_says_what_it_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_exchange", "--ranks", "9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "9 ranks; torch sees" in done.stderr
