"""Images as embeddings: what transformers makes of them, from the same checkpoint, in fp32; and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from checkpoints import edit_config, edit_tensors
from click.testing import CliRunner
from tiny_gemma import load
from tiny_towers import (
    hf_embeddings,
    image,
    largest_error,
    make_towers,
    make_unified,
    media_config,
    towers,
)
from torch import Tensor

from kerngen.arch import find_arch
from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import _tensors
from kerngen.runtime.media.config import read_media_config
from kerngen.runtime.media.towers import graphs, vision
from kerngen.runtime.media.towers.linear import NO_BOUNDS, Bounds, ClippedLinear
from kerngen.runtime.media.towers.rows import READY_ROWS, TorchRows
from kerngen.runtime.media.values import Media
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.synthetic import synthetic_towers
from kerngen.runtime.weights.towers import load_towers, rows_of
from kerngen.templates.call import Call
from kerngen.workload.towers import tower_problems
from kerngen.workload.workload import MODELS, RELEASED, find_media
from tools.bench_towers import main, tflop

R = TypeVar("R")
STANDARD = {"standardize": True}
CLIPPED = {"use_clipped_linears": True}
# wide, square, tall, twice the same grid, and a frame of a video
IMAGES = [image(3, 18, 0), image(9, 9, 1), image(24, 3, 2), image(9, 9, 3), image(6, 9, 4, kind="video")]
LAYER = "model.vision_tower.encoder.layers"


@pytest.mark.parametrize("variant", [STANDARD, CLIPPED, {}], ids=["standardize", "clips", "plain"])
def test_a_tower_is_as_in_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    theirs = hf_embeddings(make_towers(tmp_path, **variant), IMAGES)
    assert largest_error(towers(tmp_path, "vision").embed(IMAGES), theirs) <= 1e-4


@pytest.mark.parametrize("variant", [STANDARD, CLIPPED], ids=["standardize", "clips"])
def test_our_kernels_norm_and_gate_as_torch_does(tmp_path: Path, variant: dict[str, Any]) -> None:
    """By their references; and they ask for what is built for the model, and for nothing else."""
    make_towers(tmp_path, **variant)
    config = media_config(tmp_path)
    asked = set[tuple[str, Any]]()

    class Noting(Reference):
        def run(self, call: Call[R], where: str) -> R:
            assert call.problem.num_tokens <= READY_ROWS[0]
            asked.add((call.kernel, replace(call.problem, num_tokens=READY_ROWS[0])))
            return super().run(call, where)

    ours = load_towers(tmp_path, config, KernelOps(Noting(), torch.float32), which=["vision"])
    assert largest_error(ours.embed(IMAGES), towers(tmp_path, "vision").embed(IMAGES)) <= 1e-5
    assert {name for name, _ in asked} == {"rmsnorm", "add_norm", "qkv_norm_rope_2d", "gelu_gate"}
    built = {(name, replace(p, dtype="fp32", **({"residual_dtype": "fp32"} if hasattr(p, "residual_dtype") else {})))
             for name, p in tower_problems(config, find_arch("sm90"))}  # fmt: skip
    assert asked <= built
    assert config.vision is not None
    assert config.vision.encoder is not None
    narrow = replace(config.vision.encoder, head_dim=36)
    for odd in (replace(config.vision, hidden_size=36), replace(config.vision, encoder=narrow)):
        assert isinstance(rows_of(odd, KernelOps(Reference(), torch.float32)), TorchRows), "no kernel takes 36"


def test_bounds_and_standards_change_what_comes_out(tmp_path: Path) -> None:
    """So that the test above would see it if they were not applied."""
    for name, variant in (("std", STANDARD), ("clips", CLIPPED)):
        make_towers(tmp_path / name, **variant)
        before = towers(tmp_path / name, "vision").embed(IMAGES)

        def without(tensors: dict[str, Tensor]) -> None:
            for key, tensor in tensors.items():
                if key.endswith("std_bias"):
                    tensors[key] = torch.zeros_like(tensor)
                elif key.endswith(("_min", "_max")):
                    tensors[key] = torch.tensor(-math.inf if key.endswith("_min") else math.inf)

        edit_tensors(tmp_path / name, without)
        assert largest_error(towers(tmp_path / name, "vision").embed(IMAGES), before) > 0.1


def test_patches_without_an_encoder_are_as_in_transformers(tmp_path: Path) -> None:
    items = [image(1, 5, 0, values=432, side=1), image(4, 3, 1, values=432, side=1), image(4, 3, 2, values=432, side=1)]
    theirs = hf_embeddings(make_unified(tmp_path), items, side=1)
    assert largest_error(towers(tmp_path, "vision").embed(items), theirs) <= 1e-5


def test_linears_with_the_same_input_bounds_are_one_product(tmp_path: Path) -> None:
    make_towers(tmp_path, **CLIPPED)
    found = towers(tmp_path, "vision").vision
    assert isinstance(found, vision.VisionTower)
    first, middle, last = found.weights.layers
    assert [len(linear.inputs) for linear in (first.qkv, last.qkv, first.gate_up)] == [3, 1, 1]
    assert set(first.gate_up.gives) == {NO_BOUNDS}
    assert first.head_bounds is not None
    assert len(first.head_bounds.each) == 3
    assert first.gate_bounds is None
    assert first.ffn_bounds is None, "layer 1's queries, keys and values each take another input"
    for bounds in (middle.ffn_bounds, last.attention_bounds, last.gate_bounds):
        assert bounds is not None
        assert NO_BOUNDS not in bounds.each
    assert last.ffn_bounds is not None
    assert last.ffn_bounds.each[1] == NO_BOUNDS, "no linear follows"
    for linear in (first.qkv, first.out, last.qkv, last.gate_up, last.down):
        assert set(linear.gives) == {NO_BOUNDS}, "others clamp what they give"
    assert first.qkv.inputs[0][1:] != NO_BOUNDS
    assert first.out.takes != NO_BOUNDS, "nothing of ours stands between attention and this one"
    assert {linear.takes for linear in (last.qkv, last.gate_up, last.down)} == {NO_BOUNDS}, "others clamp it"


def test_infinite_bounds_and_what_a_dtype_cannot_hold_bound_nothing() -> None:
    x = torch.tensor([[3.0, -4.0]])
    weight = torch.eye(2)
    free = ((2, *NO_BOUNDS),)
    assert ClippedLinear(weight, free, free)(x).tolist() == x.tolist()
    assert ClippedLinear(weight, ((2, -1.0, math.inf),), free)(x).tolist() == [[3.0, -1.0]]
    half = ClippedLinear(weight.bfloat16(), ((2, -1.0, math.inf),), ((1, -math.inf, 1.0), (1, -math.inf, 2.0)))
    assert half(x.bfloat16()).tolist() == [[1.0, -1.0]]
    assert ClippedLinear(weight, free, ((1, -1.0, 1.0), (1, -1.0, 1.0)))(x).tolist() == [[1.0, -1.0]]
    each = ClippedLinear(weight, ((1, -1.0, 1.0), (1, -2.0, 2.0)), ((1, -9.0, 0.5), (1, -1.5, 9.0)))
    assert each(x).tolist() == [[0.5, -1.5]]
    assert each.before()(x).tolist() == each.between()(x).tolist() == [[1.0, -2.0]]
    one = ClippedLinear(weight, ((2, -1.0, 2.0),), ((2, -1.5, 9.0),))
    assert (one.takes, one.before()(x).tolist(), one.between()(x).tolist()) == (
        (-1.0, 2.0),
        [[2.0, -1.0]],
        [[3.0, -4.0]],
    )


def test_an_image_is_the_same_alone_and_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_towers(tmp_path, **CLIPPED)
    loaded = towers(tmp_path, "vision")
    together = loaded.embed(IMAGES)
    assert largest_error([loaded.embed([item])[0] for item in IMAGES], together) <= 1e-5
    sizes: list[tuple[int, ...]] = []
    real = vision.VisionTower.forward

    def forward(self: vision.VisionTower, patches: Tensor, shape: tuple[int, int, int]) -> Tensor:
        sizes.append(shape)
        return real(self, patches, shape)

    monkeypatch.setattr(vision.VisionTower, "forward", forward)
    monkeypatch.setattr(vision, "MAX_PATCHES", 100)
    assert largest_error(loaded.embed(IMAGES), together) <= 1e-5
    assert sizes == [(1, 3, 18), (1, 9, 9), (1, 9, 9), (1, 24, 3), (1, 6, 9)]
    monkeypatch.setattr(vision, "MAX_PATCHES", 162)
    loaded.embed(IMAGES)
    assert (2, 9, 9) in sizes
    assert loaded.embed([]) == []


def test_fp16_holds_what_the_scale_behind_the_pooling_makes(tmp_path: Path) -> None:
    make_towers(tmp_path, **STANDARD)

    def enlarge(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.2.post_feedforward_layernorm.weight"] *= 8000  # 8000 sqrt(32), and a few times that
        tensors["model.vision_tower.std_bias"].zero_()
        tensors["model.vision_tower.std_scale"].fill_(1e5)

    edit_tensors(tmp_path, enlarge)
    small = [IMAGES[1]]
    exact = towers(tmp_path, "vision").embed(small)[0]
    half = towers(tmp_path, "vision", dtype=torch.float16).embed(small)[0]
    assert half.dtype == torch.float16
    assert torch.cosine_similarity(half.float(), exact, dim=-1).min() > 0.99


def test_text_is_loaded_as_if_there_were_no_towers(tmp_path: Path) -> None:
    make_towers(tmp_path, **CLIPPED)
    assert load(tmp_path).config.hidden_size == media_config(tmp_path).hidden_size


def drop(start: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    return change


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor})


def fill(name: str, value: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors[name].fill_(value)


UP = f"{LAYER}.1.mlp.up_proj"
STD = "model.vision_tower.std"
BROKEN: list[tuple[dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = [
    (STANDARD, drop(f"{STD}_scale"), rf"lacks the tensor {STD}_scale \[32\]"),
    (STANDARD, drop(UP), rf"lacks the tensor {UP}.linear.weight \[40, 32\]"),
    (STANDARD, drop("model.embed_vision"), r"lacks the tensor model.embed_vision.embedding_projection.weight"),
    (STANDARD, drop("model.vision_tower"), r"holds no model.vision_tower.\*, which its config.json implies"),
    (CLIPPED, drop(f"{UP}.output_max"), rf"lacks the tensor {UP}.output_max \[\]"),
    (CLIPPED, put(f"{UP}.input_min", torch.tensor(math.nan)), "up_proj.input_min is NaN"),
    (CLIPPED, put(f"{UP}.input_min", torch.ones(1)), r"input_min has shape \[1\]"),
    (CLIPPED, put(f"{UP}.input_min", torch.tensor(9.0)), "input_min is 9, above input_max"),
    (STANDARD, put(f"{LAYER}.3.input_layernorm.weight", torch.ones(32)), "does not account for"),
    ({}, put(f"{STD}_bias", torch.ones(32)), "does not account for"),
    (STANDARD, fill(f"{STD}_bias", math.inf), "std_bias holds NaN or infinity"),
    (STANDARD, fill(f"{LAYER}.0.self_attn.q_norm.weight", math.nan), "q_norm.weight holds NaN or infinity"),
]


@pytest.mark.parametrize(("variant", "change", "complaint"), BROKEN, ids=[case[2][:40] for case in BROKEN])
def test_a_checkpoint_that_is_not_what_it_says_is_refused(
    tmp_path: Path, variant: dict[str, Any], change: Callable[[dict[str, Tensor]], Any], complaint: str
) -> None:
    make_towers(tmp_path, **variant)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=complaint):
        towers(tmp_path, "vision")


def test_bounds_that_config_does_not_know_of_are_refused(tmp_path: Path) -> None:
    make_towers(tmp_path, **CLIPPED)
    edit_config(tmp_path, lambda config: config["vision_config"].update(use_clipped_linears=False))
    with pytest.raises(CheckpointError, match=r"input_max \[\], which its config.json does not account for"):
        towers(tmp_path, "vision")


def test_leftovers_of_other_tools_and_names_without_model_are_taken(tmp_path: Path) -> None:
    make_towers(tmp_path, **STANDARD)
    before = towers(tmp_path, "vision").embed(IMAGES)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["embed_vision.embedding.weight"] = torch.full((4, 4), math.nan)

    edit_tensors(tmp_path, rename)
    assert largest_error(towers(tmp_path, "vision").embed(IMAGES), before) == 0


def resized(item: Media, **changes: Any) -> Media:
    values = {"kind": item.kind, "data": item.data, "grid": item.grid, "num_tokens": item.num_tokens} | changes
    return Media.of(**values)


@pytest.mark.parametrize(("item", "complaint"), [
    (resized(IMAGES[1], data=IMAGES[1].data.astype(np.float32)), "is no image of 9 x 9 patches of 4 x 4 pixels"),
    (resized(IMAGES[1], data=IMAGES[1].data[:, :12]), r"\[81, 12\] is no image"),
    (resized(IMAGES[1], grid=(9, 10)), "is no image of 9 x 10 patches"),
    (resized(IMAGES[1], num_tokens=81), "9 x 9 patches are 9 tokens, not 81"),
    (image(3, 51, 0), "the model knows 48 of a side"),
    (image(4, 9, 0), "4 x 9 patches do not divide into tokens of 3 x 3"),
])  # fmt: skip
def test_an_image_for_another_model_is_refused(tmp_path: Path, item: Media, complaint: str) -> None:
    make_towers(tmp_path, **STANDARD)
    with pytest.raises(UsageError, match=complaint):
        towers(tmp_path, "vision").embed([item])


def test_what_is_not_loaded_embeds_nothing(tmp_path: Path) -> None:
    make_towers(tmp_path, **STANDARD)
    sound = Media.of("audio", np.zeros((4, 128), np.float32), (4, 1), 1)
    with pytest.raises(UsageError, match="nothing loaded that embeds sound"):
        towers(tmp_path, "vision").embed([IMAGES[0], sound])
    with pytest.raises(UsageError, match="nothing loaded that embeds images"):
        towers(tmp_path).embed([IMAGES[0]])


# Of each model without and with the projector; the published totals are the sums with the text model's.
PARAMETERS = {
    "gemma-4-31b": (569_548_080 + 2_304, 6_193_152),
    "gemma-4-26b-a4b": (569_548_080 + 2_304, 3_244_032),
    "gemma-4-12b": (49_922_304 - 3840 * 3840, 3840 * 3840),
    "gemma-4-e4b": (167_364_608, 1_966_080),
    "gemma-4-e2b": (167_364_608, 1_179_648),
}


@pytest.mark.parametrize("name", MODELS)
def test_released_towers_have_their_published_sizes(name: str) -> None:
    config = read_media_config(json.loads((RELEASED / name / "config.json").read_text()))
    assert config is not None
    ops = KernelOps(Record(lambda *_: None, lambda _: None), torch.bfloat16)
    only = config.only(["vision"])
    assert only is not None
    found = synthetic_towers(only, ops).vision
    assert found is not None
    derived = 0  # of the clip bounds and the norms, beside what is stored
    if isinstance(found, vision.VisionTower):
        bounds = [
            b
            for layer in found.weights.layers
            for b in (getattr(layer, f.name) for f in fields(layer))
            if isinstance(b, Bounds)
        ]
        derived = sum(b.table.numel() for b in bounds)
        derived += sum(layer.head_norms[1].numel() for layer in found.weights.layers)
    total = sum(t.numel() for t in _tensors(found.weights)) - derived
    projector = found.weights.projection.numel()
    assert (total - projector, projector) == PARAMETERS[name]


def test_generated_towers_embed_images() -> None:
    """In the shapes of a checkpoint, with numbers that stay finite."""
    text = {"hidden_size": 64}
    section = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "use_clipped_linears": True}  # fmt: skip
    config = read_media_config({"model_type": "gemma4", "text_config": text, "vision_config": section})
    assert config is not None
    ops = TorchOps(torch.device("cpu"), torch.bfloat16)
    made = synthetic_towers(config, ops).embed([IMAGES[1], IMAGES[0]])
    assert [tuple(t.shape) for t in made] == [(9, 64), (6, 64)]
    assert all(bool(t.isfinite().all()) and float(t.float().std()) > 0.1 for t in made)
    with pytest.raises(CheckpointError):
        load_towers(RELEASED / "gemma-4-e2b", config, ops)


def test_towers_are_timed(tmp_path: Path) -> None:
    """`python -m tools.bench_towers`, on a CPU."""
    make_towers(tmp_path, **CLIPPED)
    said = CliRunner().invoke(
        main,
        [
            str(tmp_path),
            "--tokens",
            "4,9",
            "--batch",
            "2",
            "--seconds",
            "1",
            "--samples",
            "1",
            "--device",
            "cpu",
            "--json",
        ],
    )
    assert said.exception is None, said.output
    rows = json.loads(said.stdout)
    found = [(row["kind"], row["batch"], row["tokens"]) for row in rows]
    assert found == [("image", 2, 4), ("image", 2, 9), ("sound", 1, 25)]
    assert all(0 < row["host_ms"] <= row["ms"] for row in rows)
    patches, width = 81, 32
    pixels, projector = 48 * width * patches, width * 32 * 9
    layer = (4 * 48 + 3 * 40) * width * patches + 2 * 48 * patches**2
    assert rows[1]["tflop"] == pytest.approx(2 * 2 * (pixels + projector + 3 * layer) / 1e12)


def test_work_of_released_towers_is_what_is_known() -> None:
    """At 1,120 tokens, in TFLOP."""
    known = {
        "gemma-4-31b": 23.7,
        "gemma-4-26b-a4b": 23.7,
        "gemma-4-e4b": 8.05,
        "gemma-4-e2b": 8.05,
        "gemma-4-12b": 0.092,
    }
    for name, expected in known.items():
        config = find_media(name)
        assert config is not None
        assert config.vision is not None
        found = tflop(config.vision, config.hidden_size, 1120 * config.vision.pooling**2)
        assert found == pytest.approx(expected, rel=0.01)


class PlayedGraph:
    """In place of a CUDA graph: a replay computes anew what `forward` left where it left it."""

    def __init__(self, forwards: list[tuple[Tensor, Tensor]]) -> None:
        self.forwards = forwards
        self.is_reset = False

    @contextmanager
    def captured(self) -> Iterator[None]:
        yield
        self.given, self.left = self.forwards[-1]
        self.left.fill_(-1)  # a capture computes nothing

    def replay(self) -> None:
        assert not self.is_reset
        self.left.copy_(2 * self.given)

    def reset(self) -> None:
        self.is_reset = True

    def pool(self) -> str:
        return "pool"


def test_a_shape_that_comes_again_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PlayedGraph] = []
    pools: list[Any] = []
    forwards: list[tuple[Tensor, Tensor]] = []

    def forward(given: Tensor, shape: int) -> Tensor:
        forwards.append((given, 2 * given))
        return forwards[-1][1]

    def graph() -> PlayedGraph:
        made.append(PlayedGraph(forwards))
        return made[-1]

    def capture(graph: PlayedGraph, pool: Any, capture_error_mode: str) -> Any:
        pools.append(pool)
        return graph.captured()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    run = graphs.ShapeGraphs(forward)

    def doubles(shape: int, value: float) -> Tensor:
        found = run(torch.full((shape,), value), shape)
        assert found.tolist() == [2 * value] * shape
        return found

    doubles(3, 1.0)
    assert not made
    second = doubles(3, 2.0)
    doubles(3, 3.0)
    assert second.tolist() == [4.0] * 3  # a later replay leaves it alone
    assert (len(made), len(forwards)) == (1, 2)
    for value in (1.0, 2.0):
        doubles(4, value)
    doubles(3, 4.0)  # so that 4 is the one that was used longest ago
    doubles(5, 1.0)
    assert [g.is_reset for g in made] == [False, True]
    assert pools == [None, "pool"]
    doubles(4, 5.0)
    doubles(4, 6.0)
    assert [g.is_reset for g in made] == [True, True, False]
