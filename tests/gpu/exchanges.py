"""Launches whose blocks exchange data by LL in a workspace: how they are repeated, and what they must leave there."""

from __future__ import annotations

from typing import Any

import torch

from kerngen.runtime.launcher import Function, shares_sms
from kerngen.templates import Case
from kerngen.timing.measure import compare


def require_clean(workspace: torch.Tensor) -> None:
    assert not workspace.any(), "a word that is not zero would be taken for the next launch's"


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
