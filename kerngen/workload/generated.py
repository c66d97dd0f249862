"""Makes a model with generated weights where it is to run: what is timed, or soaked, where there is no checkpoint."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from kerngen.errors import DeviceError
from kerngen.runtime.config import DrafterConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafters import AnyDrafter, drafter_for
from kerngen.runtime.footprint import footprint
from kerngen.runtime.media.input import MediaInput
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops, dense_weights
from kerngen.runtime.weights.synthetic import SyntheticSource, synthetic_drafter, synthetic_model


@torch.inference_mode()
def generated_model(
    name: str,
    config: ModelConfig,
    drafter_config: DrafterConfig | DflashConfig | None,
    ops: Ops,
    seed: int,
    *,
    own_head: bool = False,
    media: MediaInput | None = None,
) -> tuple[Gemma4, AnyDrafter | None]:
    """The model of `config` and the drafter of `drafter_config`, when their weights are there: random, from `seed`. A
    rank's are its part of what one rank would have from that seed.

    own_head: also where the checkpoint's head is the embedding, as most are. A generated model with that head says the
    same token over and over: it is the likeliest to follow itself, and whatever else the cache held would change
    nothing. Another head tells contexts apart. media: what it takes beside text. Raises DeviceError as
    `require_memory`.
    """
    if ops.device.type == "cpu":
        require_memory(name, config, drafter_config)
    if own_head:
        source, rows = SyntheticSource(config, ops, seed + 2), config.vocab_span
        head = source.head(dense_weights(source.rows("head", rows, config.hidden_size)), rows)
        weights = replace(synthetic_model(config, ops, seed), head=head)
    else:
        weights = synthetic_model(config, ops, seed)
    model = Gemma4(config, weights, ops, media=media)
    drafter: AnyDrafter | None = None
    if drafter_config is not None:
        drafter = drafter_for(drafter_config, synthetic_drafter(drafter_config, ops, seed + 1), model)
    if ops.device.type == "cuda":
        torch.cuda.synchronize()
    return model, drafter


def require_memory(name: str, config: ModelConfig, drafter: DrafterConfig | DflashConfig | None) -> None:
    """Raises DeviceError where the dense fp32 weights, which the torch backend makes, do not fit in free memory."""
    unpacked = None if drafter is None else replace(drafter, text=replace(drafter.text, quant=None))
    takes = footprint(config, unpacked, torch.float32, 1, dense=True)
    need = takes.weight_bytes + takes.drafter_bytes
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free:
        raise DeviceError(
            f"{name} takes {need / 1e9:.0f} GB in fp32 without a GPU; {free / 1e9:.0f} GB of memory are free",
            hint="run it where there is a GPU, or time a smaller model",
        )
