"""The memory that a model takes, from its shapes alone: weights and cache are made without storage, and added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerngen.runtime.config import NO_DRAFTER, DrafterConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.engine.media_cache import MEDIA_CACHE_BYTES
from kerngen.runtime.engine.sizing import CacheShape, usual_step
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.shapes import ShapesAlone
from kerngen.runtime.media.config import MediaConfig
from kerngen.runtime.media.input import MOST_IMAGE_TOKENS
from kerngen.runtime.ops.kernels import KernelOps, has_room, screen_of
from kerngen.runtime.weights.layout import DrafterWeights
from kerngen.runtime.weights.synthetic import synthetic_drafter, synthetic_model, synthetic_towers

GPU_GB = (16, 24, 32, 80, 141)
CONTEXTS = (2048, 8192, 32768, 131072, 262144)
# Neither weights nor cache: CUDA's own context and modules (about 0.6 GB), activations of a prefill chunk and of the
# logits of a batch, cuBLAS's workspace, captured graphs.
RESERVE_BYTES = 15 * 10**8


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device while one sequence runs; activations, workspaces and CUDA's own come on top.

    cache_bytes: of `context` tokens. screen_bytes: of the heads in few bits, the model's and the drafter's, each of
    which is made where there is room (ops/kernels.py). tower_bytes: of what embeds images and sound, where it is asked
    for.
    """

    weight_bytes: int
    drafter_bytes: int
    cache_bytes: int
    context: int
    screen_bytes: tuple[int, int] = (0, 0)
    tower_bytes: int = 0


def footprint(
    config: ModelConfig, drafter: DrafterConfig | DflashConfig | None, dtype: torch.dtype, context: int, *,
    dense: bool = False, media: MediaConfig | None = None,
) -> Footprint:  # fmt: skip
    """Of the cuda backend, activations in `dtype`. dense: W4A16 matrices unpacked to `dtype`, as in a bf16 release.
    media: the parts that are loaded beside the text model.
    """
    if dense:
        config = replace(config, quant=None)
    policy = NO_DRAFTER if drafter is None else drafter.policy
    ops = KernelOps(Record(lambda *_: None, lambda _: None), dtype)
    shape = CacheShape(config, dtype, step=usual_step(policy), drafter=policy)
    with torch.inference_mode():
        target = synthetic_model(config, ops)
        assistant = None if drafter is None else synthetic_drafter(drafter, ops)
        head = target.head if assistant is not None else None  # a DFlash drafter's, too
        if isinstance(assistant, DrafterWeights):
            head = assistant.head if assistant.centroids is None else None
        return Footprint(
            weight_bytes=_bytes(target),
            drafter_bytes=_bytes(assistant),
            cache_bytes=shape.num_bytes(shape.pages(1, context)),
            context=context,
            screen_bytes=(
                screen_of(target.head),
                0 if head is None else screen_of(head, likely=True),
            ),
            tower_bytes=0 if media is None else tower_bytes(media, dtype),
        )


def tower_bytes(media: MediaConfig, dtype: torch.dtype) -> int:
    """Bytes of what embeds images and sound, with weights in `dtype`."""
    ops = KernelOps(Record(lambda *_: None, lambda _: None), dtype)
    with torch.inference_mode(), ShapesAlone():
        return _bytes(synthetic_towers(media, ops).weights)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model takes on a GPU, and what fits beside it. Bytes; see `CacheShape` for token_bytes and window_bytes.

    By GB (10^9 bytes) of the GPU, screen_bytes: of the heads in few bits, see `screened`; sequences: by context, how
    many run at once; longest: the context of a single one, 0 where the weights alone do not fit. tower_bytes: of what
    embeds images and sound, media_cache_bytes: of the embeddings that are kept; 0 where they are not asked for.
    """

    weight_bytes: int
    drafter_bytes: int
    tower_bytes: int
    token_bytes: int
    window_bytes: int
    screen_bytes: dict[int, int]
    sequences: dict[int, dict[int, int]]
    longest: dict[int, int]
    media_cache_bytes: int = 0


def plan(
    config: ModelConfig, drafter: DrafterConfig | DflashConfig | None, dtype: torch.dtype, *, dense: bool = False,
    media: MediaConfig | None = None,
) -> Plan:  # fmt: skip
    """Of the cuda backend, as `footprint`; contexts that the model does not take are left out."""
    takes = footprint(config, drafter, dtype, 1, dense=dense, media=media)
    longest_block = MOST_IMAGE_TOKENS if media is not None and media.images_see_themselves else 0
    policy = NO_DRAFTER if drafter is None else drafter.policy
    shape = CacheShape(config, dtype, step=usual_step(policy), drafter=policy, longest_block=longest_block)
    kept = 0 if media is None else MEDIA_CACHE_BYTES
    contexts = [c for c in CONTEXTS if c <= config.max_positions]
    screens = {gb: screened(takes, gb * 10**9 - RESERVE_BYTES) for gb in GPU_GB}
    weights = takes.weight_bytes + takes.drafter_bytes + takes.tower_bytes
    budgets = {gb: gb * 10**9 - RESERVE_BYTES - weights - screens[gb] - kept for gb in GPU_GB}
    return Plan(
        weight_bytes=takes.weight_bytes,
        drafter_bytes=takes.drafter_bytes,
        tower_bytes=takes.tower_bytes,
        token_bytes=shape.token_bytes,
        window_bytes=shape.window_bytes,
        screen_bytes=screens,
        sequences={gb: {c: shape.most_sequences(budget, c) for c in contexts} for gb, budget in budgets.items()},
        longest={gb: shape.most_tokens(budget) for gb, budget in budgets.items()},
        media_cache_bytes=kept,
    )


def screened(takes: Footprint, free_bytes: int) -> int:
    """Bytes of the heads in few bits that `KernelOps.screen` makes, in the order of loading, of `free_bytes`. Towers
    come first.
    """
    free, made = free_bytes - takes.tower_bytes, 0
    for weight_bytes, screen_bytes in zip((takes.weight_bytes, takes.drafter_bytes), takes.screen_bytes, strict=True):
        free -= weight_bytes
        if screen_bytes and has_room(screen_bytes, free):
            free, made = free - screen_bytes, made + screen_bytes
    return made


def _bytes(weights: Any) -> int:
    """Of all tensors in it, each once: a tied head is its embedding, or some rows of it."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(weights):
        place = tensor.untyped_storage()._cdata
        sizes[place] = max(sizes.get(place, 0), tensor.numel() * tensor.element_size())
    return sum(sizes.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))
