"""The check in torch's integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.check_pages.spec import ENTRY_BITS, LENGTH, NOBODY, NULL_PAGE, PAGE, SHARED, SLOT, Problem
from kerngen.templates.kernel import Tolerance
from kerngen.templates.values import PageLimits, PagesInUse


def checked_pages(pages: PagesInUse, limits: PageLimits, writers: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
    """record [6] int64 and writers [2, P] int32 as spec.py says, both new. The torch backend computes it so, too."""
    tables, kv_lens, size = pages.tables.long(), pages.kv_lens, limits.page_size
    _, batch, max_pages = tables.shape
    firsts, counts = pages.cu_seqlens[:-1].long(), pages.cu_seqlens.diff().long()
    starts, longest = kv_lens - counts, min(limits.max_kv_len, max_pages * size)
    sound = (counts >= 0) & (starts >= 0) & (kv_lens <= longest)
    rows = torch.arange(batch, device=tables.device)
    num_pages = torch.tensor([limits.num_full_pages, limits.num_sliding_pages], device=tables.device)[:, None, None]
    lookback = torch.tensor([longest, limits.lookback], device=tables.device)[:, None, None]

    begins = torch.arange(max_pages, device=tables.device) * size  # of each entry's positions
    used = sound[:, None] & (begins < kv_lens[:, None])  # [B, M]
    read = begins + size > (starts[:, None] - lookback).clamp(min=0)  # [2, B, M]
    written = used & (begins + size > starts[:, None]) & (counts > 0)[:, None]
    is_page = (tables >= 0) & (tables < num_pages)
    own = is_page & (tables > 0)
    known = torch.where(own, tables, 0)  # what may be an index
    by = torch.where(own & written, limits.first_row + rows[:, None], NOBODY).int()
    writers = writers.scatter_reduce(1, known.flatten(1), by.flatten(1), "amin")
    writer = writers.gather(1, known.flatten(1)).view(known.shape)

    tokens = torch.arange(pages.slots.shape[1], device=tables.device)
    row = torch.bucketize(tokens, pages.cu_seqlens[1:].long(), right=True).clamp(max=batch - 1)
    positions = (starts[row] + tokens - firsts[row]).clamp(0, max_pages * size - 1)
    slots = tables[:, row, positions // size] * size + positions % size  # [2, T]

    at, entries = rows[:, None], torch.arange(max_pages, device=tables.device)
    others = own & (writer != NOBODY) & (writer != limits.first_row + at)
    found = (  # kind, what is wrong, and of that row, entry, value and bound
        (LENGTH, torch.stack((~sound, torch.zeros_like(sound))), rows, 0 * rows, kv_lens, 0 * rows + longest),
        (PAGE, used & ~is_page, at, entries, tables, num_pages),
        (NULL_PAGE, used & read & (tables == 0) & (begins < starts[:, None]), at, entries, tables, num_pages),
        (SHARED, used & read & others, at, entries, tables, writer),
        (SLOT, sound[row] & (pages.slots != slots), row, positions, pages.slots, slots),
    )
    if int(record[0]):
        return record.clone(), writers
    for kind, wrong, *columns in found:
        if bool(wrong.any()):
            row, entry, value, bound = (c.expand(wrong.shape)[wrong] for c in columns)
            pool = wrong.nonzero()[:, 0]
            least = ((row * 2 + pool << ENTRY_BITS) + entry).argmin()
            fields = (torch.full_like(row, kind), row + limits.first_row, pool, entry, value, bound)
            return torch.stack([field[least] for field in fields]), writers
    return torch.zeros_like(record), writers


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """record [6] and writers [2, P] in fp64, which holds all of them exactly."""
    pages = PagesInUse(*(inputs[name] for name in ("tables", "kv_lens", "cu_seqlens", "slots")))
    limits = PageLimits(**{name: inputs[name] for name in PageLimits.__dataclass_fields__})
    record, writers = checked_pages(pages, limits, inputs["writers"], inputs["record"])
    return {"record": record.double(), "writers": writers.double()}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "integers")
