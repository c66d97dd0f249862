"""The search for one problem's best configuration: an Optuna study that its caller drives with ask and tell.

First come the configurations that knowledge proposes (the default, winners of neighbouring problems, the best
by pre-prediction), then Optuna's own proposals. How many are left to Optuna, and which configurations cannot
win and need no compile, the objective says. Where it leaves none and the space is known whole, the search is
exact. What else is valid is not asked before the default has been tried.

The study lives in memory. Every outcome is in the tuning database, so a search that was killed is asked again
from the start, with the same seed, and answered from there: the same trials, without the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning.objective import Objective, Outcome
from kerngen.tuning.ranking import Ranked, Ranker, ranked
from kerngen.tuning.space import Candidates, on_grid

if TYPE_CHECKING:
    import optuna

SAMPLER_PATIENCE = 64  # proposals in a row that bring nothing new end the search


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
        ranker: Ranker | None = None,
        sampler: Callable[[Search, int], optuna.samplers.BaseSampler] | None = None,
    ) -> None:
        """ranker: ranks in a process of its own, from when the default is told; without it, here, when first needed.
        sampler: makes Optuna's, of this search and its seed, when the first proposal is due; None for TPE.
        """
        self.kernel, self.problem, self.target = kernel, problem, objective.target
        self.candidates, self.objective, self.trials = candidates, objective, trials
        self.outcomes: dict[Any, Outcome] = {}  # in the order asked
        self.refused: dict[Any, Outcome] = {}  # what the sampler proposed and why_invalid refused
        self._seed, self._sampler = seed, sampler
        self._first: deque[Any] = deque([candidates.default])
        self._ranker = ranker
        self._ranking: Callable[[], Ranked] | None = None  # under way
        self._space: Ranked | None = None  # of the ranking: how many are valid
        self._ranked: list[Any] = []  # what is left of it, the best last
        self._study: optuna.Study | None = None
        self._open: dict[Any, optuna.trial.Trial | None] = {}
        self._closed = False

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
        if self._space is not None and self._space.complete:
            left = min(left, self._space.num_valid + 1 - len(self.outcomes))
        return max(left, 0)

    def suggest(self, configs: Iterable[Any]) -> None:
        """Put `configs` (winners of neighbours) before all that is not yet asked, but for invalid ones."""
        fresh = [c for c in configs if c not in self.outcomes and c not in self._first]
        self._first.extend(c for c in fresh if self.kernel.why_invalid(self.problem, c, self.target) is None)

    def ask(self, count: int) -> list[Any]:
        """Up to `count` configurations to evaluate next; none if the search is over."""
        if not self.outcomes:
            count = 1  # the default's registers guide the ranking of the others
        asked: list[Any] = []
        while len(asked) < count and not self._closed and self.num_left > len(asked):
            config = self._next(asked)
            if config is None:
                self._closed = True
                break
            asked.append(config)
        if self.num_left == 0:
            self._closed = True
        return asked

    def tell(self, config: Any, outcome: Outcome) -> None:
        """Record what became of a configuration that `ask` gave."""
        self.outcomes[config] = outcome
        if self._ranker is not None and self._ranking is None and self.trials > 1:
            self._ranking = self._ranker.submit(*self._to_rank())
        trial = self._open.pop(config, None)
        if trial is not None:
            self._tell_optuna(trial, outcome)

    def abandon(self, config: Any) -> None:
        """`config` was asked and will not be evaluated (time ran out): the search ends here."""
        self._open.pop(config, None)
        self._closed = True

    # -- where configurations come from

    def _next(self, asked: list[Any]) -> Any | None:
        while self._first:
            config = self._first.popleft()
            if config not in self.outcomes and config not in asked:
                return self._opened(config)
        if self._space is None:
            self._space = ranked(*self._to_rank()) if self._ranking is None else self._ranking()
            self._ranked = list(self._space.configs[::-1])
        while self._ranked:
            config = self._ranked.pop()
            if config in self.outcomes or config in asked:
                continue
            if self.objective.can_win(self.kernel, self.problem, config, self.best_us):
                return self._opened(config)
        return None if self._is_exhausted(self._space, asked) else self._sampled(asked)

    def _is_exhausted(self, space: Ranked, asked: list[Any]) -> bool:
        """With the ranked candidates gone: nothing is left, or nothing that is left can win."""
        every = len(self.outcomes) + len(asked) >= space.num_valid
        return space.complete and (every or not self.objective.sampler_share)

    def _to_rank(self) -> tuple[Candidates, int, int, float]:
        """What `ranked` is asked."""
        registers = max((o.registers for o in self.outcomes.values()), default=0)
        return self.candidates, registers, self.trials, self.objective.sampler_share

    def _opened(self, config: Any) -> Any:
        """`config`, known to Optuna as a running trial if its values are on the grid."""
        if not self.objective.sampler_share and (self._space is None or self._space.complete):
            self._open[config] = None  # there is no sampler that could learn from it
        elif (part := on_grid(self.candidates.space, config)) is not None:
            self._optuna().enqueue_trial(self._indices(part, config))
            trial = self._optuna().ask()
            self._config_of(trial)
            self._open[config] = trial
        else:
            self._open[config] = None
        return config

    def _sampled(self, asked: list[Any]) -> Any | None:
        """Optuna's next proposal that is new and valid. Invalid and repeated ones are told at once."""
        study = self._optuna()
        for _ in range(SAMPLER_PATIENCE):
            trial = study.ask()
            config = self._config_of(trial)
            if config in self.outcomes:
                self._tell_optuna(trial, self.outcomes[config])
            elif config in asked:
                self._tell_optuna(trial, Outcome("invalid", reason="asked twice", excess=1.0))
            elif (why := self.kernel.why_invalid(self.problem, config, self.target)) is not None:
                self.refused[config] = Outcome("invalid", reason=why, excess=1.0)
                self._tell_optuna(trial, self.refused[config])
            else:
                self._open[config] = trial
                return config
        return None

    # -- Optuna

    def _optuna(self) -> optuna.Study:
        if self._study is None:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            make = self._sampler or (lambda search, seed: optuna.samplers.TPESampler(seed=seed))
            self._study = optuna.create_study(sampler=make(self, self._seed))
        return self._study

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

    def _tell_optuna(self, trial: optuna.trial.Trial, outcome: Outcome) -> None:
        from optuna.trial import TrialState

        trial.set_user_attr("outcome", outcome.kind)
        trial.set_constraint("excess", outcome.excess if outcome.excess else -1.0)
        if outcome.ok and not outcome.excess:
            self._optuna().tell(trial, outcome.latency_us)
        else:  # never FAIL: samplers learn from pruned trials, and forget failed ones
            self._optuna().tell(trial, state=TrialState.PRUNED)


def _is_ordered(values: Iterable[Any]) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
