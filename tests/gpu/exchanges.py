"""Launches whose blocks exchange data by LL in a workspace: how they are repeated, and what they must leave there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kerngen.runtime.launcher import Function, shares_sms
from kerngen.templates import Case
from kerngen.templates.kernel import Kernel
from kerngen.timing.measure import compare


def require_clean(workspace: torch.Tensor) -> None:
    assert not workspace.any(), "a word that is not zero would be taken for the next launch's"


Answered = tuple[Case, dict[str, Any], dict[str, Any]]


def answered(kernel: Kernel, case: Case) -> Answered:
    """A case, its inputs, and what comes of them."""
    given = kernel.cases.inputs(case, torch.device("cuda"))
    return case, given, kernel.reference.expected(case.problem, given)


def poisoned(given: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    return given | {name: torch.full_like(given[name], float("nan")) for name in outputs}


def require_same_bits_behind_each_other(
    function: Function, cases: Sequence[Answered], *, outputs: Sequence[str] = ("out",), **how: bool
) -> None:
    """60 launches, as `how` says to Function.run, of the cases in turn: each begins while the one before it, which had
    other inputs, is still at work. Each case's first is right, and its others are the same bits.
    """
    turns = [i % len(cases) for i in range(60)]
    given = [poisoned(cases[turn][1], outputs) for turn in turns]
    torch.cuda.synchronize()
    for turn, arguments in zip(turns, given, strict=True):
        function.run(cases[turn][0].problem, arguments, **how)
    torch.cuda.synchronize()
    for (case, _, expected), arguments in zip(cases, given, strict=False):
        result = compare(function.kernel, case, arguments, expected)
        assert result.ok, f"{function.config}, {case}: {result.message}"
    for i, (turn, arguments) in enumerate(zip(turns, given, strict=True)):
        for name in outputs:
            assert torch.equal(arguments[name], given[turn][name]), f"{function.config}: launch {i} is not {turn}"


def require_right_in_a_graph(function: Function, case: Case, given: dict[str, Any], workspace: torch.Tensor) -> None:
    """Three launches right behind each other, replayed twenty times."""
    kernel, problem = function.kernel, case.problem
    expected = kernel.reference.expected(problem, given)
    function(problem, **given)  # the workspace is made outside of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            function.run(problem, given, in_forward=True, alone=not shares_sms())
    for _ in range(20):
        given["out"].fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    result = compare(kernel, case, given, expected)
    assert result.ok, result.message
    require_clean(workspace)
