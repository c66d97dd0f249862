"""What came of a tuning run."""

from __future__ import annotations

from dataclasses import dataclass, field

from kerngen.arch import Target
from kerngen.tuning_db.records import Winner
from kerngen.workload import Item


@dataclass(slots=True)
class Result:
    """What came of one problem. winner: None where nothing could be tuned, and `note` says why.

    note: also what the user should know of the winner (it spills, it could not be kept). explanation: the cost
    model's view of it. default_us: of the default configuration, by the same objective.
    """

    item: Item
    winner: Winner | None = None
    default_us: float | None = None
    note: str = ""
    explanation: str = ""
    registers: int = 0
    smem_bytes: int = 0
    spill_bytes: int = 0
    num_valid: int = 0
    num_refused: int = 0
    num_tried: int = 0
    num_failed: int = 0

    @property
    def speedup(self) -> float | None:
        """Time of the default configuration over the winner's."""
        return None if self.winner is None or not self.default_us else self.default_us / self.winner.latency_us


@dataclass(slots=True)
class Report:
    """A whole run. objective, how: its objective's name, and the same in words.

    failures: kernel, configuration and reason of each compile that failed or result that was wrong. num_refused:
    points of `num_spaces` spaces that why_invalid refused, those of a space that several problems share counted once.
    """

    target: Target
    objective: str
    how: str
    run: str
    results: list[Result] = field(default_factory=list)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    num_trials: int = 0
    num_compiled: int = 0
    num_from_database: int = 0
    num_spaces: int = 0
    num_refused: int = 0
    seconds: float = 0.0
    out_of_time: bool = False
    interrupted: bool = False
