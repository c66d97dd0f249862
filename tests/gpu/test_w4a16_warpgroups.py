"""W4A16 products by warpgroups on a GPU that has them: every case, in tiles of every size, clusters or none."""

from __future__ import annotations

from itertools import product

import pytest
from bodies import valid_here, wrong_of

from kerngen.templates import Case, find_kernel

KERNEL = find_kernel("w4a16_gemm")
# (block_m, block_n, block_k, num_stages)
TILES = (
    (256, 128, 64, 4), (192, 192, 64, 5), (128, 128, 64, 8), (128, 128, 128, 3), (128, 192, 128, 4), (64, 256, 64, 5),
    (64, 128, 128, 4), (32, 256, 128, 4), (32, 128, 128, 5), (16, 192, 256, 5), (16, 128, 64, 12),
    (48, 256, 64, 6), (80, 128, 128, 6), (80, 192, 64, 8), (96, 256, 64, 6), (112, 128, 128, 5), (160, 192, 64, 5),
    (160, 128, 128, 3), (192, 128, 64, 6),
)  # fmt: skip
CONFIGS = [  # in turn with all stages' weights on their way while x is waited for, with one and with two
    KERNEL.config_type(m, n, k, 16, 1, 1, stages, shared, body="wgmma_ws", cluster=cluster, l2_prefetch_stages=ahead,
                       prefetch_stages=turn % 3)
    for turn, ((m, n, k, stages), shared, cluster, ahead) in enumerate(product(TILES, (0, 1, 2), (1, 2), (0, 4)))
]  # fmt: skip
# Several rounds of whole tiles, behind those that are shared (where K is long) or not, and tokens of more than one band
# of tiles, of which the last one's are few.
LARGE = [
    KERNEL.cases.case_for(KERNEL.problem_type(n=n, k=k, num_tokens=m, group_size=g, dtype="bf16", gated=gated))
    for n, k, m, g, gated in (
        (4096, 256, 1030, 32, False), (1056, 256, 5000, 128, False), (4224, 2048, 1030, 128, False),
        (4224, 2048, 1100, 32, True),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", KERNEL.cases.CASES, ids=str)
def test_by_warpgroups(case: Case) -> None:
    if not (configs := valid_here(KERNEL, case, CONFIGS)):
        pytest.skip(f"{case.problem} has no whole stages")
    assert wrong_of(KERNEL, case, configs) == []


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_in_rounds(case: Case) -> None:
    configs = [c for c in valid_here(KERNEL, case, CONFIGS) if c.blocks_per_sm]
    assert wrong_of(KERNEL, case, configs) == []
