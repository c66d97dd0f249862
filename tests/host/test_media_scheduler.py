"""The scheduler alone, with prompts of which parts must be in one chunk: whatever it is asked, none is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerngen.errors import UsageError
from kerngen.runtime.cache import KINDS
from kerngen.runtime.engine.pages import PagePool
from kerngen.runtime.engine.request import Handle, Phase, Request
from kerngen.runtime.engine.scheduler import Chunk, Scheduler
from kerngen.runtime.media.input import Block

PAGE, WINDOW, STEP = 4, 8, 2


@dataclass(frozen=True)
class Asked:
    """parts: tokens of text (positive), of an image (negative). which: images of equal content have one number."""

    parts: tuple[int, ...]
    which: tuple[int, ...]
    num_new: int

    def handle(self, order: int) -> Handle:
        blocks, at = [], 1
        for size, number in zip(self.parts, self.which, strict=False):
            if size < 0:
                blocks.append(Block(at, at - size, bytes([number]) * 16, sees_itself=True))
                at += 1  # what ends an image
            at += abs(size)
        return Handle(Request([2, *[7] * at], self.num_new), order, 0.0, tuple(blocks))


ASKED = st.builds(
    Asked,
    st.lists(st.integers(-40, 30).filter(bool), min_size=1, max_size=6).map(tuple),
    st.lists(st.integers(0, 1), min_size=6, max_size=6).map(tuple),
    st.integers(1, 20),
)


def chunks_of(scheduler: Scheduler, budget: int) -> list[Chunk]:
    """As the engine takes them: one at a time where chunks are fixed, else all together."""
    found = []
    if scheduler.fixed_chunk:
        for chunk in scheduler.chunks(budget):
            found.append(chunk)
            require_whole(scheduler, chunk)
            scheduler.prefilled(chunk)
    else:
        found = list(scheduler.chunks(budget))
        for chunk in found:
            require_whole(scheduler, chunk)
            scheduler.prefilled(chunk)
    return found


def require_whole(scheduler: Scheduler, chunk: Chunk) -> None:
    handle, start, end = chunk.handle, chunk.start, chunk.start + len(chunk.tokens)
    assert start < end
    assert start == handle.num_cached
    for block in handle.blocks:
        assert not block.start < end < block.end, f"a chunk [{start}, {end}) ends within {block}"
    for kind in KINDS:
        assert len(handle.pages[kind]) * PAGE >= end, "all of a chunk has pages"
        assert all(handle.pages[kind][start // PAGE : -(-end // PAGE)])
    # every key that the chunk's tokens see has a page, in sliding layers too
    first = max(start - WINDOW + 1, 0)
    assert all(handle.pages["sliding"][first // PAGE : start // PAGE])


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=6),
    budgets=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    fixed=st.sampled_from((0, 0, 5, 12)),
    spare=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    caching=st.booleans(),
)
def test_no_chunk_ends_within_an_image(
    asked: Sequence[Asked], budgets: Sequence[int], fixed: int, spare: tuple[int, int], caching: bool
) -> None:
    """With the pages that the largest request needs and few more, budgets at random, and prefixes that end anywhere:
    all end, in whole images.
    """
    handles = [a.handle(i) for i, a in enumerate(asked)]
    needs = Scheduler({}, page_size=PAGE, window=WINDOW, max_batch=4, step=STEP, prefix_caching=False,
                      fixed_chunk=fixed).needs  # fmt: skip
    most = [max(n) for n in zip(*(needs(h.limit, h.longest_block) for h in handles), strict=True)]
    pools = {kind: PagePool(1 + n + more) for kind, n, more in zip(KINDS, most, spare, strict=True)}
    scheduler = Scheduler(pools, page_size=PAGE, window=WINDOW, max_batch=4, step=STEP,
                          prefix_caching=caching and not fixed, fixed_chunk=fixed)  # fmt: skip
    for handle in handles:
        scheduler.require_room(len(handle.request.prompt), handle.request.max_new_tokens, handle.longest_block)
        scheduler.add(handle)
    steps = 0
    while scheduler.has_work:
        steps += 1
        assert steps < 5000, "nobody gets on"
        scheduler.admit()
        if scheduler.running:
            scheduler.grow_running(1)
        budget = fixed or budgets[steps % len(budgets)]
        chunks = chunks_of(scheduler, budget)
        assert all(sum(len(c.tokens) for c in chunks[:i]) < budget for i in range(len(chunks))), "within the budget"
        sizes = [len(c.tokens) for c in chunks]
        if sum(sizes) > budget:
            assert len(sizes) == 1, "more only where an image begins the first chunk"
            assert sizes[0] <= chunks[0].handle.longest_block
        joined = {c.handle for c in chunks if c.is_last}
        for handle in list(scheduler.running):
            if handle in joined or handle.phase is not Phase.RUNNING:
                handle.tokens.append(9)
            else:
                handle.num_cached += 1
                scheduler.settle(handle)
                handle.tokens.append(9)
            if len(handle.tokens) >= handle.request.max_new_tokens:
                scheduler.finish(handle)
    for pool in pools.values():
        assert pool.num_available == pool.capacity


def test_a_block_that_begins_a_chunk_waits_for_a_step_of_its_own() -> None:
    """It is taken whole, above the budget, and not behind another's chunk."""
    pools = {kind: PagePool(100) for kind in KINDS}
    scheduler = Scheduler(pools, page_size=PAGE, window=WINDOW, max_batch=4, step=STEP, prefix_caching=False)
    handles = [Asked((6,), (0,), 4).handle(0), Asked((-30, 5), (0, 0), 4).handle(1), Asked((9,), (0,), 4).handle(2)]
    for handle in handles:
        scheduler.add(handle)
    scheduler.admit()
    taken = [[(c.handle.order, c.start, len(c.tokens)) for c in chunks_of(scheduler, 10)] for _ in range(4)]
    assert taken == [[(0, 0, 8), (1, 0, 1), (2, 0, 1)], [(1, 1, 30)], [(1, 31, 7), (2, 1, 3)], [(2, 4, 7)]]


def test_pages_that_do_not_reach_an_images_end() -> None:
    """The chunk ends before it; where it begins with it there is none, and who came later is preempted for it."""
    pools = {"full": PagePool(40), "sliding": PagePool(11)}
    scheduler = Scheduler(pools, page_size=PAGE, window=WINDOW, max_batch=4, step=STEP, prefix_caching=False)
    early, late = Asked((9, -20, 4), (0, 1, 0), 4).handle(0), Asked((34,), (0,), 4).handle(1)
    scheduler.add(late)
    scheduler.admit()
    chunks_of(scheduler, 99)
    assert late.phase is Phase.RUNNING
    scheduler.add(early)
    assert not scheduler.prefilling
    scheduler.waiting.clear()
    early.phase = Phase.PREFILLING  # as if the pages had gone since it was admitted
    early.goal = len(early.request.prompt)
    scheduler.prefilling.append(early)
    late.order, early.order = 0, 1
    (chunk,) = chunks_of(scheduler, 99)
    assert (chunk.start, len(chunk.tokens)) == (0, 10), "up to where the image begins"
    assert chunks_of(scheduler, 99) == [], "the pages of the other are not to be had"
    late.order, early.order = 2, 1
    (chunk,) = chunks_of(scheduler, 99)
    assert (chunk.start, len(chunk.tokens)) == (10, 22), "the image, and what its last page has room for"
    assert late.phase is Phase.WAITING


@pytest.mark.parametrize("fixed", [0, 16])
def test_an_image_that_does_not_fit_is_refused(fixed: int) -> None:
    pools = {"full": PagePool(100), "sliding": PagePool(12)}
    scheduler = Scheduler(pools, page_size=PAGE, window=WINDOW, max_batch=4, step=STEP, prefix_caching=False,
                          fixed_chunk=fixed)  # fmt: skip
    scheduler.require_room(100, 4, 28)
    with pytest.raises(UsageError, match="with an image of 29 tokens at once; the cache has 11"):
        scheduler.require_room(100, 4, 29)
