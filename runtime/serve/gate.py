"""What every request passes first: keys, and bounds on how much of a body comes and how long that takes.

All routes take JSON: a body is read as that whatever its content type says, for curl's is another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kerngen.runtime.serve.errors import ApiError, response_of
from kerngen.runtime.serve.service import Limits


class Gate:
    """allowed: whether a path may be asked for with this Authorization header."""

    def __init__(self, app: ASGIApp, *, limits: Limits, allowed: Callable[[str, bytes], bool]) -> None:
        self._app, self._limits, self._allowed = app, limits, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            if not self._allowed(scope["path"], headers.get(b"authorization", b"")):
                raise ApiError(401, "a valid key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                               headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
            body = await self._body(headers.get(b"content-length"), receive) if scope["method"] == "POST" else b""
        except ApiError as e:
            # What is left of the body is not read: this connection can serve no other request.
            e.headers["Connection"] = "close"
            await response_of(e)(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        given = False

        async def again() -> Message:
            nonlocal given
            if given or scope["method"] != "POST":
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        other = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        await self._app({**scope, "headers": [*other, (b"content-type", b"application/json")]}, again, send)

    async def _body(self, length: bytes | None, receive: Receive) -> bytes | None:
        """All of it; None where the client leaves before its end."""
        most = self._limits.body_bytes
        if length is not None and length.isdigit() and int(length[:20]) > most:
            raise self._too_long()
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise self._too_long()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limits.body_s:g} s") from None

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._limits.body_bytes:,} bytes", code="body_too_large")
