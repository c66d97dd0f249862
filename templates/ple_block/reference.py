"""The model's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py, from post_feedforward_layernorm on.
Each norm, each dense product, the activation, its product with the per-layer input, the sums and the product with
layer_scalar are a tensor of the model's dtype; the stream alone may be kept in fp32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.rows.torch_rows import add_normed, add_per_layer, rms_norm, rounded, tolerance_of_flips
from kerngen.templates.kernel import Tolerance
from kerngen.templates.ple_block.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """residual_out and out: [num_tokens, hidden] in fp32, holding values of their dtypes."""
    p, eps = problem, inputs["eps"]
    stream = add_normed(inputs["residual"], inputs["h"], inputs["ffn_weight"], eps, p.dtype, p.residual_dtype)
    stream = add_per_layer(
        stream, inputs["ple"][:, : p.width], inputs["gate"], inputs["projection"], inputs["post_weight"], eps, p.dtype,
        p.residual_dtype,
    )  # fmt: skip
    stream = rounded(stream * inputs["layer_scalar"].float(), p.residual_dtype)
    return {"residual_out": stream, "out": rounded(rms_norm(stream, inputs["next_weight"], eps), p.dtype)}


def tolerance(problem: Problem) -> Tolerance:
    """Flips of both norms, absolute in sums whose terms may cancel, of what the products pass on, and of the result."""
    return tolerance_of_flips(problem.dtype, 2.0, 4)
