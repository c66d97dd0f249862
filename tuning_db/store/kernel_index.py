"""The lines of a database (read/kernel_index.py): made of its rows, and written with the winners."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import Connection, delete, select

from kerngen.compiler.compile import DEFAULT_OPTIONS
from kerngen.errors import CorruptRecord
from kerngen.tuning_db.read.canonical_fields import filed_kernel
from kerngen.tuning_db.read.kernel_index import KernelIndex, Point, encode, index_id_of
from kerngen.tuning_db.read.values import Build, Winner
from kerngen.tuning_db.store import schema as t
from kerngen.tuning_db.store.rows import WINNERS, is_sealed, read_build, read_winner, sealed, warn_skipped

log = logging.getLogger(__name__)


def index_of(connection: Connection, static_key: str, arch: str, where: str) -> KernelIndex | None:
    """What the rows of these compiled-in fields say now; None where nothing is served. Damaged rows are left out."""
    if not (static_key + arch).isascii():  # a damaged key, which no row can be asked for by
        log.warning("%s: %r is no name of a line; skipped", where, static_key[:16])
        return None
    builds = _builds(connection, static_key, arch, where)
    wanted = WINNERS.where(t.winner.c.static_key == static_key, t.winner.c.arch == arch)
    newest = connection.execute(wanted.order_by(t.measurement.c.at.desc(), t.winner.c.id)).all()
    points = []
    for row in newest:
        if (winner := read_winner(row, where)) is None:
            continue
        if winner.build_id not in builds:
            warn_skipped(where, "winner", winner.id, "rests on a build that cannot be read")
            continue
        points.append(Point(winner, row.measurement_id, _switch(winner)))
    served = {p.winner.build_id for p in points}
    closures = _closures(connection, static_key, where)
    spare = sorted(set(_with_code(connection, builds)) & closures.keys() - served)
    if not points and not spare:
        return None
    points.sort(key=_place)
    kept = {id: builds[id] for id in sorted(served | set(spare))}
    any_build = next(iter(kept.values()))
    return KernelIndex(any_build.kernel, any_build.static, arch, kept,
                {id: frozenset(closures.get(id, ())) for id in kept}, points, spare)  # fmt: skip


def _switch(winner: Winner) -> tuple[tuple[int, int | None], ...]:
    """What crossovers.py chose; nothing where it was not written by that."""
    try:
        return tuple((int(upto), None if at is None else int(at)) for upto, at in winner.why.get("switch", ()))
    except (TypeError, ValueError):
        return ()


def _place(p: Point) -> tuple[Any, ...]:
    """Stable: of one problem on one board the order stays."""
    key, device = p.winner.problem.filed(), p.winner.device
    return (sorted((k, str(v)) for k, v in key.runtime.items()), key.dynamic or 0, device.name, device.num_sms,
            p.winner.provenance)  # fmt: skip


def _builds(connection: Connection, static_key: str, arch: str, where: str) -> dict[str, Build]:
    b = t.build.c
    rows = connection.execute(
        select(t.build).where(b.static_key == static_key, b.arch == arch, b.status != "compile_failed")
    ).all()
    found = {}
    for row in rows:
        try:
            found[row.id] = read_build(row, where)
        except CorruptRecord as e:
            log.warning("%s; skipped", e)
    return found


def _closures(connection: Connection, static_key: str, where: str) -> dict[str, set[str]]:
    """Build id -> the kernel code that renders its source."""
    wanted = select(t.rendered).join(t.build, t.rendered.c.build_id == t.build.c.id)
    found: dict[str, set[str]] = {}
    for row in connection.execute(wanted.where(t.build.c.static_key == static_key)):
        if is_sealed(t.rendered, row):
            found.setdefault(row.build_id, set()).add(row.closure)
        else:
            warn_skipped(where, "what renders build", row.build_id, "does not match its own seal")
    return found


def _with_code(connection: Connection, builds: dict[str, Build]) -> list[str]:
    """Ids of those whose machine code is there, compiled as today."""
    shas = {b.image_sha for b in builds.values() if b.options == DEFAULT_OPTIONS}
    there = set(connection.execute(select(t.artifact.c.sha).where(t.artifact.c.sha.in_(shas))).scalars())
    return [id for id, b in builds.items() if b.image_sha in there and b.options == DEFAULT_OPTIONS]


def write(connection: Connection, static_key: str, arch: str, where: str) -> KernelIndex | None:
    """Put the line of these compiled-in fields right, within the caller's transaction; what it says, if anything."""
    id = index_id_of(static_key, arch)
    connection.execute(delete(t.line).where(t.line.c.id == id))
    if (line := index_of(connection, static_key, arch, where)) is not None:
        row = {"id": id, "kernel": filed_kernel(line.kernel), "static_key": static_key, "arch": arch,
               "body": encode(line)}  # fmt: skip
        connection.execute(t.line.insert(), [sealed(t.line, row)])
    return line


def write_all(connection: Connection, where: str) -> None:
    """As `write`, of all there are: after a migration, or where rows came in by another way."""
    connection.execute(delete(t.line))
    w, b = t.winner.c, t.build.c
    keys = {(str(key), str(arch)) for key, arch in connection.execute(select(w.static_key, w.arch).distinct())}
    coded = select(b.static_key, b.arch).join(t.artifact, b.image_sha == t.artifact.c.sha).distinct()
    keys |= {(str(key), str(arch)) for key, arch in connection.execute(coded)}
    for static_key, arch in sorted(keys):
        write(connection, static_key, arch, where)
