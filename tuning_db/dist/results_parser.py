"""Reads the text of a results file; results_file.py has the grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from string import ascii_lowercase
from typing import Any

from kerngen.errors import DatabaseError
from kerngen.tuning_db.dist.fields_text import NAME, SHOWN, SOURCE, Line, as_json, read_lines, require_as_written
from kerngen.tuning_db.dist.results_file import (
    FORMAT,
    NEAR,
    STEP_NUMBERS,
    VERSION,
    WON,
    WRONG,
    Config,
    Model,
    Point,
    Problem,
    ResultsFile,
    Run,
    StepTrial,
    Trial,
    dump,
    label,
)
from kerngen.tuning_db.read.values import OUTCOMES, STAGES, StepKey

_LETTERS = re.compile(r"[a-z]+")


def parse(text: str, where: str = "text") -> ResultsFile:
    """The results file that `text` is. where: its name, for messages.

    Raises DatabaseError, naming the line, for whatever `dump` would not write just so.
    """
    reading = Reading()
    read_lines(text, where, reading.take)
    file = reading.file(where)
    reading.require_configs_used(where)
    require_as_written(text, dump(file), where)
    return file


@dataclass(slots=True)
class ProblemLines:
    """A problem, as far as its lines were read. config_lines: the numbers of those of its configurations."""

    static: dict[str, Any]
    configs: list[Config] = field(default_factory=list)
    config_lines: list[int] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    places: set[str] = field(default_factory=set)  # of its points

    def add(self, point: Point) -> None:
        """Raises ValueError where the point is there."""
        place = as_json([point.runtime, point.dynamic])
        if place in self.places:
            raise ValueError(f"the point {place} is said twice")
        self.places.add(place)
        self.points.append(point)


class Reading:
    """A results file, as far as its lines were read. former_results.py reads the grammars of before with it."""

    format, version = FORMAT, VERSION

    def __init__(self) -> None:
        self.at = 0  # the line's number
        self.names: tuple[str, str, str] | None = None
        self.device: dict[str, Any] | None = None
        self.dynamic: str | None = None  # before the first point
        self.runs: list[Run] = []
        self.models: list[Model] = []
        self.carried: list[str] = []
        self.steps: list[StepKey] = []
        self.bases: list[str] = []
        self.problems: list[ProblemLines] = []

    def take(self, at: int, text: str) -> None:
        """Read one line. Raises ValueError for what is none."""
        self.at, line = at, Line(text)
        if at == 1:
            self._head(line)
        elif at == 2:
            self.device = line.object(after="board ")
        else:
            self.take_body(line)
        line.end()

    def take_body(self, line: Line) -> None:
        """What follows the first two lines."""
        if line.take("run "):
            line.expect(f"r{len(self.runs) + 1} ")
            self._run(line)
        elif line.take("model "):
            line.expect(f"m{len(self.models) + 1} ")
            self.models.append(self.model(line))
        elif line.take("carried "):
            line.expect(f"c{len(self.carried) + 1} ")
            self.carried.append(line.some_text("what is carried names what it was chosen by"))
        elif line.take("step "):
            line.expect(f"s{len(self.steps) + 1} ")
            self._step(line)
        elif line.take("base "):
            self.bases.append(line.text_value("a base", after=f"b{len(self.bases) + 1} "))
        elif line.take("problem"):
            self.problems.append(ProblemLines(line.pairs("") if line.take(" ") else {}))
        elif line.take("  # "):
            self._refused(line)
        elif line.take("  "):
            won, us = self.result(line)
            config = self._letter(line)
            line.expect(" ")
            if us is None and line.sees("c"):
                who: dict[str, Any] = {"carried": self._named("c", line, self.carried)}
            elif line.sees("m"):
                who = {"model": self._named("m", line, self.models)}
            else:
                who = self.measured(line, us)
            is_wrong = us is None and "carried" not in who
            self.add(Trial(config, us, won, **who, reason=line.reason() if is_wrong else ""))
        elif line.take(" "):
            self._config_or_points(line)

    def file(self, where: str) -> ResultsFile:
        if self.names is None or self.device is None:
            raise DatabaseError(f"{where} is no results file: it has no board")
        problems = tuple(Problem(p.static, tuple(p.configs), tuple(p.points)) for p in self.problems)
        return ResultsFile(*self.names, self.device, self.dynamic or "", tuple(self.runs), tuple(self.models),
                           tuple(self.carried), tuple(self.steps), tuple(self.bases), problems)  # fmt: skip

    def require_configs_used(self, where: str) -> None:
        """Raises DatabaseError, naming the line, for a configuration that no trial names."""
        for problem in self.problems:
            named = {t.config for p in problem.points for t in p.trials}
            for i, at in enumerate(problem.config_lines):
                if i not in named:
                    raise DatabaseError(f"{where}, line {at}: nothing names configuration {label(i)}")

    # ---- the head

    def _head(self, line: Line) -> None:
        line.expect(f"{self.format} ")
        if (version := line.whole()) != self.version:
            raise ValueError(f"it is of version {version}; this kerngen reads {self.version}")
        kernel, arch, board = (line.text_value(what, after=" ") for what in ("a kernel", "an arch", "a board"))
        self.names = kernel, arch, board

    def _run(self, line: Line) -> None:
        id, at = line.text_value("a run"), line.word(SHOWN, "a time", after=" ")
        if datetime.fromisoformat(at).tzinfo is None:
            raise ValueError(f"{at} has no time zone")
        self.runs.append(Run(id, at, line.version(after=" nvrtc "), line.object(after=" ")))

    @staticmethod
    def model(line: Line) -> Model:
        if not (name := line.text_value("a cost model")):
            raise ValueError("a prediction names its model")
        return Model(name, line.version() if line.take(" nvrtc ") else None)

    def _step(self, line: Line) -> None:
        model, phase = line.text_value("a model"), line.text_value("a phase", after=" ")
        numbers = {name: line.whole(after=f" {name}=") for name in STEP_NUMBERS}
        weight = line.above_zero("the weight of a step", after=" weight=")
        sequence = line.text_value("a sequence of launches", after=" of ")
        arch = self.names[1] if self.names is not None else ""
        self.steps.append(StepKey(model, arch, phase, **numbers, sequence=sequence, weight=weight,
                                  props=line.object(after=" ")))  # fmt: skip

    # ---- configurations and points

    def problem(self) -> ProblemLines:
        if not self.problems:
            raise ValueError("it stands before any problem")
        return self.problems[-1]

    def _config_or_points(self, line: Line) -> None:
        problem = self.problem()
        if not problem.points and line.take(f"{label(len(problem.configs))} "):
            if (config := self.config(line)) in problem.configs:
                raise ValueError(f"it is configuration {label(problem.configs.index(config))}, too")
            problem.configs.append(config)
            problem.config_lines.append(self.at)
            return
        runtime = line.pairs("|")
        line.expect("| ")
        for point in self.points(line, runtime):
            problem.add(point)

    @staticmethod
    def config(line: Line) -> Config:
        fields, source = line.pairs("@"), line.word(SOURCE, "the source's digest", after="@")
        revision = line.whole() if line.take(" revision ") else 1
        if revision < 0:
            raise ValueError("a revision is 0, of which nobody knows it, or above")
        return Config(fields, source, revision)

    def points(self, line: Line, runtime: dict[str, Any]) -> list[Point]:
        """Those of a line: winners of one word each, or one point whose trials come below."""
        name = line.word(NAME, "the dynamic field")
        dynamic = "" if name == "point" else name
        if self.dynamic not in (None, dynamic):
            raise ValueError(f"the dynamic field is {self.dynamic or 'point'}, not {name}")
        self.dynamic = dynamic
        points = list[Point]()
        while line.take(" ", unless=(" as ",)):
            at = line.whole() if dynamic else None
            line.expect("=" if dynamic else "")
            us = None if line.sees(*ascii_lowercase) else line.above_zero("a time")
            if not (self.carried if us is None else self.models):
                raise ValueError(f"there is no {'c' if us is None else 'm'}1 in the head")
            who: dict[str, Any] = {"carried" if us is None else "model": 0}
            config = self._letter(line)
            points.append(Point(runtime, at, (replace(Trial(config, us, won=True), **who),)))
        if not points:
            points = [Point(runtime, line.whole(after="=") if dynamic else None, ())]
        if line.take(" as "):
            if len(points) > 1:
                raise ValueError("a point with its own fields has a line of its own")
            points = [replace(points[0], fields=line.object())]
        return points

    def _refused(self, line: Line) -> None:
        point, counts = self._last_point(), dict[str, int]()
        while not counts or line.take(", "):
            count, outcome = line.whole(), line.word(NAME, "an outcome", after=" ")
            if outcome not in OUTCOMES or outcome == "ok" or outcome in counts or count < 1:
                raise ValueError(f"{count} {outcome}: it is no outcome that counts here")
            counts[outcome] = count
        self.problems[-1].points[-1] = replace(point, refused=counts)

    def _last_point(self) -> Point:
        if not self.problems or not self.problems[-1].points:
            raise ValueError("it stands before any tuned point")
        point = self.problems[-1].points[-1]
        if point.refused:
            raise ValueError("it stands behind the count of what was refused")
        return point

    # ---- trials

    def add(self, trial: Trial) -> None:
        """To the last point."""
        point = self._last_point()
        if len({t.config for t in (*point.trials, trial) if t.won}) > 1:
            raise ValueError("there is one winner of a point")
        self.problems[-1].points[-1] = replace(point, trials=(*point.trials, trial))

    @staticmethod
    def result(line: Line) -> tuple[bool, float | None]:
        """Whether it won, and its time: none of a wrong result, nor of what is carried."""
        if line.take(f"{WRONG} "):
            return False, None
        if not (won := line.take(f"{WON} ")):
            line.expect(f"{NEAR} ")
        return won, None if line.sees(*ascii_lowercase) else line.above_zero("a time")

    def _letter(self, line: Line) -> int:
        letters, index = line.word(_LETTERS, "a configuration"), 0
        for letter in letters:
            index = index * len(ascii_lowercase) + ascii_lowercase.index(letter) + 1
        if index > len(self.problem().configs):
            raise ValueError(f"there is no configuration {letters}")
        return index - 1

    @staticmethod
    def _named(letter: str, line: Line, known: Sequence[object]) -> int:
        if not 1 <= (named := line.whole(after=letter)) <= len(known):
            raise ValueError(f"there is no {letter.strip()}{named} in the head")
        return named - 1

    def measured(self, line: Line, us: float | None) -> dict[str, Any]:
        """What nobody has who did not measure: a run, and of a right result a stage, samples and errors."""
        known: dict[str, Any] = {"run": self._named("r", line, self.runs), "after": line.number(after="+")}
        if us is None:
            return known
        known["stage"] = line.word(NAME, "a stage", after=" ")
        if known["stage"] not in STAGES:
            raise ValueError(f"{known['stage']} is none of {', '.join(STAGES)}")
        known["samples"] = line.whole(after=" n=")
        if known["samples"] < 1:
            raise ValueError("what was measured has a sample at least")
        if not line.sees(" min ", " err "):
            known |= {"p10_us": line.number(after=" "), "p90_us": line.number(after="..")}
        if line.take(" min "):
            known["min_us"] = line.number()
        known["error_abs"] = line.number(after=" err ")
        if line.take(" ", unless=(" in ", " |")):
            known["error_rel"] = line.number()
        if known["stage"] == "step":
            line.expect(" in ")
            known["in_step"] = StepTrial(
                self._named("s", line, self.steps), line.above_zero("a step's time", after=" "),
                line.above_zero("a step's time", after="/"), self._named(" b", line, self.bases),
            )  # fmt: skip
        return known
