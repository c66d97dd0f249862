"""Prefill attention by warpgroups on a GPU that has them: every case, in every way that its tiles can be copied."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kerngen.measure import check_case, target_here
from kerngen.templates import Case, find_kernel

KERNEL = find_kernel("attn_prefill")
# (block_m, block_n, num_warps, warps_d, num_stages)
TILES = {
    128: ((128, 128, 8, 1, 2), (192, 80, 12, 1, 2), (128, 176, 8, 1, 1), (64, 32, 8, 2, 1)),
    256: ((128, 80, 8, 1, 2), (128, 64, 8, 1, 1), (64, 128, 8, 2, 1)),
    512: ((64, 64, 8, 2, 1), (64, 32, 8, 2, 2), (64, 48, 8, 2, 1)),
}
WAYS = tuple(product((False, True), (False, True), (1, 2)))  # ping_pong, boxes, cluster


def _configs(case: Case) -> list[Any]:
    target, found = target_here(), []
    for (m, n, warps, parts, stages), (ping_pong, boxes, cluster) in product(TILES[case.problem.head_dim], WAYS):
        config = KERNEL.config_type(m, n, warps, parts, stages, False, True, ping_pong, boxes, cluster)
        if KERNEL.why_invalid(case.problem, config, target) is None:
            found.append(config)
    return found


@pytest.mark.parametrize("case", KERNEL.cases.CASES, ids=str)
def test_by_warpgroups(case: Case) -> None:
    if not target_here().arch.has_wgmma:
        pytest.skip("no wgmma here")
    configs = _configs(case)
    assert configs
    wrong = [f"{c}: {r.message}" for c in configs if not (r := check_case(KERNEL, case, c)).ok]
    assert wrong == []
