"""Loads a Gemma-4 checkpoint or its drafter: verify every header, then copy, fuse and repack.

Nothing is allocated before all tensors that config.json implies were found with the right shapes and no tensor of the
text model is left over: a file and a config that contradict each other never get as far as the device. Tensor names:
as transformers saves them; `model.language_model.` in multimodal checkpoints, `model.` in text-only ones.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import overload

import torch

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config import DrafterConfig, LayerConfig, ModelConfig
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.ops import Ops, dense_weights
from kerngen.runtime.weights.dflash import DflashWeights, build_dflash, require_no_table
from kerngen.runtime.weights.layout import (
    CentroidWeights,
    DrafterWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    PleLayerWeights,
    PleWeights,
)
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.repacked import Planned, RepackedCache
from kerngen.runtime.weights.safetensors import Checkpoint
from kerngen.runtime.weights.source import CheckpointSource, WeightSource
from kerngen.runtime.weights.tensors import Advance
from kerngen.runtime.world import Span


def load_model(
    folder: Path, config: ModelConfig, ops: Ops, *, advance: Advance | None = None, keep_repacked: bool = False
) -> ModelWeights:
    """The target model's weights on `ops.device`. Raises CheckpointError before allocating anything.

    advance: is told now and then how many bytes of how many were loaded. keep_repacked: what was repacked is kept
    beside the checkpoint; where it is there it is read in any case, but by a rank of a divided model. Raises UsageError
    where such a rank is to keep it.
    """
    if keep_repacked and config.share is not None:
        raise UsageError("repacked weights are kept of whole models alone", hint="leave --keep-repacked out")
    source = CheckpointSource(open_tensors(folder, config.quant), config, ops, advance)
    prefix = find_prefix(source.checkpoint)
    build_model(source, prefix)
    source.check_left(prefix)
    kept = (
        RepackedCache(source.checkpoint, config, ops)
        if config.share is None and (keep_repacked or source.checkpoint.has_repacked())
        else None
    )
    if kept is not None and kept.path.exists():
        planned = build_model(Planned(source), prefix)
        if (found := kept.load(planned, advance)) is not None:
            return found
    source.begin()
    weights = build_model(source, prefix)
    source.finish()
    for line in source.checkpoint.said(source.used, ops.dtype):
        warnings.warn(line, stacklevel=2)
    if kept is not None and keep_repacked:
        kept.save(weights)
    return weights


@overload
def load_drafter(
    folder: Path, config: DrafterConfig, ops: Ops, *, advance: Advance | None = None
) -> DrafterWeights: ...


@overload
def load_drafter(folder: Path, config: DflashConfig, ops: Ops, *, advance: Advance | None = None) -> DflashWeights: ...


def load_drafter(
    folder: Path, config: DrafterConfig | DflashConfig, ops: Ops, *, advance: Advance | None = None
) -> DrafterWeights | DflashWeights:
    """The drafter's weights on `ops.device`, each matrix made int4 as it comes where `config` says so.

    Raises CheckpointError before allocating anything.
    """
    source = CheckpointSource(open_tensors(folder, config.text.quant), config.text, ops, advance)
    if isinstance(config, DflashConfig):
        require_no_table(source.checkpoint)
    build_drafter(source, config)
    source.check_left("")
    source.begin()
    weights = build_drafter(source, config)
    source.finish()
    return weights


def planned_model(folder: Path, config: ModelConfig, ops: Ops) -> ModelWeights:
    """What load_model gives, as shapes alone: only headers are read. Raises CheckpointError."""
    source = CheckpointSource(open_tensors(folder, config.quant), config, ops)
    return build_model(Planned(source), find_prefix(source.checkpoint))


def planned_drafter(folder: Path, config: DrafterConfig | DflashConfig, ops: Ops) -> DrafterWeights | DflashWeights:
    """As planned_model, of load_drafter."""
    return build_drafter(Planned(CheckpointSource(open_tensors(folder, config.text.quant), config.text, ops)), config)


def find_prefix(checkpoint: Checkpoint) -> str:
    """What the names of the text model's tensors begin with. Raises CheckpointError where it has no embedding table."""
    known = ("model.language_model.", "model.", "language_model.model.")
    for prefix in known:
        if any(f"{prefix}embed_tokens.{part}" in checkpoint for part in ("weight", "weight_packed", "qweight")):
            return prefix
    names = ", ".join(f"{prefix}embed_tokens.weight" for prefix in known)
    raise CheckpointError(f"{checkpoint.folder} holds no embedding table; looked for {names}")


def build_model(source: WeightSource, prefix: str) -> ModelWeights:
    """Everything the target needs, asked of `source` tensor by tensor."""
    config = source.config
    hidden = config.hidden_size
    embed = source.table(f"{prefix}embed_tokens", config.vocab_size, hidden)
    ple = None
    if config.ple_size:
        width = len(config.layers) * config.ple_size
        ple = PleWeights(
            table=source.tensor(f"{prefix}embed_tokens_per_layer.weight", config.ple_vocab_size, width),
            projection=source.linear([(f"{prefix}per_layer_model_projection", Span.of(width))], Span.of(hidden)),
            norm=source.tensor(f"{prefix}per_layer_projection_norm.weight", config.ple_size),
        )
    return ModelWeights(
        embed=embed,
        layers=tuple(_layer(source, f"{prefix}layers.{layer.index}", layer) for layer in config.layers),
        norm=source.tensor(f"{prefix}norm.weight", hidden),
        head=source.head(embed, config.vocab_span),
        ple=ple,
    )


def _layer(source: WeightSource, name: str, layer: LayerConfig) -> LayerWeights:
    config = source.config
    hidden, dim = config.hidden_size, layer.head_dim
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    q_rows, kv_rows, every = config.q_span.times(dim), layer.kv_span.times(dim), Span.of(hidden)
    parts = [(f"{attn}.q_proj", q_rows)]
    if layer.owns_kv:
        parts.append((f"{attn}.k_proj", kv_rows))
        if not layer.v_is_k:
            parts.append((f"{attn}.v_proj", kv_rows))
    inner = layer.inner_span
    input_norm, post_attention_norm, pre_ffn_norm, post_ffn_norm = (
        source.tensor(f"{name}.{where}_layernorm.weight", hidden)
        for where in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    scalar = source.scalar(f"{name}.layer_scalar")
    qkv = source.linear(parts, every)
    q_norm = source.tensor(f"{attn}.q_norm.weight", dim)
    k_norm = source.tensor(f"{attn}.k_norm.weight", dim) if layer.owns_kv else None
    out = source.linear([(f"{attn}.o_proj", every)], q_rows)
    gate_up, down = source.mlp(
        [(f"{mlp}.{part}_proj", inner) for part in ("gate", "up")], [(f"{mlp}.down_proj", every)], pre_ffn_norm
    )
    return LayerWeights(
        input_norm=input_norm,
        post_attention_norm=post_attention_norm,
        pre_ffn_norm=pre_ffn_norm,
        post_ffn_norm=post_ffn_norm,
        scalar=scalar,
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        out=out,
        gate_up=gate_up,
        down=down,
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
    pre_norm = source.tensor(f"{name}.pre_feedforward_layernorm_2.weight", hidden)
    gate_up, down = source.experts(name, pre_norm)
    return MoeWeights(
        router_scale=source.tensor(f"{name}.router.scale", hidden),
        router=source.unpacked(f"{name}.router.proj", num, hidden),
        per_expert_scale=source.tensor(f"{name}.router.per_expert_scale", num),
        gate_up=gate_up,
        down=down,
        dense_norm=source.tensor(f"{name}.post_feedforward_layernorm_1.weight", hidden),
        pre_norm=pre_norm,
        post_norm=source.tensor(f"{name}.post_feedforward_layernorm_2.weight", hidden),
    )


@overload
def build_drafter(source: WeightSource, config: DrafterConfig) -> DrafterWeights: ...


@overload
def build_drafter(source: WeightSource, config: DflashConfig) -> DflashWeights: ...


def build_drafter(source: WeightSource, config: DrafterConfig | DflashConfig) -> DrafterWeights | DflashWeights:
    """Everything the drafter needs, asked of `source` tensor by tensor."""
    return build_dflash(source, config) if isinstance(config, DflashConfig) else _assistant(source, config)


def _assistant(source: WeightSource, config: DrafterConfig) -> DrafterWeights:
    text = config.text
    hidden, vocab, count = text.hidden_size, text.vocab_size, config.num_centroids
    rows = text.vocab_span
    head = source.head(dense_weights(source.rows("model.embed_tokens.weight", rows, hidden)), rows)
    if not head.is_dense:
        raise CheckpointError("the drafter's lm_head is packed, which is not implemented: it must be dense")
    centroids = None
    if count:
        ids = source.tensor("masked_embedding.token_ordering", vocab, dtype=torch.int64)
        if not source.is_dry and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise CheckpointError(f"masked_embedding.token_ordering names tokens outside 0 to {vocab - 1}")
        centroids = CentroidWeights(
            centroids=dense_weights(source.tensor("masked_embedding.centroids.weight", count, hidden)),
            token_ids=ids.view(count, vocab // count),
        )
    return DrafterWeights(
        layers=tuple(_layer(source, f"model.layers.{layer.index}", layer) for layer in text.layers),
        norm=source.tensor("model.norm.weight", hidden),
        head=head,
        pre=source.linear([("pre_projection", Span.of(hidden))], Span.of(2 * config.backbone_hidden_size)),
        post=source.linear([("post_projection", Span.of(config.backbone_hidden_size))], Span.of(hidden)),
        centroids=centroids,
    )
