"""Results files: winners as text that a reviewer can read and diff, one file for each kernel and board.

    kerngen-results 2 attn_prefill sm90 H200
    board {"arch":"sm90","clock_mhz":1980,…}
    run r1 4ec058fd0543 2026-11-21T09:06:01.250000+00:00 nvrtc 13.0 {"driver":"580.159.04",…}
    model m1 roofline-5 nvrtc 12.9
    carried c1 "steps and sweeps on an H200: docs/experiments.md"
    step s1 gemma-4-31b decode batch=1 q_len=1 context=8192 chunk=0 layers=12 weight=0.25 of a91f… {}
    base b1 77aa…

    problem head_dim=512 page_size=64
     a @a91f03c2b7d0
     b block_m=64 num_stages=3 @0c3fb1a2d4e5
     c block_m=128 @77aa01c2b3d4 revision 2
     kv_len=1024 | num_tokens 1=3.412a 64=4.02a 512=7.771b 1024=b
     kv_len=2048 | num_tokens=64
      = 16.602a r1+53.77 final n=15 16.52..16.71 min 16.49 err 0.0039 0.01
      = 16.602a r1+90.2 step n=15 16.52..16.71 min 16.49 err 0.0039 0.01 in s1 4321.55/4330.2 b1
      + 17.021b r1+54.01 final n=15 16.91..17.11 min 16.88 err 0.0039 0.01
      + 17.1b m1
      ! c r1+12.5 "[3, 4] is off by 0.5"
      # 31 invalid, 2 launch_failed

The head names what the trials refer to: tuning runs, cost models, what carried configurations were chosen by, steps of a
model (the sequence of launches is a digest), and bases (digests of the configurations that a step otherwise had). A
problem has its compiled-in fields, then
the configurations that its trials name, each with a letter and the first digits of the SHA-256 of the source that was
timed, and the revision that its body had then (Body.revision), where that is not 1; 0 where nobody noted it. A line of a
tuned point has the bucketed fields, then the dynamic one ("point" for a kernel without one), and `as {…}` with the whole
problem where these do not state it. Fields that have their default are left out.

A point that m1 predicts, winner alone, is one word, `1=3.412a`: 3.412 us with configuration a. So is one that c1 says
was chosen, `1024=b`: what is carried has no time. Any other has its trials
below: "=" won, "+" came near, "!" gave a wrong result; "#" counts what else was tried. A trial has its median in
microseconds and its letter. A measured one names its run and the seconds since that began, then stage, samples, 10th to
90th percentile, least, errors; in a step of a model also the step, its time with the configuration and without, and the
base. A predicted one names its model, a carried one its c1, and nothing else. What names none is refused.

results_parser.py reads it: `parse(dump(x)) == x`, and what `parse` takes, `dump` writes again, to the letter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

from kerngen.tuning_db.dist.fields_text import as_json, number, pairs, stated, word
from kerngen.tuning_db.read.values import StepKey

FORMAT, VERSION = "kerngen-results", 2
WON, NEAR, WRONG = "=", "+", "!"
STEP_NUMBERS = ("batch", "q_len", "context", "chunk", "layers")


@dataclass(frozen=True, slots=True)
class Run:
    """A tuning run in one environment. at: when its first row here was written, ISO 8601 with a zone."""

    id: str
    at: str
    nvrtc: tuple[int, int]
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A cost model. nvrtc: what compiled the kernels that it was asked about, None where a file does not tell."""

    name: str
    nvrtc: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class StepTrial:
    """A step's time with a configuration, and without. step, base: indices of the file's. Times in microseconds."""

    step: int
    step_us: float
    base_step_us: float
    base: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One observation. config: index of the problem's configurations. won: of the configuration that won.

    us: the median, None for a wrong result, which has its `reason`, and for what is carried. run, model or carried: index
    of the file's, of exactly one. after: seconds since the run's `at`. stage to in_step: of what was measured. Times in microseconds.
    in_step: of stage "step", and of no other.
    """

    config: int
    us: float | None
    won: bool = False
    run: int | None = None
    model: int | None = None
    carried: int | None = None
    after: float = 0.0
    stage: str = "trial"
    samples: int = 0
    p10_us: float | None = None
    p90_us: float | None = None
    min_us: float | None = None
    error_abs: float | None = None
    error_rel: float | None = None
    reason: str = ""
    in_step: StepTrial | None = None

    @property
    def is_wrong(self) -> bool:
        return self.us is None and self.carried is None


@dataclass(frozen=True, slots=True)
class Point:
    """A tuned point. runtime: its bucketed fields. dynamic: None for a kernel that has no such field. fields: the whole
    problem, where these do not state it. refused: outcome -> how often, of trials that are not listed.
    """

    runtime: Mapping[str, Any]
    dynamic: int | None
    trials: tuple[Trial, ...]
    fields: Mapping[str, Any] | None = None
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration, the first digits of the SHA-256 of its source, and the revision of its body; 0: not known."""

    fields: Mapping[str, Any]
    source: str
    revision: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """All points with the same compiled-in fields."""

    static: Mapping[str, Any]
    configs: tuple[Config, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """One kernel on one board. device: the fields of its Device. dynamic: the dynamic field's name, "" for none.

    runs, models, carried, steps, bases: those that trials name; of what is carried, in words, what it was chosen by.
    """

    kernel: str
    arch: str
    board: str
    device: Mapping[str, Any]
    dynamic: str
    runs: tuple[Run, ...]
    models: tuple[Model, ...]
    carried: tuple[str, ...]
    steps: tuple[StepKey, ...]
    bases: tuple[str, ...]
    problems: tuple[Problem, ...]

    def points(self) -> Iterator[tuple[Problem, Point]]:
        return ((problem, point) for problem in self.problems for point in problem.points)

    def fields(self, problem: Problem, point: Point) -> Mapping[str, Any]:
        """Those of the problem that was tuned, but for those that have their default."""
        if point.fields is not None:
            return point.fields
        return stated(problem.static, point.runtime, self.dynamic, point.dynamic)


def label(index: int) -> str:
    """a, b, … z, aa, ab, …"""
    text = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        text = ascii_lowercase[letter] + text
    return text


# ---- writing


def dump(file: ResultsFile) -> str:
    lines = [
        f"{FORMAT} {VERSION} {' '.join(map(word, (file.kernel, file.arch, file.board)))}",
        f"board {as_json(file.device)}",
    ]
    for i, run in enumerate(file.runs, 1):
        lines.append(f"run r{i} {word(run.id)} {run.at}{_nvrtc(run.nvrtc)} {as_json(run.environment)}")
    lines += [f"model m{i} {word(model.name)}{_nvrtc(model.nvrtc)}" for i, model in enumerate(file.models, 1)]
    lines += [f"carried c{i} {as_json(source)}" for i, source in enumerate(file.carried, 1)]
    for i, s in enumerate(file.steps, 1):
        numbers = " ".join(f"{name}={getattr(s, name)}" for name in STEP_NUMBERS)
        lines.append(f"step s{i} {word(s.model)} {word(s.phase)} {numbers} weight={number(s.weight)} "
                     f"of {word(s.sequence)} {as_json(s.props)}")  # fmt: skip
    lines += [f"base b{i} {word(base)}" for i, base in enumerate(file.bases, 1)]
    for problem in file.problems:
        lines += ["", " ".join(["problem", *pairs(problem.static)])]
        for i, config in enumerate(problem.configs):
            revision = [] if config.revision == 1 else [f"revision {config.revision}"]
            lines.append(" ".join(["", label(i), *pairs(config.fields), f"@{config.source}", *revision]))
        lines += _point_lines(problem.points, file.dynamic)
    return "\n".join(lines) + "\n"


def _nvrtc(version: tuple[int, int] | None) -> str:
    return "" if version is None else f" nvrtc {version[0]}.{version[1]}"


def _point_lines(points: Sequence[Point], dynamic: str) -> list[str]:
    lines, shared = list[str](), ""  # the head of the last line, where a point of one word may follow in it
    for point in points:
        head = " ".join(["", *pairs(point.runtime), "|", dynamic or "point"])
        if _is_one_word(point):
            if head != shared:
                lines.append(head)
            at, (t,) = "" if point.dynamic is None else f"{point.dynamic}=", point.trials
            lines[-1] += f" {at}{_us(t)}{label(t.config)}"
            shared = head
            continue
        shared = ""
        at = "" if point.dynamic is None else f"={point.dynamic}"
        lines.append(head + at + ("" if point.fields is None else f" as {as_json(point.fields)}"))
        lines += map(_trial, point.trials)
        if point.refused:
            lines.append("  # " + ", ".join(f"{count} {outcome}" for outcome, count in point.refused.items()))
    return lines


def _is_one_word(point: Point) -> bool:
    """Whether m1 predicts it, or c1 carries it, winner alone."""
    if len(point.trials) != 1 or point.refused or point.fields is not None:
        return False
    (t,) = point.trials
    return t in (Trial(t.config, t.us, won=True, model=0), Trial(t.config, None, won=True, carried=0))


def _us(t: Trial) -> str:
    return "" if t.us is None else number(t.us)


def _trial(t: Trial) -> str:
    parts = [f"  {WRONG if t.is_wrong else WON if t.won else NEAR} {_us(t)}{label(t.config)}"]
    if t.carried is not None:
        parts.append(f"c{t.carried + 1}")
    else:
        parts.append(f"r{t.run + 1}+{number(t.after)}" if t.run is not None else f"m{(t.model or 0) + 1}")
    if t.is_wrong:
        parts.append(as_json(t.reason))
    elif t.run is not None:
        parts.append(f"{t.stage} n={t.samples}")
        if t.p10_us is not None and t.p90_us is not None:
            parts.append(f"{number(t.p10_us)}..{number(t.p90_us)}")
        if t.min_us is not None:
            parts.append(f"min {number(t.min_us)}")
        parts.append(f"err {number(t.error_abs)}")
        if t.error_rel is not None:
            parts.append(number(t.error_rel))
        if (k := t.in_step) is not None:
            parts.append(f"in s{k.step + 1} {number(k.step_us)}/{number(k.base_step_us)} b{k.base + 1}")
    return " ".join(parts)
