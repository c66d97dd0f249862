"""Checkpoints: names, shards, W4A16, ties, dead tensors; and every way in which a folder can lie."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PROMPT, WIDE, edit_config, edit_tensors, logits, quantize, shard
from safetensors.torch import load_file, save_file
from tiny_gemma import CPU, hf_logits, load, load_assistant, make_assistant, make_target
from torch import Tensor
from transformers import Gemma4ForCausalLM

from kerngen.errors import CheckpointError, KerngenError, UsageError
from kerngen.runtime.ops import Linear, dense_weights, int4_weights
from kerngen.runtime.ops.eager import _UNPACK, TorchOps
from kerngen.runtime.ops.formats import FORMATS
from kerngen.runtime.weights.loader import load_model
from kerngen.runtime.weights.safetensors import Checkpoint, SafetensorsFile
from kerngen.templates.common.w4.pack import dequantize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_target(tmp_path / "model", "k_eq_v")
    return tmp_path / "model"


def test_packed_nibbles_are_least_significant_first() -> None:
    """The worked example of the format: word 0x8880F798 holds 0, 1, -1, 7, -8, 0, 0, 0."""
    packed = torch.tensor([[0x8880F798 - (1 << 32)] * 4], dtype=torch.int32)
    weights = int4_weights(packed, torch.tensor([[0.5]]), 1, 32, 32)
    assert dequantize(weights.packed, weights.scales)[0, :8].tolist() == [0, 0.5, -0.5, 3.5, -4, 0, 0, 0]


def test_weights_know_what_they_are_made_of() -> None:
    dense = dense_weights(torch.ones(3, 64, 32))  # three experts
    packed = int4_weights(torch.zeros(64, 4, dtype=torch.int32), torch.ones(64, 1), 64, 32, 32, "up")
    assert (dense.out_features, dense.in_features, dense.num_bytes) == (64, 32, 3 * 64 * 32 * 4)
    assert (packed.format.group_size, packed.num_bytes, packed.is_dense) == (32, 64 * 16 + 64 * 4, False)
    with pytest.raises(TypeError, match="up is int4, made of packed, scales: no weight"):
        packed.weight  # noqa: B018
    with pytest.raises(TypeError, match="linear is dense, made of weight: no scales"):
        dense.scales  # noqa: B018


def test_both_backends_know_the_same_formats() -> None:
    assert set(FORMATS) == set(_UNPACK) == {"dense", "int4", "int4_min", "int8", "int8_min"}


@pytest.mark.parametrize("group", [32, 64, 128])
def test_w4a16_equals_the_dequantized_model(tmp_path: Path, group: int) -> None:
    make_target(tmp_path, "k_eq_v", **WIDE)
    dense = quantize(tmp_path, group, ("lm_head", "model.layers.0.self_attn.q_proj"))  # q dense, k and v packed
    ours = logits(load(tmp_path))
    (tmp_path / "dense").mkdir()
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text((tmp_path / "config.json").read_text())
    edit_config(tmp_path / "dense", lambda c: c.pop("quantization_config"))
    assert torch.equal(ours, logits(load(tmp_path / "dense")))


def test_packed_weights_reach_the_backend_fused_and_packed(tmp_path: Path) -> None:
    make_target(tmp_path, "k_eq_v", **WIDE)
    quantize(tmp_path, 32)
    seen: list[tuple[int, int]] = []

    class Repacking(TorchOps):
        def prepare(self, weights: Any) -> Any:
            if weights.format.name == "int4":
                assert weights.packed.shape == (weights.out_features, weights.in_features // 8)
                assert weights.scales.shape == (weights.out_features, weights.in_features // weights.format.group_size)
                seen.append((weights.out_features, weights.in_features))
            return super().prepare(weights)

    config = load(tmp_path).config
    load_model(tmp_path, config, Repacking(CPU, torch.float32))
    sliding, full = config.layers[0], config.layers[1]
    qkv = (4 + 2 * sliding.num_kv_heads) * 32, (4 + full.num_kv_heads) * 32  # K = V stores q and k only
    assert seen[:4] == [(qkv[0], 128), (128, 128), (512, 128), (128, 256)]
    assert seen[4] == (qkv[1], 128)
    assert len(seen) == 4 * len(config.layers)


def test_shards_load_like_one_file(folder: Path) -> None:
    expected = logits(load(folder))
    shard(folder)
    assert torch.equal(logits(load(folder)), expected)


def test_multimodal_names_and_nested_config(folder: Path) -> None:
    expected = logits(load(folder))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(2, 2)  # not ours: ignored

    def nest(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config.update(model_type="gemma4", text_config=text, tie_word_embeddings=True, vision_config={})

    edit_tensors(folder, rename)
    edit_config(folder, nest)
    assert torch.equal(logits(load(folder)), expected)


def test_dead_kv_of_shared_layers_is_ignored(tmp_path: Path) -> None:
    hf = make_target(tmp_path, "shared_ple")
    dead = {f"model.layers.5.self_attn.{p}.weight": torch.full((2, 2), torch.nan) for p in ("k_proj", "v_proj")}
    dead["model.layers.5.self_attn.k_norm.weight"] = torch.full((2,), torch.nan)
    edit_tensors(tmp_path, lambda t: t.update(dead))
    torch.testing.assert_close(logits(load(tmp_path)), hf_logits(hf, PROMPT), atol=1e-4, rtol=0)


def test_what_transformers_ignores_is_ignored_with_a_warning(folder: Path) -> None:
    expected = logits(load(folder))
    leftover = {
        "model.layers.1.self_attn.v_proj.weight": torch.ones(32, 32),  # layer 1 has V = K
        "model.rotary_emb.inv_freq": torch.ones(8),
        "model.rotary_emb.full_attention_original_inv_freq": torch.ones(16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_tensors(folder, lambda t: t.update(leftover))
    with pytest.warns(UserWarning, match=r"inv_freq and 3 like it.*ignored"):
        assert torch.equal(logits(load(folder)), expected)
    torch.testing.assert_close(
        expected, hf_logits(Gemma4ForCausalLM.from_pretrained(folder), PROMPT), atol=1e-4, rtol=0
    )


def test_a_layer_scalar_that_is_not_stored_is_one(folder: Path) -> None:
    names = [f"model.layers.{i}.layer_scalar" for i in (1, 3)]
    edit_tensors(folder, lambda t: [t.pop(name) for name in names])
    with pytest.warns(UserWarning, match=r"layers\.1\.layer_scalar and 1 like it.*; 1 is used"):
        ours = logits(load(folder))
    torch.testing.assert_close(ours, hf_logits(Gemma4ForCausalLM.from_pretrained(folder), PROMPT), atol=1e-4, rtol=0)


def test_dead_kv_of_a_drafter_is_ignored(folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    make_assistant(tmp_path / "assistant", "k_eq_v")
    target = load(folder)
    y = torch.randn(1, 24, generator=torch.Generator().manual_seed(5))
    expected = load_assistant(tmp_path / "assistant", target).logits(y)
    dead = {f"model.layers.2.self_attn.{p}.weight": torch.full((2, 2), torch.nan) for p in ("k_proj", "v_proj")}
    edit_tensors(tmp_path / "assistant", lambda t: t.update(dead))
    assert torch.equal(load_assistant(tmp_path / "assistant", target).logits(y), expected)
    assert not recwarn.list


def test_stored_head_of_a_tied_model_is_used_where_it_differs(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    """As in transformers: equal values are one tensor, others are the head although the config says they are tied."""
    expected = logits(load(folder))
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(folder)
    assert torch.equal(logits(model), expected)
    assert dense(model.weights.head).data_ptr() == model.weights.embed.weight.data_ptr()
    assert not recwarn.list
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0) + 0.5}))
    with pytest.warns(UserWarning, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        model = load(folder)
    ours = logits(model)
    torch.testing.assert_close(ours, hf_logits(Gemma4ForCausalLM.from_pretrained(folder), PROMPT), atol=1e-4, rtol=0)
    assert (ours - expected).abs().max() > 1
    edit_config(folder, lambda c: c.update(tie_word_embeddings=False))
    assert torch.equal(logits(load(folder)), ours)


def dense(weights: Linear) -> Tensor:
    return weights.weight


@pytest.mark.parametrize("num_centroids", [0, 12])
def test_stored_head_of_a_drafter_is_used_where_it_differs(folder: Path, tmp_path: Path, num_centroids: int) -> None:
    hf = make_assistant(tmp_path / "assistant", "k_eq_v", num_centroids=num_centroids)
    head = torch.randn(hf.lm_head.weight.shape, generator=torch.Generator().manual_seed(4))
    edit_tensors(tmp_path / "assistant", lambda t: t.update({"lm_head.weight": head}))
    with pytest.warns(UserWarning, match=r"lm_head.weight differs"):
        drafter = load_assistant(tmp_path / "assistant", load(folder))
    y = torch.randn(1, hf.hidden_size, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = hf.masked_embedding(y[None], head)[0] if hf.masked_embedding is not None else y @ head.T
    torch.testing.assert_close(drafter.logits(y), expected)


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    make_target(tmp_path, "moe")
    expected = logits(load(tmp_path))

    def split(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            name = f"model.layers.{layer}.experts"
            gate_up, down = tensors.pop(f"{name}.gate_up_proj"), tensors.pop(f"{name}.down_proj")
            for e in range(len(down)):
                gate, up = gate_up[e].chunk(2)
                for part, weight in (("gate", gate), ("up", up), ("down", down[e])):
                    tensors[f"{name}.{e}.{part}_proj.weight"] = weight.clone()

    edit_tensors(tmp_path, split)
    assert torch.equal(logits(load(tmp_path)), expected)


# ---- lies -----------------------------------------------------------------------------------------------------------


def edit_header(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


NORM = "model.norm.weight"


def lie(header: dict[str, Any], **fields: Any) -> None:
    header[NORM] |= fields


def truncate(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


def cut_by(folder: Path, drop: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-drop])


def grow(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 8)


def claim_header(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])


def have_header(folder: Path, size: int) -> None:
    """A hole in the file stands for it: it takes as long to be read and parsed, if it is."""
    claim_header(folder, size)
    os.truncate(folder / "model.safetensors", 8 + size)


def misplace(folder: Path, where: str) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"][NORM] = where
    index.write_text(json.dumps(value))


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (lambda f: truncate(f, 0), "truncated: 0 B"),
    "cut in the header": (lambda f: truncate(f, 100), "truncated"),
    "cut in the data": (lambda f: cut_by(f, 10), "truncated"),
    "data after the end": (grow, "8 B follow the last tensor"),
    "huge header": (lambda f: claim_header(f, 1 << 60), "header claims"),
    "large header": (lambda f: have_header(f, 95_000_000), "header claims 95,000,000 B"),
    "not json": (lambda f: claim_header(f, 30), "not JSON"),
    "shape too large": (lambda f: edit_header(f, lambda h: lie(h, shape=[1 << 40])), "data_offsets span"),
    "negative shape": (lambda f: edit_header(f, lambda h: lie(h, shape=[-32])), "impossible shape"),
    "wrong dtype": (lambda f: edit_header(f, lambda h: lie(h, dtype="F64")), "data_offsets span"),
    "unknown dtype": (lambda f: edit_header(f, lambda h: lie(h, dtype="F7")), "unknown dtype 'F7'"),
    "integer weights": (
        lambda f: edit_header(f, lambda h: lie(h, dtype="I32")),
        f"{NORM} is I32; it must be BF16 or F16 or F32",
    ),
    "offsets elsewhere": (
        lambda f: edit_header(f, lambda h: lie(h, data_offsets=[1 << 44, (1 << 44) + 128])),
        "leaves a gap",
    ),
    "offsets overlap": (lambda f: edit_header(f, lambda h: lie(h, data_offsets=[0, 128])), "overlaps"),
    "offsets reversed": (lambda f: edit_header(f, lambda h: lie(h, data_offsets=[128, 0])), "data_offsets span -128"),
    "no offsets": (lambda f: edit_header(f, lambda h: h[NORM].pop("data_offsets")), "lacks one of"),
    "other shape": (
        lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(31)})),
        "has shape [31]; config.json implies [32]",
    ),
    "tensor missing": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), f"lacks the tensor {NORM}"),
    "tensor unknown": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.layers.5.self_attn.v_proj.weight": torch.ones(32, 32)})),
        "does not account for",
    ),
    "shard elsewhere": (lambda f: misplace(f, "../../../etc/passwd"), "is not a file name"),
    "shard of 300 characters": (lambda f: misplace(f, "x" * 300), "is not a file name"),
    "shard of 300 bytes": (lambda f: misplace(f, "é" * 150), "cannot be read: File name too long"),
    "shard of a NUL": (lambda f: misplace(f, "x\0y"), "is not a file name"),
    "shard of an escape": (lambda f: misplace(f, "\x1b]0;x\a"), r"lies in '\x1b]0;x\x07', which"),
    "shard above": (lambda f: misplace(f, ".."), "is not a file name"),
    "tensor of an escape": (
        lambda f: edit_header(f, lambda h: h.update({"\x1b[2J\n\ud800": h[NORM]})),
        r"\x1b[2J\n\ud800",
    ),
    "tensor of 10,000 characters": (
        lambda f: edit_header(f, lambda h: h.update({"x" * 10_000: h[NORM]})),
        "xxx… (10,000 characters)' is no name of a tensor",
    ),
    "tensor in the wrong shard": (lambda f: misplace(f, "model-00001-of-00002.safetensors"), f"lacks {NORM}"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_torn_or_lying_file_is_one_clear_error(folder: Path, case: str) -> None:
    damage, message = FILES[case]
    assert logits(load(folder)).isfinite().all()
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.pop(name)


def having(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(fields)


REQUIRED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "sliding_window", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    **{f"no {name}": (without(name), f"field '{name}' is missing") for name in REQUIRED},
    "hidden size is text": (having(hidden_size="32"), "hidden_size is '32'"),
    "hidden size is huge": (having(hidden_size=1 << 40), "hidden_size is"),
    "zero layers": (having(num_hidden_layers=0), "num_hidden_layers is 0"),
    "layer types too short": (having(layer_types=["full_attention"]), "layer_types names 1 layers"),
    "layer type unknown": (having(layer_types=["linear_attention"] * 5), "linear_attention"),
    "heads do not divide": (having(num_key_value_heads=3), "do not split over 3"),
    "all layers shared": (having(num_kv_shared_layers=5), "leaves none"),
    "no owner of that type": (having(num_kv_shared_layers=4), "no layer of its type"),
    "rope type unknown": (
        lambda c: c["rope_parameters"]["full_attention"].update(rope_type="yarn"),
        "rope_type is 'yarn'",
    ),
    "activation unknown": (having(hidden_activation="silu"), "hidden_activation is 'silu'"),
    "bidirectional": (having(use_bidirectional_attention="all"), "not implemented"),
    "experts without a count": (having(enable_moe_block=True), "num_experts"),
    "another quantization": (having(quantization_config={"quant_method": "hqq"}), "'hqq'"),
    "config says k_eq_v is off": (having(attention_k_eq_v=False), "k_proj.weight has shape [32, 32]"),
    "config says another width": (having(intermediate_size=64), "implies [64, 32]"),
    "packed without scheme": (having(quantization_config={"quant_method": "compressed-tensors",
                                                          "format": "pack-quantized"}), "config_groups"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_lacks_or_contradicts_is_one_clear_error(folder: Path, case: str) -> None:
    edit, message = CONFIGS[case]
    edit_config(folder, edit)
    with pytest.raises(KerngenError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert "\n" not in caught.value.message


def test_another_model_is_misuse(folder: Path) -> None:
    edit_config(folder, having(model_type="llama"))
    with pytest.raises(UsageError, match="'llama' model"):
        load(folder)


def test_packed_weights_that_contradict_their_scheme(tmp_path: Path) -> None:
    make_target(tmp_path, "k_eq_v", **WIDE)
    quantize(tmp_path, 32)
    edit_config(
        tmp_path, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64)
    )
    with pytest.raises(CheckpointError, match=r"weight_scale.*\[128, 4\].*config\.json.*\[128, 2\]"):
        load(tmp_path)
    edit_config(
        tmp_path, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=48)
    )
    with pytest.raises(CheckpointError, match="group_size is 48"):
        load(tmp_path)
    edit_config(tmp_path, lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load(tmp_path)


ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
TOP: dict[str, tuple[Any, str]] = {
    "quantization_status": ("calibration", "quantization_status is 'calibration'"),
    "kv_cache_scheme": ({"num_bits": 8, "type": "int"}, "kv_cache_scheme: type is 'int'"),
    "transform_config": ({"config_groups": {"R1": {"type": "hadamard"}}}, "transform_config is set"),
    "sparsity_config": ({"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}, "format 'sparse-24-bitmask'"),
    "format": ("marlin-24", "in format 'marlin-24'"),
}
GROUP: dict[str, tuple[Any, str]] = {
    "format": ("nvfp4-pack-quantized", "format is 'nvfp4-pack-quantized'"),
    "input_activations": (ACTIVATIONS, "input_activations are quantized"),
    "output_activations": (ACTIVATIONS, "output_activations are quantized"),
}
WEIGHTS: dict[str, tuple[Any, str]] = {
    "dynamic": (True, "dynamic is True"),
    "num_bits": (3, "num_bits is 3"),
    "actorder": ("group", "actorder is 'group'"),
}


@pytest.mark.parametrize(("level", "name"), [(i, n) for i, part in enumerate((TOP, GROUP, WEIGHTS)) for n in part])
def test_a_scheme_that_computes_something_else_is_refused(tmp_path: Path, level: int, name: str) -> None:
    make_target(tmp_path, "k_eq_v", **WIDE)
    quantize(tmp_path, 32)
    expected = logits(load(tmp_path))
    value, message = (TOP, GROUP, WEIGHTS)[level][name]

    def change(config: dict[str, Any]) -> None:
        quant = config["quantization_config"]
        group = quant["config_groups"]["group_0"]
        (quant, group, group["weights"])[level][name] = value

    as_written = {"quantization_status": "frozen", "kv_cache_scheme": None, "transform_config": {}}
    dense = {"format": "dense", "sparsity_structure": "unstructured", "global_sparsity": 0.0}
    edit_config(tmp_path, lambda c: c["quantization_config"].update(as_written, sparsity_config=dense))
    assert torch.equal(logits(load(tmp_path)), expected)
    edit_config(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in caught.value.message


def test_nothing_is_allocated_for_a_folder_that_lies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor of the file is wrong; not one byte may have been allocated by then."""
    edit_tensors(folder, lambda t: t.update({NORM: torch.ones(31)}))
    real = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        assert str(kwargs.get("device")) == "meta", "storage was allocated before the checks were done"
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", watched)
    with pytest.raises(CheckpointError, match=r"has shape \[31\]"):
        load(folder)


def test_a_drafter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "k_eq_v")
    make_assistant(tmp_path / "fits", "k_eq_v", num_centroids=12)
    make_assistant(tmp_path / "other", "dense")
    target = load(tmp_path / "target")
    load_assistant(tmp_path / "fits", target)
    with pytest.raises(UsageError, match=r"32 x 2 KV heads.*layer 4 .*32 x 1"):
        load_assistant(tmp_path / "other", target)
    with pytest.raises(UsageError, match="not a drafter"):
        load_assistant(tmp_path / "target", target)
    with pytest.raises(UsageError, match="holds a drafter"):
        load(tmp_path / "fits")
    edit_tensors(tmp_path / "fits", lambda t: t["masked_embedding.token_ordering"].add_(1))
    with pytest.raises(CheckpointError, match="outside 0 to 95"):
        load_assistant(tmp_path / "fits", target)
    edit_config(tmp_path / "fits", lambda c: c.update(backbone_hidden_size=40))
    with pytest.raises(UsageError, match=r"hidden size.* 40"):
        load_assistant(tmp_path / "fits", target)


def test_a_file_is_mapped_read_only_and_without_a_warning(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists a process's maps")
    path = folder / "model.safetensors"
    file = SafetensorsFile(path)
    lines = [line.split() for line in maps.read_text().splitlines() if line.endswith(str(path))]
    assert [line[1][:2] for line in lines] == ["r-"]
    kept = file.tensor(NORM)
    del file
    assert torch.equal(kept, load_file(path)[NORM])
    assert not recwarn.list


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "bytes": torch.arange(3, dtype=torch.uint8),  # leaves the next tensor unaligned
        "half": torch.randn(3, 5).half(),
        "long": torch.arange(6).view(2, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(file.tensor(name), tensor), name
    assert Checkpoint(tmp_path).names == set(tensors)
