"""Recorded measurements: what every configuration of a grid took on one board, as text that can be read and diffed.

One file a problem, DIR/<kernel>-<name>.csv, in UTF-8:

    {"v": 1, "kernel": "dense_gemv", "problem": {...}, ...}          line 1: `Head`, as JSON
    block_m,steps,outcome,us,p10,p90,final_us,mhz,registers,...      line 2: the columns
    8,4,ok,12.345,12.31,12.401,12.35,1980,72,0,0,0,512,              a configuration a line

Columns are the tunables that vary in the grid, by value; what a kernel with several entries takes stands in one cell,
an entry after the other in the order of the head's `entries`. Times are in microseconds, to a nanosecond.
tools/recordings.py reads them.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import Resources
from kerngen.errors import RecordingError
from kerngen.system.files import publish
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe, fields_of
from kerngen.tuning_db.read.canonical_fields import device_from

VERSION = 1
OUTCOMES = ("ok", "invalid", "compile_failed", "wrong_result", "launch_failed", "timed_out")  # as the database's
TIMES = ("us", "p10", "p90", "final_us")  # of a Row: us, p10_us, p90_us, final_us
TAKES = ("registers", "spill_store", "spill_load", "stack", "static_smem")  # the fields of Resources, in their order
COLUMNS = ("outcome", *TIMES, "mhz", *TAKES, "reason")  # after the tunables
MOST_REASON = 200  # characters
SUFFIX = ".csv"

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


class Cells:
    """How the rows under one head are written. values: of each tunable; varying: the tunables that have several."""

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
            self.values[name] = tuple({cell_of(v): v for v in every}.values())
        self.varying = tuple(n for n, vs in self.values.items() if len(vs) > 1)
        self._parts = [{n: set(part.get(n, (d,))) for n, d in defaults.items()} for part in head.grid]
        self.columns = (*self.varying, *COLUMNS)

    def row_text(self, row: Row) -> str:
        """Its line. Raises RecordingError if the reader would refuse it."""
        config = fields_of(row.config)
        if (why := row.why_wrong() or self.why_off(row.config)) is not None:
            raise RecordingError(f"{self.head.file_name}: {describe(row.config)}: {why}")
        times = ["" if t is None else repr(t) for t in (row.us, row.p10_us, row.p90_us, row.final_us)]
        if row.takes is not None and sorted(row.takes) != sorted(self.head.entries):
            raise RecordingError(f"{self.head.file_name}: resources of {list(row.takes)}, not {self.head.entries}")
        taken = [] if row.takes is None else [asdict(row.takes[e]) for e in self.head.entries]
        takes = [" ".join(str(t[f.name]) for t in taken) for f in fields(Resources)]
        mhz = "" if row.mhz is None else str(row.mhz)
        out = StringIO()
        cells = [*(cell_of(config[n]) for n in self.varying), row.outcome, *times, mhz, *takes, row.reason]
        csv.writer(out, lineterminator="\n").writerow(cells)
        return out.getvalue()

    def why_off(self, config: Any) -> str | None:
        chosen = fields_of(config)
        if any(all(chosen[n] in values for n, values in part.items()) for part in self._parts):
            return None
        if all(chosen[n] == v for n, v in self.head.default.items()):
            return None
        return "its configuration is not on the grid"


def cell_of(value: Any) -> str:
    """true, 8, 0.5, plain: a tunable's value in a cell."""
    return value if isinstance(value, str) else json.dumps(value)


def why_incomplete(recorded: Recorded) -> str | None:
    head, found = recorded.head, len(recorded.rows)
    if found > head.num_configs or (head.complete and found != head.num_configs):
        return f"{found} rows; the head says {'all of ' if head.complete else 'at most '}{head.num_configs}"
    if head.complete and recorded.default not in recorded.by_config:
        return "complete, without the default configuration"
    return None


# -- files


def read_head(path: Path) -> dict[str, Any]:
    """Line 1 of the recording in `path`; empty where it is none. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            head = json.loads(file.readline())
        except ValueError:
            return {}
    return head if isinstance(head, dict) else {}


def write(path: Path, recorded: Recorded) -> None:
    """Make `path` hold `recorded`, whole or not at all. Raises OSError, or RecordingError if it contradicts itself."""
    cells = Cells(recorded.head)
    lines = [recorded.head.text() + "\n", ",".join(cells.columns) + "\n", *map(cells.row_text, recorded.rows)]
    if (why := why_incomplete(recorded)) is not None:
        raise RecordingError(f"{path}: {why}")
    publish("".join(lines).encode(), path)


def completed(head: Head, rows: Iterable[Row]) -> Recorded:
    """The finished recording: its rows in the order of their cells. Which board it was no longer matters to anybody."""
    values = Cells(head).values

    def place(row: Row) -> Iterator[int]:
        chosen = fields_of(row.config)
        return (vs.index(chosen[n]) for n, vs in values.items())

    return Recorded(replace(head, complete=True, board=""), tuple(sorted(rows, key=lambda r: tuple(place(r)))))
