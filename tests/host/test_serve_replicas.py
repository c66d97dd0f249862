"""`kerngen serve --replicas 2` over HTTP, with the tiny checkpoint on the CPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from command import Kerngen
from served import TINY, Served, served

from kerngen.runtime.cache import PAGE_SIZE
from kerngen.runtime.session import load

LONG = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
ALONE = {"prompt": "The sky is", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--replicas", "2", "--no-draft") as found:
        yield found


def _ask(server: Served, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.http.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _replicas(server: Served) -> list[dict[str, Any]]:
    return list(server.http.get(f"{server.url}/health").json()["replicas"])


def _until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("one_thread")
def test_two_say_what_one_says(server: Served) -> None:
    before = [r["requests"] for r in _replicas(server)]
    alone = load(TINY, device="cpu", draft=False).generate(ALONE["prompt"], max_new_tokens=24, chat=False).text
    assert {_ask(server, ALONE)["choices"][0]["text"] for _ in range(4)} == {alone}
    drawn = ALONE | {"temperature": 1.0, "seed": 5}
    assert len({_ask(server, drawn)["choices"][0]["text"] for _ in range(4)}) == 1
    assert [r["requests"] - b for r, b in zip(_replicas(server), before, strict=True)] == [4, 4], "each was asked"


def test_a_conversation_stays_where_its_prefix_is(server: Served) -> None:
    hits = server.metric("prefix_cache_hits_total")
    talks = [list(range(start, start + PAGE_SIZE + 8)) for start in range(400, 800, 100)]
    for talk in talks:
        assert _ask(server, {"prompt": talk, "max_tokens": 2})["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    before = [r["requests"] for r in _replicas(server)]
    for at in (3, 2, 0, 1):  # not in the order of rotation
        usage = _ask(server, {"prompt": [*talks[at], 7, 8, 9], "max_tokens": 2})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == PAGE_SIZE, at
    assert [r["requests"] - b for r, b in zip(_replicas(server), before, strict=True)] == [2, 2]
    assert server.metric("prefix_cache_hits_total") == hits + 4 * PAGE_SIZE


def test_what_comes_at_once_is_spread(server: Served) -> None:
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(_ask, server, LONG) for _ in range(4)]
        _until(lambda: [r["running"] for r in _replicas(server)] == [2, 2])
        assert server.metric("num_requests_running") == 4
        assert len({answer.result()["choices"][0]["text"] for answer in asked}) == 1
    _until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("kv_cache_usage_perc") == 0


def test_more_replicas_than_gpus_are_refused(kerngen: Kerngen) -> None:
    devices = ",".join(f"cuda:{i}" for i in range(100))
    code, out, err = kerngen("serve", str(TINY), "--port", "0", "--replicas", "100", "--device", devices)
    assert (code, out) == (2, ""), err
    assert "UsageError: --replicas 100 take 100 GPUs: there is no cuda:" in err
    assert "starting" not in err, "nothing was loaded"


def test_one_dies_and_the_other_goes_on_and_both_end_in_order(server: Served) -> None:
    """Under load, with kill -9. Then SIGTERM, while both are at work: the last of this server's tests."""
    url = f"{server.url}/v1/completions"
    whole = _ask(server, LONG)["choices"][0]["text"]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(server.http.post, url, json=LONG) for _ in range(4)]
        _until(lambda: [r["running"] for r in _replicas(server)] == [2, 2])
        os.kill(server.engines()[1], signal.SIGKILL)
        _until(lambda: [r["up"] for r in _replicas(server)] == [True, False])
        health = server.http.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert "died (exit code -9)" in health.json()["replicas"][1]["why"]
        assert _ask(server, ALONE)["usage"]["completion_tokens"] > 0, "whoever comes is answered"
        answers = [answer.result(120) for answer in asked]
        said = [answer.json()["choices"][0]["text"] for answer in answers if answer.is_success]
        assert set(said) == {whole}
        assert len(said) >= 2, "the other's two; and those of which not one token had come"
        for answer in answers:
            died = "replica 1 (cpu): the engine's process died"
            assert answer.is_success or (answer.status_code, died in answer.text) == (503, True), answer.text
        _until(lambda: [r["up"] for r in _replicas(server)] == [True, True])
        assert [r["restarts"] for r in _replicas(server)] == [0, 1]
        assert server.http.get(f"{server.url}/health").json()["status"] == "ok"

        asked = [threads.submit(server.http.post, url, json=LONG) for _ in range(4)]
        _until(lambda: [r["running"] for r in _replicas(server)] == [2, 2])
        server.process.send_signal(signal.SIGTERM)
        answers = [answer.result(120) for answer in asked]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {whole}
        assert server.process.wait(60) == 0
    assert any("replica 1 (cpu) serves again" in line for line in server.said)
    assert not any("Traceback" in line for line in server.said), server.said
