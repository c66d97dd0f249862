"""Decode attention in eager torch, fp32. Source: arXiv 1706.03762, eq. 1; window and cap as in arXiv 2408.00118."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.kernel import Case, Tolerance


def decode_reference(
    q: Tensor, k: Tensor, v: Tensor, first_key: int, *, window: int, sm_scale: float, logit_cap: float
) -> Tensor:
    """One sequence. q: [q_len, num_q_heads, head_dim]; k, v: [num_keys, num_kv_heads, head_dim]; any float dtype.

    k[0] is the key at position first_key, k[-1] the one of the last query: query i sits at position
    first_key + num_keys - q_len + i and sees the keys up to its own, with window > 0 the last `window` of them.
    logit_cap: 0 for none. Returns [q_len, num_q_heads, head_dim] fp32; a query that sees no key gives zeros.
    """
    q_len, num_q_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    if num_keys == 0:
        return torch.zeros(q_len, num_q_heads, head_dim, device=q.device)
    key = first_key + torch.arange(num_keys, device=q.device)  # [num_keys]
    at = first_key + num_keys - q_len + torch.arange(q_len, device=q.device)[:, None]  # [q_len, 1]
    seen = (key <= at) & (key > at - window if window else key >= 0)  # [q_len, num_keys]
    grouped = q.float().reshape(q_len, num_kv_heads, -1, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * sm_scale
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).nan_to_num(0.0)
    return torch.einsum("hgqk,khd->qhgd", weights, v.float()).reshape(q_len, num_q_heads, head_dim)


def gather_pages(cache: Tensor, pages: Tensor, first: int, end: int) -> Tensor:
    """Positions first .. end - 1 of one sequence as [end - first, num_kv_heads, head_dim].

    cache: [num_pages, num_kv_heads, page_size, head_dim]; pages: [max_pages] int32.
    """
    page_size = cache.shape[2]
    at = torch.arange(first, end, device=cache.device)
    return cache[pages[at // page_size].long(), :, at % page_size]


def expected(case: Case, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """{"out": [batch * q_len, num_q_heads, head_dim] fp32} for the arguments that cases.inputs made."""
    p = case.problem
    out = []
    for s, kv_len in enumerate(inputs["kv_lens"].tolist()):
        first = max(0, kv_len - p.q_len - p.window + 1) if p.window else 0
        k, v = (gather_pages(inputs[name], inputs["block_table"][s], first, kv_len) for name in ("k_cache", "v_cache"))
        q = inputs["q"][s * p.q_len : (s + 1) * p.q_len]
        cap = inputs["logit_cap"] if p.logit_cap else 0.0
        out.append(decode_reference(q, k, v, first, window=p.window, sm_scale=inputs["sm_scale"], logit_cap=cap))
    return {"out": torch.cat(out)}


def tolerance(problem: Any) -> Tolerance:
    """Probabilities and the output are each rounded once to `dtype`, with unit roundoff u.

    Probabilities sum to 1, so their rounding moves the output by at most u * sum p |v| <= u * max |v|, and |v| < 6 in
    the cases; the signs differ, so that the sum stays near u. 4u covers it and the last rounding.
    """
    u = 2.0**-8 if problem.dtype == "bf16" else 2.0**-11
    return Tolerance(4 * u, 4 * u, f"4 roundings to {problem.dtype} (u = {u:.1e})")
