"""The conformer on a GPU, by launches and by CUDA graphs, equals itself on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kerngen.runtime.backend import open_backend
from kerngen.runtime.media.config import AudioConfig, AudioEncoderConfig
from kerngen.runtime.media.towers import audio
from kerngen.runtime.media.towers.audio import AudioTower, audio_tower
from kerngen.runtime.media.towers.conformer import KernelConformer
from kerngen.runtime.media.values import Media
from kerngen.runtime.weights.towers import conformer_of
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME

HIDDEN = 256
ENCODER = AudioEncoderConfig(
    num_layers=3, num_heads=8, hidden_size=1024, channels=(128, 32), conv_kernel=5, residual_weight=0.5, num_keys=12,
    logit_cap=50.0, largest=1e10, clips=True,
)  # fmt: skip
CONFIG = AudioConfig(num_features=128, hidden_size=1536, eps=1e-6, encoder=ENCODER)
UNBOUNDED = replace(CONFIG, encoder=replace(ENCODER, clips=False))
FRAMES = (100, 37, 128, 4, 1, 38, 700, 2999)


class Drawn:
    """A TowerSource: the same random weights on any device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._rng = torch.Generator().manual_seed(0)
        self._device, self._dtype = device, dtype

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.randn(shape, generator=self._rng)
        made = 1.0 + 0.2 * noise if len(shape) == 1 else noise / float(np.prod(shape[1:])) ** 0.5
        return made.to(self._device, dtype or self._dtype)

    def bound(self, name: str) -> float:
        return -2.25 if name.endswith("_min") else 2.25


def sound(frames: int, seed: int) -> Media:
    data = np.random.default_rng(seed).normal(-3.0, 2.0, (frames, 128)).astype(np.float32)
    return Media.of("audio", data, (frames, 1), -(-frames // 4))


def tower(device: str, dtype: torch.dtype = torch.float32) -> AudioTower:
    made = audio_tower(Drawn(device, dtype), CONFIG, HIDDEN)
    assert isinstance(made, AudioTower)
    return made


def error(got: list[Tensor], want: list[Tensor], norm: Callable[[Tensor], Tensor]) -> float:
    assert [t.shape for t in got] == [t.shape for t in want]
    return max(float(norm(a.float().cpu() - b.float()) / norm(b.float())) for a, b in zip(got, want, strict=True))


def test_launches_and_graphs_equal_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    on_cpu, on_gpu = tower("cpu"), tower("cuda")
    for seed in range(3):  # launched, captured, replayed with other sounds
        alone = [sound(frames, seed) for frames in FRAMES]
        for item in alone:
            assert error(on_gpu.embed([item]), on_cpu.embed([item]), lambda t: t.abs().max()) < 1e-4, len(item.data)
        assert error(on_gpu.embed(alone), on_cpu.embed(alone), lambda t: t.abs().max()) < 1e-4


def test_lengths_share_graphs() -> None:
    on_gpu = tower("cuda", torch.bfloat16)
    first = [sound(frames, 1) for frames in (5, 100, audio.GRAPH_STEP)]
    want = [on_gpu.embed([item])[0] for item in first]
    assert on_gpu._graphs is not None
    assert list(on_gpu._graphs._seen) == [(1, audio.GRAPH_STEP)]
    assert all(torch.equal(on_gpu.embed([item])[0], row) for item, row in zip(first, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_16_bits_stay_near_fp32(dtype: torch.dtype) -> None:
    """Three layers of roundings to 8 or 11 bits."""
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    items = [sound(frames, 5) for frames in FRAMES]
    want = tower("cpu").embed(items)
    assert error(tower("cuda", dtype).embed(items), want, lambda t: t.norm()) < (
        0.03 if dtype == torch.bfloat16 else 0.005
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_our_kernels_are_no_further_from_fp32_than_torch(dtype: torch.dtype) -> None:
    """Of the same weights; alone and together, launched, captured and replayed."""
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    conformer = conformer_of(CONFIG, open_backend("cuda", device="cuda", dtype=DTYPE_NAME[dtype]))
    assert isinstance(conformer, KernelConformer)
    theirs = tower("cuda", dtype)
    ours = AudioTower(CONFIG, theirs.weights, conformer)
    items = [sound(frames, 5) for frames in FRAMES]
    want = tower("cpu").embed(items)
    for chosen in ([0], [4], [7], list(range(len(items)))):
        mine, wanted = [items[i] for i in chosen], [want[i] for i in chosen]
        off = error(theirs.embed(mine), wanted, lambda t: t.norm())
        first = ours.embed(mine)
        assert error(first, wanted, lambda t: t.norm()) <= 1.3 * off
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(ours.embed(mine), first, strict=True))


def test_fp16_survives_what_overflows() -> None:
    """As torch: of rows that one product makes infinite, kernels leave numbers."""
    theirs = audio_tower(Drawn("cuda", torch.float16), UNBOUNDED, HIDDEN)
    assert isinstance(theirs, AudioTower)
    layers = list(theirs.weights.layers)
    first, conv = layers[0].first, layers[1].light_conv
    layers[0] = replace(layers[0], first=replace(first, down=replace(first.down, weight=first.down.weight * 60_000)))
    layers[1] = replace(layers[1], light_conv=replace(conv, end=replace(conv.end, weight=conv.end.weight * 60_000)))
    theirs.weights = replace(theirs.weights, layers=tuple(layers))
    ours = AudioTower(
        UNBOUNDED, theirs.weights, conformer_of(UNBOUNDED, open_backend("cuda", device="cuda", dtype="fp16"))
    )
    items = [sound(50, 5)]
    got, want = ours.embed(items), theirs.embed(items)
    assert got[0].isfinite().all()
    assert error(got, [t.cpu().float() for t in want], lambda t: t.norm()) < 0.02
