"""What attention means, once, in eager torch: the references and the torch backend compute it here.

Source: arXiv 1706.03762, eq. 1; window and logit cap as in arXiv 2408.00118.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.templates.common.attention.kv_formats_torch import read_rows
from kerngen.templates.common.attention.tile_lists_torch import in_queries

QUERIES_AT_ONCE = 1024  # bounds the score matrix


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: int,
    *,
    causal: bool = True,
    window: int = 0,
    ends: Tensor | None = None,
    kept: Tensor | None = None,
    sm_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Softmax(q k^T * sm_scale) v of one sequence, in fp32.

    q [n, num_q_heads, head_dim] at positions kv_len - n to kv_len - 1; k, v [keys, num_kv_heads, head_dim] at positions
    kv_len - keys to kv_len - 1; any float dtype. A query sees keys up to its own position where `causal`, or up to that
    in ends [n], and of those not the ones that are `window` or more before it, if that is > 0. kept [lists,
    num_kv_heads, tiles] bool: tiles of keys that each block of queries sees (tile_lists_torch.py), where keys begin at
    position 0; None for all. logit_cap: 0 for none.
    Returns [n, num_q_heads, head_dim] fp32. A query that sees no key gives zeros; keys that no query sees may hold NaN,
    any other NaN stays.
    """
    n, (keys, num_kv_heads, _) = q.shape[0], k.shape
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    if keys == 0:
        return out
    key = torch.arange(kv_len - keys, kv_len, device=q.device)
    for begin in range(0, n, QUERIES_AT_ONCE):
        end = min(begin + QUERIES_AT_ONCE, n)
        at = torch.arange(kv_len - n + begin, kv_len - n + end, device=q.device)[:, None]
        last = at if ends is None else ends[begin:end, None]
        seen = ((key <= last) if causal else (key == key)) & (at >= 0)  # [queries, keys]
        if window:
            seen &= key > at - window
        by_any = seen.any(0)
        lo = int(by_any.int().argmax())  # keys before it are seen by none of these queries
        by_none, hidden = ~by_any[lo:, None], ~seen[:, lo:]
        blind = hidden.all(-1)[:, None]
        for head in range(num_kv_heads):  # one at a time: the scores of all would not fit for a long prompt
            if kept is not None:
                own = seen & in_queries(kept[:, head : head + 1], end, keys)[0, begin:]
                by_none, hidden = ~own.any(0)[lo:, None], ~own[:, lo:]
                blind = hidden.all(-1)[:, None]
            rows = q[begin:end].view(end - begin, num_kv_heads, -1, q.shape[2])[:, head].float()  # [queries, group, d]
            scores = torch.einsum("qgd,kd->gqk", rows, k[lo:, head].float()) * sm_scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            weights = weights.masked_fill(blind, 0.0)
            values = v[lo:, head].float().masked_fill(by_none, 0.0)
            group = weights.shape[0]
            out[begin:end, head * group : (head + 1) * group] = torch.einsum("gqk,kd->qgd", weights, values)
    return out


def gather_pages(
    cache: Tensor, pages: Tensor, first: int, end: int, kv_format: str = "plain", dtype: torch.dtype = torch.float32,
    *, keys: bool = False,
) -> Tensor:  # fmt: skip
    """Positions first .. end - 1 of one sequence as [end - first, num_kv_heads, head_dim], as `read_rows` has them.

    cache [num_pages, num_kv_heads, page_size, row_entries]; pages [max_pages] int32.
    """
    page_size = cache.shape[2]
    at = torch.arange(first, max(first, end), device=cache.device)
    return read_rows(cache, kv_format, dtype, pages[at // page_size].long(), at % page_size, keys=keys)


def first_key(kv_len: int, num_queries: int, window: int) -> int:
    """The oldest position that any of the last `num_queries` of `kv_len` tokens sees."""
    return max(0, kv_len - num_queries - window + 1) if window else 0
