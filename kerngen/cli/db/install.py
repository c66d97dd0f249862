"""Bundles that every run looks in: `kerngen db install` and `uninstall`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kerngen.arch import find_arch
from kerngen.cli.db.common import echo_json
from kerngen.cli.tables import echo
from kerngen.errors import TrustError, UsageError
from kerngen.system.cores import usable_cores

if TYPE_CHECKING:
    from kerngen.tuning_db.read.boards import Board
    from kerngen.tuning_db.read.installed import Installed


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--name", default="", help="What to call it. Default: the name in the file.")
@click.option("--pin", is_flag=True, help="No other version takes its place, until --pin or --unpin says so.")
@click.option("--unpin", "unpinned", default=None, metavar="NAME", help="Other versions may take its place again.")
@click.option("--rollback", "back", default=None, metavar="NAME", help="Serve the version before.")
@click.option("--list", "listed", is_flag=True, help="List what is installed. As without any argument.")
@click.option("--force", is_flag=True, help="Install it though it is older than what is there, or that cannot be read.")
@click.option("--allow-unsigned", is_flag=True, help="Trust this file alone, whoever signed it or nobody.")
@click.option("--prebuilt", is_flag=True, help="Compile what kerngen is shipped with, and install that.")
@click.option("--arch", "arch_names", default=None, help="With --prebuilt: only boards of these arches.")
@click.option("--device", "devices", multiple=True, help="With --prebuilt: only these boards. Default: the GPU's here.")
@click.option("--model", "models", multiple=True, help="With --prebuilt: only what these models need.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="With --prebuilt: compiler processes.")
@click.option("--json", "as_json", is_flag=True, help="Print what is installed, as JSON.")
def install(
    file: Path | None, name: str, pin: bool, unpinned: str | None, back: str | None, listed: bool, force: bool,
    allow_unsigned: bool, prebuilt: bool, arch_names: str | None, devices: tuple[str, ...], models: tuple[str, ...],
    jobs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Verify a sealed FILE and have every run of this user look in it, after his own database and before the shipped.

    A file of the same name takes the place of the one that is there, to which --rollback goes back. It is installed by
    name: what happens to FILE later does not matter. One that is older than what was installed by that name is refused
    without --force; what that revoked stays revoked in any case.

    With --prebuilt and no FILE: the winners that kerngen is shipped with, compiled ahead, which a run would compile as
    it launches them; signed with the user's own key, and installed as prebuilt-BOARD.

    Example: kerngen db install sm90.kgdb --pin
    """
    from kerngen.tuning_db.dist.verify import LEVELS, verify
    from kerngen.tuning_db.read import installed as bundles
    from kerngen.tuning_db.read.sealed import Sealed
    from kerngen.tuning_db.read.trust import trust_digest

    said: list[str] = []
    if sum([file is not None, unpinned is not None, back is not None, prebuilt]) > 1:
        raise UsageError("FILE, --prebuilt, --unpin and --rollback are four things to do", hint="give one of them")
    if not prebuilt and (arch_names or devices or models or jobs):
        raise UsageError("--arch, --device, --model and --jobs go with --prebuilt")
    if file is None and (pin or name or force or allow_unsigned):
        raise UsageError("--pin, --name, --force and --allow-unsigned go with a FILE")
    if file is not None:
        verdicts = verify(str(file), LEVELS[:2] if allow_unsigned else LEVELS[:3])
        if (last := verdicts[-1]).ok is not True:
            why = "; ".join(last.faults[:3]) or last.text
            raise TrustError(f"{file} is not installed: {last.level}: {why}", hint=f"kerngen db verify {file}")
        if allow_unsigned:
            trust_digest(Sealed.open(file).digest)
        made = bundles.install(file, name=name, pin=pin, force=force)
        said.append(f"installed {_words(made)} as {made.path}")
    if prebuilt:
        for board in _boards(arch_names, devices):
            said.append(_install_prebuilt(board, models, jobs or usable_cores(), quiet=as_json))
    if unpinned is not None:
        said.append(f"not pinned any more: {_words(bundles.change(unpinned, pinned=False))}")
    if back is not None:
        said.append(f"back to {_words(bundles.change(back, rollback=True))}")
    found = bundles.installed()
    if as_json:
        echo_json([{"name": b.name, "digest": b.digest, "file": str(b.path), "pinned": b.pinned,
                    "versions": list(b.versions)} for b in found])  # fmt: skip
        return
    for line in said:
        echo(line)
    if listed or not said:
        for b in found:
            echo(_words(b))
        if not found:
            echo("nothing is installed")


def _boards(arch_names: str | None, devices: Sequence[str]) -> list[Board]:
    """Those that are meant, of what is shipped: of the GPU that is here where nothing is named. Raises UsageError."""
    from kerngen.arch import find_device, parse_arches
    from kerngen.cli.doctor_model import gpu_here
    from kerngen.tuning_db.read.boards import nearest_board, shipped_boards

    there = shipped_boards()
    found = list(there)
    asked = [find_device(name) for named in devices for name in named.split(",")]
    if not devices and arch_names is None:
        if (here := gpu_here()) is None:
            raise UsageError("this machine has no GPU", hint="name a board: --device V100, or --arch all")
        asked = [here.device]
    if asked:
        found = list({b.name: b for d in asked if (b := nearest_board(d)) is not None}.values())
    if arch_names is not None:
        arches = {a.name for a in parse_arches(arch_names)}
        found = [b for b in found if b.device.arch in arches]
    if not found:
        raise UsageError("nothing is shipped for that board", hint="there is: " + ", ".join(b.name for b in there))
    return found


def _install_prebuilt(board: Board, models: Sequence[str], jobs: int, *, quiet: bool) -> str:
    from kerngen.cli.db.transfer import cells_of
    from kerngen.compiler.cache import CachedCompiler, CompileCache
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db.dist.keys import user_key
    from kerngen.tuning_db.read import installed as bundles
    from kerngen.tuning_db.read.sealed import SUFFIX
    from kerngen.tuning_db.shipped import compile_board

    cells = {c for m in models for c in cells_of(m, find_arch(board.device.arch))} if models else None
    with tempfile.TemporaryDirectory(prefix="kerngen-prebuilt-") as scratch:
        file = Path(scratch) / f"prebuilt-{board.name}{SUFFIX}"
        with Reporter(f"compile {board.name}", quiet=quiet) as bar, CachedCompiler(jobs, CompileCache()) as compiler:
            done = compile_board(board, file, compiler, [user_key()], cells=cells, say=bar.update)
        made = bundles.install(file, force=True)  # the kerngen that is here decides what it ships
        left = f", {len(done.stale)} left out, whose bodies have another revision today" if done.stale else ""
        return f"installed {_words(made)}: {done.winners} winners{left}, {file.stat().st_size / 1e6:.1f} MB"


def _words(b: Installed) -> str:
    count = f", version {b.active + 1} of {len(b.versions)}" if len(b.versions) > 1 else ""
    return f"{b.name}  {b.digest[:16]}{count}{', pinned' if b.pinned else ''}"


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--json", "as_json", is_flag=True, help="Print what was removed, as JSON.")
def uninstall(names: tuple[str, ...], as_json: bool) -> None:
    """Remove installed bundles, with all their versions.

    Example: kerngen db uninstall sm90
    """
    from kerngen.tuning_db.read import installed as bundles

    gone = [bundles.uninstall(name) for name in names]
    if as_json:
        echo_json([{"name": b.name, "digest": b.digest} for b in gone])
        return
    for b in gone:
        echo(f"removed {_words(b)}")
