"""Shapes of torch functions on tensors without storage, where torch itself would load its compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ShapesAlone(TorchFunctionMode):
    """While it holds, the functions of _FORMS give empty meta tensors for meta tensors; all others are torch's own.

    Many of torch's functions are Python where there is no storage, and the first of them loads sympy and the compiler:
    two seconds, several times what the record of a model takes. A model's layers, which need none of them, are spared
    the asking (`DedupedLayers`).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type[Any]], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (form := _FORMS.get(func)) is not None and (made := form(*args, **kwargs)) is not None:
            return torch.empty(made[0], dtype=made[1], device="meta")
        return func(*args, **kwargs)


_Form = tuple[Sequence[int], torch.dtype] | None  # None: torch says


def _elementwise(a: Any, b: Any, *, alpha: int = 1, **how: Any) -> _Form:
    tensors = [x for x in (a, b) if isinstance(x, Tensor)]
    if how or not all(isinstance(x, int) or (isinstance(x, Tensor) and x.is_meta) for x in (a, b)):
        return None
    return np.broadcast_shapes(*(x.shape for x in tensors)), torch.result_type(a, b)


def _like(x: Tensor, **how: Any) -> _Form:
    return (x.shape, x.dtype) if not how and x.is_meta and x.is_contiguous() else None


def _arange(*bounds: Any, dtype: torch.dtype = torch.int64, device: Any = None, **how: Any) -> _Form:
    if how or str(device) != "meta" or len(bounds) != 2 or not all(isinstance(x, int) for x in bounds):
        return None
    return (bounds[1] - bounds[0],), dtype


def _cat(tensors: Sequence[Tensor], dim: int = 0, **how: Any) -> _Form:
    first = tensors[0]
    if how or not all(x.is_meta and x.dtype == first.dtype for x in tensors):
        return None
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return shape, first.dtype


def _stack(tensors: Sequence[Tensor], dim: int = 0, **how: Any) -> _Form:
    first = tensors[0]
    if how or dim or not all(x.is_meta and (x.shape, x.dtype) == (first.shape, first.dtype) for x in tensors):
        return None
    return (len(tensors), *first.shape), first.dtype


def _gathered(x: Tensor, index: Any) -> _Form:
    """By tensors of numbers, after dimensions that are taken whole."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = next((i for i, part in enumerate(parts) if isinstance(part, Tensor)), len(parts))
    rows = [part for part in parts[whole:] if isinstance(part, Tensor) and part.dtype in (torch.int32, torch.int64)]
    if not x.is_meta or not rows or parts[:whole] != (slice(None),) * whole or len(rows) != len(parts) - whole:
        return None
    return (*x.shape[:whole], *np.broadcast_shapes(*(part.shape for part in rows)), *x.shape[len(parts) :]), x.dtype


_FORMS: dict[Any, Callable[..., _Form]] = {
    torch.add: _elementwise,
    Tensor.sub: _elementwise,
    Tensor.__floordiv__: _elementwise,
    Tensor.remainder: _elementwise,
    torch.zeros_like: _like,
    torch.empty_like: _like,
    torch.arange: _arange,
    torch.cat: _cat,
    torch.stack: _stack,
    Tensor.__getitem__: _gathered,
}
