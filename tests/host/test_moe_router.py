"""moe_router's reference against transformers' router, what its cases promise, and its refusals. No GPU."""

from __future__ import annotations

import pytest
import torch

from kerngen.arch import ARCHES, Arch, Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import render
from kerngen.templates import Case, find_kernel
from kerngen.templates.common.rows.torch_rows import UNIT
from kerngen.templates.moe_router import cases, reference, spec
from kerngen.templates.moe_router.spec import Config, Problem

KERNEL = find_kernel("moe_router")
EACH_ARCH = pytest.mark.parametrize("arch", ARCHES.values(), ids=str)
SM90 = Target.of(find_arch("sm90"))


@pytest.mark.parametrize("tokens", [1, 33])
def test_reference_is_the_models_router(tokens: int) -> None:
    """In bf16, with the model's own modules: ids and x bit for bit, weights but for the order of a sum."""
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    case = cases.case_for(Problem(512, 64, 8, num_tokens=tokens))
    inputs = cases.inputs(case, "cpu")
    config = Gemma4TextConfig(hidden_size=512, num_experts=64, top_k_experts=8, enable_moe_block=True)
    router = gemma4.Gemma4TextRouter(config).to(torch.bfloat16)
    router.proj.weight.data = inputs["router"]
    router.scale.data = inputs["router_scale"]
    router.per_expert_scale.data = inputs["per_expert_scale"].float()  # moe_route's weights stay in fp32
    norm = gemma4.Gemma4RMSNorm(512, eps=inputs["eps"])
    norm.weight.data = inputs["pre_norm"]
    with torch.no_grad():
        _, weights, ids = router(inputs["residual"])
        x = norm(inputs["residual"])
    expected = reference.expected(case.problem, inputs)
    assert torch.equal(expected["topk_ids"].long(), ids)
    torch.testing.assert_close(expected["topk_weights"], weights.float(), rtol=1e-5, atol=0)
    assert torch.equal(expected["x"], x.float())


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_no_case_hangs_on_a_rounding(case: Case) -> None:
    """What a sum in another order changes, some 1e-5, must not change which experts are chosen, nor a chosen logit."""
    p: Problem = case.problem
    inputs = cases.inputs(case, "cpu")
    logits = reference.router_logits(p, inputs)
    plain = ~logits.isnan().any(1) & (logits != 0).any(1)
    assert int((~plain).sum()) == {"nan": 2, "zeros": 1}.get(case.options.get("kind", ""), 0)
    first = logits[plain].sort(-1, descending=True)[0][:, : p.top_k + 1]
    if p.num_experts > p.top_k:
        assert float((first[:, :-1] - first[:, 1:]).min()) > 0.4
    chosen = first[:, : p.top_k]
    half_ulp = 2 * UNIT[p.dtype] * 2  # half the distance between two values in 4..8
    away = (chosen / (2 * half_ulp) % 1 - 0.5).abs().min() * 2 * half_ulp  # from where a rounding turns
    assert float(away) > 1e-4
    assert float(chosen.min()) > 4
    x = reference.expected(p, inputs)["x"]
    assert float(x[plain].abs().max()) < 1


def test_nan_comes_first_shows_in_every_weight_and_stays_in_its_row() -> None:
    case = next(c for c in cases.CASES if c.options.get("kind") == "nan")
    expected = reference.expected(case.problem, cases.inputs(case, "cpu"))
    rows = expected["topk_weights"].isnan()
    assert rows.all(1).tolist() == rows.any(1).tolist() == [False, True, False, True, False, False]
    assert expected["topk_ids"][1].tolist() == list(range(8))


@pytest.mark.parametrize(("config", "tokens", "needles"), [
    (Config(warps_n=4, warps_k=16), 1, ("2048 threads", "1024")),
    (Config(warps_k=4, row_warps=8), 1, ("4 warps", "row_warps=8")),
    (Config(warps_k=16, unroll=11), 1, ("hidden=2816", "8 groups", "warps_k=16")),
    (Config(warps_n=16, warps_k=1, unroll=1, row_warps=16), 1, ("256 experts of 128",)),
    (Config(warps_k=8, unroll=8, row_warps=1), 1, ("registers", "256 threads leave 255")),
    (Config(16, warps_k=8, unroll=4), 20000, ("1250 tiles of 16", "8 blocks", "1024")),
])  # fmt: skip
def test_refusals_hold_the_numbers(config: Config, tokens: int, needles: tuple[str, ...]) -> None:
    why = spec.why_invalid(Problem(num_tokens=tokens), config, SM90)
    assert why is not None
    for needle in needles:
        assert needle in why


def test_a_tile_that_shared_memory_cannot_hold_is_refused() -> None:
    why = spec.why_invalid(Problem(), Config(32, 1, 8, 1, 4, 4), Target.of(find_arch("sm86")))
    assert "101,376 B a block" in why


@EACH_ARCH
def test_every_number_of_tokens_has_a_default(arch: Arch) -> None:
    target = Target.of(arch)
    for tokens in (*range(1, 20), 64, 200, 1024, 4096, 20000, 100_000):
        problem = Problem(dtype="fp16", residual_dtype="fp32", num_tokens=tokens)
        config = KERNEL.default_config(problem, target)
        assert spec.why_invalid(problem, config, target) is None
        (launch,) = spec.launches(problem, config, target)
        assert launch.grid[0] == spec.num_tiles(problem, config) * spec.expert_blocks(problem, config)


def test_counters_lie_at_the_same_place_for_every_number_of_tokens() -> None:
    """One Function's workspace sees small and large T in turn, and must not read old keys as counts."""
    for tokens in (1, 9, 8192):
        problem, config = Problem(num_tokens=tokens), Config()
        assert spec.num_tiles(problem, config) <= spec.MAX_TILES
        assert spec.workspace_bytes(problem, config, SM90) == 4 * spec.MAX_TILES + tokens * 128 * 4
    assert spec.workspace_bytes(Problem(), Config(8, 1, 8, 2, 4, 8), SM90) == 0


def test_weights_are_fetched_before_the_wait_and_the_residual_after_it() -> None:
    ptx = compile_ptx(render(KERNEL, Problem(), Config(), SM90), SM90.arch).image.decode()
    before, wait, after = ptx.partition("griddepcontrol.wait")
    assert wait
    assert "ld.global.nc.L1::no_allocate" in before
    assert "ld.global.L1::no_allocate" not in before
    assert "st.global" not in before
    assert "ld.global.L1::no_allocate" in after


def test_cases_meet_both_ways_to_share_the_experts() -> None:
    blocks = {
        spec.expert_blocks(c.problem, KERNEL.default_config(c.problem, SM90))
        for c in cases.CASES
        if KERNEL.why_unsupported(c.problem, SM90) is None
    }
    assert 1 in blocks
    assert max(blocks) > 1
