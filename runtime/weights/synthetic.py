"""Generated weights in the shape of a released model, made on the device: what a benchmark runs when there is no
checkpoint. They go through the same fusing and repacking as loaded ones. The text they generate means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kerngen.runtime.config import DrafterConfig, ModelConfig
from kerngen.runtime.ops import Experts, Linear, Ops, dense_weights, int4_weights
from kerngen.runtime.weights.int4 import becomes_int4
from kerngen.runtime.weights.layout import DrafterWeights, ModelWeights
from kerngen.runtime.weights.loader import build_drafter, build_model
from kerngen.runtime.weights.quantized import IgnoreList
from kerngen.runtime.weights.source import fused_name

_NIBBLE_STD = 4.61  # of a uniform nibble - 8


class SyntheticSource:
    """Answers the loader's questions with random tensors: matrices keep the scale of their input, norms are near 1."""

    def __init__(self, config: ModelConfig, ops: Ops, seed: int) -> None:
        self.config = config
        self.ops = ops
        self.is_dry = ops.device.type == "meta"  # shapes alone: what a record of the model runs on
        self._ignored = IgnoreList(config.quant.ignore if config.quant else (), strict=True)
        self._rng = None if self.is_dry else torch.Generator(ops.device).manual_seed(seed)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.is_dry:
            return torch.empty(shape, dtype=dtype or self.ops.dtype, device=self.ops.device)
        if dtype is not None:  # token_ordering: a permutation
            return torch.randperm(shape[0], generator=self._rng, device=self.ops.device).to(dtype)
        if len(shape) == 1:
            noise = torch.randn(shape, generator=self._rng, device=self.ops.device)
            return (1.0 + 0.05 * noise).to(self.ops.dtype)
        return self._matrix(*shape)

    def scalar(self, name: str) -> Tensor:
        return self.tensor(name, 1)

    def linear(self, parts: Sequence[tuple[str, int]], in_features: int, *, gated: bool = False) -> Linear:
        rows = sum(out for _, out in parts)
        if not self._is_quantized([module for module, _ in parts], rows, in_features):
            return self.ops.prepare(dense_weights(self._matrix(rows, in_features)))
        packed, scales = self._packed(rows, in_features)
        group_size = in_features // scales.shape[-1]
        return self.ops.prepare(int4_weights(packed, scales, rows, in_features, group_size, fused_name(parts), gated))

    def mlp(
        self, gate_up: Sequence[tuple[str, int]], down: Sequence[tuple[str, int]], norm: Tensor
    ) -> tuple[Linear, Linear]:
        return self.linear(gate_up, norm.shape[0], gated=True), self.linear(down, gate_up[0][1])

    def _is_quantized(self, modules: Sequence[str], rows: int, in_features: int) -> bool:
        quant = self.config.quant
        if quant is None or in_features % quant.group_size:
            return False
        if quant.on_load and not becomes_int4(quant, rows, in_features, self.ops.dtype):
            return False
        return not any(module in self._ignored for module in modules)

    def _packed(self, rows: int, in_features: int) -> tuple[Tensor, Tensor]:
        """Random nibbles [rows, in / 8] and scales [rows, in / group_size] that keep the scale of the input."""
        if (quant := self.config.quant) is None:
            raise TypeError("only a quantized model has packed weights")
        packed = torch.empty(rows, in_features // 8, dtype=torch.int32, device=self.ops.device)
        if not self.is_dry:
            packed.random_(-(2**31), 2**31, generator=self._rng)
        value = 1.0 / (_NIBBLE_STD * in_features**0.5)
        shape = (rows, in_features // quant.group_size)
        return packed, torch.full(shape, value, dtype=self.ops.dtype, device=self.ops.device)

    def unpacked(self, module: str, out_features: int, in_features: int) -> Linear:
        return dense_weights(self._matrix(out_features, in_features))

    def head(self, embed: Tensor) -> Linear:
        return self.ops.prepare(dense_weights(embed))

    def experts(self, name: str, norm: Tensor) -> tuple[Experts, Experts]:
        inner, hidden = self.config.moe_intermediate_size, self.config.hidden_size
        names = [f"{name}.experts.0.{part}_proj" for part in ("gate", "up")]
        gate_up = self._experts(names, 2 * inner, hidden)
        return self.ops.prepare_experts(gate_up, self._experts([f"{name}.experts.0.down_proj"], hidden, inner))

    def _experts(self, modules: list[str], rows: int, in_features: int) -> Experts:
        num = self.config.num_experts
        if not self._is_quantized(modules, rows, in_features):
            return dense_weights(self._matrix(num, rows, in_features))
        packed, scales = self._packed(num * rows, in_features)
        return int4_weights(packed.view(num, rows, -1), scales.view(num, rows, -1), rows, in_features,
                         in_features // (scales.shape[-1]))  # fmt: skip

    def _matrix(self, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self.ops.dtype, device=self.ops.device)
        return out if self.is_dry else out.normal_(0.0, shape[-1] ** -0.5, generator=self._rng)


def synthetic_model(config: ModelConfig, ops: Ops, seed: int = 0) -> ModelWeights:
    """Random weights of `config`'s shapes, int4 where it is quantized."""
    return build_model(SyntheticSource(config, ops, seed), "model.")


def synthetic_drafter(config: DrafterConfig, ops: Ops, seed: int = 0) -> DrafterWeights:
    """Random weights of an assistant's shapes, int4 where it is quantized or loading makes them so."""
    return build_drafter(SyntheticSource(config.text, ops, seed), config)
