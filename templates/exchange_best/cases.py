"""Shapes that tests, bench and tuner share: edges first, then the models' own rows.

One GPU is all ranks here, as in exchange_norm's cases: each rank seems to have the same rows.
tests/gpu/test_exchange_best.py has ranks of their own. All floats are small multiples of 1/8, whose products fp32 sums
exactly in any order: no rounding can be taken for a mistake.
"""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw, poisoned
from kerngen.templates.common.w4.pack import eighths_table
from kerngen.templates.exchange_best.op import exchange_best, exchange_best_logits, exchange_best_packed
from kerngen.templates.exchange_best.spec import POSTED, Problem
from kerngen.templates.exchange_norm.cases import loopback
from kerngen.templates.kernel import Case, asking

ROWS, PACKED_ROWS = 97, 96  # of a rank
CAP = 30.0


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    of_table = [f"{p.table}-g{p.group_size}"] if p.is_packed else []
    words = [f"n{p.ranks}_{p.source}_w{p.width}_{p.dtype}", *of_table, *options.values(), f"t{p.num_tokens}"]
    return Case("_".join(words), p, p.width + p.num_tokens + p.ranks, options)


def _cases(
    ranks: int, width: int, *tokens: int, kinds: tuple[str, ...] = ("normal",), source: str = "rows"
) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(ranks, width, d, source, t), kind=k) for d in ("bf16", "fp16") for k in kinds for t in tokens
    )


CASES = (
    *_cases(2, 8, 1, 3, 33, kinds=("normal", "zero")),  # one vector: 31 lanes idle
    *_cases(3, 264, 5, kinds=("normal", "nan", "infinite", "huge")),  # 33 vectors: one lane has two
    *_cases(5, 1544, 2, 7),
    *_cases(2, 5376, 1, 8, 128),
    *_cases(4, 2816, 1, 32),
    *_cases(8, 3840, 3),
    *_cases(2, 7680, 2),  # in rounds
    *_cases(2, 8, 9000),  # more tokens than warps: each takes several
    *_cases(2, 8, 1, 5, kinds=("normal", "nan", "infinite", "zero"), source="logits"),
    *_cases(3, 1000, 33, kinds=("normal", "capped"), source="logits"),
    *_cases(2, 131072, 1, 32, kinds=("capped",), source="logits"),
    *(
        case_for(Problem(ranks, width, dtype, "rows", tokens, table, group_size), kind="normal")
        for table, group_size, ranks, width, tokens in (
            ("int8", 16, 2, 32, 3),
            ("int8", 32, 4, 5376, 2),
            ("int8_min", 16, 2, 288, 1),
            ("int4", 32, 2, 1536, 33),
            ("int4_min", 32, 3, 96, 5),
        )
        for dtype in ("bf16", "fp16")
    ),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. x and table normal, in eighths, rows at random, and by options["kind"]:

    zero: every logit is 0, or -0 of logits; nan, infinite: what the last token's row gives; huge: logits that fp16
    cannot hold; capped: with a cap. Outputs are poison.
    """
    p: Problem = case.problem
    draw, kind = Draw(case.seed, device), case.options.get("kind", "normal")
    multiplies = p.multiplies

    def eighths(*shape: int) -> torch.Tensor:
        return draw.normal(*shape, dtype=p.dtype, std=8.0).clamp_(-40, 40).round_().div_(8)

    num_rows, scales = ROWS if multiplies else p.width, None
    if p.is_packed:
        num_rows = PACKED_ROWS
        table, scales = eighths_table(draw, num_rows, p.width, p.table, p.group_size)
    else:
        table = eighths(num_rows if multiplies else p.num_tokens, p.width).to(TORCH_DTYPE[p.dtype])
    x = eighths(p.num_tokens, p.width) if multiplies else None
    rows = draw.integers(0, num_rows, p.num_tokens)
    if kind == "zero":
        table = torch.full_like(table, -0.0)
    elif kind == "huge" and x is not None:
        x *= 2.0**12
    elif kind in ("nan", "infinite"):
        value = float("nan") if kind == "nan" else float("inf")
        if x is not None:
            x[-1, 3] = value
        else:
            table[-1, rows[-1]] = value
    rank, max_rows = case.seed % p.ranks, p.num_tokens + 1
    return {
        "ids": torch.full((p.num_tokens,), -(2**62), dtype=torch.int64, device=device),
        "values": poisoned(p.num_tokens, dtype="fp32", device=device, value=7e9),
        "rows": rows,
        "x": x,
        "table": table,
        "addresses": loopback(p.ranks, rank, max_rows, POSTED, device),
        "cap": CAP if kind == "capped" else 0.0,
        "first_row": rank * num_rows,
        "rank": rank,
        "max_rows": max_rows,
        "num_tokens": p.num_tokens,
        "table_scales": scales,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    table = inputs["table"]
    names = {"weight": table, "packed": table, "logits": table, "logit_cap": inputs["cap"], "two_shot_from": 0}
    of_rows = exchange_best_packed if case.problem.is_packed else exchange_best
    return asking(of_rows if case.problem.multiplies else exchange_best_logits, case, inputs, **names)
