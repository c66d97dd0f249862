"""w4a16_gemm's shared tiles on a GPU: split-K sums are right, and the mailbox is zero for the next launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exchanges import require_clean, require_right_in_a_graph

from kerngen.runtime.launcher import Function, shares_sms
from kerngen.templates import find_kernel
from kerngen.templates.w4a16_gemm.spec import Config, Problem
from kerngen.timing.measure import compare, load, target_here

KERNEL = find_kernel("w4a16_gemm")
FEW, MANY = Problem(2816, 4096, num_tokens=1), Problem(2816, 4096, num_tokens=300)


def _warpgroups(
    m: int, n: int, k: int, stages: int, blocks: int = 1, cluster: int = 1, prefetch_stages: int = 0
) -> Config:  # fmt: skip
    return Config(m, n, k, 16, 1, 1, stages, blocks, body="wgmma_ws", cluster=cluster, prefetch_stages=prefetch_stages)


# Each with the numbers of tokens that it is launched with in turn: one Function, one workspace.
WAYS = [
    ("stream", Config(4, 32, 1024, 32, 1, 8, 3, 1, split_k=4, body="tma_warp"), (1, 4, 2)),
    ("stream-in-flight", Config(4, 32, 1024, 32, 1, 8, 4, 1, split_k=4, body="tma_warp", prefetch_stages=2), (4, 1, 3)),
    ("shared-ring", Config(4, 32, 1024, 32, 1, 8, 3, 1, split_k=4, body="tma_block"), (1, 4, 2)),
    (
        "shared-ring-throughout",
        Config(4, 32, 256, 32, 1, 8, 4, 1, split_k=8, body="tma_block", prefetch_stages=2, cap_inflight=True),
        (4, 1, 3),
    ),
    ("stream-many-parts", Config(4, 32, 256, 32, 1, 8, 3, 1, split_k=11, body="tma_warp"), (3, 1)),
    ("gemv", Config(8, 64, 768, 64, 1, 8, 1, 0, body="gemv", split_k=3), (1, 5, 8)),
    ("gemv-many-blocks", Config(8, 32, 128, 32, 1, 4, 1, 0, body="gemv", split_k=8), (8, 2)),
    ("ring", Config(8, 128, 256, 32, 1, 1, 2, 4), (1, 8, 30)),
    ("ring-long", Config(8, 64, 256, 32, 1, 4, 8, 2), (4, 1, 8)),
    ("ring-in-flight", Config(8, 64, 256, 32, 1, 4, 8, 2, prefetch_stages=2), (4, 1, 8)),
    ("ring-64", Config(64, 128, 64, 32, 1, 1, 3, 2), (300, 64)),
    ("warpgroups-16", _warpgroups(16, 192, 256, 5), (16, 9, 40)),
    ("warpgroups-two-blocks", _warpgroups(16, 128, 256, 3, blocks=2), (16, 100)),
    ("warpgroups-in-flight", _warpgroups(16, 128, 256, 3, blocks=2, prefetch_stages=1), (16, 100)),
    ("warpgroups-64", _warpgroups(64, 128, 256, 3), (64, 10, 300)),
    ("warpgroups-256-pairs", _warpgroups(256, 128, 64, 4, cluster=2), (300, 20, 1000)),
    ("warpgroups-256-beside", _warpgroups(256, 128, 64, 4, cluster=2), (2000, 300, 1900)),
    ("warpgroups-160-beside", _warpgroups(160, 128, 128, 3, cluster=2), (1300, 2000, 100)),
    ("warpgroups-128-beside", _warpgroups(128, 128, 128, 4), (900, 130, 1700)),
]


# Strips that blocks claim: more and fewer of them than a ring holds before x is there, and one round exactly.
CLAIMED = [
    (Problem(43008, 1024, num_tokens=4), Config(4, 32, 256, 32, 1, 8, 4, 1, body="tma_block")),
    (
        Problem(16384, 1344, num_tokens=3, gated=True),
        Config(4, 32, 896, 32, 1, 14, 6, 1, body="tma_block", prefetch_stages=2),
    ),
    (
        Problem(5376, 1024, num_tokens=2),
        Config(4, 32, 256, 32, 1, 8, 4, 1, body="tma_block", prefetch_stages=1, cap_inflight=True),
    ),
    (Problem(4224, 2816, num_tokens=4), Config(4, 32, 2048, 32, 1, 8, 5, 1, body="tma_block", prefetch_stages=1)),
]


@pytest.mark.parametrize(("problem", "config"), CLAIMED, ids=lambda x: f"{x.n}x{x.k}" if isinstance(x, Problem) else "")
def test_claimed_strips_right_behind_each_other(problem: Problem, config: Config) -> None:
    """The next launch's blocks begin while those of the one before still claim."""
    target = target_here()
    if (why := KERNEL.why_invalid(problem, config, target)) is not None:
        pytest.skip(why)
    function = load(KERNEL, problem, config)
    case = KERNEL.cases.case_for(problem)
    given = KERNEL.cases.inputs(case, "cuda")
    require_right_in_a_graph(function, case, given, function.workspace(function.plan(problem)[1]))


def _function(config: Config) -> Function:
    target = target_here()
    if (why := KERNEL.why_invalid(FEW if config.few_tokens else MANY, config, target)) is not None:
        pytest.skip(why)
    return load(KERNEL, FEW if config.few_tokens else MANY, config)


def _workspace(function: Function, tokens: tuple[int, ...]) -> torch.Tensor:
    size = max(function.plan(replace(MANY, num_tokens=t))[1] for t in tokens)
    assert size > 0, "a tile is shared"
    return function.workspace(size)


@pytest.mark.parametrize("alone", [False, True], ids=["cooperative", "alone"])
@pytest.mark.parametrize(("config", "tokens"), [w[1:] for w in WAYS], ids=[w[0] for w in WAYS])
def test_launches_right_behind_each_other(config: Config, tokens: tuple[int, ...], alone: bool) -> None:
    """As in a forward: each begins while the one before it, of another number of tokens, still adds up."""
    if alone and shares_sms():
        pytest.skip("other processes' grids may be half-resident: launches are cooperative here")
    function = _function(config)
    workspace = _workspace(function, tokens)
    problems = [replace(MANY, num_tokens=t) for t in tokens]
    cases = [KERNEL.cases.case_for(p) for p in problems]
    inputs: list[dict[str, Any]] = [KERNEL.cases.inputs(case, torch.device("cuda")) for case in cases]
    expected = [KERNEL.reference.expected(p, given) for p, given in zip(problems, inputs, strict=True)]
    turns = [i % len(tokens) for i in range(60)]
    given = [inputs[i] | {"out": torch.full_like(inputs[i]["out"], float("nan"))} for i in turns]
    torch.cuda.synchronize()
    for i, arguments in zip(turns, given, strict=True):
        function.run(problems[i], arguments, in_forward=True, alone=alone)
    torch.cuda.synchronize()
    first: dict[int, torch.Tensor] = {}
    for launch, (i, arguments) in enumerate(zip(turns, given, strict=True)):
        result = compare(KERNEL, cases[i], arguments, expected[i])
        assert result.ok, f"launch {launch}: {result.message}"
        assert torch.equal(arguments["out"], first.setdefault(i, arguments["out"])), "the same bits each time"
    require_clean(workspace)


@pytest.mark.parametrize(("config", "tokens"), [w[1:] for w in WAYS], ids=[w[0] for w in WAYS])
def test_in_a_graph(config: Config, tokens: tuple[int, ...]) -> None:
    function = _function(config)
    case = KERNEL.cases.case_for(replace(MANY, num_tokens=tokens[0]))
    given = KERNEL.cases.inputs(case, torch.device("cuda"))
    require_right_in_a_graph(function, case, given, _workspace(function, tokens))
