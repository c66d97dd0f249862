"""[table[ids] * scale, hidden] in torch. Source: SinglePositionMultiTokenCandidateGenerator in transformers 5.22,
generation/candidate_generator.py, which concatenates the two; the first is embed's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.draft_inputs.spec import Problem
from kerngen.templates.embed import reference as embed
from kerngen.templates.kernel import Tolerance


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """out [num_tokens, embed_size + hidden] in fp32, holding values of dtype; NaN in place of unknown embeddings."""
    embedded = embed.expected(problem.embedding, inputs)["out"]
    return {"out": torch.cat((embedded, inputs["hidden"].float()), dim=1)}


def tolerance(problem: Problem) -> Tolerance:
    return Tolerance(0.0, 0.0, "one product of two 16-bit floats, rounded once, and copies: exact")
