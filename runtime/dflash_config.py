"""Reads config.json of a DFlash drafter, z-lab's safetensors form, against the target that it drafts for.

The file is a Qwen3's with `block_size`, `mask_token_id` and `target_layer_ids`, in `dflash_config` or beside it.
Source: z-lab's dflash, model.py (arXiv 2602.06036), and the config.json of its Gemma-4 drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerngen.errors import UsageError
from kerngen.runtime.config import DrafterLayers, DraftPolicy, LayerConfig, ModelConfig, RopeConfig
from kerngen.runtime.config_fields import Fields, config_path, short
from kerngen.runtime.quant import read_quant_config

ARCHITECTURE = "DFlashDraftModel"
MOST_BLOCK = 16
# Of a block, how many drafts a step may verify beside all of them. A block is drafted whole, so what a length costs is
# its verification: between two of these it differs by less than acceptance is known.
VERIFIED_LENGTHS = (3, 5, 7, 11)
_LAYER_TYPES = ("sliding_attention", "full_attention")


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether that is what a DFlash drafter's config.json holds."""
    names = config.get("architectures")
    return "dflash_config" in config or (isinstance(names, list) and ARCHITECTURE in names)


@dataclass(frozen=True, slots=True)
class DflashConfig(DrafterLayers):
    """A block-diffusion drafter: a small decoder that drafts a whole block of masked tokens at once. It has no table
    and no head: those are the target's.

    text: its layers, with K and V of their own. Those with a window have pages as full layers do: the target's sliding
    pages go to the pool sooner. taps: layers of the target whose outputs are its context. block_size: the last known
    token and the masked ones; mask_id: the token that stands for these. is_causal: in layers with a window a token of
    the block sees none behind itself; in the others it sees the whole block.
    """

    taps: tuple[int, ...]
    block_size: int
    mask_id: int
    is_causal: bool

    @property
    def policy(self) -> DraftPolicy:
        most = self.block_size - 1
        lengths = (*(n for n in VERIFIED_LENGTHS if n < most), most)
        return DraftPolicy(most, self.taps, self.text.layers, self.block_size, lengths)

    @property
    def words(self) -> str:
        """What it is, for people."""
        return f"DFlash, {self.block_size - 1} tokens at once, by the target's layers {', '.join(map(str, self.taps))}"

    def divided(self, target: ModelConfig) -> DflashConfig:
        """Itself: each rank of a divided target has all of it, and of the head that it drafts by some rows."""
        return self


def read_dflash_config(folder: Path, values: dict[str, Any], target: ModelConfig) -> DflashConfig:
    """What `values`, the config.json in `folder`, say of a drafter for the whole `target`.

    Raises UsageError where it drafts for another model, CheckpointError for fields that are missing, contradict each
    other or say what is not implemented.
    """
    top = Fields(values, str(config_path(folder)))
    own = Fields(values | top.section("dflash_config", default={}).values, top.where)
    if (act := top.get("hidden_act")) != "silu":
        raise top.error(f"hidden_act is {short(act)}; a DFlash drafter's is silu")
    if top.flag("attention_bias", False):
        raise top.error("attention_bias is true, which is not implemented")
    _require_target(folder, own, target)
    block = own.integer("block_size", low=2)
    if block > MOST_BLOCK:
        raise top.error(f"block_size is {block}; blocks of up to {MOST_BLOCK} tokens are drafted")
    if (mask := own.integer("mask_token_id", low=0)) >= target.vocab_size:
        raise top.error(f"mask_token_id is {mask}; the target has {target.vocab_size} tokens")
    heads, head_dim = top.integer("num_attention_heads"), top.integer("head_dim")
    if head_dim % 2:
        raise top.error(f"head_dim is {head_dim}; RoPE rotates pairs")
    text = ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_q_heads=heads,
        layers=_layers(own, heads, head_dim, len(target.layers)),
        rope={"full": _rope(top, head_dim)},
        rms_norm_eps=top.number("rms_norm_eps"),
        logit_cap=0.0,
        max_positions=target.max_positions,
        tied=False,
        ple_size=0,
        ple_vocab_size=0,
        num_experts=0,
        top_k_experts=0,
        moe_intermediate_size=0,
        bos_id=target.bos_id,
        eos_ids=(),
        quant=read_quant_config(top),
        activation="silu",
    )
    return DflashConfig(text, _taps(own, len(target.layers)), block, mask, own.flag("is_causal", True))


def _require_target(folder: Path, own: Fields, target: ModelConfig) -> None:
    """Raises UsageError where the drafter is another model's: its table, head and features are the target's."""
    num_layers = len(target.layers)
    for name, words, theirs in (
        ("hidden_size", "a hidden size of {}", target.hidden_size),
        ("num_target_layers", "a model of {} layers", num_layers),
        ("vocab_size", "a vocabulary of {} tokens", target.vocab_size),
    ):
        if (ours := own.integer(name, default=None if name == "hidden_size" else theirs)) != theirs:
            raise UsageError(f"{folder} drafts for {words.format(ours)}; the target has {theirs}",
                             hint="name the drafter of this very model: --draft FOLDER, or --no-draft")  # fmt: skip


def _taps(own: Fields, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs stand beside each other in `fc`'s input, in their order."""
    ids = own.get("target_layer_ids")
    whole = isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < num_layers:
        raise own.error(f"target_layer_ids is {short(ids)}; it must be layers of the target, 0 to {num_layers - 1}, "
                        "in their order")  # fmt: skip
    return tuple(ids)


def _layers(own: Fields, num_heads: int, head_dim: int, first: int) -> tuple[LayerConfig, ...]:
    """first: the index of the first one among those of a cache."""
    count, kv_heads = own.integer("num_hidden_layers"), own.integer("num_key_value_heads")
    if num_heads % kv_heads:
        raise own.error(f"{num_heads} query heads do not split over {kv_heads} KV heads")
    types = own.values.get("layer_types")
    if types is None:
        types = ["full_attention"] * count
    if not isinstance(types, list) or len(types) != count or any(t not in _LAYER_TYPES for t in types):
        raise own.error(f"layer_types is {short(types)}; it must name {' or '.join(_LAYER_TYPES)} for each of {count} "
                        "layers")  # fmt: skip
    window = own.integer("sliding_window") if "sliding_attention" in types else 0
    inner = own.integer("intermediate_size")
    return tuple(
        LayerConfig(
            index=first + i, is_sliding=False, head_dim=head_dim, num_kv_heads=kv_heads,
            window=window if kind == "sliding_attention" else 0, intermediate_size=inner, v_is_k=False,
            kv_source=first + i,
        )
        for i, kind in enumerate(types)
    )  # fmt: skip


def _rope(top: Fields, head_dim: int) -> RopeConfig:
    """Of all dims: rope_theta, in rope_parameters where transformers 5 wrote the file."""
    rope = top.section("rope_parameters", default=top.values)
    scaling = top.values.get("rope_scaling")
    if rope.values.get("rope_type", "default") != "default" or scaling is not None:
        raise top.error("RoPE of a DFlash drafter is of the default type, without scaling")
    return RopeConfig(rope.number("rope_theta"), head_dim // 2, 1.0)
