"""Tensors to calls of centroid_head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.centroid_head.spec import Problem
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty

_TAKES = {"y": "D[B, H]", "centroids": "D[C, H]", "token_ids": "int64[C, W]", "embed": "D[C * W, H]"}


@op(takes=_TAKES)
def centroid_greedy(y: Tensor, centroids: Tensor, top_k: int, token_ids: Tensor, embed: Tensor) -> Call[Tensor]:
    """The likeliest of the tokens of the top_k centroids that score highest: [B] int64 of y [B, H].

    centroids [C, H]; token_ids [C, vocab / C] int64; embed [vocab, H]. The token with the greatest y . embed[id]; on a
    tie that of the better centroid, then the first of its row. Scores and logits are rounded to y's dtype.
    """
    ids = empty(y, y.shape[0], dtype=torch.int64)
    return Call("centroid_head", *_asked(y, centroids, top_k, token_ids, embed, ids, None), ids)


@op(takes=_TAKES)
def centroid_logits(
    y: Tensor, centroids: Tensor, top_k: int, token_ids: Tensor, embed: Tensor
) -> Call[tuple[Tensor, Tensor]]:
    """The tokens of the top_k centroids that score highest, [B, n] int64, and their logits y . embed[id], [B, n] fp32.

    Arguments as for centroid_greedy; n = top_k * vocab / C. The best centroid's tokens come first, each centroid's as
    token_ids has them; of equal centroids the lower comes first.
    """
    n = top_k * token_ids.shape[1]
    ids, logits = empty(y, y.shape[0], n, dtype=torch.int64), empty(y, y.shape[0], n, dtype=torch.float32)
    return Call("centroid_head", *_asked(y, centroids, top_k, token_ids, embed, ids, logits), (ids, logits))


def _asked(
    y: Tensor, centroids: Tensor, top_k: int, token_ids: Tensor, embed: Tensor, ids: Tensor, logits: Tensor | None
) -> tuple[Problem | None, dict[str, Any]]:
    (tokens, hidden), (num_centroids, cluster_size) = y.shape, token_ids.shape
    problem = None
    if tokens:
        problem = Problem(
            num_centroids, cluster_size, top_k, hidden, DTYPE_NAME[y.dtype], greedy=logits is None, num_tokens=tokens
        )
    arguments = {
        "ids": ids, "logits": logits, "y": y, "centroids": centroids, "token_ids": token_ids, "embed": embed,
        "num_tokens": tokens,
    }  # fmt: skip
    return problem, arguments
