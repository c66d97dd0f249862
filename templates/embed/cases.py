"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, TORCH_DTYPE, Draw, poisoned
from kerngen.templates.common.w4.pack import drawn_table
from kerngen.templates.embed.op import embed, embed_packed
from kerngen.templates.embed.spec import Problem
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    of_table = [f"{p.table}-g{p.group_size}"] if p.is_packed else []
    names = [f"h{p.hidden}_v{p.vocab_size}_{p.dtype}-{p.residual_dtype}", *of_table, *options, f"t{p.num_tokens}"]
    return Case("_".join(names), p, p.hidden + p.num_tokens, options)


def _cases(hidden: int, vocab_size: int, *tokens: int, **options: Any) -> tuple[Case, ...]:
    return tuple(case_for(Problem(hidden, vocab_size, d, r, t), **options) for d, r in DTYPE_PAIRS for t in tokens)


PACKED_CASES: tuple[tuple[str, int, int, int, int, dict[str, Any]], ...] = (
    ("int8", 16, 32, 32, 33, {}),  # one tile, of two groups
    ("int8", 32, 96, 64, 130, {}),
    ("int8_min", 16, 5376, 96, 5, {}),
    ("int8_min", 128, 256, 32, 32, {}),
    ("int4", 32, 5376, 64, 3, {}),
    ("int4_min", 32, 96, 64, 64, {}),
    ("int4", 64, 64, 32, 65, {"bad_ids": True}),
)
CASES = (
    *_cases(8, 3, 1, 5, 1000),  # one vector a row
    *_cases(264, 100, 7, 33, bad_ids=True),
    *_cases(5376, 1000, 1, 2, 65),
    *_cases(10752, 50, 3),
    *(
        case_for(Problem(hidden, vocab, *dtypes, tokens, table, group_size), **options)
        for table, group_size, hidden, vocab, tokens, options in PACKED_CASES
        for dtypes in DTYPE_PAIRS
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
        table, scales = drawn_table(draw, p.vocab_size, p.hidden, p.table, p.group_size)
    else:
        table = draw.normal(p.vocab_size, p.hidden, dtype=p.dtype)
    return {
        "out": poisoned(p.num_tokens, p.hidden, dtype=p.residual_dtype, device=device, value=1e30),
        "ids": ids,
        "table": table,
        "scale": p.hidden**0.5,
        "num_tokens": p.num_tokens,
        "table_scales": scales,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    p = case.problem
    dtypes = {"dtype": TORCH_DTYPE[p.dtype], "out_dtype": TORCH_DTYPE[p.residual_dtype]}
    return asking(embed_packed if p.is_packed else embed, case, inputs, packed=inputs["table"], **dtypes)
