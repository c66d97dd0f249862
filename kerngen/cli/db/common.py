"""What the commands of `kerngen db` share: options, the databases they read, tables and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kerngen.arch import Target
    from kerngen.tuning_db import ProblemKey, Store

ID_CHARS = 12
_PIPED_WIDTH = 200  # where there is no terminal to measure


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    help = "The database to read. Default: all that a run looks in (override, user's, prebuilt)."
    return click.option("--db", "url", default=None, metavar="FILE|URL", help=help)(command)


@contextmanager
def reading(url: str | None, targets: Sequence[Target] | None = None) -> Iterator[list[Store]]:
    """What `--db` names, or all that a run looks in. Read-only. targets: as default_stores."""
    from kerngen.tuning_db import stores_for

    with ExitStack() as stack:
        stores = stores_for(url, targets)
        for store in stores:
            stack.enter_context(store)
        yield stores


def new_console() -> Console:
    """On stdout; as wide as a line needs where that is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=_PIPED_WIDTH)
    return console


def new_table(title: str, *columns: str) -> Table:
    """A column whose name begins with ">" is set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def fields_as_filed(key: ProblemKey) -> dict[str, Any]:
    """The problem as it is filed: compiled-in fields, bucketed fields, then the dynamic one under its own name."""
    flat = {**key.static, **key.runtime}
    if key.dynamic is not None:
        flat[_dynamic_name(key.kernel)] = key.dynamic
    return flat


def _dynamic_name(kernel: str) -> str:
    from kerngen.templates import find_kernel, kernel_names

    return str(find_kernel(kernel).problem_type.DYNAMIC) if kernel in kernel_names() else "dynamic"


def pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in values.items())


def micros(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{low:.2f}-{high:.2f}"


def echo_json(value: Any) -> None:
    """JSON has no infinity and no NaN: they become null."""

    def finite(v: Any) -> Any:
        if isinstance(v, float) and not math.isfinite(v):
            return None
        if isinstance(v, dict):
            return {k: finite(x) for k, x in v.items()}
        return [finite(x) for x in v] if isinstance(v, (list, tuple)) else v

    click.echo(json.dumps(finite(value), indent=1))
