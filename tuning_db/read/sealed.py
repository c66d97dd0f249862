"""A sealed file: an SQLite database that nothing more is written to, with the digests of its rows behind it.

    SQLite image      N bytes; SQLite reads nothing after its last page, so that any SQLite opens the whole file
    header            JSON: what the file is, the digest of the image, and of each table its rows and their digest
    leaves            of the tables that a run reads: 32 bytes a row, sorted, table after table as the header has them
    signatures        JSON: [{"key": <id>, "sig": <base64>}, ...] of `trust.signed_message` of the header's SHA-256
    footer, 64 bytes  "kgbundle", version, the four lengths, SHA-256 of header, leaves, signatures and the footer so far

A signature covers the header, the header the image and the leaves, so that each byte is answered for. A run does not
read the whole image: it asks of each row that it is about to serve whether its leaf is there (`Sealed.has`), so that a
damaged row costs that row. dist/seal.py makes such files.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import sqlite3
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kerngen.errors import CorruptRecord, DatabaseError, TrustError
from kerngen.system.files import open_regular
from kerngen.tuning_db.read.files import decode_text, uri_of
from kerngen.tuning_db.read.trust import why_untrusted

MAGIC, VERSION = b"kgbundle", 1
SUFFIX = ".kgdb"
_LENGTHS = struct.Struct("<8sIQIII")  # magic, version, and the bytes of image, header, leaves, signatures
FOOTER_BYTES = _LENGTHS.size + 32
_LEAF = b"kerngen-leaf-1\0"
_SHA = re.compile(r"[0-9a-f]{64}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_AGAIN = "fetch or export it again"

Value = None | int | float | str | bytes
# What a query of a damaged image raises: UnicodeDecodeError, a ValueError, where an error message quotes it.
QUERY_ERRORS = (sqlite3.Error, ValueError, OverflowError, MemoryError)


def leaf(table: str, values: Iterable[Value]) -> bytes:
    """The digest of one row: of its table, and of its values in the order of the table's columns."""
    h = hashlib.sha256(_LEAF + table.encode() + b"\0")
    for value in values:
        kind, data = _encoded(value)
        h.update(kind + struct.pack("<I", len(data)) + data)
    return h.digest()


def _encoded(value: Value) -> tuple[bytes, bytes]:
    if value is None:
        return b"N", b""
    if isinstance(value, int):
        return b"I", str(value).encode()
    if isinstance(value, float):
        return b"F", value.hex().encode()
    if isinstance(value, str):
        return b"T", value.encode("utf-8", "surrogateescape")
    return b"B", hashlib.sha256(value).digest()


def digest_of(leaves: Iterable[bytes]) -> str:
    """Of all rows of a table, in whatever order they lie there."""
    return hashlib.sha256(b"".join(sorted(leaves))).hexdigest()


def tail_of(image_bytes: int, header: Mapping[str, Any], leaves: bytes, signatures: Mapping[str, bytes]) -> bytes:
    """What stands after the image."""
    head = encode_header(header)
    listed = [{"key": id, "sig": base64.b64encode(s).decode()} for id, s in sorted(signatures.items())]
    signed = json.dumps(listed, separators=(",", ":")).encode()
    lengths = _LENGTHS.pack(MAGIC, VERSION, image_bytes, len(head), len(leaves), len(signed))
    covered = head + leaves + signed + lengths
    return covered + hashlib.sha256(covered).digest()


def encode_header(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed file that was opened, and whose tail is whole.

    digest: the SHA-256 of its header, in hex: what is signed, pinned and trusted. signatures: by the id of the key that
    is said to have made each; nothing was checked of them.
    """

    path: Path
    header: dict[str, Any]
    digest: str
    signatures: dict[str, bytes]
    leaves: bytes = field(repr=False)
    _sets: dict[str, frozenset[bytes]] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Sealed:
        """Raises DatabaseError where there is no sealed file, CorruptRecord where its tail is not as it was sealed."""
        try:
            with open_regular(path) as f:
                return cls._read(Path(path), f)
        except OSError as e:
            raise DatabaseError(f"{os.fspath(path)}: {e.strerror or e}", hint="kerngen db export makes one") from e
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            what = f"{type(e).__name__}: {e}" if isinstance(e, KeyError) else e
            raise CorruptRecord(f"{os.fspath(path)} is damaged: {what}", hint=_AGAIN) from e

    @classmethod
    def _read(cls, path: Path, f: BinaryIO) -> Sealed:
        size = f.seek(0, os.SEEK_END)
        if size < FOOTER_BYTES:
            raise DatabaseError(f"{path} is no sealed database: it has {size} bytes")
        f.seek(size - FOOTER_BYTES)
        footer = f.read(FOOTER_BYTES)
        magic, version, *lengths = _LENGTHS.unpack(footer[: _LENGTHS.size])
        if magic != MAGIC:
            raise DatabaseError(f"{path} is no sealed database, or was cut short or written to",
                                hint="kerngen db export makes one")  # fmt: skip
        if version != VERSION:
            raise DatabaseError(f"{path} is sealed in version {version}; this kerngen reads {VERSION}",
                                hint="upgrade kerngen")  # fmt: skip
        if sum(lengths) + FOOTER_BYTES != size:
            raise ValueError(f"it has {size:,} bytes, and should have {sum(lengths) + FOOTER_BYTES:,}")
        image_bytes, *parts = lengths
        f.seek(image_bytes)
        head, leaves, signed = (f.read(n) for n in parts)
        if hashlib.sha256(head + leaves + signed + footer[: _LENGTHS.size]).digest() != footer[_LENGTHS.size :]:
            raise ValueError("what stands behind its rows does not match its digest")
        header = json.loads(head)
        if header["kerngen_bundle"] != 1 or header["image"]["bytes"] != image_bytes:
            raise ValueError("its header is of another file")
        tables = header["tables"].values()
        shas = [header["image"]["sha256"], *(t["digest"] for t in tables)]
        whole = all(_SHA.fullmatch(s) for s in shas) and all(type(t["rows"]) is int and t["rows"] >= 0 for t in tables)
        whole = whole and type(header.get("sequence", 0)) is int
        if encode_header(header) != head or not whole or len(set(header["stored"])) != len(header["stored"]):
            raise ValueError("its header is not as it is written")
        f.seek(0)
        _require_database(f.read(100), image_bytes)
        sets = _split(leaves, header)
        return cls(path, header, hashlib.sha256(head).hexdigest(), _signatures(signed), leaves, sets)

    def has(self, table: str, values: Iterable[Value]) -> bool:
        """True if such a row was sealed: whatever else was done to the file, it may be served.

        values: all columns, in the order that the schema has them. False for every row of a table without leaves.
        """
        return table in self._sets and leaf(table, values) in self._sets[table]

    @property
    def sequence(self) -> int:
        """Of files of one name the later has the higher (dist/export.py); 0 of one that an older kerngen wrote."""
        return int(self.header.get("sequence", 0))

    def revocations(self) -> dict[str, str]:
        """Ids that it revokes, each with the reason. Raises DatabaseError where not all can be read."""
        try:
            with contextlib.closing(self.connect()) as connection:
                rows = connection.execute("SELECT subject_id, reason FROM revocation").fetchall()
        except QUERY_ERRORS as e:
            raise DatabaseError(f"{self.path}: its revocations cannot be read: {e}") from e
        if len(rows) != self.rows("revocation"):
            raise DatabaseError(f"{self.path}: {len(rows)} of {self.rows('revocation')} revocations are there")
        return {str(subject): str(reason) for subject, reason in rows}

    def rows(self, table: str) -> int:
        """How many rows `table` had when it was sealed."""
        return int(self.header["tables"][table]["rows"])

    def is_whole(self) -> bool:
        """True if each byte of the image is as it was sealed: of a few MB, in milliseconds. Raises DatabaseError."""
        h = hashlib.sha256()
        left = int(self.header["image"]["bytes"])
        try:
            with open_regular(self.path) as f:
                while left and (block := f.read(min(left, 1 << 20))):
                    h.update(block)
                    left -= len(block)
        except OSError as e:
            raise DatabaseError(f"{self.path}: {e.strerror or e}") from e
        return not left and h.hexdigest() == self.header["image"]["sha256"]

    def image(self) -> bytes:
        """The SQLite database, as it lies there. Raises DatabaseError."""
        try:
            with open_regular(self.path) as f:
                return f.read(int(self.header["image"]["bytes"]))
        except OSError as e:
            raise DatabaseError(f"{self.path}: {e.strerror or e}") from e

    def why_untrusted(self) -> str | None:
        """As trust.why_untrusted, of this file."""
        return why_untrusted(self.digest, self.signatures)

    def require_trusted(self) -> None:
        """Raises TrustError unless somebody signed it who is trusted here, or it is trusted by its digest."""
        if (why := self.why_untrusted()) is not None:
            raise TrustError(
                f"{self.path} {why}: a database is a program, and this one is not run",
                hint=f"what it is: kerngen db verify {self.path}; whom to trust: kerngen db trust KEY.pub, or this "
                f"file alone: kerngen db trust --digest {self.digest}",
            )

    def connect(self) -> sqlite3.Connection:
        """The image, to read: no locks, no side files, and nothing in its schema is run. Raises QUERY_ERRORS."""
        uri = f"{uri_of(self.path)}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
        connection.text_factory = decode_text
        for pragma in ("trusted_schema = OFF", "query_only = ON", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection


def is_sealed_file(path: str | os.PathLike[str]) -> bool:
    """True for what is, or says by its name that it should be, a sealed file; False for what cannot be read."""
    if os.fspath(path).endswith(SUFFIX):
        return True
    try:
        with open_regular(path) as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - FOOTER_BYTES))
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _require_database(head: bytes, image_bytes: int) -> None:
    """Raises ValueError unless this is how an SQLite file of that many bytes begins, with no log beside it."""
    if head[:16] != b"SQLite format 3\0":
        raise ValueError("it holds no SQLite database")
    page = int.from_bytes(head[16:18], "big")
    if (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big") != image_bytes:
        raise ValueError("its database is not of the length that was sealed")
    if head[18:20] != b"\1\1" or head[24:28] != head[92:96]:
        raise ValueError("its database was written to since it was sealed")


def _split(leaves: bytes, header: Mapping[str, Any]) -> dict[str, frozenset[bytes]]:
    """The leaves of each table that has them. Raises ValueError where they are not those of the header."""
    found: dict[str, frozenset[bytes]] = {}
    at = 0
    for table in header["stored"]:
        sealed = header["tables"][table]
        part = leaves[at : at + 32 * sealed["rows"]]
        at += len(part)
        if len(part) != 32 * sealed["rows"] or hashlib.sha256(part).hexdigest() != sealed["digest"]:
            raise ValueError(f"its leaves of {table} do not match its header")
        found[table] = frozenset(part[i : i + 32] for i in range(0, len(part), 32))
    if at != len(leaves):
        raise ValueError("it has more leaves than its header says")
    return found


def _signatures(data: bytes) -> dict[str, bytes]:
    listed = json.loads(data)
    found = {s["key"]: base64.b64decode(s["sig"], validate=True) for s in listed}
    if len(found) != len(listed) or not all(_KEY_ID.fullmatch(id) for id in found):
        raise ValueError("its signatures are not as they are written")
    return found
