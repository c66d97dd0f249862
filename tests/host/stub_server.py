"""A server of OpenAI's completions, of a hundred lines and of one's own process, that does one thing wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LEAK_BYTES = 4 << 20


@dataclass
class Stub:
    """fault: "500", "other", "silent", "busy", "cut", "sick", "takes nonsense", "leaks" or "gone". It
    begins with the request `since`, so that what is asked alone before is answered well.
    only: what is answered in place of all else, as by another kind of server.
    """

    fault: str = ""
    since: int = 0
    pause_s: float = 0.001
    only: str = ""
    url: str = ""
    num_asked: int = 0
    bodies: list[dict[str, object]] = field(default_factory=list)
    held: list[bytearray] = field(default_factory=list)
    _server: asyncio.Server | None = None

    def _is(self, fault: str) -> bool:
        return self.fault == fault and self.num_asked > self.since

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answered(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split()[1]
        size = next((int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0)
        body = await reader.readexactly(size)
        if self.only:
            return _text(writer, self.only)
        if path == "/v1/models":
            return _whole(writer, 200, {"data": [{"id": "stub"}]})
        if path == "/health":
            return _whole(writer, 503 if self._is("sick") else 200, {})
        if path == "/metrics":
            counts = {"drafts": 1, "draft_tokens": 4, "accepted_tokens": 3}
            drafts = "".join(
                f'vllm:spec_decode_num_{name}_total{{a="b"}} {count * self.num_asked}\n'
                for name, count in counts.items()
            )
            return _text(writer, f"vllm:num_requests_running{{}} {int(self._is('busy'))}\n{drafts}")
        await self._complete(body, writer)
        return None

    async def _complete(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            asked = json.loads(body)
            prompt, count = asked["prompt"], asked["max_tokens"]
            if not (isinstance(prompt, list) and prompt and min(prompt) >= 0 and 0 < count < 1000):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            return _whole(writer, 200 if self._is("takes nonsense") else 400, {"error": {"message": "nonsense"}})
        self.num_asked += 1
        self.bodies.append(asked)
        if self._is("500"):
            return _whole(writer, 500, {"error": {"message": "planted"}})
        if self._is("silent"):
            await asyncio.sleep(3600)
        if self._is("leaks"):
            self.held.append(bytearray(b"x" * LEAK_BYTES))
        if self._is("gone") and self._server is not None:
            self._server.close()
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(count):
            await asyncio.sleep(self.pause_s)
            if self._is("cut") and i == 1:
                return None
            text = f" {sum(prompt) % 97 + i}" if not self._is("other") else " other"
            _chunk(writer, {"choices": [{"index": 0, "text": text}]})
            await writer.drain()
        _chunk(writer, {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}})
        data = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))
        await writer.drain()
        return None

    async def serve(self, ready: threading.Event, end: threading.Event) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        ready.set()
        while not end.is_set():
            await asyncio.sleep(0.02)
        self._server.close()


def _chunk(writer: asyncio.StreamWriter, content: object) -> None:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    _text(writer, json.dumps(content), status)


def _text(writer: asyncio.StreamWriter, text: str, status: int = 200) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


@contextmanager
def stubbed(stub: Stub) -> Iterator[Stub]:
    """Answers in a thread, as long as this lasts."""
    ready, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(stub.serve(ready, end)), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield stub
    finally:
        end.set()
        thread.join()
