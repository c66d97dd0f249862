"""Gemma-4 from a GGUF file: what its keys say, and the tokens of the same weights in safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PROMPT, edit_tensors, logits
from gguf_files import (
    TYPES,
    Choose,
    Gguf,
    as_compressed_tensors,
    blocks_of,
    gguf_name,
    gguf_of,
    keys_of,
    rope_freqs,
)
from safetensors.torch import load_file
from tiny_gemma import BASE, CPU, VARIANTS, config_of, hf_greedy, load, make_target
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config import read_eos_ids, read_model_config, read_sampling, read_suppressed_ids
from kerngen.runtime.config_fields import RELEASED
from kerngen.runtime.engine import Engine
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import plan
from kerngen.runtime.gguf.ggml_types import PACKINGS
from kerngen.runtime.gguf.names import place_of
from kerngen.runtime.gguf.place import files_wanted, place_of_model
from kerngen.runtime.gguf.weights import GgufCheckpoint, GgufTensors
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import dense_weights, fallbacks
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import find_drafter, gguf_stem
from kerngen.runtime.weights import mapped
from kerngen.runtime.weights.layout import ModelWeights
from kerngen.runtime.weights.loader import load_model, planned_model
from kerngen.runtime.weights.opened import open_tensors
from kerngen.runtime.weights.repacked import leaves
from kerngen.runtime.world import Span, World
from kerngen.templates.common.w4.pack import dequantize, unpack
from kerngen.templates.common.w4.tiling import Packing
from kerngen.workload.workload import find_model

MODELS = ("gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e2b", "gemma-4-e4b")
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
EMBED = "model.embed_tokens.weight"
MOE: dict[str, Any] = {"moe_intermediate_size": 256}


def make(folder: Path, variant: str, **overrides: Any) -> None:
    """Of widths that blocks of 256 divide. The embedding is small: else the likeliest token is always the last one."""
    sizes = SIZES | (MOE if variant == "moe" else {}) | overrides
    make_target(folder, variant, **sizes)
    edit_tensors(folder, lambda tensors: tensors.update({EMBED: tensors[EMBED] * 0.1}))


def all_of(kind: str) -> Choose:
    return lambda name, values: kind if values.shape[-1] % TYPES[kind].block == 0 else "F32"


def greedy(model: Gemma4, count: int = 12) -> list[int]:
    engine = Engine(model, max_len=len(PROMPT) + count, max_batch=1)
    return list(engine.generate(PROMPT, max_new_tokens=count).tokens)


def planned(path: Path) -> ModelWeights:
    """What the kernels' backend would have."""
    return planned_model(
        path, read_model_config(path), KernelOps(Record(lambda *_: None, lambda _: None), torch.bfloat16)
    )


def quiet_load(place: Path, dtype: torch.dtype = torch.float32) -> Gemma4:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(decoded to|kept as they are).*")
        return load(place, dtype)


def q4_k_m_12b(name: str, values: Tensor) -> str:
    """Of llama.cpp's Q4_K_M: Q6_K for the embedding and half of attn_v and ffn_down."""
    if name.startswith("token_embd") or (name.endswith(("attn_v.weight", "ffn_down.weight")) and int(name[4]) % 2):
        return "Q6_K"
    return "Q4_K"


def q4_k_m_26b(name: str, values: Tensor) -> str:
    """Where a width is no multiple of 256: Q8_0, but for experts, Q4_K and Q5_1."""
    if "ffn_gate_up_exps" in name or "ffn_gate_exps" in name or "ffn_up_exps" in name:
        return "Q4_K"
    return "Q5_1" if "ffn_down_exps" in name else "Q8_0"


def imatrix_q4_0(name: str, values: Tensor) -> str:
    """Q4_1 in the first layer's ffn_down, the embedding in Q6_K."""
    return "Q4_1" if name == "blk.0.ffn_down.weight" else "Q6_K" if name.startswith("token_embd") else "Q4_0"


def q_of_qkv(name: str, values: Tensor) -> str:
    return "Q5_0" if name.endswith("attn_q.weight") else "Q4_0"


FILES: dict[str, tuple[str, Choose]] = {
    **{f"dense {kind}": ("dense", all_of(kind)) for kind in TYPES if kind in (
        "F16", "BF16", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")},
    "K = V, Q4_0": ("k_eq_v", all_of("Q4_0")),
    "K = V, Q4_K_M": ("k_eq_v", q4_k_m_12b),
    "experts, Q4_0": ("moe", all_of("Q4_0")),
    "experts, Q4_K_M": ("moe", q4_k_m_26b),
    "experts, Q6_K": ("moe", all_of("Q6_K")),
    "per-layer embeddings, Q4_0": ("shared_ple", all_of("Q4_0")),
    "per-layer embeddings, Q8_0": ("shared_ple", all_of("Q8_0")),
    "Q4_0 with an importance matrix": ("dense", imatrix_q4_0),
    "Q4_0 but for q": ("dense", q_of_qkv),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_tokens_are_those_of_the_same_weights_in_safetensors(tmp_path: Path, case: str) -> None:
    variant, choose = FILES[case]
    make(tmp_path, variant)
    path = gguf_of(tmp_path, choose).write(tmp_path / "m.gguf")
    ours, theirs = quiet_load(path), load(tmp_path)
    assert torch.equal(logits(ours), logits(theirs)), "both are fp32, and the same"
    tokens = greedy(ours)
    assert len(set(tokens)) > 2
    assert tokens == greedy(theirs)
    assert tokens == hf_greedy(Gemma4ForCausalLM.from_pretrained(tmp_path).eval(), PROMPT, len(tokens))


def up_in_q6_k(name: str, values: Tensor) -> str:
    return "Q6_K" if "ffn_up_exps" in name else q4_k_m_26b(name, values)


def forms_of_experts(path: Path) -> list[tuple[str, int, str, int]]:
    """Of each layer's gate and up, and down: format and group size."""
    each = [(moe.gate_up.format, moe.down.format) for layer in planned(path).layers if (moe := layer.moe)]
    return [(up.name, up.group_size, down.name, down.group_size) for up, down in each]


@pytest.mark.parametrize(("choose", "form"), [
    (all_of("Q4_0"), ("int4", 32, "int4", 32)), (all_of("Q8_0"), ("int8", 32, "int8", 32)),
    (all_of("BF16"), ("dense", 0, "dense", 0)), (up_in_q6_k, ("int8_min", 16, "int8_min", 32)),
])  # fmt: skip
def test_experts_whose_gate_and_up_are_apart(
    tmp_path: Path, choose: Choose, form: tuple[str, int, str, int]
) -> None:  # fmt: skip
    make(tmp_path, "moe")
    made = gguf_of(tmp_path, choose, split_experts=True)
    assert any("ffn_gate_exps" in name for name, *_ in made.tensors)
    path = made.write(tmp_path / "m.gguf")
    assert torch.equal(logits(quiet_load(path)), logits(load(tmp_path)))
    assert set(forms_of_experts(path)) == {form}


def test_a_file_of_the_package_gguf_is_read(tmp_path: Path) -> None:
    """Its own writer, whole and split, and its own quantiser."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install -e '.[dev]'")
    make(tmp_path, "moe")
    ours = gguf_of(tmp_path, all_of("Q8_0"))
    for split in (0, 20):
        path = tmp_path / f"theirs-{split}.gguf"
        writer = gguf.GGUFWriter(path, "gemma4", split_max_tensors=split)
        for name, value in ours.keys:
            if name != "general.architecture":
                kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)
                writer.add_key_value(name, value, gguf.GGUFValueType.UINT32 if kind.name == "INT32" else kind)
        for name, kind, shape, raw in ours.tensors:
            form = gguf.GGMLQuantizationType[kind]
            array = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(*shape[:-1], -1).numpy()
            writer.add_tensor(name, array.view("float32") if kind == "F32" else array, raw_dtype=form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (first, *_) = sorted(tmp_path.glob(f"theirs-{split}*"))
        assert torch.equal(logits(quiet_load(first)), logits(load(tmp_path)))


@pytest.mark.parametrize("variant", ["k_eq_v", "moe"])
def test_kernels_get_what_a_release_in_int4_gives_them(tmp_path: Path, variant: str) -> None:
    """The same codes and scales in the kernels' order, and so the same tokens. Such a release's embedding is dense."""
    (tmp_path / "ct").mkdir()
    make(tmp_path, variant)
    path = gguf_of(tmp_path, all_of("Q4_0")).write(tmp_path / "m.gguf")
    as_compressed_tensors(path, tmp_path / "ct")
    models = []
    for place in (path, tmp_path / "ct"):
        ops = KernelOps(Reference(), torch.bfloat16)
        config = read_model_config(place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models.append(load_model(place, config, ops))
    ours, theirs = (
        [leaf for leaf in leaves(weights) if not leaf[0].startswith(("embed.", "head."))] for weights in models
    )
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert any(name.endswith("packed") for name, _ in ours)
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other), name


def test_down_of_experts_has_a_form_of_its_own(tmp_path: Path) -> None:
    """Of Q4_0 with an importance matrix, some layers' ffn_down are Q4_1: scales of both are fp16 there. Where down is
    of floats all is dense.
    """
    make(tmp_path, "moe")
    kinds = {"blk.1.ffn_down_exps.weight": "Q4_1", "blk.2.ffn_down_exps.weight": "F16"}
    path = gguf_of(tmp_path, lambda name, _: kinds.get(name, "Q4_0")).write(tmp_path / "m.gguf")
    forms = [(up, down) for up, _, down, _ in forms_of_experts(path)]
    assert forms == [("int4", "int4"), ("int4", "int4_min"), ("dense", "dense"), ("int4", "int4")]
    dtypes = [
        {moe.gate_up.tensors[-1].dtype, moe.down.tensors[-1].dtype} for x in planned(path).layers if (moe := x.moe)
    ]
    assert dtypes == [{torch.bfloat16}, {torch.float16}, {torch.bfloat16}, {torch.bfloat16}]
    with pytest.warns(UserWarning, match=r"tensors 1 of Q4_0; kept as they are: tensors 34 of Q4_0, 1 of Q4_1"):
        assert torch.equal(logits(load(path)), logits(load(tmp_path)))


def test_matrices_of_several_types_are_packed_as_all_of_them(tmp_path: Path) -> None:
    make(tmp_path, "dense")
    path = gguf_of(tmp_path, q_of_qkv).write(tmp_path / "m.gguf")
    with warnings.catch_warnings(record=True, action="always") as caught:
        model = load(path)
    for layer in planned(path).layers:
        assert (layer.qkv.format.name, layer.out.format.name) == ("int8", "int4")
        assert (layer.gate_up.format.name, layer.down.format.name) == ("int4", "int4")
        assert layer.out.format.group_size == 32
    assert model.config.quant is not None
    assert model.config.quant.packing_of("model.layers.0.self_attn.k_proj") == Packing(32)
    (said,) = [str(w.message) for w in caught]
    assert said == "m.gguf: kept as they are: tensors 25 of Q4_0, 4 of Q5_0"


def q4_k_m_of_qkv(name: str, values: Tensor) -> str:
    return {"attn_q": "Q4_K", "attn_k": "Q4_0", "attn_v": "Q6_K", "ffn_up": "Q4_1"}.get(name.split(".")[-2], "Q4_0")


def test_minima_and_groups_of_16_go_to_the_others_of_a_matrix(tmp_path: Path) -> None:
    make(tmp_path, "dense")
    path = gguf_of(tmp_path, q4_k_m_of_qkv).write(tmp_path / "m.gguf")
    layer = planned(path).layers[0]
    assert (layer.qkv.format.name, layer.qkv.format.group_size) == ("int8_min", 16)
    assert (layer.gate_up.format.name, layer.gate_up.format.group_size) == ("int4_min", 32)
    assert torch.equal(logits(quiet_load(path)), logits(load(tmp_path)))


def test_where_a_part_is_of_floats_the_matrix_is_dense(tmp_path: Path) -> None:
    make(tmp_path, "dense")
    path = gguf_of(tmp_path, lambda name, _: "F16" if "attn_v" in name else "Q8_0").write(tmp_path / "m.gguf")
    assert [view.format.name for layer in planned(path).layers for view in (layer.qkv, layer.out)] == (
        ["dense", "int8"] * len(planned(path).layers)
    )


@pytest.mark.parametrize("choose", [all_of("Q4_0"), q4_k_m_26b])
def test_each_byte_is_read_once_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    """Codes, scales and minima of a block come of the same piece."""
    make(tmp_path, "moe")
    made = gguf_of(tmp_path, choose)
    path = made.write(tmp_path / "m.gguf")
    told: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    steps = mapped.MappedFile._steps

    def watched(file: mapped.MappedFile, *how: Any) -> Iterator[tuple[int, int, int]]:
        for row, start, stop in steps(file, *how):
            read.append((start, stop))
            yield row, start, stop

    monkeypatch.setattr(mapped.MappedFile, "_steps", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ops = TorchOps(CPU, torch.float32)
        load_model(path, read_model_config(path), ops, advance=lambda done, total: told.append((done, total)))
    stored = sum(len(raw) for name, _, _, raw in made.tensors if name != "rope_freqs.weight")
    assert told[-1] == (stored, stored)
    assert told == sorted(told)
    assert sum(stop - start for start, stop in read) == stored
    read.sort()
    assert all(stop <= start for (_, stop), (start, _) in pairwise(read))


def test_what_bf16_rounds_of_the_scales_is_told(tmp_path: Path) -> None:
    make(tmp_path, "dense")
    path = gguf_of(tmp_path, all_of("Q4_0")).write(tmp_path / "m.gguf")
    with pytest.warns(UserWarning, match=r"m\.gguf: [\d,]+ of [\d,]+ scales of Q4_0 are no bfloat16 and were rounded"):
        load(path, torch.bfloat16)
    for dtype in (torch.float16, torch.float32):
        with warnings.catch_warnings(record=True, action="always") as caught:
            load(path, dtype)
        assert not [w for w in caught if "rounded" in str(w.message)]


def test_in_fp16_scales_are_what_the_file_has(tmp_path: Path) -> None:
    make(tmp_path, "dense")
    path = gguf_of(tmp_path, all_of("Q4_0")).write(tmp_path / "m.gguf")
    checkpoint = open_tensors(path)
    assert checkpoint.dtype("model.layers.0.self_attn.o_proj.weight_scale") == "F16"
    words, scales = (
        checkpoint.tensor(f"model.layers.0.self_attn.o_proj.weight_{part}") for part in ("packed", "scale")
    )
    model = quiet_load(path, torch.float16)
    assert torch.equal(model.weights.layers[0].out.weight, dequantize(words, scales, torch.float16))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_1", "Q6_K", "Q8_0"])
def test_an_mlp_beyond_the_range_of_fp16_is_moved_into_it(tmp_path: Path, kind: str) -> None:
    make(tmp_path, "dense")
    gate_up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name] * 4096 for name in gate_up}))
    path = gguf_of(tmp_path, all_of(kind)).write(tmp_path / "m.gguf")
    ours, theirs = quiet_load(path, torch.float16), quiet_load(path)
    up, same = (model.weights.layers[0].gate_up.weight[-256:].float() for model in (ours, theirs))  # behind gate's rows
    assert up.abs().max() < same.abs().max() / 2
    apart = logits(ours).float() - logits(theirs)
    assert apart.abs().max() < 0.05 * logits(theirs).abs().max()


def test_experts_beyond_the_range_of_fp16_are_moved_into_it(tmp_path: Path) -> None:
    make(tmp_path, "moe")
    name = "model.layers.0.experts.gate_up_proj"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name] * 4096}))
    path = gguf_of(tmp_path, q4_k_m_26b).write(tmp_path / "m.gguf")
    ours, theirs = quiet_load(path, torch.float16), quiet_load(path)
    of_ours, of_theirs = ours.weights.layers[0].moe, theirs.weights.layers[0].moe
    assert of_ours is not None
    assert of_theirs is not None
    gate, same = (moe.gate_up.weight[:, :256].float() for moe in (of_ours, of_theirs))
    up, raised = (moe.gate_up.weight[:, 256:].float() for moe in (of_ours, of_theirs))
    assert (gate - same).abs().max() < 0.01 * same.abs().max()
    assert up.abs().max() < raised.abs().max() / 2
    apart = logits(ours).float() - logits(theirs)
    assert apart.abs().max() < 0.05 * logits(theirs).abs().max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K"])
def test_parts_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Boxes that ranks ask for, in pieces, also where they begin within a block."""
    make(tmp_path, "moe")
    checkpoint = GgufCheckpoint(gguf_of(tmp_path, all_of(kind)).write(tmp_path / "m.gguf"))
    monkeypatch.setattr(mapped, "PIECE_BYTES", 8192)
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        if len(shape) < 2:
            continue
        whole = checkpoint.tensor(name)
        box = tuple(Span(n // 4, n // 2, n) for n in shape)
        pieces = list(checkpoint.pieces(name, box=box))
        assert pieces[0][0] == 0
        part = torch.cat([piece for _, piece in pieces])
        assert torch.equal(part, whole[tuple(span.slice for span in box)]), name
        assert torch.equal(torch.cat([piece for _, piece in checkpoint.pieces(name)]), whole)
    assert any(isinstance(file, GgufTensors) for file in checkpoint.files)


@pytest.mark.parametrize(("variant", "choose"), [("dense", all_of("Q4_0")), ("moe", q4_k_m_26b)])
def test_a_divided_model_reads_its_parts(tmp_path: Path, variant: str, choose: Choose) -> None:
    make(tmp_path, variant, num_key_value_heads=2)
    path = gguf_of(tmp_path, choose).write(tmp_path / "m.gguf")
    whole = quiet_load(path).weights.layers[0]
    config = read_model_config(path)
    for rank in range(2):
        mine = config.divided(World(rank, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weights = load_model(path, mine, TorchOps(CPU, torch.float32))
        part, layer = mine.q_span.times(32), weights.layers[0]
        assert part.size == 128
        assert torch.equal(layer.qkv.weight[: part.size], whole.qkv.weight[part.slice])
        assert torch.equal(layer.out.weight, whole.out.weight[:, part.slice])
        if layer.moe is not None and whole.moe is not None:
            inner = mine.expert_span
            halves = [half[:, inner.slice] for half in whole.moe.gate_up.weight.chunk(2, 1)]
            assert torch.equal(layer.moe.gate_up.weight, torch.cat(halves, 1))
            assert torch.equal(layer.moe.down.weight, whole.moe.down.weight[..., inner.slice])


# ---- the embedding -------------------------------------------------------------------------------------------------


def embedding_of(kind: str) -> Choose:
    return lambda name, values: kind if name.startswith("token_embd") else "Q8_0" if values.dim() == 2 else "F32"


def on_kernels(path: Path, dtype: torch.dtype = torch.bfloat16, world: World | None = None) -> ModelWeights:
    """As the kernels' backend has it."""
    config = read_model_config(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config if world is None else config.divided(world)
        return load_model(path, config, KernelOps(Reference(), dtype))


def decoded_embedding(weights: ModelWeights, folder: Path, dtype: torch.dtype) -> ModelWeights:
    """The same with the table that the file's blocks are decoded to."""
    dense = dense_weights(load_file(folder / "model.safetensors")[EMBED].to(dtype))
    return replace(weights, embed=dense, head=dense)


@pytest.mark.parametrize(("kind", "form", "is_exact", "is_screened"), [
    ("Q6_K", ("int8", 16), False, True), ("Q8_0", ("int8", 32), True, True), ("Q5_1", ("int8_min", 32), True, True),
    ("Q4_0", ("int4", 32), True, False), ("Q4_K", ("int4_min", 32), False, False),
])  # fmt: skip
def test_an_embedding_stays_packed_for_lookup_and_head(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    form: tuple[str, int],
    is_exact: bool,
    is_screened: bool,
) -> None:
    """Its rows are what the blocks decode to, but for what fp16 rounds of scales, and its tokens the same."""
    monkeypatch.setitem(BASE, "global_head_dim", 128)  # that kernels take
    make(tmp_path, "dense", head_dim=128, num_attention_heads=4)
    path = gguf_of(tmp_path, embedding_of(kind)).write(tmp_path / "m.gguf")
    config, ids = read_model_config(path), torch.arange(96)
    weights = on_kernels(path)
    assert (weights.embed.format.name, weights.embed.format.group_size) == form
    assert all(ours is theirs for ours, theirs in zip(weights.embed.tensors, weights.head.tensors, strict=True))
    assert weights.embed.scales.dtype == torch.float16
    ours, theirs = (
        Gemma4(config, each, KernelOps(Reference(), torch.bfloat16), suppressed_ids=[5])
        for each in (weights, decoded_embedding(weights, tmp_path, torch.bfloat16))
    )
    assert (ours.screen is not None) == is_screened
    rows, wanted = ours.embed(ids), theirs.embed(ids)
    assert torch.equal(rows, wanted) == is_exact
    assert torch.allclose(rows.float(), wanted.float(), rtol=2**-7, atol=2**-7 * float(wanted.std()))
    hidden = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    assert torch.equal(ours.greedy(hidden), theirs.greedy(hidden))
    assert torch.equal(ours.greedy(hidden, screened=False), theirs.greedy(hidden, screened=False))
    bits, of_group = (8 if form[0].startswith("int8") else 4), 4 if form[0].endswith("min") else 2
    assert weights.embed.num_bytes == 96 * (256 * bits // 8 + 256 // form[1] * of_group)
    if is_exact:
        tokens = greedy(ours, 6)
        assert len(set(tokens)) > 2
        assert tokens == greedy(theirs, 6)


def test_a_ranks_head_is_some_strips_of_a_packed_embedding(tmp_path: Path) -> None:
    make(tmp_path, "dense", num_key_value_heads=2, vocab_size=128)
    path = gguf_of(tmp_path, embedding_of("Q6_K")).write(tmp_path / "m.gguf")
    whole = on_kernels(path)
    for rank in range(2):
        weights = on_kernels(path, world=World(rank, 2))
        assert torch.equal(weights.embed.packed, whole.embed.packed), "all of it is looked up"
        assert weights.head.rows == Span(64 * rank, 64, 128)
        assert torch.equal(weights.head.packed, whole.head.packed[2 * rank : 2 * rank + 2])
        assert torch.equal(weights.head.scales, whole.head.scales[2 * rank : 2 * rank + 2])
        assert weights.head.packed.untyped_storage().data_ptr() == weights.embed.packed.untyped_storage().data_ptr()
        dense = dense_weights(dequantize(*unpack(weights.head.packed, weights.head.scales), torch.bfloat16))
        hidden, ids = torch.ones(3, 256, dtype=torch.bfloat16), torch.tensor([3, 63, 32])
        assert torch.equal(fallbacks.logit_of(hidden, weights.head, ids), fallbacks.logit_of(hidden, dense, ids))


def test_where_strips_do_not_serve_an_embedding_is_decoded(tmp_path: Path) -> None:
    """Rows of ranks that begin within a strip, and a file with a head of its own."""
    make(tmp_path, "dense", num_key_value_heads=2)
    made = gguf_of(tmp_path, embedding_of("Q8_0"))
    path = made.write(tmp_path / "m.gguf")
    rank = on_kernels(path, world=World(1, 2))  # 48 of 96 rows
    assert rank.embed.is_dense
    assert torch.equal(rank.embed.weight, load_file(tmp_path / "model.safetensors")[EMBED].bfloat16())
    assert torch.equal(rank.head.weight, rank.embed.weight[48:])
    (table,) = [tensor for tensor in made.tensors if tensor[0] == "token_embd.weight"]
    made.tensors.append(("output.weight", *table[1:]))
    weights = on_kernels(made.write(tmp_path / "own.gguf"))
    assert weights.embed.is_dense
    assert weights.head.weight is weights.embed.weight, "a copy"


def test_a_plan_counts_a_packed_embedding_once(tmp_path: Path) -> None:
    make(tmp_path, "dense")
    path = gguf_of(tmp_path, embedding_of("Q6_K")).write(tmp_path / "m.gguf")
    weights = on_kernels(path)
    stored = {t.untyped_storage().data_ptr(): t.numel() * t.element_size() for _, t in leaves(weights)}
    assert plan(read_model_config(path), None, torch.bfloat16).weight_bytes == sum(stored.values())


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_say_what_config_json_says(tmp_path: Path, variant: str) -> None:
    make_target(tmp_path, variant)
    theirs = config_of(tmp_path)
    ours = read_model_config(gguf_of(tmp_path, all_of("F32")).write(tmp_path / "m.gguf"))
    assert replace(ours, eos_ids=theirs.eos_ids) == theirs


@cache
def released(name: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """A released model's text_config, and its tensors' shapes by transformers' names."""
    text = json.loads((RELEASED / name / "config.json").read_text())["text_config"]
    with torch.device("meta"):
        model = Gemma4ForCausalLM(Gemma4TextConfig(**text))
    return text, {n: tuple(t.shape) for n, t in model.state_dict().items() if n != "lm_head.weight"}


def released_file(name: str, choose: Callable[[str, tuple[int, ...]], str]) -> Gguf:
    """All of a released model's file but its weights' bytes and its tokenizer."""
    text, shapes = released(name)
    made = Gguf(list(keys_of(text).items()))
    freqs = rope_freqs(text)
    made.tensors.append(("rope_freqs.weight", "F32", tuple(freqs.shape), blocks_of(freqs, "F32", torch.Generator())))
    for theirs, shape in shapes.items():
        ours = gguf_name(theirs)
        kind = "F32" if len(shape) == 1 or "ffn_gate_inp" in ours else choose(ours, shape)
        made.tensors.append((ours, kind, shape, b""))
    return made


@pytest.mark.parametrize("name", MODELS)
def test_released_models_are_recognised(tmp_path: Path, name: str) -> None:
    path = released_file(name, lambda *_: "Q4_0").write_sparse(tmp_path / f"{name}.gguf")
    ours, theirs = read_model_config(path), read_model_config(RELEASED / name)
    assert replace(ours, quant=theirs.quant, eos_ids=theirs.eos_ids) == theirs
    assert ours.quant is not None
    assert ours.quant.group_size == 32
    assert find_model(str(path)).target == ours


# Google's own files, by their sizes, of which 16 MB are a tokenizer. The embedding is in Q6_K.
QAT = {"gemma-4-12b": 6_975_877_728, "gemma-4-26b-a4b": 14_439_361_440, "gemma-4-31b": 17_650_999_456}
COUNTS = {"gemma-4-12b": 667, "gemma-4-26b-a4b": 658, "gemma-4-31b": 833}


@pytest.mark.parametrize("name", QAT)
def test_files_of_q4_0_have_the_sizes_of_googles(tmp_path: Path, name: str) -> None:
    """So the tensors and the types that are thought of here are those that are there."""
    made = released_file(name, lambda ours, _: "Q6_K" if ours.startswith("token_embd") else "Q4_0")
    assert len(made.tensors) == COUNTS[name]
    left = QAT[name] - made.write_sparse(tmp_path / "m.gguf").stat().st_size
    assert 15_700_000 < left < 15_900_000


def test_a_file_of_the_26b_in_q4_k_m_is_sized(tmp_path: Path) -> None:
    made = released_file("gemma-4-26b-a4b", lambda ours, _: q4_k_m_26b(ours, torch.empty(0)))
    kinds = [kind for _, kind, _, _ in made.tensors]
    assert {k: kinds.count(k) for k in set(kinds)} == {"Q8_0": 206, "Q4_K": 30, "Q5_1": 30, "F32": 392}
    found = find_model(str(made.write_sparse(tmp_path / "m.gguf")))
    as_bf16 = plan(read_model_config(RELEASED / "gemma-4-26b-a4b"), None, torch.bfloat16, dense=True)
    saved = sum(
        prod(shape) * 2 - PACKINGS[kind].bytes_of(prod(shape[:-1]), shape[-1])  # in place of bf16
        for _, kind, shape, _ in made.tensors
        if kind in PACKINGS
    )
    takes = plan(found.target, None, torch.bfloat16).weight_bytes
    assert takes == as_bf16.weight_bytes - saved
    assert 20.6e9 < takes < 20.7e9


def test_minima_of_a_mixture_are_counted(tmp_path: Path) -> None:
    def choose(ours: str, shape: tuple[int, ...]) -> str:
        return "Q4_1" if ours.startswith(("blk.0.", "blk.1.")) and "ffn_down" in ours else "Q4_0"

    sizes = [
        plan(find_model(str(released_file("gemma-4-12b", kinds).write_sparse(tmp_path / f"{i}.gguf"))).target, None,
             torch.bfloat16).weight_bytes
        for i, kinds in enumerate((choose, lambda *_: "Q4_0"))
    ]  # fmt: skip
    assert sizes[0] - sizes[1] == 2 * 3840 * 15360 // 32 * 2


def test_names_are_those_of_the_package_gguf() -> None:
    """Of every tensor of every released model; two scales have no entry there, the converter names them itself."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install -e '.[dev]'")
    unnamed = set()
    for name in MODELS:
        text, shapes = released(name)
        theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text["num_hidden_layers"])
        for full in shapes:
            ours, found = gguf_name(full), theirs.get_name(full, try_suffixes=(".weight",))
            place = place_of(ours)
            assert place is not None
            assert place.name == full
            if found is None:
                unnamed.add(ours.split(".", 2)[2])
            else:
                assert ours in (found, f"{found}.weight")
    assert unnamed == {"ffn_gate_inp.scale", "ffn_down_exps.scale"}


def base_file(tmp_path: Path, **overrides: Any) -> Gguf:
    make_target(tmp_path, "dense", **overrides)
    return gguf_of(tmp_path, all_of("F32"))


def without(name: str) -> Callable[[Gguf], object]:
    return lambda made: setattr(made, "tensors", [t for t in made.tensors if t[0] != name])


def with_tensor(name: str, values: Tensor) -> Callable[[Gguf], object]:
    def change(made: Gguf) -> None:
        without(name)(made)
        made.tensors.append((name, "F32", tuple(values.shape), blocks_of(values, "F32", torch.Generator())))

    return change


def key(name: str, value: Any) -> Callable[[Gguf], object]:
    return lambda made: made.set(name, value)


def no_key(name: str) -> Callable[[Gguf], object]:
    return lambda made: made.drop(name)


def retyped(name: str, kind: str, num_bytes: int) -> Callable[[Gguf], object]:
    def change(made: Gguf) -> None:
        made.tensors = [(n, kind, s, bytes(num_bytes)) if n == name else (n, k, s, r) for n, k, s, r in made.tensors]

    return change


HALF = BASE["global_head_dim"] // 2
WRONG: dict[str, tuple[Callable[[Gguf], object], str]] = {
    "no architecture": (no_key("general.architecture"), "the key general.architecture is missing"),
    "no layers": (no_key("gemma4.block_count"), "the key gemma4.block_count is missing"),
    "no rope_freqs": (without("rope_freqs.weight"), "has no rope_freqs.weight"),
    "rope_freqs of another head": (with_tensor("rope_freqs.weight", torch.ones(HALF + 1)),
        "rope_freqs.weight has 17 numbers"),
    "a rope that is scaled in part": (
        with_tensor("rope_freqs.weight", torch.tensor([1.0] * 4 + [8.0] * (HALF - 4))), "first 4 times 1, then [8.0]"),
    "rope_freqs of nothing that turns": (with_tensor("rope_freqs.weight", torch.full((HALF,), 1e30)),
        "first 0 times 1"),
    "a scaled rope": (key("gemma4.rope.scaling.type", "yarn"), "gemma4.rope.scaling.type is yarn"),
    "a cap of attention": (key("gemma4.attn_logit_softcapping", 50.0), "no released Gemma-4 has it"),
    "heads that do not agree": (key("gemma4.rope.dimension_count", 16),
        "gemma4.rope.dimension_count is 16; key_length is 32"),
    "heads by layer that differ": (key("gemma4.attention.head_count", [4, 4, 4, 8]),
        "head_count differs between layers"),
    "KV heads of too few layers": (key("gemma4.attention.head_count_kv", [2, 2]), "has 2 numbers of 4 layers"),
    "no KV heads": (key("gemma4.attention.head_count_kv", [2, 0, 2, 2]), "or one that is 0"),
    "a pattern of too few layers": (key("gemma4.attention.sliding_window_pattern", [True, False]), "is of 2 layers"),
    "a last layer that slides": (key("gemma4.attention.sliding_window_pattern", [True] * 4),
        "the last layer is sliding"),
    "widths that nobody has": (key("gemma4.feed_forward_length", [48, 48, 96, 48]),
        "those with a cache have one width"),
    "no V in a sliding layer": (without("blk.1.attn_v.weight"), "attn_v is missing"),
    "rows of another width": (key("gemma4.embedding_length", 64), "token_embd.weight has the shape [96, 32]"),
    "no embedding": (without("token_embd.weight"), "it lacks the tensor token_embd.weight"),
    "a tensor that is no Gemma's": (with_tensor("blk.0.attn_q.bias", torch.ones(64)),
        "it holds blk.0.attn_q.bias [64], which"),
    "a type without a decoder": (retyped("blk.0.attn_q.weight", "I16", 64 * 32 * 2),
        "the type I16 is not read; F32, F16"),
    "many layers": (key("gemma4.block_count", 1 << 30), "gemma4.block_count is 1073741824"),
    "no theta of sliding layers": (no_key("gemma4.rope.freq_base_swa"), "gemma4.rope.freq_base_swa is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused_of_keys_and_tensors(tmp_path: Path, case: str) -> None:
    change, words = WRONG[case]
    made = base_file(tmp_path)
    change(made)
    path = made.write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError) as error:
        read_model_config(path)
    assert words in error.value.message
    assert str(path) in error.value.message


MISSING: dict[str, tuple[Callable[[Gguf], object], str]] = {
    "a matrix": (without("blk.2.ffn_up.weight"),
        "lacks the tensor model.layers.2.mlp.up_proj.weight [48, 32] that its metadata"),
    "a norm of another width": (with_tensor("blk.1.attn_norm.weight", torch.ones(31)),
        "has shape [31]; metadata implies [32]"),
    "a layer too many": (with_tensor("blk.9.attn_norm.weight", torch.ones(32)),
        "which its metadata does not account for"),
    "NaN": (with_tensor("blk.1.attn_norm.weight", torch.full((32,), torch.nan)),
        "holds NaN or infinity: 32 of 32 values"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_tensors_that_keys_do_not_imply(tmp_path: Path, case: str) -> None:
    change, words = MISSING[case]
    made = base_file(tmp_path)
    change(made)
    with pytest.raises(CheckpointError) as error:
        load(made.write(tmp_path / "m.gguf"))
    assert words in error.value.message


@pytest.mark.parametrize(("arch", "words"), [
    ("gemma3", "holds a model of the architecture 'gemma3'"), ("gemma4-assistant", "holds a drafter"),
    ("clip", "what embeds images and sound"),
])  # fmt: skip
def test_other_architectures_are_refused_with_the_way_on(tmp_path: Path, arch: str, words: str) -> None:
    path = Gguf([("general.architecture", arch)]).write(tmp_path / "m.gguf")
    with pytest.raises(UsageError) as error:
        read_model_config(path)
    assert words in error.value.message
    assert error.value.hint is not None


@pytest.mark.parametrize(("change", "words"), [
    (key("gemma4.final_logit_softcapping", 25.0), "another logit_cap: 25.0, not 30.0"),
    (key("gemma4.attention.sliding_window", 4096), "another layers: LayerConfig(index=0"),
    (key("gemma4.rope.freq_base_swa", 1e6), "another rope"),
    (no_key("gemma4.final_logit_softcapping"), "another logit_cap: 0.0, not 30.0"),
])  # fmt: skip
def test_a_released_models_sizes_with_another_arithmetic(
    tmp_path: Path, change: Callable[[Gguf], object], words: str
) -> None:
    made = released_file("gemma-4-12b", lambda *_: "Q4_0")
    change(made)
    with pytest.raises(CheckpointError, match="it has the sizes of gemma-4-12b") as error:
        read_model_config(made.write_sparse(tmp_path / "m.gguf"))
    assert words in error.value.message


def test_what_ends_an_answer_and_how_it_is_drawn(tmp_path: Path) -> None:
    made = base_file(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *map(str, range(40)), "<turn|>"]
    made.set("tokenizer.ggml.tokens", tokens)
    made.keys += [("tokenizer.ggml.eos_token_id", 44), ("tokenizer.ggml.eot_token_id", 7)]
    assert read_sampling(made.write(tmp_path / "m.gguf")) == {"temperature": 0.0}
    made.keys += [("general.sampling.temp", 1.0), ("general.sampling.top_k", 64), ("general.sampling.top_p", 0.95)]
    path = made.write(tmp_path / "n.gguf")
    config = read_model_config(path)
    assert read_eos_ids(path, config) == config.eos_ids == (1, 44, 7)
    assert read_sampling(path) == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 50]}')
    assert read_eos_ids(path, config) == (1, 44, 7, 50), "what lies beside the file is read, too"


def test_tokens_that_the_12b_never_makes_are_known_without_its_generation_config(tmp_path: Path) -> None:
    made = released_file("gemma-4-12b", lambda *_: "Q4_0")
    made.set("tokenizer.ggml.tokens", ["<bos>", "<image|>", "a", "<audio|>"])
    assert read_suppressed_ids(made.write_sparse(tmp_path / "m.gguf")) == (3, 1)
    other = released_file("gemma-4-e2b", lambda *_: "Q4_0")
    other.set("tokenizer.ggml.tokens", ["<bos>", "<image|>", "a", "<audio|>"])
    assert read_suppressed_ids(other.write_sparse(tmp_path / "n.gguf")) == ()


# ---- places --------------------------------------------------------------------------------------------------------


def test_a_folder_stands_for_the_one_file_in_it(tmp_path: Path) -> None:
    assert place_of_model(tmp_path) == tmp_path
    first = Gguf().write(tmp_path / "m-00001-of-00002.gguf")
    for other in ("m-00002-of-00002.gguf", "mmproj-F16.gguf", "x.txt"):
        Gguf().write(tmp_path / other)
    assert place_of_model(tmp_path) == first
    assert place_of_model(first) == first
    Gguf().write(tmp_path / "n.gguf")
    with pytest.raises(UsageError, match=r"holds 2 GGUF files: m-00001-of-00002\.gguf, n\.gguf") as error:
        place_of_model(tmp_path)
    assert error.value.hint == f"name one: {first}"
    (tmp_path / "config.json").write_text("{}")
    assert place_of_model(tmp_path) == tmp_path, "it is a folder of safetensors"


def test_what_is_wanted_of_a_repository() -> None:
    assert files_wanted("m-Q4_0.gguf") == ["m-Q4_0.gguf", "tokenizer.json", "generation_config.json"]
    assert files_wanted("BF16/m-00001-of-00002.gguf")[:2] == ["BF16/m-*-of-00002.gguf", "BF16/tokenizer.json"]


@pytest.mark.parametrize(("name", "stem"), [
    ("gemma-4-26B-A4B-it-UD-Q4_K_XL.gguf", "gemma-4-26B-A4B-it"), ("gemma-4-31b-it-qat-q4_0.gguf", "gemma-4-31b-it"),
    ("gemma-4-31B-it-BF16-00001-of-00002.gguf", "gemma-4-31B-it"), ("gemma-4-31b-it.gguf", "gemma-4-31b-it"),
    ("gemma-4-12b-it.IQ4_XS.gguf", "gemma-4-12b-it"), ("gemma-4-E4B-it-MXFP4_MOE.gguf", "gemma-4-E4B-it"),
])  # fmt: skip
def test_the_drafter_of_a_file(tmp_path: Path, name: str, stem: str) -> None:
    assert gguf_stem(name) == stem
    assert find_drafter(tmp_path / name) is None
    drafter = tmp_path / f"{stem}-assistant"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"GGUF")
    assert find_drafter(tmp_path / name) == drafter
