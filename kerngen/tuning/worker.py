"""Checks and times configurations on the GPU in a process of its own.

A kernel that faults takes its CUDA context with it; here it takes the worker, and the tuner records `launch_failed`
and goes on with a fresh one. The worker keeps one problem's inputs, the copies of them that timing takes, and the
reference between configurations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from kerngen.arch import Arch, Device, Target, arch_of_capability
from kerngen.errors import KerngenError, UnknownName
from kerngen.system.gpus import gpus_here
from kerngen.system.interrupts import result_of
from kerngen.system.processes import ProcessDied, Processes
from kerngen.templates.kernel import Kernel, spread
from kerngen.timing.gpu import Clocks, Seen, Watch
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.objective import FIGURES

if TYPE_CHECKING:
    from kerngen.timing.measure import Ceilings
    from kerngen.tuning.step_worker import Exchanged
    from kerngen.workload.steps import Ratio, Step
    from kerngen.workload.workload import Model

T = TypeVar("T")
TIMEOUT_S = 120.0  # for the inputs and reference of a large problem; a configuration takes well under a second
FINAL_ROUNDS, FINAL_SAMPLES, FINAL_MS = 5, 10, 2.0
LOOKS, PAUSE_S = 3, 2.0  # at most so many while the GPU is throttled, so far apart


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of one configuration. outcome: one of the database's; times in microseconds. gpu: what the GPU said of
    its clocks meanwhile, see Seen.noted.
    """

    outcome: str
    reason: str = ""
    p50_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    min_us: float | None = None
    samples: int = 0
    error_abs: float | None = None
    error_rel: float | None = None
    gpu: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_a_line(self) -> str:
        """The outcome with the first line of its reason."""
        return f"{self.outcome}: {self.reason.splitlines()[0] if self.reason else ''}"

    def figures(self) -> dict[str, Any]:
        """What else a Measurement of it holds, by field."""
        return {n: getattr(self, n) for n in FIGURES}


class GpuWorker:
    """Measures on this machine's GPU, one configuration at a time. Close it, or use it as a context.

    timeout_s: after so long without an answer its process is killed: a kernel may wait for ever. What measures takes
    `within_s` too, the time that its caller has: where that is less and ends first, OutOfTime is raised.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._process: Processes | None = None

    def start(self) -> None:
        """Have the process begin, which takes seconds, and do not wait for it."""
        self._running().submit(_probe)

    def device(self) -> Device:
        """The GPU at hand. Raises DeviceError where there is none."""
        return self._call(_probe)

    def target(self) -> Target:
        """It, with the arch whose cubins run there."""
        return self._call(_target)

    def environment(self) -> dict[str, Any]:
        return self._call(_environment)

    def uuid(self) -> str:
        """Its identity, as NVML writes it."""
        return self._call(_uuid)

    def ceilings(self) -> Ceilings:
        """What it reads, copies and multiplies at, measured now."""
        return self._call(_ceilings)

    def clocks(self) -> Clocks | None:
        """How it runs right now; None where NVML does not say."""
        try:
            return self._call(_clocks)
        except (ProcessDied, TimeoutError) as e:
            self._lost(e)
            return None

    def load(self, what: str, image: bytes, entries: Sequence[str]) -> str:
        """Whether the driver loads the machine code of `what` and finds `entries` in it: why not, "" where it does."""
        try:
            return self._call(_load, what, image, tuple(entries))
        except (ProcessDied, TimeoutError) as e:
            return f"{what}: {self._lost(e, 'loading it').reason}"

    def check(self, kernel: Kernel, problem: Any, config: Any, image: bytes) -> Observed:
        """Compare `config` with the reference on the problem's own inputs; no time is taken."""
        return self._seen(_checked, kernel.name, problem, config, image)

    def measure(
        self,
        kernel: Kernel,
        problem: Any,
        config: Any,
        image: bytes,
        *,
        samples: int = 15,
        target_ms: float = 2.0,
        within_s: float = inf,
    ) -> Observed:
        """Check `config` against the reference on the problem's own inputs, then time it, as measure.time_function."""
        return self._seen(_measure, kernel.name, problem, config, image, samples, target_ms, within_s=within_s)

    def finals(
        self, kernel: Kernel, problem: Any, configs: list[tuple[Any, bytes]], *, within_s: float = inf
    ) -> list[Observed]:
        """Check and time `configs` together, in rotated order, so that drifting clocks favour none."""
        seen = self._seen(
            _finals, kernel.name, problem, configs, FINAL_ROUNDS, FINAL_SAMPLES, FINAL_MS, within_s=within_s
        )
        return [seen] * len(configs) if isinstance(seen, Observed) else seen

    def in_turn(
        self, kernel: Kernel, problem: Any, candidates: Sequence[tuple[Any, bytes, bool]], *, samples: int = 30
    ) -> list[Observed]:
        """Check `candidates`, then time them by replays in turn, so that all meet the same clocks.

        candidates: configuration, machine code, and whether its results are known to be wrong: such a one is timed all
        the same, and is `wrong_result` with a time.
        """
        seen = self._seen(_in_turn, kernel.name, problem, tuple(candidates), samples)
        return [seen] * len(candidates) if isinstance(seen, Observed) else seen

    def compare(
        self,
        model: Model,
        step: Step,
        base: Sequence[Exchanged],
        other: Sequence[Exchanged],
        *,
        pairs: int = 12,
        within_s: float = inf,
        fused: Mapping[tuple[str, Any], bool] | None = None,
    ) -> Ratio | Observed:
        """How long `step` of `model` takes with `other`, over what it takes with `base`; what neither names runs its
        default. Or what came in the way. fused: of (kernel, problem) that replaces several, whether the step asks it
        where neither names it; what is not there its default configuration says.
        """
        seen = self._seen(_compare, model, step, tuple(base), tuple(other), pairs, dict(fused or {}), within_s=within_s)
        return Observed("launch_failed", seen) if isinstance(seen, str) else seen

    def _call(self, function: Callable[..., T], *arguments: Any, within_s: float = inf) -> T:
        return result_of(self._running().submit(function, *arguments), min(self._timeout_s, max(within_s, 0.0)))

    def _seen(self, function: Callable[..., T], *arguments: Any, within_s: float = inf) -> T | Observed:
        """As `_call`; where the process dies or does not answer, that. Raises OutOfTime after `within_s`, where that is
        sooner: what was under way is of no use to its caller.
        """
        try:
            return self._call(function, *arguments, within_s=within_s)
        except (ProcessDied, TimeoutError) as e:
            lost = self._lost(e)
            if isinstance(e, TimeoutError) and within_s < self._timeout_s:
                raise OutOfTime from None
            return lost

    def _running(self) -> Processes:
        if self._process is None:
            self._process = Processes(1)
        return self._process

    def _lost(self, error: Exception, what: str = "the kernel") -> Observed:
        self.close()
        if isinstance(error, TimeoutError):
            return Observed("timed_out", f"no answer within {self._timeout_s:g} s")
        return Observed("launch_failed", f"{what} took its process down")

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> GpuWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- in the worker


def _probe() -> Device:
    from kerngen.runtime.launcher import probe_device

    return probe_device()


def _target() -> Target:
    from kerngen.runtime.launcher import probe_target

    return probe_target()


def _environment() -> dict[str, Any]:
    from kerngen.timing.measure import environment

    return environment()


def _uuid() -> str:
    from kerngen.runtime.launcher import gpu_uuid

    return gpu_uuid()


@cache
def _ceilings() -> Ceilings:
    from kerngen.timing.measure import ceilings

    return ceilings()


def _watch() -> Watch:
    return Watch(_uuid())


def _clocks() -> Clocks | None:
    return _watch().sample()


class _Prepared:
    """One problem on the GPU: its inputs as made, the reference's outputs, and the copies that kernels run on.

    All of it is made once for all configurations; between two of them only what was written is copied anew.
    """

    def __init__(self, kernel: Kernel, problem: Any) -> None:
        import torch

        from kerngen.timing.measure import fresh

        self.kernel, self.problem = kernel, problem
        self.case = kernel.cases.case_for(problem)
        torch.manual_seed(self.case.seed)
        self.made: dict[str, Any] = kernel.cases.inputs(self.case, torch.device("cuda"))
        # a kernel may write what it reads, and so may its reference
        self.expected = kernel.reference.expected(self.case.problem, fresh(self.made))
        self._sets: list[dict[str, Any]] = []
        self._enough = False

    def one(self) -> dict[str, Any]:
        """Inputs to check a kernel on, all as made: whatever the one before wrote, and wherever."""
        from kerngen.timing.measure import fresh

        if self._sets:
            self._restore(self._sets[0], (name for name, _, _ in spread(self.made)))
        else:
            self._sets = [fresh(self.made)]
        return self._sets[0]

    def sets(self) -> list[dict[str, Any]]:
        """Inputs to time a kernel on, with what it writes as made."""
        from kerngen.timing.measure import timing_sets

        if not self._enough:
            self._sets, self._enough = timing_sets(self.one()), True
        for inputs in self._sets:
            self._restore(inputs, self.kernel.outputs_of(self.case.problem))
        return self._sets

    def drop(self) -> None:
        """Let go of the copies: memory is short."""
        self._sets, self._enough = [], False

    def _restore(self, inputs: dict[str, Any], names: Iterable[str]) -> None:
        import torch

        wanted = set(names)
        for (name, _, mine), (_, _, made) in zip(spread(inputs), spread(self.made), strict=True):
            if name in wanted and isinstance(mine, torch.Tensor):
                mine.copy_(made)


_held: list[_Prepared] = []  # the problem that was asked for last


def _prepared(kernel_name: str, problem: Any) -> _Prepared:
    import torch

    from kerngen.templates import find_kernel
    from kerngen.tuning.step_worker import let_go

    if not _held or (_held[0].kernel.name, _held[0].problem) != (kernel_name, problem):
        let_go()
        if _held:
            _held.clear()  # first: the next may need the memory
            torch.cuda.empty_cache()
        _held.append(_Prepared(find_kernel(kernel_name), problem))
    return _held[0]


def _check(
    kernel_name: str, problem: Any, config: Any, image: bytes, *, may_be_wrong: bool = False
) -> tuple[Any, Observed]:
    """The loaded function and what the check said; a function only if it may be timed."""
    import torch

    from kerngen.runtime.launcher import Function
    from kerngen.templates import find_kernel
    from kerngen.timing.measure import compare, target_here

    kernel = find_kernel(kernel_name)
    try:
        prepared = _prepared(kernel_name, problem)
        case = prepared.case
        function = Function(kernel, config, target_here(), image, index=torch.cuda.current_device())
        outputs = prepared.one()  # poisoned anew
        function(case.problem, **outputs)
        torch.cuda.synchronize()
        result = compare(kernel, case, outputs, prepared.expected)
    except KerngenError as e:
        return None, Observed("launch_failed", e.message)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, Observed("launch_failed", "the inputs and their reference do not fit in this GPU's memory")
    except RuntimeError as e:
        # A fault is sticky: nothing that this process launches can succeed any more.
        _die_if_broken(e)
        return None, Observed("launch_failed", str(e).strip().splitlines()[0])
    if not result.ok:
        seen = Observed("wrong_result", result.message, error_abs=result.error_abs, error_rel=result.error_rel)
        return (function if may_be_wrong else None), seen
    return function, Observed("ok", error_abs=result.error_abs, error_rel=result.error_rel)


def _checked(kernel_name: str, problem: Any, config: Any, image: bytes) -> Observed:
    return _check(kernel_name, problem, config, image)[1]


def _load(what: str, image: bytes, entries: tuple[str, ...]) -> str:
    import torch

    from kerngen.runtime.launcher import load_module

    try:
        load_module(what, image, entries, torch.device("cuda", torch.cuda.current_device()))
    except KerngenError as e:
        return e.message
    return ""


def _die_if_broken(error: RuntimeError) -> None:
    import os
    import sys

    import torch

    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        print(f"the GPU: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _time(function: Any, problem: Any, samples: int, target_ms: float) -> Any:
    """A Timing, or an Observed that says why there is none."""
    import torch

    from kerngen.timing.measure import time_function

    prepared = _prepared(function.kernel.name, problem)
    try:
        return time_function(function, prepared.case, sets=prepared.sets(), samples=samples, target_ms=target_ms)
    except torch.OutOfMemoryError:
        pass  # only now, without its traceback, do the copies go
    except KerngenError as e:
        return Observed("launch_failed", e.message)
    except RuntimeError as e:  # it ran once, for its check, and faults in a graph
        _die_if_broken(e)
        return Observed("launch_failed", str(e).strip().splitlines()[0])
    prepared.drop()
    torch.cuda.empty_cache()
    return Observed("launch_failed", "two sets of its inputs do not fit in this GPU's memory")


def _compare(
    model: Model, step: Step, base: Any, other: Any, pairs: int, fused: Mapping[tuple[str, Any], bool]
) -> Ratio | str:
    import torch

    from kerngen.tuning.step_worker import compare

    if _held:
        _held.clear()  # of a problem alone
        torch.cuda.empty_cache()
    try:
        return compare(model, step, base, other, pairs, fused)
    except RuntimeError as e:
        _die_if_broken(e)
        return str(e).strip().splitlines()[0]


def _watched(measure: Callable[[], list[Observed]]) -> list[Observed]:
    """What `measure` gives, with what the GPU said of itself; again where heat or its power supply held it back. Where
    that does not end, the last look counts, and its rows say so.
    """
    for looks in range(LOOKS, 0, -1):
        before = _clocks()
        found = measure()
        seen = Seen(before, _clocks())
        if not seen.is_throttled or looks == 1:
            break
        time.sleep(PAUSE_S)
    return [replace(o, gpu=seen.noted()) for o in found]


def _measure(kernel_name: str, problem: Any, config: Any, image: bytes, samples: int, target_ms: float) -> Observed:
    function, seen = _check(kernel_name, problem, config, image)
    if function is None:
        return seen

    def timed() -> list[Observed]:
        t = _time(function, problem, samples, target_ms)
        if isinstance(t, Observed):
            return [t]
        return [Observed("ok", "", t.p50_us, t.p10_us, t.p90_us, t.min_us, t.samples, seen.error_abs, seen.error_rel)]

    return _watched(timed)[0]


def _finals(
    kernel_name: str, problem: Any, configs: list[tuple[Any, bytes]], rounds: int, samples: int, target_ms: float
) -> list[Observed]:
    checked = [_check(kernel_name, problem, config, image) for config, image in configs]
    return _watched(lambda: _together(problem, checked, rounds, samples, target_ms))


def _together(
    problem: Any, checked: list[tuple[Any, Observed]], rounds: int, samples: int, target_ms: float
) -> list[Observed]:
    times: list[list[Any]] = [[] for _ in checked]
    failed: dict[int, Observed] = {i: seen for i, (function, seen) in enumerate(checked) if function is None}
    order = [i for i in range(len(checked)) if i not in failed]
    for _ in range(rounds):
        for i in order:
            t = _time(checked[i][0], problem, samples, target_ms)
            if isinstance(t, Observed):
                failed[i] = t
            else:
                times[i].append(t)
        order = order[1:] + order[:1]
    return [
        Observed(
            "ok", "", median(t.p50_us for t in ts), min(t.p10_us for t in ts), max(t.p90_us for t in ts),
            min(t.min_us for t in ts), sum(t.samples for t in ts), seen.error_abs, seen.error_rel,
        ) if ts else failed[i]
        for i, ((_, seen), ts) in enumerate(zip(checked, times, strict=True))
    ]  # fmt: skip


def _in_turn(
    kernel_name: str, problem: Any, candidates: Sequence[tuple[Any, bytes, bool]], samples: int
) -> list[Observed]:
    checked = [_check(kernel_name, problem, config, image, may_be_wrong=w) for config, image, w in candidates]
    return _watched(lambda: _timed_in_turn(kernel_name, problem, checked, samples))


def _timed_in_turn(
    kernel_name: str, problem: Any, checked: Sequence[tuple[Any, Observed]], samples: int
) -> list[Observed]:
    import torch

    from kerngen.timing.measure import calls_of, captured, time_in_turn

    found = [seen for _, seen in checked]
    ready = [i for i, (function, _) in enumerate(checked) if function is not None]
    prepared = _prepared(kernel_name, problem)
    try:
        sets = prepared.sets()
        timings = time_in_turn(
            [captured(calls_of(checked[i][0], prepared.case, sets)) for i in ready], samples=samples
        )  # fmt: skip
    except torch.OutOfMemoryError:
        prepared.drop()
        torch.cuda.empty_cache()
        return [replace(seen, outcome="launch_failed", reason="they do not fit in this GPU's memory together")
                for seen in found]  # fmt: skip
    except (KerngenError, RuntimeError) as e:
        if isinstance(e, RuntimeError):
            _die_if_broken(e)
        return [Observed("launch_failed", str(e).strip().splitlines()[0])] * len(found)
    for i, t in zip(ready, timings, strict=True):
        found[i] = replace(found[i], p50_us=t.p50_us, p10_us=t.p10_us, p90_us=t.p90_us, min_us=t.min_us,
                           samples=t.samples)  # fmt: skip
    return found


# -- without a CUDA context


def present_arch() -> Arch | None:
    """The arch of this machine's first GPU, asked of the driver alone; None where there is no driver or no GPU."""
    for gpu in gpus_here()[:1]:
        with suppress(UnknownName):
            return arch_of_capability(*gpu.capability)
    return None
