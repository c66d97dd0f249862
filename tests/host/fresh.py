"""A new database's tables, as the migrations made them the first time: hundreds of tests begin with one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect

from kerngen.tuning_db.store import migrate

_migrate = migrate.upgrade
# Folder of migrations and the revision to stop at -> the statements that make an empty SQLite database such a one.
_MADE: dict[tuple[Path, str], list[str]] = {}


def upgrade(connection: Connection, to: str = "head") -> None:
    """In place of kerngen's own, which it calls but for a database in which there is nothing, the second time."""
    if connection.dialect.name != "sqlite" or inspect(connection).get_table_names():
        return _migrate(connection, to)
    if (what := (migrate.MIGRATIONS, to)) in _MADE:
        for statement in _MADE[what]:
            connection.exec_driver_sql(statement)
        return None
    _migrate(connection, to)
    tables = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
    made = [str(sql) for sql in tables.scalars()]
    held = {t: connection.exec_driver_sql(f"SELECT * FROM {t}").all() for t in inspect(connection).get_table_names()}
    (version,) = held.pop(migrate.VERSION_TABLE)
    assert not any(held.values()), "a new database holds nothing but its revision"
    _MADE[what] = [*made, f"INSERT INTO {migrate.VERSION_TABLE} VALUES ('{version[0]}')"]
    return None
