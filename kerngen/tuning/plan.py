"""In which order problems and configurations are worth trying, by the cost model, and what a whole run would be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from math import inf
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import Renderer, render
from kerngen.cost.choose import GUESSED_REGISTERS, expected_times
from kerngen.cost.predict import predict
from kerngen.errors import ConfigRefused
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel, static_fields
from kerngen.tuning.field_tracing import Remembered
from kerngen.tuning.space import Candidates, Enumeration, candidates

if TYPE_CHECKING:
    from kerngen.workload.workload import Item

ROW_BYTES, IMAGE_BYTES = 2_000, 12_000  # of a database: a trial's row and build, a winner's compressed cubin
RANKED_OF_A_LINE = 3  # problems that differ in tokens or batch alone try much the same: a plan ranks a few of them
RANKED_OF_A_SPACE = 512  # configurations: enough for an estimate of how many of the best share a source
PHASES = ("decode", "verify", "draft", "prefill")  # of a workload, the one that a model spends its time in first
BEAM = 4  # of the fastest so far, around which a descent looks


def rank(
    kernel: Kernel, problem: Any, target: Target, configs: Iterable[Any], registers: int = GUESSED_REGISTERS
) -> list[tuple[float, Any]]:
    """(pre-predicted microseconds, config), fastest first; equals stay in the order given. registers: a thread's, where
    the kernel's spec expects no number.
    """
    us = Remembered(kernel.config_type, expected_times(kernel, problem, target, registers))
    return sorted(((us(c), c) for c in configs), key=itemgetter(0))


def rank_space(found: Candidates, registers: int = GUESSED_REGISTERS) -> list[tuple[float, Any]]:
    """The same of what a search by the model weighs: a small space whole; of a large one what is `askable`, and what a
    descent from there finds: of the BEAM fastest, all that differs in one or two fields, until none of it is faster.
    What will spill takes for ever.
    """
    us = _times(found.kernel, found.problem, found.target, registers)
    timed = {c: us(c) for c in found.askable}
    if found.is_large:
        left, asked = set[Any](), set(timed)
        while fresh := [c for c in nsmallest(BEAM, timed, key=timed.__getitem__) if c not in left]:
            left.update(fresh)
            timed |= {c: us(c) for c in found.near(fresh, asked)}
    return sorted(((us, c) for c, us in timed.items()), key=itemgetter(0))


def expected_least(kernel: Kernel, problem: Any, target: Target) -> Callable[[Any], float]:
    """What a configuration is expected to be predicted to take at least once it is compiled: by the registers that its
    spec expects, and for ever where it will spill; where the spec expects no number, by the fewest, which is a bound.
    """
    return _times(kernel, problem, target, None)


def lower_bound_us(kernel: Kernel, problem: Any, config: Any, target: Target) -> float:
    """The lower bound of one."""
    return predict(kernel, problem, config, target).latency_us


def _times(kernel: Kernel, problem: Any, target: Target, registers: int | None) -> Remembered[float]:
    return _remembered(kernel, problem, target, None if kernel.expects_registers else registers)


@lru_cache(maxsize=2)  # a search ranks and asks what can win, of one problem
def _remembered(kernel: Kernel, problem: Any, target: Target, registers: int | None) -> Remembered[float]:
    """Pre-predicted microseconds: configurations that differ in what the model does not see cost one."""
    us = expected_times(kernel, problem, target, registers)
    return Remembered(kernel.config_type, lambda c: inf if kernel.will_spill(problem, c, target) else us(c))


def urgency(item: Item, us: float) -> tuple[int, int, float]:
    """Sorts problems by what is worth having first, where time is short.

    What a step of one sequence needs comes before what more of them need, and decoding before the other PHASES; within
    such a step its weight decides: the time of its launches there, of `us` each.
    """
    steps: dict[tuple[int, int, int, int, int], int] = {}  # whose launches it has in several places
    for u in item.uses:
        step = u.batch, PHASES.index(u.phase), u.q_len, u.chunk, u.context
        steps[step] = steps.get(step, 0) + u.count
    batch, phase = min((s[:2] for s, n in steps.items() if n), default=(1 << 30, 0))
    count = max((n for s, n in steps.items() if s[:2] == (batch, phase)), default=1)
    return batch, phase, -count * us


# -- what a whole run would be


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One kernel's part of a run.

    num_spaces: the enumerations that its problems share; space_size, num_valid and num_refused add those up. complete:
    False where samples stand for large ones (Candidates.survey): num_valid and num_refused are estimates then.
    num_trials is an upper bound. num_compiles is an estimate, on the high side: searches prune, and try each other's
    winners. seconds: of compiling, with all jobs busy.
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
    complete: bool = True


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


def dry_run(
    items: Iterable[Item],
    target: Target,
    trials: int,
    jobs: int,
    advance: Callable[[int, int, str], None] | None = None,
) -> DryRun:
    """What tuning `items` would try. Asks why_invalid, ranks and renders; compiles one source a kernel, to time it.
    advance: is told how many problems of how many are done, and of which kernel they are.
    """
    unsupported: dict[tuple[str, str], None] = {}
    found: dict[str, list[tuple[Any, Candidates]]] = {}
    for item in items:
        try:
            c = candidates(find_kernel(item.kernel), item.problem, target)
        except ConfigRefused as e:
            unsupported[item.kernel, e.message] = None
        else:
            found.setdefault(item.kernel, []).append((item.problem, c))
    done, of = 0, sum(map(len, found.values()))
    counts, spaces = dict[str, int](), {name: dict[Enumeration, None]() for name in found}
    with ThreadPoolExecutor(1) as beside:  # NVRTC works without the interpreter's lock
        each_s = {}
        for name, rows in found.items():
            problem, c = rows[0]
            source = render(find_kernel(name), problem, c.default, target)
            each_s[name] = beside.submit(_compile_seconds, source, target)
        for name, rows in found.items():
            for _, c in rows:
                if advance is not None:
                    advance(done, of, name)
                spaces[name][c.survey] = None
                done += 1
            counts[name] = len(_likely_sources(find_kernel(name), rows, target, trials))
    plans = []
    for name, rows in found.items():
        size, num_valid = (sum(s.size for s in spaces[name]), sum(s.num_valid for s in spaces[name]))
        plans.append(
            KernelPlan(
                name, len(rows), len(spaces[name]), size, num_valid, size - num_valid,
                sum(_num_trials(c, trials) for _, c in rows), counts[name],
                each_s[name].result() * counts[name] / jobs, all(s.complete for s in spaces[name]),
            )
        )  # fmt: skip
    return DryRun(tuple(plans), tuple(unsupported), jobs)


def _num_trials(c: Candidates, trials: int) -> int:
    if not c.survey.complete:  # a sample that holds none of its valid points bounds nothing
        return trials
    return min(trials, c.survey.num_valid + (c.default not in c.survey.valid))


def _likely_sources(kernel: Kernel, rows: list[tuple[Any, Candidates]], target: Target, trials: int) -> set[str]:
    """What would be compiled: of problems with the same compiled-in fields RANKED_OF_A_LINE stand for all."""
    lines: dict[str, list[tuple[Any, Candidates]]] = {}
    for problem, c in rows:
        lines.setdefault(str(static_fields(problem)), []).append((problem, c))
    sources, rendered = set[str](), Renderer()
    for line in lines.values():
        last = len(line) - 1
        for i in sorted({round(last * k / (RANKED_OF_A_LINE - 1)) for k in range(RANKED_OF_A_LINE)}):
            problem, c = line[i]
            valid = c.survey.valid
            some = valid[:: -(-len(valid) // RANKED_OF_A_SPACE) or 1]
            likely = dict.fromkeys([c.default, *(x for _, x in rank(kernel, problem, target, some))])
            sources |= {rendered(kernel, problem, x, target) for x in list(likely)[:trials]}
    return sources


def _compile_seconds(source: str, target: Target) -> float:
    start = perf_counter()
    compile_cubin(source, target.arch)
    return perf_counter() - start
