"""The typed surface between the model and what computes it.

`Ops` has two implementations: `TorchOps` (ops/eager.py: eager torch, what transformers computes, on any machine) and
`KernelOps` (ops/kernels.py: calls of kernel folders' ops, given to an executor). The model calls nothing else that
computes on activations.

Tensors are row-major and contiguous. T is num_tokens, H the hidden size, d the head dim, nq and nkv the
numbers of query and KV heads. Activations are `ops.dtype`; the residual stream is `ops.residual_dtype`;
norm weights and dense matrices are `ops.dtype`. ids and positions are int64, slot_mapping
is int64, block tables, kv_lens and cu_seqlens are int32.

Where `supports_graphs` is true the decode step is captured in one CUDA graph: no method but attn_prefill
may wait for the device, or look at a tensor's values on the host. Outputs may be allocated with torch (the
graph's pool then owns them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from kerngen.runtime.ops.values import (
    DENSE,
    Experts,
    Linear,
    ResidualNorms,
    WeightFormat,
    WeightView,
    dense_weights,
    grouped_weights,
    int4_weights,
    rows_of_table,
)
from kerngen.templates.values import AttnBatch, HeadNorms, KVView, PageLimits, PagesInUse

if TYPE_CHECKING:
    from kerngen.runtime.config import SparsePrefill
    from kerngen.runtime.executors import Say
    from kerngen.runtime.executors.collectives import Collectives
    from kerngen.runtime.executors.trace import Trace
    from kerngen.runtime.weights.layout import LayerWeights, MoeWeights, PleLayerWeights


__all__ = [
    "DENSE",
    "Experts",
    "HeadScreen",
    "LayerInStep",
    "Linear",
    "Made",
    "Ops",
    "ResidualNorms",
    "WeightFormat",
    "WeightView",
    "dense_weights",
    "fitting",
    "grouped_weights",
    "int4_weights",
    "positions_of",
    "residual_dtype",
    "rows_of_table",
    "slots_of",
]

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class HeadScreen:
    """A head in few bits, with bounds of what that may be wrong by, sure or likely (templates/common/screen/screen.py).

    `Ops.greedy` reads it in place of most of the head [V, K], for up to max_tokens rows. codes, bounds: as head_screen
    makes them; bounds are NaN for tokens that are never chosen.
    """

    codes: Tensor
    bounds: Tensor
    max_tokens: int


def fitting(screen: HeadScreen | None, h: Tensor) -> HeadScreen | None:
    """`screen`, if there is one for as many rows as h [n, H] has."""
    return screen if screen is not None and len(h) <= screen.max_tokens else None


@dataclass(frozen=True, slots=True)
class LayerInStep:
    """A layer of a model with what it attends by. kv: its own cache, or that of the layer that it shares. is_tapped:
    its output is wanted, too.
    """

    weights: LayerWeights
    heads: HeadNorms
    kv: KVView
    batch: AttnBatch
    is_tapped: bool = False


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the residual stream is kept in: fp32 where activations are fp16, whose range it may leave; else theirs."""
    return torch.float32 if dtype == torch.float16 else dtype


def slots_of(heads: HeadNorms, batch: AttnBatch) -> Tensor | None:
    """Where K and V of the new tokens go; None for a layer that owns none. Raises TypeError where they go nowhere."""
    if not heads.owns_kv:
        return None
    if batch.slot_mapping is None:
        raise TypeError("a layer that owns K and V needs the slots that they go to")
    return batch.slot_mapping


def positions_of(batch: AttnBatch) -> Tensor:
    """Raises TypeError for a batch whose tokens have no positions."""
    if batch.positions is None:
        raise TypeError("heads are rotated by positions, and the batch has none")
    return batch.positions


class Ops(Protocol):
    """What a backend must do. Methods return new tensors unless they say otherwise."""

    name: str  # "torch", or the executor's: "cuda", "record", "reference"
    device: torch.device
    dtype: torch.dtype  # activations, weights, caches: float32 | float16 | bfloat16
    residual_dtype: torch.dtype  # `residual_dtype(dtype)`
    collectives: Collectives  # what this rank computes with the others of a divided model
    supports_graphs: bool  # the engine captures the decode step in a CUDA graph
    place: str  # where in the model the next ops are ("sliding"): set by the model, read by records and profiles
    # Set by the engine for each step: a token's results need the same bits in whichever row of the batch it stands. On
    # a GPU kernels are chosen by it; eager torch takes what its library gives.
    row_invariant: bool

    def sources(self) -> dict[str, int]:
        """Who chose the configurations that ran so far ("user: exact device (measured)"), and of how many kernels."""

    def outside(self) -> dict[str, str]:
        """What was computed so far that no kernel of ours serves, each with the reason (see ops/fallbacks.py)."""

    def build_ahead(self, warm_ups: Sequence[Callable[[Trace], None]], say: Say, meanwhile: Callable[[], None]) -> None:
        """Compile what each of `warm_ups`, which run the model, asks for and is not compiled yet. Nothing is computed
        meanwhile: their results mean nothing. They are given what listens. What the first asks for is there before
        `meanwhile` is called, all when this returns. say: done, of all, what.
        """

    def overlap(self, work: Callable[[], Made]) -> Callable[[], Made]:
        """Begins `work`, some ops on what is there, which the ops that follow need not wait for. The function that is
        returned gives its result: the ops after that wait for it. See Executor.overlap for what may go beside what.
        """

    def prepare(self, weights: Linear) -> Linear:
        """Called once per matrix at load, after q,k,v and gate,up were fused: repack, or return it unchanged.

        The tensors are on `device`. The argument is dropped afterwards, so its memory can be reused.
        """

    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]:
        """As prepare, for the matrices of all experts of a layer: gate | up, and down."""

    def decode_inputs(
        self, lengths: Tensor, tables: Tensor, q_len: int, page_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where `q_len` new tokens of each sequence stand, which follow `lengths` tokens in the cache. Before `embed`.

        lengths [B] int64; tables [2, B, max_pages] int32, the block tables of both kinds, whose rows may lie apart.
        Returns positions [B * q_len] int64, kv_lens [B] int32 and slot_mapping [2, B * q_len] int64, of both kinds.
        """

    def check_pages(self, pages: PagesInUse, limits: PageLimits, writers: Tensor, record: Tensor) -> None:
        """Writes the first violation of `limits` by `pages` to record [6] int64, if it holds none, and adds to writers
        [2, P] int32 who writes each page (check_pages/spec.py). With $KERNGEN_CHECK_PAGES alone.
        """

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
        """The end of a decode step, which chose tokens [B, q_len] int64 from states [B * q_len, H] of its tokens.

        drafts [B, q_len - 1] int64, None for none: the leading ones that are what was chosen are accepted, and the
        token after them counts. In place: token [B] int64 becomes the last that counts, 0 where that is -1; hidden
        [B, H] the state that gave it; lengths [B] int64 grows by how many count, up to limits [B] int64. Returns
        [B, q_len + 2] int64: how many count, tokens, and whether hidden is finite.
        """

    def embed(self, ids: Tensor, table: Linear, scale: float) -> Tensor:
        """table[ids] * scale. ids [T] int64, table [vocab, H] as `prepare` gave it, its values rounded to dtype; scale
        already rounded to dtype.

        Returns [T, H] in residual_dtype (rounded to dtype first where they differ).
        """

    def draft_inputs(self, ids: Tensor, hidden: Tensor, table: Linear, scale: float) -> Tensor:
        """[table[ids] * scale, hidden], what a drafter's first projection reads. ids, table and scale as for embed,
        hidden [T, C] in dtype.

        Returns [T, H + C] in dtype.
        """

    def rmsnorm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """x * (mean(x^2) + eps)^(-1/2) * weight over the last dim, in fp32, cast to dtype. weight None: no
        multiply.

        x: [..., n] in residual_dtype or dtype, weight [n].
        """

    def add_norm(self, residual: Tensor, h: Tensor, norms: ResidualNorms) -> Tensor:
        """residual <- (residual + norm(h; post_weight)) * layer_scalar, in place or into norms.into; returns
        norm(residual; next_weight).

        residual [T, H] residual_dtype, h [T, H] dtype. Returns [T, H] in dtype.
        """

    def add_rmsnorm(self, residual: Tensor, h: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual <- residual + h, in place; returns norm(residual; weight). Shapes and dtypes as of add_norm."""

    def share_memory(self, hidden: int) -> None:
        """Told, as a model is made on all ranks, how wide the rows are that exchange_norm will be asked for: memory for
        them, and for the choice of a greedy token, is shared where it is within reach.
        """

    def exchange_norm(self, residual: Tensor, h: Tensor, norms: ResidualNorms) -> Tensor:
        """add_norm of the sum of h over the ranks of a divided model, where h is this rank's summand, which may be
        overwritten. The sum is rounded once, to dtype, and is the same on all ranks. With one rank it is add_norm.
        """

    def linear_norm(self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms) -> Tensor | None:
        """add_norm of linear(x, weights), or exchange_norm where that is a summand, where one kernel does both faster;
        else None, and nothing is done.

        x [T, in_features] dtype; the rest as for add_norm.
        """

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        """x W^T. x [T, in_features] dtype. Returns [T, out_features] dtype, fp32 accumulation."""

    def qkv_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        """Head norms, RoPE and the cache write, from the fused projection's output.

        qkv [T, (nq + nkv + nkv) * d] as q | k | v; [T, (nq + nkv) * d] as q | k on layers whose V is the
        raw K projection. q = rope(norm(q)); k = rope(norm(k)); v = norm(v) with no weight and no RoPE.
        k and v of token t go to cache row slot_mapping[t] = page * page_size + row; -1 writes nothing. Returns q [T,
        nq, d] dtype.
        """

    def qk_norm_rope(self, qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        """As qkv_norm_rope, but V is not normed: v = v. qkv [T, (nq + nkv + nkv) * d] as q | k | v."""

    def kv_norm_rope(self, kv_rows: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> None:
        """As qk_norm_rope of K and V alone, of n layers at once. kv_rows [T, n * (nkv + nkv) * d], k | v of each layer;
        heads.k_weight [n, d]; kv: the layers' pools as one, a layer's pages behind the other's (KVView.chunk).
        """

    def q_norm_rope(self, q: Tensor, heads: HeadNorms, batch: AttnBatch) -> Tensor:
        """As qkv_norm_rope for a layer that owns no KV: q [T, nq * d]. Returns q [T, nq, d]."""

    def attend_decode(self, projected: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch) -> Tensor:
        """From the projection's output to attention's, for `q_len` new tokens of each sequence: qkv_norm_rope, or
        q_norm_rope for a layer that owns no KV, then softmax(q k^T) v. Scale 1.0.

        projected [batch * q_len, columns] as theirs. slot_mapping names the rows that block_table has for the tokens'
        positions. Query head a reads KV head a / (nq / nkv). positions, slot_mapping, block_table and kv_lens are read
        ahead: they were written before the forward's `embed`, or before a torch operation that came after that. Returns
        [batch * q_len, nq, d]; a query that sees no key gives zeros.
        """

    def attn_decode(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        """attend_decode's softmax(q k^T) v of ready queries, whose K and V the cache holds; under a full mask, too.

        q [batch * q_len, nq, d], normed and rotated.
        """

    def attn_prefill(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        """attn_decode for ragged queries. q [T, nq, d]."""

    def write_means(self, means: Tensor, kv: KVView, batch: AttnBatch, starts: Tensor, num_keys: int) -> None:
        """Means of keys that the cache has got, whole ones: key_means (templates/key_means/op.py).

        means [P, nkv, r, d], beside the pages of kv; starts [B] int32: of each sequence from the mean on that holds
        this position; num_keys: of all sequences, about.
        """

    def select_tiles(
        self, q: Tensor, means: Tensor, kv: KVView, batch: AttnBatch, rule: SparsePrefill, dense_from: Tensor,
        density: Tensor,
    ) -> AttnBatch:  # fmt: skip
        """`batch`, of ragged queries under a causal mask, with the lists of tiles that q [T, nq, d] see by `rule`.

        dense_from [B] int32: queries from that position on see all. density [2] int64: the lists' entries, and those
        that they would have of all tiles, are added.
        """

    def gated(self, x: Tensor, gate_up: Linear, activation: str = "gelu_tanh") -> Tensor:
        """activation(gate) * up, gate | up = x W^T. x [T, H] dtype, gate_up [2 * I, H]. Returns [T, I] dtype.

        activation: one of ACTIVATIONS (common/rows/spec.py). gate and up are rounded to dtype, and so is the activation
        before it meets up.
        """

    def ple_block(
        self,
        residual: Tensor,
        h: Tensor | None,
        ffn_weight: Tensor,
        ple: Tensor,
        layer: PleLayerWeights,
        norms: ResidualNorms,
    ) -> Tensor:
        """The end of a layer with per-layer embeddings, from the MLP's output h on.

        r = residual + norm(h; ffn_weight), or the residual where h is None; p = (gelu_tanh(r gate^T) * ple)
        projection^T, gate and projection the layer's; then add_norm of p. residual, h [T, H]; ple [T, P], whose rows
        may lie apart. Returns [T, H] in dtype.
        """

    def decode_layers(
        self, residual: Tensor, ple: Tensor | None, layers: Sequence[LayerInStep], top_k: int, final_norm: Tensor
    ) -> Tensor | None:
        """All layers for the one new token of one sequence, where the backend has one kernel for them; else None, and
        nothing is done.

        residual [1, H] residual_dtype, which may be written; ple [1, L, P] or None. Of each layer rmsnorm, linear,
        attend_decode, linear, add_norm, gated, linear, and add_norm, ple_block, or moe_router, experts (top_k of them)
        and moe_combine, one after the other. Returns norm(h; final_norm) [1, H] in dtype, and below it the output of
        each layer that is tapped, times TAP_SCALE (common/rows/spec.py).
        """

    def logits(self, h: Tensor, head: Linear, logit_cap: float) -> Tensor:
        """h W^T, then cap * tanh(. / cap) if cap > 0. h [n, H]. Returns [n, vocab] fp32: of the whole vocabulary, also
        where ranks have some of the head's rows each.
        """

    def screen(self, head: Linear, excluded: Sequence[int] = (), *, likely: bool = False) -> HeadScreen | None:
        """What `greedy` may read in place of `head`, where the backend has a kernel for that and the device room.

        Of a divided model all ranks have one, or none has. excluded: tokens that are never to be chosen. likely:
        smaller, for what is verified afterwards: `greedy` may miss the largest logit then, which is all but sure not to
        happen.
        """

    def greedy(
        self,
        h: Tensor,
        head: Linear,
        logit_cap: float,
        screen: HeadScreen | None = None,
        excluded: Tensor | None = None,
    ) -> Tensor:
        """The index of the largest logit, the lowest one on a tie. Returns [n] int64.

        screen: of this head; n is at most its max_tokens. The result is the same but for what it excludes, and for
        chance where it is a likely one. excluded [k] int64, without a screen: rows of the head, counted from this
        rank's first, that are never chosen. Where ranks have some of the head's rows each, the best of what each finds.
        A row with a NaN, or without a finite logit, gives -1 on the torch backend, on the cuda one some token.
        """

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
        """Per-layer embeddings: (norm(context * context_scale; norm_weight) + table[ids] * table_scale) /
        sqrt(2).

        ids [T], table [vocab, L * P], context [T, L * P]; the norm runs over each slice of P =
        len(norm_weight). Returns [T, L, P] dtype.
        """

    def moe_router(self, residual: Tensor, moe: MoeWeights, top_k: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token, their weights, and the experts' input.

        logits = (norm(residual) * router_scale * H^-0.5) router^T; softmax over all experts in fp32, the top k of it
        renormalised to sum 1, then times per_expert_scale. residual [T, H] residual_dtype. Returns ids [T, top_k]
        int32, weights [T, top_k] fp32 and norm(residual; pre_norm) [T, H] dtype.
        """

    def experts(self, x: Tensor, gate_up: Experts, down: Experts, topk_ids: Tensor) -> Tensor:
        """down[e] (gelu_tanh(gate) * up), gate | up = gate_up[e] x, for each expert e of each token.

        x [T, H], gate_up [E, 2 * I, H], down [E, H, I], both prepared. Returns [T, top_k, H] dtype.
        """

    def moe_combine(
        self,
        residual: Tensor,
        dense: Tensor,
        routed: Tensor,
        topk_weights: Tensor,
        moe: MoeWeights,
        norms: ResidualNorms,
    ) -> Tensor:
        """add_norm of h = norm(dense; dense_norm) + norm(sum_i topk_weights_i routed_i; post_norm), norms the layer's.

        dense [T, H], routed [T, top_k, H] dtype, topk_weights [T, top_k] fp32; the sum in fp32. Where the
        experts' `down` is a summand, dense and the weighted sum are added over the ranks first, both in one exchange.
        """

    def centroid_greedy(self, y: Tensor, centroids: Linear, top_k: int, token_ids: Tensor, embed: Tensor) -> Tensor:
        """The token [B] int64 of the greatest of centroid_logits' logits, the first of them on a tie."""

    def centroid_logits(
        self, y: Tensor, centroids: Linear, top_k: int, token_ids: Tensor, embed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A drafter's head over the tokens of the top_k centroids that score highest, instead of the vocabulary.

        y [B, d]; centroids [C, d]; token_ids [C, vocab / C] int64; embed [vocab, d]. Returns the selected
        tokens [B, n] int64 and their logits y . embed[id] [B, n] fp32, n = top_k * vocab / C.
        """
