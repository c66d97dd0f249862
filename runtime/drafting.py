"""Multi-token-prediction drafting with the Gemma-4 assistant.

The drafter is a small decoder without K and V of its own: its layers read those of the target's last sliding and last
full layer that own a cache. It drafts from one constant position P, the one that the last known token will take; the
target's cache holds 0 to P - 1 then, and nothing is written. Its sliding layers see window + 1 of those keys.
Source: transformers' modeling_gemma4_assistant.py (projections, masks, centroid head) and, for the loop around it,
SinglePositionMultiTokenCandidateGenerator in generation/candidate_generator.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DrafterConfig, DraftPolicy, LayerConfig
from kerngen.runtime.model import DecoderStack, Gemma4
from kerngen.runtime.ops import Ops, fitting
from kerngen.runtime.weights.layout import CentroidWeights, DrafterWeights
from kerngen.templates.values import AttnBatch, KVView, Mask


class Drafter(Protocol):
    """Proposes the tokens that a step verifies. What the engine asks of one, whatever it is; see DraftPolicy, too."""

    policy: DraftPolicy

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        """`count` drafts [B, count] int64 after ids [B], the last known tokens, which stand at lengths [B] int64: the
        cache holds what is before them. hidden [B, H]: the target's final hidden state that gave them. max_kv_len: no
        length is longer, nor will be when a captured step is replayed. Waits for nothing on the host.
        """

    def ingest(self, batch: Batch, rows: Tensor, cache: KVCache) -> None:
        """Take in the tokens of a forward of the target and `rows` [T, taps * H], what the tapped layers gave
        (Taps.rows), behind the forward in its stream. Of the batch it reads ids, positions and slots: it may be two
        forwards in one. Of a verification these are all drafts, accepted or not: the next forward has other
        tokens at the positions of those that were not, and what was kept of them is written again, as K and V are.
        Tokens that are nobody's, of a forward that is filled up, have slots in page 0.
        """


class MtpDrafter:
    """A loaded assistant, bound to its target. It knows its target by the hidden state and by the target's own K and V,
    and keeps nothing.
    """

    def __init__(self, config: DrafterConfig, weights: DrafterWeights, target: Gemma4) -> None:
        self.config = config
        self.policy = config.policy
        self.weights = weights
        self.target = target
        self.ops: Ops = target.ops
        self.stack = DecoderStack(config.text, weights.layers, weights.norm, self.ops, "drafter")
        # A likely one will do: a draft is verified.
        self.screen = None if weights.centroids is not None else self.ops.screen(weights.head, likely=True)
        self._windows = {layer.kind: layer.window + 1 if layer.is_sliding else 0 for layer in config.text.layers}
        self._donors = {layer.kind: target.config.donor(layer.kind) for layer in config.text.layers}
        self.stack.heads = [
            replace(heads, shared_k_weight=target.weights.layers[self._donors[layer.kind].index].k_norm)
            for heads, layer in zip(self.stack.heads, config.text.layers, strict=True)
        ]

    def step(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, max_kv_len: int,
        kv_lens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """One forward. ids [B]: the last known tokens; hidden [B, T]: the target's final hidden state that gave them,
        or what `carried` makes of this function's result; lengths [B] int64: tokens in the cache, and the position
        drafted from. max_kv_len: no length is longer, nor will be when a captured step is replayed. kv_lens [B] int32:
        lengths, where the caller has them so.

        Returns y [B, d], the input of the head.
        """
        ops = self.ops
        ops.place = self.stack.name
        if kv_lens is None:
            kv_lens = as_int32(lengths)
        given = ops.draft_inputs(ids, hidden, self.target.weights.embed, self.target.embed_scale)
        residual = ops.linear(given, self.weights.pre).to(ops.residual_dtype)

        by_kind = {
            kind: AttnBatch(cache.groups[kind].block_table, kv_lens, Mask(window=window), max_kv_len, positions=lengths)
            for kind, window in self._windows.items()
        }

        def seen(layer: LayerConfig) -> tuple[KVView, AttnBatch]:
            return cache.pages(self._donors[layer.kind]), by_kind[layer.kind]

        def attend(layer: LayerConfig, q: Tensor) -> Tensor:
            return ops.attend_decode(q, self.stack.heads[layer.index], *seen(layer)).flatten(1)

        row = self.stack.decoded(residual, None, seen) if len(ids) == 1 else None
        if row is None:
            row = self.stack.first(residual)
            for index in range(len(self.stack.layers)):
                row = self.stack.layer(index, residual, row, attend, None)
        return row

    def carried(self, y: Tensor) -> Tensor:
        """The hidden state [B, T] that the next draft begins with, of step's y [B, d]."""
        self.ops.place = self.stack.name
        return self.ops.linear(y, self.weights.post)

    def logits(self, y: Tensor) -> Tensor:
        """Uncapped logits [B, vocab] fp32. With a centroid head, tokens not selected get the lowest logit minus 1."""
        self.ops.place = self.stack.name
        if (centroids := self.weights.centroids) is None:
            return self.ops.logits(y, self.weights.head, 0.0)
        ids, logits = self._selected(y, centroids)
        floor = logits.amin(-1, keepdim=True) - 1.0
        return floor.expand(-1, self.config.text.vocab_size).scatter(1, ids, logits)

    def greedy(self, y: Tensor) -> Tensor:
        """The drafted token [B] of each y [B, d]."""
        self.ops.place = self.stack.name
        if (centroids := self.weights.centroids) is None:
            return self.ops.greedy(y, self.weights.head, 0.0, fitting(self.screen, y))
        return self.ops.centroid_greedy(
            y, centroids.centroids, self.config.centroid_top_k, centroids.token_ids, self.weights.head.weight
        )

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        """`count` greedy drafts [B, count] int64 after ids [B]; arguments as for step."""
        drafts: list[Tensor] = []
        kv_lens = as_int32(lengths)
        y = None
        for _ in range(count):
            if y is not None:  # behind the head, while which its weights come; nobody asks for the last one's
                hidden = self.carried(y)
            y = self.step(ids, hidden, lengths, cache, max_kv_len, kv_lens)
            ids = self.greedy(y)
            drafts.append(ids)
        return torch.stack(drafts, dim=1)

    def ingest(self, batch: Batch, rows: Tensor, cache: KVCache) -> None:
        """Nothing: the target's last hidden state is in the row, its K and V in the cache."""

    def _selected(self, y: Tensor, centroids: CentroidWeights) -> tuple[Tensor, Tensor]:
        """The tokens of the best centroids and their logits, both [B, top_k * vocab / C]."""
        return self.ops.centroid_logits(
            y, centroids.centroids, self.config.centroid_top_k, centroids.token_ids, self.weights.head.weight
        )


def as_int32(lengths: Tensor) -> Tensor:
    """lengths [B] int64, below 2^31, as int32: of one sequence where they lie, which takes no launch. Made before
    draft_inputs, since attention reads them ahead (docs/architecture.md).
    """
    if len(lengths) == 1:
        return lengths.view(torch.int32)[:1]  # the low half
    return lengths.to(torch.int32)
