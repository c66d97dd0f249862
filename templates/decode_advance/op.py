"""Tensors to calls of decode_advance."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.decode_advance.spec import Problem


@op(
    mutates=("token", "lengths", "hidden"),
    takes={
        "tokens": "int64[B, Q]",
        "drafts": "int64[B, Q - 1]",
        "states": "D[B * Q, H]",
        "token": "int64[B]",
        "lengths": "int64[B]",
        "limits": "int64[B]",
        "hidden": "D[B, H]",
    },
)
def decode_advance(
    tokens: Tensor,
    drafts: Tensor | None,
    states: Tensor,
    token: Tensor,
    lengths: Tensor,
    limits: Tensor,
    hidden: Tensor,
) -> Call[Tensor]:
    """The end of a decode step: tokens [B, Q] int64 were chosen from the hidden states [B * Q, H] of its tokens.

    drafts [B, Q - 1] int64: what was fed after the last known token; None where Q is 1. Those at the front that are
    what was chosen are accepted, and the token after them counts. In place: token [B] int64 becomes the last of those
    that count (0 for a negative one), hidden [B, H] the state that gave it; lengths [B] int64 grows by how many count,
    up to limits [B] int64. Returns [B, Q + 2] int64: how many count, tokens, and 1 where hidden is finite, else 0.
    """
    (batch, q_len), (_, size) = tokens.shape, hidden.shape
    require(drafts is not None or q_len < 2, f"drafts are missing: {q_len} tokens of a sequence follow {q_len - 1}")
    result = empty(tokens, batch, q_len + 2)
    problem = Problem(size, DTYPE_NAME[hidden.dtype], batch) if batch and q_len else None
    arguments = {
        "result": result, "token": token, "lengths": lengths, "hidden": hidden, "tokens": tokens, "drafts": drafts,
        "states": states, "limits": limits, "q_len": q_len,
    }  # fmt: skip
    return Call("decode_advance", problem, arguments, result)
