"""From logits to tokens: greedy, or temperature, min-p, top-k and top-p; and which drafts a step accepts.

The token at a position of a sequence is a function of the logits there, the request's parameters and one uniform
number, which is a function of the request's seed and of that position alone. So it does not depend on who else is in
the batch, on a restart, or on the device, as far as the logits do not.

Nor does it depend on drafts: the token is chosen as if there were none, and a draft is accepted if it is that very
token. This is speculative sampling (arXiv 2211.17192) for a drafter that proposes one token d, a distribution with all
its mass on d: a draft must be accepted with probability min(1, p(d) / 1), which is the probability that a token drawn
from p is d, and else a token must follow p without d, which the token drawn does. The usual form of it draws a second
number after a rejection; this one gives the very tokens that steps without drafts give.

Where no token can be chosen (a logit is NaN, or none is finite) the token is -1: a step does not wait for the host,
which finds it among the tokens that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kerngen.errors import UsageError

# Nearer to 0 or to infinity a temperature or its reciprocal does not fit in fp32. Either limit is reached long before:
# a gap between two logits, divided by these, is 0 or beyond the range of exp.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
CUTS = (64, 1024)  # how many of the likeliest tokens a step may look at in place of all: picking few beats sorting many
MOST_PENALTY = 2.0  # of what is subtracted for a token that was generated, either way, as OpenAI's
MOST_BIAS = 100.0  # either way, as OpenAI's: enough to forbid a token or to force it


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 keep every token; min_p drops what is less likely than so
    many times the likeliest. repetition_penalty 1 and the other two penalties 0 change nothing: of tokens that the
    prompt or the answer has, logits are divided by the first where they are positive, else multiplied (transformers);
    of tokens that the answer has, frequency_penalty times their number and presence_penalty are subtracted (OpenAI).
    logit_bias: (token, what is added to its logit). min_tokens: so many are made before one that would end the answer,
    one of the request's stop_ids or the model's end of sequence, may be chosen.

    Order: tokens that may not be chosen, biases, repetition, frequency, presence, and of a row that is sampled then
    temperature, min_p, top_k and top_p. Source: the docstring of vLLM's Sampler, vllm/v1/sample/sampler.py of 0.20,
    and transformers' logits processors.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature {self.temperature} is not a number from 0")
        if self.top_k < 0:
            raise UsageError(f"top_k {self.top_k} is negative; 0 keeps every token")
        if self.top_k >= 1 << 63:
            raise UsageError(f"top_k {self.top_k} does not fit in 64 bits; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p} is not in (0, 1]")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UsageError(f"seed {self.seed} does not fit in 64 bits")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p {self.min_p} is not in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MOST_PENALTY <= (value := getattr(self, name)) <= MOST_PENALTY:
                raise UsageError(f"{name} {value} is not in [-{MOST_PENALTY:g}, {MOST_PENALTY:g}]")
        if not 0 < self.repetition_penalty < math.inf:
            raise UsageError(f"repetition_penalty {self.repetition_penalty} is not a number above 0; 1 changes nothing")
        if bad := [(t, b) for t, b in self.logit_bias if not -MOST_BIAS <= b <= MOST_BIAS]:
            raise UsageError(f"logit_bias {bad[0][1]} of token {bad[0][0]} is not in [-{MOST_BIAS:g}, {MOST_BIAS:g}]")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise UsageError("logit_bias names a token twice", hint="give each token one bias")
        if self.min_tokens < 0:
            raise UsageError(f"min_tokens {self.min_tokens} is negative; 0 lets an answer end at once")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_penalized(self) -> bool:
        """Whether it matters what was generated, or what the prompt holds."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def floats(self) -> tuple[float, float, float]:
        """(temperature, top_p, min_p) in the range of fp32; temperature 0 only where greedy."""
        temperature = 0.0 if self.is_greedy else min(max(self.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
        # The likeliest has 0 before it: it stays.
        return temperature, max(self.top_p, torch.finfo(torch.float32).tiny), self.min_p

    @property
    def penalties(self) -> tuple[float, float, float]:
        """(repetition, frequency, presence) in the range of fp32."""
        repetition = min(max(self.repetition_penalty, MIN_TEMPERATURE), MAX_TEMPERATURE)
        return repetition, self.frequency_penalty, self.presence_penalty

    @property
    def key(self) -> int:
        """What `uniforms` makes of the seed: neighbouring seeds have nothing in common."""
        return _signed(_mixed(self.seed + _GOLDEN))


@dataclass(frozen=True, slots=True)
class Parameters:
    """Requests' parameters, an entry a row: temperature [n] fp32 (0: greedy), top_p [n] fp32, top_k, key [n] int64.

    min_p [n] fp32; None where it is 0 in every row, and nothing is spent on it.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    key: Tensor
    min_p: Tensor | None = None

    @staticmethod
    def of(sampling: Sequence[Sampling], device: torch.device | str = "cpu") -> Parameters:
        floats = torch.tensor([s.floats for s in sampling], dtype=torch.float32, device=device)
        ints = torch.tensor([(s.top_k, s.key) for s in sampling], dtype=torch.int64, device=device)
        min_p = floats[:, 2] if any(s.min_p for s in sampling) else None
        return Parameters(floats[:, 0], floats[:, 1], ints[:, 0], ints[:, 1], min_p)

    def repeated(self, count: int) -> Parameters:
        """Each row `count` times: a verification chooses so many tokens of each sequence."""
        if count == 1:
            return self
        temperature, top_p, top_k, key = (
            t.repeat_interleave(count) for t in (self.temperature, self.top_p, self.top_k, self.key)
        )
        min_p = None if self.min_p is None else self.min_p.repeat_interleave(count)
        return Parameters(temperature, top_p, top_k, key, min_p)


def cut_for(sampling: Iterable[Sampling]) -> int:
    """How many of the likeliest tokens hold all that any of `sampling` keeps: one of CUTS, or 0 for all tokens."""
    top_ks = [s.top_k for s in sampling if not s.is_greedy]
    if 0 in top_ks:
        return 0
    return next((cut for cut in CUTS if cut >= max(top_ks, default=0)), 0)


# -- random numbers: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), its state the position: no state, any order.

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _signed(word: int) -> int:
    """The 64 bits of `word` as int64 reads them."""
    return (word & _WORD) - ((word & (1 << 63)) << 1)


def _mixed(word: int) -> int:
    """SplitMix64's finalizer: a permutation of 64-bit words that leaves no trace of neighbours."""
    word &= _WORD
    word = (word ^ (word >> 30)) * _MIX1 & _WORD
    word = (word ^ (word >> 27)) * _MIX2 & _WORD
    return word ^ (word >> 31)


def uniforms(key: Tensor, positions: Tensor) -> Tensor:
    """[n] fp32 in [0, 1), multiples of 2^-24: one number for each key [n] and position [n], both int64.

    The top 24 bits of SplitMix64 number `position` of the stream that begins at `key`. int64 arithmetic wraps around;
    a right shift of it brings in the sign, which is masked off.
    """

    def shifted(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    word = key + (positions + 1) * _signed(_GOLDEN)
    word = (word ^ shifted(word, 30)) * _signed(_MIX1)
    word = (word ^ shifted(word, 27)) * _signed(_MIX2)
    return shifted(word ^ shifted(word, 31), 40).to(torch.float32) * 2.0**-24


# -- tokens


def distribution(logits: Tensor, wanted: Parameters, cut: int = 0) -> tuple[Tensor, Tensor]:
    """The tokens that survive each row's filters and their probabilities, likeliest first.

    logits [n, vocab] fp32. cut: no row keeps more than so many tokens, 0 for no limit (`cut_for`). Returns ids [n, m]
    int64 and probs [n, m] fp32 that sum to 1 (0 where filtered). Those of a row with a NaN, or without a finite logit,
    are NaN. Of a greedy row they mean nothing.
    """
    vocab = logits.shape[-1]
    top, ids = logits.topk(min(cut, vocab), dim=-1) if cut else logits.sort(-1, descending=True)
    rank = torch.arange(top.shape[-1], device=top.device)
    dropped = (rank >= wanted.top_k[:, None]) & (wanted.top_k > 0)[:, None]
    scaled = (top - top[:, :1]) / wanted.temperature.clamp(min=MIN_TEMPERATURE)[:, None]  # the likeliest is 0 anyway
    if wanted.min_p is not None:
        dropped = dropped | (scaled < wanted.min_p.log()[:, None])  # log p - log max p
    probs = torch.softmax(scaled.masked_fill(dropped, -math.inf), dim=-1)
    before = probs.cumsum(-1) - probs  # the mass of likelier tokens: keep until it reaches top_p
    top_p = torch.where(wanted.top_p < 1, wanted.top_p, math.inf)[:, None]
    probs = probs.masked_fill(before >= top_p, 0.0)
    return ids, probs / probs.sum(-1, keepdim=True)


def likeliest(logits: Tensor) -> Tensor:
    """The token [n] int64 of each row's largest logit, the lowest one on a tie; -1 where that is NaN or infinite.

    logits [n, vocab] fp32.
    """
    top, ids = logits.max(-1)
    return torch.where(top.isfinite(), ids, -1)


def sample(ids: Tensor, probs: Tensor, at: Tensor) -> Tensor:
    """One token [n] int64 a row, by inverting the cumulative distribution at `at` [n] in [0, 1).

    probs [n, m] need not sum to 1. -1 for a row without any mass, or whose mass is NaN.
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    # The first entry whose cumulative mass exceeds the target, which rounding may not bring up to the total: so never
    # an entry of mass 0.
    target = torch.minimum(at * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target[:, None], right=True).clamp(max=cdf.shape[-1] - 1)
    return torch.where(total > 0, ids.gather(1, index).squeeze(1), -1)


def choose(logits: Tensor, positions: Tensor, wanted: Parameters, cut: int = 0) -> Tensor:
    """The token [n] int64 of each row of logits [n, vocab] fp32 that will stand at positions [n] int64; -1: none."""
    ids, probs = distribution(logits, wanted, cut)
    drawn = sample(ids, probs, uniforms(wanted.key, positions))
    return torch.where(wanted.temperature > 0, drawn, likeliest(logits))


def accepted(drafts: Tensor, tokens: Tensor) -> Tensor:
    """How many drafts [B, k] are what was chosen, tokens [B, k + 1], from the first on. Returns [B] int64."""
    return (drafts == tokens[:, :-1]).long().cumprod(1).sum(1)
