"""The tokens of one step, as the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kerngen.runtime.cache import KINDS, KVCache
from kerngen.runtime.config import SparsePrefill
from kerngen.runtime.ops import Ops
from kerngen.templates.values import AttnBatch, Mask


@dataclass(frozen=True, slots=True)
class MediaRows:
    """What stands in a batch in place of tokens. rows [m, H]: embeddings of images and sounds; places [m] int64: of the
    batch's tokens, which those are.
    """

    rows: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class ListedChunks:
    """Of a prefill whose queries see lists of tiles. means_from [B] int32: of each sequence the first position whose
    means of keys may be missing; dense_from [B] int32: queries from that position on see all keys. num_keys: positions
    from means_from on, of all sequences, about.
    """

    means_from: Tensor
    dense_from: Tensor
    num_keys: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, on the device. Sequences lie one after the other; B of them, T tokens.

    q_len > 0: every sequence has that many tokens (decode, verification) and cu_seqlens is None. q_len 0: ragged
    prefill, sequence s owns tokens cu_seqlens[s] to cu_seqlens[s + 1], max_seqlen of them at most.
    ids, positions [T] int64; kv_lens [B] int32, this step's tokens included; slots: slot_mapping [T] by layer kind.
    max_kv_len: no kv_len is longer, nor will be when a captured step is replayed: kernels choose their KV splits by it.
    media: of a prefill with images or sounds; ids are 0 at their places. ends [T] int32: where tokens of images see
    each other, the position of the last key that each token sees in sliding layers (values.Mask); None where that is
    its own. A chunk has such an image to its end, so its last token's end is its own position. listed: of a prefill,
    where the queries of full-attention layers see lists of tiles; None where they see all keys.
    """

    ids: Tensor
    positions: Tensor
    kv_lens: Tensor
    slots: dict[str, Tensor]
    q_len: int
    max_kv_len: int
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0
    media: MediaRows | None = None
    ends: Tensor | None = None
    listed: ListedChunks | None = None

    @staticmethod
    def decode(ids: Tensor, lengths: Tensor, cache: KVCache, max_kv_len: int, ops: Ops) -> Batch:
        """ids [B, q_len] follow `lengths` [B] int64 committed tokens. All values are computed on the device."""
        q_len = ids.shape[1]
        if cache.check is None:
            positions, kv_lens, slots = ops.decode_inputs(lengths, cache.tables, q_len, cache.page_size)
        else:
            positions, kv_lens, slots = cache.check.decode_inputs(lengths, cache, q_len, max_kv_len)
        return Batch(ids.flatten(), positions, kv_lens, dict(zip(KINDS, slots, strict=True)), q_len, max_kv_len)

    @staticmethod
    def prefill(ids: Tensor, start: int, cache: KVCache, sparse: SparsePrefill | None = None) -> Batch:
        """One sequence's chunk: ids [n] at positions start to start + n - 1. sparse: how its queries choose what they
        see, as those of a longer prompt.
        """
        n = len(ids)
        positions = torch.arange(start, start + n, device=ids.device)
        slots = cache.slots_of(torch.zeros_like(positions), positions)
        ends = torch.tensor([0, n], dtype=torch.int32, device=ids.device)
        kv_lens = torch.tensor([start + n], dtype=torch.int32, device=ids.device)
        listed = None
        if sparse is not None:
            from_start, never = (torch.tensor([at], dtype=torch.int32, device=ids.device) for at in (start, start + n))
            listed = ListedChunks(from_start, never, n)
        return Batch(ids, positions, kv_lens, slots, 0, start + n, ends, n, listed=listed)

    @staticmethod
    def ragged(
        tokens: Tensor, lengths: Tensor, cache: KVCache, *, max_seqlen: int, max_kv_len: int,
        listed: ListedChunks | None = None,
    ) -> Batch:  # fmt: skip
        """Chunks of several sequences, the rows of `cache`'s tables, in that order.

        tokens [3, T] int64: ids, positions, and each token's sequence. lengths [2 * B + 1] int32: where the chunks
        begin and the last one ends, B + 1 of them, then the kv_lens.
        """
        ids, positions, rows = tokens
        ends, kv_lens = lengths.split((len(lengths) // 2 + 1, len(lengths) // 2))
        if cache.check is None:
            slots = cache.slots_of(rows, positions)
        else:
            kv_lens, slots = cache.check.chunk_inputs(rows, positions, kv_lens, ends, cache, max_kv_len)
        return Batch(ids, positions, kv_lens, slots, 0, max_kv_len, ends, max_seqlen, listed=listed)

    def attention(self, kind: str, cache: KVCache, mask: Mask) -> AttnBatch:
        """What layers of one kind attend to."""
        return AttnBatch(
            cache.groups[kind].block_table, self.kv_lens, mask, self.max_kv_len, self.q_len, self.cu_seqlens,
            self.max_seqlen, self.positions, self.slots[kind],
        )  # fmt: skip

    def last_tokens(self) -> tuple[Tensor, Batch]:
        """The rows of each sequence's last token, and a decode batch (q_len 1) of those. Prefill only."""
        if self.cu_seqlens is None:
            raise TypeError("a decode batch has no last token to cut to")
        rows = self.cu_seqlens[1:].long() - 1
        slots = {kind: slot[rows] for kind, slot in self.slots.items()}
        return rows, Batch(self.ids[rows], self.positions[rows], self.kv_lens, slots, 1, self.max_kv_len)


def ragged_layout(
    ids: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> tuple[list[Sequence[int]], list[int]]:
    """What `Batch.ragged` takes as tokens and lengths, on the host. ids: of all chunks, one after another; starts,
    sizes: of each, in its sequence. A chunk may be empty.
    """
    spans = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    tokens = [ids, [p for span in spans for p in span], [i for i, span in enumerate(spans) for _ in span]]
    return tokens, [0, *accumulate(sizes), *(span.stop for span in spans)]
