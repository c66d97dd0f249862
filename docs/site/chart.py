"""The charts, and README's table, from data/performance/*.toml: `python docs/site/chart.py` writes them anew.

One chart says how many times as fast as the best peer kerngen is: the peer's time over its own, or its rate over the
peer's. Others say which share of a board's measured limit it reaches. There is each for light pages and for dark ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
DATA = ROOT / "data" / "performance"
README = ROOT / "README.md"
BEGIN = "<!-- The chart and the table are made by docs/site/chart.py, from data/performance/h200.toml. -->\n"
END = "<!-- Until here. -->\n"


@dataclass(frozen=True, slots=True)
class Figure:
    """As data/performance/h200.toml has it."""

    what: str
    unit: str
    kerngen: str
    share: str = ""
    peer: str = ""
    by: str = ""
    beside: bool = False
    spread: str = ""
    read: str = ""
    commit: str = ""
    run: str = ""
    readme: bool = False

    @property
    def against(self) -> str:
        """The peer's figure and name, or nothing."""
        return f"{self.peer} {self.unit} ({self.by}{', beside it' if self.beside else ''})" if self.peer else ""

    @property
    def times(self) -> float:
        """How many times as fast as the peer."""
        ours, theirs = float(self.kerngen), float(self.peer)
        return ours / theirs if self.unit.endswith("/s") else theirs / ours


Group = tuple[str, list[Figure]]  # its name


@dataclass(frozen=True, slots=True)
class Board:
    """What a file of data/performance has: groups with their figures, and the commands that `run` names."""

    name: str
    about: str
    commands: dict[str, str]
    groups: list[Group]


def board(name: str) -> Board:
    """That of data/performance/NAME.toml."""
    data = tomllib.loads((DATA / f"{name}.toml").read_text())
    groups = [(g["name"], [Figure(**row) for row in g["figures"]]) for g in data["group"]]
    return Board(data["name"], data["about"], data["commands"], groups)


def read() -> list[Group]:
    """Groups with their figures: what README shows of an H200."""
    return [(name, [f for f in figures if f.readme]) for name, figures in board("h200").groups]


# ---- the table


def table(groups: list[Group]) -> str:
    lines = ["| | kerngen | share of the measured limit | best peer |", "|---|---|---|---|"]
    for name, figures in groups:
        lines.append(f"| **{name}** | | | |")
        for f in figures:
            lines.append(f"| {f.what} | {f.kerngen} {f.unit} | {f.share} | {f.against} |")
    return "\n".join(lines) + "\n"


def section(groups: list[Group]) -> str:
    """What README has between BEGIN and END."""
    return picture("docs/pictures/h200", "How many times as fast as the best peer; the table has the figures.") + (
        f"\n{table(groups)}"
    )


def picture(path: str, alt: str) -> str:
    """The HTML of a chart in both schemes: `path` without -light.svg."""
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">\n'
        f'  <img alt="{escape(alt)}" src="{path}-light.svg">\n'
        "</picture>\n"
    )


def readme(text: str, groups: list[Group]) -> str:
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


@dataclass(frozen=True, slots=True)
class Kind:
    """What a chart shows. length: of a bar. right: what stands beside kerngen's figure. one: what a bar of 1 is."""

    title: str
    heading: str
    below: str
    column: str
    one: str
    length: Callable[[Figure], float]
    right: Callable[[Figure], str]
    is_shown: Callable[[Figure], bool]


AGAINST_PEERS = Kind(
    "kerngen and the best peer on an H200", "How many times as fast as the best peer, on one H200",
    "the peer's time over kerngen's, or kerngen's rate over the peer's", "best peer", "1: as fast as the peer",
    lambda f: f.times, lambda f: f"{f.peer}, {f.by}", lambda f: bool(f.peer),
)  # fmt: skip


def against_limit(board: str) -> Kind:
    return Kind(
        f"kerngen and the limits of an {board}", f"Share of the measured limit, on one {board}",
        "what its bytes or products take at the rate measured in the same run, over its time", "read, GB/s",
        "1: the limit", lambda f: float(f.share), lambda f: f.read, lambda f: bool(f.share),
    )  # fmt: skip


def chart(groups: list[Group], scheme: str, kind: Kind = AGAINST_PEERS) -> str:
    colours = COLOURS[scheme]
    shown = [(name, [f for f in figures if kind.is_shown(f)]) for name, figures in groups]
    shown = [(name, figures) for name, figures in shown if figures]
    height = TOP + sum(GROUP + ROW * len(figures) for _, figures in shown) + BOTTOM
    most = max(kind.length(f) for _, figures in shown for f in figures) * 1.02
    parts = [*_axis(most, height, colours, kind), *_rows(shown, most, colours, kind)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-PAD:g} {-PAD:g} {WIDTH + 2 * PAD:g} {height + 2 * PAD:g}" '
        f'width="{WIDTH + 2 * PAD:g}" height="{height + 2 * PAD:g}" role="img" aria-labelledby="t">\n'
        f'<title id="t">{escape(kind.title)}</title>\n'
        f"<style>text{{font:13px -apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;"
        f"fill:{colours['ink']}}}.d{{fill:{colours['dim']}}}.b{{font-weight:600}}.r{{text-anchor:end}}"
        f".m{{text-anchor:middle}}</style>\n"
        f'<rect x="{-PAD:g}" y="{-PAD:g}" width="100%" height="100%" rx="8" fill="{colours["back"]}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _x(times: float, most: float) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * times / most


def _axis(most: float, height: float, colours: dict, kind: Kind) -> Iterator[str]:
    bottom = height - BOTTOM + 4
    yield _text(0, 18, kind.heading, "b")
    yield _text(0, 38, kind.below, "d")
    yield _text(WIDTH - 160, 38, "kerngen", "d r")
    yield _text(WIDTH, 38, kind.column, "d r")
    for i in range(int(2 * most) + 1):
        x = _x(i / 2, most)
        dash = "" if i == 2 else ' stroke-dasharray="2 3"'
        colour = colours["ink"] if i == 2 else colours["grid"]
        yield f'<path d="M{x:.1f} {TOP - 10:g}V{bottom:g}" stroke="{colour}"{dash}/>'
        yield _text(x, bottom + 18, f"{i / 2:g}", "d m")
    yield _text(0, bottom + 18, kind.one, "d")


def _rows(groups: list[Group], most: float, colours: dict, kind: Kind) -> Iterator[str]:
    y = TOP
    for (name, figures), fill in zip(groups, colours["bars"], strict=False):
        yield _text(0, y + 14, name, "b")
        y += GROUP
        for f in figures:
            end = _x(kind.length(f), most)
            colour = colours["behind"] if kind is AGAINST_PEERS and f.times < 1 else fill
            yield _text(12, y + 11, f.what)
            yield f'<rect x="{LEFT:g}" y="{y:g}" width="{end - LEFT:.1f}" height="15" rx="2" fill="{colour}"/>'
            yield _text(end + 6, y + 12, f"{kind.length(f):.2f}", "b")
            yield _text(WIDTH - 160, y + 12, f"{f.kerngen} {f.unit}", "r")
            yield _text(WIDTH, y + 12, kind.right(f), "d r")
            y += ROW


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.6g}" y="{y:.6g}"{named}>{escape(text, quote=False)}</text>'


def charts() -> dict[str, str]:
    """Every chart: file -> SVG."""
    made = {}
    for scheme in COLOURS:
        made[f"h200-{scheme}.svg"] = chart(read(), scheme)
        for name in ("h200", "h100"):
            found = board(name)
            made[f"{name}-share-{scheme}.svg"] = chart(found.groups, scheme, against_limit(found.name))
    return made


def main() -> None:
    for name, text in charts().items():
        (PICTURES / name).write_text(text)
    README.write_text(readme(README.read_text(), read()))


if __name__ == "__main__":
    main()
