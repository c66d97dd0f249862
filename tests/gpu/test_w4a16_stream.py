"""The body of w4a16_gemm that multiplies integers: configurations of every kind, and tokens that are hard to scale."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kerngen.arch import ARCHES, Target
from kerngen.templates import find_kernel
from kerngen.templates.common.w4.tiling import SPACES
from kerngen.templates.kernel import Case
from kerngen.templates.w4a16_gemm.spec import Config, Problem

KERNEL = find_kernel("w4a16_gemm")
SHAPES = ((64, 704, 32), (320, 384, 64), (96, 1536, 128), (5376, 2112, 32), (2560, 10240, 32), (64, 5376, 32))
CASES = [
    Problem(n, k, group, dtype, tokens, gated)
    for n, k, group in SHAPES
    for dtype, tokens, gated in (
        ("bf16", 1, False), ("fp16", 1, True), ("fp16", 2, True), ("bf16", 3, True), ("bf16", 4, False),
        ("fp16", 4, True),
    )
]  # fmt: skip


def target_here() -> Target:
    from kerngen.runtime.launcher import probe_device

    arch = ARCHES[probe_device().arch]
    if not arch.has_tma:
        pytest.skip(f"{arch} has no bulk copies")
    return Target.of(arch)


def some_configs(problem: Problem, target: Target, most: int, *, cta_pipeline: bool = False) -> list[Config]:
    """Valid ones, drawn with the problem as the seed."""
    choices_of = SPACES["tma_block" if cta_pipeline else "tma_warp"]
    rng = random.Random(str(problem))
    found: dict[Config, None] = {}
    slots = [problem.group_size * s for s in range(1, 12)]
    for _ in range(20000):
        space: dict[str, Any] = {name: rng.choice(choices) for name, choices in choices_of.items()}
        space["block_k"] = rng.choice(slots) * space["warps_k"]
        config = Config(**space, body="tma_block" if cta_pipeline else "tma_warp")
        if KERNEL.why_invalid(problem, config, target) is None:
            found[config] = None
            if len(found) == most:
                break
    return list(found)


TOKENS = pytest.mark.parametrize(("tokens", "cta_pipeline"), [(1, False), (2, False), (4, False), (2, True), (4, True)])


@pytest.mark.parametrize("problem", CASES, ids=lambda p: f"{p.n}x{p.k}_g{p.group_size}_{p.dtype}_m{p.num_tokens}")
def test_every_way_to_cut_the_work(problem: Problem) -> None:
    from kerngen.timing.measure import check_function, load

    target = target_here()
    configs = some_configs(problem, target, 4)
    if problem.num_tokens > 1:
        configs += some_configs(problem, target, 4, cta_pipeline=True)
        assert any(c.body == "tma_block" for c in configs)
    for config in configs:
        function = load(KERNEL, problem, config)
        for _ in range(2):  # the second launch finds the workspace as the first one left it
            result = check_function(function, KERNEL.cases.case_for(problem))
            assert result.ok, f"{config}: {result.message}"


def launched(problem: Problem, x: torch.Tensor, *, cta_pipeline: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of `x` by the body, and by the kernel's fp32 reference."""
    from kerngen.timing.measure import load

    config = some_configs(problem, target_here(), 1, cta_pipeline=cta_pipeline)[0]
    case: Case = KERNEL.cases.case_for(problem)
    inputs = KERNEL.cases.inputs(case, "cuda") | {"x": x}
    load(KERNEL, problem, config)(problem, **inputs)
    return inputs["out"].float(), KERNEL.reference.expected(problem, inputs)["out"].float()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 3e4])
@TOKENS
def test_tokens_of_any_magnitude_and_with_outliers(tokens: int, cta_pipeline: bool, magnitude: float) -> None:
    problem = Problem(256, 2112, 32, "bf16", tokens)
    x = torch.randn(tokens, 2112, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * magnitude
    x[0, ::97] *= 500
    x[-1, 64:1024] = 0
    out, expected = launched(problem, x.bfloat16(), cta_pipeline=cta_pipeline)
    for token in range(tokens):
        error, size = (out - expected)[token].abs(), expected[token].abs()
        assert error.max() <= 2.0**-7 * size.max()
        # what an outlier leaves of the others: exact to 2^-21 of it, of several tokens to 2^-15, and so to less than a
        # bf16 of the typical output
        assert error.mean() <= 2.0**-9 * size.mean()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@TOKENS
def test_what_is_no_number_stays_none_and_stays_in_its_token(tokens: int, cta_pipeline: bool, bad: float) -> None:
    problem = Problem(256, 2112, 32, "bf16", tokens)
    x = torch.randn(tokens, 2112, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    clean, _ = launched(problem, x.clone(), cta_pipeline=cta_pipeline)
    x[-1, 1000] = bad
    out, _ = launched(problem, x, cta_pipeline=cta_pipeline)
    assert not out[-1].isfinite().any()
    assert torch.equal(out[:-1], clean[:-1])


@pytest.mark.parametrize("cta_pipeline", [False, True])
@pytest.mark.parametrize("tokens", [2, 4])
def test_a_token_does_not_depend_on_its_neighbours(tokens: int, cta_pipeline: bool) -> None:
    from kerngen.timing.measure import load

    problem = Problem(2560, 10240, 32, "bf16", tokens)
    x = torch.randn(tokens, 10240, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).bfloat16()
    together, _ = launched(problem, x, cta_pipeline=cta_pipeline)
    x[1:] *= 3
    again, _ = launched(problem, x, cta_pipeline=cta_pipeline)
    assert torch.equal(together[0], again[0])
    alone = replace(problem, num_tokens=1)
    config = some_configs(problem, target_here(), 1, cta_pipeline=cta_pipeline)[0]  # what `launched` takes
    inputs = KERNEL.cases.inputs(KERNEL.cases.case_for(problem), "cuda")
    out = torch.empty(1, problem.n, dtype=torch.bfloat16, device="cuda")
    load(KERNEL, alone, config)(alone, **inputs | {"x": x[:1], "out": out, "num_tokens": 1})
    assert torch.equal(together[0], out[0].float())
