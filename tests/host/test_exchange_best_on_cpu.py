"""exchange_best's own source, on the host's threads: ranks with choices of their own, launch behind launch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_on_cpu
import pytest
import torch
from ranks_on_cpu import Given, RanksOnCpu

from kerngen.templates import find_kernel
from kerngen.templates.exchange_best.spec import POSTED, Config, Problem
from kerngen.timing.measure import compare

pytestmark = pytest.mark.skipif(kernel_on_cpu.COMPILER is None, reason="neither g++ nor clang++ is on the PATH")

KERNEL = find_kernel("exchange_best")
MAX_TOKENS, LAUNCHES = 7, 8
# Logits that are equal, on one rank and on several, and those that no token is chosen for.
LOGITS = (1.0, 1.0, 1.0, 0.0, -0.0, -2.0, 3.0, 3.0, float("-inf"), float("inf"), float("nan"))


class Ranks(RanksOnCpu):
    def __init__(self, problem: Problem, config: Config, folder: Path, changed: tuple[str, str] = ("", "")) -> None:
        super().__init__(KERNEL, problem, config, folder, width=POSTED, max_rows=MAX_TOKENS, most_blocks=2,
                         changed=changed)  # fmt: skip

    def inputs(self, seed: int, tokens: int) -> list[dict[str, Any]]:
        """Of each rank: other rows and logits of the same case."""
        problem, draw = replace(self.problem, num_tokens=tokens), random.Random(seed)
        given = []
        for rank in range(problem.ranks):
            mine = KERNEL.cases.inputs(replace(KERNEL.cases.case_for(problem), seed=100 * seed + rank), "cpu")
            if not problem.multiplies:
                logits = torch.tensor([draw.choice(LOGITS) for _ in range(tokens)]).to(mine["table"].dtype)
                mine["table"][torch.arange(tokens), mine["rows"]] = logits
            elif draw.random() < 0.5 and given:  # the same logits as the rank before, in another order of tokens' rows
                mine |= {name: given[-1][name] for name in ("x", "table", "table_scales", "rows")}
            place = {"addresses": self.addresses, "max_rows": MAX_TOKENS, "rank": rank, "first_row": 1000 * rank}
            given.append({**mine, **place})
        return given

    def require_right(self, given: Given) -> None:
        for each in given:
            problem = replace(self.problem, num_tokens=each[0]["num_tokens"])
            expected = KERNEL.reference.expected_of(problem, each)
            for inputs in each:
                result = compare(KERNEL, KERNEL.cases.case_for(problem), inputs, expected)
                assert result.ok, f"rank {inputs['rank']}: {result.message}"
                for name in expected:
                    assert torch.equal(inputs[name].view(torch.int32), each[0][name].view(torch.int32)), name
        assert self.words_left() == 0, "a word that is left would be taken for the next launch's"


PROBLEMS = {
    "rows": (Problem(3, 264), Config(2, 6)),
    "rows-in-rounds": (Problem(2, 1800), Config(1, 6)),
    "packed-rows": (Problem(2, 288, table="int8_min", group_size=16), Config(1, 6)),
    "logits": (Problem(2, 1000, source="logits"), Config(1, 6)),
    "eight-ranks": (Problem(8, 64, source="logits"), Config(2, 6)),
}


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS, scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(*request.param, tmp_path_factory.mktemp("kernel"))


def test_ranks_choose_what_the_reference_says(ranks: Ranks) -> None:
    """Launches of other numbers of tokens right behind each other; nothing is left behind."""
    draw = random.Random(ranks.problem.ranks)
    given = [ranks.inputs(i, draw.randint(1, MAX_TOKENS)) for i in range(LAUNCHES)]
    ranks.run(given, [[draw.choice((0, 0, 80_000)) for _ in range(ranks.problem.ranks)] for _ in given])
    ranks.require_right(given)


@pytest.mark.parametrize("ranks", [PROBLEMS[name] for name in ("logits", "eight-ranks")], indirect=True, ids=str)
def test_of_equal_logits_the_lowest_token_is_chosen_and_of_none_none(ranks: Ranks) -> None:
    """Also where a later rank has the lower row of its own."""
    (each,) = given = [ranks.inputs(0, 5)]
    for rank, inputs in enumerate(each):
        inputs["rows"] = torch.arange(5).flip(0) if rank == 0 else torch.zeros(5, dtype=torch.int64)
        for token, logit in enumerate((1.0, -0.0 if rank else 0.0, float("-inf"), 2.0, 0.0)):
            inputs["table"][token, inputs["rows"][token]] = logit
    each[-1]["table"][3, each[-1]["rows"][3]] = float("nan")
    each[-1]["table"][4, each[-1]["rows"][4]] = float("inf")
    ranks.run(given, [[0] * len(each)])
    ranks.require_right(given)
    for inputs in each:
        assert inputs["ids"].tolist() == [4, 3, -1, -1, -1]


def late_rank(ranks: Ranks, patience_s: float) -> None:
    given = [ranks.inputs(i, 1) for i in range(2)]
    ranks.run_with_a_late_rank(given, patience_s)
    ranks.require_right(given)


def test_two_phases_are_enough_and_one_is_not(tmp_path: Path) -> None:
    for folder in (tmp_path / "two", tmp_path / "one"):
        folder.mkdir()
    late_rank(Ranks(*PROBLEMS["logits"], tmp_path / "two"), 60.0)
    one = Ranks(*PROBLEMS["logits"], tmp_path / "one", ("int(phase & 1) * RANKS * slot", "int64_t(0)"))
    with pytest.raises(AssertionError):
        late_rank(one, 6.0)


def test_a_rank_whose_peer_is_gone_chooses_no_token_once_it_is_told(ranks: Ranks) -> None:
    (inputs, *_) = ranks.inputs(0, 2)
    ranks.launch_aborted(inputs)
    assert inputs["ids"].tolist() == [-1, -1]
    assert inputs["values"].isnan().all()
