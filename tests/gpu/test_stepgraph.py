"""Whole steps on the GPU, with exchanged configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kerngen.cache import CompileCache
from kerngen.measure import load, target_here
from kerngen.render import render
from kerngen.runtime.launcher import Function
from kerngen.stepgraph import Ratio, StepGraph
from kerngen.steps import Step
from kerngen.templates import find_kernel
from kerngen.tuning.space import walk
from kerngen.tuning.stepworker import Exchanged
from kerngen.tuning.worker import GpuWorker, Observed
from kerngen.workload import Model, find_model

TINY = Path(__file__).parents[2] / "examples" / "tiny"
STEPS = [Step.decode(1, 128), Step.decode(3, 200), Step.verify(2, 4, 128), Step.draft(2, 128), Step.prefill(64, 128)]


@pytest.fixture(scope="module")
def tiny() -> Model:
    return find_model(str(TINY / "gemma-4-tiny-w4a16"), str(TINY / "gemma-4-tiny-assistant"))


@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.name)
def test_a_step_takes_as_long_as_itself_and_launches_what_was_chosen(
    tiny: Model, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = StepGraph(tiny, step)
    base, again = graph.capture({}), graph.capture({})
    ratio = graph.compare(base, again, pairs=20)
    assert ratio.low <= ratio.median <= ratio.high
    assert 0.9 < ratio.median < 1.1
    assert ratio.us > 1

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


def test_what_takes_longer_is_seen_to(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = StepGraph(tiny, Step.decode(1, 128))
    base, twice = graph.capture({}), graph.capture({})
    once = twice.replay
    monkeypatch.setattr(twice, "replay", lambda: (once(), once()))
    assert 1.5 < graph.compare(base, twice, pairs=20).median < 2.5


def test_the_worker_compares_choices(tiny: Model) -> None:
    step = Step.decode(3, 200)
    function, problem = next((f, p) for name, p in StepGraph(tiny, step).calls if (f := _other(name, p)) is not None)
    image = CompileCache().get_or_compile(
        render(function.kernel, problem, function.config, target_here()), target_here().arch
    ).image  # fmt: skip
    other = [Exchanged(function.kernel.name, (problem,), function.config, image)]
    with GpuWorker() as worker:
        seen = worker.compare(tiny, step, [], other, pairs=10)
        assert isinstance(seen, Ratio), seen
        assert seen.us > 1
        broken = worker.compare(tiny, step, [], [replace(other[0], image=b"no cubin")])
        assert isinstance(broken, Observed)
        assert "cannot load" in broken.reason


def _other(name: str, problem: Any) -> Function | None:
    """The kernel in another configuration than its default, where it has one."""
    kernel, target = find_kernel(name), target_here()
    default = kernel.default_config(problem, target)
    other = next((c for c in walk(kernel, problem, target) if c != default), None)
    return None if other is None else load(kernel, problem, other)
