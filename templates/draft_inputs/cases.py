"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.common.w4.pack import drawn_table
from kerngen.templates.draft_inputs.op import draft_inputs, draft_inputs_packed
from kerngen.templates.draft_inputs.spec import Problem
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    of_table = [f"{p.table}-g{p.group_size}"] if p.is_packed else []
    names = [f"e{p.embed_size}_h{p.hidden}_v{p.vocab_size}_{p.dtype}", *of_table, *options, f"t{p.num_tokens}"]
    return Case("_".join(names), p, p.embed_size + 3 * p.hidden + p.num_tokens, options)


def _cases(embed_size: int, hidden: int, vocab_size: int, *tokens: int, **options: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(embed_size, hidden, vocab_size, d, t), **options) for d in ("bf16", "fp16") for t in tokens
    )


CASES = (
    *_cases(8, 8, 3, 1, 5, 1000),  # a vector of each
    *_cases(264, 40, 100, 7, 33, bad_ids=True),
    *_cases(40, 264, 100, 1, 9),
    *_cases(5376, 5376, 1000, 1, 2, 65),
    *(
        case_for(Problem(embed_size, 40, 64, d, tokens, table, group_size), **options)
        for table, group_size, embed_size, tokens, options in (
            ("int8", 16, 32, 33, {}),
            ("int8_min", 32, 5376, 2, {}),
            ("int4_min", 32, 64, 7, {}),
            ("int4", 32, 96, 65, {"bad_ids": True}),
        )
        for d in ("bf16", "fp16")
    ),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. ids hold the first and the last row; bad_ids adds ones just and far outside. out is poison."""
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    ids = draw.integers(0, p.vocab_size, p.num_tokens)
    ids[-1], ids[0] = 0, p.vocab_size - 1
    if case.options.get("bad_ids"):
        ids[1:5] = torch.tensor([-1, p.vocab_size, -(2**63), 2**63 - 1], device=device)
    scales = None
    if p.is_packed:
        table, scales = drawn_table(draw, p.vocab_size, p.embed_size, p.table, p.group_size)
    else:
        table = draw.normal(p.vocab_size, p.embed_size, dtype=p.dtype)
    return {
        "out": poisoned(p.num_tokens, p.width, dtype=p.dtype, device=device, value=6e4),
        "ids": ids,
        "table": table,
        "hidden": draw.normal(p.num_tokens, p.hidden, dtype=p.dtype),
        "scale": p.embed_size**0.5,
        "num_tokens": p.num_tokens,
        "table_scales": scales,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    op: Op[..., Any] = draft_inputs_packed if case.problem.is_packed else draft_inputs
    return asking(op, case, inputs, packed=inputs["table"])
