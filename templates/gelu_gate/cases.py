"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.gelu_gate.op import bounded_gelu_gate, gelu_gate, gelu_mul, silu_gate
from kerngen.templates.gelu_gate.spec import Problem
from kerngen.templates.kernel import Case


def case_for(problem: Problem) -> Case:
    p = problem
    words = "" if p.packed else "_strided", "_bounds" if p.has_bounds else "", "_silu" if p.activation == "silu" else ""
    return Case(f"w{p.width}_{p.dtype}{''.join(words)}_t{p.num_tokens}", p, p.width + p.num_tokens)


def _cases(width: int, *tokens: int, **fields: Any) -> tuple[Case, ...]:
    return tuple(case_for(Problem(width, d, num_tokens=t, **fields)) for d in ("bf16", "fp16") for t in tokens)


CASES = (
    *_cases(8, 1, 3, 700),  # one vector a row
    *_cases(256, 1, 7, 130, packed=False),
    *_cases(1000, 3, 129),  # 125 vectors: rows begin anywhere in a block
    *_cases(2112, 1, 5),
    *_cases(21504, 1, 2, 33),
    *_cases(1000, 1, 130, has_bounds=True),
    *_cases(256, 3, packed=False, has_bounds=True),
    *_cases(8, 3, activation="silu"),
    *_cases(10752, 16, 15, activation="silu"),  # a block of a DFlash drafter
)
_ROWS_BETWEEN = 3  # a strided `up` is one slot of this many


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. gate and up normal, gate wide enough for both tails; out is NaN.

    Not packed: `up` is [num_tokens, 3 * width], of which the first width of a row count and the rest is NaN.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    gate = draw.normal(p.num_tokens, p.width, dtype=p.dtype, std=2.0)
    gate[0, :4] = torch.tensor([0.0, -0.0, 40.0, -40.0], device=device)
    up = draw.normal(p.num_tokens, p.width, dtype=p.dtype)
    stride = 2 * p.width
    if not p.packed:
        stride = _ROWS_BETWEEN * p.width
        up = torch.cat((up, poisoned(p.num_tokens, stride - p.width, dtype=p.dtype, device=device)), dim=1)
    return {
        "out": poisoned(p.num_tokens, p.width, dtype=p.dtype, device=device),
        "gate": torch.cat((gate, up), dim=1) if p.packed else gate,
        "up": None if p.packed else up,
        "bounds": torch.tensor([[-1.0, 1.5], [-0.75, math.inf], [-1.0, 0.5]], device=device) if p.has_bounds else None,
        "num_tokens": p.num_tokens,
        "up_stride": stride,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments; None for bounds where `up` lies apart, which no op has."""
    if case.problem.has_bounds:
        found = bounded_gelu_gate, {"gate_up": inputs["gate"], "bounds": inputs["bounds"]}
        return found if case.problem.packed else None
    if case.problem.packed:
        return silu_gate if case.problem.activation == "silu" else gelu_gate, {"gate_up": inputs["gate"]}
    return gelu_mul, {"gate": inputs["gate"], "up": inputs["up"][:, : case.problem.width]}
