"""Makes a database smaller: deletes machine code that nobody runs, and rows that the user names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Table, delete, func, select

from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.fact_tables import batches
from kerngen.tuning_db.store.merge import writing
from kerngen.tuning_db.store.rederive import choose_everywhere
from kerngen.tuning_db.store.store import Store


@dataclass(slots=True)
class Pruned:
    """removed: rows by table. image_bytes: of machine code, packed."""

    removed: Counter[str] = field(default_factory=Counter)
    image_bytes: int = 0


def gc(store: Store, *, dry_run: bool = False) -> Pruned:
    """Remove machine code of builds that are no winner's, and problems, boards and environments that nothing names.

    No observation goes: what was removed is compiled again where it wins later. The file becomes smaller.
    """
    done = Pruned()
    with _pruning(store, dry_run) as connection:
        named = select(t.build.c.image_sha).join(t.winner, t.winner.c.build_id == t.build.c.id)
        idle = t.artifact.c.sha.not_in(named.where(t.build.c.image_sha.is_not(None)))
        sizes = connection.execute(select(func.length(t.artifact.c.blob)).where(idle)).scalars().all()
        done.image_bytes = sum(sizes)
        _delete(connection, done, t.artifact, idle)
        _drop_orphans(connection, done)
    if not dry_run and store.engine.dialect.name == "sqlite":
        with engines.clear_errors(store.where):
            engines.vacuum(store.engine)
    return done


def rm(
    store: Store,
    *,
    kernels: Collection[str] = (),
    arches: Collection[str] = (),
    devices: Collection[str] = (),
    dry_run: bool = False,
) -> Pruned:
    """Forget what was observed of these kernels, on these arches and boards; none given of a kind means all of it.

    With them go their winners, finished searches and builds of which nothing else was observed. Revocations stay.
    """
    done = Pruned()
    with _pruning(store, dry_run) as connection:
        m, p, d = t.measurement.c, t.problem.c, t.device.c
        wanted = (
            select(m.id, m.build_id, m.problem_id, p.static_key)
            .join(t.problem, m.problem_id == p.id)
            .join(t.device, m.device_id == d.id)
        )
        for column, names in ((p.kernel, kernels), (m.arch, arches), (d.name, devices)):
            if names:
                wanted = wanted.where(column.in_(list(names)))
        rows = connection.execute(wanted).all()
        static_keys = {row.static_key for row in rows}
        for some in batches(sorted({row.id for row in rows})):
            _delete(connection, done, t.winner, t.winner.c.measurement_id.in_(some))
            _delete(connection, done, t.measurement, m.id.in_(some))
        for some in batches(sorted({row.problem_id for row in rows})):
            _delete(connection, done, t.search, t.search.c.problem_id.in_(some))
        observed = select(m.build_id).where(m.build_id.is_not(None))
        for some in batches(sorted({row.build_id for row in rows if row.build_id is not None})):
            unobserved = t.build.c.id.not_in(observed)
            gone = select(t.build.c.id).where(t.build.c.id.in_(some), unobserved)
            ids = list(connection.execute(gone).scalars())
            _delete(connection, done, t.rendered, t.rendered.c.build_id.in_(ids))
            _delete(connection, done, t.build, t.build.c.id.in_(ids))
        _delete(connection, done, t.artifact, t.artifact.c.sha.not_in(
            select(t.build.c.image_sha).where(t.build.c.image_sha.is_not(None))))  # fmt: skip
        _drop_orphans(connection, done)
        choose_everywhere(store, static_keys)
    return done


@contextmanager
def _pruning(store: Store, dry_run: bool) -> Iterator[Connection]:
    with writing(store, dry_run=dry_run) as connection:
        yield connection
        store.rewrite_lines()  # what went must not be served, also where nothing is left to choose from


def _delete(connection: Connection, done: Pruned, table: Table, where: Any) -> None:
    done.removed[table.name] += connection.execute(delete(table).where(where)).rowcount
    if not done.removed[table.name]:
        del done.removed[table.name]


def _drop_orphans(connection: Connection, done: Pruned) -> None:
    m, w = t.measurement.c, t.winner.c
    kept = select(m.problem_id).union(select(w.problem_id), select(t.search.c.problem_id))
    _delete(connection, done, t.problem, t.problem.c.id.not_in(kept))
    _delete(connection, done, t.device, t.device.c.id.not_in(select(m.device_id).union(select(w.device_id))))
    _delete(connection, done, t.environment, t.environment.c.id.not_in(select(m.environment_id)))
    _delete(connection, done, t.step, t.step.c.id.not_in(select(m.step_id).where(m.step_id.is_not(None))))
