"""`kerngen serve`: /v1/responses as OpenAI's clients see it. The engine is played."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from played_engine import MAX_LEN, words
from starlette.testclient import TestClient
from talking import CALL, THOUGHT, Talk, events_of, prompt_of, talking

PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ARGUMENTS = '{"city":"Graz","days":2}'


@pytest.fixture
def talk() -> Iterator[Talk]:
    with talking(f"{THOUGHT}So.{CALL}") as found:
        yield found


def test_a_response(talk: Talk) -> None:
    client, service, engine = talk
    asked = {"input": "Hi", "instructions": "Be brief", "tools": [LOOK], "model": "also", "temperature": 0.5,
             "reasoning": {"effort": "high"}, "max_output_tokens": 50, "metadata": {"a": "b"}}  # fmt: skip
    answer = client.post(PATH, json=asked).json()
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "also")
    thought, said, call = answer["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "I see."}])
    assert (said["type"], said["role"], said["status"]) == ("message", "assistant", "completed")
    assert [(part["type"], part["text"]) for part in said["content"]] == [("output_text", "So.")]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", ARGUMENTS)
    assert call["call_id"].startswith("call_")
    assert len({item["id"] for item in answer["output"]}) == 3
    assert (answer["store"], answer["instructions"], answer["metadata"]) == (False, "Be brief", {"a": "b"})
    assert prompt_of(service, engine).startswith("THINK TOOLS [")
    assert prompt_of(service, engine).endswith("system[Be brief] user[Hi]")
    prompt, room, sampling, _ = engine.asked[0]
    assert (room, sampling.temperature) == (50, 0.5)
    thoughts, made = (len(words(service.codec, text)) for text in (THOUGHT, f"{THOUGHT}So.{CALL}"))
    assert answer["usage"] == {
        "input_tokens": len(prompt), "input_tokens_details": {"cached_tokens": 3}, "output_tokens": made + 1,
        "output_tokens_details": {"reasoning_tokens": thoughts}, "total_tokens": len(prompt) + made + 1,
    }  # fmt: skip
    counted = client.post(
        f"{PATH}/input_tokens", json={k: asked[k] for k in list(asked)[:3]} | {"reasoning": {"effort": "low"}}
    )
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(prompt)}


def test_a_response_in_events(talk: Talk) -> None:
    asked = {"input": "Hi", "tools": [LOOK], "stream": True}
    events = events_of(talk[0].post(PATH, json=asked).text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"].removeprefix("response.") for e in events]
    once = [kind for at, kind in enumerate(kinds) if kinds[at - 1 : at] != [kind]]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert once == [
        "created", "in_progress", *[kind.format("reasoning_text") for kind in text],
        *[kind.format("output_text") for kind in text], "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    for kind, at, whole in (("reasoning_text", 0, "I see."), ("output_text", 1, "So."),
                            ("function_call_arguments", 2, ARGUMENTS)):  # fmt: skip
        pieces = [e for e in events if e["type"] == f"response.{kind}.delta"]
        assert len(pieces) > 1
        assert "".join(e["delta"] for e in pieces) == whole
        assert {e["output_index"] for e in pieces} == {at}
        assert len({e["item_id"] for e in pieces}) == 1
    assert events[0]["response"]["output"] == []
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert (last["status"], last["output"]) == ("completed", done)
    assert last["usage"]["output_tokens"] > 10


def test_turns_before_it_come_in_the_request(talk: Talk) -> None:
    client, service, engine = talk
    first = client.post(PATH, json={"input": "Hi", "tools": [LOOK]}).json()
    call = {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"city":"Wien"}'}
    answers = [{"type": "function_call_output", "call_id": c, "output": out} for c, out in (
        (first["output"][2]["call_id"], "sunny"), ("c2", [{"type": "input_text", "text": "rain"}]))]  # fmt: skip
    items = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]},
        *first["output"], call, *answers, {"type": "message", "role": "user", "content": "So?"},
    ]  # fmt: skip
    answer = client.post(PATH, json={"input": items, "instructions": "Be brief", "tools": [LOOK], "store": False})
    assert answer.status_code == 200, answer.text
    assert prompt_of(service, engine).split("}}] ")[1] == (
        'system[Be brief\n\nBe kind] user[Hi] assistant[So. thought(I see.) call(look {"city": "Graz", "days": 2})'
        ' call(look {"city": "Wien"})] tool[sunny of look] tool[rain of look] user[So?]'
    )


@pytest.mark.parametrize(("changes", "param", "words_of_it"), [
    ({"store": True}, "store", "nothing is stored here"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the turns before it in input"),
    ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
    ({"background": True}, "background", "while the client waits"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"truncation": "auto"}, "truncation", "shorten the input"),
    ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
    ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search', which does not run here: functions do"),
    ({"tools": [{"type": "function"}]}, "tools.0.function.name", "Field required"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": [LOOK]}, "tools", "g"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "g"}]}, "tools": [LOOK]}, "tool_choice", "'g'"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [{}]}, "tools": [{"type": "function"}]},
     "tools.0.function.name", "Field required"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]",
     "this model reads text alone, no images"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "'input_file'"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content", "neither text nor a list"),
    ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0]", "no role of system"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "nothing is stored here"),
    ({"input": [{"type": "computer_call"}]}, "input[0]", "'computer_call'"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0]", "another server"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "no arguments"),
    ({"input": [{"role": "user", "content": "Hi"}, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
     None, "input[1] answers call 'c'"),
    ({"input": []}, "input", "at least 1"),
    ({"model": "gpt-9"}, "model", "there is tiny, also"),
    ({"max_output_tokens": MAX_LEN}, "input", "maximum context length"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_there_is_refused_in_words(
    talk: Talk, stream: bool, changes: dict[str, Any], param: str | None, words_of_it: str
) -> None:
    answer = talk[0].post(PATH, json={"input": "Hi", "stream": stream} | changes)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    assert words_of_it in error["message"]


def test_values_that_ask_for_nothing_pass(talk: Talk) -> None:
    asked = {"input": "Hi", "store": False, "previous_response_id": None, "truncation": "disabled", "background": False,
             "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "user": "me", "top_logprobs": 0,
             "text": {"format": {"type": "text"}, "verbosity": "low"}, "service_tier": "auto"}  # fmt: skip
    assert talk[0].post(PATH, json=asked).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_codex_sends_passes(stream: bool) -> None:
    """The fields of its requests as version 0.171.0 sends them: tools of a namespace, and one of OpenAI's servers."""

    def message(role: str, *texts: str) -> dict[str, Any]:
        return {"type": "message", "id": f"msg_{role}", "role": role,
                "content": [{"type": "input_text", "text": text} for text in texts]}  # fmt: skip

    spawn = LOOK | {"name": "spawn", "description": "Begins one.", "strict": False}
    asked = {
        "model": "tiny", "input": [message("developer", "A", "B"), message("user", "Hi")], "store": False,
        "tools": [LOOK | {"strict": False}, {"type": "namespace", "name": "agents", "description": "Others.",
                                             "tools": [spawn, {"type": "custom", "name": "patch"}]},
                  {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"}, "stream": stream,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"session_id": "s"},
    }  # fmt: skip
    with talking(f"{THOUGHT}So.{CALL.replace('look', 'agents.spawn')}") as (client, service, engine):
        service.ready = replace(service.ready, max_len=4096)
        answer = client.post(PATH, json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.headers["Kerngen-Left-Out"] == "tools[1]: custom; tools[2]: web_search"
        assert '"name": "agents.spawn"' in prompt_of(service, engine)
        assert "Others.\\n\\nBegins one." in prompt_of(service, engine)
        output = (events_of(answer.text)[-1]["response"] if stream else answer.json())["output"]
        call = output[2]
        assert (call["name"], call["namespace"], call["arguments"]) == ("spawn", "agents", ARGUMENTS)
        image = [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
        for content, told in (("sunny", "sunny"), (image, "(input_image: this cannot be read here)")):
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": content}
            thought = output[0] | {"encrypted_content": None}
            again = client.post(PATH, json=asked | {"input": [*asked["input"], thought, *output[1:], result]})
            assert again.status_code == 200, again.text
            assert 'call(agents.spawn {"city"' in prompt_of(service, engine)
            assert prompt_of(service, engine).endswith(f"tool[{told} of agents.spawn]")
        assert again.headers["Kerngen-Left-Out"].startswith("input[5].output[0]: input_image; ")


@pytest.mark.parametrize(("tool", "wrong"), [
    ({"type": "namespace", "tools": []}, "has no name and tools"),
    ({"type": "namespace", "name": "a"}, "has no name and tools"),
    ({"type": "namespace", "name": "a", "tools": [3]}, "is of type '3', which does not run here"),
    ({"type": "namespace", "name": "a", "tools": [{"type": "function"}]}, "Field required"),
    ({"type": "namespace", "name": "a", "tools": [{"type": "function", "name": 3}]}, "valid string"),
])  # fmt: skip
def test_a_namespace_that_is_none_is_refused(talk: Talk, tool: dict[str, Any], wrong: str) -> None:
    for path in (PATH, f"{PATH}/input_tokens"):
        answer = talk[0].post(path, json={"input": "Hi", "tools": [tool]})
        assert (answer.status_code, wrong in answer.text) == (400, True), answer.text


def test_tools_that_may_be_called(talk: Talk) -> None:
    client, service, engine = talk
    other = LOOK | {"name": "other"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    answer = client.post(PATH, json={"input": "Hi", "tools": [LOOK, other], "tool_choice": choice}).json()
    assert "other" not in prompt_of(service, engine)
    assert (answer["tool_choice"], len(answer["tools"])) == (choice, 2)
    named = {"input": "Hi", "tools": [LOOK, other], "tool_choice": {"type": "function", "name": "other"}}
    assert client.post(PATH, json=named).status_code == 200
    assert engine.guided[-1] is not None
    assert "other" in engine.guided[-1].grammar
    schema = {"type": "object", "properties": {"zebra": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "z", "schema": schema}}
    answer = client.post(PATH, json={"input": "Hi", "text": text}).json()
    assert engine.guided[-1] is not None
    assert "zebra" in engine.guided[-1].grammar
    assert answer["text"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete(talk: Talk, stream: bool) -> None:
    size = len(words(talk[1].codec, f"{THOUGHT}So.")) + 12
    answer = talk[0].post(PATH, json={"input": "Hi", "tools": [LOOK], "max_output_tokens": size, "stream": stream})
    events = events_of(answer.text) if stream else []
    found = events[-1]["response"] if stream else answer.json()
    assert not stream or events[-1]["type"] == "response.incomplete"
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found["output"]] == ["completed", "completed", "incomplete"]
    assert ARGUMENTS.startswith(found["output"][2]["arguments"])
    assert "completed_at" not in found


def test_errors_of_the_engine(talk: Talk) -> None:
    client, _, engine = talk
    engine.fails = "the model computed NaN"
    answer = client.post(PATH, json={"input": "Hi", "stream": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the model computed NaN")
    engine.fails_at = 13
    *_, last = events_of(client.post(PATH, json={"input": "Hi", "stream": True}).text)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the model computed NaN"}
    assert "I see." in json.dumps(last["response"]["output"])


def test_what_is_not_counted_is_let_pass(talk: Talk) -> None:
    for more in ({"include": 3}, {"temperature": "hot"}, {"max_output_tokens": []}):
        assert talk[0].post(f"{PATH}/input_tokens", json={"input": "Hi"} | more).status_code == 200


@pytest.mark.parametrize("ask", [
    lambda client: client.get(f"{PATH}/resp_1"), lambda client: client.delete(f"{PATH}/resp_1"),
    lambda client: client.post(f"{PATH}/resp_1/cancel"), lambda client: client.get(f"{PATH}/resp_1/input_items"),
])  # fmt: skip
def test_nothing_is_stored(talk: Talk, ask: Callable[[TestClient], Any]) -> None:
    answer = ask(talk[0])
    assert (answer.status_code, "nothing is stored here" in answer.text) == (404, True)
