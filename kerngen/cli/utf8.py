"""What is said on a command line, as text."""

from __future__ import annotations

from kerngen.errors import UsageError


def require_utf8(what: str, text: str) -> str:
    """`text`, which is called `what`. Python passes bytes that it cannot decode as surrogates. Raises UsageError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(f"{what} is not UTF-8: character {e.start} is {text[e.start]!r}") from None
    return text
