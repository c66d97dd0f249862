"""Decode attention in eager torch, fp32, sequence by sequence: common/attention_torch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.common.attention_torch import attend, first_key, gather_pages
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """{"out": [batch * q_len, num_q_heads, head_dim] fp32} for the kernel's arguments."""
    p, out = problem, []
    for queries, pages, kv_len in zip(
        inputs["q"].split(p.q_len), inputs["block_table"], inputs["kv_lens"].tolist(), strict=True
    ):
        first = first_key(kv_len, p.q_len, p.window)
        k, v = (gather_pages(inputs[name], pages, first, kv_len) for name in ("k_cache", "v_cache"))
        cap = inputs["logit_cap"] if p.logit_cap else 0.0
        out.append(attend(queries, k, v, kv_len, window=p.window, sm_scale=inputs["sm_scale"], logit_cap=cap))
    return {"out": torch.cat(out)}


def tolerance(problem: Problem) -> Tolerance:
    """Probabilities and the output are each rounded once to `dtype`, with unit roundoff u.

    Probabilities sum to 1, so their rounding moves the output by at most u * sum p |v| <= u * max |v|, and |v| < 6 in
    the cases; the signs differ, so that the sum stays near u. 4u covers it and the last rounding.
    """
    u = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    return Tolerance(4 * u, 4 * u, f"4 roundings to {problem.dtype} (u = {u:.1e})")
