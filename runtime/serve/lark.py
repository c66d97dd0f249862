"""Parts of grammars as llguidance's Lark has them: texts, JSON, regular expressions."""

from __future__ import annotations

import json
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.text import require_unicode

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_PATTERN_CHARS = 4096  # of a regular expression: compiling takes time with its square, 0.13 s for twice as many


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


def is_regex(text: str) -> bool:
    """Whether llguidance can follow `text`, as `regex` gives it: it cannot look around."""
    return not llguidance_library().LLMatcher.validate_grammar(f"start: /{text}/\n")


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
