"""Runs one layer of each kind of a stack of layers: layers that are alike make the same calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from kerngen.runtime.model import Attend, DecoderStack


class Once(Protocol):
    """Decides which layers run."""

    def once(self, key: Hashable, make: Callable[[], tuple[Tensor, str]]) -> tuple[Tensor, str]:
        """What `make` returns; where it was made with an equal key before, a tensor of that form, and nothing runs."""


class DedupedLayers(DecoderStack):
    """`of`, whose layers run once of each kind: the calls of the others are those of the first.

    A call's problem is made of shapes, dtypes and figures of the configuration: layers are alike that agree in those,
    in the place that their calls name, and in what follows them.
    """

    def __init__(self, of: DecoderStack, executor: Once) -> None:
        self.__dict__.update(of.__dict__)
        self.executor = executor
        kinds: dict[Hashable, int] = {}
        self._kinds = [kinds.setdefault(self._kind(i), len(kinds)) for i in range(len(self.layers))]

    def _kind(self, index: int) -> Hashable:
        config = self.config.layers[index]
        source = self.config.layers[config.kv_source] if config.kv_source < len(self.config.layers) else config
        like = dataclasses.replace(config, index=0, kv_source=0)
        return like, config.owns_kv, source.head_dim, source.num_kv_heads, self._place(index), _form(self.layers[index])

    def layer(
        self, index: int, residual: Tensor, qkv: Tensor, attend: Attend, ple: Tensor | None, *, projects: bool = True,
        into: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        key = (
            attend, *self._kinds[index : index + 2], index + 1 == len(self.layers), _form(residual), _form(qkv),
            _form(ple), projects,
        )  # fmt: skip

        def made() -> tuple[Tensor, str]:
            with torch._C.DisableTorchFunction():
                h = super(DedupedLayers, self).layer(index, residual, qkv, attend, ple, projects=projects, into=into)
            return h, self.ops.place

        h, self.ops.place = self.executor.once(key, made)
        return h


def dedupe(model: Any, executor: Once) -> None:
    """Have layers of `model`, a target or a drafter, run once of each kind; one without a DecoderStack runs as ever."""
    if isinstance(getattr(model, "stack", None), DecoderStack):
        model.stack = DedupedLayers(model.stack, executor)


class OneOfEachKind:
    """The stacks of `models`, of which a forward runs one layer of each kind. A drafter without a DecoderStack runs as
    ever.
    """

    def __init__(self, *models: Any) -> None:
        self._models = [m for m in models if isinstance(getattr(m, "stack", None), DecoderStack)]
        self._deduped: list[DedupedLayers] = []  # what is alike is looked for once

    @contextmanager
    def __call__(self, executor: Once) -> Iterator[None]:
        """Meanwhile `executor` decides."""
        self._deduped = self._deduped or [DedupedLayers(m.stack, executor) for m in self._models]
        stacks = [m.stack for m in self._models]
        for model, deduped in zip(self._models, self._deduped, strict=True):
            deduped.executor, model.stack = executor, deduped
        try:
            yield
        finally:
            for model, stack in zip(self._models, stacks, strict=True):
                model.stack = stack


def _form(value: Any) -> Hashable:
    """What a call's problem may depend on of weights: a tensor's form, in records of them field by field."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    if dataclasses.is_dataclass(value):
        return type(value), *(_form(getattr(value, f.name)) for f in dataclasses.fields(value))
    return value if isinstance(value, Hashable) else repr(value)
