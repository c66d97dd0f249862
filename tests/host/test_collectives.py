"""What ranks compute together: the same on each, as one rank would have it of the whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import ranks
import torch
from ranks import Threads

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.executors import Executor
from kerngen.runtime.executors.collectives import OneRank
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.executors.trace import Trace
from kerngen.runtime.sampling import likeliest
from kerngen.runtime.world import World

R = TypeVar("R")


def in_world(size: int, work: Callable[[Executor], R]) -> list[R]:
    """What `work` gives on each rank of a world of reference executors, in threads."""
    threads = Threads(size)

    def run(rank: int) -> R:
        try:
            return work(Reference(collectives=threads.of(rank)))
        except BaseException:
            threads.stop()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_product_that_is_divided_by_its_sum_or_by_its_rows(size: int, dtype: torch.dtype) -> None:
    """A projection's input features among the ranks and their products added; its output features, and put together."""
    draw = torch.Generator().manual_seed(size)
    x, w = (torch.randint(-4, 5, shape, generator=draw).to(dtype) for shape in ((5, 12), (6, 12)))

    def work(executor: Executor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ranks = executor.collectives
        part = slice(12 // size * ranks.world.rank, 12 // size * (ranks.world.rank + 1))
        rows = slice(6 // size * ranks.world.rank, 6 // size * (ranks.world.rank + 1))
        added = ranks.all_reduce(x[:, part] @ w[:, part].T)
        return added, ranks.all_gather(x @ w[rows].T, 1), ranks.all_gather(x[:1], 0)

    for added, gathered, stacked in in_world(size, work):
        assert added.dtype == gathered.dtype == dtype
        assert torch.equal(added, x @ w.T), "small whole numbers: exact in any order and dtype"
        assert torch.equal(gathered, x @ w.T)
        assert torch.equal(stacked, x[:1].expand(size, -1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_token_that_is_chosen_from_a_divided_vocabulary(size: int) -> None:
    """As from all logits: ties, tokens that are suppressed on a whole rank, NaN and infinity."""
    logits = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    logits[1, [3, 20, 30]] = 9.0
    logits[2, :16] = -torch.inf
    logits[3, 25] = torch.nan
    logits[4, 2] = torch.inf
    logits[5] = -torch.inf
    logits[6] = logits[6].round()

    def work(executor: Executor) -> tuple[torch.Tensor, torch.Tensor]:
        first = 32 // size * executor.collectives.world.rank
        values, indices = logits[:, first : first + 32 // size].max(-1)
        return executor.collectives.best_of_ranks(values, indices + first)

    for values, tokens in in_world(size, work):
        assert torch.equal(tokens, likeliest(logits))
        assert torch.equal(values.nan_to_num(7e9), logits.max(-1).values.nan_to_num(7e9))


def test_a_record_says_which_collectives_a_rank_asks_for_and_how_many_bytes_it_gives() -> None:
    told: list[tuple[str, int]] = []
    record = Record(lambda *_: None, lambda _: None, world=World(1, 4), note_collective=lambda *c: told.append(c))
    x = torch.empty(3, 8, dtype=torch.bfloat16, device="meta")

    def work() -> torch.Tensor:
        assert record.collectives.all_reduce(x).shape == (3, 8)
        return record.collectives.all_gather(x, 1)

    record.once("layers", lambda: record.once("layer", work))
    assert record.once("layer", work).shape == (3, 32)
    best = record.collectives.best_of_ranks(x[:, 0].float(), torch.empty(3, dtype=torch.int64, device="meta"))
    assert [t.shape for t in best] == [(3,), (3,)]
    record.once("layers", lambda: record.once("layer", work))
    layer = [("all_reduce", 48), ("all_gather", 48)]
    assert told == [*layer, *layer, ("best_of_ranks", 36), *layer]

    def told_in_vain(*_: object) -> None:
        pytest.fail("a world of one rank has nobody to tell")

    alone = Record(lambda *_: None, lambda _: None, note_collective=told_in_vain)
    assert alone.collectives.all_gather(x, 0).shape == (3, 8)
    assert alone.collectives.all_reduce(x) is x


def test_who_listens_waits_for_no_other_rank() -> None:
    listening = Trace(Reference(collectives=Threads(2).of(1)))
    assert listening.collectives.world == World(1, 2)
    assert listening.collectives.all_gather(torch.ones(2, 3), 0).shape == (4, 3)


def test_a_world_of_one_gives_back_what_it_is_given() -> None:
    x = torch.ones(2)
    assert Reference().collectives.all_reduce(x) is x
    assert isinstance(Reference().collectives, OneRank)


def test_a_rank_beyond_its_world_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 2 of a world of 2"):
        World(2, 2)


@pytest.mark.parametrize("fails", ["shape", "kind", "raises", "away"])
def test_ranks_that_do_not_ask_for_the_same_end_in_an_error(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.2 if fails == "away" else 20.0)

    def work(executor: Executor) -> None:
        ranks, x = executor.collectives, torch.ones(3)
        if ranks.world.rank == 0:
            ranks.all_reduce(x)
        elif fails == "shape":
            ranks.all_reduce(x[:2])
        elif fails == "kind":
            ranks.all_gather(x, 0)
        elif fails == "raises":
            raise ZeroDivisionError

    with pytest.raises(KerngenError, match="in vain" if fails in ("raises", "away") else "asks for"):
        in_world(2, work)
