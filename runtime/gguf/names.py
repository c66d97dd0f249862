"""Tensors of a GGUF file of Gemma-4 by the names that transformers gives them, and which of them stay packed.

Source: ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py and constants.py (MODEL_ARCH.GEMMA4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kerngen.errors import CheckpointError
from kerngen.runtime.gguf.container import GgufModel
from kerngen.runtime.gguf.ggml_types import PACKINGS, known
from kerngen.templates.common.w4.tiling import STRIP, Packing

PREFIX = "model."
EMBEDDING = f"{PREFIX}embed_tokens.weight"
ROPE_FREQS = "rope_freqs.weight"  # no weight: config.py reads it
_LAYER = re.compile(r"blk\.(\d{1,9})\.(.*)")
_ROOT = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": f"{PREFIX}norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": f"{PREFIX}embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": f"{PREFIX}per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": f"{PREFIX}per_layer_projection_norm.weight",
}
# Matrices of a layer, and the matrix of kerngen's that each is a part of, whose parts keep their codes all or none.
_LINEARS = {
    "attn_q": ("self_attn.q_proj", "qkv"),
    "attn_k": ("self_attn.k_proj", "qkv"),
    "attn_v": ("self_attn.v_proj", "qkv"),
    "attn_output": ("self_attn.o_proj", "out"),
    "ffn_gate": ("mlp.gate_proj", "gate_up"),
    "ffn_up": ("mlp.up_proj", "gate_up"),
    "ffn_down": ("mlp.down_proj", "down"),
    "ffn_gate_up_exps": ("experts.gate_up_proj", "experts"),
    "ffn_gate_exps": ("experts.*.gate_proj", "experts"),
    "ffn_up_exps": ("experts.*.up_proj", "experts"),
    "ffn_down_exps": ("experts.down_proj", "experts"),  # where one of gate, up and down is dense kernels want all so
}
_OTHERS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}


@dataclass(frozen=True, slots=True)
class Place:
    """What a tensor is. name: transformers', whose `.*.` stands for the number of each expert, where they are stored
    together and transformers has them apart. joined: of a linear, and of the embedding, the matrix that it becomes a
    part of, else "".
    """

    name: str
    joined: str = ""

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def place_of(name: str) -> Place | None:
    """What the tensor `name` is in Gemma-4, None where it is nothing."""
    if (root := _ROOT.get(name)) is not None:
        return Place(root, root if root == EMBEDDING or root.endswith("projection.weight") else "")
    if (found := _LAYER.fullmatch(name)) is None:
        return None
    layer, rest = f"{PREFIX}layers.{int(found[1])}", found[2]
    if (other := _OTHERS.get(rest)) is not None:
        return Place(f"{layer}.{other}")
    linear = _LINEARS.get(rest.removesuffix(".weight")) if rest.endswith(".weight") else None
    if linear is None:
        return None
    # transformers' experts that are stored together are called as what they are, without ".weight".
    alone = ".weight" if "*" in linear[0] or not linear[0].startswith("experts.") else ""
    return Place(f"{layer}.{linear[0]}{alone}", f"{layer}.{linear[1]}")


def placed(model: GgufModel) -> dict[str, Place]:
    """What each tensor of the model is. Raises CheckpointError for one that Gemma-4 has not, and for one of a type that
    is not read.
    """
    found: dict[str, Place] = {}
    for name, file in model.places.items():
        if name == ROPE_FREQS:
            continue
        info = file.tensors[name]
        if (where := place_of(name)) is None:
            raise file.error(f"it holds {name} {list(info.shape)}, which is no tensor of Gemma-4's text model")
        try:
            known(info.type.name)
        except CheckpointError as e:
            raise file.error(f"{name}: {e.message}", hint=e.hint) from e
        found[name] = where
    return found


def packings(model: GgufModel, found: Mapping[str, Place]) -> dict[str, Packing]:
    """The modules that stay packed, and how: all that one of kerngen's matrices is made of are quantised. The embedding
    does where it is the output head, too, and has whole strips of rows. found: see `placed`.
    """
    owners = model.head.integer("gemma4.block_count", 0) - model.head.integer("gemma4.attention.shared_kv_layers", 0)
    types: dict[str, set[str]] = {}
    for name, where in found.items():
        is_table = where.name == EMBEDDING
        if is_table and ("output.weight" in found or model.info(name).shape[0] % STRIP):
            continue
        if where.joined and not _is_dead(where, owners):
            types.setdefault(where.joined, set()).add(model.info(name).type.name)
    return {
        where.module: PACKINGS[kind]
        for name, where in found.items()
        if (kind := model.info(name).type.name) in PACKINGS and types.get(where.joined, {""}) <= PACKINGS.keys()
    }


def _is_dead(where: Place, owners: int) -> bool:
    """Whether it is K or V of a layer that reads another's: stored by some, and never used."""
    layer = where.name.split(".")[2]
    return where.module.endswith((".k_proj", ".v_proj")) and layer.isdecimal() and int(layer) >= owners


def named_packings(found: Mapping[str, Packing]) -> dict[str, Packing]:
    """The same by all names that matrices are asked for by: experts that are together also by their first one's."""
    made = dict(found)
    for name, packing in found.items():
        stem, _, part = name.rpartition(".")
        if stem.endswith(".experts"):
            each = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            made |= {f"{stem}.0.{one}": packing for one in each}
    return {name.replace(".*.", ".0."): packing for name, packing in made.items()}
