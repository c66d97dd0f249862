"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case
from kerngen.templates.ple_inputs.spec import Problem


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    names = [f"l{p.num_layers}_w{p.width}_v{p.vocab_size}_{p.dtype}", *options, f"t{p.num_tokens}"]
    return Case("_".join(names), p, p.num_layers * p.width + p.num_tokens, options)


def _cases(num_layers: int, width: int, vocab_size: int, *tokens: int, **options: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(num_layers, width, vocab_size, d, t), **options) for d in ("bf16", "fp16") for t in tokens
    )


CASES = (
    *_cases(1, 8, 3, 1, 5, 1000),  # one vector a slice: 31 lanes idle
    *_cases(7, 16, 96, 1, 9, bad_ids=True),
    *_cases(3, 264, 100, 7, 33, bad_ids=True),  # a second vector for one lane
    *_cases(2, 2048, 10, 3),
    *_cases(5, 256, 40, 6, zeros=True),  # eps alone: zeros, not NaN
    *_cases(35, 256, 1000, 1, 2, 8, 65),
    *_cases(42, 256, 500, 1, 4, 129),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. ids hold the first and the last row; bad_ids adds ones just and far outside, as many as there is
    room for; zeros: a context of zeros. Both parts of the sum are about 1. out is poison.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    columns = p.num_layers * p.width
    ids = draw.integers(0, p.vocab_size, p.num_tokens)
    ids[-1], ids[0] = 0, p.vocab_size - 1
    if case.options.get("bad_ids"):
        ids[1:5] = torch.tensor([-1, p.vocab_size, -(2**63), 2**63 - 1], device=device)[: p.num_tokens - 1]
    std = 0.0 if case.options.get("zeros") else 40.0
    return {
        "out": poisoned(p.num_tokens, p.num_layers, p.width, dtype=p.dtype, device=device, value=3e4),
        "ids": ids,
        "table": draw.normal(p.vocab_size, columns, dtype=p.dtype, std=p.width**-0.5),
        "context": draw.normal(p.num_tokens, columns, dtype=p.dtype, std=std),
        "norm_weight": draw.normal(p.width, dtype=p.dtype, mean=1.0, std=0.25),
        "table_scale": p.width**0.5,
        "context_scale": 1536**-0.5,
        "eps": 1e-6,
        "num_tokens": p.num_tokens,
    }
