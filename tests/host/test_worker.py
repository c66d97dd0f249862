"""What the GPU worker keeps of a problem between two configurations. No GPU: the tensors lie on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kerngen.timing.measure
from kerngen.errors import LaunchError
from kerngen.templates import Case
from kerngen.templates.kernel import Tolerance
from kerngen.timing.gpu import Clocks
from kerngen.timing.measure import Timing, fresh
from kerngen.tuning import worker
from kerngen.tuning.worker import _Prepared, _prepared


def _kernel(name: str, made: list[str]) -> Any:
    """Adds x to `state` in place, which is its output beside `out`."""

    def inputs(case: Case, device: Any) -> dict[str, Any]:
        made.append(name)
        state = torch.arange(4.0)
        return {"out": torch.full((4,), float("nan")), "state": state, "again": state, "x": (torch.ones(4), None)}

    def expected(problem: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"out": inputs["x"][0] * 2, "state": inputs["state"].add_(1)}

    return SimpleNamespace(
        name=name,
        cases=SimpleNamespace(inputs=inputs, case_for=lambda p: Case("case", p)),
        reference=SimpleNamespace(expected=expected),
        outputs_of=lambda problem: ("out", "state"),
        values_of=lambda problem, name, tensor: tensor,
    )


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def three(inputs: dict[str, Any]) -> list[dict[str, Any]]:
        return [inputs, fresh(inputs), fresh(inputs)]

    monkeypatch.setattr(kerngen.timing.measure, "timing_sets", three)
    monkeypatch.setattr(worker, "_held", [])


def test_each_configuration_is_checked_on_inputs_as_made() -> None:
    prepared = _Prepared(_kernel("adds", []), 1)
    assert prepared.expected["state"].tolist() == [1, 2, 3, 4], "the reference works on a copy"
    first = prepared.one()
    for value in (first["out"], first["state"], first["x"][0]):
        value.fill_(7)  # a kernel that writes where it should not, too
    second = prepared.one()
    assert second["x"][0] is first["x"][0], "the memory is the same"
    assert second["out"].isnan().all()
    assert second["state"].tolist() == [0, 1, 2, 3]
    assert second["again"] is second["state"]
    assert second["x"][0].tolist() == [1, 1, 1, 1]


def test_the_copies_for_timing_are_made_once_and_what_is_written_is_restored() -> None:
    prepared = _Prepared(_kernel("adds", []), 1)
    checked = prepared.one()
    sets = prepared.sets()
    assert len(sets) == 3
    assert sets[0] is checked
    for inputs in sets:
        inputs["state"].add_(100)
        inputs["out"].zero_()
    again = prepared.sets()
    assert [a["state"].data_ptr() for a in again] == [s["state"].data_ptr() for s in sets]
    assert all(a["state"].tolist() == [0, 1, 2, 3] and a["out"].isnan().all() for a in again)
    prepared.drop()
    assert prepared.one()["state"].tolist() == [0, 1, 2, 3]
    assert len(prepared.sets()) == 3


def test_only_the_last_problem_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("kerngen.templates.find_kernel", lambda name: _kernel(name, made))
    one = _prepared("a", 1)
    assert _prepared("a", 1) is one
    assert made == ["a"]
    other = _prepared("b", 1)
    assert worker._held == [other]
    assert _prepared("b", 2) is not other
    assert made == ["a", "b", "b"]


class _Function:
    """Adds x to what it is given, or, of configuration "wrong", twice that; "faults" raises as the driver does."""

    def __init__(self, kernel: Any, config: Any, target: Any, image: bytes, index: int) -> None:
        self.kernel, self.config = kernel, config

    def __call__(self, problem: Any, **inputs: Any) -> None:
        if self.config == "faults":
            raise LaunchError("no room")
        inputs["out"].copy_(inputs["x"][0] * (4 if self.config == "wrong" else 2))
        inputs["state"].add_(1)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was timed: configuration, number of sets, samples, milliseconds. Times are 1, 2, 3 and so on."""
    seen: list[tuple[Any, ...]] = []

    def time_function(function: Any, case: Case, *, sets: Any, samples: int, target_ms: float) -> Timing:
        assert all(s["out"].isnan().all() and s["state"].tolist() == [0, 1, 2, 3] for s in sets)
        for s in sets:
            function(case.problem, **s)
        seen.append((function.config, len(sets), samples, target_ms))
        if function.config == "large" and len(seen) == 1:
            raise torch.OutOfMemoryError
        if function.config == "late":
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")
        us = float(len(seen))
        return Timing(us, us - 0.1, us + 0.1, us - 0.2, samples, 1)

    made: list[str] = []
    kernel = _kernel("adds", made)
    kernel.tolerance_of = lambda problem, name: Tolerance(0.0, 0.0, "exact")
    monkeypatch.setattr("kerngen.templates.find_kernel", lambda name: kernel)
    monkeypatch.setattr("kerngen.runtime.launcher.Function", _Function)
    monkeypatch.setattr(kerngen.timing.measure, "target_here", lambda: None)
    monkeypatch.setattr(kerngen.timing.measure, "time_function", time_function)
    for name, does in (("synchronize", lambda: None), ("current_device", lambda: 0), ("empty_cache", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(worker, "_clocks", lambda: Clocks(1980, None, 40, None, ()))
    return seen


def test_a_configuration_is_checked_then_timed(timed: list[tuple[Any, ...]]) -> None:
    seen = worker._measure("adds", 1, "right", b"", 8, 1.0)
    assert (seen.outcome, seen.p50_us, seen.samples, seen.error_abs) == ("ok", 1.0, 8, 0.0)
    assert seen.gpu == {"sm_mhz": 1980, "temperature_c": 40, "reasons": []}
    assert timed == [("right", 3, 8, 1.0)]
    wrong = worker._measure("adds", 1, "wrong", b"", 8, 1.0)
    assert wrong.outcome == "wrong_result"
    assert "out[0] is 4, reference 2" in wrong.reason
    fault = worker._measure("adds", 1, "faults", b"", 8, 1.0)
    assert (fault.outcome, fault.reason) == ("launch_failed", "no room")
    assert len(timed) == 1
    assert worker._measure("adds", 1, "right", b"", 8, 1.0).outcome == "ok", "what the wrong one wrote is gone"


def test_where_the_copies_do_not_fit_that_is_what_came_of_it(timed: list[tuple[Any, ...]]) -> None:
    seen = worker._measure("adds", 1, "large", b"", 8, 1.0)
    assert (seen.outcome, seen.reason) == ("launch_failed", "two sets of its inputs do not fit in this GPU's memory")
    assert worker._measure("adds", 1, "large", b"", 8, 1.0).outcome == "ok", "with memory, it goes on"


def test_a_fault_in_the_timing_is_what_came_of_it(
    timed: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[RuntimeError] = []
    monkeypatch.setattr(worker, "_die_if_broken", broken.append)
    seen = worker._measure("adds", 1, "late", b"", 8, 1.0)
    assert (seen.outcome, seen.reason) == ("launch_failed", "CUDA error: an illegal memory access")
    assert len(broken) == 1, "whether the process is of use any more was asked"
    right, late = worker._finals("adds", 1, [("a", b""), ("late", b"")], 2, 8, 1.0)
    assert (right.outcome, late.outcome) == ("ok", "launch_failed")


def test_the_finalists_take_turns(timed: list[tuple[Any, ...]]) -> None:
    configs = [("a", b""), ("wrong", b""), ("b", b"")]
    first, wrong, last = worker._finals("adds", 1, configs, 3, 8, 1.0)
    assert [t[0] for t in timed] == ["a", "b", "b", "a", "a", "b"]
    assert (first.p50_us, last.p50_us, first.samples) == (4.0, 3.0, 24)
    assert wrong.outcome == "wrong_result"
