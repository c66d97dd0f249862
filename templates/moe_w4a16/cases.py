"""Shapes that tests, bench and tuner share: rows by expert from none to many, then the 26B-A4B's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.common.w4.pack import drawn, interleave, pack
from kerngen.templates.kernel import Case
from kerngen.templates.moe_w4a16.spec import PHASES, Problem, shape


def _case(
    experts: int, top_k: int, hidden: int, inner: int, group: int, dtype: str, tokens: int, routing: str = "random",
    **formats: Any,
) -> Case:  # fmt: skip
    """routing: random, or "one": all tokens choose the same experts. formats: the fields of Problem that say them."""
    return _named(Problem(experts, top_k, hidden, inner, group, dtype, tokens, **formats), routing)


def _named(p: Problem, routing: str = "random") -> Case:
    name = f"e{p.num_experts}_k{p.top_k}_{p.hidden}x{p.inner}_g{p.group_size}_{p.dtype}_t{p.num_tokens}"
    if (p.up_weights, p.down_weights) != ("int4", "int4"):
        name += f"_{p.up_weights}_{p.down_weights}"
    name += f"_down{p.down_group_size}" if p.down_group_size else ""
    name += ("_fp16_scales" if p.fp16_scales else "") + ("" if routing == "random" else f"_{routing}")
    return Case(name, p, seed=p.num_tokens + p.hidden, options={"routing": routing})


def _of(up: str, down: str, group: int, dtype: str, *tokens: int, **formats: Any) -> list[Case]:
    """Cases of a pair of formats, with rows that few tiles divide: 352 = 11 x 32."""
    return [_case(8, 4, 384, 352, group, dtype, t, up_weights=up, down_weights=down, **formats) for t in tokens]


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
    # Q4_K_M of the 26B-A4B, Q8_0, groups of 16 and of a row, one of 11 x 32; scales of either dtype
    *_of("int4_min", "int8_min", 32, "bf16", 1, 5, 20, 60, 300, fp16_scales=True),
    *_of("int4_min", "int8_min", 32, "fp16", 1, 5, 300),
    *_of("int8", "int8", 32, "bf16", 2, 9, 40, 300, fp16_scales=True),
    *_of("int8", "int8", 32, "fp16", 2, 40),
    *_of("int8", "int4_min", 16, "bf16", 1, 5, 33, 300, down_group_size=32, fp16_scales=True),
    *_of("int8", "int4_min", 16, "fp16", 5, 300, down_group_size=32),
    *_of("int4", "int8_min", 128, "bf16", 4, 16, 130, down_group_size=16),
    *_of("int4", "int8_min", 128, "fp16", 16, down_group_size=16),
    *_of("int8_min", "int8", 384, "bf16", 1, 8, 200, down_group_size=352, fp16_scales=True),
    *_of("int8_min", "int8", 384, "fp16", 1, 200, down_group_size=352),
    *_of("int4", "int4", 32, "bf16", 1, 6, 30, fp16_scales=True),
    *(_case(16, 8, 2816, 704, 32, "bf16", t, up_weights="int4_min", down_weights="int8_min", fp16_scales=True)
      for t in (4, 50, 400)),
)  # fmt: skip


def inputs(case: Case, device: str) -> dict[str, Any]:
    """Every argument but the workspace; y is NaN. Packed weights: see op.py."""
    p = case.problem
    draw = Draw(case.seed, device)
    gate_up, down = ([_matrix(draw, p, phase) for _ in range(p.num_experts)] for phase in PHASES)
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


def _matrix(draw: Draw, p: Problem, phase: str) -> tuple[Tensor, Tensor]:
    stored = drawn(draw, *shape(p, phase), p.groups(phase), "fp16" if p.fp16_scales else p.dtype, p.weights(phase))
    return pack(*(interleave(*stored) if phase == "up" else stored))


def case_for(problem: Problem) -> Case:
    return _named(problem)
