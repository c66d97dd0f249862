"""Requests that nobody would send: each has an answer in OpenAI's form, and leaves nothing behind.

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
    "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/nothing", "/health", "/",
)  # fmt: skip
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1, 10**400, 1e308, float("nan"), float("inf"), "", "a", "\x00", "\ud800", "<turn|>", "<bos>" * 9,
    "\U0001f600" * 99, "a" * 3000, [], [[]], [[[]]], {}, {"": None}, [None], [1, "a"], [10**9], ["a"] * 70, {"a": {}},
)  # fmt: skip


def _sensible(random: random.Random) -> dict[str, Any]:
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


def _body(random: random.Random) -> bytes:
    body: Any = _sensible(random)
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
            path, body = draw.choice(PATHS[:4] if draw.random() < 0.9 else PATHS), _body(draw)
            method = "POST" if draw.random() < 0.97 else draw.choice(("GET", "PUT", "DELETE", "HEAD"))
            answer = client.request(method, path, content=body)
            statuses[answer.status_code] += 1
            told = f"request {number} of seed {seed}: {method} {path} {body[:300]!r} -> {answer.text[:300]}"
            assert answer.status_code < 500, told
            if answer.status_code >= 400 and method != "HEAD":
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, told
            elif answer.headers.get("content-type", "").startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n"), told
                assert '"error"' not in answer.text, told
    assert statuses[200] > COUNT / 30, statuses
    assert statuses[400] > COUNT / 30, statuses
    with service.admitted(8):
        pass  # every place was given back
    assert not caplog.records
