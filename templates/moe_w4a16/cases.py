"""Shapes that tests, bench and tuner share: rows by expert from none to many, then the 26B-A4B's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.common.w4.pack import drawn, interleave, pack
from kerngen.templates.kernel import Case
from kerngen.templates.moe_w4a16.spec import Problem


def _case(
    experts: int, top_k: int, hidden: int, inner: int, group: int, dtype: str, tokens: int, routing: str = "random"
) -> Case:
    """routing: random, or "one": all tokens choose the same experts."""
    suffix = "" if routing == "random" else f"_{routing}"
    name = f"e{experts}_k{top_k}_{hidden}x{inner}_g{group}_{dtype}_t{tokens}{suffix}"
    problem = Problem(experts, top_k, hidden, inner, group, dtype, tokens)
    return Case(name, problem, seed=tokens + hidden, options={"routing": routing})


CASES = (
    *(_case(8, 2, 256, 96, 32, "fp16", t) for t in (1, 2, 3, 5, 16, 17, 67, 130, 300)),
    *(_case(8, 2, 256, 96, 32, "bf16", t) for t in (1, 5, 130, 300)),
    *(_case(8, 2, 256, 96, 32, "fp16", t, "one") for t in (2, 8, 9, 130)),
    _case(1, 1, 64, 32, 32, "fp16", 1),
    _case(1, 1, 64, 32, 32, "fp16", 5),
    *(_case(16, 4, 384, 128, 128, "fp16", t) for t in (1, 33)),
    *(_case(256, 8, 128, 64, 64, "fp16", t) for t in (1, 9, 600)),
    # widths that no tile divides: 704 = 11 x 64
    *(_case(16, 8, 2816, 704, 32, "bf16", t) for t in (1, 4, 50, 400)),
)


def inputs(case: Case, device: str) -> dict[str, Any]:
    """Every argument but the workspace; y is NaN. Packed weights: see op.py."""
    p = case.problem
    draw = Draw(case.seed, device)
    gate_up = [_matrix(draw, 2 * p.inner, p.hidden, p, gated=True) for _ in range(p.num_experts)]
    down = [_matrix(draw, p.hidden, p.inner, p, gated=False) for _ in range(p.num_experts)]
    if case.options.get("routing", "random") == "one":
        ids = draw.permutation(p.num_experts)[: p.top_k].expand(p.num_tokens, -1)
    else:
        scores = draw.normal(p.num_tokens, p.num_experts, dtype="fp32")
        ids = scores.topk(p.top_k, dim=-1).indices
    return {
        "y": poisoned(p.num_tokens, p.top_k, p.hidden, dtype=p.dtype, device=device),
        "x": draw.normal(p.num_tokens, p.hidden, dtype=p.dtype),
        "gate_up": torch.stack([w for w, _ in gate_up]),
        "gate_up_scales": torch.stack([s for _, s in gate_up]),
        "down": torch.stack([w for w, _ in down]),
        "down_scales": torch.stack([s for _, s in down]),
        "topk_ids": ids.to(torch.int32).contiguous(),
        "num_tokens": p.num_tokens,
    }


def _matrix(draw: Draw, n: int, k: int, p: Problem, *, gated: bool) -> tuple[Tensor, Tensor]:
    stored = drawn(draw, n, k, p.group_size, p.dtype)
    return pack(*(interleave(*stored) if gated else stored))


def case_for(problem: Problem) -> Case:
    p = problem
    return _case(p.num_experts, p.top_k, p.hidden, p.inner, p.group_size, p.dtype, p.num_tokens)
