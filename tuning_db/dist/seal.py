"""Makes sealed files (read/sealed.py) of SQLite databases, signs them, and says what became of one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from kerngen.errors import CorruptRecord, DatabaseError
from kerngen.system.files import open_regular, publish_with
from kerngen.tuning_db.read.files import decode_text
from kerngen.tuning_db.read.sealed import (
    QUERY_ERRORS,
    Sealed,
    Value,
    digest_of,
    encode_header,
    leaf,
    tail_of,
)  # fmt: skip
from kerngen.tuning_db.read.trust import signed_message
from kerngen.tuning_db.dist.keys import SecretKey

STORED = ("line", "artifact", "revocation")  # the tables that a run reads
_OURS = ("kerngen_bundle", "image", "tables", "stored")


def seal(
    db: str | os.PathLike[str],
    out: str | os.PathLike[str],
    about: Mapping[str, Any],
    *,
    keys: Iterable[SecretKey] = (),
    stored: Sequence[str] = STORED,
) -> str:
    """Write what the SQLite database `db` holds to `out`, sealed, signed by `keys`, and read-only: its digest.

    about: what its header says besides, as JSON. stored: the tables whose leaves are kept, of those that it has. The
    same rows, laid down in the same order by the same SQLite, give the same bytes. Raises DatabaseError, OSError.
    """
    if taken := sorted(about.keys() & set(_OURS)):
        raise ValueError(f"a header says {', '.join(taken)} by itself")
    target = Path(out)
    with tempfile.TemporaryDirectory(prefix="kerngen-seal-") as scratch:
        image = Path(scratch) / "image"
        with _clear_errors(os.fspath(db)):
            open_regular(db).close()
            _vacuum(Path(db), image)
            with contextlib.closing(_connect(image)) as connection:
                leaves = {t: sorted(leaf(t, row) for row in rows_of(connection, t)) for t in _tables(connection)}
        size = image.stat().st_size
        kept = [t for t in stored if t in leaves]
        with image.open("rb") as f:
            image_sha = hashlib.file_digest(f, "sha256").hexdigest()
        header = {
            **about,
            "kerngen_bundle": 1,
            "image": {"bytes": size, "sha256": image_sha},
            "tables": {t: {"rows": len(ls), "digest": digest_of(ls)} for t, ls in leaves.items()},
            "stored": kept,
        }
        digest = hashlib.sha256(encode_header(header)).hexdigest()
        signatures = {k.public.id: k.sign(signed_message(digest)) for k in keys}
        tail = tail_of(size, header, b"".join(part for t in kept for part in leaves[t]), signatures)
        with image.open("rb") as f:
            _publish(f, size, tail, target)
    return digest


def sign(path: str | os.PathLike[str], key: SecretKey) -> None:
    """Add `key`'s signature to a sealed file, or renew it. Nothing else in the file changes.

    Raises CorruptRecord where the file is not as it was sealed: nobody should answer for that. DatabaseError, OSError.
    """
    sealed = Sealed.open(path)
    if not sealed.is_whole():
        raise CorruptRecord(f"{os.fspath(path)} was changed since it was sealed: it is not signed",
                            hint=f"say where: kerngen db verify {os.fspath(path)}")  # fmt: skip
    signatures = sealed.signatures | {key.public.id: key.sign(signed_message(sealed.digest))}
    size = int(sealed.header["image"]["bytes"])
    tail = tail_of(size, sealed.header, sealed.leaves, signatures)
    with open_regular(path) as f:
        _publish(f, size, tail, Path(path))


def damage(path: str | os.PathLike[str]) -> list[str]:
    """What is not as it was sealed, in words; nothing if each byte and row is. Raises DatabaseError for another file.

    It does not ask who sealed it: `Sealed.why_untrusted` does.
    """
    try:
        sealed = Sealed.open(path)
    except CorruptRecord as e:
        return [e.message]
    found = [] if sealed.is_whole() else [f"{sealed.path} was changed since it was sealed"]
    try:
        with contextlib.closing(sealed.connect()) as connection:
            there = _tables(connection)
            found += [f"the table {t} was not sealed" for t in there if t not in sealed.header["tables"]]
            for table in sealed.header["tables"]:
                found += _damage_of(sealed, connection, table) if table in there else [f"the table {table} is gone"]
    except (*QUERY_ERRORS, DatabaseError) as e:
        found.append(f"its schema cannot be read: {e}")
    return found


def _damage_of(sealed: Sealed, connection: sqlite3.Connection, table: str) -> list[str]:
    """Of one table: how many rows were changed, came or went, as far as its leaves say."""
    try:
        leaves = [leaf(table, row) for row in rows_of(connection, table)]
    except QUERY_ERRORS as e:
        return [f"{table} cannot be read: {e}"]
    if digest_of(leaves) == sealed.header["tables"][table]["digest"]:
        return []
    counts = f"{table} has {len(leaves)} of {sealed.rows(table)} rows"
    if table not in sealed.header["stored"]:
        return [f"rows of {table} were changed: {counts}"]
    start = 32 * sum(sealed.rows(t) for t in sealed.header["stored"][: sealed.header["stored"].index(table)])
    part = sealed.leaves[start : start + 32 * sealed.rows(table)]
    was, now = Counter(part[i : i + 32] for i in range(0, len(part), 32)), Counter(leaves)
    return [f"{counts}: {(was - now).total()} that were sealed are not there, {(now - was).total()} were not sealed"]


def _tables(connection: sqlite3.Connection) -> list[str]:
    """The tables, by name. Raises DatabaseError for what would run as it is read: views, triggers, virtual tables."""
    found = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
    for kind, name, sql in found:
        if kind not in ("table", "index") or " ".join(str(sql).upper().split()).startswith("CREATE VIRTUAL"):
            raise DatabaseError(f"it has the {kind} {name}, and a tuning database has plain tables alone")
    return [name for kind, name, _ in found if kind == "table" and not name.startswith("sqlite_")]


def rows_of(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Value, ...]]:
    """The rows of `table`, all columns in the schema's order. Raises QUERY_ERRORS."""
    columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({_quoted(table)})")]
    yield from connection.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(table)}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _vacuum(db: Path, image: Path) -> None:
    """A copy of `db` without free pages, in one file, and without what its header says of how often it was changed."""
    with contextlib.closing(_connect(db)) as source:
        source.execute("VACUUM INTO ?", (str(image),))
    with contextlib.closing(sqlite3.connect(image)) as copy:
        copy.execute("PRAGMA journal_mode = DELETE")
    with image.open("r+b") as f:
        for at in (24, 40, 92):  # SQLite file format 1.3: change counter, schema cookie, the counter of the page count
            f.seek(at)
            f.write((1).to_bytes(4, "big"))


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?mode=ro", uri=True)
    connection.text_factory = decode_text
    return connection


def _publish(image: BinaryIO, size: int, tail: bytes, target: Path) -> None:
    def write(out: BinaryIO) -> None:
        image.seek(0)
        left = size
        while left and (block := image.read(min(left, 1 << 20))):
            out.write(block)
            left -= len(block)
        if left:
            raise DatabaseError(f"{target}: its database became shorter while it was copied")
        out.write(tail)
        os.fchmod(out.fileno(), 0o444)

    publish_with(write, target)


@contextlib.contextmanager
def _clear_errors(where: str) -> Iterator[None]:
    try:
        yield
    except QUERY_ERRORS as e:
        raise DatabaseError(f"{where}: {e}") from e
    except DatabaseError as e:
        raise DatabaseError(f"{where}: {e.message}") from e
