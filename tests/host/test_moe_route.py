"""moe_route's reference against transformers' router, and the promises on ties and NaN.

That it builds for every arch, and what it refuses, is in test_glue_kernels.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kerngen.templates import find_kernel

KERNEL = find_kernel("moe_route")


def _expected(logits: torch.Tensor, top_k: int, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    tokens, experts = logits.shape
    problem = KERNEL.problem_type(experts, top_k, "bf16", "fp32", tokens)
    case = KERNEL.cases.case_for(problem)
    inputs = KERNEL.cases.inputs(case, "cpu")
    inputs["logits"] = logits
    inputs["per_expert_scale"] = torch.ones(experts) if scale is None else scale
    return KERNEL.reference.expected(case.problem, inputs)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (16, 2)])
def test_reference_is_the_models_router(num_experts: int, top_k: int) -> None:
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(hidden_size=64, num_experts=num_experts, top_k_experts=top_k, enable_moe_block=True)
    router = gemma4.Gemma4TextRouter(config)
    router.proj.weight.data.normal_()
    router.scale.data.uniform_(0.5, 2.0)
    router.per_expert_scale.data.uniform_(0.5, 2.0)
    logits: list[torch.Tensor] = []
    router.proj.register_forward_hook(lambda module, args, output: logits.append(output))
    with torch.no_grad():
        _, weights, ids = router(torch.randn(33, 64))
        expected = _expected(logits[0], top_k, router.per_expert_scale.data)
    assert torch.equal(expected["topk_ids"].long(), ids)
    torch.testing.assert_close(expected["topk_weights"], weights, rtol=2e-6, atol=0)


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.zeros(1, 128)
    logits[0, [100, 7, 64]] = 2.0
    assert _expected(logits, 4)["topk_ids"].tolist() == [[7, 64, 100, 0]]


def test_weights_sum_to_one_before_the_scale() -> None:
    scale = torch.linspace(0.5, 2.0, 128)
    result = _expected(torch.randn(17, 128) * 5, 8, scale)
    unscaled = result["topk_weights"] / scale[result["topk_ids"].long()]
    torch.testing.assert_close(unscaled.sum(-1), torch.ones(17))


def test_nan_comes_first_and_shows_in_every_weight() -> None:
    logits = torch.randn(1, 128)
    logits[0, 77] = float("nan")
    result = _expected(logits, 8)
    assert result["topk_ids"][0, 0] == 77
    assert len(set(result["topk_ids"][0].tolist())) == 8
    assert bool(result["topk_weights"].isnan().all())


def test_every_kind_of_case_is_in_the_cases() -> None:
    kinds = {case.options["kind"] for case in KERNEL.cases.CASES}
    assert kinds == {"normal", "ties", "equal", "wide", "nan", "infinite", "zeros"}
    tokens: dict[Any, set[int]] = {}
    for case in KERNEL.cases.CASES:
        tokens.setdefault(case.problem.num_experts, set()).add(case.problem.num_tokens)
    assert 1 in tokens[128]
    assert any(t % 2 for t in tokens[256] - {1})
