"""Pages that are made of data, experiments and performance: what is committed is what the scripts make."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
from command import ROOT

HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b")
COMMIT = re.compile(r"[0-9a-f]{7}")


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "site")
        yield


@pytest.fixture(scope="module")
def records() -> ModuleType:
    return import_module("records")


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    return import_module("performance")


def _sentences(text: str) -> str:
    """Without rows of tables, which may have a column of commits."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def test_the_index_of_experiments_is_what_the_script_makes(records: ModuleType) -> None:
    assert records.INDEX.read_text() == records.index(records.read()), "python docs/site/records.py"


def test_a_record_says_what_came_of_it(records: ModuleType) -> None:
    for subject in records.read():
        assert len({r.anchor for r in subject.records}) == len(subject.records), subject.name
        for r in subject.records:
            assert "\n" not in r.result, r.id  # it is a cell of a table
            assert "|" not in r.result + r.title, r.id
            said = "\n".join((r.title, r.board, r.read, r.expected, r.changed, r.command, r.result, r.note, r.next))
            assert not HASH.search(_sentences(said)), f"{r.id}: a commit stands in `commit` alone"
            assert not r.commit or all(COMMIT.fullmatch(c) for c in r.commit.split()), r.id


def test_what_lost_is_in_the_index(records: ModuleType) -> None:
    index = records.INDEX.read_text()
    lost = index.partition("## What not to try again")[2].partition("## What is open")[0]
    for subject in records.read():
        for r in (r for r in subject.records if r.verdict == "lost"):
            assert f"](../data/experiments/{subject.name}.toml#{r.anchor})" in lost, r.id


@pytest.mark.parametrize("page", [
    "README.md", "docs/performance.md", "docs/experiments.md", "docs/architecture.md", "docs/kernels.md",
    "docs/quick-start.md",
])  # fmt: skip
def test_no_sentence_names_a_commit(page: str) -> None:
    assert not HASH.findall(_sentences((ROOT / page).read_text()))


def test_pages_of_figures_are_what_the_script_makes(performance: ModuleType) -> None:
    for place, text in performance.pages().items():
        assert place.read_text() == text, "python docs/site/performance.py"
    assert len(performance.PAGE.read_text().split()) <= 2750


def test_a_table_has_a_cell_for_each_column(performance: ModuleType) -> None:
    for name in (*performance.TABLES, *performance.MEASURED):
        data = tomllib.loads((performance.chart.DATA / f"{name}.toml").read_text())
        for table in data["table"]:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}, table["title"]
            said = f"{table['title']} {table.get('note', '')} {table.get('command', '')}"
            assert not HASH.search(said), f"{table['title']}: a commit stands in `commit`, or in a column"


@pytest.mark.parametrize("board", ["h200", "h100"])
def test_a_figure_says_how_it_was_measured(performance: ModuleType, board: str) -> None:
    found = performance.chart.board(board)
    for figure in (f for _, figures in found.groups for f in figures):
        assert figure.run in found.commands, figure.what
        assert COMMIT.fullmatch(figure.commit), figure.what
        assert float(figure.kerngen) > 0, figure.what
    assert {f.run for _, figures in found.groups for f in figures} == set(found.commands)
