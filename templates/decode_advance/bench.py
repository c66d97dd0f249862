"""What decode_advance is timed on, and torch's operations beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kerngen.templates.decode_advance.cases import case_for
from kerngen.templates.decode_advance.spec import Problem
from kerngen.templates.kernel import Case

BENCH_CASES: tuple[Case, ...] = (
    *(case_for(Problem(batch=b)) for b in (1, 32)),
    case_for(Problem(batch=32), q_len=4),
)


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """eager: what torch does of it where there are no drafts (the check for finite values is left to the host)."""
    if inputs["q_len"] > 1:
        return {}
    tokens, states, token, lengths, hidden = (inputs[n] for n in ("tokens", "states", "token", "lengths", "hidden"))

    def eager() -> None:
        torch.clamp(tokens[:, 0], min=0, out=token)
        hidden.copy_(states)
        torch.minimum(lengths + 1, inputs["limits"], out=lengths)

    return {"eager": eager}
