"""The service behind the routes: model names and limits, tokenizer and template, and running requests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.chat import TemplateTooSlow
from kerngen.runtime.config import ModelConfig
from kerngen.runtime.media.options import TEXT_ONLY, MediaSupport
from kerngen.runtime.media.parts import Message, items_of
from kerngen.runtime.media.prompt import EncodedPrompt, encode_chat, place, prepared
from kerngen.runtime.media.values import Placed
from kerngen.runtime.serve.engine_process import Made, Ready, TokenRequest
from kerngen.runtime.serve.engines import Engines
from kerngen.runtime.serve.errors import ApiError, shortened
from kerngen.runtime.serve.metrics import Metrics
from kerngen.runtime.serve.tracing import Trace, Tracing
from kerngen.runtime.text import TextCodec
from kerngen.system.cancellation import Cancellation

RETRY_AFTER_S = 1
# What is long, or takes a template long, waits for its like alone: beside it the others find a thread that is quick.
QUICK_THREADS, QUICK_CHARS, QUICK_S = 2, 64 * 1024, 1.0
MEDIA_THREADS = 4  # that wait for what is fetched and decoded, which processes of their own do
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Limits:
    """queue: sequences that are at work or wait; more are sent away. body_bytes: of a request, which must have come
    within body_s seconds. all_bytes: of all requests' bodies that are held at once. values: that one may hold, since
    reading them keeps all others waiting, and all_values: that all may hold at once, each of up to 150 B. logprobs:
    that an answer may hold which is sent whole, and all of those at once: 110 B each, and 600 B while one is written.
    media_bytes: of what the model is given of images and sounds, of all sequences at once.
    """

    queue: int = 256
    body_bytes: int = 16 * 1024 * 1024
    body_s: float = 30.0
    all_bytes: int = 128 * 1024 * 1024
    values: int = 500_000
    all_values: int = 2_000_000
    logprobs: int = 1_000_000
    media_bytes: int = 2 << 30


@dataclass(slots=True)
class Service:
    """names: what clients may call the model, the first is what it calls itself. suggested: sampling parameters of
    generation_config.json. stop_ids: tokens that end an answer. created: when the server began, in seconds.
    control_tokens: what looks like a control token in a raw prompt is one, unless its request says otherwise.
    media: what is read of images and sounds, and by whom. cache: what the cache is, as Metrics has it.
    """

    client: Engines
    ready: Ready
    codec: TextCodec
    config: ModelConfig
    names: Sequence[str]
    suggested: Mapping[str, float]
    stop_ids: tuple[int, ...]
    created: int
    limits: Limits = field(default_factory=Limits)
    tracing: Tracing | None = None
    control_tokens: bool = False
    media: MediaSupport = TEXT_ONLY
    cache: Mapping[str, str] = field(default_factory=dict)
    is_draining: bool = False
    metrics: Metrics = field(init=False)
    _num_inside: int = field(default=0, init=False)
    _num_logprobs: int = field(default=0, init=False)
    _num_media_bytes: int = field(default=0, init=False)
    _quick: ThreadPoolExecutor = field(init=False)
    _slow: ThreadPoolExecutor = field(init=False)
    _media: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.names[0], self.client, self.cache)
        # A batch of one text is encoded in its thread: more of them would be the library's own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._quick = ThreadPoolExecutor(QUICK_THREADS, thread_name_prefix="kerngen-text")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="kerngen-long-text")
        self._media = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="kerngen-media")

    def require_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(404, f"the model {shortened(name)!r} is not served here; there is {', '.join(self.names)}",
                           param="model", code="model_not_found")  # fmt: skip

    def trace(self, request: Request) -> Trace:
        """Of a request that begins now; of nothing where no spans are asked for."""
        return Trace() if self.tracing is None else self.tracing.begin(request.headers)

    @property
    def is_open(self) -> bool:
        """Whether requests are let in."""
        return self.client.is_alive and not self.is_draining

    def require_open(self) -> None:
        """Raises ApiError where nobody is let in."""
        if not self.is_open:
            raise ApiError(503, self.client.why_dead or "the server is about to stop", code="unavailable")

    def require_places(self, count: int) -> None:
        """Raises ApiError where `count` sequences are more than there are ever places for."""
        if count > self.limits.queue:
            raise ApiError(400, f"{count} sequences are asked for at once, and {self.limits.queue} may be at work")

    def require_length(self, count: int, param: str, what: str = "characters") -> None:
        """Raises ApiError for a text of so many characters, in field `param`, that a sequence cannot hold it: it is not
        even read.
        """
        most = self.codec.most_chars(self.ready.max_len)
        if count > most:
            raise ApiError(400, f"this model's maximum context length is {self.ready.max_len} tokens; the text has "
                                f"{count:,} {what}, and more than {most:,} are not even counted",
                           param=param, code="context_length_exceeded")  # fmt: skip

    @contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """A place for `count` sequences, which the queue has, or nobody comes in. Raises ApiError."""
        self.require_open()
        self.require_places(count)
        if self._num_inside + count > self.limits.queue:
            raise ApiError(429, f"{self._num_inside} requests are at work or wait, and {self.limits.queue} may",
                           code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})  # fmt: skip
        self._num_inside += count
        try:
            yield
        finally:
            self._num_inside -= count

    @contextmanager
    def logprobs_held(self) -> Iterator[Callable[[int], None]]:
        """Takes the number of each part's log-probabilities, which are held until this is left. Raises ApiError."""
        mine, most = 0, self.limits.logprobs

        def hold(count: int) -> None:
            nonlocal mine
            if mine + count > most:
                raise ApiError(400, f"an answer of more than {most:,} log-probabilities is sent as a stream alone",
                               param="stream")  # fmt: skip
            if self._num_logprobs + count > most:
                raise ApiError(429, f"answers that are sent whole hold {most:,} log-probabilities; stream them",
                               code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)})  # fmt: skip
            mine += count
            self._num_logprobs += count

        try:
            yield hold
        finally:
            self._num_logprobs -= mine

    async def off_loop(self, function: Callable[..., _T], *arguments: Any, size: int = 0) -> _T:
        """What takes its time, beside the event loop. size: of what is worked on, in characters or the like."""
        threads = self._quick if size <= QUICK_CHARS else self._slow
        return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *arguments))

    async def encode(self, text: str, *, with_bos: bool = True, control_tokens: bool | None = None) -> list[int]:
        """A raw prompt's tokens. control_tokens: what looks like one is one; None: as the server was told.

        Raises ApiError for a text that no sequence can hold.
        """
        self.require_length(len(text), "prompt")
        plain = not (self.control_tokens if control_tokens is None else control_tokens)
        return await self.off_loop(partial(self.codec.encode, text, plain=plain, with_bos=with_bos), size=len(text))

    async def encode_chat(
        self, messages: Sequence[Message], variables: Mapping[str, Any], max_soft_tokens: int | None = None
    ) -> EncodedPrompt:
        """Through the chat template; control tokens in what is said are text. max_soft_tokens: of each image, whatever
        its part says. Raises as `encode`, UsageError for media that cannot be read, and ApiError where none can be now.
        """
        ids = await self._chat_ids(messages, variables)
        if self.media.config is None or not items_of(messages):
            return EncodedPrompt(ids)
        unwanted = Cancellation()
        read = partial(prepared, messages, max_soft_tokens, self.media, unwanted)
        try:
            told, made = await asyncio.get_running_loop().run_in_executor(self._media, read)
        except (UsageError, ToolchainError) as e:  # clients see no hints
            raise UsageError(e.message if e.hint is None else f"{e.message}; {e.hint}") from e
        except KerngenError as e:  # no process could decode it, which is no fault of the request
            raise ApiError(503, e.message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER_S)}) from e
        finally:
            unwanted.cancel()  # who has left, or has the result
        if told != messages:  # the times of a video file's frames are text of the prompt
            ids = await self._chat_ids(told, variables)
        return await self.off_loop(place, ids, made, self.media.config)

    async def _chat_ids(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> list[int]:
        """With one placeholder for each item."""
        size = size_of(messages) + size_of(variables)
        self.require_length(size, "messages")
        most = self.codec.most_chars(self.ready.max_len)
        encode = partial(encode_chat, self.codec, messages, variables, self.media.config, plain=True, max_chars=most)
        if size <= QUICK_CHARS:
            try:
                return await self.off_loop(partial(encode, within_s=QUICK_S))
            except TemplateTooSlow:
                pass  # it may be a slow machine
        return await self.off_loop(encode, size=QUICK_CHARS + 1)

    def room(self, prompt: Sequence[int], wanted: int | None, param: str, media: Sequence[Placed] = ()) -> int:
        """New tokens that may follow `prompt`, of field `param`, in which `media` stand. Raises ApiError where `wanted`
        are more, or there are none.
        """
        if bad := [i for i in prompt if not 0 <= i < self.config.vocab_size]:
            raise ApiError(400, f"token {bad[0]} is outside the vocabulary of {self.config.vocab_size}", param=param)
        placeholders = set(self.media.placeholders.values())
        standing = [i for i in prompt if i in placeholders]
        if len(standing) != sum(placed.media.num_tokens for placed in media):
            raise ApiError(400, f"token {standing[0]} stands for an image or a sound, which come in the messages of a "
                                "chat: leave it out", param=param)  # fmt: skip
        most = self.ready.max_len - len(prompt)
        if not prompt:
            raise ApiError(400, "the prompt is empty", param=param)
        if most < 1 or (wanted or 1) > most:
            asked = "" if wanted is None else f" and {wanted} new ones"
            # By these words, OpenAI's, LiteLLM knows the error from other bad requests.
            raise ApiError(400, f"this model's maximum context length is {self.ready.max_len} tokens; the prompt has "
                           f"{len(prompt)}{asked}", param=param, code="context_length_exceeded")  # fmt: skip
        return wanted or most

    @contextmanager
    def _media_held(self, media: Sequence[Placed]) -> Iterator[None]:
        """Room for what a sequence has beside text, as long as it is at work or waits. Raises ApiError."""
        count, most = sum(placed.media.data.nbytes for placed in media), self.limits.media_bytes
        if count > most:
            raise ApiError(400, f"the images and sounds of a request have {count:,} bytes decoded; {most:,} are taken")
        if self._num_media_bytes + count > most:
            raise ApiError(429, "there are too many images and sounds at once", code="queue_full",
                           headers={"Retry-After": str(RETRY_AFTER_S)})  # fmt: skip
        self._num_media_bytes += count
        try:
            yield
        finally:
            self._num_media_bytes -= count

    async def follow(self, request: TokenRequest, enough: Callable[[], bool]) -> AsyncGenerator[Made, None]:
        """As Engines.stream, watched. Raises ApiError, too, where there is no room for its media."""
        with self._media_held(request.media):
            watch, last = self.metrics.watch(), None
            try:
                async with aclosing(self.client.stream(request, enough)) as stream:
                    async for made in stream:
                        watch.tokens(len(made.tokens))
                        last = made if made.reason else None
                        yield made
            finally:
                if last is None:
                    watch.ended("abort")
                else:
                    watch.ended("stop" if enough() else last.reason, last.stats)

    def close(self) -> None:
        for threads in (self._quick, self._slow, self._media):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()


def size_of(value: Any) -> int:
    """About how many characters `value`, which JSON can hold, has: those of its texts and 4 for each of its parts."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            left += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            left += part
        size += 4
    return size


def service_of(request: Request) -> Service:
    """That of the app which answers `request`."""
    service: Service = request.app.state.service
    return service
