"""Out-of-bounds pages, a debug mode: with $KERNGEN_CHECK_PAGES each forward's tables, lengths and slots are checked on
the device before anything uses them (templates/check_pages), and a step that violates one is an error.

The check is part of the forward, and so of its graph. All layers of a kind share one block table, so a forward is
checked once. Where something is wrong all tables and slots become page 0: the rest of the step touches nobody's memory,
and the host reads what was found behind it. It waits for every step, which is why this is no default.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kerngen.errors import PageError
from kerngen.runtime.cache import KINDS, KVCache
from kerngen.runtime.config import ModelConfig
from kerngen.runtime.engine.prefill_graphs import SEQUENCES, SIZES
from kerngen.runtime.ops import Ops
from kerngen.system.environment import is_set
from kerngen.templates.check_pages.spec import FIELDS, LENGTH, NOBODY, NULL_PAGE, PAGE, SHARED
from kerngen.templates.values import PageLimits, PagesInUse

if TYPE_CHECKING:
    from kerngen.runtime.engine.plan import StepPlan

VARIABLE = "KERNGEN_CHECK_PAGES"
DECODE, BLOCK, CHUNKS = "decode", "block", "chunks"  # parts of a step
DECODE_ROW = 1 << 16  # what row 0 of the decode step counts as: chunks count from 0


def is_wanted() -> bool:
    """True where KERNGEN_CHECK_PAGES is set (to anything but "" or "0")."""
    return is_set(VARIABLE)


@dataclass(frozen=True, slots=True)
class Violation:
    """What a record holds; see check_pages/spec.py."""

    kind: int
    row: int
    pool: int
    entry: int
    value: int
    bound: int


class PageCheck:
    """Of the steps of one rank, on `cache` and those made `with_tables` of it."""

    def __init__(self, ops: Ops, cache: KVCache, config: ModelConfig, most: int, block: int = 0) -> None:
        """most: tokens of a sequence in a decode step. block: rows that a drafter writes (DraftPolicy)."""
        self._ops, self._page_size, self._num_pages = ops, cache.page_size, [cache.num_pages[kind] for kind in KINDS]
        self._world = config.world
        # What the scheduler promises is what a drafter reads: positions from the window before the last token on.
        self._lookback = config.window + 1
        self._layers = [[layer.index for layer in config.layers if layer.kind == kind] for kind in KINDS]
        self._record = torch.zeros(len(FIELDS), dtype=torch.int64, device=ops.device)
        self._writers = torch.full((2, max(self._num_pages)), NOBODY, dtype=torch.int32, device=ops.device)
        self._seen: dict[str, Tensor] = {}  # by forwards of this step that were no graphs
        _, batch, max_pages = cache.tables.shape
        sizes = {DECODE: (batch, batch * most), BLOCK: (batch, batch * block), CHUNKS: (SEQUENCES, SIZES[-1])}
        self._seen_in_graphs: dict[str, Tensor] = {}  # at addresses that all graphs have
        for part, (rows, tokens) in sizes.items() if ops.supports_graphs else ():
            shapes = {
                "tables": (2, rows, max_pages),
                "kv_lens": (rows,),
                "cu_seqlens": (rows + 1,),
                "slots": (2, tokens),
            }
            for name, shape in shapes.items():
                self._seen_in_graphs[f"{part}_{name}"] = torch.zeros(shape, dtype=torch.int64, device=ops.device)

    # -- on the device

    def begin(self) -> None:
        """Before a step: nothing is known of it."""
        self._record.zero_()
        self._writers.fill_(NOBODY)
        self._seen.clear()
        for seen in self._seen_in_graphs.values():
            seen.fill_(-1)

    def decode_inputs(
        self, lengths: Tensor, cache: KVCache, q_len: int, max_kv_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Ops.decode_inputs`, checked: what is returned is within bounds, whatever `lengths` and the tables hold."""
        return self._rows_checked(DECODE, lengths, cache, q_len, max_kv_len)

    def block(self, lengths: Tensor, cache: KVCache, size: int, max_kv_len: int) -> None:
        """Checks the rows that a drafter writes and reads at `lengths` [B] and behind."""
        self._rows_checked(BLOCK, lengths, cache, size, max_kv_len + size)

    def _rows_checked(
        self, part: str, lengths: Tensor, cache: KVCache, q_len: int, max_kv_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tables = cache.tables
        most = min(max_kv_len, tables.shape[2] * cache.page_size) - q_len
        inputs = self._ops.decode_inputs(lengths.clamp(0, most), tables, q_len, cache.page_size)
        positions, kv_lens, slots = inputs
        firsts = torch.arange(0, (len(lengths) + 1) * q_len, q_len, dtype=torch.int32, device=lengths.device)
        pages = PagesInUse(tables, lengths + q_len, firsts, slots)
        return positions, kv_lens, self._checked(part, pages, max_kv_len, DECODE_ROW)

    def chunk_inputs(
        self, rows: Tensor, positions: Tensor, kv_lens: Tensor, cu_seqlens: Tensor, cache: KVCache, max_kv_len: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The kv_lens and `KVCache.slots_of` of chunks, checked: what is returned is within bounds. Arguments as of
        `Batch.ragged`.
        """
        room = cache.tables.shape[2] * cache.page_size
        slots = torch.stack(list(cache.slots_of(rows, positions.clamp(0, room - 1)).values()))
        pages = PagesInUse(cache.tables, kv_lens.long(), cu_seqlens, slots)
        checked = self._checked(CHUNKS, pages, max_kv_len, 0)
        return kv_lens.clamp(0, min(max_kv_len, room)), dict(zip(KINDS, checked, strict=True))

    def _checked(self, part: str, pages: PagesInUse, max_kv_len: int, first_row: int) -> Tensor:
        """The slots, or zeros; tables become zeros in place."""
        limits = PageLimits(
            num_full_pages=self._num_pages[0],
            num_sliding_pages=self._num_pages[1],
            page_size=self._page_size,
            lookback=self._lookback,
            max_kv_len=max_kv_len,
            first_row=first_row,
        )
        self._ops.check_pages(pages, limits, self._writers, self._record)
        self._keep(part, pages)
        is_right = self._record[0] == 0
        pages.tables.mul_(is_right)
        return pages.slots * is_right

    def _keep(self, part: str, pages: PagesInUse) -> None:
        """For the dump. A step that is captured in this one has run before: what it saw then comes first."""
        in_graph = self._record.is_cuda and torch.cuda.is_current_stream_capturing()
        for name in PagesInUse.__dataclass_fields__:
            value: Tensor = getattr(pages, name)
            if in_graph:
                self._seen_in_graphs[f"{part}_{name}"][tuple(slice(n) for n in value.shape)].copy_(value)
            else:
                self._seen.setdefault(f"{part}_{name}", value.clone())

    # -- on the host

    def raise_if_found(self, plan: StepPlan) -> None:
        """Waits for the step that `plan` was. Raises PageError where something was out of bounds, with the file that
        holds the step.
        """
        found: list[int] = self._record.tolist()
        if found[0]:
            violation = Violation(*found)
            rank = f"rank 0 of {self._world.size}: " if self._world.size > 1 and self._world.rank == 0 else ""
            raise PageError(rank + self._described(violation, plan), hint=self._dumped(violation, plan))

    def _described(self, found: Violation, plan: StepPlan) -> str:
        who = self._who(found.row, plan)
        if found.kind == LENGTH:
            return (
                f"{who}, all layers: {found.value:,} tokens are in the cache with this step's; allowed are as many as "
                f"the step has, and {found.bound:,} at most"
            )
        layers = self._layers[found.pool]
        kind = f"{KINDS[found.pool]} attention" + (f", and {len(layers) - 1} more" if len(layers) > 1 else "")
        where = f"{who}, layer {layers[0] if layers else 'none'} ({kind})"
        entry = f"{where}: entry {found.entry:,} of the block table is page {found.value:,}"
        if found.kind == PAGE:
            return f"{entry}; allowed are 0 to {found.bound - 1:,}"
        if found.kind == NULL_PAGE:
            return f"{entry}, which belongs to nobody, where tokens are read; allowed are 1 to {found.bound - 1:,}"
        if found.kind == SHARED:
            return f"{entry}, which {self._who(found.bound, plan)} writes in this step; allowed is a page of its own"
        page, entry_of = found.bound // self._page_size, found.entry // self._page_size
        return (
            f"{where}: position {found.entry:,} has slot {found.value:,}; allowed is {found.bound:,}, in the page "
            f"{page:,} that entry {entry_of:,} of the block table is"
        )

    @staticmethod
    def _who(row: int, plan: StepPlan) -> str:
        """The request that a row stands for, and where in the step."""
        if row >= DECODE_ROW:
            index, there, named = row - DECODE_ROW, plan.num_running, 0
            where = f"row {index} of the decode step"
        else:
            index, there, named = row, len(plan.chunks), plan.num_running
            where = f"chunk {index} of the prefill"
        if index >= there:
            return f"nobody ({where})"
        if named + index >= len(plan.requests):
            return where
        return f"request {plan.requests[named + index]} ({where})"

    def _dumped(self, found: Violation, plan: StepPlan) -> str:
        """Writes the step down; says where, or why not."""
        seen = {**self._seen_in_graphs, **self._seen}
        arrays: dict[str, Any] = {
            name: value.cpu().numpy() for name, value in seen.items() if bool((value != -1).any())
        }
        arrays["writers"] = self._writers.cpu().numpy()
        arrays["violation"] = np.array([getattr(found, name) for name in Violation.__dataclass_fields__])
        arrays["plan"] = np.array(plan.to_json())
        about = {"rank": self._world.rank, "ranks": self._world.size, "page_size": self._page_size,
                 "num_pages": self._num_pages, "lookback": self._lookback}  # fmt: skip
        arrays["about"] = np.array(json.dumps(about))
        try:
            number, path = tempfile.mkstemp(prefix="kerngen-pages-", suffix=".npz")
            with os.fdopen(number, "wb") as file:
                np.savez_compressed(file, **arrays)
        except OSError as e:
            return f"its tables, lengths, slots and plan could not be written: {e}; set TMPDIR to a folder with room"
        return f"its tables, lengths, slots and plan: numpy.load({path!r})"
