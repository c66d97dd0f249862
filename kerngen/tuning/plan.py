"""What tuning would try for one problem, before any compile: the valid configurations, why others are not.

A space that is small enough is enumerated whole, so the answer does not depend on a sampler's luck; a larger
one is represented by a seeded sample. Candidates are ranked by the cost model without a compiled kernel to
look at.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from kerngen.templates.kernel import Kernel, describe, fields_of, static_fields

if TYPE_CHECKING:
    from kerngen.workload import Item

ENUMERATE_LIMIT = 1 << 17  # points of SPACE; a check takes microseconds
RANK_LIMIT = 512  # configurations of a problem that are ranked; of more, a seeded sample
ROW_BYTES, IMAGE_BYTES = 2_000, 12_000  # of a database: a trial's row and build, a winner's compressed cubin
RANKED_OF_A_LINE = 3  # problems that differ in tokens or batch alone try much the same: a plan ranks a few of them
PHASES = ("decode", "verify", "draft", "prefill")  # of a workload, the one that a model spends its time in first
GUESSED_REGISTERS = 96  # per thread, before any kernel of the problem was compiled


Part = dict[str, tuple[Any, ...]]  # one body's: Config field -> its candidate values
Space = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Configurations that why_invalid refused for one reason; reasons that differ only in numbers are one."""

    count: int
    reason: str  # of `config`, the first one refused
    config: Any


@dataclass(frozen=True, slots=True, eq=False)
class Enumeration:
    """The points of a space, sorted out; `valid` in the space's order.

    Problems that agree in all that why_invalid reads share one, the very object: who adds up over problems counts
    each once.
    """

    space: Space
    valid: tuple[Any, ...]
    refusals: tuple[Refusal, ...]
    complete: bool  # every point was looked at

    @property
    def size(self) -> int:
        return space_size(self.space)

    @property
    def num_refused(self) -> int:
        return sum(r.count for r in self.refusals)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The configurations of one problem. `default` may lie off the grid."""

    default: Any
    points: Enumeration

    @property
    def valid(self) -> tuple[Any, ...]:
        return self.points.valid

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return self.points.refusals

    @property
    def space(self) -> Space:
        return self.points.space

    @property
    def complete(self) -> bool:
        return self.points.complete

    @property
    def space_size(self) -> int:
        return self.points.size


def space_of(kernel: Kernel, problem: Any, target: Target) -> Space:
    """The spaces of the bodies that serve on `target`, one after the other."""
    return tuple(body.choices(problem, target) for body in kernel.bodies(target.arch))


def space_size(space: Space) -> int:
    return sum(prod(len(values) for values in part.values()) for part in space)


def _points(kernel: Kernel, space: Part, seed: int) -> Iterator[Any]:
    """The points of one body's `space`, in order; of more than ENUMERATE_LIMIT a seeded sample of that many."""
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
    return Candidates(default, _sorted_out(kernel, problem, target, seed))


class _Watched:
    """Stands for a problem and notes which of its fields are read, by its properties too."""

    def __init__(self, problem: Any) -> None:
        self._problem, self._read = problem, set[str]()

    def __getattr__(self, name: str) -> Any:
        if isinstance(member := getattr(type(self._problem), name, None), property) and member.fget:
            return member.fget(self)
        self._read.add(name)
        return getattr(self._problem, name)


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
    """One body's points. refused: a reason without its figures -> how often, the first in full, and of what."""

    valid: list[Any]
    refused: dict[str, tuple[int, str, Any]]


_known: dict[tuple[Any, ...], list[tuple[dict[str, Any], _Sorted]]] = {}
_together: dict[tuple[_Sorted, ...], Enumeration] = {}


def _sorted_out(kernel: Kernel, problem: Any, target: Target, seed: int) -> Enumeration:
    """The grid's valid configurations, and the refusals."""
    space = space_of(kernel, problem, target)
    parts = tuple(_sorted_out_part(kernel, part, problem, target, seed) for part in space)
    if parts in _together:
        return _together[parts]
    refused: dict[str, tuple[int, str, Any]] = {}
    for part in parts:
        for shape, (count, first, example) in part.refused.items():
            before = refused.get(shape, (0, first, example))
            refused[shape] = (before[0] + count, before[1], before[2])
    in_order = sorted(refused.values(), key=lambda r: (-r[0], r[1]))
    valid = tuple(config for part in parts for config in part.valid)
    complete = all(space_size((part,)) <= ENUMERATE_LIMIT for part in space)
    _together[parts] = Enumeration(space, valid, tuple(Refusal(*r) for r in in_order), complete)
    return _together[parts]


def _sorted_out_part(kernel: Kernel, part: Part, problem: Any, target: Target, seed: int) -> _Sorted:
    """As _sorted_out, of one body.

    why_invalid is a function of its arguments, so two problems that agree in the fields it read of them get one answer:
    the many problems of a workload that differ only in tokens cost one enumeration of most bodies.
    """
    seen = _known.setdefault((kernel.name, target, tuple(part.items()), seed), [])
    for read, answer in seen:
        if all(getattr(problem, k) == v for k, v in read.items()):
            return answer
    watched: Any = _Watched(problem)
    found = _Sorted([], {})
    for config in _points(kernel, part, seed):
        if (reason := kernel.spec.why_invalid(watched, config, target)) is None:
            found.valid.append(config)
        else:
            shape = re.sub(r"\d[\d,.]*", "#", reason)
            count, first, example = found.refused.get(shape, (0, reason, config))
            found.refused[shape] = (count + 1, first, example)
    fields = fields_of(problem)
    if watched._read <= set(fields):  # a method would hide what it reads
        seen.append(({k: fields[k] for k in watched._read}, found))
    return found


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


def urgency(item: Item, kernel: Kernel, default: Any, target: Target) -> tuple[int, int, float]:
    """Sorts problems by what is worth having first, where time is short.

    What a step of one sequence needs comes before what more of them need, and decoding before the other PHASES; within
    such a step its weight decides: the time of its launches there, as the cost model has it for the default.
    """
    steps: dict[tuple[int, int, int, int, int], int] = {}  # whose launches it has in several places
    for u in item.uses:
        step = u.batch, PHASES.index(u.phase), u.q_len, u.chunk, u.context
        steps[step] = steps.get(step, 0) + u.count
    batch, phase = min((s[:2] for s, n in steps.items() if n), default=(1 << 30, 0))
    count = max((n for s, n in steps.items() if s[:2] == (batch, phase)), default=1)
    return batch, phase, -count * lower_bound_us(kernel, item.problem, default, target)


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
    """One kernel's part of a run.

    num_spaces: the enumerations that its problems share; space_size, num_valid and num_refused add those up. num_trials
    is an upper bound. num_compiles is an estimate, on the high side: searches prune, and try each other's winners.
    seconds: of compiling, with all jobs busy.
    """

    kernel: str
    num_problems: int
    num_spaces: int
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
    """What tuning `items` would try. Asks why_invalid, ranks and renders; compiles one source a kernel, to time it."""
    unsupported: dict[tuple[str, str], None] = {}
    found: dict[str, list[tuple[Any, Candidates]]] = {}
    for item in items:
        try:
            c = candidates(find_kernel(item.kernel), item.problem, target, seed)
        except ConfigRefused as e:
            unsupported[item.kernel, e.message] = None
        else:
            found.setdefault(item.kernel, []).append((item.problem, c))
    with ThreadPoolExecutor(1) as beside:  # NVRTC works without the interpreter's lock
        each_s = {}
        for name, rows in found.items():
            problem, c = rows[0]
            source = render(find_kernel(name), problem, c.default, target)
            each_s[name] = beside.submit(_compile_seconds, source, target)
        plans = []
        for name, rows in found.items():
            spaces = list(dict.fromkeys(c.points for _, c in rows))
            num_compiles = len(_likely_sources(find_kernel(name), rows, target, trials, seed))
            plans.append(
                KernelPlan(
                    name, len(rows), len(spaces), sum(s.size for s in spaces), sum(len(s.valid) for s in spaces),
                    sum(s.num_refused for s in spaces), sum(_num_trials(c, trials) for _, c in rows), num_compiles,
                    each_s[name].result() * num_compiles / jobs,
                )
            )  # fmt: skip
    return DryRun(tuple(plans), tuple(unsupported), jobs)


def _num_trials(c: Candidates, trials: int) -> int:
    return min(trials, len(c.valid) + (c.default not in c.valid))


def _likely_sources(
    kernel: Kernel, rows: list[tuple[Any, Candidates]], target: Target, trials: int, seed: int
) -> set[str]:
    """What would be compiled: of problems with the same compiled-in fields RANKED_OF_A_LINE stand for all."""
    lines: dict[str, list[tuple[Any, Candidates]]] = {}
    for problem, c in rows:
        lines.setdefault(str(static_fields(problem)), []).append((problem, c))
    sources = set[str]()
    for line in lines.values():
        last = len(line) - 1
        for i in sorted({round(last * k / (RANKED_OF_A_LINE - 1)) for k in range(RANKED_OF_A_LINE)}):
            problem, c = line[i]
            likely = dict.fromkeys([c.default, *(x for _, x in rank(kernel, problem, target, c.valid, seed=seed))])
            sources |= {render(kernel, problem, x, target) for x in list(likely)[:trials]}
    return sources


def _compile_seconds(source: str, target: Target) -> float:
    start = perf_counter()
    compile_cubin(source, target.arch)
    return perf_counter() - start
