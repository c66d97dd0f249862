"""`kerngen serve --replicas 2` on two GPUs: each engine on its own, and one that dies gets its GPU again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from serving import serving

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
ASKED = {"prompt": "The sky is", "max_tokens": 24, "temperature": 0}


def _gpus_of(pids: set[int]) -> set[str]:
    """Which GPUs the processes have memory on."""
    told = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    found = (line.split(", ") for line in told.stdout.splitlines())
    return {uuid for pid, uuid in found if int(pid) in pids}


def _replicas(url: str) -> list[dict[str, Any]]:
    return list(httpx2.get(f"{url}/health").json()["replicas"])


def test_each_engine_has_a_gpu_and_gets_it_again() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    with serving(str(TINY), "--replicas", "2", "--context", "512") as (process, url):
        assert [r["device"] for r in _replicas(url)] == ["cuda:0", "cuda:1"]
        answers = [httpx2.post(f"{url}/v1/completions", json=ASKED, timeout=60).json() for _ in range(4)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert [r["requests"] for r in _replicas(url)] == [2, 2]
        listing = ["ps", "-ww", "-o", "pid=", "-o", "args=", "--ppid", str(process.pid)]
        told = subprocess.run(listing, capture_output=True, text=True, check=True)
        engines = sorted(int(line.split()[0]) for line in told.stdout.splitlines() if "spawn_main" in line)
        assert len(engines) == 2
        if seen := _gpus_of(set(engines)):  # a container may hide whose memory it is
            assert len(seen) == 2
        os.kill(engines[1], signal.SIGKILL)
        end = time.monotonic() + 120
        while [(r["up"], r["restarts"]) for r in _replicas(url)] != [(True, 0), (True, 1)]:
            assert httpx2.post(f"{url}/v1/completions", json=ASKED, timeout=60).json() is not None
            assert time.monotonic() < end
            time.sleep(0.2)
        again = [httpx2.post(f"{url}/v1/completions", json=ASKED, timeout=60).json() for _ in range(2)]
        assert {a["choices"][0]["text"] for a in again} == {answers[0]["choices"][0]["text"]}
