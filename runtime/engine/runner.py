"""Runs steps on the device: what a row of the batch is there, the decode step and its graphs, prefill.

A step reads and writes device tensors at fixed addresses only, so the next one can start before the host has seen this
one's tokens, and a step is one CUDA graph where the backend can. Rows join, move and leave by copies in the same
stream. The host waits for results alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kerngen.runtime.batch import Batch, ragged_layout
from kerngen.runtime.cache import KINDS, KVCache
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.engine.graphs import Captured, Graphs
from kerngen.runtime.engine.logit_processors import Changes, Values, Way
from kerngen.runtime.engine.mixed_batches import JointSteps, Shape
from kerngen.runtime.engine.prefill_graphs import SEQUENCES, ShortPrefills
from kerngen.runtime.engine.request import Handle
from kerngen.runtime.engine.scheduler import Chunk, NewPage
from kerngen.runtime.logprobs import logprob_words, read_logprobs
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.fallbacks import GATHERED_ROWS
from kerngen.runtime.sampling import Parameters, choose, likeliest

# Of decode batches that are captured; what lies between runs as the next one, with rows that stand for nobody.
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)
LEAST_KV_LEN = 512  # of a graph: kernels choose their KV splits by the longest context, in powers of two from here
PATIENT = 1  # sequences that wait while a step is captured which another would do for
MOST_TIMED = 64  # prefills whose time nobody has asked for
TIMED_RUNS = 3  # of a short prefill, of which the shortest counts
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


_Moment = float | torch.cuda.Event  # on the host's clock, or on the device's


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

        reproducible: every step is captured for max_kv_len, however long its sequences may get, and a greedy token is
        chosen from all logits, as it is beside a row that is sampled.
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
        self.changes = Changes(max_batch, config.vocab_size, config.eos_ids, device, self._sent)
        self._steps: dict[tuple[int, int, Way, int], Captured] = {}
        self._reading = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs = Graphs()
        self.short_prefills = ShortPrefills(model, cache, self._graphs, max_kv_len, self._sent)
        self.joint_steps = JointSteps()
        self._latest: torch.cuda.Event | None = None  # behind all that was handed in
        self._prefills: deque[tuple[int, _Moment, _Moment]] = deque(maxlen=MOST_TIMED)  # tokens, beginning, end

    @property
    def num_graphs(self) -> int:
        return self._graphs.count

    @property
    def written(self) -> list[Tensor]:
        """What a step changes of its rows, the cache aside."""
        return [self.ints, self.hidden, *self.changes.written]

    @property
    def batches(self) -> list[int]:
        """That decode steps come in."""
        most = len(self.hidden)
        return [*(b for b in self.buckets if b < most), most] if self.buckets else list(range(1, most + 1))

    def bucket(self, batch: int) -> int:
        return min(next((b for b in self.buckets if b >= batch), batch), len(self.hidden))

    # -- rows

    def leave(self, row: int, last: int) -> None:
        """Row `last` becomes row `row`, and stands for nobody itself."""
        per_row = [self.ints, self.floats, self.cache.tables]
        for tensor in per_row:
            if row != last:
                tensor[:, row] = tensor[:, last]
            tensor[:, last] = 0
        if row != last:
            self.hidden[row] = self.hidden[last]
        self.hidden[last] = 0
        self.changes.leave(row, last)

    def clear(self) -> None:
        """No row stands for anybody."""
        for tensor in (self.ints, self.floats, self.hidden, self.cache.tables):
            tensor.zero_()

    def add_pages(self, pages: Sequence[NewPage]) -> None:
        """Write the entries of running rows' tables."""
        if not pages:
            return
        entries = [(KINDS.index(p.kind), p.row, p.index, p.page) for p in pages]
        kind, row, index, page = self._sent(list(zip(*entries, strict=True)), torch.int64)
        self.cache.tables.index_put_((kind, row, index), page.to(torch.int32))

    def _join(self, first: int, handles: Sequence[Handle]) -> None:
        """Rows `first` and on get what is known of them, as if the last prefilled token were the one of a decode step:
        `_advance` brings the rest.
        """
        rows = slice(first, first + len(handles))
        sampling = [h.request.sampling for h in handles]
        ints = [(0, h.goal - 1, h.limit, s.top_k, s.key) for h, s in zip(handles, sampling, strict=True)]
        self.ints[:, rows] = self._sent(ints, torch.int64).T
        self.floats[:, rows] = self._sent([s.floats for s in sampling], torch.float32).T
        self.cache.tables[:, rows] = self._sent(self._tables(handles, self.cache.tables.shape[2]), torch.int32)
        self.changes.join(first, handles)

    @staticmethod
    def _tables(handles: Sequence[Handle], width: int) -> Tensor:
        """[2, len(handles), width] int32, on the host."""
        tables = torch.zeros(len(KINDS), len(handles), width, dtype=torch.int32)
        for i, kind in enumerate(KINDS):
            for j, handle in enumerate(handles):
                pages = handle.pages[kind]
                tables[i, j, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return tables

    def _layout(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[int], list[int], Tensor]:
        """What a forward of `chunks` is given: ids, starts, sizes as `chunks` has them, and tables, on the host."""
        handles = [c.handle for c in chunks]
        tables = self._tables(handles, max(len(h.pages["full"]) for h in handles))
        ids = [t for c in chunks for t in c.tokens]
        return ids, [c.start for c in chunks], [len(c.tokens) for c in chunks], tables

    def _sent(self, values: Values, dtype: torch.dtype) -> Tensor:
        """`values` on the device, without waiting for it: torch reuses pinned memory once its copies have ended."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
        if self.hidden.is_cuda:
            return tensor.pin_memory().to(self.hidden.device, non_blocking=True)
        return tensor.to(self.hidden.device)

    # -- prefill

    def prefill(self, chunks: Sequence[Chunk], num_running: int) -> Wait | None:
        """One forward of all chunks. Sequences whose last chunk this is become rows `num_running` and on, in order.

        Returns what waits for their first tokens, or None where no chunk is a last one.
        """
        began = self._beginning()
        handles = [c.handle for c in chunks]
        ids, starts, sizes, tables = self._layout(chunks)
        done = [i for i, c in enumerate(chunks) if c.is_last]
        outputs = "last" if done else "none"
        if any(h.request.prompt_logprobs is not None for h in handles):
            batch, cache = self.chunks(ids, starts, sizes, self._sent(tables, torch.int32))
            ends = [0, *accumulate(sizes)]
            states = self.model.forward(batch, cache)
            self._know_prompts(chunks, ends, states)
            hidden = states[self._sent([end - 1 for end in ends[1:]], torch.int64)]
        elif (short := self.short_prefills.run(ids, starts, sizes, tables, outputs)) is not None:
            hidden = short
        else:
            batch, cache = self.chunks(ids, starts, sizes, self._sent(tables, torch.int32))
            hidden = self.model.forward(batch, cache, outputs=outputs)
        self._prefills.append((sum(sizes), began, self._now()))
        if not done:
            return None
        if len(done) < len(chunks):
            hidden = hidden[self._sent(done, torch.int64)]
        return self._first(hidden, num_running, [handles[i] for i in done])

    def _first(self, hidden: Tensor, num_running: int, joining: Sequence[Handle]) -> Wait:
        """Sequences whose last tokens gave hidden [n, H] become rows `num_running` and on."""
        self._join(num_running, joining)
        self.changes.guide(num_running, joining)
        rows = slice(num_running, num_running + len(joining))
        return self._result(self.first_tokens(hidden, rows, Way.of(joining)), 1, began=None)

    def first_tokens(self, hidden: Tensor, rows: slice, way: Way) -> Tensor:
        """Of sequences whose last tokens gave hidden [n, H], the rows of the batch: what the host will read."""
        return self._emit(hidden, self.ints[LENGTH, rows], None, rows, way)

    def chunks(
        self, ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int], tables: Tensor
    ) -> tuple[Batch, KVCache]:
        """A forward of chunks of several sequences, and the cache under their `tables` [2, chunks, max_pages]. ids: of
        all chunks, one after another; starts, sizes: of each, in its sequence.
        """
        self.model.ops.row_invariant = False  # where it counts, a chunk is a forward by itself: its rows are the same
        tokens, lengths = ragged_layout(ids, starts, sizes)
        cache = self.cache.with_tables(tables)
        batch = Batch.ragged(
            self._sent(tokens, torch.int64), self._sent(lengths, torch.int32), cache,
            max_seqlen=max(sizes), max_kv_len=max(lengths[len(sizes) + 1 :]),
        )  # fmt: skip
        return batch, cache

    def timed_prefills(self) -> Iterator[tuple[int, float]]:
        """(tokens, seconds) of the forwards that have ended, each once; waits for none."""
        while self._prefills and (seconds := _elapsed(*self._prefills[0][1:])) is not None:
            yield self._prefills.popleft()[0], seconds

    def _know_prompts(self, chunks: Sequence[Chunk], ends: Sequence[int], states: Tensor) -> None:
        """What each token of `chunks` says of the prompt's next one, for those that asked. states: [tokens, H], of the
        chunks one after another, which end at `ends`. The device is waited for.
        """
        for chunk, first in zip(chunks, ends, strict=False):
            handle, prompt = chunk.handle, chunk.handle.request.prompt
            known = len(handle.prompt_logprobs)  # all of them where it was preempted
            if (count := handle.request.prompt_logprobs) is None:
                continue
            for start in range(known, min(chunk.start + len(chunk.tokens), len(prompt) - 1), LOGPROB_ROWS):
                end = min(start + LOGPROB_ROWS, chunk.start + len(chunk.tokens), len(prompt) - 1)
                rows = slice(first + start - chunk.start, first + end - chunk.start)
                tokens = list(prompt[start + 1 : end + 1])
                words = logprob_words(self.model.logits(states[rows]), self._sent(tokens, torch.int64)).cpu().numpy()
                found = zip(words, tokens, strict=True)
                handle.prompt_logprobs += [read_logprobs(w, token, count) for w, token in found]

    # -- decode

    def captures(self, tokens: int) -> bool:
        """Whether forwards of so many are CUDA graphs."""
        return self.model.ops.supports_graphs and (self._most_captured is None or tokens <= self._most_captured)

    @property
    def short_sizes(self) -> list[int]:
        """Tokens of the prefills that are captured: where it counts, a chunk is a forward by itself."""
        return [] if self.reproducible else [size for size in self.short_prefills.sizes if self.captures(size)]

    def capture(self, draft_lengths: Sequence[int], ways: Sequence[Way]) -> None:
        """Have steps of the longest sequences captured, and short prefills. No row may stand for anybody."""
        for batch, num_drafts, way in product(self.batches, draft_lengths, ways):
            if self.captures(batch * (num_drafts + 1)):
                self._graph(batch, num_drafts, way, self.max_kv_len)
        for size in self.short_sizes:
            self.short_prefills.capture(size)

    def joint_shapes(self, ways: Sequence[Way]) -> list[Shape]:
        """Of the joint steps that are captured, of a model that joins."""
        return JointSteps.shapes(self.short_sizes, self.batches, ways)

    def capture_joint(self, ways: Sequence[Way]) -> None:
        """Have joint steps captured. No row may stand for anybody."""
        for shape in self.joint_shapes(ways):
            if shape not in self.joint_steps:
                self.short_prefills.clear(shape.chunk)
                self.joint_steps.keep(shape, self._graphs.capture(partial(self.joint_of, shape), self.written))

    def joint_of(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """A joint step of whatever chunks lie in the tables and lengths of short prefills."""
        return self.joint_step(shape.batch, shape.way, *self.short_prefills.batch(shape.chunk))

    def time_short_prefills(self) -> list[tuple[int, float]]:
        """(tokens, seconds) of those that were captured, where nothing is attended to yet. Waits for the device."""
        found = []
        for size in self.short_prefills.captured_sizes:
            moments = [self._now()]
            for _ in range(TIMED_RUNS):
                self.short_prefills.replay(size)
                moments.append(self._now())
            if self.hidden.is_cuda:
                torch.cuda.synchronize(self.hidden.device)
            times = [_elapsed(began, ended) for began, ended in pairwise(moments)]
            found.append((size, min(seconds for seconds in times if seconds is not None)))
        return found

    def decode(self, handles: Sequence[Handle], num_drafts: int, longest: int) -> Wait:
        """Start a step of rows 0 to len(handles) - 1. longest: tokens that any of them may ever hold."""
        batch = self.bucket(len(handles))
        way = Way.of(handles)
        self.changes.guide(0, handles)
        began: _Moment | None
        if self.captures(batch * (num_drafts + 1)):
            known = len(self._steps)
            graph, result = self._graph(batch, num_drafts, way, longest + num_drafts + 1)
            began = self._beginning() if len(self._steps) == known else None  # a graph's first replay takes longer
            graph.replay()
        else:
            began = self._beginning()
            result = self.step(batch, num_drafts, way, self.max_kv_len)
        return self._result(result[: len(handles)], num_drafts + 1, began=began)

    def least_joint(self, handles: Sequence[Handle]) -> Shape | None:
        """The shortest joint step in which these decode, None where none serves."""
        way, count = Way.of(handles), len(handles)
        if not self.model.ops.supports_graphs:
            return Shape(count + 1, count, way)
        return self.joint_steps.least(count, way)

    @property
    def most_joined(self) -> int | None:
        """Chunks of a joint step at most; None for any."""
        return SEQUENCES - 1 if self.model.ops.supports_graphs else None

    def joint(self, handles: Sequence[Handle], chunks: Sequence[Chunk]) -> tuple[Wait, Wait | None, int] | None:
        """Start a decode step of rows 0 to len(handles) - 1, without drafts, and the prefill of `chunks` as one
        forward, and have sequences whose last chunks these are join. None where no forward serves, and nothing is done.
        No chunk's tokens are weighed (prompt_logprobs).

        Returns what waits for the rows' tokens, what waits for first tokens as `prefill` does, and how many tokens the
        forward is of, filled up.
        """
        way, count = Way.of(handles), len(handles)
        ids, starts, sizes, tables = self._layout(chunks)
        shape, size = None, sum(sizes) + count
        if self.model.ops.supports_graphs:
            if (shape := self.joint_steps.find(sum(sizes), len(chunks), count, way)) is None:
                return None
            size = shape.size
        self.changes.guide(0, handles)
        began: _Moment
        if shape is not None:
            self.short_prefills.put(ids, starts, sizes, tables, shape.chunk)
            began = self._beginning()
            result, last = self.joint_steps.replay(shape)
        else:
            began = self._beginning()
            batch, cache = self.chunks(ids, starts, sizes, self._sent(tables, torch.int32))
            result, last = self.joint_step(count, way, batch, cache)
        tokens = self._result(result[:count], 1, began=began)
        done = [i for i, c in enumerate(chunks) if c.is_last]
        if not done:
            return tokens, None, size
        first = self._first(last[self._sent(done, torch.int64)], count, [chunks[i].handle for i in done])
        return tokens, first, size

    def joint_step(self, batch: int, way: Way, chunks: Batch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """One decode step of rows 0 to batch - 1 and a prefill, all on the device: what `step` returns, and the hidden
        states of the chunks' last tokens. cache: under the tables of `chunks`.
        """
        self.model.ops.row_invariant = False
        own, rows = self.cache.rows(batch), slice(0, batch)
        ids, lengths = self.ints[TOKEN, rows][:, None], self.ints[LENGTH, rows]
        fed = Batch.decode(ids, lengths, own, self.max_kv_len, self.model.ops)
        last, states = self.model.forward_joint(chunks, cache, fed, own)
        return self._emit(states, fed.positions, None, rows, way), last

    def step(self, batch: int, num_drafts: int, way: Way, max_kv_len: int) -> Tensor:
        """One decode step of rows 0 to batch - 1, all on the device.

        Returns what `_read` reads, int64: [batch, num_drafts + 3], and more columns where `way` has log-probabilities.
        A token that is -1 could not be chosen; the step that may be running behind goes on from token 0. max_kv_len: no
        context is longer, nor will be when a captured step is replayed.
        """
        self.model.ops.row_invariant = self.reproducible
        cache, rows = self.cache.rows(batch), slice(0, batch)
        token, lengths = self.ints[TOKEN, rows], self.ints[LENGTH, rows]
        ids, drafts = token[:, None], None
        if num_drafts and self.drafter is not None:
            drafts = self.drafter.draft(token, self.hidden[rows], lengths, cache, num_drafts, max_kv_len)
            ids = torch.cat((ids, drafts), dim=1)
        fed = Batch.decode(ids, lengths, cache, max_kv_len, self.model.ops)
        states = self.model.forward(fed, cache)  # [batch * q_len, H]
        return self._emit(states, fed.positions, drafts, rows, way)

    def _emit(self, states: Tensor, positions: Tensor, drafts: Tensor | None, rows: slice, way: Way) -> Tensor:
        """Choose what follows the tokens at positions [n], which gave states [n, H]: of each row its last known token
        and `drafts`. The rows go on with it. Returns what the host will read.
        """
        tokens, words = self._choose(states, positions, drafts, rows, way)
        chosen = tokens.view(rows.stop - rows.start, -1)
        result = self.model.ops.decode_advance(
            chosen, self.changes.refuse(drafts, rows, way), states, self.ints[TOKEN, rows], self.ints[LENGTH, rows],
            self.ints[LIMIT, rows], self.hidden[rows],
        )  # fmt: skip
        self.changes.count(result, rows, way)
        return result if words is None else torch.cat((result, words.view(len(result), -1)), dim=1)

    def _choose(
        self, hidden: Tensor, positions: Tensor, drafts: Tensor | None, rows: slice, way: Way
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens [n] that follow the ones at positions [n], which gave hidden [n, H], and their `logprob_words`."""
        if not way.needs_logits:
            return self.model.greedy(hidden, screened=not self.reproducible), None
        raw = self.model.logits(hidden)
        logits = self.changes.apply(raw, positions + 1, drafts, rows, way)
        if way.sampled:
            ints, floats = self.ints[:, rows], self.floats[:, rows]
            min_p = floats[MIN_P] if way.min_p else None
            wanted = Parameters(floats[TEMPERATURE], floats[TOP_P], ints[TOP_K], ints[KEY], min_p)
            q_len = 1 if drafts is None else drafts.shape[1] + 1
            tokens = choose(logits, positions + 1, wanted.repeated(q_len), way.cut)
        else:
            tokens = likeliest(logits)
        return tokens, logprob_words(raw, tokens) if way.logprobs else None

    def _kv_len(self, longest: int) -> int:
        return min(self.max_kv_len, 1 << (max(longest, self.least_kv_len) - 1).bit_length())

    def _graph(self, batch: int, num_drafts: int, way: Way, longest: int) -> Captured:
        """The step as a CUDA graph and the tensor that it leaves its result in, captured when first asked for; but no
        more than PATIENT sequences wait for that where the one of longer contexts will do.

        What the warm-up writes to the cache lies at and after the current lengths, where the next step writes again.
        """
        max_kv_len = self._kv_len(longest)
        key = batch, num_drafts, way, max_kv_len
        if key not in self._steps and batch > PATIENT:
            longer = ((batch, num_drafts, way, kv_len) for kv_len in self.kv_lens if kv_len > max_kv_len)
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
