"""A DFlash drafter's weights, by the names that z-lab's checkpoints have: no prefix, no table and no head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.config import LayerConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.ops.values import Linear
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.weights.source import Parts, WeightSource
from kerngen.runtime.world import Span


@dataclass(frozen=True, slots=True)
class DflashLayerWeights:
    """qkv: rows q | k | v, of the block. q_norm [d] is times head_dim^-0.5, since attention's scale is 1."""

    input_norm: Tensor
    post_attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    out: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DflashWeights:
    """fc [H, taps * H] and hidden_norm [H] make a context of the target's features. context [layers * 2 * nkv * d, H]:
    rows k | v of each layer once more, so that a product makes all K and V of it.
    """

    layers: tuple[DflashLayerWeights, ...]
    fc: Linear
    hidden_norm: Tensor
    context: Linear
    norm: Tensor


def require_no_table(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where the drafter has a table or a head of its own: what it computes with is the
    target's.
    """
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in checkpoint:
            raise CheckpointError(f"{checkpoint.folder} holds {name}, and a DFlash drafter has its target's",
                                  hint="drafters as z-lab stores them are read")  # fmt: skip


def build_dflash(source: WeightSource, config: DflashConfig) -> DflashWeights:
    """Everything the drafter needs, asked of `source` tensor by tensor."""
    text = config.text
    hidden = text.hidden_size
    every = Span.of(hidden)
    rows = [(f"layers.{i}", _kv(f"layers.{i}", layer)) for i, layer in enumerate(text.layers)]
    return DflashWeights(
        layers=tuple(_layer(source, name, layer) for (name, _), layer in zip(rows, text.layers, strict=True)),
        fc=source.linear([("fc", every)], Span.of(len(config.taps) * hidden)),
        hidden_norm=source.tensor("hidden_norm.weight", hidden),
        context=source.linear([part for _, parts in rows for part in parts], every),
        norm=source.tensor("norm.weight", hidden),
    )


def _kv(name: str, layer: LayerConfig) -> Parts:
    width = Span.of(layer.num_kv_heads * layer.head_dim)
    return [(f"{name}.self_attn.{part}_proj", width) for part in ("k", "v")]


def _layer(source: WeightSource, name: str, layer: LayerConfig) -> DflashLayerWeights:
    config = source.config
    every, inner, dim = Span.of(config.hidden_size), Span.of(layer.intermediate_size), layer.head_dim
    q = Span.of(config.num_q_heads * dim)
    post_attention_norm = source.tensor(f"{name}.post_attention_layernorm.weight", config.hidden_size)
    gate_up, down = source.mlp(
        [(f"{name}.mlp.{part}_proj", inner) for part in ("gate", "up")], [(f"{name}.mlp.down_proj", every)],
        post_attention_norm,
    )  # fmt: skip
    return DflashLayerWeights(
        input_norm=source.tensor(f"{name}.input_layernorm.weight", config.hidden_size),
        post_attention_norm=post_attention_norm,
        qkv=source.linear([(f"{name}.self_attn.q_proj", q), *_kv(name, layer)], every),
        q_norm=source.tensor(f"{name}.self_attn.q_norm.weight", dim) * dim**-0.5,
        k_norm=source.tensor(f"{name}.self_attn.k_norm.weight", dim),
        out=source.linear([(f"{name}.self_attn.o_proj", every)], q),
        gate_up=gate_up,
        down=down,
    )
