"""The drafters that there are: which one a configuration is of."""

from __future__ import annotations

from kerngen.runtime.config import DrafterConfig
from kerngen.runtime.dflash import DflashDrafter, dflash_ops
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops
from kerngen.runtime.weights.dflash import DflashWeights
from kerngen.runtime.weights.layout import DrafterWeights

AnyDrafter = MtpDrafter | DflashDrafter


def require_drafts(config: DrafterConfig | DflashConfig, ops: Ops) -> None:
    """Raises UsageError, with the way on, where `ops` do not run such a drafter."""
    if isinstance(config, DflashConfig):
        dflash_ops(ops)


def drafter_for(
    config: DrafterConfig | DflashConfig, weights: DrafterWeights | DflashWeights, target: Gemma4
) -> AnyDrafter:
    """The drafter of `config`, bound to its target. Raises as require_drafts."""
    if isinstance(config, DflashConfig) and isinstance(weights, DflashWeights):
        return DflashDrafter(config, weights, target)
    if isinstance(config, DrafterConfig) and isinstance(weights, DrafterWeights):
        return MtpDrafter(config, weights, target)
    raise TypeError(f"{type(weights).__name__} are not the weights of a {type(config).__name__}")
