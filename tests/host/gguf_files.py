"""GGUF files of tiny models, written by hand: the container, what Gemma-4's keys say, and weights in ggml's blocks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kerngen.runtime.gguf.blocks import decode
from kerngen.runtime.gguf.config import config_json
from kerngen.runtime.gguf.ggml_types import GGML_TYPES
from kerngen.runtime.gguf.names import EMBEDDING
from kerngen.runtime.gguf.weights import GgufCheckpoint
from kerngen.templates.common.w4.pack import dequantize

NUMBERS = {t.name: number for number, t in GGML_TYPES.items()}
TYPES = {t.name: t for t in GGML_TYPES.values()}
U32, F32, BOOL, STRING, ARRAY, I32 = 4, 6, 7, 8, 9, 5
_CODES = {U32: "I", I32: "i", F32: "f", BOOL: "?"}


@dataclass
class Gguf:
    """What a file says. keys: (name, value) pairs, in order and possibly twice. tensors: name, type, shape as torch has
    it, and bytes.
    """

    keys: list[tuple[str, Any]] = field(default_factory=list)
    tensors: list[tuple[str, str, tuple[int, ...], bytes]] = field(default_factory=list)
    version: int = 3
    alignment: int = 32

    def set(self, key: str, value: Any) -> None:
        self.keys = [*((k, v) for k, v in self.keys if k != key), (key, value)]

    def drop(self, key: str) -> None:
        self.keys = [(k, v) for k, v in self.keys if k != key]

    def to_bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        head += b"".join(string(key) + value_bytes(value) for key, value in self.keys)
        data = b""
        for name, kind, shape, raw in self.tensors:
            head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            head += struct.pack("<IQ", NUMBERS[kind], len(data))
            data += raw + bytes(-len(raw) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def write_sparse(self, path: Path) -> Path:
        """With nothing in place of the tensors, whose bytes are not looked at: of models of any size."""
        sizes = [torch.Size(shape).numel() // TYPES[kind].block * TYPES[kind].block_bytes
                 for _, kind, shape, _ in self.tensors]  # fmt: skip
        data, head = 0, b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        head += b"".join(string(key) + value_bytes(value) for key, value in self.keys)
        for (name, kind, shape, _), size in zip(self.tensors, sizes, strict=True):
            head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            head += struct.pack("<IQ", NUMBERS[kind], data)
            data += size + -size % self.alignment
        begin = len(head) + -len(head) % self.alignment
        with path.open("wb") as f:
            f.write(head)
            f.truncate(begin + data)
            for (_, _, _, raw), start in zip(self.tensors, self._starts(sizes, begin), strict=True):
                if raw:
                    f.seek(start)
                    f.write(raw)
        return path

    def _starts(self, sizes: Sequence[int], begin: int) -> list[int]:
        padded = [size + -size % self.alignment for size in sizes]
        return [begin + sum(padded[:index]) for index in range(len(padded))]

    def write_split(self, stem: Path, count: int) -> list[Path]:
        """The tensors in turn over `count` files; the keys in the first, as llama.cpp's gguf-split has it."""
        paths = []
        for index in range(count):
            split = [("split.no", index), ("split.count", count), ("split.tensors.count", len(self.tensors))]
            part = Gguf([*(self.keys if index == 0 else []), *split], self.tensors[index::count])
            paths.append(part.write(stem.with_name(f"{stem.name}-{index + 1:05}-of-{count:05}.gguf")))
        return paths


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: Any) -> bytes:
    """With its type: bool, int (u32), float, str, or a list of one of them."""
    kind = kind_of(value)
    if kind == STRING:
        return struct.pack("<I", kind) + string(value)
    if kind != ARRAY:
        return struct.pack(f"<I{_CODES[kind]}", kind, value)
    inner = kind_of(value[0]) if value else U32
    head = struct.pack("<IIQ", ARRAY, inner, len(value))
    if inner == STRING:
        return head + b"".join(map(string, value))
    return head + struct.pack(f"<{len(value)}{_CODES[inner]}", *value)


def kind_of(value: Any) -> int:
    for of, kind in ((bool, BOOL), (int, U32), (float, F32), (str, STRING), (list, ARRAY)):
        if isinstance(value, of):
            return kind
    raise TypeError(value)


def blocks_of(values: Tensor, kind: str, generator: torch.Generator) -> bytes:
    """`values` [..., K] in ggml's blocks. Of floats and the types of 32 as ggml's reference has it or nearly; of the
    others random blocks with scales as large as the values: a file of these is what it decodes to.
    """
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return values.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    form = TYPES[kind]
    grouped = values.float().reshape(-1, form.block)
    if kind == "Q4_0":
        largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))
        scale = (largest / -8).half()
        codes = (grouped / torch.where(scale == 0, 1.0, scale.float()) + 8.5).floor().clamp(0, 15).to(torch.uint8)
        raw = torch.cat((scale.view(torch.uint8), codes[:, :16] | codes[:, 16:] << 4), -1)
        return raw.numpy().tobytes()
    if kind == "Q8_0":
        scale = (grouped.abs().amax(-1, keepdim=True) / 127).half()
        codes = (grouped / torch.where(scale == 0, 1.0, scale.float())).round().clamp(-128, 127).to(torch.int8)
        return torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), -1).numpy().tobytes()
    raw = torch.randint(0, 256, (len(grouped), form.block_bytes), dtype=torch.uint8, generator=generator)
    size = float(values.float().std()) * 2
    for at, part in SCALES[kind]:
        sign = 1 if part < 0 else torch.randint(0, 2, (len(grouped), 1), generator=generator) * 2 - 1
        scale = size / abs(part) * (0.5 + torch.rand(len(grouped), 1, generator=generator)) * sign
        raw[:, at : at + 2] = scale.half().view(torch.uint8)
    if kind == "MXFP4":
        raw[:, 0] = torch.full((len(grouped),), size / 12).log2().round().add(128).to(torch.uint8)
    return raw.numpy().tobytes()


# Where fp16 scales lie in a block, and what they are multiplied with at most; below 0 where they are to be positive.
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_1": ((0, 15), (2, 2)), "Q5_0": ((0, 16),), "Q5_1": ((0, 31), (2, 2)), "Q4_K": ((0, -900), (2, -120)),
    "Q5_K": ((0, -1900), (2, -122)), "Q6_K": ((208, 4000),), "IQ4_NL": ((0, 127),), "IQ4_XS": ((0, 4000),), "MXFP4": (),
}  # fmt: skip

# ---- a model -------------------------------------------------------------------------------------------------------

ROOT = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}  # fmt: skip
LAYER = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight", "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight", "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight", "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight", "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight", "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "per_layer_input_gate.weight": "inp_gate.weight", "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}  # fmt: skip

Choose = Callable[[str, Tensor], str]  # a tensor's GGUF name and its values: the type that it is stored as


def gguf_name(name: str) -> str:
    """Of a tensor that transformers calls so."""
    short = name.removeprefix("model.language_model.").removeprefix("model.")
    if short in ROOT:
        return ROOT[short]
    _, index, rest = short.split(".", 2)
    return f"blk.{index}.{LAYER[rest]}"


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the text model with this (flat) config.json, as llama.cpp's converter writes them."""
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    kv, inner = config["num_key_value_heads"], config["intermediate_size"]
    full_kv = (config.get("num_global_key_value_heads") or kv) if config.get("attention_k_eq_v") else kv
    rope = config["rope_parameters"]
    keys: dict[str, Any] = {
        "general.architecture": "gemma4",
        "gemma4.block_count": layers,
        "gemma4.context_length": config["max_position_embeddings"],
        "gemma4.embedding_length": config["hidden_size"],
        "gemma4.feed_forward_length": inner,
        "gemma4.attention.head_count": config["num_attention_heads"],
        "gemma4.attention.head_count_kv": [kv if s else full_kv for s in sliding] if full_kv != kv else kv,
        "gemma4.attention.sliding_window": config["sliding_window"],
        "gemma4.attention.sliding_window_pattern": sliding,
        "gemma4.attention.shared_kv_layers": shared,
        "gemma4.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "gemma4.embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "gemma4.rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "gemma4.rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "gemma4.final_logit_softcapping": float(config["final_logit_softcapping"]),
    }
    for suffix, dim in (("", config["global_head_dim"]), ("_swa", config["head_dim"])):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            keys[f"gemma4.{key}{suffix}"] = dim
    if config.get("use_double_wide_mlp"):
        keys["gemma4.feed_forward_length"] = [inner] * (layers - shared) + [2 * inner] * shared
    if config.get("enable_moe_block"):
        keys |= {
            "gemma4.expert_count": config["num_experts"],
            "gemma4.expert_used_count": config["top_k_experts"],
            "gemma4.expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return keys


def rope_freqs(config: Mapping[str, Any]) -> Tensor:
    half = config["global_head_dim"] // 2
    turned = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * half)
    return torch.tensor([1.0] * turned + [1e30] * (half - turned))


def gguf_of(folder: Path, choose: Choose, *, split_experts: bool = False) -> Gguf:
    """The model in `folder` as a GGUF, tensors as `choose` says; 1-d ones and routers are F32 as in real files.

    Its weights become what the file's blocks decode to, in fp32: both are then the same model.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    made = Gguf(list(keys_of(config).items()))
    made.tensors.append(
        ("rope_freqs.weight", "F32", rope_freqs(config).shape, blocks_of(rope_freqs(config), "F32", RNG))
    )
    generator = torch.Generator().manual_seed(7)
    tensors, decoded = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        named = gguf_name(name)
        parts = {named: tensor}
        if split_experts and "gate_up_exps" in named:
            parts = dict(zip((named.replace("gate_up", "gate"), named.replace("gate_up", "up")), tensor.chunk(2, 1),
                             strict=True))  # fmt: skip
        again = []
        for part, values in parts.items():
            kind = "F32" if tensor.dim() == 1 or "ffn_gate_inp" in named else choose(part, values)
            raw = blocks_of(values, kind, generator)
            made.tensors.append((part, kind, tuple(values.shape), raw))
            again.append(decoded_of(raw, kind, values.shape))
        decoded[name] = torch.cat(again, 1) if len(again) > 1 else again[0]
    save_file({name: tensor.contiguous() for name, tensor in decoded.items()}, folder / "model.safetensors")
    return made


def as_compressed_tensors(path: Path, folder: Path) -> None:
    """Writes to `folder` what a GGUF file of Q4_0 is as a checkpoint of compressed-tensors, of the same bits, but for
    the embedding, which is dense there.
    """
    checkpoint = GgufCheckpoint(path)
    tensors = {name: checkpoint.tensor(name).contiguous() for name in checkpoint.names}
    table = EMBEDDING.removesuffix(".weight")
    words, scales = (tensors.pop(f"{table}.weight_{part}") for part in ("packed", "scale"))
    tensors[EMBEDDING] = dequantize(words, scales)
    save_file(tensors, folder / "model.safetensors")
    config = config_json(path)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
                                     "config_groups": {"group_0": group}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


RNG = torch.Generator()


def decoded_of(raw: bytes, kind: str, shape: Sequence[int]) -> Tensor:
    form = TYPES[kind]
    blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(*shape[:-1], -1, form.block_bytes)
    return decode(kind, blocks).view(tuple(shape))
