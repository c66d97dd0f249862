"""torch's own multiplication."""

from collections.abc import Callable
from typing import Any

from kerngen.templates.kernel import Case

from .cases import case_for
from .spec import Problem

BENCH_CASES = tuple(case_for(Problem(num_tokens=t)) for t in (1, 32, 4096))


def baselines(case: Case, inputs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    return {"torch": lambda: inputs["x"] * inputs["weight"]}
