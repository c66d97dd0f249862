"""The audio towers equal transformers', alone and in batches whose sounds differ in length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tiny_towers import make_towers, make_unified, towers
from torch import Tensor
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
)

from kerngen.arch import find_arch
from kerngen.errors import UsageError
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.media.config import AudioConfig, MediaConfig, read_media_config
from kerngen.runtime.media.sound import SoundRule, sound_media
from kerngen.runtime.media.towers import audio
from kerngen.runtime.media.towers.audio import AudioTower, audio_tower
from kerngen.runtime.media.towers.conformer import READY_TOKENS, KernelConformer, TorchConformer
from kerngen.runtime.media.values import Media
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.towers import conformer_of
from kerngen.templates.call import Call
from kerngen.workload.towers import tower_problems

R = TypeVar("R")
HIDDEN = 40
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8,
    "layer_types": ["full_attention"], "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0,
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "output_proj_dims": 56,
    "subsampling_conv_channels": [128, 4],
}  # fmt: skip
FRAMES = (100, 37, 128, 4, 1, 38, 2)  # of 4 n + 2 the second convolution reaches padding


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: a second thread only costs
    yield
    torch.set_num_threads(threads)


class Drawn:
    """A TowerSource of random weights that make every term count, and of bounds that bite; or of those given.

    tensors: all that was asked for, by its name on disk.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None, seed: int = 0) -> None:
        self.tensors = {} if tensors is None else dict(tensors)
        self._rng = torch.Generator().manual_seed(seed)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        noise = torch.randn(shape, generator=self._rng)
        if name.endswith(("per_dim_scale", ".bias")):
            noise = 0.2 * noise
        elif len(shape) == 1:
            noise = 1.0 + 0.2 * noise
        else:
            noise = noise / np.prod(shape[1:]) ** 0.5
        made = self.tensors.setdefault(f"model.{name}", noise)
        assert made.shape == shape, name
        return made

    def bound(self, name: str) -> float:
        noise = 2.0 + 0.5 * torch.rand((), generator=self._rng)
        return float(self.tensors.setdefault(f"model.{name}", -noise if name.endswith("_min") else noise))


def made_config(of: Any, **section: Any) -> tuple[Any, AudioConfig]:
    """transformers' config and ours."""
    config = of(vision_config=None, text_config=TEXT, audio_config=section)
    read = read_media_config(config.to_dict())
    assert read is not None
    assert read.audio is not None
    return config, read.audio


def with_weights(model: Any, tensors: dict[str, Tensor]) -> Any:
    """The same with these weights, which are all that its audio part has."""
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert not [name for name in missing if "audio" in name]
    return model.eval()


def tower_of(config: AudioConfig, tensors: dict[str, Tensor]) -> AudioTower:
    tower = audio_tower(Drawn(tensors), config, HIDDEN)
    assert isinstance(tower, AudioTower)
    return tower


@cache
def conformer(*, clips: bool = True) -> tuple[Any, AudioTower, dict[str, Tensor]]:
    """transformers' model and our tower, with the same weights."""
    config, read = made_config(Gemma4Config, **AUDIO, use_clipped_linears=clips)
    source = Drawn()
    tower = audio_tower(source, read, HIDDEN)
    assert isinstance(tower, AudioTower)
    return with_weights(Gemma4ForConditionalGeneration(config), source.tensors), tower, source.tensors


def mel_media(frames: int, seed: int = 0) -> Media:
    data = np.random.default_rng(seed + frames).normal(-3.0, 2.0, (frames, 128)).astype(np.float32)
    return Media.of("audio", data, (frames, 1), -(-frames // 4))


def hf_rows(model: Any, features: Tensor, mask: Tensor) -> list[Tensor]:
    with torch.no_grad():
        out = model.model.get_audio_features(features, mask)
    return [row[seen] for row, seen in zip(out.pooler_output, out.attention_mask, strict=True)]


def hf_padded(model: Any, items: list[Media]) -> list[Tensor]:
    longest = max(len(item.data) for item in items)
    features, mask = torch.zeros(len(items), longest, 128), torch.zeros(len(items), longest, dtype=torch.bool)
    for i, item in enumerate(items):
        features[i, : len(item.data)] = torch.from_numpy(item.data.copy())
        mask[i, : len(item.data)] = True
    return hf_rows(model, features, mask)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("clips", [True, False])
def test_a_padded_batch_equals_transformers(clips: bool) -> None:
    model, tower, _ = conformer(clips=clips)
    items = [mel_media(frames) for frames in FRAMES]
    for item, got, want in zip(items, tower.embed(items), hf_padded(model, items), strict=True):
        assert got.shape == (item.num_tokens, HIDDEN)
        assert error(got, want) < 1e-4, f"{len(item.data)} frames"


@pytest.mark.parametrize("frames", range(1, 60))
def test_every_short_length_equals_transformers(frames: int) -> None:
    model, tower, _ = conformer()
    item = mel_media(frames)
    assert error(tower.embed([item])[0], hf_padded(model, [item])[0]) < 1e-4


def test_the_bounds_of_the_test_bite() -> None:
    _, tower, tensors = conformer()
    _, read = made_config(Gemma4Config, **AUDIO, use_clipped_linears=False)
    free = tower_of(read, tensors)
    item = mel_media(100)
    assert error(free.embed([item])[0], tower.embed([item])[0]) > 1e-2


def test_infinite_bounds_are_none() -> None:
    """transformers' defaults: what a checkpoint holds that never clips."""
    config, read = made_config(Gemma4Config, **AUDIO)
    _, _, tensors = conformer()
    bounds = {
        n: torch.tensor(-torch.inf if n.endswith("_min") else torch.inf) for n, t in tensors.items() if not t.dim()
    }
    half = {name: bound for name, bound in bounds.items() if "ffw_layer_1.input" not in name}  # those keep their own
    tower = tower_of(read, tensors | half)
    model = with_weights(Gemma4ForConditionalGeneration(config), tensors | half)
    item = mel_media(60)
    assert error(tower.embed([item])[0], hf_padded(model, [item])[0]) < 1e-4


def test_one_by_one_equals_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tower, _ = conformer()
    items = [mel_media(frames) for frames in (*FRAMES, 12, 48, 49)]
    alone = [tower.embed([item])[0] for item in items]
    for limit in (1, 130, 300, audio.MAX_FRAMES):
        monkeypatch.setattr(audio, "MAX_FRAMES", limit)
        for item, got, want in zip(items, tower.embed(items), alone, strict=True):
            assert error(got, want) < 1e-5, f"{len(item.data)} frames, {limit} in a forward"
    assert tower.embed([]) == []


def test_batches_hold_every_item_once_and_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_FRAMES", 300)
    lengths = [100, 1, 299, 301, 100, 100, 7, 2999]
    batches = list(audio._batches(lengths))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 300 for b in batches)
    assert batches == [[7], [3], [2], [0, 4, 5], [6, 1]]


def test_from_samples_to_rows_equals_transformers() -> None:
    """Feature extractor and tower, as its processor runs them: padded to a multiple of 128 samples."""
    model, tower, _ = conformer()
    rng = np.random.default_rng(5)
    sounds = [(0.3 * rng.standard_normal(n)).astype(np.float32) for n in (161, 16_001, 30_000)]
    made = Gemma4AudioFeatureExtractor()(sounds, return_tensors="pt")
    want = hf_rows(model, made["input_features"], made["input_features_mask"])
    items = [sound_media(sound, SoundRule("mel", 128, 480_000)) for sound in sounds]
    for got, row in zip(tower.embed(items), want, strict=True):
        assert error(got, row) < 1e-4


def test_bf16_stays_near_fp32() -> None:
    """Weights and activations of 8 bits; norms and attention in fp32. The bound: three layers of 2^-8 roundings."""
    _, tower, tensors = conformer()
    _, read = made_config(Gemma4Config, **AUDIO)
    half = tower_of(read, {name: t.bfloat16() for name, t in tensors.items()})
    got = half.embed([mel_media(100)])[0]
    assert got.dtype == torch.bfloat16
    want = tower.embed([mel_media(100)])[0]
    assert float((got.float() - want).norm() / want.norm()) < 0.1


def test_fp16_survives_what_overflows() -> None:
    """transformers clamps before its norms to fp16's largest number, so that infinity gives no NaN."""
    config, read = made_config(Gemma4Config, **AUDIO, use_clipped_linears=False)
    tensors = {n: t.half() for n, t in conformer(clips=False)[2].items() if t.dim()}
    name = "model.audio_tower.layers.1.feed_forward1.ffw_layer_2.linear.weight"
    tensors[name] = tensors[name] * 60_000
    got = tower_of(read, tensors).embed([mel_media(50)])[0]
    model = with_weights(Gemma4ForConditionalGeneration(config).half(), tensors)
    want = hf_padded(model, [mel_media(50)])[0]
    assert got.isfinite().all()
    assert float((got - want).float().norm() / want.float().norm()) < 0.02


def test_a_long_sound_takes_no_square_of_its_length() -> None:
    """Scores of 750 tokens: 63 blocks of 12 x 24, not 750 x 750."""
    _, tower, _ = conformer()
    seen: list[int] = []
    softmax = torch.softmax

    def counted(scores: Tensor, dim: int) -> Tensor:
        seen.append(scores.numel())
        return softmax(scores, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", counted)
        assert tower.embed([mel_media(2999)])[0].shape == (750, HIDDEN)
    assert seen == [4 * 63 * 12 * 24] * 3


def test_later_frames_change_no_earlier_token() -> None:
    _, tower, _ = conformer()
    whole = mel_media(96)
    start = Media.of("audio", whole.data[:45], (45, 1), 12)
    first, changed = tower.embed([start])[0], tower.embed([whole])[0]
    assert error(changed[:11], first[:11]) < 1e-5  # the last one's convolutions reach frame 45
    assert error(changed[11:12], first[11:]) > 1e-3


def test_the_12b_frames_equal_transformers() -> None:
    config, read = made_config(Gemma4UnifiedConfig, model_type="gemma4_unified_audio")
    rule = SoundRule.of(read)
    assert rule == SoundRule("samples", 640)
    source = Drawn()
    embedder = audio_tower(source, read, HIDDEN)
    assert list(source.tensors) == ["model.embed_audio.embedding_projection.weight"]
    model = with_weights(Gemma4UnifiedForConditionalGeneration(config), source.tensors)
    rng = np.random.default_rng(6)
    sounds = [(0.3 * rng.standard_normal(n)).astype(np.float32) for n in (1, 640, 1000, 5000)] + [
        np.zeros(700, np.float32)
    ]
    items = [sound_media(sound, rule) for sound in sounds]
    for item, got in zip(items, embedder.embed(items), strict=True):
        with torch.no_grad():
            want = model.model.get_audio_features(torch.from_numpy(item.data.copy())[None]).pooler_output[0]
        assert got.shape == (item.num_tokens, HIDDEN)
        assert torch.allclose(got, want, atol=1e-6, rtol=1e-5)


def test_our_kernels_compute_what_torch_does() -> None:
    """By their references, sounds of several lengths together; and they ask for what is built for the model."""
    _, read = made_config(Gemma4Config, **(AUDIO | {"hidden_size": 64}))
    tower = audio_tower(Drawn(), read, HIDDEN)
    asked = set[tuple[str, Any]]()

    class Noting(Reference):
        def run(self, call: Call[R], where: str) -> R:
            most = READY_TOKENS[-1]
            assert call.problem.num_tokens <= most
            asked.add((call.kernel, replace(call.problem, num_tokens=most)))
            return super().run(call, where)

    conformer = conformer_of(read, KernelOps(Noting(), torch.float32))
    assert isinstance(conformer, KernelConformer)
    ours = audio_tower(Drawn(), read, HIDDEN, conformer)
    items = [mel_media(frames) for frames in (*FRAMES, 201)]
    for got, want in zip(ours.embed(items), tower.embed(items), strict=True):
        assert error(got, want) < 1e-5
    media = MediaConfig(None, read, HIDDEN, False, *range(7))
    built = {(name, replace(p, dtype="fp32")) for name, p in tower_problems(media, find_arch("sm90"))}
    assert {name for name, _ in asked} == {"attn_relative", "glu_conv", "mel_conv", "residual_norms", "silu"}
    assert asked <= built
    assert read.encoder is not None
    for odd in ({"hidden_size": 48}, {"num_keys": 33}, {"conv_kernel": 9}):
        config = replace(read, encoder=replace(read.encoder, **odd))
        assert isinstance(conformer_of(config, KernelOps(Noting(), torch.float32)), TorchConformer), odd


class Counted:
    """A TowerSource of shapes alone."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.bounds: set[str] = set()

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.sizes[name] = int(np.prod(shape))
        return torch.empty(shape, device="meta")

    def bound(self, name: str) -> float:
        self.bounds.add(name)
        return 0.0


def test_the_released_shapes_sum_to_the_published_size() -> None:
    """And a tower can be made of shapes without storage, as a plan of its memory is."""
    _, read = made_config(Gemma4Config, model_type="gemma4_audio")
    source = Counted()
    audio_tower(source, read, 1536)
    assert source.sizes.pop("embed_audio.embedding_projection.weight") == 1536 * 1536
    assert sum(source.sizes.values()) == 304_824_608
    assert len(source.bounds) == 480


def test_what_does_not_fit_is_refused() -> None:
    _, tower, _ = conformer()
    frames = np.zeros((8, 128), np.float32)
    for media, why in (
        (Media.of("image", np.zeros((4, 128), np.uint8), (2, 2), 1), r"image of uint8 \[4, 128\] is no sound"),
        (Media.of("audio", frames[:, :127], (8, 1), 2), r"float32 \[frames, 128\]"),
        (Media.of("audio", frames[:0], (0, 1), 0), "0 frames"),
        (Media.of("audio", frames, (8, 1), 3), "8 frames of sound are 2 tokens, not 3"),
    ):
        with pytest.raises(UsageError, match=why):
            tower.embed([media])


def test_a_saved_checkpoint_loads(tmp_path: Path) -> None:
    """With bounds that are finite in some linears, and a config.json that names another size of each part."""
    model = make_towers(tmp_path)
    loaded = towers(tmp_path, "audio")
    items = [mel_media(frames) for frames in FRAMES]
    for got, want in zip(loaded.embed(items), hf_padded(model, items), strict=True):
        assert error(got, want) < 1e-4
    assert loaded.vision is None


def test_a_saved_12b_loads(tmp_path: Path) -> None:
    model = make_unified(tmp_path)
    item = sound_media(np.random.default_rng(7).normal(0, 0.3, 213).astype(np.float32), SoundRule("samples", 20))
    with torch.no_grad():
        want = model.model.get_audio_features(torch.from_numpy(item.data.copy())[None]).pooler_output[0]
    assert error(towers(tmp_path, "audio").embed([item])[0], want) < 1e-5
