"""The workloads against the published sizes of the models, and against what the runtime asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kerngen.arch import ARCHES, Target, find_arch
from kerngen.errors import CheckpointError, KerngenError, UnknownName, UsageError
from kerngen.runtime.config import MAX_MTP_DRAFTS
from kerngen.runtime.fallbacks import FALLBACKS
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of
from kerngen.workload.workload import BATCHES, CONTEXTS, MODELS, VERIFY_LENS, Item, find_model, find_workload, workload

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.mark.parametrize(("model", "params_m"), [
    # Quantised weights of a decode step, in millions, from the models' published parameter counts.
    ("gemma-4-31b", 50 * 478.94 + 10 * 533.99),
    ("gemma-4-12b", 10_900),
    ("gemma-4-e4b", 3_973),
    ("gemma-4-e2b", 1_877),
    ("gemma-4-26b-a4b", 25 * 34.60 + 5 * 49.02 + 30 * 17.84),
])  # fmt: skip
def test_gemms_add_up_to_the_published_sizes(model: str, params_m: float) -> None:
    """Launch by launch, as long contexts go, and where one kernel takes all layers of a token."""
    for arch, context in (("sm89", 512), ("sm90", 512), ("sm90", 131072), ("sm90", 262144)):
        if context > find_model(model).target.max_positions:
            continue
        asked = list(find_workload(model, find_arch(arch)).step("decode", 1, context))
        weights = sum(i.problem.n * i.problem.k * n for i, n in asked if i.kernel == "w4a16_gemm")
        # per-layer gates and projections are kept in 16 bits: a kernel of their own multiplies with both
        weights += sum(2 * i.problem.hidden * i.problem.width * n for i, n in asked if i.kernel == "ple_block")
        together = [i.problem for i, _ in asked if i.kernel == "decode_layers"]
        is_long = model == "gemma-4-31b" and context == 262144
        assert len(together) == (arch == "sm90" and not is_long)
        weights += sum(_weights(p) for p in together)
        assert weights / 1e6 == pytest.approx(params_m, rel=5e-4)


@pytest.mark.parametrize("model", list(MODELS))
def test_a_chunk_of_a_prefill_reads_every_quantised_matrix_once(model: str) -> None:
    load = find_workload(model, find_arch("sm89"))

    def weights(step: Iterator[tuple[Item, int]]) -> int:
        return sum(i.problem.n * i.problem.k * n for i, n in step if i.kernel == "w4a16_gemm")

    expected = weights(load.step("decode", 1, 512))
    for chunk, keys in ((2048, 2048), (512, 2048), (512, 32768), (64, 512), (1, 2048)):
        assert weights(load.step("prefill", 1, keys, chunk=chunk)) == expected, f"{chunk} tokens of {keys}"


def _weights(p: Any) -> int:
    """Those of decode_layers' matrices, without the experts'."""
    matrices = [matrix for letter in p.layers for matrix in p.matrices(letter)[:4]]
    return sum(n * k for n, k in matrices) + len(p.layers) * 2 * p.ple_width * p.hidden


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("arch", list(ARCHES))
def test_every_problem_is_supported_and_has_a_default(model: str, arch: str) -> None:
    a = find_arch(arch)
    load = find_workload(model, a)
    assert set(load.missing) == {"dense matrices"}
    assert set(load.missing) <= set(FALLBACKS)
    assert len({(i.kernel, i.problem) for i in load.items}) == len(load.items), "a problem is listed twice"
    for item in load.items:
        kernel = find_kernel(item.kernel)
        assert kernel.why_unsupported(item.problem, Target.of(a)) is None
        dtype = "bf16" if a.has_bf16 else "fp16"
        assert fields_of(item.problem).get("dtype", dtype) == dtype  # integers alone have none
        assert item.uses
    for item in {i.kernel: i for i in load.items}.values():
        kernel = find_kernel(item.kernel)
        assert kernel.why_invalid(item.problem, kernel.default_config(item.problem, Target.of(a)), Target.of(a)) is None


def test_only_the_mixture_of_experts_routes() -> None:
    for model in MODELS:
        kernels = {i.kernel for i in find_workload(model, find_arch("sm90")).items}
        assert ("moe_router" in kernels) == (model == "gemma-4-26b-a4b")


def test_steps_hold_every_layer_once() -> None:
    load = find_workload("gemma-4-31b", find_arch("sm70"))
    for context in (1, 512, 8192, 100_000):
        attention = [(i.problem, n) for i, n in load.step("decode", 1, context) if i.kernel == "attn_decode"]
        assert sum(n for _, n in attention) == 60
        assert {(p.window, n) for p, n in attention} == {(1024, 50), (0, 10)}
        full, windowed = (next(p for p, _ in attention if bool(p.window) == w) for w in (False, True))
        assert full.kv_len == min(c for c in CONTEXTS if c >= context)
        assert windowed.kv_len == min(full.kv_len, 1024), "longer contexts are the same to a window"
    for chunk, keys in ((2048, 2048), (512, 2048), (64, 131072), (1024, 1024)):
        attention = [
            (i.problem, n) for i, n in load.step("prefill", 1, keys, chunk=chunk) if i.kernel == "attn_prefill"
        ]
        assert {(p.window, p.num_tokens, n) for p, n in attention} == {(1024, chunk, 50), (0, chunk, 10)}
        assert {p.kv_len for p, _ in attention if not p.window} == {keys}
    draft = [(i.problem, n) for i, n in load.step("draft", 1, 8192) if i.kernel == "attn_decode"]
    assert {(p.window, p.num_kv_heads, n) for p, n in draft} == {(1025, 16, 3), (0, 4, 1)}


def test_verification_covers_every_batch() -> None:
    load = find_workload("gemma-4-12b", find_arch("sm90"))
    seen = {(i.problem.batch, i.problem.q_len) for i in load.items if i.kernel == "attn_decode"}
    assert seen >= {(b, q) for b in BATCHES for q in (1, *VERIFY_LENS)}
    assert {q for b, q in seen if b == 1} == set(range(1, MAX_MTP_DRAFTS + 2)), "every draft length that is permitted"
    tokens = [i.problem.num_tokens for i in load.items if i.kernel == "w4a16_gemm"]
    assert max(BATCHES) * max(VERIFY_LENS) <= max(t for t in tokens if t < 512)


def test_a_folder_gives_its_own_shapes() -> None:
    if not (TINY / "gemma-4-tiny-w4a16").is_dir():
        pytest.skip("examples/tiny holds no checkpoint")
    config = json.loads((TINY / "gemma-4-tiny-w4a16" / "config.json").read_text())
    config = config.get("text_config", config)
    model = find_model(str(TINY / "gemma-4-tiny-w4a16"), str(TINY / "gemma-4-tiny-assistant"))
    load = workload(model, find_arch("sm70"))
    embeds = {i.problem.hidden for i in load.items if i.kernel == "embed"}
    assert embeds == {config["hidden_size"]}
    assert {u.phase for i in load.items for u in i.uses} == {"decode", "verify", "prefill", "draft"}


def test_inside_vllm_a_model_asks_each_product_by_itself() -> None:
    """Gate and up with the gate and without, full layers with K once more as V and without; of a drafter the head."""
    model = find_model("gemma-4-31b").on("vllm")
    items = workload(model, find_arch("sm90")).items
    problems = [item.problem for item in items if item.kernel == "w4a16_gemm"]
    norms = [item.problem for item in items if item.kernel == "add_norm"]
    attention = [i for i in items if i.kernel in ("attn_decode", "attn_prefill", "kv_write", "qkv_norm_rope")]
    heads = [item for item in items if item.kernel == "greedy_head"]
    assert (
        len(problems) + len(norms) + len(attention) + len(heads)
        == len(items)
        == len({(i.kernel, i.problem) for i in items})
    )
    assert {(p.has_post, p.has_scalar, p.has_next) for p in norms} == {
        (True, False, True), (True, True, True), (True, True, False),
    }  # fmt: skip
    assert {(p.hidden, p.residual_dtype) for p in norms} == {(5376, "bf16")}
    sliding, full, without_v = (32 + 2 * 16) * 256, (32 + 2 * 4) * 512, (32 + 4) * 512
    assert {(p.n, p.k) for p in problems} == {
        (sliding, 5376), (full, 5376), (without_v, 5376), (5376, 32 * 256), (5376, 32 * 512), (2 * 21504, 5376),
        (5376, 21504),
    }  # fmt: skip
    for n in (full, without_v):
        assert {p.num_tokens for p in problems if p.n == n} >= {1, 2, 8, 64, 8192}
    assert {(p.head_dim, p.k_eq_v) for p in (i.problem for i in attention if i.kernel == "qkv_norm_rope")} == {
        (256, False), (512, False), (512, True),
    }  # fmt: skip
    assert {(p.n, p.k, p.row_invariant) for p in problems if p.gated} == {(2 * 21504, 5376, False)}
    for asked in ([p for p in problems if p.gated], [p for p in problems if p.n == 2 * 21504 and not p.gated], norms):
        assert {p.num_tokens for p in asked} >= {1, 2, 8, 64, 8192}
    with_ple = {
        (p.has_scalar, p.has_next)
        for kernel, p in (
            (i.kernel, i.problem) for i in workload(find_model("gemma-4-e4b").on("vllm"), find_arch("sm75")).items
        )
        if kernel == "add_norm" and p.residual_dtype == p.dtype == "fp16"
    }
    assert with_ple == {(False, True), (False, False), (True, True), (True, False)}
    assert {u.where for item in items for u in item.uses if u.count} >= {"down_proj (sliding)", "down_proj (full)"}
    (rank,) = find_model("gemma-4-31b").ranks(2)
    halves = workload(rank.on("vllm"), find_arch("sm90")).items
    products = {(i.problem.n, i.problem.k) for i in halves if i.kernel == "w4a16_gemm"}
    assert products >= {(21504, 5376), (5376, 10752), (full // 2, 5376), (without_v // 2, 5376)}
    whole = [i for i in halves if i.kernel == "add_norm"]
    assert {i.problem for i in whole} == set(norms), "ranks have whole rows of the stream"
    sums = [i for i in halves if i.kernel == "exchange_norm"]
    assert {(p.ranks, p.hidden, p.residual_dtype, p.top_k) for p in (i.problem for i in sums)} == {(2, 5376, "bf16", 0)}
    assert {(i.problem.has_scalar, i.problem.has_next) for i in sums} == {(False, True), (True, True), (True, False)}
    assert {i.problem.num_tokens for i in sums} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {i.problem.num_tokens for i in whole if any(u.count for u in i.uses)} == {256, 512, 1024, 2048, 4096, 8192}
    dense = replace(model, target=replace(model.target, quant=None), engine="kerngen")
    with pytest.raises(UsageError, match="no W4A16 layers"):
        dense.on("vllm")


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-e4b"])
def test_inside_vllm_attention_is_over_pages_of_k_and_v(name: str) -> None:
    """Of heads that another launch made, or vLLM did. Each problem once, also of layers that share a cache. Images ask
    more of sliding layers, which a bundle has.
    """
    model = find_model(name)
    load = workload(model.on("vllm"), find_arch("sm90"))
    items = load.items
    assert len({(i.kernel, i.problem) for i in items}) == len(items)
    kernels = ("attn_decode", "attn_prefill", "kv_write", "qkv_norm_rope")
    found = {k: [i.problem for i in items if i.kernel == k] for k in kernels}
    heads = {(layer.head_dim, layer.num_kv_heads) for layer in model.target.layers}
    for kernel, problems in found.items():
        assert {(p.head_dim, p.num_kv_heads) for p in problems} == heads, kernel
        assert all(p.page_heads == 2 * p.num_kv_heads and p.page_size == 64 for p in problems), kernel
    assert {(p.source, p.num_rotated_pairs) for p in found["attn_decode"]} == {("q", 0)}
    assert {p.q_len for p in found["attn_decode"]} == {*range(1, 9)}
    assert {(p.head_dim, p.num_rotated_pairs) for p in found["qkv_norm_rope"]} == {(256, 128), (512, 64)}
    for kernel in ("kv_write", "qkv_norm_rope"):
        assert {p.num_tokens for p in found[kernel]} >= {1, 2, 8, 32, 64, 8192}, kernel
    places = {u.where for i in items if i.kernel in found for u in i.uses}
    assert {w.split(" (")[0] for w in places} == {"attention", "cache", "head norms, RoPE, cache"}
    of_images = [p for of_text in found["attn_prefill"] for p in load.with_images(of_text) if p.ends]
    sliding = [replace(p, ends=True) for p in found["attn_prefill"] if p.window]
    assert of_images == (sliding if name == "gemma-4-31b" else [])


def test_inside_vllm_a_model_asks_its_experts_and_what_is_around_them() -> None:
    """Of any number of tokens. On one rank with their routing and the end of a layer, each in a launch; of two, which
    have half of each expert, both are vLLM's.
    """
    model = find_model("gemma-4-26b-a4b")
    for ranks, inner in ((1, 704), (2, 352)):
        (rank,) = model.ranks(ranks)
        items = workload(rank.on("vllm"), find_arch("sm90")).items
        assert len(items) == len({(i.kernel, i.problem) for i in items})
        assert {i.kernel for i in items} - {"exchange_norm", "moe_router"} == {
            "w4a16_gemm",
            "add_norm",
            "moe_w4a16",
            "moe_combine",
            "attn_decode",
            "attn_prefill",
            "kv_write",
            "greedy_head",
            "qkv_norm_rope",
        }
        exchanges = [i.problem for i in items if i.kernel == "exchange_norm"]
        assert {(p.ranks, p.hidden, p.has_scalar) for p in exchanges} == ({(2, 2816, False)} if ranks == 2 else set())
        experts, routers = ([i.problem for i in items if i.kernel == k] for k in ("moe_w4a16", "moe_router"))
        sums = [i for i in items if i.kernel == "moe_combine"]
        alone, ends = ([i for i in sums if i.problem.has_norms is has_norms] for has_norms in (False, True))
        assert {(p.num_experts, p.top_k, p.hidden, p.inner, p.dtype) for p in experts} == {
            (128, 8, 2816, inner, "bf16")
        }
        assert {(p.num_experts, p.top_k, p.hidden, p.dtype, p.residual_dtype) for p in routers} == (
            {(128, 8, 2816, "bf16", "bf16")} if ranks == 1 else set()
        )
        assert {(p.hidden, p.top_k, p.dtype, p.residual_dtype) for p in (i.problem for i in sums)} == {
            (2816, 8, "bf16", "bf16")
        }
        norms = [i for i in items if i.kernel == "add_norm" and i.problem.has_scalar]
        for items_asked in (alone, norms):
            assert {any(u.count for u in i.uses) for i in items_asked} == {ranks == 2}, "else only without a part"
        asked = [experts, [i.problem for i in alone]]
        if ranks == 1:
            asked += [routers, [i.problem for i in ends]]
            assert all(u.count for i in ends for u in i.uses)
        else:
            assert not ends
        for problems in asked:
            assert {p.num_tokens for p in problems} >= {1, 2, 8, 64, 8192}


@pytest.mark.parametrize(("name", "kernel"), [("gemma-4-31b", "greedy_head"), ("gemma-4-e4b", "centroid_head")])
def test_inside_vllm_a_drafter_asks_what_it_asks_of_kerngens_own_engine(name: str, kernel: str) -> None:
    """The model's own head is vLLM's. A rank has a part of the drafter's, but all of one with centroids."""
    model = find_model(name)
    for arch, most in (("sm90", 32), ("sm75", 8 if kernel == "greedy_head" else 32)):
        mine, all_of_it = (workload(m, find_arch(arch)).items for m in (model.on("vllm"), model))
        heads = {i.problem: {u.where for u in i.uses} for i in mine if i.kernel in ("greedy_head", "centroid_head")}
        assert heads == {
            i.problem: {u.where for u in i.uses}
            for i in all_of_it
            if i.kernel == kernel and {u.phase for u in i.uses} == {"draft"} and getattr(i.problem, "greedy", True)
        }
        assert {p.num_tokens for p in heads} == {t for t in (1, 2, 4, 8, 16, 32) if t <= most}
    for rank in model.ranks(2) if name == "gemma-4-31b" else ():
        halves = [i.problem for i in workload(rank.on("vllm"), find_arch("sm90")).items if i.kernel == kernel]
        assert {(p.vocab_size, p.hidden, p.bits) for p in halves} == {(131072, 1024, 4)}
    alone = workload(replace(model, drafter=None).on("vllm"), find_arch("sm90")).items
    assert not {i.kernel for i in alone} & {"greedy_head", "centroid_head"}


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(UnknownName, match="model 'gemma-5'"):
        find_model("gemma-5")
    with pytest.raises(UsageError, match="not a folder"):
        find_model("no/such/folder")
    load = find_workload("gemma-4-31b", find_arch("sm70"))
    with pytest.raises(UsageError, match=r"moe_router.*sm70"):
        load.only(["moe_router"])
    with pytest.raises(UnknownName, match="kernel 'atn_decode'"):
        load.only(["atn_decode"])


def test_a_config_without_a_field_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text", "hidden_size": 64}))
    with pytest.raises((CheckpointError, UsageError)) as e:
        find_model(str(tmp_path))
    assert isinstance(e.value, KerngenError)
    assert "config.json" in e.value.message
    assert "\n" not in e.value.message
