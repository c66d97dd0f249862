"""The layer's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py, from self_attn's o_proj on, and the
next layer's input_layernorm and projections. Every product, norm, activation and sum is a tensor of the model's dtype;
the stream alone may be kept in fp32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.common.row_torch import gelu_gated, rms_norm, rounded, tolerance_of_flips
from kerngen.templates.common.w4_pack import dequantize, separate, unpack
from kerngen.templates.decode_chain.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """residual_out [hidden] and out [qkv], or [hidden], in fp32, holding values of their dtypes."""
    p, eps = problem, inputs["eps"]

    def product(x: Tensor, name: str, gated: bool = False) -> Tensor:
        packed, scales = unpack(inputs[f"{name}_packed"], inputs[f"{name}_scales"])
        w = dequantize(separate(packed), separate(scales)) if gated else dequantize(packed, scales)
        return rounded(x.float() @ w.T, p.dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        return rounded(rms_norm(x, inputs[name], eps), p.dtype)

    def add_normed(stream: Tensor, x: Tensor, name: str) -> Tensor:
        return rounded(stream.float() + norm(x, name), p.residual_dtype)

    stream = add_normed(inputs["residual"], product(inputs["attended"], "out"), "post_attention_weight")
    gate, up = product(norm(stream, "pre_ffn_weight"), "gate_up", gated=True).chunk(2, dim=-1)
    stream = add_normed(stream, product(gelu_gated(gate, up, p.dtype), "down"), "post_ffn_weight")
    stream = rounded(stream * inputs["layer_scalar"].float(), p.residual_dtype)
    x = norm(stream, "next_weight")
    return {"residual_out": stream, "out": product(x, "qkv") if p.qkv else x}


def tolerance(problem: Problem) -> Tolerance:
    """cases.py keeps every row near a deviation of 1. A flip in a row that is multiplied next reaches every output of
    the product, each by its share of the row's size: small beside a flip of the output itself, and there are three such
    rows; the sums of two norms flip on their own, in values of up to 4.
    """
    return tolerance_of_flips(problem.dtype, 4.0, 4)
