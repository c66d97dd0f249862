"""Shapes that tests, bench and tuner share: edges of pages first, then the engine's own."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.common.rows.torch_rows import Draw
from kerngen.templates.decode_inputs.spec import Problem
from kerngen.templates.kernel import Case

NUM_PAGES = 1 << 22  # of a pool: slots that fp32 could not hold
NOBODYS = 1 << 30  # in entries that no position lies in


def case_for(problem: Problem, **options: Any) -> Case:
    """options: q_len, which divides num_tokens (1); kind (see `inputs`)."""
    names = (f"{key[0]}{value}" if isinstance(value, int) else value for key, value in options.items())
    name = "_".join([f"p{problem.page_size}", *names, f"t{problem.num_tokens}"])
    return Case(name, problem, problem.page_size + problem.num_tokens, options)


def _cases(page_size: int, q_len: int, *batches: int, kinds: tuple[str, ...] = ("random",)) -> tuple[Case, ...]:
    return tuple(case_for(Problem(page_size, b * q_len), q_len=q_len, kind=k) for k in kinds for b in batches)


CASES = (
    *_cases(1, 3, 5),  # a page a token
    *_cases(7, 4, 3, kinds=("random", "edges")),  # no power of two
    *_cases(16, 1, 1, 5, 33),
    *_cases(64, 1, 1, 32, 129, kinds=("random", "edges", "empty")),
    *_cases(64, 4, 1, 32, kinds=("random", "edges", "empty")),
    *_cases(64, 8, 3, 40, kinds=("random", "edges")),
    *_cases(128, 5, 2),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. lengths up to 40 pages, and by options["kind"]:

    edges: around whole numbers of pages, so that new tokens lie on both sides; empty: 0, as of rows that stand for
    nobody. Entries of the tables that no new token lies in are NOBODYS, and outputs are poison.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    q_len = case.options.get("q_len", 1)
    batch = p.num_tokens // q_len
    match case.options.get("kind", "random"):
        case "random":
            lengths = draw.integers(0, 40 * p.page_size, batch)
        case "edges":
            lengths = draw.integers(1, 40, batch) * p.page_size - draw.integers(0, q_len + 1, batch)
        case "empty":
            lengths = draw.integers(0, 1, batch)
    positions = lengths[:, None] + torch.arange(q_len, device=device)
    max_pages = int(positions.max()) // p.page_size + 3
    tables = torch.full((2, batch, max_pages), NOBODYS, dtype=torch.int32, device=device)
    at = (positions // p.page_size).expand(2, -1, -1)  # [2, B, q_len]
    tables.scatter_(2, at, draw.integers(0, NUM_PAGES, *at.shape).int())
    return {
        "positions": torch.full((p.num_tokens,), -(2**62), dtype=torch.int64, device=device),
        "kv_lens": torch.full((batch,), -(2**30), dtype=torch.int32, device=device),
        "slots": torch.full((2, p.num_tokens), -(2**62), dtype=torch.int64, device=device),
        "lengths": lengths,
        "tables": tables,
        "table_stride": batch * max_pages,
        "row_stride": max_pages,
        "q_len": q_len,
        "num_tokens": p.num_tokens,
    }
