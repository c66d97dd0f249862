"""A board's figures in a file, for one that has no profile: `--device FILE.toml`."""

from __future__ import annotations

import re
from typing import Any

from kerngen.boards import DEFAULT_DEVICE, MIB, Device, is_known
from kerngen.errors import UnknownName, UsageError
from kerngen.system.files import read_toml

SUFFIX = ".toml"
MAX_BYTES = 1 << 16
# Field: what it says, and what it may be at most, so that a figure in another unit is found.
FIGURES = {
    "num_sms": ("streaming multiprocessors", 1000),
    "mem_gbps": ("memory bandwidth, GB/s (10^9)", 100_000),
    "mem_gib": ("memory, GiB", 10_000),
    "l2_mib": ("L2 cache, MiB", 10_000),
    "clock_mhz": ("boost clock of the SMs, MHz", 10_000),
    "tensor_tflops": ("dense fp16 tensor rate with fp32 sums, TFLOP/s", 100_000),
}
_TEXTS = ("name", "arch", "source")
_WHOLE = ("num_sms", "clock_mhz")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}")
_HINT = "a file to begin with: kerngen arch show H200 --toml > my-board.toml"


def read_board(path: str) -> Device:
    """The board that a file describes. Raises UsageError, which says what is wrong with it."""
    given = read_toml(path, MAX_BYTES, _HINT)
    fields = [*_TEXTS, *FIGURES]
    if unknown := [f for f in given if f not in fields]:
        raise UnknownName("field", unknown[0], fields)
    if missing := [f for f in fields if f not in given and f != "source"]:
        raise UsageError(f"{path} lacks {', '.join(missing)}", hint=_HINT)
    for field in _TEXTS:
        _require_text(path, field, given.setdefault(field, "a file"))
    for field in FIGURES:
        _require_figure(path, field, given[field])
    return Device(
        name=given["name"], arch=given["arch"], num_sms=given["num_sms"], mem_gbps=given["mem_gbps"],
        mem_gib=given["mem_gib"], l2_bytes=int(given["l2_mib"] * MIB), clock_mhz=given["clock_mhz"],
        tensor_tflops=given["tensor_tflops"], source=given["source"],
    )  # fmt: skip


def _require_text(path: str, field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{path}: {field} = {value!r} is no text")
    if field == "name" and not _NAME.fullmatch(value):
        raise UsageError(f"{path}: name = {value!r} is not letters, digits, blanks, '.', '_' and '-', 64 at most")
    if field == "name" and is_known(value):
        raise UsageError(f"{path}: kerngen has a profile {value}; give yours a name of its own")
    if field == "arch" and value not in DEFAULT_DEVICE:
        raise UnknownName("arch", value, DEFAULT_DEVICE)


def _require_figure(path: str, field: str, value: Any) -> None:
    says, most = FIGURES[field]
    kind = int if field in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        noun = "a whole number" if field in _WHOLE else "a number"
        raise UsageError(f"{path}: {field} = {value!r} is not {noun} ({says})")
    if not 0 < value <= most:  # refuses NaN too
        raise UsageError(f"{path}: {field} = {value!r} is not between 0 and {most:,} ({says})")


def as_toml(board: Device) -> str:
    """A file that `read_board` takes, once its name is another."""
    figures = {"l2_mib": board.l2_bytes / MIB}
    lines = [f'name = "my {board.name}"', f'arch = "{board.arch}"', f'source = "{board.source}"']
    for field, (says, _) in FIGURES.items():
        lines.append(f"{field} = {figures.get(field, getattr(board, field, None)):g}".ljust(24) + f"# {says}")
    return "\n".join(lines)
