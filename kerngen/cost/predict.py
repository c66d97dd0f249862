"""How long a kernel will take on a GPU that is not here: rates, dependences, occupancy and waves.

Input is what is known without running: the compiled kernel's registers, spills and shared memory, its
launches, what a configuration moves and executes (Traffic), and a Device profile. The answer is deterministic, and
says what binds. It ranks configurations; it is no measurement, and every record made from it carries MODEL.
docs/prediction.md has the formulas, and the origin of every constant; tools/fit.py fits and scores them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, log2, prod, sqrt
from pathlib import Path
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.compiler.compile import Resources
from kerngen.templates.kernel import Kernel, Launch, Traffic

# Goes into every predicted record; raise it when a formula or a constant changes, or what specs count of a kernel.
MODEL = "roofline-4"

L2_PORT_BYTES = 64.0  # between an SM and L2, a clock
SMEM_BYTES_PER_CLOCK = 128.0  # per SM: 32 banks of 4 bytes
LANES_PER_CLOCK = 128  # four schedulers issue an instruction for 32 threads each
BYTES_IN_FLIGHT_PER_THREAD = 32  # assumed where the spec does not say: two 16-byte loads
REGISTERS_LEAST = 16
LEAST_BUSY = 0.5  # of its time, a resource that is said to bind: else a block's own chain of waits does


@dataclass(frozen=True, slots=True)
class Constants:
    """What no datasheet says. Shares are of a board's own rates, clocks are of its SMs: with those they carry over.

    Fitted to what an H200 recorded and is not held out (tools/fit.py, FITTED), but for gap_clocks, measured
    there apart: in a CUDA graph 2.5 MB stream in 2.61 us where launches follow each other plainly, in 1.29 us with
    programmatic dependent launch.
    """

    block_tensor_share: float = 0.755  # of the tensor rate that wgmma, and what succeeds it, reaches
    roles_tensor_share: float = 0.88  # the same where warpgroups have roles
    issue_share: float = 0.629  # of the schedulers' slots that instructions of every kind fill
    warp_issue: float = 0.717  # instructions that a warp by itself issues a clock
    exposed: float = 0.317  # of the shorter of moving and executing, the part that the longer does not hide
    roles_exposed: float = 0.2  # the same where warpgroups have roles
    roles_norm: float = 3.0  # how little tensor cores, schedulers and shared memory are in each other's way there
    latency: float = 0.441  # of the arch's memory latency under load, what a load takes that waits for nobody
    start_clocks: float = 497.0  # until a block in the place of one that ended is at work
    join_clocks: float = 294.0  # until warps that split a tile have met
    launch_clocks: float = 1020.0  # from a predecessor's end to the first load, and from the last store to the end
    fill_clocks: float = 2690.0  # more where all SMs take part: on a logarithmic scale of its blocks
    after_clocks: float = 4890.0  # more where it reads what another launch of the same call has just made
    gap_clocks: float = 2570.0  # more without programmatic dependent launch
    spill: float = 0.798  # more time, as a share, where as much is spilled as the registers hold


CONSTANTS = Constants()


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was measured of a way to run a kernel and is not understood: the predicted time of a launch whose Traffic
    says so times `scale`, and `offset_us` microseconds more, on `arches`. source: what it was fitted to.
    """

    scale: float
    offset_us: float
    arches: tuple[str, ...]
    source: str


def _read_fitted() -> dict[tuple[str, str], Fitted]:
    """By kernel and Traffic.fit."""
    kernels = tomllib.loads((Path(__file__).parent / "fitted.toml").read_text())
    return {
        (kernel, fit): Fitted(f["scale"], f["offset_us"], tuple(f["arches"]), f["source"])
        for kernel, fits in kernels.items()
        for fit, f in fits.items()
    }


FITTED = _read_fitted()


def fitted_us(kernel: str, t: Traffic, arch: Arch, us: float) -> float:
    """What the formulas say of a launch of `kernel`, by its fitted constants, if there are any."""
    if (fitted := FITTED.get((kernel, t.fit))) is None or arch.name not in fitted.arches:
        return us
    return max(us * fitted.scale + fitted.offset_us, 0.0)


_Timed = tuple[Launch, Traffic, Resources | None, int | None, bool]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many blocks fit on one SM, and what stops the next: warps, blocks, registers or shared memory."""

    blocks_per_sm: int
    warps_per_block: int
    limit: str


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Resident blocks per SM for a block of `threads` with `registers` each and `smem_bytes` in all.

    The arithmetic of CUDA's cuda_occupancy.h: registers are given to warps in units of 256 and warps to four
    sub-partitions, shared memory in units of 256 bytes (128 since sm80) plus what the system reserves.
    """
    warps = ceil(threads / 32)
    limits = {"warps": arch.max_warps_per_sm // warps, "blocks": arch.max_blocks_per_sm}
    registers_per_warp = _round_up(max(registers, 1) * 32, 256)
    warps_by_registers = 4 * ((arch.regs_per_sm // 4) // registers_per_warp)
    limits["registers"] = warps_by_registers // warps
    if smem := smem_bytes + arch.reserved_smem_bytes:
        limits["shared memory"] = arch.smem_per_sm // _round_up(smem, 128 if arch.number >= 80 else 256)
    limit = min(limits, key=lambda k: limits[k])
    return Occupancy(limits[limit], warps, limit)


@dataclass(frozen=True, slots=True)
class LaunchPrediction:
    """One launch: its time, how it fills the GPU, what binds: memory, l2, smem, tensor, issue, latency (a block's chain
    of waits) or launch.
    """

    entry: str
    latency_us: float
    bound: str
    blocks: int
    blocks_per_sm: int
    occupancy_limit: str
    waves: float
    registers: int
    smem_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of all launches of one configuration. `bytes` and `flops` are the least that must be done."""

    latency_us: float
    launches: tuple[LaunchPrediction, ...]
    bytes: int
    flops: int
    model: str = MODEL

    @property
    def gbps(self) -> float:
        return self.bytes / self.latency_us / 1e3

    @property
    def tflops(self) -> float:
        return self.flops / self.latency_us / 1e6

    @property
    def bound(self) -> str:
        return max(self.launches, key=lambda x: x.latency_us).bound

    def explain(self) -> str:
        """One line: what binds, how full the GPU is, and the rates that follow."""
        main = max(self.launches, key=lambda x: x.latency_us)
        return (
            f"{main.bound}-bound, {main.blocks_per_sm} blocks/SM (by {main.occupancy_limit}), "
            f"{main.waves:.2f} waves, {self.gbps:.0f} GB/s, {self.tflops:.1f} TFLOP/s"
        )


class Predictor:
    """The cost model on one problem: what depends on that alone is asked once, and launches that are equal in all that
    counts are timed once, whichever configurations they belong to.
    """

    def __init__(self, kernel: Kernel, problem: Any, target: Target, constants: Constants = CONSTANTS) -> None:
        self._kernel, self._problem, self._target, self._constants = kernel, problem, target, constants
        self._cost = kernel.cost(problem)
        self._timed: dict[_Timed, tuple[float, str, Occupancy]] = {}

    def work(self, config: Any) -> tuple[tuple[Launch, Traffic], ...]:
        """The launches of `config`, and what each moves and executes."""
        kernel, problem, target, cost = self._kernel, self._problem, self._target, self._cost
        launches = kernel.launches(problem, config, target)
        workspace = kernel.workspace_bytes(problem, config, target)
        traffic = kernel.traffic(problem, config, target) or ()
        found = []
        for i, launch in enumerate(launches):
            if i < len(traffic):
                found.append((launch, traffic[i]))
                continue
            first = _main_traffic(config, target.arch, cost.bytes, cost.flops, launch) if i == 0 else Traffic(0, 0)
            found.append((launch, _with_workspace(first, workspace, target.device.l2_bytes)))
        return tuple(found)

    def predict(
        self, config: Any, resources: Mapping[str, Resources] | None = None, *, registers: int | None = None
    ) -> Prediction:
        """See `predict`."""
        target = self._target
        predictions = []
        for i, (launch, moved) in enumerate(self.work(config)):
            given = resources.get(launch.entry) if resources is not None else None
            key = launch, moved, given, registers, i > 0
            if key not in self._timed:
                self._timed[key] = launch_us(launch, moved, target, given, registers, i > 0, self._constants)
            us, bound, fit = self._timed[key]
            us = fitted_us(self._kernel.name, moved, target.arch, us)
            threads, blocks = prod(launch.block), prod(launch.grid)
            spill = given.spill_store_bytes + given.spill_load_bytes if given else 0
            predictions.append(
                LaunchPrediction(
                    launch.entry, us, bound, blocks, fit.blocks_per_sm, fit.limit,
                    blocks / (target.device.num_sms * max(fit.blocks_per_sm, 1)),
                    given.registers if given else registers or REGISTERS_LEAST,
                    launch.smem_bytes + (given.static_smem_bytes if given else 0),
                    spill * threads * blocks,
                )
            )  # fmt: skip
        total = sum(p.latency_us for p in predictions)
        return Prediction(total, tuple(predictions), self._cost.bytes, self._cost.flops)


def predict(
    kernel: Kernel,
    problem: Any,
    config: Any,
    target: Target,
    resources: Mapping[str, Resources] | None = None,
    *,
    registers: int | None = None,
) -> Prediction:
    """Predicted time of `config` on `target`.

    resources: entry point -> what the compiled kernel takes. Without them this is a pre-prediction:
    `registers` per thread are assumed, or, where that is None too, as few as there can be, which makes the
    answer a lower bound of the prediction that the compiled kernel will get.
    """
    return Predictor(kernel, problem, target).predict(config, resources, registers=registers)


def _main_traffic(config: Any, arch: Arch, num_bytes: int, flops: int, launch: Launch) -> Traffic:
    """Where the spec does not say: every byte moves once, and shared memory holds the copies under way."""
    in_flight = prod(launch.block) * BYTES_IN_FLIGHT_PER_THREAD
    stages = getattr(config, "num_stages", 1)
    if arch.has_cp_async and stages > 1:
        in_flight = max(in_flight, launch.smem_bytes * (stages - 1) // stages)
    return Traffic(num_bytes, flops, bytes_in_flight=in_flight)


def _with_workspace(t: Traffic, workspace: int, l2_bytes: int) -> Traffic:
    """Adds one pass over the workspace: through L2 where it stays there, else through memory."""
    through_memory = workspace if workspace > l2_bytes // 2 else 0
    l2 = (t.dram_bytes if t.l2_bytes is None else t.l2_bytes) + workspace
    return replace(t, dram_bytes=t.dram_bytes + through_memory, l2_bytes=l2)


def launch_us(
    launch: Launch,
    t: Traffic,
    target: Target,
    given: Resources | None,
    registers: int | None,
    follows: bool,
    k: Constants,
) -> tuple[float, str, Occupancy]:
    """(microseconds of one launch, what binds, how it fills an SM). See `predict` for given and registers.

    follows: whether it is not the first of its configuration.
    """
    regs = given.registers if given else registers or REGISTERS_LEAST
    smem = launch.smem_bytes + (given.static_smem_bytes if given else 0)
    fit = occupancy(target.arch, prod(launch.block), regs, smem)
    times, between = _times(launch, t, target, max(fit.blocks_per_sm, 1), k)
    moving = max(times["memory"], times["l2"])
    executing = max(times["latency"], _together(times["smem"], times["tensor"], times["issue"], norm=_norm(t, k)))
    exposed = k.roles_exposed if t.tensor == "roles" else k.exposed
    busy = max(moving, executing) + exposed * min(moving, executing)
    if given is not None:
        busy *= 1 + k.spill * min(1.0, (given.spill_store_bytes + given.spill_load_bytes) / (4 * regs))
    filled = log2(1 + min(prod(launch.grid), t.units or inf)) / log2(1 + target.device.num_sms)
    begin = k.launch_clocks + k.fill_clocks * filled + follows * k.after_clocks + (not launch.pdl) * k.gap_clocks
    overhead = 0.0 if t.hidden else begin / target.device.clock_mhz
    busiest = max((n for n in times if n != "latency"), key=lambda n: times[n])
    bound = busiest if times[busiest] >= LEAST_BUSY * times["latency"] else "latency"
    return overhead + busy + between, bound if busy + between > overhead else "launch", fit


def _times(launch: Launch, t: Traffic, target: Target, resident: int, k: Constants) -> tuple[dict[str, float], float]:
    """(what each resource would take by itself, what the ends of blocks take beside), microseconds.

    A unit of work is taken to be like any other. The busiest SM has ceil(units / SMs) of them, and the busiest block
    ceil(units / blocks), one after another, in as many rounds as `resident` blocks an SM make of the grid.
    """
    arch, device = target.arch, target.device
    clock, warps = device.clock_mhz, ceil(prod(launch.block) / 32)  # clock: cycles a us
    units = t.units or prod(launch.grid)
    blocks = min(prod(launch.grid), units)
    on_sm, in_block, rounds = (
        ceil(units / device.num_sms),
        ceil(units / blocks),
        ceil(blocks / device.num_sms / resident),
    )
    l2_bytes = t.dram_bytes if t.l2_bytes is None else t.l2_bytes
    in_flight = t.bytes_in_flight or prod(launch.block) * BYTES_IN_FLIGHT_PER_THREAD
    latency = arch.memory_latency_us * k.latency
    # Of a unit, on an SM of its own: by all its schedulers, and by the warps of a block, which may be too few for them.
    tensor_share = {"mma": arch.mma_sync_share, "roles": k.roles_tensor_share}.get(t.tensor, k.block_tensor_share)
    tensor = t.flops / units / (device.tensor_tflops * 1e6 / device.num_sms * tensor_share)
    issue = t.cuda_ops / units / (LANES_PER_CLOCK * clock * k.issue_share)
    smem = (t.smem_bytes or 0) / units / (SMEM_BYTES_PER_CLOCK * clock)
    joining = t.join_bytes / units / (SMEM_BYTES_PER_CLOCK * clock)
    norm = _norm(t, k)
    alone = _together(
        smem, tensor * max(1.0, 4 / warps), issue * max(1.0, 4 / (warps * k.warp_issue)), t.clocks / clock, norm=norm
    )
    # Little's law: what is on its way at any moment, over how long it takes; all of it at once takes that long too.
    arriving = max(1.0, max(t.dram_bytes, l2_bytes) / units / in_flight) * latency
    loop = _together(arriving, alone, norm=norm) if t.copies else arriving + alone
    waiting = t.waits * latency
    times = {
        "memory": t.dram_bytes
        / (device.mem_gbps * 1e3 * t.memory_share * (arch.copy_share if t.copies else arch.load_share)),
        "l2": max(on_sm * l2_bytes / units / L2_PORT_BYTES, l2_bytes / device.num_sms / arch.l2_bytes_per_clock)
        / clock,
        "smem": on_sm * (smem + joining),
        "tensor": on_sm * tensor,
        "issue": on_sm * issue,
        "latency": rounds * in_block * (loop + t.joins * k.join_clocks / clock + joining),
    }
    # Where a block ends and another begins its SM has nothing to do, but for the blocks beside it.
    return times, waiting + (rounds - 1) * (k.start_clocks / clock + waiting) / resident


def _norm(t: Traffic, k: Constants) -> float:
    return k.roles_norm if t.tensor == "roles" else 2.0


def _together(*times: float, norm: float = 2.0) -> float:
    """What does not wait for each other but shares the schedulers' attention: more than the longest, less than all."""
    return sqrt(sum(t * t for t in times)) if norm == 2.0 else float(sum(t**norm for t in times) ** (1 / norm))
