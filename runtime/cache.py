"""The paged KV cache: pages on full-attention layers, a ring of the window on sliding ones.

Every layer that owns a cache has its own pool; all layers of one kind ("full" or "sliding") share one block table,
since they hold the same positions. A ring is a block table that repeats its pages: position p lies in ring page
(p / page_size) mod ring_pages, so that kernels see an ordinary table. Layers that share KV own nothing.

How long a ring must be: a step that starts with n committed positions writes at most `max_step` new ones, up to n +
max_step - 1, and overwrites what lies ring_tokens before each. Later steps may start as early as n + 1 (a draft whose
tokens were all rejected) and a drafter at n reads window + 1 keys back from n - 1, so position n - 1 - window must
survive a write at n + max_step - 1. Hence ring_tokens >= window + max_step + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.config import LayerConfig, ModelConfig
from kerngen.runtime.ops import KVPages, Ops

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Group:
    """What layers of one kind share. block_table [batch, max_pages] int32; num_pages: the size of each layer's pool.

    first_slots [batch, max_pages] int64: the slot of each page's first row.
    """

    block_table: Tensor
    first_slots: Tensor
    num_pages: int


class KVCache:
    """Room for `batch` sequences of up to `max_len` tokens, written at most `max_step` at a time."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        batch: int,
        max_len: int,
        max_step: int,
        page_size: int = PAGE_SIZE,
    ) -> None:
        if min(batch, max_len, max_step, page_size) < 1:
            raise UsageError(f"a cache of batch {batch}, max_len {max_len}, max_step {max_step} holds nothing")
        self.batch, self.max_len, self.max_step, self.page_size = batch, max_len, max_step, page_size
        table_pages = -(-max_len // page_size)
        ring_pages = min(table_pages, -(-(config.window + max_step + 1) // page_size))
        per_sequence = {"full": table_pages, "sliding": ring_pages}
        self.groups = {
            kind: _group(batch, table_pages, pages, page_size, ops.device) for kind, pages in per_sequence.items()
        }
        self._pages: dict[int, KVPages] = {}
        for layer in config.layers:
            if layer.owns_kv:
                shape = (self.groups[layer.kind].num_pages, layer.num_kv_heads, page_size, layer.head_dim)
                # Zeros, not garbage: a masked key times weight 0 must not be NaN.
                self._pages[layer.index] = KVPages(
                    torch.zeros(shape, dtype=ops.dtype, device=ops.device),
                    torch.zeros(shape, dtype=ops.dtype, device=ops.device),
                )

    def pages(self, layer: LayerConfig) -> KVPages:
        """The pool that `layer` of the target reads: its own, or that of the layer it shares."""
        return self._pages[layer.kv_source]

    def slots(self, positions: Tensor) -> dict[str, Tensor]:
        """slot_mapping [batch * n] int64, by layer kind, of positions [batch, n] int64; computed on the device.

        Raises nothing: the caller keeps positions below max_len.
        """
        page, row = positions // self.page_size, positions % self.page_size
        return {kind: (group.first_slots.gather(1, page) + row).flatten() for kind, group in self.groups.items()}

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pages in self._pages.values() for t in (pages.k, pages.v))


def _group(batch: int, table_pages: int, pages: int, page_size: int, device: torch.device) -> Group:
    """Sequence s owns pages s * pages to (s + 1) * pages - 1 of the pool, repeated along its table."""
    logical = torch.arange(table_pages, dtype=torch.int32) % pages
    first = torch.arange(batch, dtype=torch.int32)[:, None] * pages
    table = (first + logical).to(device)
    return Group(table, table.long() * page_size, batch * pages)
