"""What tuning would try for one problem, before any compile: the valid configurations, why others are not.

A space that is small enough is enumerated whole, so the answer does not depend on a sampler's luck; a larger
one is represented by a seeded sample. Candidates are ranked by the cost model without a compiled kernel to
look at.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kerngen.arch import Arch, Device
from kerngen.compile import compile_cubin
from kerngen.errors import ConfigRefused
from kerngen.predict import predict
from kerngen.render import render
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, describe, fields_of

if TYPE_CHECKING:
    from kerngen.workload import Item

ENUMERATE_LIMIT = 1 << 17  # points of SPACE; a check takes microseconds
RANK_LIMIT = 512  # configurations of a problem that are ranked; of more, a seeded sample
ROW_BYTES, IMAGE_BYTES = 2_000, 12_000  # of a database: a trial's row and build, a winner's compressed cubin
GUESSED_REGISTERS = 96  # per thread, before any kernel of the problem was compiled


@dataclass(frozen=True, slots=True)
class Refusal:
    """Configurations that why_invalid refused for one reason; reasons that differ only in numbers are one."""

    count: int
    reason: str  # of `config`, the first one refused
    config: Any


@dataclass(frozen=True, slots=True)
class Candidates:
    """The configurations of one problem. `valid` is in SPACE order; `default` may lie off the grid."""

    default: Any
    valid: tuple[Any, ...]
    refusals: tuple[Refusal, ...]
    space_size: int
    complete: bool  # every point of SPACE was looked at

    @property
    def num_refused(self) -> int:
        return sum(r.count for r in self.refusals)


def grid(kernel: Kernel, seed: int = 0) -> Iterator[Any]:
    """The points of the kernel's SPACE, in order: all, or a seeded sample of ENUMERATE_LIMIT."""
    space = kernel.space
    size = prod(len(values) for values in space.values())
    if size <= ENUMERATE_LIMIT:
        for values in product(*space.values()):
            yield kernel.config_type(**dict(zip(space, values, strict=True)))
        return
    for index in sorted(random.Random(seed).sample(range(size), ENUMERATE_LIMIT)):
        chosen = {}
        for name, values in reversed(space.items()):
            index, at = divmod(index, len(values))
            chosen[name] = values[at]
        yield kernel.config_type(**chosen)


def candidates(kernel: Kernel, problem: Any, arch: Arch, seed: int = 0) -> Candidates:
    """What can run `problem` on `arch`, and why the rest cannot. Asks why_invalid only; nothing is compiled.

    Raises ConfigRefused if the kernel does not support the problem there at all, or refuses its own default.
    """
    if (why := kernel.why_unsupported(problem, arch)) is not None:
        raise ConfigRefused(f"{kernel.name}{describe(problem)} on {arch}: {why}")
    default = kernel.default_config(problem, arch)
    kernel.require_valid(problem, default, arch)
    valid, refusals = _sorted_out(kernel, problem, arch, seed)
    size = prod(len(values) for values in kernel.space.values())
    return Candidates(default, valid, refusals, size, size <= ENUMERATE_LIMIT)


class _Watched:
    """Stands for a problem and notes which of its fields are read, by its properties too."""

    def __init__(self, problem: Any) -> None:
        self._problem, self._read = problem, set[str]()

    def __getattr__(self, name: str) -> Any:
        if isinstance(member := getattr(type(self._problem), name, None), property) and member.fget:
            return member.fget(self)
        self._read.add(name)
        return getattr(self._problem, name)


_Sorted = tuple[tuple[Any, ...], tuple[Refusal, ...]]
_known: dict[tuple[str, str, int], list[tuple[dict[str, Any], _Sorted]]] = {}


def _sorted_out(kernel: Kernel, problem: Any, arch: Arch, seed: int) -> _Sorted:
    """The grid's valid configurations, and the refusals.

    why_invalid is a function of its arguments, so two problems that agree in the fields it read get one
    answer: the many problems of a workload that differ only in tokens cost one enumeration.
    """
    seen = _known.setdefault((kernel.name, arch.name, seed), [])
    for read, answer in seen:
        if all(getattr(problem, k) == v for k, v in read.items()):
            return answer
    watched: Any = _Watched(problem)
    valid: list[Any] = []
    refused: dict[str, tuple[int, str, Any]] = {}
    for config in grid(kernel, seed):
        if (reason := kernel.spec.why_invalid(watched, config, arch)) is None:
            valid.append(config)
        else:
            shape = re.sub(r"\d[\d,.]*", "#", reason)
            count, first, example = refused.get(shape, (0, reason, config))
            refused[shape] = (count + 1, first, example)
    refusals = tuple(Refusal(*r) for r in sorted(refused.values(), key=lambda r: (-r[0], r[1])))
    answer = tuple(valid), refusals
    fields = fields_of(problem)
    if watched._read <= set(fields):  # a method would hide what it reads
        seen.append(({k: fields[k] for k in watched._read}, answer))
    return answer


def rank(
    kernel: Kernel,
    problem: Any,
    arch: Arch,
    device: Device,
    configs: Iterable[Any],
    registers: int = GUESSED_REGISTERS,
    seed: int = 0,
) -> list[tuple[float, Any]]:
    """(pre-predicted microseconds, config), fastest first; equals stay in the order given.

    Of more than RANK_LIMIT configurations a sample is ranked. Problems differ in `seed`, so that neighbours, which
    try each other's winners, look at different parts of the space.
    """
    configs = list(configs)
    if len(configs) > RANK_LIMIT:
        configs = [configs[i] for i in sorted(random.Random(seed).sample(range(len(configs)), RANK_LIMIT))]
    timed = [
        (predict(kernel, problem, c, arch, device, registers=registers).latency_us, i, c) for i, c in enumerate(configs)
    ]
    timed.sort(key=lambda t: t[:2])
    return [(us, c) for us, _, c in timed]


def lower_bound_us(kernel: Kernel, problem: Any, config: Any, arch: Arch, device: Device) -> float:
    """What no compiled kernel of `config` can be predicted to beat: the fewest registers, no spills."""
    return predict(kernel, problem, config, arch, device).latency_us


def on_grid(kernel: Kernel, config: Any) -> bool:
    """Whether every tunable of `config` has one of the values that SPACE lists."""
    fields = fields_of(config)
    return set(fields) == set(kernel.space) and all(fields[k] in values for k, values in kernel.space.items())


# -- what a whole run would be


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel's part of a run. num_trials and num_compiles are upper bounds; seconds with all jobs busy."""

    kernel: str
    num_problems: int
    space_size: int
    num_valid: int
    num_refused: int
    num_trials: int
    num_compiles: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan of a run. unsupported: (kernel, reason) of problems that no configuration can serve."""

    kernels: tuple[KernelPlan, ...]
    unsupported: tuple[tuple[str, str], ...]
    jobs: int

    @property
    def num_problems(self) -> int:
        return sum(k.num_problems for k in self.kernels)

    @property
    def num_trials(self) -> int:
        return sum(k.num_trials for k in self.kernels)

    @property
    def num_compiles(self) -> int:
        return sum(k.num_compiles for k in self.kernels)

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)

    @property
    def db_bytes(self) -> int:
        return self.num_trials * ROW_BYTES + self.num_problems * IMAGE_BYTES


def dry_run(items: Iterable[Item], arch: Arch, device: Device, trials: int, jobs: int, seed: int = 0) -> DryRun:
    """What tuning `items` would try. Asks why_invalid and renders; compiles one configuration a kernel, to time it."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        groups.setdefault(item.kernel, []).append(item.problem)
    plans: list[KernelPlan] = []
    unsupported: dict[tuple[str, str], None] = {}
    for name, problems in groups.items():
        kernel = find_kernel(name)
        found: list[Candidates] = []
        sources: set[str] = set()
        asked, each_s = 0, 0.0
        for problem in problems:
            try:
                c = candidates(kernel, problem, arch, seed)
            except ConfigRefused as e:
                unsupported[name, e.message] = None
                continue
            if not found:
                each_s = _compile_seconds(render(kernel, problem, c.default, arch), arch)
            found.append(c)
            likely = [c.default, *(x for _, x in rank(kernel, problem, arch, device, c.valid, seed=seed))]
            chosen = list(dict.fromkeys(likely))[:trials]
            asked += len(chosen)
            sources |= {render(kernel, problem, x, arch) for x in chosen}
        if found:
            plans.append(
                KernelPlan(
                    name, len(found), found[0].space_size, max(len(c.valid) for c in found),
                    min(c.num_refused for c in found), asked, len(sources), each_s * len(sources) / jobs,
                )
            )  # fmt: skip
    return DryRun(tuple(plans), tuple(unsupported), jobs)


def _compile_seconds(source: str, arch: Arch) -> float:
    start = perf_counter()
    compile_cubin(source, arch)
    return perf_counter() - start
