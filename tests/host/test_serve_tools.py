"""Tools and thoughts over HTTP, whole and streamed. The engine is played."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from played_engine import TINY, PlayedEngine, played_service
from starlette.testclient import TestClient

from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.grammars import Guide, Guides
from kerngen.runtime.text import TextCodec

CHAT = "/v1/chat/completions"
CODEC = TextCodec(TINY, 2)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
END = "<turn|>"
VOCAB_SIZE = 1024
TEMPLATE = """{% for m in messages %}<|turn>{{ m.role }}
{{ m.content }}{{ (m.tool_calls or []) | tojson }}{{ m.tool_call_id }}<turn|>
{% endfor %}<|turn>model
"""


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(CODEC, VOCAB_SIZE, (1, 106, 50))


def answered(said: str, asked: dict[str, Any], *, stream: bool) -> tuple[dict[str, Any], PlayedEngine]:
    """The message that a client has where the model says `said`, with finish_reason and stop_reason."""
    service, engine = played_service(lambda prompt: [[i] for i in CODEC.encode(said)[1:]])
    service.codec._template.source = TEMPLATE
    with TestClient(make_app(service)) as client:
        answer = client.post(CHAT, json=asked | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        found = {key: value for key, value in choice["message"].items() if value}
        found["tool_calls"] = [call["function"] for call in choice["message"].get("tool_calls", [])]
    else:
        found = {"role": "assistant", "tool_calls": []}
        for line in answer.text.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for name in ("content", "reasoning_content"):
                if text := choice["delta"].get(name):
                    found[name] = found.get(name, "") + text
            for call in choice["delta"].get("tool_calls", []):
                if "name" in call["function"]:
                    found["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                found["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    ended = {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return {name: value for name, value in (found | ended).items() if value and name != "role"}, engine


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_a_call_that_is_cut_off_is_no_content(stream: bool, count: int) -> None:
    """tool_choice asks for a call, and max_tokens is less than its first tokens."""
    asked = ASKED | {"tool_choice": "required", "max_tokens": count}
    got, _ = answered("<|tool_call>call:look{a:1}<tool_call|>" + END, asked, stream=stream)
    assert got == {"finish_reason": "length"}, got


@pytest.mark.parametrize("stream", [False, True])
def test_slips_in_calls_and_thoughts_are_mended_or_told(stream: bool) -> None:
    def got(said: str) -> dict[str, Any]:
        return answered(said + END, ASKED, stream=stream)[0]

    call = {"tool_calls": [{"name": "look", "arguments": '{"a":"x, y","b":"","c":true,"d":108.0}'}]}
    slips = "{a:'x, y',b:,c:True,d:108.}"
    assert got(f"<|tool_call>:call:look{slips}<tool_call|>") == call | {"finish_reason": "tool_calls"}
    behind = {"reasoning_content": "hm"} | call | {"finish_reason": "tool_calls"}
    assert got(f"<|channel>thought\nhm<channel|>call:look{slips}") == behind
    assert got(f"thought\nhm<channel|>call:look{slips}<tool_call|>") == behind
    apart = {"reasoning_content": "I look.", "content": "Done.", "finish_reason": "stop"}
    assert got("thought\nI look.<channel|>Done.") == apart
    unread = {"tool_calls": [{"name": "look", "arguments": '{"a":1]}'}], "finish_reason": "stop"}
    assert got("<|tool_call>call:look{a:1]}<tool_call|>") == unread | {"stop_reason": "malformed_tool_call"}


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def follows(guide: Guide, text: str) -> bool:
    """Whether `text`, whose control tokens are tokens, may be the answer."""
    bits = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    for token in [*CODEC.encode(text)[1:], *CODEC.end_of_turn_ids]:
        guide.fill(bits)
        if not bits[token // 32] >> (token % 32) & 1:
            return False
        guide.accept(token)
    return True


@pytest.mark.parametrize("asked", [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA}},
])  # fmt: skip
def test_a_format_binds_content_and_leaves_calls_possible(guides: Guides, asked: dict[str, Any]) -> None:
    call = '<|tool_call>call:look{a:<|"|>x<|"|>,b:[1,{c:true}]}<tool_call|>'
    for stream in (False, True):
        got, engine = answered(call + END, ASKED | asked, stream=stream)
        assert (got["finish_reason"], json.loads(got["tool_calls"][0]["arguments"])["a"]) == ("tool_calls", "x")
        guiding = engine.guided[-1]
        assert guiding is not None
        for text in (call, call * 2, '{"n": 1}'):
            assert follows(guides.guide(guiding.grammar), text), text
        for text in ('{"n": "x"}', "{}", "so", call.replace("look", "other"), '{"n": 1}' + call):
            assert not follows(guides.guide(guiding.grammar), text), text
    _, engine = answered(call + END, ASKED | asked | {"parallel_tool_calls": False}, stream=False)
    assert not follows(guides.guide(engine.guided[-1].grammar), call * 2)
    for without in ({"tool_choice": "none"}, {"tools": None}):
        _, engine = answered("so" + END, ASKED | asked | without, stream=False)
        assert not follows(guides.guide(engine.guided[-1].grammar), call), "there is nothing to call"
        assert follows(guides.guide(engine.guided[-1].grammar), '{"n": 1}')


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_goes_on_after_a_call_that_was_cut_off(stream: bool) -> None:
    """What the server said comes back with the next message, as clients send it; so do calls in several messages."""
    said = '<|tool_call>call:look{a:<|"|>b c'
    got, _ = answered(said + " d e f", ASKED | {"max_tokens": len(CODEC.encode(said)) - 1}, stream=stream)
    (call,) = got["tool_calls"]
    assert (got["finish_reason"], call["arguments"]) == ("length", '{"a":"b c')
    turns = [{"role": "assistant", "content": None, "tool_calls": [{"id": i, "type": "function", "function": call}]}
             for i in ("x", "y")]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": i, "content": "no JSON"} for i in ("x", "y")]
    for more in (turns[:1], [turns[0], results[0]], [*turns, *results]):
        asked = ASKED | {"messages": [*ASKED["messages"], *more, {"role": "user", "content": "Again."}]}
        assert answered("so" + END, asked, stream=stream)[0] == {"content": "so", "finish_reason": "stop"}


def _asking(api: str, tool: dict[str, Any], *, is_named: bool) -> dict[str, Any]:
    """A request that asks for a call of `tool`, a function as chats have it."""
    name, parameters = tool["name"], tool["parameters"]
    if api == CHAT:
        named: Any = {"type": "function", "function": {"name": name}}
        return ASKED | {"tools": [{"type": "function", "function": tool}],
                        "tool_choice": named if is_named else "required"}  # fmt: skip
    if api == "/v1/responses":
        named = {"type": "function", "name": name}
        asked = {"input": "Hi", "tools": [{"type": "function", **tool}]}
        return asked | {"tool_choice": named if is_named else "required"}
    return {"model": "tiny", "max_tokens": 9, "messages": ASKED["messages"],
            "tools": [{"name": name, "input_schema": parameters}],
            "tool_choice": {"type": "tool", "name": name} if is_named else {"type": "any"}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("api", [CHAT, "/v1/responses", "/v1/messages"])
def test_what_of_a_tools_schema_is_not_enforced_is_told(api: str, is_named: bool, stream: bool) -> None:
    tags = {"type": "array", "items": {"type": "string", "format": "slug"}, "uniqueItems": True, "x-order": 1}
    parameters = {"type": "object", "properties": {"tags": tags, "n\r\nSet-Cookie: \u00e9": {"not": {"const": 1}}}}
    service, engine = played_service()
    with TestClient(make_app(service)) as client:
        asked = _asking(api, {"name": "look", "parameters": parameters}, is_named=is_named) | {"stream": stream}
        told = client.post(api, json=asked).headers["Kerngen-Not-Enforced"]
        assert sorted(told.split("; ")) == [
            "tool look: parameters.n\\r\\nSet-Cookie: \\u00e9: not",
            'tool look: parameters.tags.items: format \\"slug\\"',
            "tool look: parameters.tags: uniqueItems",
        ]
        assert engine.guided[-1] is not None
        parameters["properties"] = {"tags": {"type": "array"}}
        assert "Kerngen-Not-Enforced" not in client.post(api, json=asked).headers


TAGS = {"type": "object", "required": ["tags"], "properties": {
    "tags": {"title": "T", "type": "array", "items": {"type": "integer", "x-a": 1}, "uniqueItems": True}}}  # fmt: skip
HI = {"messages": ASKED["messages"]}


def _format(*, strict: bool | None = None, schema: Any = TAGS) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "t", "schema": schema, "strict": strict}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "asked"), [
    (CHAT, HI | {"response_format": _format()}), (CHAT, HI | {"response_format": _format(strict=False)}),
    (CHAT, HI | {"response_format": {"type": "json_object", "schema": TAGS}}), (CHAT, HI | {"guided_json": TAGS}),
    (CHAT, HI | {"structured_outputs": {"json": json.dumps(TAGS)}}), (CHAT, ASKED | {"response_format": _format()}),
    ("/v1/completions", {"prompt": "Hi", "response_format": _format()}),
    ("/v1/completions", {"prompt": "Hi", "guided_json": TAGS}),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "t", "schema": TAGS}}}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": HI["messages"],
                      "output_config": {"format": {"type": "json_schema", "schema": TAGS}}}),
])  # fmt: skip
def test_a_schema_is_enforced_as_far_as_it_can_be(
    api: str, asked: dict[str, Any], stream: bool, guides: Guides
) -> None:
    service, engine = played_service()
    with TestClient(make_app(service)) as client:
        answer = client.post(api, json=asked | {"stream": stream})
    assert (answer.status_code, answer.headers["Kerngen-Not-Enforced"]) == (200, "schema.tags: uniqueItems")
    guiding = engine.guided[-1]
    assert guiding is not None
    for text, is_allowed in (('{"tags":[1,1]}', True), ('{"tags":["x"]}', False), ("{}", False)):
        assert follows(guides.guide(guiding.grammar), text) == is_allowed, text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "asked", "param", "wrong"), [
    (CHAT, HI | {"response_format": _format(strict=True)}, "response_format", "schema.tags: uniqueItems"),
    (CHAT, ASKED | {"response_format": _format(strict=True)}, "response_format", "schema.tags: uniqueItems"),
    ("/v1/completions", {"prompt": "Hi", "response_format": _format(strict=True)}, "response_format",
     "schema.tags: uniqueItems"),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "t", "schema": TAGS,
                                                          "strict": True}}}, "text.format", "schema.tags: uniqueItems"),
    *((api, _asking(api, {"name": "f", "parameters": TAGS, "strict": True}, is_named=False) | {"tool_choice": choice},
       "tools", "tool f: parameters.tags: uniqueItems")
      for api in (CHAT, "/v1/responses") for choice in (None, "auto", "required")),
    *(("/v1/messages", HI | {"model": "tiny", "max_tokens": 9, "tool_choice": choice, "tools": [
        {"name": "f", "input_schema": TAGS, "strict": True}]}, None, "tool f: parameters.tags: uniqueItems")
      for choice in (None, {"type": "any"})),
])  # fmt: skip
def test_what_is_strict_and_cannot_be_enforced_is_refused(
    api: str, asked: dict[str, Any], param: str | None, wrong: str, stream: bool
) -> None:
    service, _ = played_service()
    with TestClient(make_app(service)) as client:
        answer = client.post(api, json=asked | {"stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error.get("param")) == (400, param), error
    assert f"strict: true asks for all of a schema, and this cannot be enforced: {wrong}" in error["message"]


@pytest.mark.parametrize("asked", [{}, {"response_format": _format(schema={"type": "integer"}, strict=True)}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_strict_functions_are_as_their_schemas_say(
    stream: bool, asked: dict[str, Any], guides: Guides
) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
             for name, strict in (("sure", True), ("free", False), ("none", None))]  # fmt: skip
    service, engine = played_service()
    with TestClient(make_app(service)) as client:
        for some in (tools, tools[1:]):
            answer = client.post(CHAT, json=ASKED | {"tools": some, "stream": stream} | asked)
            assert answer.status_code == 200, answer.text
            assert "Kerngen-Not-Enforced" not in answer.headers
    assert asked or engine.guided[-1] is None, "no function is strict, and the model may call them or not"
    guiding = engine.guided[-2]
    assert guiding is not None
    call = "<|tool_call>call:{}{{{}}}<tool_call|>".format
    texts = {call("sure", "n:1"): True, call("sure", 'n:<|"|>x<|"|>'): False, call("sure", ""): False,
             call("free", 'n:<|"|>x<|"|>'): True, call("none", ""): True, call("other", ""): False,
             call("sure", "n:1") + call("free", ""): True, "so": not asked, "3": True,
             "so" + call("sure", "n:1"): not asked, "so" + call("sure", ""): False}  # fmt: skip
    for text, is_allowed in texts.items():
        assert follows(guides.guide(guiding.grammar), text) == is_allowed, text
