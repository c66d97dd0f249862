"""attn_decode's fused combine on a GPU: outputs are right, and the LL mailbox is zero afterwards."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from exchanges import require_clean, require_right_in_a_graph

from kerngen.arch import ARCHES, Arch
from kerngen.errors import ToolchainError
from kerngen.runtime.launcher import Function, shares_sms
from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_decode.spec import Config, Problem, why_not_fused_combine
from kerngen.timing.measure import check_function, compare, load, target_here

KERNEL = find_kernel("attn_decode")
SPLITS = (2, 3, 5, 8, 13, 20, 33, 66, 132)
# An older body, which is compiled twice, takes every fourth case.
RUNS = [
    *((case, "own") for case in KERNEL.cases.CASES),
    *((case, body) for first, body in enumerate(("sm75", "sm80")) for case in KERNEL.cases.CASES[first::4]),
]
# At batch 1, as Gemma 4 has them: a window's layer and a full one, drafts of 4 and 5 tokens too.
WINDOW = Problem(256, 32, 16, window=1024, kv_len=8192, source="qkv", num_rotated_pairs=128)
FULL = Problem(512, 32, 4, kv_len=8192, source="qk", num_rotated_pairs=64)
PLAIN = Problem(512, 32, 4, kv_len=8192)
MODEL = [replace(p, q_len=q_len) for p in (WINDOW, FULL, PLAIN) for q_len in (1, 4, 5)]


def _configs(problem: Problem, arch: Arch | None = None) -> list[Config]:
    """The default's shape with the fewest splits, some, and the most that are resident here."""
    target = target_here(arch)
    if (why := KERNEL.why_unsupported(problem, target)) is not None:
        pytest.skip(why)
    shape = replace(KERNEL.default_config(problem, target), fused_combine=True)
    configs = [replace(shape, num_splits=s) for s in SPLITS]
    valid = [c for c in configs if KERNEL.why_invalid(problem, c, target) is None]
    if not valid:
        pytest.skip(str(why_not_fused_combine(problem, configs[0], target)))
    return list(dict.fromkeys([valid[0], valid[len(valid) // 2], valid[-1]]))


@cache
def _loaded(problem: Problem, config: Config, arch: Arch | None = None) -> Function:
    return load(KERNEL, problem, config, arch)


def _require_clean(function: Function, problem: Problem) -> None:
    require_clean(function.workspace(function.plan(problem)[1]))


@pytest.mark.parametrize(("case", "body"), RUNS, ids=str)
def test_together_against_reference(case: Case, body: str) -> None:
    """Two launches of one Function, of different inputs: the second finds what the first left in the workspace."""
    arch = None if body == "own" else ARCHES[body]
    if arch is not None and arch.number >= target_here().arch.number:
        pytest.skip(f"{target_here().arch} is what runs as its own body")
    configs = _configs(case.problem, arch)
    for config in dict.fromkeys(configs[:: max(1, len(configs) - 1)] if arch is None else configs[-1:]):
        try:
            function = load(KERNEL, case.problem, config, arch)
        except ToolchainError as e:
            pytest.skip(str(e))
        for seed in (case.seed, case.seed + 1000):
            result = check_function(function, replace(case, seed=seed))
            assert result.ok, f"{config}: {result.message}"
        _require_clean(function, case.problem)


@pytest.mark.parametrize("problem", MODEL, ids=lambda p: f"{p.source}-d{p.head_dim}-q{p.q_len}")
def test_together_at_lengths_of_a_model(problem: Problem) -> None:
    """One Function at every length: splits without keys, and rows whose window begins in another's split."""
    for config in _configs(problem):
        function = _loaded(replace(problem, kv_len=8192), config)
        for kv_len in (0, 1, 4, 5, 16, 17, 1023, 1024, 1025, 1029, 8192):
            case = KERNEL.cases.case_for(replace(problem, kv_len=kv_len))
            result = check_function(function, case)
            assert result.ok, f"{config} kv_len={kv_len}: {result.message}"
        _require_clean(function, problem)


@pytest.mark.parametrize("problem", [WINDOW, FULL, PLAIN], ids=["window", "full", "plain"])
def test_together_gives_the_same_bits_each_time(problem: Problem) -> None:
    """Whichever block comes first, the sum has one order: a hundred launches give the same bits."""
    case = KERNEL.cases.case_for(problem)
    given = KERNEL.cases.inputs(case, torch.device("cuda"))
    for config in _configs(problem):
        function = _loaded(problem, config)
        outputs = [torch.full_like(given["out"], float("nan")) for _ in range(100)]
        for out in outputs:
            function(problem, **(given | {"out": out}))
        torch.cuda.synchronize()
        for i, out in enumerate(outputs):
            assert torch.equal(out, outputs[0]), f"{config}: launch {i} differs from the first"


@pytest.mark.parametrize("alone", [False, True], ids=["cooperative", "alone"])
@pytest.mark.parametrize("problem", MODEL, ids=lambda p: f"{p.source}-d{p.head_dim}-q{p.q_len}")
def test_together_right_behind_another(problem: Problem, alone: bool) -> None:
    """As in a forward: a launch begins while the one before it, of other inputs, still merges in the same workspace."""
    if alone and shares_sms():
        pytest.skip("other processes' grids may be half-resident: launches are cooperative here")
    cases = [replace(KERNEL.cases.case_for(problem), seed=seed) for seed in range(3)]
    inputs: list[dict[str, Any]] = [KERNEL.cases.inputs(case, torch.device("cuda")) for case in cases]
    expected = [KERNEL.reference.expected(problem, given) for given in inputs]
    torch.cuda.synchronize()
    for config in _configs(problem):
        function = _loaded(problem, config)
        given = [inputs[i % 3] | {"out": torch.full_like(inputs[i % 3]["out"], float("nan"))} for i in range(60)]
        torch.cuda.synchronize()
        for arguments in given:
            function.run(problem, arguments, in_forward=True, alone=alone)
        torch.cuda.synchronize()
        for i, arguments in enumerate(given):
            result = compare(KERNEL, cases[i % 3], arguments, expected[i % 3])
            assert result.ok, f"{config}, launch {i}: {result.message}"
        _require_clean(function, problem)


def test_together_in_a_graph() -> None:
    case = KERNEL.cases.case_for(FULL)
    given = KERNEL.cases.inputs(case, torch.device("cuda"))
    (*_, config) = _configs(FULL)
    function = _loaded(FULL, config)
    require_right_in_a_graph(function, case, given, function.workspace(function.plan(FULL)[1]))
