"""Winners as text that a reviewer can read and diff: one sheet for each kernel and board.

    kerngen-text 1 rmsnorm sm90 H200
    board {"arch":"sm90","clock_mhz":1980,…}
    run r1 4ec058fd0543 2026-11-21T09:06:01.250000+00:00 nvrtc 13.0 {"driver":"580.159.04",…}

    problem dtype=fp16 hidden=5376 | batch=8
     num_tokens=64
      = 16.602 measured r1+53.77 final n=15 16.52..16.71 min 16.49 err 0.0039 0.01 | block_m=2 stream=true @a91f03c2b7d0
      + 17.021 measured r1+54.01 final n=15 16.91..17.11 min 16.88 err 0.0039 0.01 | block_m=4 @0c3fb1a2d4e5
      ! wrong_result measured r1+12.5 "[3, 4] is off by 0.5" | block_m=8 @77aa01c2b3d4
      # 31 invalid, 2 launch_failed

A problem has its compiled-in fields, then its bucketed ones; a point its dynamic one, and, where these do not say it,
all of the problem that was tuned. "=" won, "+" came near, "!" is wrong and so is never chosen; "#" counts what else was
tried. Of each: median, how it is known, 10th to 90th percentile, least, errors, configuration, and the first digits of
its source's SHA-256. A prediction is `16.602 predicted roofline-3 | …`: it has no run, no samples and no errors to
show, and what is called measured without them is refused. Fields that have their default are left out.

`parse(dump(x)) == x`; and what `parse` takes, `dump` writes again, to the letter: there is one way to say a thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from kerngen.errors import DatabaseError
from kerngen.tuning_db.serve.values import OUTCOMES, STAGES

VERSION = 1
SOURCE_DIGITS = 12
_HEAD = "kerngen-text"
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOT_BARE = {"true", "false", "null", "NaN", "Infinity"}
_NAME = re.compile(r"[A-Za-z_]\w*")
_SHOWN = re.compile(r"\S+")
_SOURCE = re.compile(rf"[0-9a-f]{{{SOURCE_DIGITS}}}")
_NUMBER = re.compile(r"-?(inf|nan|\d+(\.\d+)?(e[-+]?\d+)?)")
_WHOLE = re.compile(r"-?\d{1,18}")
_WON, _NEAR, _WRONG = "=", "+", "!"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Run:
    """A tuning run in one environment. at: when its first row here was written, ISO 8601 with a zone."""

    id: str
    at: str
    nvrtc: tuple[int, int]
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One observation. won: of the build that won. run: its index in the sheet's runs.

    run None: a prediction, which has a model instead. after: seconds since that run's `at`. Times in microseconds.
    p50_us None: it gave a wrong result, says `reason`.
    """

    won: bool
    p50_us: float | None
    config: Mapping[str, Any]
    source: str
    run: int | None = None
    model: str = ""
    after: float = 0.0
    stage: str = "trial"
    samples: int = 0
    p10_us: float | None = None
    p90_us: float | None = None
    min_us: float | None = None
    error_abs: float | None = None
    error_rel: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """A tuned point. dynamic: None for a kernel that has no such field. fields: the problem, where the rest differs.

    refused: outcome -> how often, of what is not told one by one.
    """

    dynamic: int | None
    trials: tuple[Trial, ...]
    fields: Mapping[str, Any] | None = None
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    static: Mapping[str, Any]
    runtime: Mapping[str, Any]
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """One kernel on one board. device: the fields of its Device. dynamic: the dynamic field's name, "" for none."""

    kernel: str
    arch: str
    board: str
    device: Mapping[str, Any]
    dynamic: str
    runs: tuple[Run, ...]
    cells: tuple[Cell, ...]


# ---- writing


def dump(sheet: Sheet) -> str:
    lines = [
        f"{_HEAD} {VERSION} {' '.join(map(_word, (sheet.kernel, sheet.arch, sheet.board)))}",
        f"board {_json(sheet.device)}",
    ]
    for i, run in enumerate(sheet.runs, 1):
        version = f"{run.nvrtc[0]}.{run.nvrtc[1]}"
        lines.append(f"run r{i} {_word(run.id)} {run.at} nvrtc {version} {_json(run.environment)}")
    for cell in sheet.cells:
        lines += ["", " ".join(["problem", *_pairs(cell.static), "|", *_pairs(cell.runtime)])]
        for point in cell.points:
            lines += _point_lines(sheet, point)
    return "\n".join(lines) + "\n"


def _point_lines(sheet: Sheet, point: Point) -> Iterator[str]:
    here = "point" if point.dynamic is None else f"{sheet.dynamic}={point.dynamic}"
    yield f" {here}" + ("" if point.fields is None else f" as {_json(point.fields)}")
    for trial in point.trials:
        yield f"  {_trial(trial)} | {' '.join([*_pairs(trial.config), '@' + trial.source])}"
    if point.refused:
        yield "  # " + ", ".join(f"{count} {outcome}" for outcome, count in point.refused.items())


def _trial(t: Trial) -> str:
    when = "" if t.run is None else f"measured r{t.run + 1}+{_number(t.after)}"
    if t.p50_us is None:
        return f"{_WRONG} wrong_result {when or f'predicted {_word(t.model)}'} {_json(t.reason)}"
    mark = _WON if t.won else _NEAR
    if t.run is None:
        return f"{mark} {_number(t.p50_us)} predicted {_word(t.model)}"
    spread = "" if t.p10_us is None or t.p90_us is None else f" {_number(t.p10_us)}..{_number(t.p90_us)}"
    least = "" if t.min_us is None else f" min {_number(t.min_us)}"
    relative = "" if t.error_rel is None else f" {_number(t.error_rel)}"
    return (
        f"{mark} {_number(t.p50_us)} {when} {t.stage} n={t.samples}{spread}{least} err {_number(t.error_abs)}{relative}"
    )


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _pairs(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_word(value)}" for name, value in sorted(fields.items())]


def _word(value: Any) -> str:
    """JSON, where a plain word needs no quotes."""
    if isinstance(value, str) and _BARE.fullmatch(value) and value not in _NOT_BARE:
        return value
    return _json(value)


def _number(value: float | None) -> str:
    return repr(float(value)).removesuffix(".0") if value is not None else "none"


def rounded(value: float | None) -> float | None:
    """As sheets have figures: five digits, which is finer than any timing."""
    return None if value is None else float(f"{value:.5g}")


# ---- reading


class _Line:
    """A line that is read from left to right. Everything it raises is a ValueError in words."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, literal: str) -> bool:
        """True, and behind it, if this comes next."""
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) if found else 0
        return found

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise ValueError(f"{literal.strip()!r} is missing at {self.text[self.at : self.at + 20]!r}")

    def word(self, pattern: re.Pattern[str], what: str) -> str:
        if (found := pattern.match(self.text, self.at)) is None:
            raise ValueError(f"{what} is missing at {self.text[self.at : self.at + 20]!r}")
        self.at = found.end()
        return found.group()

    def json(self) -> Any:
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value

    def value(self) -> Any:
        found = _BARE.match(self.text, self.at)
        if found is None or found.group() in _NOT_BARE:
            return self.json()
        self.at = found.end()
        return found.group()

    def number(self) -> float:
        return float(self.word(_NUMBER, "a number"))

    def whole(self) -> int:
        return int(self.word(_WHOLE, "a whole number"))

    def pairs(self, until: str) -> dict[str, Any]:
        """name=value, each followed by a space, up to what begins with `until`; "", to the line's end."""
        found: dict[str, Any] = {}
        while self.at < len(self.text) and not (until and self.text.startswith(until, self.at)):
            name = self.word(_NAME, "a field")
            self.expect("=")
            if name in found:
                raise ValueError(f"{name} is said twice")
            found[name] = self.value()
            if self.at < len(self.text):
                self.expect(" ")
        return found

    def end(self) -> None:
        if self.at != len(self.text):
            raise ValueError(f"{self.text[self.at :]!r} is too much")


def parse(text: str, where: str = "text") -> Sheet:
    """The sheet that `text` is. where: its name, for messages.

    Raises DatabaseError, naming the line, for whatever `dump` would not write just so.
    """
    lines = text.split("\n")
    reading = _Reading()
    for number, line in enumerate(lines, 1):
        try:
            reading.take(number, line)
        except (ValueError, TypeError, RecursionError, OverflowError) as e:
            raise DatabaseError(f"{where}, line {number}: {e}") from e
    sheet = reading.sheet(where)
    for number, (given, wanted) in enumerate(zip(lines, dump(sheet).split("\n"), strict=False), 1):
        if given != wanted:
            raise DatabaseError(f"{where}, line {number} is not as it is written", hint=f"it should be: {wanted}")
    if dump(sheet) != text:
        raise DatabaseError(f"{where} does not end where it should")
    return sheet


class _Reading:
    """A sheet, as far as its lines were read."""

    def __init__(self) -> None:
        self.names: tuple[str, str, str] | None = None
        self.device: dict[str, Any] | None = None
        self.dynamic = ""
        self.runs: list[Run] = []
        self.cells: list[tuple[dict[str, Any], dict[str, Any], list[Point]]] = []

    def take(self, number: int, text: str) -> None:
        line = _Line(text)
        if number == 1:
            self._head(line)
        elif number == 2:
            line.expect("board ")
            self.device = _object(line.json())
        elif line.take("run "):
            self._run(line)
        elif line.take("problem "):
            static = line.pairs("|")
            line.expect("|")
            runtime = line.pairs("") if line.take(" ") else {}
            self.cells.append((static, runtime, []))
        elif line.take("  # "):
            self._refused(line)
        elif line.take("  "):
            point = self._point()
            trial = self._trial(line)
            self._put(Point(point.dynamic, (*point.trials, trial), point.fields, point.refused))
        elif line.take(" "):
            self._new_point(line)
        line.end()

    def sheet(self, where: str) -> Sheet:
        if self.names is None or self.device is None:
            raise DatabaseError(f"{where} is no text of a tuning database: it has no board")
        cells = tuple(Cell(static, runtime, tuple(points)) for static, runtime, points in self.cells)
        return Sheet(*self.names, self.device, self.dynamic, tuple(self.runs), cells)

    def _head(self, line: _Line) -> None:
        line.expect(f"{_HEAD} ")
        if (version := line.whole()) != VERSION:
            raise ValueError(f"it is of version {version}; this kerngen reads {VERSION}")
        names = []
        for what in ("a kernel", "an arch", "a board"):
            line.expect(" ")
            if not isinstance(name := line.value(), str):
                raise ValueError(f"{name!r:.40} does not name {what}")
            names.append(name)
        self.names = names[0], names[1], names[2]

    def _run(self, line: _Line) -> None:
        line.expect(f"r{len(self.runs) + 1} ")
        id = line.value()
        if not isinstance(id, str):
            raise ValueError("a run is named by a word")
        line.expect(" ")
        at = line.word(_SHOWN, "a time")
        if datetime.fromisoformat(at).tzinfo is None:
            raise ValueError(f"{at} has no time zone")
        line.expect(" nvrtc ")
        major = line.whole()
        line.expect(".")
        minor = line.whole()
        line.expect(" ")
        self.runs.append(Run(id, at, (major, minor), _object(line.json())))

    def _new_point(self, line: _Line) -> None:
        if not self.cells:
            raise ValueError("it stands before any problem")
        dynamic = None
        if not line.take("point"):
            name = line.word(_NAME, "the dynamic field")
            if name != (self.dynamic or name):
                raise ValueError(f"the dynamic field is {self.dynamic}, not {name}")
            self.dynamic = name
            line.expect("=")
            dynamic = line.whole()
        self.cells[-1][2].append(Point(dynamic, (), _object(line.json()) if line.take(" as ") else None))

    def _point(self) -> Point:
        if not self.cells or not self.cells[-1][2]:
            raise ValueError("it stands before any tuned point")
        point = self.cells[-1][2][-1]
        if point.refused:
            raise ValueError("it stands behind the count of what was refused")
        return point

    def _put(self, point: Point) -> None:
        if len({(_json(t.config), t.source) for t in point.trials if t.won}) > 1:
            raise ValueError("there is one winner of a point")
        self.cells[-1][2][-1] = point

    def _refused(self, line: _Line) -> None:
        point, counts = self._point(), {}
        while True:
            count = line.whole()
            line.expect(" ")
            outcome = line.word(_NAME, "an outcome")
            if outcome not in OUTCOMES or outcome == "ok" or outcome in counts or count < 1:
                raise ValueError(f"{count} {outcome}: it is no outcome that counts here")
            counts[outcome] = count
            if not line.take(", "):
                break
        self._put(Point(point.dynamic, point.trials, point.fields, counts))

    def _trial(self, line: _Line) -> Trial:
        given: dict[str, Any] = {"won": line.take(f"{_WON} "), "p50_us": None}
        if wrong := not given["won"] and line.take(f"{_WRONG} "):
            line.expect("wrong_result")
        else:
            if not given["won"]:
                line.expect(f"{_NEAR} ")
            given["p50_us"] = line.number()
            if not 0 < given["p50_us"] < float("inf"):
                raise ValueError(f"{given['p50_us']} us is no time")
        line.expect(" ")
        if line.take("predicted "):
            given["model"] = line.value()
            if not isinstance(given["model"], str) or not given["model"]:
                raise ValueError("a prediction names its model")
        else:
            line.expect("measured ")
            self._measured(line, given, wrong)
        if wrong:
            line.expect(" ")
            given["reason"] = line.json()
            if not isinstance(given["reason"], str) or not given["reason"]:
                raise ValueError("a wrong result says what was wrong")
        line.expect(" | ")
        config = line.pairs("@")
        line.expect("@")
        return Trial(config=config, source=line.word(_SOURCE, "the source's digest"), **given)

    def _measured(self, line: _Line, given: dict[str, Any], wrong: bool) -> None:
        """What nobody has who did not measure: a run that is named, samples, and errors against the reference."""
        line.expect("r")
        run = line.whole()
        if not 1 <= run <= len(self.runs):
            raise ValueError(f"there is no run r{run}: what was measured names the run that did")
        given["run"] = run - 1
        line.expect("+")
        given["after"] = line.number()
        if wrong:
            return
        line.expect(" ")
        given["stage"] = line.word(_NAME, "a stage")
        if given["stage"] not in STAGES:
            raise ValueError(f"{given['stage']} is none of {', '.join(STAGES)}")
        line.expect(" n=")
        given["samples"] = line.whole()
        if given["samples"] < 1:
            raise ValueError("what was measured has a sample at least")
        if not line.text.startswith((" min ", " err "), line.at):
            line.expect(" ")
            given["p10_us"] = line.number()
            line.expect("..")
            given["p90_us"] = line.number()
        if line.take(" min "):
            given["min_us"] = line.number()
        line.expect(" err ")
        given["error_abs"] = line.number()
        if not line.text.startswith(" |", line.at):
            line.expect(" ")
            given["error_rel"] = line.number()


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} is no JSON object")
    return value


def moment(run: Run, after: float) -> str:
    """When a trial was, as its row says."""
    return (datetime.fromisoformat(run.at) + timedelta(seconds=after)).isoformat(timespec="microseconds")
