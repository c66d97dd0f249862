"""The drafters that there are: which one a configuration is of, and a forward of the target beside one."""

from __future__ import annotations

from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DrafterConfig
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafting import Drafter, MtpDrafter
from kerngen.runtime.model import Gemma4, Taps
from kerngen.runtime.weights.dflash import DflashWeights
from kerngen.runtime.weights.layout import DrafterWeights

AnyDrafter = MtpDrafter | DflashDrafter


def forward(model: Gemma4, drafter: Drafter | None, batch: Batch, cache: KVCache, outputs: str = "all") -> Tensor:
    """The target's forward (Gemma4.forward), and what its drafter takes in of it."""
    if drafter is None or drafter.policy.taps is None:
        return model.forward(batch, cache, outputs=outputs)
    taps = Taps(drafter.policy.taps)
    states = model.forward(batch, cache, taps=taps)
    drafter.ingest(batch, taps.states, cache)
    if outputs == "none":
        return states[:0]
    return states if outputs == "all" or batch.cu_seqlens is None else states[batch.cu_seqlens[1:].long() - 1]


def drafter_for(
    config: DrafterConfig | DflashConfig, weights: DrafterWeights | DflashWeights, target: Gemma4
) -> AnyDrafter:
    """The drafter of `config`, bound to its target."""
    if isinstance(config, DflashConfig) and isinstance(weights, DflashWeights):
        return DflashDrafter(config, weights, target)
    if isinstance(config, DrafterConfig) and isinstance(weights, DrafterWeights):
        return MtpDrafter(config, weights, target)
    raise TypeError(f"{type(weights).__name__} are not the weights of a {type(config).__name__}")
