"""Log-probabilities of tokens, from the model's logits before any logit processor.

That is what vLLM calls raw_logprobs, its default: neither temperature nor filters, penalties, biases or masks count.
Tokens that the model itself never generates (`Gemma4.suppressed_ids`) have no probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_LOGPROBS = 20  # of the likeliest tokens, as OpenAI's


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A generated token, its log-probability, and (token, log-probability) of the likeliest ones, likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprob_words(logits: Tensor, tokens: Tensor) -> Tensor:
    """What `read_logprobs` reads, [n, 1 + 2 * m] int64: the bits of 1 + m fp32 log-probabilities, of the token and of
    the m likeliest, then the likeliest tokens.

    logits [n, vocab] fp32; tokens [n] int64: chosen from them. m = min(MOST_LOGPROBS, vocab). A token of -1 has none
    that mean anything.
    """
    top, ids = logits.topk(min(MOST_LOGPROBS, logits.shape[-1]), dim=-1)
    most = top[:, :1]
    own = logits.gather(1, tokens.clamp(min=0)[:, None])
    total = (logits - most).exp().sum(-1, keepdim=True).log()
    values = torch.cat((own, top), dim=1) - most - total
    return torch.cat((values.view(torch.int32).long(), ids), dim=1)


def read_logprobs(words: NDArray[np.int64], token: int, count: int) -> TokenLogprobs:
    """Of one token: words [1 + 2 * m] as `logprob_words` made them. count: of the likeliest tokens that are wanted."""
    num_top = len(words) // 2
    own, *values = words[: num_top + 1].astype(np.int32).view(np.float32).tolist()
    top = zip(words[num_top + 1 :].tolist(), values, strict=True)
    return TokenLogprobs(token, own, tuple((t, v) for t, v in list(top)[:count] if v > -math.inf))
