"""config.json as transformers writes it: the same model, whichever spelling of its layers the file has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gemma import F, S
from transformers import Gemma4AssistantConfig, Gemma4Config, Gemma4TextConfig

from kerngen.errors import CheckpointError
from kerngen.runtime.config import ModelConfig, read_drafter_config, read_model_config
from kerngen.workload.workload import MODELS, find_model


def flat_keys(config: ModelConfig, **more: Any) -> dict[str, Any]:
    """A released model's text configuration, spelled as it was released: no per_layer_config."""
    sliding = next(layer for layer in config.layers if layer.is_sliding)
    full = config.layers[-1]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.layers[0].intermediate_size,
        "num_hidden_layers": len(config.layers),
        "layer_types": [S if layer.is_sliding else F for layer in config.layers],
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_global_key_value_heads": full.num_kv_heads if full.v_is_k else None,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.v_is_k,
        "num_kv_shared_layers": sum(not layer.owns_kv for layer in config.layers),
        "use_double_wide_mlp": full.intermediate_size > config.layers[0].intermediate_size,
        "sliding_window": config.window,
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 1e4},
            F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
        "rms_norm_eps": config.rms_norm_eps,
        "final_logit_softcapping": config.logit_cap or None,
        "max_position_embeddings": config.max_positions,
        "hidden_size_per_layer_input": config.ple_size,
        "vocab_size_per_layer_input": config.ple_vocab_size,
        "enable_moe_block": config.num_experts > 0,
        "num_experts": config.num_experts or None,
        "top_k_experts": config.top_k_experts or None,
        "moe_intermediate_size": config.moe_intermediate_size or None,
        "eos_token_id": list(config.eos_ids),
        **more,
    }


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def per_layer_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    assert "global_head_dim" not in text
    value = text["per_layer_config"]
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_saved_again_by_transformers_reads_the_same(tmp_path: Path, name: str) -> None:
    released = find_model(name)
    target, drafter = released.target, released.drafter
    assert drafter is not None
    keys = flat_keys(target)
    flat = read_model_config(write(tmp_path / "flat", {"model_type": "gemma4_text", **keys}))
    assert flat.layers == target.layers
    Gemma4TextConfig(**keys).save_pretrained(tmp_path / "text")
    assert len(next(iter(per_layer_config(tmp_path / "text")))) == 2, "keys are zero-padded"
    assert read_model_config(tmp_path / "text") == flat
    Gemma4Config(text_config=keys).save_pretrained(tmp_path / "multimodal")
    assert read_model_config(tmp_path / "multimodal") == flat

    keys = flat_keys(drafter.text, vocab_size_per_layer_input=0)
    top = {
        "backbone_hidden_size": drafter.backbone_hidden_size,
        "use_ordered_embeddings": drafter.num_centroids > 0,
        "num_centroids": max(drafter.num_centroids, 1),
        "centroid_intermediate_top_k": max(drafter.centroid_top_k, 1),
    }
    Gemma4AssistantConfig(text_config=Gemma4TextConfig(**keys), **top).save_pretrained(tmp_path / "assistant")
    write(tmp_path / "flat", {"model_type": "gemma4_assistant", "text_config": keys, **top})
    assert per_layer_config(tmp_path / "assistant")
    assert read_drafter_config(tmp_path / "assistant", flat) == read_drafter_config(tmp_path / "flat", flat)


@pytest.mark.parametrize(("keys", "written"), [
    ({}, {"05": {"head_dim": 512}, "11": {"head_dim": 512}}),
    ({"head_dim": 512}, {}),
    ({"head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
     {"05": {"num_key_value_heads": 2}, "11": {"num_key_value_heads": 2}}),
    ({"attention_k_eq_v": True, "num_global_key_value_heads": 4}, {"05": {"head_dim": 512}, "11": {"head_dim": 512}}),
])  # fmt: skip
def test_what_equals_the_global_value_is_not_written(
    tmp_path: Path, keys: dict[str, Any], written: dict[str, Any]
) -> None:
    keys = {"num_hidden_layers": 12, "hidden_size_per_layer_input": 0, **keys}
    config = Gemma4TextConfig(**keys)
    config.save_pretrained(tmp_path)
    assert per_layer_config(tmp_path) == written
    layers = read_model_config(tmp_path).layers
    want = [(c.head_dim, c.num_key_value_heads) for c in config.per_layer_config]
    assert [(layer.head_dim, layer.num_kv_heads) for layer in layers] == want
    config.serialize_explicit_per_layer_config = True
    config.save_pretrained(tmp_path)
    assert read_model_config(tmp_path).layers == layers


def test_per_layer_config_replaces_the_flat_keys(tmp_path: Path) -> None:
    """transformers reads the flat keys only where per_layer_config is absent; null and {} mean no differences."""
    keys: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": [S, F], "hidden_size_per_layer_input": 0}
    Gemma4TextConfig(**keys).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"global_head_dim": 64}
    for value in (None, {}, {"0": {"head_dim": 128}}, {"00": {"head_dim": 128, "skip": []}, "01": {}}):
        write(tmp_path, saved | {"per_layer_config": value})
        want = [c.head_dim for c in Gemma4TextConfig.from_pretrained(tmp_path).per_layer_config]
        assert [layer.head_dim for layer in read_model_config(tmp_path).layers] == want


@pytest.mark.parametrize("name", ["final_logit_softcapping", "rope_parameters", "global_head_dim"])
def test_a_field_that_is_left_out_has_transformers_default(tmp_path: Path, name: str) -> None:
    keys = {k: v for k, v in flat_keys(find_model("gemma-4-31b").target).items() if k != name}
    ours = read_model_config(write(tmp_path, {"model_type": "gemma4_text", **keys}))
    Gemma4TextConfig(**keys).save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == ours


REFUSED: dict[str, tuple[Any, str]] = {
    "no such layer": ({"12": {}}, "'12' is not a layer; num_hidden_layers is 12"),
    "negative": ({"-1": {}}, "'-1' is not a layer"),
    "no number": ({"last": {}}, "'last' is not a layer"),
    "twice": ({"5": {}, "05": {}}, "layer 5 is there twice"),
    "no object": ({"05": 512}, "05 is 512; it must be an object"),
    "list": ([{}], "it must be an object"),
    "text": ({"05": {"head_dim": "512"}}, "head_dim is '512'"),
    "null": ({"05": {"head_dim": None}}, "head_dim is None"),
    "another field": ({"05": {"intermediate_size": 8}}, "intermediate_size differs from the model's"),
    "skipped": ({"05": {"skip": ["self_attn"]}}, "skip differs"),
    "one sliding layer": ({"04": {"head_dim": 128}}, "layer 4 has head_dim 128 and 4 KV heads, layer 0 256 and 4"),
    "one full layer": ({"05": {"num_key_value_heads": 2}}, "layer 11 has head_dim 256 and 4 KV heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_per_layer_config_that_cannot_be_is_one_clear_error(tmp_path: Path, case: str) -> None:
    value, message = REFUSED[case]
    Gemma4TextConfig(num_hidden_layers=12, hidden_size_per_layer_input=0).save_pretrained(tmp_path)
    edit(tmp_path, lambda c: c.update(per_layer_config=value))
    with pytest.raises(CheckpointError) as caught:
        read_model_config(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in caught.value.message


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    write(folder, config)
