"""The torch backend: every op in eager torch, on any device. The maths that the kernels are held to.

Rounding follows transformers' modeling_gemma4.py where that rounds between steps (norms compute in fp32 and cast,
RoPE's cos and sin are cast to the activations' dtype); attention computes in fp32. Not for speed or graph capture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kerngen.runtime.config import SparsePrefill
from kerngen.runtime.executors import Say, run_inline
from kerngen.runtime.executors.collectives import Collectives, OneRank
from kerngen.runtime.executors.trace import Trace
from kerngen.runtime.ops import (
    Experts,
    HeadScreen,
    LayerInStep,
    Linear,
    Made,
    ResidualNorms,
    WeightView,
    dense_weights,
    fallbacks,
    positions_of,
    residual_dtype,
    slots_of,
)
from kerngen.runtime.ops.divided import best_token, whole_logits
from kerngen.runtime.sampling import accepted, likeliest
from kerngen.runtime.weights.layout import MoeWeights, PleLayerWeights
from kerngen.templates.check_pages.reference import checked_pages
from kerngen.templates.common.attention.attention_torch import attend, first_key, gather_pages
from kerngen.templates.common.attention.heads_torch import folded_weight
from kerngen.templates.common.attention.heads_torch import slots_of as rows_of
from kerngen.templates.common.attention.kv_formats_torch import read_rows, write_rows
from kerngen.templates.common.attention.tile_lists import first_list, num_entries
from kerngen.templates.common.attention.tile_lists_torch import (
    lists_of_scores,
    of_lists,
    scores_of_lists,
    write_means,
)
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, GATED, gelu_gated, rms_norm, rope
from kerngen.templates.common.w4.pack import dequantize
from kerngen.templates.values import AttnBatch, HeadNorms, KVView, Mask, PageLimits, PagesInUse


class TorchOps:
    """See `kerngen.runtime.ops.Ops` for every method's contract."""

    name = "torch"
    supports_graphs = False

    def __init__(self, device: torch.device, dtype: torch.dtype, collectives: Collectives | None = None) -> None:
        """collectives: of this rank of a divided model; None for a world of one."""
        self.collectives: Collectives = collectives or OneRank()
        self.device = device
        self.dtype = dtype
        self.residual_dtype = residual_dtype(dtype)
        self.place = ""
        self.row_invariant = False

    def sources(self) -> dict[str, int]:
        return {}

    def outside(self) -> dict[str, str]:
        return {"everything": "the torch backend is eager torch, on any machine"}

    def build_ahead(self, warm_ups: Sequence[Callable[[Trace], None]], say: Say, meanwhile: Callable[[], None]) -> None:
        """Nothing is compiled."""
        meanwhile()

    def overlap(self, work: Callable[[], Made]) -> Callable[[], Made]:
        return run_inline(work)

    def prepare(self, weights: Linear) -> Linear:
        """Unpacks to a dense matrix: the reference needs the right values, not few bytes."""
        return unpacked(weights, self.dtype)

    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]:
        return unpacked(gate_up, self.dtype), unpacked(down, self.dtype)

    def decode_inputs(
        self, lengths: Tensor, tables: Tensor, q_len: int, page_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        positions = lengths[:, None] + torch.arange(q_len, device=lengths.device)  # [B, q_len]
        slots = rows_of(positions, tables, page_size)  # [2, B, q_len]
        return positions.flatten(), (lengths + q_len).to(torch.int32), slots.flatten(1)

    def check_pages(self, pages: PagesInUse, limits: PageLimits, writers: Tensor, record: Tensor) -> None:
        for to, made in zip((record, writers), checked_pages(pages, limits, writers, record), strict=True):
            to.copy_(made)

    def decode_advance(
        self,
        tokens: Tensor,
        drafts: Tensor | None,
        states: Tensor,
        token: Tensor,
        lengths: Tensor,
        limits: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        last = torch.zeros_like(lengths) if drafts is None else accepted(drafts, tokens)
        count, rows = last + 1, torch.arange(len(tokens), device=tokens.device)
        torch.clamp(tokens[rows, last], min=0, out=token)
        hidden.copy_(states.view(*tokens.shape, -1)[rows, last])
        torch.minimum(lengths + count, limits, out=lengths)
        return torch.cat((count[:, None], tokens, hidden.isfinite().all(-1, keepdim=True).long()), dim=1)

    def embed(self, ids: Tensor, table: Linear, scale: float) -> Tensor:
        return (table.weight[ids] * scale).to(self.residual_dtype)

    def draft_inputs(self, ids: Tensor, hidden: Tensor, table: Linear, scale: float) -> Tensor:
        return torch.cat(((table.weight[ids] * scale).to(self.dtype), hidden), dim=-1)

    def rmsnorm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return rms_norm(x, weight, eps).to(self.dtype)

    def add_norm(self, residual: Tensor, h: Tensor, norms: ResidualNorms) -> Tensor:
        if norms.into is not None:
            residual = norms.into.copy_(residual)
        residual += self.rmsnorm(h, norms.post_weight, norms.eps)
        if norms.layer_scalar is not None:
            residual *= norms.layer_scalar
        return self.rmsnorm(residual, norms.next_weight, norms.eps)

    def add_rmsnorm(self, residual: Tensor, h: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += h
        return self.rmsnorm(residual, weight, eps)

    def share_memory(self, hidden: int) -> None:
        """Nothing to do: sums are collectives."""

    def exchange_norm(self, residual: Tensor, h: Tensor, norms: ResidualNorms) -> Tensor:
        return self.add_norm(residual, self.collectives.all_reduce(h), norms)

    def linear_norm(self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms) -> Tensor | None:
        return None

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return F.linear(x, weights.weight)

    def qkv_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        if heads.k_weight is None or (slots := slots_of(heads, batch)) is None:
            raise TypeError("a layer that owns no K and V has q alone: Ops.q_norm_rope")
        num_q_heads, positions, eps = heads.num_q_heads, positions_of(batch), heads.eps
        end = num_q_heads + kv.num_kv_heads
        rows = qkv.view(qkv.shape[0], -1, kv.head_dim)  # [T, nq + nkv (+ nkv), d]
        k_raw = rows[:, num_q_heads:end]
        v_raw = rows[:, end:] if rows.shape[1] > end else k_raw
        k = self._normed_and_turned(k_raw, heads.k_weight, heads, positions)
        _write(kv, slots, k, self.rmsnorm(v_raw, None, eps))
        return self._normed_and_turned(rows[:, :num_q_heads], _q_weight(heads, kv), heads, positions)

    def q_norm_rope(self, q: Tensor, heads: HeadNorms, batch: AttnBatch) -> Tensor:
        return self._queries(q, heads.q_weight, heads, batch)

    def qk_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        if heads.k_weight is None or (slots := slots_of(heads, batch)) is None:
            raise TypeError("queries of a layer that owns no K and V are not normed beside any")
        rows, num_q_heads, positions = qkv.unflatten(1, (-1, kv.head_dim)), heads.num_q_heads, positions_of(batch)
        k, v = rows[:, num_q_heads:].split(kv.num_kv_heads, dim=1)
        _write(kv, slots, self._normed_and_turned(k, heads.k_weight, heads, positions), v)
        return self._normed_and_turned(rows[:, :num_q_heads], heads.q_weight, heads, positions)

    def kv_norm_rope(self, kv_rows: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> None:
        if heads.k_weight is None:
            raise TypeError("k_weight is None: layers whose K and V are written have one each")
        layers = len(heads.k_weight)
        of_layers = kv_rows.unflatten(1, (layers, -1)).unbind(1)
        for rows, weight, pages in zip(of_layers, heads.k_weight, kv.chunk(layers), strict=True):
            self.qk_norm_rope(rows, replace(heads, k_weight=weight), pages, batch)

    def _queries(self, q: Tensor, weight: Tensor, heads: HeadNorms, batch: AttnBatch) -> Tensor:
        return self._normed_and_turned(q.view(len(q), -1, heads.head_dim), weight, heads, positions_of(batch))

    def _normed_and_turned(self, x: Tensor, weight: Tensor, heads: HeadNorms, positions: Tensor) -> Tensor:
        normed = self.rmsnorm(x, weight, heads.eps).float()
        return rope(normed, positions, heads.inv_freq, heads.num_rotated_pairs, DTYPE_NAME[self.dtype]).to(self.dtype)

    def attend_decode(self, projected: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        if heads.owns_kv:
            q = self.qkv_norm_rope(projected, heads, kv, batch)
        else:
            q = self._queries(projected, _q_weight(heads, kv), heads, batch)
        return self.attn_decode(q, kv, batch)

    def attn_decode(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        batch.mask.require_no_tensors()
        return _attend_each(q.split(batch.q_len), kv, batch)

    def attn_prefill(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        if batch.cu_seqlens_q is None:
            raise TypeError("attn_prefill takes ragged queries: cu_seqlens_q")
        return _attend_each(q.split(batch.cu_seqlens_q.diff().tolist()), kv, batch)

    def write_means(self, means: Tensor, kv: KVView, batch: AttnBatch, starts: Tensor, num_keys: int) -> None:
        write_means(means, kv.k_cache, batch.block_table, batch.kv_lens, starts, kv.format.name, self.dtype)

    def select_tiles(
        self, q: Tensor, means: Tensor, kv: KVView, batch: AttnBatch, rule: SparsePrefill, dense_from: Tensor,
        density: Tensor,
    ) -> AttnBatch:  # fmt: skip
        if batch.cu_seqlens_q is None:
            raise TypeError("lists of tiles are of ragged queries: cu_seqlens_q")
        lens, begins = batch.kv_lens, batch.cu_seqlens_q
        tiles = num_entries(batch.max_kv_len)
        scores = scores_of_lists(q, means, batch.block_table, lens, begins, kv.page_size, 1.0, tiles)
        counts, lists, added = lists_of_scores(
            scores, kv.num_kv_heads, lens, begins, math.log2(rule.alpha), rule.num_first, rule.num_last, dense_from
        )
        density += torch.tensor(added, device=density.device)
        return replace(batch, mask=replace(batch.mask, counts=counts, lists=lists))

    def gated(self, x: Tensor, gate_up: Linear, activation: str = "gelu_tanh") -> Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return GATED[activation](gate, up, DTYPE_NAME[self.dtype]).to(self.dtype)

    def ple_block(
        self,
        residual: Tensor,
        h: Tensor | None,
        ffn_weight: Tensor,
        ple: Tensor,
        layer: PleLayerWeights,
        norms: ResidualNorms,
    ) -> Tensor:
        if h is not None:
            residual += self.rmsnorm(h, ffn_weight, norms.eps)
        gated = gelu_gated(self.linear(residual.to(self.dtype), layer.gate), ple, DTYPE_NAME[self.dtype]).to(self.dtype)
        return self.add_norm(residual, self.linear(gated, layer.projection), norms)

    def decode_layers(
        self, residual: Tensor, ple: Tensor | None, layers: Sequence[LayerInStep], top_k: int, final_norm: Tensor
    ) -> Tensor | None:
        return None

    def logits(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        return whole_logits(self.collectives, self._logits(h, head, logit_cap), head.rows)

    def _logits(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        """Of the rows that this rank has."""
        out = self.linear(h, head).float()
        return logit_cap * torch.tanh(out / logit_cap) if logit_cap > 0 else out

    def screen(self, head: Linear, excluded: Sequence[int] = (), *, likely: bool = False) -> HeadScreen | None:
        return None

    def greedy(
        self,
        h: Tensor,
        head: Linear,
        logit_cap: float,
        screen: HeadScreen | None = None,
        excluded: Tensor | None = None,
    ) -> Tensor:
        logits = self.logits(h, head, logit_cap) if head.rows is None else self._logits(h, head, logit_cap)
        if excluded is not None:
            logits.index_fill_(1, excluded, float("-inf"))
        if head.rows is None:
            return likeliest(logits)
        values, ids = logits.max(-1)
        return best_token(self.collectives, values, ids, head.rows)

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

    def moe_router(self, residual: Tensor, moe: MoeWeights, top_k: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        scaled = self.rmsnorm(residual, None, eps) * moe.router_scale * residual.shape[-1] ** -0.5
        probs = torch.softmax(self.linear(scaled, moe.router), dim=-1, dtype=torch.float32)
        weights, ids = probs.topk(top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) * moe.per_expert_scale.float()[ids]
        return ids.to(torch.int32), weights, self.rmsnorm(residual, moe.pre_norm, eps)

    def experts(self, x: Tensor, gate_up: Experts, down: Experts, topk_ids: Tensor) -> Tensor:
        return fallbacks.experts(x, gate_up.weight, down.weight, topk_ids)

    def moe_combine(
        self,
        residual: Tensor,
        dense: Tensor,
        routed: Tensor,
        topk_weights: Tensor,
        moe: MoeWeights,
        norms: ResidualNorms,
    ) -> Tensor:
        summed = (routed * topk_weights[..., None]).sum(1).to(self.dtype)
        if moe.down.is_summand:
            dense, summed = self.collectives.all_reduce(torch.stack((dense, summed)))
        h = self.rmsnorm(dense, moe.dense_norm, norms.eps) + self.rmsnorm(summed, moe.post_norm, norms.eps)
        return self.add_norm(residual, h, norms)

    def centroid_greedy(self, y: Tensor, centroids: Linear, top_k: int, token_ids: Tensor, embed: Tensor) -> Tensor:
        ids, logits = self.centroid_logits(y, centroids, top_k, token_ids, embed)
        return ids.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1)

    def centroid_logits(
        self, y: Tensor, centroids: Linear, top_k: int, token_ids: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor]:
        picked = self.linear(y, centroids).topk(top_k, dim=-1).indices
        ids = token_ids[picked].flatten(1)
        rows = embed[ids]  # [B, n, d]
        return ids, (rows @ y[:, :, None]).squeeze(-1).float()


def _of_groups(weights: WeightView, dtype: torch.dtype) -> WeightView:
    """From the order in which they are loaded, of experts one after the other."""
    packed, scales = weights.packed, weights.scales
    if packed.ndim == 2:
        return dense_weights(dequantize(packed, scales, dtype))
    out = scales.new_empty(len(packed), weights.out_features, weights.in_features, dtype=dtype)
    for expert, words, its_scales in zip(out, packed, scales, strict=True):
        expert.copy_(dequantize(words, its_scales, dtype))
    return dense_weights(out)


_UNPACK: dict[str, Callable[[WeightView, torch.dtype], WeightView]] = {
    "dense": lambda weights, dtype: weights, **dict.fromkeys(("int4", "int4_min", "int8", "int8_min"), _of_groups),
}  # fmt: skip


def unpacked(weights: WeightView, dtype: torch.dtype) -> WeightView:
    """The same matrix, or every expert's, dense: from the order in which it is loaded. dtype: of one that is packed."""
    made = _UNPACK[weights.format.name](weights, dtype)
    return replace(made, rows=weights.rows, is_summand=weights.is_summand)


def _q_weight(heads: HeadNorms, kv: KVView) -> Tensor:
    """Of queries of that cache."""
    k_weight = heads.folded(kv.format)
    return heads.q_weight if k_weight is None else folded_weight(heads.q_weight, k_weight, heads.num_rotated_pairs)


def _write(kv: KVView, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
    """Put k, v [T, nkv, d] into cache rows slot_mapping [T]; negative slots are skipped."""
    if bool((slot_mapping < 0).any()):
        keep = slot_mapping >= 0
        slot_mapping, k, v = slot_mapping[keep], k[keep], v[keep]
    page, row = slot_mapping // kv.page_size, slot_mapping % kv.page_size
    for pool, new, keys in ((kv.k_cache, k, True), (kv.v_cache, v, False)):
        write_rows(pool, kv.format.name, page, row, new, keys=keys)


def _attend_each(queries: Sequence[Tensor], kv: KVView, batch: AttnBatch) -> Tensor:
    """queries: [n, nq, d] of each sequence."""
    mask, begin = batch.mask, 0
    ends: Sequence[Tensor | None] = [None] * len(queries)
    if mask.ends is not None:
        ends = mask.ends.split([len(q) for q in queries])
    kept: list[Tensor | None] = [None] * len(queries)
    if mask.counts is not None and mask.lists is not None:
        every = of_lists(mask.counts, mask.lists, mask.lists.shape[2])
        for s, q in enumerate(queries):
            kept[s] = every[first_list(begin, s) :]
            begin += len(q)
    mask = replace(mask, counts=None, lists=None)
    of_each = zip(queries, batch.block_table, batch.kv_lens.tolist(), ends, kept, strict=True)
    return torch.cat([
        _attend(q, kv, table, kv_len, replace(mask, ends=its), own) for q, table, kv_len, its, own in of_each
    ])  # fmt: skip


def _attend(
    q: Tensor, kv: KVView, table: Tensor, kv_len: int, mask: Mask, kept: Tensor | None = None
) -> Tensor:  # fmt: skip
    """One sequence and its mask: q [n, nq, d] at positions kv_len - n to kv_len - 1, table [max_pages]. kept: as of
    `attend`. Returns [n, nq, d].
    """
    first = min(first_key(kv_len, len(q), mask.window), max(kv_len, 0))
    if len(q) == 1 and first < kv_len and kept is None:
        return _attend_one(q, kv, table, first, kv_len).to(q.dtype)
    k, v = (
        gather_pages(pool, table, first, kv_len, kv.format.name, q.dtype, keys=keys)
        for pool, keys in ((kv.k_cache, True), (kv.v_cache, False))
    )
    causal = mask.kind == "causal"
    return attend(q, k, v, kv_len, causal=causal, window=mask.window, ends=mask.ends, kept=kept).to(q.dtype)


def _attend_one(q: Tensor, kv: KVView, table: Tensor, first: int, kv_len: int) -> Tensor:
    """`attend` of one query [1, nq, d], which sees all keys from `first` on: the same sums without any mask, in a third
    of the time where sequences are short.
    """
    at = torch.arange(first, kv_len, device=q.device)
    page, row = table[at // kv.page_size].long(), at % kv.page_size
    heads = q.view(1, kv.num_kv_heads, -1, q.shape[2]).float()  # [1, nkv, group, d]
    out = []
    name = kv.format.name
    for head in range(kv.num_kv_heads):
        k = read_rows(kv.k_cache, name, q.dtype, page, row, head, keys=True).float()
        v = read_rows(kv.v_cache, name, q.dtype, page, row, head, keys=False).float()
        weights = torch.softmax(torch.einsum("qgd,kd->gqk", heads[:, head], k), dim=-1)
        out.append(torch.einsum("gqk,kd->qgd", weights, v))
    return torch.cat(out, dim=1)
