"""A part of what databases hold, as one sealed file to take along: winners, and what they rest on.

With a winner go its build, its machine code where that was kept, and what its choice rests on: the observations of
every candidate within its noise, of the next ones, of the default configuration and of what was tried in steps of a
model, and each wrong result that was ever seen of its compiled-in fields. So the file alone gives the same winners
again, and `explain` names the rivals. All else that was observed goes along where `history` is asked for.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Table, func, select

from kerngen import __version__
from kerngen.arch import Target
from kerngen.errors import DatabaseError
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.merge import Merged, add_facts
from kerngen.tuning_db.store.ranking import Rankings
from kerngen.tuning_db.store.store import Store
from kerngen.tuning_db.store.winners import noise_of
from kerngen.tuning_db.read.values import Winner
from kerngen.tuning_db.dist.keys import SecretKey
from kerngen.tuning_db.dist.seal import seal

if TYPE_CHECKING:
    from collections.abc import Iterator

_AT_ONCE = 500  # ids in one query
_RIVALS = 2  # beyond the noise: those that come next
_NEAREST = 3  # within it, where not all are told


@dataclass(frozen=True, slots=True)
class Selection:
    """Which winners: None, all of them. cells: ProblemKey.cell, of what a model needs."""

    kernels: Collection[str] | None = None
    arches: Collection[str] | None = None
    devices: Collection[str] | None = None
    cells: Collection[str] | None = None
    provenances: Collection[str] | None = None

    def has(self, w: Winner) -> bool:
        return (
            (self.kernels is None or w.kernel in self.kernels)
            and (self.arches is None or w.arch.name in self.arches)
            and (self.devices is None or w.device.name in self.devices)
            and (self.cells is None or w.problem.cell in self.cells)
            and (self.provenances is None or w.provenance in self.provenances)
        )


@dataclass(slots=True)
class Shipment:
    """What is collected to be sealed. damaged, conflicts: as merging had them (store/merge.py)."""

    store: Store
    path: Path
    merged: Merged = field(default_factory=Merged)
    _others: set[str] = field(default_factory=set)  # winners of one point that two sources have

    def add(self, source: Store, winners: Sequence[Winner], *, history: bool = False, images: bool = True) -> None:
        """Add `winners` of `source`, whose rows stay as they are, with what they rest on."""
        if not winners:
            return
        only = _rested_on(source, winners, history=history, images=images)
        rows = {row["id"]: row for row in _rows(source, t.winner, "id", [w.id for w in winners])}
        with self.store.transaction():
            add_facts(self.store, source, only, self.merged)
            with self.store.writing() as connection:
                there = {row.id: row.seal for row in connection.execute(select(t.winner.c.id, t.winner.c.seal))}
                sound = self._present()
                for w in sorted(winners, key=lambda w: w.id):
                    if (row := rows.get(w.id)) is None or not {w.build_id, row["measurement_id"]} <= sound:
                        continue
                    if w.id not in there:
                        connection.execute(t.winner.insert(), row)
                    elif there[w.id] != row["seal"]:
                        self._others.add(w.id)

    def _present(self) -> set[str]:
        with self.store.reading() as connection:
            return {id for c in (t.build.c.id, t.measurement.c.id) for (id,) in connection.execute(select(c))}

    def settle(self) -> None:
        """Choose anew where two sources had a winner of one point, or one revoked what another chose.

        So the file's winners are those of what is in it.
        """
        revoked, chosen = self.store.revoked().keys(), set()
        for w in self.store.winners() if self._others or revoked else ():
            if w.id in self._others or w.build_id in revoked:
                chosen.add((w.kernel, w.problem.static_key, Target(w.arch, w.device)))
        for kernel, static_key, target in sorted(chosen, key=str):
            self.store.recompute_winners(kernel, static_key, target)

    def contents(self) -> dict[str, Any]:
        """What a header says of it."""
        winners = self.store.winners()
        boards = {(w.arch.name, w.device.name, w.device.num_sms) for w in winners}
        return {
            "arches": sorted({arch for arch, _, _ in boards}),
            "boards": [list(b) for b in sorted(boards)],
            "kernels": sorted({w.kernel for w in winners}),
            "winners": dict(sorted(Counter(w.provenance for w in winners).items())),
        }

    def seal(
        self, out: Path, about: Mapping[str, Any], keys: Iterable[SecretKey], *, has_lines: bool = False
    ) -> str:
        """Write it, read-only, with the leaves of all its tables: its digest. has_lines: all rows came with winners, so
        that the lines are theirs. Raises DatabaseError, OSError.
        """
        if not has_lines:
            self.store.rewrite_lines()
        sequence = self._sequence()
        self.store.close()
        engines.leave_log(self.path)
        header = {"schema": t.SCHEMA, "kerngen": __version__, "name": out.stem, "sequence": sequence, **about}
        return seal(self.path, out, header, keys=keys, stored=sorted(t.metadata.tables))


    def _sequence(self) -> int:
        """Of two files of one name the later has the higher: when its newest observation or revocation was made, in
        microseconds since 1970. So the same rows have the same, and what is only added to goes up.
        """
        with self.store.reading() as connection:
            newest = [connection.execute(select(func.max(table.c.at))).scalar() for table in (t.measurement, t.revocation)]
        return max(map(_microseconds, newest))


def _microseconds(at: str | None) -> int:
    try:
        told = datetime.fromisoformat(at or "")
    except ValueError:  # a row may say anything
        return 0
    return max(0, round(told.replace(tzinfo=told.tzinfo or UTC).timestamp() * 1e6))


@contextmanager
def shipment() -> Iterator[Shipment]:
    """An empty one, in a folder of its own that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kerngen-export-") as scratch:
        path = Path(scratch) / "export.sqlite"
        with Store.open(path) as store:
            yield Shipment(store, path)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. lacking: how many of its winners' machine code was not kept."""

    digest: str
    size: int
    contents: dict[str, Any]
    lacking: int
    merged: Merged


def export(
    sources: Sequence[Store],
    selection: Selection,
    out: Path,
    *,
    history: bool = False,
    images: bool = True,
    keys: Iterable[SecretKey] = (),
    models: Sequence[str] = (),
) -> Exported:
    """Seal the winners that `selection` has, of `sources` in lookup order, in `out`. models: what it says of itself.

    Raises DatabaseError where there is nothing to export, OSError.
    """
    with shipment() as made:
        for source in sources:
            made.add(source, [w for w in source.winners() if selection.has(w)], history=history, images=images)
        made.settle()
        contents = made.contents() | {"models": list(models)}
        if not contents["winners"]:
            raise DatabaseError(
                f"no winners to export in {', '.join(s.where for s in sources) or 'no database'}",
                hint="what there is: kerngen db ls; fill it: kerngen tune --arch ARCH --model NAME",
            )
        builds = {w.build_id for w in made.store.winners()}
        lacking = sum(made.store.image(made.store.build(id)) is None for id in builds)
        digest = made.seal(out, {"contents": contents}, keys)
        return Exported(digest, os.path.getsize(out), contents, lacking, made.merged)


def _rested_on(source: Store, winners: Sequence[Winner], *, history: bool, images: bool) -> dict[str, set[str]]:
    """The ids of all rows, by table, that these winners rest on; see the module's docstring."""
    groups: dict[tuple[str, str], list[Winner]] = {}
    for w in winners:
        groups.setdefault((w.kernel, w.problem.static_key), []).append(w)
    trials: set[str] = set()
    for (kernel, static_key), members in groups.items():
        trials |= trials_of(source, kernel, static_key, members, history=history)
    rows = list(_rows(source, t.measurement, "id", sorted(trials)))
    builds = {w.build_id for w in winners} | {row["build_id"] for row in rows if row["build_id"] is not None}
    if history:
        builds |= {id for _, static_key in groups for id in source.builds(static_key)}
    chosen = {w.build_id for w in winners}
    artifacts = {row["image_sha"] for row in _rows(source, t.build, "id", sorted(chosen)) if row["image_sha"]}
    subjects = builds | trials
    former = list(_rows(source, t.former, "id", sorted(subjects)))
    own = list(_rows(source, t.winner, "id", [w.id for w in winners]))
    problems = {row["problem_id"] for row in (*rows, *own)}
    searches = _rows(source, t.search, "problem_id", sorted(problems)) if history else ()
    return {
        "artifact": artifacts if images else set(),
        "build": builds,
        "rendered": builds,
        "problem": problems,
        "device": {row["device_id"] for row in (*rows, *own)},
        "environment": {row["environment_id"] for row in rows},
        "step": {row["step_id"] for row in rows if row["step_id"] is not None},
        "measurement": trials,
        "search": {row["id"] for row in searches},
        "former": {row["was"] for row in former},
        "revocation": _all_ids(source, t.revocation),  # of what another source has, too
    }


def trials_of(
    source: Store,
    kernel: str,
    static_key: str,
    winners: Sequence[Winner],
    *,
    history: bool = False,
    brief: bool = False,
) -> set[str]:
    """The ids of the observations that the winners of one static problem rest on; see the module's docstring.

    brief: of many that came near, the nearest few alone, and of what was timed again the later look.
    """
    rankings = Rankings(source, kernel, static_key)
    kept = {o.id for o in rankings.observations if o.measurement.outcome == "wrong_result"}
    if history:
        boards = {(w.arch.name, w.device.name, w.device.num_sms) for w in winners}
        for o in rankings.observations:
            if (o.measurement.arch, o.measurement.device.name, o.measurement.device.num_sms) in boards:
                kept.add(o.id)
        return kept
    for w in winners:
        found = rankings.of(w)
        ranked, mine = found.candidates, found.candidate(w.build_id)
        best = (*ranked[:1], *([mine] if mine else []))
        near = [c for c in ranked if any(c.is_within(noise_of(b.typical.measurement), b) for b in best)]
        default = [c for c in ranked if c.p50_us == w.why.get("default_us")]
        after = ranked[len(near) : len(near) + _RIVALS]
        in_step = sorted((c for c in ranked if c.step is not None), key=lambda c: c.step or 0.0)
        if brief:
            near, after = near[:_NEAREST], after if len(near) < _NEAREST else []
            in_step = in_step[:_RIVALS] + [c for c in in_step[_RIVALS:] if c.step == 1.0]
        stay = (*near, *after, *default, *in_step, *([mine] if mine else []))
        which = {b.id for c in stay for b in c.builds} | {w.build_id}
        rows = [o for o in found.observations if o.measurement.build_id in which]
        again = {o.measurement.build_id for o in rows if o.measurement.stage == "final"} if brief else set()
        kept |= {o.id for o in rows if o.measurement.stage != "trial" or o.measurement.build_id not in again}
    return kept


def _all_ids(store: Store, table: Table) -> set[str]:
    with store.reading() as connection:
        return {id for (id,) in connection.execute(select(table.c.id))}


def _rows(store: Store, table: Table, column: str, values: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows whose `column` has one of these values. A winner that was altered is left out."""
    with store.reading() as connection:
        for start in range(0, len(values), _AT_ONCE):
            some = table.c[column].in_(values[start : start + _AT_ONCE])
            for row in connection.execute(select(table).where(some)):
                yield {c.name: row._mapping[c.name] for c in table.columns}
