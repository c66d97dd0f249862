"""The end of a decode step in torch, one row after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.decode_advance.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """result [B, q_len + 2], token, lengths [B] in fp64, which holds all of them exactly; hidden [B, H] in fp32."""
    tokens, drafts, q_len = inputs["tokens"], inputs["drafts"], inputs["q_len"]
    accepted = torch.zeros_like(tokens[:, 0])
    for i in range(q_len - 1):
        accepted += (accepted == i) & (drafts[:, i] == tokens[:, i])
    rows = torch.arange(len(tokens), device=tokens.device)
    hidden = inputs["states"].view(len(tokens), q_len, -1)[rows, accepted]
    count = accepted + 1
    is_finite = hidden.isfinite().all(-1)
    return {
        "result": torch.cat((count[:, None], tokens, is_finite[:, None].long()), dim=1).double(),
        "token": tokens[rows, accepted].clamp(min=0).double(),
        "lengths": torch.minimum(inputs["lengths"] + count, inputs["limits"]).double(),
        "hidden": hidden.float(),
    }


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "integers, and copies")
