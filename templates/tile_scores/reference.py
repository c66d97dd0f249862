"""Estimated masses in torch: common/attention/tile_lists_torch.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.attention import tile_lists_torch
from kerngen.templates.common.attention.tile_lists import NOTHING, query_blocks
from kerngen.templates.kernel import Tolerance
from kerngen.templates.tile_scores.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """scores [num_lists, num_q_heads, max_tiles]."""
    p, scores = problem, torch.full_like(inputs["scores"], NOTHING)
    begins = inputs["cu_seqlens_q"].tolist()
    q_lens = [end - begin for begin, end in pairwise(begins)]
    per_page = p.page_size // p.mean_keys
    for at, s, first, count in query_blocks(q_lens):
        kv_len = int(inputs["kv_lens"][s])
        position = kv_len - q_lens[s] + first
        mean = torch.arange(kv_len // p.mean_keys, device=scores.device)
        pages = inputs["block_table"][s][mean // per_page].long()
        means = inputs["means"][pages, :, mean % per_page]
        queries = inputs["q"][begins[s] + first : begins[s] + first + count]
        found = tile_lists_torch.tile_scores(queries, means, position, p.mean_keys, inputs["sm_scale"])
        scores[at, :, : found.shape[1]] = found
    return {"scores": scores}


def tolerance(problem: Problem) -> Tolerance:
    """Of logarithms: a score is a sum of head_dim exact products, added in another order, and below 64 in the cases."""
    error = problem.head_dim**0.5 * 2.0**-24 * 64 + 2.0**-21
    return Tolerance(16 * error, 0.0, "fp32 sums of head_dim products in another order, and 2^x by ex2.approx")
