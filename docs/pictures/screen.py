"""What a terminal shows: the text and the escape sequences that kerngen and rich write, on a grid of characters."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_PIECE = re.compile(
    r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|[\r\n\b\t]|[^\x1b\r\n\b\t]+", re.S
)
_PARTIAL = re.compile(r"\x1b(?:\[[?\d;]*|\][^\x07\x1b]*)?$")  # a sequence whose end is yet to come


@dataclass(frozen=True, slots=True)
class Style:
    """colour: of the sixteen, as SGR counts them from 0, or "#rrggbb"; None for the terminal's own."""

    colour: int | str | None = None
    is_bold: bool = False
    is_dim: bool = False


PLAIN = Style()
Line = tuple[tuple[str, Style], ...]  # runs of one style, without blanks at the end


class Screen:
    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._x = self._y = 0
        self._style = PLAIN
        self._rest = ""
        self._cells = [self._blank() for _ in range(rows)]

    def write(self, text: str) -> None:
        text = self._rest + text
        self._rest = found.group() if (found := _PARTIAL.search(text)) else ""
        for piece in _PIECE.finditer(text[: len(text) - len(self._rest)]):
            if piece[2]:
                self._control(piece[1], piece[2])
            elif (got := piece.group()) == "\r":
                self._x = 0
            elif got == "\n":
                self._down()
            elif got == "\b":
                self._x = max(0, self._x - 1)
            elif got == "\t":
                self._x = min(self.columns - 1, (self._x // 8 + 1) * 8)
            elif got[0] != "\x1b":
                self._put(got)

    @property
    def cursor(self) -> str:
        """The sequence that puts it where it is."""
        return f"\x1b[{self._y + 1};{self._x + 1}H"

    def lines(self) -> tuple[Line, ...]:
        return tuple(_runs(row) for row in self._cells)

    def text(self) -> str:
        return "\n".join("".join(c for c, _ in row).rstrip() for row in self._cells).rstrip()

    def _blank(self) -> list[tuple[str, Style]]:
        return [(" ", PLAIN)] * self.columns

    def _put(self, text: str) -> None:
        for c in text:
            if self._x == self.columns:
                self._x = 0
                self._down()
            self._cells[self._y][self._x] = c, self._style
            self._x += 1

    def _down(self) -> None:
        if self._y + 1 < self.rows:
            self._y += 1
        else:
            self._cells = [*self._cells[1:], self._blank()]

    def _control(self, given: str, kind: str) -> None:
        if given.startswith("?"):  # the cursor is shown and hidden: it is not drawn
            return
        numbers = [int(n or 0) for n in given.split(";")]
        count = max(1, numbers[0])
        if kind == "A":
            self._y = max(0, self._y - count)
        elif kind == "B":
            self._y = min(self.rows - 1, self._y + count)
        elif kind == "C":
            self._x = min(self.columns - 1, self._x + count)
        elif kind == "D":
            self._x = max(0, self._x - count)
        elif kind == "G":
            self._x = min(self.columns, count) - 1
        elif kind == "H":
            self._y, self._x = (max(1, n) - 1 for n in [*numbers, 1][:2])
        elif kind == "K":
            self._erase(self._y, numbers[0])
        elif kind == "J":
            self._erase(self._y, numbers[0])
            for y in range(self._y + 1, self.rows) if numbers[0] == 0 else range(self.rows) if numbers[0] == 2 else ():
                self._cells[y] = self._blank()
        elif kind == "m":
            self._style = _styled(self._style, numbers)
        else:
            raise ValueError(f"a terminal was sent CSI {given}{kind}, which is not drawn yet")

    def _erase(self, y: int, which: int) -> None:
        start, end = ((self._x, self.columns), (0, self._x + 1), (0, self.columns))[which]
        self._cells[y][start:end] = [(" ", PLAIN)] * (min(end, self.columns) - start)


def _styled(style: Style, numbers: list[int]) -> Style:
    rest = list(numbers)
    while rest:
        n = rest.pop(0)
        if n == 0:
            style = PLAIN
        elif n == 1:
            style = replace(style, is_bold=True)
        elif n == 2:
            style = replace(style, is_dim=True)
        elif n == 22:
            style = replace(style, is_bold=False, is_dim=False)
        elif 30 <= n <= 37 or 90 <= n <= 97:
            style = replace(style, colour=n - 30 if n < 90 else n - 82)
        elif n == 39:
            style = replace(style, colour=None)
        elif n == 38 and rest[:1] == [5]:
            style, rest = replace(style, colour=_of_256(rest[1])), rest[2:]
        elif n == 38 and rest[:1] == [2]:
            style, rest = replace(style, colour="#{:02x}{:02x}{:02x}".format(*rest[1:4])), rest[4:]
    return style


def _of_256(n: int) -> int | str:
    """Source: ISO 8613-6's colours as xterm has them: sixteen, a cube of six levels, 24 greys."""
    if n < 16:
        return n
    if n >= 232:
        return "#" + f"{8 + 10 * (n - 232):02x}" * 3
    level = (0, 95, 135, 175, 215, 255)
    return "#{:02x}{:02x}{:02x}".format(*(level[(n - 16) // by % 6] for by in (36, 6, 1)))


def written(line: Line) -> str:
    """What shows `line` on an empty row."""
    found = ""
    for text, style in line:
        codes = ["1"] * style.is_bold + ["2"] * style.is_dim
        if isinstance(style.colour, int):
            codes.append(str(style.colour + (30 if style.colour < 8 else 82)))
        elif style.colour:
            codes.append("38;2;" + ";".join(str(int(style.colour[i : i + 2], 16)) for i in (1, 3, 5)))
        found += f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if codes else text
    return found


def _runs(row: list[tuple[str, Style]]) -> Line:
    found: list[tuple[str, Style]] = []
    for c, style in row:
        style = PLAIN if c == " " else style
        if found and (found[-1][1] == style or c == " "):
            found[-1] = found[-1][0] + c, found[-1][1]
        else:
            found.append((c, style))
    while found and not found[-1][0].strip():
        found.pop()
    if found:
        found[-1] = found[-1][0].rstrip(), found[-1][1]
    return tuple(found)
