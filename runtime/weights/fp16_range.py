"""Powers of two that keep the middle of an MLP, gelu(gate) * up, within the range of fp16.

The model was trained in bf16, whose range is that of fp32; fp16 ends at 65,504. down(gelu(gate x) * (up x)) stays the
same where a power of two goes from up to down, and the RMS norm behind down cancels a power of two that goes from down
alone, up to its epsilon. Neither needs data: x is the output of an RMS norm, so |x / norm_weight|^2 <= hidden_size,
which bounds every product of two rows. Powers are chosen and multiplied before weights are rounded to fp16, so no bit
of bf16 weights and scales is lost as long as the result is a normal number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kerngen.runtime.executors.collectives import Collectives, OneRank
from kerngen.runtime.ops import WeightView
from kerngen.templates.common.w4.pack import dequantize

LARGEST = 15  # gelu(gate) * up is at most 2^15, for any input
SMALLEST = -6  # below 2^-6 a typical row of it is raised to about 1: else fp16 has too few bits for up's weights
DOWN_SMALLEST = -8  # ... unless down's weights would then be below 2^-8
LARGEST_OUTPUT = 12  # down's typical output is at most 2^12: 16 times less than fp16 holds, and far above the epsilon
_SCRATCH_VALUES = 1 << 24  # of a matrix at a time, in fp32 a few times over


def mlp_exponents(
    gate_up: WeightView, down: WeightView, norm: Tensor, ranks: Collectives | None = None, *, normed: bool = True
) -> tuple[Tensor, Tensor]:
    """(up, down): the exponents of the powers of two to multiply the rows of up and all of down by.

    gate_up [2 I, H] as gate | up, down [H, I], norm [H] the weight of the RMS norm before them; of experts [E, 2 I, H]
    and [E, H, I]. Returns int32 [E], [1] without experts; 0 where everything is in range. normed: an RMS norm stands
    behind down, which cancels a power of two.

    ranks: of a divided model, whose ranks each have some of the I rows and columns. All get the same exponents, as the
    products that they are to add have one scale: what is bounded is the greatest on any of them, or their sum.
    """
    ranks = ranks or OneRank()

    def greatest(values: Tensor) -> Tensor:
        return ranks.all_gather(values[None], 0).amax(0)

    inner, hidden = down.in_features, gate_up.in_features
    columns = norm.float() ** 2
    gate_up, down = _as_experts(gate_up), _as_experts(down)
    count = len(down.tensors[0])
    sums = torch.empty(3, count, inner, device=norm.device)  # of gate^2, up^2 and gate * up
    for experts, rows in _blocks(count, inner, 2 * hidden):
        gate = _floats(gate_up, experts, rows)
        up = _floats(gate_up, experts, slice(inner + rows.start, inner + rows.stop))
        for total, product in zip(sums, (gate * gate, up * up, gate * up), strict=True):
            total[experts, rows] = product @ columns
    gate2, up2, gate_times_up = sums
    typical = (gate2 * up2).sqrt()  # of |gate * up|, with a random x
    # over all z with |z|^2 <= H, |(a z)(b z)| is at most H (|a||b| + |a b|) / 2, and |b z| at most sqrt(H) |b|
    bound = torch.maximum(hidden / 2 * (typical + gate_times_up.abs()), (hidden * up2).sqrt()).amax(-1)
    largest = torch.zeros(count, device=norm.device)  # of |down|
    outputs = torch.empty(count, hidden, device=norm.device)
    for experts, rows in _blocks(count, hidden, inner):
        part = _floats(down, experts, rows)
        largest[experts] = torch.maximum(largest[experts], part.abs().amax((-1, -2)))
        outputs[experts, rows] = ((part * part) @ (typical[experts] ** 2 / 4)[..., None]).squeeze(-1)
    bound, rows_typical, largest = greatest(torch.stack((bound, typical.amax(-1), largest)))
    outputs = ranks.all_reduce(outputs)
    lowered = (_exponent(bound) - LARGEST).clamp(min=0)
    rarely = _exponent(rows_typical)
    raised = torch.where(rarely < SMALLEST, rarely, 0).clamp(max=0)
    raised = torch.maximum(raised, DOWN_SMALLEST - _exponent(largest)).clamp(max=0)
    shift = torch.where(lowered > 0, lowered, raised)
    # one power for all experts: it leaves their sum as it is but for the norm behind
    excess = (_exponent(outputs.amax().sqrt()) - LARGEST_OUTPUT).clamp(min=0)
    return -shift, shift - excess if normed else shift


def times_power(values: Tensor, exponents: Tensor) -> Tensor:
    """`values` [N, K] * 2^exponents in fp16, rounded once. exponents: int32 [N].

    bf16 values are overwritten, and their memory holds the result: a checkpoint may leave no room for a second copy.
    """
    in_place = values.dtype == torch.bfloat16
    out = values.view(torch.float16) if in_place else torch.empty_like(values, dtype=torch.float16)
    powers = (exponents.clamp(-126, 127) + 127 << 23).view(torch.float32)  # exact, which exp2 need not be on a GPU
    for row, made, power in zip(values, out, powers, strict=True):
        for piece, rounded in zip(row.split(_SCRATCH_VALUES), made.split(_SCRATCH_VALUES), strict=True):
            rounded.copy_(piece.float() * power)
    return out


def _exponent(values: Tensor) -> Tensor:
    """The least e, int32, with |values| < 2^e; 0 of zeros, and of what is no number, which loading refuses."""
    return torch.frexp(values.nan_to_num(0.0, 0.0, 0.0)).exponent


def _as_experts(weights: WeightView) -> WeightView:
    """`weights` with a leading dimension, of one expert where there are none."""
    tensors = weights.tensors if weights.tensors[0].dim() == 3 else tuple(t[None] for t in weights.tensors)
    return WeightView(weights.format, tensors, weights.out_features, weights.in_features)


def _blocks(count: int, rows: int, width: int) -> list[tuple[slice, slice]]:
    """Parts of `count` matrices of so many rows, each of about _SCRATCH_VALUES at most."""
    step = min(rows, max(1, _SCRATCH_VALUES // width))
    each = max(1, _SCRATCH_VALUES // (rows * width)) if step == rows else 1
    return [
        (slice(e, min(e + each, count)), slice(r, min(r + step, rows)))
        for e in range(0, count, each)
        for r in range(0, rows, step)
    ]


def _floats(weights: WeightView, experts: slice, rows: slice) -> Tensor:
    """Some rows of some matrices, fp32 [experts, rows, in_features]."""
    if weights.is_dense:
        return weights.weight[experts, rows].float()
    codes, scales = weights.packed[experts, rows], weights.scales[experts, rows]
    return dequantize(codes.flatten(0, 1), scales.flatten(0, 1)).view(*codes.shape[:2], -1)
