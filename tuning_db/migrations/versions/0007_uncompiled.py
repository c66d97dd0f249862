"""Builds that nobody has compiled here: a source that is known to win, whose machine code and resources are not.

SQLite cannot change a check in place: the table is made anew, and what refers to it waits in tables of its own.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

log = logging.getLogger("kerngen.tuning_db")

_STATUS = "status IN ('ok', 'compile_failed', 'uncompiled')"
_IMAGE = "(status = 'ok') = (image_sha IS NOT NULL)"
_TEXTS = ("kernel", "arch", "target", "nvrtc", "options", "config", "static_key", "static", "source_sha", "status",
          "cache_key")  # fmt: skip
_WAITING = ("winner", "rendered", "measurement")  # those that refer to others of them first


def upgrade() -> None:
    if op.get_bind().dialect.name != "sqlite":
        op.drop_constraint("status_known", "build")
        op.create_check_constraint("status_known", "build", _STATUS)
        return
    connection = op.get_bind()
    for table in _WAITING:
        connection.execute(sa.text(f"CREATE TEMPORARY TABLE kept_{table} AS SELECT * FROM {table}"))
        connection.execute(sa.text(f"DELETE FROM {table}"))
    for name in ("build_by_static", "build_by_image"):
        op.drop_index(name)

    def text(*columns: str) -> list[sa.Column[object]]:
        return [sa.Column(name, sa.Text, nullable=False) for name in columns]

    op.create_table(
        "made_anew",  # renaming the old one would rename it in what refers to it, too
        sa.Column("id", sa.Text, primary_key=True),
        *text(*_TEXTS),
        sa.Column("image_sha", sa.Text),
        *text("entries"),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("registers", "spill_bytes", "static_smem_bytes")),
        *text("log"),
        sa.Column("seal", sa.Text, nullable=False, server_default=""),
        sa.CheckConstraint(_STATUS, name="status_known"),
        sa.CheckConstraint(_IMAGE, name="image_if_ok"),
    )
    _copy(connection, "made_anew", "build")
    op.drop_table("build")
    op.rename_table("made_anew", "build")
    op.create_index("build_by_static", "build", ["static_key", "arch"])
    op.create_index("build_by_image", "build", ["image_sha"])
    for table in reversed(_WAITING):
        _copy(connection, table, f"kept_{table}")
        connection.execute(sa.text(f"DROP TABLE kept_{table}"))


# What a row refers to, of what may have been left out.
_REFERS = {
    "measurement": "build_id IS NULL OR build_id IN (SELECT id FROM build)",
    "rendered": "build_id IN (SELECT id FROM build)",
    "winner": "build_id IN (SELECT id FROM build) AND measurement_id IN (SELECT id FROM measurement)",
}


def _copy(connection: sa.Connection, to: str, rows: str) -> None:
    """All rows but those that break a check or refer to such: a file that was damaged holds them."""
    columns = ", ".join(f'"{c["name"]}"' for c in sa.inspect(connection).get_columns(to))
    asked = connection.execute(sa.text(f"SELECT count(*) FROM {rows}")).scalar_one()
    where = _REFERS.get(to, "TRUE")
    done = connection.execute(
        sa.text(f"INSERT OR IGNORE INTO {to} ({columns}) SELECT {columns} FROM {rows} WHERE {where}")
    ).rowcount
    if done < asked:
        log.warning("%d damaged rows of %s are not migrated", asked - done, rows.removeprefix("kept_"))


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")
