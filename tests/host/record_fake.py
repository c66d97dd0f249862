"""python record_fake.py PLAN FOLDER CACHE KILL_AFTER: records with a fake GPU, and kills itself (tests only)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from recordings import FakeGpu

from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.tuning.record import record
from kerngen.tuning.record_plan import read_plan


def main(plan: str, folder: str, cache: str, kill_after: str) -> None:
    def after(measured: int) -> None:
        if measured == int(kill_after):
            os.kill(os.getpid(), signal.SIGKILL)

    with CachedCompiler(1, CompileCache(cache)) as compiler:
        record(read_plan(Path(plan)), Path(folder), FakeGpu(after=after), compiler, minutes=5)


if __name__ == "__main__":
    main(*sys.argv[1:])
