"""What a rank of a divided model has: sizes, and weights, of which it reads its own part alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WIDE, edit_tensors, quantize, save_compressed
from divided_models import ODD, make_pair
from ranks import Threads
from tiny_gemma import CPU, make_assistant, make_target
from torch import Tensor

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config import ModelConfig, read_drafter_config, read_model_config
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import footprint
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.layout import LayerWeights, ModelWeights
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.runtime.weights.repacked import leaves
from kerngen.runtime.weights.safetensors import SafetensorsFile
from kerngen.runtime.weights.synthetic import synthetic_model
from kerngen.runtime.world import Span, World, cut
from kerngen.workload.generated import generated_model
from kerngen.workload.workload import find_model

# -- sizes


def ranks_of(name: str, size: int) -> list[ModelConfig]:
    return [find_model(name).target.divided(World(rank, size)) for rank in range(size)]


@pytest.mark.parametrize(
    ("name", "size", "q", "kv_sliding", "kv_full", "mlp", "experts"),
    [
        ("gemma-4-31b", 2, [16] * 2, [8] * 2, [2] * 2, [10752] * 2, [0] * 2),
        ("gemma-4-31b", 3, [16, 8, 8], [8, 4, 4], [2, 1, 1], [7168] * 3, [0] * 3),
        ("gemma-4-31b", 8, [4] * 8, [2] * 8, [1] * 8, [2688] * 8, [0] * 8),
        ("gemma-4-12b", 2, [8] * 2, [4] * 2, [1] * 2, [7680] * 2, [0] * 2),
        ("gemma-4-26b-a4b", 2, [8] * 2, [4] * 2, [1] * 2, [1056] * 2, [352] * 2),
        ("gemma-4-26b-a4b", 4, [4] * 4, [2] * 4, [1] * 4, [544, 544, 512, 512], [192, 192, 160, 160]),
        ("gemma-4-26b-a4b", 8, [2] * 8, [1] * 8, [1] * 8, [288] * 2 + [256] * 6, [96] * 6 + [64] * 2),
    ],
)  # fmt: skip
def test_what_each_rank_has_of_a_released_model(
    name: str, size: int, q: list[int], kv_sliding: list[int], kv_full: list[int], mlp: list[int], experts: list[int]
) -> None:
    ranks = ranks_of(name, size)
    assert [c.num_q_heads for c in ranks] == q
    for kind, counts in (("sliding", kv_sliding), ("full", kv_full)):
        assert [{x.num_kv_heads for x in c.layers if x.kind == kind} for c in ranks] == [{n} for n in counts]
    assert [{x.intermediate_size for x in c.layers} for c in ranks] == [{n} for n in mlp]
    assert [c.moe_intermediate_size for c in ranks] == experts
    whole = find_model(name).target
    for spans in ([c.q_span for c in ranks], [c.layers[0].inner_span for c in ranks], [c.vocab_span for c in ranks]):
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
        assert spans[-1].stop == spans[-1].whole
    for rank, config in enumerate(ranks):
        for layer, was in zip(config.layers, whole.layers, strict=True):
            group, first = whole.num_q_heads // was.num_kv_heads, config.q_span.start
            heads = [first + a for a in range(config.num_q_heads)]
            mine = config.num_q_heads // layer.num_kv_heads
            read = [layer.kv_span.start + a // mine for a in range(config.num_q_heads)]
            assert read == [head // group for head in heads], "each query head reads the KV head that it reads whole"
            if was.num_kv_heads < size:
                assert layer.kv_span.start == rank * was.num_kv_heads // size
        drafter = find_model(name).drafter
        assert drafter is not None
        mine_too = drafter.divided(config).text
        assert mine_too.num_q_heads == config.num_q_heads
        assert {x.intermediate_size for x in mine_too.layers} == {x.intermediate_size for x in drafter.text.layers}


@pytest.mark.parametrize(
    ("name", "size", "why", "way_on"),
    [
        ("gemma-4-e2b", 2, "per-layer inputs", "--replicas 2"),
        ("gemma-4-e4b", 4, "per-layer inputs", "--replicas 4"),
        ("gemma-4-31b", 5, "layer 5's 4 KV heads", "among 2 or 3 or 4 or 8"),
        ("gemma-4-26b-a4b", 3, "layer 5's 2 KV heads", "among 2 or 4"),
        ("gemma-4-31b", 64, "its query heads: 32 are 32 times 1, fewer than 64 ranks", "--replicas 64"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_way_on(name: str, size: int, why: str, way_on: str) -> None:
    for rank in (0, size - 1):
        with pytest.raises(UsageError, match=why) as refused:
            find_model(name).target.divided(World(rank, size))
        assert way_on in (refused.value.hint or "")


def test_a_world_of_one_has_the_model_as_it_is() -> None:
    model = find_model("gemma-4-31b")
    assert model.drafter is not None
    assert model.target.divided(World()) is model.target
    assert model.drafter.divided(model.target) is model.drafter
    assert [cut(7, 1, World(rank, 3)) for rank in range(3)] == [Span(0, 3, 7), Span(3, 2, 7), Span(5, 2, 7)]


def test_a_ranks_memory_is_its_part_and_the_embedding() -> None:
    """The table is whole on each rank and its rows are the head; all else of the 31B halves, but for small things."""
    whole = find_model("gemma-4-31b").target
    takes, half = (footprint(config, None, torch.bfloat16, 64) for config in (whole, whole.divided(World(1, 2))))
    table = whole.vocab_size * whole.hidden_size * 2
    assert (half.weight_bytes - table) * 2 == pytest.approx(takes.weight_bytes - table, rel=0.01)
    assert half.cache_bytes * 2 == takes.cache_bytes
    assert half.screen_bytes[0] * 2 == takes.screen_bytes[0]


# -- weights


def put(out: Tensor, part: Tensor, at: slice, dim: int) -> None:
    """The part where it belongs; what is there already is the same."""
    place = out.movedim(dim, 0)[at]
    known = ~place.isnan()
    assert torch.equal(place[known], part.movedim(dim, 0)[known])
    place.copy_(part.movedim(dim, 0))


def put_together(ranks: list[tuple[ModelConfig, ModelWeights]], like: ModelWeights, whole: ModelConfig) -> None:
    """Asserts that the ranks' parts are `like`, the dense weights of one rank."""
    for index, want in enumerate(like.layers):
        layer = whole.layers[index]
        dim, inner = layer.head_dim, layer.intermediate_size
        nan = [torch.full_like(t, torch.nan) for t in _matrices(want)]
        for config, weights in ranks:
            part, has = config.layers[index], weights.layers[index]
            q, kv, mlp = config.q_span, part.kv_span, part.inner_span
            rows = [q.times(dim), *[kv.times(dim).after(whole.num_q_heads * dim, 0)] * layer.owns_kv]
            if layer.owns_kv and not layer.v_is_k:
                rows.append(kv.times(dim).after((whole.num_q_heads + layer.num_kv_heads) * dim, 0))
            for piece, span in zip(has.qkv.weight.split([span.size for span in rows]), rows, strict=True):
                put(nan[0], piece, span.slice, 0)
            put(nan[1], has.out.weight, q.times(dim).slice, 1)
            for half, piece in enumerate(has.gate_up.weight.chunk(2)):
                put(nan[2], piece, mlp.after(half * inner, 0).slice, 0)
            put(nan[3], has.down.weight, mlp.slice, 1)
            if has.moe is not None:
                width = config.expert_span
                for half, piece in enumerate(has.moe.gate_up.weight.chunk(2, 1)):
                    put(nan[4], piece, width.after(half * width.whole, 0).slice, 1)
                put(nan[5], has.moe.down.weight, width.slice, 2)
            assert has.out.is_summand
            assert has.down.is_summand
            for mine, its in ((has.input_norm, want.input_norm), (has.q_norm, want.q_norm)):
                assert torch.equal(mine, its)
        for made, its in zip(nan, _matrices(want), strict=True):
            assert torch.equal(made, its)
    for config, weights in ranks:
        assert torch.equal(weights.embed.weight, like.embed.weight)
        assert torch.equal(weights.head.weight, like.head.weight[config.vocab_span.slice])
        assert weights.head.rows == config.vocab_span


def _matrices(layer: LayerWeights) -> list[Tensor]:
    found = [layer.qkv, layer.out, layer.gate_up, layer.down]
    return [w.weight for w in (*found, *((layer.moe.gate_up, layer.moe.down) if layer.moe else ()))]


def loaded(folder: Path, size: int, ops: Ops | None = None) -> list[tuple[ModelConfig, ModelWeights]]:
    config = read_model_config(folder)
    ops = ops or TorchOps(CPU, torch.float32)
    parts = [config.divided(World(rank, size)) for rank in range(size)]
    return [(part, load_model(folder, part, ops)) for part in parts]


class Bytes:
    """Counts the bytes of what is looked at in files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = SafetensorsFile.pieces

        def pieces(file: SafetensorsFile, name: str, *how: Any, **box: Any) -> Iterator[tuple[int, Tensor]]:
            for row, piece in real(file, name, *how, **box):
                self.count += piece.numel() * piece.element_size()
                yield row, piece

        monkeypatch.setattr(SafetensorsFile, "pieces", pieces)


@pytest.mark.parametrize("variant", ODD)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_all_of_a_checkpoint_between_them_and_read_no_byte_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, size: int
) -> None:
    folder, _ = make_pair(tmp_path, variant)
    whole = read_model_config(folder)
    like = load_model(folder, whole, TorchOps(CPU, torch.float32))
    read = Bytes(monkeypatch)
    ranks = loaded(folder, size)
    put_together(ranks, like, whole)
    kept = sum(t.numel() * 4 for _, weights in ranks for _, t in leaves(replace(weights, head=())))
    assert read.count == kept, "a rank's weights are stored in fp32, as they are kept, and read once each"


@pytest.mark.parametrize("experts", ["one by one", "joined by _", "with a shape"])
def test_int4_is_cut_between_groups(tmp_path: Path, experts: str) -> None:
    make_target(tmp_path, "moe", **WIDE | {"moe_intermediate_size": 192, "intermediate_size": 320})
    save_compressed(tmp_path, 32, experts)
    whole = read_model_config(tmp_path)
    assert [whole.divided(World(r, 4)).layers[0].intermediate_size for r in range(4)] == [96, 96, 64, 64]
    put_together(loaded(tmp_path, 4), load_model(tmp_path, whole, TorchOps(CPU, torch.float32)), whole)


def test_int4_that_stays_packed_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path, "k_eq_v", **WIDE)
    quantize(tmp_path, 32)
    ops = KernelOps(Reference(), torch.bfloat16)
    read = Bytes(monkeypatch)
    kept = 0
    for _, weights in loaded(tmp_path, 2, ops):
        matrices = [w for x in weights.layers for w in (x.qkv, x.out, x.gate_up, x.down)]
        assert {w.format.name for w in matrices} == {"int4"}
        others = replace(weights, head=(), layers=tuple(_others(x) for x in weights.layers))
        kept += sum(w.num_bytes for w in matrices)
        kept += sum(t.numel() * 4 for _, t in leaves(others))  # norms and the table are stored in fp32
    assert read.count == kept


def _others(layer: LayerWeights) -> LayerWeights:
    nothing: Any = ()
    return replace(layer, qkv=nothing, out=nothing, gate_up=nothing, down=nothing)


def test_a_rank_finds_nan_in_its_own_part(tmp_path: Path) -> None:
    make_target(tmp_path, "dense")

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][5, 40] = torch.nan  # of 48 columns, two ranks

    edit_tensors(tmp_path, spoil)
    config, ops = read_model_config(tmp_path), TorchOps(CPU, torch.float32)
    load_model(tmp_path, config.divided(World(0, 2)), ops)
    with pytest.raises(CheckpointError, match=r"down_proj.weight holds NaN.* first at \[5, 40\]"):
        load_model(tmp_path, config.divided(World(1, 2)), ops)


def test_a_part_of_a_wrong_shape_is_refused_by_every_rank(tmp_path: Path) -> None:
    make_target(tmp_path, "dense")
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.ones(32, 40)}))
    config = read_model_config(tmp_path)
    for rank in range(2):
        with pytest.raises(CheckpointError, match=r"has shape \[32, 40\]; config.json implies \[32, 48\]"):
            load_model(tmp_path, config.divided(World(rank, 2)), TorchOps(CPU, torch.float32))


def test_repacked_weights_are_of_whole_models(tmp_path: Path) -> None:
    make_target(tmp_path, "dense")
    config, ops = read_model_config(tmp_path), TorchOps(CPU, torch.float32)
    with pytest.raises(UsageError, match="whole models alone"):
        load_model(tmp_path, config.divided(World(0, 2)), ops, keep_repacked=True)


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_ranks_scale_alike_for_fp16(tmp_path: Path, variant: str) -> None:
    """Of one rank what is bounded may be far less than of another: products that are added have one scale."""
    make_target(tmp_path, variant)

    def spread(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("up_proj.weight", "experts.gate_up_proj")):
                tensor[..., -2:, :] *= 3e4  # rows of the last rank alone

    edit_tensors(tmp_path, spread)
    config, threads = read_model_config(tmp_path), Threads(2)
    whole = load_model(tmp_path, config, TorchOps(CPU, torch.float16))

    def load(rank: int) -> tuple[ModelConfig, ModelWeights]:
        try:
            part = config.divided(World(rank, 2))
            return part, load_model(tmp_path, part, TorchOps(CPU, torch.float16, threads.of(rank)))
        except BaseException:
            threads.stop()
            raise

    with ThreadPoolExecutor(2) as pool:
        put_together(list(pool.map(load, range(2))), whole, config)


def test_a_drafter_is_divided_by_heads_and_by_rows_of_its_head(tmp_path: Path) -> None:
    make_target(tmp_path / "target", "k_eq_v")
    make_assistant(tmp_path / "drafter", "k_eq_v")
    make_assistant(tmp_path / "centroids", "k_eq_v", num_centroids=12)
    target, ops = read_model_config(tmp_path / "target"), TorchOps(CPU, torch.float32)
    config = read_drafter_config(tmp_path / "drafter", target)
    like = load_drafter(tmp_path / "drafter", config, ops)
    for rank in range(4):
        mine = config.divided(target.divided(World(rank, 4)))
        weights = load_drafter(tmp_path / "drafter", mine, ops)
        assert torch.equal(weights.head.weight, like.head.weight[mine.text.vocab_span.slice])
        for layer, want, part in zip(weights.layers, like.layers, mine.text.layers, strict=True):
            rows = mine.text.q_span.times(part.head_dim).slice
            assert torch.equal(layer.qkv.weight, want.qkv.weight[rows])
            assert torch.equal(layer.out.weight, want.out.weight[:, rows])
            assert torch.equal(layer.down.weight, want.down.weight)
            assert (layer.out.is_summand, layer.down.is_summand) == (True, False)
        centroids = read_drafter_config(tmp_path / "centroids", target).divided(target.divided(World(rank, 4)))
        assert len(load_drafter(tmp_path / "centroids", centroids, ops).head.weight) == target.vocab_size


@pytest.mark.parametrize("variant", ODD)
def test_generated_weights_are_parts_of_one_ranks(tmp_path: Path, variant: str) -> None:
    whole, ops = read_model_config(make_pair(tmp_path, variant)[0]), TorchOps(CPU, torch.float32)
    parts = [whole.divided(World(rank, 4)) for rank in range(4)]
    put_together([(p, synthetic_model(p, ops, 3)) for p in parts], synthetic_model(whole, ops, 3), whole)
    of_one, _ = generated_model("tiny", whole, None, ops, 3, own_head=True)
    for part in parts:
        mine, _ = generated_model("tiny", part, None, ops, 3, own_head=True)
        assert torch.equal(mine.weights.head.weight, of_one.weights.head.weight[part.vocab_span.slice])
