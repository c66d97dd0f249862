"""Winners say for which kernel code they were chosen, and what a run reads lies in one row a kernel and problem.

The seal of a winner covers its closure: each that matches its seal is sealed anew. For which code those were chosen is
not known, and their ids stay as they are. `line` stays empty: it is derived, and whoever migrates fills it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

log = logging.getLogger("kerngen.tuning_db")

_COLUMNS = (
    "id", "kernel", "static_key", "cell", "problem_id", "arch", "device_id", "build_id", "measurement_id", "provenance",
    "latency_us", "margin", "reason", "why", "seal",
)  # fmt: skip
_WINNER = sa.table("winner", *map(sa.column, _COLUMNS))
_MEASUREMENT = sa.table("measurement", sa.column("id"), sa.column("fields"))


def upgrade() -> None:
    op.create_table(
        "line",
        sa.Column("id", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("kernel", "static_key", "arch", "body")),
        sa.Column("seal", sa.Text, nullable=False, server_default=""),
    )
    op.create_index("line_by_kernel", "line", ["kernel", "arch"])
    _seal_winners(op.get_bind())


def _seal_winners(connection: sa.Connection) -> None:
    m = _MEASUREMENT.c
    rows = connection.execute(
        sa.select(_WINNER, m.fields).select_from(_WINNER.outerjoin(_MEASUREMENT, _WINNER.c.measurement_id == m.id))
    ).all()
    op.add_column("winner", sa.Column("closure", sa.Text, nullable=False, server_default=""))
    new = []
    for found in rows:
        row = dict(found._mapping)
        try:
            seal = row.pop("seal")
            if _seal(row) != seal:
                raise ValueError("it does not match its seal")
            new.append({"was": row["id"], "seal_now": _seal(row | {"closure": ""})})
        except (TypeError, ValueError) as e:  # bytes that are no text, or a value that is no JSON, among them
            log.warning("winner %s is damaged (%s) and not migrated", ascii(found.id), e)
    if new:
        sealing = _WINNER.update().where(_WINNER.c.id == sa.bindparam("was")).values(seal=sa.bindparam("seal_now"))
        connection.execute(sealing, new)


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")


# ---- the recipe of a seal, as it is from here on


def _seal(row: dict[str, Any]) -> str:
    stated = json.dumps(_exact({"v": 1, "table": "winner", "row": row}), sort_keys=True, separators=(",", ":"),
                        allow_nan=False)  # fmt: skip
    return hashlib.sha256(stated.encode()).hexdigest()


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _exact(v) for k, v in value.items()}
    return value.hex() if isinstance(value, float) else value
