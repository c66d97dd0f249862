"""One vector, a row that no power of two divides, a model's row."""

from typing import Any

import torch

from kerngen.templates.common.rows.torch_rows import Draw, poisoned
from kerngen.templates.kernel import Case

from .spec import Problem


def case_for(problem: Problem) -> Case:
    return Case(f"h{problem.hidden}_{problem.dtype}_t{problem.num_tokens}", problem, seed=problem.hidden)


CASES = tuple(case_for(Problem(h, d, t)) for h in (8, 1544, 5376) for d in ("fp16", "bf16") for t in (1, 5))


def inputs(case: Case, device: torch.device | str) -> dict[str, Any]:
    p, draw = case.problem, Draw(case.seed, device)
    return {
        "out": poisoned(p.num_tokens, p.hidden, dtype=p.dtype, device=device),
        "x": draw.normal(p.num_tokens, p.hidden, dtype=p.dtype),
        "weight": draw.normal(p.hidden, dtype=p.dtype),
    }
