"""exchange_norm's own source, on the host's threads: ranks with rows of their own, launch behind launch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from ranks_on_cpu import RanksOnCpu

from kerngen.templates import find_kernel
from kerngen.templates.exchange_norm.spec import Config, Problem
from kerngen.timing.measure import compare

pytestmark = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")

KERNEL = find_kernel("exchange_norm")
MAX_TOKENS, LAUNCHES = 7, 8


class Ranks(RanksOnCpu):
    def __init__(self, problem: Problem, config: Config, folder: Path, changed: tuple[str, str] = ("", "")) -> None:
        super().__init__(KERNEL, problem, config, folder, width=problem.hidden, max_rows=MAX_TOKENS * problem.rows,
                         most_blocks=3, changed=changed)  # fmt: skip

    def inputs(self, seed: int, tokens: int, two_shot_from: int) -> list[dict[str, Any]]:
        """Of each rank: another h, and other experts' rows, of the same case otherwise."""
        problem = replace(self.problem, num_tokens=tokens)
        cases = [replace(KERNEL.cases.case_for(problem), seed=100 * seed + r) for r in range(problem.ranks)]
        each = [KERNEL.cases.inputs(case, "cpu") for case in cases]
        own = ("h", "routed", "topk_weights", "out", "residual_out")
        given = {"addresses": self.addresses, "max_rows": self.max_rows, "two_shot_from": two_shot_from}
        return [{**each[0], **{n: e[n] for n in own}, **given, "rank": r} for r, e in enumerate(each)]


PROBLEMS = {
    "one-warp": (Problem(2, 264, residual_dtype="fp32"), Config(2)),
    "three-ranks": (Problem(3, 520, has_scalar=True), Config(1)),
    "five-ranks": (Problem(5, 264, has_next=False), Config(2, 2)),
    "experts": (Problem(3, 520, top_k=8, has_scalar=True), Config(2)),
}


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS, scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(*request.param, tmp_path_factory.mktemp("kernel"))


def require_right(ranks: Ranks, launches: list[tuple[int, int]], given: list[list[dict[str, Any]]]) -> None:
    """launches: tokens and two_shot_from."""
    for each, of in zip(given, launches, strict=True):
        problem = replace(ranks.problem, num_tokens=of[0])
        expected = KERNEL.reference.expected_of(problem, each)
        for inputs in each:
            result = compare(KERNEL, KERNEL.cases.case_for(problem), inputs, expected)
            assert result.ok, f"rank {inputs['rank']}, (tokens, two_shot_from) {of}: {result.message}"
            for name in expected:
                assert torch.equal(inputs[name], each[0][name]), f"rank {inputs['rank']}: other bits of {name}"
    assert ranks.words_left() == 0


def test_ranks_hold_the_same_bits_as_the_reference_says(ranks: Ranks) -> None:
    """Launches of other numbers of tokens right behind each other, in one shot and in two; nothing is left behind."""
    draw = random.Random(ranks.problem.ranks)
    launches = [(draw.randint(1, MAX_TOKENS), draw.choice((0, 1, 4))) for _ in range(LAUNCHES)]
    given = [ranks.inputs(i, *of) for i, of in enumerate(launches)]
    ranks.run(given, [[draw.choice((0, 0, 80_000)) for _ in range(ranks.problem.ranks)] for _ in launches])
    require_right(ranks, launches, given)


def late_rank(ranks: Ranks, patience_s: float) -> None:
    launches = [(1, 0), (1, 0)]
    given = [ranks.inputs(i, *of) for i, of in enumerate(launches)]
    ranks.run_with_a_late_rank(given, patience_s)
    require_right(ranks, launches, given)


def test_two_phases_are_enough_and_one_is_not(tmp_path: Path) -> None:
    for folder in (tmp_path / "two", tmp_path / "one"):
        folder.mkdir()
    late_rank(Ranks(*PROBLEMS["one-warp"], tmp_path / "two"), 60.0)
    one = Ranks(*PROBLEMS["one-warp"], tmp_path / "one", ("int(phase & 1) * RANKS * slot", "int64_t(0)"))
    with pytest.raises(AssertionError):
        late_rank(one, 6.0)


@pytest.mark.parametrize("two_shot_from", [0, 1])
def test_a_rank_whose_peer_is_gone_leaves_once_it_is_told(ranks: Ranks, two_shot_from: int) -> None:
    (inputs, *_) = ranks.inputs(0, 2, two_shot_from)
    ranks.launch_aborted(inputs)
    for name in ("residual_out", "out"):
        assert inputs[name] is None or inputs[name].isnan().all(), name
