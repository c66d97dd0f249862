"""Candidates: a spec names a few configurations of a problem, and neither a board nor a model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kerngen.arch import Target, find_device
from kerngen.boards import DEVICES
from kerngen.runtime.config import Keeping
from kerngen.templates import find_kernel, kernel_names
from kerngen.workload.workload import MODELS, find_model, workload

MOST_CANDIDATES = 12
SIZES = {part for model in MODELS for part in (model.removeprefix("gemma-4-"), model.split("-")[2])}
NAMES = re.compile(
    rf"\b({'|'.join(map(re.escape, sorted({*DEVICES, *SIZES, *MODELS}, key=len, reverse=True)))})\b", re.I
)


@pytest.mark.parametrize("name", kernel_names())
def test_a_spec_names_no_board_and_no_model(name: str) -> None:
    """What was learned of one is a row of the database, or a fitted constant of the cost model."""
    for path in sorted(find_kernel(name).folder.glob("spec*.py")):
        found = [
            f"{n}: {line.strip()}" for n, line in enumerate(path.read_text().splitlines(), 1) if NAMES.search(line)
        ]
        assert not found, "\n".join([f"{path.relative_to(Path(path).parents[2])} names a board or a model", *found])


def test_names_are_found_as_they_are_written() -> None:
    for line in ("# best on an H200 (docs)", "as 26B-A4B's", "E2B's", "the 26B", "on an RTX4090", "gemma-4-31b"):
        assert NAMES.search(line), line
    assert not NAMES.search("FLT4 H2000 e2bb")


@pytest.mark.parametrize("board", ["T4", "H200"])
@pytest.mark.parametrize("model", MODELS)
def test_a_problem_of_a_model_has_a_few_candidates(model: str, board: str) -> None:
    """With its drafter in int4. The default is one of them."""
    target = Target.of(find_device(board))
    for item in workload(find_model(model, kept=Keeping("int4")), target.arch).items:
        kernel = find_kernel(item.kernel)
        if kernel.why_unsupported(item.problem, target) is not None:
            continue
        candidates = kernel.candidates(item.problem, target)
        assert 1 <= len(candidates) <= MOST_CANDIDATES, (item.problem, candidates)
        default = kernel.default_config(item.problem, target)
        if kernel.is_fused:  # whether a step asks it is no part of how it runs
            default = replace(default, fused=candidates[0].fused)
        assert default in candidates, item.problem
        for config in candidates:
            assert kernel.why_invalid(item.problem, config, target) is None, (item.problem, config)
