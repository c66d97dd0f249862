"""The torch code of what `runtime.fallbacks` lists: operations that we have no kernel for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up  # in the experts' dtype, without the copies that fp32 would take
