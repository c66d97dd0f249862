"""w4a16_gemm's weight formats on a GPU: every candidate of a problem, and the stream that nothing chooses yet."""

from __future__ import annotations

import itertools

import pytest

from kerngen.arch import ARCHES, Target
from kerngen.templates import find_kernel
from kerngen.templates.w4a16_gemm import spec
from kerngen.templates.w4a16_gemm.spec import Config, Problem

KERNEL = find_kernel("w4a16_gemm")
SHAPES = (320, 1408), (2560, 10240), (96, 5376)
FORMATS = ("int8", 32), ("int8", 16), ("int8", 128), ("int4_min", 32), ("int8_min", 32)
PROBLEMS = [
    Problem(n, k, group, "bf16", tokens, gated=tokens % 2 == 0, weights=weights)
    for (n, k), (weights, group), tokens in itertools.product(SHAPES, FORMATS, (1, 6, 17, 300))
]


def _configs(problem: Problem, target: Target) -> list[Config]:
    found = list(KERNEL.candidates(problem, target))
    if problem.num_tokens <= 8 and target.arch.has_tma:
        found += spec.mma_stream_configs(problem, target)
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.n}x{p.k}_{p.weights}_g{p.group_size}_m{p.num_tokens}")
def test_each_body_gives_the_references_product(problem: Problem) -> None:
    from kerngen.runtime.launcher import probe_device
    from kerngen.timing.measure import check_function, load

    arch = ARCHES[probe_device().arch]
    if not arch.has_bf16:
        pytest.skip(f"{arch} has no bf16; tests/gpu/test_kernels.py runs the cases in fp16")
    for config in _configs(problem, Target.of(arch)):
        function = load(KERNEL, problem, config)
        for _ in range(2):  # the second launch finds the workspace as the first one left it
            result = check_function(function, KERNEL.cases.case_for(problem))
            assert result.ok, f"{config}: {result.message}"
