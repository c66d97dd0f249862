"""The drafters that there are: which one a configuration is of, several for one target, and a forward beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DrafterConfig, DraftPolicy
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafting import Drafter, MtpDrafter
from kerngen.runtime.model import Gemma4, Taps
from kerngen.runtime.weights.dflash import DflashWeights
from kerngen.runtime.weights.layout import DrafterWeights

AnyDrafter = MtpDrafter | DflashDrafter


class Drafters:
    """Several drafters of one target, of which each step asks one (Arm.by: its place in `among`). All of them take in
    each forward, so that the next step may ask any.
    """

    def __init__(self, among: Sequence[AnyDrafter]) -> None:
        """Raises UsageError where they do not go together (DraftPolicy.joint)."""
        self.among = tuple(among)
        self.policy = DraftPolicy.joint([drafter.policy for drafter in among])

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        """Not by itself: raises TypeError."""
        raise TypeError("several drafters: ask one of them (drafters.each)")

    def ingest(self, batch: Batch, rows: Tensor, cache: KVCache) -> None:
        """See Drafter."""
        for drafter in self.among:
            if drafter.policy.taps is not None:
                drafter.ingest(batch, rows, cache)


def each(drafter: Drafter | None) -> tuple[Drafter, ...]:
    """The drafters that a step may ask, in the order of `Arm.by`."""
    if isinstance(drafter, Drafters):
        return drafter.among
    return () if drafter is None else (drafter,)


def together(among: Sequence[AnyDrafter]) -> AnyDrafter | Drafters | None:
    """All of them as one."""
    return Drafters(among) if len(among) > 1 else among[0] if among else None


def forward(model: Gemma4, drafter: Drafter | None, batch: Batch, cache: KVCache, outputs: str = "all") -> Tensor:
    """The target's forward (Gemma4.forward), and what its drafter takes in of it."""
    if drafter is None or drafter.policy.taps is None:
        return model.forward(batch, cache, outputs=outputs)
    taps = Taps(drafter.policy.taps)
    states = model.forward(batch, cache, taps=taps)
    drafter.ingest(batch, taps.rows, cache)
    if outputs == "none":
        return states[:0]
    return states if outputs == "all" or batch.cu_seqlens is None else states[batch.cu_seqlens[1:].long() - 1]


def forward_mixed(
    model: Gemma4, drafter: Drafter | None, chunks: Batch, chunk_cache: KVCache, decode: Batch, decode_cache: KVCache
) -> tuple[Tensor, Tensor]:
    """The target's mixed forward (Gemma4.forward_mixed), and what its drafter takes in of both parts."""
    if drafter is None or drafter.policy.taps is None:
        return model.forward_mixed(chunks, chunk_cache, decode, decode_cache)
    taps = Taps(drafter.policy.taps)
    made = model.forward_mixed(chunks, chunk_cache, decode, decode_cache, taps=taps)
    slots = {kind: torch.cat((of_chunks, decode.slots[kind])) for kind, of_chunks in chunks.slots.items()}
    ids, positions = (torch.cat(both) for both in ((chunks.ids, decode.ids), (chunks.positions, decode.positions)))
    drafter.ingest(replace(decode, ids=ids, positions=positions, slots=slots), taps.rows, decode_cache)
    return made


def drafter_for(
    config: DrafterConfig | DflashConfig, weights: DrafterWeights | DflashWeights, target: Gemma4
) -> AnyDrafter:
    """The drafter of `config`, bound to its target."""
    if isinstance(config, DflashConfig) and isinstance(weights, DflashWeights):
        return DflashDrafter(config, weights, target)
    if isinstance(config, DrafterConfig) and isinstance(weights, DrafterWeights):
        return MtpDrafter(config, weights, target)
    raise TypeError(f"{type(weights).__name__} are not the weights of a {type(config).__name__}")
