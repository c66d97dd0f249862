"""What glu_conv is timed on, and torch's own operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import conv1d, glu, pad, rms_norm, silu

from kerngen.templates.glu_conv.cases import case_for
from kerngen.templates.glu_conv.spec import Problem
from kerngen.templates.kernel import Case

# Of a sound of 2, 30 and 120 s.
BENCH_CASES: tuple[Case, ...] = tuple(case_for(Problem(num_tokens=t)) for t in (50, 750, 3000))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """torch: clamp, GLU, padding, convolution, clamp, norm, SiLU, clamp."""
    p: Problem = case.problem
    of_x, of_norm, of_out = inputs["bounds"].tolist()
    kernel = inputs["taps"].t()[:, None].contiguous()

    def run() -> Tensor:
        y = glu(inputs["x"].clamp(*of_x)).view(-1, inputs["seq_len"], p.width).transpose(1, 2)
        y = conv1d(pad(y, (p.num_taps - 1, 0)), kernel, groups=p.width).transpose(1, 2)
        y = rms_norm(y.clamp(*of_norm), (p.width,), inputs["norm_weight"], inputs["eps"])
        return silu(y).clamp_(*of_out)

    return {"torch": run}
