"""Images as embeddings on a GPU: what a CPU makes of them, one by one and by CUDA graphs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kerngen.runtime.backend import open_backend
from kerngen.runtime.media.config import VisionConfig, read_media_config
from kerngen.runtime.media.towers import graphs, upload
from kerngen.runtime.media.towers.linear import Bounds
from kerngen.runtime.media.towers.rows import KernelRows, TorchRows, partner
from kerngen.runtime.media.towers.vision import PatchEmbedder, VisionTower
from kerngen.runtime.media.values import Media
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_towers
from kerngen.runtime.weights.towers import rows_of
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.workload.workload import MODELS, find_media

CUDA = torch.device("cuda")
VISION: dict[str, Any] = {
    "hidden_size": 144, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 72, "position_embedding_size": 64,
}  # fmt: skip
VARIANTS = [{"standardize": True}, {"use_clipped_linears": True}]


def tower_of(device: torch.device, dtype: torch.dtype, **variant: Any) -> VisionTower:
    section = VISION | variant
    config = read_media_config({"model_type": "gemma4", "text_config": {"hidden_size": 96}, "vision_config": section})
    assert config is not None
    made = synthetic_towers(config, TorchOps(device, dtype)).vision
    assert isinstance(made, VisionTower)
    return made


def moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same weights there."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    if isinstance(value, tuple):
        return tuple(moved(part, device, dtype) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device, dtype) for f in fields(value)})
    return value


def kernels(dtype: torch.dtype) -> Ops:
    return open_backend("cuda", device="cuda", dtype=DTYPE_NAME[dtype])


def image(config: VisionConfig, rows: int, columns: int, seed: int) -> Media:
    shape = rows * columns, 3 * config.patch_size**2
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Media.of("image", data, (rows, columns), rows * columns // config.pooling**2)


@pytest.mark.parametrize("variant", VARIANTS, ids=["standardize", "clips"])
def test_a_gpu_makes_of_images_what_a_cpu_does(variant: dict[str, Any]) -> None:
    """In fp32; three times, so that the second time captures and the third replays."""
    here = tower_of(torch.device("cpu"), torch.float32, **variant)
    there = VisionTower(here.config, moved(here.weights, CUDA))
    items = [image(here.config, *grid, seed) for seed, grid in enumerate([(3, 27), (12, 12), (30, 6), (12, 12)])]
    expected = here.embed(items)
    for _ in range(3):
        for ours, theirs in zip(there.embed(items), expected, strict=True):
            assert ours.is_cuda
            assert float((ours.cpu() - theirs).abs().max() / theirs.abs().max()) < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS, ids=["standardize", "clips"])
def test_replays_are_what_the_launches_one_by_one_give(variant: dict[str, Any], dtype: torch.dtype) -> None:
    """To the bit; of other images than were captured; and an earlier result stays as it was."""
    tower = tower_of(CUDA, dtype, **variant)
    images = [image(tower.config, 12, 9, seed) for seed in range(4)]
    eager = [tower.embed([item], graphs=False)[0] for item in images]
    replayed = [tower.embed([item])[0] for item in images]
    assert all(bool(made.isfinite().all()) for made in eager)
    assert not torch.equal(eager[2], eager[3])
    for made, expected in zip(replayed, eager, strict=True):
        assert torch.equal(made, expected)


def test_replays_without_an_encoder_are_what_the_launches_give() -> None:
    """And images that follow each other at once do not meet in the memory through which they come."""
    found = find_media("gemma-4-12b")
    config = found.only(["vision"]) if found else None
    assert config is not None
    tower = synthetic_towers(config, TorchOps(CUDA, torch.float16)).vision
    assert isinstance(tower, PatchEmbedder)
    items = [image(tower.config, *(((14, 20), (16, 16))[seed % 2]), seed) for seed in range(12)]
    eager = []
    for item in items:
        eager += tower.embed([item], graphs=False)
        torch.cuda.synchronize()
    assert tower._graphs is not None
    assert not tower._graphs._seen
    queued = [tower.embed([item], graphs=False)[0] for item in items]
    replayed = [tower.embed([item])[0] for item in items]
    assert len(tower._graphs._seen) == 2
    for expected, *both in zip(eager, queued, replayed, strict=True):
        assert all(torch.equal(made, expected) for made in both)


def test_what_is_large_comes_without_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [np.random.default_rng(n).integers(0, 256, (3, 70), dtype=np.uint8) for n in range(3)]
    for part in parts:
        part.flags.writeable = False
    for most in (upload.MOST_PINNED_BYTES, 0):
        monkeypatch.setattr(upload, "MOST_PINNED_BYTES", most)
        made = upload.upload(parts, CUDA)
        assert made.is_cuda
        assert np.array_equal(made.cpu().numpy(), np.concatenate(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS, ids=["standardize", "clips"])
def test_our_kernels_are_no_further_from_fp32_than_torch(variant: dict[str, Any], dtype: torch.dtype) -> None:
    """Norms, heads and gates of the same weights, launched and in graphs."""
    theirs = tower_of(CUDA, dtype, **variant)
    rows = rows_of(theirs.config, kernels(dtype))
    assert isinstance(rows, KernelRows)
    ours = VisionTower(theirs.config, theirs.weights, rows)
    exact = VisionTower(theirs.config, moved(theirs.weights, CUDA, torch.float32))
    for seed, grid in enumerate([(3, 3), (12, 9), (30, 36), (12, 9)]):
        item = image(theirs.config, *grid, seed)
        wanted = exact.embed([item], graphs=False)[0]
        off, their_off = (
            float((tower.embed([item], graphs=False)[0].float() - wanted).norm() / wanted.norm())
            for tower in (ours, theirs)
        )
        assert off <= 1.3 * their_off, f"{grid}: kernels {off:.4g}, torch {their_off:.4g} from fp32"
        alone = ours.embed([item], graphs=False)[0]
        for _ in range(3):
            assert torch.equal(ours.embed([item])[0], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clips", [False, True], ids=["free", "bounded"])
@pytest.mark.parametrize(("heads", "dim"), [(16, 72), (12, 64), (5, 24)])
def test_heads_are_no_further_from_fp32_than_torchs(heads: int, dim: int, clips: bool, dtype: torch.dtype) -> None:
    """Of three images of 7 x 9 patches."""
    ops = kernels(dtype)
    assert isinstance(ops, KernelOps)
    generator = torch.Generator(CUDA).manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=CUDA).to(dtype)

    norms = 1 + normal(2, 1, dim) / 4
    angles = 3 * normal(63, 1, 1, 2, 1, dim // 4).float().expand(-1, -1, -1, -1, 2, -1)
    sign = torch.tensor([-1.0, 1.0], device=CUDA)[:, None]
    turn = angles.cos().flatten(3).to(dtype), (sign * angles.sin()).flatten(3).to(dtype)
    bounds = Bounds.of([(-1.0, 0.75), (-float("inf"), 1.5), (-0.5, 2.0)], norms) if clips else None
    qkv = normal(3 * 63, 3 * heads * dim)
    weights = norms, partner(norms)
    exact = TorchRows().heads(
        qkv.float(), moved(weights, CUDA, torch.float32), moved(turn, CUDA, torch.float32), bounds, 1e-6
    )
    theirs = TorchRows().heads(qkv.clone(), weights, turn, bounds, 1e-6)
    ours = KernelRows(ops.run).heads(qkv, weights, turn, bounds, 1e-6)
    for which, made, torchs, wanted in zip("qkv", ours, theirs, exact, strict=True):
        assert made.shape == torchs.shape == (3, 63, heads, dim)
        off, their_off = (float((x.float() - wanted).abs().max()) for x in (made, torchs))
        assert off <= 1.001 * their_off, f"{which}: the kernel is {off:.4g} from fp32, torch {their_off:.4g}"


def test_few_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    tower = tower_of(CUDA, torch.bfloat16)
    items = [image(tower.config, 3, 3 * n, n) for n in (1, 2, 3, 4)]
    eager = [tower.embed([item], graphs=False)[0] for item in items]
    for at in (0, 0, 0, 1, 1, 2, 2, 0, 0, 0, 3, 3, 3, 2):
        assert torch.equal(tower.embed([items[at]])[0], eager[at])
        assert tower._graphs is not None
        assert len(tower._graphs._seen) <= 2


@pytest.mark.parametrize("name", MODELS)
def test_released_shapes_embed_an_image_of_each_budget(name: str) -> None:
    """By our kernels, where they serve an encoder."""
    found = find_media(name)
    config = found.only(["vision"]) if found else None
    assert config is not None
    dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    tower = synthetic_towers(config, kernels(dtype)).vision
    assert isinstance(tower, VisionTower | PatchEmbedder)
    assert isinstance(tower, PatchEmbedder) or isinstance(tower.rows, KernelRows)
    side = tower.config.pooling
    for rows, columns in ((8, 8), (14, 20), (33, 33)):
        item = image(tower.config, rows * side, columns * side, rows)
        for _ in range(3):
            (made,) = tower.embed([item])
        assert made.shape == (rows * columns, config.hidden_size)
        assert bool(made.isfinite().all())
        assert float(made.float().std()) > 0.1
