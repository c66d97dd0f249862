"""Shapes that tests, bench and tuner share: edges first, then the models' own frames."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.mel_conv.op import mel_conv
from kerngen.templates.mel_conv.spec import NUM_TAPS, Problem


def case_for(problem: Problem, **options: Any) -> Case:
    """options: sounds, of which there is one if it is not said, each one frame shorter than the one before; odd: frames
    are one fewer than twice the rows.
    """
    p = problem
    words = (f"m{p.mels}", f"c{p.channels}", p.dtype, *(f"{n}{v}" for n, v in options.items()), f"t{p.num_tokens}")
    return Case("_".join(words), p, p.mels + p.channels + p.num_tokens, options)


CASES = (
    *(
        case_for(Problem(mels, channels, dtype, t), **options)
        for dtype in ("bf16", "fp16")
        for mels, channels, t, options in (
            (1, 8, 1, {}),
            (5, 8, 3, {"odd": 1}),  # columns that no warp divides into
            (6, 16, 8, {"sounds": 4}),
            (12, 256, 5, {"odd": 1}),
            (33, 32, 4, {}),
            (128, 128, 1, {"odd": 1}),
            (128, 128, 5, {}),
            (128, 128, 14, {"sounds": 2, "odd": 1}),
        )
    ),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. frames normal, about -3 as logarithms are, and zero behind a sound's end; out is NaN."""
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    sounds = case.options.get("sounds", 1)
    num_frames = 2 * p.num_tokens // sounds - case.options.get("odd", 0)
    frames = draw.normal(sounds, num_frames, p.mels, dtype="fp32", mean=-3.0, std=2.0)
    lengths = torch.tensor([max(num_frames - i, 1) for i in range(sounds)], dtype=torch.float32, device=device)
    frames[torch.arange(num_frames, device=device) >= lengths[:, None]] = 0.0
    return {
        "out": poisoned(sounds, p.num_tokens // sounds, p.columns, p.channels, dtype=p.dtype, device=device),
        "frames": frames.flatten(0, 1),
        "taps": draw.normal(NUM_TAPS, p.channels, dtype=p.dtype, std=1 / 3),
        "norm_weight": draw.normal(p.channels, dtype=p.dtype, mean=1.0, std=0.25),
        "lengths": lengths,
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
        "num_frames": num_frames,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(mel_conv, case, inputs)
