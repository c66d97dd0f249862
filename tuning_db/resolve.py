"""Where winners come from, one answer to one problem, and on a miss what came closest. bound.py has the order."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kerngen.arch import Target
from kerngen.errors import DatabaseError, TuningMiss
from kerngen.templates.kernel import Kernel, describe
from kerngen.tuning_db.bound import Bound
from kerngen.tuning_db.engine import PREBUILT, is_absent
from kerngen.tuning_db.records import ProblemKey, Winner, problem_key
from kerngen.tuning_db.store import Store, default_path

log = logging.getLogger(__name__)


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
    if (answer := Bound(stores, kernel, problem, target).answer(problem)) is not None:
        return answer
    if strict:
        raise TuningMiss(miss_report(stores, kernel, problem, target), hint=_fill(kernel, target))
    return None


def _fill(kernel: Kernel, target: Target) -> str:
    return f"fill it: kerngen tune --arch {target.arch} --model NAME --kernel {kernel.name}"


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
