"""table[ids] * scale in torch. Source: Gemma4TextScaledWordEmbedding in transformers 5.22, modeling_gemma4.py: the
scale is cast to the table's dtype, and so is the product. A packed table's values are cast to it first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rounded
from kerngen.templates.common.w4.pack import rows_of
from kerngen.templates.embed.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, hidden] in fp32, holding values of dtype; NaN rows for ids outside the table."""
    p = problem
    ids = inputs["ids"]
    valid = (ids >= 0) & (ids < p.vocab_size)
    known = ids.clamp(0, p.vocab_size - 1)
    if p.is_packed:
        rows = rounded(rows_of(inputs["table"], inputs["table_scales"], known), p.dtype)
    else:
        rows = inputs["table"][known].float()
    scale = rounded(torch.tensor(inputs["scale"], device=ids.device), p.dtype)
    return {"out": torch.where(valid[:, None], rounded(rows * scale, p.dtype), float("nan"))}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "one product of two 16-bit floats, rounded once: exact")
