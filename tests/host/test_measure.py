"""What `kerngen.timing.measure` compares and copies, of kernels that take several tensors under one name. No GPU."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerngen.templates import Case, Tolerance
from kerngen.templates.kernel import spread
from kerngen.timing import measure
from kerngen.timing.measure import compare, fresh

KERNEL: Any = SimpleNamespace(
    name="many", values_of=lambda problem, name, x: x, tolerance_of=lambda problem, name: Tolerance(0.0, 0.0, "exact")
)


def test_the_elements_of_an_output_are_compared_one_by_one() -> None:
    case, want = Case("case", None), (torch.zeros(2), torch.ones(3))
    given: dict[str, Any] = {"out": torch.zeros(1), "caches": (torch.zeros(2), torch.ones(3)), "eps": 1e-6}
    expected = {"out": torch.zeros(1), "caches": want}
    assert compare(KERNEL, case, given, expected).ok
    given["caches"][1][2] = 5
    said = compare(KERNEL, case, given, expected)
    assert not said.ok
    assert said.error_abs == 4
    assert "caches[1][2] is 5, reference 1; 1 of 3" in said.message


@pytest.mark.parametrize("at_once", [1, 5, 7, 1 << 26])
def test_parts_that_are_compared_add_up(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(measure, "COMPARED", at_once)
    nan, inf = float("nan"), float("inf")
    want = torch.tensor([[1.0, -8.0, nan, inf], [2.0, 0.0, -inf, 3.0]])
    case, got = Case("case", None), want.clone()
    assert compare(KERNEL, case, {"out": got}, {"out": want}).ok
    for at, value in (((0, 2), 0.0), ((1, 1), 2.0), ((1, 3), nan), ((1, 2), inf)):
        got[at] = value
    said = compare(KERNEL, case, {"out": got}, {"out": want})
    assert (said.ok, said.error_abs, said.error_rel) == (False, 2.0, 0.25)
    assert "out[0, 2] is 0, reference nan; 4 of 8 outside" in said.message


def test_copies_share_nothing_with_what_they_copy_but_what_was_one_stays_one() -> None:
    cache, x = torch.zeros(2), torch.zeros(1)
    given = {"out": x, "x": x, "caches": (cache, None, cache), "eps": 1e-6}
    made = fresh(given)
    made["caches"][0][0] = 1
    made["x"][0] = 1
    assert made["caches"][2] is made["caches"][0]
    assert made["out"] is made["x"]
    assert (made["caches"][1], made["eps"]) == (None, 1e-6)
    assert not cache.any()
    assert not x.any()
    assert [shown for _, shown, _ in spread(made)] == ["out", "x", "caches[0]", "caches[1]", "caches[2]", "eps"]


def test_copies_go_with_the_last_name_for_them() -> None:
    """On a GPU, what waits for Python to look for cycles is memory that the next copy does not get."""
    gc.disable()
    try:
        made = fresh({"caches": (torch.zeros(2),), "x": torch.zeros(1)})
        seen = [weakref.ref(made["x"]), weakref.ref(made["caches"][0])]
        del made
        assert [r() for r in seen] == [None, None]
    finally:
        gc.enable()
