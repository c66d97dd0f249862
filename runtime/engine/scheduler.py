"""The scheduler: admission, page growth, window eviction and preemption. It has no tensors.

First come, first served. A request is admitted when the pages for its prompt are free; it gets pages as it grows. If no
page is free, the request that arrived last is preempted, if it arrived later than the one that needs the page;
otherwise that one waits (prefill) or is preempted itself (decode). So the earliest request always progresses, and none
starves. A preempted request keeps its tokens and is prefilled with them again; its pages stay cached until they are
reused.

Window eviction: a sequence with n committed tokens reads sliding layers from position n - window on. A drafter, whose
queries are at n and whose sliding layers see window + 1 keys of the n, reads from n - 1 - window on. Earlier keys are
never read again, not after rejected drafts either, since committed tokens stay. Hence a sequence holds `window_pages`.
A prefill chunk holds more only until its forward has been launched: in one stream a later kernel may write to a page
once its last reader has been launched.

Images: where the tokens of an image see each other (request.Handle.blocks), a chunk has all of them that are not in the
cache, or none. So a chunk ends before an image that the budget or the pages do not reach the end of, and a chunk that
begins with an image has all of it, whatever the budget. A prefix may be found that ends within an image: its pages hold
what the whole image gave.

Block-sparse prefill (config.SparsePrefill): queries choose the keys that they see by blocks, of chunks that begin at
multiples of a block: so chunks end, prefixes are found, and choices do not depend on either. Means of keys, by which
they choose, are written by prefills. Pages that were filled by decode steps lack them: who finds such a page writes
them with its first chunk.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kerngen.errors import UsageError
from kerngen.runtime.cache import KINDS
from kerngen.runtime.config import SparsePrefill
from kerngen.runtime.engine.pages import PagePool, page_keys
from kerngen.runtime.engine.plan import SAME_ROWS, NewPage, RowUpdate
from kerngen.runtime.engine.request import Handle, Phase
from kerngen.templates.common.attention.tile_lists import LIST_QUERIES


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def window_pages(window: int, step: int, page_size: int) -> int:
    """Sliding pages that a sequence holds between steps, at most. step: tokens that may be under way beyond the known.

    Positions n - 1 - window to n + step - 1 touch so many pages where they lie worst.
    """
    return pages_for(window + 1 + step, page_size) + 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + len(tokens)) of a sequence, to prefill. is_last: its next token is chosen then."""

    handle: Handle
    start: int
    tokens: list[int]
    is_last: bool


class Scheduler:
    """running[i] is row i of the decode batch; whoever leaves is replaced by the last. What becomes of rows is kept for
    the next plan: `take_update`.
    """

    def __init__(
        self,
        pools: Mapping[str, PagePool],
        *,
        page_size: int,
        window: int,
        max_batch: int,
        step: int,
        prefix_caching: bool,
        block: int = 0,
        fixed_chunk: int = 0,
        sparse: SparsePrefill | None = None,
    ) -> None:
        """step: tokens that a decode step and those under way may add. block: positions behind a sequence's last token
        that its drafter writes and reads (DraftPolicy). sparse: how prompts choose the keys that they read.

        fixed_chunk: the tokens of every chunk of a prompt but its last; what is preempted then makes its tokens again
        as it did the first time. 0: whatever fits, and its tokens are prefilled.
        """
        self.pools, self.page_size, self.window, self.max_batch = pools, page_size, window, max_batch
        self.prefix_caching = prefix_caching
        self.fixed_chunk = fixed_chunk
        self._made_by, self._align = (b"", 1) if sparse is None else (sparse.key, LIST_QUERIES)
        self._without_means: set[int] = set()  # full pages that may be found
        self._window_pages = window_pages(window, step, page_size)
        self._block = block
        self.waiting: list[Handle] = []  # in order of arrival
        self.prefilling: list[Handle] = []
        self.running: list[Handle] = []
        self.num_preemptions = 0
        self._moves: list[tuple[int, int]] = []  # as RowUpdate has them
        self._new_pages: list[NewPage] = []  # not yet in the tables; of rows as they are after all moves
        self._resets = self._wipes = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, handle: Handle) -> None:
        """Let it wait for its turn. It must fit alone: `require_room`."""
        self._wait(handle)

    def require_room(self, num_prompt_tokens: int, num_new_tokens: int, longest_block: int = 0) -> None:
        """Raises UsageError for a request that does not fit alone."""
        full, sliding = self.needs(num_prompt_tokens + num_new_tokens, longest_block)
        at_once = f", with an image of {longest_block} tokens at once" if longest_block else ""
        advice = "a shorter prompt, fewer new tokens, or a cache of more pages"
        for kind, need, why in (("full", full, ""), ("sliding", sliding, at_once)):
            if need > (have := self.pools[kind].capacity):
                raise UsageError(
                    f"{num_prompt_tokens} prompt tokens and {num_new_tokens} new ones take {need} pages of "
                    f"{self.page_size} tokens on {kind}-attention layers{why}; the cache has {have}",
                    hint=f"smaller images, {advice}" if why else advice,
                )

    def needs(self, length: int, longest_block: int = 0) -> tuple[int, int]:
        """(full, sliding) pages that a sequence of up to `length` tokens takes alone, with the shortest chunks and what
        its drafter writes behind it. longest_block: as of `Handle`.
        """
        full = pages_for(length + self._block, self.page_size)
        at_once = max(self.fixed_chunk, longest_block, self._align)
        return full, min(full, self._window_pages + pages_for(at_once, self.page_size))

    def _wait(self, handle: Handle) -> None:
        handle.phase = Phase.WAITING
        bisect.insort(self.waiting, handle, key=lambda h: h.order)

    # -- admission

    def admit(self) -> None:
        """Begin with as many of those who wait, in order, as there are rows and pages for."""
        while self.waiting and len(self.prefilling) + len(self.running) < self.max_batch:
            handle = self.waiting[0]
            known = list(handle.request.prompt) if self.fixed_chunk else handle.known
            found = self._find(handle, known)
            if not self._has_room(handle, len(known), found):
                return
            self.waiting.pop(0)
            handle.admitted_at = handle.admitted_at or time.perf_counter()
            self._share(handle, found)
            handle.goal = len(known)
            handle.num_made = len(known) - len(handle.request.prompt)
            handle.phase = Phase.PREFILLING
            bisect.insort(self.prefilling, handle, key=lambda h: h.order)

    def _find(self, handle: Handle, known: list[int]) -> tuple[list[int], list[int]]:
        """(full, sliding) pages of the longest prefix that is in the cache, 0 for the sliding ones behind the window.

        All but at least one token, whose logits are wanted. A prefix of n pages needs the full pages of all of it and
        the sliding pages that its first new token or a draft after it sees.
        """
        if not self.prefix_caching or handle.request.prompt_logprobs is not None:
            return [], []
        handle.keys = page_keys(known, self.page_size, handle.keys, handle.blocks, self._made_by)
        keys = handle.keys[: (len(known) - 1) // self.page_size]
        full: list[int] = []
        for key in keys:
            if (page := self.pools["full"].find(key)) is None:
                break
            full.append(page)
        sliding = [self.pools["sliding"].find(key) for key in keys[: len(full)]]
        runs = [0]  # how many sliding pages in a row are there before each length
        for page in sliding:
            runs.append(0 if page is None else runs[-1] + 1)
        for count in range(len(full), 0, -1):
            gone = self._num_gone(count * self.page_size)
            if count * self.page_size % self._align == 0 and runs[count] >= count - gone:
                kept = [page for page in sliding[gone:count] if page is not None]
                return full[:count], [0] * gone + kept
        return [], []

    def _num_gone(self, committed: int) -> int:
        """The sliding pages of a sequence with `committed` tokens that are never read again."""
        return max(committed - 1 - self.window, 0) // self.page_size

    def _has_room(self, handle: Handle, length: int, found: tuple[list[int], list[int]]) -> bool:
        """Whether the prompt's pages are available, and one more for each that runs already."""
        others = len(self.running) + len(self.prefilling)
        if not others:
            return True  # it fits alone, and nobody else holds anything
        for kind, need, pages in zip(KINDS, self.needs(length + 1, handle.longest_block), found, strict=True):
            pool = self.pools[kind]
            held = [page for page in pages if page]
            idle = sum(pool.is_idle(page) for page in held)
            if max(need - len(held), 0) + idle + others > pool.num_available:
                return False
        return True

    def _share(self, handle: Handle, found: tuple[list[int], list[int]]) -> None:
        for kind, pages in zip(KINDS, found, strict=True):
            for page in pages:
                if page:
                    self.pools[kind].share(page)
            handle.pages[kind] = pages
        count = len(found[0])
        handle.num_cached = count * self.page_size
        lacking = (i for i, page in enumerate(found[0]) if page in self._without_means)
        handle.means_from = next(lacking, count) * self.page_size
        handle.num_gone = self._num_gone(handle.num_cached)
        handle.num_published = count
        if not handle.tokens:
            handle.num_found = handle.num_cached

    # -- prefill

    def chunks(self, budget: int) -> Iterator[Chunk]:
        """What to prefill now, `budget` tokens at most, each with its pages; more only where the first chunk begins
        with an image that has more. To be told `prefilled` of each, at once or after the last.
        """
        whole = budget
        for handle in list(self.prefilling):
            if budget <= 0:
                return
            if handle.phase is not Phase.PREFILLING:
                continue  # preempted for one before it
            start = handle.num_cached
            end = self._chunk_end(handle, start, min(start + (self.fixed_chunk or budget), handle.goal))
            if end - start > budget and budget < whole:
                return  # it is the first of the next step
            if self.fixed_chunk:
                if not self._grow(handle, end):
                    return
            elif not self._grow(handle, end, preempt=False):
                # a shorter chunk will do; none at all only where nobody came later
                self._grow(handle, self._chunk_end(handle, start, start + 1))
            room = self.page_size * min(len(handle.pages[kind]) for kind in KINDS)
            end = self._chunk_end(handle, start, min(end, room))
            if not start < end <= room:
                return  # it waits for those before it, and those after it for it
            budget -= end - start
            yield Chunk(handle, start, handle.known[start:end], end == handle.goal)

    def _chunk_end(self, handle: Handle, start: int, end: int) -> int:
        """`end`, or where a chunk that begins at `start` ends in place of it: where a block of queries does, the one
        before if there is one; and where images allow it.
        """
        if end < handle.goal and end % self._align:
            whole = end // self._align * self._align
            end = whole if whole > start else min(whole + self._align, handle.goal)
        return handle.chunk_end(start, end)

    def prefilled(self, chunk: Chunk) -> None:
        """Its forward was handed in: what it leaves in the cache may be shared, and what lies behind it let go."""
        handle = chunk.handle
        handle.num_cached = handle.means_from = chunk.start + len(chunk.tokens)
        if self._without_means:
            self._without_means.difference_update(handle.pages["full"][: handle.num_cached // self.page_size])
        if chunk.is_last:
            self.prefilling.remove(handle)
            handle.phase, handle.row = Phase.RUNNING, len(self.running)
            self.running.append(handle)
        self.settle(handle)

    # -- decode

    def grow_running(self, step: int) -> None:
        """Pages for up to `step` more tokens of each that runs, the earliest comer first; some may be preempted."""
        size = self.page_size
        short = []  # most have a page that lasts for many steps
        for handle in self.running:
            length, pages = min(handle.longest + step, handle.limit + self._block), handle.pages
            if len(pages["full"]) * size < length or len(pages["sliding"]) * size < length:
                short.append((handle.order, handle, length))
        for _, handle, length in sorted(short):
            if handle.phase is Phase.RUNNING and not self._grow(handle, length):
                self._preempt(handle)

    def settle(self, handle: Handle) -> None:
        """After num_cached has grown: publish what is full, let go what lies behind the window."""
        if self.prefix_caching and handle.num_cached // self.page_size > handle.num_published:
            known = handle.known[: handle.num_cached]
            handle.keys = page_keys(known, self.page_size, handle.keys, handle.blocks, self._made_by)
            for i in range(handle.num_published, len(known) // self.page_size):
                for kind in KINDS:
                    if page := handle.pages[kind][i]:
                        self.pools[kind].publish(page, handle.keys[i])
                if self._align > 1 and (i + 1) * self.page_size > handle.goal:
                    self._without_means.add(handle.pages["full"][i])
            handle.num_published = len(known) // self.page_size
        gone = self._num_gone(handle.num_cached)
        if gone > handle.num_gone:
            pages = handle.pages["sliding"]
            self.pools["sliding"].release(pages[handle.num_gone : gone])
            pages[handle.num_gone : gone] = [0] * (gone - handle.num_gone)
            handle.num_gone = gone

    def _grow(self, handle: Handle, length: int, *, preempt: bool = True) -> bool:
        """Pages for `length` tokens, preempting later comers where none is left. False if that was not enough."""
        need = pages_for(length, self.page_size)
        for kind in KINDS:
            pages, pool = handle.pages[kind], self.pools[kind]
            while len(pages) < need:
                if not pool.num_available:
                    if preempt and self._preempt_later(handle):
                        continue
                    return False
                pages.append(pool.take())
                if kind == "full":
                    self._without_means.discard(pages[-1])
                if handle.phase is Phase.RUNNING:
                    self._new_pages.append(NewPage(kind, handle.row, len(pages) - 1, pages[-1]))
        return True

    def _preempt_later(self, handle: Handle) -> bool:
        """Preempt the latest comer, if it came later than `handle`."""
        latest = max((*self.prefilling, *self.running), key=lambda h: h.order)
        if latest.order <= handle.order:
            return False
        self._preempt(latest)
        return True

    def _preempt(self, handle: Handle) -> None:
        self._drop(handle)
        handle.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(handle)

    # -- rows

    def take_update(self) -> RowUpdate:
        """What has become of the rows since the last call."""
        if not (self._resets or self._wipes or self._moves or self._new_pages):
            return SAME_ROWS
        update = RowUpdate(self._resets, self._wipes, tuple(self._moves), tuple(self._new_pages))
        self._moves.clear()
        self._new_pages.clear()
        self._resets = self._wipes = False
        return update

    # -- the end

    def distrust_cache(self) -> None:
        """K and V of what was computed lately may be NaN: nobody is to find them."""
        for pool in self.pools.values():
            pool.forget_all()
        self._wipes = True

    def restart(self) -> None:
        """Send all back to wait, whatever a step that was interrupted left of them and of their rows."""
        for handle in {h.order: h for h in (*self.prefilling, *self.running)}.values():
            self._give_up(handle)
            self._wait(handle)
        self.prefilling.clear()
        self.running.clear()
        self._moves.clear()
        self._new_pages.clear()
        self._resets = self._wipes = True  # the plan that was to wipe may be what was interrupted

    def finish(self, handle: Handle) -> None:
        """Let go of all that it holds, wherever it is."""
        if handle.phase is Phase.WAITING:
            self.waiting.remove(handle)
        elif handle.phase is not Phase.DONE:
            self._drop(handle)
        handle.phase = Phase.DONE

    def _drop(self, handle: Handle) -> None:
        """Take it out of the batch and release its pages; no result of a step that was started before is its own."""
        if handle.phase is Phase.RUNNING:
            row, last = handle.row, self.running.pop()
            if last is not handle:
                self.running[row], last.row = last, row
            self._new_pages = [_moved(n, row, len(self.running)) for n in self._new_pages if n.row != row]
            self._moves.append((row, len(self.running)))
        else:
            self.prefilling.remove(handle)
        self._give_up(handle)

    def _give_up(self, handle: Handle) -> None:
        for kind in KINDS:
            self.pools[kind].release(page for page in handle.pages[kind] if page)
            handle.pages[kind] = []
        handle.row = -1
        handle.epoch += 1
        handle.num_cached = handle.num_gone = handle.num_published = 0
        handle.in_flight.clear()


def _moved(new: NewPage, row: int, last: int) -> NewPage:
    """An entry of the row `last` belongs to `row` now."""
    return NewPage(new.kind, row, new.index, new.page) if new.row == last else new
