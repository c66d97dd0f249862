"""Checkpoints of tiny models, and ways to change them: quantized, in shards, edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from tiny_gemma import prompt
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.model import Gemma4

PROMPT = prompt(20)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 32}  # groups of 128 divide


def logits(model: Gemma4) -> Tensor:
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=len(PROMPT))
    return model.logits(model.forward(Batch.prefill(torch.tensor(PROMPT), 0, cache), cache))


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Split model.safetensors into two shards with an index, as save_pretrained does for large models."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    weight_map = {n: file for file, part in halves.items() for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def pack_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scale, dequantised), symmetric, as compressed-tensors' pack-quantized format."""
    rows, cols = weight.shape
    grouped = weight.view(rows, -1, group)
    scale = (grouped.abs().amax(-1) / 7.5).to(torch.bfloat16)
    q = (grouped / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int64)
    words = ((q.view(rows, -1, 8) + 8) << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return packed, scale, (q * scale.float()[..., None]).view(rows, cols)


def quantize(folder: Path, group: int, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Tensor]:
    """Rewrite a checkpoint as W4A16. Returns the dense tensors that it now stands for."""
    dense = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in list(dense.items()):
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "embed_tokens" in name or module in ignore:
            stored[name] = tensor
            continue
        packed, scale, dense[name] = pack_int4(tensor, group)
        shape = torch.tensor(tensor.shape)
        stored |= {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}
    save_file(stored, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(ignore)}
    edit_config(folder, lambda c: c.update(quantization_config=quant | {"config_groups": {"group_0": scheme}}))
    return dense


def add_kv_scales(folder: Path, *, by_head: bool = False) -> None:
    """Gives a W4A16 checkpoint what llm-compressor writes of an fp8 cache. Its scales are made of the weights of K's
    norms: K is no larger than sqrt(head_dim) times its weight, and V than sqrt(head_dim).
    """
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("self_attn.k_norm.weight")]:
        weight, stem = tensors[name].float(), name.removesuffix("k_norm.weight")
        rows = tensors.get(f"{stem}k_proj.weight_packed", tensors.get(f"{stem}k_proj.weight"))
        assert rows is not None
        heads = len(rows) // len(weight) if by_head else 1
        most = len(weight) ** 0.5 / 448 * (1 - 0.125 * torch.arange(heads))
        tensors[f"{stem}k_scale"] = (most * weight.abs().max()).bfloat16()
        tensors[f"{stem}v_scale"] = most.float()
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, lambda c: c["quantization_config"].update(kv_cache_scheme=kv_scheme(by_head)))


def kv_scheme(by_head: bool = False) -> dict[str, Any]:
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=False, strategy="tensor")
    return args.model_dump(mode="json") | ({"strategy": "attn_head"} if by_head else {})


def scheme(group: int) -> QuantizationScheme:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=args)


def compress(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """What the library stores of a linear, and what it makes of that again."""
    scale = weight.unflatten(-1, (-1, group)).abs().amax(-1) / 7.5
    stored = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme(group))
    again = PackedQuantizationCompressor.decompress(stored, scheme(group))["weight"]
    return {k: v for k, v in stored.items() if k != "weight"}, again


def save_compressed(folder: Path, group: int, experts: str) -> dict[str, Tensor]:
    """Rewrite a checkpoint with the library, experts stored as said. Returns the dense tensors that it stands for."""
    dense = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in list(dense.items()):
        if ".experts." in name:
            parts = [compress(matrix, group) for matrix in tensor]
            dense[name] = torch.stack([again for _, again in parts])
            for e, (part, _) in enumerate(parts if experts == "one by one" else []):
                put_expert(stored, name, e, part)
            if experts != "one by one":
                joint = "_" if experts == "joined by _" else ".weight_"
                stored[f"{name}{joint}packed"] = torch.stack([p["weight_packed"] for p, _ in parts])
                stored[f"{name}{joint}scale"] = torch.stack([p["weight_scale"] for p, _ in parts])
                if experts == "with a shape":
                    stored[f"{name}.weight_shape"] = torch.tensor(tensor.shape)
        elif tensor.dim() == 2 and "embed_tokens" not in name and "router" not in name:
            part, dense[name] = compress(tensor, group)
            stored |= {f"{name.removesuffix('weight')}{key}": value for key, value in part.items()}
        else:
            stored[name] = tensor
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    groups = {"group_0": scheme(group).model_dump(mode="json")}
    quant = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*router.*"]}
    edit_config(folder, lambda c: c.update(quantization_config=quant | {"config_groups": groups}))
    return dense


def put_expert(stored: dict[str, Tensor], name: str, e: int, part: dict[str, Tensor]) -> None:
    """gate_up as two linears, which is what the rows of the packed one are."""
    stem = name.rpartition(".")[0]
    if name.endswith("down_proj"):
        stored |= {f"{stem}.{e}.down_proj.{key}": value.clone() for key, value in part.items()}
        return
    for i, half in enumerate(("gate_proj", "up_proj")):
        for key in ("weight_packed", "weight_scale"):
            stored[f"{stem}.{e}.{half}.{key}"] = part[key].chunk(2)[i].clone()
        rows, cols = part["weight_shape"].tolist()
        stored[f"{stem}.{e}.{half}.weight_shape"] = torch.tensor([rows // 2, cols])
