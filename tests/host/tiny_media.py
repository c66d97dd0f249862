"""Tiny random Gemma-4 models that take images, videos and sounds, and media whose embeddings are drawn at random.

The towers are others' business: both models are given the same embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tiny_towers
import torch
from tiny_gemma import BASE, VARIANTS, prompt, save, scramble
from tiny_gemma import load as load_text
from torch import Tensor
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
)

from kerngen.runtime.media.input import MediaInput
from kerngen.runtime.media.values import Kind, Media, Placed
from kerngen.runtime.model import Gemma4

WINDOW = 16
BEGIN, END = 88, 89  # around an item
PLACEHOLDERS: dict[Kind, int] = {"image": 90, "audio": 91, "video": 92}
TYPES: dict[Kind, int] = {"image": 1, "video": 2, "audio": 3}  # mm_token_type_ids
HIDDEN: int = BASE["hidden_size"]
VISION = {"use_bidirectional_attention": "vision"}


def make_model(folder: Path, variant: str, **overrides: Any) -> Gemma4ForConditionalGeneration:
    """A random target of `variant`, saved to `folder`. Without towers: its tests hand embeddings in."""
    text = Gemma4TextConfig(**(BASE | {"sliding_window": WINDOW} | VARIANTS[variant] | overrides))
    model = Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=text, vision_config=None, audio_config=None, image_token_id=PLACEHOLDERS["image"],
            audio_token_id=PLACEHOLDERS["audio"], video_token_id=PLACEHOLDERS["video"], boi_token_id=BEGIN,
            eoi_token_id=END,
        )
    ).eval()  # fmt: skip
    scramble(model, seed=1)
    save(model, folder)
    return model


def make_with_vision(folder: Path, family: str) -> tuple[Any, list[Media]]:
    """A random model of `family` that takes pixels, saved to `folder`, and three images for it, two of one size."""
    ids = {"image_token_id": PLACEHOLDERS["image"], "audio_token_id": PLACEHOLDERS["audio"],
           "video_token_id": PLACEHOLDERS["video"], "boi_token_id": BEGIN, "eoi_token_id": END}  # fmt: skip
    text = BASE | {"sliding_window": WINDOW} | VISION
    model: Any
    if family == "gemma4":
        vision = Gemma4VisionConfig(**tiny_towers.VISION, standardize=True)
        config = Gemma4Config(text_config=Gemma4TextConfig(**text), vision_config=vision, audio_config=None, **ids)
        config._attn_implementation = "eager"
        model = Gemma4ForConditionalGeneration(config).eval()
        images = [tiny_towers.image(*grid, i) for i, grid in enumerate(((18, 12), (6, 9), (18, 12)))]
    else:
        keep = {k: v for k, v in text.items() if not k.endswith("per_layer_input")}
        projector = Gemma4UnifiedVisionConfig(**tiny_towers.UNIFIED_VISION)
        unified = Gemma4UnifiedTextConfig(**keep)
        model = Gemma4UnifiedForConditionalGeneration(
            Gemma4UnifiedConfig(text_config=unified, vision_config=projector, audio_config=None, **ids)
        ).eval()
        grids = ((6, 4), (2, 3), (6, 4))
        images = [tiny_towers.image(*grid, i, values=432, side=1) for i, grid in enumerate(grids)]
    scramble(model, seed=1)
    save(model, folder)
    return model, images


def hf_logits_of_pixels(model: Any, ids: Sequence[int], images: Sequence[Media]) -> Tensor:
    """transformers' logits [T, vocab] of a prompt with images, from their pixels.

    With the masks that its `generate` makes for a cache of fixed size. Those are google-deepmind/gemma's: full layers
    are causal, and a window cuts images too. The 12B's own forward in 5.22 makes others, of which transformers' issue
    46711 is; Gemma4's does not any more.
    """
    pixels, positions = tiny_towers.hf_pixels(images)
    types = torch.tensor([[TYPES["image"] * (token == PLACEHOLDERS["image"]) for token in ids]])
    masks = type(model).create_masks_for_generate(
        model.config, torch.empty(1, len(ids), 0), None, None, torch.arange(len(ids))[None], mm_token_type_ids=types
    )
    with torch.no_grad():
        made = model(torch.tensor([ids]), pixel_values=pixels, image_position_ids=positions, attention_mask=masks)
    return made.logits[0]


class Towers:
    """What stands for a model's towers. calls: how many items each call had."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def embed(self, items: Sequence[Media]) -> list[Tensor]:
        self.calls.append(len(items))
        return list(torch.cat([embedding(item) for item in items]).split([item.num_tokens for item in items]))


def embedding(media: Media) -> Tensor:
    """[num_tokens, hidden], decided by the digest, about as large as a scaled row of the table."""
    generator = torch.Generator().manual_seed(int.from_bytes(media.digest[:7], "little"))
    return torch.randn(media.num_tokens, HIDDEN, generator=generator)


def load(folder: Path, *, bidirectional: bool, towers: Towers | None = None) -> Gemma4:
    text = load_text(folder)
    media = MediaInput((towers or Towers()).embed, PLACEHOLDERS, bidirectional)
    return Gemma4(text.config, text.weights, text.ops, media=media)


def item(num_tokens: int, seed: int = 0, kind: Kind = "image") -> Media:
    data = np.full((num_tokens, 3), seed, np.float32 if kind == "audio" else np.uint8)
    return Media.of(kind, data, (num_tokens, 1), num_tokens)


def interleaved(*parts: int | Media, seed: int = 0) -> tuple[list[int], tuple[Placed, ...]]:
    """A prompt: so many tokens of text, or an item between BEGIN and END."""
    ids, media = [2], []
    for number, part in enumerate(parts):
        if isinstance(part, Media):
            media.append(Placed(len(ids) + 1, part))
            ids += [BEGIN, *[PLACEHOLDERS[part.kind]] * part.num_tokens, END]
        else:
            ids += [token % 85 for token in prompt(part + 1, seed=100 * seed + number)[1:]]
    return ids, tuple(media)


def hf_logits(model: Gemma4ForConditionalGeneration, ids: Sequence[int], media: Sequence[Placed]) -> Tensor:
    """transformers' logits [T, vocab] of one prompt."""
    types = torch.zeros(1, len(ids), dtype=torch.long)
    features: dict[str, list[Tensor]] = {}
    for placed in media:
        types[0, placed.start : placed.end] = TYPES[placed.media.kind]
        features.setdefault(placed.media.kind, []).append(embedding(placed.media))
    given: dict[str, Any] = {}
    if sounds := features.pop("audio", []):
        rows = torch.cat(sounds)[None]
        heard = SimpleNamespace(pooler_output=rows, attention_mask=torch.ones(rows.shape[:2], dtype=torch.bool))
        model.model.get_audio_features = lambda *_, **__: heard
        given = {"input_features": rows, "input_features_mask": rows}
    outputs = {kind: SimpleNamespace(pooler_output=rows) for kind, rows in features.items()}
    with torch.no_grad():
        made = model(torch.tensor([ids]), mm_token_type_ids=types, mm_encoder_outputs=outputs, **given)
    return made.logits[0]


def hf_greedy(
    model: Gemma4ForConditionalGeneration, ids: Sequence[int], media: Sequence[Placed], count: int
) -> list[int]:
    """`count` greedy tokens that are no placeholders, each of a forward of all that is before it."""
    ids, made = list(ids), list[int]()
    for _ in range(count):
        logits = hf_logits(model, ids, media)[-1]
        logits[list(PLACEHOLDERS.values())] = -torch.inf
        made.append(int(logits.argmax()))
        ids.append(made[-1])
    return made
