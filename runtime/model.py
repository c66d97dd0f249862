"""The Gemma-4 text forward, exactly as transformers' modeling_gemma4.py computes it, in terms of `Ops`.

Dense, K = V, shared KV, per-layer embeddings and MoE variants are one code path: what a layer has is in its weights.
Images and sounds come as embeddings (Batch.media), in place of rows of the table.
Nothing here waits for the device, so a decode step is captured in a CUDA graph by running it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.batch import Batch, ListedChunks, MediaRows
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import LayerConfig, ModelConfig, RopeConfig
from kerngen.runtime.media.input import MediaInput
from kerngen.runtime.ops import LayerInStep, Linear, Ops, ResidualNorms, fitting
from kerngen.runtime.weights.layout import LayerWeights, ModelWeights, MoeWeights
from kerngen.templates.common.rows.spec import TAP_SCALE
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.values import AttnBatch, HeadNorms, KVView, Mask


def inverse_frequencies(config: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """RoPE of one layer type, [head_dim / 2] fp32: theta^(-2j / head_dim) / factor for the first `num_rotated` pairs,
    and zeros for the others, which pass unchanged ("proportional" RoPE of full-attention layers rotates 64 of 256).
    """
    exponents = torch.arange(0, 2 * config.num_rotated, 2, dtype=torch.float32) / head_dim
    inv_freq = torch.zeros(head_dim // 2, dtype=torch.float32)
    inv_freq[: config.num_rotated] = 1.0 / (config.theta**exponents) / config.factor
    return inv_freq.to(device)


def rounded_scale(value: float, dtype: torch.dtype) -> float:
    """`value` as the embedding's dtype holds it: sqrt(5376) becomes 73.5 in bf16."""
    return float(torch.tensor(value, dtype=dtype))


def tap_scale(dtype: torch.dtype) -> float:
    """What tapped rows are multiplied by: TAP_SCALE."""
    return TAP_SCALE[DTYPE_NAME[dtype]]


@dataclass(slots=True)
class Taps:
    """Layers, in their order, whose output a forward is asked for beside its result.

    rows [T, len(layers) * H] in `ops.dtype`, once the forward has run: the outputs beside each other, times
    `tap_scale`.
    """

    layers: tuple[int, ...]
    rows: Tensor = field(init=False)
    _kept: list[Tensor] = field(init=False, default_factory=list)

    def keep(self, index: int, residual: Tensor) -> Tensor | None:
        """Of the forward, behind layer `index`: keeps `residual` if that is tapped, and returns an empty tensor like
        it, into which the next layer's goes.
        """
        if index not in self.layers:
            return None
        self._kept.append(residual)
        return torch.empty_like(residual)

    def join(self, dtype: torch.dtype) -> None:
        """Makes `rows` of what was kept, which no one reads afterwards. Nothing is launched between the layers."""
        if (scale := tap_scale(dtype)) != 1:
            torch._foreach_mul_(self._kept, scale)
        tokens, hidden = self._kept[0].shape
        self.rows = self._kept[0].new_empty(tokens, len(self._kept) * hidden, dtype=dtype)
        torch.cat(self._kept, dim=-1, out=self.rows)
        self._kept.clear()


Attend = Callable[[LayerConfig, Tensor], Tensor]
Seen = Callable[[LayerConfig], tuple[KVView, AttnBatch]]  # the cache that a layer reads, and what of it


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where a layer's parts enter the residual stream. ple: None for a layer without per-layer inputs."""

    attention: ResidualNorms
    mlp: ResidualNorms
    ple: ResidualNorms | None


class DecoderStack:
    """The layers that a target and its drafter have in common; `attend` says whose cache is read and how.

    name: what its ops' places begin with ("drafter"). heads, ends: of each layer, what ops take beside matrices.
    """

    def __init__(
        self, config: ModelConfig, layers: tuple[LayerWeights, ...], norm: Tensor, ops: Ops, name: str = ""
    ) -> None:
        self.config = config
        self.name = name
        self.layers = layers
        self.norm = norm
        self.ops = ops
        ops.share_memory(config.hidden_size)
        dims = {layer.kind: layer.head_dim for layer in config.layers}
        inv_freqs = {kind: inverse_frequencies(rope, dims[kind], ops.device) for kind, rope in config.rope.items()}
        self.heads = [
            HeadNorms(
                w.q_norm, inv_freqs[layer.kind], config.rope[layer.kind].num_rotated, config.rms_norm_eps, w.k_norm,
                config.num_q_heads,
            )
            for w, layer in zip(layers, config.layers, strict=True)
        ]  # fmt: skip
        next_norms = [*(w.input_norm for w in layers[1:]), norm]
        self.ends = [self._ends(w, after) for w, after in zip(layers, next_norms, strict=True)]

    def _ends(self, w: LayerWeights, next_norm: Tensor) -> _Ends:
        eps = self.config.rms_norm_eps
        # no released model has experts and per-layer inputs: its layer would go on from here
        scalar = w.scalar if w.ple is None else None
        return _Ends(
            ResidualNorms(w.post_attention_norm, w.pre_ffn_norm, eps),
            ResidualNorms(w.post_ffn_norm, next_norm, eps, scalar),
            None if w.ple is None else ResidualNorms(w.ple.post_norm, next_norm, eps, w.scalar),
        )

    def decoded(self, residual: Tensor, ple: Tensor | None, seen: Seen, taps: Sequence[int] = ()) -> Tensor | None:
        """The final norm's output [1, H] of one token, where one kernel serves all layers, and below it the output of
        each layer of `taps`, times `tap_scale`; else None, and nothing is done. The rest as Ops.decode_layers has it.
        """
        self.ops.place = self.name
        layers = [
            LayerInStep(w, heads, *seen(layer), index in taps)
            for index, (w, heads, layer) in enumerate(zip(self.layers, self.heads, self.config.layers, strict=True))
        ]
        return self.ops.decode_layers(residual, ple, layers, self.config.top_k_experts, self.norm)

    def first(self, residual: Tensor) -> Tensor:
        """The projections of layer 0."""
        self.ops.place = self.name
        return self.project(0, self.ops.rmsnorm(residual, self.layers[0].input_norm, self.config.rms_norm_eps))

    def project(self, index: int, h: Tensor) -> Tensor:
        """q | k | v of layer `index`, as its weights have them, from its normed input."""
        self.ops.place = self._place(index)
        return self.ops.linear(h, self.layers[index].qkv)

    def _place(self, index: int) -> str:
        shared = "" if self.layers[index].k_norm is not None else "shared KV"
        return " ".join(filter(None, (self.name, self.config.layers[index].kind, shared)))

    def layer(
        self, index: int, residual: Tensor, qkv: Tensor, attend: Attend, ple: Tensor | None, *, projects: bool = True,
        into: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Layer `index` on `residual` [T, H] (updated in place, or into `into`) and its projections `qkv`; ple [T, P]
        or None.

        Returns the next layer's projections, or without `projects` its normed input; after the last layer the final
        norm's output.
        """
        w, config = self.layers[index], self.config.layers[index]
        self.ops.place = self._place(index)
        h = self._rest(w, self.ends[index], residual, attend(config, qkv), ple, into)
        return self.project(index + 1, h) if projects and index + 1 < len(self.layers) else h

    def _rest(
        self, w: LayerWeights, ends: _Ends, residual: Tensor, attended: Tensor, ple: Tensor | None, into: Tensor | None
    ) -> Tensor:
        """From attention's output on, kernel by kernel: norm(residual; next_norm)."""
        ops = self.ops
        if into is None:
            x = self._projected(residual, attended, w.out, ends.attention)
        else:
            x = self._projected(residual, attended, w.out, replace(ends.attention, into=into))
            residual = into

        def dense() -> Tensor:
            return ops.linear(ops.gated(x, w.gate_up), w.down)

        if w.ple is None or ends.ple is None or ple is None:
            if w.moe is None:
                return self._projected(residual, ops.gated(x, w.gate_up), w.down, ends.mlp)
            return self._with_experts(residual, dense, w.moe, ends.mlp)
        h = None
        if w.moe is None:
            h = dense()
        else:
            self._with_experts(residual, dense, w.moe, ends.mlp)
        return ops.ple_block(residual, h, ends.mlp.post_weight, ple, w.ple, ends.ple)

    def _projected(self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms) -> Tensor:
        """add_norm of x's projection, summed over the ranks that have a part of it."""
        ops = self.ops
        done = ops.linear_norm(residual, x, weights, norms)
        if done is not None:
            return done
        h = ops.linear(x, weights)
        return ops.exchange_norm(residual, h, norms) if weights.is_summand else ops.add_norm(residual, h, norms)

    def _with_experts(
        self, residual: Tensor, dense: Callable[[], Tensor], moe: MoeWeights, norms: ResidualNorms
    ) -> Tensor:
        """Adds the dense MLP's output and the routed experts', which read the residual before either. As add_norm.

        dense: gives the former. It is small, and goes on beside the router and the experts.
        """
        ops, config = self.ops, self.config
        made = ops.overlap(dense)
        try:
            ids, weights, x = ops.moe_router(residual, moe, config.top_k_experts, config.rms_norm_eps)
            routed = ops.experts(x, moe.gate_up, moe.down, ids)
        finally:
            of_dense = made()
        return ops.moe_combine(residual, of_dense, routed, weights, moe, norms)


class Gemma4:
    """A loaded target model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        suppressed_ids: Sequence[int] = (),
        media: MediaInput | None = None,
    ) -> None:
        """suppressed_ids: tokens that are never generated. media: what it takes beside text, None for a model that
        takes nothing; its placeholders are suppressed, too. Raises UsageError where a token is none, or all are
        suppressed.
        """
        self.config = config
        self.weights = weights
        self.ops = ops
        self.media = media
        self.suppressed_ids = frozenset((*suppressed_ids, *(() if media is None else media.placeholders.values())))
        if bad := [i for i in self.suppressed_ids if not 0 <= i < config.vocab_size]:
            raise UsageError(f"suppressed token {bad[0]} is outside the vocabulary of {config.vocab_size}")
        if len(self.suppressed_ids) == config.vocab_size:
            raise UsageError(f"all {config.vocab_size} tokens are suppressed; none is left to generate")
        self._suppressed = torch.tensor(sorted(self.suppressed_ids), dtype=torch.int64, device=ops.device)
        rows = config.vocab_span  # of the head, that this rank has
        mine = [i - rows.start for i in sorted(self.suppressed_ids) if rows.start <= i < rows.stop]
        self._excluded = torch.tensor(mine, dtype=torch.int64, device=ops.device) if mine else None
        self.screen = ops.screen(weights.head, sorted(self.suppressed_ids))
        self.stack = DecoderStack(config, weights.layers, weights.norm, ops)
        self.embed_scale = rounded_scale(config.embed_scale, ops.dtype)
        self._ple_scale = rounded_scale(config.ple_size**0.5, ops.dtype)
        # Layers from here on write no cache: of a prefill chunk they only need the token whose logits are wanted.
        shared = [layer.index for layer in config.layers if not layer.owns_kv]
        self._kinds = dict.fromkeys((layer.kind, layer.window) for layer in config.layers)
        self._first_shared = min(shared, default=len(config.layers))

    def embed(self, ids: Tensor) -> Tensor:
        """The scaled input embedding [T, H] of ids [T], in residual_dtype."""
        return self.ops.embed(ids, self.weights.embed, self.embed_scale)

    def forward(self, batch: Batch, cache: KVCache, *, outputs: str = "all", taps: Taps | None = None) -> Tensor:
        """Writes the batch's K and V, and returns the hidden states after the final norm, in `ops.dtype`.

        outputs: "all" for every token [T, H]; of a prefill also "last", each sequence's last token [B, H], and "none"
        for an empty tensor [0, H] (a chunk that is not the prompt's last needs only its K and V). taps: are filled, of
        every token: only where outputs is "all".
        """
        if taps is not None and outputs != "all":
            raise TypeError(f"layers are tapped where all tokens go through them, not for outputs={outputs!r}")
        self.ops.place = ""
        residual = _merged(self.embed(batch.ids), batch.media)
        ple = self._ple(batch.ids, residual)  # of media: the table's row of id 0, and what their embeddings project to
        if batch.cu_seqlens is None and len(batch.ids) == 1:
            done = self.stack.decoded(residual, ple, self._seen(batch, cache), () if taps is None else taps.layers)
            if done is not None:
                if taps is not None:
                    taps.rows = done[1:].view(1, -1)
                return done[:1]
        row, attend, into = self.stack.first(residual), self._attend(batch, cache), None
        for index in range(len(self.stack.layers)):
            if index == self._first_shared and outputs != "all":
                if outputs == "none":
                    break
                rows, batch = batch.last_tokens()  # before the gathers: attention reads ahead what precedes those
                residual, row = residual[rows], self.stack.project(index, row[rows])
                ple, attend = None if ple is None else ple[rows], self._attend(batch, cache)
            part = None if ple is None else ple[:, index]
            before_shared = index + 1 == self._first_shared and outputs != "all"  # few rows go on, or none
            row = self.stack.layer(index, residual, row, attend, part, projects=not before_shared, into=into)
            residual = residual if into is None else into
            into = None if taps is None else taps.keep(index, residual)
        if taps is not None:
            taps.join(self.ops.dtype)
        if outputs == "none":
            return residual[:0].to(self.ops.dtype)
        if outputs == "last" and batch.cu_seqlens is not None:
            return row[batch.cu_seqlens[1:].long() - 1]
        return row

    @property
    def supports_mixed(self) -> bool:
        """Whether a mixed batch (prefill and decode in one forward) is possible: every layer processes all tokens of a
        prefill, and none has per-layer inputs.
        """
        return self._first_shared == len(self.config.layers) and not self.config.ple_size

    def forward_mixed(
        self, chunks: Batch, chunk_cache: KVCache, decode: Batch, decode_cache: KVCache, *, taps: Taps | None = None
    ) -> tuple[Tensor, Tensor]:
        """A mixed batch: a prefill and the decode step of other sequences. All layers but attention process their
        tokens together, so weights are read once. Each cache has its own sequences' tables. Needs `supports_mixed`.

        Returns the hidden states after the final norm, in `ops.dtype`: of each chunk's last token [B, H], and of the
        decode step's tokens. taps: are filled, of the chunks' tokens and then of the decode step's.
        """
        if chunks.cu_seqlens is None or not self.supports_mixed:
            raise TypeError("a mixed batch needs a ragged prefill and a model that supports it")
        self.ops.place = ""
        count = len(chunks.ids)
        residual = _merged(self.embed(torch.cat((chunks.ids, decode.ids))), chunks.media)
        before, behind = self._attend(chunks, chunk_cache), self._attend(decode, decode_cache)

        def attend(layer: LayerConfig, qkv: Tensor) -> Tensor:
            return torch.cat((before(layer, qkv[:count]), behind(layer, qkv[count:])))

        row, into = self.stack.first(residual), None
        for index in range(len(self.stack.layers)):
            row = self.stack.layer(index, residual, row, attend, None, into=into)
            residual = residual if into is None else into
            into = None if taps is None else taps.keep(index, residual)
        if taps is not None:
            taps.join(self.ops.dtype)
        return row[chunks.cu_seqlens[1:].long() - 1], row[count:]

    def _seen(self, batch: Batch, cache: KVCache) -> Seen:
        by_kind = {
            (kind, window): batch.attention(kind, cache, Mask(window=window, ends=batch.ends if window else None))
            for kind, window in self._kinds
        }
        return lambda layer: (cache.pages(layer), by_kind[layer.kind, layer.window])

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped logits [n, vocab] fp32 of hidden states [n, H] after the final norm, -inf for suppressed tokens."""
        self.ops.place = ""
        logits = self.ops.logits(hidden, self.weights.head, self.config.logit_cap)
        return logits.index_fill(1, self._suppressed, float("-inf")) if self.suppressed_ids else logits

    def greedy(self, hidden: Tensor, *, screened: bool = True) -> Tensor:
        """The likeliest token [n] int64 of each hidden state [n, H] that is not suppressed.

        screened: the head may be read in few bits first. Sums of a logit have another order then, which may decide
        between two that are all but equal.
        """
        self.ops.place = ""
        screen = fitting(self.screen, hidden) if screened else None
        if screen is None and self._excluded is not None:
            return self.ops.greedy(hidden, self.weights.head, self.config.logit_cap, excluded=self._excluded)
        return self.ops.greedy(hidden, self.weights.head, self.config.logit_cap, screen)

    def _ple(self, ids: Tensor, residual: Tensor) -> Tensor | None:
        if (ple := self.weights.ple) is None:
            return None
        context = self.ops.linear(residual.to(self.ops.dtype), ple.projection)
        scale = self.config.hidden_size**-0.5
        return self.ops.ple_inputs(ids, ple.table, self._ple_scale, context, scale, ple.norm, self.config.rms_norm_eps)

    def _attend(self, batch: Batch, cache: KVCache) -> Attend:
        ops, seen = self.ops, self._seen(batch, cache)

        def attend(layer: LayerConfig, qkv: Tensor) -> Tensor:  # [T, nq * d]
            heads, (kv, attn) = self.stack.heads[layer.index], seen(layer)
            if attn.cu_seqlens_q is None:
                return ops.attend_decode(qkv, heads, kv, attn).flatten(1)
            q = ops.qkv_norm_rope(qkv, heads, kv, attn) if heads.owns_kv else ops.q_norm_rope(qkv, heads, attn)
            if batch.listed is not None and layer.kind == "full":
                attn = self._listed(layer, q, kv, attn, batch.listed, cache)
            return ops.attn_prefill(q, kv, attn).flatten(1)

        return attend

    def _listed(
        self, layer: LayerConfig, q: Tensor, kv: KVView, attn: AttnBatch, chunks: ListedChunks, cache: KVCache
    ) -> AttnBatch:
        """`attn`, with lists of the tiles of keys that queries see, where some may not see all. Writes the means of
        keys, whatever the length: later chunks and prompts choose by them.
        """
        ops, rule, means = self.ops, self.config.sparse, cache.means(layer)
        if rule is None or means is None:
            raise TypeError("a batch has chunks that choose their keys, and its cache has no means of keys")
        if layer.owns_kv:
            ops.write_means(means, kv, attn, chunks.means_from, chunks.num_keys)
        if attn.max_kv_len <= rule.most_whole:
            return attn
        return ops.select_tiles(q, means, kv, attn, rule, chunks.dense_from, cache.density[layer.index])


def _merged(residual: Tensor, media: MediaRows | None) -> Tensor:
    """`residual` [T, H], with the rows of `media` where they stand."""
    if media is not None:
        residual.index_copy_(0, media.places, media.rows.to(residual.dtype))
    return residual


__all__ = ["Attend", "Batch", "DecoderStack", "Gemma4", "Seen", "Taps", "inverse_frequencies", "rounded_scale"]
