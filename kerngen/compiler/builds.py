"""Lists the builds that a model, or the kernels' test cases, need: each source once, with the problems it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kerngen.arch import Target
from kerngen.compiler.cache import CachedCompiler, CompileCache, compiling_is_forbidden
from kerngen.compiler.compile import Cubin, Ptx, nvrtc_version, source_key
from kerngen.compiler.render import Renderer, render
from kerngen.errors import CompileError, ProblemError, TuningMiss
from kerngen.runtime.selection import DEFAULT, Choice, Selector, between, finer_between
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel, describe, fields_of, static_fields
from kerngen.tuning_db.read.canonical_fields import finer, round_up
from kerngen.tuning_db.read.ids import bucketed, coordinates
from kerngen.workload.workload import Model, Workload, workload

if TYPE_CHECKING:
    from kerngen.system.progress import Reporter
    from kerngen.tuning_db import Source
    from kerngen.tuning_db.read.boards import PerBoard


@dataclass(slots=True)
class Build:
    """One source for one board, and what it serves: runtime fields of a workload's problems, or names of cases.

    origins: who chose its configuration, and for how many of them. stored: its machine code, where the database that
    answered keeps it.
    """

    kernel: Kernel
    target: Target
    problem: Any  # the first that it serves
    config: Any
    source: str
    origins: Counter[str] = field(default_factory=Counter)
    serves: list[Any] = field(default_factory=list)
    stored: Cubin | None = None

    def __str__(self) -> str:
        static = ", ".join(f"{k}={v}" for k, v in static_fields(self.problem).items())
        return f"{self.kernel.name}({static}) {describe(self.config)} on {self.target.arch}"


@dataclass(frozen=True, slots=True)
class Built:
    """What became of a Build. made: in words, where its machine code came from; image None: why it failed."""

    build: Build
    image: Cubin | Ptx | None
    made: str


def choices(load: Workload, selector: Selector, unsupported: Counter[str]) -> Iterator[tuple[Any, Choice]]:
    """(problem, what runs it) of a workload, of the lengths between its own (see `lengths_between`), and of those
    between at which something is tuned.

    unsupported: is given what no configuration of a kernel can run, in words, with how often.
    """
    lines: dict[tuple[Any, ...], dict[int, Any]] = {}
    for name, problem in lengths_between(load):
        kernel = find_kernel(name)
        if (why := kernel.why_unsupported(problem, selector.target)) is not None:
            unsupported[f"{name} on {selector.target.arch}: {why}"] += 1
            continue
        for asked in load.with_images(problem):
            yield asked, selector.choice(kernel, asked)
        if problem.DYNAMIC:
            lines.setdefault(_line(kernel, problem), {})[getattr(problem, problem.DYNAMIC)] = problem
    for name, problem in load.of_towers:
        yield problem, selector.choice(find_kernel(name), problem)
    for (name, *_), points in lines.items():
        kernel, (first, *_) = find_kernel(name), points.values()
        for length in selector.tuned_lengths(kernel, first):
            if length not in points and min(points) < length < max(points):
                for asked in load.with_images(replace(first, **{first.DYNAMIC: length})):
                    yield asked, selector.choice(kernel, asked)


def _line(kernel: Kernel, problem: Any) -> tuple[Any, ...]:
    """What problems share that differ in their length alone; the kernel's name first."""
    return (kernel.name, *static_fields(problem).values(), *coordinates(bucketed(kernel, problem)))


def lengths_between(load: Workload) -> Iterator[tuple[str, Any]]:
    """(kernel, problem) of the workload, and every power of two between two of its tuned lengths, for a kernel that
    prefers some defaults those `between` them too; each at the finer steps of fields that have them (Problem.FINER).

    A length that has no winner runs the default of the power of two above it, or the one that the kernel prefers: with
    these none is met unprepared.
    """
    for name, problem in _lengths_between(load):
        yield name, problem
        for finely in finer(problem):
            for size in finer_between(round_up(getattr(problem, finely))):
                yield name, replace(problem, **{finely: size})


def _lengths_between(load: Workload) -> Iterator[tuple[str, Any]]:
    lines: dict[tuple[Any, ...], dict[int, Any]] = {}
    for item in load.items:
        problem = item.problem
        yield item.kernel, problem
        if problem.DYNAMIC:
            line = _line(find_kernel(item.kernel), problem)
            lines.setdefault(line, {})[getattr(problem, problem.DYNAMIC)] = problem
    for (kernel_name, *_), points in lines.items():
        lengths = {1 << e for e in range(min(points).bit_length(), max(points).bit_length())}
        if find_kernel(kernel_name).prefer is not None:
            lengths |= {length for power in lengths for length in between(power)}
        for length in sorted(lengths):
            if length not in points and min(points) < length < max(points):
                above = points[min(n for n in points if n > length)]
                try:
                    yield kernel_name, replace(above, **{above.DYNAMIC: length})
                except ProblemError:  # longer than the keys that it attends to, say
                    continue


def workload_builds(
    load: Workload, selector: Selector, notes: list[str], chosen: list[Choice] | None = None
) -> list[Build]:
    """What `load` needs on the selector's target. chosen: is given every choice, each once."""
    builds: dict[str, Build] = {}
    texts: dict[int, tuple[Choice, str]] = {}
    rendered = Renderer()
    unsupported: Counter[str] = Counter()
    for problem, choice in choices(load, selector, unsupported):
        if id(choice) not in texts:
            texts[id(choice)] = choice, rendered(choice.kernel, choice.problem, choice.config, choice.target)
        build = _build(builds, choice.kernel, problem, choice.config, selector.target, texts[id(choice)][1])
        build.origins[choice.source] += 1
        build.stored = build.stored or choice.cubin
        build.serves.append({k: v for k, v in fields_of(problem).items() if k in problem.RUNTIME})
    notes += [f"{text} ({count} problems)" for text, count in unsupported.items()]
    if chosen is not None:
        chosen += [choice for choice, _ in texts.values()]
    return list(builds.values())


def models_builds(
    models: Sequence[Model],
    targets: Iterable[Target],
    sources: Sequence[Source | PerBoard],
    notes: list[str],
    chosen: list[Choice],
    kernels: Iterable[str] = (),
) -> list[Build]:
    """What all of `models` need on all of `targets`: each source for each board once.

    sources: databases in lookup order. chosen: is given every choice. kernels: only these, none for all. Raises
    UsageError where a model needs none of them.
    """
    from kerngen.runtime.fallbacks import FALLBACKS

    builds: list[Build] = []
    for target in targets:
        selector = Selector(sources, target)
        here: dict[str, Build] = {}
        for model in models:
            load = workload(model, target.arch)
            load = load.only(kernels) if kernels else load
            notes += [f"outside our kernels: {name} ({FALLBACKS[name]})" for name in load.missing]
            for build in workload_builds(load, selector, notes, chosen):
                if (known := here.setdefault(build.source, build)) is not build:
                    known.origins.update(build.origins)
                    known.serves += build.serves
        builds += here.values()
    return builds


def case_builds(target: Target, names: Iterable[str], notes: list[str]) -> list[Build]:
    """The default configuration of every test case that `target` supports. names: of kernels, none for all."""
    found: list[Build] = []
    unsupported: Counter[str] = Counter()
    for kernel in map(find_kernel, list(names) or kernel_names()):
        builds: dict[str, Build] = {}
        for case in kernel.cases.CASES:
            if (why := kernel.why_unsupported(case.problem, target)) is not None:
                unsupported[f"{kernel.name} on {target.arch}: {why}"] += 1
                continue
            config = kernel.default_config(case.problem, target)
            source = render(kernel, case.problem, config, target)
            build = _build(builds, kernel, case.problem, config, target, source)
            build.origins[DEFAULT] += 1
            build.serves.append(case.name)
        found += builds.values()
    notes += [f"{text} ({count} cases)" for text, count in unsupported.items()]
    return found


def _build(builds: dict[str, Build], kernel: Kernel, problem: Any, config: Any, target: Target, source: str) -> Build:
    return builds.setdefault(source, Build(kernel, target, problem, config, source))


def missing(builds: Iterable[Build], cache: CompileCache, *, ptx: bool = False) -> list[Build]:
    """Those whose machine code lies in no database and not in `cache`. Raises ToolchainError as `CompileCache.find`."""
    return [b for b in builds if _known(b, cache, ptx) is None]


def _known(build: Build, cache: CompileCache, ptx: bool) -> Cubin | Ptx | None:
    if ptx:
        return cache.get_ptx(source_key(build.source, build.target.arch.ptx_target))
    return build.stored or cache.find(build.source, build.target.arch)


def build_all(builds: list[Build], cache: CompileCache, jobs: int, bar: Reporter, *, ptx: bool = False) -> list[Built]:
    """The machine code of all, in order: from the database, from `cache`, or compiled in `jobs` processes.

    Raises TuningMiss where KERNGEN_NO_COMPILE forbids that: ask `require_allowed` first, which names them all.
    """
    known = [_known(b, cache, ptx) for b in builds]
    here = "NVRTC {}.{} here".format(*nvrtc_version())
    found: list[Built] = []
    with CachedCompiler(jobs, cache) as compiler, ThreadPoolExecutor(jobs) as threads:
        futures: list[Future[Any] | None] = []
        for build, image in zip(builds, known, strict=True):
            if image is not None:
                futures.append(None)
            elif ptx:
                futures.append(threads.submit(cache.get_or_compile_ptx, build.source, build.target.arch))
            else:
                futures.append(compiler.submit(build.source, build.target.arch))
        try:
            for i, (build, image, future) in enumerate(zip(builds, known, futures, strict=True)):
                bar.update(i, len(builds), f"{build.kernel.name} on {build.target.arch}")
                if future is None:
                    found.append(Built(build, image, "database" if image is build.stored else "compile cache"))
                    continue
                try:
                    found.append(Built(build, future.result(), here))
                except CompileError as e:
                    found.append(Built(build, None, e.message))
        finally:
            threads.shutdown(cancel_futures=True)
    return found


CASES = "--cases"  # what `kerngen compile` is asked for the builds of all test cases by


def require_allowed(builds: list[Build], cache: CompileCache, *, ptx: bool = False, what: str = "--model NAME") -> None:
    """Raises TuningMiss, naming them, where builds are missing that KERNGEN_NO_COMPILE forbids to make.

    what: which of them `kerngen compile` would be asked for.
    """
    if not compiling_is_forbidden() or not (lacking := missing(builds, cache, ptx=ptx)):
        return
    named = "; ".join(map(str, lacking[:3])) + (f"; and {len(lacking) - 3} more" if len(lacking) > 3 else "")
    arches = ",".join(dict.fromkeys(b.target.arch.name for b in lacking))
    raise TuningMiss(
        f"{len(lacking)} of {len(builds)} builds for {arches} are in no database that was asked, and not in the "
        f"compile cache {cache.dir}, and KERNGEN_NO_COMPILE forbids compiling them: {named}",
        hint=f"without KERNGEN_NO_COMPILE, here or elsewhere: kerngen compile --arch {arches} {what} -o "
        + (
            "FOLDER; then export KERNGEN_CACHE_DIR=FOLDER" if what == CASES else "FILE; then export KERNGEN_BUNDLE=FILE"
        ),
    )
