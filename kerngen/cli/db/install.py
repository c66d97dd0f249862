"""Bundles that every run looks in: `kerngen db install` and `uninstall`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kerngen.cli.db.common import echo_json
from kerngen.errors import TrustError, UsageError

if TYPE_CHECKING:
    from kerngen.tuning_db.serve.installed import Installed


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--name", default="", help="What to call it. Default: the name in the file.")
@click.option("--pin", is_flag=True, help="No other version takes its place, until --pin or --unpin says so.")
@click.option("--unpin", "unpinned", default=None, metavar="NAME", help="Other versions may take its place again.")
@click.option("--rollback", "back", default=None, metavar="NAME", help="Serve the version before.")
@click.option("--list", "listed", is_flag=True, help="List what is installed. As without any argument.")
@click.option("--allow-unsigned", is_flag=True, help="Trust this file alone, whoever signed it or nobody.")
@click.option("--json", "as_json", is_flag=True, help="Print what is installed, as JSON.")
def install(
    file: Path | None, name: str, pin: bool, unpinned: str | None, back: str | None, listed: bool,
    allow_unsigned: bool, as_json: bool,
) -> None:  # fmt: skip
    """Verify a sealed FILE and have every run of this user look in it, after his own database and before the shipped.

    A file of the same name takes the place of the one that is there, to which --rollback goes back. It is installed by
    name: what happens to FILE later does not matter.

    Example: kerngen db install sm90.kgdb --pin
    """
    from kerngen.tuning_db.serve import installed as bundles
    from kerngen.tuning_db.serve.sealed import Sealed
    from kerngen.tuning_db.serve.trust import trust_digest
    from kerngen.tuning_db.ship.verify import LEVELS, verify

    said: list[str] = []
    if sum(what is not None for what in (file, unpinned, back)) > 1:
        raise UsageError("FILE, --unpin and --rollback are three things to do", hint="give one of them")
    if file is None and (pin or name or allow_unsigned):
        raise UsageError("--pin, --name and --allow-unsigned go with a FILE")
    if file is not None:
        verdicts = verify(str(file), LEVELS[:2] if allow_unsigned else LEVELS[:3])
        if (last := verdicts[-1]).ok is not True:
            why = "; ".join(last.faults[:3]) or last.text
            raise TrustError(f"{file} is not installed: {last.level}: {why}", hint=f"kerngen db verify {file}")
        if allow_unsigned:
            trust_digest(Sealed.open(file).digest)
        made = bundles.install(file, name=name, pin=pin)
        said.append(f"installed {_words(made)} as {made.path}")
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
        click.echo(line)
    if listed or not said:
        for b in found:
            click.echo(_words(b))
        if not found:
            click.echo("nothing is installed")


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
    from kerngen.tuning_db.serve import installed as bundles

    gone = [bundles.uninstall(name) for name in names]
    if as_json:
        echo_json([{"name": b.name, "digest": b.digest} for b in gone])
        return
    for b in gone:
        click.echo(f"removed {_words(b)}")
