"""Shapes that tests, bench and tuner share: every edge of M, N and K first, then the models' own."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.dense_gemv.op import dense_gemv
from kerngen.templates.dense_gemv.spec import Problem
from kerngen.templates.kernel import Case


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    name = "_".join([f"{p.n}x{p.k}", p.dtype, *options.values(), f"m{p.num_tokens}"])
    return Case(name, p, p.n + p.k + p.num_tokens, options)


_BOTH = ("bf16", "fp16")


def _cases(n: int, k: int, *tokens: int, dtypes: tuple[str, ...] = _BOTH, **options: Any) -> tuple[Case, ...]:
    return tuple(case_for(Problem(n, k, d, m), **options) for d in dtypes for m in tokens)


CASES = (
    *_cases(8, 8, 1, 16),  # half of a fragment's rows, one of a step's four chunks
    *_cases(16, 32, 3),  # exactly one fragment and step
    *_cases(24, 40, 2, 9),  # nothing divides
    *_cases(200, 1000, *range(1, 17), dtypes=("bf16",)),
    *_cases(1544, 264, 1, 7, 8, 9, 15),
    *_cases(136, 4104, 5, 12),  # few rows, many columns: blocks share them
    *_cases(128, 2816, 1, 8, 16),  # the 26B's router
    *_cases(256, 1536, 1, 4),  # per-layer gate and projection of E2B
    *_cases(1536, 256, 1, 4),
    *_cases(8960, 1536, 1, 16, dtypes=("bf16",)),
    *_cases(64, 21504, 2, 11),
    *_cases(70000, 512, 1, 13, dtypes=("bf16",)),  # many tiles a block, the last one partial
    *_cases(40000, 1032, 6, dtypes=("bf16",), kind="tail"),
    *_cases(200, 1000, 5, kind="nan"),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. W has a standard deviation of K ** -0.5, x of 1; out is NaN.

    options["kind"]: "nan" has tokens of NaN and infinities, which must not touch their neighbours; "tail" has nothing
    but zeros in all but the last eight columns and the last eight rows.
    """
    p = case.problem
    draw = Draw(case.seed, device)
    x = draw.normal(p.num_tokens, p.k, dtype=p.dtype)
    w = draw.normal(p.n, p.k, dtype=p.dtype, std=p.k**-0.5)
    match case.options.get("kind", ""):
        case "nan":
            x[0, 5], x[2, -1] = float("nan"), float("inf")
        case "tail":
            x[:, :-8] = 0
            w[:-8] = 0
    return {
        "out": poisoned(p.num_tokens, p.n, dtype=p.dtype, device=device),
        "x": x,
        "w": w,
        "num_tokens": p.num_tokens,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return dense_gemv, {"x": inputs["x"], "weight": inputs["w"]}
