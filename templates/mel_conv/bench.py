"""What mel_conv is timed on, and torch's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm

from kerngen.templates.kernel import Case
from kerngen.templates.mel_conv.cases import case_for
from kerngen.templates.mel_conv.spec import Problem

# Of a sound of 2, 30 and 120 s.
BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (100, 1500, 6000))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: convolution, norm, ReLU, and what is no sound zeroed."""
    p: Problem = case.problem
    kernel = inputs["taps"].t().reshape(p.channels, 1, 3, 3).contiguous(memory_format=torch.channels_last)
    num_frames = inputs["num_frames"]

    def run() -> Tensor:
        x = inputs["frames"].to(kernel.dtype).view(-1, 1, num_frames, p.mels)
        x = conv2d(x, kernel, stride=2, padding=1).permute(0, 2, 3, 1)
        x = layer_norm(x, (p.channels,), inputs["norm_weight"], eps=inputs["eps"]).relu_()
        is_sound = torch.arange(0, num_frames, 2, device=x.device) < inputs["lengths"][:, None]
        return x * is_sound[..., None, None]

    return {"torch": run}
