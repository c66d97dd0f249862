"""The paged KV cache: pools of pages, and the block tables that name them.

Every layer that owns a cache has its own pool; all layers of one kind ("full" or "sliding") share one block table,
since they hold the same positions: a page's number is the same in each of their pools. Position p of a sequence lies in
page block_table[p / page_size]. Layers that share KV own nothing.

Page 0 belongs to nobody. Whatever must not be kept is written there (rows of a batch that stand for no sequence,
positions that a sequence will never reach), so that a step needs no mask, and what is not read (pages before a
window) may be named 0. The kernels never let a key that no query sees into a result, whatever it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kerngen.errors import UsageError
from kerngen.runtime.config import LayerConfig, ModelConfig
from kerngen.runtime.ops import Ops
from kerngen.templates.common.attention.kv_formats_torch import put_scales, wipe_page
from kerngen.templates.values import KV_FORMATS, KVView

if TYPE_CHECKING:
    from kerngen.runtime.engine.page_check import PageCheck

PAGE_SIZE = 64
KINDS = ("full", "sliding")


@dataclass(frozen=True, slots=True)
class Group:
    """What layers of one kind share. block_table [batch, max_pages] int32; num_pages: the size of each layer's pool."""

    block_table: Tensor
    num_pages: int


class KVCache:
    """The pools, and tables for `batch` sequences of up to `max_len` tokens, all of whose entries name page 0.

    num_pages: of each kind, page 0 included. tables [2, batch, max_pages] int32, in the order of KINDS. check: of the
    forwards on it, None for none. density [layers, 2] int64: entries of the lists of tiles that prompts read by in each
    layer of the target, so far, and how many they would have had of all tiles; zeros where they read all keys.
    """

    check: PageCheck | None = None

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        num_pages: Mapping[str, int],
        batch: int,
        max_len: int,
        page_size: int = PAGE_SIZE,
        drafter_layers: Sequence[LayerConfig] = (),
    ) -> None:
        """drafter_layers: of a drafter, that have pools of their own under the same tables, all of one shape, one
        behind the other. Raises UsageError.
        """
        if min(batch, max_len, page_size, *(num_pages[kind] for kind in KINDS)) < 1:
            raise UsageError(f"a cache of batch {batch}, max_len {max_len}, {dict(num_pages)} pages holds nothing")
        self.page_size = page_size
        self.num_pages = {kind: num_pages[kind] for kind in KINDS}
        self.set_tables(torch.zeros(2, batch, -(-max_len // page_size), dtype=torch.int32, device=ops.device))
        self._pages: dict[int, KVView] = {}
        self._means: dict[int, Tensor] = {}
        self.density = torch.zeros(len(config.layers), 2, dtype=torch.int64, device=ops.device)
        sparse = config.sparse
        if sparse is not None and page_size % sparse.mean_keys:
            raise UsageError(f"sparse prefill keeps a mean of each {sparse.mean_keys} keys of a page, and pages of "
                             f"{page_size} tokens have no whole ones", hint=f"pages of {PAGE_SIZE} tokens")  # fmt: skip

        def allocated(*layers: LayerConfig) -> KVView:
            shapes = {(len(layers) * self.num_pages[x.kind], x.num_kv_heads, page_size, x.head_dim) for x in layers}
            if len(shapes) > 1:
                raise UsageError(f"the layers of a drafter have pages of one shape, not of {sorted(shapes)}")
            form = KV_FORMATS[config.kv_format_of(layers[0])]
            whole = form.allocate(shapes.pop(), ops.dtype, ops.device)
            for x, made in zip(layers, whole.chunk(len(layers)), strict=True):
                if x.index in self._pages:
                    raise UsageError(f"two layers of a cache have the index {x.index}")
                self._pages[x.index] = made
                if form.is_static and not made.k_cache.is_meta:
                    put_scales(made, *x.kv_scales)
            return whole

        for layer in config.layers:
            if layer.owns_kv:
                made = allocated(layer).k_cache
                if sparse is not None and layer.kind == "full":
                    of_page = (*made.shape[:2], page_size // sparse.mean_keys, layer.head_dim)
                    self._means[layer.index] = torch.zeros(of_page, dtype=ops.dtype, device=ops.device)
        self._drafter_pages = allocated(*drafter_layers) if drafter_layers else None

    @staticmethod
    def whole(
        config: ModelConfig, ops: Ops, *, batch: int, max_len: int, page_size: int = PAGE_SIZE,
        last: int | None = None, drafter_layers: Sequence[LayerConfig] = (),
    ) -> KVCache:  # fmt: skip
        """A cache whose sequences own all the pages that max_len tokens need: nothing to allocate, nothing to free.

        last: tokens, the newest ones, that sliding layers keep, as an engine has them; None for all. The entries before
        them name their pages once more.
        """
        pages = -(-max_len // page_size)
        own = dict.fromkeys(KINDS, pages)
        if last is not None:
            own["sliding"] = min(pages, -(-last // page_size) + 1)
        cache = KVCache(config, ops, num_pages={kind: batch * n + 1 for kind, n in own.items()}, batch=batch,
                        max_len=max_len, page_size=page_size, drafter_layers=drafter_layers)  # fmt: skip
        sequences, entries = torch.arange(batch)[:, None], torch.arange(pages)
        for table, n in zip(cache.tables, (own[kind] for kind in KINDS), strict=True):
            table.copy_(1 + sequences * n + entries % n)
        return cache

    def set_tables(self, tables: Tensor) -> None:
        self.tables = tables
        self.groups = {kind: Group(tables[i], self.num_pages[kind]) for i, kind in enumerate(KINDS)}

    def with_tables(self, tables: Tensor) -> KVCache:
        """The same pools under other tables [2, batch, max_pages] int32."""
        other = copy.copy(self)
        other.set_tables(tables)
        return other

    def rows(self, count: int) -> KVCache:
        """The same pools for the first `count` sequences."""
        return self.with_tables(self.tables[:, :count])

    def pages(self, layer: LayerConfig) -> KVView:
        """The pool that `layer` of the target reads: its own, or that of the layer it shares."""
        return self._pages[layer.kv_source]

    def drafter_pages(self) -> KVView:
        """The pools of a drafter's layers as one: the pages of each behind those of the layer before. Raises TypeError
        where there is no such drafter.
        """
        if self._drafter_pages is None:
            raise TypeError("a cache without drafter_layers has no pages of a drafter")
        return self._drafter_pages

    def means(self, layer: LayerConfig) -> Tensor | None:
        """[num_pages, num_kv_heads, page_size / mean_keys, head_dim]: of the keys that `layer` of the target reads,
        where prompts choose by them what they read; else None.
        """
        return self._means.get(layer.kv_source)

    def slots_of(self, rows: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """slot_mapping [T] int64, by layer kind, of positions [T] int64 of the sequences rows [T] int64.

        Computed on the device, and raises nothing: the caller keeps positions below max_len. A decode step asks
        `Ops.decode_inputs` instead.
        """
        pages = self.tables[:, rows, positions // self.page_size]
        slots = torch.add(positions % self.page_size, pages, alpha=self.page_size)  # [2, T] int64
        return {kind: slots[i] for i, kind in enumerate(KINDS)}

    def wipe(self) -> None:
        """Zeros to page 0, which may hold NaN that a sequence left there."""
        for pages in self._pages.values():
            wipe_page(pages, 0)
        for means in self._means.values():
            means[0] = 0

    @property
    def num_bytes(self) -> int:
        means = sum(means.numel() * means.element_size() for means in self._means.values())
        return means + sum(pages.num_bytes for pages in self._pages.values())
