"""Writes prediction files (prediction_file.py) from a database: its predicted winners, without the losers."""

from __future__ import annotations

from collections.abc import Sequence

from kerngen.arch import Device
from kerngen.errors import DatabaseError
from kerngen.templates.kernel import filled, trimmed
from kerngen.tuning_db.store.store import Store
from kerngen.tuning_db.read.ids import canonical
from kerngen.tuning_db.read.canonical_fields import filed_device, filed_kernel, canonical_fields_of
from kerngen.tuning_db.read.values import Build, Winner
from kerngen.tuning_db.dist.export import Selection
from kerngen.tuning_db.dist.prediction_file import Cell, Family, PredictionFile, Plan, Point, rounded
from kerngen.tuning_db.dist.fields_text import SOURCE_DIGITS, stated


def predictions_of(store: Store, selection: Selection) -> list[PredictionFile]:
    """One for each kernel and board of the selected winners that were predicted. The same rows give the same.

    Raises DatabaseError where those of a kernel and board are not of one cost model and one NVRTC: tune anew.
    """
    groups: dict[tuple[str, Device], list[Winner]] = {}
    for w in store.winners():
        if w.provenance == "predicted" and not w.stale and selection.has(w):
            groups.setdefault((w.kernel, w.device), []).append(w)
    ordered = sorted(groups, key=lambda key: (key[0], canonical(filed_device(key[1]))))
    return [_predictions(store, kernel, device, groups[kernel, device]) for kernel, device in ordered]


def _predictions(store: Store, kernel: str, device: Device, winners: Sequence[Winner]) -> PredictionFile:
    dynamic = canonical_fields_of(kernel).dynamic
    families: dict[str, list[Winner]] = {}
    for w in winners:
        families.setdefault(canonical(w.problem.filed().static), []).append(w)
    builds = {id: b for key in {w.problem.static_key for w in winners} for id, b in store.builds(key).items()}
    models = _models(store, kernel, device, winners)
    nvrtcs = {builds[w.build_id].nvrtc for w in winners}
    if len(models) != 1 or len(nvrtcs) != 1:
        told = ", ".join(sorted(models) + sorted(f"NVRTC {a}.{b}" for a, b in nvrtcs))
        raise DatabaseError(f"the predictions of {kernel} for {device} are of more than one maker ({told})",
                            hint="predict them anew, in an empty database")  # fmt: skip
    return PredictionFile(
        filed_kernel(kernel), device.arch, device.name, filed_device(device), models.pop(), nvrtcs.pop(), dynamic,
        tuple(_family(families[key], builds, dynamic) for key in sorted(families)),
    )  # fmt: skip


def _models(store: Store, kernel: str, device: Device, winners: Sequence[Winner]) -> set[str]:
    """The cost models that gave the winners' times."""
    times = {(w.problem.id, w.build_id): w.latency_us for w in winners}
    found = set()
    for o in store.measurements(kernel, arch=device.arch, device=device, provenance="predicted", outcome="ok"):
        m = o.measurement
        if times.get((m.problem.id, m.build_id or "")) == m.p50_us:
            found.add(m.model)
    return found


def _family(winners: Sequence[Winner], builds: dict[str, Build], dynamic: str) -> Family:
    of = canonical_fields_of(winners[0].kernel)
    plans: dict[str, Plan] = {}
    for w in winners:
        build = builds[w.build_id]
        plans[w.build_id] = Plan(trimmed(build.config, of.config), build.source_sha[:SOURCE_DIGITS])
    ids = sorted(plans, key=lambda id: (canonical(plans[id].config), plans[id].source, id))
    at = {id: i for i, id in enumerate(ids)}
    cells: dict[str, list[Winner]] = {}
    for w in winners:
        cells.setdefault(canonical(w.problem.filed().runtime), []).append(w)
    told = []
    for members in cells.values():
        points = []
        for w in sorted(members, key=lambda w: w.problem.dynamic or 0):
            key = w.problem.filed()
            fields = stated(key.static, key.runtime, dynamic, key.dynamic)
            said = filled(fields, of.fields) == filled(key.fields, of.fields)
            points.append(Point(key.dynamic, rounded(w.latency_us), at[w.build_id], None if said else key.fields))
        told.append(Cell(members[0].problem.filed().runtime, tuple(points)))
    told.sort(key=lambda c: [(name, str(type(v)), v) for name, v in sorted(c.runtime.items())])
    return Family(winners[0].problem.filed().static, tuple(plans[id] for id in ids), tuple(told))
