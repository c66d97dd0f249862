"""What the GPU worker keeps of a problem between two configurations. No GPU: the tensors lie on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kerngen.measure
from kerngen.measure import fresh
from kerngen.templates import Case
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
    )


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def three(inputs: dict[str, Any]) -> list[dict[str, Any]]:
        return [inputs, fresh(inputs), fresh(inputs)]

    monkeypatch.setattr(kerngen.measure, "timing_sets", three)
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
