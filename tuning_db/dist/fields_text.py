"""Values and lines of results files: how each is written and read.

There is one way to write each: what was read is written again to the letter, or was not well written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from kerngen.errors import DatabaseError

SOURCE_DIGITS = 12  # of a source's SHA-256, in hex
PREDICTED_DIGITS = 4  # of a predicted winner's time: finer than any prediction
STEP_DIGITS = 7  # of a step's time: a ratio of two that differ by 0.2 % decides
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


def rounded(value: float, digits: int = 5) -> float:
    """As results files have figures. Five digits are finer than any timing."""
    return float(f"{value:.{digits}g}")


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

    def sees(self, *literals: str) -> bool:
        return self.text.startswith(literals, self.at)

    def take(self, literal: str, *, unless: tuple[str, ...] = ()) -> bool:
        """True, and behind it, if this comes next, and none of `unless`."""
        found = self.sees(literal) and not self.sees(*unless)
        self.at += len(literal) if found else 0
        return found

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise self._missing(repr(literal.strip()) if literal.strip() else "a space")

    def _missing(self, what: str) -> ValueError:
        rest = self.text[self.at : self.at + 20]
        return ValueError(f"{what} is missing at {repr(rest) if rest else 'the end'}")

    def end(self) -> None:
        if self.at != len(self.text):
            raise ValueError(f"{self.text[self.at :]!r} is too much")

    # ---- values, each behind the literal `after`

    def word(self, pattern: re.Pattern[str], what: str, *, after: str = "") -> str:
        """What `pattern` matches. what: it names, for messages."""
        self.expect(after)
        if (found := pattern.match(self.text, self.at)) is None:
            raise self._missing(what)
        self.at = found.end()
        return found.group()

    def number(self, *, after: str = "") -> float:
        return float(self.word(_NUMBER, "a number", after=after))

    def above_zero(self, what: str, *, after: str = "") -> float:
        if not 0 < (value := self.number(after=after)) < float("inf"):
            raise ValueError(f"{what} is above zero and finite, not {value}")
        return value

    def whole(self, *, after: str = "") -> int:
        return int(self.word(_WHOLE, "a whole number", after=after))

    def version(self, *, after: str = "") -> tuple[int, int]:
        return self.whole(after=after), self.whole(after=".")

    def json(self, *, after: str = "") -> Any:
        self.expect(after)
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value

    def object(self, *, after: str = "") -> dict[str, Any]:
        if not isinstance(value := self.json(after=after), dict):
            raise ValueError(f"{value!r:.40} is no JSON object")
        return value

    def reason(self) -> str:
        """Of a wrong result."""
        return self.some_text("a wrong result says what was wrong", after=" ")

    def some_text(self, rule: str, *, after: str = "") -> str:
        """A JSON string that is not empty. rule: for messages."""
        if not isinstance(value := self.json(after=after), str) or not value:
            raise ValueError(rule)
        return value

    def value(self) -> Any:
        """JSON, or a plain word."""
        found = _BARE.match(self.text, self.at)
        if found is None or found.group() in _NOT_BARE:
            return self.json()
        self.at = found.end()
        return found.group()

    def text_value(self, what: str, *, after: str = "") -> str:
        self.expect(after)
        if not isinstance(name := self.value(), str):
            raise ValueError(f"{name!r:.40} does not name {what}")
        return name

    def pairs(self, until: str) -> dict[str, Any]:
        """name=value, each followed by a space, up to what begins with `until`; "", to the line's end."""
        found: dict[str, Any] = {}
        while self.at < len(self.text) and not (until and self.sees(until)):
            name = self.word(NAME, "a field")
            self.expect("=")
            if name in found:
                raise ValueError(f"{name} is said twice")
            found[name] = self.value()
            if self.at < len(self.text):
                self.expect(" ")
        return found
