"""A reproducible engine's products on a GPU: a token gets the same bits in whichever row of the batch it stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kerngen.runtime.backend import open_backend
from kerngen.runtime.ops import dense_weights, int4_weights
from kerngen.runtime.ops.kernels import KernelOps

BATCHES = (9, 33, 64, 65, 129, 200, 256, 500)


@pytest.fixture(scope="module")
def ops() -> KernelOps:
    made = open_backend("cuda", device=None, db_url=None, bundle=None)
    assert isinstance(made, KernelOps)
    made.row_invariant = True
    return made


def _inputs(ops: KernelOps, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Random rows [batch, width], and which of them are one and the same."""
    generator = torch.Generator(ops.device).manual_seed(batch)
    x = torch.randn(batch, width, generator=generator, device=ops.device).to(ops.dtype)
    same = torch.rand(batch, generator=generator, device=ops.device) < 0.5
    same[[0, -1]] = True
    x[same] = x[0].clone()
    return x, same


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("n", "k", "gated"),
    [(43008, 5376, True), (5376, 21504, False), (16384, 5376, False), (4224, 2816, True), (2816, 2112, False),
     (2816, 4096, False), (704, 2112, False)],
)  # fmt: skip
def test_w4_products(ops: KernelOps, n: int, k: int, gated: bool, batch: int) -> None:
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), device=ops.device).to(torch.int32)
    scales = torch.full((n, k // 32), 0.2 * k**-0.5, dtype=ops.dtype, device=ops.device)
    weights = ops.prepare(int4_weights(packed, scales, n, k, 32, "product", gated))
    x, same = _inputs(ops, batch, k)
    out = ops.gated(x, weights) if gated else ops.linear(x, weights)
    assert out.isfinite().all()
    assert (out[same] == out[0]).all()
    assert not (out == out[0]).all()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("n", "k"), [(1024, 5632), (1024, 10752), (8192, 1024), (5376, 1024), (262144, 2816)])
def test_dense_products(ops: KernelOps, n: int, k: int, batch: int) -> None:
    """cuBLAS's, where there are more than a few rows."""
    weights = dense_weights(torch.randn(n, k, device=ops.device).to(ops.dtype) * k**-0.5)
    x, same = _inputs(ops, batch, k)
    out = ops.linear(x, weights)
    assert (out[same] == out[0]).all()
