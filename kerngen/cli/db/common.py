"""What the commands of `kerngen db` share: options, the databases they read, what is printed of a row, and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.tables import say
from kerngen.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from kerngen.arch import Target
    from kerngen.report.data import Wanted
    from kerngen.tuning_db import Store

ID_CHARS = 12


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    help = "The database to read. Default: all that a run looks in, and of what is shipped the boards of "
    help += "--arch or --device, else of this machine's GPU."
    return click.option("--db", "url", default=None, metavar="FILE|URL", help=help)(command)


def boards_for(arch_names: str | None, devices: Sequence[str | None]) -> list[Target] | None:
    """The boards whose shipped results are meant; None where nothing names any. Raises UnknownName for an arch.

    devices: as options give them, None for one that was not given.
    """
    from kerngen.arch import Target, find_device, parse_arches
    from kerngen.tuning_db.read.boards import shipped_boards

    names, boards = [n for d in devices if d for n in d.split(",")], []
    for name in names:
        with suppress(UnknownName):  # a database may have boards that kerngen has no profile of
            boards.append(find_device(name))
    if arch_names is not None:
        arches = {a.name for a in parse_arches(arch_names)}
        named = boards if names else [b.device for b in shipped_boards()]
        boards = [b for b in named if b.arch in arches]
    return [Target.of(b) for b in boards] if names or arch_names is not None else None


def _boards_here() -> tuple[list[Target], list[str]]:
    """Those of this machine's arch, and the names of the others: each takes seconds when first looked at."""
    from kerngen.arch import Target
    from kerngen.tuning.worker import present_arch
    from kerngen.tuning_db.read.boards import shipped_boards

    arch, boards = present_arch(), shipped_boards()
    here = [b for b in boards if arch is not None and b.device.arch == arch.name]
    return [Target.of(b.device) for b in here], [b.name for b in boards if b not in here]


@contextmanager
def reading(url: str | None, targets: Sequence[Target] | None = None, *, own: bool = False) -> Iterator[list[Store]]:
    """What `--db` names, or all that a run looks in. Read-only. targets: boards whose shipped results are read too;
    None for those of this machine's arch, and then the end says which were left out. own: as tuning_db.stores_for.
    """
    from kerngen.tuning_db import stores_for

    others: list[str] = []
    if targets is None and url is None:
        targets, others = _boards_here()
    with ExitStack() as stack:
        stores = stores_for(url, targets, own=own)
        for store in stores:
            stack.enter_context(store)
        yield stores
    if others:
        say(f"left out: what is shipped for {', '.join(others)}; --arch or --device asks for it", err=True)


@contextmanager
def changing(url: str | None) -> Iterator[Store]:
    """A database that is there, to write to. Raises UsageError, DatabaseError."""
    from kerngen.tuning_db import Store, default_path
    from kerngen.tuning_db.read.sealed import is_sealed_file

    place = url or default_path()
    if "://" not in place:
        if not os.path.exists(place):
            raise UsageError(f"{place} is not there: there is nothing to change", hint="name another with --db")
        if os.path.isfile(place) and not os.path.getsize(place):
            raise UsageError(f"{place} is an empty file: there is nothing to change",
                             hint="name another with --db; kerngen tune --db FILE fills one")  # fmt: skip
        if is_sealed_file(place):
            raise UsageError(f"{place} is sealed: it is never changed", hint="kerngen db import takes it to your own")
    with Store.open(place) as store:
        yield store


def known_kernels(stores: Iterable[Store]) -> set[str]:
    """Those that are installed, and those that only have winners."""
    from kerngen.templates import kernel_names

    return {w.kernel for store in stores for w in store.winners()} | set(kernel_names())


def require_known(names: Collection[str], stores: Iterable[Store]) -> None:
    """Raises UnknownName for a kernel that neither is installed nor has winners."""
    known = known_kernels(stores) if names else set()
    for name in sorted(set(names) - known):
        raise UnknownName("kernel", name, sorted(known))


def drawing_options(output: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of commands that draw a part of what they read: which part (see `drawing`), and where to (`output`)."""
    path = click.Path(path_type=Path, dir_okay=False)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--device", "device_name", default=None, help="Only this device."),
            click.option("--arch", "arch_names", default=None, help="Only these arches: sm70,sm90."),
            click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given several times."),
            click.option("-o", "--output", type=path, required=True, help=output),
        ):
            command = option(command)
        return reading_options(command)

    return decorate


@contextmanager
def drawing(
    url: str | None, kernels: Sequence[str], arch_names: str | None, device_name: str | None
) -> Iterator[tuple[list[Store], Wanted]]:
    """What is read, and which part of it is drawn. Raises UnknownName for a kernel that neither has rows nor is
    installed, an arch, or a device.
    """
    from kerngen.arch import find_device, parse_arches
    from kerngen.report.data import Wanted

    arches = None if arch_names is None else frozenset(a.name for a in parse_arches(arch_names))
    device = None if device_name is None else find_device(device_name).name
    names = frozenset(n for k in kernels for n in k.split(","))
    with reading(url, boards_for(arch_names, [device])) as stores:
        require_known(names, stores)
        yield stores, Wanted(names or None, arches, device)


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
