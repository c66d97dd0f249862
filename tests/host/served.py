"""A server of the tiny checkpoint, in a process of its own."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx2
from command import ROOT

TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
START_S = 120.0


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)
    http: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=120))

    def metric(self, name: str) -> float:
        found = re.search(rf"^vllm:{name}{{.*}} (\S+)$", self.http.get(f"{self.url}/metrics").text, re.M)
        assert found is not None, name
        return float(found[1])

    def engine(self) -> int:
        """The process that runs the model."""
        (pid,) = self.engines()
        return pid

    def engines(self) -> list[int]:
        """The processes that run the model, in the order in which they were started."""
        told = subprocess.run(
            ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        return sorted(int(line.split()[0]) for line in told.stdout.splitlines() if "spawn_main" in line)


@contextmanager
def served(*options: str, model: str = str(TINY), max_files: int | None = None) -> Iterator[Served]:
    """Ready to be asked, on a port of its own. max_files: that it may have open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kerngen", "serve", model, "--port", "0", "--backend", "torch", "--context", "256",
         "--max-batch", "4", *options],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if max_files is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (max_files, max_files))
    found = Served(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            found.said.append(line)
            if at := re.search(r"http://\S+:\d+", line):
                found.url = at[0]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_S)
        assert found.url, "".join(found.said)
        yield found
    finally:
        found.http.close()
        process.kill()
        process.wait()
        reader.join()
        if process.stderr is not None:
            process.stderr.close()
