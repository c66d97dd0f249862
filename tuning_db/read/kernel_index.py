"""The kernel index: a row, a line, holds all that a run reads of a kernel, its compiled-in fields and an arch.

It is derived from the other tables (store/kernel_index.py), rewritten with the winners: the boards, the builds that are
served and what renders them, and at each tuned point the winners, those for other versions of the kernel's code too. A
spare is a build that no winner rests on, whose machine code is there: a default's, say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from kerngen.arch import Device, find_arch
from kerngen.compiler.compile import Resources
from kerngen.errors import CorruptRecord
from kerngen.templates.kernel import filled, trimmed
from kerngen.tuning_db.read.canonical_fields import (
    canonical_fields_of,
    device_from,
    filed_device,
    filed_kernel,
    named_kernel,
)
from kerngen.tuning_db.read.checks import require_build, require_device, require_indices, require_winner
from kerngen.tuning_db.read.ids import ID_VERSION, ProblemKey, digest, static_key_as_filed
from kerngen.tuning_db.read.values import Build, Winner

VERSION = 1  # of a body
COLUMNS = ("id", "kernel", "static_key", "arch", "body", "seal")


@dataclass(frozen=True, slots=True)
class Point:
    """What one winner of a line is besides.

    measurement_id: what it rests on. switch: what serves between it and the next lower point where it is not this one:
    (up to this size, the tuned point whose winner does, None for the default), ascending.
    """

    winner: Winner
    measurement_id: str
    switch: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class KernelIndex:
    """kernel, static (all fields), arch: whose. builds: by id; closures: of each, the kernel code that renders it.

    points: of one problem on one board the winner for the newest code first. spare: ids of builds.
    """

    kernel: str
    static: dict[str, Any]
    arch: str
    builds: Mapping[str, Build]
    closures: Mapping[str, frozenset[str]]
    points: Sequence[Point]
    spare: Sequence[str] = field(default=())


def index_id_of(static_key: str, arch: str) -> str:
    """What a line is filed under. A static key is of one kernel."""
    return digest({"v": ID_VERSION, "line": static_key, "arch": arch})


def encode(line: KernelIndex) -> str:
    """The line's body: the same line gives the same text."""
    of = canonical_fields_of(line.kernel)
    ids = sorted(line.builds)
    boards = sorted({p.winner.device for p in line.points}, key=lambda d: (d.name, d.num_sms, digest(filed_device(d))))
    at = {id: i for i, id in enumerate(ids)}
    where = {board: i for i, board in enumerate(boards)}
    points = []
    for p in line.points:
        w, key = p.winner, p.winner.problem.filed()
        asked = {k: v for k, v in key.fields.items() if k not in key.static}
        point = {
            "id": w.id, "runtime": key.runtime, "dynamic": key.dynamic, "fields": asked, "board": where[w.device],
            "build": at[w.build_id], "measurement": p.measurement_id, "how": w.provenance, "us": w.latency_us,
            "margin": w.margin, "reason": w.reason, "closure": w.closure, "stale": w.stale,
        }  # fmt: skip
        points.append(point | ({"switch": [list(s) for s in p.switch]} if p.switch else {}))
    body = {
        "v": VERSION, "kernel": filed_kernel(line.kernel), "arch": line.arch, "static": trimmed(line.static, of.static),
        "boards": [filed_device(b) for b in boards], "spare": [at[id] for id in line.spare],
        "builds": [_build_json(line.builds[id], line.closures.get(id, frozenset()), of.config) for id in ids],
        "points": points,
    }  # fmt: skip
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _build_json(b: Build, closures: frozenset[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": b.id, "config": trimmed(b.config, defaults), "source": b.source_sha, "closures": sorted(closures),
        "nvrtc": list(b.nvrtc), "options": list(b.options), "target": b.target, "key": b.key, "image": b.image_sha,
        "entries": {name: asdict(r) for name, r in b.entries.items()},
    }  # fmt: skip


def decode(body: str, kernel: str, static_key: str, arch: str) -> KernelIndex:
    """What `encode` wrote. Raises CorruptRecord unless it is of this kernel, these compiled-in fields and this arch."""
    try:
        stated = json.loads(body)
        if stated["v"] != VERSION:
            raise ValueError(f"it is of version {stated['v']}, and this kerngen reads {VERSION}")
        static = stated["static"]
        filed = filed_kernel(kernel)
        if (stated["kernel"], stated["arch"]) != (filed, arch) or static_key_as_filed(filed, static) != static_key:
            raise ValueError("it is of other compiled-in fields")
        return _line(stated, named_kernel(kernel), static, arch)
    except Exception as e:  # there is no telling what parsing a text that nobody wrote does
        raise CorruptRecord(f"the line of {kernel} on {arch} cannot be read ({type(e).__name__}: {e})") from e


def _line(stated: dict[str, Any], kernel: str, static: dict[str, Any], arch: str) -> KernelIndex:
    of, found = canonical_fields_of(kernel), find_arch(arch)
    every = filled(static, of.static)
    builds = [
        Build(
            b["id"], kernel, arch, b["target"], tuple(b["nvrtc"]), tuple(b["options"]), filled(b["config"], of.config),
            every, b["source"], "uncompiled" if b["image"] is None else "ok", b["key"], b["image"],
            {name: Resources(**r) for name, r in b["entries"].items()}, "",
        )
        for b in stated["builds"]
    ]  # fmt: skip
    for build in builds:
        require_build(build)
    boards = [_device(tuple(sorted(b.items()))) for b in stated["boards"]]
    require_indices("spare", stated["spare"], len(builds))
    points = []
    for p in stated["points"]:
        require_indices("build", [p["build"]], len(builds))
        require_indices("board", [p["board"]], len(boards))
        build = builds[p["build"]]
        key = ProblemKey(kernel, static, p["runtime"], p["dynamic"], static | p["fields"]).filled()
        winner = Winner(
            p["id"], kernel, key, build.config, found, boards[p["board"]], p["how"], p["us"], build.id, None,
            p["reason"], "", p["margin"], p["stale"], {}, p["closure"],
        )  # fmt: skip
        require_winner(winner)
        if not isinstance(p["measurement"], str):
            raise ValueError(f"its measurement is {p['measurement']!r:.80}")
        switch = tuple((int(upto), None if at is None else int(at)) for upto, at in p.get("switch", ()))
        points.append(Point(winner, p["measurement"], switch))
    closures = {b["id"]: frozenset(b["closures"]) for b in stated["builds"]}
    spare = [builds[i].id for i in stated["spare"]]
    return KernelIndex(kernel, every, arch, {b.id: b for b in builds}, closures, points, spare)


@lru_cache(maxsize=64)
def _device(stated: tuple[tuple[str, Any], ...]) -> Device:
    found = device_from(dict(stated))
    require_device(found)
    return found


def named(line: KernelIndex, where: str) -> KernelIndex:
    """`line` with the name of the database that it was read from in each winner's source."""
    return replace(line, points=[replace(p, winner=replace(p.winner, source=where)) for p in line.points])
