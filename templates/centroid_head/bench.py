"""What centroid_head is timed on, and the model's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from kerngen.templates.centroid_head.cases import case_for
from kerngen.templates.centroid_head.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(greedy=greedy, num_tokens=t)) for greedy in (True, False) for t in (1, 4, 16, 64)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: product, topk, two gathers, product, arg-max if greedy. dense: the whole table instead."""
    p: Problem = case.problem
    y, embed = inputs["y"], inputs["embed"]

    def eager() -> tuple[Tensor, ...]:
        chosen = linear(y, inputs["centroids"]).topk(p.top_k, dim=-1).indices
        ids = inputs["token_ids"][chosen].flatten(1)
        logits = (embed[ids] @ y[:, :, None]).squeeze(-1).float()
        return (ids.gather(1, logits.argmax(-1, keepdim=True)),) if p.greedy else (ids, logits)

    def dense() -> Tensor:
        logits = linear(y, embed)
        return logits.argmax(-1) if p.greedy else logits.float()

    return {"eager": eager, "dense": dense}
