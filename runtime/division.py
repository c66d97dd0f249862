"""Tensor parallelism: the configuration of one rank of a divided model.

Matrices that read the residual stream are cut by rows (q, k, v by heads; gate and up), those that write to it by
columns (o by heads, down), so that a layer takes two sums over the ranks (Megatron-LM, arXiv 1909.08053). A rank's KV
heads are those that its query heads read; a KV head that several ranks' query heads read is on each of them. Widths are
cut in whole quantization groups, unevenly where these do not divide.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm
from typing import TYPE_CHECKING

from kerngen.errors import UsageError
from kerngen.runtime.world import VECTOR, Share, Span, World, cut, head_rows

if TYPE_CHECKING:
    from kerngen.runtime.config import DrafterConfig, LayerConfig, ModelConfig

STRIP = 32  # rows of an int4 matrix that kernels multiply together
MOST_RANKS = 8  # that a refusal looks for a way on in


def divided_model(config: ModelConfig, world: World) -> ModelConfig:
    """What `world.rank` has of the whole `config`; `config` itself in a world of one.

    Raises UsageError, with what can be done, where the model's sizes do not divide among so many ranks.
    """
    if config.share is not None:
        raise TypeError("the model is divided already")
    if world.size == 1:
        return config
    try:
        return _parts(config, world.size)[world.rank]  # what one rank cannot have is refused on all
    except UsageError as e:
        raise UsageError(
            f"the model cannot be divided among {world.size} ranks: {e.message}", hint=_way_on(config, world.size)
        ) from e


def _way_on(config: ModelConfig, size: int) -> str:
    """Which numbers of ranks would do, and that whole engines always do."""
    counts = [n for n in range(2, MOST_RANKS + 1) if n != size and _is_divisible(config, n)]
    whole = f"one whole model a GPU: kerngen serve --replicas {size}"
    return f"it can among {' or '.join(map(str, counts))}; or {whole}" if counts else whole


def _is_divisible(config: ModelConfig, size: int) -> bool:
    try:
        _parts(config, size)
    except UsageError:
        return False
    return True


def _parts(config: ModelConfig, size: int) -> list[ModelConfig]:
    """What each of `size` ranks has."""
    return [_divided(config, World(rank, size)) for rank in range(size)]


def _divided(config: ModelConfig, world: World) -> ModelConfig:
    if config.ple_size:
        raise UsageError(
            "per-layer inputs read the whole residual stream on every rank, and gain nothing from more of them"
        )
    q_heads = _q_heads(config, world)
    experts = config.moe_intermediate_size
    width = Span.of(experts)
    if config.num_experts:
        width = _named("its experts' width", experts, _unit(config, experts), world)
    share = Share(world, q_heads, width, head_rows(config.vocab_size, world))
    layers = tuple(_layer(config, layer, q_heads, world) for layer in config.layers)
    return replace(
        config, num_q_heads=q_heads.size, moe_intermediate_size=share.expert_width.size, layers=layers, share=share
    )


def _q_heads(config: ModelConfig, world: World) -> Span:
    """Whole groups of the query heads that share a KV head, of every kind of layer that has a KV head for each rank;
    and, so that `o` is cut between quantization groups, so many that their columns are whole ones.
    """
    heads, unit = config.num_q_heads, 1
    for layer in config.layers:
        if layer.num_kv_heads >= world.size:
            unit = lcm(unit, heads // layer.num_kv_heads)
        width = _unit(config, heads * layer.head_dim)
        unit = lcm(unit, width // gcd(width, layer.head_dim))
    return _named("its query heads", heads, unit, world)


def _layer(config: ModelConfig, layer: LayerConfig, q_heads: Span, world: World) -> LayerConfig:
    inner = layer.intermediate_size
    width = _named(f"layer {layer.index}'s MLP width", inner, _unit(config, inner), world)
    return _with(layer, _kv_heads(layer, q_heads), width)


def _with(layer: LayerConfig, kv_heads: Span, inner: Span) -> LayerConfig:
    k_scales, v_scales = (each if len(each) == 1 else each[kv_heads.slice] for each in layer.kv_scales)
    return replace(layer, num_kv_heads=kv_heads.size, kv_heads=kv_heads, intermediate_size=inner.size, inner=inner,
                   kv_scales=(k_scales, v_scales))  # fmt: skip


def _kv_heads(layer: LayerConfig, q_heads: Span) -> Span:
    """Those that the rank's query heads read: whole groups of these, or part of one."""
    count = layer.num_kv_heads
    group = q_heads.whole // count
    first, last = q_heads.start // group, (q_heads.stop - 1) // group
    whole_groups = q_heads.start % group == 0 and q_heads.size % group == 0
    if first != last and not whole_groups:
        raise UsageError(
            f"layer {layer.index}'s {count} KV heads: query heads {q_heads.start} to {q_heads.stop - 1} of a rank read "
            f"{last - first + 1} of them, and not all to the same extent"
        )
    return Span(first, last - first + 1, count)


def _unit(config: ModelConfig, width: int) -> int:
    """By how many columns a width is cut: int4 between groups of any size that the checkpoint may have."""
    if config.quant is None:
        return gcd(width, VECTOR)
    return lcm(STRIP, *config.quant.group_sizes)


def _named(what: str, whole: int, unit: int, world: World) -> Span:
    try:
        return cut(whole, unit, world)
    except UsageError as e:
        raise UsageError(f"{what}: {e.message}") from e


def divided_drafter(drafter: DrafterConfig, target: ModelConfig) -> DrafterConfig:
    """What the rank of a divided `target` has of its `drafter`; `drafter` itself where the target is whole.

    Query heads are where the target's KV heads are that they read. MLP and projections are whole on every rank: what
    they cost is less than one more exchange. So is a centroid head, which gathers rows from anywhere. Raises UsageError
    where heads do not match.
    """
    text = drafter.text
    if target.share is None or text.share is not None:
        return drafter
    mine = target.share.q_heads
    if mine.start * text.num_q_heads % mine.whole or mine.size * text.num_q_heads % mine.whole:
        raise UsageError(
            f"the drafter's {text.num_q_heads} query heads do not divide as the target's {mine.whole} do",
            hint="run without it: --no-draft",
        )
    q_heads = Span(
        mine.start * text.num_q_heads // mine.whole, mine.size * text.num_q_heads // mine.whole, text.num_q_heads
    )
    vocab = Span.of(text.vocab_size) if drafter.num_centroids else target.share.vocab
    layers = tuple(_with(x, _kv_heads(x, q_heads), Span.of(x.intermediate_size)) for x in text.layers)
    share = Share(target.share.world, q_heads, Span.of(text.moe_intermediate_size), vocab)
    return replace(drafter, text=replace(text, num_q_heads=q_heads.size, layers=layers, share=share))
