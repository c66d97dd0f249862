"""A GPU as what several programs share: a lock for who measures on it, and what it says of its clocks meanwhile.

Neither torch nor CuPy: the lock is taken by a process without a CUDA context, and NVML is asked where it is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kerngen.errors import DeviceError

LOCKS = Path("/tmp")  # not TMPDIR, which may be another for every user
POLL_S = 0.5


class GpuLock:
    """Held by whoever measures on the GPU `uuid`, of this host's processes: the kernel frees it when one is killed.

    A file that everyone may lock, with a line about who does. Containers that do not share `folder` do not see each
    other's.
    """

    def __init__(self, uuid: str, folder: Path = LOCKS) -> None:
        self.path = folder / f"kerngen-{uuid}.lock"
        self._file: int | None = None

    def try_acquire(self) -> bool:
        """Take it if it is free. Raises DeviceError where its file cannot be opened."""
        if self._file is not None:
            return True
        file = self._open()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        who = {"pid": os.getpid(), "user": _user(), "host": socket.gethostname(), "since": time.strftime("%H:%M:%S")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(who).encode(), 0)
        return True

    def acquire(self, say: Callable[[str], None], poll_s: float = POLL_S) -> float:
        """Take it when it is free, and return the seconds that this waited. say: told every `poll_s` who holds it."""
        began = time.monotonic()
        while not self.try_acquire():
            say(f"waiting for the GPU: {self.holder()} measures on it")
            time.sleep(poll_s)
        return time.monotonic() - began

    def holder(self) -> str:
        """Who holds it, as far as its file says so."""
        try:
            with open(self.path, "rb") as f:
                who = json.loads(f.read(4096))
            return f"pid {int(who['pid'])} ({who['user']} on {who['host']}, since {who['since']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def release(self) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        """Its file, made if it is not there. No link is followed. A folder that all may write to, as /tmp, may forbid
        to open another user's file with O_CREAT: who finds one there opens it without.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(3):
            try:
                return os.open(self.path, flags)
            except FileNotFoundError:
                pass
            except OSError as e:
                raise self._unusable(e) from e
            try:
                file = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            except OSError as e:
                raise self._unusable(e) from e
            os.fchmod(file, 0o666)  # whatever the umask: other users lock it too
            return file
        raise self._unusable("it comes and goes")

    def _unusable(self, why: object) -> DeviceError:
        return DeviceError(
            f"the lock of this GPU cannot be opened: {self.path}: {why}",
            hint=f"remove {self.path}, or have its owner make it readable and writable for all",
        )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


@dataclass(frozen=True, slots=True)
class Clocks:
    """What NVML says of a GPU at one moment: MHz, degrees Celsius, watts, and why the clocks are not higher. None is
    what it does not say: not every board tells all of it.
    """

    sm_mhz: int | None
    mem_mhz: int | None
    temperature_c: int | None
    power_w: int | None
    reasons: tuple[str, ...]

    @property
    def is_throttled(self) -> bool:
        """Whether heat or a power supply hold the clocks down. A board's own power cap is how it works under load, and
        no reason: what runs for milliseconds on the tensor cores always meets it.
        """
        return not _THROTTLES.isdisjoint(self.reasons)


_REASONS = {  # NVML's bits: nvmlClocksEventReasons
    0x1: "gpu_idle", 0x2: "applications_clocks", 0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x10: "sync_boost",
    0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake", 0x100: "display_clocks",
}  # fmt: skip
_THROTTLES = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})


def throttled_by(noted: Mapping[str, Any]) -> set[str]:
    """What held the clocks down, by what `Seen.noted` says."""
    return set(_THROTTLES.intersection(noted.get("reasons", ())))


class Watch:
    """Asks NVML about the GPU `uuid`. why_not: why it cannot, where it cannot; then every sample is None."""

    def __init__(self, uuid: str) -> None:
        self.why_not: str | None = None
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
        except Exception as e:  # a convenience: its absence is recorded, not hidden
            self.why_not = f"{type(e).__name__}: {e}"

    def sample(self) -> Clocks | None:
        if (nvml := self._nvml) is None:
            return None

        def ask(what: str, *about: Any) -> int | None:
            try:
                return int(getattr(nvml, what)(self._handle, *about))
            except nvml.NVMLError:  # a slice of a GPU has no clocks of its own, say
                return None

        bits, milliwatts = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0, ask("nvmlDeviceGetPowerUsage")
        return Clocks(
            ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            None if milliwatts is None else round(milliwatts / 1e3),
            tuple(name for bit, name in _REASONS.items() if bits & bit),
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a GPU said before and after it was timed."""

    before: Clocks | None
    after: Clocks | None

    @property
    def is_throttled(self) -> bool:
        return any(c is not None and c.is_throttled for c in (self.before, self.after))

    def noted(self) -> dict[str, Any]:
        """For a row: what is known of the moment after, with the reasons of both. Empty where nothing is."""
        if self.after is None:
            return {}
        reasons = {r for c in (self.before, self.after) if c is not None for r in c.reasons} - {"gpu_idle"}
        return {n: v for n, v in asdict(self.after).items() if v is not None} | {"reasons": sorted(reasons)}
