"""The ranking of a problem's whole valid space, where need be in processes of its own.

Pre-predicting ten thousand configurations takes half a second, for every problem of a model minutes. A GPU that waits
for its next trial must not wait for that: a `Ranker` is asked as soon as a problem's default has its registers, and
with a few processes has the answer by the time that the other defaults were tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from kerngen.arch import Target
from kerngen.compile import end_with_parent
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of
from kerngen.tuning.plan import GUESSED_REGISTERS, rank
from kerngen.tuning.space import Candidates, candidates

# The 31B's 609 problems on sm90 take about 100 s of one core; to try their defaults takes an H200 about half of that.
MOST_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class Ranked:
    """A problem's valid configurations, the best by the cost model first: all of them, or what a search may ask for.

    num_valid: all. complete: whether the space is known whole.
    """

    configs: tuple[Any, ...]
    num_valid: int
    complete: bool


def ranked(found: Candidates, registers: int, trials: int, sampler_share: float) -> Ranked:
    """All that are valid; where those are more than `trials`, of which a share is a sampler's, as many as are left.

    registers: a thread's, of a compiled kernel of this problem; 0 where there is none yet.
    """
    points = found.points
    order = rank(found.kernel, found.problem, found.target, points.valid, registers or GUESSED_REGISTERS)
    cut = sampler_share and len(points.valid) > trials
    most = max(int(trials * (1 - sampler_share)), 1) if cut else None
    return Ranked(tuple(c for _, c in order[:most]), len(points.valid), points.complete)


class Ranker:
    """Answers `ranked` in other processes, which start as they are needed."""

    def __init__(self, most_processes: int = MOST_PROCESSES) -> None:
        processes = min(most_processes, os.cpu_count() or 1)
        self._pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=end_with_parent)

    def submit(self, found: Candidates, registers: int, trials: int, sampler_share: float) -> Callable[[], Ranked]:
        """Start it. The function returned waits for the answer; should the process have died, it ranks by itself."""
        kernel, how = found.kernel, (registers, trials, sampler_share)
        answer: Future[_Plain] | None = None
        with suppress(BrokenProcessPool):
            answer = self._pool.submit(_as_fields, kernel.name, fields_of(found.problem), found.target, *how)

        def wait() -> Ranked:
            if answer is not None:
                with suppress(BrokenProcessPool):
                    configs, num_valid, complete = answer.result()
                    return Ranked(tuple(kernel.config_type(**c) for c in configs), num_valid, complete)
            return ranked(found, *how)

        return wait

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


_Plain = tuple[list[dict[str, Any]], int, bool]


def _as_fields(name: str, problem: dict[str, Any], target: Target, *how: Any) -> _Plain:
    """`ranked` by plain values: a kernel's classes may lie in a folder that the process has not looked into yet."""
    kernel = find_kernel(name)
    found = ranked(candidates(kernel, kernel.problem_type(**problem), target), *how)
    return [fields_of(c) for c in found.configs], found.num_valid, found.complete
