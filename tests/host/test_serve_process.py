"""`kerngen serve` as a process: a model answers, who leaves frees what it held, and it ends in order."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from command import Kerngen
from served import TINY, Served, served

from kerngen.errors import UsageError
from kerngen.runtime.serve import server as serving
from kerngen.runtime.serve.connections import REFUSED_S

ASKED = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0, "max_tokens": 40}
LONG = {"prompt": "The", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--control-tokens") as found:
        yield found


def _until(is_so: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_says_what_run_says(server: Served, kerngen: Kerngen) -> None:
    out = kerngen.ok(
        "run", str(TINY), "--prompt", ASKED["messages"][0]["content"], "--max-new-tokens", "40", "--json",  # type: ignore[index]
        "--backend", "torch", "--temperature", "0",
    )  # fmt: skip
    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(
            lambda _: server.http.post(f"{server.url}/v1/chat/completions", json=ASKED).json(), range(6)
        )
    said = {answer["choices"][0]["message"]["content"] for answer in answers}
    assert said == {json.loads(out)["text"]}
    assert server.metric("prefix_cache_hits_total") >= 0
    assert server.metric("spec_decode_num_drafts_total") > 0


def test_an_answer_is_what_it_must_be(server: Served) -> None:
    """Guided, in company of others that are not, and with what is known of its tokens."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}, "of": {"enum": ["blue", "red"]}},
              "required": ["n", "of"], "additionalProperties": False}  # fmt: skip
    asked = [
        ASKED | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "max_tokens": 200},
        ASKED | {"guided_choice": ["yes", "no"], "logprobs": True, "top_logprobs": 1},
        ASKED | {"repetition_penalty": 1.3, "logit_bias": {"5": -100}},
        ASKED,
    ]
    url = f"{server.url}/v1/chat/completions"
    alone = server.http.post(url, json=ASKED).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda body: server.http.post(url, json=body).json(), asked))
    said = [answer["choices"][0]["message"]["content"] for answer in answers]
    found = json.loads(said[0])
    assert found["n"] in (1, 22)
    assert found["of"] in ("blue", "red")
    assert said[1] in ("yes", "no")
    assert all(x["logprob"] <= 0 for x in answers[1]["choices"][0]["logprobs"]["content"])
    assert said[3] == alone
    refused = server.http.post(url, json=ASKED | {"guided_regex": "(?=a)b"})
    assert refused.status_code == 400, refused.text


def test_a_raw_prompt_has_control_tokens_where_the_server_was_told(server: Served) -> None:
    asked = {"prompt": "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"}
    ids = server.http.post(f"{server.url}/tokenize", json=asked).json()["tokens"]
    assert [i for i in ids if i in (2, 105, 106)] == [2, 105, 106, 105]
    told = server.http.post(f"{server.url}/v1/completions", json=asked | {"max_tokens": 1}).json()["usage"]
    assert told["prompt_tokens"] == len(ids)
    plain = server.http.post(f"{server.url}/tokenize", json=asked | {"control_tokens": False}).json()["tokens"]
    assert not {105, 106} & set(plain)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_an_engine(server: Served, stream: bool) -> None:
    """A call is asked for: cut off, it is no content; and schemas are enforced as far as they can be."""
    either = {"type": "array", "items": {"oneOf": [{"const": "a"}, {"const": "b"}]}, "minItems": 1, "maxItems": 1,
              "uniqueItems": True}  # fmt: skip
    parameters = {"allOf": [{"properties": {"x": either}, "required": ["x"]}], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    asked = ASKED | {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}

    def choice(more: dict[str, object]) -> dict[str, object]:
        answer = server.http.post(f"{server.url}/v1/chat/completions", json=asked | more)
        assert answer.headers["kerngen-not-enforced"] == "tool look: parameters.x: uniqueItems"
        if not stream:
            (found,) = answer.json()["choices"]
            called = found["message"].get("tool_calls", [])
            return {"content": found["message"]["content"] or "", "reason": found["finish_reason"],
                    "arguments": "".join(call["function"]["arguments"] for call in called)}  # fmt: skip
        events = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n")[:-2]]
        called = [call for event in events for call in event["delta"].get("tool_calls", [])]
        return {"content": "".join(event["delta"].get("content", "") for event in events),
                "reason": events[-1]["finish_reason"],
                "arguments": "".join(call["function"]["arguments"] for call in called)}  # fmt: skip

    assert choice({"max_tokens": 2}) == {"content": "", "reason": "length", "arguments": ""}
    whole = choice({"max_tokens": 100})
    assert (whole["content"], whole["reason"]) == ("", "tool_calls")
    assert json.loads(str(whole["arguments"]))["x"] in (["a"], ["b"])


def test_an_answer_that_a_stop_string_ends_is_counted(server: Served) -> None:
    url, names = f"{server.url}/v1/completions", ("generation_tokens_total", "request_generation_tokens_sum")
    alone = server.http.post(url, json=LONG).json()["choices"][0]["text"]
    before = server.metric("prompt_tokens_total")
    answer = server.http.post(url, json=LONG | {"stop": alone[40:44]}).json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["stop_reason"]) == (alone[: alone.find(alone[40:44])], alone[40:44])
    assert server.metric("prompt_tokens_total") == before + usage["prompt_tokens"]
    assert server.metric(names[0]) == server.metric(names[1]) > 0


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_what_it_held(server: Served, stream: bool) -> None:
    body = json.dumps(LONG | {"stream": stream, "n": 3}).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        client.sendall(head % len(body) + body)
        _until(lambda: server.metric("num_requests_running") == 3)
    _until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("num_requests_waiting") == 0
    assert server.metric("kv_cache_usage_perc") == 0


def test_it_ends_once_answers_have(tmp_path: Path) -> None:
    with served("--no-draft") as found, ThreadPoolExecutor(1) as threads:
        long = threads.submit(lambda: found.http.post(f"{found.url}/v1/completions", json=LONG))
        _until(lambda: found.metric("num_requests_running") == 1)
        host, _, port = found.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as idle:
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(4096).startswith(b"HTTP/1.1 200")
            found.process.send_signal(signal.SIGTERM)
            assert idle.recv(4096) == b"", "it is closed"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        assert not long.done()
        answer = long.result(120)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 120
        assert found.process.wait(60) == 0


@pytest.mark.parametrize(("drain_s", "signals"), [(0, [signal.SIGTERM]), (60, [signal.SIGINT] * 2)])
def test_answers_that_do_not_end_in_time_say_so(drain_s: int, signals: list[signal.Signals]) -> None:
    with served("--no-draft", "--drain", str(drain_s)) as found, ThreadPoolExecutor(2) as threads:
        url, long = f"{found.url}/v1/completions", LONG | {"max_tokens": 250, "n": 2}
        asked = [threads.submit(found.http.post, url, json=long | {"stream": stream}) for stream in (False, True)]
        _until(lambda: found.metric("num_requests_running") == 4)
        for number in signals:
            found.process.send_signal(number)
            time.sleep(0.05)
        whole, streamed = (answer.result(60) for answer in asked)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "unavailable"), whole.text
        *_, last, done, _ = streamed.text.split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith("the server has stopped")
        assert found.process.wait(60) == 0
    assert not any("Traceback" in line for line in found.said), found.said


def test_it_says_that_the_engine_died(tmp_path: Path) -> None:
    with served("--no-draft") as found, ThreadPoolExecutor(1) as threads:
        long = threads.submit(lambda: found.http.post(f"{found.url}/v1/completions", json=LONG))
        _until(lambda: found.metric("num_requests_running") == 1)
        os.kill(found.engine(), signal.SIGKILL)
        assert long.result(120).status_code == 503
        assert found.process.wait(60) == 1
        assert any("the engine has ended: the engine's process died" in line for line in found.said)


def test_a_port_is_one_servers_while_its_weights_load_and_free_once_it_has_ended() -> None:
    first = serving._listen("127.0.0.1", 0)
    address = first.getsockname()
    with pytest.raises(UsageError, match=f"{address[1]}.*in use"):
        serving._listen(*address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    serving._answer(first)
    with socket.create_connection(address) as client:
        first.accept()[0].close()  # the end that closes first keeps the port for a minute
        assert client.recv(1) == b""
    with pytest.raises(UsageError):
        serving._listen(*address)
    first.close()
    with serving._listen(*address) as second:
        serving._answer(second)


def test_what_cannot_be_served(kerngen: Kerngen, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = kerngen("serve", str(TINY), "--port", port)
        assert (code, "--port takes another one" in err) == (2, True), err
    for arguments, status, says in (
        ((str(tmp_path / "none"),), 2, "none"),
        ((str(TINY), "--context", "1000000"), 2, "--context 1000000"),
        ((str(TINY), "--api-key", ""), 2, "an API key is empty"),
        ((str(TINY), "--name", "tiny", "--name", " "), 2, "a --name is empty"),
        ((str(TINY), "--host", "no.such.host.invalid"), 2, "--host no.such.host.invalid"),
        ((str(TINY), "--host", "a" * 70), 2, f"UsageError: --host {'a' * 70}: encoding with 'idna' codec failed"),
        ((str(TINY), "--draft", str(tmp_path)), 1, str(tmp_path)),
        ((str(TINY), "--db", "x.db"), 2, "UsageError: --db x.db: the torch backend looks nothing up"),
    ):
        code, out, err = kerngen("serve", *arguments, "--port", "0", "--backend", "torch")
        assert (code, out) == (status, ""), (arguments, err)
        assert says in err


def test_more_clients_than_descriptors_keep_nobody_waiting() -> None:
    """It cannot raise its limit. asyncio said so in thousands of tracebacks, and a kept connection waited for 28 s."""
    most = 300
    with served(max_files=most) as found, httpx2.Client(timeout=60) as kept:
        assert kept.get(f"{found.url}/version").status_code == 200
        host, _, port = found.url.removeprefix("http://").partition(":")
        idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(2 * most)]
        try:
            began = time.monotonic()
            assert kept.post(f"{found.url}/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
            assert time.monotonic() - began < 10
            time.sleep(2 * REFUSED_S)  # of those that came at once some are cut off; who comes now is told
            assert httpx2.get(f"{found.url}/version").status_code == 503
        finally:
            for client in idle:
                client.close()
        _until(lambda: httpx2.get(f"{found.url}/version").status_code == 200)
        assert not any("Traceback" in line or "warning: clients" in line for line in found.said), found.said


def test_the_limit_of_descriptors_is_raised_where_it_may_be(server: Served) -> None:
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 4096 + 256)


def test_pages_of_others_may_not_ask(server: Served) -> None:
    url, port = f"{server.url}/v1/completions", server.url.rpartition(":")[2]
    asked = json.dumps(LONG | {"max_tokens": 2}).encode()

    def status(**headers: str) -> int:
        sent = {"Content-Type": "text/plain", **{name.capitalize(): value for name, value in headers.items()}}
        return int(server.http.post(url, content=asked, headers=sent).status_code)

    assert status() == status(origin=server.url) == status(host=f"localhost:{port}") == 200
    assert status(origin="http://other.example") == status(origin="null") == 403
    assert status(host=f"rebound.example:{port}") == 403
    assert status(host=f"rebound.example:{port}", origin=f"http://rebound.example:{port}") == 403


@pytest.mark.parametrize("more", [
    {"guided_json": '{"enum": ["\\ud800"]}'},
    {"guided_json": '{"properties": {"\\ud800": {}}, "required": ["\\ud800"]}'},
    {"guided_json": {"type": "integer", "multipleOf": 999_983}},
])  # fmt: skip
def test_what_no_answer_can_follow_is_refused(server: Served, more: dict[str, object]) -> None:
    """A lone surrogate in JSON that is a text of the request, and what takes too long to compile."""
    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(server.http.post, f"{server.url}/v1/chat/completions", json=ASKED | more)
        time.sleep(0.5)
        quick = server.http.post(f"{server.url}/v1/chat/completions", json=ASKED | {"guided_choice": ["yes", "no"]})
        assert quick.json()["choices"][0]["message"]["content"] in ("yes", "no")
        assert refused.result().status_code == 400, refused.result().text
    assert time.monotonic() - began < 60
    assert not any("Traceback" in line for line in server.said)


def test_a_pattern_of_no_text_is_named_as_not_enforced(server: Served) -> None:
    more = {"guided_json": '{"type": "string", "pattern": "\\ud800"}'}
    answer = server.http.post(f"{server.url}/v1/chat/completions", json=ASKED | more)
    assert (answer.status_code, "pattern" in answer.headers["Kerngen-Not-Enforced"]) == (200, True), answer.text
