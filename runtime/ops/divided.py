"""What both backends do with an output head whose rows are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kerngen.runtime.executors.collectives import Collectives
from kerngen.runtime.world import Span, World, head_rows


def whole_logits(ranks: Collectives, logits: Tensor, rows: Span | None) -> Tensor:
    """[n, vocab] of all ranks' logits [n, rows.size]; rows None for a head that is whole."""
    if rows is None:
        return logits
    size = ranks.world.size
    sizes = [head_rows(rows.whole, World(rank, size)).size for rank in range(size)]
    widest = max(sizes)
    if min(sizes) == widest:
        return ranks.all_gather(logits, 1)
    parts = ranks.all_gather(F.pad(logits, (0, widest - rows.size)), 1).split(widest, 1)
    return torch.cat([part[:, :count] for part, count in zip(parts, sizes, strict=True)], 1)


def best_token(ranks: Collectives, values: Tensor, ids: Tensor, rows: Span) -> Tensor:
    """The token [n] of the greatest of all ranks' values [n] fp32; ids [n]: each rank's, counted in its own rows."""
    return ranks.best_of_ranks(values, ids + rows.start)[1]
