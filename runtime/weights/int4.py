"""int4 matrices made of dense ones, as a drafter is loaded: its drafts are guesses, which the target verifies.

A group of inputs has one scale, and a nibble n stands for (n - 8) * scale. ggml's Q4_0 (ggml-quants.c,
quantize_row_q4_0_ref) takes the element of largest magnitude, with its sign, for -8 scales, so that the scale may be
negative. Weights that were trained for that come out as they are: an eighth of such an element is exact. Others lose
less where that element is taken for another number of scales, and each group gets the best of DIVISORS: on normally
distributed weights the error is 4 % less than Q4_0's (tests/host/test_int4.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.runtime.quant import QuantConfig
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.common.w4.tiling import require_matrix

DIVISORS = (8.0, 7.0, 7.5, 8.5, 9.0)  # Q4_0's first: it stays where no other is better
_SCRATCH_VALUES = 1 << 22  # of a matrix at a time, in fp32 a few times over


def becomes_int4(quant: QuantConfig | None, rows: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether a matrix that is stored dense is made int4 as it is loaded: where that is wanted and kernels take it."""
    if quant is None or not quant.on_load:
        return False
    try:
        require_matrix(rows, in_features, quant.group_size, DTYPE_NAME[dtype])
    except ProblemError:
        return False
    return True


def to_int4(dense: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """`dense` [N, K] as compressed-tensors stores int4: words int32 [N, K / 8], and scales [N, K / group_size] in its
    dtype.

    K is a multiple of group_size. Scratch is bounded, whatever the size.
    """
    n, k = dense.shape
    packed = torch.empty(n, k // 8, dtype=torch.int32, device=dense.device)
    scales = torch.empty(n, k // group_size, dtype=dense.dtype, device=dense.device)
    if dense.is_meta:
        return packed, scales
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=dense.device)
    step = max(1, _SCRATCH_VALUES // k)
    for begin in range(0, n, step):
        part = slice(begin, begin + step)
        grouped = dense[part].float().view(-1, k // group_size, group_size)
        codes, scale = _best(grouped, dense.dtype)
        packed[part] = (codes.view(-1, k // 8, 8) << shifts).sum(-1, dtype=torch.int32)  # lowest column, lowest nibble
        scales[part] = scale.squeeze(-1)
    return packed, scales


def _best(grouped: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of groups [..., G] in fp32: their nibbles, int32, and scales [..., 1] in `dtype`, of the least squared error."""
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
    found: tuple[Tensor, Tensor, Tensor] | None = None
    for divisor in DIVISORS:
        scale = (largest / -divisor).to(dtype)
        value = scale.float()
        codes = (grouped / torch.where(value == 0, 1.0, value) + 8.5).floor_().clamp_(0, 15)  # halves as Q4_0 has them
        error = (((codes - 8.0) * value - grouped) ** 2).sum(-1, keepdim=True)
        if found is None:
            found = codes, scale, error
        else:
            better = error < found[2]
            found = (
                torch.where(better, codes, found[0]),
                torch.where(better, scale, found[1]),
                torch.where(better, error, found[2]),
            )
    if found is None:
        raise TypeError("there is no divisor to try")
    return found[0].to(torch.int32), found[1]
