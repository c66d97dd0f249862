"""What embed is timed on, and torch's embedding and product beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import embedding

from kerngen.templates.embed.cases import case_for
from kerngen.templates.embed.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(vocab_size=32768, num_tokens=t)) for t in (1, 4, 32, 4096))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: the lookup, then the product."""
    return {"eager": lambda: embedding(inputs["ids"], inputs["table"]) * inputs["scale"]}
