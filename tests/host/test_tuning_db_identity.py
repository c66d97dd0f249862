"""What an id covers: a new field with a default changes none, and the defaults that ids rest on do not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sheets import measured_store

from kerngen.arch import Target, find_device
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel, defaults_of, filled, trimmed
from kerngen.tuning_db import Store, Winner, lookup, miss_report, problem_key, static_key
from kerngen.tuning_db.read.places import PREBUILT

REQUIRED = "(required)"
H200 = Target.of(find_device("H200"))

# Kernel: (runtime fields, the dynamic one first; the other fields of its Problem; those of its Config).
FILED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "add_norm": (
        {"num_tokens": 1},
        {"hidden": 5376, "dtype": "bf16", "residual_dtype": "bf16", "has_post": True, "has_scalar": False,
         "has_next": True, "has_bounds": False},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "attn_decode": (
        {"kv_len": 8192, "batch": 1},
        {"head_dim": 128, "num_q_heads": 32, "num_kv_heads": 8, "q_len": 1, "page_size": 64, "window": 0,
         "dtype": "bf16", "logit_cap": False, "source": "q", "num_rotated_pairs": 0,
         "page_heads": 0, "kv_format": "plain", "causal": True},
        {"block_m": 8, "block_n": 16, "split_d": 1, "num_warps": 4, "num_stages": 2, "num_splits": 1,
         "warpgroups": False, "cluster": 1, "key_parts": 2, "push_bits": 0, "in_flight": 0,
         "prefetch": 0},
    ),
    "attn_prefill": (
        {"num_tokens": 8192, "batch": 1, "kv_len": 8192},
        {"head_dim": 256, "num_q_heads": 32, "num_kv_heads": 16, "page_size": 0, "window": 0, "causal": True,
         "dtype": "bf16", "logit_cap": False, "page_heads": 0, "ends": False, "kv_format": "plain",
         "lists": False},
        {"block_m": 128, "block_n": 64, "num_warps": 8, "warps_d": 1, "num_stages": 1, "q_in_regs": False,
         "wgmma": False, "ping_pong": False, "boxes": False, "cluster": 1, "split": False},
    ),
    "centroid_head": (
        {"num_tokens": 1},
        {"num_centroids": 2048, "cluster_size": 128, "top_k": 32, "hidden": 256, "dtype": "bf16", "greedy": True},
        {"lanes_per_row": 8, "score_warps": 4, "num_warps": 8, "rows_per_block": 32},
    ),
    "decode_advance": (
        {"batch": 1},
        {"hidden": 5376, "dtype": "bf16"},
        {"threads": 256},
    ),
    "decode_inputs": (
        {"num_tokens": 1},
        {"page_size": 64},
        {"threads": 32},
    ),
    "decode_layers": (
        {"kv_len": 512},
        {"layers": "sssssf", "hidden": 5376, "num_q_heads": 32, "num_kv_heads": 16, "head_dim": 256,
         "num_full_kv_heads": 4, "full_head_dim": 512, "k_eq_v": True, "inner": 21504, "shared_inner": 0, "ple_width":
         0, "window": 1024, "page_size": 64, "num_rotated_pairs": 128, "num_full_rotated_pairs": 64, "group_size": 32,
         "dtype": "bf16", "residual_dtype": "bf16", "num_experts": 0, "top_k": 0, "expert_inner": 0,
         "ranks": 1, "mlp_is_whole": False, "kv_format": "plain", "taps": ""},
        {"num_warps": 8, "stage_tiles": 24, "num_stages": 8, "in_flight": 4, "tiles_together": 3, "out_parts": 2,
         "down_parts": 3, "slots": 3, "split_tiles": 1, "fused": True},
    ),
    "dense_gemv": (
        {"num_tokens": 1},
        {"n": REQUIRED, "k": REQUIRED, "dtype": "bf16"},
        {"block_m": 8, "row_tiles": 1, "warps_n": 1, "warps_k": 8, "steps": 4, "split_k": 1, "blocks_per_sm": 2,
         "persistent": False},
    ),
    "draft_inputs": (
        {"num_tokens": 1},
        {"embed_size": 5376, "hidden": 5376, "vocab_size": 262144, "dtype": "bf16", "table": "dense", "group_size": 0},
        {"threads": 128},
    ),
    "embed": (
        {"num_tokens": 1},
        {"hidden": 5376, "vocab_size": 262144, "dtype": "bf16", "residual_dtype": "bf16", "table": "dense",
         "group_size": 0},
        {"threads": 128, "vecs_per_thread": 1},
    ),
    "exchange_best": (
        {"num_tokens": 1},
        {"ranks": 2, "width": 5376, "dtype": "bf16", "source": "rows", "table": "dense", "group_size": 0},
        {"num_warps": 1, "loads": 24},
    ),
    "exchange_norm": (
        {"num_tokens": 1},
        {"ranks": 2, "hidden": 5376, "dtype": "bf16", "residual_dtype": "bf16", "top_k": 0, "has_scalar": False,
         "has_next": True},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "gather_kv": (
        {"num_keys": 8192, "batch": 1, "heads": 4},
        {"head_dim": 512, "num_kv_heads": 4, "page_size": 64, "kv_format": "int8", "dtype": "bf16"},
        {"threads": 256, "rows": 4},
    ),
    "attn_relative": (
        {"num_tokens": 1},
        {"num_heads": 8, "head_dim": 128, "window": 12, "dtype": "bf16"},
        {"num_warps": 4, "queries": 2},
    ),
    "glu_conv": (
        {"num_tokens": 1},
        {"width": 1024, "num_taps": 5, "dtype": "bf16"},
        {"vecs_per_thread": 1, "tokens_per_block": 4},
    ),
    "mel_conv": (
        {"num_tokens": 1},
        {"mels": 128, "channels": 128, "dtype": "bf16"},
        {"num_warps": 4, "rows_per_block": 2},
    ),
    "residual_norms": (
        {"num_tokens": 1},
        {"hidden": 1024, "dtype": "bf16", "has_post": True, "has_last": False},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "silu": (
        {"num_tokens": 1},
        {"width": 4096, "dtype": "bf16"},
        {"threads": 256, "vecs_per_thread": 2},
    ),
    "gelu_gate": (
        {"num_tokens": 1},
        {"width": 21504, "dtype": "bf16", "packed": True, "has_bounds": False, "activation": "gelu_tanh"},
        {"threads": 128, "vecs_per_thread": 1},
    ),
    "greedy_head": (
        {"num_tokens": 1},
        {"vocab_size": 262144, "hidden": 5376, "dtype": "bf16", "bits": 8, "table": "dense", "group_size": 0},
        {
            "block_tokens": 4,
            "column_parts": 1,
            "num_warps": 16,
            "steps": 4,
            "blocks_per_sm": 1,
            "choose_warps": 8,
            "strips": 1,
            "first_bits": 0,
        },
    ),
    "key_means": (
        {"num_tokens": 2048, "batch": 1},
        {"head_dim": 512, "num_kv_heads": 4, "page_size": 64, "mean_keys": 32, "kv_format": "plain", "dtype": "bf16"},
        {"threads": 256},
    ),
    "moe_combine": (
        {"num_tokens": 1},
        {"hidden": 2816, "top_k": 8, "dtype": "bf16", "residual_dtype": "bf16", "has_norms": True},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "moe_route": (
        {"num_tokens": 1},
        {"num_experts": 128, "top_k": 8, "dtype": "bf16", "logits_dtype": "bf16"},
        {"num_warps": 1},
    ),
    "moe_router": (
        {"num_tokens": 1},
        {"hidden": 2816, "num_experts": 128, "top_k": 8, "dtype": "bf16", "residual_dtype": "bf16"},
        {"block_t": 8, "row_tiles": 1, "warps_n": 1, "warps_k": 8, "steps": 6, "row_warps": 4},
    ),
    "moe_w4a16": (
        {"num_tokens": 1},
        {"num_experts": REQUIRED, "top_k": REQUIRED, "hidden": REQUIRED, "inner": REQUIRED, "group_size": 32, "dtype":
         "bf16", "up_weights": "int4", "down_weights": "int4", "down_group_size": 0, "fp16_scales": False},
        {"block_m": 8, "warp_n": 32, "warps_m": 1, "wgmma": False, "gemv": False, "up_block_n": 128, "up_block_k":
         256, "up_warps_k": 1, "up_num_stages": 2, "up_blocks_per_sm": 0, "down_block_n": 128, "down_block_k": 128,
         "down_warps_k": 1, "down_num_stages": 2, "down_blocks_per_sm": 0, "groups_routes": False},
    ),
    "ple_block": (
        {"num_tokens": 1},
        {"hidden": 1536, "width": 256, "dtype": "bf16", "residual_dtype": "bf16"},
        {"block_m": 1, "gate_warps": 4, "num_warps": 8, "rows_per_warp": 2},
    ),
    "ple_inputs": (
        {"num_tokens": 1},
        {"num_layers": 35, "width": 256, "vocab_size": 262144, "dtype": "bf16"},
        {"num_warps": 1, "slices_per_warp": 1},
    ),
    "qkv_norm_rope": (
        {"num_tokens": 1},
        {"num_q_heads": 32, "num_kv_heads": 16, "head_dim": 256, "num_rotated_pairs": 128, "page_size": 64,
         "dtype": "bf16", "k_eq_v": False, "q_only": False, "page_heads": 0, "kv_format": "plain", "v_norm": True,
         "row_heads": 0, "num_layers": 0},
        {"num_warps": 4, "heads_per_group": 1},
    ),
    "qkv_norm_rope_2d": (
        {"num_tokens": 1},
        {"num_heads": 16, "head_dim": 72, "dtype": "bf16", "has_bounds": False},
        {"num_warps": 4, "heads_per_group": 1},
    ),
    "rmsnorm": (
        {"num_tokens": 1},
        {"hidden": 5376, "dtype": "bf16", "residual_dtype": "bf16", "has_weight": True},
        {"vecs_per_thread": 1, "rows_per_block": 1},
    ),
    "softcap_argmax": (
        {"num_tokens": 1},
        {"vocab_size": 262144, "dtype": "bf16", "logits_dtype": "bf16", "has_cap": True, "round_steps": True,
         "write_capped": False},
        {"threads": 256, "vecs_per_thread": 1},
    ),
    "tile_lists": (
        {"num_tokens": 2048, "batch": 1, "kv_len": 32768},
        {"num_q_heads": 32, "num_kv_heads": 4},
        {"threads": 256},
    ),
    "tile_scores": (
        {"num_tokens": 2048, "batch": 1, "kv_len": 32768},
        {"head_dim": 512, "num_q_heads": 32, "num_kv_heads": 4, "page_size": 64, "mean_keys": 32, "dtype": "bf16"},
        {"block_n": 128, "num_warps": 8, "num_stages": 3},
    ),
    "w4a16_norm": (
        {"num_tokens": 4},
        {"n": 5376, "k": 8192, "group_size": 32, "dtype": "bf16", "residual_dtype": "bf16", "has_scalar": False,
         "ranks": 1},
        {"block_k": 2816, "warps_k": 8, "num_stages": 2, "split_k": 3, "in_flight": 0, "vecs_per_thread": 1,
         "block_m": 4, "block_n": 32, "blocks_per_sm": 1, "shared_ring": False, "throughout": False,
         "fused": True},
    ),
    "w4a16_gemm": (
        {"num_tokens": 1},
        {"n": REQUIRED, "k": REQUIRED, "group_size": 32, "dtype": "bf16", "gated": False,
         "row_invariant": False, "weights": "int4", "fp16_scales": False,
         "activation": "gelu_tanh"},
        {"block_m": 8, "block_n": 128, "block_k": 128, "warp_n": 32, "warps_m": 1, "warps_k": 1, "num_stages": 4,
         "blocks_per_sm": 1, "wgmma": False, "gemv": False, "split_k": 1, "stream": False,
         "warpgroups": False, "cluster": 1, "prefetch": 0, "in_flight": 0, "shared_ring": False,
         "throughout": False, "tma_mma": False},
    ),
}  # fmt: skip
WHAT_TO_DO = """\
Databases in the field file problems and configurations without the fields that have their default, so these are part
of every id, under the names that they had first. In place of changing, removing or moving one:
  - to rename one, say what it is filed under: field(default=..., metadata={"filed": "old_name"});
  - to compute something else, add a field whose default means what was done before, and a line for it here;
  - to change what most callers get, change what callers pass, or default_config;
  - for another meaning of the same fields, make another kernel."""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(measured_store(tmp_path_factory.mktemp("identity") / "h200.sqlite"), read_only=True) as store:
        yield store


def _flat(kernel: Kernel) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    def known(cls: type[Any]) -> dict[str, Any]:
        of = defaults_of(cls)
        fields = {of.names.get(k, k): REQUIRED if v is dataclasses.MISSING else v for k, v in of.items()}
        if of.bodies:  # a body is filed as flags
            del fields["body"]
        return fields | dict.fromkeys(of.flags, False)

    problem, p = known(kernel.problem_type), kernel.problem_type
    filed = defaults_of(p).names
    runtime = {filed.get(n, n): problem[filed.get(n, n)] for n in sorted(p.RUNTIME, key=lambda n: n != p.DYNAMIC)}
    return runtime, {k: v for k, v in problem.items() if k not in runtime}, known(kernel.config_type)


@pytest.mark.parametrize("name", sorted(FILED))
def test_no_default_that_ids_rest_on_has_changed(name: str) -> None:
    assert name in kernel_names(), f"{name} is gone.\n{WHAT_TO_DO}"
    found = _flat(find_kernel(name))
    for fields, today in zip(FILED[name], found, strict=True):
        for field, default in fields.items():
            now = today.get(field, "(gone)")
            assert (type(now), now) == (type(default), default), f"{name}: {field} was {default}.\n{WHAT_TO_DO}"
        added = today.keys() - fields.keys()
        assert not added, f"{name}: {', '.join(sorted(added))} is new: pin it in FILED, and never change it after that"
    assert next(iter(found[0])) == next(iter(FILED[name][0])), f"{name}: another dynamic field.\n{WHAT_TO_DO}"


def test_what_is_shipped_is_pinned() -> None:
    shipped = {path.name.partition(".")[0] for path in PREBUILT.glob("*/*.txt")}
    assert len(shipped) > 10
    assert shipped <= FILED.keys(), "ids of a kernel that is shipped rest on its defaults"


# ---- a new field keeps what was tuned


def _with_field(cls: type[Any], name: str, type_: type[Any], default: Any) -> type[Any]:
    added = dataclasses.field(default=default)
    return dataclasses.make_dataclass(cls.__name__, [(name, type_, added)], bases=(cls,), frozen=True, slots=True)


def _asked(kernel: Kernel, **more: Any) -> Any:
    """attn_prefill as Gemma-4 31B asks it, in its sliding layers."""
    return kernel.problem_type(
        head_dim=256, num_q_heads=32, num_kv_heads=16, page_size=64, window=1024, batch=1, num_tokens=512, kv_len=1024,
        **more,
    )  # fmt: skip


def _found(store: Store, kernel: Kernel, problem: Any) -> Winner:
    found = lookup([store], kernel, problem, H200, strict=True)
    assert found.cubin is not None, f"{kernel.name} was changed since it was shipped: ask another kernel here"
    return found


@pytest.mark.parametrize("runtime", [False, True], ids=["compiled in", "runtime"])
def test_a_new_field_of_a_problem_keeps_the_shipped_winner(
    shipped: Store, monkeypatch: pytest.MonkeyPatch, runtime: bool
) -> None:
    kernel = find_kernel("attn_prefill")
    before = _found(shipped, kernel, _asked(kernel))
    wider = _with_field(kernel.problem_type, "num_sinks", int, 5)  # as a runtime field it is rounded up to 8
    if runtime:
        wider.RUNTIME = (*wider.RUNTIME, "num_sinks")
    monkeypatch.setattr(kernel.spec, "Problem", wider)

    after = _found(shipped, kernel, _asked(kernel))
    assert (after.id, after.build_id, after.config, after.latency_us) == (
        before.id, before.build_id, before.config, before.latency_us,
    )  # fmt: skip
    assert after.cubin == before.cubin
    filed = after.problem.runtime if runtime else after.problem.static
    assert filed["num_sinks"] == (8 if runtime else 5), "readers see the new field too"
    assert after.problem.fields["num_sinks"] == 5

    assert problem_key(kernel, _asked(kernel, num_sinks=5)) == problem_key(kernel, _asked(kernel))
    other = _asked(kernel, num_sinks=16)
    assert lookup([shipped], kernel, other, H200) is None, "another value is another problem"
    there = 8 if runtime else 5
    assert f"num_sinks {there} there, 16 asked" in miss_report([shipped], kernel, other, H200)


def test_a_new_field_of_a_config_keeps_the_shipped_winner(shipped: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = find_kernel("attn_prefill")
    before = _found(shipped, kernel, _asked(kernel))
    monkeypatch.setattr(kernel.spec, "Config", _with_field(kernel.config_type, "swizzle", bool, False))
    after = _found(shipped, kernel, _asked(kernel))
    assert (after.id, after.build_id, after.cubin) == (before.id, before.build_id, before.cubin)
    assert after.config == before.config | {"swizzle": False}
    (build,) = [b for b in shipped.builds(after.problem.static_key).values() if b.id == after.build_id]
    assert build.config == after.config


def test_what_was_measured_before_a_new_field_is_found_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build, trial and default configuration of then are those of now."""
    from kerngen.compiler.compile import compile_cubin
    from kerngen.compiler.render import render
    from kerngen.templates.kernel import fields_of, static_fields
    from kerngen.tuning_db import Measurement

    kernel = find_kernel("rmsnorm")
    problem: Any = kernel.problem_type(hidden=1024)
    config = kernel.default_config(problem, H200)
    source = render(kernel, problem, config, H200)
    with Store.open(tmp_path / "tuning.db") as store:
        build = store.add_build(
            compile_cubin(source, H200.arch), kernel.name, source, fields_of(config), static_fields(problem)
        )
        key, said = problem_key(kernel, problem), {"p50_us": 3.0, "error_abs": 0.0}
        trial = Measurement(key, "sm90", H200.device, fields_of(config), build, "ok", "measured", **said)
        store.add_measurement(trial)

        monkeypatch.setattr(kernel.spec, "Problem", _with_field(kernel.problem_type, "plus_one", bool, False))
        monkeypatch.setattr(kernel.spec, "Config", _with_field(kernel.config_type, "unroll", int, 1))
        monkeypatch.setattr(kernel.spec, "default_config", lambda p, target: kernel.config_type(**fields_of(config)))
        wider, new = kernel.problem_type(hidden=1024), fields_of(kernel.default_config(problem, H200))
        assert new["unroll"] == 1
        found = store.find_build(kernel.name, source, new, static_fields(wider), H200.arch)
        assert (found.id, found.config, found.static) == (build, new, static_fields(wider))
        (seen,) = store.measurements("rmsnorm", problem=problem_key(kernel, wider))
        assert seen.measurement.config == new
        assert seen.measurement.problem.fields["plus_one"] is False
        (winner,) = store.recompute_winners(kernel, problem_key(kernel, wider).static_key, H200)
        assert winner.why["is_default"]


# ---- filing


_VALUES = st.integers(-2, 2) | st.booleans() | st.sampled_from(["", "bf16"])


@given(st.dictionaries(st.sampled_from("abcd"), _VALUES), st.dictionaries(st.sampled_from("abc"), _VALUES))
def test_what_is_left_out_is_put_back(fields: dict[str, Any], defaults: dict[str, Any]) -> None:
    """And 1 is not True: they are not the same JSON."""
    whole = defaults | fields
    short = trimmed(whole, defaults)
    assert filled(short, defaults) == whole
    assert [type(v) for v in filled(short, defaults).values()] == [type(v) for v in filled(whole, defaults).values()]
    assert all(k not in defaults or (type(v), v) != (type(defaults[k]), defaults[k]) for k, v in short.items())
    assert trimmed(short, defaults) == short


def test_a_field_may_be_given_or_not() -> None:
    full = {"hidden": 5376, "dtype": "fp16", "residual_dtype": "bf16", "has_weight": True}
    assert static_key("rmsnorm", full) == static_key("rmsnorm", {"dtype": "fp16"})
    assert static_key("rmsnorm", full) != static_key("rmsnorm", full | {"has_weight": 1})
    assert static_key("no_such_kernel", full) != static_key("no_such_kernel", {"dtype": "fp16"})


def test_a_bucket_of_ones_own_is_filed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names need not be fields, so nothing is known of their defaults."""

    @dataclasses.dataclass(frozen=True)
    class Problem:
        RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "num_tokens")
        DYNAMIC: ClassVar[str] = "num_tokens"
        batch: int = 1
        num_tokens: int = 1

    spec = ModuleType("spec")
    spec.Problem = spec.Config = Problem  # type: ignore[attr-defined]
    spec.bucket = lambda problem: {"batch": min(problem.batch, 4)}  # type: ignore[attr-defined]
    kernel = Kernel("own", spec)
    monkeypatch.setattr("kerngen.tuning_db.read.canonical_fields.find_kernel", lambda name: kernel)
    key = problem_key(kernel, Problem())
    assert key.filed().runtime == key.runtime == {"batch": 1}
