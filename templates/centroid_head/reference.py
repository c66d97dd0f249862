"""Scores, the best centroids, their tokens' logits in torch, both products rounded to dtype.

Source: Gemma4AssistantMaskedEmbedder.forward in transformers 5.22, modeling_gemma4_assistant.py. torch.topk promises
nothing about ties; here the lower centroid comes first, which a stable sort gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.centroid_head.spec import Problem
from kerngen.templates.common.rows.torch_rows import rounded
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """ids and, unless greedy, logits, in fp32 (an id below 2^24 is exact)."""
    p, y = problem, inputs["y"].float()
    scores = rounded(y @ inputs["centroids"].float().T, p.dtype)
    scores = torch.where(scores.isnan(), float("nan"), scores)  # torch sorts a negative NaN last on a GPU
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : p.top_k]
    ids = inputs["token_ids"][chosen].flatten(1)  # [num_tokens, num_selected]
    vocab = p.num_centroids * p.cluster_size
    rows = inputs["embed"][ids.clamp(0, vocab - 1)].float()
    logits = rounded((rows @ y[:, :, None]).squeeze(-1), p.dtype)
    logits = torch.where((ids >= 0) & (ids < vocab), logits, float("nan"))
    if not p.greedy:
        return {"ids": ids.float(), "logits": logits}
    # The first NaN, or else the first place of the maximum.
    has_nan = logits.isnan().any(-1, keepdim=True)
    greatest = torch.where(has_nan, logits.isnan(), logits == logits.amax(-1, keepdim=True))
    return {"ids": ids.gather(1, greatest.int().argmax(-1, keepdim=True)).squeeze(1).float()}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "cases hold small multiples of 1/8, which fp32 sums exactly in any order")
