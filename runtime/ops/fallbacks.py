"""The torch code of what `runtime.fallbacks` lists: operations that we have no kernel for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kerngen.runtime.ops.values import Linear
from kerngen.templates.common.w4.pack import rows_of

GATHERED_ROWS = 64  # of dense experts, tokens times experts of each: more wait for the host


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] transposed."""
    if x.is_meta:
        return torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return F.linear(x, weight)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor) -> Tensor:
    """down[e] (gelu_tanh(gate) * up), gate | up = gate_up[e] x, for each expert e of each token. See Ops.experts.

    Up to GATHERED_ROWS routed rows are gathered, without a look at the ids on the host: a decode step of 8 tokens can
    be captured in a CUDA graph. More wait for the ids.
    """
    tokens, top_k = topk_ids.shape
    if x.is_meta:
        return torch.empty(tokens, top_k, x.shape[1], dtype=x.dtype, device=x.device)
    ids = topk_ids.long()
    if tokens * top_k <= GATHERED_ROWS:
        rows = x[:, None, :, None]  # [T, 1, H, 1]
        hidden = _gated((gate_up[ids] @ rows).squeeze(-1))  # [T, k, I]
        return (down[ids] @ hidden[..., None]).squeeze(-1)
    out = torch.empty(tokens, top_k, x.shape[1], dtype=x.dtype, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        out[token, slot] = F.linear(_gated(F.linear(x[token], gate_up[expert])), down[expert])
    return out


def routed_sum(routed: Tensor, topk_weights: Tensor) -> Tensor:
    """routed [T, k, H] weighted by topk_weights [T, k] and added in fp32: [T, H] in routed's dtype."""
    if routed.is_meta:
        return torch.empty(routed.shape[0], routed.shape[2], dtype=routed.dtype, device=routed.device)
    return (routed.float() * topk_weights[..., None]).sum(1).to(routed.dtype)


def logit_of(h: Tensor, head: Linear, ids: Tensor) -> Tensor:
    """The product of each h [n, H] with row ids [n] of the head [rows, H], whose values are of h's dtype, rounded as a
    dense product is: [n] fp32.
    """
    if h.is_meta:
        return torch.empty(len(h), dtype=torch.float32, device=h.device)
    rows = head.weight[ids] if head.is_dense else rows_of(head.packed, head.scales, ids).to(h.dtype)
    return (h.float() * rows.float()).sum(-1).to(h.dtype).float()


def capped(logits: Tensor, ids: Tensor, cap: float) -> Tensor:
    """cap * tanh(logit / cap) of logits [n, rows] at ids [n], [n] fp32; the logit itself where cap is 0."""
    if logits.is_meta:
        return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    found = logits.gather(1, ids[:, None]).squeeze(1).float()
    return cap * torch.tanh(found / cap) if cap > 0 else found


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up  # in the experts' dtype, without the copies that fp32 would take
