"""Sealed files (read/sealed.py) as stores: what somebody answers for who is trusted here, and what of it is whole.

The whole file is read at once and served from memory: whatever becomes of it on the disk meanwhile, what was verified
is what is served.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kerngen.errors import CorruptRecord, DatabaseError
from kerngen.tuning_db.read.files import is_absent
from kerngen.tuning_db.read.reader import require_own
from kerngen.tuning_db.read.sealed import QUERY_ERRORS, Sealed, Value, is_sealed_file
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import migrate, schema
from kerngen.tuning_db.store.store import Store

log = logging.getLogger(__name__)


def open_bundle(
    path: str | os.PathLike[str], *, name: str = "", override: bool = False, allow_unsigned: bool = False
) -> Store:
    """The database that a sealed file holds. One that was changed since is served without the rows that were changed.

    name, override: as Store.open. Raises TrustError unless somebody signed it who is trusted here, DatabaseError where
    it is no sealed file, or CorruptRecord where too little of it is left.
    """
    sealed = Sealed.open(path)
    if not allow_unsigned:
        sealed.require_trusted()
    where = os.fspath(sealed.path)
    image = sealed.image()
    with engines.clear_errors(where):
        whole = hashlib.sha256(image).hexdigest() == sealed.header["image"]["sha256"]
        engine = as_it_is(image) if whole else _salvaged(sealed, image)
        try:
            engine = migrate.settle(engine, where, read_only=True)
        except BaseException:
            engine.dispose()
            raise
    return Store(engine, where, name=name or sealed.path.stem, read_only=True, override=override)


def open_any(
    url_or_path: str, *, name: str = "", override: bool = False, allow_unsigned: bool = False, own: bool = False
) -> Store:
    """What a user names with --db, to read: a server, a file that is written to, or a sealed one. Raises as those.

    own: its machine code goes on from here. TrustError where another user may have written a file that is not sealed.
    """
    place = url_or_path.removeprefix("sqlite:///")
    if "://" not in place:
        if is_sealed_file(place):
            return open_bundle(place, name=name, override=override, allow_unsigned=allow_unsigned)
        if own and not is_absent(Path(place)):
            require_own(Path(place))
    return Store.open(place, read_only=True, name=name, override=override)


def as_it_is(image: bytes) -> Engine:
    """An SQLite file's bytes as a database in memory. Raises sqlite3.Error where they are too damaged to be copied."""
    with contextlib.closing(sqlite3.connect(":memory:")) as raw:
        raw.deserialize(image)
        return engines.in_memory(raw)


def _salvaged(sealed: Sealed, image: bytes) -> Engine:
    """A database of the rows that are as they were sealed. Raises CorruptRecord where there are none to be had."""
    revision = sealed.header.get("schema")
    if revision not in migrate.known_revisions():
        migrate.require_known(revision, os.fspath(sealed.path))
        raise CorruptRecord(f"{sealed.path} was changed since it was sealed, and does not say what schema it has")
    engine = engines.in_memory()
    with engines.writing(engine) as connection:
        migrate.upgrade(connection, revision)
    lost = []
    with contextlib.closing(sqlite3.connect(":memory:")) as damaged, engine.connect() as to:
        damaged.deserialize(image)
        damaged.text_factory = engines.decode_text
        raw: Any = to.connection.driver_connection
        raw.execute("PRAGMA foreign_keys = OFF")
        raw.execute("BEGIN")
        for table in sealed.header["stored"]:
            if table not in schema.metadata.tables:
                continue
            kept = [row for row in _readable(damaged, raw, table) if sealed.has(table, row)]
            if kept:
                raw.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(kept[0]))})", kept)
            if len(kept) != sealed.rows(table):
                lost.append(f"{sealed.rows(table) - len(kept)} of {sealed.rows(table)} rows of {table}")
        raw.execute("COMMIT")
        raw.execute("PRAGMA foreign_keys = ON")
    what = ", ".join(lost) or "no row that is read"
    log.warning("%s was changed since it was sealed; it is read without what was changed: %s", sealed.path, what)
    return engine


def _readable(damaged: sqlite3.Connection, like: sqlite3.Connection, table: str) -> Iterator[tuple[Value, ...]]:
    """The rows of a table that can still be read. like: a database that has it whole, whose columns they are."""
    columns = ", ".join(f'"{name}"' for _, name, *_ in like.execute(f"PRAGMA table_info({table})"))
    try:
        yield from damaged.execute(f"SELECT {columns} FROM {table}")
    except (*QUERY_ERRORS, DatabaseError) as e:
        log.debug("%s cannot be read to its end: %s", table, e)
