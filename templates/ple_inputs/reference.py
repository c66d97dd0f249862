"""The two parts of the per-layer inputs in torch, each step computed in fp32 and rounded where the model rounds.

Source: Gemma4TextModel.get_per_layer_inputs and project_per_layer_inputs in transformers 5.22, modeling_gemma4.py: the
product with per_layer_model_projection_scale, the norm, the scaled embedding, the sum and the product with
per_layer_input_scale are a tensor of the model's dtype each; the scale of the embedding is cast to it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import rms_norm, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.ple_inputs.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, num_layers, width] in fp32, holding values of dtype; NaN for ids outside the table."""
    p, ids = problem, inputs["ids"]
    shape = p.num_tokens, p.num_layers, p.width
    context = rounded(inputs["context"].float() * inputs["context_scale"], p.dtype).view(shape)
    normed = rounded(rms_norm(context, inputs["norm_weight"], inputs["eps"]), p.dtype)
    valid = (ids >= 0) & (ids < p.vocab_size)
    rows = inputs["table"][ids.clamp(0, p.vocab_size - 1)].float().view(shape)
    scale = rounded(torch.tensor(inputs["table_scale"], device=ids.device), p.dtype)
    tokens = torch.where(valid[:, None, None], rounded(rows * scale, p.dtype), float("nan"))
    return {"out": rounded(rounded(normed + tokens, p.dtype) * 2.0**-0.5, p.dtype)}


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the norm, absolute in the sum, whose terms may cancel, and of the sum; all else is exact."""
    return tolerance_of_flips(problem.dtype, 2.0, 2)
