"""What the processes of a server on this machine hold: found by the port that they listen on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MB = 1e6
_LISTENS = "0A"


def processes_of(port: int) -> list[int]:
    """The process that listens on `port`, and all below it; [] where none of this user's does on this machine."""
    sockets = {
        f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)
    }
    if not sockets:
        return []
    found = [pid for pid in _all() if not sockets.isdisjoint(_open_files(pid))]
    parents = {pid: _parent(pid) for pid in _all()}
    for pid in found:  # it grows
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def resident_mb(pids: list[int]) -> dict[int, float]:
    """Resident memory of each that is there."""
    found = {}
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[pid] = pages * os.sysconf("SC_PAGE_SIZE") / MB
    return found


def gpu_mb(pids: list[int]) -> float | None:
    """What these processes hold on GPUs; None where NVML is not there or does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        used = [p for h in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)]
        mine = [p.usedGpuMemory for p in used if p.pid in pids and p.usedGpuMemory is not None]
        if mine:
            return float(sum(mine)) / MB
        # In a container, pids are others: all that is in use, by whomever.
        return float(sum(pynvml.nvmlDeviceGetMemoryInfo(h).used for h in handles)) / MB if handles else None
    except Exception:  # the library's own, an ImportError, a driver that is none: there is nothing to watch
        return None


def _listening(table: Path, port: int) -> list[str]:
    with suppress(OSError):
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
        return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]
    return []


def _all() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return found


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
