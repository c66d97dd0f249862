"""`kerngen serve`: /v1/messages as Anthropic's clients see it. The engine is played."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from played_engine import MAX_LEN, words
from starlette.testclient import TestClient
from talking import CALL, THOUGHT, Q, Talk, events_of, prompt_of, talking, talking_service

from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.service import Limits

PATH = "/v1/messages"
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
HI: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
GRAZ = {"city": "Graz", "days": 2}


@pytest.fixture
def talk() -> Iterator[Talk]:
    with talking(f"{THOUGHT}So.{CALL}") as found:
        yield found


def test_a_message(talk: Talk) -> None:
    client, service, engine = talk
    asked = HI | {"tools": [LOOK], "system": [{"type": "text", "text": text} for text in ("Be brief", "and kind")],
                  "thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 0.5, "top_k": 3}  # fmt: skip
    answer = client.post(PATH, json=asked).json()
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    thought, said, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "I see.", "signature": ""}
    assert said == {"type": "text", "text": "So."}
    assert {k: call[k] for k in ("type", "name", "input")} == {"type": "tool_use", "name": "look", "input": GRAZ}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert prompt_of(service, engine).startswith("THINK TOOLS [")
    assert prompt_of(service, engine).endswith("system[Be brief\n\nand kind] user[Hi]")
    prompt, room, sampling, _ = engine.asked[0]
    assert (room, sampling.temperature, sampling.top_k) == (100, 0.5, 3)
    assert answer["usage"] == {
        "input_tokens": len(prompt) - 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3,
        "output_tokens": len(words(service.codec, f"{THOUGHT}So.{CALL}")) + 1,
        "output_tokens_details": {"thinking_tokens": len(words(service.codec, THOUGHT))},
    }  # fmt: skip
    counted = client.post(f"{PATH}/count_tokens", json={k: v for k, v in asked.items() if k != "max_tokens"})
    assert counted.json() == {"input_tokens": len(prompt)}


def test_a_message_in_events(talk: Talk) -> None:
    answer = talk[0].post(PATH, json=HI | {"tools": [LOOK], "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    kinds = [e["type"] for e in events]
    once = [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert (events[0]["message"]["content"], events[0]["message"]["stop_reason"]) == ([], None)
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert starts[2]["input"] == {}
    for at, kind, name, whole in ((0, "thinking_delta", "thinking", "I see."), (1, "text_delta", "text", "So."),
                                  (2, "input_json_delta", "partial_json", '{"city":"Graz","days":2}')):  # fmt: skip
        deltas = [e["delta"] for e in events if e.get("index") == at and e["type"] == "content_block_delta"]
        pieces = [delta[name] for delta in deltas if delta["type"] == kind]
        assert len(pieces) > 1
        assert "".join(pieces) == whole
        assert {delta["type"] for delta in deltas} == {kind, *(["signature_delta"] if at == 0 else [])}
    delta = events[-2]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 10


def test_turns_reach_the_template(talk: Talk) -> None:
    client, service, engine = talk
    first = client.post(PATH, json=HI | {"tools": [LOOK]}).json()
    results = [
        {"type": "text", "text": "There:"}, {"type": "text", "text": "both."},
        {"type": "tool_result", "tool_use_id": first["content"][2]["id"], "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}], "is_error": True},
    ]  # fmt: skip
    second = {"type": "tool_use", "id": "t2", "name": "look", "input": {"city": "Wien"}}
    messages = [*HI["messages"], {"role": "assistant", "content": [*first["content"], second]},
                {"role": "user", "content": results}]  # fmt: skip
    answer = client.post(PATH, json=HI | {"messages": messages, "tools": [LOOK], "system": "Be brief"})
    assert answer.status_code == 200, answer.text
    assert prompt_of(service, engine).split("}}] ")[1] == (
        'system[Be brief] user[Hi] assistant[So. thought(I see.) call(look {"city": "Graz", "days": 2})'
        ' call(look {"city": "Wien"})] tool[sunny of look] tool[no of look] user[There:\nboth.]'
    )


@pytest.mark.parametrize(("changes", "wrong"), [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "messages.0.content.0[0]: this model reads text alone, no images"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'; read here: text"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
    ({"messages": []}, "messages"), ({"max_tokens": None}, "max_tokens"), ({"model": None}, "model"),
    ({"messages": [*HI["messages"], {"role": "assistant", "content": "So"}]}, "an answer is a turn of its own"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "1"}]}]},
     "messages.0.content.0 answers call 'x'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "1"}]}]}, "no tool_use_id"),
    ({"messages": [*HI["messages"], {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]},
                   *HI["messages"]]}, "messages.1.content.0 is no call"),
    ({"messages": [*HI["messages"], {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                   *HI["messages"]]}, "another server encrypted"),
    ({"messages": [{"role": "user", "content": []}]}, "there are no messages"),
    ({"system": [{"type": [], "text": "Hi"}]}, "system[0] is of type []"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "which does not run here"),
    ({"tools": [LOOK, LOOK]}, "two functions named look"),
    ({"tool_choice": {"type": "tool"}, "tools": [LOOK]}, "has no name"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"mcp_servers": [{"url": "x"}]}, "the client calls tools"),
    ({"container": "x"}, "no code runs here"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "shorten the messages"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_there_is_refused_in_words(talk: Talk, stream: bool, changes: dict[str, Any], wrong: str) -> None:
    answer = talk[0].post(PATH, json=HI | {"stream": stream} | changes)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert wrong in answer.json()["error"]["message"]


def test_what_its_agents_send_passes(talk: Talk) -> None:
    client, service, engine = talk
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = {"system": [{"type": "text", "text": "Be brief", **cached}], "tools": [LOOK | cached | {"type": "custom"}],
             "metadata": {"user_id": "u"}, "service_tier": "auto", "output_config": {"effort": "high"},
             "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
             "thinking": {"type": "adaptive", "display": "omitted"}}  # fmt: skip
    answer = client.post(f"{PATH}?beta=true", json=HI | asked, headers={"anthropic-beta": "x"}).json()
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"], "thoughts are left out"
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    long = "mcp__" + "a" * 123  # as long as Anthropic lets a name be
    assert client.post(PATH, json=HI | {"tools": [LOOK | {"name": long}]}).status_code == 200
    assert long in prompt_of(service, engine)
    client.post(PATH, json=HI | {"thinking": {"type": "disabled"}})
    assert not prompt_of(service, engine).startswith("THINK")


def test_what_claude_code_sends_passes(talk: Talk) -> None:
    """The fields of its requests as version 2.1.197 sends them: a turn, one on after a call, and with a web search."""
    client, service, engine = talk
    service.ready = replace(service.ready, max_len=4096)
    assert client.head("/").status_code == 200, "it asks before all else whether there is anybody"
    cached = {"cache_control": {"type": "ephemeral"}}
    texts = [{"type": "text", "text": "Know this."}, {"type": "text", "text": "Hi", **cached}]
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": texts}, {"role": "system", "content": "Be exact."}],
        "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B", **cached}], "max_tokens": 32_000,
        "tools": [{"name": "look", "description": "Looks.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {
                "city": {"description": "Where", "type": "string"}}, "additionalProperties": False}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "stream": True,
    }  # fmt: skip
    betas = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    answer = client.post(f"{PATH}?beta=true", json=asked, headers=betas)
    assert (answer.status_code, answer.headers["Kerngen-Left-Out"]) == (200, "tools.1: web_search_20250305")
    assert "web_search" not in prompt_of(service, engine)
    assert prompt_of(service, engine).endswith("system[A\n\nB] user[Know this.\nHi] system[Be exact.]")
    starts = [event["content_block"] for event in events_of(answer.text) if event["type"] == "content_block_start"]
    call = starts[2] | {"input": GRAZ}
    said = [{"type": "thinking", "thinking": "I see.", "signature": ""}, {"type": "text", "text": "So."}, call]
    for content, told in (("sunny", "sunny"), (
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}],
        "(image: this cannot be read here)",
    )):  # fmt: skip
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": content, "is_error": False, **cached}
        turns = [*asked["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
        answer = client.post(f"{PATH}?beta=true", json=asked | {"messages": turns}, headers=betas)
        assert answer.status_code == 200, answer.text
        assert prompt_of(service, engine).endswith(f"tool[{told} of look]")
    left_out = ["messages.3.content.0.content[0]: image", "tools.1: web_search_20250305"]
    assert answer.headers["Kerngen-Left-Out"].split("; ") == left_out


def test_how_tools_are_chosen(talk: Talk) -> None:
    client, service, engine = talk
    both = HI | {"tools": [LOOK, LOOK | {"name": "other"}]}
    for choice, are_there, are_not in (({"type": "tool", "name": "other"}, ["other"], ["look"]),
                                       ({"type": "any"}, ["other", "look"], [])):  # fmt: skip
        assert client.post(PATH, json=both | {"tool_choice": choice}).status_code == 200
        assert engine.guided[-1] is not None
        assert all(name in engine.guided[-1].grammar for name in are_there)
        assert not any(name in engine.guided[-1].grammar for name in are_not)
    client.post(PATH, json=both | {"tool_choice": {"type": "any"}})
    many = engine.guided[-1]
    client.post(PATH, json=both | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    assert engine.guided[-1] != many
    client.post(PATH, json=both | {"tool_choice": {"type": "none"}})
    assert "TOOLS" not in prompt_of(service, engine)
    schema = {"type": "object", "properties": {"zebra": {"type": "integer"}}}
    client.post(PATH, json=HI | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert engine.guided[-1] is not None
    assert "zebra" in engine.guided[-1].grammar


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends(stream: bool) -> None:
    def ended(client: TestClient, changes: dict[str, Any]) -> tuple[str, str | None]:
        answer = client.post(PATH, json=HI | {"stream": stream} | changes)
        found = events_of(answer.text)[-2]["delta"] if stream else answer.json()
        return found["stop_reason"], found["stop_sequence"]

    with talking("Hello there") as (client, _, engine):
        assert ended(client, {}) == ("end_turn", None)
        assert ended(client, {"stop_sequences": ["xyz", "the"]}) == ("stop_sequence", "the")
        assert ended(client, {"max_tokens": 2}) == ("max_tokens", None)
        assert ended(client, {"max_tokens": 32_000}) == ("end_turn", None), "as long as the context has room"
        assert engine.asked[-1][1] == MAX_LEN - len(engine.asked[-1][0])
        content = "a " * (MAX_LEN // 2 - 30)
        engine.script = lambda prompt: [[9]] * MAX_LEN
        long = {"messages": [{"role": "user", "content": content}], "max_tokens": 32_000}
        assert ended(client, long) == ("model_context_window_exceeded", None)


def test_a_prompt_that_is_too_long_is_called_so(talk: Talk) -> None:
    answer = talk[0].post(PATH, json=HI | {"messages": [{"role": "user", "content": "a " * MAX_LEN}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: this model's maximum context length is")


def test_a_call_that_is_cut_off_or_cannot_be_read(talk: Talk) -> None:
    client, service, _ = talk
    size = len(words(service.codec, f"{THOUGHT}So.{CALL}"))
    answer = client.post(PATH, json=HI | {"tools": [LOOK], "max_tokens": size - 3}).json()
    assert (answer["stop_reason"], answer["content"][2]["input"]) == ("max_tokens", {"city": "Graz"})
    with talking(f"<|tool_call>call:look{{city:{Q}Graz{Q}]x}}<tool_call|>") as (client, _, _):
        answer = client.post(PATH, json=HI | {"tools": [LOOK]}).json()
        assert answer["stop_reason"] == "end_turn"
        (block,) = answer["content"]
        assert block["type"] == "text"
        assert block["text"].startswith('call:look{"city":"Graz"')


def test_errors_have_anthropics_form() -> None:
    service, engine = talking_service("Hello")
    service.limits = Limits(queue=1, body_bytes=5000)
    with TestClient(make_app(service, ["key"]), raise_server_exceptions=False) as client:

        def told(**how: Any) -> tuple[int, str, str]:
            answer = client.post(PATH, **{"headers": {"x-api-key": "key"}, "json": HI} | how)
            assert answer.json()["type"] == "error"
            error = answer.json()["error"]
            return answer.status_code, error["type"], error["message"]

        assert told(headers={})[:2] == (401, "authentication_error")
        assert told(headers={"x-api-key": "no"})[:2] == (401, "authentication_error")
        assert client.post(PATH, json=HI, headers={"Authorization": "Bearer key"}).status_code == 200
        assert client.post(PATH, json=HI, headers={"x-api-key": "key"}).status_code == 200
        assert told(json=HI | {"model": "claude"})[:2] == (404, "not_found_error")
        assert told(json=HI | {"system": "a" * 6000})[:2] == (413, "request_too_large")
        assert told(json=None, content=b"{")[:2] == (400, "invalid_request_error")
        with service.admitted(1):
            assert told()[:2] == (429, "rate_limit_error")
        engine.fails = "the model computed NaN"
        assert told() == (503, "overloaded_error", "the model computed NaN")
        engine.fails_at = 1
        stream = client.post(PATH, json=HI | {"stream": True}, headers={"x-api-key": "key"})
        last = events_of(stream.text)[-1]
        assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "the model computed NaN"}}
