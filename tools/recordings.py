"""Reads recordings (kerngen/tuning/recorded.py), for fits and replays.

Whoever reads gets all of a file or a RecordingError that names file and line: a recording is a test fixture, and never
guessed at.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kerngen.compiler.compile import Resources
from kerngen.errors import KerngenError, RecordingError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import defaults_of
from kerngen.tuning.recorded import (
    SUFFIX,
    TAKES,
    TIMES,
    VERSION,
    Cells,
    Head,
    Recorded,
    Row,
    cell_of,
    why_incomplete,
)

# What two files of one folder must agree in: figures of different boards, drivers or compilers are not compared.
SAME_PLACE = ("v", "device", "environment")


class _Cells(Cells):
    """How the rows under one head are read."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._known = {n: {cell_of(v): v for v in self.values[n]} for n in self.varying}
        self._fixed = {n: vs[0] for n, vs in self.values.items() if len(vs) == 1}

    def row(self, cells: list[str]) -> Row:
        """Raises RecordingError, without file and line."""
        if len(cells) != len(self.columns):
            raise RecordingError(f"{len(cells)} cells in {len(self.columns)} columns")
        given = dict(zip(self.columns, cells, strict=True))
        chosen = dict(self._fixed)
        for name in self.varying:
            if given[name] not in self._known[name]:
                raise RecordingError(f"{name}={given[name]!r} is none of: {', '.join(self._known[name])}")
            chosen[name] = self._known[name][given[name]]
        config = self.config_type(**chosen)
        times = [None if given[n] == "" else _number(float, n, given[n]) for n in TIMES]
        mhz = None if given["mhz"] == "" else _number(int, "mhz", given["mhz"])
        us, p10, p90, final = times
        takes, reason = self._takes(given), given["reason"]
        row = Row(config, given["outcome"], us, p10, p90, final, mhz, takes, reason)
        if (why := row.why_wrong() or self.why_off(config)) is not None:
            raise RecordingError(why)
        return row

    def _takes(self, given: Mapping[str, str]) -> dict[str, Resources] | None:
        columns = [[_number(int, n, t) for t in given[n].split()] for n in TAKES]
        if not any(columns):
            return None
        if any(len(c) != len(self.head.entries) for c in columns):
            raise RecordingError(f"resources are not those of the entries {', '.join(self.head.entries)}")
        return {e: Resources(*found) for e, *found in zip(self.head.entries, *columns, strict=True)}


def _number(kind: Callable[[str], Any], name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RecordingError(f"{name}={text!r} is no number") from None


def read(path: Path) -> Recorded:
    """The recording in `path`. Raises RecordingError, with file and line, where it is not as it should be; OSError."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as e:
        raise RecordingError(f"{path}: byte {e.start} is no UTF-8") from None
    lines = text.split("\n")
    if lines[-1]:
        raise RecordingError(f"{path}:{len(lines)}: cut short: the line has no end")
    del lines[-1]
    head = _line(path, 1, lambda: _head(lines[0] if lines else ""))
    if path.name != head.file_name:
        raise RecordingError(f"{path}:1: this is {head.file_name}, under another name")
    cells = _line(path, 1, lambda: _Cells(head))
    own = _own_names(head.kernel)
    _line(path, 2, lambda: _require_columns(lines[1] if len(lines) > 1 else "", cells.columns, own))
    rows: dict[Any, Row] = {}
    seen: dict[Any, int] = {}
    for number, line in enumerate(lines[2:], 3):
        row = _line(path, number, lambda line=line: cells.row(_split(line)))  # type: ignore[misc]
        if row.config in seen:
            raise RecordingError(f"{path}:{number}: the configuration of line {seen[row.config]} again")
        seen[row.config], rows[row.config] = number, row
    recorded = Recorded(head, tuple(rows.values()))
    if (why := why_incomplete(recorded)) is not None:
        raise RecordingError(f"{path}:1: {why}")
    return recorded


def read_folder(folder: Path) -> tuple[Recorded, ...]:
    """Every recording in `folder`, by file name. Raises RecordingError where there is none, or where two differ in
    board, driver or compiler, or in the sources of one kernel: such figures are not to be mixed. OSError.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise RecordingError(f"{folder} holds no recordings (*{SUFFIX})", hint="docs/tuning.md says how they are made")
    found = [read(p) for p in paths]
    by_kernel: dict[str, tuple[Path, Recorded]] = {}
    for path, recorded in zip(paths, found, strict=True):
        for other, first, names in (
            (paths[0], found[0], SAME_PLACE),
            (*by_kernel.setdefault(recorded.head.kernel, (path, recorded)), ("folder_digest",)),
        ):
            for name in names:
                mine, theirs = getattr(recorded.head, name), getattr(first.head, name)
                if mine != theirs:
                    raise RecordingError(
                        f"{path}:1: {_difference(name, mine, theirs)} in {other.name}: versions are mixed",
                        hint="keep what was recorded apart in folders of its own",
                    )
    return tuple(found)


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        name, mine, theirs = next(
            (f"{name} {k}", mine.get(k), theirs.get(k)) for k in (*mine, *theirs) if mine.get(k) != theirs.get(k)
        )
    return f"{name} is {mine!r}, and {theirs!r}"


def _line(path: Path, number: int, what: Callable[[], Any]) -> Any:
    try:
        return what()
    except KerngenError as e:
        raise RecordingError(f"{path}:{number}: {e.message}", hint=e.hint) from None


def _head(line: str) -> Head:
    try:
        given = json.loads(line)
    except ValueError as e:
        raise RecordingError(f"the first line is not the head, which is JSON: {e}") from None
    if not isinstance(given, dict) or not isinstance(given.get("v"), int):
        raise RecordingError("the first line is not the head of a recording: it has no version")
    if given["v"] != VERSION:
        raise RecordingError(
            f"version {given['v']}; this kerngen reads {VERSION}", hint="record it again, or update kerngen"
        )
    known = {f.name: f for f in fields(Head)}
    if wrong := sorted(given.keys() ^ known.keys()):
        raise RecordingError(f"the head lacks, or should not have: {', '.join(wrong)}")
    for name, kind in _KINDS.items():
        if not isinstance(given[name], kind) or (kind is int and isinstance(given[name], bool)):
            raise RecordingError(f"the head's {name} is {given[name]!r}")
    if not all(
        isinstance(part, dict) and all(isinstance(v, list) and v for v in part.values()) for part in given["grid"]
    ):
        raise RecordingError("the head's grid is not a list of fields with lists of values")
    own = _own_names(given["kernel"])
    grid = tuple({own.get(k, k): tuple(v) for k, v in part.items()} for part in given["grid"])
    default = {own.get(k, k): v for k, v in given["default"].items()}
    read = {"grid": grid, "default": default, "entries": tuple(given["entries"]), "clocks": tuple(given["clocks"])}
    head = Head(**(given | read))
    recorded = Recorded(head, ())
    try:
        _ = recorded.problem, recorded.default, recorded.target
    except TypeError as e:
        raise RecordingError(f"the head does not fit today's {head.kernel}: {e}", hint="record it again") from None
    return head


_KINDS: dict[str, type] = {
    "kernel": str, "name": str, "problem": dict, "arch": str, "device": dict, "grid": list, "default": dict,
    "num_configs": int, "entries": list, "exhaustive": bool, "held_out": bool, "environment": dict, "board": str,
    "clocks": list, "folder_digest": str, "commit": str, "complete": bool,
}  # fmt: skip


def _own_names(kernel: str) -> Mapping[str, str]:
    """Today's names of fields that were recorded under the names that they are filed under."""
    return defaults_of(find_kernel(kernel).config_type).own


def _require_columns(line: str, columns: tuple[str, ...], own: Mapping[str, str]) -> None:
    given = [own.get(c, c) for c in line.split(",")]
    if unknown := [c for c in given if c not in columns]:
        raise RecordingError(f"unknown column {', '.join(map(repr, unknown))}")
    if tuple(given) != columns:
        raise RecordingError(f"columns {line}; expected {','.join(columns)}")


def _split(line: str) -> list[str]:
    if line.startswith("{"):
        raise RecordingError("a second head: two recordings in one file")
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError) as e:
        raise RecordingError(f"no line of a CSV: {e}") from None
    return cells
