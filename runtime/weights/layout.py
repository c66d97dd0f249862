"""The weights that a forward pass reads: fused matrices, norms and tables, on the device, in `ops.dtype`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kerngen.runtime.ops.values import Experts, Linear


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router_scale [H], router [E, H], per_expert_scale [E]; gate_up [E, 2 I, H], down [E, H, I]."""

    router_scale: Tensor
    router: Linear
    per_expert_scale: Tensor
    gate_up: Experts
    down: Experts
    dense_norm: Tensor  # post_feedforward_layernorm_1
    pre_norm: Tensor  # pre_feedforward_layernorm_2
    post_norm: Tensor  # post_feedforward_layernorm_2


@dataclass(frozen=True, slots=True)
class PleLayerWeights:
    """gate [P, H] and projection [H, P], post_norm [H]."""

    gate: Linear
    projection: Linear
    post_norm: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: rows q | k | v, or q | k where V is the raw K, or q where the layer owns no cache. Norms are [H] or [d]."""

    input_norm: Tensor
    post_attention_norm: Tensor
    pre_ffn_norm: Tensor
    post_ffn_norm: Tensor
    scalar: Tensor  # [1]
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor | None
    out: Linear
    gate_up: Linear
    down: Linear
    moe: MoeWeights | None = None
    ple: PleLayerWeights | None = None


@dataclass(frozen=True, slots=True)
class PleWeights:
    """table [vocab, L * P], projection [L * P, H] linear, norm [P]."""

    table: Tensor
    projection: Linear
    norm: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embed [vocab, H], dense or packed; head [vocab, H], which shares embed's memory where the two are tied."""

    embed: Linear
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    ple: PleWeights | None = None


@dataclass(frozen=True, slots=True)
class CentroidWeights:
    """centroids [C, d], token_ids int64 [C, vocab / C]: the tokens of each centroid."""

    centroids: Linear
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class DrafterWeights:
    """head [vocab, d], pre [d, 2 T] and post [T, d] linears; the input embedding is the target's."""

    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    pre: Linear
    post: Linear
    centroids: CentroidWeights | None = None
