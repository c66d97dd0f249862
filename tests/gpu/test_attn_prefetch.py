"""Decode attention with few tiles in flight until its pipeline has been filled once (prefetch_stages): every case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bodies import wrong_of

from kerngen.templates import Case, find_kernel
from kerngen.templates.attn_decode.spec import Config
from kerngen.timing.measure import target_here

KERNEL = find_kernel("attn_decode")


@pytest.mark.parametrize(("turn", "case"), list(enumerate(KERNEL.cases.CASES)), ids=str)
def test_each_case_in_its_turn(turn: int, case: Case) -> None:
    here = target_here()
    if not here.arch.has_pdl:
        pytest.skip(f"{here.arch} begins no launch before its predecessor ends")
    default = KERNEL.default_config(case.problem, here)
    warps = Config(8, 16, 4 if case.problem.head_dim == 512 else 2, 8, 4, 1 + turn % 5)
    configs = [replace(c, prefetch_stages=1 + turn % 3) for c in (default, warps) if c.num_stages > 3]
    assert wrong_of(KERNEL, case, [c for c in configs if KERNEL.why_invalid(case.problem, c, here) is None]) == []
