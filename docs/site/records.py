"""What was tried, from data/experiments/*.toml: `python docs/site/records.py` writes the index anew.

A file is a subject, a record is one experiment: what was expected, what was changed, by which command, what came of it.
docs/experiments.md has the index, what not to try again first. The site has a page for each subject, which is not
committed. In a record's prose, [[id]] is a link to another record; other links are relative to the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "data" / "experiments"
INDEX = ROOT / "docs" / "experiments.md"
BEGIN = "<!-- The rest is made by docs/site/records.py, from data/experiments/*.toml. -->\n"
END = "<!-- Until here. -->\n"
VERDICTS = ("won", "lost", "open")
REFERENCE = re.compile(r"\[\[([\w-]+)\]\]")


@dataclass(frozen=True, slots=True)
class Record:
    """One experiment. Prose is Markdown.

    id: unique among all files. board: where it was measured, or "none". read: GB/s that the board read in that run.
    commit: those that it was measured at, and nowhere else. verdict: of VERDICTS. expected, changed: what was thought,
    and what was done. result: one sentence with the figures, for tables. note: everything else. next: what to try next.
    """

    id: str
    title: str
    kernel: str
    board: str
    verdict: str
    result: str
    read: str = ""
    commit: str = ""
    expected: str = ""
    changed: str = ""
    command: str = ""
    note: str = ""
    next: str = ""

    @property
    def anchor(self) -> str:
        """Of its heading, as GitHub and MyST name it."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Subject:
    """A file: name is its stem."""

    name: str
    title: str
    records: Sequence[Record]


def read() -> list[Subject]:
    """Subjects by name. Raises SystemExit where an id is there twice, or a verdict is none."""
    subjects = []
    for path in sorted(FOLDER.glob("*.toml")):
        data = tomllib.loads(path.read_text())
        records = [
            Record(**{"kernel": data["kernel"]} | fields | {"result": " ".join(fields["result"].split())})
            for fields in data["record"]
        ]
        subjects.append(Subject(path.stem, data["title"], records))
    every = [r for s in subjects for r in s.records]
    if wrong := {r.id for r in every if r.verdict not in VERDICTS} | {r.id for r in every if not r.result}:
        raise SystemExit(f"data/experiments: no verdict of {VERDICTS}, or no result: {', '.join(sorted(wrong))}")
    if len({r.id for r in every}) < len(every):
        raise SystemExit("data/experiments: an id is there twice")
    return subjects


def pages(subjects: Sequence[Subject]) -> dict[str, str]:
    """The site's page of each subject by the subject's name, its links as relative to the subject's file."""
    places = _places(subjects)
    return {s.name: "\n".join(_subject(s, places)) for s in subjects}


def index(subjects: Sequence[Subject]) -> str:
    """The text of docs/experiments.md. Raises SystemExit where it has no place for the index."""
    before, begin, rest = INDEX.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{INDEX}: no place between {BEGIN.strip()} and {END.strip()}")
    made = "\n".join(_index(subjects, _places(subjects)))
    return f"{before}{begin}\n{made}\n{end}{after}"


def _places(subjects: Sequence[Subject]) -> dict[str, tuple[str, Record]]:
    return {r.id: (s.name, r) for s in subjects for r in s.records}


def _linked(text: str, places: Mapping[str, tuple[str, Record]], here: str) -> str:
    """Prose with its references as links; `here` is the page: a subject's name, or "" for the index."""

    def link(m: re.Match[str]) -> str:
        if m[1] not in places:
            raise SystemExit(f"data/experiments: no record is called {m[1]}")
        name, record = places[m[1]]
        path = "" if name == here else f"{name}.toml" if here else f"../data/experiments/{name}.toml"
        return f"[{record.title}]({path}#{record.anchor})"

    text = REFERENCE.sub(link, text)
    if here:
        return text
    return text.replace("](../../docs/", "](").replace("](../performance/", "](../data/performance/")


def _subject(subject: Subject, places: Mapping[str, tuple[str, Record]]) -> Iterator[str]:
    yield f"# {subject.title}"
    yield "\n[All experiments](../../docs/experiments.md).\n"
    yield from ("| experiment | board | verdict | result |", "|---|---|---|---|")
    for r in subject.records:
        result = _linked(r.result, places, subject.name)
        yield f"| [{r.title}](#{r.anchor}) | {r.board} | {r.verdict} | {result} |"
    for r in subject.records:
        yield f"\n## {r.title}\n"
        read = f", read {r.read} GB/s" if r.read else ""
        commits = f" · {', '.join(f'`{c}`' for c in r.commit.split())}" if r.commit else ""
        yield f"**{r.verdict.capitalize()}** · `{r.kernel.replace(', ', '`, `')}` · {r.board}{read}{commits}\n"
        command = f"`{r.command}`" if r.command else ""
        for label, text in (
            ("Expected", r.expected), ("Changed", r.changed), ("Result", r.result), ("Command", command)
        ):  # fmt: skip
            if text:
                yield f"- {label}: {_linked(_indented(text), places, subject.name)}"
        if r.note:
            yield f"\n{_linked(r.note.strip(), places, subject.name)}"
        if r.next:
            yield f"\nTo try: {_linked(r.next.strip(), places, subject.name)}"
    yield ""


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n  ")


def _index(subjects: Sequence[Subject], places: Mapping[str, tuple[str, Record]]) -> Iterator[str]:
    yield "## What not to try again\n"
    yield from _listed(subjects, places, "lost")
    yield "\n## What is open\n"
    yield from _listed(subjects, places, "open")
    yield "\n## What would be tried next\n"
    yield from ("| after | what |", "|---|---|")
    for s in subjects:
        for r in (r for r in s.records if r.next):
            yield f"| {_linked(f'[[{r.id}]]', places, '')} | {_linked(' '.join(r.next.split()), places, '')} |"
    yield "\n## All of it\n"
    yield from ("| page | won | lost | open |", "|---|---|---|---|")
    for s in subjects:
        counts = " | ".join(str(sum(r.verdict == v for r in s.records)) for v in VERDICTS)
        yield f"| [{s.title}](../data/experiments/{s.name}.toml) | {counts} |"


def _listed(subjects: Sequence[Subject], places: Mapping[str, tuple[str, Record]], verdict: str) -> Iterator[str]:
    yield from ("| experiment | kernel | board | result |", "|---|---|---|---|")
    for s in subjects:
        for r in (r for r in s.records if r.verdict == verdict):
            kernel = f"`{r.kernel.replace(', ', '`, `')}`"
            yield f"| {_linked(f'[[{r.id}]]', places, '')} | {kernel} | {r.board} | {_linked(r.result, places, '')} |"


def main() -> None:
    INDEX.write_text(index(read()))


if __name__ == "__main__":
    main()
