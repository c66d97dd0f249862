"""Tensors to calls of softcap_argmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.softcap_argmax.spec import Problem


@op(takes={"logits": "D[T, V]"})
def argmax(logits: Tensor, logit_cap: float) -> Call[Tensor]:
    """The index of each row's largest logit, the lowest one on a tie: [T] int64 of logits [T, vocab].

    logit_cap: 0 for none. A cap orders nothing anew, but makes ties where it rounds.
    """
    ids = empty(logits, logits.shape[0], dtype=torch.int64)
    return Call("softcap_argmax", *_asked(logits, logit_cap, ids, None), ids)


@op(takes={"logits": "D[T, V]"})
def softcap(logits: Tensor, logit_cap: float) -> Call[Tensor]:
    """logit_cap * tanh(logits / logit_cap) in fp32, or the logits themselves where logit_cap is 0: [T, vocab]."""
    ids = empty(logits, logits.shape[0], dtype=torch.int64)
    capped = empty(logits, *logits.shape, dtype=torch.float32)
    return Call("softcap_argmax", *_asked(logits, logit_cap, ids, capped), capped)


def _asked(
    logits: Tensor, logit_cap: float, ids: Tensor, capped: Tensor | None
) -> tuple[Problem | None, dict[str, Any]]:
    tokens, vocab = logits.shape
    dtype = DTYPE_NAME[logits.dtype]
    problem = None
    if tokens:
        problem = Problem(
            vocab, dtype, dtype, has_cap=logit_cap > 0, round_steps=False, write_capped=capped is not None,
            num_tokens=tokens,
        )  # fmt: skip
    return problem, {"ids": ids, "capped": capped, "logits": logits, "cap": logit_cap, "num_tokens": tokens}
