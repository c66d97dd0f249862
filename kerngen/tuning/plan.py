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

from kerngen.arch import Target
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


Space = tuple[dict[str, tuple[Any, ...]], ...]  # of each body: Config field -> its candidate values


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
    space: Space
    complete: bool  # every point of the space was looked at

    @property
    def space_size(self) -> int:
        return space_size(self.space)

    @property
    def num_refused(self) -> int:
        return sum(r.count for r in self.refusals)


def space_of(kernel: Kernel, problem: Any, target: Target) -> Space:
    """The spaces of the bodies that serve on `target`, one after the other."""
    return tuple(body.choices(problem, target) for body in kernel.bodies(target.arch))


def space_size(space: Space) -> int:
    return sum(prod(len(values) for values in part.values()) for part in space)


def grid(kernel: Kernel, space: Space, seed: int = 0) -> Iterator[Any]:
    """The points of `space`, in order; of a body with more than ENUMERATE_LIMIT a seeded sample of that many."""
    for part in space:
        yield from _grid_of(kernel, part, seed)


def _grid_of(kernel: Kernel, space: dict[str, tuple[Any, ...]], seed: int) -> Iterator[Any]:
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


def candidates(kernel: Kernel, problem: Any, target: Target, seed: int = 0) -> Candidates:
    """What can run `problem` on `arch`, and why the rest cannot. Asks why_invalid only; nothing is compiled.

    Raises ConfigRefused if the kernel does not support the problem there at all, or refuses its own default.
    """
    if (why := kernel.why_unsupported(problem, target)) is not None:
        raise ConfigRefused(f"{kernel.name}{describe(problem)} on {target.arch}: {why}")
    default = kernel.default_config(problem, target)
    kernel.require_valid(problem, default, target)
    space = space_of(kernel, problem, target)
    valid, refusals = _sorted_out(kernel, problem, target, space, seed)
    whole = all(space_size((part,)) <= ENUMERATE_LIMIT for part in space)
    return Candidates(default, valid, refusals, space, whole)


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
_known: dict[tuple[Any, ...], list[tuple[dict[str, Any], _Sorted]]] = {}


def _sorted_out(kernel: Kernel, problem: Any, target: Target, space: Space, seed: int) -> _Sorted:
    """The grid's valid configurations, and the refusals.

    why_invalid is a function of its arguments, so two problems that agree in the fields it read get one
    answer: the many problems of a workload that differ only in tokens cost one enumeration.
    """
    points = tuple(tuple(part.items()) for part in space)
    seen = _known.setdefault((kernel.name, target, points, seed), [])
    for read, answer in seen:
        if all(getattr(problem, k) == v for k, v in read.items()):
            return answer
    watched: Any = _Watched(problem)
    valid: list[Any] = []
    refused: dict[str, tuple[int, str, Any]] = {}
    for config in grid(kernel, space, seed):
        if (reason := kernel.spec.why_invalid(watched, config, target)) is None:
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
    target: Target,
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
    timed = [(predict(kernel, problem, c, target, registers=registers).latency_us, i, c) for i, c in enumerate(configs)]
    timed.sort(key=lambda t: t[:2])
    return [(us, c) for us, _, c in timed]


def lower_bound_us(kernel: Kernel, problem: Any, config: Any, target: Target) -> float:
    """What no compiled kernel of `config` can be predicted to beat: the fewest registers, no spills."""
    return predict(kernel, problem, config, target).latency_us


def on_grid(space: Space, config: Any) -> int | None:
    """Which part of `space` has `config` among its points, None where none does."""
    fields = fields_of(config)
    defaults = fields_of(type(config)())
    for index, part in enumerate(space):
        if all(v in part.get(k, (defaults[k],)) for k, v in fields.items()):
            return index
    return None


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


def dry_run(items: Iterable[Item], target: Target, trials: int, jobs: int, seed: int = 0) -> DryRun:
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
                c = candidates(kernel, problem, target, seed)
            except ConfigRefused as e:
                unsupported[name, e.message] = None
                continue
            if not found:
                each_s = _compile_seconds(render(kernel, problem, c.default, target), target)
            found.append(c)
            likely = [c.default, *(x for _, x in rank(kernel, problem, target, c.valid, seed=seed))]
            chosen = list(dict.fromkeys(likely))[:trials]
            asked += len(chosen)
            sources |= {render(kernel, problem, x, target) for x in chosen}
        if found:
            plans.append(
                KernelPlan(
                    name, len(found), found[0].space_size, max(len(c.valid) for c in found),
                    min(c.num_refused for c in found), asked, len(sources), each_s * len(sources) / jobs,
                )
            )  # fmt: skip
    return DryRun(tuple(plans), tuple(unsupported), jobs)


def _compile_seconds(source: str, target: Target) -> float:
    start = perf_counter()
    compile_cubin(source, target.arch)
    return perf_counter() - start
