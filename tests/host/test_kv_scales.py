"""Checkpoints with scales of an fp8 KV cache: what loads, what a cache holds then, and what is refused."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_kv_scales, edit_config, edit_tensors, kv_scheme
from command import Kerngen
from torch import Tensor

from kerngen.errors import CheckpointError, UsageError
from kerngen.quality.kv import kv_quality
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import Keeping, read_model_config
from kerngen.runtime.engine import Engine
from kerngen.runtime.session import Session, load
from kerngen.runtime.weights.kv_scales import with_kv_scales
from kerngen.runtime.world import World
from kerngen.templates.common.attention.kv_formats_torch import scales_of
from kerngen.workload.workload import find_model

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny"
MODEL, ASSISTANT = TINY / "gemma-4-tiny-w4a16", TINY / "gemma-4-tiny-assistant"
PROMPT = (TINY / "prompt.txt").read_text()
FP8 = Keeping(kv_cache_dtype="fp8")
HOW: dict[str, Any] = {"draft": False, "device": "cpu", "backend": "torch", "media": "none"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / MODEL.name
    shutil.copytree(MODEL, made)
    add_kv_scales(made)
    return made


def _scales(session: Session) -> list[tuple[Tensor, Tensor]]:
    """Of each layer that owns a cache, what its pools hold: [num_kv_heads] each, the same in all rows."""
    cache, found = KVCache.whole(session.config, session.ops, batch=1, max_len=100), []
    for layer in (layer for layer in session.config.layers if layer.owns_kv):
        kv = cache.pages(layer)
        each = [scales_of(pool, kv.format) for pool in (kv.k_cache, kv.v_cache)]
        assert all(bool((its == its[:1, :, :1, :1]).all()) for its in each)
        found.append((each[0][0, :, 0, 0], each[1][0, :, 0, 0]))
    return found


@pytest.mark.parametrize("by_head", [False, True])
def test_pools_have_the_checkpoints_scales(folder: Path, by_head: bool) -> None:
    if by_head:
        add_kv_scales(folder, by_head=True)
    stored: dict[str, Tensor] = {}
    edit_tensors(folder, lambda tensors: stored.update({k: v.clone() for k, v in tensors.items() if "_scale" in k}))
    session = load(folder, kv_cache_dtype="fp8", **HOW)
    found = _scales(session)
    names = [f"model.language_model.layers.{layer.index}.self_attn" for layer in session.config.layers]
    assert len(found) == len(names)
    for name, both in zip(names, found, strict=True):
        for of, got in zip("kv", both, strict=True):
            assert torch.equal(got, (256 * stored[f"{name}.{of}_scale"].double()).half().expand(len(got)))


def test_a_scale_may_have_no_dims(folder: Path) -> None:
    wanted = _scales(load(folder, kv_cache_dtype="fp8", **HOW))

    def flat(tensors: dict[str, Tensor]) -> None:
        tensors.update({k: v.reshape(()) for k, v in tensors.items() if k.endswith(("k_scale", "v_scale"))})

    edit_tensors(folder, flat)
    for both, others in zip(_scales(load(folder, kv_cache_dtype="fp8", **HOW)), wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(both, others, strict=True))


def test_by_default_scales_change_nothing(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    said = [load(where, **HOW).generate(PROMPT, max_new_tokens=24).tokens for where in (folder, MODEL)]
    assert said[0] == said[1]
    assert not [w for w in recwarn if "scale" in str(w.message)]
    config = with_kv_scales(read_model_config(folder), folder)
    assert (config.has_kv_scales, config.kv_format) == (True, "plain")
    assert with_kv_scales(read_model_config(MODEL), folder) == read_model_config(MODEL)


def test_wiping_and_reuse_of_pages_keep_scales(folder: Path) -> None:
    session = load(folder, kv_cache_dtype="fp8", **HOW)
    prompt = session.encode(PROMPT, chat=False)
    engine = Engine(session.model, None, max_len=300, max_batch=1, prefix_caching=False)
    first = engine.generate(prompt, max_new_tokens=12).tokens
    engine.cache.wipe()
    assert engine.generate(prompt, max_new_tokens=12).tokens == first
    for layer in session.config.layers:
        kv = engine.cache.pages(layer)
        assert all(bool((scales_of(pool, kv.format) > 0).all()) for pool in (kv.k_cache, kv.v_cache))


def test_what_it_costs_is_little(folder: Path) -> None:
    session = load(folder, **HOW)
    found = kv_quality(session.model, session.encode(PROMPT * 4, chat=False)[:200], [FP8])[0].whole
    assert 0 < found.kl_mean < 2e-2
    assert found.top1 > 0.95


def test_a_rank_has_the_scales_of_its_heads(folder: Path) -> None:
    config = read_model_config(folder)
    layers = tuple(
        replace(layer, kv_scales=(tuple(range(1, layer.num_kv_heads + 1)), (0.5,))) for layer in config.layers
    )
    config = replace(config, layers=layers)
    ranks = [config.divided(World(rank, 2)) for rank in range(2)]
    for i, layer in enumerate(config.layers):
        for rank in ranks:
            mine = rank.layers[i]
            assert mine.kv_scales == (layer.kv_scales[0][mine.kv_span.slice], (0.5,))
            assert len(mine.kv_scales[0]) == mine.num_kv_heads


def test_fp8_needs_scales_and_two_pools() -> None:
    with pytest.raises(UsageError, match="fp8 takes the checkpoint's own scales, and this one has none") as e:
        load(MODEL, kv_cache_dtype="fp8", **HOW)
    assert "--kv-cache-dtype int8 needs none" in str(e.value.hint)
    with pytest.raises(UsageError, match="one pool of K and V, which have scales of their own in fp8"):
        Keeping(kv_cache_dtype="fp8", kv_cache_layout="shared")
    assert find_model("gemma-4-31b", kept=FP8).target.kv_format == "fp8"  # shapes, for a checkpoint that has some


def test_a_plan_says_what_may_be_had(folder: Path, kerngen: Kerngen) -> None:
    said = "The checkpoint has scales of an fp8 cache: with --kv-cache-dtype fp8 keys and values take 33 of 64 bytes."
    found = [
        kerngen("run", str(where), "--plan", *options)[1]
        for where, options in ((folder, ()), (folder, ("--kv-cache-dtype", "fp8")), (MODEL, ()))
    ]
    assert [said in out for out in found] == [True, False, False]


@pytest.mark.parametrize(("changed", "says"), [
    ({"num_bits": 4}, "num_bits is 4; only 8 is implemented"),
    ({"type": "int"}, "type is 'int'; only 'float' is implemented"),
    ({"symmetric": False}, "symmetric is False; only True is implemented"),
    ({"dynamic": True}, "dynamic is True; only False is implemented"),
    ({"strategy": "token"}, "strategy is 'token'; 'tensor' and 'attn_head' are implemented"),
    ({"group_size": 64}, "group_size is 64; it must be null"),
])  # fmt: skip
def test_another_scheme_is_refused_by_its_field(folder: Path, changed: dict[str, Any], says: str) -> None:
    edit_config(folder, lambda c: c["quantization_config"].update(kv_cache_scheme=kv_scheme() | changed))
    with pytest.raises(CheckpointError, match=re.escape(f"kv_cache_scheme: {says}")):
        load(folder, **HOW)


@pytest.mark.parametrize(("value", "says"), [
    (None, r"lacks the tensor .*layers\.1\.self_attn\.v_scale, which kv_cache_scheme implies"),
    (torch.ones(3), r"v_scale has shape \[3\]: neither one scale nor one for each of \d KV heads"),
    (torch.ones(1, dtype=torch.int32), "v_scale is I32; it must be BF16 or F16 or F32"),
    (torch.zeros(1), "v_scale has 0; scales from 6.10352e-05 to 128 are implemented"),
    (torch.tensor([-1.0]), "v_scale has -1; scales"), (torch.tensor([torch.nan]), "v_scale has nan; scales"),
    (torch.tensor([300.0]), "v_scale has 300; scales"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_scales_that_cannot_be_are_refused(folder: Path, value: Tensor | None, says: str, dtype: str) -> None:
    name = "model.language_model.layers.1.self_attn.v_scale"

    def change(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=says):
        load(folder, kv_cache_dtype=dtype, **HOW)


def test_scales_that_no_scheme_tells_of_are_refused(folder: Path) -> None:
    edit_config(folder, lambda c: c["quantization_config"].pop("kv_cache_scheme"))
    with pytest.raises(CheckpointError, match=r"k_scale .* which its config\.json does not account for"):
        load(folder, **HOW)
