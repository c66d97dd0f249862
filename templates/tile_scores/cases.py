"""Chunks that begin and end within tiles and means, behind a prefix or not; sequences without queries."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.attention.tile_lists import num_entries, num_lists
from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case, asking
from kerngen.templates.tile_scores.op import tile_scores
from kerngen.templates.tile_scores.spec import Problem

NO_PAGE = 0x3FFFFFFF  # a table entry that faults if it is followed
_Q_LENS = [0, 1, 15, 128, 129, 200, 0, 31, 32]
_KV_LENS = [77, 1, 15, 128, 257, 1000, 0, 31, 160]


def case_for(problem: Problem, name: str = "") -> Case:
    """`problem` as equally long sequences of kv_len keys, or as many as they have queries."""
    p = problem
    q_lens = [p.num_tokens // p.batch + (i < p.num_tokens % p.batch) for i in range(p.batch)]
    kv_lens = [max(p.kv_len, n) for n in q_lens]
    kind = f"d{p.head_dim}_h{p.num_q_heads}-{p.num_kv_heads}_s{p.page_size}_m{p.mean_keys}_{p.dtype}"
    options = {"q_lens": q_lens, "kv_lens": kv_lens}
    return Case(name or f"{kind}_b{p.batch}_t{p.num_tokens}_k{p.kv_len}", p, p.num_tokens + p.kv_len, options)


def _case(name: str, **fields: Any) -> Case:
    problem = Problem(batch=len(_Q_LENS), num_tokens=sum(_Q_LENS), kv_len=max(_KV_LENS), **fields)
    return Case(name, problem, len(name), {"q_lens": _Q_LENS, "kv_lens": _KV_LENS})


CASES = (
    *(
        _case(f"d{d}-{dtype}-{m}-of-{s}", head_dim=d, num_q_heads=4, num_kv_heads=2, page_size=s, mean_keys=m,
              dtype=dtype)
        for d, s, m in ((128, 16, 16), (256, 64, 32), (512, 64, 32), (512, 48, 16))
        for dtype in ("bf16", "fp16")
    ),
    *(
        _case(f"group8-{dtype}", num_q_heads=8, num_kv_heads=1, dtype=dtype) for dtype in ("bf16", "fp16")
    ),
    *(
        case_for(Problem(num_q_heads=2, num_kv_heads=1, dtype=dtype, num_tokens=384, kv_len=5000))
        for dtype in ("bf16", "fp16")
    ),
    # More sequences than the 32 that a warp searches at once.
    case_for(Problem(128, 2, 2, dtype="fp16", batch=70, num_tokens=150, kv_len=200)),
)  # fmt: skip


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Scores have a standard deviation of 3. Means that no query sees, and scores, are NaN."""
    p, draw = case.problem, Draw(case.seed, device)
    q_lens, kv_lens = case.options["q_lens"], case.options["kv_lens"]
    per_page = p.page_size // p.mean_keys
    used = [-(-n // p.page_size) for n in kv_lens]
    order = draw.permutation(sum(used) + 2)
    table = torch.full((len(kv_lens), max(used) + 1), NO_PAGE, dtype=torch.int32, device=device)
    means = poisoned(sum(used) + 2, p.num_kv_heads, per_page, p.head_dim, dtype=p.dtype, device=device)
    taken = 0
    for s, (count, n) in enumerate(zip(used, kv_lens, strict=True)):
        table[s, :count] = order[taken : taken + count].int()
        taken += count
        at = torch.arange(n // p.mean_keys, device=device)
        rows = draw.normal(len(at), p.num_kv_heads, p.head_dim, dtype=p.dtype)
        means[table[s, at // per_page].long(), :, at % per_page] = rows
    tiles = num_entries(p.kv_len)
    lists = num_lists(sum(q_lens), len(q_lens))
    return {
        "scores": poisoned(lists, p.num_q_heads, tiles, dtype="fp32", device=device),
        "q": draw.normal(sum(q_lens), p.num_q_heads, p.head_dim, dtype=p.dtype),
        "means": means,
        "cu_seqlens_q": torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "block_table": table,
        "sm_scale": 3 * p.head_dim**-0.5,
        "batch": len(q_lens),
        "max_pages": table.shape[1],
        "max_tiles": tiles,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(tile_scores, case, inputs, page_size=case.problem.page_size, max_kv_len=case.problem.kv_len)
