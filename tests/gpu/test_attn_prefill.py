"""Prefill attention by warpgroups on a GPU that has them: every case, in every way that its tiles can be copied."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from bodies import valid_here, wrong_of

from kerngen.templates import Case, find_kernel

KERNEL = find_kernel("attn_prefill")
# (block_m, block_n, num_warps, warps_d, num_stages)
TILES = {
    128: ((128, 128, 8, 1, 2), (192, 80, 12, 1, 2), (128, 176, 8, 1, 1)),
    256: ((128, 80, 8, 1, 2), (128, 64, 8, 1, 1)),
    512: ((64, 64, 8, 2, 9), (64, 64, 8, 2, 8), (64, 64, 8, 2, 4)),
}
WAYS = tuple(product((False, True), (False, True), (1, 2)))  # ping_pong, boxes, cluster
HALVES_WAYS = tuple(product((False,), (False, True), (1, 2, 4)))


def _configs(case: Case) -> Iterator[Any]:
    ways = HALVES_WAYS if case.problem.head_dim == 512 else WAYS
    for tile, (ping_pong, boxes, cluster) in product(TILES[case.problem.head_dim], ways):
        yield KERNEL.config_type(*tile, False, True, ping_pong, boxes, cluster)


@pytest.mark.parametrize("case", KERNEL.cases.CASES, ids=str)
def test_by_warpgroups(case: Case) -> None:
    configs = valid_here(KERNEL, case, _configs(case))
    assert configs
    assert wrong_of(KERNEL, case, configs) == []
