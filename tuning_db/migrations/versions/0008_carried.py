"""Carried rows: configurations that were chosen on a board before, of which no time is left.

SQLite cannot change a check in place: both tables are made anew, and the winners, which refer to measurements, wait in
a table of their own.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

log = logging.getLogger("kerngen.tuning_db")

_PROVENANCES = "provenance IN ('measured', 'carried', 'predicted')"
_CHANGED = {
    "provenance_known": _PROVENANCES,
    "ok_has_time": "outcome <> 'ok' OR (build_id IS NOT NULL AND (provenance = 'carried' OR p50_us > 0))",
    "measured_ok_was_checked": "outcome <> 'ok' OR provenance <> 'measured' OR error_abs IS NOT NULL",
    "predicted_names_its_model": "outcome <> 'ok' OR provenance <> 'predicted' OR model <> ''",
}
_NEW = {"carried_names_its_source": "provenance <> 'carried' OR (p50_us IS NULL AND reason <> '')"}
_KEPT = {
    "outcome_known": "outcome IN ('ok', 'invalid', 'compile_failed', 'wrong_result', 'launch_failed', 'timed_out')",
    "stage_known": "stage IN ('trial', 'final', 'step')",
    "step_is_whole": "outcome <> 'ok' OR stage <> 'step' OR "
    "(step_id IS NOT NULL AND step_us > 0 AND base_step_us > 0 AND base_id IS NOT NULL)",
}
_WINNER = {
    "provenance_known": _PROVENANCES,
    "carried_has_no_time": "(latency_us IS NULL) = (provenance = 'carried')",
}
_INDICES = {
    "measurement": {
        "measurement_by_problem": ["problem_id", "arch", "device_id"],
        "measurement_by_build": ["build_id"],
        "measurement_by_step": ["step_id"],
    },
    "winner": {"winner_by_cell": ["cell", "arch"], "winner_by_static": ["static_key", "arch"]},
}
_REFERENCES = {
    "measurement": ("build", "problem", "device", "environment", "step"),
    "winner": ("build", "problem", "device", "measurement"),
}


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _make_anew()
        return
    for name, check in _CHANGED.items():
        op.drop_constraint(name, "measurement")
        op.create_check_constraint(name, "measurement", check)
    for name, check in _NEW.items():
        op.create_check_constraint(name, "measurement", check)
    op.alter_column("winner", "latency_us", nullable=True)
    op.drop_constraint("provenance_known", "winner")
    for name, check in _WINNER.items():
        op.create_check_constraint(name, "winner", check)


def _make_anew() -> None:
    connection = op.get_bind()
    connection.execute(sa.text("CREATE TEMPORARY TABLE kept_winner AS SELECT * FROM winner"))
    op.drop_table("winner")
    for name in _INDICES["measurement"]:
        op.drop_index(name)
    op.create_table(
        "made_anew",  # renaming the old one would rename it in what refers to it, too
        sa.Column("id", sa.Text, primary_key=True),
        _reference("build", nullable=True),
        *(_reference(table) for table in ("problem", "device", "environment")),
        *_text("arch", "config", "fields", "outcome", "reason", "provenance", "stage", "model"),
        *_double("p50_us", "p10_us", "p90_us", "min_us"),
        sa.Column("samples", sa.Integer, nullable=False),
        *_double("error_abs", "error_rel"),
        *_text("run", "at", "tags"),
        _reference("step", nullable=True),
        *_double("step_us", "base_step_us"),
        sa.Column("base_id", sa.Text),
        _seal(),
        *(sa.CheckConstraint(check, name=name) for name, check in (_CHANGED | _NEW | _KEPT).items()),
    )
    _copy(connection, "made_anew", "measurement", _REFERENCES["measurement"])
    op.drop_table("measurement")
    op.rename_table("made_anew", "measurement")
    op.create_table(
        "winner",
        sa.Column("id", sa.Text, primary_key=True),
        *_text("kernel", "static_key", "cell"),
        _reference("problem"),
        *_text("arch"),
        *(_reference(table) for table in ("device", "build", "measurement")),
        *_text("provenance"),
        *_double("latency_us", "margin"),
        *_text("reason", "why"),
        _seal(),
        sa.Column("closure", sa.Text, nullable=False, server_default=""),
        *(sa.CheckConstraint(check, name=name) for name, check in _WINNER.items()),
    )
    _copy(connection, "winner", "kept_winner", _REFERENCES["winner"])
    connection.execute(sa.text("DROP TABLE kept_winner"))
    for table, indices in _INDICES.items():
        for name, columns in indices.items():
            op.create_index(name, table, columns)


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _double(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double) for name in names]


def _reference(table: str, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(f"{table}_id", sa.Text, sa.ForeignKey(f"{table}.id"), nullable=nullable)


def _seal() -> sa.Column[str]:
    return sa.Column("seal", sa.Text, nullable=False, server_default="")


def _copy(connection: sa.Connection, to: str, rows: str, references: tuple[str, ...]) -> None:
    """All rows but those that break a check or refer to what is not there: a file that was damaged holds them."""
    columns = ", ".join(c["name"] for c in sa.inspect(connection).get_columns(to))
    there = " AND ".join(f"({name}_id IS NULL OR {name}_id IN (SELECT id FROM {name}))" for name in references)
    asked = connection.execute(sa.text(f"SELECT count(*) FROM {rows}")).scalar_one()
    done = connection.execute(
        sa.text(f"INSERT OR IGNORE INTO {to} ({columns}) SELECT {columns} FROM {rows} WHERE {there}")
    ).rowcount
    if done < asked:
        log.warning("%d damaged rows of %s are not migrated", asked - done, rows.removeprefix("kept_"))


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")
