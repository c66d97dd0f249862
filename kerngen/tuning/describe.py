"""Computes the learner's features of what a search may ask for, in processes of its own.

To find and pre-predict a thousand configurations takes half a second, for every problem of a model minutes. A GPU that
waits for its next trial must not wait for that: a `Describer` is asked as soon as a problem's default has its
registers, and other searches go on until a few processes have the answer.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, fields
from operator import attrgetter
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

MOST_PROCESSES = 4

_Answer = tuple[list[tuple[Any, ...]], "ndarray", "ndarray"]  # configurations by their fields' values, features, model


@dataclass(frozen=True, slots=True)
class Describing:
    """Under way. Called, it waits for the answer; should the process have died, that is made here."""

    found: Candidates
    registers: int
    answer: Future[_Answer]

    def __call__(self) -> Described:
        try:
            values, features, model = result_of(self.answer)
        except ProcessDied:
            return described_space(self.found, self.registers)
        return Described(tuple(self.found.kernel.config_type(*v) for v in values), features, model)

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
        asked = kernel, problem, found.fused, found.target, registers
        answer: Future[_Answer] = self._processes.submit(_described, *asked)
        return Describing(found, registers, answer)

    def close(self) -> None:
        self._processes.close()


def _described(name: str, problem: dict[str, Any], fused: bool | None, target: Target, registers: int) -> _Answer:
    """`described_space` by plain values: a kernel's classes may lie in a folder that the process has not looked into
    yet.
    """
    kernel = find_kernel(name)
    made = described_space(candidates(kernel, kernel.problem_type(**problem), target, fused), registers)
    values = attrgetter(*(f.name for f in fields(kernel.config_type)), "__class__")  # always a tuple
    return [values(c)[:-1] for c in made.configs], made.features, made.model
