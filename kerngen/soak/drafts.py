"""A drafter that is right now and then, whatever its weights: generated ones accept next to nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.drafting import Drafter
from kerngen.runtime.ops import Ops

NUM_ENTRIES = 1 << 22
ERR_EVERY = 5  # at one position of so many nothing is remembered: every number of drafts gets accepted
_PRIMES = (2_654_435_761, 40_503)  # of Knuth's multiplicative hashing


class RememberingDrafter:
    """Drafts what followed the same token at the same position before, where it knows, else what `drafter` says.

    What it knows is a table on the device, read within the captured step and written between two engines' lives: a
    request that is asked again meanwhile has the same drafts. Entries that collide make a draft wrong, and no more.
    Of a divided model it is rank 0 that knows, and the other ranks get its drafts.
    """

    def __init__(self, drafter: Drafter, ops: Ops) -> None:
        self._drafter, self.policy = drafter, drafter.policy
        self._ops = ops
        self._next = torch.full((NUM_ENTRIES,), -1, dtype=torch.int64, device=ops.device)

    @torch.inference_mode()
    def remember(self, num_prompt_tokens: int, tokens: list[int]) -> None:
        """`tokens` followed a prompt of num_prompt_tokens."""
        known = torch.tensor(tokens, dtype=torch.int64, device=self._next.device)
        positions = torch.arange(num_prompt_tokens, num_prompt_tokens + len(tokens), device=self._next.device)
        kept = positions[:-1] % ERR_EVERY != 0
        self._next[_places(positions[:-1][kept], known[:-1][kept])] = known[1:][kept]

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        drafts = self._drafter.propose(ids, hidden, lengths, cache, count, max_kv_len)
        for i in range(count):
            known = self._next[_places(lengths + i, ids)]
            ids = torch.where(known >= 0, known, drafts[:, i])
            drafts[:, i] = ids
        ranks = self._ops.collectives
        if ranks.world.size == 1:
            return drafts
        return ranks.all_reduce(drafts if ranks.world.rank == 0 else torch.zeros_like(drafts))

    def ingest(self, batch: Batch, rows: Tensor, cache: KVCache) -> None:
        self._drafter.ingest(batch, rows, cache)


def _places(positions: Tensor, tokens: Tensor) -> Tensor:
    """Entries [n] of tokens [n] at positions [n], int64."""
    return (positions * _PRIMES[0] + tokens * _PRIMES[1]) % NUM_ENTRIES
