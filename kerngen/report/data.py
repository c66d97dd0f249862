"""Rows of databases, ready to be drawn: winners, trials, searches, and figures computed from them.

Microseconds are those of the database. Added to them are a problem's floor on its device and, for compiled trials,
the time that today's cost model predicts. A kernel that is not installed here has neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kerngen.arch import Device, Target
from kerngen.cost.predict import predict
from kerngen.errors import KerngenError
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Cost, Kernel
from kerngen.tuning_db.read.ids import ProblemKey

if TYPE_CHECKING:
    from kerngen.tuning_db import Build, Measurement, Observation, Store, Winner
    from kerngen.tuning_db.read.values import StepKey


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which part of the databases is drawn; None: all of it."""

    kernels: frozenset[str] | None = None
    arches: frozenset[str] | None = None
    device: str | None = None

    def takes(self, kernel: str, arch: str, device: Device) -> bool:
        return (
            (self.kernels is None or kernel in self.kernels)
            and (self.arches is None or arch in self.arches)
            and (self.device is None or device.name == self.device)
        )


@dataclass(frozen=True, slots=True)
class Place:
    """A problem on a device. cost: None where the kernel is not installed, or refuses these fields now.

    id, static_key: the problem's. The dynamic field is the one along which points are tuned.
    """

    kernel: str
    key: ProblemKey
    device: Device
    cost: Cost | None
    id: str
    static_key: str

    @property
    def where(self) -> str:
        """The problem in words: all fields but those that have their default."""
        filed = self.key.filed()
        along = {} if filed.dynamic is None else {self.key.dynamic_name: filed.dynamic}
        return pairs({**filed.static, **filed.runtime, **along})

    @property
    def floor_us(self) -> float | None:
        """The least that it takes at the rates that the device's profile states: memory's or the tensor cores'."""
        if self.cost is None:
            return None
        return max(self.cost.bytes / self.device.mem_gbps / 1e3, self.cost.flops / self.device.tensor_tflops / 1e6)


@dataclass(frozen=True, slots=True)
class Point:
    """A winner with a time. default_us: the default configuration's at the same point, where that was tried."""

    place: Place
    us: float
    default_us: float | None
    provenance: str
    config: Mapping[str, Any]
    run: str
    is_default: bool
    stale: bool
    store: str

    @property
    def share(self) -> float | None:
        """Of its time, what the floor would take."""
        return None if self.place.floor_us is None else self.place.floor_us / self.us


@dataclass(frozen=True, slots=True)
class Trial:
    """An observation. us: None where it failed. predicted_us: by today's model, of what compiled.

    is_chosen: a winner rests on this very build at this very point.
    """

    place: Place
    row: Measurement
    predicted_us: float | None
    is_chosen: bool

    @property
    def us(self) -> float | None:
        return self.row.p50_us if self.row.outcome == "ok" else None


@dataclass(frozen=True, slots=True)
class Search:
    """The trials of one search, in the order of time, without finals."""

    place: Place
    trials: tuple[Trial, ...]

    @property
    def best_us(self) -> float | None:
        return min((t.us for t in self.trials if t.us is not None), default=None)


@dataclass
class Facts:
    """All that a page shows, of rows that match their digests. revoked: ids, with the reasons. steps: by id, those that
    configurations were exchanged in. num_carried: winners that have no time, and are no points.
    """

    stores: tuple[str, ...] = ()
    points: list[Point] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    revoked: dict[str, str] = field(default_factory=dict)
    steps: dict[str, StepKey] = field(default_factory=dict)
    num_builds: int = 0
    num_carried: int = 0
    nvrtc: tuple[str, ...] = ()

    @cached_property
    def searches(self) -> list[Search]:
        found: dict[tuple[str, str, Device, str], list[Trial]] = {}
        for t in self.trials:
            if t.row.stage == "trial" and t.row.provenance != "carried":
                which = str(t.row.tags.get("search", t.row.run))
                found.setdefault((which, t.place.id, t.place.device, t.row.provenance), []).append(t)
        return [Search(rows[0].place, tuple(rows)) for rows in found.values()]

    @property
    def devices(self) -> list[Device]:
        """In the order of the architectures, then by name."""
        found = {p.place.device for p in self.points} | {t.place.device for t in self.trials}
        return sorted(found, key=lambda d: (int(d.arch.removeprefix("sm")), d.name, d.num_sms, d.source))

    @property
    def kernels(self) -> list[str]:
        return sorted({p.place.kernel for p in self.points} | {t.place.kernel for t in self.trials})


def gather(stores: Sequence[Store], wanted: Wanted | None = None) -> Facts:
    """What `stores` hold. Where two have a winner of the same point, or the same trial, the first one's counts.

    Raises DatabaseError where one cannot be read; rows that were altered are left out with a warning.
    """
    wanted = wanted or Wanted()
    facts = Facts(tuple(store.where for store in stores))
    places = _Places()
    winners: dict[str, tuple[Winner, Store]] = {}
    rows: dict[str, tuple[Observation, Store]] = {}
    for store in stores:
        for w in store.winners():
            if wanted.takes(w.kernel, w.arch.name, w.device):
                winners.setdefault(w.id, (w, store))
        for o in store.measurements():
            m = o.measurement
            if wanted.takes(m.problem.kernel, m.arch, m.device):
                rows.setdefault(o.id, (o, store))
        facts.revoked |= store.revoked()
        facts.steps |= store.steps()
    placed = {
        id: (places.of(o.measurement.problem, o.measurement.device), o.measurement) for id, (o, _) in rows.items()
    }
    builds: dict[str, Build] = {}
    for store, static_key in dict.fromkeys((rows[id][1], place.static_key) for id, (place, _) in placed.items()):
        builds |= store.builds(static_key)
    runs = {(place.id, place.device, m.build_id): m.run for place, m in placed.values() if m.outcome == "ok"}
    chosen = set()
    for w, store in winners.values():
        place = places.of(w.problem, w.device)
        rests_on = place.id, place.device, w.build_id
        chosen.add(rests_on)
        if w.latency_us is None:
            facts.num_carried += 1
            continue
        facts.points.append(
            Point(place, w.latency_us, w.why.get("default_us"), w.provenance, w.config, runs.get(rests_on, ""),
                  bool(w.why.get("is_default")), w.stale, store.where)
        )  # fmt: skip
    used = {}
    for place, m in placed.values():
        if (build := builds.get(m.build_id or "")) is not None:
            used[build.id] = build
        is_chosen = (place.id, place.device, m.build_id) in chosen
        facts.trials.append(Trial(place, m, places.predicted_us(place, m, build), is_chosen))
    facts.num_builds = len(used)
    facts.nvrtc = tuple(sorted({".".join(map(str, b.nvrtc)) for b in used.values() if any(b.nvrtc)}))
    facts.points.sort(key=lambda p: _order(p.place))
    facts.trials.sort(key=lambda t: (_order(t.place), t.row.at))
    return facts


def _order(place: Place) -> tuple[Any, ...]:
    """By kernel, device and compiled-in fields, then along the line of tuned points."""
    key = place.key
    return (
        place.kernel,
        f"{place.device.arch:>6} {place.device}",
        in_order(str(key.static)),
        in_order(str(key.runtime)),
        key.dynamic or 0,
    )


def in_order(text: str) -> list[str | int]:
    """To sort texts by, numbers in them as numbers: 1, 2, 16."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def pairs(values: Mapping[str, Any]) -> str:
    """`n=4096 k=4096`."""
    return " ".join(f"{k}={v}" for k, v in values.items())


class _Places:
    """Places by problem and device, each made once, with what the installed kernel says of them."""

    def __init__(self) -> None:
        self._installed = set(kernel_names())
        self._made: dict[tuple[str, Device], Place] = {}
        self._problems: dict[str, Any] = {}  # by the problem's id

    def of(self, key: ProblemKey, device: Device) -> Place:
        ids = key.ids()
        found = self._made.get((ids.problem, device))
        if found is None:
            problem = self._problems[ids.problem] = self._problem(key)
            cost = None if problem is None else find_kernel(key.kernel).cost(problem)
            found = Place(key.kernel, key, device, cost, ids.problem, ids.static_key)
            self._made[ids.problem, device] = found
        return found

    def predicted_us(self, place: Place, m: Measurement, build: Build | None) -> float | None:
        """Today's prediction of what was measured; None where the kernel has changed too much to say."""
        problem = self._problems.get(place.id)
        if problem is None or build is None or m.provenance != "measured" or m.outcome != "ok":
            return None
        kernel = find_kernel(place.kernel)
        try:
            config = kernel.config_type(**m.config)
            return predict(kernel, problem, config, Target.of(place.device), build.entries).latency_us
        except (KerngenError, ArithmeticError, KeyError, TypeError):  # of another version of it
            return None

    def _problem(self, key: ProblemKey) -> Any | None:
        if key.kernel not in self._installed:
            return None
        kernel: Kernel = find_kernel(key.kernel)
        try:
            return kernel.problem_type(**key.fields)
        except (KerngenError, TypeError):  # fields that it had, or refuses by now
            return None
