"""[table[ids] * scale, hidden] in torch. Source: SinglePositionMultiTokenCandidateGenerator in transformers 5.22,
generation/candidate_generator.py, which concatenates the two, and Gemma4TextScaledWordEmbedding in modeling_gemma4.py:
the scale is cast to the table's dtype, and so is the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.common.row_torch import rounded
from kerngen.templates.draft_inputs.spec import Problem
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, embed_size + hidden] in fp32, holding values of dtype; NaN in place of unknown embeddings."""
    p = problem
    ids = inputs["ids"]
    valid = (ids >= 0) & (ids < p.vocab_size)
    rows = inputs["table"][ids.clamp(0, p.vocab_size - 1)].float()
    scale = rounded(torch.tensor(inputs["scale"], device=ids.device), p.dtype)
    embedded = torch.where(valid[:, None], rounded(rows * scale, p.dtype), float("nan"))
    return {"out": torch.cat((embedded, inputs["hidden"].float()), dim=1)}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "one product of two 16-bit floats, rounded once, and copies: exact")
