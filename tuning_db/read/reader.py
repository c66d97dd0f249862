"""A tuning database in a file, as a run reads it: lines, images and revocations, with Python's own sqlite3.

Nothing is ever written, and no lock is held between two reads. The user's own file may be tuned into meanwhile. Only
what is sealed, and so written to by nobody, is opened as immutable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kerngen.compiler.compile import Cubin, Ptx
from kerngen.errors import CorruptRecord, DatabaseError, TrustError, printable
from kerngen.system.owner import TRUST_HINT, why_distrusted
from kerngen.tuning_db.read.canonical_fields import filed_kernel
from kerngen.tuning_db.read.files import BUSY_S, beside, decode_text, is_absent, require_whole, uri_of
from kerngen.tuning_db.read.ids import seal_of
from kerngen.tuning_db.read.images import image_of
from kerngen.tuning_db.read.kernel_index import COLUMNS, KernelIndex, decode, index_id_of, named
from kerngen.tuning_db.read.sealed import QUERY_ERRORS, Sealed, Value, is_sealed_file
from kerngen.tuning_db.read.source import ClosedAtEnd
from kerngen.tuning_db.read.values import Build, Winner

log = logging.getLogger(__name__)

# Revisions of the schema whose line, artifact, revocation and former are as they are read here.
SCHEMAS = frozenset({"0005", "0006", "0007", "0008"})
_REVOCATION = ("id", "subject_id", "reason", "at", "seal")
_FORMER = ("was", "id", "seal")
_AT_ONCE = 500  # names in one query


class Reader(ClosedAtEnd):
    """A file that was opened; a Source. Threads may share one."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, name: str, override: bool, sealed: Sealed | None
    ) -> None:
        self.where, self.name, self.override, self.sealed = str(path), name, override, sealed
        self._connection, self._lock = connection, threading.Lock()
        self._revoked: tuple[int, dict[str, str]] | None = None  # and what others had committed when it was read
        self._warned: set[str] = set()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        override: bool = False,
        allow_unsigned: bool = False,
    ) -> Reader | None:
        """None where it takes a Store to read it: another schema, or a log that cannot be read along.

        Raises TrustError where another user may have written the file, or nobody who is trusted signed a sealed one,
        unless allow_unsigned says that nobody need; DatabaseError.
        """
        file = Path(path)
        if is_absent(file):
            raise DatabaseError(f"{file}: no such file", hint="kerngen tune --db FILE makes one")
        sealed = Sealed.open(file) if is_sealed_file(file) else None
        if sealed is not None:
            if not allow_unsigned:
                sealed.require_trusted()
        else:
            require_whole(file)
            require_own(file)
        try:
            connection = sealed.connect() if sealed is not None else _connect(file)
        except QUERY_ERRORS:
            return None  # whoever opens it as a Store says what it is
        try:
            found = connection.execute("SELECT version_num FROM kerngen_alembic").fetchall()
            connection.execute("SELECT id FROM line LIMIT 1").fetchall()
        except QUERY_ERRORS:
            found = []
        if len(found) != 1 or found[0][0] not in SCHEMAS:
            connection.close()
            if sealed is not None and not sealed.is_whole():  # a Store does not ask row by row what was sealed
                raise CorruptRecord(f"{file} was changed since it was sealed", hint="fetch or export it again")
            return None
        return cls(connection, file, name=name or file.stem, override=override, sealed=sealed)

    def close(self) -> None:
        self._connection.close()

    # ---- what a Source does

    def line(self, kernel: str, static_key: str, arch: str) -> KernelIndex | None:
        id, filed = index_id_of(static_key, arch), filed_kernel(kernel)
        if not (rows := self._rows("line", COLUMNS, "id = ?", (id,)) or self._unindexed("line", COLUMNS, "id", id)):
            rows = self._rows("line", COLUMNS, "kernel = ? AND static_key = ? AND arch = ?", (filed, static_key, arch))
        if not rows:
            return None
        if self.sealed is not None:
            self.revoked()  # what was taken out of them would be served
        line = self._line(rows[0])
        stated = (rows[0][0], rows[0][1], rows[0][2], rows[0][3])
        if stated != (id, filed, static_key, arch):  # an index that is damaged finds another row
            raise CorruptRecord(f"{self.where}: the line of {kernel} on {arch} is filed under another's name")
        return line

    def image(self, build: Build) -> Cubin | Ptx | None:
        if build.image_sha is None:
            return None
        columns = ("blob", "codec", "raw_bytes")
        rows = self._rows("artifact", columns, "sha = ?", (build.image_sha,))
        if not (rows := rows or self._unindexed("artifact", columns, "sha", build.image_sha)):
            return None
        blob, codec, raw_bytes = rows[0]
        return image_of(build, blob, codec, raw_bytes, self.where)

    def winners(self, kernel: str | None = None) -> list[Winner]:
        rows = self._rows("line", COLUMNS, "kernel = ?" if kernel else "1", (filed_kernel(kernel),) if kernel else ())
        found: list[Winner] = []
        for row in rows:
            try:
                found += [p.winner for p in self._line(row).points]
            except CorruptRecord as e:
                self._warn(f"{e.message}; skipped")
        return found

    def revoked(self) -> dict[str, str]:
        with self._lock, self._clear_errors():
            ((version,),) = self._connection.execute("PRAGMA data_version").fetchall()
        if self._revoked is not None and self._revoked[0] == version:
            return self._revoked[1]
        rows = self._rows("revocation", _REVOCATION)
        if self.sealed is not None and len(rows) != (count := self.sealed.rows("revocation")):
            raise CorruptRecord(f"{self.where}: {len(rows)} of {count} revocations are there; nothing of it is served",
                                hint="fetch or export it again")  # fmt: skip
        for row in rows:
            if not self._is_whole("revocation", _REVOCATION, row):
                self._warn(f"{self.where}: revocation {row[0]} is not as it was written; it counts all the same")
        found = {str(subject): str(reason) for _, subject, reason, *_ in rows}
        for was, id in self._former(found).items():
            found.setdefault(id, found[was])
        self._revoked = version, found
        return found

    def renamed(self, ids: Collection[str]) -> set[str]:
        return set(self._former(ids).values())

    def _former(self, ids: Collection[str]) -> dict[str, str]:
        """What those of `ids` that are names of an older schema are called now."""
        asked, found = [id for id in ids if id.isascii()], dict[str, str]()
        for start in range(0, len(asked), _AT_ONCE):
            some = asked[start : start + _AT_ONCE]
            for row in self._rows("former", _FORMER, f"was IN ({', '.join('?' * len(some))})", some):
                if _seal_holds("former", _FORMER, row):
                    found[str(row[0])] = str(row[1])
                else:
                    self._warn(f"{self.where}: what {row[0]} is called now does not match its own seal; skipped")
        return found

    # ---- rows

    def _unindexed(self, table: str, columns: tuple[str, ...], key: str, value: str) -> list[tuple[Any, ...]]:
        """Of a sealed file, what its index did not find: a damaged one finds nothing, and that is said."""
        if self.sealed is None:
            return []
        rows = self._rows(table, columns, f"+{key} = ?", (value,))
        ((count,),) = self._rows(f"{table} NOT INDEXED", ("count(*)",))
        if rows:
            self._warn(f"{self.where}: the index of {table} is damaged; it is read without")
        elif count != self.sealed.rows(table):
            self._warn(f"{self.where}: {count} of {self.sealed.rows(table)} rows of {table} are there")
        return rows

    def _line(self, row: tuple[Any, ...]) -> KernelIndex:
        """Raises CorruptRecord unless it is as it was written."""
        _, kernel, static_key, arch, body, _ = row
        if not self._is_whole("line", COLUMNS, row):
            raise CorruptRecord(f"{self.where}: the line of {kernel} on {arch} does not match its own seal")
        try:
            return named(decode(body, kernel, static_key, arch), self.where)
        except CorruptRecord as e:
            raise CorruptRecord(f"{self.where}: {e.message}") from e

    def _is_whole(self, table: str, columns: tuple[str, ...], row: tuple[Any, ...]) -> bool:
        if self.sealed is not None and not self.sealed.has(table, row):
            return False
        return _seal_holds(table, columns, row)

    def _rows(
        self, table: str, columns: tuple[str, ...], where: str = "1", values: Collection[Value] = ()
    ) -> list[tuple[Any, ...]]:
        with self._lock, self._clear_errors():
            return self._connection.execute(
                f"SELECT {', '.join(columns)} FROM {table} WHERE {where}", tuple(values)
            ).fetchall()

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except QUERY_ERRORS as e:
            raise DatabaseError(f"{self.where} cannot be read: {str(e).encode('ascii', 'replace').decode()}") from e

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", printable(message))


def _seal_holds(table: str, columns: tuple[str, ...], row: tuple[Any, ...]) -> bool:
    stated = dict(zip(columns, row, strict=True))
    try:
        return seal_of(table, stated) == stated["seal"]
    except (TypeError, ValueError):  # bytes, or text that is none
        return False


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{uri_of(path)}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    connection.text_factory = decode_text
    for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def require_own(path: Path) -> None:
    """Raises TrustError where another user may have written `path`, or what SQLite keeps beside it: it is a program."""
    for file in (path, *beside(path)):
        try:
            why = None if file is not path and is_absent(file) else why_distrusted(file)
        except OSError as e:
            raise DatabaseError(f"{file}: {e.strerror or e}") from e
        if why is not None:
            raise TrustError(f"{file} {why}: it is not served", hint=TRUST_HINT)
