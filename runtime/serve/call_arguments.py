"""The arguments of Gemma-4's tool calls, to JSON as they come: output_parser.py says what the syntax is."""

from __future__ import annotations

import json
import re

from kerngen.runtime.text import QUOTE

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"None": "null", "True": "true", "False": "false"}  # as Python writes them
_SPACE = " \t\n\r"


class Arguments:
    """Gemma-4's arguments, behind their first brace, to JSON text in pieces; each piece is final.

    Where the syntax is broken the rest is given as it is. No JSON can go on with it there, so the whole is none.
    """

    def __init__(self) -> None:
        self._nested = ["{"]
        self._take = self._start  # what reads the next character
        self._is_key = True  # of what is read: a key, or a value
        self._comma = False  # before what begins next
        self._bare = ""  # a key or a value without the tokens around it, held until it ends
        self._escaped = False  # the next character, in plain quotation marks

    def push(self, text: str) -> str:
        pieces = []
        for at, c in enumerate(text):
            if self._take == self._string:  # up to a token: all of it
                pieces.append(_escaped(text[at:]))
                break
            if self._take == self._raw:
                pieces.append(text[at:])
                break
            pieces.append(self._take(c))
        return "".join(pieces)

    def quote(self) -> str:
        """The token around strings."""
        if self._take == self._start:
            self._take = self._string
            return self._lead() + '"'
        if self._take == self._string:
            self._take = self._colon if self._is_key else self._after
            return '"'
        return self._break(QUOTE)

    @property
    def is_complete(self) -> bool:
        return self._take == self._done

    def close(self) -> str:
        """What the brackets say that are missing where the call's last token stands."""
        said = ""
        if self._take == self._single and not self._is_key:  # an apostrophe, not a quotation mark
            held, self._bare, self._take = self._bare, "", self._word
            said = self.push(held)
        while self._take in (self._start, self._after) or (self._take == self._word and not self._is_key):
            said += self._take(self._closer)
        return said

    def finish(self) -> str:
        """What is held where the call ends; nothing where it is complete."""
        bare, self._bare = self._bare, ""
        return bare

    def _start(self, c: str) -> str:
        """Where a key or a value may begin, or, in its stead, what holds it may end."""
        if c in _SPACE:
            return ""
        if c in "}]" and c == self._closer and self._is_key == (c == "}"):
            return self._end(c)
        if c == "," and self._is_key:
            return ""
        if c in ",}" and self._closer == "}" and not self._is_key:  # a key with nothing
            return self._lead() + '""' + self._after(c)
        if c == "'":
            self._take, self._bare = self._single, c
            return self._lead()
        if c == '"':
            self._take, self._bare = self._plain, c
            return self._lead()
        if c in "{[" and not self._is_key:
            lead = self._lead()
            self._nested.append(c)
            self._is_key = c == "{"
            return lead + c
        if c in "{}[],":
            return self._break(c)
        self._take = self._word
        return self._lead() + self._word(c)

    def _word(self, c: str) -> str:
        """A key up to its colon, or a value up to what ends it."""
        if self._is_key and c == ":":
            return self._end_bare(_quoted(self._bare.strip(_SPACE))) + self._colon(c)
        if not self._is_key and c in ",]}":
            return self._end_bare(_value(self._bare.strip(_SPACE))) + self._after(c)
        if c in "{}[],":
            return self._break(c)
        self._bare += c
        return ""

    def _plain(self, c: str) -> str:
        """A key or a value in plain quotation marks, as in JSON."""
        self._bare += c
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            try:
                text = json.dumps(json.loads(self._bare, strict=False))
            except ValueError:
                return self._break("")
            return self._end_bare(text)
        return ""

    def _single(self, c: str) -> str:
        """A key or a value in single quotation marks, as in Python. One ends it that stands before what may follow."""
        if c == ":" if self._is_key else c in (",", self._closer):
            inner = self._bare[1:].rstrip(_SPACE)
            before = inner.removesuffix("'")
            if inner != before and (len(before) - len(before.rstrip("\\"))) % 2 == 0:
                return self._end_bare(_of_single_quoted(before)) + self._take(c)
            if self._is_key:  # an apostrophe, not a quotation mark
                return self._end_bare(_quoted(self._bare.strip(_SPACE))) + self._colon(c)
        self._bare += c
        return ""

    def _end_bare(self, text: str) -> str:
        self._bare = ""
        self._take = self._colon if self._is_key else self._after
        return text

    def _string(self, c: str) -> str:
        return _escaped(c)

    def _colon(self, c: str) -> str:
        if c in _SPACE:
            return ""
        if c != ":":
            return self._break(c)
        self._take, self._is_key = self._start, False
        return c

    def _after(self, c: str) -> str:
        if c in _SPACE:
            return ""
        if c == ",":
            self._take, self._comma, self._is_key = self._start, True, self._closer == "}"
            return ""
        return self._end(c) if c == self._closer else self._break(c)

    @property
    def _closer(self) -> str:
        return {"{": "}", "[": "]"}[self._nested[-1]] if self._nested else ""

    def _end(self, c: str) -> str:
        self._nested.pop()
        self._comma = False
        self._take = self._after if self._nested else self._done
        return c

    def _done(self, c: str) -> str:
        return "" if c in _SPACE or c in "}]" else self._break(c)

    def _lead(self) -> str:
        comma, self._comma = "," if self._comma else "", False
        return comma

    def _break(self, c: str) -> str:
        self._take = self._raw
        return self._lead() + self.finish() + c

    def _raw(self, c: str) -> str:
        return c


def _value(word: str) -> str:
    """The JSON of a value that has no quotation marks: a word that is none of JSON's is a string."""
    word = _WORDS.get(word, word)
    if re.fullmatch(r"-?([0-9]+\.|\.[0-9]+)", word):
        whole, _, fraction = word.partition(".")
        number = f"{whole}{'' if whole.strip('-') else '0'}.{fraction or '0'}"
    else:
        number = word
    if _NUMBER.fullmatch(number):
        return number
    return word if word in ("true", "false", "null") else _quoted(word)


def _of_single_quoted(text: str) -> str:
    """The JSON of a string in single quotation marks: \\' is one of them, and else it is escaped as JSON is."""
    marks = {"\\'": "'", '"': '\\"'}
    inner = re.sub(r'\\.|"', lambda found: marks.get(found[0], found[0]), text, flags=re.DOTALL)
    try:
        return json.dumps(json.loads(f'"{inner}"', strict=False))
    except ValueError:
        return _quoted(text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
