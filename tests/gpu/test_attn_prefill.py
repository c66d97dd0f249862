"""Prefill attention by warpgroups on a GPU that has them: every case, in every way that its tiles can be copied. And of
every body: a mask with ends that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from bodies import valid_here, wrong_of

from kerngen.arch import ARCHES, Target
from kerngen.errors import ToolchainError
from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_prefill import spec
from kerngen.timing.measure import check_function, compare, load, target_here

KERNEL = find_kernel("attn_prefill")
# (block_m, block_n, num_warps, warps_d, num_stages)
TILES = {
    128: ((128, 128, 8, 1, 2), (192, 80, 12, 1, 2), (128, 176, 8, 1, 1)),
    256: ((128, 80, 8, 1, 2), (128, 64, 8, 1, 2), (128, 64, 8, 1, 1)),
    512: tuple((64, 64, 8, 2, stages) for stages in (9, 8, 7, 4)),
}
WAYS = tuple(product((False, True), (False, True), (1, 2)))  # ping_pong, use_tma, cluster
HALVES_WAYS = tuple(product((False,), (False, True), (1, 2, 4)))
SPLIT = KERNEL.config_type(64, 64, 8, 2, 8, body="wgmma_ws", use_tma=True, cluster=2, split_kv=True)
SPLITS = (
    SPLIT,
    replace(SPLIT, use_tma=False, cluster=1),
    replace(SPLIT, use_tma=False, cluster=1, num_stages=7),  # beside codes
)


def _configs(case: Case) -> Iterator[Any]:
    ways = HALVES_WAYS if case.problem.head_dim == 512 else WAYS
    for tile, (ping_pong, use_tma, cluster) in product(TILES[case.problem.head_dim], ways):
        yield KERNEL.config_type(*tile, False, "wgmma_ws", ping_pong, use_tma, cluster)
    if case.problem.head_dim == 512:
        yield from SPLITS


# Lists of tiles are taken by the body for head_dim 512, and by mma.sync.
BY_WARPGROUPS = [c for c in KERNEL.cases.CASES if not c.problem.lists or c.problem.head_dim == 512]


@pytest.mark.parametrize("case", BY_WARPGROUPS, ids=str)
def test_by_warpgroups(case: Case) -> None:
    configs = valid_here(KERNEL, case, _configs(case))
    assert configs
    assert wrong_of(KERNEL, case, configs) == []


PLAIN = [c for c in KERNEL.cases.CASES if c.name.endswith(("fp16-dense-self", "fp16-paged-chunk", "fp16-paged-window"))]


@pytest.mark.parametrize("body", ["sm70", "sm75", "sm80", "own"])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_ends_at_the_queries_give_the_same_bits(case: Case, body: str) -> None:
    """As without ends: the same tiles, in the same order, under the same mask."""
    here = target_here()
    target = here if body in ("own", here.arch.name) else Target.of(ARCHES[body])
    if target.arch.number > here.arch.number:
        pytest.skip(f"{target.arch} code does not run on {here.arch}")
    asked = replace(case.problem, ends=True)
    configs = [KERNEL.default_config(case.problem, target)]
    if target.arch.has_wgmma:
        ways = (c for c in _configs(case) if c.use_tma == (c.cluster > 1))
        configs += [c for c in ways if KERNEL.why_invalid(asked, c, target) is None]
    inputs = KERNEL.cases.inputs(case, torch.device("cuda"))
    q_lens, kv_lens = case.options["q_lens"], case.options["kv_lens"]
    own = KERNEL.cases.ends_of(q_lens, kv_lens, [()] * len(q_lens))
    for config in configs:
        found = []
        for problem, ends in ((case.problem, None), (asked, torch.tensor(own, dtype=torch.int32, device="cuda"))):
            out = torch.full_like(inputs["out"], float("nan"))
            try:
                function = load(KERNEL, problem, config, target.arch)
            except ToolchainError as e:
                pytest.skip(str(e))
            function(problem, **inputs | {"out": out, "ends": ends})
            found.append(out)
        assert torch.equal(*found), f"{config}"


@pytest.mark.parametrize("body", ["sm75", "sm80", "own"])
@pytest.mark.parametrize("tokens", [256, 1024])
def test_lists_of_all_tiles_give_the_same_bits(body: str, tokens: int) -> None:
    """As without lists: by mma.sync everywhere; by warpgroups where a block's keys end in the upper tile of a pair,
    which has the same two tiles then, and within rounding elsewhere.
    """
    here = target_here()
    target = here if body in ("own", here.arch.name) else Target.of(ARCHES[body])
    if target.arch.number > here.arch.number:
        pytest.skip(f"{target.arch} code does not run on {here.arch}")
    problem = KERNEL.problem_type(512, 16, 2, page_size=64, dtype="fp16", num_tokens=tokens, kv_len=4096)
    asked = replace(problem, lists=True)
    case = KERNEL.cases.case_for(asked)
    every = KERNEL.cases.inputs(replace(case, options=case.options | {"lists": "all"}), torch.device("cuda"))
    configs = [KERNEL.default_config(asked, target)]
    if target.arch.has_wgmma:
        configs = [c for c in (KERNEL.config_type(), *_configs(case)) if KERNEL.why_invalid(asked, c, target) is None]
        configs.append(KERNEL.config_type(64, 32, 8, 4, body="mma"))
    for config in configs:
        found = []
        for of in (problem, asked):
            out = torch.full_like(every["out"], float("nan"))
            try:
                function = load(KERNEL, of, config, target.arch)
            except ToolchainError as e:
                pytest.skip(str(e))
            function(of, **every | {"out": out})
            found.append(out)
        whole, listed = found
        torch.testing.assert_close(listed, whole, atol=2e-3, rtol=2e-3)
        if config.body == "mma":
            assert torch.equal(whole, listed), f"{config}"
        elif not config.split_kv:
            upper = torch.arange(4096 - tokens, 4096, device="cuda") // 64 % 2 == 1
            assert torch.equal(whole[upper], listed[upper]), f"{config}"


@pytest.mark.parametrize("splits", [2, 3, spec.MAX_SPLITS])
@pytest.mark.parametrize("case", [c for c in KERNEL.cases.CASES if c.problem.head_dim == 512], ids=str)
def test_more_parts_than_are_of_use(case: Case, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without a key, rows that see no key of a part; masks, windows and caps in others than the first."""
    monkeypatch.setattr(spec, "num_splits", lambda problem, config, target: splits if config.split_kv else 1)
    configs = valid_here(KERNEL, case, SPLITS)
    assert configs
    assert wrong_of(KERNEL, case, configs) == []


@pytest.mark.parametrize("heads", [(32, 4), (16, 2), (8, 1)], ids=str)
def test_parts_of_the_keys(heads: tuple[int, int]) -> None:
    """One Function for chunks of any length behind any number of keys: whole, in some parts, in as many as may be."""
    whole = KERNEL.problem_type(512, *heads, page_size=64, kv_len=16384, num_tokens=64)
    valid_here(KERNEL, KERNEL.cases.case_for(whole), [SPLIT])
    function, found = load(KERNEL, whole, SPLIT), set()
    for num_tokens, kv_len in product((1, 16, 63, 64, 65, 128, 192, 512), (64, 128, 129, 1024, 2049, 8191, 16384)):
        problem = replace(whole, num_tokens=min(num_tokens, kv_len), kv_len=kv_len)
        found.add(spec.num_splits(problem, SPLIT, function.target))
        result = check_function(function, KERNEL.cases.case_for(problem))
        assert result.ok, f"{num_tokens} tokens, {kv_len} keys: {result.message}"
    assert {1, 16} < found


def test_right_behind_another_with_the_same_bits() -> None:
    """As in a forward: a launch begins while the one before it, of other inputs, still has the same workspace."""
    problem = KERNEL.problem_type(512, 16, 2, page_size=64, kv_len=5003, num_tokens=64)
    cases = [replace(KERNEL.cases.case_for(problem), seed=seed) for seed in range(3)]
    valid_here(KERNEL, cases[0], [SPLIT])
    function = load(KERNEL, problem, SPLIT)
    inputs: list[dict[str, Any]] = [KERNEL.cases.inputs(case, torch.device("cuda")) for case in cases]
    expected = [KERNEL.reference.expected(problem, given) for given in inputs]
    given = [inputs[i % 3] | {"out": torch.full_like(inputs[i % 3]["out"], float("nan"))} for i in range(60)]
    torch.cuda.synchronize()
    for arguments in given:
        function.run(problem, arguments, in_forward=True)
    torch.cuda.synchronize()
    for i, arguments in enumerate(given):
        if i < 3:
            result = compare(KERNEL, cases[i], arguments, expected[i])
            assert result.ok, f"launch {i}: {result.message}"
        assert torch.equal(arguments["out"], given[i % 3]["out"]), f"launch {i} is another than {i % 3}"
