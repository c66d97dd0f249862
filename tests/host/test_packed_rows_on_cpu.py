"""Rows of packed tables, by the kernels' own source on the host: every format, groups of 16 to 64."""

from __future__ import annotations

from pathlib import Path

import kernel_on_cpu
import pytest

from kerngen.arch import Target, find_arch
from kerngen.templates import find_kernel
from kerngen.timing.measure import compare


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("name", "case"), [
    ("embed", "h32_v32_bf16-bf16_int8-g16_t33"), ("embed", "h64_v32_fp16-fp32_int4-g64_bad_ids_t65"),
    ("draft_inputs", "e64_h40_v64_bf16_int4_min-g32_t7"),
])  # fmt: skip
def test_rows_are_those_of_the_reference(tmp_path: Path, name: str, case: str) -> None:
    kernel, target = find_kernel(name), Target.of(find_arch("sm90"))
    (given,) = [c for c in kernel.cases.CASES if c.name == case]
    inputs = kernel.cases.inputs(given, "cpu")
    config = kernel.default_config(given.problem, target)
    kernel_on_cpu.run_kernel(kernel, given.problem, config, target, inputs, tmp_path)
    result = compare(kernel, given, inputs, kernel.reference.expected(given.problem, inputs))
    assert result.ok, result.message
