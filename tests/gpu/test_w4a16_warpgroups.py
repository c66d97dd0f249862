"""W4A16 products by warpgroups on a GPU that has them: every case, in tiles of every size, clusters or none."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kerngen.measure import check_case, target_here
from kerngen.templates import Case, find_kernel

KERNEL = find_kernel("w4a16_gemm")
# (block_m, block_n, block_k, num_stages)
TILES = (
    (256, 128, 64, 5), (128, 128, 64, 8), (128, 128, 128, 3), (64, 256, 64, 5), (64, 128, 128, 4), (32, 256, 128, 4),
    (16, 256, 256, 3), (16, 128, 64, 12),
)  # fmt: skip


def _configs(case: Case) -> list[Any]:
    target, found = target_here(), []
    for (m, n, k, stages), shared, cluster in product(TILES, (0, 1), (1, 2)):
        config = KERNEL.config_type(m, n, k, 16, 1, 1, stages, shared, warpgroups=True, cluster=cluster)
        if KERNEL.why_invalid(case.problem, config, target) is None:
            found.append(config)
    return found


@pytest.mark.parametrize("case", KERNEL.cases.CASES, ids=str)
def test_by_warpgroups(case: Case) -> None:
    if not target_here().arch.has_wgmma:
        pytest.skip("no wgmma here")
    if not (configs := _configs(case)):
        pytest.skip(f"{case.problem} has no whole stages")
    wrong = [f"{c}: {r.message}" for c in configs if not (r := check_case(KERNEL, case, c)).ok]
    assert wrong == []
