"""A token's experts give the same bits whoever else is in the batch: what only a GPU can show of moe_w4a16."""

from __future__ import annotations

import pytest
import torch

from kerngen.templates import find_kernel
from kerngen.templates.moe_w4a16.spec import Problem

KERNEL = find_kernel("moe_w4a16")


@pytest.mark.parametrize("tokens", [2, 4, 5, 16, 64, 300])
def test_what_neighbours_choose_changes_no_bit_of_a_token(tokens: int) -> None:
    from kerngen.timing.measure import load, target_here

    problem = Problem(128, 8, 2816, 704, 32, "bf16", tokens)
    function = load(KERNEL, problem, KERNEL.default_config(problem, target_here()))
    inputs = KERNEL.cases.inputs(KERNEL.cases.case_for(problem), torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(tokens)

    def first_token() -> torch.Tensor:
        """Token 0's outputs, with other neighbours each time."""
        inputs["x"][1:] = torch.randn(tokens - 1, 2816, generator=generator, device="cuda").bfloat16()
        chosen = torch.rand(tokens - 1, 128, generator=generator, device="cuda").topk(8, -1).indices
        inputs["topk_ids"][1:] = (chosen % 20 if tokens % 2 else chosen).int()
        function(problem, **inputs)
        return inputs["y"][0].clone()

    expected = first_token()
    assert expected.isfinite().all()
    for _ in range(4):
        assert torch.equal(first_token(), expected)
