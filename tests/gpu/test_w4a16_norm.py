"""w4a16_norm on a GPU: what one launch posts to the next is right, and gone behind it; bits as step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exchanges import require_clean

from kerngen.runtime.launcher import Function, shares_sms
from kerngen.templates import find_kernel
from kerngen.templates.add_norm import spec as add_norm
from kerngen.templates.w4a16_gemm import spec as w4a16_gemm
from kerngen.templates.w4a16_norm.spec import Config, Problem
from kerngen.timing.measure import compare, load, target_here

KERNEL = find_kernel("w4a16_norm")
PROBLEM = Problem(2816, 4096, has_scalar=True)
WAYS = {
    "three-parts": Config(1536, 8, 2, 3, 1, 1),
    "three-parts-many-vectors": Config(1536, 8, 2, 3, 0, 3),
    "six-parts": Config(1024, 16, 2, 6, 0, 2),
    "whole-strips": Config(2048, 16, 5, 1, 0, 1),
    "shared-ring": Config(1024, 8, 6, 3, 2, 2, cta_pipeline=True),
    "shared-ring-throughout": Config(768, 12, 3, 6, 1, 1, cta_pipeline=True, cap_inflight=True),
    "shared-ring-whole-strips": Config(1024, 8, 4, 1, 0, 2, cta_pipeline=True),
    "ring": Config(256, 4, 8, 1, 0, 2, block_m=8, block_n=64, blocks_per_sm=2),
    "ring-in-flight": Config(256, 2, 6, 1, 2, 1, block_m=8, block_n=32, blocks_per_sm=4),
    "ring-wide": Config(128, 1, 4, 1, 1, 3, block_m=8, block_n=128, blocks_per_sm=2),
}


def _tokens(config: Config) -> tuple[int, ...]:
    """With which it is launched in turn: one Function, one workspace."""
    return (4, 1, 3, 2) if config.block_m == 4 else (8, 5, 2, 7)


def _most(config: Config) -> Problem:
    return replace(PROBLEM, num_tokens=config.block_m)


def _function(config: Config) -> Function:
    problem, target = _most(config), target_here()
    if (why := KERNEL.why_unsupported(problem, target) or KERNEL.why_invalid(problem, config, target)) is not None:
        pytest.skip(why)
    return load(KERNEL, problem, config)


def _case(tokens: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A case, its inputs, and what comes of them."""
    case = KERNEL.cases.case_for(replace(PROBLEM, num_tokens=tokens))
    given = KERNEL.cases.inputs(case, torch.device("cuda"))
    return case, given, KERNEL.reference.expected(case.problem, given)


def _poisoned(given: dict[str, Any]) -> dict[str, Any]:
    return given | {n: torch.full_like(given[n], float("nan")) for n in ("out", "residual_out")}


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["cooperative", "alone"])
def test_launches_right_behind_each_other(config: Config, in_forward: bool, alone: bool) -> None:
    """Each begins while the one before it, of another number of tokens, still norms."""
    if alone and shares_sms():
        pytest.skip("other processes' grids may be half-resident: launches are cooperative here")
    function = _function(config)
    workspace = function.workspace(function.plan(_most(config))[1])
    cases = [_case(tokens) for tokens in _tokens(config)]
    turns = [i % len(cases) for i in range(80)]
    given = [_poisoned(cases[i][1]) for i in turns]
    torch.cuda.synchronize()
    for i, arguments in zip(turns, given, strict=True):
        function.run(cases[i][0].problem, arguments, in_forward=in_forward, alone=alone)
    torch.cuda.synchronize()
    first: dict[int, dict[str, Any]] = {}
    for launch, (i, arguments) in enumerate(zip(turns, given, strict=True)):
        case, _, expected = cases[i]
        result = compare(KERNEL, case, arguments, expected)
        assert result.ok, f"launch {launch}: {result.message}"
        for name in ("out", "residual_out"):
            assert torch.equal(arguments[name], first.setdefault(i, arguments)[name]), "the same bits each time"
    require_clean(workspace)


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
def test_in_a_graph_that_goes_on_from_its_own_results(config: Config) -> None:
    """In place, three launches a replay: residual is read by a launch that begins before the one that wrote it ends."""
    function = _function(config)
    workspace = function.workspace(function.plan(_most(config))[1])
    case, given, _ = _case(config.block_m)
    start = given["residual"].clone()
    here = given | {"residual_out": given["residual"]}
    graph = torch.cuda.CUDAGraph()
    function.run(case.problem, here, in_forward=True)  # once outside: nothing is made while it is captured
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            function.run(case.problem, here, in_forward=True, alone=not shares_sms())
    for _ in range(5):
        given["residual"].copy_(start)
        graph.replay()
    torch.cuda.synchronize()
    expected = KERNEL.reference.expected(case.problem, given | {"residual": start})
    for _ in range(2):
        # the next from what was reached, as the model's dtype holds it
        reached = expected["residual_out"].to(start.dtype)
        expected = KERNEL.reference.expected(case.problem, given | {"residual": reached})
    result = compare(KERNEL, case, here, expected)
    assert result.ok, result.message
    require_clean(workspace)


@pytest.mark.parametrize(
    ("config", "tokens"), [(c, t) for c in WAYS.values() for t in ((2, 3, 4) if c.block_m == 4 else (2, 5, 8))]
)
def test_the_same_bits_as_one_kernel_after_the_other(config: Config, tokens: int) -> None:
    function = _function(config)
    case, given, _ = _case(tokens)
    p = case.problem
    ours = _poisoned(given)
    function.run(p, ours)
    product, norm = find_kernel("w4a16_gemm"), find_kernel("add_norm")
    y, theirs = torch.full_like(given["out"], float("nan")), _poisoned(given)
    gemm_problem = w4a16_gemm.Problem(p.n, p.k, p.group_size, p.dtype, tokens)
    load(product, gemm_problem, config.product).run(
        gemm_problem, {n: given[n] for n in ("x", "w_packed", "scales", "num_tokens")} | {"out": y}
    )
    norm_problem = add_norm.Problem(p.n, p.dtype, p.residual_dtype, has_scalar=True, num_tokens=tokens)
    load(norm, norm_problem, add_norm.Config(config.vecs_per_thread)).run(norm_problem, theirs | {"h": y})
    torch.cuda.synchronize()
    for name in ("out", "residual_out"):
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("way", ["three-parts", "ring"])
def test_a_token_that_is_no_number_stays_alone(way: str) -> None:
    function = _function(WAYS[way])
    case, given, expected = _case(4)
    given["x"][2, 100] = float("nan")
    ours = _poisoned(given)
    function.run(case.problem, ours)
    torch.cuda.synchronize()
    assert ours["out"][2].isnan().all()
    whole = [0, 1, 3]
    others = replace(case, problem=replace(case.problem, num_tokens=3))
    result = compare(
        KERNEL, others, {n: ours[n][whole] for n in ("out", "residual_out")},
        {n: expected[n][whole] for n in ("out", "residual_out")},
    )  # fmt: skip
    assert result.ok, result.message
    require_clean(function.workspace(1))
