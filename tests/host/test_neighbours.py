"""A problem without rows gets what won for one near in shape, where the cost model holds that for good."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_tune import V100, FakeGpu

from kerngen.arch import Target
from kerngen.bundles.build import _collect
from kerngen.bundles.preflight import DEFAULT as BY_DEFAULT
from kerngen.bundles.preflight import PREDICTED, kind_of
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.cost.choose import ranked
from kerngen.runtime.neighbours import CLOSE, FAR, NEARLY_EQUAL, Neighbourhood, preferred
from kerngen.runtime.selection import DEFAULT, Selector
from kerngen.templates.kernel import Kernel
from kerngen.tuning.objective import Measured, Predicted
from kerngen.tuning.space import candidates
from kerngen.tuning.tuner import Tuner
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.export import shipment
from kerngen.tuning_db.store.winners import PREDICTED_MARGIN
from kerngen.workload.workload import Item

TARGET = Target.of(V100)


@pytest.fixture
def store(scale: Kernel, tmp_path: Path) -> Iterator[Store]:
    """One width of `scale` is measured, another predicted."""
    gpu: Any = FakeGpu()
    with Store.open(tmp_path / "a.db") as store, CachedCompiler(1, CompileCache(tmp_path / "cache")) as compiler:
        measured = [Item("scale", scale.problem_type(1024, t)) for t in (64, 4096)]
        Tuner(Measured(gpu), store, compiler, trials=12).run(measured)
        Tuner(Predicted(TARGET), store, compiler, trials=2).run([Item("scale", scale.problem_type(512, 64))])
        yield store


def choosing(scale: Kernel, *configs: Any) -> Kernel:
    """`scale` with these candidates in place of its default."""
    spec: Any = ModuleType("spec")
    vars(spec).update({k: v for k, v in vars(scale.spec).items() if k != "default_config"})
    spec.candidates = lambda problem, target: configs
    return replace(scale, spec=spec)


def test_the_winner_of_a_near_shape_runs_where_the_model_agrees(scale: Kernel, store: Store) -> None:
    kernel = choosing(scale, scale.config_type(32), scale.config_type(64))
    selector = Selector([store], TARGET)
    own = selector.choice(kernel, scale.problem_type(1024, 64))
    assert own.winner is not None
    problem = scale.problem_type(2048, 64)
    choice = selector.choice(kernel, problem)
    default = kernel.default_config(problem, TARGET)
    (us, _), (default_us, _) = ranked(kernel, problem, TARGET, [own.config, default])
    assert us <= default_us * (1 + NEARLY_EQUAL)
    assert choice.config == own.config != default
    assert (choice.source, choice.provenance) == ("winner of width=1024, chosen by the cost model", "predicted")
    assert choice.winner is None
    assert choice.neighbour is not None
    assert choice.neighbour.id == own.winner.id
    assert kind_of(choice, TARGET) == PREDICTED
    with shipment() as made:
        _collect(made, [store], [choice])
        bundled = Selector([made.store], TARGET).choice(kernel, problem)
        assert (bundled.config, bundled.source) == (choice.config, choice.source), "a bundle brings it along"
    beyond = selector.choice(kernel, scale.problem_type(1024 << int(FAR + 1), 64))
    assert (beyond.source, kind_of(beyond, TARGET)) == (DEFAULT, BY_DEFAULT)
    assert Selector([], TARGET).choice(kernel, problem).source == DEFAULT


def test_a_default_that_its_spec_chose_gives_way_only_to_what_is_far_ahead(scale: Kernel, store: Store) -> None:
    """Whom the model holds for nearly equal to the neighbour's winner."""
    problem = scale.problem_type(2048, 64)
    near = Neighbourhood([store], scale, TARGET).of(problem)
    valid = candidates(scale, problem, TARGET).valid
    (us, _), *timed = ranked(scale, problem, TARGET, [near[0].config, *valid])
    default = next(
        c for t, c in timed if us / (1 + NEARLY_EQUAL) < t < us * (1 + PREDICTED_MARGIN) and c != near[0].config
    )
    assert preferred(scale, problem, TARGET, default, near) is None
    assert preferred(choosing(scale, default), problem, TARGET, default, near) is near[0]
    slow = max(timed, key=lambda t: t[0])
    assert slow[0] > us * (1 + PREDICTED_MARGIN)
    assert preferred(scale, problem, TARGET, slow[1], near) is not None


def test_predictions_of_others_are_no_neighbours_and_a_choice_depends_on_no_other(scale: Kernel, store: Store) -> None:
    """So a bundle that has the one that was chosen chooses it again."""
    kernel = choosing(scale, scale.config_type(32), scale.config_type(64))
    neighbourhood = Neighbourhood([store], kernel, TARGET)
    for width, tokens in ((256, 64), (512, 1024), (2048, 4096), (2048, 256), (4096, 64)):
        problem = scale.problem_type(width, tokens)
        near = neighbourhood.of(problem)
        assert {n.winner.provenance for n in near} <= {"measured"}
        assert [sum(n.octaves) for n in near] == sorted(sum(n.octaves) for n in near)
        assert all(n.is_close == (max(n.octaves) <= CLOSE) for n in near)
        default = kernel.default_config(problem, TARGET)
        if (found := preferred(kernel, problem, TARGET, default, near)) is not None:
            assert preferred(kernel, problem, TARGET, default, [found]) is found
