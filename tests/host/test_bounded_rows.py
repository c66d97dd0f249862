"""add_norm and gelu_gate between bounded linears: their own sources on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch

from kerngen.arch import Target, find_arch
from kerngen.templates import Case, Kernel, find_kernel
from kerngen.timing.measure import compare

TARGET = Target.of(find_arch("sm90"))
MOST_ELEMENTS = 3000
BOUNDED = [
    (kernel, case)
    for kernel in map(find_kernel, ("add_norm", "gelu_gate"))
    for case in kernel.cases.CASES
    if case.problem.has_bounds
    and case.problem.num_tokens * getattr(case.problem, "hidden", 0) <= MOST_ELEMENTS
    and case.problem.num_tokens * getattr(case.problem, "width", 0) <= MOST_ELEMENTS
]


def run_on_cpu(kernel: Kernel, case: Case, inputs: dict[str, Any], folder: Path) -> None:
    config = kernel.default_config(case.problem, TARGET)
    kernel_on_cpu.run_kernel(kernel, case.problem, config, TARGET, inputs, folder)


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("kernel", "case"), BOUNDED, ids=lambda value: getattr(value, "name", None))
def test_rows_are_clamped(kernel: Kernel, case: Case, tmp_path: Path) -> None:
    inputs = kernel.cases.inputs(case, "cpu")
    expected = kernel.reference.expected(case.problem, inputs)
    free = inputs | {"bounds": torch.tensor([[-torch.inf, torch.inf]] * len(inputs["bounds"]))}
    without = kernel.reference.expected(case.problem, free)
    assert all(not torch.equal(expected[name], without[name]) for name in expected), "so that it is seen"
    run_on_cpu(kernel, case, inputs, tmp_path)
    result = compare(kernel, case, inputs, expected)
    assert result.ok, result.message
