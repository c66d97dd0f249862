"""What a format of the KV cache costs: distributions of the next token against those by a cache that is not quantized.

The same weights read the same text, which is prefilled in chunks, once a format. So all that differs is what the
cache holds; rows of the chunk itself are read as they are stored. KL divergence is KL(P || Q) = sum P (log P - log Q)
in nats, of P by the activations' dtype and Q by the format (Kullback and Leibler, 1951), in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kerngen.errors import NumericsError, UsageError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import Keeping
from kerngen.runtime.model import Gemma4

CHUNK = 256  # tokens at once: their logits over the vocabulary lie beside each other, twice
BUCKETS = (0, 128, 512, 2048, 8192, 32768, 131072)  # where positions are counted apart
AT_ONCE = 1 << 26  # logits compared at once


@dataclass(frozen=True, slots=True)
class Distance:
    """Of some positions from the reference. kl_*: nats. top1: the share of them whose likeliest token is the same.
    perplexity: of the text's own next tokens, reference_perplexity by the reference.
    """

    first: int
    end: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True, slots=True)
class KvQuality:
    """Of one format over a text: all of it, and each bucket of positions that it reaches."""

    kv_cache_dtype: str
    kv_cache_layout: str
    whole: Distance
    buckets: tuple[Distance, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.inference_mode()
def kv_quality(
    model: Gemma4,
    ids: Sequence[int],
    kept: Sequence[Keeping],
    *,
    chunk: int = CHUNK,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> list[KvQuality]:
    """How far a cache that is `kept` so, each, is from the plain one on the text `ids`, the last of which is not read.

    advance: is told how many tokens of how many were read. Raises UsageError for a text of fewer than two tokens or
    longer than the model takes, and for a format that the model cannot have; NumericsError for NaN.
    """
    count = len(ids) - 1
    if count < 1:
        raise UsageError("a text of one token has no next one", hint="name a longer text: --text FILE")
    if count > model.config.max_positions:
        raise UsageError(f"a text of {count:,} tokens; the model takes {model.config.max_positions:,}",
                         hint="--tokens N reads its beginning")  # fmt: skip
    plain = model.config.keeping(Keeping())
    configs = [plain, *(plain.keeping(each) for each in kept)]
    caches = [KVCache.whole(config, model.ops, batch=1, max_len=count) for config in configs]
    tokens = torch.tensor(ids, dtype=torch.int64, device=model.ops.device)
    found: list[list[Tensor]] = [[] for _ in kept]
    for first in range(0, count, chunk):
        part, following = tokens[first : min(first + chunk, count)], tokens[first + 1 : min(first + chunk, count) + 1]
        hidden = [model.forward(Batch.prefill(part, first, cache), cache) for cache in caches]
        for rows in range(0, len(part), step := max(AT_ONCE // model.config.vocab_size, 1)):
            some = slice(rows, rows + step)
            reference = torch.log_softmax(model.logits(hidden[0][some]).float(), dim=-1)
            for rows_of, states in zip(found, hidden[1:], strict=True):
                rows_of.append(_compared(reference, model.logits(states[some]), following[some]))
        advance(min(first + chunk, count), count)
    compared = [torch.cat(rows).double().cpu() for rows in found]
    for each, of_format in zip(kept, compared, strict=True):
        if len(bad := of_format.isnan().any(1).nonzero()):
            raise NumericsError(f"behind token {int(bad[0]):,} the next one's distribution is no number, with "
                                f"{' '.join(each.options) or 'a plain cache'} or without")  # fmt: skip
    return [
        KvQuality(each.kv_cache_dtype, each.kv_cache_layout, *_summed(of_format))
        for each, of_format in zip(kept, compared, strict=True)
    ]


def _compared(reference: Tensor, logits: Tensor, following: Tensor) -> Tensor:
    """[n, 4] of log probabilities [n, vocabulary] and logits of as many: KL, whether both say the same token, and minus
    the log probability of `following` [n] by the format and by the reference.
    """
    own = torch.log_softmax(logits.float(), dim=-1)
    # Of a token that is never chosen 0 * inf would be asked. A NaN stays.
    divergence = torch.where(reference.isneginf(), 0.0, reference.exp() * (reference - own)).sum(-1)
    same = reference.argmax(-1) == own.argmax(-1)
    said = (-table.gather(1, following[:, None]).squeeze(1) for table in (own, reference))
    return torch.stack((divergence.clamp(min=0), same.float(), *said), dim=1)


def _summed(rows: Tensor) -> tuple[Distance, tuple[Distance, ...]]:
    def distance(first: int, end: int) -> Distance:
        kl, same, own, reference = rows[first:end].unbind(1)
        return Distance(
            first, end, float(kl.mean()), float(kl.quantile(0.99)), float(kl.max()), float(same.mean()),
            float(own.mean().exp()), float(reference.mean().exp()),
        )  # fmt: skip

    ends = [*(b for b in BUCKETS if b < len(rows)), len(rows)]
    return distance(0, len(rows)), tuple(distance(a, b) for a, b in pairwise(ends))
