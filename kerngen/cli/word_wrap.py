"""Text that comes in pieces, broken between words as it comes."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PART = re.compile(r"\n|[^\S\n]+|\S+")
_MARKS = ("```", "~~~", "|")  # with which a fence of a code block begins, or a row of a table
_FENCE = re.compile(r"\s*(`{3,})[^`]*|\s*(~{3,}).*")
_JOINER = "\u200d"  # between the emoji of a sequence, which is one character to look at
_NO_START = "、。，．：；？！）］｝」』】〉》々ーっッ"  # begin no line


class Words:
    """Text in pieces, broken between words where a line of `width` cells ends.

    A word waits until it is whole, or fills half a line. An ideograph is a word by itself. Markdown's fenced code and
    the rows of its tables stay as they are. `width` may change at any time.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._blanks = self._word = ""
        self._line = ""  # of the text, as far as it is written
        self._fence = ""  # that began the code block
        self._is_kept = False  # this line is not broken

    def add(self, text: str) -> str:
        """What may be written now."""
        written = ""
        for part in _PART.findall(text):
            if part == "\n":
                written += self._end_line()
                continue
            if part.isspace():
                written += self.flush()
            if self._is_kept:
                written += part
                self._line += part
            elif part.isspace():
                self._blanks += part
            else:
                written += self._add_word(part)
        return written

    def _add_word(self, part: str) -> str:
        written = ""
        for char in part:
            if self._may_break(char):
                written += self.flush()
            self._word += char
            if 2 * cell_len(self._word) > self.width or self._is_kept:
                written += self.flush()
        return written

    def flush(self) -> str:
        """The word that waits, on the next line where this one has no room for it."""
        if not self._word:
            return ""
        word, blanks = self._word, self._blanks
        self._word = self._blanks = ""
        if not self._line:
            self._is_kept = word.startswith(_MARKS)
        self._line += blanks + word
        before = " " * self._column
        column = len((before + blanks).expandtabs())
        cells = cell_len(word)
        if self._column and column + cells > self.width and not self._is_kept:
            self._column = cells
            return f"\n{word}"
        self._column = column + cells
        return blanks + word

    def _may_break(self, char: str) -> bool:
        """Whether a line may end between the word that waits and `char`: beside an ideograph."""
        if not self._word or char in _NO_START or self._word[-1] == _JOINER or not cell_len(char):
            return False
        return max(cell_len(char), cell_len(self._word[0])) > 1

    def _end_line(self) -> str:
        rest = self.flush()
        if self._fence:
            mark = self._line.strip()
            if len(mark) >= len(self._fence) and set(mark) == {self._fence[0]}:
                self._fence = ""
        elif found := _FENCE.fullmatch(self._line):
            self._fence = found[1] or found[2]
        self._column, self._blanks, self._line, self._is_kept = 0, "", "", bool(self._fence)
        return f"{rest}\n"
