"""Scales of an fp8 KV cache that a checkpoint stores: `self_attn.k_scale` and `v_scale` of each layer with a cache."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from kerngen.errors import CheckpointError
from kerngen.runtime.config import LayerConfig, ModelConfig
from kerngen.runtime.weights.loader import find_prefix
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.quantized import FLOATS
from kerngen.runtime.weights.safetensors import Checkpoint

LEAST, MOST = 2.0**-14, 128.0  # in fp16 scales keep their bits, and so do values and what is multiplied by a scale


def with_kv_scales(config: ModelConfig, folder: Path) -> ModelConfig:
    """`config`, of a whole model, with the scales of the checkpoint in `folder`, if it is to have some.

    Raises CheckpointError for a layer without them, and for scales of another shape, or that are not from 2^-14 to 128.
    """
    if not config.has_kv_scales:
        return config
    checkpoint = open_tensors(folder)
    prefix = find_prefix(checkpoint)
    return replace(config, layers=tuple(_with(layer, checkpoint, prefix) for layer in config.layers))


def _with(layer: LayerConfig, checkpoint: Checkpoint, prefix: str) -> LayerConfig:
    if not layer.owns_kv:
        return layer
    name = f"{prefix}layers.{layer.index}.self_attn"
    found = (_scales(checkpoint, f"{name}.{of}_scale", layer.num_kv_heads) for of in "kv")
    return replace(layer, kv_scales=(next(found), next(found)))


def _scales(checkpoint: Checkpoint, name: str, num_heads: int) -> tuple[float, ...]:
    """One of all KV heads, or one of each."""
    if name not in checkpoint:
        raise CheckpointError(f"{checkpoint.folder} lacks the tensor {name}, which kv_cache_scheme implies")
    values, shape = math.prod(checkpoint.shape(name)), list(checkpoint.shape(name))
    if values not in (1, num_heads):
        raise CheckpointError(f"{checkpoint.path(name)}: {name} has shape {shape}: neither one scale nor one for each "
                              f"of {num_heads} KV heads")  # fmt: skip
    checkpoint.require(name, tuple(shape), FLOATS)
    scales = tuple(checkpoint.tensor(name).double().flatten().tolist())
    for scale in scales:
        if not LEAST <= scale <= MOST:
            raise CheckpointError(f"{checkpoint.path(name)}: {name} has {scale:g}; scales from {LEAST:g} to {MOST:g} "
                                  "are implemented")  # fmt: skip
    return scales
