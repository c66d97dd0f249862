"""What the model computes that no kernel of ours serves, each with the reason, and how torch does it.

This list is the only way past the kernels: `kernels.py` tells the executor each time that it goes it, `run`, `tune` and
`doctor` print it, and a workload's `missing` is what its record met of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# name -> why torch computes it
OUTSIDE = {
    "dense matrices": "more than 16 tokens: cuBLAS through torch, a well-kept library where kerngen adds nothing",
    "dense experts": "no grouped kernel for 16-bit weights yet: torch multiplies one expert after the other",
    "experts' sum": "no kernel yet: torch weighs and adds what the experts' kernel gives",
}


def dense(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] times weight [out, in] transposed."""
    return F.linear(x, weight)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """sum_i w_i * down[e_i] (gelu_tanh(gate) * up), gate | up = gate_up[e_i] x. See Ops.experts.

    Up to 64 routed rows are gathered, without a look at the ids on the host: a decode step of 8 tokens can be
    captured in a CUDA graph. More wait for the ids.
    """
    if x.is_meta:
        return torch.empty_like(x)
    tokens, top_k = topk_ids.shape
    ids = topk_ids.long()
    if tokens * top_k <= 64:
        rows = x[:, None, :, None]  # [T, 1, H, 1]
        hidden = _gated((gate_up[ids] @ rows).squeeze(-1))  # [T, k, I]
        each = (down[ids] @ hidden[..., None]).squeeze(-1)  # [T, k, H]
        return (each * topk_weights[..., None]).sum(1).to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        hidden = _gated(F.linear(x[token], gate_up[expert]))
        each = F.linear(hidden, down[expert]) * topk_weights[token, slot, None]
        out.index_add_(0, token, each.float())
    return out.to(x.dtype)


def weighted_sum(routed: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights[t, i] routed[t, i] in fp32: [T, H] in routed's dtype. routed [T, k, H], weights [T, k] fp32."""
    return (routed * weights[..., None]).sum(1).to(routed.dtype)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up  # in the experts' dtype, without the copies that fp32 would take
