"""How many cores this process may use, which in a container or under a scheduler is not what the machine has."""

from __future__ import annotations

import os
from math import ceil, inf
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that the scheduler gives it (taskset, Slurm), or a control group's share of time if that is less
    (Kubernetes, `docker run --cpus`); at least 1.

    root: where /proc and /sys are.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, ceil(min(cores, _quota(root))))


def _quota(root: Path) -> float:
    """The cores' worth of time that the tightest of its control groups allows."""
    limits = [inf]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree
            tree, read = root / "sys/fs/cgroup", _version_2
        elif "cpu" in controllers.split(","):
            tree, read = root / "sys/fs/cgroup/cpu", _version_1
        else:
            continue
        here = path.strip("/")
        for group in (Path(here), *Path(here).parents):  # a group has no more than those that it lies in
            limits.append(read(tree / group))
    return min(limits)


def _version_2(group: Path) -> float:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    return _share(quota, period)


def _version_1(group: Path) -> float:
    return _share(_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip())


def _share(quota: str, period: str) -> float:
    """Microseconds of a period; "max", -1 or nothing where there is no limit."""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
