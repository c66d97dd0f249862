"""The grammar of Gemma-4's tool calls: from a function's JSON schema to the format that call_arguments.py reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.serve.lark import (
    MAX_GRAMMAR_CHARS,
    Grammar,
    dumped,
    is_regex,
    is_texts,
    literal,
    llguidance_library,
    regex,
    require_enforced,
)
from kerngen.runtime.serve.schema import (
    ANNOTATIONS,
    MAX_MEMBERS,
    MAX_NESTED,
    SCHEMA_KEYWORDS,
    known_keywords,
    modern,
    referred,
    require_small,
    without,
)


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    tokens: tuple[int, int, int],
    *,
    name: str | None = None,
    is_required: bool = True,
    is_parallel: bool = True,
    in_place_of: Grammar | None = None,
) -> Grammar:
    """Of calls of `tools` (OpenAI's, as template_tools takes them) in Gemma-4's syntax; of `name` alone if it is given.

    tokens: TextCodec.call_ids. is_parallel: more than one may be made. is_required: nothing but calls is said; else
    text may stand before them, and there may be none. in_place_of: another grammar, which binds the content; calls
    may be made instead. Where calls are required, and of a `strict` function, arguments are what its `parameters` allow
    as far as that can be enforced; else they are any.
    Raises UsageError for a name that is not among the tools, for what is no schema or allows nothing, and for a strict
    function whose schema cannot be enforced.
    """
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise UsageError("there are no tools to call" if name is None else f"there is no tool named {name}")
    first, last, quote = tokens
    rules = ["calls: call+" if is_parallel else "calls: call"]
    calls: list[str] = []
    num_chars = 0
    not_enforced: list[str] = list(in_place_of.not_enforced) if in_place_of else []
    for at, function in enumerate(chosen):
        if not re.fullmatch(r"[A-Za-z0-9_.:/-]{1,128}", function["name"]):
            raise UsageError(f"{function['name']!r} is no name of a function: letters, digits, _ and - are")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        whole = "object"
        is_strict = function.get("strict") is True
        if is_strict or (is_required and in_place_of is None):
            arguments = _Arguments(parameters, f"tool {function['name']}: parameters", f"t{at}_", quote)
            if is_strict:
                require_enforced(arguments.not_enforced)
            whole, rules = arguments.whole, rules + arguments.rules
            num_chars += sum(map(len, arguments.rules))
            if num_chars > MAX_GRAMMAR_CHARS:
                raise UsageError(f"the grammar of the tools' calls has more than {MAX_GRAMMAR_CHARS:,} characters")
            not_enforced += arguments.not_enforced
        calls.append(f"<[{first}]> {literal('call:' + function['name'])} {whole} <[{last}]>")
    rules += ["call: " + "\n  | ".join(calls), *_shared(quote)]
    if in_place_of is not None:
        rules.append(f"body: said | calls\nsaid:{in_place_of.text.removeprefix('body:')}")
    else:
        rules.append("body: calls" if is_required else "body: SAID calls?\nSAID: /(?s:.*)/")
    return Grammar("\n".join(rules) + "\n", tuple(dict.fromkeys(not_enforced)))


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


_BARE = r"""[^\s:,{}\[\]"<>|'][^\s:,{}\[\]"<>|]*"""  # of a key: what call_arguments.py reads as one
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
_KNOWN = SCHEMA_KEYWORDS | {"type", "nullable", "enum", "const"} | set().union(*_OF_TYPE.values())
# Of two such bounds the higher and the lower one hold.
_HIGHER = {"minimum", "exclusiveMinimum", "minLength", "minItems"}
_LOWER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems"}
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


class _Unsatisfiable(UsageError):
    """No value can be what a schema asks for."""


class _Arguments:
    """The grammar of one function's arguments: `whole` is what follows its name, `rules` is what that needs,
    `not_enforced` what the schema asks for beyond it.

    where: for errors. prefix: of the rules' names. Members come in the order in which the template writes them, sorted.
    """

    def __init__(self, schema: Mapping[str, Any], where: str, prefix: str, quote: int) -> None:
        self._root, self._prefix, self._quote = schema, prefix, f"<[{quote}]>"
        self.rules: list[str] = []
        self.not_enforced: list[str] = []
        self._num_parts = self._num_chars = self._depth = 0
        self._refs: dict[str, str] = {}  # the rules of what is referred to
        self._pending: list[tuple[str, Any, str]] = []  # those that are yet to be made
        require_small(schema)
        schema, where = self._followed(schema, where)
        kinds = schema.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise UsageError(f"{where}: the arguments of a function are an object")
        whole = {key: value for key, value in schema.items() if key != "nullable"} | {"type": "object"}
        self.whole = self._value(whole, where)
        while self._pending:
            name, target, where = self._pending.pop()
            self._add(f"{name}: {self._value(target, where)}")

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self.rules)}"
        self._add(f"{name}: {body}")
        return name

    def _terminal(self, regex: str) -> str:
        name = f"{self._prefix.upper()}{len(self.rules)}"
        self._add(f"{name}: {regex}")
        return name

    def _add(self, rule: str) -> None:
        self._num_chars += len(rule)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise UsageError(f"the grammar of a call has more than {MAX_GRAMMAR_CHARS:,} characters")
        self.rules.append(rule)

    def _count(self, num_parts: int, where: str) -> None:
        """What is joined, or referred to, counts each time: small schemas can ask for very many."""
        self._num_parts += num_parts
        if self._num_parts > MAX_MEMBERS or self._depth > MAX_NESTED:
            raise UsageError(f"{where}: with what it refers to the schema has more than {MAX_MEMBERS:,} parts, or is "
                             f"nested deeper than {MAX_NESTED}")  # fmt: skip

    def _leave_out(self, where: str, keywords: Iterable[str]) -> None:
        self.not_enforced += [f"{where}: {keyword}" for keyword in keywords]

    def _value(self, schema: Any, where: str) -> str:
        """The rule of what `schema` allows, as far as it can be enforced."""
        if schema is True:
            return "any"
        if not isinstance(schema, Mapping):
            raise _Unsatisfiable(f"{where} is no schema that a value can satisfy: {dumped(schema)[:100]}")
        self._depth += 1
        self._count(1 + len(schema), where)
        found, unknown = known_keywords(modern(schema), _KNOWN)
        self._leave_out(where, unknown)
        rule = self._known_value(found, where)
        self._depth -= 1
        return rule

    def _known_value(self, schema: dict[str, Any], where: str) -> str:
        """As `_value`, of known keywords alone."""
        if not schema:
            return "any"
        if schema.get("nullable") is True and SCHEMA_KEYWORDS & set(schema):
            return self._rule(f'{self._value(without(schema, "nullable"), where)} | "null"')
        if list(schema) == ["$ref"]:
            return self._ref(schema, where)
        if "$ref" in schema or "allOf" in schema:
            parts = _schemas(schema, "allOf", where) if "allOf" in schema else []
            rest = without(schema, "allOf")
            if not rest and len(parts) == 1:
                return self._value(parts[0], f"{where}.allOf[0]")
            return self._value(self._joined([rest, *parts], where), where)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._one_of(schema, keyword, where)
        kinds = self._types(schema, where)
        if "enum" in schema or "const" in schema:
            allowed = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(allowed, list) or not allowed:
                raise UsageError(f"{where}.enum is no list of at least one value")
            typed = [v for v in allowed if "type" not in schema or any(_is_a(v, kind) for kind in kinds)]
            if not typed:
                raise _Unsatisfiable(f"{where}: no value of enum is of type {schema['type']}")
            beside = sorted(set(schema) - {"enum", "const", "type", "nullable"})
            self._leave_out(where, [f"{keyword} beside enum" for keyword in beside])
            return self._rule(" | ".join(self._constant(value, where) for value in typed))
        if not kinds:
            return "any"
        return self._rule(" | ".join(self._typed(kind, schema, where) for kind in kinds))

    def _types(self, schema: Mapping[str, Any], where: str) -> list[str]:
        """The types that `schema` names or has keywords of, none for any."""
        kinds = schema.get("type")
        if kinds is None:
            kinds = [k for k in ("object", "array", "string", "number") if set(schema) & _OF_TYPE[k]]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in _OF_TYPE for kind in kinds):
            raise UsageError(f"{where}.type is none of {', '.join(_OF_TYPE)}: {dumped(kinds)[:100]}")
        return [*kinds, "null"] if schema.get("nullable") is True and kinds and "null" not in kinds else kinds

    def _joined(self, schemas: Sequence[Any], where: str) -> dict[str, Any]:
        """One schema that asks for what all of `schemas` do, as far as their keywords can be joined."""
        found: dict[str, Any] = {}
        left = list(schemas)
        while left:
            part = left.pop(0)
            if part is True:
                continue
            if not isinstance(part, Mapping):
                raise _Unsatisfiable(f"{where} is no schema that a value can satisfy: {dumped(part)[:100]}")
            self._count(1 + len(part), where)
            if "$ref" in part:
                left[:0] = [without(part, "$ref"), self._followed({"$ref": part["$ref"]}, where)[0]]
                continue
            for key, value in part.items():
                found[key] = self._both(key, found[key], value, where) if key in found else value
        return found

    def _both(self, keyword: str, one: Any, other: Any, where: str) -> Any:
        """What `keyword` must be for both of its values to hold; the first where that cannot be said."""
        if one is other or keyword in ANNOTATIONS:
            return one
        numbers = _is_a(one, "number") and _is_a(other, "number")
        if numbers and keyword in _HIGHER | _LOWER:
            return max(one, other) if keyword in _HIGHER else min(one, other)
        if isinstance(one, str | bool | int | float | None) and one == other:
            return one
        if keyword == "type":
            kinds, others = ([kind] if isinstance(kind, str) else kind for kind in (one, other))
            if not isinstance(kinds, list) or not isinstance(others, list):
                raise UsageError(f"{where}.type is none of {', '.join(_OF_TYPE)}")
            both = [k for k in kinds if k in others or (k == "integer" and "number" in others)]
            both += ["integer"] if "integer" in others and "number" in kinds and "integer" not in both else []
            if not both:
                raise _Unsatisfiable(f"{where}: no value is of type {dumped(one)[:50]} and {dumped(other)[:50]}")
            return both
        if keyword == "properties" and isinstance(one, Mapping) and isinstance(other, Mapping):
            self._count(len(one) + len(other), where)
            return {**one, **{n: {"allOf": [one[n], value]} if n in one else value for n, value in other.items()}}
        if keyword in ("required", "allOf", "enum") and isinstance(one, list) and isinstance(other, list):
            self._count(len(one) + len(other), where)
            if keyword != "enum":
                return [*one, *other]
            allowed = {dumped(value) for value in other}
            if not (both := [value for value in one if dumped(value) in allowed]):
                raise _Unsatisfiable(f"{where}: enum allows nothing")
            return both
        if keyword == "additionalProperties" and (isinstance(one, bool) or isinstance(other, bool)):
            return other if one is True else one if other is True else False
        self._leave_out(where, [f"a second {keyword}"])
        return one

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
            raise UsageError(f"{where}: {dumped(bounds)}: bounds are numbers")
        return f"%json {dumped({'type': kind, **bounds, 'x-guidance': {'whitespace_flexible': False}})}"

    def _string(self, schema: Mapping[str, Any], where: str) -> str:
        regexes = []
        if "minLength" in schema or "maxLength" in schema:
            least, most = _bounds(schema, "minLength", "maxLength", where)
            regexes.append(f"(?s:.{{{least},{'' if most is None else most}}})")
        if "pattern" in schema:
            if is_regex(pattern := regex(schema["pattern"])):
                regexes.append(pattern)
            else:
                self._leave_out(where, ["pattern"])
        if "format" in schema:
            if isinstance(schema["format"], str) and schema["format"] in _FORMATS:
                regexes.append(regex(_FORMATS[schema["format"]], from_end_to_end=True))
            else:
                self._leave_out(where, [f"format {dumped(schema['format'])[:50]}"])
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
        if not isinstance(properties, Mapping) or not is_texts(required):
            raise UsageError(f"{where}: properties are an object, required is a list of names")
        # Members that no property names are only written where the schema speaks of them, or of no member.
        others = schema.get("additionalProperties", "properties" not in schema)
        members = dict(properties) | {name: others for name in required if name not in properties}
        rest = ""
        if others is not False:
            bare = "|".join(re.escape(name) for name in members if re.fullmatch(_BARE, name))
            key = self._terminal(f"/{_BARE}:/ & ~/({llguidance_library().regex_to_lark(bare)}):/") if bare else "KEY"
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
            return literal(name + ":")
        return f"{self._quote} {literal(name)} {self._quote} {literal(':')}"

    def _ref(self, schema: Mapping[str, Any], where: str) -> str:
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
                raise UsageError(f"{where}: $ref {dumped(ref)[:100]} leads nowhere in the same schema")
            seen.append(ref)
            schema, where = found, f"{where} ({ref})"
        return schema, where

    def _one_of(self, schema: Mapping[str, Any], keyword: str, where: str) -> str:
        """anyOf, or oneOf, which is taken as it; what stands beside it holds in each of its schemas."""
        rest = without(schema, keyword)
        rules = []
        for n, part in enumerate(_schemas(schema, keyword, where)):
            at, depth = f"{where}.{keyword}[{n}]", self._depth
            try:
                rules.append(self._value(self._joined([rest, part], at) if rest else part, at))
            except _Unsatisfiable as e:
                self._depth, why = depth, e
        if not rules:
            raise why
        return self._rule(" | ".join(rules))

    def _constant(self, value: Any, where: str) -> str:
        if isinstance(value, str):
            return f"{self._quote} {literal(value)} {self._quote}"
        if isinstance(value, list):
            items = ' "," '.join(self._constant(item, where) for item in value)
            return f'"[" {items} "]"'
        if isinstance(value, Mapping):
            members = [f"{self._key(k)} {self._constant(value[k], where)}" for k in sorted(value, key=str.lower)]
            return '"{" ' + ' "," '.join(members) + ' "}"'
        return literal(dumped(value))


def _schemas(schema: Mapping[str, Any], keyword: str, where: str) -> list[Any]:
    parts = schema[keyword]
    if not isinstance(parts, list) or not parts:
        raise UsageError(f"{where}.{keyword} is no list of at least one schema")
    return parts


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
            raise UsageError(f"{where}.{name} is {dumped(bound)}, not a number from 0 to 1,000,000")
    if most is not None and most < least:
        raise UsageError(f"{where}: {low} {least} is more than {high} {most}")
    return least, most


def _times(body: str, low: int, high: int | None) -> str:
    """`body` from `low` to `high` times; Lark has no {0,0}."""
    return "" if high == 0 else f"({body}){{{low},{'' if high is None else high}}}"
