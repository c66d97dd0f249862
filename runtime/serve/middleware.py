"""Middleware of every request: API keys, whose pages may ask, and limits on a body's size and time.

All routes take JSON. A body is read as JSON whatever its content type, since curl sends another by default.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kerngen.runtime.serve.errors import ApiError, response_of
from kerngen.runtime.serve.service import RETRY_AFTER_S, Limits

# A surrogate without its other half, in JSON; behind an escaped backslash it is none.
_LONE = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F])"
)


@dataclass(slots=True)
class _Body:
    """What has come of one, and how many values are in it."""

    parts: list[bytes] = field(default_factory=list)
    num_values: int = 0


class Gate:
    """require: raises ApiError for a path that may not be asked for with these headers."""

    def __init__(self, app: ASGIApp, *, limits: Limits, require: Callable[[str, Mapping[bytes, bytes]], None]) -> None:
        self._app, self._limits, self._require = app, limits, require
        self._held = self._num_values = 0  # bytes of all bodies, and values in them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = _Body()
        try:
            await self._pass(held, scope, receive, send)
        finally:
            self._held -= sum(map(len, held.parts))
            self._num_values -= held.num_values

    async def _pass(self, held: _Body, scope: Scope, receive: Receive, send: Send) -> None:
        """held: takes what comes of the body."""
        try:
            headers = dict(scope["headers"])
            if b"content-length" in headers and b"transfer-encoding" in headers:
                # A proxy before this server may go by the other of the two: RFC 9112, 6.1.
                raise ApiError(400, "Content-Length and Transfer-Encoding contradict each other")
            self._require(scope["path"], headers)
            body = b""
            if scope["method"] == "POST" and not await self._body(held.parts, headers.get(b"content-length"), receive):
                return  # the client has gone
            body = b"".join(held.parts)
            held.parts[:] = [body]
            held.num_values = self._require_few(body)
            _require_unicode(body)
        except ApiError as e:
            # What is left of the body is not read: this connection can serve no other request.
            e.headers["Connection"] = "close"
            await response_of(e, scope["path"])(scope, receive, send)
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given or scope["method"] != "POST":
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        other = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        await self._app({**scope, "headers": [*other, (b"content-type", b"application/json")]}, again, send)

    async def _body(self, held: list[bytes], length: bytes | None, receive: Receive) -> bool:
        """Whether all of it came; the client may leave before."""
        most = self._limits.body_bytes
        if length is not None and length.isdigit() and int(length[:20]) > most:
            raise self._too_long()
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    held.append(message.get("body", b""))
                    size += len(held[-1])
                    self._held += len(held[-1])
                    if size > most:
                        raise self._too_long()
                    if self._held > self._limits.all_bytes:
                        raise _too_much_at_once()
                    if not message.get("more_body"):
                        return True
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limits.body_s:g} s") from None

    def _require_few(self, body: bytes) -> int:
        """Values in `body`, which are held from here on. Commas and brackets in its texts count as if they were JSON's:
        there are fewer of them than tokens.
        """
        if (values := body.count(b",") + body.count(b"[") + body.count(b"{")) > self._limits.values:
            raise ApiError(413, f"the body holds some {values:,} values; {self._limits.values:,} are taken",
                           code="body_too_large")  # fmt: skip
        if self._num_values + values > self._limits.all_values:
            raise _too_much_at_once()
        self._num_values += values
        return values

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._limits.body_bytes:,} bytes", code="body_too_large")


def _too_much_at_once() -> ApiError:
    return ApiError(429, "there are too many long requests at once", code="queue_full",
                    headers={"Retry-After": str(RETRY_AFTER_S)})  # fmt: skip


def _require_unicode(body: bytes) -> None:
    """Raises ApiError for JSON with a lone surrogate: nothing that takes text as UTF-8 takes it."""
    if _LONE.search(body) is None:
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise ApiError(400, f"the body is not Unicode: it has the lone surrogate {e.object[e.start]!r}") from None
    except (ValueError, RecursionError):
        pass  # no JSON: whoever reads it says so
