"""What was measured, from data/performance/*.toml: `python docs/site/performance.py` writes it into the docs anew.

docs/performance.md has a table and a chart of each board, h200.toml and h100.toml; each page of MEASURED has the tables
of a file. kernels.toml and history.toml, which hold tables as they were measured, have a page each on the site, which
is not committed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import chart

PAGE = chart.ROOT / "docs" / "performance.md"
BOARDS = ("h200", "h100")
TABLES = ("kernels", "history")
MEASURED = {  # where, in docs
    "vllm": "vllm.md", "media": "media.md", "caches": "runtime.md", "dflash": "runtime.md", "gguf": "gguf.md",
}  # fmt: skip


def begin(board: str) -> str:
    return f"<!-- The rest of this section is made by docs/site/performance.py, from {board}.toml. -->\n"


def pages() -> dict[Path, str]:
    """The text of each page that has something made. Raises SystemExit where one has no place for it."""
    made = {PAGE: _filled(PAGE, {board: _board(board) for board in BOARDS})}
    for file in dict.fromkeys(MEASURED.values()):
        page = chart.ROOT / "docs" / file
        made[page] = _filled(page, {name: _measured(_read(name)) for name, where in MEASURED.items() if where == file})
    return made


def _filled(page: Path, made: Mapping[str, Iterable[str]]) -> str:
    text = page.read_text()
    for name, lines in made.items():
        before, found, rest = text.partition(begin(name))
        _, end, after = rest.partition(chart.END)
        if not (found and end):
            raise SystemExit(f"{page}: no place between {begin(name).strip()} and {chart.END.strip()}")
        text = f"{before}{found}\n{chr(10).join(lines)}\n{end}{after}"
    return text


def tables() -> dict[str, str]:
    """The site's page of each of TABLES by name, its links as relative to the file."""
    return {name: "\n".join(_tables(name)) for name in TABLES}


def _board(name: str) -> Iterator[str]:
    board = chart.board(name)
    numbers = {key: n for n, key in enumerate(board.commands, 1)}
    yield f"{board.about}.\n"
    if name == "h200":
        yield chart.picture("pictures/h200", "How many times as fast as the best peer; the table has the figures.")
    yield chart.picture(f"pictures/{name}-share", "Share of the measured limit; the table has the figures.")
    peers = any(f.peer for _, figures in board.groups for f in figures)
    head = ["", "kerngen", "of the limit", *(["best peer"] if peers else []), "read, GB/s", "commit", "run"]
    yield from (_row(head), _row(["---"] * len(head)))
    for group, figures in board.groups:
        yield _row([f"**{group}**", *[""] * (len(head) - 1)])
        for f in figures:
            against = [f.against] if peers else []
            spread = f" ({f.spread})" if f.spread else ""
            yield _row([f.what, f"{f.kerngen} {f.unit}{spread}", f.share, *against, f.read, f.commit,
                        str(numbers[f.run])])  # fmt: skip
    yield "\nCommands of the last column, the first of their kind each:\n"
    yield from (f"{n}. `{board.commands[key]}`" for key, n in numbers.items())


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((chart.DATA / f"{name}.toml").read_text())


def _tables(name: str) -> Iterator[str]:
    data = _read(name)
    yield f"# {data['title']}"
    yield f"\n{data['intro'].strip()}"
    for table in data["table"]:
        yield f"\n## {table['title']}\n"
        yield from _table(table)
    yield ""


def _measured(data: dict[str, Any]) -> Iterator[str]:
    """A file's tables without headings, after what it says of them all."""
    yield data["intro"].strip()
    for table in data["table"]:
        yield ""
        yield from _table(table)


def _table(table: dict[str, Any]) -> Iterator[str]:
    read = f"read {table['read']} GB/s" if "read" in table else ""
    commits = ", ".join(f"`{c}`" for c in table.get("commit", "").split())
    command = f"`{table['command']}`" if "command" in table else ""
    yield " · ".join(part for part in (table["board"], read, commits, command) if part) + "\n"
    yield from (_row(table["columns"]), _row(["---"] * len(table["columns"])), *map(_row, table["rows"]))
    if "note" in table:
        yield f"\n{table['note'].strip()}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def main() -> None:
    for place, text in pages().items():
        place.write_text(text)


if __name__ == "__main__":
    main()
