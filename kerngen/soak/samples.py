"""Samples of a run, every minute or so: speed, load, pages, memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kerngen.runtime.engine import Load

MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """In MB of 10^6 bytes; a GPU's are 0 without one.

    host: resident memory of this process and of the other ranks'. allocated, reserved: by torch, in tensors, and with
    what it keeps for later ones. device: in use on the GPU by whomever, as the driver says.
    """

    host: float
    allocated: float = 0.0
    reserved: float = 0.0
    device: float = 0.0

    @staticmethod
    def now(where: torch.device, others: Sequence[int] = ()) -> Memory:
        """others: processes of the other ranks, whose GPUs are not looked at."""
        host = sum(_resident(pid) for pid in (os.getpid(), *others)) / MB
        if where.type != "cuda":
            return Memory(host)
        free, total = torch.cuda.mem_get_info(where)
        allocated, reserved = torch.cuda.memory_allocated(where), torch.cuda.memory_reserved(where)
        return Memory(host, allocated / MB, reserved / MB, (total - free) / MB)


def _resident(pid: int) -> int:
    """Bytes; none of a process that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Sample:
    """The time since the sample before. running, waiting: requests at a step; free pages: the fewest at any step.

    num_graphs, memory: at its end.
    """

    at_s: float
    seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_graphs: int = 0
    sum_running: int = 0
    max_running: int = 0
    min_running: int = 0
    max_waiting: int = 0
    min_free_full: int = 0
    min_free_sliding: int = 0
    memory: Memory | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_running(self) -> float:
        return self.sum_running / self.num_steps if self.num_steps else 0.0

    def note(self, load: Load, num_tokens: int) -> None:
        """A step that left `load` and made num_tokens."""
        is_first = not self.num_steps
        running, free = load.num_running, load.free_pages
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.sum_running += running
        self.max_running = max(self.max_running, running)
        self.max_waiting = max(self.max_waiting, load.num_waiting)
        self.min_running = running if is_first else min(self.min_running, running)
        self.min_free_full = free["full"] if is_first else min(self.min_free_full, free["full"])
        self.min_free_sliding = free["sliding"] if is_first else min(self.min_free_sliding, free["sliding"])
