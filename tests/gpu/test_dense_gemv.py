"""A token's outputs are the same bits alone and among others: what only a GPU can show of dense_gemv."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kerngen.templates import find_kernel
from kerngen.templates.dense_gemv.spec import Problem

KERNEL = find_kernel("dense_gemv")


@pytest.mark.parametrize("tokens", [2, 5, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(200, 1000), (128, 2816), (136, 4104), (70000, 512)])
def test_a_row_does_not_depend_on_the_others(n: int, k: int, tokens: int) -> None:
    from kerngen.timing.measure import load, target_here

    dtype = target_here().arch.dtype
    problem = Problem(n, k, dtype, tokens)
    inputs = KERNEL.cases.inputs(KERNEL.cases.case_for(problem), "cuda")
    config = KERNEL.default_config(problem, target_here())
    load(KERNEL, problem, config)(problem, **inputs)
    for block_m in {config.block_m, 16}:
        alone = dataclasses.replace(problem, num_tokens=1)
        function = load(KERNEL, alone, dataclasses.replace(config, block_m=block_m))
        for row in range(tokens):
            one = inputs | {"x": inputs["x"][row : row + 1].clone(), "out": torch.empty_like(inputs["out"][:1])}
            function(alone, **(one | {"num_tokens": 1}))
            assert torch.equal(one["out"][0], inputs["out"][row]), f"token {row} of {tokens}, block_m={block_m}"
