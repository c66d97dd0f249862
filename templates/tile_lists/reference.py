"""Which tiles are kept, in torch: common/attention/tile_lists_torch.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.attention.tile_lists import query_blocks
from kerngen.templates.common.attention.tile_lists_torch import as_lists, kept_tiles
from kerngen.templates.kernel import Tolerance
from kerngen.templates.tile_lists.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """counts, lists and density in float64; -1 behind a list's end."""
    p, density = problem, inputs["density"].double().clone()
    counts = torch.zeros_like(inputs["counts"], dtype=torch.float64)
    lists = torch.full_like(inputs["lists"], -1, dtype=torch.float64)
    begins = inputs["cu_seqlens_q"].tolist()
    q_lens = [end - begin for begin, end in pairwise(begins)]
    for at, s, first, count in query_blocks(q_lens):
        position = int(inputs["kv_lens"][s]) - q_lens[s] + first
        kept = kept_tiles(
            inputs["scores"][at], position, count, p.num_kv_heads, inputs["log2_alpha"], inputs["num_first"],
            inputs["num_last"], int(inputs["dense_from"][s]),
        )  # fmt: skip
        counts[at], found = as_lists(kept)
        lists[at, :, : found.shape[-1]] = found.double()
        density[0] += kept.sum()
        density[1] += kept.numel()
    return {"counts": counts, "lists": lists, "density": density}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "numbers of tiles are exact, of scores that are given")
