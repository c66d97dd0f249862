"""Connections of clients: how many there may be, and how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h11 import IDLE
from uvicorn.protocols.http.h11_impl import H11Protocol

from kerngen.errors import UsageError
from kerngen.runtime.serve.errors import ApiError

HEAD_S = 20.0  # within which a client, once connected, has sent a request's head
UNREAD_S = 60.0  # how long a client may leave unread what it asked for
MAX_UNREAD_BYTES = 256 * 1024 * 1024  # of all answers that wait for their clients
MAX_CONNECTIONS = 4096  # of what they send and do not read, each holds some 200 kB at most
# asyncio accepts so many before it asks anybody, and again while those are under way; the others wait in the system's
# queue. What was refused keeps its descriptor until its client has read why.
ACCEPTED_AT_ONCE, BACKLOG, MAX_REFUSED = 32, 1024, 32
REFUSED_S = 1.0
# Descriptors for all else: files, pipes to the engine and to templates, what is accepted or refused.
_SPARE = 128 + 3 * ACCEPTED_AT_ONCE + MAX_REFUSED
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WHY = ApiError(503, "the server has as many connections as it can take", code="too_many_connections")
_BODY = json.dumps(_WHY.body).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


@dataclass(slots=True)
class Places:
    """For `most` connections. num_refused: those that are told so now."""

    most: int
    num_refused: int = 0

    @classmethod
    def there_are(cls) -> Places:
        """As many as this process may have descriptors for, which it raises where the system lets it. Raises UsageError
        where there are next to none.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_CONNECTIONS + _SPARE
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        most = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft - _SPARE)
        if most < 1:
            raise UsageError(f"this process may open {soft} files, and a server needs more than {_SPARE}",
                             hint=f"ulimit -n {wanted}")  # fmt: skip
        return cls(most)


def saying_what_is_lacking(say: Callable[[str], None]) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler of the event loop: a connection for which the system has no descriptor is a line a minute,
    since asyncio tries again by itself.
    """
    said = -60.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _LACKING:
            loop.default_exception_handler(context)
        elif time.monotonic() - said >= 60:
            said = time.monotonic()
            say(f"warning: clients have to wait to connect: {error.strerror}")

    return handle


class Connection(H11Protocol):
    """A client's, which ends where that sends no whole head of a request, or does not read what it asked for: uvicorn
    waits for ever, and with it a place in the queue. Where all `places` are taken, it is answered by 503.
    """

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_refused = False

    def __init__(self, places: Places, **of_server: Any) -> None:
        super().__init__(**of_server)
        self._places = places

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._places.most:
            self._refuse(transport)
            return
        super().connection_made(transport)
        self._expect_head()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Closed at once, what the client sends meanwhile would have the system take back what it is told."""
        self.transport, self._is_refused = transport, True
        self._places.num_refused += 1
        if self._places.num_refused > MAX_REFUSED:
            transport.abort()
            return
        transport.write(_FULL)
        transport.write_eof()
        self._head = self.loop.call_later(REFUSED_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._expect_head()

    def _expect_head(self) -> None:
        is_there = self.conn.their_state is not IDLE
        if self._head is not None and is_there:
            self._head.cancel()
            self._head = None
        elif self._head is None and not is_there:  # bytes that come one by one do not begin it anew
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        unread = (client.transport.get_write_buffer_size() for client in self.connections)
        if sum(unread) > MAX_UNREAD_BYTES:
            self.transport.abort()
            return
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # of the last piece, too small for a pause
            self.loop.call_later(UNREAD_S, self._require_read)

    def _require_read(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._places.num_refused -= self._is_refused
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
