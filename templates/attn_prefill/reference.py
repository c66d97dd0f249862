"""Prefill attention in eager torch, fp32. Source: arXiv 1706.03762, eq. 1; window and cap as in arXiv 2408.00118."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.kernel import Case, Tolerance

_QUERIES_AT_ONCE = 1024  # bounds the score matrix


def prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int, sm_scale: float, logit_cap: float
) -> Tensor:
    """One sequence. q: [seqlen_q, num_q_heads, head_dim]; k, v: [kv_len, num_kv_heads, head_dim]; any float dtype.

    Query i is at position kv_len - seqlen_q + i. window: keys seen to the left, itself included; 0 sees all.
    logit_cap: 0 for none. Returns [seqlen_q, num_q_heads, head_dim] fp32; a query that sees no key gives zeros.
    Keys that no query sees may hold NaN.
    """
    seqlen_q, num_q_heads, _ = q.shape
    kv_len, num_kv_heads, _ = k.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    group = num_q_heads // num_kv_heads
    for begin in range(0, seqlen_q, _QUERIES_AT_ONCE):
        end = min(begin + _QUERIES_AT_ONCE, seqlen_q)
        at = torch.arange(begin, end, device=q.device)[:, None] + kv_len - seqlen_q  # [queries, 1]
        lo = max(0, begin + kv_len - seqlen_q - window + 1) if window else 0
        key = torch.arange(lo, kv_len, device=q.device)[None, :]  # [1, keys]
        seen = (key <= at) if causal else torch.ones_like(key <= at)
        if window:
            seen &= key > at - window
        if key.numel() == 0:
            continue
        for head in range(num_q_heads):
            keys, values = k[lo:, head // group].float(), v[lo:, head // group].float()
            scores = q[begin:end, head].float() @ keys.T * sm_scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).nan_to_num(0.0)
            out[begin:end, head] = weights @ values.masked_fill(~seen.any(0)[:, None], 0.0)
    return out


def gather_pages(cache: Tensor, pages: Tensor, lo: int, hi: int) -> Tensor:
    """Positions 0 .. hi - 1 of one sequence as [hi, num_kv_heads, head_dim]; those before `lo` are left zero.

    cache: [num_pages, num_kv_heads, page_size, head_dim]; pages: [max_pages] int32.
    """
    _, num_kv_heads, page_size, head_dim = cache.shape
    rows = torch.zeros(hi, num_kv_heads, head_dim, dtype=cache.dtype, device=cache.device)
    at = torch.arange(lo, hi, device=cache.device)
    rows[lo:] = cache[pages[at // page_size].long(), :, at % page_size]
    return rows


def expected(case: Case, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """{"out": [num_tokens, num_q_heads, head_dim] fp32} for the arguments that cases.inputs made."""
    p = case.problem
    out = torch.zeros(inputs["q"].shape, dtype=torch.float32, device=inputs["q"].device)
    starts = inputs["cu_seqlens_q"].tolist()
    for s, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        if p.page_size:
            kv_len = int(inputs["kv_lens"][s])
            lo = max(0, kv_len - (end - begin) - p.window + 1) if p.window else 0
            k = gather_pages(inputs["k"], inputs["block_table"][s], min(lo, kv_len), kv_len)
            v = gather_pages(inputs["v"], inputs["block_table"][s], min(lo, kv_len), kv_len)
        else:
            keys = slice(int(inputs["cu_seqlens_k"][s]), int(inputs["cu_seqlens_k"][s + 1]))
            k, v = inputs["k"][keys], inputs["v"][keys]
        out[begin:end] = prefill_reference(
            inputs["q"][begin:end],
            k,
            v,
            causal=p.causal,
            window=p.window,
            sm_scale=inputs["sm_scale"],
            logit_cap=inputs["logit_cap"] if p.logit_cap else 0.0,
        )
    return {"out": out}


def tolerance(problem: Any) -> Tolerance:
    """Probabilities and the output are each rounded once to `dtype`, with unit roundoff u.

    Since probabilities sum to 1, their rounding moves the output by at most u · Σ p |v| < u · max |v|, and |v| < 5 in
    the cases; in practice the errors' signs differ and the sum is near u. 4u covers it and one more rounding.
    """
    u = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    return Tolerance(4 * u, 4 * u, f"4 roundings to {problem.dtype} (u = {u:.1e})")
