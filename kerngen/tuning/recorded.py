"""Recorded measurements: what every configuration of a grid took on one board, as text that can be read and diffed.

One file a problem, DIR/<kernel>-<name>.csv, in UTF-8:

    {"v": 1, "kernel": "dense_gemv", "problem": {...}, ...}          line 1: `Head`, as JSON
    block_m,steps,outcome,us,p10,p90,final_us,mhz,registers,...      line 2: the columns
    8,4,ok,12.345,12.31,12.401,12.35,1980,72,0,0,0,512,              a configuration a line

Columns are the tunables that vary in the grid, by value; what a kernel with several entries takes stands in one cell,
an entry after the other in the order of the head's `entries`. Times are in microseconds, to a nanosecond. Whoever reads
gets all of it or a RecordingError that names file and line: a recording is a test fixture, and never guessed at.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import Resources
from kerngen.errors import KerngenError, RecordingError
from kerngen.system.files import publish
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, defaults_of, describe, fields_of
from kerngen.tuning_db.read.canonical_fields import device_from

VERSION = 1
OUTCOMES = ("ok", "invalid", "compile_failed", "wrong_result", "launch_failed", "timed_out")  # as the database's
TIMES = ("us", "p10", "p90", "final_us")  # of a Row: us, p10_us, p90_us, final_us
TAKES = ("registers", "spill_store", "spill_load", "stack", "static_smem")  # the fields of Resources, in their order
COLUMNS = ("outcome", *TIMES, "mhz", *TAKES, "reason")  # after the tunables
MOST_REASON = 200  # characters
SUFFIX = ".csv"
# What two files of one folder must agree in: figures of different boards, drivers or compilers are not compared.
SAME_PLACE = ("v", "device", "environment")

Part = Mapping[str, tuple[Any, ...]]  # of a grid: Config field -> values; a field that is left out has its default


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one configuration.

    us, p10_us, p90_us: set if outcome is "ok". final_us: of the second look, at the fastest together. mhz: the SM clock
    right after. takes: entry -> resources; None if it did not compile. reason: why it is not "ok", on one line.
    """

    config: Any
    outcome: str
    us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    final_us: float | None = None
    mhz: int | None = None
    takes: Mapping[str, Resources] | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("us", "p10_us", "p90_us", "final_us"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, round(value, 3))
        reason = "".join(c if c.isprintable() else " " for c in self.reason)
        object.__setattr__(self, "reason", " ".join(reason.split())[:MOST_REASON].strip())

    @property
    def best_us(self) -> float | None:
        """Its time by the best look there was: the second, where it had one."""
        return self.us if self.final_us is None else self.final_us

    def why_wrong(self) -> str | None:
        """Why no recording can say this, or None."""
        if self.outcome not in OUTCOMES:
            return f"outcome {self.outcome!r} is none of: {', '.join(OUTCOMES)}"
        times = [self.us, self.p10_us, self.p90_us]
        if self.outcome != "ok":
            return None if times == [None] * 3 and self.final_us is None else f"{self.outcome}, with a time"
        if any(t is None for t in times):
            return "ok, without its three times"
        for t in (*times, self.final_us):
            if t is not None and not (math.isfinite(t) and t > 0):
                return f"{t} us is no time"
        return None if self.takes is not None else "ok, without the resources of what was timed"


@dataclass(frozen=True, slots=True)
class Head:
    """What a file is about.

    grid: the parts of the space that were recorded, one or more for each body. default: the kernel's default
    configuration then, which is always among the rows and may lie off the grid. num_configs: rows that a complete file
    has. exhaustive: every valid configuration of the grid, not a sample of it. held_out: not for fitting. entries: the
    kernel's. environment: driver, compiler, timing. board: empty in what is complete. clocks: as each
    session on it began and ended. folder_digest, commit: of the sources.
    """

    kernel: str
    name: str
    problem: Mapping[str, Any]
    arch: str
    device: Mapping[str, Any]
    grid: tuple[Part, ...]
    default: Mapping[str, Any]
    num_configs: int
    entries: tuple[str, ...]
    exhaustive: bool = True
    held_out: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    board: str = ""
    clocks: tuple[Mapping[str, Any], ...] = ()
    folder_digest: str = ""
    commit: str = ""
    complete: bool = False
    v: int = VERSION

    @property
    def file_name(self) -> str:
        return f"{self.kernel}-{self.name}{SUFFIX}"

    def text(self) -> str:
        """Line 1."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Recorded:
    """One problem's recording. rows: by the order of the file; no configuration twice."""

    head: Head
    rows: tuple[Row, ...]

    @cached_property
    def kernel(self) -> Kernel:
        return find_kernel(self.head.kernel)

    @cached_property
    def problem(self) -> Any:
        return self.kernel.problem_type(**self.head.problem)

    @cached_property
    def default(self) -> Any:
        return self.kernel.config_type(**self.head.default)

    @cached_property
    def target(self) -> Target:
        return Target(find_arch(self.head.arch), device_from(self.head.device))

    @cached_property
    def by_config(self) -> Mapping[Any, Row]:
        return {r.config: r for r in self.rows}

    @property
    def best(self) -> Row:
        """The fastest known: of those that had a second look, by that. Raises RecordingError if nothing ran."""
        ok = [r for r in self.rows if r.outcome == "ok"]
        if not ok:
            raise RecordingError(f"{self.head.file_name}: no configuration ran")
        return min([r for r in ok if r.final_us is not None] or ok, key=lambda r: r.best_us or math.inf)


# -- columns and cells


class _Cells:
    """How the rows under one head are written and read."""

    def __init__(self, head: Head) -> None:
        """Raises RecordingError if the head does not fit today's kernel."""
        self.head, self.config_type = head, find_kernel(head.kernel).config_type
        defaults = {f.name: f.default for f in fields(self.config_type)}
        used = {k: None for part in (*head.grid, head.default) for k in part}
        if unknown := [k for k in used if k not in defaults]:
            raise RecordingError(
                f"{head.kernel} has no tunable {', '.join(unknown)} any more", hint="record it again: docs/tuning.md"
            )
        if required := [k for k, v in defaults.items() if v is MISSING and k not in used]:
            raise RecordingError(f"{head.kernel}: {', '.join(required)} has neither a value nor a default")
        self.values: dict[str, tuple[Any, ...]] = {}
        for name, default in defaults.items():
            parts = [part.get(name, (default,)) for part in head.grid]
            every = [v for part in parts for v in part] + [head.default.get(name, default)]
            self.values[name] = tuple({_text(v): v for v in every}.values())
        self.varying = tuple(n for n, vs in self.values.items() if len(vs) > 1)
        self._known = {n: {_text(v): v for v in self.values[n]} for n in self.varying}
        self._fixed = {n: vs[0] for n, vs in self.values.items() if len(vs) == 1}
        self._parts = [{n: set(part.get(n, (d,))) for n, d in defaults.items()} for part in head.grid]
        self.columns = (*self.varying, *COLUMNS)

    def row_text(self, row: Row) -> str:
        """Its line. Raises RecordingError if the reader would refuse it."""
        config = fields_of(row.config)
        if (why := row.why_wrong() or self._why_off(row.config)) is not None:
            raise RecordingError(f"{self.head.file_name}: {describe(row.config)}: {why}")
        times = ["" if t is None else repr(t) for t in (row.us, row.p10_us, row.p90_us, row.final_us)]
        if row.takes is not None and sorted(row.takes) != sorted(self.head.entries):
            raise RecordingError(f"{self.head.file_name}: resources of {list(row.takes)}, not {self.head.entries}")
        taken = [] if row.takes is None else [asdict(row.takes[e]) for e in self.head.entries]
        takes = [" ".join(str(t[f.name]) for t in taken) for f in fields(Resources)]
        mhz = "" if row.mhz is None else str(row.mhz)
        out = StringIO()
        cells = [*(_text(config[n]) for n in self.varying), row.outcome, *times, mhz, *takes, row.reason]
        csv.writer(out, lineterminator="\n").writerow(cells)
        return out.getvalue()

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
        if (why := row.why_wrong() or self._why_off(config)) is not None:
            raise RecordingError(why)
        return row

    def _takes(self, given: Mapping[str, str]) -> dict[str, Resources] | None:
        columns = [[_number(int, n, t) for t in given[n].split()] for n in TAKES]
        if not any(columns):
            return None
        if any(len(c) != len(self.head.entries) for c in columns):
            raise RecordingError(f"resources are not those of the entries {', '.join(self.head.entries)}")
        return {e: Resources(*found) for e, *found in zip(self.head.entries, *columns, strict=True)}

    def _why_off(self, config: Any) -> str | None:
        chosen = fields_of(config)
        if any(all(chosen[n] in values for n, values in part.items()) for part in self._parts):
            return None
        if all(chosen[n] == v for n, v in self.head.default.items()):
            return None
        return "its configuration is not on the grid"


def _text(value: Any) -> str:
    """true, 8, 0.5, plain: a tunable's value in a cell."""
    return value if isinstance(value, str) else json.dumps(value)


def _number(kind: Callable[[str], Any], name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RecordingError(f"{name}={text!r} is no number") from None


# -- writing


def write(path: Path, recorded: Recorded) -> None:
    """Make `path` hold `recorded`, whole or not at all. Raises OSError, or RecordingError if it contradicts itself."""
    cells = _Cells(recorded.head)
    lines = [recorded.head.text() + "\n", ",".join(cells.columns) + "\n", *map(cells.row_text, recorded.rows)]
    if (why := _why_incomplete(recorded)) is not None:
        raise RecordingError(f"{path}: {why}")
    publish("".join(lines).encode(), path)


# -- reading


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
    if (why := _why_incomplete(recorded)) is not None:
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


def _own_names(kernel: str) -> Mapping[str, str]:
    """Today's names of fields that were recorded under the names that they are filed under."""
    return defaults_of(find_kernel(kernel).config_type).own


_KINDS: dict[str, type] = {
    "kernel": str, "name": str, "problem": dict, "arch": str, "device": dict, "grid": list, "default": dict,
    "num_configs": int, "entries": list, "exhaustive": bool, "held_out": bool, "environment": dict, "board": str,
    "clocks": list, "folder_digest": str, "commit": str, "complete": bool,
}  # fmt: skip


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


def _why_incomplete(recorded: Recorded) -> str | None:
    head, found = recorded.head, len(recorded.rows)
    if found > head.num_configs or (head.complete and found != head.num_configs):
        return f"{found} rows; the head says {'all of ' if head.complete else 'at most '}{head.num_configs}"
    if head.complete and recorded.default not in recorded.by_config:
        return "complete, without the default configuration"
    return None


def completed(head: Head, rows: Iterable[Row]) -> Recorded:
    """The finished recording: its rows in the order of their cells. Which board it was no longer matters to anybody."""
    values = _Cells(head).values

    def place(row: Row) -> Iterator[int]:
        chosen = fields_of(row.config)
        return (vs.index(chosen[n]) for n, vs in values.items())

    return Recorded(replace(head, complete=True, board=""), tuple(sorted(rows, key=lambda r: tuple(place(r)))))
