"""Shared parts of references, ops, cases and benches: dtypes, roundings, poisoned outputs, tolerances."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kerngen.errors import ProblemError
from kerngen.templates.kernel import Tolerance

TORCH_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _Names(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        raise ProblemError(f"{dtype} is not one of: {', '.join(map(str, self))}")


DTYPE_NAME = _Names({dtype: name for name, dtype in TORCH_DTYPE.items()})
DTYPE_PAIRS = (("bf16", "bf16"), ("fp16", "fp32"))  # of the activations and the residual stream (or logits), in cases
# Unit roundoff: half the distance from 1 to the next number.
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor beside `like`, in its dtype unless one is given: what an op returns.

    Not like.new_empty: on the meta device, where workloads are recorded, that takes five times as long.
    """
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def rounded(x: Tensor, dtype: str) -> Tensor:
    """x to the nearest values of `dtype`, held in fp32."""
    return x.to(TORCH_DTYPE[dtype]).float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * (mean(x^2) + eps)^(-1/2) * weight over the last dim, all of it in fp32 and unrounded.

    Source: Gemma4RMSNorm in transformers 5.22, modeling_gemma4.py; the weight is used as it is, not 1 + weight.
    """
    x = x.float()
    x = x * torch.pow(x.pow(2).mean(-1, keepdim=True) + eps, -0.5)
    return x if weight is None else x * weight.float()


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, num_rotated_pairs: int, dtype: str) -> Tensor:
    """x [num_tokens, heads, head_dim], values of `dtype` in fp32, turned by positions [num_tokens] * inv_freq.

    Returns fp32 values of `dtype`: angles, sine and cosine in fp32, cast to it; two products and a sum, each rounded.
    Source: Gemma4TextRotaryEmbedding.forward and apply_rotary_pos_emb in transformers 5.22, modeling_gemma4.py.
    """
    freqs = torch.where(torch.arange(len(inv_freq), device=x.device) < num_rotated_pairs, inv_freq, 0.0)
    angles = positions.float()[:, None] * freqs
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    cos, sin = rounded(angles.cos(), dtype), rounded(angles.sin(), dtype)
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return rounded(rounded(x * cos, dtype) + rounded(turned * sin, dtype), dtype)


def gelu_gated(gate: Tensor, up: Tensor, dtype: str) -> Tensor:
    """gelu_tanh(gate) * up in fp32, the activation and the product rounded to `dtype`.

    Source: Gemma4TextMLP.forward in transformers 5.22, modeling_gemma4.py; the activation is gelu_pytorch_tanh.
    """
    return rounded(rounded(gelu(gate.float(), approximate="tanh"), dtype) * up.float(), dtype)


def silu_gated(gate: Tensor, up: Tensor, dtype: str) -> Tensor:
    """silu(gate) * up, else as gelu_gated. Source: Qwen3MLP.forward in transformers 5.22."""
    return rounded(rounded(silu(gate.float()), dtype) * up.float(), dtype)


GATED = {"gelu_tanh": gelu_gated, "silu": silu_gated}  # by activation (common/rows/spec.py)


def add_normed(stream: Tensor, x: Tensor, weight: Tensor, eps: float, dtype: str, residual_dtype: str) -> Tensor:
    """stream + norm(x; weight) in fp32: the norm rounded to `dtype`, the sum to `residual_dtype`."""
    return rounded(stream.float() + rounded(rms_norm(x, weight, eps), dtype), residual_dtype)


def add_per_layer(
    stream: Tensor, ple: Tensor, gate: Tensor, projection: Tensor, post_weight: Tensor, eps: float, dtype: str,
    residual_dtype: str,
) -> Tensor:  # fmt: skip
    """stream [T, hidden] + norm((gelu_tanh(stream gate^T) * ple) projection^T; post_weight), rounded as add_normed.

    ple [T, width], gate [width, hidden], projection [hidden, width]. Source: Gemma4TextDecoderLayer.forward in
    transformers 5.22, modeling_gemma4.py: each product, the activation and what it multiplies is a tensor of `dtype`.
    """
    gated = gelu_gated(rounded(rounded(stream, dtype) @ gate.float().T, dtype), ple, dtype)
    return add_normed(stream, rounded(gated @ projection.float().T, dtype), post_weight, eps, dtype, residual_dtype)


def poisoned(*shape: int, dtype: str, device: torch.device | str, value: float = float("nan")) -> Tensor:
    """A tensor of NaN, or of `value` where NaN is a right answer: what a kernel does not write stays visible."""
    return torch.full(shape, value, dtype=TORCH_DTYPE[dtype], device=device)


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int, device: torch.device | str) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: str, mean: float = 0.0, std: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=self._generator, device=self.device)
        return (mean + std * x).to(TORCH_DTYPE[dtype])

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in low..high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def permutation(self, count: int) -> Tensor:
        """int64 0..count - 1, shuffled."""
        return torch.randperm(count, generator=self._generator, device=self.device)


def tolerance_of_flips(dtype: str, magnitude: float, flips: int) -> Tolerance:
    """A reference that rounds where the kernel rounds differs only where a sum in another order flips a rounding.

    Each flip is one unit in the last place of a value of at most `magnitude`: 2 * UNIT of its own size.
    """
    unit = 2 * UNIT[dtype] * flips
    return Tolerance(unit * magnitude, unit, f"{flips} flipped roundings to {dtype} of values up to {magnitude:g}")
