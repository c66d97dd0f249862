"""Bring a database, or a copy of it, to the newest schema in one transaction; lines, which are derived, are made anew.

Alembic, run from here: no alembic.ini, no env.py. A migration holds all that it needs: today's classes are not those
that wrote what it finds.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from kerngen.errors import DatabaseError, SchemaTooNew
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import kernel_index, schema
from kerngen.tuning_db.store.schema import VERSION_TABLE

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

log = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).resolve().parents[1] / "migrations"


def settle(engine: Engine, where: str, *, read_only: bool) -> Engine:
    """An engine whose database has today's schema: `engine`, or one on a migrated copy in memory where it is read only.

    Raises SchemaTooNew where a newer kerngen wrote it, DatabaseError where it is another program's, or can neither be
    changed nor copied.
    """
    with engines.clear_errors(where):
        with engine.connect() as connection:
            found = revision(connection)
            if found is None and engine.dialect.name == "sqlite" and inspect(connection).get_table_names():
                raise DatabaseError(f"{where} is an SQLite database, but not a tuning database",
                                    hint="name another with --db or KERNGEN_DB")  # fmt: skip
        require_known(found, where)
        if found == schema.SCHEMA:
            return engine
        if read_only:
            return _migrated_copy(engine, where, found)
        with engines.writing(engine) as connection:
            found = revision(connection)  # another process may have been first
            require_known(found, where)
            if found != schema.SCHEMA:
                upgrade(connection)
                kernel_index.write_all(connection, where)
        return engine


def _migrated_copy(engine: Engine, where: str, found: str | None) -> Engine:
    if found is None:
        raise DatabaseError(f"{where} holds no tuning database: there is nothing in it to read",
                            hint="kerngen tune --db FILE fills it")  # fmt: skip
    older = f"{where} has schema {found}, and this kerngen reads {schema.SCHEMA}"
    if engine.dialect.name != "sqlite":
        raise DatabaseError(
            f"{older}; a server is not migrated by reading it",
            hint="open it once to write (kerngen tune --db URL); an older kerngen can no longer use it then",
        )
    log.info("%s: a copy in memory is migrated and read; the file stays as it is", older)
    copy = engines.copy_to_memory(engine)
    engine.dispose()
    try:
        with engines.writing(copy) as connection:
            upgrade(connection)
    except BaseException:
        copy.dispose()
        raise
    return copy


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


def require_known(found: str | None, where: str) -> None:
    """Raises SchemaTooNew if `found` is none of the revisions that this kerngen knows."""
    if found is not None and found != schema.SCHEMA and found not in known_revisions():
        raise SchemaTooNew(
            f"{where} has schema {found}, written by a newer kerngen; this one knows up to {schema.SCHEMA}",
            hint="upgrade kerngen, or name another database with --db or KERNGEN_DB",
        )


def known_revisions() -> list[str]:
    """Every revision, oldest first."""
    return [r.revision for r in reversed(list(_scripts().walk_revisions()))]


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run what is missing, within the transaction that the caller has begun: all of it lands, or none.

    to: the revision to stop at.
    """
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext

    scripts, config = _scripts(), Config()
    with EnvironmentContext(config, scripts, fn=lambda at, _: scripts._upgrade_revs(to, at)) as context:
        context.configure(connection=connection, version_table=VERSION_TABLE)
        context.run_migrations()


def _scripts() -> ScriptDirectory:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return ScriptDirectory.from_config(config)
