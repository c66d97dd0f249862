"""int4 weights as a value: what `w4a16_gemm` multiplies with, made once from a checkpoint's tensors."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor

from kerngen.errors import ProblemError, UsageError
from kerngen.templates.common.w4.pack import dequantize, pack, unpack
from kerngen.templates.common.w4.tiling import GROUP_SIZES, STRIP


class W4Weights(NamedTuple):
    """W [N, K] in symmetric int4, in the kernel's order: a tuple of two tensors, as torch.compile and export take it.

    w_packed [N / 32, K / 32, 32, 4] int32; scales [N / 32, K / group_size, 32] in the activations' dtype.
    """

    w_packed: Tensor
    scales: Tensor

    @property
    def out_features(self) -> int:
        """N."""
        return self.w_packed.shape[0] * STRIP

    @property
    def in_features(self) -> int:
        """K."""
        return self.w_packed.shape[1] * STRIP

    @property
    def group_size(self) -> int:
        """Weights along K that share a scale."""
        return self.in_features // self.scales.shape[1]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> W4Weights:
        """The same weights on another device, or with their scales in another dtype: that of the activations."""
        return W4Weights(self.w_packed.to(device=device), self.scales.to(device=device, dtype=dtype))

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N, K] in `dtype`, in the usual order; the values are exact in fp32."""
        return dequantize(*unpack(self.w_packed, self.scales), dtype)


def pack_w4(weight_packed: Tensor, weight_scale: Tensor) -> W4Weights:
    """Weights in compressed-tensors' pack-quantized layout, as W4A16 checkpoints store them, in the kernel's order.

    weight_packed: [N, K / 8] int32, lowest column in the lowest nibble, value + 8. weight_scale: [N, K / group_size] in
    the dtype of the activations. Raises ProblemError where the kernel does not take such weights.
    """
    if weight_packed.dtype != torch.int32 or weight_packed.ndim != 2 or weight_scale.ndim != 2:
        raise ProblemError(
            f"weight_packed is {tuple(weight_packed.shape)} {weight_packed.dtype}, weight_scale "
            f"{tuple(weight_scale.shape)}; they must be [N, K / 8] torch.int32 and [N, K / group_size]"
        )
    k, groups = 8 * weight_packed.shape[1], weight_scale.shape[1]
    if not groups or k / groups not in GROUP_SIZES:
        raise ProblemError(f"K = {k} in {groups} groups; a group has {', '.join(map(str, GROUP_SIZES))} weights")
    return W4Weights(*pack(weight_packed, weight_scale))


@overload
def w4a16_gemm(x: Tensor, w_packed: W4Weights, *, row_invariant: bool = False) -> Tensor: ...
@overload
def w4a16_gemm(x: Tensor, w_packed: Tensor, scales: Tensor, row_invariant: bool = False) -> Tensor: ...
def w4a16_gemm(
    x: Tensor, w_packed: Tensor | W4Weights, scales: Tensor | None = None, row_invariant: bool = False
) -> Tensor:
    """x [M, K] times W^T: [M, N] in x's dtype, summed in fp32. W: `W4Weights`, or its two tensors.

    row_invariant: a row's result has the same bits in whichever of the M rows it stands, in the same number of rows.
    """
    if isinstance(w_packed, W4Weights):
        w_packed, scales = w_packed
    if scales is None:
        raise UsageError("w4a16_gemm needs scales", hint="give a W4Weights (pack_w4 makes one), or both of its tensors")
    result: Tensor = torch.ops.kerngen.w4a16_gemm(x, w_packed, scales, row_invariant)
    return result
