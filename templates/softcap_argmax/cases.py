"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, TORCH_DTYPE, Draw, poisoned
from kerngen.templates.kernel import Case
from kerngen.templates.softcap_argmax.op import argmax, softcap
from kerngen.templates.softcap_argmax.spec import Problem

CAP = 30.0


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    parts = (("no-cap", not p.has_cap), ("fp32-steps", not p.round_steps), ("write", p.write_capped))
    names = [f"v{p.vocab_size}_{p.logits_dtype}", *(n for n, on in parts if on), *options.values()]
    return Case("_".join([*names, f"t{p.num_tokens}"]), p, p.vocab_size + p.num_tokens, options)


def _cases(vocab_size: int, *tokens: int, kinds: tuple[str, ...] = ("peak",), **fields: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(vocab_size, d, ld, num_tokens=t, **fields), kind=k)
        for d, ld in DTYPE_PAIRS
        for k in kinds
        for t in tokens
    )


CASES = (
    *_cases(8, 1, 5, write_capped=True, kinds=("peak", "ties")),
    *_cases(1000, 3, 70, kinds=("first", "last", "ties", "equal"), write_capped=True),
    *_cases(2056, 3, kinds=("nan", "infinite", "ties"), has_cap=False, write_capped=True),
    *_cases(2056, 3, kinds=("nan", "infinite", "saturated")),
    *_cases(8200, 2, kinds=("peak", "ties", "saturated"), round_steps=False, write_capped=True),
    *_cases(262144, 1, 5, kinds=("peak", "ties"), round_steps=False),
    *_cases(262144, 1, 3, kinds=("peak", "last", "ties", "equal")),
    *_cases(262144, 2, write_capped=True),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. logits normal and within 12 of zero, and by options["kind"]:

    peak: one clear maximum somewhere; first, last: there; ties: three equal maxima, the lowest of which must win;
    equal: all the same; saturated: many values whose tanh is 1; nan: NaN of either sign, the first of which must win;
    infinite: minus infinity but for one plus infinity. ids and capped are poison.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    t, v = p.num_tokens, p.vocab_size
    logits = draw.normal(t, v, dtype="fp32", std=2.0).clamp(-12, 12)
    rows = torch.arange(t, device=device)
    at = draw.integers(0, v, t)
    match case.options.get("kind", "peak"):
        case "peak":
            logits[rows, at] = 20.0
        case "first":
            logits[:, 0] = 20.0
        case "last":
            logits[:, -1] = 20.0
        case "ties":
            for other in (at, draw.integers(0, v, t), draw.integers(0, v, t)):
                logits[rows, other] = 20.0
        case "equal":
            logits[:] = -3.0
        case "saturated":
            logits[:, 5::3] = 1e6 + 1e3 * logits[:, 5::3].abs()
        case "nan":
            logits[rows, at] = float("nan")
            logits[rows, draw.integers(0, v, t)] = -float("nan")
        case "infinite":
            logits[:] = -float("inf")
            logits[rows, at] = float("inf")
    return {
        "ids": torch.full((t,), -(2**62), dtype=torch.int64, device=device),
        "capped": poisoned(t, v, dtype="fp32", device=device) if p.write_capped else None,
        "logits": logits.to(TORCH_DTYPE[p.logits_dtype]),
        "cap": CAP,
        "num_tokens": t,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments; None for what no op has: steps that round, another dtype."""
    p = case.problem
    if p.round_steps or p.dtype != p.logits_dtype:
        return None
    op = softcap if p.write_capped else argmax
    return op, {"logits": inputs["logits"], "logit_cap": inputs["cap"] if p.has_cap else 0.0}
