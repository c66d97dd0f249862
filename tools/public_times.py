"""Compares the cost model with times that others published, of boards that nobody here has.

    python -m tools.public_times data/public_times.csv

Each line of the file is a time that somebody measured of another kernel that does the same, and where it was published.
So a ratio far from 1 is the other kernel's doing as often as the model's; that a board's are all far to one side is the
model's. The prediction is of the default configuration, before any compile.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kerngen.arch import Target, find_device
from kerngen.cost.predict import Prediction, predict
from kerngen.errors import KerngenError, RecordingError
from kerngen.templates import find_kernel
from kerngen.tuning.plan import GUESSED_REGISTERS

COLUMNS = ("kernel", "problem", "board", "us", "what", "source")


@dataclass(frozen=True, slots=True)
class Published:
    """A time that was published. what: the kernel that it is of. predicted_us: of ours on that board."""

    kernel: str
    problem: dict[str, Any]
    board: str
    us: float
    what: str
    source: str
    predicted_us: float
    bound: str

    @property
    def ratio(self) -> float:
        """Predicted / published."""
        return self.predicted_us / self.us


def read_public_times(path: Path) -> tuple[Published, ...]:
    """The lines of `path`, with predictions. Raises RecordingError, with file and line, and OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    if not lines or tuple(lines[0]) != COLUMNS:
        raise RecordingError(f"{path}:1: the columns are not {','.join(COLUMNS)}")
    return tuple(_published(f"{path}:{number}", cells) for number, cells in enumerate(lines[1:], 2))


def _published(where: str, cells: Sequence[str]) -> Published:
    if len(cells) != len(COLUMNS) or not all(cells):
        raise RecordingError(f"{where}: {len([c for c in cells if c])} of {len(COLUMNS)} cells")
    kernel, text, board, us, what, source = cells
    try:
        problem, took = json.loads(text), float(us)
        found = _predicted(kernel, problem, board)
    except (KerngenError, TypeError, ValueError) as e:
        raise RecordingError(f"{where}: {getattr(e, 'message', e)}") from e
    if took <= 0:
        raise RecordingError(f"{where}: {us} us")
    return Published(kernel, problem, board, took, what, source, found.latency_us, found.bound)


def _predicted(kernel: str, fields: dict[str, Any], board: str) -> Prediction:
    found, target = find_kernel(kernel), Target.of(find_device(board))
    problem = found.problem_type(**fields)
    return predict(found, problem, found.default_config(problem, target), target, registers=GUESSED_REGISTERS)


def markdown(times: Sequence[Published]) -> str:
    """A table, as docs/prediction.md has it."""
    rows = ["| board | kernel | problem | published | us | predicted | ratio |", "|---|---|---|---|---|---|---|"]
    for t in times:
        problem = ", ".join(f"{k} {v}" for k, v in t.problem.items())
        rows.append(
            f"| {t.board} | {t.kernel} | {problem} | {t.what}: {t.source} | {t.us:g} | {t.predicted_us:.4g} | "
            f"{t.ratio:.2f} |"
        )
    return "\n".join(rows)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def main(path: Path, as_json: bool) -> None:
    """Predict what the times in PATH were published of: a table in Markdown.

    \b
    Example:
      python -m tools.public_times data/public_times.csv
    """
    times = read_public_times(path)
    print(json.dumps([asdict(t) | {"ratio": t.ratio} for t in times]) if as_json else markdown(times))


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.public_times"))
