"""The result of a bench: the object that --json prints and that the page embeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerngen import __version__
from kerngen.errors import UsageError
from kerngen.report.document import carried
from kerngen.system.files import open_regular

Run = Mapping[str, Any]
MOST_BYTES = 64 * 2**20  # of a file that is read as a run: pages of hundreds of cases take less than one


@dataclass(frozen=True, slots=True)
class Limits:
    """This GPU's, measured in the run; None where the bench has none. read_gbps: GB/s; matmul_tflops: TFLOP/s."""

    read_gbps: float | None
    matmul_tflops: float | None

    def sentence(self) -> str:
        parts = [f"read {self.read_gbps:.0f} GB/s"] if self.read_gbps else []
        parts += [f"matmul {self.matmul_tflops:.0f} TFLOP/s"] if self.matmul_tflops else []
        return f"Measured limits of this run: {', '.join(parts)}." if parts else "No limit was measured."


def run_of(bench: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """`found` with what it is of, when, and by which kerngen."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"bench": bench, "kerngen": __version__, "at": at, **found}


def limits_of(run: Run) -> Limits:
    return Limits(positive(run.get("read_gbps")), positive(run.get("matmul_tflops")))


def gpu_of(run: Run) -> str:
    """What ran it, in words."""
    return text(run["device"]) if "device" in run else text(run["environment"]["gpu"])


def when(run: Run) -> str:
    return text(run["at"]).replace("T", " ").removesuffix("Z") + " UTC"


def read_run(path: Path, bench: str) -> dict[str, Any]:
    """The run of `kerngen bench BENCH` that lies at `path`: what --json printed, or a page that --report wrote.

    Raises UsageError where it is neither, or another bench's; OSError where it cannot be read.
    """
    hint = f"kerngen bench {bench} ... --json > {path.name}, or a page that --report wrote"
    with open_regular(path) as f:
        data = f.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} is no run: it has more than {MOST_BYTES >> 20} MB", hint=hint)
    try:
        whole = data.decode()
        run = json.loads(carried(whole) or whole, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is neither a run's JSON nor its page", hint=hint) from None
    if not isinstance(run, dict) or "bench" not in run:
        raise UsageError(f"{path} is no run of kerngen bench", hint=hint)
    if run["bench"] != bench:
        raise UsageError(f"{path} is of kerngen bench {run['bench']}, not of kerngen bench {bench}", hint=hint)
    return run


def as_data(run: Run) -> str:
    """JSON for a page to carry: whatever names are in it, nothing in it ends its element."""
    return json.dumps(run, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- values of a run that a file may have given: each raises ValueError or TypeError for what is none


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no time, rate or count")
    return float(value)


def time(value: Any) -> float:
    """One that something can be divided by."""
    if not (found := number(value)):
        raise ValueError("a time of 0")
    return found


def positive(value: Any) -> float | None:
    return None if value is None or not number(value) else number(value)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
