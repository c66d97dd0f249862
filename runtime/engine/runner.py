"""Runs plans (plan.py) on the device: the state of the batch's rows, the decode step and its graphs, prefill.

A step reads and writes device tensors at fixed addresses only. So the next step can start before the host has read this
one's tokens, and a step is one CUDA graph if the backend supports graphs. Rows join, move and leave by copies in the
same stream. The host waits for results only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime import drafters
from kerngen.runtime.batch import Batch, ListedChunks, MediaRows, ragged_layout
from kerngen.runtime.cache import KINDS, KVCache
from kerngen.runtime.config import Arm
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.engine.graphs import Captured, Graphs
from kerngen.runtime.engine.logit_processors import LogitProcessors, Values
from kerngen.runtime.engine.mixed_batches import ANY_SHAPE, MixedBatchGraphs, MixedBatchShapes, Shape
from kerngen.runtime.engine.plan import (
    DecodeRows,
    Limits,
    MediaSlice,
    MediaUpdate,
    NewPage,
    PrefillChunk,
    RowUpdate,
    SamplingMode,
    StepPlan,
)
from kerngen.runtime.engine.prefill_graphs import SEQUENCES, STRIDE, MediaOfChunks, PrefillGraphs
from kerngen.runtime.executors.layer_dedup import OneOfEachKind
from kerngen.runtime.logprobs import logprob_words
from kerngen.runtime.media.values import Media
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.fallbacks import GATHERED_ROWS
from kerngen.runtime.sampling import Parameters, choose, likeliest
from kerngen.templates.common.rows.spec import is_rotated

# Of decode batches that are captured; what lies between runs as the next one, with rows that stand for nobody.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
LEAST_KV_LEN = 512  # of a graph: kernels choose their KV splits by the longest context, in powers of two from here
PATIENT = 1  # sequences that wait while a step is captured which another would do for
MOST_TIMED = 64  # prefills whose time nobody has asked for
LOGPROB_ROWS = 64  # of a prompt whose logits are held at once
TOKEN, LENGTH, LIMIT, TOP_K, KEY = range(5)  # rows of `Runner.ints`
TEMPERATURE, TOP_P, MIN_P = range(3)  # rows of `Runner.floats`


@dataclass(frozen=True, slots=True)
class Result:
    """Each row's new tokens, of which one that is -1 could not be chosen.

    is_finite: whether the hidden state that gave its last token is. seconds: the step took, 0 where that is not known.
    logprobs: [rows, q_len, words] of its tokens, what `read_logprobs` reads; None where nobody asked.
    """

    tokens: list[list[int]]
    is_finite: list[bool]
    seconds: float
    logprobs: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """For a step that was handed in. result: waits until it is there."""

    result: Callable[[], Result]
    is_ready: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Of a plan that was handed in. decoded: the rows' tokens; first: those of the sequences that joined; None where
    there are none. prompt_logprobs: of each chunk [targets, words], what `read_logprobs` reads; empty where no chunk
    has targets.
    """

    decoded: Wait | None = None
    first: Wait | None = None
    prompt_logprobs: tuple[NDArray[np.int64], ...] = ()


_Moment = float | torch.cuda.Event  # on the host's clock, or on the device's


class EmbeddingFailed(KerngenError):
    """A forward has not begun, since an item cannot be embedded, on this rank or another. digest: the item's.
    is_misuse: it does not fit the model.
    """

    digest = b""
    is_misuse = False

    @staticmethod
    def of(item: Media, error: Exception) -> EmbeddingFailed:
        kind = item.kind
        if isinstance(error, KerngenError):
            failed = EmbeddingFailed(error.message, hint=error.hint)
        elif isinstance(error, torch.OutOfMemoryError):
            failed = EmbeddingFailed(f"the device has no memory left to embed {kind} input of this size",
                                     hint="send a smaller one, or leave more memory beside the cache")  # fmt: skip
        else:
            failed = EmbeddingFailed(f"{kind} input cannot be embedded: {type(error).__name__}: {error}")
        failed.digest, failed.is_misuse = item.digest, isinstance(error, UsageError)
        return failed

    @property
    def reason(self) -> KerngenError:
        """What its requests are told. It has no traceback, which would keep the tower's tensors."""
        return (UsageError if self.is_misuse else KerngenError)(self.message, hint=self.hint)


# What could not be embedded here, or None, to what could not be on all ranks together.
Agree = Callable[[EmbeddingFailed | None], EmbeddingFailed | None]


class Runner:
    """Rows 0 to max_batch - 1 of the decode batch. A row that stands for nobody is all zeros: it writes to page 0."""

    def __init__(
        self,
        model: Gemma4,
        drafter: Drafter | None,
        cache: KVCache,
        *,
        max_batch: int,
        max_kv_len: int,
        buckets: Sequence[int] | None,
        reproducible: bool = False,
    ) -> None:
        """max_kv_len: tokens that the tables have room for. buckets: of the batch; None for those of the backend.

        reproducible: every step is captured for max_kv_len, however long its sequences may get, a greedy token is
        chosen from all logits, as it is beside a row that is sampled, and each image is embedded by itself.
        """
        ops, config = model.ops, model.config
        self.model, self.drafter, self.cache = model, drafter, cache
        self.max_kv_len = max_kv_len
        self.reproducible = reproducible
        self.least_kv_len = max_kv_len if reproducible else LEAST_KV_LEN
        self.buckets = buckets or (BUCKETS if ops.supports_graphs else ())
        lengths = {self._kv_len(1 << e) for e in range(max_kv_len.bit_length() + 1)}
        self.kv_lens = sorted(lengths) if self.buckets else [max_kv_len]  # that steps are captured for
        device = ops.device
        self.ints = torch.zeros(5, max_batch, dtype=torch.int64, device=device)
        self.floats = torch.zeros(3, max_batch, dtype=torch.float32, device=device)
        self.hidden = torch.zeros(max_batch, config.hidden_size, dtype=ops.dtype, device=device)
        experts = any(w.moe is not None and w.moe.gate_up.is_dense for w in model.weights.layers)
        self._most_captured = GATHERED_ROWS // config.top_k_experts if experts else None  # tokens of a step
        self.logit_processors = LogitProcessors(max_batch, config.vocab_size, device, self._sent)
        self._steps: dict[tuple[int, Arm, SamplingMode, int], Captured] = {}
        self._reading = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.one_of_each_kind = OneOfEachKind(model, *drafters.each(drafter))
        self._graphs = Graphs(self.one_of_each_kind)
        self.prefill_graphs = PrefillGraphs(model, cache, self._graphs, max_kv_len, self._sent, self.forward)
        self.mixed_graphs = MixedBatchGraphs()
        self._latest: torch.cuda.Event | None = None  # behind all that was handed in
        self._prefills: deque[tuple[int, _Moment, _Moment]] = deque(maxlen=MOST_TIMED)  # tokens, beginning, end
        self._embeddings: dict[bytes, Tensor] = {}  # [num_tokens, H] of items, by digest
        self._key_tiles: dict[int, tuple[int, int]] = {}
        # For timing alone: the chance that a draft behind accepted ones is accepted, in place of what it is; None for
        # what it is.
        self.assumed_acceptance: float | None = None
        self._counting: tuple[Tensor, torch.cuda.Event | None] | None = None  # a copy of the cache's density

    @property
    def num_graphs(self) -> int:
        return self._graphs.count

    def free_graphs(self) -> None:
        """Where no plan is run again: NCCL ends no group while a graph has kernels of it."""
        self._graphs.reset()

    @property
    def written(self) -> list[Tensor]:
        """What a step changes of its rows, the cache aside."""
        return [self.ints, self.hidden, *self.logit_processors.written]

    @property
    def batches(self) -> list[int]:
        """That decode steps come in."""
        most = len(self.hidden)
        return [*(b for b in self.buckets if b < most), most] if self.buckets else list(range(1, most + 1))

    def bucket(self, batch: int) -> int:
        return min(next((b for b in self.buckets if b >= batch), batch), len(self.hidden))

    @property
    def limits(self) -> Limits:
        """What a plan from elsewhere must keep to."""
        cache, model = self.cache, self.model
        return Limits(
            max_batch=len(self.hidden),
            max_len=self.max_kv_len,
            max_drafts=tuple(drafter.policy.max_drafts for drafter in drafters.each(self.drafter)),
            vocab_size=model.config.vocab_size,
            page_size=cache.page_size,
            num_pages=tuple(cache.num_pages[kind] for kind in KINDS),
            mixes=self.mixes,
            media=frozenset(() if model.media is None else model.media.placeholders),
        )

    @property
    def mixes(self) -> bool:
        """Whether sequences may decode in the forward that prefills others."""
        return self.model.supports_mixed and not self.reproducible

    def run(self, plan: StepPlan, agree: Agree = lambda failed: failed) -> StepOutput:
        """Hand in what `plan` says, and wait for none of it but the log-probabilities of prompts. Where pages are
        checked the step is waited for, and one that is out of bounds raises PageError.

        agree: tells the other ranks what came of embedding, where the plan has any, and says what came of it on all.
        Raises that EmbeddingFailed, before anything else that ranks do together.
        """
        if (check := self.cache.check) is None:
            return self._run(plan, agree)
        check.begin()
        output = self._run(plan, agree)
        check.raise_if_found(plan)
        return output

    def _run(self, plan: StepPlan, agree: Agree) -> StepOutput:
        self.update(plan.update)
        failed: EmbeddingFailed | None = None
        try:
            self._update_media(plan.media)
        except EmbeddingFailed as e:
            failed = e
        if plan.media.embed and (failed := agree(failed)) is not None:
            raise failed
        if plan.decode is None:
            return self._prefill(plan) if plan.chunks else StepOutput()
        if plan.chunks:
            return self._mixed(plan, plan.decode)
        return StepOutput(self._decode(plan.decode, plan.num_running))

    @property
    def key_tiles(self) -> dict[int, tuple[int, int]]:
        """Of each layer whose prompts choose the keys that they read: entries of their lists, since the runner was
        made, and how many they would have had of all tiles. Of prompts that have ended, as far as that is known; waits
        for none. Empty where prompts read all keys.
        """
        if self._counting is not None and (self._counting[1] is None or self._counting[1].query()):
            counted: list[tuple[int, int]] = [(kept, of_all) for kept, of_all in self._counting[0].tolist()]
            layers = self.model.config.layers
            self._key_tiles = {layer.index: counted[layer.index] for layer in layers if layer.kind == "full"}
            self._counting = None
        return self._key_tiles

    def _count_key_tiles(self) -> None:
        """Have `key_tiles` know of what was handed in so far."""
        if self.model.config.sparse is None:
            return
        density = self.cache.density
        if not density.is_cuda:
            self._counting = density.clone(), None
            return
        buffer, copied = torch.empty(density.shape, dtype=density.dtype, pin_memory=True), torch.cuda.Event()
        buffer.copy_(density, non_blocking=True)
        copied.record()
        self._counting = buffer, copied

    # -- rows

    def update(self, update: RowUpdate) -> None:
        if update.reset:
            self.clear()
        if update.wipe:
            self.cache.wipe()
        for row, last in update.moves:
            self._leave(row, last)
        self._add_pages(update.new_pages)

    def _leave(self, row: int, last: int) -> None:
        """Row `last` becomes row `row`, and stands for nobody itself."""
        per_row = [self.ints, self.floats, self.cache.tables]
        for tensor in per_row:
            if row != last:
                tensor[:, row] = tensor[:, last]
            tensor[:, last] = 0
        if row != last:
            self.hidden[row] = self.hidden[last]
        self.hidden[last] = 0
        self.logit_processors.leave(row, last)

    def clear(self) -> None:
        """No row stands for anybody."""
        for tensor in (self.ints, self.floats, self.hidden, self.cache.tables):
            tensor.zero_()

    def _add_pages(self, pages: Sequence[NewPage]) -> None:
        if not pages:
            return
        entries = [(KINDS.index(p.kind), p.row, p.index, p.page) for p in pages]
        kind, row, index, page = self._sent(list(zip(*entries, strict=True)), torch.int64)
        self.cache.tables.index_put_((kind, row, index), page.to(torch.int32))

    # -- media

    def _update_media(self, update: MediaUpdate) -> None:
        if update.reset:
            self._embeddings.clear()
        for digest in update.forget:
            self._embeddings.pop(digest, None)
        if self.reproducible:  # beside others an item is computed in other shapes
            for item in update.embed:
                self._embed([item])
        elif update.embed:
            self._embed(update.embed)

    def _embed(self, items: Sequence[Media]) -> None:
        if (media := self.model.media) is None:
            raise UsageError("a plan has images or sounds, and the model takes text alone")
        hidden = self.model.config.hidden_size
        try:
            made = media.embed(items)
            for item, rows in zip(items, made, strict=True):
                if rows.shape != (item.num_tokens, hidden):
                    raise UsageError(f"an item of kind {item.kind} has embeddings {tuple(rows.shape)} in place of "
                                     f"{(item.num_tokens, hidden)}")  # fmt: skip
        except Exception as e:
            if len(items) == 1:
                raise EmbeddingFailed.of(items[0], e) from e
            made = []
        if not made:  # outside of the handler, which holds what the tower computed
            for item in items:  # to find the one that fails, or as one by one they take less memory
                self._embed([item])
            return
        for item, rows in zip(items, made, strict=True):
            # a part of what a tower gave for several items would keep all of it
            alone = rows.untyped_storage().nbytes() == rows.nbytes
            self._embeddings[item.digest] = rows if alone else rows.clone()

    def with_media(self, batch: Batch, found: MediaOfChunks | None) -> Batch:
        """`batch` with what stands in its chunks in place of tokens."""
        if found is None:
            return batch
        media = MediaRows(torch.cat(found.rows), self._sent(found.places, torch.int64))
        ends = self._sent(found.ends, torch.int32) if found.see_themselves else None
        return replace(batch, media=media, ends=ends)

    def _media_of(self, chunks: Sequence[PrefillChunk]) -> MediaOfChunks | None:
        """None where a forward of them has tokens alone."""
        if not any(c.media for c in chunks):
            return None
        rows, places, ends, first = list[Tensor](), list[int](), list[int](), 0
        for chunk in chunks:
            for part in chunk.media:
                rows.append(self._slice(part))
                places += range(first + part.at, first + part.at + part.count)
            own = list(range(chunk.start, chunk.start + len(chunk.tokens)))
            for begin, end in chunk.blocks:
                own[begin - chunk.start : end - chunk.start] = [end - 1] * (end - begin)
            ends += own
            first += len(chunk.tokens)
        return MediaOfChunks(rows, places, ends, any(c.blocks for c in chunks))

    def _slice(self, part: MediaSlice) -> Tensor:
        if (rows := self._embeddings.get(part.digest)) is None or part.first + part.count > len(rows):
            raise UsageError(f"a plan has {part.count} soft tokens from {part.first} on of an item "
                             f"({part.digest.hex()}) with {0 if rows is None else len(rows)} at hand")  # fmt: skip
        return rows[part.first : part.first + part.count]

    def join(self, first: int, chunks: Sequence[PrefillChunk]) -> None:
        """Sequences whose last `chunks` these are become rows `first` and on, as if the last prefilled token were the
        one of a decode step: `decode_advance` brings the rest.
        """
        rows = slice(first, first + len(chunks))
        new_rows = [c.new_row for c in chunks if c.new_row is not None]
        ends = [c.start + len(c.tokens) for c in chunks]
        ints = [(0, end - 1, r.limit, r.sampling.top_k, r.sampling.key) for r, end in zip(new_rows, ends, strict=True)]
        self.ints[:, rows] = self._sent(ints, torch.int64).T
        self.floats[:, rows] = self._sent([r.sampling.floats for r in new_rows], torch.float32).T
        self.cache.tables[:, rows] = self._sent(self._tables(chunks, self.cache.tables.shape[2]), torch.int32)
        self.logit_processors.join(first, new_rows)
        self.logit_processors.guide([(row, r.mask) for row, r in enumerate(new_rows, first) if r.mask is not None])

    @staticmethod
    def _tables(chunks: Sequence[PrefillChunk], width: int) -> Tensor:
        """[2, len(chunks), width] int32, on the host."""
        tables = torch.zeros(len(KINDS), len(chunks), width, dtype=torch.int32)
        for j, chunk in enumerate(chunks):
            for i, pages in enumerate(chunk.pages):
                tables[i, j, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return tables

    def _layout(
        self, chunks: Sequence[PrefillChunk]
    ) -> tuple[list[int], list[int], list[int], Tensor, list[tuple[int, int]]]:
        """What a forward of `chunks` is given: ids, starts, sizes, tables on the host, and listed, as `chunks` has
        them.
        """
        tables = self._tables(chunks, max(len(c.pages[0]) for c in chunks))
        ids = [t for c in chunks for t in c.tokens]
        listed = [] if self.model.config.sparse is None else [(c.means_from, c.dense_from) for c in chunks]
        return ids, [c.start for c in chunks], [len(c.tokens) for c in chunks], tables, listed

    def _sent(self, values: Values, dtype: torch.dtype) -> Tensor:
        """`values` on the device, without waiting for it: torch reuses pinned memory once its copies have ended."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
        if self.hidden.is_cuda:
            return tensor.pin_memory().to(self.hidden.device, non_blocking=True)
        return tensor.to(self.hidden.device)

    # -- prefill

    def _prefill(self, plan: StepPlan) -> StepOutput:
        began = self._beginning()
        chunks = plan.chunks
        prompt_logprobs: tuple[NDArray[np.int64], ...] = ()
        ids, starts, sizes, tables, listed = self._layout(chunks)
        media = self._media_of(chunks)
        outputs = "none" if all(c.new_row is None for c in chunks) else "last"
        tokens = sum(sizes)
        if any(c.targets for c in chunks):
            batch, cache = self.chunks(ids, starts, sizes, self._sent(tables, torch.int32), listed)
            ends = [0, *accumulate(sizes)]
            states = self.forward(self.with_media(batch, media), cache)
            prompt_logprobs = tuple(self._prompt_words(c, states[end:]) for c, end in zip(chunks, ends, strict=False))
            hidden = states[self._sent([end - 1 for end in ends[1:]], torch.int64)]
        elif (
            short := self.prefill_graphs.run(ids, starts, sizes, tables, plan.num_tokens, outputs, listed, media)
        ) is not None:
            hidden, tokens = short, plan.num_tokens
        else:
            batch, cache = self.chunks(ids, starts, sizes, self._sent(tables, torch.int32), listed)
            hidden = self.forward(self.with_media(batch, media), cache, outputs)
        now = self._now()
        if media is None:  # how long a tower takes says nothing of the next chunk
            self._prefills.append((tokens, began, now))
        return StepOutput(first=self._first(plan, hidden), prompt_logprobs=prompt_logprobs)

    def _first(self, plan: StepPlan, hidden: Tensor) -> Wait | None:
        """Have sequences join whose last chunks these are. hidden [n, H]: of the chunks' last tokens, which come first.

        Returns what waits for their first tokens; None if no sequence starts to decode.
        """
        done = [i for i, c in enumerate(plan.chunks) if c.new_row is not None]
        if not done:
            return None
        if len(done) < len(hidden):
            hidden = hidden[self._sent(done, torch.int64)]
        self.join(plan.num_running, [plan.chunks[i] for i in done])
        self._count_key_tiles()
        rows = slice(plan.num_running, plan.num_running + len(done))
        return self._result(self.first_tokens(hidden, rows, plan.first_mode), 1, began=None)

    def first_tokens(self, hidden: Tensor, rows: slice, mode: SamplingMode) -> Tensor:
        """Of sequences whose last tokens gave hidden [n, H], the rows of the batch: what the host will read."""
        return self._emit(hidden, self.ints[LENGTH, rows], None, rows, mode)

    def chunks(
        self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], tables: Tensor,
        listed: Sequence[tuple[int, int]] = (),
    ) -> tuple[Batch, KVCache]:  # fmt: skip
        """A forward of chunks of several sequences, and the cache under their `tables` [2, chunks, max_pages]. ids: of
        all chunks, one after another; starts, sizes: of each, in its sequence. listed: means_from and dense_from of
        each, where prompts choose the keys that they read (ListedChunks).
        """
        self.model.ops.row_invariant = False  # where it counts, a chunk is a forward by itself: its rows are the same
        tokens, lengths = ragged_layout(ids, starts, sizes)
        kv_lens = lengths[len(sizes) + 1 :]
        cache, choices = self.cache.with_tables(tables), None
        if listed:
            num_keys = sum(kv_lens) - sum(means_from for means_from, _ in listed)
            rows = self._sent(list(zip(*listed, strict=True)), torch.int32)
            choices = ListedChunks(rows[0], rows[1], num_keys)
        batch = Batch.ragged(
            self._sent(tokens, torch.int64), self._sent(lengths, torch.int32), cache,
            max_seqlen=max(sizes), max_kv_len=max(kv_lens), listed=choices,
        )  # fmt: skip
        return batch, cache

    def forward(self, batch: Batch, cache: KVCache, outputs: str = "all") -> Tensor:
        """See drafters.forward."""
        return drafters.forward(self.model, self.drafter, batch, cache, outputs)

    def timed_prefills(self) -> Iterator[tuple[int, float]]:
        """(tokens with the padding, seconds) of the forwards that have ended, each once; waits for none."""
        while self._prefills and (seconds := _elapsed(*self._prefills[0][1:])) is not None:
            yield self._prefills.popleft()[0], seconds

    def _prompt_words(self, chunk: PrefillChunk, states: Tensor) -> NDArray[np.int64]:
        """`logprob_words` of the chunk's targets. states: [tokens, H], of the chunk and what may follow it. The device
        is waited for.
        """
        found = [np.empty((0, 0), np.int64)] if not chunk.targets else []
        for start in range(0, len(chunk.targets), LOGPROB_ROWS):
            tokens = chunk.targets[start : start + LOGPROB_ROWS]
            hidden = states[chunk.first_target + start :][: len(tokens)]
            words = logprob_words(self.model.logits(hidden), self._sent(tokens, torch.int64))
            found.append(words.cpu().numpy())
        return np.concatenate(found)

    # -- decode

    def captures(self, tokens: int) -> bool:
        """Whether forwards of so many are CUDA graphs."""
        return self.model.ops.supports_graphs and (self._most_captured is None or tokens <= self._most_captured)

    @property
    def short_sizes(self) -> list[int]:
        """Tokens of the prefills that are captured: where it counts, a chunk is a forward by itself. Over a cache of
        rotated values a forward gathers all keys of a head (gather_kv): a graph would hold memory for as many as the
        longest contexts have.
        """
        config = self.model.config
        gathers_all = any(is_rotated(config.kv_format_of(layer)) for layer in config.layers)
        if self.reproducible or gathers_all:
            return []
        return [size for size in self.prefill_graphs.sizes if self.captures(size)]

    def capture(self, arms: Sequence[Arm], modes: Sequence[SamplingMode]) -> None:
        """Have steps of the longest sequences captured, and short prefills. No row may stand for anybody."""
        for batch, arm, mode in product(self.batches, arms, modes):
            if self.captures(batch * (arm.length + 1)):
                self._graph(batch, arm, mode, self.max_kv_len)
        for size in self.short_sizes:
            self.prefill_graphs.capture(size)

    def mixed_shapes_to_capture(self, modes: Sequence[SamplingMode]) -> list[Shape]:
        """Shapes of the mixed batches that are captured, where the model supports them."""
        return MixedBatchGraphs.shapes(self.short_sizes, self.batches, modes)

    def capture_mixed(self, modes: Sequence[SamplingMode]) -> None:
        """Capture mixed steps as graphs. No row may belong to a request."""
        for shape in self.mixed_shapes_to_capture(modes):
            if shape not in self.mixed_graphs:
                self.prefill_graphs.clear(shape.chunk)
                self.mixed_graphs.keep(shape, self._graphs.capture(partial(self.mixed_step_of, shape), self.written))

    def mixed_step_of(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """A mixed step of the chunks that the tables and lengths of short prefills hold."""
        return self.mixed_step(shape.batch, shape.mode, *self.prefill_graphs.batch(shape.chunk))

    def prefill_of_nobody(self, tokens: int, size: int) -> StepPlan:
        """A plan that is only timed: a prompt of so many tokens, written to page 0. They differ as a prompt's do, since
        equal tokens go to the same experts. size: tokens of its graph; 0: it runs eagerly.
        """
        ids = tuple([i * STRIDE % self.model.config.vocab_size for i in range(tokens)])
        pages = ((0,) * -(-tokens // self.cache.page_size),) * len(KINDS)
        return StepPlan(num_running=0, chunks=(PrefillChunk(ids, 0, pages),), num_tokens=size)

    def seconds_of_last_prefill(self) -> float:
        """Waits for the device."""
        if self.hidden.is_cuda:
            torch.cuda.synchronize(self.hidden.device)
        *_, (_, seconds) = self.timed_prefills()
        return seconds

    def _decode(self, rows: DecodeRows, count: int) -> Wait:
        """Start a step of `rows`, the first `count` of which stand for sequences."""
        batch, arm, mode = rows.batch, rows.arm, rows.mode
        self.logit_processors.guide(rows.masks)
        began: _Moment | None
        if self.captures(batch * (arm.length + 1)):
            known = len(self._steps)
            graph, result = self._graph(batch, arm, mode, rows.longest + arm.length + 1)
            began = self._beginning() if len(self._steps) == known else None  # a graph's first replay takes longer
            graph.replay()
        else:
            began = self._beginning()
            result = self.step(batch, arm, mode, self.max_kv_len)
        return self._result(result[:count], arm.length + 1, began=began)

    @property
    def mixed_shapes(self) -> MixedBatchShapes:
        """The mixed steps that a plan may use."""
        return self.mixed_graphs.captured if self.model.ops.supports_graphs else ANY_SHAPE

    def _mixed(self, plan: StepPlan, rows: DecodeRows) -> StepOutput:
        """A decode step without drafts and a prefill as one forward."""
        ids, starts, sizes, tables, listed = self._layout(plan.chunks)
        media = self._media_of(plan.chunks)
        self.logit_processors.guide(rows.masks)
        shape = Shape(plan.num_tokens, rows.batch, rows.mode)
        if shape in self.mixed_graphs and len(sizes) < SEQUENCES and media is None:
            self.prefill_graphs.put(ids, starts, sizes, tables, shape.chunk, listed)
            began = self._beginning()
            result, last = self.mixed_graphs.replay(shape)
        else:
            began = self._beginning()
            batch, cache = self.chunks(ids, starts, sizes, self._sent(tables, torch.int32), listed)
            result, last = self.mixed_step(rows.batch, rows.mode, self.with_media(batch, media), cache)
        decoded = self._result(result[: plan.num_running], 1, began=began)
        return StepOutput(decoded, self._first(plan, last))

    def mixed_step(self, batch: int, mode: SamplingMode, chunks: Batch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """One decode step of rows 0 to batch - 1 and a prefill, all on the device: what `step` returns, and the hidden
        states of the chunks' last tokens. cache: under the tables of `chunks`.
        """
        self.model.ops.row_invariant = False
        own, rows = self.cache.rows(batch), slice(0, batch)
        ids, lengths = self.ints[TOKEN, rows][:, None], self.ints[LENGTH, rows]
        fed = Batch.decode(ids, lengths, own, self.max_kv_len, self.model.ops)
        last, states = drafters.forward_mixed(self.model, self.drafter, chunks, cache, fed, own)
        return self._emit(states, fed.positions, None, rows, mode), last

    def step(self, batch: int, arm: Arm, mode: SamplingMode, max_kv_len: int) -> Tensor:
        """One decode step of rows 0 to batch - 1, all on the device.

        Returns what `_read` reads, int64: [batch, arm.length + 3], and more columns where `mode` has log-probabilities.
        A token that is -1 could not be chosen; the step that may be running behind goes on from token 0. max_kv_len: no
        context is longer, nor will be when a captured step is replayed.
        """
        self.model.ops.row_invariant = self.reproducible
        cache, rows = self.cache.rows(batch), slice(0, batch)
        token, lengths = self.ints[TOKEN, rows], self.ints[LENGTH, rows]
        ids, drafts, fed = token[:, None], None, None
        if arm.length and cache.check is not None:  # before a drafter reads what the tables and lengths name
            fed = Batch.decode(ids.expand(-1, arm.length + 1), lengths, cache, max_kv_len, self.model.ops)
            lengths = fed.kv_lens.long() - (arm.length + 1)
        if arm.length and self.drafter is not None:
            drafter = drafters.each(self.drafter)[arm.by]
            if cache.check is not None and drafter.policy.block:
                cache.check.block(lengths, cache, drafter.policy.block, max_kv_len)
            drafts = drafter.propose(token, self.hidden[rows], lengths, cache, arm.length, max_kv_len)
            ids = torch.cat((ids, drafts), dim=1)
        if fed is None:
            fed = Batch.decode(ids, lengths, cache, max_kv_len, self.model.ops)
        else:
            fed = replace(fed, ids=ids.flatten())
        states = self.forward(fed, cache)  # [batch * q_len, H]
        return self._emit(states, fed.positions, drafts, rows, mode)

    def _emit(
        self, states: Tensor, positions: Tensor, drafts: Tensor | None, rows: slice, mode: SamplingMode
    ) -> Tensor:
        """Choose what follows the tokens at positions [n], which gave states [n, H]: of each row its last known token
        and `drafts`. The rows go on with it. Returns what the host will read.
        """
        tokens, words = self._choose(states, positions, drafts, rows, mode)
        chosen = tokens.view(rows.stop - rows.start, -1)
        if self.assumed_acceptance is not None and drafts is not None:
            right = torch.rand(drafts.shape, device=drafts.device) < self.assumed_acceptance
            drafts = torch.where(right, chosen[:, :-1], chosen[:, :-1] + 1)
        result = self.model.ops.decode_advance(
            chosen, self.logit_processors.refuse(drafts, rows, mode), states, self.ints[TOKEN, rows],
            self.ints[LENGTH, rows], self.ints[LIMIT, rows], self.hidden[rows],
        )  # fmt: skip
        self.logit_processors.count(result, rows, mode)
        return result if words is None else torch.cat((result, words.view(len(result), -1)), dim=1)

    def _choose(
        self, hidden: Tensor, positions: Tensor, drafts: Tensor | None, rows: slice, mode: SamplingMode
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens [n] that follow the ones at positions [n], which gave hidden [n, H], and their `logprob_words`."""
        if not mode.needs_logits:
            return self.model.greedy(hidden, screened=not self.reproducible), None
        raw = self.model.logits(hidden)
        logits = self.logit_processors.apply(raw, positions + 1, drafts, rows, mode)
        if mode.sampled:
            ints, floats = self.ints[:, rows], self.floats[:, rows]
            min_p = floats[MIN_P] if mode.min_p else None
            wanted = Parameters(floats[TEMPERATURE], floats[TOP_P], ints[TOP_K], ints[KEY], min_p)
            q_len = 1 if drafts is None else drafts.shape[1] + 1
            tokens = choose(logits, positions + 1, wanted.repeated(q_len), mode.cut)
        else:
            tokens = likeliest(logits)
        return tokens, logprob_words(raw, tokens) if mode.logprobs else None

    def _kv_len(self, longest: int) -> int:
        return min(self.max_kv_len, 1 << (max(longest, self.least_kv_len) - 1).bit_length())

    def _graph(self, batch: int, arm: Arm, mode: SamplingMode, longest: int) -> Captured:
        """The step as a CUDA graph and the tensor that it leaves its result in, captured when first asked for; but no
        more than PATIENT sequences wait for that where the one of longer contexts will do.

        What the warm-up writes to the cache lies at and after the current lengths, where the next step writes again.
        """
        max_kv_len = self._kv_len(longest)
        key = batch, arm, mode, max_kv_len
        if key not in self._steps and batch > PATIENT:
            longer = ((batch, arm, mode, kv_len) for kv_len in self.kv_lens if kv_len > max_kv_len)
            key = next((k for k in longer if k in self._steps), key)
        if key not in self._steps:
            self._steps[key] = self._graphs.capture(lambda: self.step(*key), self.written)
        return self._steps[key]

    # -- results

    def _now(self) -> _Moment:
        """The host's clock, or the device's where work is only handed in."""
        return self._mark() if self.hidden.is_cuda else time.perf_counter()

    def _mark(self) -> torch.cuda.Event:
        """Behind all that was handed in."""
        self._latest = torch.cuda.Event(enable_timing=True)
        self._latest.record()
        return self._latest

    def _beginning(self) -> _Moment:
        """When what is handed in next begins. Behind work that is not done yet that is when it ends: an event in a
        stream takes the device 1 to 2 us.
        """
        return self._now() if self._latest is None or self._latest.query() else self._latest

    def _result(self, result: Tensor, q_len: int, *, began: _Moment | None) -> Wait:
        """Copies what the host will read out of the way of the next step."""
        if self._reading is not None:
            kept = result.clone()
            ended = self._mark()  # the copy may begin, too
            # In this stream a copy to the host would hold up the next step by some 10 us.
            buffer = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            copied = torch.cuda.Event()
            self._reading.wait_event(ended)
            with torch.cuda.stream(self._reading):
                buffer.copy_(kept, non_blocking=True)
                copied.record()
            kept.record_stream(self._reading)

            def wait() -> Result:
                copied.synchronize()
                seconds = began.elapsed_time(ended) / 1e3 if isinstance(began, torch.cuda.Event) else 0.0
                return _read(buffer, q_len, seconds)

            return Wait(wait, copied.query)
        seconds = time.perf_counter() - began if isinstance(began, float) else 0.0
        kept = result.clone()
        return Wait(lambda: _read(kept, q_len, seconds))


def _elapsed(began: _Moment, ended: _Moment) -> float | None:
    """Seconds between the two; None where the device has not come so far."""
    if isinstance(began, float) or isinstance(ended, float):
        return ended - began if isinstance(began, float) and isinstance(ended, float) else None
    return began.elapsed_time(ended) / 1e3 if ended.query() else None


def _read(result: Tensor, q_len: int, seconds: float) -> Result:
    """result [rows, q_len + 2 + ...]: how many tokens count, q_len tokens, whether the state that gave the last is
    finite; then, where anybody asked, the words of each token's log-probabilities.
    """
    rows: list[list[int]] = result[:, : q_len + 2].tolist()
    words = result[:, q_len + 2 :]
    logprobs = words.view(len(words), q_len, -1).numpy() if words.shape[1] else None
    return Result([row[1 : row[0] + 1] for row in rows], [bool(row[-1]) for row in rows], seconds, logprobs)
