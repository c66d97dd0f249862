"""Connections: how SQLite and PostgreSQL are opened, and what their errors mean in words."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine import make_url
from sqlalchemy.pool import QueuePool

from kerngen.errors import DatabaseError, UsageError
from kerngen.system.urls import hide_password, without_password
from kerngen.tuning_db.read.files import BUSY_S, decode_text, is_absent, require_whole, uri_of, wal_of
from kerngen.tuning_db.read.places import NO_ANSWER, PREBUILT

CONNECT_S = 10  # how long a server may take to answer, unless the URL has ?connect_timeout=
STATEMENT_S = 300  # how long a server may take for one statement, and a session may sit in a transaction
# Each end notices within a minute that the other is gone; a lost network would otherwise hold the lock for two hours.
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
_SESSION = {
    "statement_timeout": f"{STATEMENT_S}s", "idle_in_transaction_session_timeout": f"{STATEMENT_S}s",
    "lock_timeout": f"{BUSY_S:.0f}s", "tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}  # fmt: skip
_ADVISORY_LOCK = 0x6B65726E67656E  # "kerngen"
_IMMEDIATE = "kerngen_immediate"
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse.sshfs",
}
_RESTORE = "restore a copy; sqlite3 FILE .recover may save rows"
_MEANINGS = (
    ("readonly database", "is read-only", "name a place you can write to, with --db or KERNGEN_DB"),
    ("not a database", "is not an SQLite database", "name another with --db or KERNGEN_DB, or move it away"),
    ("malformed", "is damaged or cut short", _RESTORE),
    ("unsupported file format", "is in a format that this SQLite cannot read", None),
    ("disk is full", "has no space left to write to; what was committed is safe", None),
    ("disk I/O error", "cannot be read or written: disk I/O error", None),
    (
        "unable to open",
        "cannot be opened",
        "its folder must be there and not read-only",
    ),
    ("lock timeout", f"has been locked by another process for {BUSY_S:.0f} s", None),
    ("statement timeout", f"has taken more than {STATEMENT_S} s over one statement", None),
    ("locked", f"has been locked by another process for {BUSY_S:.0f} s", None),
    ("no such table", "is not a tuning database", None),
)


@contextlib.contextmanager
def clear_errors(where: str, hint: str | None = None, url: str = "") -> Iterator[None]:
    """Turn what the database driver raises into a DatabaseError of one clear line that names `where`.

    hint: for what is not known here by its words. url: the server's, whose password the driver may repeat.
    """
    try:
        yield
    except (exc.DBAPIError, sqlite3.Error) as e:
        text = hide_password(str(e.orig if isinstance(e, exc.DBAPIError) else e).strip(), url)
        for sign, meaning, way_on in _MEANINGS:
            if sign in text:
                raise DatabaseError(f"{where} {meaning}", hint=way_on) from e
        raise DatabaseError(f"{where}: {text.splitlines()[0] if text else type(e).__name__}", hint=hint) from e
    except UnicodeError as e:  # of a damaged schema that an error quotes, or of a damaged key that is asked for
        raise DatabaseError(f"{where} is damaged", hint=_RESTORE) from e


def open_sqlite(path: Path) -> Engine:
    """A file to read and write, made if it is not there. Raises DatabaseError.

    Write-ahead log: readers never wait, writers wait for each other, and what is committed survives a kill. On a
    network file system, where such a log is not safe, a rollback journal takes its place.
    """
    if Path(os.path.realpath(path)).is_relative_to(PREBUILT):
        raise UsageError(f"{path} is shipped with kerngen, to be read and never written to",
                         hint="tune into a file of your own with --db FILE, or KERNGEN_DB=FILE, which a run asks "
                              "before the shipped ones")  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DatabaseError(f"{path}: cannot make its folder: {e.strerror or e}",
                            hint="name a place you can write to, with --db or KERNGEN_DB") from e  # fmt: skip
    require_whole(path)
    engine = _sqlite_engine(f"{uri_of(path)}?mode=rwc")
    with clear_errors(str(path)), engine.connect() as connection:
        _set_journal(connection, "delete" if is_network_path(path) else "wal")
    return engine


def open_sqlite_read_only(path: Path, *, sealed: bool = False) -> Engine:
    """A file to read, which this never changes. Raises DatabaseError.

    A `sealed` file, and one on a disk where nobody here can write, is opened as immutable: no locks, no side files.
    Any other may be written to by someone else meanwhile, and what they commit is seen.
    """
    if is_absent(path):
        raise DatabaseError(f"{path}: no such file", hint="kerngen tune --db FILE makes one")
    require_whole(path)
    immutable = sealed or (not os.access(path.absolute().parent, os.W_OK) and not wal_of(path).exists())
    uri = f"{uri_of(path)}?mode=ro" + ("&immutable=1" if immutable else "")
    engine = _sqlite_engine(uri)
    with clear_errors(str(path)), engine.connect() as connection:
        connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
    return engine


def copy_to_memory(source: Engine) -> Engine:
    """What an SQLite database holds now, in memory: the copy may be changed, and is gone with its engine."""
    with source.connect() as connection:
        return in_memory(_raw(connection))


def in_memory(source: sqlite3.Connection | None = None) -> Engine:
    """A database in memory, of what `source` holds now or empty; it is gone with its engine."""
    uri = f"file:kerngen-{uuid4().hex}?mode=memory&cache=shared"
    keeper = sqlite3.connect(uri, uri=True, check_same_thread=False)  # it lives while a connection to it does
    if source is not None:
        source.backup(keeper)
    engine = _sqlite_engine(uri)
    event.listen(engine, "engine_disposed", lambda _: keeper.close())
    return engine


def fold_log(engine: Engine) -> bool:
    """Move a write-ahead log into its SQLite file, so that the file alone holds everything. True if it is all there.

    False where another process is at it: the last of them to close it does the same.
    """
    with engine.connect() as connection:
        raw = _raw(connection)
        raw.execute("PRAGMA busy_timeout = 1000")
        busy: int = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    return not busy


def vacuum(engine: Engine) -> None:
    """Give an SQLite file's free pages back."""
    with engine.connect() as connection:
        _raw(connection).execute("VACUUM")


def open_server(url: str) -> Engine:
    """A PostgreSQL server by URL (postgresql+psycopg://...). Raises UsageError; DatabaseError where none answers.

    Nothing waits for ever: what _KEEPALIVE and _SESSION say holds unless the URL says otherwise, in its parameters
    (?keepalives_idle=) or its options (?options=-cstatement_timeout%3D0).
    """
    where = without_password(url)
    try:
        url.encode()  # bytes of a command line that are no UTF-8 are lone surrogates, which no driver takes
        parsed = make_url(url)
        if parsed.get_backend_name() != "postgresql":
            raise UsageError(f"{where}: neither SQLite nor PostgreSQL",
                             hint="a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME")  # fmt: skip
        if "@" in (parsed.host or ""):
            raise ValueError("a password with an @, of which a part would be looked up, and shown, as the host")
        waiting = {k: v for k, v in {"connect_timeout": CONNECT_S, **_KEEPALIVE}.items() if k not in parsed.query}
        engine = create_engine(parsed, pool_pre_ping=True, connect_args=waiting)
        event.listen(
            engine, "connect", lambda connection, _: _set_session(connection, str(parsed.query.get("options")))
        )
    except (exc.ArgumentError, ValueError):  # ValueError: a port that is no number, or a surrogate
        raise UsageError(f"{where!r} is not a database URL",
                         hint="a path, sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME; an @ in a password is "
                              "written %40") from None  # fmt: skip
    except ModuleNotFoundError as e:
        raise DatabaseError(f"{e.name} is not installed", hint="pip install 'kerngen[pg]'") from e
    with clear_errors(where, NO_ANSWER, url), engine.connect():
        return engine


def _set_session(connection: Any, told: str) -> None:
    """Not by `options` as one connects: connection poolers refuse those."""
    with connection.cursor() as cursor:
        cursor.execute("; ".join(f"SET {name} = '{value}'" for name, value in _SESSION.items() if name not in told))
    connection.commit()


def _sqlite_engine(uri: str) -> Engine:
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None),
        poolclass=QueuePool,
    )

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: object) -> None:
        connection.text_factory = decode_text
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        # Deferred transactions that turn into writers fail at once when another wrote meanwhile; these wait.
        immediate = connection.get_execution_options().get(_IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


@contextlib.contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that holds the write lock from its start: one writer at a time, so no deadlocks and no half reads.

    On PostgreSQL an advisory lock of our own stands for SQLite's; readers and other programs' tables are not held up.
    """
    with engine.connect().execution_options(**{_IMMEDIATE: True}) as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")
        yield connection


def _raw(connection: Connection) -> sqlite3.Connection:
    """SQLite's own connection, on which no transaction is begun for us."""
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def leave_log(path: Path) -> None:
    """Put what lies in the write-ahead log of a file that nobody has open into the file; it keeps no log after that."""
    engine = _sqlite_engine(f"{uri_of(path)}?mode=rw")
    with clear_errors(str(path)), engine.connect() as connection:
        _set_journal(connection, "delete")
    engine.dispose()


def _set_journal(connection: Connection, mode: str) -> None:
    """Several processes may do this to a new file at once, and SQLite's busy timeout does not cover it."""
    raw = _raw(connection)
    give_up = time.monotonic() + BUSY_S
    while True:
        try:
            if raw.execute("PRAGMA journal_mode").fetchone()[0] != mode:
                raw.execute(f"PRAGMA journal_mode = {mode}").fetchone()  # a read-only file keeps its mode, silently
            return
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def is_network_path(path: Path) -> bool:
    """True where `path` lies on a file system that several hosts may mount, as far as /proc/mounts tells."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return False
    where = os.path.realpath(path.parent)
    best, kind = "", ""
    for line in lines:
        _, mount, fs, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = where == mount or where.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fs
    return kind in _NETWORK
