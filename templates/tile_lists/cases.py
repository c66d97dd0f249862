"""Few tiles and many, heads that keep other tiles, thresholds that scores meet, blocks that see all."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch

from kerngen.templates.call import Op
from kerngen.templates.common.attention.tile_lists import LIST_KEYS, NOTHING, num_entries, num_lists, query_blocks
from kerngen.templates.common.rows.torch_rows import Draw
from kerngen.templates.kernel import Case, asking
from kerngen.templates.tile_lists.op import tile_lists
from kerngen.templates.tile_lists.spec import Problem

POISON = -7  # of counts and lists
_Q_LENS = [0, 1, 128, 129, 300, 0, 256, 40, 5, 5]
_KV_LENS = [77, 1, 128, 2000, 1000, 0, 40000, 35000, 3, 0]


def case_for(problem: Problem, name: str = "", alpha: float = 0.1) -> Case:
    """`problem` as equally long sequences, none of whose blocks sees all."""
    p = problem
    q_lens = [p.num_tokens // p.batch + (i < p.num_tokens % p.batch) for i in range(p.batch)]
    kv_lens = [max(p.kv_len, n) for n in q_lens]
    kind = f"h{p.num_q_heads}-{p.num_kv_heads}_b{p.batch}_t{p.num_tokens}_k{p.kv_len}"
    options = {"q_lens": q_lens, "kv_lens": kv_lens, "alpha": alpha, "dense": False}
    return Case(name or kind, p, p.num_tokens + p.kv_len, options)


def _case(name: str, alpha: float, **options: Any) -> Case:
    problem = Problem(options.pop("num_q_heads", 4), 2, len(_Q_LENS), sum(_Q_LENS), max(_KV_LENS))
    usual: dict[str, Any] = {"q_lens": _Q_LENS, "kv_lens": _KV_LENS, "alpha": alpha, "dense": True}
    return Case(name, problem, len(name), usual | options)


CASES = (
    _case("alpha.1", 0.1),
    _case("alpha.9", 0.9),
    _case("alpha1e-6", 1e-6),
    _case("group16", 0.3, num_q_heads=32),
    _case("at-the-threshold", 0.5, whole=True),
    _case("nothing-first", 0.5, num_first=0, num_last=1),
    case_for(Problem(16, 2, 1, 2048, 9000)),
    case_for(Problem(2, 1, 70, 150, 200)),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Scores spread over 8 powers of two, whole numbers with the option `whole`; NaN behind a block's
    last tile, NOTHING now and then.
    """
    p, o, draw = case.problem, case.options, Draw(case.seed, device)
    q_lens, kv_lens = o["q_lens"], o["kv_lens"]
    lists, tiles = num_lists(sum(q_lens), len(q_lens)), num_entries(p.kv_len)
    scores = draw.normal(lists, p.num_q_heads, tiles, dtype="fp32", std=2.0)
    if o.get("whole"):
        scores = scores.round()
    scores[draw.integers(0, 10, *scores.shape) == 0] = NOTHING
    for at, s, first, count in query_blocks(q_lens):
        last = kv_lens[s] - q_lens[s] + first + count - 1
        scores[at, :, last // LIST_KEYS + 1 :] = math.nan
    # Of every other sequence the last block sees all.
    dense_from = [n - 1 if o["dense"] and i % 2 else n for i, n in enumerate(kv_lens)]
    return {
        "counts": torch.full((lists, p.num_kv_heads), POISON, dtype=torch.int32, device=device),
        "lists": torch.full((lists, p.num_kv_heads, tiles), POISON, dtype=torch.int32, device=device),
        "density": torch.tensor([3, 5], dtype=torch.int64, device=device),
        "scores": scores,
        "cu_seqlens_q": torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "dense_from": torch.tensor(dense_from, dtype=torch.int32, device=device),
        "log2_alpha": math.log2(o["alpha"]),
        "num_first": o.get("num_first", 2),
        "num_last": o.get("num_last", 4),
        "batch": len(q_lens),
        "max_tiles": tiles,
    }


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    p = case.problem
    table = torch.zeros(p.batch, 1, dtype=torch.int32, device=inputs["scores"].device)
    return asking(
        tile_lists, case, inputs, num_kv_heads=p.num_kv_heads, num_tokens=sum(case.options["q_lens"]), block_table=table
    )
