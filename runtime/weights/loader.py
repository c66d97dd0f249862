"""Loads a Gemma-4 checkpoint or its drafter: verify every header, then copy, fuse and repack.

Nothing is allocated before all tensors that config.json implies were found with the right shapes and no tensor of the
text model is left over: a file and a config that contradict each other never get as far as the device. Tensor names:
as transformers saves them; `model.language_model.` in multimodal checkpoints, `model.` in text-only ones.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.config import DrafterConfig, LayerConfig, ModelConfig
from kerngen.runtime.ops import DenseExperts, DenseLinear, Experts, Linear, Ops, W4Experts, W4Linear
from kerngen.runtime.weights.layout import (
    CentroidWeights,
    DrafterWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    PleLayerWeights,
    PleWeights,
)
from kerngen.runtime.weights.quantized import FLOATS, check_packed, is_packed
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.templates.common.w4_pack import dequantize

# Stored by the E-series on layers that own no cache, and never used there.
DEAD_KV = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")
# Left over by other tools, and ignored with a warning: V of layers whose V is K, and tables that are computed.
DEAD_V = re.compile(r"layers\.(\d+)\.self_attn\.v_proj\..*")
DEAD_ROPE = re.compile(r"(?:layers\.\d+\.self_attn\.)?rotary_emb\.\w*inv_freq")


def load_model(folder: Path, config: ModelConfig, ops: Ops) -> ModelWeights:
    """The target model's weights on `ops.device`. Raises CheckpointError before allocating anything."""
    source = _Source(Checkpoint(folder), config, ops)
    prefix = _find_prefix(source.checkpoint)
    build_model(source, prefix)
    source.finish(prefix)
    source.is_dry = False
    return build_model(source, prefix)


def load_drafter(folder: Path, config: DrafterConfig, ops: Ops) -> DrafterWeights:
    """The assistant's weights on `ops.device`; always dense. Raises CheckpointError before allocating anything."""
    source = _Source(Checkpoint(folder), config.text, ops)
    build_drafter(source, config)
    source.finish("")
    source.is_dry = False
    return build_drafter(source, config)


def _find_prefix(checkpoint: Checkpoint) -> str:
    known = ("model.language_model.", "model.", "language_model.model.")
    for prefix in known:
        if f"{prefix}embed_tokens.weight" in checkpoint:
            return prefix
    names = ", ".join(f"{prefix}embed_tokens.weight" for prefix in known)
    raise CheckpointError(f"{checkpoint.folder} holds no embedding table; looked for {names}")


class WeightSource(Protocol):
    """What the model is built from: a checkpoint (below), or generated weights (synthetic.py).

    is_dry: tensors have shapes and no storage yet, so their values must not be looked at.
    """

    config: ModelConfig
    ops: Ops
    is_dry: bool

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A float tensor in `ops.dtype`, or an integer one where `dtype` names it."""

    def scalar(self, name: str) -> Tensor:
        """A float tensor [1] in `ops.dtype`; 1 where the model has none of that name."""

    def linear(self, parts: Sequence[tuple[str, int]], in_features: int, *, gated: bool = False) -> Linear:
        """The linears called `parts` (module, out_features), one under the other, repacked for the backend.

        gated: they are gate and up, for `Ops.gated`.
        """

    def unpacked(self, module: str, out_features: int, in_features: int) -> DenseLinear:
        """A small linear that kernels want in floats, however it is stored."""

    def head(self, embed: Tensor) -> Linear:
        """The output matrix [vocab, H]; shares `embed`'s memory where the two are tied."""

    def experts(self, name: str) -> tuple[Experts, Experts]:
        """gate_up [E, 2 I, H] and down [E, H, I] of the layer `name`, prepared for the backend."""


class _Source:
    """Where weights come from. A dry pass checks names, shapes and dtypes and returns tensors without storage."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.ops = ops
        self.is_dry = True
        self.used: set[str] = set()
        self.absent: list[str] = []  # scalars that the checkpoint leaves out

    def finish(self, prefix: str) -> None:
        """Raise CheckpointError if a tensor of the model was not asked for: then config.json says too little.

        Warns of tensors that transformers ignores or makes up, too.
        """
        folder, left = self.checkpoint.folder, []
        for name in sorted(n for n in self.checkpoint.names - self.used if n.startswith(prefix)):
            short = name.removeprefix(prefix).removeprefix("model.")  # which a drafter's prefix does not hold
            dead = DEAD_KV.fullmatch(short)
            if dead and self._layer_is(dead[1], lambda layer: not layer.owns_kv):
                continue
            dead = DEAD_V.fullmatch(short)
            if not DEAD_ROPE.fullmatch(short) and not (dead and self._layer_is(dead[1], lambda layer: layer.v_is_k)):
                shape = list(self.checkpoint.shape(name))
                raise CheckpointError(f"{folder} holds {name} {shape}, which its config.json does not account for")
            left.append(name)
        for names, what in ((left, "is stored and ignored"), (self.absent, "is not stored; 1 is used")):
            if names:
                more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
                warnings.warn(f"{folder}: {names[0]}{more} {what}, as in transformers", stacklevel=2)

    def _layer_is(self, index: str, test: Callable[[LayerConfig], bool]) -> bool:
        layers = self.config.layers
        return len(index) <= 9 and int(index) < len(layers) and test(layers[int(index)])

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A float tensor in `ops.dtype`, or an integer one where `dtype` names it."""
        out = self._allocate(shape, dtype or self.ops.dtype)
        self._copy(name, out, FLOATS if dtype is None else ("I64", "I32"))
        return out

    def scalar(self, name: str) -> Tensor:
        """A float tensor [1] in `ops.dtype`; 1 where the checkpoint lacks it, as transformers initializes it."""
        if name in self.checkpoint:
            return self.tensor(name, 1)
        if self.is_dry:
            self.absent.append(name)
        return self._allocate((1,), self.ops.dtype).fill_(1.0)

    def linear(self, parts: Sequence[tuple[str, int]], in_features: int, *, gated: bool = False) -> Linear:
        """The linears called `parts` (module, out_features), one under the other, repacked for the backend.

        Stays packed if all of them are; a mixture becomes dense.
        """
        packed = [is_packed(self.checkpoint, self.config.quant, module) for module, _ in parts]
        rows = sum(out for _, out in parts)
        weights: Linear
        if all(packed):
            weights = replace(self._packed(parts, rows, in_features), gated=gated)
        else:
            weights = self._dense(parts, packed, in_features)
        return weights if self.is_dry else self.ops.prepare(weights)

    def unpacked(self, module: str, out_features: int, in_features: int) -> DenseLinear:
        packed = is_packed(self.checkpoint, self.config.quant, module)
        return self._dense([(module, out_features)], [packed], in_features)

    def head(self, embed: Tensor) -> Linear:
        """lm_head. Tied models may store it too (the W4A16 releases do): a copy of the table shares its memory, a head
        with other values is used and warned of, as transformers does.
        """
        config, checkpoint = self.config, self.checkpoint
        stored = [("lm_head", config.vocab_size)]
        if not config.tied or is_packed(checkpoint, config.quant, "lm_head"):
            return self.linear(stored, config.hidden_size)
        if "lm_head.weight" in checkpoint:
            self.used.add("lm_head.weight")
            checkpoint.require("lm_head.weight", (config.vocab_size, config.hidden_size), FLOATS)
            if not self.is_dry and not _same(checkpoint.tensor("lm_head.weight"), embed):
                warnings.warn(
                    f"{checkpoint.folder}: config.json says tie_word_embeddings, but lm_head.weight differs from "
                    "embed_tokens.weight; both are used as they are stored",
                    stacklevel=2,
                )
                return self.linear(stored, config.hidden_size)
        return DenseLinear(embed) if self.is_dry else self.ops.prepare(DenseLinear(embed))

    def experts(self, name: str) -> tuple[Experts, Experts]:
        """gate_up [E, 2 I, H] and down [E, H, I] of the layer `name`, prepared for the backend.

        Stay packed where every expert's are; a mixture becomes dense.
        """
        config = self.config
        num, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        gate_up: Experts
        down: Experts
        if f"{name}.experts.gate_up_proj" in self.checkpoint:
            gate_up = DenseExperts(self.tensor(f"{name}.experts.gate_up_proj", num, 2 * inner, hidden))
            down = DenseExperts(self.tensor(f"{name}.experts.down_proj", num, hidden, inner))
        else:  # community W4A16 files keep one linear per expert and projection
            each = [f"{name}.experts.{e}" for e in range(num)]
            gate_up = self._stacked([[(f"{e}.gate_proj", inner), (f"{e}.up_proj", inner)] for e in each], hidden)
            down = self._stacked([[(f"{e}.down_proj", hidden)] for e in each], inner)
        return (gate_up, down) if self.is_dry else self.ops.prepare_experts(gate_up, down)

    def _stacked(self, experts: Sequence[Sequence[tuple[str, int]]], in_features: int) -> Experts:
        """The fused linears of each expert, one behind the other."""
        num, rows = len(experts), sum(out for _, out in experts[0])
        modules = [module for parts in experts for module, _ in parts]
        packed = [is_packed(self.checkpoint, self.config.quant, module) for module in modules]
        if all(packed) and (quant := self.config.quant) is not None:
            words = self._allocate((num, rows, in_features // 8), torch.int32)
            scales = self._allocate((num, rows, in_features // quant.group_size), self.ops.dtype)
            for parts, p, s in zip(experts, words, scales, strict=True):
                self._fill_packed(parts, in_features, p, s)
            return W4Experts(words, scales, rows, in_features, quant.group_size)
        out = self._allocate((num, rows, in_features), self.ops.dtype)
        for parts, matrix in zip(experts, out, strict=True):
            for (module, _), part in zip(parts, matrix.split([n for _, n in parts]), strict=True):
                self.dense(module, part)
        return DenseExperts(out)

    def dense(self, module: str, out: Tensor) -> None:
        """Fill `out` [out_features, in_features] with one linear, unpacking it if need be."""
        if not is_packed(self.checkpoint, self.config.quant, module):
            self._copy(f"{module}.weight", out, FLOATS)
        else:
            rows, cols = out.shape
            weights = self._packed([(module, rows)], rows, cols)
            if not self.is_dry:
                out.copy_(dequantize(weights.packed, weights.scales, out.dtype))

    def _dense(self, parts: Sequence[tuple[str, int]], packed: list[bool], in_features: int) -> DenseLinear:
        out = self._allocate((sum(n for _, n in parts), in_features), self.ops.dtype)
        for (module, _), rows in zip(parts, out.split([n for _, n in parts]), strict=True):
            self.dense(module, rows)
        return DenseLinear(out)

    def _packed(self, parts: Sequence[tuple[str, int]], rows: int, in_features: int) -> W4Linear:
        if (quant := self.config.quant) is None:
            raise CheckpointError(f"{self.checkpoint.folder}: {parts[0][0]} is packed without a quantization_config")
        packed = self._allocate((rows, in_features // 8), torch.int32)
        scales = self._allocate((rows, in_features // quant.group_size), self.ops.dtype)
        self._fill_packed(parts, in_features, packed, scales)
        return W4Linear(packed, scales, rows, in_features, quant.group_size, fused_name(parts))

    def _fill_packed(self, parts: Sequence[tuple[str, int]], in_features: int, packed: Tensor, scales: Tensor) -> None:
        """Fill packed [rows, in / 8] and scales [rows, in / group_size] with the packed linears called `parts`."""
        if (quant := self.config.quant) is None:
            raise CheckpointError(f"{self.checkpoint.folder}: {parts[0][0]} is packed without a quantization_config")
        sizes = [out for _, out in parts]
        for (module, out), p, s in zip(parts, packed.split(sizes), scales.split(sizes), strict=True):
            self.used |= check_packed(self.checkpoint, quant, module, (out, in_features))
            self._copy(f"{module}.weight_packed", p, ("I32",))
            self._copy(f"{module}.weight_scale", s, FLOATS)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta" if self.is_dry else self.ops.device)

    def _copy(self, name: str, out: Tensor, dtypes: tuple[str, ...]) -> None:
        self.used.add(name)
        self.checkpoint.require(name, tuple(out.shape), dtypes)
        if not self.is_dry:
            out.copy_(self.checkpoint.tensor(name))


def fused_name(parts: Sequence[tuple[str, int]]) -> str:
    """What a matrix made of these modules is called: "gate_proj+up_proj"."""
    return "+".join(module.rpartition(".")[2] for module, _ in parts)


def build_model(source: WeightSource, prefix: str) -> ModelWeights:
    """Everything the target needs, asked of `source` tensor by tensor."""
    config = source.config
    hidden = config.hidden_size
    embed = source.tensor(f"{prefix}embed_tokens.weight", config.vocab_size, hidden)
    ple = None
    if config.ple_size:
        width = len(config.layers) * config.ple_size
        ple = PleWeights(
            table=source.tensor(f"{prefix}embed_tokens_per_layer.weight", config.ple_vocab_size, width),
            projection=source.linear([(f"{prefix}per_layer_model_projection", width)], hidden),
            norm=source.tensor(f"{prefix}per_layer_projection_norm.weight", config.ple_size),
        )
    return ModelWeights(
        embed=embed,
        layers=tuple(_layer(source, f"{prefix}layers.{layer.index}", layer) for layer in config.layers),
        norm=source.tensor(f"{prefix}norm.weight", hidden),
        head=source.head(embed),
        ple=ple,
    )


def _same(stored: Tensor, table: Tensor, rows: int = 8192) -> bool:
    pairs = zip(stored.split(rows), table.split(rows), strict=True)
    return all(torch.equal(a.to(b.device, b.dtype), b) for a, b in pairs)


def _layer(source: WeightSource, name: str, layer: LayerConfig) -> LayerWeights:
    config = source.config
    hidden, dim = config.hidden_size, layer.head_dim
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    q_size, kv_size = config.num_q_heads * dim, layer.num_kv_heads * dim
    parts = [(f"{attn}.q_proj", q_size)]
    if layer.owns_kv:
        parts.append((f"{attn}.k_proj", kv_size))
        if not layer.v_is_k:
            parts.append((f"{attn}.v_proj", kv_size))
    return LayerWeights(
        input_norm=source.tensor(f"{name}.input_layernorm.weight", hidden),
        post_attention_norm=source.tensor(f"{name}.post_attention_layernorm.weight", hidden),
        pre_ffn_norm=source.tensor(f"{name}.pre_feedforward_layernorm.weight", hidden),
        post_ffn_norm=source.tensor(f"{name}.post_feedforward_layernorm.weight", hidden),
        scalar=source.scalar(f"{name}.layer_scalar"),
        qkv=source.linear(parts, hidden),
        q_norm=source.tensor(f"{attn}.q_norm.weight", dim),
        k_norm=source.tensor(f"{attn}.k_norm.weight", dim) if layer.owns_kv else None,
        out=source.linear([(f"{attn}.o_proj", hidden)], q_size),
        gate_up=source.linear(
            [(f"{mlp}.{part}_proj", layer.intermediate_size) for part in ("gate", "up")], hidden, gated=True
        ),
        down=source.linear([(f"{mlp}.down_proj", hidden)], layer.intermediate_size),
        moe=_moe(source, name) if config.num_experts else None,
        ple=_ple_layer(source, name) if config.ple_size else None,
    )


def _ple_layer(source: WeightSource, name: str) -> PleLayerWeights:
    hidden, size = source.config.hidden_size, source.config.ple_size
    return PleLayerWeights(
        gate=source.unpacked(f"{name}.per_layer_input_gate", size, hidden),
        projection=source.unpacked(f"{name}.per_layer_projection", hidden, size),
        post_norm=source.tensor(f"{name}.post_per_layer_input_norm.weight", hidden),
    )


def _moe(source: WeightSource, name: str) -> MoeWeights:
    config = source.config
    num, hidden = config.num_experts, config.hidden_size
    gate_up, down = source.experts(name)
    return MoeWeights(
        router_scale=source.tensor(f"{name}.router.scale", hidden),
        router=source.unpacked(f"{name}.router.proj", num, hidden),
        per_expert_scale=source.tensor(f"{name}.router.per_expert_scale", num),
        gate_up=gate_up,
        down=down,
        dense_norm=source.tensor(f"{name}.post_feedforward_layernorm_1.weight", hidden),
        pre_norm=source.tensor(f"{name}.pre_feedforward_layernorm_2.weight", hidden),
        post_norm=source.tensor(f"{name}.post_feedforward_layernorm_2.weight", hidden),
    )


def build_drafter(source: WeightSource, config: DrafterConfig) -> DrafterWeights:
    """Everything the assistant needs, asked of `source` tensor by tensor."""
    text = config.text
    hidden, vocab, count = text.hidden_size, text.vocab_size, config.num_centroids
    head = source.head(source.tensor("model.embed_tokens.weight", vocab, hidden))
    if not isinstance(head, DenseLinear):
        raise TypeError("a drafter's head is dense: its rows are gathered by centroid")
    centroids = None
    if count:
        ids = source.tensor("masked_embedding.token_ordering", vocab, dtype=torch.int64)
        if not source.is_dry and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise CheckpointError(f"masked_embedding.token_ordering names tokens outside 0 to {vocab - 1}")
        centroids = CentroidWeights(
            centroids=DenseLinear(source.tensor("masked_embedding.centroids.weight", count, hidden)),
            token_ids=ids.view(count, vocab // count),
        )
    return DrafterWeights(
        layers=tuple(_layer(source, f"model.layers.{layer.index}", layer) for layer in text.layers),
        norm=source.tensor("model.norm.weight", hidden),
        head=head,
        pre=source.linear([("pre_projection", hidden)], 2 * config.backbone_hidden_size),
        post=source.linear([("post_projection", config.backbone_hidden_size)], hidden),
        centroids=centroids,
    )
