"""The FastAPI app: API keys, health and metrics, models, tokenization. Completions and chats have files of their own.

Source: OpenAI's API reference; for the others vLLM 0.24, `entrypoints/openai/api_server.py`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

import kerngen
from kerngen.runtime.media.parts import max_soft_tokens
from kerngen.runtime.serve import chat_completions, completions, errors, messages_api, protocol, responses_api
from kerngen.runtime.serve.chat_page import chat_page
from kerngen.runtime.serve.errors import ApiError, json_response
from kerngen.runtime.serve.messages import template_messages
from kerngen.runtime.serve.metrics import CONTENT_TYPE
from kerngen.runtime.serve.middleware import Gate
from kerngen.runtime.serve.origins import Allowed
from kerngen.runtime.serve.service import Service, service_of
from kerngen.runtime.serve.streaming import unless_gone
from kerngen.runtime.serve.unsupported_fields import require_honoured

OPEN = ("/health", "/ping", "/version", "/metrics", "/", "/docs", "/openapi.json")  # no key is asked for


def make_app(service: Service, keys: Sequence[str] = (), allowed: Allowed | None = None) -> FastAPI:
    """keys: one of them must come with every request but those for OPEN; none: none is asked for. allowed: whose pages
    may ask without one, by which names, and read the answers; None: all may ask, and none reads.
    """
    app = FastAPI(title="kerngen", version=kerngen.__version__, redoc_url=None, swagger_ui_oauth2_redirect_url=None)
    app.state.service, app.state.keys = service, [key.encode() for key in keys]
    for router in (_router, completions.router, chat_completions.router, responses_api.router, messages_api.router):
        app.include_router(router)
    errors.install(app)

    def require(path: str, headers: Mapping[bytes, bytes]) -> None:
        if path in OPEN:
            return
        if app.state.keys:  # which no page has that was not given one
            # x-api-key: as Anthropic's clients send it
            _require_key(app.state.keys, headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b""))
        elif allowed is not None:
            allowed.require(headers.get(b"host", b""), headers.get(b"origin"))

    app.add_middleware(Gate, limits=service.limits, require=require)
    if allowed is not None and allowed.origins:  # outside of the gate: a browser asks whether it may without a key
        app.add_middleware(CORSMiddleware, allow_origins=allowed.origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _require_key(keys: Sequence[bytes], header: bytes) -> None:
    scheme, _, key = header.partition(b" ")
    # all are compared: how long it takes says nothing of them
    if scheme.lower() != b"bearer" or not sum(hmac.compare_digest(key.strip(), k) for k in keys):
        raise ApiError(401, "a valid key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                       code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})  # fmt: skip


_router = APIRouter()


# -- what is watched


@_router.get("/health")
@_router.get("/ping")
@_router.head("/health", include_in_schema=False)
@_router.head("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    service = service_of(request)
    if not (replicas := service.client.replicas):
        service.require_open()
        return Response(status_code=200)
    status = "down" if not service.is_open else "ok" if all(r.up for r in replicas) else "degraded"
    told = {"status": status, "replicas": [asdict(r) for r in replicas]}
    return json_response(told, 200 if service.is_open else 503)


@_router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE)


@_router.get("/version")
async def version() -> Response:
    return json_response({"version": kerngen.__version__})


@_router.get("/")
@_router.head("/", include_in_schema=False)  # Claude Code asks whether there is anybody
async def page() -> Response:
    html, headers = chat_page()
    return HTMLResponse(html, headers=headers)


@_router.get("/v1/models")
async def models(request: Request) -> Response:
    service = service_of(request)
    return json_response({"object": "list", "data": [_model(service, name) for name in service.names]})


@_router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    service = service_of(request)
    service.require_model(name)
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    told = {"id": name, "object": "model", "created": service.created, "owned_by": "kerngen", "root": service.names[0],
            "parent": None, "max_model_len": service.ready.max_len}  # fmt: skip
    if service.media.reads("image") or service.media.reads("audio"):
        limits = service.media.options.limits
        told["media"] = {
            "image": service.media.reads("image"), "audio": service.media.reads("audio"),
            "max_image_bytes": limits.image_bytes, "max_audio_bytes": limits.audio_bytes,
            "max_video_bytes": limits.video_bytes, "max_items": limits.items,
            "max_body_bytes": service.limits.body_bytes,
        }  # fmt: skip
    return told


# -- text and tokens


@_router.post("/tokenize")
async def tokenize(request: Request, body: protocol.Tokenize) -> Response:
    service = service_of(request)
    service.require_model(body.model)
    require_honoured(body)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages is tokenized")
    if body.prompt is not None:
        encoded = service.encode(body.prompt, with_bos=body.add_special_tokens, control_tokens=body.control_tokens)
        ids = await unless_gone(request, encoded)
    else:
        num_tokens = max_soft_tokens(body.mm_processor_kwargs)
        messages = template_messages(body.messages or [], service.codec.template_reads, service.media)
        variables = await chat_completions.variables_of(service, body, chat_completions.told_tools(service, body.tools))
        if body.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        ids = list((await unless_gone(request, service.encode_chat(messages, variables, num_tokens))).ids)
    texts = [service.codec.token(i) for i in ids] if body.return_token_strs else None
    return json_response({"count": len(ids), "max_model_len": service.ready.max_len, "tokens": ids,
                          "token_strs": texts})  # fmt: skip


@_router.post("/detokenize")
async def detokenize(request: Request, body: protocol.Detokenize) -> Response:
    service = service_of(request)
    service.require_model(body.model)
    service.require_length(len(body.tokens), "tokens", "tokens")
    if bad := [i for i in body.tokens if not 0 <= i < service.config.vocab_size]:
        raise ApiError(400, f"token {bad[0]} is outside the vocabulary of {service.config.vocab_size}", param="tokens")
    text = await unless_gone(request, service.off_loop(service.codec.decode, body.tokens, size=len(body.tokens)))
    return json_response({"prompt": text})
