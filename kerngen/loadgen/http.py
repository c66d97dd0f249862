"""HTTP/1.1 as a load needs it: a connection a request, bodies read as they come, and left or read slowly at will."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kerngen.errors import KerngenError, UsageError
from kerngen.system.urls import hide_password, without_password

READ_BYTES = 1 << 16
_BLANK = re.compile(rb"\r?\n\r?\n")  # ends a server-sent event; some servers end lines as HTTP does
_BODILESS = (204, 304)


class ServerGone(KerngenError):
    """The connection was refused, or ended where an answer should go on."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and the key that it asks for."""

    host: str
    port: int
    path: str = ""  # before /v1
    key: str | None = None

    @staticmethod
    def at(url: str, key: str | None = None) -> Server:
        """Raises UsageError for what is no address: http://HOST[:PORT][/PATH]."""
        try:
            found = urlsplit(url if "//" in url else f"http://{url}")
            port = found.port or 80
            (found.hostname or "").encode("idna")  # as it will be looked up
            found.path.encode()
        except ValueError as e:
            raise UsageError(f"{without_password(url)}: {hide_password(str(e), url)}") from None
        if found.scheme != "http" or not found.hostname:
            raise UsageError(f"{without_password(url)} is no address of a server", hint="http://127.0.0.1:8000")
        return Server(found.hostname, port, found.path.rstrip("/").removesuffix("/v1"), key)

    def __str__(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{self.path}"

    async def open(self, method: str, path: str, body: Any = None, *, receive_bytes: int | None = None) -> Answer:
        """Ask, and wait for the answer's head. body: JSON, or bytes as they are. receive_bytes: what the kernel holds
        of an answer that is not read. Raises ServerGone.
        """
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        try:
            reader, writer = await self._connect(receive_bytes)
        except OSError as e:
            raise ServerGone(f"{self}: {why(e)}", hint="kerngen serve MODEL starts a server") from e
        answer = Answer(reader, writer)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            await answer.read_head()
        except BaseException:
            answer.leave()
            raise
        return answer

    async def _connect(self, receive_bytes: int | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if receive_bytes is None:
            return await asyncio.open_connection(self.host, self.port, limit=READ_BYTES)
        family, kind, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)  # before it connects
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, address)
            return await asyncio.open_connection(sock=connection, limit=receive_bytes)
        except BaseException:
            connection.close()
            raise

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """(status, body) of the whole answer. Raises ServerGone."""
        answer = await self.open(method, path, body)
        try:
            return answer.status, b"".join([data async for data in answer.data()])
        finally:
            answer.leave()


@dataclass(slots=True)
class Answer:
    """An answer as it comes. Whoever has enough of it says `leave`."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    async def read_head(self) -> None:
        first = await self._line()
        parts = first.split(None, 2)
        if len(parts) < 2 or not parts[1].isdigit():
            raise ServerGone(f"the server answered {first[:80]!r}")
        self.status = int(parts[1])
        while (line := (await self._line()).decode("latin-1").strip()) != "":
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as e:
            raise ServerGone(f"the connection broke off: {e}") from e
        if not line.endswith(b"\n"):
            raise ServerGone("the connection ended where an answer should go on")
        return line

    async def _some(self, count: int) -> bytes:
        """b"" where the connection has ended."""
        try:
            return await self._reader.read(count)
        except OSError as e:
            raise ServerGone(f"the connection broke off: {e}") from e

    async def _read(self, count: int) -> bytes:
        if data := await self._some(count):
            return data
        raise ServerGone("the connection ended where an answer should go on")

    async def data(self, at_once: int = READ_BYTES) -> AsyncGenerator[bytes, None]:
        """The body, in the pieces in which it is there; of one that says no length, until the connection ends. Raises
        ServerGone where it breaks off.
        """
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            chunks = _Chunks()
            while not chunks.is_over:
                if found := chunks.push(await self._read(at_once)):
                    yield found
            return
        if "content-length" not in self.headers:
            while self.status not in _BODILESS and (data := await self._some(at_once)):
                yield data
            return
        try:
            left = int(self.headers["content-length"])
        except ValueError:
            raise ServerGone(f"a body of {self.headers['content-length'][:40]!r} bytes") from None
        while left:
            data = await self._read(min(left, at_once))
            left -= len(data)
            yield data

    async def events(self) -> AsyncGenerator[bytes, None]:
        """What follows `data:` of each server-sent event that has it."""
        held = b""
        async for data in self.data():
            *events, held = _BLANK.split(held + data)
            for event in events:
                if lines := [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]:
                    yield b"\n".join(lines)

    def leave(self) -> None:
        with suppress(OSError, RuntimeError):
            self._writer.transport.abort()


def why(error: OSError) -> str:
    """What the system calls it: of a connection that is refused, asyncio says where it was to go, and no more."""
    if error.errno is None or isinstance(error, socket.gaierror):  # those of names have numbers of their own
        return error.strerror or str(error)
    return os.strerror(error.errno)


class _Chunks:
    """Takes chunked transfer coding apart. Source: RFC 9112, 7.1."""

    def __init__(self) -> None:
        self._held = b""
        self._left = 0  # of the chunk's data and its line end
        self.is_over = False

    def push(self, data: bytes) -> bytes:
        self._held += data
        found = []
        while not self.is_over:
            if self._left > 2:
                piece = self._held[: self._left - 2]
                found.append(piece)
                self._held, self._left = self._held[len(piece) :], self._left - len(piece)
                if self._left > 2:
                    break
            if self._left:
                if len(self._held) < self._left:
                    break
                self._held, self._left = self._held[self._left :], 0
            line, end, rest = self._held.partition(b"\r\n")
            if not end:
                break
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError:
                raise ServerGone(f"a chunk of {line[:40]!r} bytes") from None
            self._held, self._left, self.is_over = rest, size + 2, size == 0
        return b"".join(found)
