"""Compares the cost model with recordings, and fits its constants to them.

    python -m tools.fit data/recorded/h200
    python -m tools.fit data/recorded/h200 --refit

A problem's score is what a tuner without a GPU would have got out of the model there: whether it has the configurations
in the right order (Spearman), how much slower than the fastest the one is that it would have chosen (regret), and how
far its microseconds are off. What was recorded as held out is scored apart: no constant is chosen by it.

A fit goes down one constant after the other, in steps of a share, until none helps. It starts from what predict.py has,
and asks above all for the order of a problem's fastest: see `loss`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from kerngen.arch import Target
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import CONSTANTS, MODEL, Constants, Predictor, fitted_us, launch_us
from kerngen.errors import RecordingError
from kerngen.templates.kernel import Launch, Traffic
from kerngen.tuning.recorded import Recorded, Row
from kerngen.tuning_db.store.winners import PREDICTED_MARGIN
from tools.recordings import read_folder


@dataclass(frozen=True, slots=True)
class Held:
    """A configuration that ran, and what the model says of it once it is compiled. Times in microseconds; measured_us
    as of the first look.
    """

    row: Row
    predicted_us: float
    measured_us: float


@dataclass(frozen=True, slots=True)
class Score:
    """Of one problem. spearman: of predicted and measured times, -1..1; 0 where the model tells none apart.

    regret: how much slower than the fastest known is what a database chooses by the predictions (the default, where
    nothing is predicted to be PREDICTED_MARGIN ahead of it), 0.05 for 5 %. ratio: geometric mean of
    predicted / measured. off: mean factor by which a prediction misses, either way, less 1.
    """

    kernel: str
    problem: str
    held_out: bool
    num_configs: int
    spearman: float
    regret: float
    ratio: float
    off: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of several problems, each counting the same."""

    name: str
    num_problems: int
    spearman: float  # median
    worst_spearman: float
    regret: float  # median
    worst_regret: float
    ratio: float  # geometric mean
    off: float  # mean


def held_against(recorded: Recorded, constants: Constants = CONSTANTS) -> tuple[Held, ...]:
    """What ran, in the order of the file, but the default first: of equal predictions the first is the choice.

    Raises RecordingError where nothing ran.
    """
    predictor = Predictor(recorded.kernel, recorded.problem, recorded.target, constants)
    drift = _drift(recorded)
    found = [
        Held(r, predictor.predict(r.config, r.takes).latency_us, r.us if r.final_us is None else r.final_us / drift)
        for r in recorded.rows
        if r.outcome == "ok" and r.us is not None
    ]
    if not found:
        raise RecordingError(f"{recorded.head.file_name}: no configuration ran")
    return tuple(sorted(found, key=lambda h: h.row.config != recorded.default))


def _drift(recorded: Recorded) -> float:
    """How much slower the second look had all that were in it. Its 30 fastest run one after the other, warmer or
    slower clocked than when each was compiled, checked and timed alone: 0.89 to 1.11 on an H200.
    """
    both = [r.final_us / r.us for r in recorded.rows if r.us is not None and r.final_us is not None]
    return median(both) if both else 1.0


def score(recorded: Recorded, constants: Constants = CONSTANTS) -> Score:
    """Raises RecordingError where nothing ran."""
    held, head = held_against(recorded, constants), recorded.head
    chosen, default = min(held, key=lambda h: h.predicted_us), held[0]
    if default.row.config == recorded.default and default.predicted_us <= chosen.predicted_us * (1 + PREDICTED_MARGIN):
        chosen = default  # as the database chooses between predictions
    best = next(h for h in held if h.row is recorded.best)
    logs = [log(h.predicted_us / h.measured_us) for h in held]
    return Score(
        head.kernel, head.name, head.held_out, len(held),
        spearman([h.predicted_us for h in held], [h.measured_us for h in held]),
        max(chosen.measured_us / best.measured_us - 1, 0.0),
        exp(fmean(logs)),
        exp(fmean(map(abs, logs))) - 1,
    )  # fmt: skip


def summary(name: str, scores: Sequence[Score]) -> Summary:
    """Raises ValueError for no score."""
    return Summary(
        name, len(scores),
        median(s.spearman for s in scores), min(s.spearman for s in scores),
        median(s.regret for s in scores), max(s.regret for s in scores),
        exp(fmean(log(s.ratio) for s in scores)), fmean(s.off for s in scores),
    )  # fmt: skip


def summaries(scores: Sequence[Score]) -> list[Summary]:
    """Of what is held out, of the rest, and of each kernel's in both."""
    groups: dict[str, list[Score]] = {}
    for held_out, name in ((True, "held out"), (False, "fitted to")):
        for s in (s for s in scores if s.held_out == held_out):
            groups.setdefault(name, []).append(s)
    for s in sorted(scores, key=lambda s: s.kernel):
        groups.setdefault(s.kernel, []).append(s)
    return [summary(name, found) for name, found in groups.items()]


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the ranks of both, equals sharing theirs; 0 where all of one are equal."""
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(a) - 1) / 2
    both = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return both / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            ranks[i] = (start + end) / 2
        start = end + 1
    return ranks


# -- the fit

# None of the recordings has warpgroups in roles: docs/prediction.md says where their constants come from.
FITTED = tuple(f.name for f in fields(Constants) if f.name != "gap_clocks" and not f.name.startswith("roles_"))
MOST_ROWS = 60  # of a problem, the faster the more likely
LEVEL_WEIGHT = 0.3  # of a problem's mean miss, beside what its configurations miss by apart from that
FASTER_COUNTS = 1.0  # a configuration weighs as its best is to it, to this power
TELLING = 0.3  # beyond a miss of e^0.3 its square counts no more, but its size: a kernel has faults of its own
FIRST_STEP, LAST_STEP = 0.25, 0.01  # of a constant, as a share
SWEEPS = 20


@dataclass(frozen=True)
class Sample:
    """Some configurations of a problem, as the model sees them, apart from its constants."""

    kernel: str
    target: Target
    work: tuple[tuple[tuple[Launch, Traffic, Resources | None], ...], ...]
    measured_us: tuple[float, ...]

    def predicted_us(self, constants: Constants) -> list[float]:
        return [
            sum(self._launch_us(i, *launch, constants) for i, launch in enumerate(launches)) for launches in self.work
        ]

    def _launch_us(
        self, i: int, launch: Launch, moved: Traffic, given: Resources | None, constants: Constants
    ) -> float:
        us = launch_us(launch, moved, self.target, given, None, i > 0, constants)[0]
        return fitted_us(self.kernel, moved, self.target.arch, us)


def sample(recorded: Recorded, most: int = MOST_ROWS) -> Sample:
    """Up to `most` that ran, closer to each other towards the fastest. Raises RecordingError where nothing ran."""
    held = sorted(held_against(recorded), key=lambda h: h.measured_us)
    if len(held) > most:
        held = [held[i] for i in sorted({int(len(held) * (j / most) ** 1.5) for j in range(most)})]
    predictor = Predictor(recorded.kernel, recorded.problem, recorded.target)
    work = tuple(
        tuple((launch, moved, (h.row.takes or {}).get(launch.entry)) for launch, moved in predictor.work(h.row.config))
        for h in held
    )
    return Sample(recorded.kernel.name, recorded.target, work, tuple(h.measured_us for h in held))


def loss(samples: Sequence[Sample], constants: Constants) -> float:
    """Mean over the problems, each counting the same, of what log(predicted / measured) scatters by around its mean in
    the problem, which is its order, and, weighing less, of that mean, which is its level.
    """
    losses = []
    for s in samples:
        best = min(s.measured_us)
        weights = [(best / us) ** FASTER_COUNTS for us in s.measured_us]
        misses = [log(p / m) for p, m in zip(s.predicted_us(constants), s.measured_us, strict=True)]
        level = sum(w * x for w, x in zip(weights, misses, strict=True)) / sum(weights)
        scatter = sum(w * _huber(x - level) for w, x in zip(weights, misses, strict=True)) / sum(weights)
        losses.append(scatter + LEVEL_WEIGHT * _huber(level))
    return fmean(losses)


def _huber(x: float) -> float:
    return x * x if abs(x) < TELLING else TELLING * (2 * abs(x) - TELLING)


def fit(recordings: Iterable[Recorded], start: Constants = CONSTANTS) -> Constants:
    """The constants, to three digits, at which `loss` is least near `start`; of what is not held out.

    Raises RecordingError where nothing is left to fit to.
    """
    samples = [sample(r) for r in recordings if not r.head.held_out]
    if not samples:
        raise RecordingError("every recording is held out: nothing to fit to")
    best, least = start, loss(samples, start)
    step = dict.fromkeys(FITTED, FIRST_STEP)
    for _ in range(SWEEPS):
        for name in FITTED:
            for sign in (1, -1):
                value = float(f"{getattr(best, name) * exp(sign * step[name]):.3g}")
                tried = replace(best, **{name: value})
                if (found := loss(samples, tried)) < least:
                    best, least = tried, found
                    break
            else:
                step[name] /= 2
        if max(step.values()) < LAST_STEP:
            break
    return best


# -- the command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--refit", is_flag=True, help="Choose the constants anew by what is not held out, and score those.")
@click.option("--json", "as_json", is_flag=True, help="The scores, and the constants, as JSON.")
def main(folder: Path, refit: bool, as_json: bool) -> None:
    """Hold the cost model against the recordings in FOLDER.

    \b
    Example:
      python -m tools.fit data/recorded/h200
    """
    recordings = [r for r in read_folder(folder) if r.head.complete]
    if not recordings:
        raise RecordingError(f"{folder} has no complete recording")
    constants = fit(recordings) if refit else CONSTANTS
    scores = [score(r, constants) for r in recordings]
    if as_json:
        print(json.dumps(_as_json(scores, constants)))
        return
    _print(scores)
    if refit:
        print("\nfitted              was     now")
        for name in FITTED:
            print(f"{name:20}{getattr(CONSTANTS, name):<8g}{getattr(constants, name):<8g}")


def _as_json(scores: Sequence[Score], constants: Constants) -> dict[str, Any]:
    return {
        "model": MODEL,
        "constants": asdict(constants),
        "summaries": [asdict(s) for s in summaries(scores)],
        "problems": [asdict(s) for s in scores],
    }


def _print(scores: Iterable[Score]) -> None:
    scores = sorted(scores, key=lambda s: (not s.held_out, s.kernel, s.problem))
    print(f"{MODEL}\n{'':36} {'configs':>7} {'spearman':>8} {'regret':>7} {'ratio':>6} {'off':>5}")
    for s in scores:
        name = f"{'*' if s.held_out else ' '} {s.kernel} {s.problem}"
        print(f"{name:36} {s.num_configs:7} {s.spearman:8.2f} {s.regret:7.1%} {s.ratio:6.2f} {s.off:5.0%}")
    print("* held out\n")
    print(f"{'':14} {'problems':>8} {'spearman':>8} {'worst':>6} {'regret':>7} {'worst':>6} {'ratio':>6} {'off':>5}")
    for g in summaries(scores):
        print(
            f"{g.name:14} {g.num_problems:8} {g.spearman:8.2f} {g.worst_spearman:6.2f} {g.regret:7.1%} "
            f"{g.worst_regret:6.0%} {g.ratio:6.2f} {g.off:5.0%}"
        )


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.fit"))
