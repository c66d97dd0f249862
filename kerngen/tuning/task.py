"""One problem of a run, and one trial of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kerngen.templates.kernel import Kernel
from kerngen.tuning.ledger import Entry
from kerngen.tuning.study import Search
from kerngen.tuning_db.read.values import Build
from kerngen.workload.workload import Item


@dataclass(slots=True, eq=False)
class Task:
    """One problem of the run. about: its search in words, for the row that ends it. guessed_us: what it takes at least,
    by the cost model.
    """

    item: Item
    kernel: Kernel
    entry: Entry
    search: Search
    static_key: str
    about: str
    guessed_us: float = 0.0
    builds: dict[Any, Build] = field(default_factory=dict)  # of the configurations tried

    @property
    def problem(self) -> Any:
        return self.item.problem


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A configuration that compiled and can be launched. image: gives its machine code, compiled now if need be. Raises
    OutOfTime where that is not done by the end of the run's time.
    """

    task: Task
    config: Any
    build: Build
    image: Callable[[], bytes]

    @property
    def item(self) -> Item:
        return self.task.item

    @property
    def kernel(self) -> Kernel:
        return self.task.kernel

    @property
    def problem(self) -> Any:
        return self.task.problem
