"""An answer as it comes: tokens from the engine, taken apart into what is thought, said and called."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kerngen.runtime.completion import UpToStop
from kerngen.runtime.engine import Stats
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve.output import ContentDelta, Delta, Output, ToolCallDelta
from kerngen.runtime.serve.protocol import _Generation
from kerngen.runtime.serve.service import Service
from kerngen.runtime.text import TextCodec

_T = TypeVar("_T")
_SUGGESTED = ("temperature", "top_k", "top_p")  # where generation_config.json says more than OpenAI's defaults


@dataclass(frozen=True, slots=True)
class Part:
    """Of choice `index`: what came with these tokens. finish_reason and stats come with the last part."""

    index: int
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None


class Reader(Protocol):
    """Makes deltas of tokens. is_over: a stop string is complete."""

    def push(self, token: int) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...
    @property
    def is_over(self) -> bool: ...


class TextReader:
    """All of it is content, special tokens left out."""

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        self._stream, self._text = codec.stream(), UpToStop(stop)

    @property
    def is_over(self) -> bool:
        return self._text.is_over

    def push(self, token: int) -> list[Delta]:
        self._text.push(self._stream.push([token]))
        return _content(self._text.news())

    def finish(self) -> list[Delta]:
        self._text.push(self._stream.finish())
        return _content(self._text.rest())


class ChatReader:
    """Thoughts, content and calls; stop strings end the content. prompt: what the answer follows."""

    def __init__(self, codec: TextCodec, stop: Sequence[str], prompt: Sequence[int]) -> None:
        self._output, self._text = Output(codec, prompt), UpToStop(stop)

    @property
    def is_over(self) -> bool:
        return self._text.is_over

    def push(self, token: int) -> list[Delta]:
        return self._stopped(self._output.push([token]))

    def finish(self) -> list[Delta]:
        return [*self._stopped(self._output.finish()), *_content(self._text.rest())]

    def _stopped(self, deltas: Sequence[Delta]) -> list[Delta]:
        found: list[Delta] = []
        for delta in deltas:
            if not isinstance(delta, ContentDelta):
                found += [*_content(self._text.rest()), delta]  # no stop string reaches over it
                continue
            self._text.push(delta.text)
            found += _content(self._text.news())
        return found


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []


def sampling_of(service: Service, body: _Generation, index: int) -> Sampling:
    """The parameters of choice `index`: as asked for, else as the checkpoint suggests, else OpenAI's defaults."""
    values = {"temperature": 1.0, **{n: v for n, v in service.suggested.items() if n in _SUGGESTED}}
    values |= {n: v for n in _SUGGESTED if (v := getattr(body, n)) is not None}
    top_k = max(int(values.get("top_k", 0)), 0)
    seed = secrets.randbits(62) if body.seed is None else body.seed
    return Sampling(float(values["temperature"]), top_k, float(values.get("top_p", 1.0)), seed + index)


def stops_of(body: _Generation) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


async def choice(
    service: Service, body: _Generation, index: int, prompt: Sequence[int], max_new_tokens: int, reader: Reader,
    sampling: Sampling,
) -> AsyncGenerator[Part, None]:  # fmt: skip
    """One answer to `prompt`, in parts."""
    stop_ids = (*(() if body.ignore_eos else service.stop_ids), *(body.stop_token_ids or ()))
    has_calls = False
    stream = service.follow(prompt, max_new_tokens, sampling, stop_ids)
    try:
        async for made in stream:
            deltas: list[Delta] = []
            shown = made.tokens[:-1] if made.reason == "stop" else made.tokens
            for count, token in enumerate(shown, 1):
                deltas += reader.push(token)
                if reader.is_over:
                    yield Part(index, made.tokens[:count], deltas, "stop", made.stats)
                    return
            if made.reason:
                deltas += reader.finish()
            has_calls = has_calls or any(isinstance(d, ToolCallDelta) for d in deltas)
            reason = "tool_calls" if made.reason == "stop" and has_calls else made.reason or None
            yield Part(index, made.tokens, deltas, reason, made.stats)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


async def merged(generators: Sequence[AsyncGenerator[_T, None]]) -> AsyncIterator[_T]:
    """What all of them yield, as it comes. The first error ends them all, as whoever leaves the loop does."""
    if len(generators) == 1:
        try:
            async for item in generators[0]:
                yield item
        finally:
            await generators[0].aclose()
        return
    queue: asyncio.Queue[tuple[_T | None, BaseException | None]] = asyncio.Queue()

    async def drain(generator: AsyncGenerator[_T, None]) -> None:
        error: BaseException | None = None
        try:
            async for item in generator:
                queue.put_nowait((item, None))
        except BaseException as e:
            error = e
            raise
        finally:
            await generator.aclose()
            queue.put_nowait((None, error))

    tasks = [asyncio.ensure_future(drain(g)) for g in generators]
    try:
        left = len(tasks)
        while left:
            came, error = await queue.get()
            if error is not None:
                raise error
            if came is None:
                left -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
