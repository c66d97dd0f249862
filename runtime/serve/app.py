"""The routes: OpenAI's, and those by which a server is watched.

Source: OpenAI's API reference; for the others vLLM 0.24, `entrypoints/openai/api_server.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

import kerngen
from kerngen.runtime.serve import errors, protocol
from kerngen.runtime.serve.answers import Heading, Message, Usage, deltas_of, text_of
from kerngen.runtime.serve.choices import ChatReader, Part, Reader, TextReader, choice, merged, sampling_of, stops_of
from kerngen.runtime.serve.errors import ApiError, json_response
from kerngen.runtime.serve.gate import Gate
from kerngen.runtime.serve.messages import checked_messages
from kerngen.runtime.serve.metrics import CONTENT_TYPE
from kerngen.runtime.serve.page import chat_page
from kerngen.runtime.serve.service import Service

_T = TypeVar("_T")
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
OPEN = ("/health", "/ping", "/version", "/metrics", "/")  # no key is asked for


class ClientGone(Exception):
    """Nobody waits for the answer."""


def make_app(service: Service, keys: Sequence[str] = ()) -> FastAPI:
    """keys: one of them must come with every request but those for OPEN; none: none is asked for."""
    app = FastAPI(
        title="kerngen", version=kerngen.__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json"
    )
    app.state.service, app.state.keys = service, [key.encode() for key in keys]
    app.include_router(_router)
    errors.install(app)
    app.add_middleware(Gate, limits=service.limits, allowed=lambda path, header: _is_allowed(app, path, header))
    return app


def _is_allowed(app: FastAPI, path: str, header: bytes) -> bool:
    if not app.state.keys or path in OPEN:
        return True
    scheme, _, key = header.partition(b" ")
    # all are compared: how long it takes says nothing of them
    return scheme.lower() == b"bearer" and sum(hmac.compare_digest(key.strip(), k) for k in app.state.keys) > 0


_router = APIRouter()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


# -- what is watched


@_router.get("/health")
@_router.get("/ping")
async def health(request: Request) -> Response:
    service = _service(request)
    if service.client.is_alive and not service.is_draining:
        return Response(status_code=200)
    return errors.response_of(ApiError(503, service.client.why_dead or "the server is about to stop"))


@_router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE)


@_router.get("/version")
async def version() -> Response:
    return json_response({"version": kerngen.__version__})


@_router.get("/")
async def page() -> Response:
    html, headers = chat_page()
    return HTMLResponse(html, headers=headers)


@_router.get("/v1/models")
async def models(request: Request) -> Response:
    service = _service(request)
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@_router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = _service(request)
    service.require_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created, "owned_by": "kerngen", "root": service.names[0],
            "parent": None, "max_model_len": service.ready.max_len}  # fmt: skip


# -- text and tokens


@_router.post("/tokenize")
async def tokenize(request: Request, body: protocol.Tokenize) -> Response:
    service = _service(request)
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages is tokenized")
    if body.prompt is not None:
        ids = await service.encode(body.prompt, with_bos=body.add_special_tokens)
    else:
        messages = checked_messages(body.messages or [])
        ids = await service.encode_chat(messages, **(body.chat_template_kwargs or {}))
    texts = [service.codec.token(i) for i in ids] if body.return_token_strs else None
    return json_response({"count": len(ids), "max_model_len": service.ready.max_len, "tokens": ids,
                          "token_strs": texts})  # fmt: skip


@_router.post("/detokenize")
async def detokenize(request: Request, body: protocol.Detokenize) -> Response:
    service = _service(request)
    service.require_model(body.model)
    if bad := [i for i in body.tokens if not 0 <= i < service.config.vocab_size]:
        raise ApiError(400, f"token {bad[0]} is outside the vocabulary of {service.config.vocab_size}", param="tokens")
    return json_response({"prompt": await service.off_loop(service.codec.decode, body.tokens)})


# -- completions


def _require_supported(body: protocol.Completion | protocol.ChatCompletion) -> None:
    """Raises ApiError for what would change the answer and is not there: nothing is left out in silence."""
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0}
    asked = {name: getattr(body, name) not in (None, value) for name, value in neutral.items()}
    asked |= {"logit_bias": bool(body.logit_bias), "logprobs": bool(body.logprobs) or body.logprobs == 0}
    if isinstance(body, protocol.ChatCompletion):
        asked["logprobs"] = bool(body.logprobs)
        asked["response_format"] = body.response_format is not None and body.response_format.type != "text"
        asked["tool_choice"] = body.tool_choice not in (None, "none", "auto")
    if name := next((name for name, is_asked in asked.items() if is_asked), None):
        raise ApiError(400, f"{name} is not supported yet", param=name, code="unsupported")


@_router.post("/v1/completions")
async def completions(request: Request, body: protocol.Completion) -> Response:
    service = _service(request)
    service.require_model(body.model)
    _require_supported(body)
    for name, value in (("suffix", body.suffix), ("best_of", (body.best_of or 1) > (body.n or 1))):
        if value:
            raise ApiError(400, f"{name} is not supported", param=name)
    prompts = [await service.encode(p) if isinstance(p, str) else p for p in _prompts(body)]
    count = body.n or 1
    rooms = [service.room(prompt, body.max_tokens or DEFAULT_TOKENS) for prompt in prompts]
    generators, echoes = [], []
    for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        for j in range(count):
            index = i * count + j
            reader: Reader = TextReader(service.codec, stops_of(body))
            generators.append(choice(service, body, index, prompt, room, reader, sampling_of(service, body, j)))
            echoes.append(service.codec.decode(prompt) if body.echo else "")
    heading = Heading.of("cmpl", "text_completion", body.model or service.names[0])
    usage = Usage(sum(map(len, prompts)))

    def told(part: Part, text: str) -> dict[str, Any]:
        return {"index": part.index, "text": text, "logprobs": None, "finish_reason": part.finish_reason,
                "stop_reason": None}  # fmt: skip

    if body.stream:
        first = set(range(len(echoes)))

        def chunks(part: Part) -> list[dict[str, Any]]:
            text = text_of(part.deltas)
            if part.index in first:
                first.discard(part.index)
                text = echoes[part.index] + text
            return [told(part, text)] if text or part.finish_reason else []

        return _streamed(service, body, heading, usage, generators, chunks)
    texts, last = list(echoes), [Part(i) for i in range(len(echoes))]

    async def whole() -> Response:
        with service.admitted(len(generators)):
            async for part in merged(generators):
                usage.add(part)
                texts[part.index] += text_of(part.deltas)
                last[part.index] = part
        return json_response(heading.body([told(p, t) for p, t in zip(last, texts, strict=True)], usage))

    return await _unless_gone(request, whole())


def _prompts(body: protocol.Completion) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


# -- chats


@_router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: protocol.ChatCompletion) -> Response:
    service = _service(request)
    service.require_model(body.model)
    _require_supported(body)
    messages = checked_messages(body.messages)
    variables = dict(body.chat_template_kwargs or {})
    if body.tools and body.tool_choice != "none":
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if body.reasoning_effort is not None:
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    prompt = await service.encode_chat(messages, **variables)
    room = service.room(prompt, body.max_completion_tokens or body.max_tokens)
    count = body.n or 1
    generators = [
        choice(service, body, i, prompt, room, ChatReader(service.codec, stops_of(body), prompt),
               sampling_of(service, body, i)) for i in range(count)
    ]  # fmt: skip
    heading = Heading.of("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion",
                         body.model or service.names[0])  # fmt: skip
    usage = Usage(len(prompt))
    if body.stream:
        begun: set[int] = set()

        def chunks(part: Part) -> list[dict[str, Any]]:
            deltas = deltas_of(part.deltas, with_reasoning=body.include_reasoning)
            if part.index not in begun:
                begun.add(part.index)
                deltas.insert(0, {"role": "assistant", "content": ""})
            if part.finish_reason and not deltas:
                deltas.append({})
            last = len(deltas) - 1
            return [
                {"index": part.index, "delta": delta, "logprobs": None,
                 "finish_reason": part.finish_reason if i == last else None} for i, delta in enumerate(deltas)
            ]  # fmt: skip

        return _streamed(service, body, heading, usage, generators, chunks)
    made = [Message() for _ in range(count)]

    async def whole() -> Response:
        with service.admitted(count):
            async for part in merged(generators):
                usage.add(part)
                made[part.index].add(part)
        choices = [m.body(i, with_reasoning=body.include_reasoning) for i, m in enumerate(made)]
        return json_response(heading.body(choices, usage))

    return await _unless_gone(request, whole())


# -- how answers go out


def _streamed(
    service: Service,
    body: protocol._Generation,
    heading: Heading,
    usage: Usage,
    generators: Sequence[AsyncGenerator[Part, None]],
    chunks: Callable[[Part], list[dict[str, Any]]],
) -> Response:
    """Server-sent events: a chunk for each of what `chunks` makes of a part, usage where it was asked for, [DONE]."""
    options = body.stream_options or protocol.StreamOptions()
    place = service.admitted(len(generators))
    place.__enter__()  # refused before the answer begins: a stream's status is 200

    async def events() -> AsyncIterator[bytes]:
        try:
            async with aclosing(merged(generators)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    usage.add(part)
                    now = usage if options.continuous_usage_stats and options.include_usage else None
                    for chunk in chunks(part):
                        yield _event(heading.body([chunk], now))
            if options.include_usage:
                yield _event(heading.body([], usage))
        except Exception as e:
            yield _event(errors.of(e).body)
        finally:
            place.__exit__(None, None, None)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream",
                             headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # fmt: skip


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """What `work` gives; it is ended where the client leaves before. Raises ClientGone then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        return tasks[0].result()  # type: ignore[return-value]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
