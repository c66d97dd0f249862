"""Tiny random multimodal Gemma-4 checkpoints, made with transformers, and what it makes of images with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_gemma import BASE, CPU, scramble
from torch import Tensor
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedAudioConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)

from kerngen.runtime.media.config import MediaConfig, Part, read_media_config
from kerngen.runtime.media.towers.dispatch import Towers
from kerngen.runtime.media.values import Kind, Media
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.weights.towers import load_towers

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 24, "patch_size": 4, "pooling_kernel_size": 3, "position_embedding_size": 48,
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
    "subsampling_conv_channels": [128, 4],
}  # fmt: skip
UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 24,
}  # fmt: skip
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def make_towers(folder: Path, **vision: Any) -> Gemma4ForConditionalGeneration:
    """As 31B and 26B-A4B with standardize=True, as the E-series with use_clipped_linears=True; saved to `folder`.

    Bounds bite: they are near 1, and some are infinite. Queries, keys and values take the same in the last layer alone,
    and so do gate and up.
    """
    config = Gemma4Config(
        text_config=Gemma4TextConfig(**BASE),
        vision_config=Gemma4VisionConfig(**(VISION | vision)),
        audio_config=Gemma4AudioConfig(**AUDIO),
    )
    config._attn_implementation = "eager"
    model = Gemma4ForConditionalGeneration(config).eval()
    scramble(model, seed=4)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(1 + torch.randn(buffer.shape, generator=generator))
        elif name.endswith(BOUNDS):
            near = 0.5 + float(torch.rand((), generator=generator))
            infinite = ".0.mlp" in name
            buffer.fill_(math.copysign(math.inf if infinite else near, -1 if name.endswith("_min") else 1))
    if config.vision_config.use_clipped_linears:
        last = model.model.vision_tower.encoder.layers[-1]
        attn, mlp = last.self_attn, last.mlp
        for proj, first in ((attn.k_proj, attn.q_proj), (attn.v_proj, attn.q_proj), (mlp.up_proj, mlp.gate_proj)):
            proj.input_min.copy_(first.input_min)
            proj.input_max.copy_(first.input_max)
    model.save_pretrained(folder)
    return model


def make_unified(folder: Path) -> Gemma4UnifiedForConditionalGeneration:
    """As the 12B, saved to `folder`."""
    keep = {k: v for k, v in BASE.items() if not k.endswith("per_layer_input")}
    config = Gemma4UnifiedConfig(
        text_config=Gemma4UnifiedTextConfig(**keep),
        vision_config=Gemma4UnifiedVisionConfig(**UNIFIED_VISION),
        audio_config=Gemma4UnifiedAudioConfig(audio_embed_dim=20),
    )
    model = Gemma4UnifiedForConditionalGeneration(config).eval()
    scramble(model, seed=6)
    model.save_pretrained(folder)
    return model


def media_config(folder: Path) -> MediaConfig:
    found = read_media_config(json.loads((folder / "config.json").read_text()))
    assert found is not None
    return found


def towers(folder: Path, *which: Part, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Towers:
    return load_towers(folder, media_config(folder), TorchOps(device, dtype), which=which)


def image(rows: int, columns: int, seed: int, *, values: int = 48, side: int = 3, kind: Kind = "image") -> Media:
    """Random patches of `values` values. side: of how many patches a token is."""
    data = np.random.default_rng(seed).integers(0, 256, (rows * columns, values), dtype=np.uint8)
    return Media.of(kind, data, (rows, columns), rows * columns // side**2)


def hf_pixels(items: Sequence[Media]) -> tuple[Tensor, Tensor]:
    """(pixel_values, image_position_ids) of images, as transformers takes them: one padded batch."""
    most = max(len(item.data) for item in items)
    pixels = torch.zeros(len(items), most, items[0].data.shape[1])
    positions = torch.full((len(items), most, 2), -1)
    for i, item in enumerate(items):
        rows, columns = item.grid
        pixels[i, : len(item.data)] = torch.tensor(item.data).float() * (1 / 255)
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions[i, : len(item.data)] = torch.stack((x, y), -1).view(-1, 2)
    return pixels, positions


def hf_embeddings(model: Any, items: Sequence[Media], side: int = 3) -> list[Tensor]:
    """What transformers puts in place of the images' placeholders."""
    with torch.no_grad():
        return list(model.get_image_features(*hf_pixels(items)).pooler_output)


def largest_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference in any item, relative to that item's largest value."""
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
