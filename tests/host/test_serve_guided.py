"""Whatever the model would like to say, under a guide it says what was asked for: random tokens stand for the model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kerngen.errors import UsageError
from kerngen.runtime.serve import grammar_cost
from kerngen.runtime.serve.grammar_cost import GrammarTooCostly, GrammarTooSlow
from kerngen.runtime.serve.grammars import (
    MAX_GRAMMAR_CHARS,
    Guide,
    Guides,
    GuidesBusy,
    choice_grammar,
    regex_grammar,
)
from kerngen.runtime.serve.json_grammar import _ENFORCED, json_grammar
from kerngen.runtime.serve.messages import template_tools
from kerngen.runtime.serve.output_parser import ContentDelta, Output, ReasoningDelta, ToolCallDelta
from kerngen.runtime.serve.schema import ANNOTATIONS
from kerngen.runtime.serve.tool_grammar import _KNOWN, call_grammar
from kerngen.runtime.text import TextCodec
from kerngen.system.processes import Processes

VOCAB_SIZE = 1040  # more than the tokenizer's 1,024, and no multiple of 32
TINY = TextCodec(ROOT / "examples/tiny/gemma-4-tiny", 2)
STOPS = (1, 106, 50)


@pytest.fixture(scope="module")
def guides() -> Guides:
    return Guides(TINY, VOCAB_SIZE, STOPS)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Guides:
    """As Gemma-4's tokenizer: spaces are ▁, and characters that have no token are bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>']
    words = ["▁", "▁the", "call", '":', '{"', "true", "null", "\n\n"]
    pieces = [*special, *[f"<0x{i:02X}>" for i in range(256)], *map(chr, range(0x21, 0x7F)), *words]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Guides(TextCodec(folder, 2), len(pieces), (1,))


def json_text(schema: Any = None) -> str:
    return json_grammar(schema).text


def allowed(guide: Guide, vocab_size: int = VOCAB_SIZE) -> list[int]:
    bits = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    assert guide.fill(bits)
    tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert len(tokens), "some token must be allowed"
    return tokens.tolist()


def said(guides: Guides, codec: TextCodec, guide: Guide, seed: int, stops: tuple[int, ...] = STOPS) -> list[int]:
    """Tokens of an answer, at random among those allowed; those that end something are likely, so that it ends."""
    rng = np.random.default_rng(seed)
    ends = {*stops, *(codec.channel_ids or ()), *(codec.call_ids or ())}
    ends |= {i for i in range(codec.vocab_size) if codec.token(i) in ('"', "}", "]", ",", ":", "0", '",', '"}')}
    tokens: list[int] = []
    while len(tokens) < 2000:
        may = allowed(guide, guides.vocab_size)
        assert max(may) < codec.vocab_size
        likely = [i for i in may if i in ends]
        token = int(rng.choice(likely if likely and rng.random() < 0.4 else may))
        guide.accept(token)
        if token in stops:
            return tokens
        tokens.append(token)
    raise AssertionError(f"it did not end: {codec.decode(tokens)[:300]}")


def is_valid(schema: Any, value: Any, root: Any = None) -> bool:
    """The keywords that the tests use."""
    if isinstance(schema, bool):
        return schema
    root = schema if root is None else root
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target[part]
        return is_valid(target, value, root)
    kinds = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict,
             "integer": int, "number": (int, float)}  # fmt: skip
    types = schema.get("type", list(kinds))
    types = [types] if isinstance(types, str) else types
    fits = [k for k in types if isinstance(value, kinds[k]) and (k == "boolean" or not isinstance(value, bool))]
    if not fits and not (schema.get("nullable") and value is None):
        return False
    checks = [
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        all(any(is_valid(s, value, root) for s in schema[k]) for k in ("anyOf", "oneOf") if k in schema),
        all(is_valid(s, value, root) for s in schema.get("allOf", [])),
    ]
    if isinstance(value, str):
        checks += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)]
        checks += [re.search(schema.get("pattern", ""), value) is not None]
    if isinstance(value, int | float) and not isinstance(value, bool):
        checks += [schema.get("minimum", value) <= value <= schema.get("maximum", value)]
        checks += ["exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"], "multipleOf" not in schema]
        checks[-1] |= "multipleOf" in schema and value % schema["multipleOf"] == 0
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        checks += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)]
        checks += [is_valid(s, v, root) for s, v in zip(first, value, strict=False)]
        checks += [is_valid(schema.get("items", True), v, root) for v in value[len(first) :]]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        checks += [key in value for key in schema.get("required", [])]
        others = schema.get("additionalProperties", True)
        checks += [is_valid(known.get(key, others), v, root) for key, v in value.items()]
    return all(checks)


TREE = {
    "type": "object",
    "properties": {
        "leaf": {"type": "integer"},
        "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["leaf"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {"type": "object", "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8, "description": "where"}, "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", 'q"}\n<turn|>', ""]}, "rain": {"type": "boolean"},
        "share": {"type": "number"}}, "required": ["days", "unit"]},
    "numbers": {"type": "object", "properties": {
        "a": {"type": "integer", "minimum": 3, "maximum": 17},
        "b": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
        "c": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}}, "required": ["a", "b", "c"]},
    "arrays": {"type": "object", "properties": {
        "none": {"type": "array", "items": {"type": "null"}, "maxItems": 0},
        "some": {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2, "maxItems": 4},
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": 7}], "items": False, "minItems": 1},
        "more": {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"const": "x"}, "minItems": 3},
        "any": {"type": "array", "items": {"type": "boolean"}}}, "required": ["none", "some", "pair", "more"]},
    "patterns": {"type": "object", "properties": {
        "word": {"type": "string", "pattern": "^[a-z]{2,4}$"},
        "has": {"type": "string", "pattern": "x/y", "maxLength": 6},
        "either": {"type": "string", "pattern": "^(a|b)|[0-9]$", "maxLength": 4},
        "money": {"type": "string", "pattern": "^\\$\\d+\\$$"}}, "required": ["word", "has", "either", "money"]},
    "nested": {"type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"],
               "$defs": {"tree": TREE}},
    "choices": {"type": "object", "properties": {
        "a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "b": {"oneOf": [{"type": "object", "properties": {"k": {"const": "p"}}, "required": ["k"]},
                        {"type": "boolean"}]},
        "c": {"allOf": [{"$ref": "#/$defs/kind"}]}, "d": {"enum": [1, None, "x", [1, {"y": True}]]}},
        "required": ["a", "b", "c", "d"], "$defs": {"kind": {"type": "string", "enum": ["u", "v"]}}},
    "names": {"type": "object", "properties": {"a b": {"const": 1}, 'q"': {"const": 2}, "x:y": {"const": 3},
              "Zoë": {"const": 4}, "b": {"const": 5}},
              "required": ["a b", 'q"', "x:y", "Zoë"], "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "others": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a", "z"],
               "additionalProperties": {"type": "boolean"}},
    "nothing": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_satisfies_its_schema(guides: Guides, name: str) -> None:
    grammar = json_text(SCHEMAS[name])
    for seed in range(6):
        text = TINY.decode(said(guides, TINY, guides.guide(grammar), seed))
        assert is_valid(SCHEMAS[name], json.loads(text)), text


def test_json_has_one_space_at_most_in_a_gap(guides: Guides) -> None:
    """Else a weak model fills each of them up to the bound."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    grammar = json_text(schema | {"additionalProperties": False})
    for text in ('{"a": [1, 2]}', '{"a":[1,2]}'):
        guide = guides.guide(grammar)
        for token in TINY.encode(text, plain=True)[1:]:
            assert token in allowed(guide), text
            guide.accept(token)
    for seed in range(10):
        text = TINY.decode(said(guides, TINY, guides.guide(grammar), seed))
        assert re.search(r"\s\s|[\n\r\t]", text) is None, text


def test_any_json_object_without_a_schema(guides: Guides) -> None:
    for seed in range(6):
        assert isinstance(json.loads(TINY.decode(said(guides, TINY, guides.guide(json_text()), seed))), dict)


def tool(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": dict(parameters)}}


def calls_of(tokens: list[int], codec: TextCodec = TINY) -> tuple[list[tuple[str, Any]], str, str]:
    """The calls, what is said beside them, and what is thought."""
    output = Output(codec)
    deltas = output.push(tokens) + output.finish()
    made: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            made += [(delta.name, "")] if delta.name is not None else []
            made[-1] = (made[-1][0], made[-1][1] + delta.arguments)
    text = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    return [(name, json.loads(arguments)) for name, arguments in made], text, thought


CONSTANTS = st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"}<|é\n ', max_size=4)
NAMES = st.text('abC _:é"{', max_size=3)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of(properties: dict[str, Any], others: bool | None, count: int) -> dict[str, Any]:
        schema = {"type": "object", "properties": properties, "required": sorted(properties)[:count]}
        return schema if others is None else schema | {"additionalProperties": others and {"type": "boolean"}}

    return st.builds(of, st.dictionaries(NAMES, inner, max_size=4), st.none() | st.booleans(), st.integers(0, 4))


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of(first: list[Any], items: Any, least: int, more: int | None) -> dict[str, Any]:
        schema = {"type": "array", "prefixItems": first, "items": items, "minItems": least}
        return schema if more is None else schema | {"maxItems": least + more}

    return st.builds(of, st.lists(inner, max_size=2), inner, st.integers(0, 3), st.none() | st.integers(0, 2))


LEAVES = (
    st.sampled_from(
        [{"type": t} for t in ("string", "integer", "number", "boolean", "null")] + [{"type": ["null", "number"]}]
    )
    | st.builds(lambda values: {"enum": values}, st.lists(CONSTANTS, min_size=1, max_size=3))
    | st.builds(
        lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-99, 99), st.integers(0, 99)
    )
    | st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 3), st.integers(0, 3)
    )
)
TREES = st.recursive(LEAVES, lambda inner: objects(inner) | arrays(inner) | st.builds(
    lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2)), max_leaves=8)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(schema=objects(TREES), seed=st.integers(0, 10**6))
def test_any_schema_is_satisfied(guides: Guides, schema: dict[str, Any], seed: int) -> None:
    value = json.loads(TINY.decode(said(guides, TINY, guides.guide(json_text(schema)), seed)))
    assert is_valid(schema, value), value
    [(_, value)], _, _ = calls_of(
        said(guides, TINY, guides.guide(guides.calls([tool("f", schema)], is_parallel=False)), seed)
    )
    assert is_valid(schema, value), value


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3)
    | st.sampled_from(["string", "object", "array", "null", "number", "#", "#/$defs/a", "#/a", "^a|[", "date", "(a+"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(sorted(_KNOWN | _ENFORCED | ANNOTATIONS | {"not", "x-a"})), inner),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(schema=ANYTHING, name=st.sampled_from(sorted(_KNOWN)))
@example(schema={"nullable": True, "type": 1}, name="type")
def test_what_is_no_schema_is_refused(guides: Guides, schema: Any, name: str) -> None:
    """As an error of the request, whatever it is."""
    for make in (json_text, lambda s: guides.calls([tool("f", {"type": "object", "properties": {"x": s}})]),
                 lambda s: guides.calls([tool("f", {"type": "object", name: s})]),
                 lambda s: str(template_tools([tool("f", {name: s})]))):  # fmt: skip
        with contextlib.suppress(UsageError):
            grammar = make(schema)
            if "body:" in grammar:
                guides.guide(grammar)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_satisfies_its_schema(guides: Guides, byte_fallback: Guides, name: str) -> None:
    for made_for, codec, stops in ((guides, TINY, STOPS), (byte_fallback, byte_fallback._codec, (1,))):
        grammar = made_for.calls([tool("look_up", SCHEMAS[name])], is_parallel=False)
        for seed in range(6):
            tokens = said(made_for, codec, made_for.guide(grammar), seed, stops)
            [(called, arguments)], text, _ = calls_of(tokens, codec)
            assert (called, text) == ("look_up", "")
            assert is_valid(SCHEMAS[name], arguments), arguments
            if name not in ("map", "others", "names"):  # as the template writes them
                keys = list(arguments)
                assert keys == sorted(keys, key=str.lower)


def test_calls_are_of_the_tools_that_may_be_called(guides: Guides) -> None:
    tools = [tool("now", {"type": "object", "properties": {}}), tool("get.weather-2", SCHEMAS["flat"])]
    tools.append(tool("a", {"type": "object"}))
    del tools[0]["function"]["parameters"]
    some = guides.calls(tools)
    now = guides.calls(tools, name="now", is_parallel=False)
    maybe = guides.calls(tools, is_required=False)
    names, most, beside = set(), 0, 0
    for seed in range(20):
        made, text, _ = calls_of(said(guides, TINY, guides.guide(some), seed))
        assert (len(made) > 0, text) == (True, "")
        most = max(most, len(made))
        names |= {name for name, _ in made}
        [(name, _)], text, _ = calls_of(said(guides, TINY, guides.guide(now), seed))
        assert (name, text) == ("now", "")
        made, text, _ = calls_of(said(guides, TINY, guides.guide(maybe), seed))
        beside += bool(text) and not made
    assert names == {"now", "get.weather-2", "a"}
    assert most > 1
    assert beside, "without a call, too"


@pytest.mark.parametrize("is_thinking", [False, True])
def test_a_thought_may_come_first(guides: Guides, is_thinking: bool) -> None:
    grammar = choice_grammar(["yes", "no"])
    seen = set()
    for seed in range(20):
        tokens = said(guides, TINY, guides.guide(grammar, may_think=True, is_thinking=is_thinking), seed)
        output = Output(TINY, prompt=[100] if is_thinking else [])
        deltas = output.push(tokens) + output.finish()
        assert deltas[-1] in (ContentDelta("yes"), ContentDelta("no"))
        assert (101 in tokens) == (is_thinking or tokens[0] == 100)
        seen.add(101 in tokens)
    assert seen == ({True} if is_thinking else {True, False})


PATTERNS = {
    "[a-c]{3}": "[abc]{3}", "^a|b$": "a|b", r"\d{2}/\d": "[0-9]{2}/[0-9]", r"^(?:x|\|)[|]$": r"[x|]\|", r"a\$": r"a\$",
    "<turn.>": "<turn.>",
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "text"), PATTERNS.items())
def test_a_regular_expression_is_matched_from_end_to_end(guides: Guides, pattern: str, text: str) -> None:
    for seed in range(4):
        assert re.fullmatch(text, TINY.decode(said(guides, TINY, guides.guide(regex_grammar(pattern)), seed)))


def test_one_of_the_choices_is_made(guides: Guides, byte_fallback: Guides) -> None:
    choices = ["yes", "no", "no, never", 'a "b"\n<turn|>', "é😀"]
    for made_for, codec, stops in ((guides, TINY, STOPS), (byte_fallback, byte_fallback._codec, (1,))):
        grammar = choice_grammar(choices)
        made = {codec.decode(said(made_for, codec, made_for.guide(grammar), n, stops)) for n in range(40)}
        assert made == set(choices)


def test_stop_tokens_follow_where_the_answer_may_end_and_alone_where_it_must(guides: Guides) -> None:
    guide = guides.guide(choice_grammar(["ab", "abc"]))
    assert not set(STOPS) & set(allowed(guide))
    for token in TINY.encode("ab", plain=True)[1:]:
        guide.accept(token)
    assert set(STOPS) < set(allowed(guide))
    for token in TINY.encode("c", plain=True)[1:]:
        guide.accept(token)
    assert sorted(allowed(guide)) == sorted(allowed(guide)) == sorted(STOPS), "asked twice"
    guide.accept(106)
    assert set(TINY.end_of_turn_ids + TINY.end_of_calls_ids) < set(STOPS)


def test_a_token_that_is_not_allowed_is_refused(guides: Guides) -> None:
    guide = guides.guide(choice_grammar(["ab"]))
    with pytest.raises(UsageError, match="cannot be guided on"):
        guide.accept(TINY.encode("b", plain=True)[1])
    with pytest.raises(UsageError, match="cannot be guided on"):
        allowed(guide)
    with pytest.raises(ValueError, match="int32"):
        guides.guide(choice_grammar(["ab"])).fill(np.zeros(4, np.int32))


def test_control_tokens_never_stand_in_strings(guides: Guides) -> None:
    guide = guides.guide(json_text({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}))
    for token in TINY.encode('{"a":"x', plain=True)[1:]:
        guide.accept(token)
    special = {i for i in range(107) if not TINY.decode([i])}
    assert {1, 48, 49, 52, 100, 105, 106} <= special
    assert not special & set(allowed(guide))


@pytest.mark.parametrize(("schema", "wrong"), [
    ({"type": "what"}, "what"), (False, "is an object"), ([], "is an object"), ({"$ref": "#"}, "nothing that ends"),
    ({"const": {1, 2}}, "JSON can hold"), ({"const": "x" * MAX_GRAMMAR_CHARS}, "characters"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "schema.a: .ref .#/.defs/b. leads nowhere"),
    ({"properties": {"a": {"pattern": [1]}}}, r"schema.a.pattern is \[1\], and not a regular expression"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"), ({"items": 3}, "cannot be guided"),
])  # fmt: skip
def test_a_schema_that_allows_nothing_is_refused(guides: Guides, schema: Any, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        guides.guide(json_text(schema))


def follows(guide: Guide, text: str) -> bool:
    """Whether the answer may be `text`, and may end there."""
    for token in TINY.encode(text, plain=True)[1:]:
        if token not in allowed(guide):
            return False
        guide.accept(token)
    return STOPS[0] in allowed(guide)


A, AB = {"type": "integer"}, {"a": {"type": "integer"}, "b": {"type": "integer"}}


@pytest.mark.parametrize(("schema", "not_enforced", "valid", "invalid"), [
    ({"type": "array", "uniqueItems": True, "contains": {}, "maxItems": 2, "x-order": 3, "foo": 1},
     ["schema: contains", "schema: foo", "schema: uniqueItems"], ["[1,1]", "[]"], ["[1,1,1]", "1"]),
    ({"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}, "type": "integer"}}},
      "unevaluatedProperties": False, "propertyNames": {}, "uniqueItems": False},
     ["schema: propertyNames", "schema.a.items: not"], ['{"a":[1]}'], ['{"a":["x"]}', '{"b":[1]}']),
    ({"$ref": "#/$defs/a", "unevaluatedProperties": False, "$defs": {"a": {"type": "object"}}},
     ["schema: unevaluatedProperties"], ["{}"], ["1"]),
    ({"type": "string", "format": "colour", "maxLength": 2}, ['schema: format "colour"'], ['"ab"'], ['"abc"', "1"]),
    ({"type": "string", "format": "date"}, [], ['"2026-11-28"'], ['"ab"']),
    ({"type": "integer", "format": "int64"}, [], ["3"], ['"a"']),
    ({"type": "string", "pattern": "(?=a)", "maxLength": 2}, ["schema: pattern"], ['"bb"'], ['"abc"']),
    ({"type": "string", "pattern": "("}, ["schema: pattern"], ['"b"'], ["1"]),
    ({"type": "string", "pattern": "^a+$"}, [], ['"aa"'], ['"ab"']),
    ({"patternProperties": {"^a": A, "(?=b)": A}, "type": "object", "additionalProperties": False},
     ["schema: patternProperties"], ['{"ab":1}'], ['{"ab":"x"}', '{"c":1}']),
    ({"type": "object", "minProperties": 1, "additionalProperties": A}, [], ['{"c":1}'], ["{}"]),
    ({"type": "object", "minProperties": 1, "properties": AB, "additionalProperties": False},
     ["schema: minProperties"], ["{}", '{"a":1}'], ['{"a":"x"}']),
    ({"allOf": [{"maxProperties": 1}, {"properties": AB}], "type": "object", "additionalProperties": A},
     ["schema.allOf[0]: maxProperties"], ['{"a":1,"b":2}'], ['{"a":"x"}']),
    ({"$ref": "#/$defs/two", "minProperties": 0, "$defs": {"two": {"maxProperties": 1, "type": "object"}}}, [],
     ['{"c":1}'], ['{"c":1,"d":2}']),
    ({"$ref": "#/$defs/two", "properties": AB, "$defs": {"two": {"maxProperties": 1, "type": "object"}}},
     ["schema (#/$defs/two): maxProperties"], ['{"a":1,"b":2}'], ['{"a":"x"}']),
    ({"$ref": "#/components/a", "components": {"a": {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}}},
     ["schema (#/components/a): uniqueItems"], ["[]", "[[],[]]"], ["[1]"]),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/used"}}, "required": ["a"],
      "$defs": {"used": {"type": "integer", "not": {}}, "other": {"uniqueItems": True}}},
     ["schema (#/$defs/used): not"], ['{"a":1}'], ['{"a":"x"}']),
    ({"type": "string", "nullable": True}, [], ["null", '"a"'], ["1"]),
    ({"allOf": [{"type": "integer"}], "nullable": True}, [], ["null", "1"], ['"a"']),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False}, [],
     ["4", "5"], ["3", "6"]),
    ({"type": "array", "items": [{"const": 1}, A], "additionalItems": False}, [], ["[1,2]", "[1]"], ["[2]", "[1,2,3]"]),
    ({"enum": ["ab", "c"], "minLength": 2}, [], ['"ab"'], ['"c"']),
    ({"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "readOnly": True, "xml": {},
      "$schema": "http://odd/schema#", "$id": "http://x/y", "$comment": "c", "discriminator": {}, "contentSchema": {},
      "type": "integer"}, [], ["1"], ['"a"']),
])  # fmt: skip
def test_what_can_be_enforced_of_json_is_and_the_rest_is_told(
    schema: Any, not_enforced: list[str], valid: list[str], invalid: list[str], guides: Guides
) -> None:
    made = json_grammar(schema)
    assert list(made.not_enforced) == not_enforced
    for text in (*valid, *invalid):
        assert follows(guides.guide(made.text), text) == (text in valid), text


@pytest.mark.parametrize("keyword", sorted(_ENFORCED | ANNOTATIONS | {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependencies", "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "$dynamicRef",
    "nullable", "$dynamicAnchor", "$recursiveRef", "additionalItems", "x-a", "foo",
}))  # fmt: skip
def test_no_keyword_is_refused_for_being_there(guides: Guides, keyword: str) -> None:
    """llguidance refuses those that it knows of and has not, so that none of them may reach it."""
    maps = ("properties", "patternProperties", "$defs", "definitions")
    lists = ("anyOf", "oneOf", "allOf", "prefixItems")
    values = {"$ref": "#/$defs/a", "type": "object", "enum": [1], "required": [], "pattern": "a", "format": "x",
              "$id": "http://x", "$anchor": "b", "items": {}, "additionalProperties": {}, "unevaluatedProperties": {},
              **{key: {"a": {}} for key in maps}, **{key: [{}] for key in lists}}  # fmt: skip
    schema = {"$defs": {"a": {}}, keyword: values.get(keyword, 1)}
    assert allowed(guides.guide(json_text(schema)))
    assert allowed(guides.guide(json_text({"type": "object", "properties": {"x": schema | {"$defs": {}}}} | (
        {"$defs": {"a": {}}}))))  # fmt: skip


@pytest.mark.parametrize(("schema", "wrong"), [
    ({"type": "string", "minLength": -1}, "minLength is -1"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "more than"),
    ({"type": "integer", "minimum": "3"}, "bounds are numbers"), ({"type": "what"}, "x.type is none of"),
    ({"enum": []}, "enum is no list"), ({"type": "string", "enum": [1]}, "no value of enum"),
    ({"anyOf": []}, "anyOf is no list"), ({"allOf": {}}, "allOf is no list"),
    ({"anyOf": [{"type": "null"}, {"enum": [1]}], "type": "string"}, "no value of enum is of type"),
    ({"allOf": [{"type": "null"}, {"type": "string"}]}, "no value is of type"),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [3]}]}, "enum allows nothing"), ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$ref": "http://x"}, "leads nowhere"), ({"$ref": "#/properties/x"}, "leads nowhere"),
    ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "no array has as many"),
    (False, "no schema that a value can satisfy"), (3, "no schema that a value can satisfy"),
    ({"type": "object", "properties": {"y": {"$ref": "#"}}, "required": ["y"]}, None),
])  # fmt: skip
def test_parameters_that_cannot_be_enforced_are_refused(guides: Guides, schema: Any, wrong: str | None) -> None:
    tools = [tool("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]})]
    if wrong is None:  # it never ends: the guide says so when it is too long
        guide = guides.guide(guides.calls(tools))
        with pytest.raises(UsageError, match="cannot be guided on"):
            said(guides, TINY, guide, 0)
        return
    with pytest.raises(UsageError, match=wrong):
        guides.guide(guides.calls(tools))


@pytest.mark.parametrize(("schema", "not_enforced", "valid", "invalid"), [
    ({"type": "array", "uniqueItems": True, "contains": {}, "maxItems": 2, "x-order": 3, "minProperties": 0},
     ["contains", "uniqueItems"], ["[1,1]", "[]"], ["[1,1,1]", "1"]),
    ({"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"},
      "patternProperties": {"^a": {}}},
     ["minProperties", "patternProperties"], ["{}", "{a:1}"], ["{a:true}"]),
    ({"type": "integer", "not": {"const": 3}}, ["not"], ["3", "4"], ["3.5"]),
    ({"type": "string", "format": "colour", "maxLength": 2}, ['format "colour"'], ["QabQ"], ["QabcQ", "1"]),
    ({"type": "string", "pattern": "(?=a)", "maxLength": 2}, ["pattern"], ["QbbQ"], ["QabcQ"]),
    ({"type": "string", "pattern": "("}, ["pattern"], ["QbQ"], ["1"]),
    ({"minLength": 2, "minimum": 1}, [], ["QabQ", "1"], ["QaQ", "0", "true"]),
    ({"enum": [1, "a"], "minLength": 1}, ["minLength beside enum"], ["1", "QaQ"], ["2"]),
    ({"enum": ["a", "bc"], "minLength": 2}, ["minLength beside enum"], ["QbcQ"], ["QdQ"]),
    ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "kind"}}, [],
     ["{kind:QaQ}", "{kind:QbQ,n:1}"], ["{kind:QaQ,n:1}", "{}"]),
    ({"allOf": [{"$ref": "#/$defs/b"},
                {"properties": {"m": {"type": "null"}, "n": {"minimum": 5}}, "required": ["m"]}]},
     [], ["{kind:QbQ,m:null,n:5}"], ["{kind:QbQ,n:5}", "{kind:QbQ,m:null,n:4}", "{kind:QbQ,m:null,n:null}"]),
    ({"$ref": "#/$defs/b", "properties": {"n": {"maximum": 5}}, "description": "b"}, [],
     ["{kind:QbQ,n:5}"], ["{kind:QbQ,n:6}", "{n:5}"]),
    ({"$ref": "#/$defs/a", "nullable": True}, [], ["null", "{kind:QaQ}"], ["{}"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
      "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [], ["{a:1}", "{b:1}", "{a:1,b:2}"], ["{}", "{a:true}"]),
    ({"type": "object", "properties": {"": {"type": "null"}, "'b'": {"type": "null"}},
      "additionalProperties": {"type": "integer"}}, [],
     ["{QQ:null,Q'b'Q:null,c':1}"], ["{'':1}", "{'b':null}", "{'c':1}"]),
    ({"type": ["string", "null"], "anyOf": [{"type": "null"}, {"enum": ["a", 1]}, {"type": "integer"}]}, [],
     ["null", "QaQ"], ["1", "QbQ"]),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False}, [],
     ["4", "5"], ["3", "6"]),
    ({"allOf": [{"minimum": 2}, {"minimum": 3, "type": "number"}, {"type": ["integer", "null"]}, True]}, [],
     ["3"], ["2", "null", "3.5"]),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, ["a second pattern"], ["QaQ"], ["QbQ"]),
])  # fmt: skip
def test_what_can_be_enforced_is_and_the_rest_is_told(
    schema: Any, not_enforced: list[str], valid: list[str], invalid: list[str], guides: Guides
) -> None:
    kinds = {"a": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
             "b": {"type": "object", "properties": {"kind": {"const": "b"}, "n": {"type": "integer"}},
                   "required": ["kind"], "additionalProperties": False}}  # fmt: skip
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": kinds, "minProperties": 1}
    assert TINY.call_ids is not None
    made = call_grammar([tool("f", parameters)], TINY.call_ids, is_parallel=False)
    wanted = ["tool f: parameters: minProperties", *(f"tool f: parameters.x: {keyword}" for keyword in not_enforced)]
    assert [told.replace(".allOf[0]", "") for told in made.not_enforced] == wanted
    for text in (*valid, *invalid):
        guide = guides.guide(made.text)
        call = f"<|tool_call>call:f{{x:{text}}}<tool_call|>".replace("Q", '<|"|>')
        is_allowed = True
        for token in TINY.encode(call)[1:]:
            if not (is_allowed := token in allowed(guide)):
                break
            guide.accept(token)
        assert is_allowed == (text in valid), text


def test_schemas_that_are_large_written_out_are_bounded(guides: Guides) -> None:
    """Small ones, of which each part asks for the next one twice, or for itself."""
    twice = {f"d{n}": {"type": "object", "anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    loop = {"type": "object", "allOf": [{"$ref": "#/$defs/loop"}]}
    ring = {"a": {"type": "object", "$ref": "#/$defs/b"}, "b": {"type": "object", "$ref": "#/$defs/a"}}
    wide = {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}}
    defs = twice | ring | {"d60": {}, "loop": loop, "wide": wide}
    many = {"type": "object", "anyOf": [{"$ref": "#/$defs/wide"}] * 2000}
    begun = time.perf_counter()
    for schema in ({"$ref": "#/$defs/d0"}, loop, {"$ref": "#/$defs/a", "type": "object"}, many):
        with pytest.raises(UsageError):
            guides.calls([tool("f", {"type": "object", "properties": {"x": schema}, "$defs": defs})])
    assert time.perf_counter() - begun < 10


def test_tools_that_cannot_be_called_are_refused(guides: Guides) -> None:
    with pytest.raises(UsageError, match="no tool named g"):
        guides.calls([tool("f", {"type": "object"})], name="g")
    with pytest.raises(UsageError, match="no tools"):
        guides.calls([])
    with pytest.raises(UsageError, match="name of a function"):
        guides.calls([tool("f{", {"type": "object"})])
    with pytest.raises(UsageError, match=r"arguments.*object"):
        guides.calls([tool("f", {"type": "string"})])
    with pytest.raises(UsageError, match="a choice is"):
        choice_grammar([])
    with pytest.raises(UsageError, match=r"regular expression.*text"):
        regex_grammar(3)  # type: ignore[arg-type]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_hostile_schemas_are_bounded(guides: Guides) -> None:
    """In depth, in size, and in time."""
    begun = time.perf_counter()
    for make in (json_text, lambda s: guides.calls([tool("f", {"type": "object", "properties": {"x": s}})])):
        with pytest.raises(UsageError, match="nested deeper"):
            make(nested(5000))
        with pytest.raises(UsageError, match="at most 4,096"):
            make({"type": "string", "pattern": "a?" * 5000})
        guides.guide(make({"type": "object", "properties": {"pattern": {"title": "t" * 5000}}}))
        guides.guide(make(nested(40)))
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2000)}
    chain["d2000"] = {"type": "null"}
    below = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    guides.guide(guides.calls([tool("f", below)]))
    guides.guide(json_text(below))
    options = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(500)}}
    said(guides, TINY, guides.guide(guides.calls([tool("f", options)])), 0)
    for pattern in ("a?" * 2000, "(" * 50_000 + ")" * 50_000, "(a{1,1000}){1,1000}", "(a|aa)*" * 200):
        with contextlib.suppress(UsageError):
            allowed(guides.guide(regex_grammar(pattern)))
    assert time.perf_counter() - begun < 20


def test_a_grammar_is_compiled_once(guides: Guides) -> None:
    grammar = json_text(SCHEMAS["nested"] | {"title": "once"})
    one, other = guides.guide(grammar), guides.guide(grammar)
    assert one._compiled is other._compiled
    one.accept(TINY.encode("{", plain=True)[1])
    assert allowed(one) != allowed(other)


# ---- what compiling may cost -----------------------------------------------------------------------------------------


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.parametrize("schema", [
    {"type": "integer", "multipleOf": 999_983},
    {"type": "array", "items": {"anyOf": [{"type": "integer", "multipleOf": n} for n in (99_991, 999_983)]}},
])  # fmt: skip
def test_a_grammar_that_takes_too_much_costs_its_asker_alone(
    guides: Guides, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, began = resident_mb(), time.perf_counter()
    with pytest.raises(GrammarTooSlow, match=r"more than 0\.2 s"):
        guides.guide(json_text(schema), within_s=0.2)
    monkeypatch.setattr(grammar_cost, "MAX_COMPILE_S", 1.0)
    with pytest.raises(GrammarTooCostly, match="to compile"):
        guides.guide(json_text(schema), within_s=1.0)
    assert time.perf_counter() - began < 15
    assert resident_mb() - before < 20
    with pytest.raises(GrammarTooCostly):  # is known
        guides.guide(json_text(schema), within_s=0.001)
    assert allowed(guides.guide(json_text({"type": "null"}), within_s=0.2))


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    with Processes(1) as processes:
        tokenizer = (TINY.folder, 2, VOCAB_SIZE, STOPS)
        grammar = "start: body\n" + json_text({"type": "integer", "multipleOf": 299_993})
        assert processes.submit(_measure_within, 1 << 28, tokenizer, grammar).result() > 50 << 20
        with pytest.raises(GrammarTooCostly, match="16 MB"):
            processes.submit(_measure_within, 1 << 24, tokenizer, grammar).result()


def _measure_within(max_bytes: int, *arguments: Any) -> int:
    """In a process."""
    grammar_cost.MAX_COMPILE_BYTES = max_bytes
    return grammar_cost._measure(*arguments, within_s=60.0)


def test_what_is_kept_of_grammars_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    guides = Guides(TINY, VOCAB_SIZE, STOPS)
    sizes: dict[str, int] = {}
    monkeypatch.setattr(guides._costs, "measure", lambda grammar, _: sizes.setdefault(grammar, 100 << 20))
    held = [guides.guide(choice_grammar([str(n)])) for n in range(4)]
    assert len(guides._kept) == 2  # of 256 MB
    held.append(guides.guide(choice_grammar(["4"])))
    with pytest.raises(GuidesBusy, match="512 MB"):
        guides.guide(choice_grammar(["5"]))
    assert guides.guide(choice_grammar(["0"]))._compiled is held[0]._compiled
    held.pop(1)
    assert allowed(guides.guide(choice_grammar(["5"])))
    guides.close()


def test_a_grammar_whose_states_are_used_up_is_compiled_anew(guides: Guides) -> None:
    grammar = regex_grammar("(.*a.{20}b.{20}c.*){3}")
    letters = [TINY._tokenizer.token_to_id(letter) for letter in "abc"]
    rng = np.random.default_rng(1)
    first = guides.guide(grammar)

    def use_up() -> None:
        for _ in range(1000):
            guide = guides.guide(grammar)
            assert guide._compiled is first._compiled
            for _ in range(60):
                allowed(guide)
                guide.accept(int(rng.choice(letters)))

    with pytest.raises(UsageError, match="too many states"):
        use_up()
    assert guides.guide(grammar)._compiled is not first._compiled
