"""The search for one problem's best configuration: an Optuna study that its caller drives with ask and tell.

First come the configurations that knowledge proposes: what runs today, the default, and winners of neighbouring
problems. Where the
objective says that the cost model is all there is to know (sampler "model") its ranking follows, down to where nothing
that is left is expected to win. Else the sampler proposes, which learns what the model gets wrong
(sampler.py). What else is valid is not asked before the first of these has been tried.

The study lives in memory. Every outcome is in the tuning database, so a search that was killed is asked again
from the start, with the same seed, and answered from there: the same trials, without the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kerngen.templates.kernel import Kernel, describe, fields_of
from kerngen.tuning.features import described_space
from kerngen.tuning.objective import Objective, Outcome
from kerngen.tuning.plan import GUESSED_REGISTERS, rank_space
from kerngen.tuning.space import Candidates, on_grid
from kerngen.tuning_db.read.winner_table import why_unfit

if TYPE_CHECKING:
    import optuna

    from kerngen.tuning.describe import Describer, Describing
    from kerngen.tuning.sampler import ResidualSampler

GUESSED_GAIN = 0.04  # of a search whose sampler knows nothing yet: what 51 problems gained on an H200, in the mean
GAIN_OF_AN_EXACT_SEARCH = 1e-6  # at least, until nothing is left that can win


class Search:
    """One problem's study. `ask` never repeats a configuration; `tell` answers each before the next ask."""

    def __init__(
        self,
        kernel: Kernel,
        problem: Any,
        candidates: Candidates,
        objective: Objective,
        *,
        trials: int,
        seed: int,
        describer: Describer | None = None,
        least_gain: float = 0.0,
    ) -> None:
        """describer: describes the space in a process of its own, from when the default is told; without it that is
        done here, when first needed. least_gain: where the sampler hopes for less, as a part of the best time, the
        search is over.
        """
        self.kernel, self.problem, self.target = kernel, problem, objective.target
        self.candidates, self.objective, self.trials = candidates, objective, trials
        self.outcomes: dict[Any, Outcome] = {}  # in the order asked
        self.stored: Any | None = None  # what runs today, where that is another than the default
        self._seed, self._describer, self._least_gain = seed, describer, least_gain
        self._hinted = 0.0  # what neighbours gained by what stands in `_first`
        self._gain = 0, GUESSED_GAIN  # that was hoped for after so many outcomes
        self._first: deque[Any] = deque([candidates.default])
        self._ranked: list[tuple[float, Any]] | None = None  # what is left of the model's ranking, the best last
        self._describing: Describing | None = None
        self._sampler: ResidualSampler | None = None
        self._study: optuna.Study | None = None
        self._open: dict[Any, optuna.trial.Trial | None] = {}
        self._closed = self._is_cut_short = False

    # -- what others see

    @property
    def best_us(self) -> float:
        times = [o.latency_us for o in self.outcomes.values() if o.latency_us is not None]
        return min(times, default=float("inf"))

    @property
    def best(self) -> Any | None:
        """The fastest configuration so far, the earliest asked of equals."""
        ok = [c for c, o in self.outcomes.items() if o.latency_us == self.best_us]
        return ok[0] if ok else None

    @property
    def pending(self) -> tuple[Any, ...]:
        """What was asked for and is not told yet, in that order."""
        return tuple(self._open)

    @property
    def num_left(self) -> int:
        """At most so many configurations are still to come, those asked and not yet told among them."""
        if self._closed:
            return len(self._open)
        left = self.trials - len(self.outcomes)
        if self._sampler is not None:
            left = min(left, self._sampler.num_left + len(self._open))
        elif self._ranked is not None:
            left = min(left, len(self._ranked) + len(self._first) + len(self._open))
        return max(left, 0)

    @property
    def study(self) -> optuna.Study:
        """All that was told, as Optuna has it."""
        if self._study is None:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._study = optuna.create_study(study_name=f"{self.kernel.name}{describe(self.problem)}")
            for config, outcome in self.outcomes.items():
                self._add(config, outcome)
        return self._study

    @property
    def expected_gain(self) -> float:
        """How much faster than the best so far the next trials are hoped to be, as a part of its time: 0 where nothing
        is left. A guess before anything was learned.
        """
        if not self.num_left:
            return 0.0
        known = self._sampler is not None if self._learns else self._ranked is not None
        if known and self._gain[0] != len(self.outcomes):
            self._gain = len(self.outcomes), self._learned_gain()
        return max(self._gain[1], self._hinted if self._first else 0.0)

    def _learned_gain(self) -> float:
        if self._learns:
            return self.sampler.expected_gain()
        next_us = self._ranked[-1][0] if self._ranked else float("inf")
        return max(1 - next_us / self.best_us, GAIN_OF_AN_EXACT_SEARCH)

    @property
    def is_ready(self) -> bool:
        """Whether `ask` waits for no description of the space."""
        return self._sampler is not None or self._describing is None or self._describing.is_ready

    @property
    def is_over(self) -> bool:
        """Whether it ended by itself: not where time ran out."""
        return not self.num_left and not self._is_cut_short

    def begin_with(self, stored: Any) -> None:
        """Try what runs today before all else: a search that is cut short then leaves nothing slower than that."""
        if stored != self.candidates.default:
            self.stored = stored
            self._first.appendleft(stored)

    def suggest(self, configs: Iterable[Any], gain: float = 0.0) -> None:
        """Put `configs` (winners of neighbours) before all that is not yet asked, but for invalid ones. gain: what
        neighbours have of them, as a part of their time.
        """
        known = {*self.outcomes, *self._first, *self._open}
        own = dict.fromkeys(map(self.candidates.own, configs))
        fit = (c for c in own if why_unfit(self.kernel, self.problem, c, self.target) is None)
        fresh = [c for c in fit if c not in known]
        if fresh and not self._closed:
            self._hinted = max(gain, self._hinted if self._first else 0.0)
            self._first.extend(fresh)

    def ask(self, count: int) -> list[Any]:
        """Up to `count` configurations to evaluate next; none if the search is over."""
        if not self.outcomes:
            count = min(count, 1 + (self.stored is not None))  # whose registers guide the ranking of the others
        elif not self._first and self._is_hopeless():
            self._closed = True
        asked: list[Any] = []
        while len(asked) < count and not self._closed and self.num_left > len(asked):
            config = self._next_suggested(asked)
            if config is None:
                config = self._sampled(asked) if self._learns else self._next_by_the_model(asked)
                self._closed = config is None
            if config is None:
                break
            asked.append(config)
        if self.num_left == 0:
            self._closed = True
        return asked

    def tell(self, config: Any, outcome: Outcome) -> None:
        """Record what became of a configuration that `ask` gave."""
        self.outcomes[config] = outcome
        if self._describer is not None and self._describing is None and self._learns and self.trials > 1:
            self._describing = self._describer.submit(self.candidates, self._registers)
        trial = self._open.pop(config, None)
        if trial is not None:
            self._close(trial, outcome)
        elif self._study is not None:
            self._add(config, outcome)

    def abandon(self, config: Any) -> None:
        """`config` was asked and will not be evaluated (time ran out): the search ends here."""
        self._open.pop(config, None)
        self._closed = self._is_cut_short = True

    def let_go(self) -> None:
        """Of what the sampler holds, or the ranking: tens of megabytes, where nothing more is asked."""
        self._sampler = self._describing = self._ranked = None
        self._closed = True

    # -- where configurations come from

    def _is_hopeless(self) -> bool:
        """Nothing to ask for any more: after a portion at least, the sampler has hardly any hope."""
        known = self._sampler is not None and len(self.outcomes) > self.objective.batch
        return known and self.best_us < float("inf") and self.expected_gain < self._least_gain

    @property
    def _learns(self) -> bool:
        return self.objective.sampler != "model"

    @property
    def _registers(self) -> int:
        """A thread's, of the configurations that were compiled; 0 where there is none yet."""
        return max((o.registers for o in self.outcomes.values()), default=0)

    def _next_suggested(self, asked: list[Any]) -> Any | None:
        while self._first:
            config = self._first.popleft()
            if config not in self.outcomes and config not in asked and (not self.outcomes or self._can_win(config)):
                self._open[config] = None
                return config
        return None

    def _can_win(self, config: Any) -> bool:
        return self.objective.can_win(self.kernel, self.problem, config, self._to_beat)

    @property
    def _to_beat(self) -> float:
        """What a configuration has to take less than, in microseconds."""
        default = self.outcomes.get(self.candidates.default)
        default_us = float("inf") if default is None or default.latency_us is None else default.latency_us
        return min(self.best_us, default_us / (1 + self.objective.margin))

    def _next_by_the_model(self, asked: list[Any]) -> Any | None:
        if self._ranked is None:
            ranked = rank_space(self.candidates, self._registers or GUESSED_REGISTERS)
            self._ranked = [(us, c) for us, c in reversed(ranked) if self._can_win(c)]  # who cannot by now never can
        while self._ranked:
            _, config = self._ranked.pop()
            if config in self.outcomes or config in asked:
                continue
            if self._can_win(config):
                self._open[config] = None
                return config
        return None

    def _sampled(self, asked: list[Any]) -> Any | None:
        if not self.sampler.num_left:
            return None
        trial = self.study.ask()
        config = self._config_of(trial)
        self._open[config] = trial
        return config

    @property
    def sampler(self) -> ResidualSampler:
        """Made when first needed: by then the default was told."""
        if self._sampler is None:
            from kerngen.tuning.sampler import ResidualSampler

            known = self._describing() if self._describing else described_space(self.candidates, self._registers)
            self._sampler = self.study.sampler = ResidualSampler(self, known, self._seed)
        return self._sampler

    # -- Optuna

    def _config_of(self, trial: optuna.trial.Trial) -> Any:
        """What `trial` proposes: first a body, then its tunables. Numbers are searched by their index, others as
        categories.
        """
        space = self.candidates.space
        part = trial.suggest_categorical("body", list(range(len(space))))
        chosen = {}
        for name, values in space[part].items():
            label, last = f"{part}.{name}", len(values) - 1
            at = (
                trial.suggest_int(label, 0, last)
                if _is_ordered(values)
                else trial.suggest_categorical(label, list(range(last + 1)))
            )
            chosen[name] = values[at]
        return self.kernel.config_type(**chosen)

    def parameters(self, config: Any) -> dict[str, tuple[optuna.distributions.BaseDistribution, int]] | None:
        """`config` as `_config_of` asks for it: parameter -> distribution and value. None where it is off the grid."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        space = self.candidates.space
        if (part := on_grid(space, config)) is None:
            return None
        found: dict[str, tuple[optuna.distributions.BaseDistribution, int]] = {}
        for name, at in self._indices(part, config).items():
            values = range(len(space)) if name == "body" else space[part][name.partition(".")[2]]
            ordered = name != "body" and _is_ordered(values)
            last = len(values) - 1
            found[name] = (IntDistribution(0, last) if ordered else CategoricalDistribution(range(last + 1))), at
        return found

    def _indices(self, part: int, config: Any) -> dict[str, int]:
        fields = fields_of(config)
        indices = {f"{part}.{k}": values.index(fields[k]) for k, values in self.candidates.space[part].items()}
        return {"body": part} | indices

    def _close(self, trial: optuna.trial.Trial, outcome: Outcome) -> None:
        from optuna.trial import TrialState

        trial.set_user_attr("outcome", outcome.kind)
        trial.set_constraint("excess", _constraint(outcome))
        if _is_complete(outcome):
            self.study.tell(trial, outcome.latency_us)
        else:  # never FAIL: samplers learn from pruned trials, and forget failed ones
            self.study.tell(trial, state=TrialState.PRUNED)

    def _add(self, config: Any, outcome: Outcome) -> None:
        """As `_close`, of a configuration that the sampler did not propose; one that is off the grid cannot be told."""
        from optuna.trial import TrialState, create_trial

        if (found := self.parameters(config)) is None:
            return
        complete = _is_complete(outcome)
        trial = create_trial(
            state=TrialState.COMPLETE if complete else TrialState.PRUNED,
            value=outcome.latency_us if complete else None,
            params={name: value for name, (_, value) in found.items()},
            distributions={name: where for name, (where, _) in found.items()},
            user_attrs={"outcome": outcome.kind},
            constraints={"excess": _constraint(outcome)},
        )
        self.study.add_trial(trial)


def _constraint(outcome: Outcome) -> float:
    return outcome.excess if outcome.excess else -1.0


def _is_complete(outcome: Outcome) -> bool:
    return outcome.ok and not outcome.excess


def _is_ordered(values: Iterable[Any]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
