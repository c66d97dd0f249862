"""Seal winners, searches, revocations, former names and measurements; keep words out of measurements' ids.

The id of a measured row covered its reason and its tags, and so the seed and the settings of the search that it came
from. Here each measurement that matches its digest gets the id of schema 3, `former` says what it was called, and what
names it is written anew. A row that does not match its digest keeps its id and gets no seal: it is refused as before.

Nothing sealed a winner until now. One that contradicts its own figures, or the measurement that it names, was altered,
and is left out: winners are derived.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

log = logging.getLogger("kerngen.tuning_db")

_TABLES = {
    name: sa.table(name, *(sa.column(c) for c in columns.split()))
    for name, columns in {
        "device": "id props",
        "environment": "id props",
        "problem": "id static_key cell",
        "measurement": "id build_id problem_id device_id environment_id arch config fields outcome reason provenance "
        "stage model p50_us p10_us p90_us min_us samples error_abs error_rel run at tags seal",
        "revocation": "id subject_id reason at seal",
        "winner": "id kernel static_key cell problem_id arch device_id build_id measurement_id provenance latency_us "
        "margin reason why seal",
        "search": "id search problem_id summary seal",
        "former": "was id seal",
    }.items()
}
_SEALED = ("measurement", "revocation", "winner", "search", "former")
_CHUNK = 1000

_Row = dict[str, Any]


def upgrade() -> None:
    for name in _SEALED:
        op.add_column(name, sa.Column("seal", sa.Text, nullable=False, server_default=""))
    _Sealing(op.get_bind()).run()


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")


class _Sealing:
    """renamed: from a measurement's id of schema 2 to its id of schema 3; sound rows only."""

    def __init__(self, connection: sa.Connection) -> None:
        self.connection = connection
        self.props: dict[str, Any] = {}  # of devices and environments
        self.renamed: dict[str, str] = {}
        self.measured: dict[str, _Row] = {}  # what winners rest on, by its id of schema 2

    def run(self) -> None:
        for row in self.rows("device") + self.rows("environment"):
            with contextlib.suppress(ValueError):  # what refers to it is damaged too
                self.props[row.id] = json.loads(row.props)
        problems = {row.id: row for row in self.rows("problem")}
        winners = self.rows("winner")
        self.connection.execute(_TABLES["winner"].delete())  # nothing else refers to a measurement

        self.rewrite_measurements({row.measurement_id for row in winners})
        self.insert("winner", self.sound("winner", winners, lambda row: self.winner(row, problems)))
        searches = self.rows("search")
        self.seal("search", self.sound("search", searches, self.search))
        self.rewrite_revocations()
        self.rewrite_former()

    def rewrite_measurements(self, named: set[str]) -> None:
        """In parts, since there may be many. Of two that differ in words alone the first stays. named: by winners."""
        there_now: set[str] = set()
        m = _TABLES["measurement"]
        there = self.connection.execute(sa.select(m.c.id).order_by(m.c.at, m.c.id)).scalars().all()
        ids = [id for id in there if isinstance(id, str) and id.isascii()]  # what else a damaged file may hold
        for start in range(0, len(ids), _CHUNK):
            part = sa.select(m).where(m.c.id.in_(ids[start : start + _CHUNK])).order_by(m.c.at, m.c.id)
            gone, kept = [], []
            for row in self.sound("measurement", self.connection.execute(part).all(), self.measurement):
                was = row.pop("was")
                self.renamed[was] = row["id"]
                if was in named:
                    self.measured[was] = row
                if row["id"] in there_now:
                    gone.append({"was": was})
                else:
                    there_now.add(row["id"])
                    kept.append({"was": was, "now": row["id"], "seal_now": row["seal"]})
            where = m.c.id == sa.bindparam("was")
            if kept:
                renaming = m.update().where(where).values(id=sa.bindparam("now"), seal=sa.bindparam("seal_now"))
                self.connection.execute(renaming, kept)
            if gone:
                self.connection.execute(m.delete().where(where), gone)

    def rewrite_revocations(self) -> None:
        """One that does not match its digest stays as it is, without a seal."""
        table = _TABLES["revocation"]
        rows = self.sound("revocation", self.rows("revocation"), self.revocation)
        for row in rows:
            self.connection.execute(table.delete().where(table.c.id == row.pop("was")))
        self.insert("revocation", list({row["id"]: row for row in reversed(rows)}.values()))

    def rewrite_former(self) -> None:
        """What schema 1 called a measurement, and what schema 2 did."""
        rows = self.sound("former", self.rows("former"), self.former)
        rows += [self.former({"was": was, "id": was}) for was in self.renamed]
        self.connection.execute(_TABLES["former"].delete())
        self.insert("former", rows)

    # ---- one row of each kind: what takes its place

    def measurement(self, row: _Row) -> _Row:
        stated = {
            "problem": row["problem_id"], "fields": json.loads(row["fields"]), "arch": row["arch"],
            "device": self.props[row["device_id"]], "config": json.loads(row["config"]), "build": row["build_id"],
            "outcome": row["outcome"], "provenance": row["provenance"], "stage": row["stage"], "model": row["model"],
            "p50": row["p50_us"], "p10": row["p10_us"], "p90": row["p90_us"], "min": row["min_us"],
            "samples": row["samples"], "error_abs": row["error_abs"], "error_rel": row["error_rel"],
        }  # fmt: skip
        words = {"reason": row["reason"], "tags": json.loads(row["tags"])}
        when = {"environment": self.props[row["environment_id"]], "run": row["run"], "at": row["at"]}
        measured = row["provenance"] == "measured"
        _require(_digest(stated | {"v": 2} | (words | when if measured else {})) == row["id"])
        id = _digest(stated | {"v": 3} | (when if measured else {}))
        return {"was": row["id"], **_sealed("measurement", row | {"id": id})}

    def winner(self, row: _Row, problems: dict[str, sa.Row[Any]]) -> _Row:
        m, problem, why = self.measured[row["measurement_id"]], problems[row["problem_id"]], json.loads(row["why"])
        for name in ("problem_id", "build_id", "arch", "provenance"):
            _require(row[name] == m[name])
        _require(m["outcome"] == "ok" and row["latency_us"] > 0)
        _require((row["static_key"], row["cell"]) == (problem.static_key, problem.cell))
        device = self.props[row["device_id"]]
        _require(row["id"] == _digest({"v": 2, "problem": row["problem_id"], "arch": row["arch"],
                                       "device": device["name"], "num_sms": device["num_sms"]}))  # fmt: skip
        if first := why.get("fastest"):
            _require(first["us"] <= row["latency_us"] <= first["us"] * (1 + why["noise"]))
            _require(first.get("build_id") != row["build_id"] or first["us"] == row["latency_us"])
        return _sealed("winner", row | {"measurement_id": m["id"]}, fields=m["fields"])

    def search(self, row: _Row) -> _Row:
        _require(_digest({"v": 2, "search": row["search"], "problem": row["problem_id"]}) == row["id"])
        json.loads(row["summary"])
        return _sealed("search", row)

    def revocation(self, row: _Row) -> _Row:
        _require(_digest({"v": 2, "subject": row["subject_id"], "reason": row["reason"]}) == row["id"])
        subject = self.renamed.get(row["subject_id"], row["subject_id"])
        id = _digest({"v": 2, "subject": subject, "reason": row["reason"]})
        return {"was": row["id"], **_sealed("revocation", row | {"id": id, "subject_id": subject})}

    def former(self, row: _Row) -> _Row:
        return _sealed("former", row | {"id": self.renamed.get(row["id"], row["id"])})

    # ---- statements

    def rows(self, table: str) -> list[sa.Row[Any]]:
        return list(self.connection.execute(sa.select(_TABLES[table])))

    def sound(self, table: str, rows: Iterable[sa.Row[Any]], change: Callable[[_Row], _Row]) -> list[_Row]:
        """What takes the place of those of `rows` that are what was written; the others are named in a warning."""
        made = []
        for row in rows:
            try:
                for value in row:
                    if isinstance(value, str):
                        value.encode()  # SQLite may hold bytes that are no text
                made.append(change(dict(row._mapping)))
            except Exception as e:  # there is no telling what parsing bytes that nobody wrote does
                why = "it refers to a damaged row" if isinstance(e, KeyError) else e
                log.warning("%s %s is damaged (%s) and not migrated", table, ascii(row[0]), why)
        return made

    def insert(self, table: str, rows: list[_Row]) -> None:
        if rows:
            self.connection.execute(_TABLES[table].insert(), rows)

    def seal(self, table: str, rows: list[_Row]) -> None:
        column = _TABLES[table].c.id
        if new := [{"was": row["id"], "seal_now": row["seal"]} for row in rows]:
            changed = _TABLES[table].update().where(column == sa.bindparam("was"))
            self.connection.execute(changed.values(seal=sa.bindparam("seal_now")), new)


# ---- the recipe, as it is from here on


def _sealed(table: str, row: _Row, **beside: Any) -> _Row:
    content = {name: value for name, value in (row | beside).items() if name != "seal"}
    return row | {"seal": _digest({"v": 1, "table": table, "row": content})}


def _digest(value: Any) -> str:
    text = json.dumps(_exact(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {str(k): _exact(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(v) for v in value]
    return value


def _require(sound: bool) -> None:
    if not sound:
        raise ValueError("it does not match what it rests on")
