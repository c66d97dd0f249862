"""Searches replayed on recorded measurements, without a GPU: which sampler finds the best, and how soon?

    python -m tools.replay data/recorded/h200

A replay drives the tuner's own `Search` with an objective that answers from a recording. What a sampler may ask for is
what was recorded, so the best there is is known, and the share of problems that a sampler brings within 5 % of it in 40
trials is a figure that a change of sampler or cost model moves. Between the fastest of a search is decided as the tuner
does, by the second look that the recording holds of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from kerngen.errors import RecordingError, UnknownName, UsageError
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning.objective import Measured, Objective, Outcome, Selections, finalists, forever, unsaid
from kerngen.tuning.recorded import Recorded
from kerngen.tuning.space import Candidates, Enumeration
from kerngen.tuning.study import Search
from kerngen.tuning_db.read.ids import digest
from tools.recordings import read_folder

if TYPE_CHECKING:
    import optuna

    from kerngen.tuning.task import Trial
    from kerngen.tuning_db.read.values import Measurement

TRIALS = 40
SEEDS = 5
WITHIN = 0.05  # of the best known
PATIENCE = 64  # proposals in a row that bring nothing new end the search of a sampler that does not know the space


class Recalled:
    """Judges as the GPU did when `recorded` was made. sampler, batch: as Objective has them."""

    name, how, provenance = "recalled", "recalled from a recording", "measured"
    row: Mapping[str, Any] = {}
    trials = TRIALS
    needs_image = takes_time = False
    final_stage = "final"
    margin = final_s = finals_s = waited_s = 0.0
    settings: Sequence[Any] = ()
    remarks: Sequence[str] = ()
    selections: Selections | None = None

    def __init__(self, recorded: Recorded, sampler: str = Measured.sampler, batch: int = Measured.batch) -> None:
        self.recorded, self.sampler, self.batch = recorded, sampler, batch
        self.target = recorded.target
        self.say: Callable[[str], None] = unsaid
        self.left: Callable[[], float] = forever

    def can_win(self, kernel: Kernel, problem: Any, config: Any, best_us: float) -> bool:
        return True

    def outcome(self, config: Any) -> Outcome:
        """What became of `config`. Raises RecordingError if it was not recorded."""
        row = self.recorded.by_config.get(config)
        if row is None:
            raise RecordingError(f"{self.recorded.head.file_name} has no {describe(config)}")
        registers = max((r.registers for r in (row.takes or {}).values()), default=0)
        spilled = sum(r.spill_store_bytes + r.spill_load_bytes for r in (row.takes or {}).values())
        return Outcome(row.outcome, row.us, row.reason, registers, spilled, 0.0 if row.us is not None else 1.0)

    def answer(self, trial: Trial, rows: Sequence[Measurement]) -> Outcome | None:
        return self.outcome(trial.config)

    def judge(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in trials:
            yield trial, self.outcome(trial.config)

    def finalists(self, search: Search) -> list[Any]:
        return finalists([(c, o.latency_us) for c, o in search.outcomes.items()], search.candidates.default)

    def decide(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        for trials in finalists:
            for trial in trials:
                row, seen = self.recorded.by_config[trial.config], self.outcome(trial.config)
                yield trial, Outcome(seen.kind, row.best_us, seen.reason, seen.registers, seen.spill_bytes, seen.excess)

    def undecided(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        return iter(())


@dataclass(frozen=True, slots=True)
class Sampler:
    """A way to search. make: one of Optuna's own samplers, of a seed; None for those that the tuner has, which go by
    the same name. needs: a package that is no dependency.
    """

    name: str
    make: Callable[[int], optuna.samplers.BaseSampler] | None = None
    needs: str = ""

    @property
    def is_here(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None


def _optunas(name: str, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    quiet = {"warn_independent_sampling": False} if name == "GPSampler" else {}  # bodies differ in their fields
    sampler: optuna.samplers.BaseSampler = getattr(optuna.samplers, name)(seed=seed, **quiet)
    return sampler


SAMPLERS = {
    s.name: s
    for s in (
        Sampler("random", partial(_optunas, "RandomSampler")),
        Sampler("model"),  # the cost model's ranking, from the top: what the tuner does where it predicts
        Sampler("tpe", partial(_optunas, "TPESampler")),
        Sampler("residual"),  # the model, times what it is seen to get wrong: what the tuner does where it measures
        Sampler("gp", partial(_optunas, "GPSampler"), needs="scipy"),
    )
}


class _Drawn(Search):
    """A search by a sampler that does not know what is valid: what it proposes in vain is told at once, and PATIENCE
    such proposals in a row end it.
    """

    def __init__(self, make: Callable[[int], optuna.samplers.BaseSampler], *args: Any, seed: int, **how: Any) -> None:
        super().__init__(*args, seed=seed, **how)
        self._make: Callable[[], optuna.samplers.BaseSampler] | None = partial(make, seed)

    def _sampled(self, asked: list[Any]) -> Any | None:
        if len(self.outcomes) + len(asked) == len(self.candidates.askable):
            return None
        if self._make is not None:
            self.study.sampler, self._make = self._make(), None
        for _ in range(PATIENCE):
            trial = self.study.ask()
            config = self._config_of(trial)
            if config in self.outcomes:
                self._close(trial, self.outcomes[config])
            elif config in asked:
                self._close(trial, Outcome("invalid", reason="asked twice", excess=1.0))
            elif (why := self.kernel.why_invalid(self.problem, config, self.target)) is not None:
                self._close(trial, Outcome("invalid", reason=why, excess=1.0))
            else:
                self._open[config] = trial
                return config
        return None


@dataclass(frozen=True, slots=True)
class Trace:
    """One replay. tried: each configuration in the order asked for, with its time, None where it failed."""

    recorded: Recorded
    sampler: str
    seed: int
    tried: tuple[tuple[Any, float | None], ...]

    def chosen(self, trials: int = TRIALS) -> Any:
        """What the tuner would have kept after so many trials: the best of the finalists by their second look."""
        rows = self.recorded.by_config
        last = finalists(self.tried[:trials], self.recorded.default)
        return min(last, key=lambda c: rows[c].best_us or float("inf"), default=None)

    def regret(self, trials: int = TRIALS) -> float:
        """How much slower than the best known that is: 0.05 for 5 %; infinite where nothing ran."""
        if (chosen := self.chosen(trials)) is None:
            return float("inf")
        took, best = self.recorded.by_config[chosen].best_us, self.recorded.best.best_us
        return float("inf") if took is None or best is None else max(took / best - 1, 0.0)


def replay(recorded: Recorded, sampler: Sampler, trials: int = TRIALS, seed: int = 0, least_gain: float = 0.0) -> Trace:
    """Search `recorded` for its best. The same arguments, the same trace. least_gain: as Search has it.

    Raises RecordingError for a recording that is not complete or holds a sample: it cannot answer every question.
    """
    search, objective = _search(recorded, sampler, trials, seed, least_gain)
    while asked := search.ask(objective.batch):
        for config in asked:
            search.tell(config, objective.outcome(config))
    tried = tuple((c, o.latency_us) for c, o in search.outcomes.items())
    return Trace(recorded, sampler.name, seed, tried)


@dataclass(frozen=True)
class _AsRecorded(Kernel):
    """A kernel whose valid configurations are those of a recording: what its spec.py allows today is another matter."""

    known: frozenset[Any] = frozenset()

    def why_invalid(self, problem: Any, config: Any, target: Any) -> str | None:
        return None if config in self.known else "it was not recorded: it was invalid then"


def _search(
    recorded: Recorded, sampler: Sampler, trials: int, seed: int, least_gain: float = 0.0
) -> tuple[Search, Recalled]:
    head = recorded.head
    if not (head.complete and head.exhaustive):
        what = "a sample" if head.complete else "not complete"
        raise RecordingError(f"{head.file_name} is {what}: only what was recorded whole can be searched again")
    objective = Recalled(recorded, sampler.name)
    found: Objective = objective
    kernel = _AsRecorded(recorded.kernel.name, recorded.kernel.spec, frozenset(recorded.by_config))
    candidates = Candidates(kernel, recorded.problem, recorded.target, recorded.default)
    candidates.space = tuple(dict(part) for part in head.grid)
    valid = tuple(recorded.by_config)
    candidates.points = Enumeration(candidates.space, valid, (), complete=True, num_valid=len(valid))
    candidates.askable = tuple(dict.fromkeys([*recorded.by_config, recorded.default]))
    own = int(digest([head.kernel, head.name, seed])[:8], 16)  # problems differ in luck, as in the tuner
    make = Search if sampler.make is None else partial(_Drawn, sampler.make)
    search = make(kernel, recorded.problem, candidates, found, trials=trials, seed=own, least_gain=least_gain)
    return search, objective


@dataclass(frozen=True, slots=True)
class Score:
    """How a sampler did on one kernel's problems, or on "all". share: of (problem, seed) within `WITHIN` of the best
    known. worst, median: regret. num_tried: configurations a problem, in the mean.
    """

    sampler: str
    kernel: str
    num_problems: int
    share: float
    median: float
    worst: float
    num_tried: float


def table(
    recordings: Sequence[Recorded],
    samplers: Iterable[Sampler],
    trials: int = TRIALS,
    seeds: int = SEEDS,
    least_gain: float = 0.0,
) -> list[Score]:
    """Each sampler's scores, of all problems first and then by kernel."""
    kernels = sorted({r.head.kernel for r in recordings})
    scores = []
    for sampler in samplers:
        traces: dict[str, list[Trace]] = {k: [] for k in ("all", *kernels)}
        for recorded in recordings:
            for seed in range(seeds):
                trace = replay(recorded, sampler, trials, seed, least_gain)
                traces["all"].append(trace)
                traces[recorded.head.kernel].append(trace)
        for kernel, found in traces.items():
            regrets = [t.regret(trials) for t in found]
            within = sum(r <= WITHIN for r in regrets) / len(found)
            tried = sum(len(t.tried) for t in found) / len(found)
            scores.append(
                Score(sampler.name, kernel, len(found) // seeds, within, median(regrets), max(regrets), tried)
            )
    return scores


# -- the command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sampler", "names", multiple=True, help="One or more of them; all that can run here by default.")
@click.option("--trials", type=click.IntRange(min=1), default=TRIALS, show_default=True, help="A problem's.")
@click.option("--seeds", type=click.IntRange(min=1), default=SEEDS, show_default=True, help="Replays of each problem.")
@click.option("--least-gain", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="End a search where the sampler hopes for less, as the tuner does at 0.002.")  # fmt: skip
@click.option("--held-out", is_flag=True, help="Only problems that nothing is fitted to.")
@click.option("--json", "as_json", is_flag=True, help="The scores as JSON.")
def main(
    folder: Path,
    names: tuple[str, ...],
    trials: int,
    seeds: int,
    least_gain: float,
    held_out: bool,
    as_json: bool,
) -> None:
    """Compare samplers on the recordings in FOLDER.

    \b
    Example:
      python -m tools.replay data/recorded/h200 --sampler model --sampler random
    """
    for name in names:
        if name not in SAMPLERS:
            raise UnknownName("sampler", name, SAMPLERS)
        if not SAMPLERS[name].is_here:
            needs = SAMPLERS[name].needs
            raise UsageError(f"sampler {name} needs {needs}, which is not installed", hint=f"pip install {needs}")
    chosen = [s for s in SAMPLERS.values() if (s.name in names if names else s.is_here)]
    whole = [r for r in read_folder(folder) if r.head.exhaustive and (r.head.held_out or not held_out)]
    left_out = [r.head.file_name for r in whole if not r.head.complete]
    found = [r for r in whole if r.head.complete]
    if not found:
        raise RecordingError(f"{folder} has no complete recording of a whole grid")
    for name in left_out:
        click.echo(f"{name} is not complete: left out", err=True)
    scores = table(found, chosen, trials, seeds, least_gain)
    if as_json:
        print(json.dumps([asdict(s) for s in scores]))
        return
    print(f"{len(found)} problems, {seeds} seeds, {trials} trials each; within {WITHIN:.0%} of the best known")
    print(f"{'sampler':12} {'kernel':14} {'problems':>8} {'within':>7} {'median':>7} {'worst':>7} {'tried':>6}")
    for s in scores:
        regrets = f"{s.median:7.1%} {s.worst:7.0%}"
        print(f"{s.sampler:12} {s.kernel:14} {s.num_problems:8} {s.share:7.0%} {regrets} {s.num_tried:6.1f}")


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.replay"))
