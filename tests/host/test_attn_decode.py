"""attn_decode without a GPU: its traffic, its splits and its grid, and the reference is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kerngen.arch import ARCHES, Arch, Target, find_arch
from kerngen.runtime.executors.reference import Reference
from kerngen.templates import find_kernel
from kerngen.templates.attn_decode.op import attn_decode
from kerngen.templates.common.attention.attention_torch import attend
from kerngen.templates.kernel import Case
from kerngen.templates.qkv_norm_rope.op import q_norm_rope, qkv_norm_rope

KERNEL = find_kernel("attn_decode")
SPEC = KERNEL.spec
ALL = [*KERNEL.cases.CASES, *KERNEL.bench.BENCH_CASES]


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_traffic_covers_the_cost(arch: Arch) -> None:
    for case in ALL:
        problem = replace(case.problem, dtype="fp16")
        config = KERNEL.default_config(problem, Target.of(arch))
        moved = KERNEL.traffic(problem, config, Target.of(arch))
        assert moved is not None
        assert len(moved) == len(KERNEL.launches(problem, config, Target.of(arch))), case
        least = KERNEL.cost(problem)
        assert moved[0].flops >= least.flops, case
        assert (moved[0].l2_bytes or 0) >= moved[0].dram_bytes == least.bytes, case


@pytest.mark.parametrize("case", [c for c in KERNEL.cases.CASES if c.name.startswith(("q", "raw_q-1", "d128"))
                                  and c.problem.source != "q" and "177k" not in c.name
                                  and c.problem.kv_format == "plain"], ids=str)  # fmt: skip
def test_from_the_projection_is_head_norms_rope_and_attention(case: Case) -> None:
    """What one call gives is what its two halves give, one after the other; and so is what they leave in the caches."""
    reference, inputs = Reference(), KERNEL.cases.inputs(case, torch.device("cpu"))
    op, arguments = KERNEL.op_call(case, inputs)
    caches = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    at_once = reference.run(op.of_flat(arguments), "")
    new = {n: v for n, v in arguments.items() if n in ("q_weight", "inv_freq", "positions", "num_rotated_pairs", "eps")}
    if case.problem.owns_kv:
        before = inputs["kv_lens"][:, None] - case.problem.q_len + torch.arange(case.problem.q_len) < 0
        new |= {n: arguments[n] for n in ("qkv", "k_weight", "num_q_heads")} | caches
        new["slot_mapping"] = arguments["slot_mapping"].masked_fill(before.flatten(), -1)  # those are not written
        q = reference.run(qkv_norm_rope.of_flat(new), "")
    else:
        q = reference.run(q_norm_rope.of_flat(new | {"q_raw": arguments["q_raw"]}), "")
    rest = {
        n: arguments[n] for n in ("block_table", "kv_lens", "q_len", "window", "max_kv_len", "sm_scale", "logit_cap")
    }
    halves = reference.run(attn_decode.of_flat({"q": q} | caches | rest), "")
    # A CPU may add in another order where a tensor lies otherwise in memory: a rounding of fp32, or of the result.
    torch.testing.assert_close(at_once, halves, rtol=2 * torch.finfo(halves.dtype).eps, atol=1e-6, equal_nan=True)
    for name, cache in caches.items():
        torch.testing.assert_close(inputs[name], cache, rtol=0, atol=0, equal_nan=True)


def test_shared_memory_has_room_for_sines_of_every_token() -> None:
    """Only where heads are made: the others keep what they took."""
    target, config = Target.of(find_arch("sm90")), SPEC.Config()
    plain = SPEC.Problem(head_dim=512, q_len=4)
    raw = replace(plain, source="qk", num_rotated_pairs=64)
    assert SPEC.smem_bytes(raw, config, target) - SPEC.smem_bytes(plain, config, target) == 4 * 256 * 2 * 2


def test_grid_does_not_depend_on_kv_len() -> None:
    """A CUDA graph captured at one context length must serve all others."""
    arch = find_arch("sm90")
    problem = SPEC.Problem(head_dim=512, num_q_heads=32, num_kv_heads=4, kv_len=8192)
    target = Target.of(arch)
    config = KERNEL.default_config(problem, target)
    for kv_len in (0, 1, 100000):
        other = replace(problem, kv_len=kv_len)
        assert KERNEL.launches(other, config, target) == KERNEL.launches(problem, config, target)
        assert KERNEL.workspace_bytes(other, config, target) == KERNEL.workspace_bytes(problem, config, target)


@pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
def test_default_splits_fill_the_gpu_and_no_more(arch: Arch) -> None:
    one = SPEC.Problem(head_dim=512, num_q_heads=32, num_kv_heads=4, kv_len=65536, dtype="fp16")
    assert KERNEL.default_config(one, Target.of(arch)).num_splits > 4, "4 blocks cannot use a GPU"
    many = replace(one, batch=512, kv_len=64)
    assert KERNEL.default_config(many, Target.of(arch)).num_splits == 1, "2,048 blocks with one tile each need no split"
    assert KERNEL.default_config(replace(one, kv_len=16), Target.of(arch)).num_splits == 1
    assert KERNEL.default_config(replace(one, kv_len=0), Target.of(arch)).num_splits == 1


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None].double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1).float()


@pytest.mark.parametrize(("window", "kv_len", "q_len"), [(0, 37, 1), (0, 5, 4), (8, 37, 3), (8, 8, 1), (8, 9, 2)])
def test_reference_agrees_with_torch(window: int, kv_len: int, q_len: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(q_len, 4, 128), torch.randn(kv_len, 2, 128), torch.randn(kv_len, 2, 128)
    at = torch.arange(kv_len - q_len, kv_len)[:, None]
    key = torch.arange(kv_len)[None, :]
    mask = (key <= at) & ((key > at - window) if window else (key >= 0))
    got = attend(q, k, v, kv_len, window=window, sm_scale=0.1)
    torch.testing.assert_close(got, _sdpa(q, k, v, mask, 0.1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [c for c in KERNEL.cases.CASES if "177k" not in c.name and "fp16" in c.name], ids=str)
def test_inputs_poison_what_must_not_be_read(case: Case) -> None:
    inputs = KERNEL.cases.inputs(case, torch.device("cpu"))
    assert set(inputs) | {"workspace"} == {a.name for args in SPEC.ARGS.values() for a in args}
    assert inputs["out"].isnan().all()
    expected = KERNEL.reference.expected(case.problem, inputs)["out"]
    assert expected.shape == inputs["out"].shape
    assert expected.isfinite().all(), "the reference reads only what is visible"
    p = case.problem
    for s, kv_len in enumerate(case.options["kv_lens"]):
        unseen = max(0, p.q_len - kv_len)
        rows = expected[s * p.q_len : (s + 1) * p.q_len]
        assert (rows[:unseen] == 0).all()
        assert (rows[unseen:] != 0).any(-1).all()


@pytest.mark.parametrize("block_m", [4, 12, 24, 40])
def test_rows_that_no_whole_merge_has_are_refused(block_m: int) -> None:
    """Blocks of 24 rows wrote what they had for a fourth tile of 8 over the next block's rows."""
    problem = SPEC.Problem(head_dim=512, num_q_heads=32, num_kv_heads=4, q_len=8)
    config = SPEC.Config(block_m, 16, 8, 8, 2, 66)
    why = KERNEL.why_invalid(problem, config, Target.of(find_arch("sm90")))
    assert why == f"block_m={block_m}: a block has 8 rows or a multiple of 16 with body=mma"
