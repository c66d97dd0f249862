"""Errors in OpenAI's format: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.serve.engines import EngineFailed, EngineStopped

log = logging.getLogger(__name__)
SHOWN_CHARS, MOST_CHARS = 100, 2000  # of a name that a client gave, and of a message
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
MESSAGES = "/v1/messages"


def shortened(text: str, most: int = SHOWN_CHARS) -> str:
    """`text` as far as it is shown to the client that sent it, or may have."""
    return text if len(text) <= most else f"{text[:most]}…"


class ClientGone(Exception):
    """Nobody waits for the answer."""


class ApiError(Exception):
    """What a client is told in place of an answer. param: the field that is wrong. code: one word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else shortened(self.param)
        return {"error": {"message": shortened(self.message, MOST_CHARS), "type": kind, "param": param,
                          "code": self.code}}  # fmt: skip


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """In Anthropic's format, which /v1/messages has."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded":  # by these words its agents know that they must shorten a conversation
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def of(error: Exception) -> ApiError:
    """What `error` is to a client. What should not happen is logged, and says nothing of itself."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):
        return ApiError(400, error.message)
    if isinstance(error, EngineStopped):
        return ApiError(503, error.message, code="unavailable")
    if isinstance(error, EngineFailed):
        return ApiError(503, error.message, code="engine_failed")
    if isinstance(error, KerngenError):  # a chat template may refuse one chat and not the next
        return ApiError(400, error.message)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says how", code="internal_error")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII, so that text which is no Unicode (a lone surrogate) is an answer too."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def response_of(error: Exception, path: str) -> Response:
    """path: that was asked for; each API has its own form of errors."""
    told = of(error)
    is_anthropic = path == MESSAGES or path.startswith(f"{MESSAGES}/")
    return json_response(anthropic_body(told) if is_anthropic else told.body, told.status, told.headers)


def install(app: FastAPI) -> None:
    """Have `app` answer all errors so."""

    async def any_error(request: Request, error: Exception) -> Response:
        return response_of(error, request.url.path)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return response_of(_invalid(error), request.url.path)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, told = request.url.path, str(error.detail)
        if isinstance(cause := error.__cause__, UnicodeDecodeError):  # FastAPI's own message says nothing of it
            return response_of(ApiError(400, f"the body is not UTF-8: {cause.reason} at byte {cause.start}"), path)
        if error.status_code == 404:
            told = f"there is no {path!r:.80} here; there is {', '.join(app.openapi()['paths'])}, /docs"
        elif error.status_code == 405:
            told = (
                f"{path!r:.80} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method:.20}"
            )
        return response_of(ApiError(error.status_code, told, headers=error.headers), path)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # which nobody reads

    app.add_exception_handler(Exception, any_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ApiError, any_error)
    app.add_exception_handler(KerngenError, any_error)


def _invalid(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(where) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    return ApiError(400, f"{field or 'the body'}: {first['msg']}", param=field)
