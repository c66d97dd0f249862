"""Means of keys in torch: common/attention/tile_lists_torch.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.attention.attention_torch import gather_pages
from kerngen.templates.common.attention.tile_lists_torch import means_of
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.key_means.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """means in fp32; rows that nobody makes keep what they hold."""
    p, means = problem, inputs["means"].float().clone()
    per_page = p.page_size // p.mean_keys
    for table, kv_len, start in zip(inputs["block_table"], inputs["kv_lens"], inputs["starts"], strict=True):
        first, end = int(start) // p.mean_keys, int(kv_len) // p.mean_keys
        if first >= end:
            continue
        dtype = TORCH_DTYPE[p.dtype]
        keys = gather_pages(inputs["k"], table, first * p.mean_keys, end * p.mean_keys, p.kv_format, dtype, keys=True)
        made = rounded(means_of(keys, p.mean_keys), p.dtype)  # [end - first, num_kv_heads, d]
        for i in range(first, end):
            means[table[i // per_page].long(), :, i % per_page] = made[i - first]
    return {"means": means}


def tolerance(problem: Problem) -> Tolerance:
    return tolerance_of_flips(problem.dtype, 1.0, 1)
