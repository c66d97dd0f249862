"""Requests that nobody would send: each has an answer in its API's form, and leaves nothing behind.

KERNGEN_FUZZ says how many; 100,000 take some minutes.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from typing import Any

import pytest
from played_engine import played_service
from starlette.testclient import TestClient

from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.service import Limits

COUNT = int(os.environ.get("KERNGEN_FUZZ", "3000"))
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/v1/nothing",
    "/health", "/",
)  # fmt: skip
LAST = {  # how a stream's last event begins
    "/v1/responses": ("event: response.completed\n", "event: response.incomplete\n"),
    "/v1/messages": ("event: message_stop\n",),
}
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 10**400, 1e308, float("nan"), float("inf"), "", "a", "\x00", "\ud800", "<turn|>", "<bos>" * 9,
    "\U0001f600" * 99, "a" * 3000, [], [[]], [[[]]], {}, {"": None}, [None], [1, "a"], [10**9], ["a"] * 70, {"a": {}},
)  # fmt: skip


def _items(random: random.Random) -> dict[str, Any]:
    """For /v1/responses."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
    ]
    fields: dict[str, Any] = {
        "instructions": "Be brief", "max_output_tokens": 3, "reasoning": {"effort": "low"}, "store": False,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "stream": True,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}, "temperature": 1,
        "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}, "include": ["x"], "metadata": {},
    }  # fmt: skip
    body = {"model": "tiny", "input": random.choice(("Hi", items[: random.randrange(1, 4)]))}
    return body | {name: fields[name] for name in random.sample(sorted(fields), random.randrange(4))}


def _blocks(random: random.Random) -> dict[str, Any]:
    """For /v1/messages."""
    said = [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "So."}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]  # fmt: skip
    fields: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief"}], "thinking": {"type": "enabled", "budget_tokens": 9},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["x"], "temperature": 1, "top_p": 0.5, "top_k": 3, "stream": True,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    }  # fmt: skip
    body = {"model": "tiny", "max_tokens": 3, "messages": messages[: random.choice((1, 1, 3))]}
    return body | {name: fields[name] for name in random.sample(sorted(fields), random.randrange(4))}


def _sensible(random: random.Random, path: str) -> dict[str, Any]:
    if path.startswith("/v1/responses"):
        return _items(random)
    if path.startswith("/v1/messages"):
        return _blocks(random)
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["x"]}}, "required": ["a"]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                         {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "c", "content": "1"}][: random.choice((1, 1, 1, 3))],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}  # fmt: skip
    fields: dict[str, Any] = {
              "model": "tiny", "temperature": 1, "top_p": 0.5, "top_k": 3, "n": 2, "max_tokens": 3, "seed": 1,
              "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"1": 1},
              "logprobs": True, "top_logprobs": 2,
              "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
              "tool_choice": {"type": "function", "function": {"name": "f"}}, "guided_choice": ["a", "b"],
              "structured_outputs": {"json": schema, "grammar": None}, "best_of": 1, "add_generation_prompt": True,
              "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True}, "user": "me"}  # fmt: skip
    body = {"prompt": "Hi", "tokens": [1, 2], **chat}
    return body | {name: fields[name] for name in random.sample(sorted(fields), random.randrange(4))}


def _spoilt(value: Any, random: random.Random) -> Any:
    """`value` with something in it that is not as it should be."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        name = random.choice(sorted(value))
        kind = random.randrange(4)
        if kind == 0:
            return {k: v for k, v in value.items() if k != name}
        if kind == 1:
            return value | {str(random.choice(STRANGE))[:9].encode("utf-8", "replace").decode(): random.choice(STRANGE)}
        return value | {name: _spoilt(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        return [*value[:at], _spoilt(value[at], random), *value[at + 1 :]]
    return random.choice(STRANGE)


def _body(random: random.Random, path: str) -> bytes:
    body: Any = _sensible(random, path)
    for _ in range(random.randrange(4)):
        body = _spoilt(body, random)
    text = json.dumps(body).encode()
    kind = random.randrange(12)
    if kind == 0:
        return text[: random.randrange(len(text) + 1)]
    if kind == 1:
        return bytes(random.randrange(256) if random.random() < 0.02 else byte for byte in text)
    return text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_request_has_an_answer(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    service, _ = played_service(limits=Limits(queue=8, body_bytes=20_000))
    draw, statuses = random.Random(seed), Counter[int]()
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        for number in range(COUNT // 3):
            path = draw.choice(PATHS[:8] if draw.random() < 0.9 else PATHS)
            body = _body(draw, path)
            method = "POST" if draw.random() < 0.97 else draw.choice(("GET", "PUT", "DELETE", "HEAD"))
            answer = client.request(method, path, content=body)
            statuses[answer.status_code] += 1
            told = f"request {number} of seed {seed}: {method} {path} {body[:300]!r} -> {answer.text[:300]}"
            assert answer.status_code < 500, told
            if answer.status_code >= 400 and method != "HEAD":
                is_anthropic = path.startswith("/v1/messages")
                form = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == form, told
            elif answer.headers.get("content-type", "").startswith("text/event-stream"):
                assert answer.text.rstrip().rpartition("\n\n")[2].startswith(LAST.get(path, ("data: [DONE]",))), told
                assert '"error":{' not in answer.text, told
    assert statuses[200] > COUNT / 30, statuses
    assert statuses[400] > COUNT / 30, statuses
    with service.admitted(8):
        pass  # every place was given back
    assert not caplog.records
