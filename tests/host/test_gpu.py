"""The lock of who measures on a GPU, and what is made of what it says about its clocks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kerngen.errors import DeviceError
from kerngen.timing.gpu import Clocks, GpuLock, Seen, Watch
from kerngen.tuning import worker
from kerngen.tuning.worker import Observed

UUID = "GPU-00000000-1111-2222-3333-444444444444"
HOLD = """
import sys, time
from pathlib import Path
from kerngen.timing.gpu import GpuLock
lock = GpuLock(sys.argv[1], Path(sys.argv[2]))
print(lock.try_acquire(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, UUID, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.wait()


def test_one_at_a_time_and_who_waits_knows_for_whom(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    assert not lock.try_acquire()
    assert f"pid {holder.pid} (" in lock.holder()
    assert GpuLock(UUID.replace("4", "5"), tmp_path).try_acquire(), "another GPU is free"
    said: list[str] = []
    threading.Timer(0.3, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    waited = lock.acquire(said.append, poll_s=0.05)
    assert 0.2 < waited < 10, "a killed process holds nothing"
    assert f"pid {holder.pid} (" in said[0]
    assert lock.acquire(said.append) < 0.1, "who has it has it"
    lock.release()
    assert GpuLock(UUID, tmp_path).try_acquire()


def test_a_lock_can_be_taken_by_other_users_and_follows_no_link(tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    old = os.umask(0o077)
    try:
        assert lock.try_acquire()
    finally:
        os.umask(old)
    assert lock.path.stat().st_mode & 0o777 == 0o666
    assert json.loads(lock.path.read_bytes())["pid"] == os.getpid()
    lock.release()
    lock.release()
    lock.path.unlink()
    target = tmp_path / "theirs"
    target.write_text("precious")
    lock.path.symlink_to(target)
    with pytest.raises(DeviceError, match=r"kerngen-GPU-.*\.lock"):
        lock.try_acquire()
    assert target.read_text() == "precious"


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b'{"pid": "x"}', b'{"pid": 3}'])
def test_whatever_a_locks_file_says(text: bytes, tmp_path: Path) -> None:
    lock = GpuLock(UUID, tmp_path)
    lock.path.write_bytes(text)
    assert lock.holder() == "another process"
    assert lock.try_acquire()


def _clocks(*reasons: str) -> Clocks:
    return Clocks(1980, 3201, 40, 350, reasons)


def test_heat_throttles_and_a_power_cap_does_not() -> None:
    assert not _clocks().is_throttled
    assert not _clocks("gpu_idle", "sw_power_cap", "applications_clocks").is_throttled
    for reason in ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"):
        assert _clocks("sw_power_cap", reason).is_throttled
        assert Seen(_clocks(reason), _clocks()).is_throttled
    seen = Seen(_clocks("gpu_idle"), _clocks("sw_power_cap"))
    assert seen.noted() == {"sm_mhz": 1980, "mem_mhz": 3201, "temperature_c": 40, "power_w": 350,
                            "reasons": ["sw_power_cap"]}  # fmt: skip
    assert Seen(None, None).noted() == {}
    assert not Seen(None, None).is_throttled


def test_nvml_is_asked_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and constants are the library's, the answers ours."""
    import pynvml

    def answer(name: str, value: Any) -> None:
        assert callable(getattr(pynvml, name))
        monkeypatch.setattr(pynvml, name, lambda *args: value)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: SimpleNamespace(uuid=uuid))
    answer("nvmlDeviceGetCurrentClocksThrottleReasons", 0x1 | 0x4 | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown)
    answer("nvmlDeviceGetTemperature", 91)
    answer("nvmlDeviceGetPowerUsage", 700_200)
    clocks = {pynvml.NVML_CLOCK_SM: 1200, pynvml.NVML_CLOCK_MEM: 3201}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: clocks[kind])
    watch = Watch(UUID)
    assert watch.why_not is None
    reasons = ("gpu_idle", "sw_power_cap", "hw_thermal_slowdown")
    assert watch.sample() == Clocks(1200, 3201, 91, 700, reasons)

    def broken(handle: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", broken)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", broken)
    partly = watch.sample()
    assert partly == Clocks(1200, 3201, 91, None, ())
    assert Seen(None, partly).noted() == {"sm_mhz": 1200, "mem_mhz": 3201, "temperature_c": 91, "reasons": []}


def test_without_nvml_nothing_is_known_and_said_to_be() -> None:
    watch = Watch("GPU-of-nobody")
    assert watch.sample() is None
    assert watch.why_not


@pytest.mark.parametrize(
    ("states", "looks"), [(["", ""], 1), (["hw_slowdown", "", "", ""], 2), (["hw_slowdown"] * 6, 3)]
)
def test_what_is_timed_while_throttled_is_timed_again(
    states: list[str], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(states)
    monkeypatch.setattr(worker, "_clocks", lambda: _clocks(*filter(None, [next(said)])))
    monkeypatch.setattr(time, "sleep", lambda s: None)
    timed: list[int] = []

    def measure() -> list[Observed]:
        timed.append(1)
        return [Observed("ok", p50_us=float(len(timed))), Observed("ok", p50_us=9.0)]

    first, second = worker._watched(measure)
    assert len(timed) == looks
    assert first.p50_us == looks
    assert first.gpu["reasons"] == (["hw_slowdown"] if looks == 3 else [])
    assert second.gpu == first.gpu
