"""Computes the learner's features of a whole valid space, in processes of its own.

Pre-predicting ten thousand configurations takes half a second, for every problem of a model minutes. A GPU that waits
for its next trial must not wait for that: a `Describer` is asked as soon as a problem's default has its registers, and
other searches go on until a few processes have the answer.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.system.interrupts import result_of
from kerngen.system.processes import ProcessDied, Processes
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of
from kerngen.tuning.features import Described, described_space
from kerngen.tuning.space import Candidates, candidates

if TYPE_CHECKING:
    from numpy import ndarray

# The 31B's 609 problems on sm90 take about 150 s of one core; to try their defaults takes an H200 a third of that.
MOST_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class Describing:
    """Under way. Called, it waits for the answer; should the process have died, that is made here."""

    found: Candidates
    registers: int
    answer: Future[tuple[ndarray, ndarray]]

    def __call__(self) -> Described:
        try:
            return Described(self.found.askable, *result_of(self.answer))
        except ProcessDied:
            return described_space(self.found, self.registers)

    @property
    def is_ready(self) -> bool:
        return self.answer.done()


class Describer:
    """Answers `described_space` in other processes, which start as they are needed."""

    def __init__(self, most_processes: int = MOST_PROCESSES) -> None:
        self._processes = Processes(min(most_processes, os.cpu_count() or 1))

    def submit(self, found: Candidates, registers: int) -> Describing:
        """Start it."""
        kernel, problem = found.kernel.name, fields_of(found.problem)
        answer: Future[tuple[ndarray, ndarray]] = self._processes.submit(
            _columns, kernel, problem, found.target, registers
        )
        return Describing(found, registers, answer)

    def close(self) -> None:
        self._processes.close()


def _columns(name: str, problem: dict[str, Any], target: Target, registers: int) -> tuple[ndarray, ndarray]:
    """`described_space` by plain values: a kernel's classes may lie in a folder that the process has not looked into
    yet. In the order of the space, which is the same wherever it is enumerated.
    """
    kernel = find_kernel(name)
    found = described_space(candidates(kernel, kernel.problem_type(**problem), target), registers)
    return found.features, found.model
