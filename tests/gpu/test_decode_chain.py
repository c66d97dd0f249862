"""decode_chain on a GPU: what blocks post is cleared behind them, grids on two streams, and the models' own layers."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from kerngen.arch import Target
from kerngen.cache import CompileCache
from kerngen.measure import check_function, compare, load, target_here
from kerngen.render import render
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.templates.decode_chain.spec import Config, Problem
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
    """Each begins to fetch, and to run its dry turns, while the one before it still posts; what that writes, the
    residual and the row that is attended next, it must not read before.
    """
    case = KERNEL.cases.case_for(Problem(2560, 2048, 2752, 2048))
    function = _loaded(case)
    given = KERNEL.cases.inputs(case, "cuda")
    given["residual_out"] = given["residual"]
    rows = [given["attended"], *(torch.full_like(given["attended"], float("nan")) for _ in range(8))]
    stream, wanted = given["residual"].clone(), rows[0]
    for _ in range(8):
        expected = KERNEL.reference.expected(case.problem, given | {"residual": stream, "attended": wanted})
        stream, wanted = (expected[n].view(1, -1).to(wanted.dtype) for n in ("residual_out", "out"))
    for attended, out in pairwise(rows):
        function.run(case.problem, given | {"attended": attended, "out": out}, in_forward=True, alone=alone)
    torch.cuda.synchronize()
    for got, want in ((given["residual"], stream), (rows[-1], wanted)):
        # flips of one layer move the next one's rows; a row read too early has nothing to do with what is wanted
        assert torch.nn.functional.cosine_similarity(got.float(), want.float()).item() > 0.999


@pytest.mark.parametrize("num_sms", [7, 60, 132])
@pytest.mark.parametrize(
    "config",
    [
        Config(16, 48, 3, 3, 2, 1, 3, 5),
        Config(8, 24, 4, 1, 5, 33, 33, 3),
        Config(12, 24, 12, 2, 2, 2, 5, 4),
    ],
    ids=str,
)
def test_other_configurations_and_boards(config: Config, num_sms: int) -> None:
    """Fewer SMs than there are: long shares, and more strips in each."""
    case = KERNEL.cases.case_for(Problem(1536, 1056, 2752, 640))
    here = target_here()
    target = Target(here.arch, replace(here.device, num_sms=min(num_sms, here.device.num_sms)))
    if (why := KERNEL.why_invalid(case.problem, config, target)) is not None:
        pytest.skip(why)
    image = CompileCache().get_or_compile(render(KERNEL, case.problem, config, target), target.arch).image
    result = check_function(Function(KERNEL, config, target, image), case)
    assert result.ok, result.message


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e4])
def test_what_is_no_number_stays_none_and_an_outlier_is_one(value: float) -> None:
    case = KERNEL.cases.case_for(Problem(1536, 1056, 2752, 640))
    function = _loaded(case)
    given = KERNEL.cases.inputs(case, "cuda")
    given["attended"][0, 40] = value
    expected = KERNEL.reference.expected(case.problem, given)
    function(case.problem, **given)
    torch.cuda.synchronize()
    if value == 3e4:
        result = compare(KERNEL, case, given, expected)
        assert result.ok, result.message
    else:
        assert given["out"].isnan().all(), "and no launch waits for ever"


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
    ended = [stream.record_event() for stream in streams]
    deadline = time.monotonic() + 30
    while not all(event.query() for event in ended):
        assert time.monotonic() < deadline, "two half-resident grids wait for each other"
        time.sleep(0.01)
    for inputs, wanted in zip(given, expected, strict=True):
        result = compare(KERNEL, case, inputs, wanted)
        assert result.ok, result.message
