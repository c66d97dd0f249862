"""The engine: requests in, tokens out. scheduler.py decides what runs next, runner.py runs it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from kerngen.errors import KerngenError, NumericsError, PageError, UsageError
from kerngen.runtime.cache import KINDS, PAGE_SIZE, KVCache
from kerngen.runtime.config import NO_DRAFTER, NO_DRAFTS, Arm, DraftPolicy, require_reproducible
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.engine import page_check
from kerngen.runtime.engine.draft_length import Choice, DraftLength
from kerngen.runtime.engine.mask import allowed_bits
from kerngen.runtime.engine.media_cache import MEDIA_CACHE_BYTES, MediaCache
from kerngen.runtime.engine.mixed_batches import Shape
from kerngen.runtime.engine.pages import PagePool
from kerngen.runtime.engine.plan import PLAIN, SAME_MEDIA, DecodeRows, MediaUpdate, SamplingMode, StepPlan
from kerngen.runtime.engine.planning import (
    begun_media,
    decode_rows,
    held_ids,
    media_of,
    prefill_chunk,
    sampling_mode,
)
from kerngen.runtime.engine.prefill_budget import MOST_STALL, PrefillBudget
from kerngen.runtime.engine.prefill_graphs import TIMED_RUNS, sizes_worth_padding
from kerngen.runtime.engine.request import Event, Generation, Handle, Load, Request
from kerngen.runtime.engine.runner import EmbeddingFailed, Runner, StepOutput, Wait
from kerngen.runtime.engine.scheduler import Chunk, Scheduler
from kerngen.runtime.engine.sizing import PREFILL_CHUNK, CacheShape, step_of
from kerngen.runtime.engine.warmup import warm_up, warm_up_captured
from kerngen.runtime.executors import Say
from kerngen.runtime.executors.trace import Trace
from kerngen.runtime.logprobs import MOST_LOGPROBS, TokenLogprobs, read_logprobs
from kerngen.runtime.media.input import Block, longest_block
from kerngen.runtime.model import Gemma4
from kerngen.runtime.sampling import Sampling

if TYPE_CHECKING:
    from kerngen.runtime.engine.ranks import Ranks

log = logging.getLogger(__name__)


def require_draft_tokens(count: int | None, policy: DraftPolicy) -> None:
    """Raises UsageError unless such a drafter drafts `count` tokens; 0 is no drafting, None as many as pay."""
    most = policy.max_drafts
    if count and policy.among:
        raise UsageError(f"{count} draft tokens, by which of {len(policy.among)} drafters?",
                         hint="name one drafter, or leave the number out: what pays is drafted")  # fmt: skip
    if count is not None and not 0 <= count <= most:
        raise UsageError(f"{count} draft tokens; its drafter makes at most {most} of them", hint=f"ask for 1 to {most}")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose results the host has not read. rows: who was in it, and in which epoch of theirs.

    choice: None for a prefill. joined: tokens of the forward, where others were prefilled in it.
    """

    number: int
    rows: list[tuple[Handle, int]]
    choice: Choice | None
    wait: Wait
    joined: int = 0


class Engine:
    """Up to `max_batch` sequences at a time, each of up to `max_len` tokens, on a cache that is allocated here.

    num_draft_tokens: drafted a step where there is a drafter; None for as many as pay (draft_length.py), 0 for none.
    prefill_chunk: tokens prefilled a step, of all sequences together, the most; max_stall: how many decode steps' time
    that may take while others decode (prefill_budget.py), None for any. num_pages: of each kind of cache ("full",
    "sliding"), page 0 included; None for what max_batch sequences of max_len take. With fewer pages some requests wait
    or are preempted. mixed_batches: sequences decode in the forward that prefills others, if none of them is drafted
    for and the model supports it (mixed_batches.py). prefix_caching: prompts share the pages of equal beginnings.
    media_cache_bytes: of the embeddings of images and sounds that are kept for whoever needs them again
    (media_cache.py), where the model takes any (model.media).
    buckets: sizes that a decode step is padded to; async_depth: steps that the host reads behind; None for the
    backend's own. ranks: the other ranks of a divided model, which make such an engine too, with their parts' drafter
    where there is one here, and run its plans.

    reproducible: no request's arithmetic depends on who runs beside it. Every decode step is one of max_batch rows for
    max_len keys, each chunk of a prompt is a forward of its own, begins at a multiple of prefill_chunk and shares no
    prefix, and a preempted request makes its tokens again in place of prefilling them. In 16 bits, too, and with a
    fixed number of drafts, a request has then the same tokens in every company, as far as kernels give a row the same
    result whatever the others hold. Small batches pay for it.
    Raises UsageError for what cannot be right.
    """

    def __init__(
        self,
        model: Gemma4,
        drafter: Drafter | None = None,
        *,
        max_len: int,
        max_batch: int = 1,
        num_draft_tokens: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        max_stall: float | None = MOST_STALL,
        page_size: int = PAGE_SIZE,
        num_pages: Mapping[str, int] | None = None,
        mixed_batches: bool = True,
        prefix_caching: bool = True,
        reproducible: bool = False,
        buckets: Sequence[int] | None = None,
        async_depth: int | None = None,
        media_cache_bytes: int = MEDIA_CACHE_BYTES,
        ranks: Ranks | None = None,
    ) -> None:
        ops, config = model.ops, model.config
        self.model, self.drafter = model, drafter
        if max_len > config.max_positions:
            raise UsageError(f"{max_len} tokens of context; the model takes {config.max_positions:,}")
        policy = NO_DRAFTER if drafter is None else drafter.policy
        if drafter is not None:
            require_draft_tokens(num_draft_tokens, policy)
        if prefill_chunk < 1:
            raise UsageError(f"a prefill chunk of {prefill_chunk} tokens never ends")
        if reproducible and drafter is not None and num_draft_tokens is None:
            way_on = "name one drafter, and fix num_draft_tokens" if policy.among else "fix num_draft_tokens"
            raise UsageError(
                "a number of drafts that adapts depends on time: no run is reproducible with it", hint=way_on
            )
        if max_batch < 1:
            raise UsageError(f"a batch of {max_batch} sequences runs none")
        if reproducible:
            require_reproducible(config.sparse)
        self.max_len, self.max_batch, self.prefill_chunk = max_len, max_batch, prefill_chunk
        self._fixed = 0 if drafter is None else num_draft_tokens
        most = policy.max_drafts if self._fixed is None else self._fixed
        self._budget = PrefillBudget(prefill_chunk, None if reproducible else max_stall)
        self._lengths = DraftLength(policy.arms if self._fixed is None else ())
        self._async_depth = async_depth if async_depth is not None else 1 if ops.supports_graphs else 0
        step = step_of(most, self._async_depth, policy)
        self.shape = CacheShape(config, ops.dtype, page_size, step, prefill_chunk, policy,
                                longest_block=0 if model.media is None else model.media.longest_block)  # fmt: skip
        pages = dict(num_pages or self.shape.pages(max_batch, max_len))
        self._block = policy.block
        room = max_len + max(most + 1, policy.block)  # a step begins at the last token at the latest
        options = {
            "max_len": max_len, "max_batch": max_batch, "num_draft_tokens": num_draft_tokens,
            "prefill_chunk": prefill_chunk, "page_size": page_size, "num_pages": pages, "mixed_batches": mixed_batches,
            "reproducible": reproducible, "buckets": buckets, "async_depth": async_depth,
        }  # fmt: skip
        self._ranks = ranks
        with nullcontext() if ranks is None else ranks.making_engine(options, drafter is not None):
            self.cache = KVCache(config, ops, num_pages=pages, batch=max_batch, max_len=room, page_size=page_size,
                                 drafter_layers=policy.cache_layers)  # fmt: skip
            if page_check.is_wanted():
                self.cache.check = page_check.PageCheck(ops, self.cache, config, most + 1, policy.block)
            self.runner = Runner(model, drafter, self.cache, max_batch=max_batch, max_kv_len=room,
                                 reproducible=reproducible,
                                 buckets=(max_batch,) if reproducible else buckets)  # fmt: skip
        if ranks is not None:
            ranks.runners.add(self.runner)
        self._mixes = mixed_batches and not self._fixed and max_batch > 1 and self.runner.mixes
        self.pools = {kind: PagePool(pages[kind]) for kind in KINDS}
        self.scheduler = Scheduler(
            self.pools, page_size=page_size, window=config.window, max_batch=max_batch, step=step,
            block=policy.block,
            prefix_caching=prefix_caching and not reproducible, fixed_chunk=prefill_chunk if reproducible else 0,
            sparse=config.sparse,
        )  # fmt: skip
        self._media = MediaCache(media_cache_bytes, config.hidden_size * ops.dtype.itemsize)
        self._pending: deque[_Pending] = deque()
        self._num_steps = self._newest = self._num_requests = 0

    @torch.inference_mode()
    def make_ready(self, say: Say = lambda *_: None, usual: Sampling | None = None) -> None:
        """Have built and captured what steps may need, before the first request: none waits for a compiler then. Of
        graphs those of steps of the longest sequences, greedy or as most will ask (`usual`), and of short prefills;
        others are captured when they are first needed, which takes as long as a few steps. Then time short prefills.
        say: done, of all, what.
        """
        with nullcontext() if self._ranks is None else self._ranks.making_ready(usual):
            self.prepare(say, usual)
        self._time_short_prefills()
        self.cache.density.zero_()  # of prompts alone

    @torch.inference_mode()
    def prepare(self, say: Say = lambda *_: None, usual: Sampling | None = None) -> None:
        """What every rank does of `make_ready`: all but the timing, which rank 0 does with plans."""
        fixed = self._fixed
        arms = self._lengths.arms if fixed is None else sorted({NO_DRAFTS, Arm(fixed)})
        usually = [NO_DRAFTS, *self._lengths.first] if fixed is None else [Arm(fixed)]
        modes = sorted({SamplingMode(), SamplingMode.for_sampling([usual or Sampling()])})

        def ask_captured(trace: Trace) -> None:
            with self.runner.one_of_each_kind(trace):
                warm_up_captured(self.runner, usually, mixed=self._mixes)

        def ask_others(trace: Trace) -> None:
            with self.runner.one_of_each_kind(trace):
                warm_up(self.runner, arms, self.prefill_chunk)

        def capture() -> None:
            self.runner.capture(usually, modes)
            if self._mixes:
                self.runner.capture_mixed(modes)

        self.model.ops.build_ahead((ask_captured, ask_others), say, capture)

    def _time_short_prefills(self) -> None:
        """How long prompts that begin take in each graph, and which graphs are worth padding for."""
        graphs = self.runner.prefill_graphs
        timed = [(size, min(self._prefill_seconds(size, size))) for size in graphs.captured_sizes]
        graphs.padded = sizes_worth_padding(timed, partial(self._prefill_seconds, size=0), self.prefill_chunk)
        self._budget.know(timed)

    def _prefill_seconds(self, tokens: int, size: int) -> list[float]:
        """Of TIMED_RUNS prefills of nobody's tokens, each waited for. size: of their graph; 0: they run eagerly."""
        plan, found = self.runner.prefill_of_nobody(tokens, size), []
        for _ in range(TIMED_RUNS):
            self._hand_in(plan)
            with nullcontext() if self._ranks is None else self._ranks.collecting():
                found.append(self.runner.seconds_of_last_prefill())
        return found

    # -- many requests

    def submit(self, request: Request) -> Handle:
        """Queue `request`; `step` works on it. Raises UsageError if it cannot be right or does not fit alone, or if its
        mask allows no first token.
        """
        self._check(request)
        handle = Handle(request, self._num_requests, time.perf_counter(), self._blocks(request))
        self._ask_mask(handle)
        self.scheduler.add(handle)
        self._num_requests += 1
        return handle

    @torch.inference_mode()
    def cancel(self, handle: Handle) -> None:
        """End `handle` where it is; its pages are free at once. Nothing happens to one that is done."""
        if not handle.is_done:
            self._end(handle, "cancelled")

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            num_waiting=len(scheduler.waiting),
            num_prefilling=len(scheduler.prefilling),
            num_running=len(scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            num_graphs=self.runner.num_graphs,
            free_pages={kind: pool.num_available for kind, pool in self.pools.items()},
            num_pages={kind: pool.capacity for kind, pool in self.pools.items()},
            key_tiles=self.runner.key_tiles,
        )

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """A decode step of all that run, then a chunk of prefill; returns the tokens that are known by now, one event a
        request.

        Where the device runs behind, those are the step's before this one; and where that step's prefill has not ended
        yet, those of its decode alone: the next call waits for the others, and starts nothing. A request that ends in
        an error has its event too: see `Handle.error`. What interrupts a step (Ctrl-C, a callback that raises) costs no
        token: all begin again with the tokens that they have. So they do where an image or a sound cannot be embedded,
        by any rank, whose requests alone end in that error.
        """
        try:
            return self._step()
        except BaseException as e:
            self._pending.clear()
            self.scheduler.restart()
            self._media.restart()
            if isinstance(e, PageError):
                self.scheduler.distrust_cache()
            if not isinstance(e, EmbeddingFailed):
                raise
            return self._ended_by(e)

    def _step(self) -> list[Event]:
        if not self._is_overdue:
            self._start()
        events: dict[Handle, Event] = {}
        while self._is_overdue and (not events or self._pending[0].wait.is_ready()):
            for event in self._collect(self._pending.popleft()):
                known = events.get(event.handle)
                events[event.handle] = event if known is None else known.then(event)
        if not self.has_work:
            self._pending.clear()  # steps that were started before their last request had ended
        return list(events.values())

    def _start(self) -> None:
        """Hand in a decode step and a prefill, and say which steps are to be read now."""
        self._num_steps += 1
        self.scheduler.admit()
        for tokens, seconds in self.runner.timed_prefills():
            self._budget.prefilled(tokens, seconds)
        choice = self._choose() if self.scheduler.running else None
        if choice is not None and (least := self._least_mixed(choice)) is not None:
            decodes = self._start_mixed(choice, least)
        else:
            decodes = choice is not None and self._decode(choice)
            self._prefill()
        # With nothing to decode there is nothing for the device to run meanwhile: a first token is read at once. So are
        # all while somebody's mask waits for them.
        waits = any(h.request.mask is not None for h in self.scheduler.running)
        self._newest = self._num_steps - (self._async_depth if decodes and not waits else 0)

    @property
    def _is_overdue(self) -> bool:
        """Whether a step is to be read before the next one is started."""
        return bool(self._pending) and self._pending[0].number <= self._newest

    def generate_many(self, requests: Sequence[Request]) -> list[Generation]:
        """All of them, in order. Raises the first error, the others cancelled."""
        made = dict(self.finished(requests))
        return [made[i] for i in range(len(requests))]

    def finished(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
        """(number, what came out) of each of `requests`, as they end. Raises the first error, the others cancelled."""
        for request in requests:
            self._check(request)
        handles: dict[Handle, int] = {}
        try:
            for i, request in enumerate(requests):
                handles[self.submit(request)] = i
            while handles:
                self.step()
                for handle in [h for h in handles if h.is_done]:  # also in somebody else's step, or cancelled
                    if handle.error is not None:
                        raise handle.error
                    yield handles.pop(handle), handle.generation
        finally:
            for handle in handles:
                self.cancel(handle)

    # -- one request

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Generation:
        """Continue `prompt`: `stream`, at once."""
        steps = self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                done: Generation = end.value
                return done

    def stream(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: Sequence[int] = (),
    ) -> Generator[list[int], None, Generation]:
        """Continue `prompt`: yields each step's new tokens as they come, and returns all of it.

        Several streams share the engine's steps. One that is closed or forgotten is cancelled. Raises UsageError if the
        prompt is empty, holds unknown ids, or does not fit with max_new_tokens in max_len. What is returned raises
        NumericsError where the model computes NaN or infinity in place of logits.
        """
        return self.follow(Request(prompt, max_new_tokens, sampling or Sampling(), stop_ids))

    def follow(self, request: Request) -> Generator[list[int], None, Generation]:
        """As `stream`, of any request."""
        self._check(request)
        return self._follow(request)

    def _follow(self, request: Request) -> Generator[list[int], None, Generation]:
        handle = self.submit(request)
        seen = 0
        try:
            while True:
                if handle.error is not None:
                    raise handle.error
                if new := handle.tokens[seen:]:
                    seen += len(new)
                    yield new
                elif handle.is_done:
                    return handle.generation
                else:
                    self.step()
        finally:
            self.cancel(handle)

    # -- steps

    def _choose(self) -> Choice:
        """How many drafts those that run get."""
        running = self.scheduler.running
        bucket = self.runner.bucket(len(running))
        if not self.runner.reproducible and all(h.request.mask is not None for h in running):
            return Choice(NO_DRAFTS, bucket)  # nobody would accept one
        return self._lengths.choose(bucket) if self._fixed is None else Choice(Arm(self._fixed), bucket)

    def _decode(self, choice: Choice) -> bool:
        """Start a decode step of all that run. False if nobody does any more."""
        self.scheduler.grow_running(max(choice.length + 1, self._block if choice.length else 0))
        if not self.scheduler.running:
            return False
        self._run(choice)
        return True

    def _least_mixed(self, choice: Choice) -> Shape | None:
        """The shortest mixed batch of a decode step and a prefill; None if they must be two forwards."""
        scheduler = self.scheduler
        if not self._mixes or not scheduler.prefilling or choice.length:
            return None
        # The budget of a mixed step is relative to the time of a step that only decodes: measure that first.
        if not self._budget.knows_decode or (self._fixed is None and not self._lengths.knows_plain(choice.bucket)):
            return None
        if any(h.request.prompt_logprobs is not None for h in scheduler.prefilling):
            return None
        return self.runner.mixed_shapes.least(len(scheduler.running), sampling_mode(scheduler.running))

    def _start_mixed(self, choice: Choice, least: Shape) -> bool:
        """Start a decode step of all running sequences and a prefill of others, as one forward if a shape fits. Returns
        whether any sequence decodes.
        """
        scheduler, shapes = self.scheduler, self.runner.mixed_shapes
        scheduler.grow_running(1)
        prefilling, decoding = len(scheduler.prefilling), len(scheduler.running)
        most = self._budget.tokens(prefilling, decoding, least.batch, least.size)
        chunks = list(islice(scheduler.chunks(most), shapes.most_chunks))
        shape = None
        if (running := scheduler.running) and chunks:
            size = sum(len(c.tokens) for c in chunks)
            shape = shapes.find(size, len(chunks), len(running), sampling_mode(running))
        decodes = bool(running)
        if shape is not None and shapes.captured is not None and any(media_of(c) for c in chunks):
            shape = None  # no graph has media, and without one a step takes the host longer than two forwards
        if shape is not None:
            self._run(choice, chunks, shape)
            return decodes
        if decodes:
            self._run(choice)
        if chunks:
            self._run(None, chunks)
        return decodes

    def _prefill(self) -> None:
        scheduler = self.scheduler
        chunks = scheduler.chunks(self._budget.tokens(len(scheduler.prefilling), len(scheduler.running)))
        if self.scheduler.fixed_chunk:
            for chunk in chunks:
                self._run(None, [chunk])
        elif together := list(chunks):
            self._run(None, together)

    def _run(self, choice: Choice | None, chunks: Sequence[Chunk] = (), shape: Shape | None = None) -> None:
        """Hand in one forward: a decode step of all that run where there is a choice, a prefill of `chunks`, or both as
        `shape` has them.
        """
        running = list(self.scheduler.running)
        plan = self._plan(running, choice, chunks, shape)
        output = self._hand_in(plan)
        if choice is not None and output.decoded is not None:
            for handle in running:
                handle.in_flight.append(choice.length + 1)
            self._await(running, choice, output.decoded, plan.num_tokens)
        for chunk, planned, words in zip(chunks, plan.chunks, output.prompt_logprobs, strict=False):
            handle, count = chunk.handle, chunk.handle.request.prompt_logprobs or 0
            found = zip(words, planned.targets, strict=True)
            handle.prompt_logprobs += [read_logprobs(w, token, count) for w, token in found]
        for chunk in chunks:
            self.scheduler.prefilled(chunk)
        if output.first is not None:
            self._await([c.handle for c in chunks if c.is_last], None, output.first)

    def _hand_in(self, plan: StepPlan) -> StepOutput:
        """To all ranks."""
        return self.runner.run(plan) if self._ranks is None else self._ranks.run(self.runner, plan)

    def _plan(
        self, running: Sequence[Handle], choice: Choice | None, chunks: Sequence[Chunk], shape: Shape | None
    ) -> StepPlan:
        decode: DecodeRows | None = None
        if choice is not None:
            batch = self.runner.bucket(len(running)) if shape is None else shape.batch
            decode = decode_rows(running, batch, choice.arm)
        config = self.model.config
        planned = tuple([prefill_chunk(c, config.eos_ids, config.vocab_size, config.sparse) for c in chunks])
        num_tokens = 0 if shape is None else shape.size
        if choice is None and not any(c.targets for c in planned):
            num_tokens = self.runner.prefill_graphs.size_for(sum(len(c.tokens) for c in planned), len(planned))
        return StepPlan(
            num_running=len(running),
            update=self.scheduler.take_update(),
            decode=decode,
            chunks=planned,
            first_mode=sampling_mode([c.handle for c in chunks if c.is_last]) if chunks else PLAIN,
            num_tokens=num_tokens,
            media=self._media_update(chunks),
            requests=self._numbers(running, chunks),
        )

    def _numbers(self, running: Sequence[Handle], chunks: Sequence[Chunk]) -> tuple[int, ...]:
        return () if self.cache.check is None else tuple([h.order for h in (*running, *(c.handle for c in chunks))])

    def _media_update(self, chunks: Sequence[Chunk]) -> MediaUpdate:
        if self.model.media is None:
            return SAME_MEDIA
        needed = [placed.media for chunk in chunks for placed in media_of(chunk)]
        return self._media.take_update(needed, begun_media(self.scheduler.prefilling))

    def _await(self, handles: Sequence[Handle], choice: Choice | None, wait: Wait, joined: int = 0) -> None:
        """Their tokens are to be read; see _Pending."""
        self._pending.append(_Pending(self._num_steps, [(h, h.epoch) for h in handles], choice, wait, joined))

    def _collect(self, step: _Pending) -> list[Event]:
        """Read a step's results: hand out tokens, end what has ended, and learn from what was accepted."""
        with nullcontext() if self._ranks is None else self._ranks.collecting():
            result = step.wait.result()
        if self._ranks is not None:
            self._ranks.require_alive()  # what was waited for may have been given up
        live = [i for i, (h, epoch) in enumerate(step.rows) if h.epoch == epoch and not h.is_done]
        if step.choice is not None and step.joined:
            self._budget.prefilled(step.joined, result.seconds)
            if self._fixed is None:
                self._lengths.passed(step.choice)
        elif step.choice is not None:
            self._budget.decoded(result.seconds, len(step.rows))
            if self._fixed is None:
                drafted = [i for i in live if step.rows[i][0].request.mask is None]
                self._lengths.observe(step.choice, result.seconds, [len(result.tokens[i]) - 1 for i in drafted])
        events = []
        for i in live:
            handle = step.rows[i][0]
            if not handle.is_done:  # a callback may have cancelled it
                num_drafts = -1 if step.choice is None else 0 if handle.request.mask is not None else step.choice.length
                again = len(handle.tokens) - handle.num_made
                new = self._take(handle, num_drafts, result.tokens[i], result.is_finite[i])
                said: list[TokenLogprobs] = []
                if (wanted := handle.request.logprobs) is not None and result.logprobs is not None:
                    each = zip(result.logprobs[i][again:], new, strict=False)  # beyond the new ones nothing counts
                    said = [read_logprobs(words, token, wanted) for words, token in each]
                    handle.logprobs += said
                events.append(Event(handle, new, said))
                if handle.request.mask is not None and not handle.is_done:
                    with self._ending(handle):
                        self._ask_mask(handle)
        return events

    def _take(self, handle: Handle, num_drafts: int, tokens: list[int], is_finite: bool) -> list[int]:
        """A step's tokens, cut where the answer ends. num_drafts: -1 for a prefill."""
        request, count = handle.request, len(tokens)
        if num_drafts < 0:
            handle.first_token_at = handle.first_token_at or time.perf_counter()
        else:
            handle.in_flight.popleft()
            handle.num_steps += 1
            handle.num_emitted += count
            if num_drafts:
                handle.count_drafts(num_drafts, count - 1)
        if handle.num_made < len(handle.tokens):  # after a preemption
            again = handle.tokens[handle.num_made : handle.num_made + count]
            handle.num_made += len(again)
            if again != tokens[: len(again)]:
                handle.error = NumericsError(
                    f"tokens {again} came out as {tokens[: len(again)]} the second time: a row's result depends on "
                    "others",
                    hint="leave reproducible out, which prefills a preempted request's tokens",
                )
                self._end(handle, "error")
                return []
            tokens = tokens[len(again) :]
        new: list[int] = []
        reason, asks = "", request.mask is not None or request.stops is not None
        for token in tokens[: request.max_new_tokens - len(handle.tokens)]:
            if token < 0:
                break
            new.append(token)
            if request.mask is not None:
                with self._ending(handle):
                    request.mask.accept(token)
                if handle.is_done:
                    break
            if token in request.stop_ids or (asks and self._is_stopped(handle, token)):
                reason = "stop"
                break
        broken = len(new) < len(tokens) and tokens[len(new)] < 0 and not reason
        # A kernel that fuses the choice may choose a token from NaN; what NaN does is in the hidden state by then.
        if broken or not is_finite:
            handle.error = self._no_number(len(request.prompt) + len(handle.tokens) + (len(new) if broken else 0))
            new = new if broken else []
        handle.tokens += new
        handle.num_made += len(new)
        if asks and handle.is_done:  # cancelled by the callback, or ended by what its mask raised
            return new
        if handle.error is not None:
            self._end(handle, "error")
            self.scheduler.distrust_cache()
            self._media.restart()
        elif reason or len(handle.tokens) == request.max_new_tokens:
            self._end(handle, reason or "length")
        elif num_drafts >= 0:
            handle.num_cached += count
            self.scheduler.settle(handle)
        return new

    def _ask_mask(self, handle: Handle) -> None:
        """What may follow, if the request has a mask. Raises UsageError where that is nothing."""
        request, vocab = handle.request, self.model.config.vocab_size
        if request.mask is None or handle.num_made < len(handle.tokens):
            return
        never = [*self.model.suppressed_ids, *request.suppressed_ids]
        if len(handle.tokens) < request.sampling.min_tokens:
            never += held_ids(request, self.model.config.eos_ids, vocab)
        handle.allowed = allowed_bits(request.mask, vocab, never, len(handle.tokens))

    def _ended_by(self, failed: EmbeddingFailed) -> list[Event]:
        """After a restart: of all requests with what could not be embedded."""
        if not isinstance(failed.__cause__, KerngenError):
            log.error("an item of a prompt cannot be embedded: %s", failed.message, exc_info=failed.__cause__)
        events = []
        for handle in list(self.scheduler.waiting):
            if any(placed.media.digest == failed.digest for placed in handle.request.media):
                handle.error = failed.reason
                self._end(handle, "error")
                events.append(Event(handle, []))
        return events

    @contextmanager
    def _ending(self, handle: Handle) -> Iterator[None]:
        """What raises in here has ended its request: a KerngenError is that request's alone."""
        try:
            yield
        except KerngenError as e:
            handle.error = e
            self._end(handle, "error")
        except BaseException:
            self.cancel(handle)
            raise

    def _is_stopped(self, handle: Handle, token: int) -> bool:
        """What the request's callback says; one that raises has ended its request."""
        if handle.request.stops is None:
            return False
        try:
            return handle.request.stops(token)
        except BaseException:
            self.cancel(handle)
            raise

    def _end(self, handle: Handle, reason: str) -> None:
        handle.stop_reason, handle.ended_at = reason, time.perf_counter()
        self.scheduler.finish(handle)

    def _check(self, request: Request) -> None:
        prompt, vocab = request.prompt, self.model.config.vocab_size
        if not prompt:
            raise UsageError("the prompt is empty", hint="a raw prompt needs at least the <bos> token")
        if bad := [i for i in prompt if not 0 <= i < vocab]:
            raise UsageError(f"token {bad[0]} of the prompt is outside the vocabulary of {vocab}")
        if bad := [i for i in request.suppressed_ids if not 0 <= i < vocab]:
            raise UsageError(f"suppressed token {bad[0]} is outside the vocabulary of {vocab}")
        sampling = request.sampling
        if bad := [t for t, _ in sampling.logit_bias if not 0 <= t < vocab]:
            raise UsageError(f"token {bad[0]} of logit_bias is outside the vocabulary of {vocab}")
        never = self.model.suppressed_ids | set(request.suppressed_ids)
        if len(never) == vocab:
            raise UsageError(f"all {vocab} tokens are suppressed; none is left to generate")
        if len(never.union(held_ids(request, self.model.config.eos_ids, vocab))) == vocab:
            raise UsageError(f"all {vocab} tokens are suppressed or end the answer before min_tokens are made")
        if request.max_new_tokens < 1:
            raise UsageError(f"{request.max_new_tokens} new tokens were asked for; at least 1 is made")
        if sampling.min_tokens > request.max_new_tokens:
            raise UsageError(f"min_tokens {sampling.min_tokens} is more than the {request.max_new_tokens} new tokens "
                             "that were asked for")  # fmt: skip
        if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
            raise UsageError(f"logprobs {request.logprobs} of the likeliest tokens; there are 0 to {MOST_LOGPROBS}")
        if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= MOST_LOGPROBS:
            raise UsageError(f"prompt_logprobs {request.prompt_logprobs} of the likeliest tokens; there are 0 to "
                             f"{MOST_LOGPROBS}")  # fmt: skip
        if (need := len(prompt) + request.max_new_tokens) > self.max_len:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {request.max_new_tokens} new ones need {need}; "
                f"the cache holds {self.max_len}"
            )
        if self.model.media is not None:
            self.model.media.require_placed(prompt, request.media)
        elif request.media:
            kind = request.media[0].media.kind
            raise UsageError(f"the request has {kind} input, and this model was opened for text alone")
        self.scheduler.require_room(len(prompt), request.max_new_tokens, longest_block(self._blocks(request)))

    def _blocks(self, request: Request) -> tuple[Block, ...]:
        return () if self.model.media is None else self.model.media.blocks(request.media)

    def _no_number(self, length: int) -> NumericsError:
        dtype = str(self.model.ops.dtype).removeprefix("torch.")
        hint = "check the checkpoint's weights for NaN and infinity, and that config.json belongs to them"
        if self.model.ops.dtype == torch.float16:
            hint += (
                "; fp16 overflows beyond 65,504: try --dtype bf16, or on a GPU without it --backend torch --dtype fp32"
            )
        return NumericsError(
            f"no token can follow {length} tokens: the model computed NaN or infinity ({dtype}) where logits should be",
            hint=hint,
        )
