"""How long a kernel will take on a GPU that is not here: a roofline with occupancy, latency and waves.

Input is what is known without running: the compiled kernel's registers, spills and shared memory, its
launches, the bytes and FLOPs that the spec counts, and a Device profile. The answer is deterministic, and
says what binds. It ranks configurations; it is no measurement, and every record made from it carries MODEL.
docs/prediction.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.compile import Resources
from kerngen.templates.kernel import Kernel, Launch, Traffic

MODEL = "roofline-2"  # goes into every predicted record; raise it when a formula or a constant changes

# Shares of a datasheet rate that good kernels reach. A plain read loop on an H200 reaches 4.44 of 4.8 TB/s.
MEMORY_SHARE = 0.92
TENSOR_SHARE = 0.95
L2_SHARE = 0.45
L2_BYTES_PER_CLOCK = 64.0  # per SM
SMEM_BYTES_PER_CLOCK = 128.0  # per SM: 32 banks of 4 bytes
LANES_PER_CLOCK = 128  # four schedulers issue an instruction for 32 threads each
# Of what does not bind, the part that is not hidden where one block has the SM to itself; n blocks hide n times more.
EXPOSED_EXECUTION, EXPOSED_TRANSFER = 0.4, 0.25
# A launch in a CUDA graph: an H200 streams 2.5 MB in 2.61 us plain and 1.29 us with programmatic dependent
# launch, where the bytes alone take 0.56 us. The ramp, one memory latency, is counted beside these.
LAUNCH_US = 1.4
LAUNCH_PDL_US = 0.2
SPILL_FACTOR = 2.0  # the report says how much is spilled, not how deep in which loop
STEP_US = 0.2  # a barrier of the main loop: filling the pipes anew, waiting for the slowest warp
GRID_SYNC_US = 1.0  # the last block of a split waits for the others' partial results
SINGLE_PASS = 4  # a block that moves at most so many times what it has in flight, writes included
BYTES_IN_FLIGHT_PER_THREAD = 32  # assumed where the spec does not say: two 16-byte loads
REGISTERS_LEAST = 16


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

    The arithmetic of the CUDA occupancy calculator: registers are given to warps in units of 256 and warps to
    four sub-partitions, shared memory in units of 256 bytes (128 since sm80) plus what the system reserves.
    """
    warps = ceil(threads / 32)
    limits = {"warps": arch.max_warps_per_sm // warps, "blocks": arch.max_blocks_per_sm}
    registers_per_warp = _round_up(max(registers, 1) * 32, 256)
    warps_by_registers = 4 * ((arch.regs_per_sm // 4) // registers_per_warp)
    limits["registers"] = warps_by_registers // _round_up(warps, 4)
    if smem := smem_bytes + arch.reserved_smem_bytes:
        limits["shared memory"] = arch.smem_per_sm // _round_up(smem, 128 if arch.number >= 80 else 256)
    limit = min(limits, key=lambda k: limits[k])
    return Occupancy(limits[limit], warps, limit)


@dataclass(frozen=True, slots=True)
class LaunchPrediction:
    """One launch: its time, how it fills the GPU, what binds: memory, l2, smem, tensor, issue or launch."""

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


class Outlook:
    """The cost model on one problem: what depends on that alone is asked once, and launches that are equal in all that
    counts are timed once, whichever configurations they belong to.
    """

    def __init__(self, kernel: Kernel, problem: Any, target: Target) -> None:
        self._kernel, self._problem, self._target = kernel, problem, target
        self._cost = kernel.cost(problem)
        self._timed: dict[tuple[Launch, Traffic, Resources | None, int | None], tuple[float, str, Occupancy]] = {}

    def predict(
        self, config: Any, resources: Mapping[str, Resources] | None = None, *, registers: int | None = None
    ) -> Prediction:
        """See `predict`."""
        kernel, problem, target, cost = self._kernel, self._problem, self._target, self._cost
        launches = kernel.launches(problem, config, target)
        workspace = kernel.workspace_bytes(problem, config, target)
        traffic = kernel.traffic(problem, config, target)
        predictions = []
        for i, launch in enumerate(launches):
            given = resources.get(launch.entry) if resources is not None else None
            moved = (
                traffic[i] if traffic is not None and i < len(traffic) else
                _main_traffic(config, target.arch, cost.bytes, cost.flops, launch) if i == 0 else Traffic(0, 0)
            )  # fmt: skip
            if traffic is None or i >= len(traffic):
                moved = _with_workspace(moved, workspace, target.device.l2_bytes)
            key = launch, moved, given, registers
            if key not in self._timed:
                self._timed[key] = _launch_us(launch, moved, target, given, registers)
            us, bound, fit = self._timed[key]
            if workspace and len(launches) == 1:
                us += GRID_SYNC_US
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
        return Prediction(sum(p.latency_us for p in predictions), tuple(predictions), cost.bytes, cost.flops)


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
    return Outlook(kernel, problem, target).predict(config, resources, registers=registers)


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


def _launch_us(
    launch: Launch, t: Traffic, target: Target, given: Resources | None, registers: int | None
) -> tuple[float, str, Occupancy]:
    smem = launch.smem_bytes + (given.static_smem_bytes if given else 0)
    regs = given.registers if given else registers or REGISTERS_LEAST
    fit = occupancy(target.arch, prod(launch.block), regs, smem)
    overhead = LAUNCH_PDL_US if launch.pdl else LAUNCH_US
    if given is not None:  # spilled bytes go out to L1 and back for every thread, at least once
        t = _with_spills(t, given, prod(launch.block) * prod(launch.grid))
    # A scheduler with room for n blocks can do what one with room for fewer does: more room never hurts.
    most = max(1, min(fit.blocks_per_sm, ceil(prod(launch.grid) / target.device.num_sms)))
    best, bound = min(_busy_us(launch, t, target, n) for n in range(1, most + 1))
    if given is not None and given.spill_store_bytes + given.spill_load_bytes:
        best *= SPILL_FACTOR
    return overhead + best, bound if best > overhead else "launch", fit


def _with_spills(t: Traffic, given: Resources, threads: int) -> Traffic:
    spilled = (given.spill_store_bytes + given.spill_load_bytes) * threads
    if not spilled:
        return t
    l2 = (t.dram_bytes if t.l2_bytes is None else t.l2_bytes) + spilled
    return replace(t, l2_bytes=l2, smem_bytes=(t.smem_bytes or 0) + spilled)


def _busy_us(launch: Launch, t: Traffic, target: Target, blocks_per_sm: int) -> tuple[float, str]:
    """Time from the first block's start to the last one's end, in waves of up to blocks_per_sm on each SM."""
    blocks = prod(launch.grid)
    per_wave = target.device.num_sms * blocks_per_sm
    full, rest = divmod(blocks, per_wave)
    total, bound = 0.0, "memory"
    for count, size in ((full, per_wave), (1, rest)):
        if count and size:
            us, bound_here = _wave_us(size, blocks, launch, t, target)
            total, bound = total + count * us, bound_here if total == 0 else bound
    return total, bound


def _wave_us(size: int, blocks: int, launch: Launch, t: Traffic, target: Target) -> tuple[float, str]:
    """Time of one wave of `size` of the grid's `blocks`; each block is taken to do the same work."""
    arch, device = target.arch, target.device
    share, per_sm = size / blocks, ceil(size / device.num_sms)
    clock = device.clock_mhz  # cycles per us
    in_flight = t.bytes_in_flight or prod(launch.block) * BYTES_IN_FLIGHT_PER_THREAD
    each = max(1, ceil(max(t.dram_bytes, t.l2_bytes or 0) / blocks))
    in_flight = each if each <= SINGLE_PASS * in_flight else in_flight  # no loop: all of it is under way at once
    l2_bytes = t.dram_bytes if t.l2_bytes is None else t.l2_bytes
    # Little's law: what is on its way at any moment, over how long it takes. Bytes per us.
    latency = arch.memory_latency_us
    memory_rate = min(device.mem_gbps * 1e3 * MEMORY_SHARE, size * in_flight / latency)
    l2_rate = L2_BYTES_PER_CLOCK * L2_SHARE * clock  # per SM
    warps = per_sm * ceil(prod(launch.block) / 32)
    tensor_share = TENSOR_SHARE * arch.mma_sync_share
    tensor_rate = device.tensor_tflops * 1e6 * tensor_share / device.num_sms
    transfer = {
        "memory": t.dram_bytes * share / memory_rate,
        "l2": per_sm * l2_bytes / blocks / l2_rate,
    }
    execution = {
        "smem": per_sm * (t.smem_bytes or 0) / blocks / (SMEM_BYTES_PER_CLOCK * clock),
        # Four sub-partitions have a tensor core and a scheduler each: fewer warps leave some idle.
        "tensor": per_sm * t.flops / blocks / (tensor_rate * min(1.0, warps / 4)),
        "issue": per_sm * t.cuda_ops / blocks / (LANES_PER_CLOCK * clock * min(1.0, warps / 4)),
    }
    moving = max(transfer.values())
    busiest = max(execution.values())
    executing = busiest + (sum(execution.values()) - busiest) * EXPOSED_EXECUTION / per_sm
    total = max(moving, executing) + min(moving, executing) * EXPOSED_TRANSFER / per_sm + latency
    total += t.steps * STEP_US
    times = transfer if moving >= executing else execution
    return total, max(times, key=lambda k: times[k])
