"""Penalties and biases on logits, with parameters of each row.

`Sampling` says what there is and in which order it applies. In a verification of drafts the tokens of one sequence
stand one after the other: the one at position j is chosen as if the drafts before it had been generated, which they
have if it counts. So penalties give the very tokens that steps without drafts give.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def counts_at(made: Tensor, drafts: Tensor | None) -> Tensor:
    """How often each token was generated before the one that is chosen, [B * q_len, vocab] int32.

    made [B, vocab] int32: in each sequence so far. drafts [B, q_len - 1] int64: the tokens that follow it; None for
    none.
    """
    if drafts is None:
        return made
    batch, num_drafts = drafts.shape
    counts = made[:, None].repeat(1, num_drafts + 1, 1)  # [B, q_len, vocab]
    before = torch.ones(num_drafts + 1, num_drafts, dtype=made.dtype, device=made.device).tril(-1)  # draft i at j > i
    index = drafts[:, None].expand(-1, num_drafts + 1, -1)
    return counts.scatter_add_(2, index, before.expand(batch, -1, -1)).flatten(0, 1)


def penalized(logits: Tensor, counts: Tensor, prompt: Tensor, penalties: Tensor) -> Tensor:
    """logits [n, vocab] fp32 after each row's penalties [3, n] fp32: repetition, frequency, presence.

    counts [n, vocab] int32: how often a token was generated; prompt [n, vocab] bool: whether the prompt has it.
    """
    repetition, frequency, presence = penalties[:, :, None]
    is_made = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_made | prompt, repeated, logits)
    return logits - frequency * counts - presence * is_made


def held_back(logits: Tensor, stops: Tensor, first: Tensor, positions: Tensor) -> Tensor:
    """logits [n, vocab] fp32 without tokens that would end an answer which is too short for that.

    stops [n, vocab] bool; positions [n] int64: where the token that is chosen will stand; first [n] int64: where one of
    `stops` may.
    """
    return logits.masked_fill(stops & (positions < first)[:, None], -math.inf)


def forbidden(bits: Tensor, vocab: int) -> Tensor:
    """[n, vocab] bool: where bits [n, ceil(vocab / 32)] int32 has a 0. Token t is bit t % 32 of word t / 32."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> places) & 1 == 0).flatten(1)[:, :vocab]
