"""`kerngen db keygen` and `kerngen db trust`: who signs databases, and whose signatures count here."""

from __future__ import annotations

from pathlib import Path

import click

from kerngen.cli.db.common import echo_json
from kerngen.cli.tables import echo
from kerngen.errors import TrustError, UsageError


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--comment", default=None, help="Whose key it is, for those who are to trust it. Default: user@host.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def keygen(file: Path | None, comment: str | None, as_json: bool) -> None:
    """Make a key to sign databases with: FILE, which stays secret, and FILE.pub, which others are to trust.

    Without FILE, the user's own, with which exports are signed where no other key is named. A key that is there is
    never written over. The new key is not trusted by itself: `kerngen db trust FILE.pub`.

    Example: kerngen db keygen release.key --comment "release key of our cluster"
    """
    from kerngen.tuning_db.dist.keys import SecretKey, user_key_path, whose

    path = user_key_path() if file is None else file
    key = SecretKey.generate(whose() if comment is None else comment)
    key.write(path)
    if as_json:
        echo_json({"key": key.public.id, "comment": key.comment, "secret": str(path),
                   "public": f"{path}.pub", "line": key.public.line.strip()})  # fmt: skip
        return
    echo(f"{key.public}\n  secret  {path}      keep it, and show it to nobody\n  public  {path}.pub")
    echo(f"whoever is to run what it signs: kerngen db trust {path}.pub")


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--digest", "digests", multiple=True, metavar="HEX",
              help="One sealed database, by its digest, whoever signed it or nobody.")  # fmt: skip
@click.option("--remove", "ids", multiple=True, metavar="ID", help="Trust this key, or digest, no longer.")
@click.option("--list", "listed", is_flag=True, help="List what is trusted. As without any argument.")
@click.option("--json", "as_json", is_flag=True, help="Print what is trusted, as JSON.")
def trust(files: tuple[Path, ...], digests: tuple[str, ...], ids: tuple[str, ...], listed: bool, as_json: bool) -> None:
    """Trust what the keys in FILES sign, as this user: a database is a program, and trusted ones are run.

    Compare the id with what its owner says it is, by another way than the file came.

    Example: kerngen db trust --list
    """
    from kerngen.tuning_db.dist.keys import read_public
    from kerngen.tuning_db.read import trust as trusted

    keys = [read_public(path) for path in files]
    said = []
    try:
        for key in keys:
            said.append(f"trusts {key}: {trusted.trust(key)}")
        said += [f"trusts the database {digest}: {trusted.trust_digest(digest)}" for digest in digests]
        for id in ids:
            removed = trusted.distrust(id)
            if not removed:
                raise UsageError(f"{id} is not trusted", hint="kerngen db trust --list")
            said += [f"does not trust {id} any more: {path} is gone" for path in removed]
    except OSError as e:
        raise TrustError(f"{e.filename}: {e.strerror or e}") from e
    found, bundles = trusted.trusted_keys(), sorted(trusted.trusted_digests())
    places = [str(p) for p in trusted.trusted_places()]
    if as_json:
        rows = [{"key": k.id, "comment": k.comment, "line": k.line.strip()} for k in found.values()]
        echo_json({"keys": rows, "digests": bundles, "places": places})
        return
    for line in said:
        echo(line)
    if listed or not said:
        for key in found.values():
            echo(f"key     {key}")
        for digest in bundles:
            echo(f"digest  {digest}")
        if not found and not bundles:
            echo("nobody is trusted: what others signed is not run")
        echo(f"looked in {', '.join(places)}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--key", "key_files", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
              help="The secret key; may be given several times. Default: the user's own.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print who signed it now as JSON.")
def sign(file: Path, key_files: tuple[Path, ...], as_json: bool) -> None:
    """Add a signature to a sealed FILE, that is as it was sealed: you answer for what it holds.

    Example: kerngen db sign sm90.kgdb --key release.key
    """
    from kerngen.tuning_db.dist.keys import SecretKey, user_key
    from kerngen.tuning_db.dist.seal import sign as add
    from kerngen.tuning_db.read.sealed import Sealed

    for key in [SecretKey.read(path) for path in key_files] or [user_key()]:
        add(file, key)
    sealed = Sealed.open(file)
    if as_json:
        echo_json({"file": str(file), "digest": sealed.digest, "signed_by": list(sealed.signatures)})
        return
    echo(f"{file} is signed by {', '.join(sealed.signatures)}\ndigest {sealed.digest}")
