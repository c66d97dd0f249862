"""Which configuration serves a problem on a device, from several stores; and, on a miss, what came closest.

Who is asked, in this order; the answer names who spoke:
    1. an override store, whatever it has      2. this very device, measured
    3. the same arch, measured on the device with the nearest SM count
    4. the same arch, predicted (this device first, then the nearest SM count)
    5. as 1 to 4, but tuned on an older source of the kernel: the configuration alone, to be compiled anew
None of them: None, and the caller uses the default configuration.

Tuned points lie along the dynamic field (tokens, KV length). A point serves itself and what lies between it and the
next lower one; nothing is served below the lowest or above the highest. Everything is checked again before it is
served: build and image must match their digests, the configuration must still be valid, nothing revoked counts. What
fails is skipped with a warning that names it, and the next in order is asked. Nothing that a database holds raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerngen.arch import Target
from kerngen.compile import Cubin
from kerngen.errors import CorruptRecord, DatabaseError, TuningMiss
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning_db.engine import is_absent
from kerngen.tuning_db.freshness import is_current
from kerngen.tuning_db.records import ProblemKey, Winner, problem_key
from kerngen.tuning_db.store import Store, default_path

log = logging.getLogger(__name__)

PREBUILT = Path(__file__).resolve().parent / "prebuilt"


def default_stores() -> list[Store]:
    """What a run looks in: $KERNGEN_DB_OVERRIDE, the user's database, then the prebuilt ones. All read-only.

    One that is not there is left out; one that cannot be opened is left out with a warning.
    """
    stores: list[Store] = []
    places: list[tuple[str, dict[str, Any]]] = []
    if override := os.environ.get("KERNGEN_DB_OVERRIDE"):
        places.append((override, {"name": "override", "override": True}))
    user = default_path()
    if "://" in user or not is_absent(Path(user)):
        places.append((user, {"name": "user"}))
    places += [(str(p), {"name": f"prebuilt {p.stem}", "sealed": True}) for p in sorted(PREBUILT.glob("*.sqlite"))]
    for place, options in places:
        try:
            stores.append(Store.open(place, read_only=True, **options))
        except DatabaseError as e:
            log.warning("%s; looking on without it", e.message)
    return stores


def stores_for(url: str | None) -> list[Store]:
    """What `--db` names, read-only, or `default_stores()` where it names nothing. Raises DatabaseError."""
    return default_stores() if url is None else [Store.open(url, read_only=True)]


@dataclass(frozen=True, slots=True)
class _Entry:
    store: Store
    winner: Winner
    how: str


def lookup(
    stores: Sequence[Store],
    kernel: Kernel,
    problem: Any,
    target: Target,
    *,
    strict: bool = False,
) -> Winner | None:
    """The configuration to run `problem` with on `target`, with its cubin if that was kept and is current.

    None, or with `strict` TuningMiss with the nearest entries, where nothing serves it.
    """
    key = problem_key(kernel, problem)
    entries = list(_entries(stores, key, target))
    revoked = _revoked(stores) if entries else set()
    older: list[tuple[_Entry, Winner]] = []
    for entry in entries:
        w = entry.winner
        if w.build_id in revoked:
            log.warning("%s: winner %s for %s is revoked; skipped", entry.store.where, w.id[:16], kernel.name)
            continue
        answer = _serve(entry, kernel, problem, target)
        if answer is None:
            continue
        if not answer.stale:
            return answer
        older.append((entry, answer))
    if older:
        return older[0][1]
    if strict:
        raise TuningMiss(miss_report(stores, kernel, problem, target), hint=_fill(kernel, target))
    return None


def _fill(kernel: Kernel, target: Target) -> str:
    return f"fill it: kerngen tune --arch {target.arch} --model NAME --kernel {kernel.name}"


def _entries(stores: Sequence[Store], key: ProblemKey, target: Target) -> Iterator[_Entry]:
    """The entries that may serve `key`, in the order of the module's docstring, at most one a device and store."""
    arch, device = target.arch, target.device
    found: list[tuple[Store, list[Winner]]] = []
    for store in stores:
        try:
            winners = store.winners(key.kernel, arch=arch, cell=key.cell)
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
            continue
        found.append((store, [w for w in winners if w.device.arch == arch.name]))

    def exact(w: Winner) -> bool:
        return w.device.name == device.name and w.device.num_sms == device.num_sms

    def distance(w: Winner) -> tuple[bool, int, str]:
        return (not exact(w), abs(w.device.num_sms - device.num_sms), w.device.name)

    def pick(winners: list[Winner], provenance: str, same_device: bool | None) -> list[Winner]:
        wanted = [w for w in winners if w.provenance == provenance and same_device in (None, exact(w))]
        boards: dict[tuple[str, int], list[Winner]] = {}
        for w in wanted:
            boards.setdefault((w.device.name, w.device.num_sms), []).append(w)
        points = [p for p in (point_for(key.dynamic, b) for b in boards.values()) if p is not None]
        return sorted(points, key=distance)

    steps: tuple[tuple[str, bool | None, str], ...] = (
        ("measured", True, "exact device"),
        ("measured", False, "measured on {device}, the same arch"),
        ("predicted", None, "predicted for {device}"),
    )
    for overriding in (True, False):
        scope = [(s, w) for s, w in found if s.override == overriding]
        for provenance, same_device, how in steps:
            for store, winners in scope:
                for w in pick(winners, provenance, same_device):
                    yield _Entry(store, w, how.format(device=w.device))


def point_for(dynamic: int | None, points: Sequence[Winner]) -> Winner | None:
    """The tuned point that serves `dynamic`: the lowest at or above it, unless it lies outside all points."""
    if dynamic is None:
        return next((w for w in points if w.problem.dynamic is None), None)
    tuned = sorted((w for w in points if w.problem.dynamic is not None), key=lambda w: w.problem.dynamic or 0)
    if not tuned or dynamic < (tuned[0].problem.dynamic or 0):
        return None
    return next((w for w in tuned if (w.problem.dynamic or 0) >= dynamic), None)


def _revoked(stores: Sequence[Store]) -> set[str]:
    revoked: set[str] = set()
    for store in stores:
        try:
            revoked |= store.revoked().keys()
        except DatabaseError as e:
            log.warning("%s; looking on without it", e)
    return revoked


def _serve(entry: _Entry, kernel: Kernel, problem: Any, target: Target) -> Winner | None:
    """The entry's winner as an answer to `problem`; None, with a warning that names it, if it must not be served.

    Nothing is asked of a configuration before the digest that covers it was checked.
    """
    store, w = entry.store, entry.winner
    here = f"{store.where}: winner {w.id[:16]} for {kernel.name}"
    cubin: Cubin | None = None
    try:
        build = store.build(w.build_id)
        config = kernel.config_type(**build.config)
        if (why := kernel.why_invalid(problem, config, target)) is not None:
            log.warning("%s cannot run %s: %s; skipped", here, describe(problem), why)
            return None
        stale = not is_current(kernel, problem, build)
        if not stale:
            image = store.image(build)
            cubin = image if isinstance(image, Cubin) else None
    except DatabaseError as e:
        kind = "" if isinstance(e, CorruptRecord) else "unreadable: "
        log.warning("%s%s; winner %s for %s skipped", kind, e, w.id[:16], kernel.name)
        return None
    except Exception as e:  # whatever an older Config's values do to today's spec
        log.warning("%s cannot be served (%s: %s); skipped", here, type(e).__name__, e)
        return None
    how = entry.how + (", on an older source" if stale else "")
    return replace(w, config=build.config, cubin=cubin, stale=stale, source=f"{store.name}: {how}")


def miss_report(stores: Sequence[Store], kernel: Kernel, problem: Any, target: Target, *, nearest: int = 3) -> str:
    """Why nothing serves `problem`: where it was looked for, and the nearest entries with the fields that differ."""
    key = problem_key(kernel, problem)
    wanted = _flat(key, kernel) | {"arch": target.arch.name, "device": target.device.name}
    counts, near = [], []
    for store in stores:
        try:
            winners = store.winners(kernel.name)
        except DatabaseError as e:
            counts.append(f"{store.name} (unreadable: {e.message})")
            continue
        counts.append(f"{store.name} ({len(winners)} of {kernel.name})")
        for w in winners:
            has = _flat(w.problem, kernel) | {"arch": w.arch.name, "device": w.device.name}
            differing = [n for n in sorted(wanted.keys() | has.keys()) if wanted.get(n) != has.get(n)]
            near.append((_distance(differing, wanted, has), w.id, store.name, differing, has))
    near.sort(key=lambda n: n[:2])
    lines = [f"no record for {kernel.name}{describe(problem)} on {target}",
             f"  looked in: {', '.join(counts) or 'no database'}"]  # fmt: skip
    for _, id, name, differing, has in near[:nearest]:
        pairs = ", ".join(f"{n} {has.get(n)} there, {wanted.get(n)} asked" for n in differing)
        lines.append(f"  near: {id[:12]} in {name}: {pairs or 'the same, but it could not be served'}")
    return "\n".join(lines)


def _flat(key: ProblemKey, kernel: Kernel) -> dict[str, Any]:
    flat = {**key.static, **key.runtime}
    return flat if key.dynamic is None else flat | {kernel.problem_type.DYNAMIC: key.dynamic}


def _distance(differing: list[str], wanted: dict[str, Any], has: dict[str, Any]) -> tuple[int, float]:
    """How many fields differ, then how far apart their numbers are, in octaves."""
    octaves = 0.0
    for name in differing:
        a, b = wanted.get(name), has.get(name)
        if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0:
            octaves += abs(a.bit_length() - b.bit_length()) + 0.01
        else:
            octaves += 8.0
    return len(differing), octaves
