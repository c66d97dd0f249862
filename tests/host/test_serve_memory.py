"""What a server's memory may grow by, whatever is asked: the bound that docs/serving.md states."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
SAMPLE_S = 0.2


def _resident_bytes(root: int) -> int:
    """Of `root` and all below it, what they share counted once."""
    told = subprocess.run(["ps", "-e", "-o", "pid=", "-o", "ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for pid, parent in (map(int, line.split()) for line in told.splitlines()):
        children.setdefault(parent, []).append(pid)
    total, left = 0, [root]
    while left:
        left += children.get(pid := left.pop(), [])
        with suppress(OSError):  # it has ended
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


def test_nothing_that_is_asked_takes_the_machines_memory(tmp_path: Path) -> None:
    """Each of these took hundreds of megabytes for good, or gigabytes for minutes."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    hi = {"max_tokens": 2, "temperature": 0}
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/chat/completions", hi | {"messages": [{"role": "user", "content": how}]})
          for how in ("written", "doubled", "huge", "many")),
        *(("/v1/completions", hi | {"prompt": "Hi", "guided_json": {"type": "integer", "multipleOf": number}})
          for number in (199_999, 999_983)),
        *(("/tokenize", {"prompt": "a" * LEAST_CHARS}) for _ in range(2)),
    ]  # fmt: skip
    with served(model=str(folder)) as server:
        url = f"{server.url}/v1/completions"
        warm = hi | {"prompt": "Hi", "guided_choice": ["a", "b"]}
        assert server.http.post(url, json=warm).status_code == 200
        host, _, port = server.url.removeprefix("http://").partition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(300)]
        with _watched(server) as held, ThreadPoolExecutor(len(asked)) as threads:
            bodies = [(path, json.dumps(body)) for path, body in asked]
            answers = list(threads.map(lambda one: server.http.post(f"{server.url}{one[0]}", content=one[1]), bodies))
        for client in idle:
            client.close()
        assert {answer.status_code for answer in answers} <= {200, 400, 429}
        assert {answer.status_code for answer in answers[:4]} == {400}
        assert server.http.post(url, json=warm).status_code == 200
    limits = Limits()
    bound = (3 * template_worker.MEMORY_BYTES + 2 * MAX_COMPILE_BYTES + MAX_LIVE_BYTES + 256 * LEAST_CHARS
             + 2 * limits.all_bytes + 150 * limits.all_values + 200_000 * len(idle))  # fmt: skip
    assert max(held) - held[0] < bound, [h >> 20 for h in held]
    assert held[-1] - held[0] < 1 << 30, [h >> 20 for h in held]
