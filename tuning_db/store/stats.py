"""Counts and sizes of a database's contents."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sqlalchemy import func, select

from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.store import Store


def stats(store: Store) -> dict[str, Any]:
    """rows by table; trials by kernel, arch, board and how they are known, with their outcomes; runs; image bytes."""
    m, p, d = t.measurement.c, t.problem.c, t.device.c
    groups = (
        select(p.kernel, m.arch, d.name, m.provenance, m.outcome, func.count())
        .join(t.problem, m.problem_id == p.id)
        .join(t.device, m.device_id == d.id)
        .group_by(p.kernel, m.arch, d.name, m.provenance, m.outcome)
    )
    w = t.winner.c
    won = (
        select(w.kernel, w.arch, d.name, w.provenance, func.count())
        .join(t.device, w.device_id == d.id)
        .group_by(w.kernel, w.arch, d.name, w.provenance)
    )
    found: dict[tuple[str, str, str, str], tuple[Counter[str], int]] = {}
    with store.reading() as connection:
        rows = {table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in t.metadata.sorted_tables}  # fmt: skip
        for kernel, arch, board, how, outcome, count in connection.execute(groups):
            found.setdefault((kernel, arch, board, how), (Counter(), 0))[0][outcome] += count
        for kernel, arch, board, how, count in connection.execute(won):
            key = (kernel, arch, board, how)
            found[key] = found.get(key, (Counter(), 0))[0], count
        images = connection.execute(select(func.sum(func.length(t.artifact.c.blob)))).scalar() or 0
        runs = connection.execute(select(func.count(m.run.distinct())).where(m.run != "")).scalar_one()
        last = connection.execute(select(func.max(m.at))).scalar()
    return {
        "store": store.where,
        "schema": t.SCHEMA,
        "rows": rows,
        "image_bytes": int(images),
        "runs": runs,
        "last": last,
        "trials": [
            {"kernel": kernel, "arch": arch, "device": board, "provenance": how, "winners": winners,
             "outcomes": dict(outcomes.most_common())}
            for (kernel, arch, board, how), (outcomes, winners) in sorted(found.items())
        ],
    }  # fmt: skip
