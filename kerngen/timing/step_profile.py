"""Where a step's time is: its launches on this GPU, by how far each moves the step's end, beside what its bytes take.

Launches overlap, so that their own times add up to more than the step. What counts of one is by how much it ends later
than all that began before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kerngen.errors import DeviceError
from kerngen.templates import find_kernel

if TYPE_CHECKING:
    from kerngen.runtime.engine.ranks import Ranks
    from kerngen.runtime.executors.collectives import Collectives
    from kerngen.timing.step_graph import Called
    from kerngen.tuning_db import PerBoard, Source
    from kerngen.workload.steps import Step
    from kerngen.workload.workload import Model

REPLAYS = 8
IDLE = "(idle)"


@dataclass(frozen=True, slots=True)
class Span:
    """One launch: its entry point, and when it ran, in microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel in a step. launches: of its entry points, in all. moved_us: of the step, by which they move its end.
    each_us: how long one runs, on average. bytes, flops: what they must move and multiply at least. floor_us: the
    bytes, at the read rate.
    """

    kernel: str
    launches: float
    moved_us: float
    each_us: float
    bytes: int
    flops: int
    floor_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """step_us: what the rows' times add up to. rows: the largest first; `(idle)` is time in which nothing ran. density:
    of each layer whose prompts choose the keys that they read, the share of tiles that they read; of random keys.
    """

    step: Step
    step_us: float
    read_gbps: float
    rows: tuple[Row, ...]
    density: dict[int, float] = field(default_factory=dict)


def moved(spans: Iterable[Span]) -> dict[str, tuple[int, float, float]]:
    """Name -> launches, by how much they move the end in all, and how long they run in all; idle time by its name."""
    found: dict[str, tuple[int, float, float]] = {}

    def add(name: str, moved_us: float, ran_us: float) -> None:
        launches, us, ran = found.get(name, (0, 0.0, 0.0))
        found[name] = launches + 1, us + moved_us, ran + ran_us

    end: float | None = None
    for span in sorted(spans, key=lambda s: (s.start_us, s.end_us)):
        if end is not None and span.start_us > end:
            add(IDLE, span.start_us - end, span.start_us - end)
        begun = span.start_us if end is None else max(end, span.start_us)
        add(span.name, max(0.0, span.end_us - begun), span.end_us - span.start_us)
        end = span.end_us if end is None else max(end, span.end_us)
    return found


def rows_of(spans: Iterable[Span], replays: int, calls: Mapping[Called, int], read_gbps: float) -> tuple[Row, ...]:
    """The largest first. spans: of `replays` steps, which call `calls`; entry points that no kernel of those has, what
    torch launches say, have rows of their own names, and no floor.
    """
    owner = {e: name for name, _ in calls for body in find_kernel(name).spec.BODIES for e in body.args}
    least: dict[str, tuple[int, int]] = {}
    for (name, problem), count in calls.items():
        (moved_bytes, flops), cost = least.get(name, (0, 0)), find_kernel(name).cost(problem)
        least[name] = moved_bytes + count * cost.bytes, flops + count * cost.flops
    rows = [
        Row(name, launches / replays, us / replays, ran / launches, *least.get(name, (0, 0)),
            floor_us=least.get(name, (0, 0))[0] / read_gbps / 1e3)
        for name, (launches, us, ran) in moved(replace(s, name=owner.get(s.name, s.name)) for s in spans).items()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda r: -r.moved_us))


def profile_step(
    model: Model,
    step: Step,
    sources: Sequence[Source | PerBoard],
    *,
    seed: int = 0,
    collectives: Collectives | None = None,
) -> Profile:
    """`step` of `model` on this GPU, on generated weights. sources: databases in lookup order; none: defaults.
    collectives: of the rank whose part `model` is. Ranks replay the step as often as rank 0, which alone has rows.

    Raises UsageError for a step that the model cannot take, LaunchError, torch.OutOfMemoryError, and DeviceError where
    ranks do not reach each other's memory.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from kerngen.runtime.launcher import Launcher
    from kerngen.timing.measure import ceilings
    from kerngen.timing.step_graph import Stage, StepGraph

    read_gbps = ceilings().read_gbps
    stage = Stage(model, seed=seed, collectives=collectives)
    is_first = True
    if collectives is not None:
        is_first = collectives.world.rank == 0
        if not stage.executor.peers:  # what the step is said to call is not what it would call
            raise DeviceError("these GPUs do not reach each other's memory: a profile is of steps that sum over it",
                              hint="kerngen bench model --tensor-parallel times what NCCL sums")  # fmt: skip
        torch.manual_seed(seed)  # the same tokens on all ranks
    launcher = Launcher(sources, index=stage.launcher.index)
    held = StepGraph(stage, step)
    graph = held.capture(held.chosen_by(launcher), launcher.fuses)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    # The other ranks are there before rank 0 is: its profiler takes longer to begin.
    with profile(activities=[ProfilerActivity.CUDA]) if is_first else nullcontext() as seen:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    spans = [] if seen is None else [_span(e) for e in seen.events() if e.device_type.name == "CUDA"]
    rows = rows_of(spans, REPLAYS, held.calls_by(launcher.fuses), read_gbps)
    return Profile(step, sum(r.moved_us for r in rows), read_gbps, rows, held.density)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Profiled:
    """What a rank has seen, and on rank 0 the others."""

    profile: Profile
    ranks: Ranks | None = None


def profile_divided(
    model: Model, step: Step, size: int, device: str | None, *, db_url: str | None, untuned: bool, seed: int = 0
) -> Profile:
    """As `profile_step`, of rank 0 of the whole `model` divided among `size` ranks, on as many GPUs from `device` on;
    the others run the step along. db_url: as of `sources_for`; untuned: ask no database. Raises as `profile_step` and
    `open_divided` do.
    """
    from kerngen.runtime.backend import use_gpu
    from kerngen.runtime.engine.ranks import local_device
    from kerngen.runtime.session import open_divided
    from kerngen.system.leaving import leave_at_once

    use_gpu(local_device(device, 0))
    opens = partial(_profiled_part, model, step, db_url, untuned, seed)
    found = open_divided(size, model.target, opens, device)
    if found.ranks is not None:
        found.ranks.close()
        leave_at_once()  # seen on two H200s: rank 0 stayed in some library's clean-up
    return found.profile


def _profiled_part(
    model: Model, step: Step, db_url: str | None, untuned: bool, seed: int, collectives: Collectives,
    device: str | None, advance: Any,
) -> _Profiled:  # fmt: skip
    """On every rank."""
    from kerngen.runtime.backend import use_gpu
    from kerngen.tuning_db import sources_for

    use_gpu(device)
    mine, sources = model.divided(collectives.world), [] if untuned else sources_for(db_url)
    return _Profiled(profile_step(mine, step, sources, seed=seed, collectives=collectives))


def _span(event: Any) -> Span:
    """As torch's profiler has it, without the signature that it shows of C++ kernels."""
    name = str(event.name).replace("(anonymous namespace)::", "")
    name = name.removeprefix("void ").split("(")[0].split("<")[0]
    return Span(name, float(event.time_range.start), float(event.time_range.end))
