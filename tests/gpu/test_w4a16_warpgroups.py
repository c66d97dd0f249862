"""W4A16 products by warpgroups on a GPU that has them: every case, in tiles of every size, clusters or none."""

from __future__ import annotations

from itertools import product

import pytest
from bodies import valid_here, wrong_of

from kerngen.templates import Case, find_kernel

KERNEL = find_kernel("w4a16_gemm")
# (block_m, block_n, block_k, num_stages)
TILES = (
    (256, 128, 64, 5), (128, 128, 64, 8), (128, 128, 128, 3), (64, 256, 64, 5), (64, 128, 128, 4), (32, 256, 128, 4),
    (16, 256, 256, 3), (16, 128, 64, 12),
)  # fmt: skip
CONFIGS = [
    KERNEL.config_type(m, n, k, 16, 1, 1, stages, shared, warpgroups=True, cluster=cluster)
    for (m, n, k, stages), shared, cluster in product(TILES, (0, 1), (1, 2))
]


@pytest.mark.parametrize("case", KERNEL.cases.CASES, ids=str)
def test_by_warpgroups(case: Case) -> None:
    if not (configs := valid_here(KERNEL, case, CONFIGS)):
        pytest.skip(f"{case.problem} has no whole stages")
    assert wrong_of(KERNEL, case, configs) == []
