"""Parts of grammars as llguidance's Lark has them: texts, JSON, regular expressions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.text import require_unicode

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_PATTERN_CHARS = 4096  # of a regular expression: compiling takes time with its square, 0.13 s for twice as many


@dataclass(frozen=True, slots=True)
class Grammar:
    """text: the rule `body` and what it needs. not_enforced: what was asked for beyond it, each once, as
    "tool f: parameters.tags: uniqueItems".
    """

    text: str
    not_enforced: tuple[str, ...] = ()


def require_enforced(not_enforced: Sequence[str]) -> None:
    """Raises UsageError where a schema that is strict has what `not_enforced` names."""
    if not_enforced:
        raise UsageError(f"strict: true asks for all of a schema, and this cannot be enforced: "
                         f"{'; '.join(not_enforced)[:1000]}; without strict it is left out, and told")  # fmt: skip


def is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


def llguidance_library() -> Any:
    try:
        import llguidance
    except ImportError as e:
        raise UsageError(f"guided answers need llguidance: {e}", hint="pip install 'kerngen[serve]'") from e
    return llguidance


def regex(pattern: str, *, from_end_to_end: bool = False) -> str:
    """`pattern` between Lark's slashes: found anywhere, as in JSON Schema, where ^ and $ do not hold it.

    llguidance matches from end to end and knows neither, so they are taken off each alternative.
    """
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
        raise UsageError(f"a regular expression is a text of at most {MAX_PATTERN_CHARS:,} characters")
    require_unicode(pattern)
    anything = "" if from_end_to_end else "(?s:.*)"
    branches = []
    for branch in _alternatives(pattern):
        start = "" if branch.startswith("^") else anything
        before = branch[:-1]
        is_end = branch.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0
        inner = branch.removeprefix("^")
        branches.append(f"{start}({inner[:-1] if is_end else inner}){'' if is_end else anything}")
    return str(llguidance_library().regex_to_lark("|".join(branches), "dw"))


@lru_cache(1024)
def is_regex(text: str) -> bool:
    """Whether llguidance can follow `text`, as `regex` gives it: it cannot look around."""
    return _is_grammar(f"start: /{text}/\n")


@lru_cache(1024)
def is_json_pattern(pattern: str) -> bool:
    """Whether llguidance can follow `pattern` in a JSON schema."""
    return _is_grammar(f"start: %json {dumped({'type': 'string', 'pattern': pattern})}\n")


def _is_grammar(text: str) -> bool:
    return not llguidance_library().LLMatcher.validate_grammar(text)


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


def literal(text: str) -> str:
    """`text` as Lark writes it."""
    return dumped(text)


def dumped(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"a schema must be what JSON can hold: {e}") from None
