"""From logits to tokens: greedy, or temperature, top-k and top-p; and which drafts a sampled step accepts.

Random numbers come as tensors of uniforms, made once from the seed and indexed by token position, so that a step has no
state of its own, can be captured in a CUDA graph, and draws the same on every device.

Where no token can be chosen (a logit is NaN, or none is finite) the token is -1: a step does not wait for the host,
which finds it among the tokens that it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.errors import UsageError

# Nearer to 0 or to infinity a temperature or its reciprocal does not fit in fp32. Either limit is reached long before:
# a gap between two logits, divided by these, is 0 or beyond the range of exp.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1 keep every token. Filters apply in that order, as transformers'."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature {self.temperature} is not a number from 0")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k} is negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p} is not in (0, 1]")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UsageError(f"seed {self.seed} does not fit in 64 bits")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def uniforms(self, count: int) -> Tensor:
        """[count, 2] fp32 in [0, 1) on the CPU: for each position, one to accept a draft with and one to sample."""
        return torch.rand(count, 2, generator=torch.Generator().manual_seed(self.seed))


def distribution(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that survive the filters and their probabilities, likeliest first.

    logits [n, vocab] fp32. Returns ids [n, m] int64 and probs [n, m] fp32 that sum to 1 (0 where filtered).
    Those of a row with a NaN, or without a finite logit, are NaN.
    """
    vocab = logits.shape[-1]
    top, ids = logits.topk(min(sampling.top_k, vocab), dim=-1) if sampling.top_k else logits.sort(-1, descending=True)
    temperature = min(max(sampling.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    probs = torch.softmax((top - top[:, :1]) / temperature, dim=-1)  # the likeliest is 0 at any temperature
    if sampling.top_p < 1:
        before = probs.cumsum(-1) - probs  # the mass of likelier tokens: keep until it reaches top_p
        top_p = max(sampling.top_p, torch.finfo(torch.float32).tiny)  # the likeliest has 0 before it and always stays
        probs = torch.where(before < top_p, probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return ids, probs


def likeliest(logits: Tensor) -> Tensor:
    """The token [n] int64 of each row's largest logit, the lowest one on a tie; -1 where that is NaN or infinite.

    logits [n, vocab] fp32.
    """
    top, ids = logits.max(-1)
    return torch.where(top.isfinite(), ids, -1)


def sample(ids: Tensor, probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token [n] int64 a row, by inverting the cumulative distribution; probs [n, m] need not sum to 1.

    -1 for a row without any mass, or whose mass is NaN.
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    # The first entry whose cumulative mass exceeds the target, which rounding may not bring up to the total: so never
    # an entry of mass 0.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target[:, None], right=True).clamp(max=cdf.shape[-1] - 1)
    return torch.where(total > 0, ids.gather(1, index).squeeze(1), -1)


def accept_greedy(drafts: Tensor, targets: Tensor) -> Tensor:
    """How many drafts [B, k] match what the target chose [B, k + 1], from the first on. Returns [B] int64."""
    return (drafts == targets[:, :-1]).long().cumprod(1).sum(1)


def accept_sampled(drafts: Tensor, ids: Tensor, probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Accept greedy drafts without changing the distribution: a draft is a one-hot proposal.

    Draft i is accepted with its probability p_i; at the first rejection the token is drawn from p without that draft,
    after the last acceptance from p itself. drafts [B, k]; ids, probs [B, k + 1, m]; uniforms [B, k + 1, 2].
    Returns num_accepted [B] and tokens [B, k + 1], of which the first num_accepted + 1 are valid.
    """
    batch, count = drafts.shape
    hit = ids == torch.nn.functional.pad(drafts, (0, 1), value=-1)[..., None]  # the last row has no draft
    p_draft = (probs * hit).sum(-1)[:, :count]
    accepted = (uniforms[:, :count, 0] < p_draft).long().cumprod(1).sum(1)
    rest = torch.where(hit, 0.0, probs)
    drawn = sample(ids.flatten(0, 1), rest.flatten(0, 1), uniforms[..., 1].flatten()).view(batch, count + 1)
    row = torch.arange(count + 1, device=drafts.device)
    kept = torch.nn.functional.pad(drafts, (0, 1))
    return accepted, torch.where(row < accepted[:, None], kept, drawn)
