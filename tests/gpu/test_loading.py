"""Weights on their way to a GPU: the same bits as in the file, and NaN is found there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kerngen.runtime.weights import mapped
from kerngen.runtime.weights.repacked import seal
from kerngen.runtime.weights.safetensors import SafetensorsFile
from kerngen.runtime.weights.staging import Stage

CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "PIECE_BYTES", 10_000)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32])
@pytest.mark.parametrize("shape", [(1000, 77), (3, 20_000), (5,), (), (0, 4), (7, 33, 65)])
def test_pieces_arrive_whole_and_in_place(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Many pieces, rows larger than a buffer, a number alone, nothing; as they are, converted and turned."""
    from safetensors.torch import save_file

    want = torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"x": want}, tmp_path / "x.safetensors")
    file, stage = SafetensorsFile(tmp_path / "x.safetensors"), Stage(CUDA)
    for to in {dtype, torch.float32 if dtype.is_floating_point else dtype}:
        out = torch.full(shape, -1, dtype=to, device=CUDA)
        for row, piece in file.pieces("x"):
            stage.copy(piece, out[row : row + len(piece)] if shape else out)
        assert torch.equal(out.cpu(), want.to(to))
    if len(shape) == 2:
        turned = torch.full(shape[::-1], -1, dtype=dtype, device=CUDA)
        for row, piece in file.pieces("x"):
            stage.copy(piece, turned[:, row : row + len(piece)], is_transposed=True)
        assert torch.equal(turned.cpu(), want.T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 12_345, 99_999])
def test_extremes_tell_of_nan_and_infinity(dtype: torch.dtype, place: int) -> None:
    """What the loader looks at; NaN must spread into both whatever it is compared with."""

    def is_finite(value: float) -> bool:
        x = torch.randn(100_000, device=CUDA).to(dtype)
        x[place] = value
        return bool(torch.stack(torch.aminmax(x)).isfinite().all())

    assert is_finite(1.0)
    assert not any(map(is_finite, (torch.nan, torch.inf, -torch.inf)))


def test_seals_are_those_of_the_host() -> None:
    def same(x: Tensor) -> bool:
        return bool(seal(x.cuda()).tolist() == seal(x).tolist())

    assert all(same(torch.randn(n).to(dtype)) for n in (0, 1, 4097, 3_000_001) for dtype in DTYPES)
