"""Sends responses, whole or as server-sent events, and cancels requests whose clients have disconnected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from kerngen.runtime.serve import errors
from kerngen.runtime.serve.choice_stream import Part, merged
from kerngen.runtime.serve.protocol import StreamOptions
from kerngen.runtime.serve.responses import Heading, Usage
from kerngen.runtime.serve.service import Service
from kerngen.runtime.serve.tracing import Trace

_T = TypeVar("_T")
_DONE = b"data: [DONE]\n\n"


async def send_whole(
    request: Request,
    service: Service,
    usage: Usage,
    trace: Trace,
    generators: Sequence[AsyncGenerator[Part, None]],
    add: Callable[[Part], None],
    body: Callable[[], dict[str, Any]],
) -> Response:
    """`body` as JSON, once `add`, `usage` and `trace` know all parts. Raises ApiError, and ClientGone where nobody
    waits.
    """

    with service.logprobs_held() as hold:

        async def work() -> None:
            async with aclosing(parts_of(service, usage, trace, generators)) as parts:
                async for part in parts:
                    hold(sum(1 + len(of.top) for of in (*part.logprobs, *part.prompt_logprobs)))
                    add(part)

        await unless_gone(request, work())
        return errors.json_response(body())


async def send_events(
    request: Request,
    service: Service,
    options: StreamOptions | None,
    heading: Heading,
    usage: Usage,
    trace: Trace,
    generators: Sequence[AsyncGenerator[Part, None]],
    chunks: Callable[[Part], list[dict[str, Any]]],
) -> Response:
    """Server-sent events: a chunk for each of what `chunks` makes of a part, usage where it was asked for, [DONE].

    A stream begins with its first part: what goes wrong before has a status of its own. Raises ApiError then, and
    ClientGone where nobody waits.
    """
    asked = options or StreamOptions()

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(parts_of(service, usage, trace, generators)) as parts:
            async for part in parts:
                found, now, before = chunks(part), None, None
                if asked.continuous_usage_stats and asked.include_usage:
                    now, before = usage, replace(usage, completion_tokens=usage.completion_tokens - len(part.tokens))
                for chunk in found:  # with the last of them, all of the part's tokens are there
                    yield _event(heading.body([chunk], now if chunk is found[-1] else before))
        if asked.include_usage:
            yield _event(heading.body([], usage))

        yield _DONE

    return await send_stream(request, events(), lambda error: _event(errors.of(error).body) + _DONE)


async def send_stream(
    request: Request, events: AsyncGenerator[bytes, None], failed: Callable[[Exception], bytes]
) -> Response:
    """Server-sent events. failed: what tells of an error that comes behind the first event.

    What goes wrong before has a status of its own: raises ApiError then, and ClientGone where nobody waits.
    """
    first = await unless_gone(request, anext(events, b""))

    async def sent() -> AsyncIterator[bytes]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except Exception as e:
                yield failed(e)

    return StreamingResponse(sent(), media_type="text/event-stream",
                             headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # fmt: skip


async def parts_of(
    service: Service, usage: Usage, trace: Trace, generators: Sequence[AsyncGenerator[Part, None]]
) -> AsyncGenerator[Part, None]:
    """Of all of them, as they come; `usage` and `trace` are told. Raises ApiError where there is no place for them."""
    error: BaseException | None = None
    try:
        with service.admitted(len(generators)):
            async with aclosing(merged(generators)) as parts:
                async for part in parts:
                    usage.add(part)
                    trace.part(part)
                    yield part
    except BaseException as e:
        error = e
        raise
    finally:
        trace.ended(usage, error)


def named_event(content: dict[str, Any]) -> bytes:
    """An event whose name is its type, as those APIs have it that send no [DONE]."""
    return b"event: " + content["type"].encode() + b"\n" + _event(content)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """What `work` gives; it is ended where the client leaves before. Raises ClientGone then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise errors.ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
