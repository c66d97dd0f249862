"""Verifies a database level by level: its structure, its digests, its signature.

Levels that need a compiler or a workload are in kerngen/bundles/verify_cpu.py, those that need a GPU in verify_gpu.py beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Table, inspect, select

from kerngen.errors import CorruptRecord, DatabaseError
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.bundles import as_it_is, open_any
from kerngen.tuning_db.store.fact_tables import damaged
from kerngen.tuning_db.store.kernel_index import index_of
from kerngen.tuning_db.store.ranking import Rankings
from kerngen.tuning_db.store.rows import is_sealed
from kerngen.tuning_db.store.store import Store
from kerngen.tuning_db.read.kernel_index import encode, index_id_of
from kerngen.tuning_db.read.sealed import Sealed, is_sealed_file
from kerngen.tuning_db.read.trust import trusted_keys
from kerngen.tuning_db.read.values import Winner
from kerngen.tuning_db.dist.seal import damage

LEVELS = ("structure", "digests", "signature", "complete", "rebuilt", "loads", "correct", "fast")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one level. ok: None where it says nothing about such a database. text: one line. faults: each in a line.

    done: False where it was asked for and not carried out, or not to its end: then ok is False, and nothing is proved.
    figures: what text says in numbers.
    """

    level: str
    ok: bool | None
    text: str
    faults: list[str] = field(default_factory=list)
    done: bool = True
    figures: dict[str, Any] = field(default_factory=dict)


def verify(url: str, levels: Iterable[str]) -> list[Verdict]:
    """The first three of LEVELS, those of them that were asked for; the last one that is given is the first to fail.

    url: a sealed file, another database's path, or a server. Raises DatabaseError where there is nothing to open.
    """
    sealed = "://" not in url and is_sealed_file(url)
    found: list[Verdict] = []
    checks = {"structure": _structure, "digests": _digests, "signature": _signature}
    for level in (level for level in checks if level in levels):
        found.append(checks[level](url, sealed))
        if found[-1].ok is False:
            break
    return found


def _structure(url: str, sealed: bool) -> Verdict:
    if not sealed and "://" not in url and not Path(url).exists():
        raise DatabaseError(f"{url}: no such file")
    try:
        faults = _faults_of_image(Sealed.open(url)) if sealed else []
        with open_any(url, allow_unsigned=True) as store, store.reading() as connection:
            if not sealed:
                faults = _structural_faults(connection)
            counts = {table.name: _count(connection, table) for table in (t.build, t.measurement, t.winner)}
    except CorruptRecord as e:
        return Verdict("structure", False, "it is damaged", [e.message])
    text = ", ".join(f"{count:,} {name}s" for name, count in counts.items())
    size = f", {os.path.getsize(url) / 1e6:.2f} MB" if "://" not in url else ""
    return Verdict("structure", not faults, f"schema {t.SCHEMA}: {text}{size}", faults)


def _faults_of_image(sealed: Sealed) -> list[str]:
    """Of the database as it lies there, whatever of it is served. One of an older schema is not compared."""
    try:
        with engines.clear_errors("its database"):
            engine = as_it_is(sealed.image())
            try:
                with engine.connect() as connection:
                    return _structural_faults(connection) if sealed.header.get("schema") == t.SCHEMA else []
            finally:
                engine.dispose()
    except DatabaseError as e:
        return [e.message]


def _structural_faults(connection: Connection) -> list[str]:
    faults: list[str] = []
    there = inspect(connection)
    names = set(there.get_table_names())
    for table in t.metadata.sorted_tables:
        if table.name not in names:
            faults.append(f"the table {table.name} is missing")
            continue
        columns, wanted = {c["name"] for c in there.get_columns(table.name)}, {c.name for c in table.columns}
        if columns != wanted:
            faults.append(f"{table.name} has other columns: {', '.join(sorted(columns ^ wanted))}")
    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        faults += [str(line) for line in found if line != "ok"]
        for table_name, _, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            faults.append(f"a row of {table_name} names one of {parent} that is not there")
    return faults


def _count(connection: Connection, table: Table) -> int:
    return len(connection.execute(select(next(iter(table.primary_key.columns)))).all())


def _digests(url: str, sealed: bool) -> Verdict:
    faults = damage(url) if sealed else []
    with open_any(url, allow_unsigned=True) as store:
        faults += damaged(store)
        faults += _unfounded(store)
        faults += _lines_astray(store)
    text = "each row is as it was sealed" if sealed else "each row matches its own digests"
    return Verdict("digests", not faults, text if not faults else "rows were changed", faults)


def _unfounded(store: Store) -> list[str]:
    """Winners that are not what the observations in the database give, or that cannot be read."""
    winners = store.winners(every=True)
    with store.reading() as connection:
        ids = {id for (id,) in connection.execute(select(t.winner.c.id))}
    found = [f"winner {id[:16]} does not match its seal" for id in sorted(ids - {w.id for w in winners})]
    groups: dict[tuple[str, str], list[Winner]] = {}
    for w in winners:
        groups.setdefault((w.kernel, w.problem.static_key), []).append(w)
    revoked = store.revoked().keys()
    for (kernel, static_key), members in groups.items():
        rankings = Rankings(store, kernel, static_key)
        for w in members:
            if w.build_id in revoked:
                continue  # of another database's builds: it is not served, and is no damage
            mine = rankings.of(w).candidate(w.build_id)
            if mine is None or (mine.p50_us, mine.typical.measurement.provenance) != (w.latency_us, w.provenance):
                found.append(f"winner {w.id[:16]} of {kernel} is not what its observations give")
    return found


def _lines_astray(store: Store) -> list[str]:
    """Lines, which are what a run reads, that are not what the rows give, or that are missing."""
    with store.reading() as connection:
        rows = {row.id: row for row in connection.execute(select(t.line))}
        found = [f"the line of {row.kernel} on {row.arch}, {id[:16]}, is not what its rows give"
                 for id, row in sorted(rows.items()) if not _is_derived(connection, row, store.where)]  # fmt: skip
        w = t.winner.c
        for key, arch in sorted(set(map(tuple, connection.execute(select(w.static_key, w.arch))))):
            if index_id_of(key, arch) not in rows:
                found.append(f"the line of {key[:16]} on {arch} is missing")
    return found


def _is_derived(connection: Connection, row: Row[Any], where: str) -> bool:
    line = index_of(connection, row.static_key, row.arch, where)
    return line is not None and is_sealed(t.line, row) and row.body == encode(line)


def _signature(url: str, sealed: bool) -> Verdict:
    if not sealed:
        return Verdict("signature", None, "a database that is written to has none")
    file = Sealed.open(url)
    known = trusted_keys()
    by = ", ".join(str(known.get(id, id)) for id in file.signatures) or "nobody"
    if (why := file.why_untrusted()) is not None:
        return Verdict("signature", False, f"signed by {by}", [f"it {why}"])
    return Verdict("signature", True, f"signed by {by}; trusted here")
