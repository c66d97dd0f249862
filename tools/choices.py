"""Scores the cost model's choices: what a default configuration takes beside the others that were timed of its problem.

    python -m tools.choices data/choices/h200
    python -m tools.choices data/choices/h200 --problems        the worst of each kernel too

A file is of one kernel on one board, DIR/<kernel>.csv, in UTF-8:

    {"v": 1, "kernel": "dense_gemv", "device": {...}, ...}     line 1: what was timed, where and how, as JSON
    set,problem,config,base,us                                 line 2: the columns
    model,n=8192 k=1024,block_m=8 row_tiles=2,1,12.345         a configuration a line; a problem's first is the base's

Fields that have their default are left out, and so is the problem where it is the line before's. base: 1 of the
configuration that all are compared with, the default at the commit that the head names. us: by graph replays in turn
with the others of the problem, each checked against the fp32 reference. Sets: model, wide (problems of the released
models), random, small, tp (shapes that no model has).
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from kerngen.arch import Target
from kerngen.cost.choose import ranked
from kerngen.errors import RecordingError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe, parse_fields
from kerngen.tuning_db.read.canonical_fields import device_from
from tools.fit import spearman

VERSION = 1
COLUMNS = ["set", "problem", "config", "base", "us"]


@dataclass(frozen=True, slots=True)
class Timed:
    """What was timed of one problem: microseconds by configuration, those of `base` among them."""

    kernel: Kernel
    target: Target
    of: str  # the set
    problem: Any
    base: Any
    us: dict[Any, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one problem. ratio: of the time of today's default to that of `base`; None where it was not timed. best: of
    the fastest's. spearman: of predicted and measured times of all that were timed.
    """

    kernel: str
    of: str
    problem: str
    ratio: float | None
    best: float
    spearman: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a kernel's problems in one set. num_timed: those whose default was timed, of which the ratios are."""

    kernel: str
    of: str
    num_problems: int
    num_timed: int
    mean: float  # geometric, as `best` is
    worst: float
    best: float
    spearman: float  # median


def read(path: Path) -> Iterator[Timed]:
    """The problems of a file, in its order. Raises RecordingError where it is none."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            head = json.loads(next(file))
            kernel, target = find_kernel(head["kernel"]), Target.of(device_from(head["device"]))
            lines = csv.reader(file)
            if head["v"] != VERSION or next(lines) != COLUMNS:
                raise ValueError(f"its version is {head['v']}, or its columns are others")
            yield from _problems(kernel, target, lines)
        except (StopIteration, ValueError, KeyError, TypeError) as e:
            raise RecordingError(f"{path}: {e}", hint="tools/choices.py has the format") from e


def _problems(kernel: Kernel, target: Target, lines: Iterable[Sequence[str]]) -> Iterator[Timed]:
    found: Timed | None = None
    for of, problem, config, base, us in lines:
        made = parse_fields(kernel.config_type, config.replace(" ", ","))
        if base == "1":
            if found is not None:
                yield found
            found = Timed(kernel, target, of, parse_fields(kernel.problem_type, problem.replace(" ", ",")), made, {})
        if found is None:
            raise ValueError("a problem's first line is the base's")
        found.us[made] = float(us)
    if found is not None:
        yield found


def score(timed: Timed) -> Choice:
    """What the default of today is worth, and whether the model has those that were timed in the right order."""
    kernel, problem, base_us = timed.kernel, timed.problem, timed.us[timed.base]
    chosen = timed.us.get(kernel.default_config(problem, timed.target))
    valid = [c for c in timed.us if kernel.why_invalid(problem, c, timed.target) is None]
    order = spearman([us for us, _ in ranked(kernel, problem, timed.target, valid)], [timed.us[c] for c in valid])
    return Choice(kernel.name, timed.of, describe(problem), None if chosen is None else chosen / base_us,
                  min(timed.us.values()) / base_us, order)  # fmt: skip


def summaries(choices: Iterable[Choice]) -> list[Summary]:
    """Of each kernel and set whose defaults were timed, in the order in which they are first met."""
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        groups.setdefault((choice.kernel, choice.of), []).append(choice)
    return [
        Summary(kernel, of, len(found), len(ratios), _mean(ratios), max(ratios), _mean([c.best for c in found]),
                median(c.spearman for c in found))
        for (kernel, of), found in groups.items()
        if (ratios := [c.ratio for c in found if c.ratio is not None])
    ]  # fmt: skip


def _mean(ratios: Sequence[float]) -> float:
    return exp(fmean(map(log, ratios)))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--problems", is_flag=True, help="The five worst problems of each kernel and set, too.")
@click.option("--json", "as_json", is_flag=True, help="The summaries and all problems as JSON.")
def main(folder: Path, problems: bool, as_json: bool) -> None:
    """Score the defaults of today by what was timed in FOLDER.

    \b
    Example:
      python -m tools.choices data/choices/h200
    """
    choices = [score(timed) for path in sorted(folder.glob("*.csv")) for timed in read(path)]
    if not choices:
        raise RecordingError(f"{folder} has no files of choices")
    found = summaries(choices)
    if as_json:
        print(json.dumps({"summaries": [asdict(s) for s in found], "problems": [asdict(c) for c in choices]}))
        return
    print(f"{'':14} {'set':7} {'problems':>8} {'timed':>6} {'mean':>6} {'worst':>6} {'best':>6} {'spearman':>8}")
    for s in found:
        print(f"{s.kernel:14} {s.of:7} {s.num_problems:8} {s.num_timed:6} {s.mean:6.3f} {s.worst:6.3f} {s.best:6.3f} "
              f"{s.spearman:8.2f}")  # fmt: skip
        here = [c for c in choices if (c.kernel, c.of) == (s.kernel, s.of) and c.ratio is not None]
        for c in sorted(here, key=lambda c: -(c.ratio or 0.0))[:5] if problems else ():
            print(f"    {c.ratio:6.3f} of {c.best:.3f} at best: {c.problem}")


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.choices"))
