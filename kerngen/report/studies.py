"""Each search of a database as the Optuna study that it was: for optuna-dashboard, and whatever else reads Optuna.

A tune keeps its studies in memory and every trial in the database, from where they are made again: the same
configurations in the same order, whichever process or machine tried them. What failed is PRUNED, as the sampler was
told, with its outcome and the reason. A search through several bodies of a kernel has one set of parameters, of them
all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerngen.report.data import Facts, Search, Trial
from kerngen.system.files import publish, unwritable

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

NAME_CHARS = 8  # of the search's own id, which tells two of the same problem apart


def write_studies(path: Path, facts: Facts) -> int:
    """Optuna's journal of every search in `facts`, at `path`, whole or not at all. Returns how many studies it has.

    Raises KerngenError where the file cannot lie there.
    """
    import tempfile

    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="kerngen-studies-") as folder:
        journal = Path(folder) / "studies.journal"
        journal.touch()
        storage = JournalStorage(JournalFileBackend(str(journal)))
        taken: Counter[str] = Counter()
        for search in facts.searches:
            name = _name(search)
            taken[name] += 1
            study = optuna.create_study(storage=storage, direction="minimize",
                                        study_name=name if taken[name] == 1 else f"{name} ({taken[name]})")  # fmt: skip
            for key, value in _about(search).items():
                study.set_user_attr(key, value)
            study.add_trials(_trials(search.trials))
        try:
            publish(journal.read_bytes(), path)
        except OSError as e:
            raise unwritable(path, e) from e
    return len(facts.searches)


def _name(search: Search) -> str:
    first = search.trials[0].row
    which = str(first.tags.get("search", first.run))[:NAME_CHARS]
    return f"{search.place.kernel}[{search.place.where}] on {search.place.device} {which}".strip()


def _about(search: Search) -> dict[str, Any]:
    first = search.trials[0].row
    return {
        "kernel": search.place.kernel, "problem": search.place.key.fields, "arch": first.arch,
        "device": search.place.device.name, "value is": f"{first.provenance} microseconds", "model": first.model,
        "search": first.tags.get("search", ""), "floor_us": search.place.floor_us,
    }  # fmt: skip


def _trials(trials: Sequence[Trial]) -> list[optuna.trial.FrozenTrial]:
    from optuna.trial import TrialState, create_trial

    distributions = _distributions(t.row.config for t in trials)
    made = []
    for number, t in enumerate(trials):
        config = {k: v for k, v in t.row.config.items() if k in distributions}
        trial = create_trial(
            state=TrialState.PRUNED if t.us is None else TrialState.COMPLETE, value=t.us, params=config,
            distributions={k: distributions[k] for k in config},
            user_attrs={"outcome": t.row.outcome, "reason": t.row.reason, "run": t.row.run,
                        "is_winner": t.is_chosen, "build": t.row.build_id or ""},
            constraints={"excess": -1.0 if t.us is not None else 1.0},
        )  # fmt: skip
        trial.number = number
        trial.datetime_start = trial.datetime_complete = datetime.fromisoformat(t.row.at).replace(tzinfo=None)
        made.append(trial)
    return made


def _distributions(configs: Iterable[dict[str, Any]]) -> dict[str, BaseDistribution]:
    """Of each field that has one value or more: numbers by their range, everything else as categories."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    seen: dict[str, dict[Any, None]] = {}
    for config in configs:
        for name, value in config.items():
            seen.setdefault(name, {})[value] = None
    found: dict[str, BaseDistribution] = {}
    for name, values in seen.items():
        kinds = {type(v) for v in values}
        low, high = (min(values), max(values)) if kinds <= {int, float} else (0, 0)
        if kinds == {int}:
            found[name] = IntDistribution(low, high, log=low > 0)
        elif kinds <= {int, float}:
            found[name] = FloatDistribution(low, high)
        elif kinds <= {bool, str, type(None)}:
            found[name] = CategoricalDistribution(list(values))
    return found
