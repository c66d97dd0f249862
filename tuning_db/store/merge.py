"""The union of databases: builds, observations and revocations are sets of rows, and winners are derived from them.

A row that does not match its own digests is left where it is, and named. Where two sound rows have one id and differ
(`_preferred`), which of them stays depends on the two alone. So any databases, merged in any order and any number of
times, give the same rows.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Table, select

from kerngen.system.interrupts import heed
from kerngen.tuning_db.read.values import BUILD_STATUSES
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.fact_tables import KINDS, Kind, chunks, is_text, name_of
from kerngen.tuning_db.store.rederive import choose_everywhere, static_keys_of
from kerngen.tuning_db.store.rows import revocation_id_of, sealed
from kerngen.tuning_db.store.store import Store

log = logging.getLogger(__name__)

_STATUS_ORDER = {status: i for i, status in enumerate(BUILD_STATUSES)}  # of one build: the first that is there stays


@dataclass(slots=True)
class Merged:
    """What a merge did, or would do.

    added, mended: rows by table; a mended one was damaged in the target, or gave way to another (see conflicts).
    damaged: rows of the others that do not match their digests, in words; they were left out. conflicts: sound rows
    with one id that differ, and which stays. winners: tuned points that have another winner now, or their first.
    """

    added: Counter[str] = field(default_factory=Counter)
    mended: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    winners: int = 0


class _NotMeant(Exception):
    """Ends the transaction of a dry run."""


@contextmanager
def writing(store: Store, *, dry_run: bool) -> Iterator[Connection]:
    """As `Store.writing`; of a dry run nothing stays."""
    with suppress(_NotMeant), store.writing() as connection:
        yield connection
        if dry_run:
            raise _NotMeant


def merge(into: Store, others: Sequence[Store], *, dry_run: bool = False) -> Merged:
    """Add all that `others` hold to `into`, and choose the winners anew that this concerns, in one transaction.

    dry_run: find out what that would do, and do nothing. Raises DatabaseError.
    """
    done = Merged()
    with writing(into, dry_run=dry_run) as connection:
        union = _Union(into, connection, done)
        for other in others:
            for kind in KINDS:
                heed()
                union.add(other, kind)
        union.derive()
    return done


def add_facts(into: Store, other: Store, only: Mapping[str, Set[str]], done: Merged) -> None:
    """Add some of `other`'s rows to `into`, and choose nothing.

    only: by table, the first column of the primary keys that are wanted. Rows that those name have to be among them.
    """
    with into.writing() as connection:
        union = _Union(into, connection, done)
        for kind in KINDS:
            heed()
            if wanted := only.get(kind.table.name):
                union.add(other, kind, wanted)


def _preferred(table: Table, row: dict[str, Any]) -> tuple[Any, ...]:
    """Of two sound rows with one id, that with the smaller one of these stays: a total order of whole rows."""
    whole = tuple(sorted((name, repr(value)) for name, value in row.items()))
    if table is t.artifact:  # the same bytes, packed by another zstd
        return len(row["blob"]), bytes(row["blob"]), whole
    # What compiled, compiles; what was tried is more than what was not. The oldest word counts, of what is said twice.
    return _STATUS_ORDER.get(row.get("status", ""), 0), row.get("at", ""), row.get("seal", ""), whole


class _Union:
    """One transaction on the database that others are merged into."""

    def __init__(self, into: Store, connection: Connection, done: Merged) -> None:
        self._into, self._connection, self._done = into, connection, done
        self._touched: set[str] = set()  # static keys
        self._subjects: set[str] = set()  # builds and measurements of which something was said anew

    def add(self, other: Store, kind: Kind, only: Set[str] | None = None) -> None:
        for rows in chunks(other, kind, only):
            sound = [row for row in map(self._sound(other, kind), rows) if row is not None]
            there = {kind.key(kind.stated(row)): row for row in self._there(kind, [kind.key(r)[0] for r in sound])}
            lacking = self._lacking(kind, [row for row in sound if kind.key(row) not in there])
            new = []
            for row in sound:
                if (old := there.get(kind.key(row))) is not None:
                    self._settle(other, kind, old, row)
                elif named := [f"{f} {row[f]}" for f, ids in lacking.items() if row[f] in ids]:
                    self._leave_out(other, kind, row, f"{', '.join(named)} is not there")
                else:
                    new.append(row)
            if new:
                self._connection.execute(kind.table.insert(), new)
                self._done.added[kind.table.name] += len(new)
                for row in new:
                    self._touch(kind, row)

    def _sound(self, other: Store, kind: Kind) -> Callable[[Row[Any]], dict[str, Any] | None]:
        def stated(row: Row[Any]) -> dict[str, Any] | None:
            if (why := kind.why_unsound(row, other.where)) is None:
                return kind.stated(row)
            self._leave_out(other, kind, kind.stated(row), why)
            return _resealed(row) if kind.table is t.revocation else None

        return stated

    def _leave_out(self, other: Store, kind: Kind, row: dict[str, Any], why: str) -> None:
        self._done.damaged.append(f"{other.where}: {name_of(kind, row)}: {why}")

    def _there(self, kind: Kind, ids: Sequence[str]) -> list[Row[Any]]:
        return list(self._connection.execute(kind.rows.where(kind.first.in_(ids)))) if ids else []

    def _lacking(self, kind: Kind, rows: Sequence[dict[str, Any]]) -> dict[str, set[str]]:
        """By foreign key, the ids that `rows` name and this database has not: those rows were damaged."""
        lacking: dict[str, set[str]] = {}
        for foreign in kind.table.foreign_keys:
            named = {row[foreign.parent.name] for row in rows} - {None}
            if named:
                here = self._connection.execute(select(foreign.column).where(foreign.column.in_(named)))
                lacking[foreign.parent.name] = named - {id for (id,) in here}
        return lacking

    def _settle(self, other: Store, kind: Kind, old: Row[Any], new: dict[str, Any]) -> None:
        """Two rows with one id: a damaged one is put right, and of two sound ones the preferred stays."""
        here = kind.stated(old)
        if here == new:
            return
        if kind.why_unsound(old, self._into.where) is None:
            stays = min((here, new), key=lambda row: _preferred(kind.table, row))
            if not _says_the_same(kind.table, here, new):
                where = self._into.where if stays is here else other.where
                self._done.conflicts.append(
                    f"{name_of(kind, new)} differs in {_differing(here, new)}; that of {where} stays"
                )
            if stays is here:
                return
        matches = [c == new[c.name] for c in kind.table.primary_key.columns]
        self._connection.execute(kind.table.update().where(*matches).values(new))
        self._done.mended[kind.table.name] += 1
        self._touch(kind, new)

    def _touch(self, kind: Kind, row: dict[str, Any]) -> None:
        if kind.table is t.build:
            self._touched.add(row["static_key"])
        elif kind.table is t.measurement:
            self._subjects.add(row["id"])
        elif kind.table is t.rendered:
            self._subjects.add(row["build_id"])
        elif kind.table is t.revocation:
            self._subjects.add(row["subject_id"])
        elif kind.table is t.former:
            self._subjects.add(row["id"])

    def derive(self) -> None:
        """Choose anew wherever something came in that choosing rests on."""
        touched = self._touched | static_keys_of(self._into, self._subjects)
        self._done.winners = choose_everywhere(self._into, touched)
        if self._done.added or self._done.mended:
            self._into.rewrite_lines()  # code of defaults came in too, which no choice rests on


def _resealed(row: Row[Any]) -> dict[str, Any] | None:
    """A revocation that was altered counts all the same, under the id of what it says now, where that is legible."""
    if not all(isinstance(v, str) and is_text(v) for v in (row.subject_id, row.reason, row.at)):
        return None
    stated = {"id": revocation_id_of(row.subject_id, row.reason), "subject_id": row.subject_id, "reason": row.reason,
              "at": row.at}  # fmt: skip
    return sealed(t.revocation, stated)


def _says_the_same(table: Table, a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two rows with one id differ only in words beside the fact: who said it, when, and how it is packed."""
    beside = {"seal", "at", "run", "tags", "reason", "environment_id", "blob", "log"}
    if table is t.build and a["status"] != b["status"]:
        return True  # a compiler that was out of memory, and one that was not; or nobody had compiled it yet
    return all(_same(a[name], b[name]) for name in a if name not in beside)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _differing(a: dict[str, Any], b: dict[str, Any]) -> str:
    return ", ".join(name for name in a if name != "seal" and not _same(a[name], b[name]))
