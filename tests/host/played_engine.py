"""An engine that says what it is told to, in place of a process with a model."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from command import ROOT

from kerngen.errors import UsageError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.engine import Stats, TokenLogprobs
from kerngen.runtime.media.values import Placed
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve.engine_process import Guiding, Made, Ready, TokenRequest
from kerngen.runtime.serve.engines import EngineFailed, ReplicaState
from kerngen.runtime.serve.service import Limits, Service
from kerngen.runtime.session import stop_ids_of
from kerngen.runtime.text import TextCodec

TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
MAX_LEN = 256


class PlayedEngine:
    """script: what follows a prompt, in steps of tokens; the last of them is a stop token or the limit. pause_s: before
    each step. Remembers what was asked, and what was left before its end, or ended since it was enough.
    """

    def __init__(self, script: Callable[[Sequence[int]], list[list[int]]], stop_ids: Sequence[int]) -> None:
        self.script, self._stop_ids = script, set(stop_ids)
        self.pause_s = 0.0
        self.is_alive, self.is_lost, self.why_dead = True, False, ""
        self.fails: str | None = None
        self.fails_at = 0
        self.refuses: str | None = None
        self.asked: list[tuple[list[int], int, Sampling, tuple[int, ...]]] = []
        self.guided: list[Guiding | None] = []
        self.media: list[tuple[Placed, ...]] = []
        self.num_left = self.num_ended = 0
        self.load = None
        self.replicas: tuple[ReplicaState, ...] = ()

    async def stream(self, request: TokenRequest, enough: Callable[[], bool] = lambda: False) -> AsyncIterator[Made]:
        prompt, max_new_tokens, stop_ids, logprobs = (
            request.prompt, request.max_new_tokens, request.stop_ids, request.logprobs
        )  # fmt: skip
        self.asked.append((list(array("i", prompt)), max_new_tokens, request.sampling, tuple(stop_ids)))
        self.guided.append(request.guiding)
        self.media.append(request.media)
        number, made, is_over = len(self.asked), 0, False
        of_prompt = (
            [] if request.prompt_logprobs is None else [TokenLogprobs(t, -2.0, ((t, -2.0),)) for t in prompt[1:]]
        )
        try:
            for at, step in enumerate(self.script(prompt)):
                await asyncio.sleep(self.pause_s)
                if self.refuses is not None:
                    raise UsageError(self.refuses)
                if self.fails is not None and at >= self.fails_at:
                    raise EngineFailed(self.fails)
                tokens = step[: max_new_tokens - made]
                ends = next((i for i, t in enumerate(tokens, 1) if t in stop_ids), None)
                tokens = tokens[:ends]
                made += len(tokens)
                reason = "stop" if ends is not None else "length" if made == max_new_tokens else ""
                is_over = bool(reason)
                stats = Stats(len(prompt), made, made, 0, made, 0.1, 0.2, num_cached_tokens=3, queue_s=0.04)
                found = [TokenLogprobs(t, -0.5, tuple((t + i, -0.5 - i) for i in range(logprobs or 0))) for t in tokens]
                yield Made(number, tokens, [] if logprobs is None else found, reason, stats if reason else None,
                           prompt_logprobs=of_prompt if made == len(tokens) else [])  # fmt: skip
                if is_over:
                    return
                if enough():
                    is_over = True
                    self.num_ended += 1
                    yield Made(number, [], reason="stop", stats=stats)
                    return
        finally:
            self.num_left += not is_over

    def end(self, why: str) -> None:
        """Nobody waits for long here."""

    async def close(self) -> None:
        self.is_alive = False


def played_service(
    script: Callable[[Sequence[int]], list[list[int]]] | None = None, **changes: Any
) -> tuple[Service, PlayedEngine]:
    """The tiny checkpoint's text behind an engine that answers every prompt with `script`, "Hello there" where None."""
    config = read_model_config(TINY)
    codec = TextCodec(TINY, config.bos_id)
    stop_ids = stop_ids_of(TINY, config, codec)
    engine = PlayedEngine(script or (lambda prompt: [*words(codec, "Hello there"), [stop_ids[0]]]), stop_ids)
    ready = Ready(MAX_LEN, 8, {"full": 8, "sliding": 8}, "played", 0.0, 0.0, None)
    service = Service(
        client=engine, ready=ready, codec=codec, config=config, names=("tiny", "also"), suggested={}, stop_ids=stop_ids,
        created=1, limits=changes.pop("limits", Limits()), **changes,
    )  # fmt: skip
    return service, engine


def words(codec: TextCodec, text: str) -> list[list[int]]:
    """A step a token."""
    return [[i] for i in codec.encode(text)[1:]]
