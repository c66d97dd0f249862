"""Packed matrices of several forms as one: nothing is lost, and what is dense makes all of it dense."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kerngen.runtime.quant import joined_packing
from kerngen.runtime.weights.packed import PackedTensors, scale_dtype
from kerngen.templates.common.w4.tiling import Packing

PACKINGS = [
    Packing(size, bits, has_minima)
    for size, bits, has_minima in product((16, 32, 64), (4, 8), (False, True))
    if bits == 8 or size > 16
]
ROWS, COLS = 8, 128


def drawn(packing: Packing, seed: int, dtype: torch.dtype = torch.float32) -> PackedTensors:
    """With scales of few bits, so that products with codes are exact in fp32."""
    rng = torch.Generator().manual_seed(seed)
    is_int8, groups = packing.bits == 8, COLS // packing.group_size
    codes = (
        torch.randint(-128, 128, (ROWS, COLS), generator=rng).to(torch.int8)
        if is_int8
        else torch.randint(-(2**31), 2**31, (ROWS, COLS // 8), generator=rng).to(torch.int32)
    )
    scales, minima = (torch.randint(-64, 64, (ROWS, groups), generator=rng).to(dtype) / 16 for _ in range(2))
    return PackedTensors(packing, codes, scales, minima if packing.has_minima else None)


def empty(packing: Packing, rows: int) -> PackedTensors:
    """Poisoned: what is not filled shows."""
    one = drawn(packing, 0)
    codes, scales = (t.repeat(rows // ROWS, 1) for t in (one.codes, one.scales))
    minima = None if one.minima is None else torch.full_like(scales, torch.nan)
    return PackedTensors(packing, torch.full_like(codes, 77), torch.full_like(scales, torch.nan), minima)


@pytest.mark.parametrize("first", PACKINGS, ids=str)
def test_rows_keep_their_values_in_a_joined_matrix(first: Packing) -> None:
    for second in PACKINGS:
        parts = [drawn(first, 1), drawn(second, 2)]
        joined = joined_packing([first, second])
        assert joined is not None
        made = empty(joined, 2 * ROWS)
        for part, own in zip(made.split([ROWS, ROWS]), parts, strict=True):
            part.take(own)
        assert torch.equal(made.dense(torch.float32), torch.cat([p.dense(torch.float32) for p in parts])), second


def test_what_a_joined_matrix_is() -> None:
    q4_k, q6_k, q8_0 = Packing(32, has_minima=True), Packing(16, 8), Packing(32, 8)
    assert joined_packing([q4_k, q4_k]) == q4_k
    assert joined_packing([q4_k, Packing(32)]) == q4_k
    assert joined_packing([q4_k, q6_k]) == Packing(16, 8, has_minima=True)
    assert joined_packing([q8_0, q6_k]) == q6_k
    assert joined_packing([Packing(128), Packing(32)]) == Packing(32)
    assert joined_packing([q8_0, None]) is None


def test_scales_that_were_made_in_fp16_stay_so() -> None:
    assert scale_dtype(torch.bfloat16, Packing(32)) == torch.bfloat16
    assert scale_dtype(torch.bfloat16, Packing(32, has_minima=True)) == torch.float16
    assert scale_dtype(torch.bfloat16, Packing(16, 8)) == torch.float16
    assert scale_dtype(torch.float32, Packing(16, 8)) == torch.float32
    assert scale_dtype(torch.bfloat16, Packing(32), Packing(64)) == torch.bfloat16
    assert scale_dtype(torch.bfloat16, Packing(32), Packing(32, 8)) == torch.float16  # experts' gate and up, and down
    assert scale_dtype(torch.bfloat16, None, Packing(32)) == torch.bfloat16


def test_parts_share_the_matrix() -> None:
    whole = drawn(Packing(32, 8, has_minima=True), 3)
    first, second = whole.split([3, 5])
    first.codes.zero_()
    assert not whole.codes[:3].any()
    assert torch.equal(second.scales, whole.scales[3:])
