"""What only a GPU can show of moe_w4a16: a token's experts give the same bits whoever else is in the batch, and every
candidate of each pair of formats gives the reference's products.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kerngen.arch import ARCHES, Target
from kerngen.templates import find_kernel
from kerngen.templates.moe_w4a16.spec import Problem

KERNEL = find_kernel("moe_w4a16")


FORMATS: dict[str, dict[str, Any]] = {
    "int4": {},
    "Q4_K_M": {"up_weights": "int4_min", "down_weights": "int8_min", "fp16_scales": True},
    "Q8_0": {"up_weights": "int8", "down_weights": "int8", "fp16_scales": True},
    "Q6_K and Q8_0": {"up_weights": "int8", "down_weights": "int8", "fp16_scales": True, "group_size": 16,
                      "down_group_size": 32},
    "by row": {"up_weights": "int8_min", "down_weights": "int8", "group_size": 384, "down_group_size": 352},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 3, 6, 17, 60, 300])
@pytest.mark.parametrize("formats", FORMATS)
def test_each_candidate_gives_the_references_products(formats: str, tokens: int) -> None:
    from kerngen.runtime.launcher import probe_device
    from kerngen.timing.measure import check_function, load

    arch = ARCHES[probe_device().arch]
    if not arch.has_bf16:
        pytest.skip(f"{arch} has no bf16; tests/gpu/test_kernels.py runs the cases in fp16")
    sizes = {"num_experts": 16, "top_k": 8, "hidden": 384, "inner": 352}
    problem = Problem(**(sizes | {"num_tokens": tokens} | FORMATS[formats]))
    for config in KERNEL.candidates(problem, Target.of(arch)):
        if KERNEL.why_invalid(problem, config, Target.of(arch)) is None:
            result = check_function(load(KERNEL, problem, config), KERNEL.cases.case_for(problem))
            assert result.ok, f"{config}: {result.message}"


@pytest.mark.parametrize(("tokens", "formats"), [
    *((tokens, "int4") for tokens in (2, 4, 5, 16, 64, 300)), *((tokens, "Q4_K_M") for tokens in (4, 16, 300)),
])  # fmt: skip
def test_what_neighbours_choose_changes_no_bit_of_a_token(tokens: int, formats: str) -> None:
    from kerngen.timing.measure import load, target_here

    problem = Problem(128, 8, 2816, 704, 32, "bf16", tokens, **FORMATS[formats])
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
