"""Timeline of a step: when the CTAs of each launch begin, wait, go on and end.

    python -m tools.timeline gemma-4-31b --phase verify --tokens 4

`kerngen bench profile` says by how much each launch moves a step's end. This says why: clocks go into the rendered text
of every kernel, at its entries' first and last lines and around pdl_wait, and the step is replayed as one graph. A row
is all launches of one kind behind another kind, medians, in microseconds from when the last block of the launch before
ended: when its blocks began (the median one, the last one; below 0 they were resident while that one ran), when they
had done all that needs no wait ("ready", the last warp of each), when the first of them went on, and when they ended,
the median one and the last. So a row's last figure is what the launch adds to the step, "on" of it is the way from one
launch to the next, and a "ready" above 0 is a launch that came too late for its own prologue.

Clocks cost a little: some registers, and 512 bytes of shared memory a block; how much of the step is said. A kernel
that has no room for them goes without, and its row with it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from kerngen.cli.keeping_options import keeping_options
from kerngen.cli.step_options import step_of, step_options
from kerngen.errors import CompileError, KerngenError, LaunchError
from kerngen.runtime.config import Keeping
from kerngen.templates import find_kernel
from kerngen.templates.kernel import describe
from kerngen.workload.steps import Ratio, Step, sequence
from kerngen.workload.workload import Model, find_model

if TYPE_CHECKING:
    import numpy as np

    from kerngen.compiler.compile import Cubin
    from kerngen.runtime.launcher import Function

REPLAYS = 5
FIELDS = 4  # of a block: begun, ready, on, ended
_ENTRY = re.compile(r'extern "C" __global__([^{]*)\{')
_WAIT = re.compile(r"DEVICE void pdl_wait\(\) \{\n((?: [^\n]*\n)+)\}")
_CLOCKS = """
struct Clocks {
    unsigned long long ready, on;  // of one warp, when it waited first; 0 where it does not wait
};
__device__ __forceinline__ Clocks& clocks_of_warp() {
    __shared__ Clocks of_warps[32];
    return of_warps[threadIdx.x / 32];
}
__device__ __forceinline__ unsigned long long clock_now() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now) : : "memory");
    return now;
}
"""
_OF_ENTRY = """
extern "C" {{
__device__ unsigned long long clocks_{name}[{launches}][{blocks}][{fields}];
__device__ unsigned launches_{name}[{blocks}];
}}
struct Clocked_{name} {{
    unsigned launch;
    unsigned long long begun;
    __device__ __forceinline__ static int block() {{
        return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    }}
    __device__ __forceinline__ Clocked_{name}() {{
        if (threadIdx.x % 32) return;
        launch = *(volatile unsigned*)&launches_{name}[block()];
        clocks_of_warp() = {{0, 0}};
        begun = clock_now();
    }}
    __device__ __forceinline__ ~Clocked_{name}() {{
        if (threadIdx.x % 32) return;
        const unsigned long long ended = clock_now();
        unsigned long long* const to = clocks_{name}[launch % {launches}][block()];
        const Clocks own = clocks_of_warp();
        atomicMax(to, ~begun);
        if (own.on) atomicMax(to + 1, own.ready), atomicMax(to + 2, ~own.on);
        atomicMax(to + 3, ended);
        if (threadIdx.x == 0) launches_{name}[block()] = launch + 1;
    }}
}};
"""


def with_clocks(text: str, entries: Mapping[str, tuple[int, int]]) -> str:
    """The rendered `text` with clocks. entries: of each entry that is launched, how often a step launches it, and its
    blocks. Raises CompileError where the text has no place for them.
    """
    text, waits = _WAIT.subn(_wait_with_clocks, text)
    found = set()

    def begun(entry: re.Match[str]) -> str:
        names = [n for n in re.findall(r"(\w+)\(", entry[1]) if n in entries]
        found.update(names)
        return entry[0] + "".join(f" Clocked_{n} clocked;" for n in names)

    text = _ENTRY.sub(begun, text)
    if found != set(entries) or waits != ("pdl_wait" in text):
        raise CompileError(f"no place for clocks: of the entries {sorted(entries)} it has {sorted(found)}, and "
                           f"{waits} definitions of pdl_wait")  # fmt: skip
    head = "".join(
        _OF_ENTRY.format(name=name, launches=launches, blocks=blocks, fields=FIELDS)
        for name, (launches, blocks) in entries.items()
    )
    return _CLOCKS + head + text


def _wait_with_clocks(found: re.Match[str]) -> str:
    before, after = (
        f"if (threadIdx.x % 32 == 0 && !clocks_of_warp().{which}) clocks_of_warp().{which} = clock_now();"
        for which in ("ready", "on")
    )
    return f"DEVICE void pdl_wait() {{\n    {before}\n{found[1]}    {after}\n}}"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of one launch, in nanoseconds of the GPU's clock: when the median block began, and the last; when the last warp
    of the median one was ready to wait, and the first warp went on (None: none waits); when the median block ended,
    and the last.
    """

    begun: int
    last_begun: int
    ready: int | None
    on: int | None
    ended: int
    last_ended: int


@dataclass(frozen=True, slots=True)
class Row:
    """Launches of one kind behind another, `before`: how many, and medians in microseconds from the end of that one."""

    entry: str
    kernel: str
    problem: Any
    before: str  # its entry
    count: int
    begun_us: float
    last_begun_us: float
    ready_us: float | None
    on_us: float | None
    ended_us: float
    last_ended_us: float


Call = tuple[str, str, Any]  # of a launch: its entry, kernel and problem


def blocks_of(stamps: np.ndarray[Any, Any]) -> Blocks | None:
    """stamps: uint64 [blocks, FIELDS], as the device leaves them. None where a block has none."""
    import numpy as np

    if not stamps.size or not stamps[:, 0].all() or not stamps[:, 3].all():
        return None
    waits = stamps[:, 2] > 0
    begun, ready, on = ~stamps[:, 0], stamps[waits, 1], ~stamps[waits, 2]
    origin = int(begun.min())

    def after(values: np.ndarray[Any, Any], what: Any) -> int:
        return origin + round(float(what(values.astype(np.int64) - origin)))  # a float has not all digits of the clock

    return Blocks(
        after(begun, np.median), after(begun, np.max),
        after(ready, np.median) if waits.any() else None, after(on, np.min) if waits.any() else None,
        after(stamps[:, 3], np.median), after(stamps[:, 3], np.max),
    )  # fmt: skip


def rows_of(calls: Sequence[Call], replays: Sequence[Sequence[Blocks | None]]) -> list[Row]:
    """By kind, in the order of the step. replays: of each, what came of every call. What follows a call without clocks
    is left out.
    """
    met: dict[tuple[Call, Call], list[tuple[Blocks, int]]] = {}
    for found in replays:
        for (call, own), (call_before, one_before) in pairwise(reversed(list(zip(calls, found, strict=True)))):
            if one_before is not None and own is not None:
                met.setdefault((call, call_before), []).append((own, one_before.last_ended))
    rows = []
    for (call, before), seen in reversed(met.items()):
        us = [_median_us([(getattr(b, f.name), end) for b, end in seen]) for f in fields(Blocks)]
        rows.append(Row(*call, before[0], len(seen) // len(replays), *us))  # type: ignore[arg-type]  # None where a Row has it too
    return rows


def _median_us(times: Sequence[tuple[int | None, int]]) -> float | None:
    """Of nanoseconds from another moment on; None where there is none."""
    known = [(at - origin) / 1e3 for at, origin in times if at is not None]
    return median(known) if known else None


class _Stamps:
    """What the blocks of one entry leave in the memory of its module, `launches` of `blocks` blocks."""

    def __init__(self, function: Function, entry: str, launches: int, blocks: int) -> None:
        self._entry, self._shape = entry, (launches, blocks, FIELDS)
        self._clocks, self._counts = (function.address(f"{what}_{entry}") for what in ("clocks", "launches"))

    def clear(self) -> None:
        """Before a replay, whose first launch is number 0 then."""
        from cupy_backends.cuda.api import runtime

        runtime.memset(self._clocks, 0, 8 * prod(self._shape))
        runtime.memset(self._counts, 0, 4 * self._shape[1])

    def read(self) -> np.ndarray[Any, Any]:
        """Raises LaunchError where a block was not launched as often as the step has it."""
        import numpy as np
        from cupy_backends.cuda.api import runtime

        found, counts = np.zeros(self._shape, np.uint64), np.zeros(self._shape[1], np.uint32)
        for array, address in ((found, self._clocks), (counts, self._counts)):
            runtime.memcpy(array.ctypes.data, address, array.nbytes, runtime.memcpyDeviceToHost)
        if (counts != self._shape[0]).any():
            raise LaunchError(f"{self._entry}: a step launches it {self._shape[0]} times, and its blocks counted "
                              f"{counts.min()} to {counts.max()}")  # fmt: skip
        return found


def timeline(model: Model, step: Step, *, seed: int = 0) -> tuple[list[Row], Ratio, list[str]]:
    """`step` of `model` by default configurations on this GPU: the rows, its time with clocks over that without, and
    what goes without clocks, with the reason. Raises UsageError for a step that the model cannot take.
    """
    import torch

    from kerngen.compiler.cache import CachedCompiler
    from kerngen.compiler.render import render
    from kerngen.runtime.launcher import Function as Loaded
    from kerngen.runtime.launcher import Launcher
    from kerngen.runtime.selection import default_selector
    from kerngen.timing.step_graph import Stage, StepGraph

    stage = Stage(model, seed=seed)
    held, target, index = StepGraph(stage, step), stage.target, stage.launcher.index
    chosen = dict(held.chosen_by(Launcher(index=index)))
    launches = {called: find_kernel(called[0]).launches(called[1], f.config, target) for called, f in chosen.items()}
    num_launches = held.calls
    sizes = {called: {x.entry: (num_launches[called], prod(x.grid)) for x in of} for called, of in launches.items()}
    clocked: dict[Any, Function] = {}
    stamps: dict[tuple[Any, str], _Stamps] = {}
    building: dict[Any, Future[Cubin]] = {}
    without: dict[Any, KerngenError] = {}
    with CachedCompiler(os.cpu_count() or 1) as compiler:
        for called, function in chosen.items():
            try:
                text = with_clocks(render(function.kernel, called[1], function.config, target), sizes[called])
                building[called] = compiler.submit(text, target.arch)
            except KerngenError as e:
                without[called] = e
        for called, made in building.items():
            plain = chosen[called]
            try:
                own = Loaded(plain.kernel, plain.config, target, made.result().image, "with clocks", index)
                own.plan(called[1])
            except KerngenError as e:
                without[called] = e
                continue
            clocked[called] = own
            stamps |= {(called, entry): _Stamps(own, entry, *size) for entry, size in sizes[called].items()}
    graph = held.capture(chosen | clocked)
    cost = held.compare(held.capture(chosen), graph)
    calls: list[Call] = []
    places: list[tuple[tuple[Any, str], int]] = []  # of each call: whose stamps, and which launch
    counts: dict[Any, int] = {}
    for launched in sequence(model, step, target.arch, default_selector(target).fuses):
        called = launched.kernel, launched.problem
        number = counts[called] = counts.get(called, -1) + 1
        for x in launches[called]:
            calls.append((x.entry, *called))
            places.append(((called, x.entry), number))
    replays = []
    for _ in range(REPLAYS):
        for one in stamps.values():
            one.clear()
        graph.replay()
        torch.cuda.synchronize()
        read = {key: one.read() for key, one in stamps.items()}
        replays.append([blocks_of(read[key][number]) if key in read else None for key, number in places])
    reasons = [f"{name} {describe(p)}: {e.message.splitlines()[0]}" for (name, p), e in without.items()]
    return rows_of(calls, replays), cost, reasons


def table(rows: Sequence[Row]) -> list[str]:
    """A line each, in the order of the step, behind one that names the columns."""

    def shown(us: float | None) -> str:
        return "       -" if us is None else f"{us:8.2f}"

    lines = [f"{'':40} launches    begin     last    ready       on     done  last done"]
    for r in rows:
        figures = (r.begun_us, r.last_begun_us, r.ready_us, r.on_us, r.ended_us, r.last_ended_us)
        what = f"{r.entry} behind {r.before}"
        lines.append(f"{what:40} {r.count:8d} " + " ".join(shown(us) for us in figures) + f"  {describe(r.problem)}")
    return lines


@click.command()
@click.argument("name", metavar="MODEL")
@step_options
@keeping_options
@click.option("--seed", default=0, show_default=True)
def main(name: str, phase: str, batch: int, context: int, tokens: int | None, kept: Keeping, seed: int) -> None:
    """Show when the blocks of each launch of a step of MODEL begin, wait, go on and end, on this GPU."""
    from kerngen.runtime.backend import use_gpu

    model, step = find_model(name, kept=kept), step_of(phase, batch, context, tokens)
    use_gpu(None)
    rows, cost, without = timeline(model, step, seed=seed)
    ms = cost.base_us / 1e3
    click.echo(
        f"{model.name}, {step.name}: {ms:.3f} ms, with clocks {cost.median:.4f} of it; us from the last block before"
    )
    for line in table(rows):
        click.echo(line)
    for line in without:
        click.echo(f"without clocks: {line}", err=True)


if __name__ == "__main__":
    from kerngen.cli import run_command

    sys.exit(run_command(main, "python -m tools.timeline"))
