"""The model's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4AudioLightConv1d and Gemma4ClippableLinear of transformers 5.22, modeling_gemma4.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import glu, pad, silu

from kerngen.templates.common.rows.torch_rows import UNIT, rms_norm, rounded
from kerngen.templates.glu_conv.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, width] in fp32, holding values of dtype."""
    p, seq_len = problem, inputs["seq_len"]
    of_x, of_norm, of_out = inputs["bounds"].tolist()
    y = rounded(glu(inputs["x"].float().clamp(*of_x)), p.dtype).view(-1, seq_len, p.width)
    wide = pad(y, (0, 0, p.num_taps - 1, 0))
    conv = sum(tap.float() * wide[:, k : k + seq_len] for k, tap in enumerate(inputs["taps"]))
    conv = rounded(conv, p.dtype).clamp(*of_norm)
    normed = rounded(rms_norm(conv, inputs["norm_weight"], inputs["eps"]), p.dtype)
    return {"out": rounded(silu(normed), p.dtype).clamp(*of_out).view(p.num_tokens, p.width)}


def tolerance(problem: Problem) -> Tolerance:
    """Flips of the GLU and of the convolution, whose terms may cancel, of up to a unit of values up to 2, and of the
    norm and the result. SiLU is no steeper than 1.1.
    """
    unit = 2 * UNIT[problem.dtype]
    return Tolerance(2 * unit, 3 * unit, f"flipped roundings to {problem.dtype} of GLU, convolution, norm and SiLU")
