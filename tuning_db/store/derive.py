"""Winners out of what a database holds. The policy is in winners.py; here is what it is asked about, and when.

Whether a build is current may have to be rendered, and choosing reads all trials: neither is done while others wait for
the write lock. What was chosen is written if nothing that it rests on has changed meanwhile, else it is chosen again.

A winner is of a closure: of the kernel code that it was chosen for. Those for other code stay beside it, as long as
what they rest on may still win, so that two versions of kerngen share a database; of more than KEPT the oldest go.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, and_, delete, exists, select

from kerngen.arch import Device, Target
from kerngen.compiler import source_digest
from kerngen.compiler.compile import Resources
from kerngen.errors import UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning_db.read.canonical_fields import filed_device, filed_kernel, named_kernel
from kerngen.tuning_db.read.freshness import Freshness
from kerngen.tuning_db.read.ids import canonical, digest
from kerngen.tuning_db.read.values import PROVENANCES, Build, Observation, Winner
from kerngen.tuning_db.store import kernel_index
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.crossovers import Judge, TunedPoint, switches
from kerngen.tuning_db.store.rows import sealed, to_json, winner_id_of
from kerngen.tuning_db.store.winners import Choice, choose, may_win

if TYPE_CHECKING:
    from kerngen.tuning_db.store.store import Store

log = logging.getLogger(__name__)

KEPT = 3  # winners of one problem on one board, each for other kernel code
_PATIENCE = 3  # times that others may come in between, before they have to wait


def recompute_winners(
    store: Store, kernel: Kernel | str, static_key: str, target: Target, judge: Judge | None
) -> list[Winner]:
    """As Store.recompute_winners."""
    derived = _Derivation(store, kernel, static_key, target, judge)
    for _ in range(_PATIENCE):
        with store.reading() as connection:
            seen = _state(connection, static_key)
        derived.choose()
        with store.writing() as connection:
            if _state(connection, static_key) == seen:
                return derived.write(connection)
    with store.writing() as connection:
        derived.choose()
        return derived.write(connection)


def _state(connection: Connection, static_key: str) -> tuple[set[Any], ...]:
    """What choosing rests on, by name: another state may give another choice."""
    m, b, p = t.measurement.c, t.build.c, t.problem.c
    trials = select(m.id).join(t.problem, m.problem_id == p.id).where(p.static_key == static_key)
    builds = select(b.id, b.status).where(b.static_key == static_key)
    revocations = select(t.revocation.c.id)
    return tuple({tuple(row) for row in connection.execute(wanted)} for wanted in (trials, builds, revocations))


class _Derivation:
    """The winners of one static problem on one board. `choose` may render; `write` does not."""

    def __init__(
        self, store: Store, kernel: Kernel | str, static_key: str, target: Target, judge: Judge | None
    ) -> None:
        self.store, self.static_key, self.target, self.judge = store, static_key, target, judge
        self.kernel, self.name = _load(kernel), kernel if isinstance(kernel, str) else kernel.name
        self.closure = "" if self.kernel is None else source_digest.source_digest_of(self.kernel)
        self.freshness: Freshness | None = None
        self.by_config: dict[str, list[Build]] = {}  # all builds, by canonical JSON
        self.notes: list[tuple[str, str]] = []  # (build, what gives its source), to be written
        self.chosen: list[dict[str, Any]] = []
        self.may_win: dict[str, set[str]] = {}  # problem id -> builds: what winners for other kernel code may rest on

    def choose(self) -> None:
        store, target, arch = self.store, self.target, self.target.arch.name
        rows = store.measurements(self.name, static_key=self.static_key, arch=arch, device=target.device)
        builds, wrong = store.builds(self.static_key), store.wrong_sources(self.static_key)
        revoked = store.revoked().keys()
        weights = {id: step.weight for id, step in store.steps().items()}
        if self.kernel is not None and self.freshness is None:
            self.freshness = Freshness(self.kernel, self.closure, store.digests(self.static_key), builds.values())
        self.by_config = {}
        for build in builds.values():
            self.by_config.setdefault(canonical(build.config), []).append(build)
        points: dict[str, list[Observation]] = {}
        for o in rows:
            points.setdefault(o.measurement.problem.id, []).append(o)
        self.chosen, self.may_win = [], {}
        cells: dict[str, list[tuple[TunedPoint, dict[str, Any]]]] = {}
        for problem_id, observations in points.items():
            self.may_win[problem_id] = may_win(observations, builds, wrong_sources=wrong, revoked=revoked)
            problem = _problem(self.kernel, observations)
            tried = _tried(observations, builds, wrong)
            # A row that is carried alone wins whatever the default is, and a shipped board has thousands of them.
            is_alone = len(observations) == 1 and observations[0].measurement.provenance == "carried"
            default = None if is_alone else _default_config(self.kernel, problem, target)
            choice = choose(observations, builds, wrong_sources=wrong, revoked=revoked, default=default,
                            is_current=partial(self._is_current, problem),
                            holds=partial(self._holds, problem, tried), weights=weights)  # fmt: skip
            if choice is not None:
                key = observations[0].measurement.problem
                typical = next(o for o in observations if o.id == choice.measurement_id)
                self.chosen.append({
                    "id": winner_id_of(key, arch, target.device, self.closure), "kernel": filed_kernel(self.name),
                    "static_key": self.static_key, "closure": self.closure,
                    "cell": key.cell, "problem_id": key.id, "arch": arch,
                    "device_id": digest(filed_device(typical.measurement.device)), "build_id": choice.build_id,
                    "measurement_id": choice.measurement_id, "provenance": choice.provenance,
                    "latency_us": choice.latency_us, "margin": choice.margin, "reason": choice.reason,
                    "why": choice.why,
                })  # fmt: skip
                if (point := self._tuned(problem, builds[choice.build_id], choice)) is not None:
                    cells.setdefault(key.cell, []).append((point, choice.why))
        if self.judge is not None and self.kernel is not None:
            self._judge_between(cells.values())
        self.notes = [] if self.freshness is None else list(self.freshness.notes(builds.values()))

    def _is_current(self, problem: Any, build: Build) -> bool:
        return self.freshness is None or problem is None or self.freshness.is_current(problem, build)

    def _holds(self, problem: Any, tried: Set[str], build: Build) -> bool:
        """tried: ids of builds. If the configuration was tried from today's source, only that counts, not `build`."""
        if self.freshness is None or not self.freshness.holds(build):
            return False
        of_config = self.by_config[canonical(build.config)]
        return not any(other.id in tried and self._is_current(problem, other) for other in of_config)

    def _tuned(self, problem: Any, build: Build, choice: Choice) -> TunedPoint | None:
        """None where nothing lies between points, or what lies there is not known any more. A carried winner has no
        time to judge by, and serves all of its stretch, as one that steps chose.
        """
        if self.kernel is None or problem is None or not problem.DYNAMIC or choice.why["stale"]:
            return None
        if choice.latency_us is None:
            return None
        config = self.kernel.config_type(**build.config)
        return TunedPoint(problem, config, choice.latency_us, choice.times)

    def _judge_between(self, cells: Iterable[list[tuple[TunedPoint, dict[str, Any]]]]) -> None:
        """Write into the `why` of each point what serves between it and the next lower one; see crossovers.py. What was
        judged in steps of a model was so at the sizes that they have, and serves those whatever the judge says.
        """
        kernel, judge = self.kernel, self.judge
        if kernel is None or judge is None:
            return
        for points in cells:
            points.sort(key=lambda p: p[0].at)
            for (below, _), (above, why) in pairwise(points):
                if "step" in why:
                    continue

                def entries(config: Any, problem: Any = above.problem) -> Mapping[str, Resources] | None:
                    made = [b for b in self.by_config.get(canonical(fields_of(config)), ()) if b.status == "ok"]
                    current = (b.entries for b in made if self._is_current(problem, b))
                    held = (b.entries for b in made if self.freshness is not None and self.freshness.holds(b))
                    return next(chain(current, held), None)

                if found := switches(kernel, self.target, below, above, entries, judge):
                    why["switch"] = found

    def write(self, connection: Connection) -> list[Winner]:
        known = (
            self.kernel is not None and source_digest.source_digest_of(self.kernel) == self.closure
        )  # no file changed meanwhile
        for build_id, note in self.notes if known else ():
            self.store.note_rendered([build_id], note)
        arch, ids = self.target.arch.name, [row["id"] for row in self.chosen]
        gone = self._others_gone(connection)
        connection.execute(delete(t.winner).where(t.winner.c.id.in_([*gone, *ids])))
        if self.chosen:
            m = t.measurement.c
            wanted = select(m.id, m.fields).where(m.id.in_([row["measurement_id"] for row in self.chosen]))
            fields = {row.id: row.fields for row in connection.execute(wanted)}
            chosen = [row | {"why": to_json(row["why"])} for row in self.chosen if row["measurement_id"] in fields]
            rows = [sealed(t.winner, row, fields=fields[row["measurement_id"]]) for row in chosen]
            if len(rows) < len(self.chosen):
                log.warning("%s: %s measurements of %s are damaged; their winners are skipped",
                            self.store.where, len(self.chosen) - len(rows), self.name)  # fmt: skip
            if rows:
                connection.execute(t.winner.insert(), rows)
        index = kernel_index.write(connection, self.static_key, arch, self.store.where)
        return [] if index is None else [p.winner for p in index.points if p.winner.id in ids]

    def _others_gone(self, connection: Connection) -> list[str]:
        """The ids of this board's winners that do not stay: those of this closure, and of others what must not win."""
        w, m = t.winner.c, t.measurement.c
        here = and_(w.static_key == self.static_key, w.arch == self.target.arch.name, _is_of(self.target.device))
        wanted = (
            select(w.id, w.problem_id, w.build_id, w.measurement_id, w.closure)
            .join(t.measurement, w.measurement_id == m.id)
            .where(here)
            .order_by(m.at.desc(), w.id)
        )
        revoked = self.store.revoked()
        gone, kept = [], dict[str, int]()
        for row in connection.execute(wanted):
            others = kept.get(row.problem_id, 0)
            sound = row.build_id in self.may_win.get(row.problem_id, ()) and row.measurement_id not in revoked
            if row.closure in ("", self.closure) or not sound or others >= KEPT - 1:
                gone.append(row.id)
            else:
                kept[row.problem_id] = others + 1
        return gone


def _is_of(device: Device) -> Any:
    same = and_(t.device.c.name == device.name, t.device.c.num_sms == device.num_sms)
    return exists().where(and_(t.device.c.id == t.winner.c.device_id, same))


def _tried(observations: Sequence[Observation], builds: Mapping[str, Build], wrong: Set[str]) -> set[str]:
    """Ids of the builds that were run here (where none was: that are carried; where none is: that were predicted), that
    gave a wrong result anywhere, or that did not compile.
    """
    best = min((PROVENANCES.index(o.measurement.provenance) for o in observations), default=0)
    seen = {o.measurement.build_id for o in observations if o.measurement.provenance == PROVENANCES[best]}
    return {id for id, b in builds.items() if id in seen or b.source_sha in wrong or b.status == "compile_failed"}


def _load(kernel: Kernel | str) -> Kernel | None:
    if not isinstance(kernel, str):
        return kernel
    try:
        return find_kernel(named_kernel(kernel))
    except UnknownName:
        return None  # another installation's kernel: its records are kept and ranked all the same


def _problem(kernel: Kernel | None, observations: Sequence[Observation]) -> Any:
    """The Problem that was tuned, or None where this kernel no longer has such a one."""
    if kernel is None:
        return None
    try:
        return kernel.problem_type(**observations[0].measurement.problem.fields)
    except Exception:  # whatever an older Problem's fields do to the newer class
        return None


def _default_config(kernel: Kernel | None, problem: Any, target: Target) -> dict[str, Any] | None:
    if kernel is None or problem is None or kernel.why_unsupported(problem, target) is not None:
        return None
    return fields_of(kernel.default_config(problem, target))
