"""Choosing winners anew on every board at once, after something came in or went that choosing rests on."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, func, select

from kerngen.arch import Target, find_arch
from kerngen.errors import UnknownName
from kerngen.system.interrupts import heed
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.fact_tables import batches
from kerngen.tuning_db.store.rows import device_of
from kerngen.tuning_db.store.store import Store

log = logging.getLogger(__name__)


def choose_everywhere(store: Store, static_keys: Collection[str]) -> int:
    """Choose the winners of these compiled-in fields, on each board that has trials: how many points' winners changed.

    All in one transaction.
    """
    m, p, d = t.measurement.c, t.problem.c, t.device.c
    boards = (
        select(p.kernel, p.static_key, m.arch, func.min(d.id).label("device_id"))
        .join(t.measurement, m.problem_id == p.id)
        .join(t.device, m.device_id == d.id)
        .group_by(p.kernel, p.static_key, m.arch, d.name, d.num_sms)
        .order_by(p.kernel, p.static_key, m.arch, d.name, d.num_sms)
    )
    changed = 0
    with store.writing() as connection:
        for keys in batches(sorted(static_keys)):
            for row in connection.execute(boards.where(p.static_key.in_(keys))).all():
                heed()
                before = _winners(connection, row.static_key, row.arch)
                _choose(store, connection, row)
                after = _winners(connection, row.static_key, row.arch)
                changed += sum(1 for id in before.keys() | after.keys() if before.get(id) != after.get(id))
    return changed


def static_keys_of(store: Store, subjects: Collection[str]) -> set[str]:
    """Of the builds and measurements with these ids, or that had them in an older schema."""
    b, m, p = t.build.c, t.measurement.c, t.problem.c
    named = {s for s in {*subjects, *store.renamed(subjects)} if s.isascii()}
    trials = select(p.static_key).join(t.measurement, m.problem_id == p.id)
    found: set[str] = set()
    with store.reading() as connection:
        for wanted, id in ((select(b.static_key), b.id), (trials, m.id)):
            for some in batches(sorted(named)):
                found |= {key for (key,) in connection.execute(wanted.where(id.in_(some)).distinct())}
    return found


def _choose(store: Store, connection: Connection, row: Any) -> None:
    props = connection.execute(select(t.device.c.props).where(t.device.c.id == row.device_id)).scalar_one()
    try:
        target = Target(find_arch(row.arch), device_of(props)[0])
    except UnknownName as e:  # of a newer kerngen, which chooses when it next tunes
        log.warning("%s: no winners of %s: %s", store.where, row.kernel, e.message)
        return
    store.recompute_winners(row.kernel, row.static_key, target)


def _winners(connection: Connection, static_key: str, arch: str) -> dict[str, tuple[Any, ...]]:
    w = t.winner.c
    wanted = select(w.id, w.build_id, w.provenance).where(w.static_key == static_key, w.arch == arch)
    return {id: tuple(rest) for id, *rest in connection.execute(wanted)}
