"""Makes plans (plan.py) of the running requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kerngen.runtime.cache import KINDS
from kerngen.runtime.config import Arm, SparsePrefill
from kerngen.runtime.engine.mask import bits_of
from kerngen.runtime.engine.plan import DecodeRows, MediaSlice, NewRow, PrefillChunk, SamplingMode
from kerngen.runtime.engine.request import Handle, Request
from kerngen.runtime.engine.scheduler import Chunk
from kerngen.runtime.media.input import touched
from kerngen.runtime.media.values import Placed


def sampling_mode(handles: Sequence[Handle]) -> SamplingMode:
    """How a step of these sequences chooses tokens."""
    requests = [h.request for h in handles]
    sampling = [r.sampling for r in requests]
    guided = any(r.mask is not None for r in requests)
    return SamplingMode.for_sampling(sampling)._replace(
        masked=guided or any(r.suppressed_ids for r in requests),
        held=any(h.num_made < s.min_tokens for h, s in zip(handles, sampling, strict=True)),
        guided=guided,
        logprobs=any(r.logprobs is not None for r in requests),
    )


def decode_rows(running: Sequence[Handle], batch: int, arm: Arm) -> DecodeRows:
    """A decode step of `running`, which are rows 0 and on, computed as `batch` rows. arm: what it drafts."""
    masks = tuple((row, bits_of(h).tobytes()) for row, h in enumerate(running) if h.request.mask is not None)
    return DecodeRows(batch, max(h.limit for h in running), arm.length, sampling_mode(running), masks, arm.by)


def prefill_chunk(
    chunk: Chunk, eos_ids: Sequence[int], vocab: int, sparse: SparsePrefill | None = None
) -> PrefillChunk:  # fmt: skip
    """eos_ids: end an answer beside a request's own stop_ids. sparse: how prompts choose the keys that they read."""
    handle, start, size = chunk.handle, chunk.start, len(chunk.tokens)
    known = len(handle.prompt_logprobs)
    targets: tuple[int, ...] = ()
    if handle.request.prompt_logprobs is not None:  # after a preemption they may be known
        targets = tuple(handle.request.prompt[known + 1 : start + size + 1])
    pages = tuple([tuple(handle.pages[kind]) for kind in KINDS])
    new_row = _new_row(handle, eos_ids, vocab) if chunk.is_last else None
    tokens, media = chunk.tokens, tuple(_slices(chunk))
    if media:
        tokens = list(tokens)
        for part in media:
            tokens[part.at : part.at + part.count] = [0] * part.count
    blocks = tuple([
        (max(b.start, start), min(b.end, start + size))
        for b in touched(handle.blocks, start, start + size) if b.sees_itself
    ])  # fmt: skip
    means_from, dense_from = (0, 0) if sparse is None else (handle.means_from, sparse.dense_from(handle.goal))
    return PrefillChunk(
        tuple(tokens), start, pages, new_row, targets, known - start if targets else 0, media, blocks, means_from,
        dense_from,
    )  # fmt: skip


def media_of(chunk: Chunk) -> list[Placed]:
    """The items that have soft tokens in `chunk`."""
    end = chunk.start + len(chunk.tokens)
    return [placed for placed in chunk.handle.request.media if placed.start < end and placed.end > chunk.start]


def _slices(chunk: Chunk) -> Iterator[MediaSlice]:
    for placed in media_of(chunk):
        begin = max(placed.start, chunk.start)
        end = min(placed.end, chunk.start + len(chunk.tokens))
        yield MediaSlice(placed.media.digest, begin - chunk.start, begin - placed.start, end - begin)


def begun_media(prefilling: Iterable[Handle]) -> set[bytes]:
    """Digests of the items of which some soft tokens are in the cache, and the next chunk has more."""
    return {
        placed.media.digest
        for handle in prefilling for placed in handle.request.media if placed.start < handle.num_cached < placed.end
    }  # fmt: skip


def _new_row(handle: Handle, eos_ids: Sequence[int], vocab: int) -> NewRow:
    request, sampling = handle.request, handle.request.sampling
    num_prompt = len(request.prompt)
    counts = sampling.is_penalized
    return NewRow(
        limit=handle.limit,
        sampling=sampling,
        suppressed_ids=tuple(request.suppressed_ids),
        stop_ids=held_ids(request, eos_ids, vocab),
        first_stop=num_prompt + sampling.min_tokens,
        prompt=tuple(request.prompt) if counts else (),
        answer=tuple(handle.tokens[: handle.goal - num_prompt]) if counts else (),
        mask=None if request.mask is None else bits_of(handle).tobytes(),
    )


def held_ids(request: Request, eos_ids: Sequence[int], vocab: int) -> tuple[int, ...]:
    """The tokens that `min_tokens` holds back; none without it."""
    if not request.sampling.min_tokens:
        return ()
    return tuple(t for t in dict.fromkeys((*request.stop_ids, *eos_ids)) if 0 <= t < vocab)
