"""Renews predicted results files after a change of device code: the same winners, compiled and predicted anew.

A changed spec needs a new search: what may be chosen, or what the model counts, is another. Changed device code moves
a prediction only through registers, and renewing takes minutes in place of an hour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerngen.arch import Target
from kerngen.compiler.cache import CachedCompiler
from kerngen.compiler.compile import Cubin
from kerngen.compiler.render import source_of
from kerngen.cost.predict import MODEL, predict
from kerngen.errors import DatabaseError, KerngenError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import filled
from kerngen.tuning_db.dist.fields_text import PREDICTED_DIGITS, SOURCE_DIGITS, rounded
from kerngen.tuning_db.dist.results_file import Point, Problem, ResultsFile, Trial, dump
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.tuning_db.read.canonical_fields import canonical_fields_of, filed_device, named_kernel
from kerngen.tuning_db.read.freshness import source_sha


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """A configuration whose source is another today. digits: the first ones of its SHA-256."""

    config: Any
    digits: str
    build: Future[Cubin]


def renewed(path: Path, target: Target, compiler: CachedCompiler) -> tuple[str, int]:
    """The text of a predicted results file of the target's board, and how many of its builds are new.

    Raises DatabaseError where that takes a new search: by another model, or what won cannot be built any more.
    """
    text = path.read_text()
    file = parse(text, str(path))
    anew = f"python -m tools.prebuilt --device {file.board}"
    if file.runs or [m.name for m in file.models] != [MODEL]:
        told = ", ".join([*(f"run {r.id}" for r in file.runs), *(m.name for m in file.models)])
        raise DatabaseError(f"{path} is by {told or 'nobody'}, and predictions are by {MODEL}", hint=anew)
    if filed_device(target.device) != file.device:
        raise DatabaseError(f"{path} is for a {file.board} of other figures than kerngen has now", hint=anew)
    rebuilt = [dict(_rebuilt(file, problem, target, compiler, anew)) for problem in file.problems]
    nvrtc = file.models[0].nvrtc or (0, 0)
    for r in (r for of_problem in rebuilt for r in of_problem.values()):
        try:
            build = r.build.result()
        except KerngenError as e:
            raise DatabaseError(f"{path}: {r.config} no longer builds: {e.message}", hint=anew) from e
        if build.nvrtc != nvrtc:
            raise DatabaseError(f"{path} was built by NVRTC {'.'.join(map(str, nvrtc))}, and here is "
                                f"{'.'.join(map(str, build.nvrtc))}", hint=anew)  # fmt: skip
    problems = tuple(_with(file, p, of_p, target) for p, of_p in zip(file.problems, rebuilt, strict=True))
    count = sum(map(len, rebuilt))
    return dump(replace(file, problems=problems)) if count else text, count


def _rebuilt(
    file: ResultsFile, problem: Problem, target: Target, compiler: CachedCompiler, anew: str
) -> Iterator[tuple[int, _Rebuilt]]:
    """By index of the problem's configurations."""
    kernel, of = find_kernel(named_kernel(file.kernel)), canonical_fields_of(file.kernel)
    first = {t.config: point for point in reversed(problem.points) for t in point.trials}
    for i, told in enumerate(problem.configs):
        asked = _problem(file, problem, first[i])
        config = kernel.config_type(**filled(told.fields, of.config))
        if (why := kernel.why_invalid(asked, config, target)) is not None:
            raise DatabaseError(f"{file.kernel} on {file.board}: {config} is no longer valid: {why}", hint=anew)
        source = source_of(kernel, asked, config, target.arch)
        if (digits := source_sha(source)[:SOURCE_DIGITS]) != told.source:
            yield i, _Rebuilt(config, digits, compiler.submit(source, target.arch))


def _problem(file: ResultsFile, problem: Problem, point: Point) -> Any:
    kernel, of = find_kernel(named_kernel(file.kernel)), canonical_fields_of(file.kernel)
    return kernel.problem_type(**filled(file.fields(problem, point), of.fields))


def _with(file: ResultsFile, problem: Problem, rebuilt: Mapping[int, _Rebuilt], target: Target) -> Problem:
    """`problem` with the digits of what was built anew, and the times that the model gives with it."""
    kernel = find_kernel(named_kernel(file.kernel))

    def timed(point: Point, trial: Trial) -> Trial:
        if (r := rebuilt.get(trial.config)) is None:
            return trial
        asked = _problem(file, problem, point)
        found = predict(kernel, asked, r.config, target, r.build.result().entries)
        return replace(trial, us=rounded(found.latency_us, PREDICTED_DIGITS))

    configs = tuple(replace(c, source=rebuilt[i].digits) if i in rebuilt else c for i, c in enumerate(problem.configs))
    points = tuple(replace(p, trials=tuple(timed(p, t) for t in p.trials)) for p in problem.points)
    return replace(problem, configs=configs, points=points)
