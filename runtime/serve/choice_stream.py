"""Streams one choice of an answer: splits the engine's tokens into reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kerngen.runtime.completion import UpToStop
from kerngen.runtime.engine import Stats, TokenLogprobs
from kerngen.runtime.media.values import Placed
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve.engine_process import Guiding, TokenRequest
from kerngen.runtime.serve.errors import ApiError
from kerngen.runtime.serve.output_parser import ContentDelta, Delta, Output, ToolCallDelta
from kerngen.runtime.serve.protocol import MAX_STOP_CHARS, Generation
from kerngen.runtime.serve.service import Service
from kerngen.runtime.text import TextCodec

MALFORMED_CALL = "malformed_tool_call"  # the stop_reason of a chat's answer in which a call cannot be read
_T = TypeVar("_T")
_MORE = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
_SUGGESTED = ("temperature", "top_k", "top_p")  # where generation_config.json says more than OpenAI's defaults


@dataclass(frozen=True, slots=True)
class Part:
    """Of choice `index`: what came with these tokens. finish_reason and stats come with the last part, and stop_reason,
    the stop string that ended it, and whether a call in it cannot be read; prompt_logprobs with the first.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: Sequence[TokenLogprobs] = ()
    deltas: list[Delta] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    stop_reason: str | None = None
    has_unread_call: bool = False

    @property
    def stop_reason_of_chat(self) -> str | None:
        """As a chat's choice tells it."""
        return MALFORMED_CALL if self.has_unread_call else self.stop_reason


class Reader(Protocol):
    """Makes deltas of tokens. ended_by: the stop string that is complete, after which there is nothing.
    has_unread_call: a call's arguments are no JSON.
    """

    def push(self, token: int) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...
    @property
    def ended_by(self) -> str | None: ...
    @property
    def has_unread_call(self) -> bool: ...


class TextReader:
    """All of it is content, special tokens left out."""

    has_unread_call = False

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        self._stream, self._text = codec.stream(), UpToStop(stop)

    @property
    def ended_by(self) -> str | None:
        return self._text.ended_by

    def push(self, token: int) -> list[Delta]:
        self._text.push(self._stream.push([token]))
        return _content(self._text.news())

    def finish(self) -> list[Delta]:
        self._text.push(self._stream.finish())
        return _content(self._text.rest())


class ChatReader:
    """Thoughts, content and calls; stop strings end the content. prompt: what the answer follows. tools: the names of
    those that the request has.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], prompt: Sequence[int], *, tools: Collection[str]) -> None:
        self._output, self._text = Output(codec, prompt, calls=bool(tools), tools=tools), UpToStop(stop)

    @property
    def has_unread_call(self) -> bool:
        return self._output.has_unread_call

    @property
    def ended_by(self) -> str | None:
        return self._text.ended_by

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


def usual_values(suggested: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of who asks for none: as the checkpoint suggests, else OpenAI's defaults."""
    return {"temperature": 1.0} | {name: value for name, value in suggested.items() if name in _SUGGESTED}


def sampling_of(service: Service, body: Generation, index: int) -> Sampling:
    """The parameters of choice `index`: as asked for, else `usual_values`."""
    values = usual_values(service.suggested)
    values |= {name: value for name in (*_SUGGESTED, *_MORE) if (value := getattr(body, name)) is not None}
    values["top_k"] = max(int(values.get("top_k", 0)), 0)  # vLLM's clients say -1 for all
    values["logit_bias"] = tuple((_token(name), bias) for name, bias in (body.logit_bias or {}).items())
    values["seed"] = (secrets.randbits(62) if body.seed is None else body.seed) + index
    return Sampling(**values)


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise ApiError(400, f"logit_bias: {name!r:.40} is no token's number", param="logit_bias")
    return int(name)


def stops_of(body: Generation) -> tuple[str, ...]:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise ApiError(400, f"a stop string has at most {MAX_STOP_CHARS:,} characters", param="stop")
    return stop


NOT_ENFORCED, LEFT_OUT = "Kerngen-Not-Enforced", "Kerngen-Left-Out"
MAX_HEADER_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """What all choices of a request share. logprobs, prompt_logprobs, media: see the engine's Request. not_enforced:
    what the request's schemas ask for beyond what guides the answer. left_out: what of the request the model is not
    told.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    logprobs: int | None = None
    guiding: Guiding | None = None
    prompt_logprobs: int | None = None
    not_enforced: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    media: tuple[Placed, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Of the response, in ASCII, each on one line."""
        told = {NOT_ENFORCED: self.not_enforced, LEFT_OUT: self.left_out}
        lines = {
            name: json.dumps("; ".join(values)[:MAX_HEADER_CHARS])[1:-1] for name, values in told.items() if values
        }
        return {name: line[:MAX_HEADER_CHARS] for name, line in lines.items()}


def stop_ids_of(service: Service, body: Generation, more: Sequence[int] = ()) -> tuple[int, ...]:
    return (*(() if body.ignore_eos else service.stop_ids), *more, *(body.stop_token_ids or ()))


async def choice(
    service: Service, asked: Asked, index: int, reader: Reader, sampling: Sampling
) -> AsyncGenerator[Part, None]:
    """One answer, in parts."""
    has_calls = False
    request = TokenRequest(asked.prompt, asked.max_new_tokens, sampling, asked.stop_ids, asked.logprobs, asked.guiding,
                           asked.prompt_logprobs, asked.media)  # fmt: skip
    async with aclosing(service.follow(request, lambda: reader.ended_by is not None)) as stream:
        async for made in stream:
            deltas: list[Delta] = []
            count = len(made.tokens)
            for at, token in enumerate(made.tokens[:-1] if made.reason == "stop" else made.tokens, 1):
                deltas += reader.push(token)
                if reader.ended_by is not None:
                    count = at
                    break
            if made.reason and reader.ended_by is None:
                deltas += reader.finish()
            has_calls = has_calls or any(isinstance(d, ToolCallDelta) for d in deltas)
            reason, stop = made.reason or None, reader.ended_by if made.reason else None
            has_unread_call = reason == "stop" and stop is None and reader.has_unread_call
            if stop is not None:
                reason = "stop"
            elif reason == "stop" and has_calls and not has_unread_call:
                reason = "tool_calls"
            yield Part(index, made.tokens[:count], made.logprobs[:count], deltas, reason, made.stats,
                       made.prompt_logprobs, stop, has_unread_call)  # fmt: skip


async def merged(generators: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[_T, None]:
    """What all of them yield, as it comes. The first error ends them all, as whoever leaves the loop does."""
    if len(generators) == 1:
        async with aclosing(generators[0]) as only:
            async for item in only:
                yield item
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
