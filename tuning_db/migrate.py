"""Bring a database to the newest schema in one transaction. Alembic, run from here: no alembic.ini, no env.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from kerngen.errors import DatabaseError, SchemaTooNew
from kerngen.tuning_db.schema import SCHEMA, VERSION_TABLE

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

MIGRATIONS = Path(__file__).resolve().parent / "migrations"


def revision(connection: Connection) -> str | None:
    """The schema revision that the database says it has; None if it was never kerngen's.

    Raises DatabaseError where the note of it is damaged.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    rows = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()
    if len(rows) > 1:
        raise DatabaseError(f"{connection.engine.url}: {VERSION_TABLE} holds {len(rows)} revisions, not one")
    return str(rows[0]) if rows else None


def has_tables(connection: Connection) -> bool:
    return bool(inspect(connection).get_table_names())


def require_known(found: str | None, where: str) -> None:
    """Raises SchemaTooNew if `found` is none of the revisions that this kerngen knows."""
    if found is not None and found != SCHEMA and found not in known_revisions():
        raise SchemaTooNew(
            f"{where} has schema {found}, written by a newer kerngen; this one knows up to {SCHEMA}",
            hint="upgrade kerngen, or name another database with --db or KERNGEN_DB",
        )


def known_revisions() -> list[str]:
    """Every revision, oldest first."""
    return [r.revision for r in reversed(list(_scripts().walk_revisions()))]


def upgrade(connection: Connection) -> None:
    """Run what is missing, within the transaction that the caller has begun: all of it lands, or none."""
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext

    scripts, config = _scripts(), Config()
    with EnvironmentContext(config, scripts, fn=lambda at, _: scripts._upgrade_revs("head", at)) as context:
        context.configure(connection=connection, version_table=VERSION_TABLE)
        context.run_migrations()


def _scripts() -> ScriptDirectory:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return ScriptDirectory.from_config(config)
