"""Prefill attention in eager torch, fp32, sequence by sequence: common/attention/attention_torch.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_prefill.spec import Problem
from kerngen.templates.common.attention.attention_torch import attend, first_key, gather_pages
from kerngen.templates.common.attention.kv_formats_torch import all_values
from kerngen.templates.common.attention.tile_lists import first_list
from kerngen.templates.common.attention.tile_lists_torch import of_lists
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """{"out": [num_tokens, num_q_heads, head_dim] fp32} for the kernel's arguments."""
    p = problem
    out = torch.zeros(inputs["q"].shape, dtype=torch.float32, device=inputs["q"].device)
    kept = of_lists(inputs["counts"], inputs["lists"], inputs["max_tiles"]) if p.lists else None
    for s, (begin, end) in enumerate(pairwise(inputs["cu_seqlens_q"].tolist())):
        if begin == end:
            continue
        if p.page_size:
            kv_len = int(inputs["kv_lens"][s])
            lo = min(first_key(kv_len, end - begin, p.window), kv_len)
            k, v = (
                gather_pages(
                    inputs[name],
                    inputs["block_table"][s],
                    lo,
                    kv_len,
                    p.kv_format,
                    TORCH_DTYPE[p.dtype],
                    keys=name == "k",
                )
                for name in ("k", "v")
            )
        else:
            keys = slice(int(inputs["cu_seqlens_k"][s]), int(inputs["cu_seqlens_k"][s + 1]))
            k, v = inputs["k"][keys], inputs["v"][keys]
            kv_len = len(k)
        out[begin:end] = attend(
            inputs["q"][begin:end],
            k,
            v,
            kv_len,
            causal=p.causal,
            window=p.window,
            ends=inputs["ends"][begin:end] if p.ends else None,
            kept=None if kept is None else kept[first_list(begin, s) :],
            sm_scale=inputs["sm_scale"],
            logit_cap=inputs["logit_cap"] if p.logit_cap else 0.0,
        )
    return {"out": out}


def values(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """What an output holds, and of the caches what they do, in their format or not."""
    return all_values(tensor, problem.kv_format, TORCH_DTYPE[problem.dtype]) if name in ("k", "v") else tensor


def tolerance(problem: Problem) -> Tolerance:
    """Probabilities and the output are each rounded once to `dtype`, with unit roundoff u.

    Since probabilities sum to 1, their rounding moves the output by at most u · Σ p |v| < u · max |v|, and |v| < 5 in
    the cases; in practice the errors' signs differ and the sum is near u. 4u covers it and one more rounding.
    """
    u = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    return Tolerance(4 * u, 4 * u, f"4 roundings to {problem.dtype} (u = {u:.1e})")
