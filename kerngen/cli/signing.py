"""Who signs what is written: the options of commands that make sealed files, and the keys that they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kerngen.errors import TrustError, UsageError

if TYPE_CHECKING:
    from kerngen.tuning_db.dist.keys import SecretKey


def signing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--unsigned", is_flag=True, help="Sign it with no key: it is run where that is allowed."),
        click.option("--key", "key_files", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
                     help="Sign it with this secret key (kerngen db keygen); may be given several times. Default: the "
                     "user's own, which is made if need be."),
    ):  # fmt: skip
        command = option(command)
    return command


def signers(key_files: tuple[Path, ...], unsigned: bool) -> list[SecretKey]:
    """The keys to sign with. Raises UsageError where both are given, TrustError for a file that is no safe key.

    The user's own is a convenience: where it can be neither read nor made, which a warning says, there is none.
    """
    from kerngen.tuning_db.dist.keys import SecretKey, user_key

    if key_files and unsigned:
        raise UsageError("--key and --unsigned contradict each other", hint="give one of them")
    if unsigned:
        return []
    if key_files:
        return [SecretKey.read(path) for path in key_files]
    try:
        return [user_key()]
    except (TrustError, OSError) as e:
        why = e.message if isinstance(e, TrustError) else f"{e.filename}: {e.strerror or e}"
        click.echo(f"not signed: {why}\n  sign it: kerngen db sign FILE --key KEY", err=True)
        return []
