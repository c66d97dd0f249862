"""`kerngen serve`: the API as OpenAI's clients see it. The engine is played."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from contextlib import aclosing
from typing import Any

import pytest
from command import ROOT
from played_engine import MAX_LEN, PlayedEngine, played_service, words
from starlette.testclient import TestClient

from kerngen.runtime.sampling import Sampling
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.choice_stream import merged
from kerngen.runtime.serve.engine_process import TokenRequest
from kerngen.runtime.serve.service import Limits, Service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_chat(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    answer = client.post(CHAT, json=HI | {"model": "also", "temperature": 0, "seed": 7}).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "also"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there"}
    assert choice["finish_reason"] == "stop"
    prompt, room, sampling, _ = played[1].asked[0]
    made = len(words(played[0].codec, "Hello there")) + 1
    assert answer["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }  # fmt: skip
    assert room == MAX_LEN - len(prompt)
    assert (sampling.temperature, sampling.seed) == (0, 7)


def test_a_chat_in_pieces(client: TestClient) -> None:
    events = _events(client.post(CHAT, json=HI | {"stream": True}).text)
    assert all(e["object"] == "chat.completion.chunk" and e["id"] == events[0]["id"] for e in events)
    assert all("usage" not in e for e in events), "only where it was asked for"
    deltas = [e["choices"][0]["delta"] for e in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content", "") for d in deltas) == "Hello there"
    reasons = [e["choices"][0]["finish_reason"] for e in events]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


@pytest.mark.parametrize("continuous", [False, True])
def test_usage_of_a_stream(client: TestClient, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    events = _events(client.post(CHAT, json=HI | {"stream": True, "stream_options": options}).text)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] > 1
    assert all(("usage" in e) == continuous for e in events[:-1])
    if continuous:
        counts = [e["usage"]["completion_tokens"] for e in events]
        assert counts[:3] == [0, 1, 2], "the first says the role alone"
        assert counts[-2] == counts[-1]


def test_several_answers(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    answer = client.post(CHAT, json=HI | {"n": 3, "seed": 5}).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in answer["choices"]} == {"Hello there"}
    assert sorted(asked[2].seed for asked in played[1].asked) == [5, 6, 7]
    events = _events(client.post(TEXT, json={"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 50}).text)
    for index in range(4):
        texts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(texts) == "Hello there"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "left"), [("there", "Hello "), (["xyz", "lo th"], "Hel"), ("Hello there", "")])
def test_a_stop_string_ends_an_answer(
    client: TestClient, played: tuple[Service, PlayedEngine], stream: bool, stop: Any, left: str
) -> None:
    answer = client.post(CHAT, json=HI | {"stop": stop, "stream": stream})
    if stream:
        events = _events(answer.text)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == left
        choice = events[-1]["choices"][0]
    else:
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"] == left
    by = stop if isinstance(stop, str) else "lo th"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", by)
    assert (played[1].num_ended, played[1].num_left) == (1, 0), "the engine is told to end it"
    answer = client.post(TEXT, json={"prompt": "a", "stop": stop, "stream": stream})
    choices = [e["choices"][0] for e in _events(answer.text)] if stream else answer.json()["choices"]
    assert "".join(c["text"] for c in choices) == left
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", by)


def test_a_completion(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    answer = client.post(TEXT, json={"prompt": "Say", "max_tokens": 2, "echo": True}).json()
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"].startswith("Say")
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2
    ids = played[0].codec.encode("Say")
    assert played[1].asked[0][0] == ids
    client.post(TEXT, json={"prompt": ids})
    assert played[1].asked[1][0] == ids
    assert played[1].asked[1][1] == 16, "OpenAI's default"


def test_how_tokens_are_chosen(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    asked = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
             "min_tokens": 2, "logit_bias": {"7": -100, "9": 3}, "top_k": -1}  # fmt: skip
    assert client.post(CHAT, json=HI | asked).status_code == 200
    sampling = played[1].asked[0][2]
    assert sampling.logit_bias == ((7, -100), (9, 3))
    assert sampling.top_k == 0
    assert all(getattr(sampling, name) == asked[name] for name in list(asked)[:5])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: TestClient, played: tuple[Service, PlayedEngine], stream: bool) -> None:
    steps = words(played[0].codec, "Hello there")
    answer = client.post(CHAT, json=HI | {"logprobs": True, "top_logprobs": 2, "stream": stream})
    if stream:
        found = [x for e in _events(answer.text) for x in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
    else:
        found = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(found) == len(steps) + 1, "the stop token's too"
    assert "".join(x["token"] for x in found[:-1]) == "Hello there"
    assert all(bytes(x["bytes"]).decode() == x["token"] and len(x["top_logprobs"]) == 2 for x in found)
    answer = client.post(TEXT, json={"prompt": "a", "logprobs": 1, "stream": stream})
    choices = [e["choices"][0] for e in _events(answer.text)] if stream else answer.json()["choices"]
    tokens = [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]]
    offsets = [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]]
    assert tokens[: len(steps)] == [x["token"] for x in found[:-1]]
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_are_weighed_too(client: TestClient, played: tuple[Service, PlayedEngine], stream: bool) -> None:
    """Several prompts with echo and logprobs, as evaluations ask: each has its own tokens and offsets."""
    codec = played[0].codec
    prompts = [codec.encode("Say"), codec.encode("Hello there")]
    asked = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    answer = client.post(TEXT, json=asked)
    choices = [e["choices"][0] for e in _events(answer.text)] if stream else answer.json()["choices"]
    for choice in sorted(choices, key=lambda c: c["index"]):
        prompt, found = prompts[choice["index"]], choice["logprobs"]
        assert found["tokens"][: len(prompt)] == [codec.token_text(i) for i in prompt]
        assert found["token_logprobs"] == [None, *[-2.0] * (len(prompt) - 1), -0.5]
        assert found["top_logprobs"][:2] == [None, {found["tokens"][1]: -2.0}]
        begins = [0, *(sum(map(len, found["tokens"][1:i])) for i in range(1, len(prompt) + 1))]
        assert found["text_offset"] == begins, "<bos> is no part of the text"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_an_offset_is_a_place_in_the_text(stream: bool, echo: bool) -> None:
    """Also where a character has several tokens, and behind control tokens."""
    codec = played_service()[0].codec
    prompt = codec.encode("<bos>H\u00e9, <|turn>\u65e5\u672c!<turn|>\n")
    said = codec.encode("\u20ac 5 \U0001f600.<turn|>")[1:]
    service, _ = played_service(lambda _: [[i] for i in said])
    asked = {"prompt": prompt, "echo": echo, "logprobs": 0, "stream": stream, "max_tokens": len(said)}
    with TestClient(make_app(service)) as client:
        answer = client.post(TEXT, json=asked)
    choices = [e["choices"][0] for e in _events(answer.text)] if stream else answer.json()["choices"]
    text = "".join(c["text"] for c in choices)
    parts = [c["logprobs"] for c in choices if c["logprobs"]]
    tokens, offsets = ([x for part in parts for x in part[key]] for key in ("tokens", "text_offset"))
    ids = [*(prompt if echo else []), *said]
    assert text == codec.decode(prompt if echo else []) + codec.decode(said)
    assert tokens == [codec.token_text(i) for i in ids]
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[-1]) == (0, len(text))
    places = [*offsets, len(text)]
    assert "".join(text[a:b] for a, b in itertools.pairwise(places)) == text
    for token, begin, end in zip(tokens, offsets, places[1:], strict=True):
        is_whole = "\ufffd" not in token and codec.decode(codec.encode(token)) == token
        assert not is_whole or text[begin:end] == token, (token, begin)
    if echo:
        assert offsets[len(prompt)] == len(codec.decode(prompt))


def test_what_an_answer_must_be(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"guided_json": schema}, {"guided_json": json.dumps(schema)}, {"guided_regex": "[a-z]+"},
        {"guided_choice": ["yes", "no"]},
    ):  # fmt: skip
        for path, body in ((CHAT, HI), (TEXT, {"prompt": "a"})):
            assert client.post(path, json=body | asked).status_code == 200, asked
        (name, value), of_chat, of_text = *asked.items(), *played[1].guided[-2:]
        assert of_chat == of_text is not None
        assert of_text.grammar.startswith("body:")
        if name.startswith("guided_"):
            client.post(CHAT, json=HI | {"structured_outputs": {name.removeprefix("guided_"): value}})
            assert played[1].guided[-1] == of_chat, "vLLM's newer name of the same"
    for path, body in ((CHAT, HI), (TEXT, {"prompt": "a"})):
        client.post(path, json=body | {"structured_outputs": {"json_object": True}})
        assert played[1].guided[-1] == played[1].guided[0]
        client.post(path, json=body | {"response_format": {"type": "text"}, "structured_outputs": {"regex": None}})
        assert played[1].guided[-1] is None


_OFF: dict[str, tuple[Any, ...]] = {
    "guided_grammar": (None, ""), "bad_words": (None, []), "prompt_logprobs": (None, 0, False), "echo": (None, False),
    "truncate_prompt_tokens": (None, 0), "continue_final_message": (None, False), "chat_template": (None, ""),
    "add_generation_prompt": (None, True), "best_of": (None, 1), "functions": (None, []), "use_beam_search": (False,),
    "function_call": (None, "none"), "allowed_token_ids": (None, []), "structured_outputs": (None, {}),
    "top_logprobs": (None, 0), "nobody_knows": (None, 1, "x"),
}  # fmt: skip


def test_what_is_off_is_let_pass(client: TestClient) -> None:
    """Benchmarks and evaluations send these."""
    for name, values in _OFF.items():
        for value in values:
            for path, body in ((CHAT, HI), (TEXT, {"prompt": "a"}), ("/tokenize", HI)):
                answer = client.post(path, json=body | {name: value})
                assert answer.status_code == 200, (path, name, value, answer.text)


@pytest.mark.parametrize(("asked", "instead"), [
    ({"guided_grammar": "root ::= 'a'"}, "guided_regex"),
    ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "json, regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "tool_choice"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "additionalProperties"),
    ({"bad_words": ["a"]}, "logit_bias"), ({"allowed_token_ids": [5]}, "guided_choice"),
    ({"prompt_logprobs": 1}, "echo"), ({"truncate_prompt_tokens": -1}, "/tokenize"),
    ({"use_beam_search": True}, "temperature of 0"), ({"functions": [{"name": "f"}]}, "tools"),
    ({"function_call": {"name": "f"}}, "tool_choice"), ({"continue_final_message": True}, "control_tokens: true"),
    ({"add_generation_prompt": False}, "/v1/completions"),
    ({"chat_template": "{{ messages }}"}, "control_tokens: true"),
    ({"echo": True}, "/v1/completions"), ({"best_of": 2, "n": 2}, "the n that are sent"),
    ({"top_logprobs": 2}, "logprobs: true"),
])  # fmt: skip
def test_what_is_known_and_not_there_is_refused(client: TestClient, asked: dict[str, Any], instead: str) -> None:
    ((name, value),) = list(asked.items())[:1]
    only_chats = {"functions", "function_call", "continue_final_message", "add_generation_prompt", "chat_template",
                  "echo", "best_of", "top_logprobs"}  # fmt: skip
    for path, body in ((CHAT, HI), (TEXT, {"prompt": "a"})):
        answer = client.post(path, json=body | asked)
        if path == TEXT and name in only_chats:
            assert answer.status_code == 200, answer.text
            continue
        assert answer.status_code == 400, (path, asked)
        error = answer.json()["error"]
        field = f"{name}.{list(value)[-1]}" if name == "structured_outputs" else name
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert error["message"].startswith(field)
        assert instead in error["message"]


def test_ends_that_are_asked_for(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    token = words(played[0].codec, "Hello there")[1][0]
    client.post(CHAT, json=HI | {"ignore_eos": True, "stop_token_ids": [token], "max_tokens": 5})
    assert played[1].asked[0][3] == (token,)


@pytest.mark.parametrize(("path", "body", "status", "says", "param"), [
    (CHAT, {}, 400, "messages", "messages"),
    (CHAT, {"messages": []}, 400, "messages", "messages"),
    (CHAT, {"messages": "Hi"}, 400, "messages", "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "Hi"}]}, 400, "messages[0] has no role", None),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "reads text", None),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0]", None),
    (CHAT, HI | {"temperature": -1}, 400, "temperature", "temperature"),
    (CHAT, HI | {"temperature": "hot"}, 400, "temperature", "temperature"),
    (CHAT, HI | {"n": 0}, 400, "n:", "n"),
    (CHAT, HI | {"n": 10**30}, 400, "n:", "n"),
    (CHAT, HI | {"max_tokens": MAX_LEN}, 400, "this model's maximum context length is 256", "messages"),
    (CHAT, HI | {"model": "gpt-9"}, 404, "there is tiny, also", "model"),
    (CHAT, HI | {"stop": ""}, 400, "empty stop string", None),
    (CHAT, HI | {"seed": 1 << 70}, 400, "seed", None),
    (CHAT, HI | {"logit_bias": {"x": 2}}, 400, "no token's number", "logit_bias"),
    (CHAT, HI | {"logit_bias": {"1": 200}}, 400, "logit_bias", None),
    (CHAT, HI | {"tool_choice": "required"}, 400, "there are no tools", "tool_choice"),
    (CHAT, HI | {"response_format": {"type": "json_schema"}}, 400, "schema is missing", "response_format"),
    (CHAT, HI | {"guided_json": "{"}, 400, "not JSON", "guided_json"),
    (CHAT, HI | {"structured_outputs": {"json": "{"}}, 400, "not JSON", "structured_outputs.json"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "missing", "response_format"),
    (CHAT, HI | {"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "one grammar", None),
    (CHAT, HI | {"guided_regex": "a", "guided_choice": ["b"]}, 400, "one grammar", None),
    (TEXT, {"prompt": "a", "best_of": 3, "n": 2}, 400, "best_of 3", "best_of"),
    (CHAT, HI | {"tools": [{"type": "gun"}]}, 400, "tools", "tools.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "not Unicode", None),
    (TEXT, {"prompt": []}, 400, "empty", "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "outside the vocabulary", "prompt"),
    (TEXT, {"prompt": [1, "a"]}, 400, "prompt", None),
    (TEXT, {"prompt": "a" * 10_000}, 400, "this model's maximum context length is 256", "prompt"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix"),
    ("/tokenize", {}, 400, "either prompt or messages", None),
    ("/tokenize", HI | {"chat_template": "{{ messages }}"}, 400, "the checkpoint's own", "chat_template"),
    ("/tokenize", HI | {"continue_final_message": True}, 400, "is not there", "continue_final_message"),
    ("/detokenize", {"tokens": [10**9]}, 400, "outside the vocabulary", "tokens"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_right_is_said_in_openais_form(
    client: TestClient, path: str, body: dict[str, Any], status: int, says: str, param: str | None, stream: bool
) -> None:
    answer = client.post(path, content=json.dumps(body | ({"stream": True} if stream and body else {})))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert says in error["message"]
    assert param is None or error["param"] is None or error["param"].startswith(param)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'"a"', b'{"messages": NaN}'])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_body_that_is_none(client: TestClient, path: str, body: bytes) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_not_utf8_is_told_so(client: TestClient) -> None:
    error = client.post(CHAT, content=b'{"user": "\xe4"}').json()["error"]
    assert error["message"] == "the body is not UTF-8: invalid continuation byte at byte 10"


def test_paths_and_methods(client: TestClient) -> None:
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get(CHAT).status_code == 405
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny", "also"]
    assert client.get("/v1/models/also").json()["max_model_len"] == MAX_LEN
    assert client.get("/v1/models/other").status_code == 404
    assert "version" in client.get("/version").json()
    assert client.get("/").headers["content-type"].startswith("text/html")


def test_text_and_tokens(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    ids = played[0].codec.encode("Hello there")
    told = client.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), MAX_LEN)
    assert len(told["token_strs"]) == len(ids)
    assert (
        client.post("/tokenize", json={"prompt": "Hello there", "add_special_tokens": False}).json()["tokens"]
        == ids[1:]
    )
    asked = client.post("/tokenize", json=HI).json()["tokens"]
    client.post(CHAT, json=HI)
    assert played[1].asked[0][0] == asked, "as a chat has them"
    open_ended = client.post("/tokenize", json=HI | {"add_generation_prompt": False}).json()["tokens"]
    assert asked[: len(open_ended)] == open_ended
    assert played[0].codec.decode(asked[len(open_ended) :]) == "model\n"
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello there"}


def test_a_raw_prompt_may_have_control_tokens(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    """2, 105, ..., 106, 107, 105: a turn of a chat as a client renders it. <bos> stands there once."""
    service, engine = played
    turns = "<|turn>user\nHi<turn|>\n<|turn>model\n"
    as_chat = service.codec.encode(turns)
    assert [as_chat[i] for i in (0, 1)] == [2, 105]
    assert [i for i in as_chat if i in (105, 106, 107)] == [105, 107, 106, 107, 105, 107]
    as_text = service.codec.encode(turns, plain=True)
    assert not {105, 106} & set(as_text)
    asked: tuple[tuple[str, dict[str, Any], list[int]], ...] = (
        (turns, {}, as_text),
        (turns, {"control_tokens": True}, as_chat),
        ("<bos>" + turns, {"control_tokens": True}, as_chat),
        (turns, {"control_tokens": True, "add_special_tokens": False}, as_chat[1:]),
        ("<bos>" + turns, {"control_tokens": True, "add_special_tokens": False}, as_chat),
        (turns, {"add_special_tokens": False}, as_text[1:]),
    )
    for is_default in (False, True):
        service.control_tokens = is_default
        for prompt, options, ids in asked:
            want = as_chat if is_default and not options else as_chat[1:] if is_default and len(options) == 1 and (
                "add_special_tokens" in options) else ids  # fmt: skip
            body = {"prompt": prompt, **options}
            assert client.post("/tokenize", json=body).json()["tokens"] == want, (is_default, body)
            assert client.post(TEXT, json=body).status_code == 200
            assert client.post(TEXT, json=body | {"prompt": [prompt], "stream": True}).status_code == 200
            assert [engine.asked[-1][0], engine.asked[-2][0]] == [want, want]
        assert client.post("/tokenize", json={"prompt": turns, "control_tokens": False}).json()["tokens"] == as_text


def test_tools_are_tokens_too(
    client: TestClient, played: tuple[Service, PlayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = played[0].codec._template
    monkeypatch.setattr(template, "source", template.source + "{{ tools | tojson }}")
    asked = HI | {"tools": [{"type": "function", "function": {"name": "look_up", "description": "Looks up."}}]}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    client.post(CHAT, json=asked)
    assert played[1].asked[0][0] == tokens
    assert "look_up" in played[0].codec.decode(tokens)
    twice = client.post("/tokenize", json=asked | {"tools": asked["tools"] * 2})
    assert (twice.status_code, "two functions named" in twice.text) == (400, True)


def test_keys(played: tuple[Service, PlayedEngine]) -> None:
    with TestClient(make_app(played[0], ["one", "two"])) as client:
        for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}, {"Authorization": "one"}):
            answer = client.post(CHAT, json=HI, headers=header)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.post(CHAT, json=HI, headers={"Authorization": "Bearer two"}).status_code == 200
        assert client.get("/health").status_code == client.head("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_bodies_have_an_end() -> None:
    service, _ = played_service(limits=Limits(body_bytes=1000))
    with TestClient(make_app(service)) as client:
        long = json.dumps({"messages": [{"role": "user", "content": "a" * 2000}]})
        for body in (long, iter([long[:500].encode(), long[500:].encode()])):
            answer = client.post(CHAT, content=body)
            assert answer.status_code == 413
            assert answer.headers["connection"] == "close"
        assert client.post(CHAT, json=HI).status_code == 200


@pytest.mark.parametrize("goes", [False, True])
def test_a_body_that_does_not_come(goes: bool) -> None:
    """It stops after its first half, or its client leaves there: that one gets no answer."""
    service, engine = played_service(limits=Limits(body_s=0.05))
    sent: list[Any] = []
    came = [{"type": "http.request", "body": b'{"messages": ', "more_body": True}]
    came += [{"type": "http.disconnect"}] if goes else []

    async def receive() -> Any:
        if came:
            return came.pop(0)
        await asyncio.sleep(10)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
             "headers": [], "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
    asyncio.run(make_app(service)(scope, receive, send))
    assert [m.get("status") for m in sent[:1]] == ([] if goes else [408])
    assert not engine.asked


def test_the_queue_has_an_end() -> None:
    service, engine = played_service(limits=Limits(queue=2))
    with TestClient(make_app(service)) as client:
        for stream in (False, True):
            assert client.post(CHAT, json=HI | {"n": 3, "stream": stream}).status_code == 400, "there is never room"
        with service.admitted(1):
            answer = client.post(CHAT, json=HI | {"n": 2})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert client.post(CHAT, json=HI | {"n": 2, "stream": True}).status_code == 429
        for stream in (False, True, False):
            assert client.post(CHAT, json=HI | {"n": 2, "stream": stream}).status_code == 200, "places are given back"
    assert len(engine.asked) == 6


def test_an_engine_that_fails(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    service, engine = played
    engine.fails = "the model computed NaN"
    answer = client.post(CHAT, json=HI)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the model computed NaN")
    assert client.post(CHAT, json=HI | {"stream": True}).status_code == 503, "no token had come"
    engine.fails_at = 1
    last = _events(client.post(CHAT, json=HI | {"stream": True}).text)[-1]
    assert last["error"]["message"] == "the model computed NaN"
    engine.refuses, engine.fails = "the cache holds less", None
    assert client.post(CHAT, json=HI | {"stream": True}).status_code == 400
    engine.refuses = None
    engine.is_alive, engine.why_dead = False, "its process died"
    assert client.get("/health").status_code == 503
    assert client.post(CHAT, json=HI).json()["error"]["message"] == "its process died"
    engine.is_alive, service.is_draining = True, True
    assert client.post(CHAT, json=HI | {"stream": True}).status_code == 503


def test_what_is_measured(client: TestClient, played: tuple[Service, PlayedEngine]) -> None:
    """An answer that a stop string ends is one as those are that a token ends; one whose client leaves is not."""
    usages = [client.post(CHAT, json=HI | more).json()["usage"] for more in ({}, {"stop": "there"})]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] == 3 for usage in usages)
    asyncio.run(_leaves(played[0]))
    told = client.get("/metrics").text

    def total(name: str, **labels: str) -> float:
        said = ",".join(f'{label}="{value}"' for label, value in sorted({"model_name": "tiny", **labels}.items()))
        return float(told.partition(f"vllm:{name}{{{said}}} ")[2].split("\n")[0])

    assert total("request_success_total", finished_reason="stop") == 2
    assert total("request_success_total", finished_reason="abort") == 1
    assert total("time_to_first_token_seconds_count") == 3
    assert total("prefix_cache_hits_total") == 6
    for phase, seconds in (("queue", 0.04), ("prefill", 0.06), ("decode", 0.2), ("inference", 0.26)):
        assert total(f"request_{phase}_time_seconds_count") == 2
        assert total(f"request_{phase}_time_seconds_sum") == pytest.approx(2 * seconds)
    for name, counted in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        tokens = sum(usage[counted] for usage in usages)
        assert total(f"request_{name}_tokens_sum") == tokens
        assert total(f"{name}_tokens_total") == tokens + (name == "generation"), "one had come to who left"
    assert "_created" not in told


async def _leaves(service: Service) -> None:
    """Somebody who goes after the first token."""
    async with aclosing(service.follow(TokenRequest([2, 5], 9, Sampling()), lambda: False)) as stream:
        await anext(stream)


def test_the_dashboard_asks_for_what_there_is(client: TestClient) -> None:
    client.post(CHAT, json=HI)
    there = set(re.findall(r"^# TYPE (\S+)", client.get("/metrics").text, re.M))
    dashboard = json.loads((ROOT / "examples" / "serving" / "grafana.json").read_text())
    asked = {m for p in dashboard["panels"] for t in p["targets"] for m in re.findall(r"vllm:\w+", t["expr"])}
    assert len(asked) > 10
    assert {re.sub(r"_bucket$", "", name) for name in asked} <= there


def test_generators_are_merged_and_ended() -> None:
    ended: list[int] = []

    async def numbers(start: int, fails: bool) -> Any:
        try:
            for i in range(3):
                await asyncio.sleep(0)
                yield start + i
            if fails:
                raise ValueError("three")
            await asyncio.sleep(10 if start else 0)
        finally:
            ended.append(start)

    async def run(*fail: bool) -> list[int]:
        return [i async for i in merged([numbers(10 * i, f) for i, f in enumerate(fail)])]

    assert asyncio.run(run(False)) == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        asyncio.run(run(True, False))
    assert sorted(ended) == [0, 0, 10]


def test_who_asks_for_what_is_not_there_is_told_what_is(client: TestClient) -> None:
    for path in ("/v1/embeddings", "/api/chat"):
        answer = client.post(path, json={})
        told = answer.json()["error"]["message"]
        assert answer.status_code == 404
        assert all(name in told for name in (path, CHAT, TEXT, "/v1/models", "/docs")), told
    answer = client.get(CHAT)
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, f"'{CHAT}' takes POST, not GET")
    long = client.get("/" + "a" * 5000)
    assert (long.status_code, len(long.text) < 1000) == (404, True)


def test_the_api_is_shown(played: tuple[Service, PlayedEngine]) -> None:
    with TestClient(make_app(played[0], ["key"])) as client:
        page = client.get("/docs")
        assert (page.status_code, "swagger" in page.text, "/openapi.json" in page.text) == (200, True, True)
        shown = client.get("/openapi.json").json()
        body = shown["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "max_tokens" in shown["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
        assert client.post(CHAT, json=HI).status_code == 401
