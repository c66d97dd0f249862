"""The memory that a model takes, from its shapes alone: weights and cache are made without storage, and added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DrafterConfig, ModelConfig
from kerngen.runtime.engine import PREFILL_CHUNK
from kerngen.runtime.executors.record import Record
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_drafter, synthetic_model


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device while one sequence runs; activations, workspaces and CUDA's own come on top.

    cache_bytes: of `context` tokens.
    """

    weight_bytes: int
    drafter_bytes: int
    cache_bytes: int
    context: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.drafter_bytes + self.cache_bytes


def footprint(
    config: ModelConfig, drafter: DrafterConfig | None, dtype: torch.dtype, context: int, *, dense: bool = False
) -> Footprint:
    """Of the cuda backend, activations in `dtype`. dense: W4A16 matrices unpacked to `dtype`, as in a bf16 release."""
    if dense:
        config = replace(config, quant=None)
    ops = KernelOps(Record(lambda *_: None, lambda _: None), dtype)
    step = min(PREFILL_CHUNK, context)
    with torch.inference_mode():
        return Footprint(
            weight_bytes=_bytes(synthetic_model(config, ops)),
            drafter_bytes=_bytes(synthetic_drafter(drafter, ops)) if drafter is not None else 0,
            cache_bytes=KVCache(config, ops, batch=1, max_len=context, max_step=step).num_bytes,
            context=context,
        )


def _bytes(weights: Any) -> int:
    """Of all tensors in it, each once: a tied head is its embedding."""
    tensors = {id(t): t for t in _tensors(weights)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _tensors(getattr(value, f.name))
