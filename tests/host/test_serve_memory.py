"""What a server's memory may grow by, whatever is asked: the bounds that docs/serving.md states, by kind of input."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import TINY, Served, served

from kerngen.runtime import template_worker
from kerngen.runtime.serve.grammar_cost import MAX_COMPILE_BYTES
from kerngen.runtime.serve.grammars import MAX_LIVE_BYTES
from kerngen.runtime.serve.service import Limits
from kerngen.runtime.text import LEAST_CHARS

# A template of whoever made the checkpoint, which does what the message says.
TEMPLATE = """{% set said = messages[0].content %}
{% if said == "written" %}{{ "é" | urlencode * 10 ** 7 }}
{% elif said == "doubled" %}{{ "a" * 2 * 10 ** 6 }}
{% elif said == "huge" %}{{ "a" * 10 ** 10 }}
{% elif said == "many" %}{% for i in range(99999) %}{{ "x" * 10000 }}{% endfor %}
{% else %}{{ said }}{% endif %}"""
SAMPLE_S = 0.05
LIMITS = Limits()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Asked = tuple[str, dict[str, Any] | bytes]


def _resident_bytes(root: int) -> int:
    """Of `root` and all below it, what they share counted once."""
    total, left = 0, [root]
    while left:
        pid = left.pop()
        with suppress(OSError):  # it has ended
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                left += map(int, children.read_text().split())
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


@contextmanager
def _watched(server: Served) -> Iterator[list[int]]:
    """What the server's processes hold as it goes on."""
    held, end = [_resident_bytes(server.process.pid)], threading.Event()

    def watch() -> None:
        while not end.wait(SAMPLE_S):
            held.append(_resident_bytes(server.process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield held
    finally:
        end.set()
        thread.join()


def _grown(held: list[int]) -> int:
    """At most, from any time to a later one: what was asked before may be given back meanwhile."""
    least = accumulate(held, min)
    return max(now - before for now, before in zip(held, least, strict=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with served(model=str(folder)) as found:
        warm = {"prompt": "Hi", "guided_choice": ["a", "b"], "max_tokens": 2}
        assert found.http.post(f"{found.url}{TEXT}", json=warm).status_code == 200
        yield found


@pytest.fixture(scope="module", autouse=True)
def start_bytes(server: Served) -> int:
    """What its processes hold before anybody has asked."""
    return _resident_bytes(server.process.pid)


def _said(content: Any, **more: Any) -> Asked:
    return CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0, **more}


def _long(more: str) -> Asked:
    """A request that is at work for seconds, with as many bytes of `more` as one may have; one character takes four
    bytes, and so do all others of its text.
    """
    body = json.dumps({"prompt": "Hi", "max_tokens": 100, "n": 2, "ignore_eos": True, "user": "\N{GRINNING FACE}"},
                      ensure_ascii=False)[:-2].encode()  # fmt: skip
    return TEXT, body + more.encode() * ((LIMITS.body_bytes - len(body) - 2) // len(more)) + b'"}'


def _many(value: str, count: int) -> Asked:
    """A request that is at work for seconds, with as many values as one may have."""
    values = ",".join([value] * count)
    return TEXT, f'{{"prompt":"Hi","max_tokens":100,"n":2,"ignore_eos":true,"x":[{values}]}}'.encode()


def _tools(count: int) -> Asked:
    """Each refers again and again to the same, and so is 25,000 parts written out."""
    defs = {"A": {"type": "object", "properties": {f"k{n}": {} for n in range(100)}}}
    properties = {f"p{n}": {"$ref": "#/$defs/A"} for n in range(240)}
    parameters = {"type": "object", "$defs": defs, "properties": properties}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(count)]
    return _said("Hi", tools=tools, tool_choice="required")


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * (15 << 17)}}]
MULTIPART = b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\n' + b"a" * (15 << 20) + b"\r\n--x--"
BIAS = {str(token): 1.0 for token in range(1024)}
STOPS = [f"{n:02}" * 2048 for n in range(64)]
BODIES = 8 * LIMITS.all_bytes  # as it came, once more, four bytes a character, and a copy of one while it is read
# Of each kind, the worst of which come last: what is asked at once, what may be answered, and the bound.
KINDS: dict[str, tuple[list[Asked], set[int], int]] = {
    "values": ([_many('{"a":1}', 249_000) for _ in range(4)], {200, 429}, 150 * LIMITS.all_values),
    "lists": ([_many("[1.5]", 249_000) for _ in range(4)], {200, 429}, 150 * LIMITS.all_values),
    "tools": ([_tools(25) for _ in range(3)], {400}, 32 << 20),
    "choices": ([(TEXT, {"prompt": "Hi", "n": 64, "max_tokens": 2, "logprobs": 20, "logit_bias": BIAS, "stop": STOPS})
                 for _ in range(4)], {200}, 96 << 20),
    "images": ([_said(IMAGE) for _ in range(4)], {400, 413}, BODIES),
    "multipart": ([(CHAT, MULTIPART) for _ in range(4)], {400}, BODIES),
    "texts": ([("/tokenize", {"prompt": "a" * LEAST_CHARS}) for _ in range(3)], {200}, 256 * LEAST_CHARS),
    "bodies": ([_long("a") for _ in range(8)], {200, 429}, BODIES),
    "templates": ([_said(how) for how in ("written", "doubled", "huge", "many")], {400},
                  3 * template_worker.MEMORY_BYTES),
    "grammars": ([(TEXT, {"prompt": "Hi", "guided_json": {"type": "integer", "multipleOf": number}, "max_tokens": 2})
                  for number in (199_999, 999_983)], {200, 400}, 2 * MAX_COMPILE_BYTES + MAX_LIVE_BYTES),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_takes_no_more_memory_than_is_stated(server: Served, kind: str) -> None:
    asked, statuses, bound = KINDS[kind]
    bodies = [(path, body if isinstance(body, bytes) else json.dumps(body).encode()) for path, body in asked]
    headers = {"Content-Type": "multipart/form-data; boundary=x"} if kind == "multipart" else {}

    def ask(one: tuple[str, bytes]) -> httpx2.Response:
        return server.http.post(f"{server.url}{one[0]}", content=one[1], headers=headers)

    with _watched(server) as held, ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(ask, bodies))
    assert {answer.status_code for answer in answers} <= statuses, [answer.text[:300] for answer in answers]
    assert _grown(held) < bound, [h >> 20 for h in held]


def test_connections_whose_heads_do_not_end_take_what_is_stated(server: Served) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + b"a: " + b"b" * 60_000
    with _watched(server) as held, ExitStack() as clients:
        for _ in range(500):
            clients.enter_context(socket.create_connection((host, int(port)), timeout=20)).sendall(head)
        assert server.http.get(f"{server.url}/version").status_code == 200
        time.sleep(5 * SAMPLE_S)
    assert _grown(held) < 500 * 200_000, [h >> 20 for h in held]


def test_what_was_asked_is_given_back(server: Served, start_bytes: int) -> None:
    """All but grammars that are kept, and what the allocators keep of the largest request."""
    end = time.monotonic() + 30
    while _resident_bytes(server.process.pid) - start_bytes > 1 << 30 and time.monotonic() < end:
        time.sleep(1)
    assert _resident_bytes(server.process.pid) - start_bytes < 1 << 30
    assert server.http.post(f"{server.url}{TEXT}", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200
