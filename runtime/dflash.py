"""DFlash drafting: a block of masked tokens behind the last known one is drafted at once, by block diffusion.

The drafter knows the text by the outputs of some layers of its target, from which K and V of its own layers are made
for each token that is in the target's cache. It drafts from position P, which the last known token will take: that
token and the masked ones, at P and behind it, go through its layers with the target's embedding, and the target's head
says what each masked one is. The block's K and V are written behind the context's, in the same pages, and go with it.
Layers with a window are causal within the block, the others see all of it (DflashConfig.is_causal).
Source: z-lab's dflash, model.py (arXiv 2602.06036); the causal layers are SGLang's (pull request 34524), with which the
31B's drafts are accepted longer than with z-lab's own masks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.model import Gemma4, inverse_frequencies, tap_scale
from kerngen.runtime.ops import fitting
from kerngen.runtime.weights.dflash import DflashWeights
from kerngen.templates.values import AttnBatch, HeadNorms, Mask


class DflashDrafter:
    """A loaded drafter, bound to its target. Of a sequence it keeps K and V of its own layers, in the target's pages of
    full layers.
    """

    def __init__(self, config: DflashConfig, weights: DflashWeights, target: Gemma4) -> None:
        self.config = config
        self.policy = config.policy
        self.weights = weights
        self.target = target
        self.ops = target.ops
        # The target's head once more, in fewer bits than the target's own screen: a draft is verified.
        self.screen = self.ops.screen(target.weights.head, sorted(target.suppressed_ids), likely=True)
        text, device = config.text, target.ops.device
        dim = text.layers[0].head_dim
        inv_freq = inverse_frequencies(text.rope["full"], dim, device)
        self.heads = [
            HeadNorms(w.q_norm, inv_freq, dim // 2, text.rms_norm_eps, w.k_norm, text.num_q_heads)
            for w in weights.layers
        ]
        k_weights = torch.stack([w.k_norm for w in weights.layers])
        self._context_heads = replace(self.heads[0], k_weight=k_weights, num_q_heads=0)
        self._masked = torch.full((1, config.block_size - 1), config.mask_id, dtype=torch.int64, device=device)
        is_causal = config.is_causal
        self._masks = [Mask("causal" if is_causal and layer.window else "full", layer.window) for layer in text.layers]

    def context(self, rows: Tensor) -> Tensor:
        """What K and V of a context are made of, [T, H]. rows: Taps.rows, times `tap_scale`, which the norm takes
        away.
        """
        ops = self.ops
        ops.place = "drafter context"
        made = ops.linear(rows, self.weights.fc)
        return ops.rmsnorm(made, self.weights.hidden_norm, self.config.text.rms_norm_eps * tap_scale(ops.dtype) ** 2)

    def ingest(self, batch: Batch, rows: Tensor, cache: KVCache) -> None:
        """Write K and V of a forward's tokens, all layers' from one product."""
        made = self.ops.linear(self.context(rows), self.weights.context)  # [T, layers * 2 * nkv * d]
        self.ops.kv_norm_rope(made, self._context_heads, cache.drafter_pages(), batch.attention("full", cache, Mask()))

    def block(self, ids: Tensor, lengths: Tensor, cache: KVCache, max_kv_len: int) -> Tensor:
        """The block's states after the final norm [B, block_size, H], that of the last known token first. Arguments as
        for propose. Writes the block's K and V.
        """
        ops, size, eps = self.ops, self.config.block_size, self.config.text.rms_norm_eps
        ops.place = "drafter"
        positions, kv_lens, slots = ops.decode_inputs(lengths, cache.tables, size, cache.page_size)
        table, slots = cache.groups["full"].block_table, slots[0]
        residual = self.target.embed(torch.cat((ids[:, None], self._masked.expand(len(ids), -1)), dim=1).flatten())
        layers = self.weights.layers
        row = ops.rmsnorm(residual, layers[0].input_norm, eps)
        norms = [*(w.input_norm for w in layers[1:]), self.weights.norm]
        each = zip(layers, self.config.text.layers, self.heads, self._masks, norms, strict=True)
        for w, layer, heads, mask, next_norm in each:
            seen = AttnBatch(table, kv_lens, mask, max_kv_len + size, size, positions=positions, slot_mapping=slots)
            pages = cache.pages(layer)
            q = ops.qk_norm_rope(ops.linear(row, w.qkv), heads, pages, seen)
            attended = ops.attn_decode(q, pages, seen).flatten(1)
            row = ops.add_rmsnorm(residual, ops.linear(attended, w.out), w.post_attention_norm, eps)
            mlp = ops.linear(ops.gated(row, w.gate_up, self.config.text.activation), w.down)
            row = ops.add_rmsnorm(residual, mlp, next_norm, eps)
        return row.view(len(ids), size, -1)

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        """The first `count` drafts [B, count] int64 of the block behind ids [B]; see Drafter. The block is whole
        whatever the count, as it was in training. hidden is not read: the context has it, if it is tapped.
        """
        states = self.block(ids, lengths, cache, max_kv_len)[:, 1 : count + 1]
        return self.greedy(states.flatten(0, 1)).view(len(ids), count)

    def greedy(self, states: Tensor) -> Tensor:
        """The drafted token [n] int64 of each of `block`'s states [n, H]."""
        if (screen := fitting(self.screen, states)) is None:
            return self.target.greedy(states)
        self.ops.place = "drafter"
        return self.ops.greedy(states, self.target.weights.head, self.target.config.logit_cap, screen)
