"""What draft_inputs is timed on, and torch's embedding, product and concatenation beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import embedding

from kerngen.templates.draft_inputs.cases import case_for
from kerngen.templates.draft_inputs.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(vocab_size=32768, num_tokens=t)) for t in (1, 8, 32))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the lookup, the product, then both side by side."""

    def eager() -> torch.Tensor:
        return torch.cat((embedding(inputs["ids"], inputs["table"]) * inputs["scale"], inputs["hidden"]), dim=1)

    return {"eager": eager}
