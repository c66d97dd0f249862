"""One forward as a value: what the scheduler has decided, and all that the runner needs for it (vLLM: SchedulerOutput).

A plan has no tensors and no request handles. It can be written as JSON, and any runner of the same model and limits
that runs the same plans in the same order makes the same tokens. The plan in which a request joins the decode batch has
all that the runner must know of it; from then on the request is a row.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

from kerngen.errors import UsageError
from kerngen.runtime.cache import KINDS
from kerngen.runtime.config import Arm
from kerngen.runtime.config_fields import short
from kerngen.runtime.media.values import Kind, Media
from kerngen.runtime.sampling import CUTS, Sampling, cut_for

MAX_JSON_BYTES = 1 << 26  # of one plan: 128 rows with a mask each take 6 MB, a chunk of 2,048 tokens 20 kB
ARRAYS = ("|u1", "<f4")  # that items have: of patches, of sound
GREEDY = Sampling()


class SamplingMode(NamedTuple):
    """How a step chooses tokens. cut: see sampling.cut_for. The others say what some row needs.

    masked: suppresses tokens of its own, or has a mask; guided: has a mask, and takes none of the drafts that others
    may take; held: may not end yet.
    """

    sampled: bool = False
    cut: int = 0
    masked: bool = False
    min_p: bool = False
    penalized: bool = False
    biased: bool = False
    held: bool = False
    guided: bool = False
    logprobs: bool = False

    @staticmethod
    def for_sampling(sampling: Sequence[Sampling]) -> SamplingMode:
        """What the parameters alone ask for, but for min_tokens."""
        sampled = not all(s.is_greedy for s in sampling)
        return SamplingMode(
            sampled=sampled,
            cut=cut_for(sampling) if sampled else 0,
            min_p=sampled and any(s.min_p for s in sampling),
            penalized=any(s.is_penalized for s in sampling),
            biased=any(s.logit_bias for s in sampling),
        )

    @property
    def needs_logits(self) -> bool:
        """Whether more is asked for than each row's likeliest token."""
        return self.sampled or self.masked or self.penalized or self.biased or self.held or self.logprobs


PLAIN = SamplingMode()


@dataclass(frozen=True, slots=True)
class NewPage:
    """Entry `index` of a running sequence's block table of `kind`."""

    kind: str
    row: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What becomes of the rows before the forward, in this order.

    reset: no row stands for a sequence any more. wipe: page 0 may hold NaN, and becomes zeros. moves: of each (row,
    last) the sequence of `row` leaves, row `last` takes its place, and row `last` stands for nobody.
    """

    reset: bool = False
    wipe: bool = False
    moves: tuple[tuple[int, int], ...] = ()
    new_pages: tuple[NewPage, ...] = ()


SAME_ROWS = RowUpdate()


@dataclass(frozen=True, slots=True)
class NewRow:
    """What is known of a sequence that joins the decode batch, besides its pages and its length.

    limit: tokens of prompt and answer together, at most. stop_ids: what may not be chosen before position `first_stop`;
    none without min_tokens. prompt, answer: the tokens that penalties count, where the sequence has any. mask: the bits
    of the tokens that may come next (mask.py), None for a sequence without a mask.
    """

    limit: int
    sampling: Sampling = GREEDY
    suppressed_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    first_stop: int = 0
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    mask: bytes | None = None


@dataclass(frozen=True, slots=True)
class MediaUpdate:
    """What becomes of the embeddings that a runner holds (media_cache.py), before the forward, in this order.

    reset: it holds none. forget: digests of those that go. embed: items whose embeddings are made.
    """

    reset: bool = False
    forget: tuple[bytes, ...] = ()
    embed: tuple[Media, ...] = ()


SAME_MEDIA = MediaUpdate()


@dataclass(frozen=True, slots=True)
class MediaSlice:
    """Soft tokens [first, first + count) of the item with this digest, in place of a chunk's tokens from `at` on."""

    digest: bytes
    at: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(tokens)) of a sequence, and the pages that hold it, in the order of KINDS.

    new_row: of a sequence whose last chunk this is; its first token is chosen then. targets: tokens of the prompt whose
    log-probabilities are wanted: those that follow the chunk's tokens at first_target and on. media: what stands in
    place of tokens, which are 0 there. blocks: (begin, end) of positions in the sequence whose tokens see each other in
    sliding layers, of those in the chunk; no block goes on behind it. means_from, dense_from: as ListedChunks has them
    (batch.py), where prompts choose the keys that they read.
    """

    tokens: tuple[int, ...]
    start: int
    pages: tuple[tuple[int, ...], ...]
    new_row: NewRow | None = None
    targets: tuple[int, ...] = ()
    first_target: int = 0
    media: tuple[MediaSlice, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    means_from: int = 0
    dense_from: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode batch of a forward. batch: rows that are computed, from 0 on; those from StepPlan.num_running on stand
    for nobody. longest: tokens that any of the sequences may ever hold. masks: (row, bits) of rows that have a mask.
    drafter: the number of the one that drafts, where there are several.
    """

    batch: int
    longest: int
    num_drafts: int = 0
    mode: SamplingMode = PLAIN
    masks: tuple[tuple[int, bytes], ...] = ()
    drafter: int = 0

    @property
    def arm(self) -> Arm:
        return Arm(self.num_drafts, self.drafter)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward: the rows that decode, the chunks that are prefilled, or both (mixed_batches.py); or rows alone.

    num_running: rows that stand for a sequence, after `update`. All of them decode, if any does; sequences whose last
    chunks these are become rows num_running and on, in order, and choose their first tokens as first_way says.
    num_tokens: of a forward that is filled up to one that is captured: of both, or of chunks alone (prefill_graphs.py);
    0 otherwise. A runner that has not captured it runs the forward without a graph. media: of the embeddings that
    chunks read. requests: what errors of a page check call the sequences of the rows, then of the chunks; none without
    such checks.
    """

    num_running: int
    update: RowUpdate = SAME_ROWS
    decode: DecodeRows | None = None
    chunks: tuple[PrefillChunk, ...] = ()
    first_mode: SamplingMode = PLAIN
    num_tokens: int = 0
    media: MediaUpdate = SAME_MEDIA
    requests: tuple[int, ...] = ()

    def to_json(self) -> str:
        """On one line. Fields that have their default are left out."""
        return json.dumps(_plain(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str, limits: Limits) -> StepPlan:
        """The plan that `to_json` wrote. Raises UsageError where it is none, or does not keep to `limits`."""
        if len(text) > MAX_JSON_BYTES:
            raise UsageError(f"a plan of {len(text):,} B; {MAX_JSON_BYTES:,} B are read at most")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise UsageError(f"a plan is not JSON: {e}") from e
        plan = _typed(StepPlan, values, "plan")
        limits.check(plan)
        return plan


@dataclass(frozen=True, slots=True)
class Limits:
    """What plans may ask of a runner: a page or a row that it does not have would be somebody else's memory.

    max_len: tokens that block tables have room for. max_drafts: of each drafter; () without one. num_pages: of each
    kind, page 0 included, in the order of KINDS. mixes: whether a forward may decode and prefill. media: kinds of items
    that the model takes.
    """

    max_batch: int
    max_len: int
    max_drafts: tuple[int, ...]
    vocab_size: int
    page_size: int
    num_pages: tuple[int, ...]
    mixes: bool = True
    media: frozenset[Kind] = frozenset()

    def check(self, plan: StepPlan) -> None:
        """Raises UsageError where `plan` asks for more."""
        rows, most = self.max_batch, -(-self.max_len // self.page_size)
        _within("the number of rows", (plan.num_running,), rows + 1)
        self._check_update(plan.update, plan.num_running, most)
        _within("the number of chunks", (len(plan.chunks),), rows + 1)
        joining = [chunk.new_row for chunk in plan.chunks if chunk.new_row is not None]
        _within("the number of rows", (plan.num_running + len(joining),), rows + 1)
        if (decode := plan.decode) is not None:
            _within("the rows that decode", (plan.num_running - 1,), decode.batch)
            _within("the rows that are computed", (decode.batch,), rows + 1)
            _within("the drafter", (decode.drafter,), max(1, len(self.max_drafts)))
            longest = self.max_drafts[decode.drafter] if self.max_drafts else 0
            _within("the number of drafts", (decode.num_drafts,), longest + 1)
            _within("the longest sequence with a step's tokens", (decode.longest + decode.num_drafts,), self.max_len)
            _within("a row with a mask", (row for row, _ in decode.masks), plan.num_running)
            for _, bits in decode.masks:
                self._check_mask(bits)
            _check_mode(decode.mode, bool(decode.masks))
        if decode is not None and plan.chunks:
            if not self.mixes:
                raise UsageError("a plan decodes and prefills in one forward; this model and its options need two")
            _within("the number of drafts beside a prefill", (decode.num_drafts,), 1)
            _within("the targets of chunks beside a decode step", (len(c.targets) for c in plan.chunks), 1)
        if plan.chunks and (decode is not None or plan.num_tokens):
            asked = (0 if decode is None else decode.batch) + sum(len(chunk.tokens) for chunk in plan.chunks)
            _within("the tokens of a forward that are none", (plan.num_tokens - asked,), self.max_len)
        else:
            _within("the tokens of a forward that is not filled up", (plan.num_tokens,), 1)
        _check_mode(plan.first_mode, any(new.mask is not None for new in joining))
        for chunk in plan.chunks:
            self._check_chunk(chunk, most)
        for item in plan.media.embed:
            self._check_item(item)
        _within("the number of requests", (len(plan.requests),), plan.num_running + len(plan.chunks) + 1)

    def _check_item(self, item: Media) -> None:
        if item.kind not in self.media:
            takes = ", ".join(sorted(self.media)) or "text alone"
            raise UsageError(f"a plan has media of kind {short(item.kind)}; the model takes {takes}")
        _within("the soft tokens of an item but one", (item.num_tokens - 1,), self.max_len)
        if Media.of(item.kind, item.data, item.grid, item.num_tokens).digest != item.digest:
            raise UsageError("an item of a plan has another's digest")

    def _check_update(self, update: RowUpdate, num_running: int, most: int) -> None:
        before = num_running + len(update.moves)
        _within("the number of rows before some leave", (before,), self.max_batch + 1)
        if update.reset and before:
            raise UsageError(f"a plan resets all rows, and {before} of them stand for sequences")
        for last, move in zip(reversed(range(num_running, before)), update.moves, strict=True):
            _within("a row that leaves", (move[0],), last + 1)
            if move[1] != last:
                raise UsageError(f"a plan lets row {move[1]} take the place of row {move[0]}; row {last} is the last")
        for new in update.new_pages:
            if new.kind not in KINDS:
                raise UsageError(f"a plan has a page of kind {short(new.kind)}; there are {', '.join(KINDS)}")
            _within("a row that gets a page", (new.row,), num_running)
            _within("the place of a page in its table", (new.index,), most)
            _within("a page", (new.page,), self.num_pages[KINDS.index(new.kind)])

    def _check_chunk(self, chunk: PrefillChunk, most: int) -> None:
        size, end = len(chunk.tokens), chunk.start + len(chunk.tokens)
        _within("the tokens of a chunk", (size - 1,), self.max_len)
        _within("where a chunk begins", (chunk.start,), self.max_len)
        _within("where a chunk ends", (end,), self.max_len + 1)
        _within("where a chunk's means begin", (chunk.means_from,), chunk.start + 1)
        _within("where a prompt reads all keys", (chunk.dense_from,), self.max_len + 1)
        self._check_tokens(chunk.tokens, chunk.targets)
        _within("the targets of a chunk", (chunk.first_target, chunk.first_target + len(chunk.targets)), size + 1)
        if len(chunk.pages) != len(KINDS):
            raise UsageError(f"a chunk of a plan has pages of {len(chunk.pages)} kinds; there are {', '.join(KINDS)}")
        for pages, count in zip(chunk.pages, self.num_pages, strict=True):
            _within("the pages of a chunk that lack", (len(pages) - -(-end // self.page_size),), most)
            _within("the pages of a chunk", (len(pages),), most + 1)
            _within("a page", pages, count)
        behind = 0
        for part in chunk.media:
            _within("where media are in a chunk", (part.at - behind,), size)
            _within("the soft tokens of a chunk but one", (part.count - 1, part.first), self.max_len)
            behind = part.at + part.count
            _within("where media end in a chunk", (behind,), size + 1)
        behind = chunk.start
        for begin, behind_it in chunk.blocks:
            _within("the tokens between blocks", (begin - behind,), size)
            _within("the tokens of a block but one", (behind_it - begin - 1,), size)
            behind = behind_it
        _within("the tokens behind blocks", (end - behind,), size + 1)
        if (new := chunk.new_row) is not None:
            _within("the most tokens of a sequence", (new.limit,), self.max_len)
            _within("the tokens that a sequence may still get", (new.limit - end,), self.max_len)
            self._check_tokens(new.suppressed_ids, new.stop_ids, new.prompt, new.answer)
            self._check_tokens([token for token, _ in new.sampling.logit_bias])
            _within("where a sequence may end", (new.first_stop,), self.max_len + 1)
            if new.mask is not None:
                self._check_mask(new.mask)

    def _check_tokens(self, *tokens: Iterable[int]) -> None:
        for ids in tokens:
            _within("a token", ids, self.vocab_size)

    def _check_mask(self, bits: bytes) -> None:
        if len(bits) != (need := 4 * -(-self.vocab_size // 32)):
            raise UsageError(f"a mask has {len(bits):,} B in a plan; for {self.vocab_size:,} tokens it has {need:,}")


def _check_mode(mode: SamplingMode, has_masks: bool) -> None:
    if mode.cut not in (0, *CUTS):
        raise UsageError(
            f"a step looks at the {short(mode.cut)} likeliest tokens in a plan; it may at {CUTS}, or 0: all"
        )
    # A step in another mode would not look at masks, and accept drafts that they forbid.
    if has_masks and not (mode.masked and mode.guided):
        raise UsageError("a plan has masks, and a mode that is not masked and guided")


def _within(what: str, numbers: Iterable[int], end: int) -> None:
    for number in numbers:
        if not 0 <= number < end:
            raise UsageError(f"{what} is {short(number)} in a plan; it must be from 0 to {end - 1:,}")


# -- JSON


def _plain(value: Any) -> Any:
    """`value` in terms of what JSON has."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), b64encode(value.tobytes()).decode()]
    kind: Any = type(value)
    if defaults := _defaults(kind):
        found = ((name, getattr(value, name), default) for name, default in defaults.items())
        return {name: _plain(v) for name, v, default in found if default is MISSING or v != default}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """The fields of a record and their defaults; none where `kind` is no record."""
    if is_dataclass(kind):
        return {f.name: f.default for f in fields(kind)}
    names = getattr(kind, "_fields", ())  # of a NamedTuple
    return {name: kind._field_defaults.get(name, MISSING) for name in names}


_hints = cache(get_type_hints)


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` of JSON as a `kind`. Raises UsageError where it is none."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (kind,) = (arg for arg in args if arg is not NoneType)
        return None if value is None else _typed(kind, value, where)
    if origin is tuple and isinstance(value, list):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            return tuple([_typed(k, v, where) for k, v in zip(kinds, value, strict=True)])
    elif origin is np.ndarray and isinstance(value, list):
        with suppress(ValueError, TypeError):
            name, shape, data = value
            if name in ARRAYS:
                return np.frombuffer(b64decode(data, validate=True), name).reshape([int(n) for n in shape])
    elif origin is Literal and value in args:
        return value
    elif kind is bytes and isinstance(value, str):
        with suppress(ValueError):
            return b64decode(value, validate=True)
    elif kind is float and type(value) in (int, float):
        with suppress(OverflowError):
            return float(value)
    elif isinstance(kind, type) and (known := _defaults(kind)) and isinstance(value, dict):
        wrong = value.keys() - known.keys() | {n for n, d in known.items() if d is MISSING and n not in value}
        if wrong:
            raise UsageError(f"{where} must have {', '.join(known)}; look at {short(sorted(wrong))}")
        return kind(**{name: _typed(_hints(kind)[name], v, f"{where}.{name}") for name, v in value.items()})
    elif type(value) is kind:
        return value
    raise UsageError(f"{where} is {short(value)}, which is no {getattr(kind, '__name__', kind)}")
