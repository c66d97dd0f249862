"""int4 matrices made of dense ones (weights/int4.py): Q4_0's grid comes out as it is, others as near as may be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kerngen.runtime.weights import int4
from kerngen.runtime.weights.int4 import to_int4
from kerngen.templates.common.w4.pack import dequantize

GROUP = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def q4_0(row: np.ndarray) -> np.ndarray:
    """What ggml's Q4_0 makes of one group, with its scale as it comes: quantize_row_q4_0_ref, line by line."""
    largest = 0.0
    for v in row:
        if abs(v) > abs(largest):
            largest = v
    d = largest / -8
    inverse = 1 / d if d else 0.0
    codes = [min(15, int(v * inverse + 8.5)) for v in row]
    return np.array([(c - 8) * d for c in codes])


def normal(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).mul(cols**-0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_on_q4_0s_grid_comes_out_as_it_is(dtype: torch.dtype, sign: int) -> None:
    """Scales of four significant bits, so that every code's value is exact in each dtype; each group has a -8."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (64, 8, GROUP), generator=generator)
    codes[..., 5] = -8
    codes[0, 0] = 0
    scales = sign * torch.randint(1, 16, (64, 8), generator=generator) * 2.0**-9
    dense = (codes * scales[..., None]).view(64, -1).to(dtype)
    packed, found = to_int4(dense, GROUP)
    assert found.dtype == dtype
    assert torch.equal(dequantize(packed, found, dtype), dense)
    assert torch.equal(found.float()[0, 1:], scales[0, 1:])
    assert torch.equal(found.float()[1:], scales[1:])


def test_q4_0s_grid_in_bf16_loses_nothing_but_what_bf16_lost() -> None:
    """Products of fp16 scales rounded to bf16, as an unquantized QAT checkpoint has them: the codes are all found."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-8, 8, (128, 16, GROUP), generator=generator)
    codes[..., 0] = -8
    scales = (torch.rand(128, 16, generator=generator) * 0.02 + 1e-4).half().float()
    scales *= torch.randint(0, 2, (128, 16), generator=generator) * 2 - 1
    packed, found = to_int4((codes * scales[..., None]).view(128, -1).bfloat16(), GROUP)
    assert torch.equal(found, scales.bfloat16())
    assert torch.equal(dequantize(packed, torch.ones_like(found)).view(codes.shape), codes.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_group_is_further_off_than_q4_0_has_it(dtype: torch.dtype) -> None:
    dense = normal(128, 512, dtype)
    packed, scales = to_int4(dense, GROUP)
    ours = (dequantize(packed, scales) - dense.float()).view(-1, GROUP).square().sum(-1)
    groups = dense.float().view(-1, GROUP).numpy()
    theirs = torch.tensor([np.square(q4_0(g.astype(float)) - g).sum() for g in groups], dtype=torch.float32)
    rounding = 2.0**-8 * dense.float().view(-1, GROUP).norm(dim=-1)  # of the scale, in bf16
    assert (ours.sqrt() <= theirs.sqrt() + rounding).all()
    error, of_q4_0 = ((e.sum().sqrt() / dense.float().norm()).item() for e in (ours, theirs))
    assert of_q4_0 == pytest.approx(0.086, abs=1e-3)
    assert error < 0.96 * of_q4_0
    largest = dense.float().view(-1, GROUP).abs().amax(-1)
    worst = (dequantize(packed, scales) - dense.float()).view(-1, GROUP).abs().amax(-1)
    assert (worst <= largest / 7 + rounding).all(), "half a step, or a whole one where it is clipped"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_nothing_stay_nothing(dtype: torch.dtype) -> None:
    dense = torch.zeros(32, 64, dtype=dtype)
    dense[1, 3] = torch.finfo(dtype).smallest_normal  # its scale may be no number of the dtype any more
    dense[2, 40] = 1.0
    packed, scales = to_int4(dense, GROUP)
    made = dequantize(packed, scales)
    assert made.isfinite().all()
    assert (made - dense.float()).abs().max() <= torch.finfo(dtype).smallest_normal
    assert made[2, 40] == 1.0


def test_pieces_of_a_matrix_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = normal(96, 128, torch.bfloat16)
    whole = to_int4(dense, GROUP)
    monkeypatch.setattr(int4, "_SCRATCH_VALUES", 1000)  # 7 rows at a time
    for a, b in zip(to_int4(dense, GROUP), whole, strict=True):
        assert torch.equal(a, b)
    shapes = to_int4(dense.to("meta"), GROUP)
    assert [(t.shape, t.dtype) for t in shapes] == [(t.shape, t.dtype) for t in whole]
