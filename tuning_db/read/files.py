"""SQLite files as such: their names, whether they are there and whole, and what their text is read as."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import quote

from kerngen.errors import DatabaseError

BUSY_S = 60.0  # how long whoever wants to write waits for its turn


def uri_of(path: Path) -> str:
    """`path` for SQLite, byte for byte: a file's name need not be UTF-8."""
    return f"file:{quote(os.fsencode(path.absolute()))}"


def decode_text(data: bytes) -> str:
    """SQLite's text, where bytes that are no UTF-8 become lone surrogates: one damaged row must not fail a query.

    Who reads a row refuses it if it has any. PostgreSQL lets no such bytes in.
    """
    return data.decode("utf-8", "surrogateescape")


def is_absent(path: Path) -> bool:
    """True where nothing is. What cannot be looked at may be there: whoever opens it hears what is wrong."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def require_whole(path: Path) -> None:
    """Raises DatabaseError if `path` is shorter than its own header says, or no regular file, or no SQLite file at all,
    or if what is called like a file that SQLite keeps beside it is none.

    SQLite notices only when it needs a page that is gone. Where a write-ahead log lies beside it, the header may be
    ahead of the file: nothing is checked.
    """
    another = "name another with --db or KERNGEN_DB"
    try:
        for side in beside(path):  # SQLite opens it, and waits at a pipe: no signal ends that
            if not is_absent(side) and not stat.S_ISREG(side.stat().st_mode):
                what = "is no regular file, and SQLite keeps one of that name"
                raise DatabaseError(f"{side} {what}", hint=f"remove it, or {another}")
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise DatabaseError(f"{path} is {kind}, not a database", hint=another)
        with path.open("rb") as f:
            header = f.read(100)
    except FileNotFoundError:
        return
    except OSError as e:
        raise DatabaseError(f"{path}: {e.strerror or e}", hint=another) from e
    size = found.st_size
    if size == 0:
        return
    if header[:16] != b"SQLite format 3\0":
        raise DatabaseError(f"{path} is not an SQLite database", hint=f"{another}, or move it away")
    page, pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    counted = header[24:28] == header[92:96]  # the page count is valid only then (SQLite file format, 1.3.8)
    expected = (65536 if page == 1 else page) * pages
    if len(header) < 100 or (counted and size < expected and not wal_of(path).exists()):
        raise DatabaseError(f"{path} is cut short: {size:,} of {expected:,} bytes", hint="restore a copy of it")


def beside(path: Path) -> tuple[Path, Path, Path]:
    """What SQLite keeps beside a file, or beside what a link leads to: write-ahead log, its index, rollback journal."""
    log, index, journal = (Path(os.path.realpath(path) + end) for end in ("-wal", "-shm", "-journal"))
    return log, index, journal


def wal_of(path: Path) -> Path:
    return beside(path)[0]
