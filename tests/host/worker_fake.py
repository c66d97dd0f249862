"""python worker_fake.py URL: a worker that measures, on a GPU that times by a formula, until there is no more to do."""

from __future__ import annotations

import sys
from typing import Any

import kerngen.tuning.worker
from kerngen.arch import Device, find_arch, find_device
from kerngen.job_queue.worker import Options, work
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning.worker import Observed
from kerngen.tuning_db.read.ids import digest


class FakeGpu:
    """A V100 on which the more of a configuration's digest is there, the longer it takes."""

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def uuid(self) -> str:
        return "GPU-0fa4e000-0000-0000-0000-000000000000"

    def device(self) -> Device:
        return find_device("V100")

    def environment(self) -> dict[str, Any]:
        return {"driver": "none"}

    def measure(self, kernel: Kernel, problem: Any, config: Any, image: bytes) -> Observed:
        why = why_not_cubin(image, find_arch("sm70"))
        if why is not None:
            return Observed("launch_failed", why)
        us = 10 + int(digest([fields_of(problem), fields_of(config)])[:2], 16) / 10
        return Observed("ok", "", us, us - 0.01, us + 0.01, us - 0.02, 15, 0.0, 0.0)

    def finals(self, kernel: Kernel, problem: Any, configs: list[tuple[Any, bytes]]) -> list[Observed]:
        return [self.measure(kernel, problem, c, image) for c, image in configs]


def main(url: str) -> None:
    kerngen.tuning.worker.GpuWorker = FakeGpu  # type: ignore[misc, assignment]
    work(Options(url, ("measured",), (), jobs=1, until_empty=True, heartbeat_s=0.3, say=lambda line: print(line)))


if __name__ == "__main__":
    main(*sys.argv[1:])
