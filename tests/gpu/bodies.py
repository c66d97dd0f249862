"""Configurations of a body by wgmma, which no tune may have chosen yet, against the fp32 reference."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from kerngen.templates import Case
from kerngen.templates.kernel import Kernel
from kerngen.timing.measure import check_case, target_here

MOST_OF_A_SAMPLE = 8  # configurations of one test with --smoke, each of which is compiled
smoke = False  # conftest.py says


def valid_here(kernel: Kernel, case: Case, configs: Iterable[Any]) -> list[Any]:
    """Those that may run the case on this GPU. Skips where it has no wgmma."""
    target = target_here()
    if not target.arch.has_wgmma:
        pytest.skip("no wgmma here")
    return [c for c in configs if kernel.why_invalid(case.problem, c, target) is None]


def wrong_of(kernel: Kernel, case: Case, configs: Iterable[Any]) -> list[str]:
    """Those that do not give what the reference does, and how. With --smoke, of some: which, the case decides."""
    configs = list(configs)
    if smoke and len(configs) > MOST_OF_A_SAMPLE:
        configs = random.Random(str(case)).sample(configs, MOST_OF_A_SAMPLE)
    return [f"{c}: {r.message}" for c in configs if not (r := check_case(kernel, case, c)).ok]
