"""The best of what ranks have, in torch: logits in fp32, rounded as those of a dense product are.

Source: the lm_head of Gemma4ForCausalLM in transformers 5.22, a linear layer in the model's dtype, the cap of its
forward, and greedy generation, which takes the arg-max; `Collectives.best_of_ranks` says what ranks make of their
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rounded
from kerngen.templates.common.w4.pack import rows_of
from kerngen.templates.exchange_best.spec import Problem
from kerngen.templates.kernel import Tolerance


def of_rank(problem: Problem, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """This rank's logits [num_tokens] fp32, and their tokens."""
    rows, table, cap = inputs["rows"], inputs["table"], inputs["cap"]
    if problem.multiplies:
        if problem.is_packed:
            weights = rounded(rows_of(table, inputs["table_scales"], rows), problem.dtype)
        else:
            weights = table[rows].float()
        values = rounded((inputs["x"].float() * weights).sum(-1), problem.dtype)
    else:
        values = table.gather(1, rows[:, None]).squeeze(1).float()
        values = cap * torch.tanh(values / cap) if cap > 0 else values
    return values, rows + inputs["first_row"]


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """As `expected_of` where every rank has these rows: what a launch gives that is its own peers (cases.py)."""
    return expected_of(problem, [inputs] * problem.ranks)


def expected_of(problem: Problem, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """ids [num_tokens] (one below 2^24 is exact) and values [num_tokens], in fp32. of_ranks: each rank's inputs."""
    return best(*(torch.stack(each) for each in zip(*(of_rank(problem, i) for i in of_ranks), strict=True)))


def best(values: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """As `expected_of`, of all ranks' logits and tokens, both [ranks, num_tokens]."""
    top = values.amax(0)  # NaN where any is
    lowest = ids.masked_fill(values != top, torch.iinfo(torch.int64).max).amin(0)
    return {"ids": torch.where(top.isfinite(), lowest, -1).float(), "values": top}


def tolerance(problem: Problem) -> Tolerance:
    """Absolute and below 1/2, so that ids must be exact."""
    if problem.multiplies:
        return Tolerance(0.0, 0.0, "cases hold small multiples of 1/8, which fp32 sums exactly in any order")
    return Tolerance(1e-5, 0.0, "tanh in fp32, of values within 30")
