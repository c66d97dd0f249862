"""Images and sounds in requests of all APIs: parts to sources, the places in prompts, limits, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeing import NAMES, PNG, TEMPLATES, Seeing, events, seeing, seeing_codec, shown

from kerngen.errors import KerngenError, ToolchainError, UsageError
from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.options import MediaOptions
from kerngen.runtime.media.parts import KINDS, Item
from kerngen.runtime.media.prompt import TOLD, behind_tools, place
from kerngen.runtime.media.values import Media, Source
from kerngen.runtime.serve.app import make_app
from kerngen.runtime.serve.service import Limits
from kerngen.system.cancellation import Cancellation

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
A, B, C = (base64.b64encode(bytes([n] * 3)).decode() for n in (1, 2, 3))
WAV = base64.b64encode(b"RIFF").decode()
TYPED = "a <|image|> b <|audio|> c <|video|> d <|image><image|><|audio><audio|>"


def image(data: str = A, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": PNG + data, **more}}


def sound(data: str = WAV) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def calls(*ids: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    return {"role": "assistant", "content": "",
            "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}  # fmt: skip


def result(call: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": list(parts)}


def chat(seen: Seeing, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = seen.client.post(CHAT, json={"messages": list(messages), **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def placeholders(seen: Seeing) -> list[int]:
    """Where they stand in the prompt that the model read last."""
    ids = (seen.config.image_id, seen.config.audio_id, seen.config.video_id)
    return [at for at, token in enumerate(seen.engine.asked[-1][0]) if token in ids]


# ---- from parts to prompts -------------------------------------------------------------------------------------------


def test_parts_become_sources_and_places_in_the_order_as_written() -> None:
    with seeing() as seen:
        first = user(text("One"), image(A), text("two"), sound(), image(B))
        answer = chat(seen, first, {"role": "assistant", "content": "Yes."}, user(image(C), text("?")))
        assert [(s.kind, s.data) for s in seen.sources] == [
            ("image", b"\1\1\1"), ("audio", b"RIFF"), ("image", b"\2\2\2"), ("image", b"\3\3\3"),
        ]  # fmt: skip
        image_of_8, sound_of_3 = "<|image><|image|>*8<image|>", "<|audio><|audio|>*3<audio|>"
        assert seen.prompt() == (
            f"<bos><|turn>user\nOne{image_of_8}two{sound_of_3}{image_of_8}<turn|>\n"
            f"<|turn>assistant\nYes.<turn|>\n<|turn>user\n{image_of_8}?<turn|>\n<|turn>model"
        )
        assert [p.media.kind for p in seen.placed] == ["image", "audio", "image", "image"]
        assert [p.media.data.tobytes()[0] for p in seen.placed] == [1, ord("R"), 2, 3]
        assert [at for p in seen.placed for at in range(p.start, p.end)] == placeholders(seen)
        assert answer["usage"]["prompt_tokens"] == len(seen.engine.asked[-1][0]), "begin, end and soft tokens too"


@pytest.mark.parametrize(("part", "more", "tokens"), [
    (image(), {}, None),
    (image(detail="auto"), {}, None),
    (image(detail="low"), {}, 70),
    (image(detail="high"), {}, 1120),
    ({"type": "image_url", "image_url": PNG + A}, {}, None),
    ({"type": "image_url", "image_url": PNG + A, "detail": "low"}, {}, 70),
    (image(detail="low"), {"mm_processor_kwargs": {"max_soft_tokens": 560}}, 560),
    (image(), {"mm_processor_kwargs": {"max_soft_tokens": 140}}, 140),
    (image(), {"mm_processor_kwargs": {}}, None),
])  # fmt: skip
def test_detail_is_a_number_of_soft_tokens(part: dict[str, Any], more: dict[str, Any], tokens: int | None) -> None:
    with seeing() as seen:
        chat(seen, user(part), **more)
        assert seen.sources == [Source("image", b"\1\1\1", num_tokens=tokens)]
        assert [p.media.num_tokens for p in seen.placed] == [(tokens or 280) // 35]


def test_a_name_that_clients_give_an_image_is_none_of_its_content() -> None:
    """vLLM takes a part's uuid for its digest: one client then sees what another has named so."""
    with seeing() as seen:
        named = [{**image(data), "uuid": "a"} for data in (A, B, A)]
        digests = []
        for part in named:
            chat(seen, user(part))
            digests.append(seen.placed[0].media.digest)
        assert digests[0] == digests[2] != digests[1]


def test_a_budget_of_the_request_is_none_of_sounds_and_videos() -> None:
    with seeing() as seen:
        video = {"type": "video", "frames": [PNG + A]}
        chat(seen, user(sound(), video), mm_processor_kwargs={"max_soft_tokens": 1120})
        assert [(s.kind, s.num_tokens) for s in seen.sources] == [("audio", None), ("video", 70)]


def test_audio_comes_by_url_too() -> None:
    with seeing() as seen:
        for given in (f"data:audio/wav;base64,{WAV}", {"url": f"DATA:audio/x-wav;codec=1;BASE64,{WAV}"}):
            chat(seen, user({"type": "audio_url", "audio_url": given}))
            assert seen.sources == [Source("audio", b"RIFF")]


def test_responses_and_messages_say_the_same() -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": [user(text("See"), image(B, detail="low"), text("now"), sound())]}),
        (RESPONSES, {"store": False, "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "See"},
            {"type": "input_image", "image_url": PNG + B, "detail": "low"},
            {"type": "input_text", "text": "now"}, sound(),
        ]}]}),
        (MESSAGES, {"model": "tiny", "max_tokens": 9, "mm_processor_kwargs": {"max_soft_tokens": 70}, "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "See"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B}},
                {"type": "text", "text": "now"}, sound(),
            ]}]}),
    ]  # fmt: skip
    with seeing() as seen:
        prompts = []
        for path, body in asked:
            answer = seen.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            count = usage.get("prompt_tokens", usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0))
            assert count == len(seen.engine.asked[-1][0])
            assert seen.sources == [Source("image", b"\2\2\2", num_tokens=70), Source("audio", b"RIFF")]
            prompts.append((seen.prompt(), [p.start for p in seen.placed]))
        assert prompts[0] == prompts[1] == prompts[2]


def test_streams_and_several_answers_have_the_media_too() -> None:
    with seeing() as seen:
        body = {"messages": [user(image(), text("?"))], "stream": True, "n": 2,
                "stream_options": {"include_usage": True}}  # fmt: skip
        answer = seen.client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert len(seen.engine.media) == 2
        assert seen.engine.media[0] == seen.engine.media[1] != ()
        assert events(answer.text)[-1]["usage"]["prompt_tokens"] == len(seen.engine.asked[-1][0])  # type: ignore[index]
        assert len(seen.prepare.asked) == 1, "decoded once"


def test_counting_counts_what_would_be_read() -> None:
    with seeing() as seen:
        said = [user(image(detail="high"), text("?"))]
        chat(seen, *said)
        tokens = seen.client.post("/tokenize", json={"messages": said, "model": "tiny"}).json()
        assert tokens["tokens"] == seen.engine.asked[-1][0]
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": A}}
        count = seen.client.post(f"{MESSAGES}/count_tokens", json={
            "model": "tiny", "mm_processor_kwargs": {"max_soft_tokens": 1120},
            "messages": [{"role": "user", "content": [block, {"type": "text", "text": "?"}]}]}).json()  # fmt: skip
        assert count == {"input_tokens": tokens["count"]}
        part = {"type": "input_image", "image_url": PNG + A, "detail": "high"}
        count = seen.client.post(f"{RESPONSES}/input_tokens", json={
            "input": [{"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}]}).json()  # fmt: skip
        assert count["input_tokens"] == tokens["count"]


def test_text_alone_is_as_it_was() -> None:
    with seeing() as seen:
        chat(seen, user(text("a"), text("b")), {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"})
        assert seen.prompt().startswith("<bos><|turn>user\nab<turn|>\n<|turn>assistant\nc<turn|>\n")
        assert (seen.prepare.asked, seen.placed) == ([], ())


# ---- videos ----------------------------------------------------------------------------------------------------------


def test_a_video_is_its_frames_with_their_times() -> None:
    with seeing() as seen:
        frames = [PNG + data for data in (A, B, C)]
        chat(seen, user(text("What"), {"type": "video", "frames": frames, "fps": 0.04}, image(A), text("?")))
        frame = "<|image><|video|>*2<image|>"
        assert f"What00:00 {frame} 00:25 {frame} 00:50 {frame}<|image><|image|>*8<image|>?" in seen.prompt()
        assert [(p.media.kind, p.media.data.tobytes()[0]) for p in seen.placed] == [
            ("video", 1), ("video", 2), ("video", 3), ("image", 1),
        ]  # fmt: skip
        assert [at for p in seen.placed for at in range(p.start, p.end)] == placeholders(seen)
        codec, ids = seen.service.codec, seen.engine.asked[-1][0]
        whole = codec.encode(codec._tokenizer.decode(ids, skip_special_tokens=False), with_bos=False)
        assert whole == ids, "the tokens are those of the text with all of it written out"


def test_a_video_file_is_decoded_before_its_times_are_written() -> None:
    with seeing() as seen:
        url = "data:video/mp4;base64," + A
        chat(seen, user(text("What"), {"type": "video_url", "video_url": {"url": url}}, image(B), text("?")))
        frame = "<|image><|video|>*2<image|>"
        assert f"What00:00 {frame} 00:25 {frame} 01:01 {frame}<|image><|image|>*8<image|>?" in seen.prompt()
        assert [(p.media.kind, p.media.data.tobytes()[0]) for p in seen.placed] == [
            ("video", 1), ("video", 2), ("video", 3), ("image", 2),
        ]  # fmt: skip
        assert [at for p in seen.placed for at in range(p.start, p.end)] == placeholders(seen)
        assert [(s.kind, s.num_tokens) for s in seen.sources] == [("video_file", 70), ("image", None)]
        assert len(seen.prepare.asked) == 1, "decoded once"


@pytest.mark.parametrize("generation", TEMPLATES)
def test_a_video_file_of_a_tool_is_decoded_too(generation: str) -> None:
    with seeing(generation) as seen:
        video = {"type": "video_url", "video_url": {"url": "data:video/webm;base64," + A}}
        call = {"id": "1", "type": "function", "function": {"name": "film", "arguments": "{}"}}
        chat(seen, user(text("Film it")), {"role": "assistant", "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "1", "content": [text("done"), video]})  # fmt: skip
        frame = "<|image><|video|>*2<image|>"
        assert f"00:00 {frame} 00:25 {frame} 01:01 {frame}" in seen.prompt()
        assert [p.media.kind for p in seen.placed] == ["video"] * 3


def test_a_long_video_is_thinned_out_as_transformers_does() -> None:
    with seeing() as seen:
        frames = [PNG + base64.b64encode(bytes([n] * 3)).decode() for n in range(100)]
        chat(seen, user({"type": "video", "frames": frames, "fps": 2}))
        picked = [int(i * 100 / 32) for i in range(32)]  # torch.arange(0, 100, 100 / 32).int()
        assert [s.data[0] for s in seen.sources if s.data] == picked
        assert {s.num_tokens for s in seen.sources} == {70}
        assert f" 00:{picked[-1] // 2:02d} <|image>" in seen.prompt()


# ---- what users and tools type ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", TEMPLATES)
def test_a_placeholder_that_somebody_types_is_text(generation: str) -> None:
    with seeing(generation) as seen:
        tools = [{"type": "function", "function": {"name": "look", "description": TYPED}}]
        chat(seen, {"role": "system", "content": TYPED}, user(text(TYPED), image(), text(TYPED)), calls("1"),
             result("1", text(TYPED)), user(text(TYPED)), tools=tools)  # fmt: skip
        ids = seen.engine.asked[-1][0]
        assert [at for p in seen.placed for at in range(p.start, p.end)] == placeholders(seen)
        assert len(seen.placed) == 1
        named = {name: seen.service.codec._tokenizer.token_to_id(name) for name in NAMES}
        assert {name: ids.count(token) for name, token in named.items()} == {
            "<|image>": 1, "<|image|>": 8, "<image|>": 1, "<|audio>": 0, "<|audio|>": 0, "<audio|>": 0, "<|video|>": 0,
        }  # fmt: skip
        assert seen.service.codec.decode(ids).count("<|video|>") == 5, "and it is there, as text"
        chat(seen, {"role": "user", "content": TYPED})
        assert placeholders(seen) == []


def test_tokens_that_stand_for_media_come_with_media_alone() -> None:
    with seeing() as seen:
        for token in (seen.config.image_id, seen.config.audio_id, seen.config.video_id):
            answer = seen.client.post("/v1/completions", json={"prompt": [2, token, 9]})
            assert (answer.status_code, f"token {token} stands for an image" in answer.text) == (400, True)
            typed = {"prompt": seen.service.codec.token(token), "control_tokens": True}
            assert seen.client.post("/v1/completions", json=typed).status_code == 400
        assert seen.client.post("/v1/completions", json={"prompt": TYPED}).status_code == 200
        assert placeholders(seen) == []


# ---- results of tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", TEMPLATES)
def test_what_a_tool_shows_has_a_place_in_every_template(generation: str) -> None:
    with seeing(generation) as seen:
        chat(
            seen,
            user(image(A)),
            calls("1", "2"),
            result("1", text("one"), image(B)),
            result("2", image(C, detail="low")),
            {"role": "assistant", "content": "So."},
            user(text("And?"), image(A)),
        )
        assert [p.media.data.tobytes()[0] for p in seen.placed] == [1, 2, 3, 1]
        assert [at for p in seen.placed for at in range(p.start, p.end)] == placeholders(seen)
        of_8, of_2 = "<|image><|image|>*8<image|>", "<|image><|image|>*2<image|>"
        prompt = seen.prompt().replace("\n\n", "") if generation == "april" else seen.prompt()
        one, two = (
            "<|tool_response>response:look{one}<tool_response|>",
            "<|tool_response>response:look{}<tool_response|>",
        )
        if generation == "newer":
            assert f"{one}{of_8}{two}{of_2}<turn|>" in prompt
        else:
            assert f"{one}{two}<turn|>" in prompt
            assert f"<|turn>user\nlook returned:{of_8}look returned:{of_2}<turn|>\n<|turn>assistant\nSo." in prompt


@pytest.mark.parametrize("generation", ["april", "may"])
def test_what_a_tool_shows_joins_the_users_turn_behind_it(generation: str) -> None:
    with seeing(generation) as seen:
        chat(seen, user(text("?")), calls("1"), result("1", image(B)), user(text("And?"), image(C)))
        prompt = seen.prompt().replace("\n\n", "")
        of_8 = "<|image><|image|>*8<image|>"
        assert f"<|turn>user\nlook returned:{of_8}And?{of_8}<turn|>\n<|turn>model" in prompt
        chat(seen, user(text("?")), calls("1"), result("1", image(B)), {"role": "user", "content": "And?"})
        assert f"<|turn>user\nlook returned:{of_8}And?<turn|>\n<|turn>model" in seen.prompt().replace("\n\n", "")


def test_results_of_the_other_apis() -> None:
    with seeing() as seen:
        call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        shows = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B}}
        told = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}, shows]}
        answer = seen.client.post(MESSAGES, json={"model": "tiny", "max_tokens": 9, "messages": [
            {"role": "user", "content": "?"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [told]}]})  # fmt: skip
        assert answer.status_code == 200, answer.text
        first = seen.prompt()
        assert "response:look{one}<tool_response|><|image><|image|>*8<image|>" in first
        answer = seen.client.post(RESPONSES, json={"store": False, "input": [
            {"role": "user", "content": "?"},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [
                {"type": "input_text", "text": "one"}, {"type": "input_image", "image_url": PNG + B}]}]})  # fmt: skip
        assert answer.status_code == 200, answer.text
        assert (seen.prompt(), seen.sources) == (first, [Source("image", b"\2\2\2")])
        assert "Kerngen-Left-Out" not in answer.headers


def test_a_result_that_is_not_read_here_ends_no_agents_conversation() -> None:
    with seeing(options="none") as seen:
        call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1",
                  "output": [{"type": "input_image", "image_url": PNG + B}]}  # fmt: skip
        asked = {"store": False, "input": [{"role": "user", "content": "?"}, call, output]}
        answer = seen.client.post(RESPONSES, json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.headers["Kerngen-Left-Out"] == "input[2].output[0]: input_image"
        assert "response:look{(input_image: this cannot be read here)}" in seen.prompt()


def test_media_move_behind_tools_and_nothing_else_does() -> None:
    shown_by_tool, of_user = (Item("image", (Source("image", bytes([n])),)) for n in (1, 2))
    plain = [{"role": "user", "content": [of_user, "x"]}, {"role": "tool", "tool_call_id": "1", "content": "y"},
             {"role": "assistant", "content": "z"}]  # fmt: skip
    assert behind_tools(plain) == plain
    shows = {"role": "tool", "tool_call_id": "1", "name": "f", "content": ["y", shown_by_tool]}
    said = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "y"}
    assert behind_tools([shows]) == [said, {"role": "user", "content": ["f returned:", shown_by_tool]}]
    untold = {"role": "tool", "name": "f", "content": [shown_by_tool], TOLD: True}
    assert behind_tools([untold, {"role": "user", "content": ""}]) == [
        {"role": "user", "content": ["f returned:", shown_by_tool]}
    ]


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(seen: Seeing, *messages: dict[str, Any], path: str = CHAT, **more: Any) -> str:
    answer = seen.client.post(path, json={"messages": list(messages), **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert seen.engine.asked == []
    return str(error["message"])


@pytest.mark.parametrize(("part", "says"), [
    (image("A"), "messages[0].content[0] is no base64"),
    (image("AA A"), "is no base64"),
    (image(""), "is empty"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "a data: URL is data:TYPE;base64,DATA"),
    ({"type": "image_url", "image_url": {"url": "data:"}}, "a data: URL is data:TYPE;base64,DATA"),
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "--allow-media-host HOST"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "files of the server are not"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "files of the server are not"),
    ({"type": "image_url", "image_url": {}}, "has no url"),
    ({"type": "image_url"}, "has no url"),
    ({"type": "image_url", "image_url": None, "uuid": "a"}, "has no url"),  # vLLM looks it up among all clients' images
    ({"type": "input_image", "file_id": "file-1"}, "files that were uploaded before are not kept here"),
    (image(detail="ultra"), "detail 'ultra' is none of low, auto, high"),
    (image(detail=3), "detail 3 is none of low, auto, high"),
    ({"type": "image", "image": "/etc/passwd"}, 'an image is {"type": "image_url"'),
    ({"type": "image", "source": {"type": "file", "file_id": "x"}}, "read here: base64, with data, and url"),
    ({"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}, "nothing is fetched here"),
    ({"type": "input_audio", "input_audio": "AAAA"}, 'a sound is {"input_audio"'),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,!"}}, "is no base64"),
    ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, "files of the server are not"),
    ({"type": "video_url"}, "has no url"),
    ({"type": "video", "frames": []}, 'a video is {"type": "video", "frames"'),
    ({"type": "video", "frames": PNG + A}, 'a video is {"type": "video", "frames"'),
    ({"type": "video", "frames": [PNG + A], "fps": 0}, "fps 0 is no number of frames a second"),
    ({"type": "video", "frames": [PNG + A] * 2, "fps": 1e-320}, "is no number of frames a second, between 0.0001 and"),
    ({"type": "video", "frames": [PNG + A] * 2, "fps": 2**70}, "is no number of frames a second"),
    ({"type": "video", "frames": [PNG + A, "/a.png"]}, "frames[1]: only data: URLs"),
    ({"type": "image_embeds", "image_embeds": "AA"}, "read here: text, image_url, input_audio"),
    ({"type": "file", "file": {}}, "read here: text, image_url, input_audio"),
])  # fmt: skip
def test_a_part_that_cannot_be_right_is_refused_in_words(part: dict[str, Any], says: str) -> None:
    with seeing() as seen:
        assert says in refused(seen, user(part))
        assert seen.prepare.asked == []


@pytest.mark.parametrize(("sections", "options", "part", "says"), [
    ({"audio_config": None}, "images,audio", sound(), "this model reads text and images, no sound"),
    ({"vision_config": None}, "images", image(), "this model reads text and sound, no images"),
    ({}, "none", image(), "images: not loaded here; start it with --media images"),
    ({}, "images", sound(), "sound: not loaded here; start it with --media audio"),
    ({}, "audio", image(), "--media images"),
    ({}, "audio", {"type": "video", "frames": [PNG + A]}, "--media images"),
])  # fmt: skip
def test_what_a_model_lacks_or_was_not_loaded_is_named_with_its_flag(
    sections: dict[str, Any], options: str, part: dict[str, Any], says: str
) -> None:
    with seeing(options=options, **sections) as seen:
        assert says in refused(seen, user(part))


def test_auto_takes_what_the_model_has() -> None:
    with seeing(options="auto", audio_config=None) as seen:
        chat(seen, user(image()))
        answer = seen.client.post(CHAT, json={"messages": [user(sound())]})
        assert (answer.status_code, "no sound" in answer.text) == (400, True)


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_other_turns_are_text(role: str) -> None:
    with seeing() as seen:
        said = refused(seen, {"role": role, "content": [image()]}, user(text("?")))
        assert said.startswith("messages[0]: images and sounds are the user's, or what tools return")


def test_turns_of_the_other_apis_are_text_too() -> None:
    with seeing() as seen:
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B}}
        for body in ({"system": [block]}, {"messages": [{"role": "user", "content": "?"},
                     {"role": "assistant", "content": [block]}, {"role": "user", "content": "?"}]}):  # fmt: skip
            asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}], **body}
            answer = seen.client.post(MESSAGES, json=asked)
            assert (answer.status_code, "here is text alone" in answer.text) == (400, True), answer.text
        part = {"type": "input_image", "image_url": PNG + B}
        asked = {"store": False, "input": [{"role": "developer", "content": [part]}, {"role": "user", "content": "?"}]}
        answer = seen.client.post(RESPONSES, json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0]"), answer.text


@pytest.mark.parametrize(("kwargs", "says"), [
    ({"max_soft_tokens": 100}, "max_soft_tokens 100 is none of 70, 140, 280, 560, 1120"),
    ({"max_soft_tokens": True}, "is none of 70"),
    ({"max_soft_tokens": "70"}, "is none of 70"),
    ({"do_resize": False}, "mm_processor_kwargs.do_resize is not there: max_soft_tokens is"),
])  # fmt: skip
def test_processor_arguments_that_are_not_there_are_refused(kwargs: dict[str, Any], says: str) -> None:
    with seeing() as seen:
        for part in (image(), text("no image at all")):
            assert says in refused(seen, user(part), mm_processor_kwargs=kwargs)


def test_limits_hold_before_anything_is_decoded() -> None:
    limits = MediaLimits(image_bytes=30, audio_bytes=60, items=4)
    large = base64.b64encode(b"x" * 40).decode()
    with seeing(limits=limits) as seen:
        assert "40 bytes; an image of at most 30 is taken" in refused(seen, user(image(large)))
        assert "5 images, frames and sounds; 4 are taken" in refused(seen, user(*[image()] * 3), user(*[sound()] * 2))
        many = {"type": "video", "frames": [PNG + A] * 100}
        assert "32 images, frames and sounds" in refused(seen, user(many))
        chat(seen, user(sound(large)), user(*[image()] * 3))
        assert len(seen.prepare.asked) == 1
    with seeing() as seen:
        assert "10,000 images, frames and sounds; 32 are taken" in refused(seen, user(*[image()] * 10_000))


def test_all_requests_together_have_room_for_so_much() -> None:
    """Of what is decoded, which waits with its sequence; an item is 64 bytes here."""
    with seeing() as seen:
        seen.service.limits = Limits(media_bytes=3 * 64)
        two = {"messages": [user(image(), image())]}
        assert seen.client.post(CHAT, json=two).status_code == 200
        assert seen.client.post(CHAT, json=two).status_code == 200, "who is done leaves room"
        answer = seen.client.post(CHAT, json=two | {"n": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["Retry-After"]
        assert seen.service._num_media_bytes == 0
        answer = seen.client.post(CHAT, json={"messages": [user(*[image()] * 4)]})
        assert (answer.status_code, "have 256 bytes decoded; 192 are taken" in answer.text) == (400, True)
        assert seen.client.post(CHAT, json={"messages": [user(text("?"))]}).status_code == 200


def test_a_host_that_is_allowed_is_asked_by_who_prepares() -> None:
    with seeing(limits=MediaLimits(hosts=("example.org",))) as seen:
        url = "https://example.org/a.png"
        chat(seen, user({"type": "image_url", "image_url": {"url": url, "detail": "low"}}))
        assert seen.sources == [Source("image", url=url, num_tokens=70)]
        seen.engine.asked.clear()
        too_long = {"type": "image_url", "image_url": {"url": url + "?" + "a" * 5000}}
        assert "4,096 are taken" in refused(seen, user(too_long))


def test_what_cannot_be_decoded_is_a_400_with_what_to_do() -> None:
    with seeing() as seen:
        seen.prepare.fails = UsageError("image 2: the file is damaged", hint="send it as PNG")
        assert refused(seen, user(image(), image())) == "image 2: the file is damaged; send it as PNG"
        seen.prepare.fails = ToolchainError("video files need PyAV", hint="pip install 'kerngen[video]'")
        assert refused(seen, user(image())) == "video files need PyAV; pip install 'kerngen[video]'"


def test_what_is_no_fault_of_the_request_is_no_400() -> None:
    with seeing() as seen:
        seen.prepare.fails = KerngenError("image: no process can decode it now", hint="ask again")
        for path, body in (
            (CHAT, {"messages": [user(image())]}),
            (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG + A}]}]}),
        ):
            answer = seen.client.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
            assert answer.json()["error"]["message"] == "image: no process can decode it now"
        seen.prepare.fails = ToolchainError("MP3 needs soundfile", hint="or send WAV")
        assert refused(seen, user(sound())) == "MP3 needs soundfile; or send WAV"


def test_who_leaves_has_nothing_decoded() -> None:
    begun, dropped, sent = threading.Event(), threading.Event(), list[Any]()

    def endless(sources: Sequence[Source], cancellation: Cancellation) -> list[Media]:
        begun.set()
        with cancellation.interrupting(dropped.set):
            assert dropped.wait(10)
        raise CancelledError

    body = json.dumps({"messages": [user(image())]}).encode()
    came = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if not came:
            await asyncio.to_thread(begun.wait)
            return {"type": "http.disconnect"}
        return came.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
             "headers": [], "http_version": "1.1", "scheme": "http", "root_path": ""}  # fmt: skip
    with seeing() as seen:
        seen.service.media = replace(seen.service.media, prepare=endless)
        asyncio.run(make_app(seen.service)(scope, receive, send))
        assert dropped.is_set()
        assert (sent[0]["status"], seen.engine.asked) == (499, [])


def test_an_image_takes_its_room_in_the_context() -> None:
    with seeing() as seen:
        parts = [image(detail="high")] * 31
        answer = seen.client.post(CHAT, json={"messages": [user(*parts)], "max_tokens": 9})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = seen.client.post(CHAT, json={"messages": [user(*parts[:20])], "max_tokens": 9})
        assert answer.status_code == 200, answer.text


def test_a_template_that_has_no_place_for_media_is_no_silent_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    with seeing() as seen:
        source = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        monkeypatch.setattr(seen.service.codec._template, "source", source)
        said = refused(seen, user(image(), text("?")))
        assert said.startswith("the chat has 1 images, and the model's chat template makes places for 0")
        assert seen.prepare.asked == [], "nothing is decoded for it"
        monkeypatch.setattr(seen.service.codec._template, "source", source + "<|image|><|image|>")
        assert "makes places for 2" in refused(seen, user(image(), text("?")))


def test_options_by_name() -> None:
    assert MediaOptions.parse("none") == MediaOptions()
    assert MediaOptions.parse("images,audio").parts == MediaOptions.parse("auto").parts == {"vision", "audio"}
    assert not MediaOptions.parse("audio").at_first_use
    assert MediaOptions.parse("auto").at_first_use
    with pytest.raises(UsageError, match="'sight' is none of images, audio, auto and none"):
        MediaOptions.parse("images,sight")
    with pytest.raises(UsageError, match="--allow-media-host"):
        MediaOptions.parse("none", MediaLimits(hosts=("example.org",)))


def test_placing_refuses_what_does_not_fit() -> None:
    with seeing() as seen:
        media = seen.prepare([Source("image", b"x"), Source("audio", b"y")], Cancellation())
        config = seen.config
        with pytest.raises(UsageError, match="more places"):
            place([config.image_id, config.image_id], media, config)
        with pytest.raises(UsageError, match="1 places for 2"):
            place([config.image_id], media, config)
        audio_first = place([config.audio_id, 9, config.image_id], media, config)
        assert [p.media.kind for p in audio_first.media] == ["audio", "image"], "kind by kind"
        assert shown(seeing_codec("newer"), audio_first.ids).startswith("<|audio><|audio|>*3<audio|>")


# ---- whatever a client sends -----------------------------------------------------------------------------------------

_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
    st.sampled_from([PNG + A, PNG, "data:", "data:;base64,", "https://x", "low", "auto", WAV, "<|image|>", "base64"]),
    st.just([PNG + A, PNG + B]), st.just({"url": PNG + A}), st.just({"data": WAV, "format": "wav"}),
    st.just({"type": "base64", "data": A}),
)  # fmt: skip
_FIELDS = ("text", "image_url", "input_audio", "audio_url", "video_url", "source", "detail", "image", "audio", "video",
           "frames", "fps", "url", "path", "content", "item")  # fmt: skip
_PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from([*KINDS, "text", "input_text", "tool_result", "file", None])},
    optional=dict.fromkeys(_FIELDS, _ODD),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_PARTS, min_size=1, max_size=3), st.sampled_from(["user", "tool", "system", "assistant"]), _ODD)
def test_no_part_is_too_odd_for_an_answer(parts: list[dict[str, Any]], role: str, kwargs: Any) -> None:
    message = {"role": role, "content": parts, "tool_call_id": "1"}
    item = {"role": role if role != "tool" else "user", "content": parts}
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": [calls("1"), message, user(text("?"))], "mm_processor_kwargs": kwargs}),
        (RESPONSES, {"store": False, "input": [item]}),
        (MESSAGES, {"model": "tiny", "max_tokens": 2, "messages": [item, {"role": "user", "content": "?"}]}),
        ("/tokenize", {"messages": [message]}),
    ]
    with seeing() as seen:
        for path, body in bodies:
            answer = seen.client.post(path, content=json.dumps(body))
            assert answer.status_code in (200, 400), (path, body, answer.text)
