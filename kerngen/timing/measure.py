"""On the GPU: is a configuration right, how long does it take, and what could this GPU do at best?

Timing replays a CUDA graph that walks over several copies of the inputs, so that what a kernel streams comes from
memory and not from L2, and the host is out of the picture. A share of the limit is a share of `ceilings()`, measured
in the same run.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch

from kerngen.arch import Arch, Target, find_arch
from kerngen.compiler.cache import CompileCache
from kerngen.compiler.render import render
from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.launcher import Function, Launcher, probe_device, shares_sms
from kerngen.templates.kernel import Case, Kernel, Tolerance, spread

COMPARED = 1 << 26  # elements that are compared at once
# Before a case is timed: behind milliseconds on the tensor cores (a baseline's, the ceilings') an H200 runs some
# kernels slower by an eighth, for a tenth of a second, at the clock that it had before (docs/experiments.md).
REST_S = 0.3


@dataclass(frozen=True, slots=True)
class CheckResult:
    """error_abs, error_rel: the largest over all outputs; error_rel is |out - ref| / max |ref| of that output.

    message: empty if ok, else the case, output, first bad index and both values.
    """

    ok: bool
    error_abs: float
    error_rel: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds for all launches of the kernel together, over `samples` graph replays of `launches` calls each."""

    p50_us: float
    p10_us: float
    p90_us: float
    min_us: float
    samples: int
    launches: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """This GPU in this run: read and copy GB/s (bytes read; read + written), bf16 or fp16 matmul TFLOP/s."""

    read_gbps: float
    copy_gbps: float
    matmul_tflops: float
    environment: dict[str, Any] = field(default_factory=dict)


def load(
    kernel: Kernel,
    problem: Any,
    config: Any,
    arch: Arch | None = None,
    cache: CompileCache | None = None,
    source: str | None = None,
) -> Function:
    """Compile (through the cache) and load. `arch`: whose body to run; one that is not this GPU's own goes as PTX
    through the driver's JIT, which is how older bodies are checked on a newer GPU.
    """
    target, cache, index = target_here(arch), cache or CompileCache(), torch.cuda.current_device()
    text = source or render(kernel, problem, config, target)
    if target.arch.name == target.device.arch:
        image = cache.get_or_compile(text, target.arch).image
    else:
        image = cache.get_or_compile_ptx(text, target.arch).image
    return Function(kernel, config, target, image, index=index)


def target_here(arch: Arch | None = None) -> Target:
    """This GPU, as a board of `arch` where that is not its own: whose body to run on it."""
    device = probe_device()
    return Target(arch or find_arch(device.arch), device)


def check_function(function: Function, case: Case) -> CheckResult:
    """Run `case` once and compare every output with the fp32 reference, elementwise under the kernel's tolerance."""
    kernel = function.kernel
    torch.manual_seed(case.seed)
    inputs = kernel.cases.inputs(case, torch.device("cuda"))
    expected = kernel.reference.expected(case.problem, inputs)
    function(case.problem, **inputs)
    torch.cuda.synchronize()
    return compare(kernel, case, inputs, expected)


def check_case(kernel: Kernel, case: Case, config: Any = None, arch: Arch | None = None) -> CheckResult:
    """As check_function, for the default or a given config, of this GPU's body or an older one's.

    The default of an older arch is its usual board's: what `kerngen compile --cases --ptx` built elsewhere.
    """
    here = target_here()
    target = here if arch is None or arch == here.arch else Target.of(arch)
    config = config or kernel.default_config(case.problem, target)
    return check_function(load(kernel, case.problem, config, arch), case)


def compare(kernel: Kernel, case: Case, outputs: dict[str, Any], expected: dict[str, Any]) -> CheckResult:
    """Compare outputs with `expected` (fp32, same names, tensors or tuples) under kernel.tolerance_of."""
    worst_abs = worst_rel = 0.0
    message = ""
    given = {shown: value for _, shown, value in spread(outputs)}
    for name, shown, its in spread(expected):
        tolerance = kernel.tolerance_of(case.problem, name)
        got, want = (kernel.values_of(case.problem, name, x) for x in (given[shown], its))
        got = got.reshape(want.shape)
        largest, scale, num_bad, first = _differences(got.reshape(-1), want.reshape(-1), tolerance)
        worst_abs = max(worst_abs, largest)
        worst_rel = max(worst_rel, largest / scale if scale > 0 else largest)
        if first is not None and not message:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), want.shape))
            message = (
                f"{kernel.name} {case.name} seed={case.seed}: {shown}{list(index)} is {float(got[index]):.6g}, "
                f"reference {float(want[index]):.6g}; {num_bad} of {want.numel()} outside "
                f"{tolerance.atol:g} + {tolerance.rtol:g} |ref|; largest error {largest:.4g}"
            )
    return CheckResult(not message, worst_abs, worst_rel, message)


def _differences(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> tuple[float, float, int, int | None]:
    """Of two vectors, a part at a time: K and V of a million keys, in fp64, fit nowhere.

    Returns the largest finite error, the largest finite |want|, how many are outside, and where the first one is.
    """
    largest = scale = 0.0
    num_bad, first = 0, None
    for start in range(0, want.numel(), COMPARED):
        part = got[start : start + COMPARED].double()
        ref = want[start : start + COMPARED].to(part.device).double()
        error = (part - ref).abs()
        bad = ~(error <= tolerance.atol + tolerance.rtol * ref.abs())
        bad &= ~(part.isnan() & ref.isnan())  # a reference may ask for NaN: poison that must stay
        bad &= ~(part == ref)  # infinities
        largest = max(largest, float(error.nan_to_num(0.0, 0.0, 0.0).max()))
        scale = max(scale, float(ref.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        count = int(bad.sum())
        if count and first is None:
            first = start + int(bad.nonzero()[0])
        num_bad += count
    return largest, scale, num_bad, first


def timing_sets(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """`inputs`, and as many copies of them as keep L2 from serving what a kernel reads; fewer where memory ends."""
    return _copies(inputs, working_set=4 * max(probe_device().l2_bytes, 2**24), most=64)


def _copies(inputs: dict[str, Any], working_set: int, most: int) -> list[dict[str, Any]]:
    distinct = {id(v): v for *_, v in spread(inputs) if isinstance(v, torch.Tensor)}
    size = sum(v.numel() * v.element_size() for v in distinct.values())
    count = min(most, max(2, math.ceil(working_set / max(size, 1))))
    free = torch.cuda.mem_get_info()[0]
    count = max(1, min(count, int(free * 0.8 // max(size, 1))))
    return [inputs] + [fresh(inputs) for _ in range(count - 1)]


def fresh(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies of the tensors; what was one tensor under two names, as an output in place, is one again."""
    copies: dict[int, torch.Tensor] = {}
    return {name: _copied(value, copies) for name, value in inputs.items()}


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    # No function within `fresh`: one that calls itself is a cycle, which keeps the copies until Python looks for such.
    if isinstance(value, tuple | list):
        return tuple(_copied(v, copies) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in copies:
        # Heads of larger pages lie as far apart in the copy.
        copies[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        copies[id(value)].copy_(value)
    return copies[id(value)]


def time_function(
    function: Function,
    case: Case,
    *,
    sets: Sequence[dict[str, Any]] | None = None,
    samples: int = 30,
    target_ms: float = 2.0,
) -> Timing:
    """Time `case` with inputs that come from memory: CUDA-graph replay over rotating copies, medians.

    sets: the case's inputs and their copies (`timing_sets`), if they were made already.
    """
    return time_calls(calls_of(function, case, sets), samples=samples, target_ms=target_ms)


def calls_of(
    function: Function, case: Case, sets: Sequence[dict[str, Any]] | None = None
) -> list[Callable[[], object]]:
    """What launches `case` on each of `sets` as a forward does, for `captured`. sets: as time_function."""
    if sets is None:
        sets = timing_sets(function.kernel.cases.inputs(case, torch.device("cuda")))
    # Nothing writes the inputs in between, so that all launches may overlap as in a forward; and all are on one stream.
    alone = not shares_sms()
    return [partial(function.run, case.problem, s, in_forward=True, alone=alone) for s in sets]


def time_calls(calls: Sequence[Callable[[], object]], *, samples: int = 30, target_ms: float = 2.0) -> Timing:
    """Time callables that do the same work on different buffers, one CUDA graph holding them all in turn.

    The graph repeats the round until a replay takes about `target_ms`, so that a launch's own time is what counts.
    """
    return time_in_turn([captured(calls, target_ms)], samples=samples)[0]


@dataclass(frozen=True, slots=True)
class Captured:
    """A CUDA graph of `launches` calls, the stream that it was captured on, and the calls: a graph keeps none of the
    tensors that it reads.
    """

    graph: torch.cuda.CUDAGraph
    launches: int
    stream: torch.cuda.Stream
    calls: Sequence[Callable[[], object]]


def captured(calls: Sequence[Callable[[], object]], target_ms: float = 2.0) -> Captured:
    """As many rounds of `calls` as take about target_ms, as one graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the inputs were made on another stream
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls[: max(1, min(4, len(calls)))]:
            call()
        end.record()
        torch.cuda.synchronize()
        each_ms = max(start.elapsed_time(end) / max(1, min(4, len(calls))), 1e-3)
        count = max(1, min(256, round(target_ms / each_ms)))
        count = math.ceil(count / len(calls)) * len(calls) if count > len(calls) // 2 else count
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                calls[i % len(calls)]()
    return Captured(graph, count, stream, calls)


def time_in_turn(contenders: Sequence[Captured], *, samples: int = 30) -> list[Timing]:
    """Each one's time, of replays in turn: whoever is first in one round is last in the next.

    What runs for milliseconds on the tensor cores makes the GPU lower its clock, so that of two the one that is timed
    for longer, or later, would seem slower: in turn all meet the same clocks.
    """
    times: list[list[float]] = [[] for _ in contenders]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for sample in range(-3, samples):  # three to warm up
        order = list(enumerate(contenders))
        for i, one in order if sample % 2 == 0 else reversed(order):
            with torch.cuda.stream(one.stream):
                start.record()
                one.graph.replay()
                end.record()
            end.synchronize()
            if sample >= 0:
                times[i].append(start.elapsed_time(end) * 1e3 / one.launches)
    return [_timing(sorted(of), one.launches) for of, one in zip(times, contenders, strict=True)]


def _timing(times: list[float], launches: int) -> Timing:
    """times: sorted."""
    return Timing(
        p50_us=statistics.median(times),
        p10_us=times[len(times) // 10],
        p90_us=times[len(times) * 9 // 10],
        min_us=times[0],
        samples=len(times),
        launches=launches,
    )


@cache
def ceilings() -> Ceilings:
    """Measure this GPU's limits once a process: a read (max over int64), a copy, an 8192^3 matmul. About 0.3 s."""
    probe_device()
    dtype = torch.bfloat16 if target_here().arch.has_bf16 else torch.float16
    size = min(2**33, int(torch.cuda.mem_get_info()[0] // 4))
    words = torch.randint(0, 1 << 30, (size // 8,), device="cuda")
    read = time_calls([lambda: words.max()], samples=10, target_ms=4)
    half = words.numel() // 2
    # A kernel, not cudaMemcpy: in a graph the latter goes to a copy engine, which is slower than the SMs.
    copy = time_calls([lambda: torch.bitwise_not(words[half : 2 * half], out=words[:half])], samples=10, target_ms=4)
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    c = torch.empty_like(a)
    matmul = time_calls([lambda: torch.mm(a, b, out=c)], samples=10, target_ms=8)
    return Ceilings(
        read_gbps=size / read.p50_us / 1e3,
        copy_gbps=2 * half * 8 / copy.p50_us / 1e3,
        matmul_tflops=2 * n**3 / matmul.p50_us / 1e6,
        environment=environment(),
    )


def environment() -> dict[str, Any]:
    """What may change a measurement: GPU, driver, torch, CUDA, timing method."""
    device = probe_device()
    found: dict[str, Any] = {
        "gpu": device.name, "torch": torch.__version__, "cuda": torch.version.cuda,
        "timer": "cuda events over graph replays", "l2": "rotating buffers", "launch": "graph",
    }  # fmt: skip
    try:
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception as e:  # NVML is a convenience: its absence is recorded, not hidden
        found["driver"] = f"unknown ({type(e).__name__})"
    return found


def bench_row(launcher: Launcher, kernel: Kernel, case: Case) -> dict[str, Any]:
    """Time `case` with what `launcher` runs, and its baselines, in turn: latency, rates, shares of measured ceilings.

    What fails is a row with an `error`.
    """
    limit = ceilings()
    row: dict[str, Any] = {"kernel": kernel.name, "case": case.name}
    try:
        function = launcher.function(kernel, case.problem)
        row |= {"config": asdict(function.config), "source": function.source}
        contenders = {"": captured(calls_of(function, case))}
    except KerngenError as e:
        return row | {"error": str(e)}
    refused = dict[str, str]()
    for name, calls in _baselines(kernel, case).items():
        try:
            contenders[name] = captured(calls)
        except Exception as e:  # a baseline may not support the case; the row says so
            refused[f"baseline_{name}_us"] = f"{type(e).__name__}: {e}"[:120]
    torch.cuda.synchronize()
    time.sleep(REST_S)
    timings = dict(zip(contenders, time_in_turn(list(contenders.values())), strict=True))
    timing, cost = timings.pop(""), kernel.cost(case.problem)
    gbps, tflops = cost.bytes / timing.p50_us / 1e3, cost.flops / timing.p50_us / 1e6
    row |= asdict(timing) | {
        "gbps": gbps, "tflops": tflops,
        "share_read": gbps / limit.read_gbps, "share_matmul": tflops / limit.matmul_tflops,
    }  # fmt: skip
    return row | {f"baseline_{name}_us": t.p50_us for name, t in timings.items()} | refused


def load_peers() -> None:
    """Give torch the operators of the libraries that KERNGEN_PEERS names: what baselines find is timed beside ours.

    Raises UsageError where one cannot be loaded.
    """
    for path in filter(None, os.environ.get("KERNGEN_PEERS", "").split(os.pathsep)):
        try:
            torch.ops.load_library(path)
        except OSError as e:
            raise UsageError(f"KERNGEN_PEERS: {e}", hint="it names libraries of operators, one behind the other") from e


def _baselines(kernel: Kernel, case: Case) -> dict[str, list[Callable[[], object]]]:
    """Each of the kernel's baselines, on inputs of its own for each of the sets that the kernel is timed on: what
    it reads comes from memory too. It may hold more than the kernel does, and has fewer sets where memory ends.
    """
    found: dict[str, list[Callable[[], object]]] = {}
    for inputs in timing_sets(kernel.cases.inputs(case, torch.device("cuda"))):
        try:
            for name, call in kernel.bench.baselines(case, inputs).items():
                found.setdefault(name, []).append(call)
        except torch.OutOfMemoryError:
            if not found:
                raise
            break
    return found
