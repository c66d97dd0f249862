"""Requests, their handles, and their results."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import KerngenError
from kerngen.runtime.engine.mask import TokenMask
from kerngen.runtime.logprobs import TokenLogprobs
from kerngen.runtime.media.input import Block, longest_block, touched
from kerngen.runtime.media.values import Placed
from kerngen.runtime.sampling import Sampling

GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """prompt: token ids. The answer ends after max_new_tokens, after one of stop_ids, or after the token at which
    `stops` returns True; it is told each token once, in order. suppressed_ids: never chosen, beside the model's.
    logprobs: of each token, and so many of the likeliest ones at its place; None for none (logprobs.py).
    prompt_logprobs: the same of the prompt's, all but its first; such a prompt is computed whole, whatever the cache
    has; a token that stands for an image or a sound has no probability (-inf). mask: what may be chosen, one token at a
    time (mask.py); it is this request's alone. media: what is in the prompt beside text, sorted; the prompt has the
    placeholder of its kind at each of its places, and nowhere else (MediaInput).
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: Sequence[int] = ()
    stops: Callable[[int], bool] | None = None
    suppressed_ids: Sequence[int] = ()
    logprobs: int | None = None
    mask: TokenMask | None = None
    prompt_logprobs: int | None = None
    media: tuple[Placed, ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """Times in seconds, the consumer's included. prefill_s ends with the first token, and begins where the request was
    handed in; decode_s covers the rest, made in num_steps steps. queue_s: of prefill_s, until it first had pages.

    num_draft_tokens: drafts a step, the most where the number adapted. drafted, accepted: how many drafts stood at
    position 0, 1, ... of their step, and how many of those were accepted, all before them included.
    """

    num_prompt_tokens: int
    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_emitted: int  # by the steps, before the last one was cut at a stop token or the limit
    prefill_s: float
    decode_s: float
    num_cached_tokens: int = 0  # of the prompt, that were found in the cache
    num_preemptions: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    queue_s: float = 0.0

    @property
    def phases_s(self) -> tuple[float, float, float]:
        """In the queue, of prefill, of decoding: one after the other, together all of the request's time."""
        return self.queue_s, self.prefill_s - self.queue_s, self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """Decode rate, without the first token; 0 if there was no step."""
        return (self.num_tokens - 1) / self.decode_s if self.num_steps and self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.num_prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step emits on average: 1 without drafting, num_draft_tokens + 1 at most; 0 without steps."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of drafts that were accepted, for each position of a step."""
        return tuple(a / d for a, d in zip(self.accepted, self.drafted, strict=True))


@dataclass(frozen=True, slots=True)
class Generation:
    """tokens: what was generated, a stop token included. stop_reason: "stop", "length" or "cancelled".

    logprobs: an entry a token, where the request asked for them.
    """

    tokens: list[int]
    stop_reason: str
    stats: Stats
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    """Who is where in an engine between two steps, and what it has left.

    num_preemptions, num_graphs: since the engine was made; steps and prefills are captured as graphs. free_pages,
    num_pages: of each kind of cache, page 0 excluded; pages that only later requests may find are free. key_tiles: as
    of Runner.key_tiles.
    """

    num_waiting: int
    num_prefilling: int
    num_running: int
    num_preemptions: int
    num_graphs: int
    free_pages: dict[str, int]
    num_pages: dict[str, int]
    key_tiles: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def density(self) -> dict[int, float]:
        """Of each layer whose prompts choose the keys that they read: the share of tiles of keys that they read."""
        return {layer: kept / of_all for layer, (kept, of_all) in self.key_tiles.items() if of_all}


class Phase(enum.Enum):
    WAITING = "waiting"  # without pages: not begun, or preempted
    PREFILLING = "prefilling"
    RUNNING = "running"  # has a row of the decode batch
    DONE = "done"


@dataclass(eq=False, slots=True)
class Handle:
    """A request under way. `tokens`, `logprobs`, `prompt_logprobs`, `stop_reason` and `error` are for everyone, the
    rest is the engine's.

    logprobs: an entry a token, where the request asked for them. stop_reason: "" while it runs; "error" where `error`
    says why there is no further token: what the model computed in its place, or that the request's mask allows none.
    """

    request: Request
    order: int  # of arrival: who came last is preempted first
    began: float
    blocks: tuple[Block, ...] = ()  # of the prompt's media
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: str = ""
    error: KerngenError | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # whole when the first token is there

    phase: Phase = Phase.WAITING
    row: int = -1  # of the decode batch
    epoch: int = 0  # results of steps that began before the last preemption are none of this one's
    pages: dict[str, list[int]] = field(default_factory=lambda: {"full": [], "sliding": []})  # 0 where let go
    num_gone: int = 0  # the first sliding pages, which lie behind the window
    keys: list[bytes] = field(default_factory=list)  # of the full pages of known tokens (pages.py)
    num_published: int = 0
    goal: int = 0  # tokens to prefill
    num_made: int = 0  # of `tokens`, since it was admitted or by prefilling them again
    allowed: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # by its mask, of the next token
    num_cached: int = 0  # tokens in the cache, as far as the host knows
    means_from: int = 0  # the first position whose means of keys may be missing, where prompts choose by them
    in_flight: deque[int] = field(default_factory=deque)  # the most tokens that each step not yet read may add
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0
    num_steps: int = 0
    num_emitted: int = 0
    num_found: int = 0
    num_preemptions: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    limit: int = field(init=False)  # tokens of prompt and answer together, at most
    longest_block: int = field(init=False)  # tokens of the prompt that must be in one chunk, the most; 0: none must

    def __post_init__(self) -> None:
        self.longest_block = longest_block(self.blocks)
        self.limit = len(self.request.prompt) + self.request.max_new_tokens

    @property
    def is_done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]

    def chunk_end(self, start: int, end: int) -> int:
        """`end`, if a chunk that begins at `start` may end there. If `end` is within a block whose tokens see each
        other, where that block begins; or where it ends, if the chunk begins in it.
        """
        for block in touched(self.blocks, end, end + 1):
            if block.sees_itself and block.start < end:
                return block.start if block.start > start else block.end
        return end

    @property
    def longest(self) -> int:
        """The most tokens that the cache may hold once all steps that were started have ended."""
        return min(self.num_cached + sum(self.in_flight), self.limit)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        while len(self.drafted) < num_drafts:
            self.drafted.append(0)
            self.accepted.append(0)
        for i in range(num_drafts):
            self.drafted[i] += 1
            self.accepted[i] += i < num_accepted

    @property
    def stats(self) -> Stats:
        """Of what was made so far."""
        first = self.first_token_at or self.ended_at or self.began
        return Stats(
            num_prompt_tokens=len(self.request.prompt),
            num_tokens=len(self.tokens),
            num_steps=self.num_steps,
            num_draft_tokens=len(self.drafted),
            num_emitted=self.num_emitted,
            prefill_s=first - self.began,
            decode_s=max(self.ended_at - first, 0.0),
            num_cached_tokens=self.num_found,
            num_preemptions=self.num_preemptions,
            drafted=tuple(self.drafted),
            accepted=tuple(self.accepted),
            queue_s=(self.admitted_at or first) - self.began,
        )

    @property
    def generation(self) -> Generation:
        return Generation(list(self.tokens), self.stop_reason, self.stats, list(self.logprobs))


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one request; `handle.is_done` says whether they are its last. logprobs: as `Handle.logprobs`."""

    handle: Handle
    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def then(self, later: Event) -> Event:
        """Both, as one."""
        return Event(self.handle, self.tokens + later.tokens, self.logprobs + later.logprobs)
