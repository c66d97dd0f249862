"""Shapes that tests, bench and tuner share: edges first, then the models' own rows."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.decode_advance.spec import Problem
from kerngen.templates.kernel import Case

VOCAB = 262144


def case_for(problem: Problem, **options: Any) -> Case:
    """options: q_len (1); kind (see `inputs`)."""
    p = problem
    names = (f"{key[0]}{value}" if isinstance(value, int) else value for key, value in options.items())
    return Case("_".join([f"h{p.hidden}_{p.dtype}", *names, f"b{p.batch}"]), p, p.hidden + p.batch, options)


def _cases(hidden: int, q_len: int, *batches: int, kinds: tuple[str, ...] = ("usual",)) -> tuple[Case, ...]:
    return tuple(
        case_for(Problem(hidden, d, b), q_len=q_len, kind=k) for d in ("bf16", "fp16") for k in kinds for b in batches
    )


CASES = (
    *_cases(8, 1, 1, 7),  # one vector a row
    *_cases(8, 4, 3, kinds=("usual", "all", "none")),
    *_cases(520, 1, 5, kinds=("usual", "broken")),  # one vector more than 64 threads hold
    *_cases(520, 8, 40, kinds=("usual", "broken")),
    *_cases(5376, 1, 1, 32, kinds=("usual", "broken")),
    *_cases(5376, 5, 8, kinds=("usual", "broken")),
    *_cases(10752, 2, 3),
)


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    """Every argument. Half of the drafts are what was chosen, and by options["kind"]:

    all, none: so many of them; broken: one element of every other row of states is NaN or an infinity, and every third
    token is -1. Of more than two rows the first stands for nobody: its length and its limit are 0; the last one's limit
    is what its length is.
    """
    p: Problem = case.problem
    draw = Draw(case.seed, device)
    q_len, kind = case.options.get("q_len", 1), case.options.get("kind", "usual")
    tokens = draw.integers(1, VOCAB, p.batch, q_len)
    states = draw.normal(p.batch * q_len, p.hidden, dtype=p.dtype)
    if kind == "broken":
        bad = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device).to(states.dtype)
        rows = torch.arange(0, len(states), 2, device=device)
        states[rows, draw.integers(0, p.hidden, len(rows))] = bad[rows // 2 % 3]
        states[-1, -1] = bad[0]
        tokens.view(-1)[::3] = -1
    right = draw.integers(0, 2, p.batch, q_len - 1) == 0
    if kind in ("all", "none"):
        right[:] = kind == "all"
    lengths = draw.integers(1, 100_000, p.batch)
    limits = lengths + draw.integers(1, 2 * q_len + 1, p.batch)
    if p.batch > 2:
        lengths[0] = limits[0] = 0
        limits[-1] = lengths[-1]
    return {
        "result": torch.full((p.batch, q_len + 2), -(2**62), dtype=torch.int64, device=device),
        "token": torch.full((p.batch,), -(2**62), dtype=torch.int64, device=device),
        "lengths": lengths,
        "hidden": poisoned(p.batch, p.hidden, dtype=p.dtype, device=device, value=3e4),
        "tokens": tokens,
        "drafts": torch.where(right, tokens[:, :-1], tokens[:, :-1] + 1) if q_len > 1 else None,
        "states": states,
        "limits": limits,
        "q_len": q_len,
    }
