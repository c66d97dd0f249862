"""Predicts which winner serves the sizes between two tuned points; see tuning_db/store/crossovers.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import predict
from kerngen.templates.kernel import Kernel

if TYPE_CHECKING:
    from kerngen.tuning_db.store.crossovers import Judge


def judge_of(kernel: Kernel, target: Target) -> Judge:
    """What the model says that a configuration takes on `target`."""

    def judge(problem: Any, config: Any, entries: Mapping[str, Resources]) -> float:
        return predict(kernel, problem, config, target, entries).latency_us

    return judge
