"""The model on kerngen's kernels: each op is a `Call` of a kernel folder's op.py, given to an executor.

What no kernel serves goes through `fallbacks`, by its name there. With the launching executor this is the `cuda`
backend; the recording and the reference executor run the very same code with no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.runtime.config import SparsePrefill
from kerngen.runtime.executors import Executor, Say
from kerngen.runtime.executors.trace import Trace
from kerngen.runtime.fallbacks import FALLBACKS
from kerngen.runtime.ops import (
    Experts,
    HeadScreen,
    LayerInStep,
    Linear,
    Made,
    ResidualNorms,
    fallbacks,
    positions_of,
    residual_dtype,
    slots_of,
)
from kerngen.runtime.ops.divided import best_token, whole_logits
from kerngen.runtime.ops.eager import unpacked
from kerngen.runtime.ops.formats import FORMATS
from kerngen.runtime.weights.layout import MoeWeights, PleLayerWeights
from kerngen.templates.add_norm.op import add_norm, add_post_norm, add_rmsnorm
from kerngen.templates.attn_decode.op import attn_decode, attn_decode_qkv, attn_decode_raw_q
from kerngen.templates.attn_prefill.op import attn_prefill
from kerngen.templates.call import Call
from kerngen.templates.centroid_head.op import centroid_greedy, centroid_logits
from kerngen.templates.check_pages.op import check_pages
from kerngen.templates.common.rows.spec import VEC, is_rotated, sliding_format
from kerngen.templates.common.screen.screen import head_screen, packed_head_screen
from kerngen.templates.common.screen.screen_spec import least_bytes, screen_bytes
from kerngen.templates.decode_advance.op import decode_advance
from kerngen.templates.decode_inputs.op import decode_inputs
from kerngen.templates.decode_layers import spec as layers_spec
from kerngen.templates.decode_layers.op import (
    LayerTensors,
    Stack,
    Token,
    decode_layers,
    decode_layers_over_ranks,
)
from kerngen.templates.draft_inputs.op import draft_inputs, draft_inputs_packed
from kerngen.templates.embed.op import embed, embed_packed
from kerngen.templates.exchange_best.op import exchange_best, exchange_best_logits, exchange_best_packed
from kerngen.templates.exchange_best.spec import POSTED
from kerngen.templates.exchange_norm.op import exchange_norm, exchange_pair_norm
from kerngen.templates.gather_kv.op import gather_kv, gathered, keys_seen
from kerngen.templates.gelu_gate.op import gelu_mul
from kerngen.templates.greedy_head import spec as head_spec
from kerngen.templates.greedy_head.op import greedy_head, greedy_head_packed
from kerngen.templates.key_means.op import key_means
from kerngen.templates.moe_combine.op import moe_combine
from kerngen.templates.moe_router.op import moe_router
from kerngen.templates.ple_block import spec as ple_spec
from kerngen.templates.ple_block.op import ple_block
from kerngen.templates.ple_inputs.op import ple_inputs
from kerngen.templates.qkv_norm_rope.op import kv_norm_rope, q_norm_rope, qk_norm_rope, qkv_norm_rope
from kerngen.templates.rmsnorm.op import rmsnorm
from kerngen.templates.softcap_argmax.op import argmax, softcap
from kerngen.templates.tile_lists.op import TileRule, tile_lists
from kerngen.templates.tile_scores.op import tile_scores
from kerngen.templates.values import (
    KV_FORMATS,
    PLAIN,
    AttnBatch,
    HeadNorms,
    KVView,
    PageLimits,
    PagesInUse,
    Peers,
    Routed,
)

R = TypeVar("R")

# A head is kept in few bits too where so many times what that takes is free: the cache loses a sixteenth at most, and
# another one to the drafter's.
SCREEN_ROOM = 16

# Of a cache that is not plain, bytes for each query of a prefill in which keys and values are gathered (gather_kv): at
# most, of several heads together, and of a single one. What takes more is converted within attn_prefill. 128 MB of
# 2,048 tokens, and 512 MB where one head has 262,144 keys; an MLP's activations take as much.
GATHERED_BYTES = 64 << 10
GATHERED_BYTES_OF_ONE = 256 << 10


def has_room(size: int, free_bytes: int) -> bool:
    """Whether a head in few bits, of `size` bytes, is made where `free_bytes` are free."""
    return free_bytes >= SCREEN_ROOM * size


def screen_of(head: Linear, *, likely: bool = False) -> int:
    """Bytes that `KernelOps.screen` takes for `head`, 0 where it makes none of it: of a packed head, where what is read
    of a screen is no less than the head, as of int4.
    """
    if head.in_features % VEC or head.in_features > head_spec.MAX_HIDDEN:
        return 0
    size = head.out_features, head.in_features, head_spec.bits_for(head.in_features, likely=likely)
    return screen_bytes(*size) if head.is_dense or least_bytes(*size) < head.num_bytes else 0


def heads_at_once(queries: int, kv: KVView, batch: AttnBatch) -> int:
    """KV heads, a divisor of all, that are gathered at once before attn_prefill reads them, for so many queries; 0: it
    reads the cache. Rotated values it cannot read: those are gathered, if need be one head after the other.
    """
    if kv.format == PLAIN or not queries:
        return 0
    of_head = 4 * len(batch.kv_lens) * keys_seen(batch, kv.page_size) * kv.head_dim  # K and V in 16 bits
    most = GATHERED_BYTES * queries // max(of_head, 1)
    divisors = (n for n in range(1, kv.num_kv_heads + 1) if kv.num_kv_heads % n == 0 and n <= most)
    by_one = is_rotated(kv.format.name) or of_head <= GATHERED_BYTES_OF_ONE * queries
    return max(divisors, default=int(by_one))


class KernelOps:
    """See `kerngen.runtime.ops.Ops` for every method's contract."""

    def __init__(self, executor: Executor, dtype: torch.dtype) -> None:
        self.executor = executor
        self.name = executor.name
        self.collectives = executor.collectives
        self.device = executor.device
        self.dtype = dtype
        self.residual_dtype = residual_dtype(dtype)
        self.supports_graphs = executor.supports_graphs
        self.place = ""
        self.row_invariant = False
        self._met: dict[str, None] = {}  # of OUTSIDE, in the order of the model

    def sources(self) -> dict[str, int]:
        return self.executor.sources()

    def outside(self) -> dict[str, str]:
        return {name: FALLBACKS[name] for name in self._met}

    def run(self, call: Call[R], what: str) -> R:
        """Executes `call`. what: its place in the layer, for records and profiles."""
        return self.executor.run(call, self._at(what))

    def run_fused(self, call: Call[R], what: str) -> R | None:
        """As `run`, of a kernel that replaces several; None where those are to be asked, and nothing is done."""
        return self.run(call, what) if self.executor.fuses(call, self._at(what)) else None

    def went_outside(self, name: str) -> None:
        """Notes that torch computes `name`, of `runtime.fallbacks.FALLBACKS`."""
        self._met[name] = None
        self.executor.outside(name)

    def _at(self, what: str) -> str:
        return f"{what} ({self.place})" if self.place else what

    def build_ahead(self, warm_ups: Sequence[Callable[[Trace], None]], say: Say, meanwhile: Callable[[], None]) -> None:
        executor = self.executor
        listening = Trace(executor)

        def asked(warm_up: Callable[[Trace], None]) -> list[tuple[str, Any]]:
            known = len(listening.asked)
            self.executor, self.collectives = listening, listening.collectives
            try:
                warm_up(listening)
            finally:
                self.executor, self.collectives = executor, executor.collectives
            return list(listening.asked)[known:]

        executor.build(map(asked, warm_ups), say, meanwhile)

    def overlap(self, work: Callable[[], Made]) -> Callable[[], Made]:
        return self.executor.overlap(work)

    def prepare(self, weights: Linear) -> Linear:
        """In the kernel's order. Raises ProblemError for shapes that the format's kernels do not take."""
        return FORMATS[weights.format.name].prepare(weights)

    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]:
        """In the kernel's order. Where one of the two is dense, both become so."""
        if gate_up.is_dense != down.is_dense:
            gate_up, down = unpacked(gate_up, self.dtype), unpacked(down, self.dtype)
        return FORMATS[gate_up.format.name].prepare_experts(gate_up, down)

    def decode_inputs(
        self, lengths: Tensor, tables: Tensor, q_len: int, page_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.executor.run(decode_inputs(lengths, tables, q_len, page_size), "positions and slots")

    def check_pages(self, pages: PagesInUse, limits: PageLimits, writers: Tensor, record: Tensor) -> None:
        self.executor.run(check_pages(pages, limits, writers, record), "page check")

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
        call = decode_advance(tokens, drafts, states, token, lengths, limits, hidden)
        return self.executor.run(call, "end of step")

    def embed(self, ids: Tensor, table: Linear, scale: float) -> Tensor:
        if table.is_dense:
            return self.run(embed(ids, table.weight, scale, self.residual_dtype), "embedding")
        call = embed_packed(ids, table.packed, table.scales, scale, self.dtype, self.residual_dtype)
        return self.run(call, "embedding")

    def draft_inputs(self, ids: Tensor, hidden: Tensor, table: Linear, scale: float) -> Tensor:
        if table.is_dense:
            return self.run(draft_inputs(ids, hidden, table.weight, scale), "embedding")
        return self.run(draft_inputs_packed(ids, hidden, table.packed, table.scales, scale), "embedding")

    def rmsnorm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return self.run(rmsnorm(x, weight, eps, self.dtype), "norm")

    def add_norm(self, residual: Tensor, h: Tensor, norms: ResidualNorms) -> Tensor:
        where = "end of layer" if norms.layer_scalar is not None else "residual and norms"
        call = add_norm(residual, h, norms.post_weight, norms.layer_scalar, norms.next_weight, norms.eps)
        return self.run(_onward(call, norms), where)

    def add_rmsnorm(self, residual: Tensor, h: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.run(add_rmsnorm(residual, h, weight, eps), "residual and norm")

    def share_memory(self, hidden: int) -> None:
        self.executor.share_memory(hidden)

    def exchange_norm(self, residual: Tensor, h: Tensor, norms: ResidualNorms) -> Tensor:
        if self.collectives.world.size == 1:
            return self.add_norm(residual, h, norms)
        if (peers := self._peers(h, h.shape[1], 1)) is not None:
            call = exchange_norm(
                residual, h, norms.post_weight, norms.layer_scalar, norms.next_weight, norms.eps, peers
            )
            return self.run(_onward(call, norms), "sum over ranks, residual and norms")
        return self.add_norm(residual, self.collectives.all_reduce(h), norms)

    def _peers(self, h: Tensor, width: int, rows: int) -> Peers | None:
        """The memory through which so many rows of `width` for each token of h [T, H] are exchanged in one launch, if
        there is.
        """
        peers = self.executor.peers.get(width)
        return peers if peers is not None and peers.holds(h, rows) else None

    def linear_norm(self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms) -> Tensor | None:
        if self.executor.target is None:
            return None
        peers = None
        if weights.is_summand and (peers := self._peers(x, residual.shape[1], 1)) is None:
            return None
        call = FORMATS[weights.format.name].norm_call(residual, x, weights, norms, peers)
        return None if call is None else self.run_fused(_onward(call, norms), weights.name)

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        return FORMATS[weights.format.name].linear(self, x, weights)

    def qkv_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        return self._write_heads(qkv_norm_rope, qkv, heads, kv, batch)

    def qk_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        return self._write_heads(qk_norm_rope, qkv, heads, kv, batch)

    def _write_heads(
        self, make: Callable[[Tensor, HeadNorms, Tensor, KVView, Tensor], Call[R]], qkv: Tensor, heads: HeadNorms,
        kv: KVView, batch: AttnBatch,
    ) -> R:  # fmt: skip
        if (slots := slots_of(heads, batch)) is None:
            raise TypeError("a layer that owns no K and V has q alone: Ops.q_norm_rope")
        return self.run(make(qkv, heads, positions_of(batch), kv, slots), "head norms, RoPE, cache")

    def kv_norm_rope(self, kv_rows: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> None:
        self._write_heads(kv_norm_rope, kv_rows, heads, kv, batch)

    def q_norm_rope(self, q: Tensor, heads: HeadNorms, batch: AttnBatch) -> Tensor:
        return self.run(q_norm_rope(q, heads, positions_of(batch)), "q norm and RoPE")

    def attend_decode(self, projected: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        positions_of(batch)
        if slots_of(heads, batch) is None:
            call = attn_decode_raw_q(projected, heads, kv, batch)
            return self.run(call, "q norm, RoPE, attention")
        call = attn_decode_qkv(projected, heads, kv, batch)
        return self.run(call, "head norms, RoPE, cache, attention")

    def attn_decode(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        return self.run(attn_decode(q, kv, batch), "attention")

    def attn_prefill(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        heads, count = heads_at_once(len(q), kv, batch), kv.num_kv_heads
        if heads == 0:
            return self.run(attn_prefill(q, kv, batch), "attention")
        if heads == count:
            return self._attend_gathered(q, kv, batch, 0, heads)
        out, group = torch.empty_like(q), q.shape[1] // count
        for first in range(0, count, heads):
            part, mask = slice(first * group, (first + heads) * group), batch.mask
            if mask.lists is not None and mask.counts is not None:
                counts, lists = (x[:, first : first + heads].contiguous() for x in (mask.counts, mask.lists))
                mask = replace(mask, counts=counts, lists=lists)
            of_part = replace(batch, mask=mask)
            out[:, part] = self._attend_gathered(q[:, part].contiguous(), kv, of_part, first, heads)
        return out

    def _attend_gathered(self, q: Tensor, kv: KVView, batch: AttnBatch, first: int, heads: int) -> Tensor:
        made = self.run(gather_kv(kv, batch, q.dtype, first, heads), "keys and values in 16 bits")
        return self.run(attn_prefill(q, *gathered(made, batch)), "attention")

    def write_means(self, means: Tensor, kv: KVView, batch: AttnBatch, starts: Tensor, num_keys: int) -> None:
        self.run(key_means(means, kv, batch, starts, num_keys), "means of keys")

    def select_tiles(
        self, q: Tensor, means: Tensor, kv: KVView, batch: AttnBatch, rule: SparsePrefill, dense_from: Tensor,
        density: Tensor,
    ) -> AttnBatch:  # fmt: skip
        scores = self.run(tile_scores(q, means, kv.page_size, batch), "weights of tiles of keys")
        by = TileRule(math.log2(rule.alpha), rule.num_first, rule.num_last)
        call = tile_lists(scores, density, dense_from, kv.num_kv_heads, len(q), batch, by)
        counts, lists = self.run(call, "lists of tiles of keys")
        return replace(batch, mask=replace(batch.mask, counts=counts, lists=lists))

    def gated(self, x: Tensor, gate_up: Linear, activation: str = "gelu_tanh") -> Tensor:
        return FORMATS[gate_up.format.name].gated(self, x, gate_up, activation)

    def ple_block(
        self,
        residual: Tensor,
        h: Tensor | None,
        ffn_weight: Tensor,
        ple: Tensor,
        layer: PleLayerWeights,
        norms: ResidualNorms,
    ) -> Tensor:
        if h is not None and norms.layer_scalar is not None and len(h) <= ple_spec.MAX_TOKENS:
            call = ple_block(
                residual, h, ffn_weight, layer.gate.weight, ple, layer.projection.weight, norms.post_weight,
                norms.layer_scalar, norms.next_weight, norms.eps,
            )  # fmt: skip
            return self.run(call, "end of layer")
        if h is not None:
            self.run(add_post_norm(residual, h, ffn_weight, None, norms.eps), "residual and norms")
        x = self.linear(residual.to(self.dtype), layer.gate)
        p = self.linear(self.run(gelu_mul(x, ple), "per-layer gate"), layer.projection)
        return self.add_norm(residual, p, norms)

    def decode_layers(
        self, residual: Tensor, ple: Tensor | None, layers: Sequence[LayerInStep], top_k: int, final_norm: Tensor
    ) -> Tensor | None:
        target = self.executor.target
        if target is None or not target.arch.has_tma or len(residual) != 1:
            return None
        peers, (out_is_summand, down_is_summand) = None, _summands(layers)
        if out_is_summand or down_is_summand:
            peers = self.executor.layer_peers.get(residual.shape[1])
            if peers is None or None in (out_is_summand, down_is_summand) or not out_is_summand:
                return None  # by NCCL, or of some layers alone
        if (letters := _letters(layers)) is None or (kv_format := _kv_format(layers, letters)) is None:
            return None
        if (tensors := _int4_layers(layers, letters, ple)) is None:
            return None
        sliding, full = (next((x for x in layers if bool(x.batch.mask.window) == w), layers[0]) for w in (True, False))
        own, taps = any(x.heads.owns_kv for x in layers), "".join("t" if x.is_tapped else "-" for x in layers)
        try:
            token = Token(
                positions_of(full.batch), full.batch.kv_lens, sliding.batch.slot_mapping if own else None,
                full.batch.slot_mapping if own else None, sliding.batch.block_table, full.batch.block_table,
                sliding.heads.inv_freq, full.heads.inv_freq,
            )  # fmt: skip
            stack = Stack(
                full.heads.num_q_heads, sliding.batch.mask.window or 1, sliding.heads.num_rotated_pairs,
                full.heads.num_rotated_pairs, full.heads.eps, full.batch.max_kv_len, top_k,
                kv_format, taps if "t" in taps else "",
            )  # fmt: skip
            given = residual, ple, token, tensors, final_norm, letters
            if peers is None:
                call = decode_layers(*given, stack)
            else:
                call = decode_layers_over_ranks(*given, not down_is_summand, peers.addresses, peers.rank, stack)
        except ProblemError:  # of sizes that the kernels of single layers may take
            return None
        return self.run_fused(call, "all layers")

    def logits(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        mine = self.run(softcap(self.linear(h, head), logit_cap), "logits")
        return whole_logits(self.collectives, mine, head.rows)

    def screen(self, head: Linear, excluded: Sequence[int] = (), *, likely: bool = False) -> HeadScreen | None:
        size = screen_of(head, likely=likely)
        if not size or not self._all_have_room(size):
            return None
        if (rows := head.rows) is not None:
            excluded = [token - rows.start for token in excluded if rows.start <= token < rows.stop]
        bits = head_spec.bits_for(head.in_features, likely=likely)
        if head.is_dense:
            made = head_screen(head.weight, excluded, bits, likely)
        else:
            made = packed_head_screen(head.packed, head.scales, self.dtype, excluded, bits, likely)
        return HeadScreen(*made, head_spec.most_tokens(self.executor.target))

    def _all_have_room(self, size: int) -> bool:
        """Whether a screen of `size` bytes fits on all ranks: which collectives a step asks for depends on it."""
        fits = True
        if self.device.type == "cuda":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            fits = has_room(size, torch.cuda.mem_get_info(self.device)[0] + unused)
        if self.collectives.world.size == 1 or self.device.type == "meta":
            return fits
        lacking = torch.tensor([0 if fits else 1], device=self.device)
        return not int(self.collectives.all_reduce(lacking))

    def greedy(
        self,
        h: Tensor,
        head: Linear,
        logit_cap: float,
        screen: HeadScreen | None = None,
        excluded: Tensor | None = None,
    ) -> Tensor:
        logits: Tensor | None = None
        if screen is not None:
            if head.is_dense:
                call = greedy_head(h, head.weight, screen.codes, screen.bounds)
            else:
                call = greedy_head_packed(h, head.packed, head.scales, screen.codes, screen.bounds)
            ids = self.run(call, "greedy token")
        else:
            logits = self.linear(h, head)
            if excluded is not None:
                logits.index_fill_(1, excluded, float("-inf"))
            ids = self.run(argmax(logits, logit_cap), "greedy token")
        if head.rows is None:
            return ids
        if (peers := self._peers(h, POSTED, 1)) is not None:
            if logits is not None:
                best = exchange_best_logits(logits, ids, logit_cap, head.rows.start, peers)
            elif head.is_dense:
                best = exchange_best(h, head.weight, ids, head.rows.start, peers)
            else:
                best = exchange_best_packed(h, head.packed, head.scales, ids, head.rows.start, peers)
            return self.run(best, "best token of the ranks")[1]
        self.went_outside("the chosen token's logit")
        # without logits the screen was read in place of the head
        of_ids = fallbacks.logit_of(h, head, ids) if logits is None else fallbacks.capped(logits, ids, logit_cap)
        return best_token(self.collectives, of_ids, ids, head.rows)

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
        call = ple_inputs(ids, table, table_scale, context, context_scale, norm_weight, eps)
        return self.run(call, "per-layer inputs")

    def moe_router(self, residual: Tensor, moe: MoeWeights, top_k: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        weights = moe.router_scale, moe.router.weight, moe.per_expert_scale, moe.pre_norm
        return self.run(moe_router(residual, *weights, top_k, eps), "router")

    def experts(self, x: Tensor, gate_up: Experts, down: Experts, topk_ids: Tensor) -> Tensor:
        if gate_up.is_dense != down.is_dense:
            raise TypeError("prepare_experts makes both dense where one is")
        return FORMATS[gate_up.format.name].experts(self, x, gate_up, down, topk_ids)

    def moe_combine(
        self,
        residual: Tensor,
        dense: Tensor,
        routed: Tensor,
        topk_weights: Tensor,
        moe: MoeWeights,
        norms: ResidualNorms,
    ) -> Tensor:
        if moe.down.is_summand:
            if (peers := self._peers(dense, dense.shape[1], 2)) is not None:
                experts = Routed(routed, topk_weights, moe.post_norm)
                pair = exchange_pair_norm(
                    residual, dense, moe.dense_norm, experts, norms.post_weight, norms.layer_scalar, norms.next_weight,
                    norms.eps, peers,
                )  # fmt: skip
                return self.run(pair, "end of layer, summed over ranks")
            self.went_outside("sums of routed experts")
            summed = fallbacks.routed_sum(routed, topk_weights)
            both = self.collectives.all_reduce(torch.stack((dense, summed)))
            dense, routed = both[0], both[1][:, None]
            topk_weights = torch.ones_like(topk_weights[:, :1])
        scalar = norms.layer_scalar if norms.layer_scalar is not None else torch.ones_like(moe.router_scale[:1])
        call = moe_combine(
            residual, dense, routed, topk_weights, moe.dense_norm, moe.post_norm, norms.post_weight, scalar,
            norms.next_weight, norms.eps,
        )  # fmt: skip
        return self.run(call, "end of layer")

    def centroid_greedy(self, y: Tensor, centroids: Linear, top_k: int, token_ids: Tensor, embed: Tensor) -> Tensor:
        call = centroid_greedy(y, centroids.weight, top_k, token_ids, embed)
        return self.run(call, "centroid head")

    def centroid_logits(
        self, y: Tensor, centroids: Linear, top_k: int, token_ids: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor]:
        call = centroid_logits(y, centroids.weight, top_k, token_ids, embed)
        return self.run(call, "centroid head")


def _onward(call: Call[R], norms: ResidualNorms) -> Call[R]:
    """`call`, which adds to the residual, with its output where `norms` want it."""
    return call if norms.into is None else call.writing(residual_out=norms.into)


def _int4_layers(layers: Sequence[LayerInStep], letters: str, ple: Tensor | None) -> LayerTensors | None:
    """What decode_layers takes of `layers`; None where some layers have experts and others none, or where matrices
    are not int4 in groups of one size.
    """
    names = (*layers_spec.MATRICES, *layers_spec.EXPERT_MATRICES)
    found: dict[str, list[Tensor]] = {f"{name}_{part}": [] for name in names for part in ("packed", "scales")}
    formats = set()
    with_experts = layers[0].weights.moe is not None
    for w in (layer.weights for layer in layers):
        if (w.moe is not None) != with_experts or (w.ple is None) != (ple is None):
            return None
        of_experts = () if w.moe is None else (w.moe.gate_up, w.moe.down)
        for name, matrix in zip(names, (w.qkv, w.out, w.gate_up, w.down, *of_experts), strict=False):
            if matrix.format.name != "int4":
                return None
            formats.add(matrix.format)
            for part, tensor in zip(("packed", "scales"), matrix.tensors, strict=True):
                found[f"{name}_{part}"].append(tensor)
    if len(formats) > 1:
        return None
    of_moe = [x.weights.moe for x in layers if x.weights.moe is not None]
    each, of_ple = [layer.weights for layer in layers], [x.weights.ple for x in layers if x.weights.ple is not None]
    kept = [layers[index].kv for index in layers_spec.sources(letters)]
    k_norms = [x.heads.k_weight if x.heads.owns_kv else x.heads.folded(x.kv.format) for x in layers]
    return LayerTensors(
        **found,
        input_norms=[w.input_norm for w in each],
        q_norms=[x.heads.q_weight for x in layers],
        k_norms=[w for w in k_norms if w is not None],
        k_caches=[kv.k_cache for kv in kept],
        v_caches=[kv.v_cache for kv in kept],
        post_attention_norms=[w.post_attention_norm for w in each],
        pre_ffn_norms=[w.pre_ffn_norm for w in each],
        post_ffn_norms=[w.post_ffn_norm for w in each],
        layer_scalars=[w.scalar for w in each],
        ple_gates=[w.gate.weight for w in of_ple],
        ple_projections=[w.projection.weight for w in of_ple],
        post_ple_norms=[w.post_norm for w in of_ple],
        router_scales=[w.router_scale for w in of_moe],
        routers=[w.router.weight for w in of_moe],
        per_expert_scales=[w.per_expert_scale for w in of_moe],
        pre_expert_norms=[w.pre_norm for w in of_moe],
        dense_norms=[w.dense_norm for w in of_moe],
        expert_norms=[w.post_norm for w in of_moe],
    )


def _summands(layers: Sequence[LayerInStep]) -> tuple[bool | None, bool | None]:
    """Whether what the layers' out gives is to be summed over ranks, and what their MLPs give; None where some are."""
    each = [layer.weights for layer in layers]
    of_mlp = [w.down.is_summand for w in each] + [w.moe.down.is_summand for w in each if w.moe is not None]
    return _of_all([w.out.is_summand for w in each]), _of_all(of_mlp)


def _of_all(found: Sequence[bool]) -> bool | None:
    return found[0] if len(set(found)) == 1 else None


def _kv_format(layers: Sequence[LayerInStep], letters: str) -> str | None:
    """decode_layers' `kv_format`: that of the full layers' caches, or of the sliding ones' where there are none. None
    where those of either kind are not as it says.
    """
    own = next((layer for layer in layers if not layer.batch.mask.window), layers[0]).kv.format.name
    wanted = {"f": KV_FORMATS.get(own), "s": KV_FORMATS.get(sliding_format(own))}
    as_wanted = (x.kv.format == wanted[c] for x, c in zip(layers, letters.lower(), strict=True))
    return own if all(as_wanted) else None


def _letters(layers: Sequence[LayerInStep]) -> str | None:
    """decode_layers' `layers`; None where windows differ or a mask is not causal, or where a layer shares K and V of
    another than the last of its kind that owns some, or if none does, than the first of its kind.
    """
    if not all(layer.batch.mask.is_causal for layer in layers):
        return None
    letters, last = "", {}
    own = [layer.heads.owns_kv for layer in layers]
    for layer, owns in zip(layers, own, strict=True):
        letter = "s" if layer.batch.mask.window else "f"
        if owns or (not any(own) and letter not in last):
            last[letter] = layer.kv
        elif last.get(letter) is not layer.kv:
            return None
        letters += letter if owns else letter.upper()
    return letters if len({x.batch.mask for x in layers if x.batch.mask.window}) <= 1 else None
