"""Values and lines in results and prediction files: how each is written and read.

There is one way to write each: what was read is written again to the letter, or was not well written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kerngen.errors import DatabaseError

SOURCE_DIGITS = 12  # of a source's SHA-256, in hex
NAME = re.compile(r"[A-Za-z_]\w*")
SHOWN = re.compile(r"\S+")
SOURCE = re.compile(rf"[0-9a-f]{{{SOURCE_DIGITS}}}")
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOT_BARE = {"true", "false", "null", "NaN", "Infinity"}
_NUMBER = re.compile(r"-?(inf|nan|\d+(\.\d+)?(e[-+]?\d+)?)")
_WHOLE = re.compile(r"-?\d{1,18}")
_DECODER = json.JSONDecoder()


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def pairs(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name}={word(value)}" for name, value in sorted(fields.items())]


def stated(static: Mapping[str, Any], runtime: Mapping[str, Any], dynamic: str, at: Any) -> dict[str, Any]:
    """The fields of a problem, by its place in a text. at: of its dynamic field, None where it has none."""
    return {**static, **runtime} | ({} if at is None else {dynamic: at})


def word(value: Any) -> str:
    """JSON, where a plain word needs no quotes."""
    if isinstance(value, str) and _BARE.fullmatch(value) and value not in _NOT_BARE:
        return value
    return as_json(value)


def number(value: float | None) -> str:
    return repr(float(value)).removesuffix(".0") if value is not None else "none"


def rounded(value: float | None) -> float | None:
    """As sheets have figures: five digits, which is finer than any timing."""
    return None if value is None else float(f"{value:.5g}")


def read_lines(text: str, where: str, take: Callable[[int, str], None]) -> None:
    """Have `take` read each line, which it is given with its number. Raises DatabaseError, naming the line, for what it
    does not take.
    """
    for at, line in enumerate(text.split("\n"), 1):
        try:
            take(at, line)
        except (ValueError, TypeError, RecursionError, OverflowError) as e:
            raise DatabaseError(f"{where}, line {at}: {e}") from e


def require_as_written(text: str, again: str, where: str) -> None:
    """Raises DatabaseError, naming the line, where `text` is not `again`, which says the same as it is written."""
    for at, (given, wanted) in enumerate(zip(text.split("\n"), again.split("\n"), strict=False), 1):
        if given != wanted:
            raise DatabaseError(f"{where}, line {at} is not as it is written", hint=f"it should be: {wanted}")
    if again != text:
        raise DatabaseError(f"{where} does not end where it should")


class Line:
    """A line that is read from left to right. Everything it raises is a ValueError in words."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, literal: str) -> bool:
        """True, and behind it, if this comes next."""
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise ValueError(f"{literal.strip()!r} is missing at {self.text[self.at : self.at + 20]!r}")

    def word(self, pattern: re.Pattern[str], what: str) -> str:
        if (found := pattern.match(self.text, self.at)) is None:
            raise ValueError(f"{what} is missing at {self.text[self.at : self.at + 20]!r}")
        self.at = found.end()
        return found.group()

    def json(self) -> Any:
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value

    def value(self) -> Any:
        found = _BARE.match(self.text, self.at)
        if found is None or found.group() in _NOT_BARE:
            return self.json()
        self.at = found.end()
        return found.group()

    def text_value(self, what: str, *, after: str = "") -> str:
        """A value that is text, behind `after`. what: it names, for messages."""
        if after:
            self.expect(after)
        if not isinstance(name := self.value(), str):
            raise ValueError(f"{name!r:.40} does not name {what}")
        return name

    def number(self) -> float:
        return float(self.word(_NUMBER, "a number"))

    def whole(self) -> int:
        return int(self.word(_WHOLE, "a whole number"))

    def pairs(self, until: str) -> dict[str, Any]:
        """name=value, each followed by a space, up to what begins with `until`; "", to the line's end."""
        found: dict[str, Any] = {}
        while self.at < len(self.text) and not (until and self.text.startswith(until, self.at)):
            name = self.word(NAME, "a field")
            self.expect("=")
            if name in found:
                raise ValueError(f"{name} is said twice")
            found[name] = self.value()
            if self.at < len(self.text):
                self.expect(" ")
        return found

    def end(self) -> None:
        if self.at != len(self.text):
            raise ValueError(f"{self.text[self.at :]!r} is too much")


def as_object(value: Any) -> dict[str, Any]:
    """`value`, if it is a JSON object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is no JSON object")
    return value
