"""Measurements within a step of a model: which step, and what it took with and without the configuration.

A measurement made alone has none of these columns, and its seal does not speak of them. SQLite cannot change a check in
place: the table is made anew there, and the winners, which refer to it, wait in a table of their own.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

log = logging.getLogger("kerngen.tuning_db")

_REFERENCES = ("build", "problem", "device", "environment")
_STAGES = "stage IN ('trial', 'final', 'step')"
_ALL = "step_id IS NOT NULL AND step_us > 0 AND base_step_us > 0 AND base_id IS NOT NULL"
_CHECKS = {
    "outcome_known": "outcome IN ('ok', 'invalid', 'compile_failed', 'wrong_result', 'launch_failed', 'timed_out')",
    "provenance_known": "provenance IN ('measured', 'predicted')",
    "stage_known": _STAGES,
    "ok_has_time": "outcome <> 'ok' OR (build_id IS NOT NULL AND p50_us > 0)",
    "measured_ok_was_checked": "outcome <> 'ok' OR provenance = 'predicted' OR error_abs IS NOT NULL",
    "predicted_names_its_model": "outcome <> 'ok' OR provenance = 'measured' OR model <> ''",
    "step_is_whole": f"outcome <> 'ok' OR stage <> 'step' OR ({_ALL})",
}
_INDICES = {
    "measurement_by_problem": ["problem_id", "arch", "device_id"],
    "measurement_by_build": ["build_id"],
    "measurement_by_step": ["step_id"],
}


def upgrade() -> None:
    op.create_table(
        "step",
        sa.Column("id", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("model", "arch", "phase")),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("batch", "q_len", "context", "chunk", "layers")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("sequence", "props")),
        sa.Column("seal", sa.Text, nullable=False, server_default=""),
    )
    if op.get_bind().dialect.name == "sqlite":
        _make_anew()
    else:
        for column in _columns():
            op.add_column("measurement", column)
        op.create_foreign_key(None, "measurement", "step", ["step_id"], ["id"])
        op.drop_constraint("stage_known", "measurement")
        for name in ("stage_known", "step_is_whole"):
            op.create_check_constraint(name, "measurement", _CHECKS[name])
        op.create_index("measurement_by_step", "measurement", _INDICES["measurement_by_step"])


def _columns() -> list[sa.Column[object]]:
    return [
        sa.Column("step_id", sa.Text),
        *(sa.Column(name, sa.Double) for name in ("step_us", "base_step_us")),
        sa.Column("base_id", sa.Text),
    ]


def _make_anew() -> None:
    connection = op.get_bind()
    connection.execute(sa.text("CREATE TEMPORARY TABLE kept AS SELECT * FROM winner"))
    connection.execute(sa.text("DELETE FROM winner"))
    names = [c["name"] for c in sa.inspect(connection).get_columns("measurement")]
    for name in ("measurement_by_problem", "measurement_by_build"):
        op.drop_index(name)

    def reference(table: str, nullable: bool = False) -> sa.Column[object]:
        return sa.Column(f"{table}_id", sa.Text, sa.ForeignKey(f"{table}.id"), nullable=nullable)

    def text(*columns: str) -> list[sa.Column[object]]:
        return [sa.Column(name, sa.Text, nullable=False) for name in columns]

    op.create_table(
        "made_anew",  # renaming the old one would rename it in what refers to it, too
        sa.Column("id", sa.Text, primary_key=True),
        reference("build", nullable=True),
        reference("problem"),
        reference("device"),
        reference("environment"),
        *text("arch", "config", "fields", "outcome", "reason", "provenance", "stage", "model"),
        *(sa.Column(name, sa.Double) for name in ("p50_us", "p10_us", "p90_us", "min_us")),
        sa.Column("samples", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Double) for name in ("error_abs", "error_rel")),
        *text("run", "at", "tags"),
        reference("step", nullable=True),
        *_columns()[1:],
        sa.Column("seal", sa.Text, nullable=False, server_default=""),
        *(sa.CheckConstraint(check, name=name) for name, check in _CHECKS.items()),
    )
    columns = ", ".join(names)
    _copy(connection, f"made_anew ({columns})", f"SELECT {columns} FROM measurement", _REFERENCES)
    op.drop_table("measurement")
    op.rename_table("made_anew", "measurement")
    for name, indexed in _INDICES.items():
        op.create_index(name, "measurement", indexed)
    _copy(connection, "winner", "SELECT * FROM kept", (*_REFERENCES[:3], "measurement"))
    connection.execute(sa.text("DROP TABLE kept"))


def _copy(connection: sa.Connection, to: str, rows: str, references: tuple[str, ...]) -> None:
    """All rows but those that refer to what is not there or break a check: a file that was damaged holds such."""
    there = " AND ".join(
        f"({name}_id IN (SELECT id FROM {name}){' OR build_id IS NULL' if name == 'build' else ''})"
        for name in references
    )
    asked = connection.execute(sa.text(f"SELECT count(*) FROM ({rows})")).scalar_one()
    done = connection.execute(sa.text(f"INSERT OR IGNORE INTO {to} {rows} WHERE {there}")).rowcount
    if done < asked:
        log.warning("%d damaged rows of %s are not migrated", asked - done, rows.split()[-1])


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")
