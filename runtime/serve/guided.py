"""What the model may say: JSON of a schema, a regular expression, one of some texts, calls of tools; by llguidance.

A Guide masks, step by step, the tokens with which the answer could no longer end as it should. Grammars are Lark text
as llguidance has it (https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md). Its JSON
schemas are used as they are; the arguments of calls are no JSON (see output.py), so that their grammar is built here.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.serve.schema import MAX_NESTED, referred
from kerngen.runtime.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_PATTERN_CHARS = 4096  # of a regular expression: compiling takes time with its square, 0.13 s for twice as many
# llguidance calls itself for each rule of a chain: 8 MB are too few for 2,000, and it would crash.
STACK_BYTES = 256 * 1024 * 1024
NUM_KEPT = 64  # compiled grammars: a chat with tools asks for the same one again and again
# Where JSON may have white space, and how much: without a bound a model may go on with it for ever.
_WHITESPACE = r"[ \n\r\t]{1,32}"
_LIMITS = {"verbose_errors": False}  # else its messages quote the grammar
# In its messages: the place of an error, in a grammar that nobody wrote, and what it shows of that grammar.
_PLACE, _SHOWN = re.compile(r"^at \d+\(\d+\): "), re.compile(r"\n *\d+ \| |\n<")


class Guide:
    """The engine's TokenMask for one answer."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._shape = matcher, (-(-vocab_size // 32),)

    def accept(self, token: int) -> None:
        """Go on behind `token`. Raises UsageError where it is not allowed, or the grammar is too costly to follow."""
        self._matcher.consume_token(token)
        self._check()

    def fill(self, bits: np.ndarray) -> bool:
        """Set bit i of `bits` (int32 [ceil(vocab_size / 32)]) where token i may follow; always True, for masked.

        The stop tokens may follow where the answer may end, and nothing else where it must. Raises UsageError where the
        grammar is too costly to follow.
        """
        if bits.dtype != np.int32 or bits.shape != self._shape or not bits.flags.c_contiguous:
            raise ValueError(f"bits are int32 {self._shape}, contiguous; not {bits.dtype} {bits.shape}")
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"the answer cannot be guided on: {_said(self._matcher.get_error())}")


class Guides:
    """Makes guides for a checkpoint: `codec` and its model's vocab_size, of which the tokenizer may name fewer.

    stop_ids: tokens that end an answer. Takes a second for Gemma-4's 262,144 tokens. Raises UsageError without
    llguidance, CheckpointError for a tokenizer that it cannot read.
    """

    def __init__(self, codec: TextCodec, vocab_size: int, stop_ids: Sequence[int]) -> None:
        llguidance = _llguidance()
        self._library, self._codec, self.vocab_size = llguidance, codec, vocab_size
        try:
            read = llguidance.LLTokenizer(codec.to_json(), n_vocab=vocab_size)
            plain = llguidance.TokenizerWrapper(_PlainTokenizer(codec, read, stop_ids))
            self._tokenizer = llguidance.LLTokenizer(plain, eos_token=list(stop_ids))
        except Exception as e:  # whatever its Rust code finds wrong
            raise CheckpointError(f"llguidance cannot read the tokenizer of {codec.folder}: {e}") from e
        self._compiled = lru_cache(NUM_KEPT)(self._compile)

    def guide(self, grammar: str, *, may_think: bool = False, is_thinking: bool = False) -> Guide:
        """A guide by `grammar`, the Lark rule `body` and what it needs: see json_grammar and the others.

        may_think: a thought may come first. is_thinking: the prompt has opened one, which ends first. Raises UsageError
        for a grammar that llguidance refuses, or that allows nothing.
        """
        if may_think or is_thinking:
            if self._codec.channel_ids is None:
                raise UsageError(f"the tokenizer of {self._codec.folder} has no tokens for thoughts")
            first, last = self._codec.channel_ids
            thought = f"THOUGHT <[{last}]>"
            start = f"start: {thought} body" if is_thinking else f"start: (<[{first}]> {thought})? body"
            grammar = f"{start}\nTHOUGHT: /(?s:.*)/\n{grammar}"
        else:
            grammar = f"start: body\n{grammar}"
        return Guide(self._compiled(grammar).deep_copy(), self.vocab_size)

    def calls(self, tools: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """call_grammar with this checkpoint's tokens. Raises UsageError where it has none for calls."""
        if self._codec.call_ids is None:
            raise UsageError(f"the tokenizer of {self._codec.folder} has no tokens for tool calls")
        return call_grammar(tools, self._codec.call_ids, **options)

    def _compile(self, grammar: str) -> LLMatcher:
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise UsageError(f"the grammar has {len(grammar):,} characters; {MAX_GRAMMAR_CHARS:,} are allowed")
        limits = self._library.LLParserLimits(**_LIMITS)
        made: list[tuple[LLMatcher, LLMatcher]] = []
        failed: list[BaseException] = []

        def make() -> None:
            try:
                matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
                probe = matcher.deep_copy()
                if not probe.is_error():
                    probe.compute_bitmask()
                made.append((matcher, probe))
            except BaseException as e:  # its Rust code may panic, which is no Exception
                failed.append(e)

        with _STACK:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=make)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join()
        if failed:
            raise UsageError(f"the answer cannot be guided so: llguidance failed: {failed[0]}") from failed[0]
        matcher, probe = made[0]
        if matcher.is_error():
            raise UsageError(f"the answer cannot be guided so: {_said(matcher.get_error())}")
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise UsageError("the answer cannot be guided so: nothing that ends satisfies it")
        return matcher


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise UsageError(f"guided answers need llguidance: {e}", hint="pip install 'kerngen[serve]'") from e
    return llguidance


class _PlainTokenizer:
    """The tokens as llguidance read them, and an encoder to which <turn|> in a grammar's texts is text.

    Where only one text can follow, llguidance allows the tokens that encode it alone: its own would be the control one.
    """

    def __init__(self, codec: TextCodec, read: LLTokenizer, stop_ids: Sequence[int]) -> None:
        self._encoder = Tokenizer.from_str(codec.to_json())
        self._encoder.encode_special_tokens = True
        self.bos_token_id, self.eos_token_id = codec.bos_id, stop_ids[0]
        self.tokens = [read.decode_bytes([i]) for i in range(read.vocab_size)]
        self.special_token_ids = [i for i in range(read.vocab_size) if read.is_special_token(i)]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("texts, not bytes")  # how llguidance learns it
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids


_STACK = threading.Lock()  # around what sets the stack of the threads to come


def _said(error: str) -> str:
    """llguidance's message without the place, the grammar and its state behind it."""
    return _PLACE.sub("", _SHOWN.split(error)[0].strip())


# ---- grammars --------------------------------------------------------------------------------------------------------


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> str:
    """Of JSON text that `schema` allows; of any JSON object without one.

    JSON Schema 2020-12 as far as llguidance has it: a keyword or a format that it has not is an error that names it.
    Members come in the order of `properties`; oneOf is taken as anyOf. Raises UsageError for what is no schema.
    """
    if schema is None:
        schema = {"type": "object"}
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        raise UsageError(f"a JSON schema is an object, not {json.dumps(schema, default=repr)}")
    _require_small(schema)
    options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    return f"body: %json {_dumped({**schema, 'x-guidance': options})}\n"


def regex_grammar(pattern: str) -> str:
    """Of text that `pattern` matches from end to end: Rust's syntax, without looking around."""
    return f"body: /{_regex(pattern, from_end_to_end=True)}/\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """Of one of `choices`."""
    if not choices or not _is_texts(choices):
        raise UsageError("a choice is a list of at least one text")
    return f"body: {' | '.join(map(_literal, choices))}\n"


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    tokens: tuple[int, int, int],
    *,
    name: str | None = None,
    is_required: bool = True,
    is_parallel: bool = True,
) -> str:
    """Of calls of `tools` (OpenAI's, as template_tools takes them) in Gemma-4's syntax; of `name` alone if it is given.

    tokens: TextCodec.call_ids. is_parallel: more than one may be made. is_required: nothing but calls is said; else
    text and thoughts may stand before them, and there may be none. Arguments are what a function's `parameters` allow.
    Raises UsageError for a name that is not among the tools, and for schemas with what is not known here.
    """
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise UsageError("there are no tools to call" if name is None else f"there is no tool named {name}")
    first, last, quote = tokens
    rules = ["calls: call+" if is_parallel else "calls: call"]
    calls = []
    for at, function in enumerate(chosen):
        if not re.fullmatch(r"[A-Za-z0-9_.:/-]{1,128}", function["name"]):
            raise UsageError(f"{function['name']!r} is no name of a function: letters, digits, _ and - are")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        arguments = _Arguments(parameters, f"tool {function['name']}: parameters", f"t{at}_", quote)
        calls.append(f"<[{first}]> {_literal('call:' + function['name'])} {arguments.whole} <[{last}]>")
        rules += arguments.rules
    rules += ["call: " + "\n  | ".join(calls), *_shared(quote)]
    rules.append("body: calls" if is_required else "body: SAID calls?\nSAID: /(?s:.*)/")
    return "\n".join(rules) + "\n"


def _shared(quote: int) -> list[str]:
    """Rules that the arguments of all tools use. A key of Gemma-4's is bare."""
    return [
        f"text: <[{quote}]> TEXT <[{quote}]>",
        "TEXT: /(?s:.*)/",
        "NUMBER: /-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?/",
        "INTEGER: /-?(0|[1-9][0-9]{0,30})/",
        "KEY: /" + _BARE + ":/",
        'any: text | NUMBER | "true" | "false" | "null" | object | array',
        'object: "{" (member ("," member)*)? "}"',
        "member: KEY any",
        'array: "[" (any ("," any)*)? "]"',
    ]


_BARE = r"""[^\s:,{}\[\]"<>|]+"""  # of a key: what output.py reads as one
_ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "strict",
}  # fmt: skip
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "boolean": set(),
    "null": set(),
}  # fmt: skip
_CHOICES = {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
_KNOWN = _CHOICES | {"type", "nullable"} | set().union(*_OF_TYPE.values())
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "-".join(f"[0-9a-fA-F]{{{n}}}" for n in (8, 4, 4, 4, 12)),
    "email": rf"[A-Za-z0-9._%+-]{{1,64}}@{_NAME}(\.{_NAME})+",
    "hostname": rf"{_NAME}(\.{_NAME})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]+",
}


class _Arguments:
    """The grammar of one function's arguments: `whole` is what follows its name, `rules` is what that needs.

    where: for errors. prefix: of the rules' names. Members come in the order in which the template writes them, sorted.
    """

    def __init__(self, schema: Mapping[str, Any], where: str, prefix: str, quote: int) -> None:
        self._root, self._prefix, self._quote = schema, prefix, f"<[{quote}]>"
        self.rules: list[str] = []
        self._refs: dict[str, str] = {}  # the rules of what is referred to
        self._pending: list[tuple[str, Any, str]] = []  # those that are yet to be made
        _require_small(schema)
        schema, where = self._followed(schema, where)
        kinds = schema.get("type", "object")
        if kinds != "object" or not set(schema) <= _OF_TYPE["object"] | _ANNOTATIONS | {"type"}:
            raise UsageError(f"{where}: the arguments of a function are an object, with no more than properties, "
                             "required and additionalProperties")  # fmt: skip
        self.whole = self._object(schema, where)
        while self._pending:
            name, target, where = self._pending.pop()
            self.rules.append(f"{name}: {self._value(target, where)}")

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _terminal(self, regex: str) -> str:
        name = f"{self._prefix.upper()}{len(self.rules)}"
        self.rules.append(f"{name}: {regex}")
        return name

    def _value(self, schema: Any, where: str) -> str:
        """A rule of one value."""
        if schema is True:
            return "any"
        if not isinstance(schema, Mapping):
            raise UsageError(f"{where} is no schema that a value can satisfy: {_dumped(schema)[:100]}")
        asked = set(schema) - _ANNOTATIONS
        if unknown := sorted(map(str, asked - _KNOWN)):
            raise UsageError(f"{where}: {', '.join(unknown)} cannot be enforced in the arguments of a call",
                             hint=f"what can be: {', '.join(sorted(_KNOWN))}")  # fmt: skip
        if not asked:
            return "any"
        if "$ref" in asked:
            return self._ref(schema, where)
        if used := asked & {"anyOf", "oneOf", "allOf"}:
            return self._one_of(schema, used.pop(), where)
        kinds = self._types(schema, where)
        if "enum" in asked or "const" in asked:
            allowed = [schema["const"]] if "const" in asked else schema["enum"]
            if not isinstance(allowed, list) or not allowed:
                raise UsageError(f"{where}.enum is no list of at least one value")
            if beside := sorted(asked - {"enum", "const", "type", "nullable"}):
                raise UsageError(f"{where}: {', '.join(beside)} beside enum cannot be enforced in a call's arguments")
            typed = [v for v in allowed if not kinds or any(_is_a(v, kind) for kind in kinds)]
            if not typed:
                raise UsageError(f"{where}: no value of enum is of type {schema['type']}")
            return self._rule(" | ".join(self._constant(value, where) for value in typed))
        if not kinds:
            return "any"
        return self._rule(" | ".join(self._typed(kind, schema, where) for kind in kinds))

    def _types(self, schema: Mapping[str, Any], where: str) -> list[str]:
        """The types that `schema` names or has keywords of, none for any."""
        kinds = schema.get("type")
        if kinds is None:
            kinds = [k for k in ("object", "array", "string", "number") if set(schema) & _OF_TYPE[k]]
            if len(kinds) > 1:
                raise UsageError(f"{where}: keywords of {' and of '.join(kinds)}, and no type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _OF_TYPE for kind in kinds):
            raise UsageError(f"{where}.type is none of {', '.join(_OF_TYPE)}: {_dumped(kinds)[:100]}")
        return [*kinds, "null"] if schema.get("nullable") is True and kinds and "null" not in kinds else kinds

    def _typed(self, kind: str, schema: Mapping[str, Any], where: str) -> str:
        if kind == "null":
            return '"null"'
        if kind == "boolean":
            return '"true" | "false"'
        if kind == "string":
            return self._string(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "object":
            return self._object(schema, where)
        if not (bounds := {key: schema[key] for key in sorted(_OF_NUMBERS & set(schema))}):
            return "INTEGER" if kind == "integer" else "NUMBER"
        if not all(_is_a(bound, "number") for bound in bounds.values()):
            raise UsageError(f"{where}: {_dumped(bounds)}: bounds are numbers")
        return f"%json {_dumped({'type': kind, **bounds, 'x-guidance': {'whitespace_flexible': False}})}"

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        regexes = []
        if "minLength" in schema or "maxLength" in schema:
            least, most = _bounds(schema, "minLength", "maxLength", where)
            regexes.append(f"(?s:.{{{least},{'' if most is None else most}}})")
        if "pattern" in schema:
            regexes.append(_regex(schema["pattern"]))
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
                raise UsageError(f"{where}: format {schema['format']!r} cannot be enforced in a call's arguments",
                                 hint=f"what can be: {', '.join(_FORMATS)}")  # fmt: skip
            regexes.append(_regex(_FORMATS[schema["format"]], from_end_to_end=True))
        if not regexes:
            return "text"
        return f"{self._quote} {self._terminal(' & '.join(f'/{regex}/' for regex in regexes))} {self._quote}"

    def _array(self, schema: Mapping[str, Any], where: str) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", where)
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise UsageError(f"{where}.prefixItems is no list")
        prefix = [self._value(item, f"{where}.prefixItems[{n}]") for n, item in enumerate(first)]
        if most is not None:
            prefix = prefix[:most]
        rest = schema.get("items", True)
        if rest is False or most == len(prefix):
            most = len(prefix)
        if least > (len(prefix) if rest is False else least if most is None else most):
            raise UsageError(f"{where}: no array has as many as {least} items")
        more = ""  # what may follow the first n items, from the last n on
        if most is None or most > len(prefix):
            item = self._value(rest, f"{where}.items")
            low, high = max(least - len(prefix), 0), None if most is None else most - len(prefix)
            if prefix:
                more = _times(f'"," {item}', low, high)
            else:
                others = _times(f'"," {item}', max(low - 1, 0), None if high is None else high - 1)
                more = f"{item} {others}" if low else f"({item} {others})?"
        for n in reversed(range(len(prefix))):
            comma = '"," ' if n else ""
            more = f"{comma}{prefix[n]} {self._rule(more) if more else ''}"
            more = more if n < least else f"({more})?"
        return f'"[" {more} "]"'

    def _object(self, schema: Mapping[str, Any], where: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not _is_texts(required):
            raise UsageError(f"{where}: properties are an object, required is a list of names")
        # Members that no property names are only written where the schema speaks of them, or of no member.
        others = schema.get("additionalProperties", "properties" not in schema)
        members = dict(properties) | {name: others for name in required if name not in properties}
        rest = ""
        if others is not False:
            bare = "|".join(re.escape(name) for name in members if re.fullmatch(_BARE, name))
            key = self._terminal(f"/{_BARE}:/ & ~/({_llguidance().regex_to_lark(bare)}):/") if bare else "KEY"
            rest = self._rule(f"{key} {self._value(others, f'{where}.additionalProperties')}")
        # two rules for each member: what follows where members stand before it, and where it would be the first
        behind, first = (f'("," {rest})*', f'({rest} ("," {rest})*)?') if rest else ("", "")
        for name in sorted(members, key=str.lower, reverse=True):
            member = f"{self._key(name)} {self._value(members[name], f'{where}.{name}')}"
            follows = self._rule(behind or '""')
            skipped = self._rule(first or '""')
            behind = f'"," {member} {follows}' + ("" if name in required else f" | {follows}")
            first = f"{member} {follows}" + ("" if name in required else f" | {skipped}")
        return f'"{{" {self._rule(first) if first else ""} "}}"'

    def _key(self, name: str) -> str:
        if re.fullmatch(_BARE, name):
            return _literal(name + ":")
        return f"{self._quote} {_literal(name)} {self._quote} {_literal(':')}"

    def _ref(self, schema: Mapping[str, Any], where: str) -> str:
        if beside := sorted(set(schema) - _ANNOTATIONS - {"$ref"}):
            raise UsageError(f"{where}: {', '.join(beside)} beside $ref cannot be enforced in a call's arguments")
        ref = schema["$ref"]
        target, path = self._followed(schema, where)
        if ref not in self._refs:
            self._refs[ref] = f"{self._prefix}ref{len(self._refs)}"
            self._pending.append((self._refs[ref], target, path))
        return self._refs[ref]

    def _followed(self, schema: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
        """What `schema` refers to, itself where it does not, and where that is."""
        seen: list[Any] = []
        while isinstance(schema, Mapping) and "$ref" in schema:
            ref = schema["$ref"]
            found = referred(self._root, ref) if isinstance(ref, str) and ref not in seen else None
            if found is None:
                raise UsageError(f"{where}: $ref {_dumped(ref)[:100]} leads nowhere in the same schema")
            seen.append(ref)
            schema, where = found, f"{where} ({ref})"
        return schema, where

    def _one_of(self, schema: Mapping[str, Any], keyword: str, where: str) -> str:
        """anyOf, oneOf (taken as it), or an allOf of one."""
        parts = schema[keyword]
        beside = sorted(set(schema) - _ANNOTATIONS - {keyword, "nullable"})
        if not isinstance(parts, list) or not parts:
            raise UsageError(f"{where}.{keyword} is no list of at least one schema")
        if beside or (keyword == "allOf" and len(parts) > 1):
            named = f"{', '.join(beside)} beside {keyword}" if beside else "allOf of several schemas"
            raise UsageError(f"{where}: {named} cannot be enforced in the arguments of a call")
        rules = [self._value(part, f"{where}.{keyword}[{n}]") for n, part in enumerate(parts)]
        return self._rule(" | ".join([*rules, *(['"null"'] if schema.get("nullable") is True else [])]))

    def _constant(self, value: Any, where: str) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_literal(value)} {self._quote}"
        if isinstance(value, list):
            items = ' "," '.join(self._constant(item, where) for item in value)
            return f'"[" {items} "]"'
        if isinstance(value, Mapping):
            members = [f"{self._key(k)} {self._constant(value[k], where)}" for k in sorted(value, key=str.lower)]
            return '"{" ' + ' "," '.join(members) + ' "}"'
        return _literal(_dumped(value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def _is_a(value: Any, kind: str) -> bool:
    kinds: dict[str, Callable[[Any], bool]] = {
        "string": lambda v: isinstance(v, str),
        "boolean": lambda v: isinstance(v, bool),
        "null": lambda v: v is None,
        "array": lambda v: isinstance(v, list),
        "object": lambda v: isinstance(v, Mapping),
        "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        "integer": lambda v: isinstance(v, int | float) and not isinstance(v, bool) and float(v).is_integer(),
    }
    return kinds[kind](value)


def _bounds(schema: Mapping[str, Any], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, bound in ((low, least), (high, most)):
        if name in schema and (not isinstance(bound, int) or isinstance(bound, bool) or not 0 <= bound <= 10**6):
            raise UsageError(f"{where}.{name} is {_dumped(bound)}, not a number from 0 to 1,000,000")
    if most is not None and most < least:
        raise UsageError(f"{where}: {low} {least} is more than {high} {most}")
    return least, most


def _times(body: str, low: int, high: int | None) -> str:
    """`body` from `low` to `high` times; Lark has no {0,0}."""
    return "" if high == 0 else f"({body}){{{low},{'' if high is None else high}}}"


def _regex(pattern: str, *, from_end_to_end: bool = False) -> str:
    """`pattern` between Lark's slashes: found anywhere, as in JSON Schema, where ^ and $ do not hold it.

    llguidance matches from end to end and knows neither, so they are taken off each alternative.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise UsageError(f"a regular expression is a text of at most {MAX_PATTERN_CHARS:,} characters")
    anything = "" if from_end_to_end else "(?s:.*)"
    branches = []
    for branch in _alternatives(pattern):
        start = "" if branch.startswith("^") else anything
        before = branch[:-1]
        is_end = branch.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0
        inner = branch.removeprefix("^")
        branches.append(f"{start}({inner[:-1] if is_end else inner}){'' if is_end else anything}")
    return str(_llguidance().regex_to_lark("|".join(branches), "dw"))


def _alternatives(pattern: str) -> list[str]:
    """The parts of `pattern` between its outermost |."""
    parts, depth, in_class, at, begun = [], 0, False, 0, 0
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            at += 1
        elif in_class:
            in_class = c != "]" or pattern[at - 1] == "[" or pattern[at - 2 : at] == "[^"
        elif c == "[":
            in_class = True
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0:
            parts.append(pattern[begun:at])
            begun = at + 1
        at += 1
    return [*parts, pattern[begun:]]


def _require_small(schema: Any) -> None:
    """Raises UsageError for a schema that is nested too deep, or has too long a regular expression."""
    level = [schema]
    for _ in range(MAX_NESTED):
        for value in level:
            if isinstance(value, Mapping) and len(str(value.get("pattern", ""))) > MAX_PATTERN_CHARS:
                raise UsageError(f"a pattern has at most {MAX_PATTERN_CHARS:,} characters")
            if isinstance(value, Mapping) and any(len(str(key)) > MAX_PATTERN_CHARS for key in value):
                raise UsageError(f"a name has at most {MAX_PATTERN_CHARS:,} characters")
        parts = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list)]
        level = [part for whole in parts for part in whole]
    if level:
        raise UsageError(f"the schema is nested deeper than {MAX_NESTED}")


def _literal(text: str) -> str:
    """`text` as Lark writes it."""
    return _dumped(text)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"a schema must be what JSON can hold: {e}") from None
