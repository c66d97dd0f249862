"""decode_layers on a GPU: what blocks post is cleared behind them, grids on two streams, and the models' own layers."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from exchange_ranks import Streams

from kerngen.arch import Target
from kerngen.compiler.cache import CompileCache
from kerngen.compiler.render import render
from kerngen.errors import LaunchError
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.templates.decode_layers.spec import PEER_ROWS, Config, Problem, layer_tensors
from kerngen.templates.kernel import Case
from kerngen.timing.measure import check_function, compare, fresh, load, target_here

KERNEL = find_kernel("decode_layers")
# E2B's and E4B's heads with narrower matrices; a dense model's
ALL = Problem(
    "ssfsSFS", 1536, 8, 1, 256, 1, 512, False, 2752, 4096, ple_width=256, window=512, kv_len=700
)  # fmt: skip
DENSE = Problem("sssf", 2560, 16, 8, 256, 1, 512, True, 2752, kv_len=300)
EXPERTS = Problem(
    "ssf", 1024, 16, 8, 256, 2, 512, True, 2112, kv_len=300, num_experts=32, top_k=8, expert_inner=704
)  # fmt: skip
DRAFTER = Problem("SSSF", 1024, 32, 16, 256, 4, 512, False, 2752, window=513, kv_len=700)  # the 31B's, less wide
# Caches in other formats.
FORMATS = {
    "all-int8": replace(ALL, kv_format="int8"),
    "dense-shared": replace(DENSE, kv_format="shared"),
    "dense-shared_int8": replace(DENSE, kv_format="shared_int8"),
    "drafter-shared_int8": replace(DRAFTER, kv_format="shared_int8"),
}


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
@pytest.mark.parametrize("problem", [ALL, DENSE, EXPERTS, DRAFTER, *FORMATS.values()],
                         ids=["all", "dense", "experts", "drafter", *FORMATS])  # fmt: skip
def test_a_launch_right_behind_another(problem: Problem, alone: bool) -> None:
    """Each begins to fetch while the one before it still posts; what that writes, the row that the next one begins
    with, it must not read before. Sums have one order, so launches that wait for each other say to the bit what is
    wanted.
    """
    case = KERNEL.cases.case_for(problem)
    function = _loaded(case)
    given = KERNEL.cases.inputs(case, "cuda")

    def chained(*, waiting: bool) -> torch.Tensor:
        rows = [given["residual"], *(torch.full_like(given["residual"], float("nan")) for _ in range(8))]
        for residual, out in pairwise(rows):
            function.run(problem, given | {"residual": residual, "out": out}, in_forward=True, alone=alone)
            if waiting:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return torch.cat(rows)

    wanted = chained(waiting=True)
    assert wanted.isfinite().all()
    for _ in range(5):
        assert torch.equal(chained(waiting=False), wanted)


@pytest.mark.parametrize("num_sms", [16, 60, 132])
@pytest.mark.parametrize("num_warps", [8, 12, 16])
@pytest.mark.parametrize("split_tiles", [1, 4])
@pytest.mark.parametrize("problem", [ALL, EXPERTS, DRAFTER, *FORMATS.values()],
                         ids=["all", "experts", "drafter", *FORMATS])  # fmt: skip
def test_other_configurations_and_boards(problem: Problem, num_warps: int, split_tiles: int, num_sms: int) -> None:
    """Fewer SMs than there are: long shares, more strips in each, and more tiles of keys."""
    case, here = KERNEL.cases.case_for(problem), target_here()
    target = Target(here.arch, replace(here.device, num_sms=min(num_sms, here.device.num_sms)))
    config = Config(num_warps, 48, 4, 2, 2, 3, 5, 5, split_tiles)
    if (why := KERNEL.why_invalid(case.problem, config, target)) is not None:
        pytest.skip(why)
    image = CompileCache().get_or_compile(render(KERNEL, case.problem, config, target), target.arch).image
    result = check_function(Function(KERNEL, config, target, image), case)
    assert result.ok, result.message


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e4])
@pytest.mark.parametrize("problem", [ALL, EXPERTS, DRAFTER, *FORMATS.values()],
                         ids=["all", "experts", "drafter", *FORMATS])  # fmt: skip
def test_what_is_no_number_stays_none_and_an_outlier_is_one(problem: Problem, value: float) -> None:
    case = KERNEL.cases.case_for(problem)
    function = _loaded(case)
    given = KERNEL.cases.inputs(case, "cuda")
    given["residual"][0, 40] = value
    expected = KERNEL.reference.expected(case.problem, given)
    function(case.problem, **given)
    torch.cuda.synchronize()
    if value == 3e4:
        result = compare(KERNEL, case, given, expected)
        assert result.ok, result.message
    else:
        assert given["out"].isnan().all(), "and no launch waits for ever"


def test_grids_of_two_streams_do_not_wait_for_each_other() -> None:
    case = KERNEL.cases.case_for(DENSE)
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
    ended = [stream.record_event() for stream in streams]
    deadline = time.monotonic() + 30
    while not all(event.query() for event in ended):
        assert time.monotonic() < deadline, "two half-resident grids wait for each other"
        time.sleep(0.01)
    for inputs, wanted in zip(given, expected, strict=True):
        result = compare(KERNEL, case, inputs, wanted)
        assert result.ok, result.message


def test_a_graph_names_arrays_of_addresses_that_stay() -> None:
    """They are made by the first launch; a capture that would have to make them is refused, and spoils nothing."""
    case = KERNEL.cases.case_for(DENSE)
    function = _loaded(case)
    given = KERNEL.cases.inputs(case, "cuda")
    expected = KERNEL.reference.expected(case.problem, given)
    others = fresh(given)
    function(case.problem, **given)
    torch.cuda.synchronize()
    with pytest.raises(LaunchError, match="being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        function(case.problem, **others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(case.problem, **given)
    function(case.problem, **others)  # other arrays
    given["out"].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for outputs in (given, others):
        result = compare(KERNEL, case, outputs, expected)
        assert result.ok, result.message


OVER_RANKS = Problem("ssfs", 1024, 8, 4, 256, 1, 512, True, 1344, kv_len=300, dtype="fp16", residual_dtype="fp32")
WITH_EXPERTS = Problem(
    "ssf", 1024, 8, 4, 256, 1, 512, True, 1056, kv_len=300, num_experts=32, top_k=8, expert_inner=352
)  # fmt: skip
OF_DRAFTER = Problem(
    "SSSF", 1024, 8, 4, 256, 1, 512, False, 2752, window=513, kv_len=700, ranks=2, mlp_is_whole=True
)  # fmt: skip


class OneGpu(Streams):
    """The ranks of a model, each with SMs enough of its own."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.ranks, PEER_ROWS, problem.hidden)
        here = target_here()
        self.problem = problem
        self.target = Target(here.arch, replace(here.device, num_sms=here.device.num_sms // problem.ranks))
        config = KERNEL.default_config(problem, self.target)
        image = CompileCache().get_or_compile(render(KERNEL, problem, config, self.target), here.arch).image
        self.functions = [Function(KERNEL, config, self.target, image) for _ in range(problem.ranks)]
        for function in self.functions:
            function.workspace(function.plan(problem)[1])  # allocated before anything waits

    def given(self, seed: int) -> list[dict[str, Any]]:
        """Of each rank; they have the residual, the norms, routers and scalars of the first."""
        case = KERNEL.cases.case_for(self.problem)
        each = [
            KERNEL.cases.inputs(Case(case.name, self.problem, seed * 8 + rank), "cuda") | {"rank": rank}
            for rank in range(self.problem.ranks)
        ]
        names = layer_tensors(self.problem.num_experts)
        alike = ("gate_up", "down") if self.problem.mlp_is_whole else ()
        own = [
            n in ("q_norm", "k_norm") or (n.endswith(("packed", "scales")) and not n.startswith(alike)) for n in names
        ] * len(self.problem.layers)
        for given in each:
            given["layers"] = tuple(
                mine if is_own else shared
                for mine, shared, is_own in zip(given["layers"], each[0]["layers"], own, strict=True)
            )
            given |= {n: each[0][n] for n in ("residual", "final_norm", "positions", "kv_lens")}
            given["addresses"] = self.addresses
        return each

    def launch(self, rank: int, given: dict[str, Any]) -> None:
        """On torch's current stream."""
        self.functions[rank].run(self.problem, given, alone=True)


def _over_ranks(problem: Problem) -> OneGpu:
    if (why := KERNEL.why_unsupported(problem, target_here())) is not None:
        pytest.skip(why)
    return OneGpu(problem)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("problem", [OVER_RANKS, WITH_EXPERTS, OF_DRAFTER], ids=["dense", "experts", "drafter"])
def test_ranks_sum_what_each_has(problem: Problem, ranks: int) -> None:
    """Launches right behind each other, with ranks that pause at random: the same bits on all, and those wanted."""
    gpu, draw = _over_ranks(replace(problem, ranks=ranks)), Random(ranks)
    case = KERNEL.cases.case_for(gpu.problem)
    each = [gpu.given(seed) for seed in range(3)]
    expected = [KERNEL.reference.expected_of(gpu.problem, given) for given in each]
    torch.cuda.synchronize()
    for _ in range(30):
        for given in each:
            for of_rank in given:
                of_rank["out"].fill_(float("nan"))
        torch.cuda.synchronize()
        with gpu.watched():
            for given in each * 4:
                for rank in draw.sample(range(ranks), ranks):
                    with torch.cuda.stream(gpu.streams[rank]):
                        if draw.random() < 0.3:
                            torch.cuda._sleep(draw.randrange(200_000))
                        gpu.launch(rank, given[rank])
        for given, wanted in zip(each, expected, strict=True):
            for rank in range(ranks):
                result = compare(KERNEL, case, given[rank], wanted[rank])
                assert result.ok, f"rank {rank}: {result.message}"
                assert torch.equal(given[rank]["out"], given[0]["out"]), "bits differ from rank to rank"
    gpu.require_clean()


def test_a_rank_alone_leaves_once_it_is_told() -> None:
    gpu = _over_ranks(replace(OVER_RANKS, ranks=2))
    given = gpu.given(1)
    gpu.require_leaving(lambda: gpu.launch(0, given[0]))
    assert given[0]["out"].isnan().all()
