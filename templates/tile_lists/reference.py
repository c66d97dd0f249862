"""Which tiles are kept, in torch: common/attention/tile_lists_torch.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.attention.tile_lists_torch import lists_of_scores
from kerngen.templates.kernel import Tolerance
from kerngen.templates.tile_lists.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """counts, lists and density in float64; -1 behind a list's end."""
    i = inputs
    counts, lists, added = lists_of_scores(
        i["scores"], problem.num_kv_heads, i["kv_lens"], i["cu_seqlens_q"], i["log2_alpha"], i["num_first"],
        i["num_last"], i["dense_from"],
    )  # fmt: skip
    density = i["density"].double() + torch.tensor(added, dtype=torch.float64, device=counts.device)
    return {"counts": counts.double(), "lists": lists.double(), "density": density}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "numbers of tiles are exact, of scores that are given")
