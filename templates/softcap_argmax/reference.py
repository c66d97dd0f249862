"""The cap and the arg-max in torch, rounded where the model's arithmetic on logits of that dtype rounds.

Source: Gemma4ForCausalLM.forward in transformers 5.22, modeling_gemma4.py: logits / cap, tanh, * cap, each a tensor of
the logits' dtype; greedy generation then takes the arg-max of that in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.rows.torch_rows import UNIT, rounded
from kerngen.templates.kernel import Tolerance
from kerngen.templates.softcap_argmax.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """ids [num_tokens] and, with write_capped, capped [num_tokens, vocab_size], in fp32 (an id below 2^24 is exact)."""
    p = problem
    logits, step = inputs["logits"].float(), p.logits_dtype if p.round_steps else "fp32"
    x = logits
    if p.has_cap:
        x = rounded(rounded(torch.tanh(rounded(x / inputs["cap"], step)), step) * inputs["cap"], step)
    # The first NaN, or else the first place of the maximum; in fp32 tanh of a large logit is 1, of a larger one too.
    y = logits if step == "fp32" else x
    greatest = torch.where(y.isnan().any(-1, keepdim=True), y.isnan(), y == y.amax(-1, keepdim=True))
    results = {"ids": greatest.int().argmax(-1).float()}
    if p.write_capped:
        results["capped"] = x
    return results


def tolerance(problem: Problem) -> Tolerance:
    """Absolute and below 1/2, so that ids must be exact; capped values lie within 30."""
    if not problem.has_cap:
        return Tolerance(0.0, 0.0, "a choice, no arithmetic")
    step = problem.logits_dtype if problem.round_steps else "fp32"
    return Tolerance(
        30 * 2 * UNIT[step] + 1e-5, 0.0, f"one flipped rounding to {step} of values up to 30; tanh in fp32"
    )
