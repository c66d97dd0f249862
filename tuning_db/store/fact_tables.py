"""The tables of facts: what their rows must match, whatever kernels are installed, and how all are gone through.

What a damaged row has a check raise is anything: there is no telling what parsing bytes that nobody wrote does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, Table, select

from kerngen.errors import CorruptRecord
from kerngen.tuning_db.read.ids import ProblemKey, digest, ids_as_filed
from kerngen.tuning_db.read.images import decompress
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.rows import (
    device_of,
    is_sealed,
    read_build,
    read_measurement,
    read_search,
    read_step,
    require_utf8,
    search_id_of,
    step_row,
)
from kerngen.tuning_db.store.store import Store

_AT_ONCE = 500  # ids in one query
_Check = Callable[[Row[Any], str], None]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _check_artifact(row: Row[Any], where: str) -> None:
    raw = decompress(row.blob, row.codec, row.raw_bytes)
    _require(raw is not None and hashlib.sha256(raw).hexdigest() == row.sha, "it does not match its own digest")


def _check_build(row: Row[Any], where: str) -> None:
    build = read_build(row, where)
    columns = (row.registers, row.spill_bytes, row.static_smem_bytes)
    _require(columns == (build.registers, build.spill_bytes, build.static_smem_bytes), "its resources contradict it")
    key = ProblemKey(row.kernel, json.loads(row.static), {}, None)
    _require(ids_as_filed(key).static_key == row.static_key, "its static_key is not that of its fields")


def _check_seal(table: Table) -> _Check:
    def check(row: Row[Any], where: str) -> None:
        require_utf8(row)
        _require(is_sealed(table, row), "it does not match its own seal")

    return check


def _check_problem(row: Row[Any], where: str) -> None:
    require_utf8(row)
    ids = ids_as_filed(ProblemKey(row.kernel, json.loads(row.static), json.loads(row.runtime), row.dynamic))
    _require((ids.problem, ids.cell, ids.static_key) == (row.id, row.cell, row.static_key), "it does not match its id")


def _check_device(row: Row[Any], where: str) -> None:
    require_utf8(row)
    device, id = device_of(row.props)
    stated = (row.id, row.arch, row.name, row.num_sms)
    _require(stated == (id, device.arch, device.name, device.num_sms), "it does not match its id")


def _check_environment(row: Row[Any], where: str) -> None:
    require_utf8(row)
    _require(digest(json.loads(row.props)) == row.id, "it does not match its id")


def _check_step(row: Row[Any], where: str) -> None:
    step = read_step(row, where)
    _require(step is not None and step_row(step)["id"] == row.id, "it does not match its own seal")


def _check_measurement(row: Row[Any], where: str) -> None:
    _require(read_measurement(row, where) is not None, "it does not match its own digests")


def _check_search(row: Row[Any], where: str) -> None:
    _require(read_search(row, where) is not None, "it does not match its own seal")
    _require(search_id_of(row.search, row.problem_id) == row.id, "it does not match its id")


_MEASUREMENTS: Select[Any] = (
    select(t.measurement, t.problem.c.kernel, t.problem.c.static_key, t.problem.c.static, t.problem.c.runtime,
           t.problem.c.dynamic, t.device.c.props.label("device_props"),
           t.environment.c.props.label("environment_props"))
    .join(t.problem, t.measurement.c.problem_id == t.problem.c.id)
    .join(t.device, t.measurement.c.device_id == t.device.c.id)
    .join(t.environment, t.measurement.c.environment_id == t.environment.c.id)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """A table of facts. rows: its rows, with what checking them needs besides."""

    table: Table
    rows: Select[Any]
    check: _Check

    @classmethod
    def of(cls, table: Table, check: _Check, rows: Select[Any] | None = None) -> Kind:
        return cls(table, select(table) if rows is None else rows, check)

    @property
    def first(self) -> Any:
        """The first column of the primary key."""
        return next(iter(self.table.primary_key.columns))

    def key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[c.name] for c in self.table.primary_key.columns)

    def stated(self, row: Row[Any]) -> dict[str, Any]:
        return {c.name: row._mapping[c.name] for c in self.table.columns}

    def why_unsound(self, row: Row[Any], where: str) -> str | None:
        try:
            self.check(row, where)
        except CorruptRecord as e:
            return e.message.removeprefix(f"{where}: ")
        except Exception as e:  # there is no telling what parsing bytes that nobody wrote raises
            return str(e) or type(e).__name__
        return None


KINDS = (  # each after those that its foreign keys name
    Kind.of(t.artifact, _check_artifact),
    Kind.of(t.build, _check_build),
    Kind.of(t.rendered, _check_seal(t.rendered)),
    Kind.of(t.problem, _check_problem),
    Kind.of(t.device, _check_device),
    Kind.of(t.environment, _check_environment),
    Kind.of(t.step, _check_step),
    Kind.of(t.measurement, _check_measurement, _MEASUREMENTS),
    Kind.of(t.search, _check_search),
    Kind.of(t.former, _check_seal(t.former)),
    Kind.of(t.revocation, _check_seal(t.revocation)),
)


def chunks(store: Store, kind: Kind, only: Set[str] | None = None) -> Iterator[list[Row[Any]]]:
    """The rows of a table by their ids, some at a time; `only`, those with these."""
    with store.reading() as connection:
        ids = sorted({id for (id,) in connection.execute(select(kind.first)) if isinstance(id, str)})
    for some in batches([id for id in ids if is_text(id) and (only is None or id in only)]):
        with store.reading() as connection:
            rows = connection.execute(kind.rows.where(kind.first.in_(some)).order_by(kind.first)).all()
        yield list(rows)


def batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _AT_ONCE):
        yield ids[start : start + _AT_ONCE]


def is_text(id: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in id)


def name_of(kind: Kind, row: dict[str, Any]) -> str:
    return f"{kind.table.name} {str(kind.key(row)[0])[:16]!r}".replace("'", "")


def damaged(store: Store) -> list[str]:
    """Every row of facts that does not match its own digests, in words."""
    return [
        f"{name_of(kind, kind.stated(row))}: {why}"
        for kind in KINDS
        for rows in chunks(store, kind)
        for row in rows
        if (why := kind.why_unsound(row, store.where)) is not None
    ]
