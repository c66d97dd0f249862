"""Generated weights in the shape of a released model, made on the device: what a benchmark runs when there is no
checkpoint. They go through the same fusing and repacking as loaded ones. The text they generate means nothing.

A rank of a divided model draws each whole tensor and keeps its part, so that ranks have the model that one rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from kerngen.runtime.config import DrafterConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.media.config import MediaConfig
from kerngen.runtime.media.towers.dispatch import Towers
from kerngen.runtime.ops import Experts, Linear, Ops, WeightView, dense_weights, grouped_weights, rows_of_table
from kerngen.runtime.quant import joined_packing
from kerngen.runtime.weights.dflash import DflashWeights
from kerngen.runtime.weights.int4 import becomes_int4
from kerngen.runtime.weights.layout import DrafterWeights, ModelWeights
from kerngen.runtime.weights.loader import build_drafter, build_model
from kerngen.runtime.weights.mapped import DTYPES
from kerngen.runtime.weights.packed import codes_layout, scale_dtype, table_is_packed, table_scale_dtype
from kerngen.runtime.weights.quantized import IgnoreList
from kerngen.runtime.weights.source import Parts, fused_name
from kerngen.runtime.weights.towers import build_towers
from kerngen.runtime.world import Span
from kerngen.templates.common.w4.tiling import Packing

_NIBBLE_STD, _BYTE_STD = 4.61, 73.9  # of a uniform nibble - 8, and of a byte
BOUND = 16.0  # of what encoders' linears take and give, which is about 1: finite, so that clamping is timed


class SyntheticTensors:
    """Random tensors by name: matrices keep the scale of their input, norms are near 1.

    As TowerSource (media/towers/linear.py), too.
    """

    def __init__(self, ops: Ops, seed: int) -> None:
        self.ops = ops
        self.is_dry = ops.device.type == "meta"  # shapes alone: what a record of the model runs on
        self._rng = None if self.is_dry else torch.Generator(ops.device).manual_seed(seed)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.ops.dtype
        if self.is_dry:
            return torch.empty(shape, dtype=dtype, device=self.ops.device)
        if not dtype.is_floating_point:  # token_ordering: a permutation
            return torch.randperm(shape[0], generator=self._rng, device=self.ops.device).to(dtype)
        if len(shape) == 1:
            noise = torch.randn(shape, generator=self._rng, device=self.ops.device)
            return (1.0 + 0.05 * noise).to(dtype)
        return self._matrix(*shape, dtype=dtype)

    def bound(self, name: str) -> float:
        return -BOUND if name.endswith("_min") else BOUND

    def _matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.ops.dtype, device=self.ops.device)
        return out if self.is_dry else out.normal_(0.0, shape[-1] ** -0.5, generator=self._rng)


class SyntheticSource(SyntheticTensors):
    """Answers the loader's questions with random tensors."""

    def __init__(self, config: ModelConfig, ops: Ops, seed: int) -> None:
        super().__init__(ops, seed)
        self.config = config
        self._ignored = IgnoreList(config.quant.ignore if config.quant else (), strict=True)

    def scalar(self, name: str) -> Tensor:
        return self.tensor(name, 1)

    def rows(self, name: str, rows: Span, width: int) -> Tensor:
        return self._normal((), [rows], Span.of(width))

    def table(self, module: str, rows: int, width: int) -> Linear:
        quant, spans = self.config.quant, [Span.of(rows)]
        packing = None if quant is None or quant.packings is None else quant.packing_of(module)
        if packing is None or not table_is_packed(packing, self.config):
            return dense_weights(self._normal((), spans, Span.of(width)))
        made = self._packed(packing, (), spans, Span.of(width), table_scale_dtype(self.ops.dtype))
        return self.ops.prepare(replace(made, name="embedding"))

    def linear(self, parts: Parts, in_features: Span, *, gated: bool = False) -> Linear:
        rows = [out for _, out in parts]
        packing = self._packing([module for module, _ in parts], sum(out.size for out in rows), in_features.size)
        made = self._weights(packing, (), rows, in_features, scale_dtype(self.ops.dtype, packing))
        if not made.is_dense:
            made = replace(made, name=fused_name(parts), gated=gated)
        return replace(self.ops.prepare(made), is_summand=not in_features.is_whole)

    def mlp(self, gate_up: Parts, down: Parts, norm: Tensor) -> tuple[Linear, Linear]:
        return self.linear(gate_up, Span.of(norm.shape[0]), gated=True), self.linear(down, gate_up[0][1])

    def _packing(self, modules: list[str], rows: int, in_features: int) -> Packing | None:
        """Of the matrix that has these modules' rows; None where it is dense."""
        quant = self.config.quant
        if quant is None or any(module in self._ignored for module in modules):
            return None
        packing = joined_packing([quant.packing_of(module) for module in modules])
        if packing is None or in_features % packing.group_size:
            return None
        is_dense = quant.on_load and not becomes_int4(quant, rows, in_features, self.ops.dtype)
        return None if is_dense else packing

    def _weights(
        self, packing: Packing | None, leading: tuple[int, ...], rows: list[Span], cols: Span, of_scales: torch.dtype
    ) -> WeightView:
        """The rank's rows and columns of as many matrices as `leading` says, packed so or dense."""
        if packing is None:
            return dense_weights(self._normal(leading, rows, cols))
        return self._packed(packing, leading, rows, cols, of_scales)

    def _packed(
        self, packing: Packing, leading: tuple[int, ...], rows: list[Span], cols: Span, of_scales: torch.dtype
    ) -> WeightView:
        mine = sum(span.size for span in rows)
        is_int8, (dtype, each) = packing.bits == 8, codes_layout(packing)
        fill = self._random_bytes if is_int8 else self._random_words
        codes = self._part(leading, rows, cols.over(each), DTYPES[dtype], fill)
        value = 1.0 / ((_BYTE_STD if is_int8 else _NIBBLE_STD) * cols.whole**0.5)  # which keeps the scale of the input
        shape = (*leading, mine, cols.size // packing.group_size)
        scales = torch.full(shape, value, dtype=of_scales, device=self.ops.device)
        return grouped_weights(codes, scales, scales * (0.5 if is_int8 else -7.5) if packing.has_minima else None)

    def unpacked(self, module: str, out_features: int, in_features: int) -> Linear:
        return dense_weights(self._matrix(out_features, in_features))

    def head(self, embed: Linear, rows: Span) -> Linear:
        return rows_of_table(embed, rows)

    def experts(self, name: str, norm: Tensor) -> tuple[Experts, Experts]:
        inner, hidden, num = self.config.expert_span, Span.of(self.config.hidden_size), (self.config.num_experts,)
        names = [f"{name}.experts.0.{part}_proj" for part in ("gate", "up", "down")]
        of_up = self._packing(names[:2], 2 * inner.size, hidden.size)
        of_down = self._packing(names[2:], hidden.size, inner.size)
        of_scales = scale_dtype(self.ops.dtype, of_up, of_down)
        gate_up = self._weights(of_up, num, [inner, inner], hidden, of_scales)
        down = self._weights(of_down, num, [hidden], inner, of_scales)
        gate_up, down = self.ops.prepare_experts(gate_up, down)
        return gate_up, replace(down, is_summand=not inner.is_whole)

    def _normal(self, leading: tuple[int, ...], rows: list[Span], cols: Span) -> Tensor:
        def fill(out: Tensor) -> None:
            out.normal_(0.0, cols.whole**-0.5, generator=self._rng)

        return self._part(leading, rows, cols, self.ops.dtype, fill)

    def _random_bytes(self, out: Tensor) -> None:
        out.random_(-128, 128, generator=self._rng)

    def _random_words(self, out: Tensor) -> None:
        out.random_(-(2**31), 2**31, generator=self._rng)

    def _part(
        self, leading: tuple[int, ...], rows: list[Span], cols: Span, dtype: torch.dtype,
        fill: Callable[[Tensor], None],
    ) -> Tensor:  # fmt: skip
        """The rank's part of a tensor [*leading, rows one under the other, cols] that `fill` draws."""
        if self.is_dry:
            shape = (*leading, sum(span.size for span in rows), cols.size)
            return torch.empty(shape, dtype=dtype, device=self.ops.device)
        sizes = [span.whole for span in rows]
        whole = torch.empty(*leading, sum(sizes), cols.whole, dtype=dtype, device=self.ops.device)
        fill(whole)
        if cols.is_whole and all(span.is_whole for span in rows):
            return whole
        parts = zip(whole.split(sizes, -2), rows, strict=True)
        return torch.cat([part[..., span.slice, cols.slice] for part, span in parts], -2)


def synthetic_model(config: ModelConfig, ops: Ops, seed: int = 0) -> ModelWeights:
    """Random weights of `config`'s shapes, int4 where it is quantized."""
    return build_model(SyntheticSource(config, ops, seed), "model.")


@overload
def synthetic_drafter(config: DrafterConfig, ops: Ops, seed: int = 0) -> DrafterWeights: ...


@overload
def synthetic_drafter(config: DflashConfig, ops: Ops, seed: int = 0) -> DflashWeights: ...


def synthetic_drafter(config: DrafterConfig | DflashConfig, ops: Ops, seed: int = 0) -> DrafterWeights | DflashWeights:
    """Random weights of a drafter's shapes, int4 where it is quantized or loading makes them so."""
    return build_drafter(SyntheticSource(config.text, ops, seed), config)


def synthetic_towers(config: MediaConfig, ops: Ops, seed: int = 0) -> Towers:
    """What embeds images and sound, with random weights of `config`'s shapes."""
    return build_towers(SyntheticTensors(ops, seed), config, ops)
