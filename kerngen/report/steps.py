"""What a model's step takes by the times that a database has, kernel by kernel, beside its floor."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kerngen.arch import Device, Target, find_arch
from kerngen.errors import KerngenError
from kerngen.report.data import Facts, Point
from kerngen.runtime.selection import default_selector
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db.read.ids import buckets_above, problem_key
from kerngen.workload.steps import STEPS, sequence
from kerngen.workload.workload import MODELS, Model, find_model


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel's launches within a step that the database has a time for. floor_us: of all of them."""

    kernel: str
    launches: int
    us: float
    floor_us: float
    provenance: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A step on a device. unknown: kernel -> its launches that no tuned point serves."""

    model: str
    step: str
    device: Device
    parts: tuple[Part, ...]
    unknown: dict[str, int]

    @property
    def us(self) -> float:
        return sum(p.us for p in self.parts)

    @property
    def floor_us(self) -> float:
        return sum(p.floor_us for p in self.parts)

    @property
    def num_known(self) -> int:
        return sum(p.launches for p in self.parts)


def shown_steps(facts: Facts, models: Sequence[str] = ()) -> list[Shown]:
    """The steps that a model is judged by (`workload.steps.STEPS`), for every device, as far as `facts` know them.

    models: names or folders; without any, for each device the released model that most of its winners are of. Raises
    UnknownName, UsageError or CheckpointError for a model that is none.
    """
    named = [find_model(name) for name in models]
    found: list[Shown] = []
    for device in facts.devices:
        points = [p for p in facts.points if p.place.device == device and p.place.cost is not None]
        if not points:
            continue
        index = _Index(points)
        if named:
            found += [s for model in named for s in _steps(model, device, index)]
        else:
            each = [list(_steps(find_model(name), device, index)) for name in MODELS]
            found += max(each, key=_known_kinds, default=[])
    return found


def _known_kinds(steps: Iterable[Shown]) -> int:
    """How many kernels of these steps have a time: many launches of one kernel tell less of which model it was."""
    return sum(len(s.parts) for s in steps)


class _Index:
    """Tuned points by cell, along their line, as a run looks them up."""

    def __init__(self, points: Iterable[Point]) -> None:
        self._lines: dict[str, list[tuple[int, Point]]] = {}
        for p in points:
            self._lines.setdefault(p.place.key.cell, []).append((p.place.key.dynamic or 0, p))
        for line in self._lines.values():
            line.sort(key=lambda at: at[0])

    def serving(self, kernel: str, problem: object) -> Point | None:
        """The point at or above `problem` on its line, or on that of a bucket above its own."""
        found = find_kernel(kernel)
        key = problem_key(found, problem)
        for runtime in buckets_above(found, problem):
            line = self._lines.get(replace(key, runtime=runtime).cell, [])
            at = bisect_left(line, key.dynamic or 0, key=lambda entry: entry[0])
            if at < len(line):
                return line[at][1]
        return None


def _steps(model: Model, device: Device, index: _Index) -> Iterable[Shown]:
    arch, default = find_arch(device.arch), default_selector(Target.of(device)).fuses

    def fuses(kernel: Kernel, problem: object) -> bool:
        point = index.serving(kernel.name, problem)
        return default(kernel, problem) if point is None else bool(kernel.config_type(**point.config).fused)

    for step, _ in STEPS:
        try:
            counts = Counter((x.kernel, x.problem) for x in sequence(model, step, arch, fuses))
        except KerngenError:  # a step that this model cannot take: it has no drafter, or not as many positions
            continue
        parts: dict[str, list[tuple[int, Point]]] = {}
        unknown: Counter[str] = Counter()
        for (kernel, problem), count in counts.items():
            if (point := index.serving(kernel, problem)) is None:
                unknown[kernel] += count
            else:
                parts.setdefault(kernel, []).append((count, point))
        if parts:
            made = [_part(kernel, rows) for kernel, rows in parts.items()]
            made.sort(key=lambda p: -p.us)
            yield Shown(model.name, step.name, device, tuple(made), dict(unknown))


def _part(kernel: str, rows: list[tuple[int, Point]]) -> Part:
    how = sorted({point.provenance for _, point in rows})
    return Part(kernel, sum(n for n, _ in rows), sum(n * p.us for n, p in rows),
                sum(n * (p.place.floor_us or 0.0) for n, p in rows), " and ".join(how))  # fmt: skip
