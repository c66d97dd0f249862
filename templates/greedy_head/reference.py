"""The dense product in fp32 torch, rounded, and its arg-max. Codes are not looked at: they must make no difference.

Source: the lm_head of Gemma4ForCausalLM in transformers 5.22, a linear layer in the model's dtype, and greedy
generation, which takes the arg-max of what it gives; the cap on logits between them is increasing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rounded
from kerngen.templates.common.w4.pack import dequantize, unpack
from kerngen.templates.greedy_head.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """ids [num_tokens] in fp32 (an id below 2^24 is exact)."""
    x, weight = inputs["x"].float(), inputs["weight"]
    if problem.is_packed:
        weight = rounded(dequantize(*unpack(weight, inputs["table_scales"])), problem.dtype)
    weight = weight.float()
    logits = rounded(x @ weight.T, problem.dtype)
    wanted = ~inputs["bounds"][: problem.vocab_size].isnan().any(-1)
    logits = torch.where(wanted, logits, -float("inf"))
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    return {"ids": torch.where(x.isfinite().all(-1), first, 0).float()}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "cases hold small multiples of 1/8, which fp32 sums exactly in any order")
