"""One tuning database: what is written to it, and what is read back. tuning_db/__init__.py lists the operations."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard
from sqlalchemy import Connection, Engine, Select, Table, and_, select

from kerngen.arch import Arch, Device, Target
from kerngen.compiler import source_digest as closures
from kerngen.compiler.compile import DEFAULT_OPTIONS, Cubin, Ptx
from kerngen.errors import CorruptRecord, DatabaseError, UnknownName, UsageError
from kerngen.system.interrupts import held
from kerngen.system.urls import without_password
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.read.canonical_fields import filed_device, filed_kernel, named_kernel
from kerngen.tuning_db.read.ids import ProblemKey, digest, ids_as_filed
from kerngen.tuning_db.read.images import image_of
from kerngen.tuning_db.read.kernel_index import KernelIndex, named
from kerngen.tuning_db.read.places import default_path
from kerngen.tuning_db.read.source import ClosedAtEnd
from kerngen.tuning_db.read.values import BUILD_STATUSES, Build, Measurement, Observation, StepKey, Winner
from kerngen.tuning_db.store import engine as engines
from kerngen.tuning_db.store import kernel_index, migrate
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.crossovers import Judge
from kerngen.tuning_db.store.derive import recompute_winners
from kerngen.tuning_db.store.rows import (
    WINNERS,
    ZSTD_LEVEL,
    as_filed,
    build_row,
    compile_id,
    describe_build,
    is_sealed,
    measurement_row,
    now,
    read_build,
    read_measurement,
    read_search,
    read_step,
    read_winner,
    revocation_id_of,
    sealed,
    search_id_of,
    settled,
    step_row,
    to_json,
)

log = logging.getLogger(__name__)

_AT_ONCE = 500  # ids in one query


class Store(ClosedAtEnd):
    """A tuning database. Threads may share one; processes open their own (never use one across a fork)."""

    def __init__(self, engine: Engine, where: str, *, name: str, read_only: bool, override: bool) -> None:
        self.engine = engine
        self.where = where
        self.name = name
        self.read_only = read_only
        self.override = override
        self._local = threading.local()
        self._warned: set[str] = set()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        url_or_path: str | Path | None = None,
        *,
        read_only: bool = False,
        sealed: bool = False,
        name: str = "",
        override: bool = False,
    ) -> Store:
        """Open a database, made and brought to the newest schema; `read_only`, an older file is read as a copy of it.

        url_or_path: a file, sqlite:///FILE, or postgresql+psycopg://...; None for `default_path()`.
        sealed: a shipped file that nobody writes to, opened read-only without locks or side files.
        name: what a lookup calls it. override: its answers come before any other store's.
        Raises DatabaseError where it cannot be opened, SchemaTooNew where a newer kerngen wrote it, UsageError where a
        file that is shipped with kerngen would be written to.
        """
        chosen = str(url_or_path) if url_or_path is not None else default_path()
        path = chosen.removeprefix("sqlite:///")
        if "://" in path:
            engine = engines.open_server(path)
            where = without_password(path)
        else:
            where = path
            read_only = read_only or sealed
            if read_only:
                engine = engines.open_sqlite_read_only(Path(path), sealed=sealed)
            else:
                engine = engines.open_sqlite(Path(path))
        try:
            engine = migrate.settle(engine, where, read_only=read_only)
        except BaseException:
            engine.dispose()  # and leave the file as it is
            raise
        return cls(engine, where, name=name or Path(where).stem, read_only=read_only, override=override)

    def close(self) -> None:
        """Close the connections. Of a file that was opened to write, the write-ahead log goes into the file."""
        first, self._is_closed = not self._is_closed, True
        try:
            if first and not self.read_only and self.engine.dialect.name == "sqlite":
                with engines.clear_errors(self.where):
                    if not engines.fold_log(self.engine):
                        log.info("%s is in use elsewhere: copy its -wal file along with it", self.where)
        except DatabaseError as e:  # what was committed is safe in the log
            log.warning("%s; copy its -wal file along with it", e.message)
        finally:
            self.engine.dispose()

    # ---- connections

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes of this thread within the context land together, or none. Contexts nest."""
        with self.writing():
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """As `transaction`, with its connection."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            yield connection
            return
        if self.read_only:
            raise DatabaseError(f"{self.where} was opened read-only")
        with held(), engines.clear_errors(self.where), engines.writing(self.engine) as connection:
            self._local.connection = connection
            try:
                yield connection
            finally:
                self._local.connection = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read with: this thread's transaction, if it is in one."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            yield connection
            return
        with held(), engines.clear_errors(self.where), self.engine.connect() as connection:
            yield connection

    def _add(self, connection: Connection, table: Table, row: dict[str, Any]) -> bool:
        """Insert `row` unless its key is there; True if it was not."""
        if self.engine.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert as upsert
        else:
            from sqlalchemy.dialects.sqlite import insert as upsert  # type: ignore[assignment]
        done = connection.execute(upsert(table).values(row).on_conflict_do_nothing())
        return done.rowcount == 1

    def _add_sealed(self, connection: Connection, table: Table, row: dict[str, Any]) -> None:
        """Insert `row` unless it is there as it was once written: what was altered since is put right."""
        if not self._add(connection, table, row):
            here = and_(*(c == row[c.name] for c in table.primary_key.columns))
            if not is_sealed(table, connection.execute(select(table).where(here)).one()):
                connection.execute(table.update().where(here).values(row))

    def _add_all(self, connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        if self.engine.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert as upsert
        else:
            from sqlalchemy.dialects.sqlite import insert as upsert  # type: ignore[assignment]
        if rows:
            connection.execute(upsert(table).on_conflict_do_nothing(), list(rows))

    def _add_all_sealed(self, connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        there = set[str]()
        for some in (rows[i : i + _AT_ONCE] for i in range(0, len(rows), _AT_ONCE)):
            ids = [row["id"] for row in some]
            there |= {id for (id,) in connection.execute(select(table.c.id).where(table.c.id.in_(ids)))}
        self._add_all(connection, table, [row for row in rows if row["id"] not in there])
        for row in rows:
            if row["id"] in there:
                self._add_sealed(connection, table, row)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s: %s", self.where, message)

    # ---- builds

    def add_build(
        self,
        image: Cubin | Ptx | None,
        kernel: str,
        source: str,
        config: dict[str, Any],
        static: dict[str, Any],
        *,
        arch: Arch | None = None,
        options: tuple[str, ...] = DEFAULT_OPTIONS,
        nvrtc: tuple[int, int] | None = None,
        status: str = "ok",
        log: str = "",
        keep_image: bool = True,
        notes: Collection[str] = (),
    ) -> str:
        """Record one compile and return its id; the same compile again changes nothing.

        A failed one has no `image`, names its `arch`, and gives status "compile_failed" with NVRTC's `log`. It is
        replaced if the same build succeeds later. So is one that is "uncompiled", by whatever comes of it.
        keep_image: store the machine code too, and not its digest alone.
        notes: what gives `source` (`freshness.notes_of`), where an unchanged kernel rendered it.
        Raises CorruptRecord if the same build is there with another result, DatabaseError if `image` was made from
        another source.
        """
        made = describe_build(image, kernel, source, config, static, arch, options, nvrtc, status, log)
        self.file_build(made, image if keep_image else None, notes)
        return made.id

    def file_build(self, made: Build, image: Cubin | Ptx | None = None, notes: Collection[str] = ()) -> None:
        """As `add_build`, of what `describe_build` made of a compile; `image` is stored where it is given."""
        row = build_row(made)
        with self.writing() as connection:
            if not self._add(connection, t.build, row):
                there = connection.execute(select(t.build).where(t.build.c.id == made.id)).one()
                if there.status != made.status and made.status in BUILD_STATUSES[: BUILD_STATUSES.index(there.status)]:
                    connection.execute(t.build.update().where(t.build.c.id == made.id).values(row))
                elif made.status == "ok" and there.seal != row["seal"]:
                    raise CorruptRecord(f"{self.where}: build {made.id[:16]} of {made.kernel} is there with other "
                                        "machine code from the same source and compiler")  # fmt: skip
            if image is not None:
                self._keep(connection, image)
            for note in notes:
                self.note_rendered([made.id], note)

    def note_rendered(self, build_ids: Iterable[str], note: str) -> None:
        """Note what gives the very sources of these builds: the closure of kernel code that renders them; the revision
        of their bodies (freshness.revision_of); of builds that an older kerngen filed, also what their source is filed
        by today (freshness.source_sha).
        """
        with self.writing() as connection:
            for id in build_ids:
                row = sealed(t.rendered, {"build_id": id, "closure": note})
                self._add_sealed(connection, t.rendered, row)

    def digests(self, static_key: str) -> dict[str, set[str]]:
        """Of the builds of these compiled-in fields, all that was noted by `note_rendered`."""
        wanted = select(t.rendered).join(t.build, t.rendered.c.build_id == t.build.c.id)
        with self.reading() as connection:
            rows = connection.execute(wanted.where(t.build.c.static_key == static_key)).all()
        found: dict[str, set[str]] = {}
        for row in rows:
            if is_sealed(t.rendered, row):
                found.setdefault(row.build_id, set()).add(row.closure)
            else:
                self._warn_once(f"what renders build {row.build_id} does not match its own seal; skipped")
        return found

    def rendered(self, static_key: str, closure: str) -> set[str]:
        """The builds of these compiled-in fields whose source is rendered by kernel code with this closure."""
        return {id for id, given in self.digests(static_key).items() if closure in given}

    def keep_image(self, image: Cubin | Ptx) -> None:
        """Store the machine code of a build that is already here."""
        with self.writing() as connection:
            self._keep(connection, image)

    def _keep(self, connection: Connection, image: Cubin | Ptx) -> None:
        sha = hashlib.sha256(image.image).hexdigest()
        if connection.execute(select(t.artifact.c.sha).where(t.artifact.c.sha == sha)).first() is not None:
            return
        blob = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(image.image)
        kind = "cubin" if isinstance(image, Cubin) else "ptx"
        row = {"sha": sha, "kind": kind, "codec": "zstd", "raw_bytes": len(image.image), "blob": blob}
        self._add(connection, t.artifact, row)

    def find_build(
        self,
        kernel: str,
        source: str,
        config: dict[str, Any],
        static: dict[str, Any],
        arch: Arch,
        *,
        options: tuple[str, ...] = DEFAULT_OPTIONS,
        nvrtc: tuple[int, int] | None = None,
    ) -> Build | None:
        """The cubin build of exactly this, by this machine's NVRTC unless `nvrtc` is given; None if never tried."""
        wanted = compile_id(kernel, source, config, static, arch, options, nvrtc)
        with self.reading() as connection:
            row = connection.execute(select(t.build).where(t.build.c.id == wanted)).first()
        return None if row is None or row.status == "uncompiled" else read_build(row, self.where)

    def build(self, build_id: str) -> Build:
        """The build with this id. Raises UsageError if there is none, CorruptRecord if it was altered."""
        with self.reading() as connection:
            row = connection.execute(select(t.build).where(t.build.c.id == build_id)).first()
        if row is None:
            raise UsageError(f"{self.where}: no build {build_id}")
        return read_build(row, self.where)

    def builds(self, static_key: str) -> dict[str, Build]:
        """Every build of these compiled-in fields by id; one that was altered is skipped with a warning."""
        builds: dict[str, Build] = {}
        with self.reading() as connection:
            rows = connection.execute(select(t.build).where(t.build.c.static_key == static_key)).all()
        for row in rows:
            try:
                builds[row.id] = read_build(row, self.where)
            except CorruptRecord as e:
                log.warning("%s; skipped", e)
        return builds

    def image(self, build: Build) -> Cubin | Ptx | None:
        """The machine code of `build`, or None if it was not kept. Raises CorruptRecord if it was altered."""
        if build.image_sha is None:
            return None
        with self.reading() as connection:
            row = connection.execute(select(t.artifact).where(t.artifact.c.sha == build.image_sha)).first()
        if row is None:
            return None
        return image_of(build, row.blob, row.codec, row.raw_bytes, self.where)

    def named(self, prefix: str) -> list[tuple[str, str]]:
        """("build" or "trial", id) of what begins like this; two at most of each."""
        found = []
        with self.reading() as connection:
            for kind, table in (("build", t.build), ("trial", t.measurement)):
                like = table.c.id.startswith(prefix, autoescape=True)
                found += [(kind, str(id)) for (id,) in connection.execute(select(table.c.id).where(like).limit(2))]
        return found

    def kept_builds(self) -> list[Build]:
        """The builds whose machine code is here, by id. Raises CorruptRecord where one was altered."""
        wanted = select(t.build).join(t.artifact, t.build.c.image_sha == t.artifact.c.sha).order_by(t.build.c.id)
        with self.reading() as connection:
            rows = connection.execute(wanted).all()
        return [read_build(row, self.where) for row in rows]

    def find_cubin(self, key: str) -> Cubin | None:
        """The cubin that the compile cache would have under `key`, if it was kept. Raises CorruptRecord."""
        wanted = select(t.build).where(t.build.c.cache_key == key, t.build.c.status == "ok").order_by(t.build.c.id)
        with self.reading() as connection:
            rows = connection.execute(wanted).all()
        images = (self.image(read_build(row, self.where)) for row in rows)
        return next((image for image in images if isinstance(image, Cubin)), None)

    # ---- measurements

    def add_measurement(self, m: Measurement) -> str:
        """Record one trial and return its id."""
        return self.add_measurements([m])[0]

    def add_measurements(self, measurements: Sequence[Measurement]) -> list[str]:
        """Record trials in one transaction, in order; returns their ids."""
        rows = []
        devices, environments, problems = (dict[str, dict[str, Any]]() for _ in range(3))  # which rows share
        known: dict[Device, str] = {}
        for given in measurements:
            m = as_filed(settled(given))
            if (d := m.device) not in known:
                device = filed_device(d)
                known[d] = digest(device)
                devices[known[d]] = {"id": known[d], "arch": d.arch, "name": d.name, "num_sms": d.num_sms,
                                     "props": to_json(device)}  # fmt: skip
            environment = digest(m.environment)
            environments[environment] = {"id": environment, "props": to_json(m.environment)}
            problem = _problem_row(m.problem)
            problems[problem["id"]] = problem
            rows.append(measurement_row(m, problem["id"]))
        with self.writing() as connection:
            for table, shared in ((t.device, devices), (t.environment, environments), (t.problem, problems)):
                self._add_all(connection, table, list(shared.values()))
            self._add_all_sealed(connection, t.measurement, rows)
        return [str(row["id"]) for row in rows]

    def _add_problem(self, connection: Connection, key: ProblemKey) -> str:
        row = _problem_row(key)
        self._add(connection, t.problem, row)
        return str(row["id"])

    def measurements(
        self,
        kernel: str | None = None,
        *,
        static_key: str | None = None,
        problem: ProblemKey | None = None,
        arch: Arch | str | None = None,
        device: Device | str | None = None,
        provenance: str | None = None,
        outcome: str | None = None,
        build_id: str | None = None,
        run: str | None = None,
    ) -> list[Observation]:
        """What was observed, oldest first. A row that was altered is skipped with a warning that names it."""
        m, p, d = t.measurement.c, t.problem.c, t.device.c
        wanted: Select[Any] = (
            select(t.measurement, p.kernel, p.static, p.runtime, p.dynamic, d.props.label("device_props"),
                   t.environment.c.props.label("environment_props"))
            .join(t.problem, m.problem_id == p.id)
            .join(t.device, m.device_id == d.id)
            .join(t.environment, m.environment_id == t.environment.c.id)
            .order_by(m.at, m.id)
        )  # fmt: skip
        for column, value in (
            (p.kernel, None if kernel is None else filed_kernel(kernel)),
            (p.static_key, static_key),
            (p.id, None if problem is None else problem.id),
            (m.arch, None if arch is None else str(arch)),
            (d.name, None if device is None else str(device)),
            (d.num_sms, device.num_sms if isinstance(device, Device) else None),
            (m.provenance, provenance),
            (m.outcome, outcome),
            (m.build_id, build_id),
            (m.run, run),
        ):
            if value is not None:
                wanted = wanted.where(column == value)
        with self.reading() as connection:
            rows = connection.execute(wanted).all()
        return [o for o in (read_measurement(row, self.where) for row in rows) if o is not None]

    def add_step(self, step: StepKey) -> str:
        """Record a step that measurements are made in, and return its id; the same step again changes nothing."""
        row = step_row(step)
        with self.writing() as connection:
            self._add_sealed(connection, t.step, row)
        return str(row["id"])

    def steps(self) -> dict[str, StepKey]:
        """All that measurements were made in, by id. One that was altered is skipped with a warning."""
        with self.reading() as connection:
            rows = connection.execute(select(t.step).order_by(t.step.c.id)).all()
        found = {row.id: read_step(row, self.where) for row in rows}
        return {id: step for id, step in found.items() if step is not None}

    def wrong_sources(self, static_key: str) -> set[str]:
        """source_sha of the builds that ever gave a wrong result for these compiled-in fields, on any device."""
        with self.reading() as connection:
            wrong = connection.execute(
                select(t.build.c.source_sha, t.measurement.c.id)
                .join(t.measurement, t.measurement.c.build_id == t.build.c.id)
                .where(t.build.c.static_key == static_key, t.measurement.c.outcome == "wrong_result")
            ).all()
        revoked = self.revoked()
        return {r.source_sha for r in wrong if r.id not in revoked}

    # ---- searches

    def close_search(self, search: str, problem: ProblemKey, summary: dict[str, Any]) -> None:
        """Note that a search of `problem` was finished. search: digest of everything that decides how it goes."""
        with self.writing() as connection:
            problem_id = self._add_problem(connection, problem)
            row = {"id": search_id_of(search, problem_id), "search": search, "problem_id": problem_id,
                   "summary": to_json(summary)}  # fmt: skip
            self._add_sealed(connection, t.search, sealed(t.search, row))

    def closed_searches(self, search: str) -> dict[str, dict[str, Any]]:
        """The problems, by id, whose search of this digest was finished, each with its summary.

        A row that was altered is skipped with a warning that names it: its search is done again.
        """
        with self.reading() as connection:
            rows = connection.execute(select(t.search).where(t.search.c.search == search)).all()
        read = {row.problem_id: read_search(row, self.where) for row in rows}
        return {id: summary for id, summary in read.items() if summary is not None}

    # ---- revocation

    def revoke(self, subject_id: str, reason: str) -> None:
        """Say that a build or a measurement must not count any more, here and in every store that is read with this.

        Winners that rest on it are not served from now on; `recompute_winners` finds others.
        """
        row = {"id": revocation_id_of(subject_id, reason), "subject_id": subject_id, "reason": reason, "at": now()}
        with self.writing() as connection:
            self._add_sealed(connection, t.revocation, sealed(t.revocation, row))

    def revoked(self) -> dict[str, str]:
        """Ids that were revoked, each with the reason.

        One that was altered is named in a warning, and what it names counts as revoked all the same: that is the safe
        side, for the next candidate is asked.
        """
        with self.reading() as connection:
            rows = connection.execute(select(t.revocation)).all()
            for row in rows:
                if not is_sealed(t.revocation, row):
                    self._warn_once(f"revocation {row.id} does not match its own seal; it counts all the same")
            found = {r.subject_id: r.reason for r in rows}
            names = self._former(connection, found)
        return found | {id: found[was] for was, id in names.items()}

    def renamed(self, ids: Collection[str]) -> set[str]:
        """What those of `ids` that are names of an older schema are called here now."""
        with self.reading() as connection:
            return set(self._former(connection, ids).values())

    def _former(self, connection: Connection, ids: Collection[str]) -> dict[str, str]:
        names: dict[str, str] = {}
        asked = [id for id in ids if isinstance(id, str) and id.isascii()]  # what else a damaged row may name
        for row in connection.execute(select(t.former).where(t.former.c.was.in_(asked))) if asked else ():
            if is_sealed(t.former, row):
                names[row.was] = row.id
            else:
                self._warn_once(f"what {row.was} is called now does not match its own seal; skipped")
        return names

    # ---- winners

    def recompute_winners(
        self, kernel: Kernel | str, static_key: str, target: Target, *, judge: Judge | None = None
    ) -> list[Winner]:
        """Choose anew, by the policy of winners.py, at every tuned point of these compiled-in fields on `target`.

        Replaces what was chosen before, in one transaction. Returns the winners, without cubins. What must be rendered
        is rendered before that transaction, unless this is called within one. judge: says what a configuration takes
        where nobody measured (cost/crossover.py); with it, what serves between two points too (crossovers.py).
        """
        return recompute_winners(self, kernel, static_key, target, judge)

    def winners(
        self,
        kernel: str | None = None,
        *,
        arch: Arch | str | None = None,
        device: Device | str | None = None,
        static_key: str | None = None,
        cell: str | None = None,
        closure: str | None = None,
        every: bool = False,
    ) -> list[Winner]:
        """The winners, sorted by kernel, problem, arch and device; without their cubins (see `image`).

        Of a problem on a board there is one for each version of the kernel's code that it was tuned for: listed is that
        for the code that is installed, else the one measured last. closure: that for this code; every: all of them.
        """
        wanted = WINNERS
        for column, value in (
            (t.winner.c.kernel, None if kernel is None else filed_kernel(kernel)),
            (t.winner.c.arch, None if arch is None else str(arch)),
            (t.device.c.name, None if device is None else str(device)),
            (t.device.c.num_sms, device.num_sms if isinstance(device, Device) else None),
            (t.winner.c.static_key, static_key),
            (t.winner.c.cell, cell),
            (t.winner.c.closure, closure),
        ):
            if value is not None:
                wanted = wanted.where(column == value)
        with self.reading() as connection:
            rows = connection.execute(wanted.order_by(t.measurement.c.at.desc(), t.winner.c.id)).all()
        found = [w for w in (read_winner(row, self.where) for row in rows) if w is not None]
        return sorted(found if every else _one_each(found), key=_by_problem)

    def line(self, kernel: str, static_key: str, arch: str) -> KernelIndex | None:
        """What a run reads of these compiled-in fields, made of the rows as they are; see read/kernel_index.py.

        Of a file, read/reader.py reads the same from one row.
        """
        with self.reading() as connection:
            found = kernel_index.index_of(connection, static_key, arch, self.where)
        return None if found is None or found.kernel != named_kernel(kernel) else named(found, self.where)

    def rewrite_lines(self) -> None:
        """Put all lines right, where rows came in by another way than recompute_winners."""
        with self.writing() as connection:
            kernel_index.write_all(connection, self.where)

    def winner(self, id_or_prefix: str) -> Winner:
        """The winner whose id starts like this. Raises UsageError unless there is exactly one."""
        with self.reading() as connection:
            like = t.winner.c.id.startswith(id_or_prefix, autoescape=True)
            rows = connection.execute(WINNERS.where(like).limit(2)).all()
        found = [w for w in (read_winner(row, self.where) for row in rows) if w is not None]
        if len(found) != 1:
            what = "no winner" if not found else "more than one winner"
            raise UsageError(f"{self.where}: {what} with id {id_or_prefix}", hint="list them: kerngen db ls -v")
        return found[0]


def _problem_row(key: ProblemKey) -> dict[str, Any]:
    p = key.filed()
    ids = ids_as_filed(p)
    return {"id": ids.problem, "kernel": p.kernel, "static_key": ids.static_key, "static": to_json(p.static),
            "cell": ids.cell, "runtime": to_json(p.runtime), "dynamic": p.dynamic}  # fmt: skip


def _one_each(winners: Iterable[Winner]) -> Iterable[Winner]:
    """Of each problem on each board the winner for the kernel code that is installed, else the first."""
    found: dict[tuple[str, str, str, int], Winner] = {}
    for w in winners:
        key = w.problem.id, w.arch.name, w.device.name, w.device.num_sms
        if key not in found or w.closure == _closure_here(w.kernel) != found[key].closure:
            found[key] = w
    return found.values()


def _closure_here(kernel: str) -> str | None:
    try:
        return closures.source_digest_of(find_kernel(kernel))
    except UnknownName:
        return None


def _by_problem(w: Winner) -> tuple[Any, ...]:
    p, d = w.problem, w.device
    dynamic = -1 if p.dynamic is None else p.dynamic
    return (p.kernel, to_json(p.static), to_json(p.runtime), dynamic, w.arch.name, d.name, d.num_sms)
