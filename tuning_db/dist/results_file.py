"""Results files: measured winners as text that a reviewer can read and diff, one file for each kernel and board.

    kerngen-text 1 rmsnorm sm90 H200
    board {"arch":"sm90","clock_mhz":1980,…}
    run r1 4ec058fd0543 2026-11-21T09:06:01.250000+00:00 nvrtc 13.0 {"driver":"580.159.04",…}
    step s1 gemma-4-31b decode batch=1 q_len=1 context=8192 chunk=0 layers=12 weight=0.25 of a91f… {}
    base b1 77aa…

    problem dtype=fp16 hidden=5376 | batch=8
     num_tokens=64
      = 16.602 measured r1+53.77 final n=15 16.52..16.71 min 16.49 err 0.0039 0.01 | block_m=2 stream=true @a91f03c2b7d0
      = 16.602 measured r1+90.2 step n=15 16.52..16.71 min 16.49 err 0.0039 0.01 in s1 4321.55/4330.2 b1 | block_m=2 …
      + 17.021 measured r1+54.01 final n=15 16.91..17.11 min 16.88 err 0.0039 0.01 | block_m=4 @0c3fb1a2d4e5
      ! wrong_result measured r1+12.5 "[3, 4] is off by 0.5" | block_m=8 @77aa01c2b3d4
      # 31 invalid, 2 launch_failed

A problem has its compiled-in fields, then its bucketed ones; a point its dynamic one, and, where these do not say it,
all of the problem that was tuned. "=" won, "+" came near, "!" is wrong and so is never chosen; "#" counts what else was
tried. Of each: median, how it is known, 10th to 90th percentile, least, errors, configuration, and the first digits of
its source's SHA-256. What was tried in a step of a model says in which, the step's time with it and without, and which
base all else was as: the head names steps, whose sequence of launches is a digest, and bases, which are digests. A
prediction is `16.602 predicted roofline-3 | …`: it has no run, no samples and no errors to
show, and what is called measured without them is refused. Fields that have their default are left out.

`parse(dump(x)) == x`; and what `parse` takes, `dump` writes again, to the letter: there is one way to say a thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from kerngen.errors import DatabaseError
from kerngen.tuning_db.read.values import OUTCOMES, STAGES
from kerngen.tuning_db.dist.fields_text import (
    NAME,
    SHOWN,
    SOURCE,
    Line,
    as_json,
    as_object,
    number,
    pairs,
    read_lines,
    require_as_written,
    word,
)

VERSION = 1
_HEAD = "kerngen-text"
_WON, _NEAR, _WRONG = "=", "+", "!"


@dataclass(frozen=True, slots=True)
class Run:
    """A tuning run in one environment. at: when its first row here was written, ISO 8601 with a zone."""

    id: str
    at: str
    nvrtc: tuple[int, int]
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a model, as StepKey has it, but for the arch, which is the sheet's."""

    model: str
    phase: str
    batch: int
    q_len: int
    context: int
    chunk: int
    layers: int
    weight: float
    sequence: str
    props: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTrial:
    """What a step took with a configuration, and without. step, base: indices of the sheet's. Times in microseconds."""

    step: int
    step_us: float
    base_step_us: float
    base: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One observation. won: of the build that won. run: its index in the sheet's runs.

    run None: a prediction, which has a model instead. after: seconds since that run's `at`. Times in microseconds.
    p50_us None: it gave a wrong result, says `reason`. look: of stage "step", and of no other.
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
    look: StepTrial | None = None


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
class ResultsFile:
    """One kernel on one board. device: the fields of its Device. dynamic: the dynamic field's name, "" for none.

    steps, bases: that looks refer to; a base is a digest of the configurations that a step otherwise had.
    """

    kernel: str
    arch: str
    board: str
    device: Mapping[str, Any]
    dynamic: str
    runs: tuple[Run, ...]
    cells: tuple[Cell, ...]
    steps: tuple[Step, ...] = ()
    bases: tuple[str, ...] = ()


# ---- writing


def dump(sheet: ResultsFile) -> str:
    lines = [
        f"{_HEAD} {VERSION} {' '.join(map(word, (sheet.kernel, sheet.arch, sheet.board)))}",
        f"board {as_json(sheet.device)}",
    ]
    for i, run in enumerate(sheet.runs, 1):
        version = f"{run.nvrtc[0]}.{run.nvrtc[1]}"
        lines.append(f"run r{i} {word(run.id)} {run.at} nvrtc {version} {as_json(run.environment)}")
    lines += [f"step s{i} {_step(step)}" for i, step in enumerate(sheet.steps, 1)]
    lines += [f"base b{i} {word(base)}" for i, base in enumerate(sheet.bases, 1)]
    for cell in sheet.cells:
        lines += ["", " ".join(["problem", *pairs(cell.static), "|", *pairs(cell.runtime)])]
        for point in cell.points:
            lines += _point_lines(sheet, point)
    return "\n".join(lines) + "\n"


def _step(s: Step) -> str:
    numbers = f"batch={s.batch} q_len={s.q_len} context={s.context} chunk={s.chunk} layers={s.layers}"
    return (
        f"{word(s.model)} {word(s.phase)} {numbers} weight={number(s.weight)} of {word(s.sequence)} {as_json(s.props)}"
    )


def _point_lines(sheet: ResultsFile, point: Point) -> Iterator[str]:
    here = "point" if point.dynamic is None else f"{sheet.dynamic}={point.dynamic}"
    yield f" {here}" + ("" if point.fields is None else f" as {as_json(point.fields)}")
    for trial in point.trials:
        yield f"  {_trial(trial)} | {' '.join([*pairs(trial.config), '@' + trial.source])}"
    if point.refused:
        yield "  # " + ", ".join(f"{count} {outcome}" for outcome, count in point.refused.items())


def _trial(t: Trial) -> str:
    when = "" if t.run is None else f"measured r{t.run + 1}+{number(t.after)}"
    if t.p50_us is None:
        return f"{_WRONG} wrong_result {when or f'predicted {word(t.model)}'} {as_json(t.reason)}"
    mark = _WON if t.won else _NEAR
    if t.run is None:
        return f"{mark} {number(t.p50_us)} predicted {word(t.model)}"
    spread = "" if t.p10_us is None or t.p90_us is None else f" {number(t.p10_us)}..{number(t.p90_us)}"
    least = "" if t.min_us is None else f" min {number(t.min_us)}"
    relative = "" if t.error_rel is None else f" {number(t.error_rel)}"
    figures = f"{t.stage} n={t.samples}{spread}{least} err {number(t.error_abs)}{relative}"
    return f"{mark} {number(t.p50_us)} {when} {figures}" + ("" if t.look is None else f" {_look(t.look)}")


def _look(k: StepTrial) -> str:
    return f"in s{k.step + 1} {number(k.step_us)}/{number(k.base_step_us)} b{k.base + 1}"


# ---- reading


def parse(text: str, where: str = "text") -> ResultsFile:
    """The sheet that `text` is. where: its name, for messages.

    Raises DatabaseError, naming the line, for whatever `dump` would not write just so.
    """
    reading = _Reading()
    read_lines(text, where, reading.take)
    sheet = reading.sheet(where)
    require_as_written(text, dump(sheet), where)
    return sheet


class _Reading:
    """A sheet, as far as its lines were read."""

    def __init__(self) -> None:
        self.names: tuple[str, str, str] | None = None
        self.device: dict[str, Any] | None = None
        self.dynamic = ""
        self.runs: list[Run] = []
        self.steps: list[Step] = []
        self.bases: list[str] = []
        self.cells: list[tuple[dict[str, Any], dict[str, Any], list[Point]]] = []

    def take(self, number: int, text: str) -> None:
        line = Line(text)
        if number == 1:
            self._head(line)
        elif number == 2:
            line.expect("board ")
            self.device = as_object(line.json())
        elif line.take("run "):
            self._run(line)
        elif line.take("step "):
            self._step(line)
        elif line.take("base "):
            self._base(line)
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

    def sheet(self, where: str) -> ResultsFile:
        if self.names is None or self.device is None:
            raise DatabaseError(f"{where} is no text of a tuning database: it has no board")
        cells = tuple(Cell(static, runtime, tuple(points)) for static, runtime, points in self.cells)
        steps, bases = tuple(self.steps), tuple(self.bases)
        return ResultsFile(*self.names, self.device, self.dynamic, tuple(self.runs), cells, steps, bases)

    def _head(self, line: Line) -> None:
        line.expect(f"{_HEAD} ")
        if (version := line.whole()) != VERSION:
            raise ValueError(f"it is of version {version}; this kerngen reads {VERSION}")
        kernel, arch, board = (line.text_value(what, after=" ") for what in ("a kernel", "an arch", "a board"))
        self.names = kernel, arch, board

    def _run(self, line: Line) -> None:
        line.expect(f"r{len(self.runs) + 1} ")
        id = line.text_value("a run")
        line.expect(" ")
        at = line.word(SHOWN, "a time")
        if datetime.fromisoformat(at).tzinfo is None:
            raise ValueError(f"{at} has no time zone")
        line.expect(" nvrtc ")
        major = line.whole()
        line.expect(".")
        minor = line.whole()
        line.expect(" ")
        self.runs.append(Run(id, at, (major, minor), as_object(line.json())))

    def _step(self, line: Line) -> None:
        line.expect(f"s{len(self.steps) + 1} ")
        model, phase = line.text_value("a model"), line.text_value("a phase", after=" ")
        numbers = []
        for name in ("batch", "q_len", "context", "chunk", "layers"):
            line.expect(f" {name}=")
            numbers.append(line.whole())
        line.expect(" weight=")
        if not 0 < (weight := line.number()) < float("inf"):
            raise ValueError(f"a step of weight {weight} counts nothing")
        sequence = line.text_value("a sequence of launches", after=" of ")
        line.expect(" ")
        batch, q_len, context, chunk, layers = numbers
        props = as_object(line.json())
        self.steps.append(Step(model, phase, batch, q_len, context, chunk, layers, weight, sequence, props))

    def _base(self, line: Line) -> None:
        line.expect(f"b{len(self.bases) + 1} ")
        self.bases.append(line.text_value("a base"))

    def _new_point(self, line: Line) -> None:
        if not self.cells:
            raise ValueError("it stands before any problem")
        dynamic = None
        if not line.take("point"):
            name = line.word(NAME, "the dynamic field")
            if name != (self.dynamic or name):
                raise ValueError(f"the dynamic field is {self.dynamic}, not {name}")
            self.dynamic = name
            line.expect("=")
            dynamic = line.whole()
        self.cells[-1][2].append(Point(dynamic, (), as_object(line.json()) if line.take(" as ") else None))

    def _point(self) -> Point:
        if not self.cells or not self.cells[-1][2]:
            raise ValueError("it stands before any tuned point")
        point = self.cells[-1][2][-1]
        if point.refused:
            raise ValueError("it stands behind the count of what was refused")
        return point

    def _put(self, point: Point) -> None:
        if len({(as_json(t.config), t.source) for t in point.trials if t.won}) > 1:
            raise ValueError("there is one winner of a point")
        self.cells[-1][2][-1] = point

    def _refused(self, line: Line) -> None:
        point, counts = self._point(), {}
        while True:
            count = line.whole()
            line.expect(" ")
            outcome = line.word(NAME, "an outcome")
            if outcome not in OUTCOMES or outcome == "ok" or outcome in counts or count < 1:
                raise ValueError(f"{count} {outcome}: it is no outcome that counts here")
            counts[outcome] = count
            if not line.take(", "):
                break
        self._put(Point(point.dynamic, point.trials, point.fields, counts))

    def _trial(self, line: Line) -> Trial:
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
        return Trial(config=config, source=line.word(SOURCE, "the source's digest"), **given)

    def _measured(self, line: Line, given: dict[str, Any], wrong: bool) -> None:
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
        given["stage"] = line.word(NAME, "a stage")
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
        if not line.text.startswith((" |", " in "), line.at):
            line.expect(" ")
            given["error_rel"] = line.number()
        if given["stage"] == "step":
            given["look"] = self._look(line)

    def _look(self, line: Line) -> StepTrial:
        line.expect(" in s")
        step = line.whole()
        line.expect(" ")
        with_it = line.number()
        line.expect("/")
        without = line.number()
        line.expect(" b")
        base = line.whole()
        for us in (with_it, without):
            if not 0 < us < float("inf"):
                raise ValueError(f"{us} us is no time of a step")
        for name, index, named in (("s", step, self.steps), ("b", base, self.bases)):
            if not 1 <= index <= len(named):
                raise ValueError(f"there is no {name}{index}: a look names the step and the base of the head")
        return StepTrial(step - 1, with_it, without, base - 1)


def moment(run: Run, after: float) -> str:
    """When a trial was, as its row says."""
    return (datetime.fromisoformat(run.at) + timedelta(seconds=after)).isoformat(timespec="microseconds")
