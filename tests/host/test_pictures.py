"""README's pictures: what is committed is what the scripts make, of figures and of a recording that are kept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
MAX_BYTES = 300_000

sys.path[:0] = [str(PICTURES), str(ROOT / "docs" / "site")]  # the scripts there import each other by name
import chart  # noqa: E402
import demo  # noqa: E402
import screen  # noqa: E402


def test_the_charts_are_what_the_script_makes() -> None:
    made = chart.charts()
    assert set(made) == {p.name for p in PICTURES.glob("*.svg")} - {"demo.svg"}
    for name, text in made.items():
        assert (PICTURES / name).read_text() == text, "python docs/site/chart.py"
        ElementTree.fromstring(text)


def test_the_table_and_the_chart_have_the_same_figures() -> None:
    text = (ROOT / "README.md").read_text()
    assert chart.readme(text, chart.read()) == text, "python docs/site/chart.py"
    for figure in (f for _, figures in chart.read() for f in figures):
        assert f"| {figure.what} | {figure.kerngen} {figure.unit} |" in text
    shown = set(re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^\]]*\]\(([^)]+)\)', text))
    assert {one or other for one, other in shown} == {
        "docs/pictures/demo.svg", *(f"docs/pictures/h200-{scheme}.svg" for scheme in chart.COLOURS)
    }  # fmt: skip
    for path in (one or other for one, other in shown):
        assert (ROOT / path).exists(), path


def test_a_rate_counts_the_other_way_round() -> None:
    assert chart.Figure("", "ms", "5", peer="10").times == 2
    for unit in ("TFLOP/s", "tokens/s"):
        assert chart.Figure("", unit, "5", peer="10").times == 0.5


def test_what_moves_is_what_the_script_draws_of_the_recording() -> None:
    cast = (PICTURES / "demo.cast").read_text()
    made = demo.draw(cast)
    assert (PICTURES / "demo.svg").read_text() == made, "python docs/pictures/demo.py draw"
    assert len(made.encode()) < MAX_BYTES
    ElementTree.fromstring(made)
    assert "://" not in made.replace("http://www.w3.org/2000/svg", ""), "it asks for nothing"
    assert "prefers-reduced-motion" in made


def test_the_recording_is_of_these_commands_and_of_no_ones_machine() -> None:
    head, *events = map(json.loads, (PICTURES / "demo.cast").read_text().splitlines())
    assert (head["version"], head["width"], head["height"]) == (2, demo.COLUMNS, demo.ROWS)
    times = [at for at, _, _ in events]
    assert times == sorted(times)
    shown = screen.Screen(demo.COLUMNS, 400)
    for _, _, text in events:
        if not text.startswith("\x1b[1;1H") and "\x1b[2K" not in text:
            shown.write(text)
    typed = shown.text().replace("\n", "")
    for command in demo.COMMANDS:
        assert command.replace("\n", "") in typed
    whole = "".join(text for _, _, text in events)
    assert "predicted by" in whole
    assert "of decode" in whole, "the table that tune ends in"
    assert not re.search(r"/(work|root|home|tmp|usr|opt|Users)\b", whole)


def test_a_screen_shows_what_a_terminal_would() -> None:
    s = screen.Screen(8, 3)
    s.write("one\r\ntwo\r\nthree\r\nfour and mo")
    assert s.text() == "three\nfour and\n mo"
    s.write("\x1b[1A\r\x1b[2K\x1b[1;3")  # a sequence may come in two pieces
    s.write("2mgo\x1b[0m \x1b[38;5;196mx\x1b[38;2;1;2;3my\x1b[?25l")
    assert s.text() == "three\ngo xy\n mo"
    (go, _, x, y) = [style for _, style in [*s.lines()[1][:1], *s.lines()[1]]]
    assert (go.is_bold, go.colour) == (True, 2)
    assert (x.colour, y.colour) == ("#ff0000", "#010203")
    s.write("\x1b[2;1H\x1b[J")
    assert s.text() == "three"
    with pytest.raises(ValueError, match="not drawn yet"):
        s.write("\x1b[2S")


def test_what_is_kept_of_a_recording_ends_in_the_same_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left out between."""
    clock = iter(n / 20 for n in range(10_000))
    monkeypatch.setattr(demo.time, "monotonic", lambda: next(clock))
    pieces = [f"\r\x1b[2K\x1b[3{n % 8}m{n}/300\x1b[0m compiling" + "\r\n" * (n % 41 == 0) for n in range(300)]
    pieces += ["\x1b[1mend\x1b[0m of it\r\n", "a line that is longer than the screen is wide"]
    whole, kept = screen.Screen(30, 6), screen.Screen(30, 6)
    found = list(demo._thinned(iter(pieces), screen.Screen(30, 6)))
    for text in pieces:
        whole.write(text)
    for _, text in found:
        kept.write(text)
    assert len(found) < len(pieces) / 2
    assert kept.lines() == whole.lines()
    assert kept.cursor == whole.cursor
