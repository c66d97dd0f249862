"""The model's steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4AudioSubSampleConvProjectionLayer of transformers 5.22, modeling_gemma4.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad

from kerngen.templates.common.rows.torch_rows import UNIT, rounded
from kerngen.templates.kernel import Tolerance
from kerngen.templates.mel_conv.spec import Problem


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out in the shape that it has, in fp32, holding values of dtype. Products and sums tap by tap: convolutions of
    cuDNN may round what they take.
    """
    p, num_frames = problem, inputs["num_frames"]
    frames = rounded(inputs["frames"], p.dtype).view(-1, num_frames, p.mels)
    half = (num_frames + 1) // 2
    wide = pad(frames, (1, 2, 1, 2))
    y = sum(
        tap.float() * wide[:, i // 3 : i // 3 + 2 * half : 2, i % 3 : i % 3 + 2 * p.columns : 2, None]
        for i, tap in enumerate(inputs["taps"])
    )
    y = layer_norm(rounded(y, p.dtype), (p.channels,), inputs["norm_weight"].float(), eps=inputs["eps"]).relu()
    is_sound = 2 * torch.arange(half, device=y.device) < inputs["lengths"][:, None]
    return {"out": rounded(y * is_sound[..., None, None], p.dtype).view(inputs["out"].shape)}


def tolerance(problem: Problem) -> Tolerance:
    """A flip of the convolution, which the norm makes a unit of values up to 4, and one of the result."""
    unit = 2 * UNIT[problem.dtype]
    return Tolerance(4 * unit, unit, f"two flipped roundings to {problem.dtype} of values up to 4")
