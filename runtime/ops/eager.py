"""The torch backend: every op in eager torch, on any device. The maths that the kernels are held to.

Rounding follows transformers' modeling_gemma4.py where that rounds between steps (norms compute in fp32 and cast,
RoPE's cos and sin are cast to the activations' dtype); attention computes in fp32. Not for speed or graph capture.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kerngen.runtime.ops import DenseLinear, KVPages, Linear, Rope, W4Linear
from kerngen.runtime.sampling import likeliest


class TorchOps:
    """See `kerngen.runtime.ops.Ops` for every method's contract."""

    name = "torch"
    supports_graphs = False
    max_decode_len = 8

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.max_kv_len = 0
        self.dtype = dtype
        self.residual_dtype = torch.float32 if dtype == torch.float16 else dtype

    def sources(self) -> dict[str, int]:
        return {}

    def prepare(self, weights: Linear) -> Linear:
        """Unpacks W4A16 to a dense matrix: the reference needs the right values, not few bytes."""
        if isinstance(weights, W4Linear):
            from kerngen.runtime.weights.quantized import dequantize

            return DenseLinear(dequantize(weights))
        return weights

    def embed(self, ids: Tensor, table: Tensor, scale: float) -> Tensor:
        return (table[ids] * scale).to(self.residual_dtype)

    def rmsnorm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.pow(wide.square().mean(-1, keepdim=True) + eps, -0.5)
        if weight is not None:
            normed = normed * weight.float()
        return normed.to(self.dtype)

    def add_norm(
        self,
        residual: Tensor,
        h: Tensor,
        post_weight: Tensor,
        layer_scalar: Tensor | None,
        next_weight: Tensor | None,
        eps: float,
    ) -> Tensor | None:
        residual += self.rmsnorm(h, post_weight, eps)
        if layer_scalar is not None:
            residual *= layer_scalar
        return None if next_weight is None else self.rmsnorm(residual, next_weight, eps)

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        if isinstance(weights, W4Linear):
            raise TypeError("TorchOps.prepare turns packed weights into dense ones at load")
        return F.linear(x, weights.weight)

    def qkv_norm_rope(
        self,
        qkv: Tensor,
        num_q_heads: int,
        q_norm: Tensor,
        k_norm: Tensor | None,
        rope: Rope,
        positions: Tensor,
        cache: KVPages | None,
        slot_mapping: Tensor | None,
        eps: float,
    ) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, rope.head_dim)  # [T, nq (+ nkv (+ nkv)), d]
        angles = positions[:, None].float() * rope.inv_freq
        cos, sin = angles.cos().to(self.dtype)[:, None], angles.sin().to(self.dtype)[:, None]  # [T, 1, d / 2]
        q = _rotate(self.rmsnorm(heads[:, :num_q_heads], q_norm, eps), cos, sin)
        if cache is not None:
            if k_norm is None or slot_mapping is None:
                raise TypeError("a layer that writes its cache needs k_norm and slot_mapping")
            end = num_q_heads + cache.num_kv_heads
            k_raw = heads[:, num_q_heads:end]
            v_raw = heads[:, end:] if heads.shape[1] > end else k_raw
            k = _rotate(self.rmsnorm(k_raw, k_norm, eps), cos, sin)
            _write(cache, slot_mapping, k, self.rmsnorm(v_raw, None, eps))
        return q

    def attn_decode(
        self, q: Tensor, cache: KVPages, block_table: Tensor, kv_lens: Tensor, q_len: int, window: int
    ) -> Tensor:
        parts = [
            _attend(part, cache, row, kv_len, window)
            for part, row, kv_len in zip(q.split(q_len), block_table, kv_lens.tolist(), strict=True)
        ]
        return torch.cat(parts)

    def attn_prefill(
        self,
        q: Tensor,
        cache: KVPages,
        block_table: Tensor,
        kv_lens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        window: int,
    ) -> Tensor:
        sizes = cu_seqlens_q.diff().tolist()
        parts = [
            _attend(part, cache, row, kv_len, window)
            for part, row, kv_len in zip(q.split(sizes), block_table, kv_lens.tolist(), strict=True)
        ]
        return torch.cat(parts)

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def gelu_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * x

    def logits(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        out = self.linear(h, head).float()
        return logit_cap * torch.tanh(out / logit_cap) if logit_cap > 0 else out

    def greedy(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        return likeliest(self.logits(h, head, logit_cap))

    def ple_inputs(
        self,
        ids: Tensor,
        table: Tensor,
        table_scale: float,
        context: Tensor,
        context_scale: float,
        norm_weight: Tensor,
        eps: float,
    ) -> Tensor:
        sliced = (context * context_scale).view(len(ids), -1, norm_weight.shape[0])  # [T, L, P]
        normed = self.rmsnorm(sliced, norm_weight, eps)
        return (normed + (table[ids] * table_scale).view_as(normed)) * 2.0**-0.5

    def moe_route(self, logits: Tensor, per_expert_scale: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return ids.to(torch.int32), weights * per_expert_scale.float()[ids]

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        tokens, top_k = topk_ids.shape
        ids = topk_ids.long()
        if tokens * top_k <= 64:  # few rows: gather the experts, with no look at the ids on the host
            rows = x[:, None, :, None]  # [T, 1, H, 1]
            hidden = self.gelu_gate((gate_up[ids] @ rows).squeeze(-1))  # [T, k, I]
            each = (down[ids] @ hidden[..., None]).squeeze(-1)  # [T, k, H]
            return (each * topk_weights[..., None]).sum(1).to(x.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            hidden = self.gelu_gate(F.linear(x[token], gate_up[expert]))
            each = F.linear(hidden, down[expert]) * topk_weights[token, slot, None]
            out.index_add_(0, token, each.float())
        return out.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, d], cos and sin [T, 1, d / 2]: pairs (j, j + d / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _write(cache: KVPages, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Put k, v [T, nkv, d] into cache rows slot_mapping [T]; negative slots are skipped."""
    if bool((slot_mapping < 0).any()):
        keep = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[keep], k[keep], v[keep]
    page, row = slot_mapping // cache.page_size, slot_mapping % cache.page_size
    cache.k[page, :, row] = k
    cache.v[page, :, row] = v


def _attend(q: Tensor, cache: KVPages, table: Tensor, kv_len: int, window: int) -> Tensor:
    """One sequence: q [n, nq, d] at positions kv_len - n to kv_len - 1, table [max_pages]. Returns [n, nq, d]."""
    n, num_q_heads, dim = q.shape
    first = max(kv_len - n - window + 1, 0) if window else 0  # the oldest key that any query sees
    size, groups = cache.page_size, cache.num_kv_heads
    if kv_len <= 0:
        return torch.zeros_like(q)
    pages = table[first // size : (kv_len - 1) // size + 1].long()
    skip = first % size
    k, v = (
        t[pages].transpose(1, 2).reshape(-1, groups, dim)[skip : skip + kv_len - first] for t in (cache.k, cache.v)
    )  # [keys, nkv, d]
    rows = q.view(n, groups, -1, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim).float()  # [nkv, g * n, d]
    scores = (rows @ k.permute(1, 2, 0).float()).view(groups, -1, n, kv_len - first)
    query = torch.arange(kv_len - n, kv_len, device=q.device)[:, None]
    key = torch.arange(first, kv_len, device=q.device)[None]
    visible = (key <= query) & (query >= 0)
    if window:
        visible &= key > query - window
    scores = scores.masked_fill(~visible, float("-inf"))
    # A query that sees no key has weights of NaN, all its scores being -inf; any other NaN is the model's and stays.
    weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    out = weights.view(groups, -1, kv_len - first) @ v.transpose(0, 1).float()  # [nkv, g * n, d]
    return out.view(groups, -1, n, dim).permute(2, 0, 1, 3).reshape(n, num_q_heads, dim).to(q.dtype)
