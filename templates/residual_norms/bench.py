"""What residual_norms is timed on, and torch's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm

from kerngen.templates.kernel import Case
from kerngen.templates.residual_norms.cases import case_for
from kerngen.templates.residual_norms.spec import Problem

# Of a sound of 2, 30 and 120 s.
BENCH_CASES: tuple[Case, ...] = tuple(
    case_for(Problem(has_last=last, num_tokens=t)) for last in (False, True) for t in (50, 750, 3000)
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: clamps, norms and a sum."""
    p: Problem = case.problem
    of_h, of_norms, of_out = inputs["bounds"].tolist()

    def norm(x: Tensor, which: str) -> Tensor:
        return rms_norm(x, (p.hidden,), inputs[f"{which}_weight"], inputs["eps"])

    def run() -> tuple[Tensor, Tensor]:
        h = inputs["h"].clamp(*of_h)
        x = inputs["residual"] + (norm(h, "post") if p.has_post else h)
        y = norm(x.clamp(*of_norms), "next")
        if p.has_last:
            x, y = y, norm(y.clamp(*of_norms), "last")
        return x, y.clamp(*of_out)

    return {"torch": run}
