"""Decode attention in eager torch, fp32, sequence by sequence: common/attention/*_torch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.common.attention.attention_torch import attend, first_key, gather_pages
from kerngen.templates.common.attention.heads_torch import new_heads, written_both
from kerngen.templates.common.attention.kv_formats_torch import all_values, code_flip
from kerngen.templates.common.rows.spec import KV_BITS, is_rotated
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.kernel import Tolerance
from kerngen.templates.values import KV_FORMATS

CACHES = ("k_cache", "v_cache")


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [batch * q_len, num_q_heads, head_dim], fp32; and the caches if the problem owns K and V, as
    `written_both` gives them.
    """
    p, out, results = problem, [], {}
    q = inputs["q"]
    if p.source != "q":
        num_kv_heads = p.num_kv_heads if p.owns_kv else 0
        shared = KV_FORMATS[p.kv_format].is_shared
        q, k, v = new_heads(q, p.num_q_heads, num_kv_heads, p.source == "qk", p.num_rotated_pairs, p.dtype, inputs,
                            shared=shared)  # fmt: skip
        if p.owns_kv:
            at = inputs["kv_lens"][:, None] - p.q_len + torch.arange(p.q_len, device=q.device)  # [batch, q_len]
            slots = inputs["slot_mapping"].where(at.flatten() >= 0, -1)
            made = written_both(inputs["k_cache"], inputs["v_cache"], slots, k, v, p.kv_format)
            results = dict(zip(CACHES, made, strict=True))
    caches = [results.get(name, inputs[name]) for name in CACHES]
    for queries, pages, kv_len in zip(q.split(p.q_len), inputs["block_table"], inputs["kv_lens"].tolist(), strict=True):
        first = first_key(kv_len, p.q_len, p.window)
        k, v = (
            gather_pages(cache, pages, first, kv_len, p.kv_format, TORCH_DTYPE[p.dtype], keys=keys)
            for cache, keys in zip(caches, (True, False), strict=True)
        )
        cap = inputs["logit_cap"] if p.logit_cap else 0.0
        out.append(attend(queries, k, v, kv_len, causal=p.causal, window=p.window, sm_scale=inputs["sm_scale"],
                          logit_cap=cap))  # fmt: skip
    return {"out": torch.cat(out), **results}


def values(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """What an output holds, in the caches' format or not."""
    return all_values(tensor, problem.kv_format, TORCH_DTYPE[problem.dtype]) if name in CACHES else tensor


def tolerance(problem: Problem) -> Tolerance:
    """Probabilities and the output are each rounded once to `dtype`, with unit roundoff u.

    Probabilities sum to 1, so their rounding moves the output by at most u * sum p |v| <= u * max |v|, and |v| < 6 in
    the cases; the signs differ, so that the sum stays near u. 4u covers it and the last rounding. Of heads that are
    made here a rounding may flip, as qkv_norm_rope's may: of values of about 4 and less, by 8u, and then a code. For a
    rotated cache q is rounded once more, and on sm70 K and V are: a score's error has a deviation of about u then, as
    scores have one of 3; of three bits up to twice that, since all codes of one size are rounded alike.
    """
    u = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    if problem.source == "q" and is_rotated(problem.kv_format):
        scores = 4 if KV_BITS[problem.kv_format] == 4 else 12
        most = (4 + scores) * u
        return Tolerance(most, most, f"4 roundings to {problem.dtype} (u = {u:.1e}), and {scores} of scores")
    if problem.source == "q":
        return Tolerance(4 * u, 4 * u, f"4 roundings to {problem.dtype} (u = {u:.1e})")
    code = code_flip(KV_FORMATS[problem.kv_format]) if problem.owns_kv else 0.0
    return Tolerance(8 * u + code, 4 * u, f"a flipped rounding of values up to 4, or 4 roundings, to {problem.dtype}")
