"""decode_chain on a GPU: what blocks post is cleared behind them, grids on two streams, and the models' own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kerngen.measure import check_function, compare, load, target_here
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.templates.decode_chain.spec import Problem
from kerngen.templates.kernel import Case

KERNEL = find_kernel("decode_chain")


def _loaded(case: Case) -> Function:
    target = target_here()
    if (why := KERNEL.why_unsupported(case.problem, target)) is not None:
        pytest.skip(why)
    return load(KERNEL, case.problem, KERNEL.default_config(case.problem, target))


@pytest.mark.parametrize("case", [*KERNEL.cases.CASES, *KERNEL.bench.BENCH_CASES], ids=str)
def test_every_launch_finds_a_clean_workspace(case: Case) -> None:
    function = _loaded(case)
    for seed in range(3):
        result = check_function(function, Case(case.name, case.problem, seed, case.options))
        assert result.ok, result.message
    _, size = function.plan(case.problem)
    assert not function.workspace(size).any(), "a word that is not zero would be taken for the next launch's"


@pytest.mark.parametrize("alone", [False, True])
def test_a_launch_right_behind_another(alone: bool) -> None:
    """Each begins to fetch, and to run its dry turns, while the one before it still posts."""
    case = KERNEL.cases.case_for(Problem(2560, 512, 2752, 768))
    function = _loaded(case)
    rows = [KERNEL.cases.inputs(Case(case.name, case.problem, seed), "cuda") for seed in range(8)]
    wanted = [KERNEL.reference.expected(case.problem, given) for given in rows]
    for given in rows:
        function.run(case.problem, given, in_forward=True, alone=alone)
    torch.cuda.synchronize()
    for given, expected in zip(rows, wanted, strict=True):
        result = compare(KERNEL, case, given, expected)
        assert result.ok, result.message


def test_grids_of_two_streams_do_not_wait_for_each_other() -> None:
    case = KERNEL.cases.case_for(Problem(2560, 512, 2752, 768))
    functions = [_loaded(case), _loaded(case)]  # a workspace each
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    given: list[dict[str, Any]] = [
        KERNEL.cases.inputs(Case(case.name, case.problem, seed), "cuda") for seed in range(2)
    ]
    expected = [KERNEL.reference.expected(case.problem, inputs) for inputs in given]
    torch.cuda.synchronize()
    for _ in range(200):
        for function, stream, inputs in zip(functions, streams, given, strict=True):
            with torch.cuda.stream(stream):
                function(case.problem, **inputs)
    torch.cuda.synchronize()
    for inputs, wanted in zip(given, expected, strict=True):
        result = compare(KERNEL, case, inputs, wanted)
        assert result.ok, result.message
