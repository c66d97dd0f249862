"""python worker_fake.py URL: a worker that measures, on a GPU that times by a formula, until there is no more to do."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from played_gpu import PlayedGpu

import kerngen.tuning.worker
from kerngen.job_queue.worker import Options, work
from kerngen.templates.kernel import fields_of
from kerngen.tuning_db.read.ids import digest


def times(problem: Any, config: Any) -> float:
    """The more of a configuration's digest is there, the longer it takes."""
    return 10 + int(digest([fields_of(problem), fields_of(config)])[:2], 16) / 10


def main(url: str) -> None:
    kerngen.tuning.worker.GpuWorker = partial(PlayedGpu, times, board="V100")  # type: ignore[misc, assignment]
    work(Options(url, ("measured",), (), jobs=1, until_empty=True, heartbeat_s=0.3, say=lambda line: print(line)))


if __name__ == "__main__":
    main(*sys.argv[1:])
