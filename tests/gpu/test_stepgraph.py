"""Whole steps on the GPU, with exchanged configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kerngen.compiler.cache import CompileCache
from kerngen.compiler.render import render
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.timing.measure import load, target_here
from kerngen.timing.step_compare import means, side_by_side
from kerngen.timing.step_graph import Stage, StepGraph
from kerngen.tuning.space import walk
from kerngen.tuning.step_worker import Exchanged
from kerngen.tuning.worker import GpuWorker, Observed
from kerngen.workload.steps import Ratio, Step
from kerngen.workload.workload import Model, find_model

pytestmark = pytest.mark.whole_gpu

TINY = Path(__file__).parents[2] / "examples" / "tiny"
STEPS = [Step.decode(1, 128), Step.decode(3, 200), Step.verify(2, 4, 128), Step.draft(2, 128), Step.prefill(64, 128)]


@pytest.fixture(scope="module")
def tiny() -> Model:
    return find_model(str(TINY / "gemma-4-tiny-w4a16"), str(TINY / "gemma-4-tiny-assistant"))


@pytest.fixture(scope="module")
def stage(tiny: Model) -> Stage:
    return Stage(tiny)


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.name)
def test_a_step_takes_as_long_as_itself_and_launches_what_was_chosen(
    stage: Stage, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = StepGraph(stage, step)
    base, again = graph.capture({}), graph.capture({})
    ratio = graph.compare(base, again, pairs=20)
    assert 0.9 < ratio.median < 1.1
    assert ratio.spread < 0.1
    assert ratio.base_us > 1

    ran: list[Function] = []
    plain = Function.run
    monkeypatch.setattr(Function, "run", lambda self, *a, **k: (ran.append(self), plain(self, *a, **k))[1])
    for (name, problem), count in graph.calls.items():
        other = _other(name, problem)
        if other is None:
            continue
        graph.capture({(name, problem): other})  # it warms up twice
        assert ran.count(other) == 3 * count, f"{name} {problem}"
        ran.clear()
        graph.capture({})
        assert other not in ran
        ran.clear()


def test_a_default_that_has_not_run_yet_is_run_before_it_is_captured(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = StepGraph(stage, Step.decode(1, 128))
    called, other = next((c, o) for c in graph.calls if (o := _other(*c)) is not None)
    graph.capture({called: other})
    ran: list[Function] = []
    plain = Function.run
    monkeypatch.setattr(Function, "run", lambda self, *a, **k: (ran.append(self), plain(self, *a, **k))[1])
    graph.capture({})
    default = stage.launcher.function(find_kernel(called[0]), called[1])
    assert ran.count(default) == 3 * graph.calls[called]


def test_what_takes_longer_is_seen_to(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = StepGraph(stage, Step.decode(1, 128))
    base, twice = graph.capture({}), graph.capture({})
    once = twice.replay
    monkeypatch.setattr(twice, "replay", lambda: (once(), once()))
    assert 1.5 < graph.compare(base, twice, pairs=20).median < 2.5


def test_the_worker_compares_choices(tiny: Model, stage: Stage) -> None:
    step = Step.decode(3, 200)
    function, problem = next((f, p) for name, p in StepGraph(stage, step).calls if (f := _other(name, p)) is not None)
    image = CompileCache().get_or_compile(
        render(function.kernel, problem, function.config, target_here()), target_here().arch
    ).image  # fmt: skip
    other = [Exchanged(function.kernel.name, (problem,), function.config, image)]
    with GpuWorker() as worker:
        seen = worker.compare(tiny, step, [], other, pairs=10)
        assert isinstance(seen, Ratio), seen
        assert seen.base_us > 1
        broken = worker.compare(tiny, step, [], [replace(other[0], image=b"no cubin")])
        assert isinstance(broken, Observed)
        assert "cannot load" in broken.reason


def test_databases_are_compared_in_steps(tiny: Model) -> None:
    rows = list(side_by_side(tiny, {"untuned": [], "again": []}, pairs=10))
    assert [r.step for r in rows]
    assert all(0.9 < r.ratios["again"].median < 1.1 and r.base_us > 1 for r in rows)
    assert all(r.num_tuned == {"untuned": 0, "again": 0} and r.num_calls > 0 for r in rows)
    assert 0.95 < means(rows)["again"] < 1.05


def _other(name: str, problem: Any) -> Function | None:
    """The kernel in another configuration than its default, where it has one."""
    kernel, target = find_kernel(name), target_here()
    default = kernel.default_config(problem, target)
    other = next((c for c in walk(kernel, problem, target) if c != default), None)
    return None if other is None else load(kernel, problem, other)
