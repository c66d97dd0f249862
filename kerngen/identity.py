"""Identity of a source: its text without comments and without white space that means nothing.

The digest of this normal form names a build and its machine code in the cache. So a comment or a line break in a shared
header changes no id. The text that is compiled keeps its comments.

The normal form follows C++'s phases of translation ([lex.phases]): a line that ends in a backslash is joined with the
next; a comment is white space; white space between two tokens becomes one space where the two could be read as one
token without it, and nothing elsewhere. A preprocessor directive keeps its line, and a space wherever it has white
space: `#define F (x)` is not `#define F(x)`. Literals, raw strings included, are kept.

A text can see its own layout. One that asks for line numbers, as an assert does, is filed as it is. Where a macro turns
its arguments into strings (`#x`), white space becomes one space everywhere.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

_RAW = r'(?<![\w$])(?:u8|[uUL])?R"(?P<end>[^()\\\s"]{0,16})\((?s:.*?)\)(?P=end)"'
_HEADER = r"(?m:^)[ \t]*#[ \t]*include[ \t]*<[^>\n]*>"  # <a//b> has no comment
_STRING = r'"(?:[^"\\\n]|\\(?:\n|.))*"'
_NUMBER = r"(?<![\w$])\.?\d(?:[eEpP][+-]|'?\w|\.)*"  # with digit separators, which begin no character
_CHARACTER = r"'(?:[^'\\\n]|\\(?:\n|.))+'"
# What may reach across lines. A backslash at a line's end may stand between the two characters that begin a comment.
_ACROSS_LINES = re.compile(
    rf"(?P<raw>{_RAW})|(?P<literal>{_HEADER}|{_STRING}|{_NUMBER}|{_CHARACTER})"
    r"|(?P<comment>/(?:\\\n)*/(?:\\\n|.)*|/(?:\\\n)*\*(?s:.*?)\*(?:\\\n)*/)|(?P<splice>\\\n)"
)
_TOKEN = re.compile(rf"(?P<blank>(?:[ \t\r\f\v]|//.*)+)|{_RAW}|{_STRING}|{_NUMBER}|{_CHARACTER}|[\w$]+|.")
# An assert names the line that it failed in. %: is another spelling of #.
_SEES_LINES = ("__LINE__", "__builtin_LINE", "source_location", "%:")
_ASSERT = re.compile(r"assert(?<![\w$]assert)(?![\w$])")
# What compilers join with the next line too, or a raw string whose opening is on two lines: filed as they are.
_UNUSUAL_SPLICES = re.compile(r"\\[ \t\r\f\v]+\n"), re.compile(r'R(?:\\\n)+"')
# The first is part of the second, and is found sooner where there is none.
_MAKES_STRINGS = (
    re.compile(r"define\b.*[^#\n]#(?!#)"),
    re.compile(r"^[ \t]*#[ \t]*define\b.*[^#\n]#(?!#)", re.MULTILINE),
)
_INCLUDE = re.compile(r"[ \t]*#[ \t]*include\b")
_OPEN_NUMBER = re.compile(r"\.?\d.*[eEpP]\Z")
_COMMENT_LINES = re.compile(rb"(?<!\\\n)(?<!\\\r\n)^[ \t]*(?://[^\n{]*(?<!\\)(?<!\\[ \t\r]))?\n", re.MULTILINE)
_LINE_BREAK = "\0"  # of a raw string, which is one line here


def normal_form(text: str) -> str:
    """`text` without comments and without white space that means nothing. Equal forms compile to the same machine code.

    What is no C++, an open quotation mark say, is kept character by character.
    """
    if any(unusual.search(text) for unusual in _UNUSUAL_SPLICES):
        return text
    form = _form(text)
    return text if any(name in form for name in _SEES_LINES) or _ASSERT.search(form) else form


def _form(text: str) -> str:
    joined = text.replace("\\\n", "")
    has_more = "/*" in joined or 'R"' in joined  # what else may cross lines: few sources have either
    text = _ACROSS_LINES.sub(_on_one_line, text) if has_more else joined
    spaced = all(makes.search(text) for makes in _MAKES_STRINGS)
    parts: list[str] = []
    ends = 0  # of the line before, 0 where that is a directive
    for line in text.split("\n"):
        form, begins, ending = _line(line, spaced)
        if not form:
            continue
        if form[0] == "#":
            parts.append(f"\n{form}\n")
            ends = 0
            continue
        if ends & begins:
            parts.append(" ")
        parts.append(form)
        ends = ending
    return "".join(parts)


def digest_of(text: str) -> str:
    """sha256 of the normal form, in hexadecimal."""
    return hashlib.sha256(normal_form(text).encode()).hexdigest()


def without_comment_lines(name: str, data: bytes) -> bytes:
    """What of a kernel's file may change the sources: of a .cuh, all but blank lines and lines that are a comment.

    A line with a brace stays, since a template may be what includes it.
    """
    if not name.endswith(".cuh") or b"/*" in data or b'R"' in data:
        return data
    return _COMMENT_LINES.sub(b"", data)


def _on_one_line(match: re.Match[str]) -> str:
    kind, text = match.lastgroup, match[0]
    if match["raw"] is not None:
        return text.replace("\n", _LINE_BREAK)
    if kind == "comment":
        return " "
    return "" if kind == "splice" else text.replace("\\\n", "")


@lru_cache(maxsize=1 << 16)  # most lines are of shared headers
def _line(line: str, spaced: bool) -> tuple[str, int, int]:
    """The normal form of a line that no token and no comment leaves, and what it begins and ends with (see `_ends`)."""
    if _INCLUDE.match(line):
        return line.strip(), 0, 0  # <a//b> has no comment
    form, gap, begins, ends = "", False, 0, 0
    for match in _TOKEN.finditer(line):
        if match["blank"] is not None:
            gap = True
            continue
        token = match[0]
        first = _ANY if spaced else _begins(token)
        if not form:
            begins = first
        elif gap and form != "#" and (form[0] == "#" or ends & first):
            form += " "
        form += token
        ends = _ANY if spaced else _ends(token)
        gap = False
    return form, begins, ends


# Two tokens could be read as one if the end of the first and the start of the second have one of these in common.
# WORD: letters, digits, quotation marks ("a" "b", L 'x'), a point (1 .5). OPERATOR: what operators are made of. SIGN: a
# number that ends in an e takes in the sign behind it (0xe + 1).
_WORD, _OPERATOR, _SIGN = 1, 2, 4
_ANY = _WORD | _OPERATOR | _SIGN


def _kind(char: str) -> int:
    if char == ".":
        return _WORD | _OPERATOR
    if char in "+-*/%<>=!&|^:#":
        return _OPERATOR
    return _WORD if char.isalnum() or char in "_$\"'\\" or not char.isascii() else 0


def _begins(token: str) -> int:
    return _kind(token[0]) | (_SIGN if token[0] in "+-" else 0)


def _ends(token: str) -> int:
    return _kind(token[-1]) | (_SIGN if _OPEN_NUMBER.match(token) else 0)
