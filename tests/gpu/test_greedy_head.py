"""greedy_head on a GPU: what launches leave for each other, other cuts, launches behind each other, and real heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kerngen.arch import Target
from kerngen.cache import CompileCache
from kerngen.measure import check_function, load, target_here
from kerngen.render import render
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.templates.common.int8_screen import int8_screen
from kerngen.templates.greedy_head.spec import MAX_TOKENS, PROGRESS_BYTES, Config, Problem
from kerngen.templates.kernel import Case

KERNEL = find_kernel("greedy_head")
SMALL = KERNEL.cases.case_for(Problem(3000, 1000, num_tokens=19), kind="normal")


def _loaded(problem: Problem) -> Function:
    target = target_here()
    if (why := KERNEL.why_unsupported(problem, target)) is not None:
        pytest.skip(why)
    return load(KERNEL, problem, KERNEL.default_config(problem, target))


@pytest.mark.parametrize("case", KERNEL.cases.CASES, ids=str)
def test_every_launch_finds_a_clean_workspace(case: Case) -> None:
    function = _loaded(case.problem)
    for seed in range(3):
        result = check_function(function, Case(case.name, case.problem, seed, case.options))
        assert result.ok, result.message
        _, size = function.plan(case.problem)
        progress = function.workspace(size).view(torch.uint8)[: PROGRESS_BYTES * MAX_TOKENS]
        assert not progress.any(), "the next launch would take it for an end of its own"


@pytest.mark.parametrize("num_sms", [7, 132])
@pytest.mark.parametrize(
    "config",
    [
        Config(4, 1, 4, 1, 4, 4),
        Config(4, 3, 8, 3, 1, 16),
        Config(8, 2, 16, 2, 1, 4),
        Config(8, 4, 4, 4, 2),
        Config(16, 1, 16, 3),
        Config(16, 6, 4, 1, 2),
        Config(32, 1, 8, 8),
        Config(32, 2, 8, 6),
        Config(32, 3, 16, 1),
    ],
    ids=str,
)
def test_other_configurations_and_boards(config: Config, num_sms: int) -> None:
    """Fewer SMs than there are: more strips a warp, and parts of columns whose sums wait in memory."""
    here = target_here()
    target = Target(here.arch, replace(here.device, num_sms=min(num_sms, here.device.num_sms)))
    if (why := KERNEL.why_invalid(SMALL.problem, config, target)) is not None:
        pytest.skip(why)
    image = CompileCache().get_or_compile(render(KERNEL, SMALL.problem, config, target), target.arch).image
    function = Function(KERNEL, config, target, image)
    for seed in range(3):
        result = check_function(function, Case(SMALL.name, SMALL.problem, seed, SMALL.options))
        assert result.ok, result.message


def test_launches_right_behind_each_other() -> None:
    """Each clears what the next one begins with, which is on its way while the one before still chooses."""
    function = _loaded(SMALL.problem)
    sets = [KERNEL.cases.inputs(Case(SMALL.name, SMALL.problem, s, SMALL.options), "cuda") for s in range(4)]
    expected = [KERNEL.reference.expected(SMALL.problem, given)["ids"].long() for given in sets]
    for _ in range(50):
        for given in sets:
            function.run(SMALL.problem, given, in_forward=True)
    torch.cuda.synchronize()
    for given, want in zip(sets, expected, strict=True):
        assert torch.equal(given["ids"], want)


@pytest.mark.parametrize("num_tokens", [1, 8, MAX_TOKENS])
def test_a_head_of_any_floats(num_tokens: int) -> None:
    """No product is exact here: what is chosen is as large as the largest, but for the order of a sum."""
    problem = Problem(262144, 1536, num_tokens=num_tokens)
    function = _loaded(problem)
    draw = torch.Generator("cuda").manual_seed(num_tokens)
    weight = torch.randn(262144, 1536, generator=draw, device="cuda").mul_(1536**-0.5).to(torch.bfloat16)
    sizes = torch.logspace(-3, 3, num_tokens, device="cuda")[:, None]
    x = (torch.randn(num_tokens, 1536, generator=draw, device="cuda") * sizes).to(torch.bfloat16)
    given = {"ids": torch.full((num_tokens,), -1, device="cuda"), "x": x, "weight": weight}
    given["codes"], given["bounds"] = int8_screen(weight)
    function(problem, **given, num_tokens=num_tokens)
    logits = x.float() @ weight.float().T
    chosen = logits.gather(1, given["ids"][:, None]).squeeze(1)
    assert bool((chosen >= logits.amax(-1) * (1 - 2.0**-7)).all())
