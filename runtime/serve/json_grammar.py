"""The grammar of JSON text by a schema: what llguidance can enforce of it, and what it cannot by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.serve.lark import MAX_GRAMMAR_CHARS, Grammar, dumped, is_json_pattern, is_texts
from kerngen.runtime.serve.schema import SCHEMA_KEYWORDS, known_keywords, modern, referred, require_small

# Between the parts of JSON: with more a weak model fills each gap up to the bound. Outlines has the same.
_WHITESPACE = r" "
_SIZES = ("minProperties", "maxProperties")
# What llguidance 1.9 enforces; it ignores or refuses the others.
_ENFORCED = SCHEMA_KEYWORDS | {
    "type", "enum", "const", "minLength", "maxLength", "pattern", "format", "items", "prefixItems", "minItems",
    "maxItems", "properties", "required", "additionalProperties", "patternProperties", *_SIZES, "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_FORMATS = {"date", "time", "date-time", "duration", "uuid", "email", "hostname", "ipv4", "ipv6", "uri"}


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> Grammar:
    """Of JSON text that `schema`, JSON Schema 2020-12, allows, as far as llguidance can enforce it; of any JSON object
    without one.

    Members come in the order of `properties`; oneOf is taken as anyOf; nullable is OpenAPI's. Annotations say nothing
    of the text. What cannot be enforced is left out, and named: "schema.tags: uniqueItems". Raises UsageError for what
    is no schema, or is too large.
    """
    if schema is None:
        schema = {"type": "object"}
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        raise UsageError(f"a JSON schema is an object, not {json.dumps(schema, default=repr)}")
    require_small(schema)
    if (size := len(dumped(schema))) > MAX_GRAMMAR_CHARS:
        raise UsageError(f"the schema has {size:,} characters; {MAX_GRAMMAR_CHARS:,} are allowed")
    found = _Enforceable(schema)
    options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    text = f"body: %json {dumped({**found.schema, 'x-guidance': options})}\n"
    return Grammar(text, tuple(dict.fromkeys(found.not_enforced)))


class _Enforceable:
    """`schema` is what can be enforced of `root`; what it refers to is in its $defs. not_enforced: the rest."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.not_enforced: list[str] = []
        self._names: dict[tuple[str, bool], str] = {}  # in $defs, of what is referred to
        self._pending: list[tuple[str, Any, str, bool]] = []  # what is yet to be put there
        self.schema: dict[str, Any] = self._of(root, "schema")
        definitions: dict[str, Any] = {}
        while self._pending:
            name, target, where, is_joined = self._pending.pop()
            definitions[name] = self._of(target, where, is_joined=is_joined)
        if definitions:
            self.schema["$defs"] = definitions

    def _leave_out(self, where: str, keywords: Iterable[str]) -> None:
        self.not_enforced += [f"{where}: {keyword}" for keyword in keywords]

    def _of(self, schema: Any, where: str, *, is_joined: bool = False) -> Any:
        """is_joined: other schemas hold beside this one."""
        if not isinstance(schema, Mapping):
            return schema  # true, false, or none: llguidance says which
        found, unknown = known_keywords(modern(schema), _ENFORCED)
        self._leave_out(where, unknown)
        if found.get("minProperties") == 0:
            del found["minProperties"]
        is_joined = is_joined or (len(found) > 1 and bool(SCHEMA_KEYWORDS & set(found))) or "allOf" in found
        self._leave_out_sizes(found, where, is_joined=is_joined)
        self._leave_out_texts(found, where)
        for key in ("properties", "patternProperties"):
            if isinstance(parts := found.get(key), Mapping):
                found[key] = {name: self._of(part, f"{where}.{name}") for name, part in parts.items()}
        for key in ("additionalProperties", "items"):
            if key in found:
                found[key] = self._of(found[key], f"{where}.{key}")
        for key in ("prefixItems", "anyOf", "oneOf", "allOf"):
            if isinstance(parts := found.get(key), list):
                beside = is_joined and key != "prefixItems"
                found[key] = [self._of(part, f"{where}.{key}[{n}]", is_joined=beside) for n, part in enumerate(parts)]
        if "$ref" in found:
            found["$ref"] = self._ref(found["$ref"], where, is_joined=is_joined)
        return _or_null(found) if schema.get("nullable") is True else found

    def _leave_out_sizes(self, schema: dict[str, Any], where: str, *, is_joined: bool) -> None:
        """llguidance counts members only where all that have names must be there."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_counted = not is_joined and isinstance(properties, Mapping) and is_texts(required) and (
            set(properties) <= set(required))  # fmt: skip
        for key in () if is_counted else _SIZES:
            if schema.pop(key, None) is not None:
                self._leave_out(where, [key])

    def _leave_out_texts(self, schema: dict[str, Any], where: str) -> None:
        """Formats that llguidance does not know, and patterns that it cannot follow."""
        if "format" in schema and not (isinstance(schema["format"], str) and schema["format"] in _FORMATS):
            kinds, told = schema.get("type", "string"), schema.pop("format")
            if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
                self._leave_out(where, [f"format {dumped(told)[:50]}"])
        if "pattern" in schema:
            if not isinstance(pattern := schema["pattern"], str):
                raise UsageError(f"{where}.pattern is {dumped(pattern)[:100]}, and not a regular expression")
            if not is_json_pattern(pattern):
                del schema["pattern"]
                self._leave_out(where, ["pattern"])
        if isinstance(patterns := schema.get("patternProperties"), Mapping):
            schema["patternProperties"] = {p: part for p, part in patterns.items() if is_json_pattern(p)}
            if len(schema["patternProperties"]) < len(patterns):
                self._leave_out(where, ["patternProperties"])

    def _ref(self, ref: Any, where: str, *, is_joined: bool) -> str:
        target = referred(self._root, ref) if isinstance(ref, str) else None
        if target is None:
            raise UsageError(f"{where}: $ref {dumped(ref)[:100]} leads nowhere in the same schema")
        if target is self._root and not is_joined:
            return "#"
        if (ref, is_joined) not in self._names:
            name = self._names[ref, is_joined] = str(len(self._names))
            self._pending.append((name, target, f"schema ({ref})", is_joined))
        return f"#/$defs/{self._names[ref, is_joined]}"


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """As OpenAPI 3.0 has nullable: of a type, or of schemas; an enum names null itself. What is no type stays, and is
    refused where types are read.
    """
    if SCHEMA_KEYWORDS & set(schema):
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = [kinds] if isinstance(kinds := schema.get("type", []), str) else kinds
    takes_null = not isinstance(kinds, list) or not kinds or "null" in kinds
    return schema if takes_null else {**schema, "type": [*kinds, "null"]}
