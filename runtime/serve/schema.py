"""JSON schemas: their keywords and references, and how the chat template reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.serve.lark import MAX_PATTERN_CHARS

ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "strict", "contentEncoding", "contentMediaType",
    "contentSchema", "components", "discriminator", "externalDocs", "xml",
}  # fmt: skip
SCHEMA_KEYWORDS = {"$ref", "anyOf", "oneOf", "allOf"}  # whose schemas hold beside what stands with them
_NONE_ALLOWED = {"contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}  # by false
MAX_MEMBERS, MAX_NESTED = 50_000, 100  # of tools' parameters, with what they refer to written out; and how deep


def known_keywords(schema: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """What of `schema` is in `known`, and the names of what else it asks for: annotations, and what is turned off, ask
    for nothing.
    """
    found, unknown = {}, []
    for key, value in schema.items():
        if key in known:
            found[key] = value
        elif key not in ANNOTATIONS | {"nullable"} and not key.startswith("x-"):
            is_off = value is None or (value == 0 and key not in _NONE_ALLOWED)
            unknown += [] if is_off else [key]
    return found, sorted(unknown)


def modern(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` as JSON Schema 2020-12 writes it, where drafts before it, or OpenAPI 3.0, write it otherwise."""
    found = dict(schema)
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)  # which holds only behind a list of items
    if "unevaluatedProperties" in found and not (SCHEMA_KEYWORDS | {"additionalProperties"}) & set(found):
        found["additionalProperties"] = found.pop("unevaluatedProperties")
    return found


def without(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != keyword}


def referred(root: Mapping[str, Any], ref: str) -> Mapping[str, Any] | None:
    """What `ref` names in the same schema, None where there is nothing."""
    if not ref.startswith("#"):
        return None
    found: Any = root
    for part in ref[2:].split("/") if len(ref) > 1 else []:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def require_small(schema: Any) -> None:
    """Raises UsageError for a schema that is nested too deep, or has too long a name or regular expression."""
    level = [schema]
    for _ in range(MAX_NESTED):
        for value in level:
            texts = [*value, value.get("pattern")] if isinstance(value, Mapping) else []
            if any(isinstance(text, str) and len(text) > MAX_PATTERN_CHARS for text in texts):
                raise UsageError(f"a pattern, and a name, have at most {MAX_PATTERN_CHARS:,} characters")
        parts = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list)]
        level = [part for whole in parts for part in whole]
    if level:
        raise UsageError(f"the schema is nested deeper than {MAX_NESTED}")


@dataclass(slots=True)
class Parts:
    """Of schemas, those of all tools of a request, written out: how many more there may be."""

    num_left: int = MAX_MEMBERS


def written_out(schema: Mapping[str, Any], where: str, parts: Parts) -> dict[str, Any]:
    """`schema` as Gemma-4's template can tell it to the model.

    It reads type, enum, properties, items, required and nullable, and says nothing of the rest: so $ref is written out
    (an object, where it leads back), const becomes enum, and what may be null besides one type is nullable. Raises
    UsageError, which names `where`, for a schema that is too large then: it takes from `parts`.
    """
    told = _WrittenOut(schema, where, parts).schema
    return {key: value for key, value in told.items() if key not in ("$defs", "definitions")}


class _WrittenOut:
    def __init__(self, root: Mapping[str, Any], where: str, parts: Parts) -> None:
        self._root, self._where, self._parts = root, where, parts
        self.schema = self._of(root, ())

    def _of(self, schema: Any, within: tuple[str, ...]) -> Any:
        """`schema`, which may be none. within: what was referred to on the way to it."""
        if not isinstance(schema, Mapping):
            return schema
        self._parts.num_left -= 1 + len(schema)
        if self._parts.num_left < 0 or len(within) > MAX_NESTED:
            raise UsageError(f"{self._where}: the schemas of all tools, written out, have more than {MAX_MEMBERS:,} "
                             f"parts, or this one is nested deeper than {MAX_NESTED}")  # fmt: skip
        ref = schema.get("$ref")
        if isinstance(ref, str):
            target = None if ref in within else referred(self._root, ref)
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self._of({**(target or {"type": "object"}), **rest}, (*within, ref))
        said = dict(schema)
        for keyword in ("allOf", "anyOf", "oneOf"):
            parts = said.get(keyword)
            if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
                continue
            some = [part for part in parts if part.get("type") != "null"]
            if len(some) == 1:
                del said[keyword]
                null = {"nullable": True} if len(some) < len(parts) else {}
                return self._of({**some[0], **said, **null}, (*within, ""))
        kinds = said.get("type")
        if isinstance(kinds, list) and "null" in kinds and len(kinds) == 2:
            said |= {"type": next(kind for kind in kinds if kind != "null"), "nullable": True}
        if "const" in said:
            said["enum"] = [said.pop("const")]
        if isinstance(said.get("enum"), list) and "type" not in said and all(isinstance(v, str) for v in said["enum"]):
            said["type"] = "string"
        deeper = (*within, "")
        if isinstance(said.get("properties"), Mapping):
            said["properties"] = {name: self._of(part, deeper) for name, part in said["properties"].items()}
        for key in ("items", "additionalProperties"):
            if key in said:
                said[key] = self._of(said[key], deeper)
        return said
