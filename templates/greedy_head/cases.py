"""Shapes that tests, bench and tuner share: edges first, then the models' own.

All floats are small multiples of 1/8, whose products fp32 sums exactly in any order: no rounding can be taken for a
mistake, and rounded to 16 bits many logits are equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE, Draw
from kerngen.templates.common.screen.screen import head_screen
from kerngen.templates.common.w4.pack import dequantize, eighths_table, unpack
from kerngen.templates.greedy_head.op import greedy_head, greedy_head_packed
from kerngen.templates.greedy_head.spec import Problem
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    of_bits = [] if p.bits == 8 else [f"b{p.bits}"]
    of_bits += [f"{p.table}-g{p.group_size}"] if p.is_packed else []
    name = "_".join([f"v{p.vocab_size}x{p.hidden}", *of_bits, p.dtype, *options.values(), f"t{p.num_tokens}"])
    return Case(name, p, p.vocab_size + p.hidden + p.num_tokens, options)


def _cases(
    vocab: int,
    hidden: int,
    *tokens: int,
    kinds: tuple[str, ...] = ("normal",),
    bits: tuple[int, ...] = (8,),
    dtypes: tuple[str, ...] = ("bf16", "fp16"),
) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(vocab, hidden, d, t, b), kind=k) for d in dtypes for b in bits for k in kinds for t in tokens
    )


FEW = (4, 6, 7)  # bits
CASES = (
    *_cases(1, 8, 1, 8),
    *_cases(17, 72, 2, 5, kinds=("normal", "equal")),  # one row in the second strip, one vector in the second tile
    *_cases(1000, 200, *range(1, 9)),
    *_cases(3000, 320, 1, 4, 7, kinds=("ties", "equal", "excluded", "outliers", "zero_rows", "sizes", "nan")),
    *_cases(3000, 320, 2, kinds=("negative", "tiny", "huge")),
    *_cases(5000, 1536, 1, 3, kinds=("normal", "first", "last", "infinite")),
    *_cases(2056, 5376, 1, 8, 9, 31, 32),  # columns in parts
    *_cases(1500, 1000, 15, 17, 20, 32, kinds=("normal", "excluded")),
    *_cases(40000, 256, 1, 6, kinds=("normal", "ties", "excluded")),
    case_for(Problem(262144, 256, num_tokens=2), kind="normal"),
    *_cases(1, 8, 1, bits=FEW),
    *_cases(17, 264, 2, 5, kinds=("normal", "equal"), bits=FEW),  # one vector in the second group, of any bits
    *_cases(3000, 320, 1, 7, kinds=("ties", "equal", "excluded", "outliers", "zero_rows", "sizes", "nan"), bits=(6,)),
    *_cases(3000, 320, 1, 4, kinds=("equal", "excluded", "outliers", "zero_rows"), bits=(7,)),
    *_cases(3000, 320, 2, kinds=("ties", "sizes", "nan"), bits=(4, 7), dtypes=("bf16",)),
    *_cases(3000, 320, 2, kinds=("negative", "tiny", "huge", "rows", "likely"), bits=FEW),
    *_cases(5000, 1536, 1, 3, kinds=("wide", "first", "last", "infinite"), bits=(6, 7), dtypes=("bf16",)),
    *_cases(5000, 1536, 3, kinds=("wide",), bits=(7,), dtypes=("fp16",)),
    *_cases(2056, 5376, 1, 9, 32, kinds=("wide",), bits=(6, 7), dtypes=("bf16",)),
    *_cases(1500, 1000, 8, 17, 32, kinds=("excluded",), bits=FEW),
    *_cases(100000, 1024, 1, 5, kinds=("wide", "likely"), bits=(4, 6), dtypes=("bf16",)),
    *_cases(100000, 1024, 1, 4, kinds=("wide", "rows"), bits=(7,), dtypes=("bf16",)),
    case_for(Problem(262144, 256, num_tokens=32, bits=7), kind="wide"),
    # all rows are left to choose from: lists are full, of few blocks a token and of many
    *(case_for(Problem(262144, 64, num_tokens=t, bits=7), kind="equal") for t in (1, 4, 32)),
    *(
        case_for(Problem(vocab, hidden, dtype, tokens, bits, table, group_size), kind=kind)
        for table, group_size, vocab, hidden, tokens, bits, kind in (
            ("int8", 16, 64, 32, 2, 8, "normal"),
            ("int8", 16, 3008, 1536, 1, 6, "excluded"),
            ("int8", 32, 2048, 5376, 3, 7, "normal"),
            ("int8_min", 32, 1504, 256, 5, 7, "equal"),
            ("int8_min", 16, 1504, 96, 9, 6, "nan"),
            ("int4", 32, 3008, 320, 4, 8, "normal"),
            ("int4_min", 32, 1504, 256, 1, 4, "excluded"),
        )
        for dtype in ("bf16", "fp16")
    ),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument but the workspace. weight and x normal, in eighths, and by options["kind"]:

    normal: many of them at 1, the largest there is; wide, and where there is no kind: of standard deviation 1 up to 5,
    as few rows are likely as of normal numbers; likely: that, with bounds that are likely, which a problem of four bits
    without a kind has too: sure ones leave most rows;
    ties: rows that are each a copy of some others; equal: all of x is zero; first, last: there is the greatest;
    excluded: what would be chosen is not to be, nor is a third of the rest; outliers: rows with one large element, so
    that their other codes are coarse; zero_rows: every other row is zero; rows: all of them are the same one; sizes:
    rows of very different size; negative: all logits are; tiny, huge: x so small that its squares vanish in fp32, or so
    large that they, or logits in fp16, are infinite; nan: one in the first token; infinite: one in the last token. ids
    are poison. A packed weight is of eighths in any case, and kinds that change weight are not made of one.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    kind = case.options.get("kind", "wide" if p.bits != 4 else "likely")
    std, most = (8.0, 40) if kind in ("wide", "likely") else (4.0, 8)

    def eighths(*shape: int) -> Tensor:
        return draw.normal(*shape, dtype=p.dtype, std=std).clamp_(-most, most).round_().div_(8)

    x, stored, scales = eighths(p.num_tokens, p.hidden), None, None
    if p.is_packed:
        stored, scales = eighths_table(draw, p.vocab_size, p.hidden, p.table, p.group_size)
        weight = dequantize(*unpack(stored, scales), TORCH_DTYPE[p.dtype])
    else:
        weight = eighths(p.vocab_size, p.hidden)
    rows = torch.arange(p.vocab_size, device=device)
    excluded: list[int] = []
    match kind:
        case "ties":
            weight = weight[rows % 100 * 7 % p.vocab_size]
        case "equal":
            x[:] = 0.0
        case "first":
            weight[0] = x[0].sign()
        case "last":
            weight[-1] = x[0].sign()
        case "excluded":
            best = (x.float() @ weight.float().T).argmax(-1).tolist()
            excluded = sorted({*best, *rows[::3].tolist()})
        case "outliers":
            weight[::4, 5] = 60.0
            x[:, 5] = 0.0
        case "zero_rows":
            weight[::2] = 0.0
        case "rows":
            weight[:] = weight[0].clone()
        case "sizes":
            weight *= (2.0 ** (rows % 9 - 6))[:, None].to(weight.dtype)
        case "negative":
            x[:, 0], weight[:, 0] = 128.0, -1.0
        case "tiny":
            x *= 2.0**-100 if p.dtype == "bf16" else 2.0**-20
        case "huge":
            x *= 2.0**70 if p.dtype == "bf16" else 2.0**12
        case "nan":
            x[0, 3] = float("nan")
        case "infinite":
            x[-1, 3] = -float("inf")
    codes, bounds = head_screen(weight, excluded, p.bits, likely=kind == "likely")
    return {
        "ids": torch.full((p.num_tokens,), -(2**62), dtype=torch.int64, device=device),
        "x": x,
        "weight": weight if stored is None else stored,
        "codes": codes,
        "bounds": bounds,
        "num_tokens": p.num_tokens,
        "table_scales": scales,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    op: Op[..., Any] = greedy_head_packed if case.problem.is_packed else greedy_head
    return asking(op, case, inputs, packed=inputs["weight"])
