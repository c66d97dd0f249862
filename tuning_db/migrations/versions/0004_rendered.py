"""Note which kernel code renders a build's source, so that nobody has to render it again to know."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "rendered",
        sa.Column("build_id", sa.Text, sa.ForeignKey("build.id"), primary_key=True),
        sa.Column("closure", sa.Text, primary_key=True),
        sa.Column("seal", sa.Text, nullable=False, server_default=""),
    )


def downgrade() -> None:
    raise NotImplementedError("kerngen's migrations only go forward; restore a copy instead")
