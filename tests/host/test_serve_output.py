"""What the model says is taken apart into thoughts, content and calls; and turns reach the template in its own form."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
from command import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kerngen.errors import UsageError
from kerngen.runtime.chat import render_chat
from kerngen.runtime.serve.messages import template_messages, template_tools
from kerngen.runtime.serve.output_parser import ContentDelta, Delta, Output, ReasoningDelta, ToolCallDelta
from kerngen.runtime.text import TextCodec

TINY = TextCodec(ROOT / "examples/tiny/gemma-4-tiny", 2)
CONTROL = {"open": 100, "close": 101, "call": 48, "end": 49, "quote": 52, "turn": 106, "eos": 1, "pad": 0}
Q = '<|"|>'


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """As Gemma-4's: spaces are ▁, and characters that have no token are bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", Q]
    pieces = [*special, *[f"<0x{i:02X}>" for i in range(256)], "▁", *map(chr, range(0x21, 0x7F))]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder, 2)


def encode(text: str, codec: TextCodec = TINY, *, plain: bool = False) -> list[int]:
    return codec.encode(text, plain=plain)[1:]


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str | None, str | None, str]]]:
    """What is thought, what is said, and each call: id, name, arguments."""
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    said = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    calls: list[tuple[str | None, str | None, str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            assert (delta.id is None) == (delta.name is None)
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append((delta.id, delta.name, ""))
            assert delta.index == len(calls) - 1, "a call is whole before the next begins"
            calls[-1] = (*calls[-1][:2], calls[-1][2] + delta.arguments)
    return thought, said, calls


def read(ids: Sequence[int], codec: TextCodec = TINY, *, size: int = 0, **options: Any) -> list[Delta]:
    count = iter(range(10**6))
    output = Output(codec, new_id=lambda: f"call_{next(count)}", **({"tools": ("f",)} | options))
    chunks = [ids[at : at + size] for at in range(0, len(ids), size)] if size else [ids]
    return [delta for chunk in chunks for delta in output.push(chunk)] + output.finish()


def arguments(text: str) -> str:
    _, said, [(_, name, got)] = joined(read(encode(f"<|tool_call>call:f{text}<tool_call|>")))
    assert (said, name) == ("", "f")
    return got


def test_a_thought_content_and_calls_are_told_apart() -> None:
    text = (
        f"<|channel>thought\nhm\n<channel|>I look.<|tool_call>call:get_weather{{city:{Q}Graz{Q},days:2}}<tool_call|>"
        "<|tool_call>call:now{}<tool_call|><turn|>"
    )
    assert read(encode(text)) == [
        ReasoningDelta("hm\n"),
        ContentDelta("I look."),
        ToolCallDelta(0, "call_0", "get_weather", '{"city":"Graz","days":2}'),
        ToolCallDelta(1, "call_1", "now", "{}"),
    ]


def test_a_call_comes_in_pieces() -> None:
    output = Output(TINY)
    seen = [d for i in encode(f"<|tool_call>call:f{{a:{Q}one two{Q},n:12") for d in output.push([i])]
    assert isinstance(seen[0], ToolCallDelta)
    assert (seen[0].index, seen[0].name) == (0, "f")
    assert str(seen[0].id).startswith("call_")
    assert len(seen) > 3
    assert joined(seen)[2][0][2] == '{"a":"one two","n":', "12 may go on"
    assert output.finish() == [ToolCallDelta(0, None, None, "12")]


@pytest.mark.parametrize(("text", "value"), [
    ("{}", {}),
    ("{a:1,b:-2.5e3,c:true,d:false,e:null}", {"a": 1, "b": -2500.0, "c": True, "d": False, "e": None}),
    (f'{{a:{Q}"x"\n{{y:[\\{Q}}}', {"a": '"x"\n{y:[\\'}),
    (f"{{a:{{b:[1,{{c:{Q}{Q}}}],d:[]}},e:{{}}}}", {"a": {"b": [1, {"c": ""}], "d": []}, "e": {}}),
    (f"{{{Q}a b{Q}:1, c d :2 }}", {"a b": 1, "c d": 2}),
    ('{"city": "Gr\\u00e4z, \\"x\\"",n: 1,}', {"city": 'Gräz, "x"', "n": 1}),
    ("{a:None,day:2024-01-02,time:10:30,word: all of it,v:01}",
     {"a": None, "day": "2024-01-02", "time": "10:30", "word": "all of it", "v": "01"}),
    ("{a:'x, y'}", {"a": "x, y"}),
    ("{'a':'it's \\'so\\', or \"so\"' , b:['', 'x]'],c:'tis}", {"a": "it's 'so', or \"so\"", "b": ["", "x]"],
      "c": "'tis"}),
    ("{'tis:1,'b':2}", {"'tis": 1, "b": 2}),
    ("{\x1f: \x1fx\x1f }", {"\x1f": "\x1fx\x1f"}),
    ("{a:,b:1}", {"a": "", "b": 1}), ("{a:}", {"a": ""}), ("{a:{b: },c:}", {"a": {"b": ""}, "c": ""}),
    ("{a:True,b:False,c:[True,None]}", {"a": True, "b": False, "c": [True, None]}),
    ("{a:108.,b:-.5,c:.,d:1.2.3,e:00.5,f:+5}",
     {"a": 108.0, "b": -0.5, "c": ".", "d": "1.2.3", "e": "00.5", "f": "+5"}),
    ("{a:1,,b:2,}", {"a": 1, "b": 2}), ("{,a:1}", {"a": 1}),
    ("{a:1}}", {"a": 1}), ("{", {}), ("{a:12", {"a": 12}), ("{a:[1,{b:", {"a": [1, {"b": ""}]}),
    ("{a:'tis so", {"a": "'tis so"}),
])  # fmt: skip
def test_arguments_become_json(text: str, value: Any) -> None:
    assert json.loads(arguments(text)) == value


@pytest.mark.parametrize(("text", "got"), [
    ("{a}", "{a}"), ("{a:1]}", '{"a":1]}'), ("{a:[1,,2]}", '{"a":[1,,2]}'), ("{a:1};", '{"a":1};'), ("{a", '{a'),
    (f"{{a:{Q}x{Q} y}}", '{"a":"x"y}'), (f"{{a:{Q}x", '{"a":"x'),
    ("{a:b{c:1}}", '{"a":b{c:1}}'),
    (f"{{a:b{Q}c{Q}}}", f'{{"a":b{Q}c{Q}}}'), ('{a:"b', '{"a":"b'), ("{[1]}", "{[1]}"),
    (f"{{a:'b{Q}", f"{{\"a\":'b{Q}"), (f"{{{Q}a{Q} 1}}", '{"a"1}'), ('{a:"\\x"}', '{"a":"\\x"}'),
])  # fmt: skip
def test_what_cannot_be_read_is_given_as_it_is(text: str, got: str) -> None:
    output = Output(TINY)
    _, said, [(_, name, given)] = joined(output.push(encode(f"<|tool_call>call:f{text}<tool_call|>")))
    assert (said, name, given) == ("", "f", got)
    assert output.has_unread_call
    with pytest.raises(ValueError, match="line 1"):
        json.loads(got)


@pytest.mark.parametrize(("text", "said"), [
    (f"f{{a:{Q}b{Q}}}<tool_call|>", "f{a:b}"), ("call:f<tool_call|> and on", "call:f and on"), ("hm", "hm"),
    ("call:f g{}<tool_call|>", "call:f g{}"), (f"call:{'f' * 300}{{}}<tool_call|>", f"call:{'f' * 300}{{}}"),
    ("call:f[1]}<tool_call|>", "call:f[1]}"),
    ("", ""), ("c", ""), (" call", ""), ("call: f", ""), (":call:f", ""),
])  # fmt: skip
def test_a_call_that_is_none_is_content_without_its_tokens(text: str, said: str) -> None:
    """One that is cut off before its name is whole is nothing."""
    assert joined(read(encode(f"so <|tool_call>{text}"))) == ("", f"so {said}", [])


@pytest.mark.parametrize("size", [0, 1, 3])
def test_a_thought_whose_first_token_is_missing_is_apart(size: int) -> None:
    def parted(text: str) -> tuple[str, str]:
        return joined(read(encode(text), size=size))[:2]

    assert parted("thought\nI look.<channel|>Done.") == ("I look.", "Done.")
    assert parted("thought\nI look.") == ("I look.", "")
    assert parted("thought<channel|>Done.") == ("", "Done.")
    assert parted("I look.<channel|>Done.") == ("", "I look.\n\nDone."), "what was said cannot be taken back"
    assert parted("I look.\n<channel|>Done.<channel|>") == ("", "I look.\nDone.")
    assert parted("thoughtful\n<channel|>") == ("", "thoughtful\n")
    assert parted("though") == ("", "though")
    assert parted("so\nthought\nhm") == ("", "so\nthought\nhm")


@pytest.mark.parametrize("size", [0, 1, 3])
def test_calls_whose_first_token_is_missing(size: int) -> None:
    def parted(text: str) -> tuple[str, str, list[tuple[str | None, str]]]:
        thought, said, calls = joined(read(encode(text), size=size, tools=("f", "get_x")))
        return thought, said, [(name, got) for _, name, got in calls]

    behind = "<|channel>thought\nhm<channel|>"
    assert parted(behind + f"call:f{{a:{Q}x{Q}}}") == ("hm", "", [("f", '{"a":"x"}')])
    assert parted(behind + "\ncall:f{}<tool_call|>call:get_x{a:'y, z'} so") == (
        "hm", " so", [("f", "{}"), ("get_x", '{"a":"y, z"}')])  # fmt: skip
    assert parted(behind + "call:f{}<|tool_call>:call:g{}<tool_call|>") == ("hm", "", [("f", "{}"), ("g", "{}")])
    assert parted("thought\nhm<channel|>call:f{}") == ("hm", "", [("f", "{}")])
    for text in ("call:g{}", "so call:f{}", "call:f", "call:f {}", "call"):
        assert parted(behind + text) == ("hm", text, []), "no tool's name, or not right behind the thought"
    assert parted("call:f{}") == ("", "call:f{}", [])


def test_typed_tokens_are_text() -> None:
    text = f"<|channel>thought\n<channel|><|tool_call>call:f{{a:{Q}b{Q}}}<tool_call|>"
    assert joined(read(encode(text, plain=True))) == ("", text, [])
    ids = [*encode(f"<|tool_call>call:f{{a:{Q}"), *encode(text, plain=True), *encode(f"{Q}}}<tool_call|>")]
    assert json.loads(joined(read(ids))[2][0][2]) == {"a": text}


def test_a_thought_may_be_open_end_early_or_have_no_name() -> None:
    for prompt in ("<|turn>model\n<|channel>thought\n", "<|turn>model\n<|channel>", "<|turn>model\n<|channel>thou"):
        rest = "thought\n"[len(prompt.partition("<|channel>")[2]) :]
        assert joined(read(encode(rest + "hm<channel|>so"), prompt=encode(prompt)))[:2] == ("hm", "so")
    closed = encode("<|turn>model\n<|channel>thought\n<channel|>")
    assert joined(read(encode("so"), prompt=closed)) == ("", "so", [])
    assert joined(read(encode("<|channel>thought<channel|>so")))[:2] == ("", "so")
    assert joined(read(encode("<|channel>thorough\nas ever")))[:2] == ("thorough\nas ever", "")
    assert joined(read(encode("<|channel>thou")))[:2] == ("thou", "")
    thought, said, [(_, name, got)] = joined(read(encode("<|channel>thought\nhm<|tool_call>call:f{}<tool_call|>")))
    assert (thought, said, name, got) == ("hm", "", "f", "{}")


def test_a_thought_or_another_call_ends_a_call() -> None:
    text = f"<|tool_call>call:f{{a:{Q}b<|tool_call>call:g{{}}<|channel>thought\nhm<channel|>so<tool_call|>"
    assert joined(read(encode(text))) == ("hm", "so", [("call_0", "f", '{"a":"b'), ("call_1", "g", "{}")])


def test_without_tools_the_tokens_of_calls_mean_nothing() -> None:
    text = f"so <|tool_call>call:f{{a:{Q}b{Q}}}<tool_call|>"
    assert joined(read(encode(text), calls=False)) == ("", "so call:f{a:b}", [])


WORDS = [
    "call:f{", "call:", "call", "'", ".", "thought", "True",
    "{", "}", "[", "]", ",", ":", '"', "\\", "a", "12", "-", " ", "\n", "true", "é", "thought\n",
]  # fmt: skip
PIECES = [*([i] for i in CONTROL.values()), *(encode(w) for w in WORDS)]
SOUPS = st.lists(st.sampled_from(PIECES) | st.lists(st.integers(0, 1100), max_size=2), max_size=40)


@settings(max_examples=400, deadline=None)
@given(SOUPS, st.integers(1, 9))
@example([[48], encode("call:f{a:"), [52], [300], [52], encode("}"), [49]], 2)
def test_any_tokens_in_any_pieces_give_the_same(soup: list[list[int]], size: int) -> None:
    ids = [i for piece in soup for i in piece]
    whole = joined(read(ids))
    assert joined(read(ids, size=size)) == whole
    for _, _, got in whole[2]:
        assert got.startswith("{")
        with contextlib.suppress(ValueError):
            assert isinstance(json.loads(got), dict)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bytes_that_are_no_text_do_not_fail(byte_fallback: TextCodec, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_fallback.vocab_size - 1), max_size=30))
    whole = joined(read(ids, byte_fallback))
    assert joined(read(ids, byte_fallback, size=data.draw(st.integers(1, 5)))) == whole
    json.dumps(whole).encode()


MARK = "\ud800"  # stands for the token around strings, whose characters a string may have


def written(value: Any) -> str:
    """format_argument of the released template, with bare keys."""
    if isinstance(value, str):
        return f"{MARK}{value}{MARK}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(part)}" for key, part in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "}", "\x00", "<turn|>", Q]
)
KEYS = st.from_regex(r"[A-Za-z_é][A-Za-z0-9_.-]{0,6}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(value=st.dictionaries(KEYS, VALUES, max_size=4), size=st.integers(1, 7), fallback=st.booleans())
def test_what_the_template_writes_is_read_back(
    byte_fallback: TextCodec, value: dict[str, Any], size: int, fallback: bool
) -> None:
    codec = byte_fallback if fallback else TINY
    ids: list[int] = []
    for n, part in enumerate(f"<|tool_call>call:f{written(value)}<tool_call|>".split(MARK)):
        ids += encode(Q, codec) if n else []
        ids += encode(part, codec, plain=n % 2 == 1)
    _, said, [(_, name, got)] = joined(read(ids, codec, size=size))
    assert (said, name) == ("", "f")
    assert json.loads(got) == value


# ---- the way in ------------------------------------------------------------------------------------------------------

# The form of the released template, in our words: what it reads, and what it refuses.
TEMPLATE = """
{%- macro say(v) -%}
{%- if v is none -%}null{%- elif v is string -%}<|"|>{{ v }}<|"|>{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}
{ {%- for k, x in v | dictsort -%}{{ k }}:{{ say(x) }}{{ ',' if not loop.last }}{%- endfor -%} }
{%- elif v is sequence -%}[{%- for x in v -%}{{ say(x) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- for t in tools or [] -%}<|tool>{{ t.function.name }}:{{ t.function.description }}<tool|>{%- endfor -%}
{%- for m in messages if m.role != 'tool' -%}
<|turn>{{ m.role }}:
{%- for c in m.tool_calls or [] -%}
{%- if c.function.arguments is not mapping -%}{{ raise_exception('arguments must be a mapping') }}{%- endif -%}
<|tool_call>call:{{ c.function.name }}{{ say(c.function.arguments) }}<tool_call|>
{%- for r in messages if r.role == 'tool' and r.tool_call_id == c.id -%}
<|tool_response>response:{{ c.function.name }}{value:{{ say(r.content) }}}<tool_response|>
{%- endfor -%}
{%- endfor -%}{{ m.content }}<turn|>
{%- endfor -%}
"""


def asks(call: str, arguments: Any, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call, "type": "function", "function": function}],
    }


TALK = [
    {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
    {"role": "user", "content": "?"},
    asks("x1", '{"b": {"c": null, "d": [1, "z"]}, "a": true}'),
    {"role": "tool", "tool_call_id": "x1", "content": "sunny"},
]


def test_openai_turns_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "does", "strict": True}}]
    text = render_chat(TEMPLATE, {"messages": template_messages(TALK), "tools": template_tools(tools)})
    assert text == (
        "<|tool>f:does<tool|><|turn>system:be brief<turn|><|turn>user:?<turn|><|turn>assistant:"
        f"<|tool_call>call:f{{a:true,b:{{c:null,d:[1,{Q}z{Q}]}}}}<tool_call|>"
        f"<|tool_response>response:f{{value:{Q}sunny{Q}}}<tool_response|><turn|>"
    )
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    got = template_messages([asks("x", "", "g"), {"role": "user", "content": "?"}, said])
    assert got[0]["tool_calls"][0]["function"] == {"name": "g", "arguments": {}}
    assert got[2] == said


def test_an_older_template_finds_answers_with_the_calls() -> None:
    got = template_messages(TALK, lambda variable: variable in ("tool_calls", "tool_responses"))
    assert [m["role"] for m in got] == ["system", "user", "assistant"]
    assert got[-1]["tool_responses"] == [{"name": "f", "response": "sunny"}]


@pytest.mark.parametrize(("messages", "wrong"), [
    ([{"role": "robot"}], r"messages\[0\] has no role of system"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content is neither"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "this model reads text alone, no images"),
    ([{"role": "user", "tool_calls": [{}]}], "which the assistant makes"),
    ([asks("x", "[1]")], r"messages\[0\].tool_calls\[0\].function.arguments is no JSON object: {} are"),
    ([asks("x", [1])], "no JSON object"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "no call of a function"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "has no id"),
    ([{"role": "tool", "tool_call_id": "x", "content": ""}], "answers call 'x', which"),
    ([asks("x", "{}"), {"role": "user"}, {"role": "tool", "tool_call_id": "x"}], "answers call 'x'.*right behind"),
    ([asks("x", "{}"), {"role": "tool", "tool_call_id": "x"}, asks("y", "{}"), {"role": "tool", "tool_call_id": "x"}],
     "answers call 'x'"),
    ([{"role": "assistant", "function_call": {}}], "no longer"),
])  # fmt: skip
def test_turns_that_cannot_be_told_are_refused(messages: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        template_messages(messages)


@pytest.mark.parametrize("text", ["{", '{"a": "b', '{"a":1]}', '{"a": NaN}', "[" * 100_000])
def test_a_call_that_is_no_json_is_told_as_text(text: str) -> None:
    """So that a chat goes on whose call was cut off, or could not be read."""
    turns = [asks("x", text), {"role": "tool", "tool_call_id": "x", "content": "?"}]
    got = template_messages(turns)
    assert got[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"invalid_arguments": text}}
    assert f"call:f{{invalid_arguments:{Q}{text}{Q}}}" in render_chat(TEMPLATE, {"messages": got})


def test_calls_in_several_messages_are_one_turn() -> None:
    def answer(call: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call, "content": call.upper()}

    said = {"role": "assistant", "content": "I look.", "reasoning_content": "hm"}
    turns = [said, asks("x", "{}"), asks("y", "{}", "g") | {"content": "And on."}, answer("x"), answer("y")]
    got = template_messages([*turns, {"role": "assistant", "content": "so"}])
    assert [m["role"] for m in got] == ["assistant", "tool", "tool", "assistant"]
    assert (got[0]["content"], got[0]["reasoning_content"]) == ("I look.\n\nAnd on.", "hm")
    assert [call["id"] for call in got[0]["tool_calls"]] == ["x", "y"]
    assert [m["name"] for m in got[1:3]] == ["f", "g"]
    older = template_messages([*turns, {"role": "assistant", "content": "so"}], lambda v: v != "tool_call_id")
    assert [m["content"] for m in older] == ["I look.\n\nAnd on.", "so"]
    assert [r["response"] for r in older[0]["tool_responses"]] == ["X", "Y"]
    apart = [{"role": "assistant", "content": text} for text in ("a", "b")]
    assert template_messages(apart) == apart, "no calls, no change"
    assert len(template_messages([asks("x", "{}"), answer("x"), asks("y", "{}"), answer("y")])) == 4


def test_calls_need_a_template_that_reads_them() -> None:
    with pytest.raises(UsageError, match="knows none"):
        template_messages(TALK, TINY.template_reads)
    assert template_messages(TALK[1:2], TINY.template_reads) == [{"role": "user", "content": "?"}]


NAMED_F = {"type": "function", "function": {"name": "f"}}
BAD_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": 3}}


@pytest.mark.parametrize("tools", [[{"type": "web"}], [BAD_SCHEMA], [NAMED_F, NAMED_F]])
def test_tools_that_are_none_are_refused(tools: list[dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="tools"):
        template_tools(tools)


def test_tools_are_written_in_the_words_of_the_template() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place", "description": "where"},
            "unit": {"anyOf": [{"enum": ["c", "f"]}, {"type": "null"}], "default": None},
            "days": {"type": ["integer", "null"]},
            "kind": {"allOf": [{"const": "now"}]},
            "many": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
        "$defs": {
            "Place": {"type": "object", "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/Place"}}}
        },
    }
    [told] = template_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    place = {"type": "object", "properties": {"city": {"type": "string"}, "near": {"type": "object"}}}
    assert told["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "place": {**place, "description": "where"},
            "unit": {"enum": ["c", "f"], "type": "string", "nullable": True, "default": None},
            "days": {"type": "integer", "nullable": True},
            "kind": {"enum": ["now"], "type": "string"},
            "many": {"type": "array", "items": place},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
    }


def test_tools_that_grow_without_bound_are_refused() -> None:
    twice = {f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(30)}
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    loop = {"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}
    for parameters in ({"$ref": "#/$defs/d0", "$defs": twice}, deep):
        with pytest.raises(UsageError, match=r"50,000.*nested"):
            template_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    [told] = template_tools([{"type": "function", "function": {"name": "f", "parameters": loop}}])
    assert told["function"]["parameters"] == {"type": "object"}
