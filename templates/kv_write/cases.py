"""Shapes that tests, bench and tuner share: edges first, then the models' own layers."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.attention.heads_torch import in_pages
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.kv_write.op import kv_write
from kerngen.templates.kv_write.spec import Problem

_HEADS_BETWEEN = 3  # of what follows K, and V, of a token in the tensor that they are a part of


def case_for(problem: Problem) -> Case:
    p = problem
    heads = f"{p.num_kv_heads}" + (f"-of-{p.page_heads}" if p.page_heads else "")
    return Case(f"d{p.head_dim}_h{heads}_s{p.page_size}_{p.dtype}_t{p.num_tokens}", p, p.head_dim + p.num_tokens)


def _cases(num_kv_heads: int, head_dim: int, page_size: int, *tokens: int, page_heads: int = 0) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(num_kv_heads, head_dim, page_size, d, t, page_heads)) for d in ("bf16", "fp16") for t in tokens
    )


CASES = (
    *_cases(1, 8, 1, 1, 3),  # a vector a head
    *_cases(3, 64, 16, 1, 7, 130),  # tokens begin anywhere in a block
    *_cases(2, 128, 48, 33, page_heads=4),  # K and V in one tensor, side by side, or with a head between
    *_cases(1, 512, 32, 5, page_heads=3),
    *_cases(16, 256, 64, 1, 4, 65, page_heads=32),
    *_cases(4, 512, 64, 4),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. k and v normal, each a part of a wider tensor whose rest is NaN.

    Slots are distinct rows all over caches with three pages more than needed; with three tokens or more the second
    token has slot -1. All cache rows, and so those that no slot names, are NaN.
    """
    p: Problem = case.problem
    draw, t = Draw(case.seed, device), p.num_tokens
    num_pages = -(-t // p.page_size) + 3
    slots = draw.permutation(num_pages * p.page_size)[:t]
    if t > 2:
        slots[1] = -1

    def rows() -> torch.Tensor:
        rest = poisoned(t, _HEADS_BETWEEN, p.head_dim, dtype=p.dtype, device=device)
        return torch.cat((draw.normal(t, p.num_kv_heads, p.head_dim, dtype=p.dtype), rest), 1)[:, : p.num_kv_heads]

    cache_shape = num_pages, p.num_kv_heads, p.page_size, p.head_dim
    k_cache, v_cache = (poisoned(*cache_shape, dtype=p.dtype, device=device) for _ in range(2))
    k_cache, v_cache = in_pages(k_cache, v_cache, p.page_heads, is_one=True)
    k, v = rows(), rows()
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "slot_mapping": slots,
        "k_stride": k.stride(0),
        "v_stride": v.stride(0),
        "num_tokens": t,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(kv_write, case, inputs)
