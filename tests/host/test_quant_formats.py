"""Quantised checkpoints that are not read: each refusal says what they are, what is read, and the way on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_gemma import make_target

from kerngen.cli import main

W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "group_size": 128}


def compressed(more: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": W4 | weights} | (more or {})
    return CT | {"config_groups": {"group_0": group}}


# What config.json says, and what stands in the refusal. Fields: as the tools write them.
FORMATS: dict[str, tuple[Any, str]] = {
    "AQLM": ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "'aqlm' (codebooks of AQLM)"),
    "AutoRound of its own order": (
        {"quant_method": "auto-round", "packing_format": "auto_round"},
        "packing_format is 'auto_round'",
    ),
    "AWQ gemv": (AWQ | {"version": "gemv"}, "version is 'gemv'"),
    "AWQ 8 bits": (AWQ | {"bits": 8}, "bits is 8"),
    "AWQ symmetric": (AWQ | {"zero_point": False}, "zero_point is False"),
    "BitBLAS": ({"quant_method": "bitblas", "bits": 4, "group_size": 128}, "BitBLAS"),
    "BitNet": ({"quant_method": "bitnet"}, "ternary"),
    "bitsandbytes 4 bits": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes'"),
    "bitsandbytes 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes'"),
    "compressed-tensors fp8": (CT | {"format": "float-quantized"}, "format 'float-quantized'"),
    "compressed-tensors int8": (CT | {"format": "int-quantized"}, "format 'int-quantized'"),
    "compressed-tensors mxfp4": (CT | {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized'"),
    "compressed-tensors naive": (CT | {"format": "naive-quantized"}, "format 'naive-quantized'"),
    "compressed-tensors nvfp4": (CT | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
    "compressed-tensors mixed": (CT | {"format": "mixed-precision"}, "format 'mixed-precision'"),
    "compressed-tensors 2:4": (CT | {"format": "marlin-24"}, "format 'marlin-24'"),
    "compressed-tensors W3A16": (compressed(num_bits=3), "num_bits is 3"),
    "compressed-tensors by tensor": (compressed(strategy="tensor"), "strategy is 'tensor'"),
    "compressed-tensors of two kinds": (
        CT
        | {
            "config_groups": {str(bits): {"targets": ["Linear"], "weights": W4 | {"num_bits": bits}} for bits in (4, 8)}
        },
        "config_groups are of 2 schemes",
    ),
    "compressed-tensors actorder": (compressed(actorder="group"), "actorder is 'group'"),
    "compressed-tensors W4A8": (compressed({"input_activations": {"num_bits": 8}}), "input_activations are quantized"),
    "compressed-tensors groups of 16": (compressed(group_size=16), "group_size is 16"),
    "compressed-tensors kv cache": (
        compressed() | {"kv_cache_scheme": {"num_bits": 8}},
        "kv_cache_scheme: field 'type' is missing",
    ),
    "DeepSpeed": ({"quant_method": "deepspeedfp", "bits": 6, "group_size": 512}, "DeepSpeed's"),
    "EETQ": ({"quant_method": "eetq"}, "EETQ"),
    "ExLlamaV2": ({"quant_method": "exl2", "bits": 4.5}, "ExLlamaV2"),
    "ExLlamaV3": ({"quant_method": "exl3", "bits": 4.0}, "ExLlamaV3"),
    "FBGEMM": ({"quant_method": "fbgemm_fp8"}, "FBGEMM"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "8-bit floats"),
    "FP-Quant": ({"quant_method": "fp_quant"}, "FP-Quant"),
    "GGUF": ({"quant_method": "gguf"}, "llama.cpp's blocks"),
    "GPTQ 3 bits": (GPTQ | {"bits": 3}, "bits is 3"),
    "GPTQ marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "HIGGS": ({"quant_method": "higgs"}, "HIGGS"),
    "HQQ": ({"quant_method": "hqq"}, "HQQ"),
    "Marlin": ({"quant_method": "marlin", "group_size": 128}, "Marlin"),
    "MLX": ({"bits": 4, "group_size": 64, "mode": "affine"}, "quantized by MLX"),
    "ModelOpt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "NVIDIA ModelOpt"),
    "ModelOpt nvfp4": ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "NVIDIA ModelOpt"),
    "mxfp4": ({"quant_method": "mxfp4"}, "4-bit floats"),
    "Quanto": ({"quant_method": "quanto"}, "Quanto"),
    "Quark": ({"quant_method": "quark"}, "AMD Quark"),
    "QuIP#": ({"quant_method": "quip"}, "QuIP#"),
    "SINQ": ({"quant_method": "sinq"}, "SINQ"),
    "SpQR": ({"quant_method": "spqr"}, "SpQR"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {}}}, "tensors of its classes"),
    "VPTQ": ({"quant_method": "vptq"}, "VPTQ"),
    "what nobody knows": ({"quant_method": "\x1b[31mnew"}, "is not implemented"),
    "no name": ({"load_in_4bit": True}, "field 'quant_method' is missing"),
    "a list for a name": ({"quant_method": []}, "[] is not implemented"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("quant")
    make_target(folder, "dense")
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def refusal(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `kerngen run FOLDER` says."""
    monkeypatch.setattr(sys, "argv", ["kerngen", "run", str(folder), "--prompt", "x", "--device", "cpu"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_is_not_read_gets_a_way_on(
    tmp_path: Path,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    quant, words = FORMATS[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quant}))
    first, hint = refusal(tmp_path, monkeypatch, capsys)
    assert first.startswith(f"CheckpointError: {tmp_path / 'config.json'}")
    assert words in first
    assert "llm-compressor makes int4 of that" in hint
    assert "\x1b" not in first


@pytest.mark.parametrize(("hidden", "layers", "name"), [(5376, 60, "31B"), (2816, 30, "26B-A4B"), (3840, 48, "12B")])
def test_a_released_model_is_named_with_what_loads_of_it(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    hidden: int, layers: int, name: str,
) -> None:  # fmt: skip
    text = {k: v for k, v in config.items() if k != "layer_types"} | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
    }
    top = {"model_type": "gemma4", "text_config": text, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(top))
    hint = refusal(tmp_path, monkeypatch, capsys)[1]
    assert f"google/gemma-4-{name}-it-qat-w4a16-ct (int4) and google/gemma-4-{name}-it (bf16) load" in hint


def test_mlx_without_the_section_of_transformers(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))
    assert "quantized by MLX" in refusal(tmp_path, monkeypatch, capsys)[0]
