"""README's figures of an H200, table and chart, both from h200.toml: `python docs/pictures/chart.py` writes them anew.

A bar is how many times as fast as the best peer kerngen is: the peer's time over its own, or its rate over the peer's.
There is a chart for light pages and one for dark ones; README names both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
BEGIN = "<!-- The chart and the table are made by docs/pictures/chart.py, from docs/pictures/h200.toml. -->\n"
END = "<!-- Until here. -->\n"


@dataclass(frozen=True, slots=True)
class Figure:
    """As h200.toml has it."""

    what: str
    unit: str
    kerngen: str
    share: str = ""
    peer: str = ""
    by: str = ""
    beside: bool = False

    @property
    def times(self) -> float:
        """How many times as fast as the peer."""
        ours, theirs = float(self.kerngen), float(self.peer)
        return ours / theirs if self.unit.endswith("/s") else theirs / ours


def read() -> list[tuple[str, list[Figure]]]:
    """Groups, with their figures."""
    with open(HERE / "h200.toml", "rb") as f:
        return [(g["name"], [Figure(**row) for row in g["figures"]]) for g in tomllib.load(f)["group"]]


# ---- the table


def table(groups: list[tuple[str, list[Figure]]]) -> str:
    lines = ["| | kerngen | share of the measured limit | best peer |", "|---|---|---|---|"]
    for name, figures in groups:
        lines.append(f"| **{name}** | | | |")
        for f in figures:
            peer = f"{f.peer} {f.unit} ({f.by}{', beside it' if f.beside else ''})" if f.peer else ""
            lines.append(f"| {f.what} | {f.kerngen} {f.unit} | {f.share} | {peer} |")
    return "\n".join(lines) + "\n"


def section(groups: list[tuple[str, list[Figure]]]) -> str:
    """What README has between BEGIN and END."""
    said = "; ".join(f"{f.what}: {f.times:.2f}" for _, figures in groups for f in figures if f.peer)
    return (
        "<picture>\n"
        '  <source media="(prefers-color-scheme: dark)" srcset="docs/pictures/h200-dark.svg">\n'
        f'  <img alt="How many times as fast as the best peer. {escape(said)}" src="docs/pictures/h200-light.svg">\n'
        f"</picture>\n\n{table(groups)}"
    )


def readme(text: str, groups: list[tuple[str, list[Figure]]]) -> str:
    """`text` with the section made anew. Raises SystemExit where it has no place for it."""
    found, count = re.subn(
        f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", lambda _: section(groups), text, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"{README}: {count} places between {BEGIN.strip()} and {END.strip()}")
    return found


# ---- the chart

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 860.0, 312.0, 250.0, 25.0, 62.0, 28.0  # pixels; bars are between LEFT and RIGHT
GROUP, PAD = 30.0, 16.0
COLOURS = {
    "light": {"back": "#ffffff", "ink": "#1f2328", "dim": "#59636e", "grid": "#d8dee4",
              "bars": ("#0a69b7", "#7a4fc4", "#0b7a5b"), "behind": "#b45309"},
    "dark": {"back": "#0d1117", "ink": "#e6edf3", "dim": "#9198a1", "grid": "#2a313c",
             "bars": ("#5cb0f5", "#b79af2", "#4fc9a0"), "behind": "#f2a253"},
}  # fmt: skip


def chart(groups: list[tuple[str, list[Figure]]], scheme: str) -> str:
    colours = COLOURS[scheme]
    shown = [(name, [f for f in figures if f.peer]) for name, figures in groups]
    height = TOP + sum(GROUP + ROW * len(figures) for _, figures in shown) + BOTTOM
    most = max(f.times for _, figures in shown for f in figures) * 1.02
    parts = [*_axis(most, height, colours), *_rows(shown, most, colours)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-PAD:g} {-PAD:g} {WIDTH + 2 * PAD:g} {height + 2 * PAD:g}" '
        f'width="{WIDTH + 2 * PAD:g}" height="{height + 2 * PAD:g}" role="img" aria-labelledby="t">\n'
        f'<title id="t">kerngen and the best peer on an H200</title>\n'
        f"<style>text{{font:13px -apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;"
        f"fill:{colours['ink']}}}.d{{fill:{colours['dim']}}}.b{{font-weight:600}}.r{{text-anchor:end}}"
        f".m{{text-anchor:middle}}</style>\n"
        f'<rect x="{-PAD:g}" y="{-PAD:g}" width="100%" height="100%" rx="8" fill="{colours["back"]}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _x(times: float, most: float) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * times / most


def _axis(most: float, height: float, colours: dict) -> Iterator[str]:
    bottom = height - BOTTOM + 4
    yield _text(0, 18, "How many times as fast as the best peer, on one H200", "b")
    yield _text(0, 38, "the peer's time over kerngen's, or kerngen's rate over the peer's", "d")
    yield _text(WIDTH - 160, 38, "kerngen", "d r")
    yield _text(WIDTH, 38, "best peer", "d r")
    for i in range(int(2 * most) + 1):
        x = _x(i / 2, most)
        dash = "" if i == 2 else ' stroke-dasharray="2 3"'
        colour = colours["ink"] if i == 2 else colours["grid"]
        yield f'<path d="M{x:.1f} {TOP - 10:g}V{bottom:g}" stroke="{colour}"{dash}/>'
        yield _text(x, bottom + 18, f"{i / 2:g}", "d m")
    yield _text(0, bottom + 18, "1: as fast as the peer", "d")


def _rows(groups: list[tuple[str, list[Figure]]], most: float, colours: dict) -> Iterator[str]:
    y = TOP
    for (name, figures), fill in zip(groups, colours["bars"], strict=True):
        yield _text(0, y + 14, name, "b")
        y += GROUP
        for f in figures:
            end = _x(f.times, most)
            kind = fill if f.times >= 1 else colours["behind"]
            yield _text(12, y + 11, f.what)
            yield f'<rect x="{LEFT:g}" y="{y:g}" width="{end - LEFT:.1f}" height="15" rx="2" fill="{kind}"/>'
            yield _text(end + 6, y + 12, f"{f.times:.2f}", "b")
            yield _text(WIDTH - 160, y + 12, f"{f.kerngen} {f.unit}", "r")
            yield _text(WIDTH, y + 12, f"{f.peer}, {f.by}", "d r")
            y += ROW


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.6g}" y="{y:.6g}"{named}>{escape(text, quote=False)}</text>'


def main() -> None:
    groups = read()
    for scheme in COLOURS:
        (HERE / f"h200-{scheme}.svg").write_text(chart(groups, scheme))
    README.write_text(readme(README.read_text(), groups))


if __name__ == "__main__":
    main()
