"""What a DFlash drafter asks of kernels beside Gemma-4: their sources, run on the host."""

from __future__ import annotations

from pathlib import Path

import kernel_on_cpu
import pytest
import torch

from kerngen.arch import Target, find_arch
from kerngen.templates import Case, Kernel, find_kernel
from kerngen.timing.measure import compare

ASKED = [
    (kernel, case)
    for kernel, words, most in (
        (find_kernel("gelu_gate"), "silu", 3),
        (find_kernel("qkv_norm_rope"), "qk-norm", 20),
        (find_kernel("qkv_norm_rope"), "rows-of-12", 20),
        (find_kernel("qkv_norm_rope"), "-x", 20),
        (find_kernel("add_norm"), "no-post", 3),
    )
    for case in kernel.cases.CASES
    if words in case.name and case.problem.num_tokens <= most
]


@pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")
@pytest.mark.parametrize(("kernel", "case"), ASKED, ids=lambda value: value.name)
def test_sources_equal_references(kernel: Kernel, case: Case, tmp_path: Path) -> None:
    target = Target.of(find_arch("sm80" if "bf16" in case.name else "sm70"))
    config = kernel.default_config(case.problem, target)
    inputs = kernel.cases.inputs(case, torch.device("cpu"))
    expected = kernel.reference.expected(case.problem, inputs)
    kernel_on_cpu.run_kernel(kernel, case.problem, config, target, inputs, tmp_path)
    result = compare(kernel, case, inputs, expected)
    assert result.ok, result.message
