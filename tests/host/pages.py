"""Reads a page of `kerngen db report` without a browser, and is strict about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br", "input", "link", "hr", "img"}
SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Node:
    """An element with what is in it, in order."""

    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag: str) -> list[Node]:
        """Every element within it that is a `tag`, in order; "" for all."""
        nodes = [c for c in self.children if isinstance(c, Node)]
        return [n for c in nodes for n in ([c] if tag in ("", c.tag) else []) + c.all(tag)]

    def one(self, tag: str) -> Node:
        (found,) = self.all(tag)
        return found


class _Reader(HTMLParser):
    """Every element that is opened is closed, and closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [n for n, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        node = Node(tag, {n: v or "" for n, v in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}> at {self.getpos()}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def read(self, text: str) -> Node:
        self.feed(text)
        self.close()
        assert [n.tag for n in self._open] == [""], "the page ends before its elements do"
        return self.root


def read_page(text: str) -> Node:
    assert text.startswith("<!DOCTYPE html>")
    return _Reader().read(text)


def svgs(text: str) -> list[ElementTree.Element]:
    """Every plot of a page, read as the XML that it is."""
    found = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    return [ElementTree.fromstring(s.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)) for s in found]


def rows_of(figure: Node) -> list[dict[str, str]]:
    """The table behind a figure: column -> cell. Of two columns with one name, the last."""
    heads = [th.text for th in figure.one("thead").all("th")]
    return [dict(zip(heads, [td.text for td in tr.all("td")], strict=True)) for tr in figure.one("tbody").all("tr")]


def value_at(scale: str, pixel: float) -> float:
    """What an axis (its `data-x` or `data-y`) has at a pixel."""
    kind, low, high, start, end = scale.split()
    part = (pixel - float(start)) / (float(end) - float(start))
    if kind == "log":
        return float(low) * (float(high) / float(low)) ** part
    return float(low) + (float(high) - float(low)) * part


def marks_of(svg: ElementTree.Element) -> list[tuple[int, float, float]]:
    """(row of the table, x, y) of each mark that names its row, in values."""
    found = []
    for path in svg.iter(f"{SVG}path"):
        if (first := path.get("data-first")) is not None:
            for i, point in enumerate(path.attrib["d"].split("M")[1:]):
                x, y = map(float, point.removesuffix("h0").split())
                found.append((int(first) + i, value_at(svg.attrib["data-x"], x), value_at(svg.attrib["data-y"], y)))
    return found


def corners_of(path: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """The corners of a line in pixels: a list for each piece that is drawn without lifting the pen."""
    pieces: list[list[tuple[float, float]]] = []
    for to, numbers in re.findall(r"([MLHV])([-\d. ]+)", path.attrib["d"]):
        at = [float(n) for n in numbers.split()]
        if to == "M":
            pieces.append([])
        x, y = pieces[-1][-1] if pieces[-1] else (0.0, 0.0)
        pieces[-1].append((at[0], y) if to == "H" else (x, at[0]) if to == "V" else (at[0], at[1]))
    return pieces


def area_of(svg: ElementTree.Element) -> tuple[tuple[float, float], tuple[float, float]]:
    """Pixels between which a plot's values lie: (left, right), (top, bottom)."""
    x, y = (sorted(map(float, svg.attrib[name].split()[-2:])) for name in ("data-x", "data-y"))
    return (x[0], x[1]), (y[0], y[1])
