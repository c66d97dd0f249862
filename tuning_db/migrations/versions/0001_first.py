"""Builds, measurements and winners, kept apart."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _id() -> sa.Column[str]:
    return sa.Column("id", sa.Text, primary_key=True)


def _reference(table: str, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(f"{table}_id", sa.Text, sa.ForeignKey(f"{table}.id"), nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "artifact",
        sa.Column("sha", sa.Text, primary_key=True),
        *_text("kind", "codec"),
        sa.Column("raw_bytes", sa.BigInteger, nullable=False),
        sa.Column("blob", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("kind IN ('cubin', 'ptx')", name="kind_known"),
    )
    op.create_table(
        "build",
        _id(),
        *_text("kernel", "arch", "target", "nvrtc", "options", "config", "static_key", "static"),
        *_text("source_sha", "status", "cache_key"),
        sa.Column("image_sha", sa.Text),
        *_text("entries"),
        sa.Column("registers", sa.Integer, nullable=False),
        sa.Column("spill_bytes", sa.Integer, nullable=False),
        sa.Column("static_smem_bytes", sa.Integer, nullable=False),
        *_text("log", "seal"),
        sa.CheckConstraint("status IN ('ok', 'compile_failed')", name="status_known"),
        sa.CheckConstraint("(status = 'ok') = (image_sha IS NOT NULL)", name="image_if_ok"),
    )
    op.create_index("build_by_static", "build", ["static_key", "arch"])
    op.create_index("build_by_image", "build", ["image_sha"])
    op.create_table(
        "problem",
        _id(),
        *_text("kernel", "static_key", "static", "cell", "runtime"),
        sa.Column("dynamic", sa.BigInteger),
    )
    op.create_index("problem_by_static", "problem", ["static_key"])
    op.create_table(
        "device",
        _id(),
        *_text("arch", "name"),
        sa.Column("num_sms", sa.Integer, nullable=False),
        *_text("props"),
    )
    op.create_index("device_by_name", "device", ["name"])
    op.create_table("environment", _id(), *_text("props"))
    op.create_table(
        "measurement",
        _id(),
        _reference("build", nullable=True),
        _reference("problem"),
        _reference("device"),
        _reference("environment"),
        *_text("arch", "config", "fields", "outcome", "reason", "provenance", "stage", "model"),
        *(sa.Column(name, sa.Double) for name in ("p50_us", "p10_us", "p90_us", "min_us")),
        sa.Column("samples", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Double) for name in ("error_abs", "error_rel")),
        *_text("run", "at", "tags"),
        sa.CheckConstraint(
            "outcome IN ('ok', 'invalid', 'compile_failed', 'wrong_result', 'launch_failed', 'timed_out')",
            name="outcome_known",
        ),
        sa.CheckConstraint("provenance IN ('measured', 'predicted')", name="provenance_known"),
        sa.CheckConstraint("stage IN ('trial', 'final')", name="stage_known"),
        sa.CheckConstraint("outcome <> 'ok' OR (build_id IS NOT NULL AND p50_us > 0)", name="ok_has_time"),
        sa.CheckConstraint(
            "outcome <> 'ok' OR provenance = 'predicted' OR error_abs IS NOT NULL",
            name="measured_ok_was_checked",
        ),
        sa.CheckConstraint(
            "outcome <> 'ok' OR provenance = 'measured' OR model <> ''", name="predicted_names_its_model"
        ),
    )
    op.create_index("measurement_by_problem", "measurement", ["problem_id", "arch", "device_id"])
    op.create_index("measurement_by_build", "measurement", ["build_id"])
    op.create_table("revocation", _id(), *_text("subject_id", "reason", "at"))
    op.create_index("revocation_by_subject", "revocation", ["subject_id"])
    op.create_table(
        "winner",
        _id(),
        *_text("kernel", "static_key", "cell"),
        _reference("problem"),
        *_text("arch"),
        _reference("device"),
        _reference("build"),
        _reference("measurement"),
        *_text("provenance"),
        sa.Column("latency_us", sa.Double, nullable=False),
        sa.Column("margin", sa.Double),
        *_text("reason", "why"),
        sa.CheckConstraint("provenance IN ('measured', 'predicted')", name="provenance_known"),
    )
    op.create_index("winner_by_cell", "winner", ["cell", "arch"])
    op.create_index("winner_by_static", "winner", ["static_key", "arch"])


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")
