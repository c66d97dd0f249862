"""Shapes that tests, bench and tuner share: tables that are right, then each violation at each of its edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Op
from kerngen.templates.check_pages.op import check_pages
from kerngen.templates.check_pages.spec import FIELDS, NOBODY, Problem
from kerngen.templates.common.attention.heads_torch import slots_of
from kerngen.templates.common.rows.torch_rows import Draw
from kerngen.templates.kernel import Case, asking

FIRST_ROW = 5  # rows count from here
MOST = 12  # pages of the longest sequence
STALE = -7  # in entries beyond a length: nobody may read them
POISON = -9  # in a record that holds no violation
FAULTS = (
    "none", "too long", "shorter than its tokens", "negative page", "page beyond the pool",
    "stale entry behind a window", "page 0 in use", "two writers", "read while written", "slot of another page",
    "slot in the other pool", "several", "writer before",
)  # fmt: skip


def case_for(problem: Problem, **options: Any) -> Case:
    """options: q_len (2), new tokens of each sequence; ragged: each has a number of its own; page_size (16); fault, of
    FAULTS.
    """
    usual: dict[str, Any] = {"q_len": 2, "page_size": 16, "fault": "none", "ragged": False}
    o = usual | options
    how = "ragged" if o["ragged"] else f"q{o['q_len']}"
    name = f"p{o['page_size']}_{how}_b{problem.batch}_{o['fault'].replace(' ', '-')}"
    return Case(name, problem, seed=problem.batch, options=o)


CASES = (
    *(case_for(Problem(b)) for b in (1, 3, 33)),
    *(case_for(Problem(4), ragged=True, page_size=s) for s in (1, 7, 64)),
    *(case_for(Problem(3), fault=f, ragged=i % 2 == 1) for i, f in enumerate(FAULTS[1:])),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Sequences have up to MOST pages of their own each, of a pool with a page to spare; what lies
    behind the window of pool 1 is page 0, and entries beyond a length are STALE. One of many is for nobody: no length,
    page 0. Then the fault, in the last sequence.
    """
    p, o = case.problem, case.options
    draw, size, batch = Draw(case.seed, device), o["page_size"], p.batch
    lookback, num_pages = size + size // 2, (batch * MOST + 2, batch * MOST + 9)
    counts = torch.full((batch,), o["q_len"], dtype=torch.int64, device=device)
    if o["ragged"]:
        counts = draw.integers(0, 2 * size + 2, batch)
        counts[0], counts[-1] = size, size + 1
    starts = draw.integers(6 * size, (MOST - 4) * size, batch)
    if batch > 4:
        starts[1] = 0
    kv_lens = starts + counts
    cu_seqlens = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    pages = torch.stack([draw.permutation(n - 1)[: batch * MOST].view(batch, MOST) + 1 for n in num_pages])
    places = torch.arange(MOST, device=device)
    pages[1] *= places >= (starts[:, None] - lookback).clamp(min=0) // size
    if batch > 4:
        pages[:, 1] = 0
    tables = torch.where(places * size < kv_lens[:, None], pages, STALE).int()
    _break_tables(o["fault"], tables, int(starts[-1]) // size, int(kv_lens[0] - 1) // size, num_pages[1])
    slots = _slots(starts, counts, tables, size)
    given = {
        "record": torch.tensor([0, *[POISON] * (len(FIELDS) - 1)], device=device),
        "writers": torch.full((2, max(num_pages)), NOBODY, dtype=torch.int32, device=device),
        "tables": tables, "kv_lens": kv_lens, "cu_seqlens": cu_seqlens, "slots": slots,
        "table_stride": tables.stride(0), "row_stride": tables.stride(1), "max_kv_len": MOST * size,
        "num_full_pages": num_pages[0], "num_sliding_pages": num_pages[1], "page_size": size, "first_row": FIRST_ROW,
        "max_num_pages": max(num_pages), "lookback": lookback, "num_tokens": slots.shape[1],
    }  # fmt: skip
    match o["fault"]:
        case "too long":
            kv_lens[-1] = MOST * size + 1
        case "shorter than its tokens":
            kv_lens[-1] = counts[-1] - 1
        case "slot of another page":
            slots[0, -1] += size
        case "slot in the other pool":
            slots[1, -1] -= 1
        case "several":
            slots[:, -1] = -1
        case "writer before":
            given["writers"][1, tables[1, -1, int(starts[-1]) // size]] = 1
    return given


def _slots(starts: Tensor, counts: Tensor, tables: Tensor, page_size: int) -> Tensor:
    """[2, num_tokens] of the sequences' new tokens, one sequence after the other."""
    made = []
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        positions = torch.arange(start, start + count, device=tables.device)[None]
        made.append(slots_of(positions, tables[:, [i]], page_size)[:, 0])
    return torch.cat(made, dim=1)


def _break_tables(fault: str, tables: Tensor, begun: int, written: int, num_sliding_pages: int) -> None:
    """begun: the entry of the last sequence's first new token; written: of the first sequence's last one."""
    match fault:
        case "negative page":
            tables[0, -1, 1] = -1
        case "page beyond the pool":
            tables[1, -1, begun] = num_sliding_pages
        case "stale entry behind a window":
            tables[1, -1, 0] = 1 << 30
        case "page 0 in use":
            tables[0, -1, 0] = 0
        case "two writers":
            tables[0, -1, begun] = tables[0, 0, written]
        case "read while written":
            tables[1, -1, begun - 1] = tables[1, 0, written]
        case "several":
            tables[0, 0, 2] = -5
            tables[1, -1, begun] = 1 << 20


def op_call(case: Case, inputs: dict[str, Any]) -> tuple[Op[..., Any], dict[str, Any]]:
    """The op that asks for this case, and its arguments."""
    return asking(check_pages, case, inputs)
