"""A small database of what a few winners rest on: their rows as they are, ids and digests included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, select
from sqlalchemy.dialects.sqlite import insert

from kerngen.tuning_db.keep import engine as engines
from kerngen.tuning_db.keep import schema as t
from kerngen.tuning_db.keep.store import Store
from kerngen.tuning_db.serve.values import Winner

_AT_ONCE = 500  # ids in one query


def extract(stores: Sequence[Store], winners: Iterable[Winner], path: Path) -> int:
    """Make the database `path` of `winners` (of `stores`), each with all points of its line: how many there are then.

    A line is what one board has tuned of one cell in one way, so what lies between two points is answered as before.
    With a winner go its build, its image where that was kept, its measurement, and what revokes any of them. Where two
    stores have a winner of one board and problem, the one in `winners` stays. The file is complete, and in no
    write-ahead log, when this returns.
    """
    lines: dict[int, dict[str, None]] = {i: {} for i in range(len(stores))}  # of each store: ids, in order
    chosen: list[tuple[int, str]] = []
    cells = [_Cells(store) for store in stores]
    for winner in winners:
        index = next(i for i, c in enumerate(cells) if c.has(winner))  # the store that answered
        chosen.append((index, winner.id))
        lines[index] |= dict.fromkeys(w.id for w in cells[index].around(winner) if w.provenance == winner.provenance)
    with Store.open(path) as made:
        with engines.clear_errors(str(path)), engines.writing(made.engine) as to:
            for index, id in chosen:
                _copy(stores[index], to, t.winner, [id])
            for index, ids in lines.items():
                _copy(stores[index], to, t.winner, list(ids))
            _copy_what_no_key_names(stores, to)
        made.rewrite_lines()
        count = len(made.winners())
    engines.leave_log(path)
    return count


class _Cells:
    """One store's winners, read a cell at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[tuple[Any, ...], list[Winner]] = {}

    def around(self, winner: Winner) -> list[Winner]:
        """Those of its board and cell."""
        key = (winner.kernel, winner.arch, winner.device, winner.problem.cell)
        if key not in self._read:
            kernel, arch, device, cell = key
            self._read[key] = self._store.winners(kernel, arch=arch, device=device, cell=cell, every=True)
        return self._read[key]

    def has(self, winner: Winner) -> bool:
        here = (winner.id, winner.build_id, winner.provenance)
        return any((w.id, w.build_id, w.provenance) == here for w in self.around(winner))


def _copy(store: Store, to: Connection, table: Table, ids: Sequence[str]) -> None:
    """The rows of `table` with these ids, after the rows that their foreign keys name; what is there already stays."""
    (key,) = table.primary_key.columns
    rows = list(_rows(store, table, key.name, ids))
    for foreign in table.foreign_keys:
        named = dict.fromkeys(row[foreign.parent.name] for row in rows)
        _copy(store, to, foreign.column.table, [id for id in named if id is not None])
    _insert(to, table, rows)


def _rows(store: Store, table: Table, column: str, values: Sequence[str]) -> Iterable[dict[str, Any]]:
    with engines.clear_errors(store.where), store.engine.connect() as connection:
        for start in range(0, len(values), _AT_ONCE):
            some = table.c[column].in_(values[start : start + _AT_ONCE])
            yield from (dict(row._mapping) for row in connection.execute(select(table).where(some)))


def _copy_what_no_key_names(stores: Sequence[Store], to: Connection) -> None:
    """Images, what renders a build, former ids and revocations: they may lie in any store, or in none."""
    builds = [id for (id,) in to.execute(select(t.build.c.id))]
    images = [sha for (sha,) in to.execute(select(t.build.c.image_sha)) if sha is not None]
    subjects = [id for column in (t.build.c.id, t.measurement.c.id) for (id,) in to.execute(select(column))]
    for store in stores:
        _copy(store, to, t.artifact, images)
        _insert(to, t.rendered, _rows(store, t.rendered, "build_id", builds))
        _insert(to, t.former, _rows(store, t.former, "id", subjects))
    subjects += [was for (was,) in to.execute(select(t.former.c.was))]
    for store in stores:
        _insert(to, t.revocation, _rows(store, t.revocation, "subject_id", subjects))


def _insert(to: Connection, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    if values := list(rows):
        to.execute(insert(table).on_conflict_do_nothing(), values)
