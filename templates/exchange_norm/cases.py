"""Shapes that tests, bench and tuner share: edges first, then the models' own rows.

One GPU is all ranks here: as peer p's workspace a launch is given its own, p - rank slots further. What it posts to p,
into the slot of its rank there, is then the own slot of p: each rank seems to have the same rows. That holds for whole
rows alone (two_shot_from is 0); tests/gpu/test_exchange_norm.py has ranks of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import DTYPE_PAIRS, Draw, poisoned
from kerngen.templates.exchange_norm import op
from kerngen.templates.exchange_norm.spec import Problem, exchange_bytes
from kerngen.templates.kernel import Case, asking


def case_for(problem: Problem, **options: Any) -> Case:
    p = problem
    parts = ((f"k{p.top_k}", p.top_k), ("scalar", p.has_scalar), ("last", not p.has_next), *options.items())
    words = [f"n{p.ranks}_h{p.hidden}_{p.residual_dtype}-{p.dtype}", *(n for n, on in parts if on), f"t{p.num_tokens}"]
    return Case("_".join(words), p, p.hidden + p.num_tokens + p.ranks, options)


def _cases(ranks: int, hidden: int, *tokens: int, in_place: bool = False, **fields: Any) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(ranks, hidden, d, r, num_tokens=t, **fields), in_place=in_place)
        for d, r in DTYPE_PAIRS
        for t in tokens
    )


CASES = (
    *_cases(2, 8, 1, 3, 33),  # one vector: 31 lanes idle
    *_cases(3, 264, 1, 5, has_scalar=True),  # 33 vectors: a second warp with one
    *_cases(5, 1544, 2, 7, has_next=False),  # 193 vectors; peers are polled four at a time
    *_cases(3, 264, 3, has_next=False, in_place=True),
    *_cases(2, 5376, 1, 8, 129),
    *_cases(4, 5376, 1, 32, 64, in_place=True, has_scalar=True),
    *_cases(8, 5376, 3),
    *_cases(2, 2816, 1, 8, top_k=8, has_scalar=True),
    *_cases(8, 2816, 3, top_k=8, in_place=True, has_scalar=True),
    *_cases(3, 264, 2, top_k=3),
    *_cases(4, 2816, 65, top_k=1),
    *_cases(2, 8, 9000),  # more rows than blocks: each takes several
    case_for(Problem(4, 3840, "fp16", "fp16", num_tokens=5)),
)


@cache
def _workspace(device: torch.device, ranks: int, max_rows: int, hidden: int) -> Tensor:
    """Of one rank, and behind it the abort word. Kept: addresses of it are all that a launch gets, and it is as it was
    after each. One for each shape, since epochs lie elsewhere in another.
    """
    return torch.zeros(exchange_bytes(ranks, max_rows, hidden) + 16, dtype=torch.uint8, device=device)


def loopback(ranks: int, rank: int, max_rows: int, hidden: int, device: torch.device | str, stride: int = 0) -> Tensor:
    """`Peers.addresses` of a rank that is its own peers; zeros where no kernel runs. stride: bytes between what two
    ranks post, 0 for a slot.
    """
    if torch.device(device).type != "cuda":
        return torch.zeros(ranks + 1, dtype=torch.int64, device=device)
    device = torch.device("cuda", torch.cuda.current_device())
    own, slot = _workspace(device, ranks, max_rows, hidden).data_ptr(), stride or 2 * max_rows * hidden
    abort = own + exchange_bytes(ranks, max_rows, hidden)
    return torch.tensor([*(own + (p - rank) * slot for p in range(ranks)), abort], dtype=torch.int64, device=device)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Rows and residual normal, weights about 1, topk_weights as a router gives them; outputs NaN, or
    residual itself with in_place.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    shape = p.num_tokens, p.hidden
    residual = draw.normal(*shape, dtype=p.residual_dtype)
    in_place = case.options.get("in_place", False)
    max_rows, rank = p.num_tokens * p.rows + 1, case.seed % p.ranks

    def weight(wanted: bool = True) -> Tensor | None:
        return draw.normal(p.hidden, dtype=p.dtype, mean=1.0, std=0.25) if wanted else None

    return {
        "residual_out": residual if in_place else poisoned(*shape, dtype=p.residual_dtype, device=device),
        "out": poisoned(*shape, dtype=p.dtype, device=device) if p.has_next else None,
        "residual": residual,
        "h": draw.normal(*shape, dtype=p.dtype, std=0.5),
        "routed": draw.normal(p.num_tokens, p.top_k, p.hidden, dtype=p.dtype, std=0.7) if p.top_k else None,
        "h_norm": weight(p.top_k > 0),
        "routed_norm": weight(p.top_k > 0),
        "post_weight": weight(),
        "layer_scalar": draw.normal(1, dtype=p.dtype, mean=0.7, std=0.1) if p.has_scalar else None,
        "next_weight": weight(p.has_next),
        "addresses": loopback(p.ranks, rank, max_rows, p.hidden, device),
        "eps": 1e-6,
        "rank": rank,
        "max_rows": max_rows,
        "two_shot_from": 0,
        "num_tokens": p.num_tokens,
        "topk_weights": torch.softmax(draw.normal(p.num_tokens, p.top_k, dtype="fp32"), dim=-1) if p.top_k else None,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]] | None:
    """The op that asks for this case, and its arguments."""
    p: Problem = case.problem
    if p.top_k:
        return asking(op.exchange_pair_norm, case, inputs)
    if case.options.get("in_place", False):
        return asking(op.exchange_norm if p.has_next else op.exchange_post_norm, case, inputs)
    return asking(op.exchange_norm_functional if p.has_next else op.exchange_post_norm_functional, case, inputs)
