"""greedy_head on a GPU: what launches leave for each other, other cuts, launches behind each other, and real heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kerngen.arch import Target
from kerngen.compiler.cache import CompileCache
from kerngen.compiler.render import render
from kerngen.runtime.launcher import Function
from kerngen.templates import find_kernel
from kerngen.templates.common.screen.screen import head_screen
from kerngen.templates.greedy_head.spec import MAX_TOKENS, PROGRESS_BYTES, Config, Problem
from kerngen.templates.kernel import Case
from kerngen.timing.measure import check_function, load, target_here

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
    ("bits", "config"),
    [
        (8, Config(4, 1, 4, 1, 4, 4)),
        (8, Config(4, 3, 8, 3, 1, 16)),
        (8, Config(8, 2, 16, 2, 1, 4)),
        (8, Config(8, 4, 4, 4, 2)),
        (8, Config(16, 1, 16, 3)),
        (8, Config(16, 6, 4, 1, 2)),
        (8, Config(32, 1, 8, 8)),
        (8, Config(32, 2, 8, 6)),
        (8, Config(32, 3, 16, 1)),
        (8, Config(8, 1, 8, 2, 2, row_tiles=2)),
        (7, Config(4, 1, 16, 8, 1, 16)),
        (7, Config(8, 2, 4, 4, 4, 4)),
        (7, Config(32, 4, 8, 4)),
        (7, Config(4, 1, 16, 4, 1, 4, first_bits=6)),
        (7, Config(8, 2, 4, 4, 4, 16, first_bits=6)),
        (7, Config(32, 2, 8, 4, row_tiles=2, first_bits=6)),
        (6, Config(4, 1, 8, 12, 1, 4)),
        (6, Config(16, 3, 16, 2)),
        (6, Config(32, 2, 8, 8, 1, 16)),
        (6, Config(16, 3, 4, 2, row_tiles=2)),
        (4, Config(4, 1, 4, 16, 4)),
        (4, Config(8, 4, 16, 4, 1, 4)),
        (4, Config(32, 2, 8, 8)),
    ],
    ids=str,
)
def test_other_configurations_and_boards(bits: int, config: Config, num_sms: int) -> None:
    """Fewer SMs than there are: more strips a warp, and parts of columns whose sums wait in memory."""
    here = target_here()
    target = Target(here.arch, replace(here.device, num_sms=min(num_sms, here.device.num_sms)))
    problem = replace(SMALL.problem, bits=bits)
    if (why := KERNEL.why_invalid(problem, config, target)) is not None:
        pytest.skip(why)
    image = CompileCache().get_or_compile(render(KERNEL, problem, config, target), target.arch).image
    function = Function(KERNEL, config, target, image)
    for seed in range(3):
        result = check_function(function, Case(SMALL.name, problem, seed, SMALL.options))
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


@pytest.mark.parametrize("bits", [6, 7, 8])
@pytest.mark.parametrize("num_tokens", [1, 8, MAX_TOKENS])
def test_a_head_of_any_floats(num_tokens: int, bits: int) -> None:
    """No product is exact here: what is chosen is as large as the largest, but for the order of a sum."""
    chosen, logits = _chosen(Problem(262144, 1536, num_tokens=num_tokens, bits=bits), likely=False)
    assert bool((chosen >= logits.amax(-1) * (1 - 2.0**-7)).all())


def test_likely_bounds_hold_the_right_row() -> None:
    chosen, logits = _chosen(Problem(262144, 1024, num_tokens=MAX_TOKENS, bits=4), likely=True)
    assert int((chosen >= logits.amax(-1) * (1 - 2.0**-7)).sum()) >= MAX_TOKENS - 1


def _chosen(problem: Problem, *, likely: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that are chosen and all, of random rows."""
    p, function = problem, _loaded(problem)
    draw = torch.Generator("cuda").manual_seed(p.num_tokens)
    weight = torch.randn(p.vocab_size, p.hidden, generator=draw, device="cuda").mul_(p.hidden**-0.5).to(torch.bfloat16)
    sizes = torch.logspace(-3, 3, p.num_tokens, device="cuda")[:, None]
    x = (torch.randn(p.num_tokens, p.hidden, generator=draw, device="cuda") * sizes).to(torch.bfloat16)
    given = {"ids": torch.full((p.num_tokens,), -1, device="cuda"), "x": x, "weight": weight}
    given["codes"], given["bounds"] = head_screen(weight, (), p.bits, likely)
    function(p, **given, num_tokens=p.num_tokens)
    logits = x.float() @ weight.float().T
    return logits.gather(1, given["ids"][:, None]).squeeze(1), logits
