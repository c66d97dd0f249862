"""Whole steps in the GPU's process: what is captured once, what is let go, what a failure becomes. No GPU here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerngen.arch import Target, find_device
from kerngen.errors import LaunchError
from kerngen.system.processes import ProcessDied
from kerngen.templates import find_kernel
from kerngen.tuning import step_worker, worker
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.step_worker import GRAPHS_KEPT, Exchanged
from kerngen.tuning.worker import GpuWorker, Observed
from kerngen.workload.steps import Step
from kerngen.workload.workload import find_model

H200 = Target.of(find_device("H200"))
MODEL, STEP = find_model("gemma-4-e2b"), Step.decode(1, 512)
KERNEL = find_kernel("rmsnorm")


class FakeGraph:
    """In place of StepGraph."""

    def __init__(self, stage: Any, step: Any) -> None:
        self.stage = stage
        self.captured: list[Any] = []

    def capture(self, chosen: Any, fuses: Any) -> Any:
        if any(f.image == b"bad" for f in chosen.values()):
            raise LaunchError("refused")
        if any(f.image == b"huge" for f in chosen.values()):
            raise torch.OutOfMemoryError("no room")
        self.captured.append(chosen)
        return SimpleNamespace(chosen=chosen)

    def compare(self, base: Any, other: Any, *, pairs: int) -> Any:
        return base, other, pairs


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(kernel: Any, config: Any, target: Any, image: bytes, *, index: int) -> Any:
        return SimpleNamespace(config=config, image=image)

    monkeypatch.setattr(step_worker, "_held", {})
    monkeypatch.setattr(step_worker, "_stages", {})
    monkeypatch.setattr(step_worker, "StepGraph", FakeGraph)
    monkeypatch.setattr(step_worker, "Stage", lambda model: SimpleNamespace(model=model, target=H200))
    monkeypatch.setattr(step_worker, "Function", function)
    monkeypatch.setattr(step_worker, "target_here", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def _exchanged(image: bytes, *tokens: int) -> Exchanged:
    problems = tuple(KERNEL.problem_type(num_tokens=t) for t in tokens or (1,))
    return Exchanged("rmsnorm", problems, KERNEL.config_type(), image)


def test_a_choice_is_captured_once_and_serves_every_problem_it_names() -> None:
    base, other = [_exchanged(b"a", 1, 2)], [_exchanged(b"b")]
    first: Any = step_worker.compare(MODEL, STEP, base, other, 5, {})
    again: Any = step_worker.compare(MODEL, STEP, base, other, 7, {})
    assert (first[0], first[1]) == (again[0], again[1])
    assert (first[2], again[2]) == (5, 7)
    functions = first[0].chosen
    assert set(functions) == {("rmsnorm", KERNEL.problem_type(num_tokens=t)) for t in (1, 2)}
    assert len({id(f) for f in functions.values()}) == 1


def test_the_base_stays_while_others_come_and_go() -> None:
    base = [_exchanged(b"base")]
    first: Any = step_worker.compare(MODEL, STEP, base, [_exchanged(b"0")], 1, {})
    for i in range(3 * GRAPHS_KEPT):
        later: Any = step_worker.compare(MODEL, STEP, base, [_exchanged(f"{i}".encode())], 1, {})
        assert later[0] is first[0]
    (held,) = step_worker._held.values()
    captured = held._graph.captured  # type: ignore[attr-defined]
    assert len(captured) == 1 + 3 * GRAPHS_KEPT


def test_steps_of_one_model_share_its_weights() -> None:
    for step in (STEP, Step.decode(8, 512), STEP):
        step_worker.compare(MODEL, step, [], [], 1, {})
    first, second = step_worker._held.values()
    assert first._graph.stage is second._graph.stage
    step_worker.let_go()
    assert step_worker._held == step_worker._stages == {}


def test_where_memory_is_short_other_steps_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    step_worker.compare(MODEL, STEP, [], [], 1, {})
    capture = FakeGraph.capture

    def alone(self: FakeGraph, chosen: Any, fuses: Any) -> Any:
        if len(step_worker._held) > 1:
            raise torch.OutOfMemoryError("no room for two")
        return capture(self, chosen, fuses)

    monkeypatch.setattr(FakeGraph, "capture", alone)
    seen = step_worker.compare(MODEL, Step.decode(8, 512), [], [], 1, {})
    assert not isinstance(seen, str)
    assert [step for _, step in step_worker._held] == [Step.decode(8, 512)]


@pytest.mark.parametrize(("image", "why"), [(b"bad", "refused"), (b"huge", "decode, batch 1, context 512 of gemma-4-")])
def test_what_cannot_run_says_so(image: bytes, why: str) -> None:
    seen = step_worker.compare(MODEL, STEP, [], [_exchanged(image)], 1, {})
    assert isinstance(seen, str)
    assert why in seen


@pytest.mark.parametrize(("error", "outcome"), [(ProcessDied(True), "launch_failed"), (TimeoutError(), "timed_out")])
def test_a_process_that_is_lost_is_what_came_of_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str
) -> None:
    def call(self: GpuWorker, function: Any, *arguments: Any, within_s: float) -> Any:
        raise error

    monkeypatch.setattr(GpuWorker, "_call", call)
    seen = GpuWorker().compare(MODEL, STEP, [], [])
    assert isinstance(seen, Observed)
    assert seen.outcome == outcome
    if outcome == "timed_out":
        with pytest.raises(OutOfTime):
            GpuWorker().compare(MODEL, STEP, [], [], within_s=1.0)


def test_a_refusal_is_an_outcome_and_a_ratio_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_held", [])
    monkeypatch.setattr(GpuWorker, "_call", lambda self, function, *arguments, within_s: function(*arguments))
    refused = GpuWorker().compare(MODEL, STEP, [], [_exchanged(b"bad")])
    assert isinstance(refused, Observed)
    assert (refused.outcome, refused.reason) == ("launch_failed", "refused")
    seen: Any = GpuWorker().compare(MODEL, STEP, [_exchanged(b"a")], [_exchanged(b"b")], pairs=3)
    assert seen[2] == 3
