"""Renews prediction files after a change of device code: the same winners, compiled and predicted anew, no search.

A changed spec needs a new search: what may be chosen, or what the model counts, is another. Changed device code moves
a prediction only through registers, and renewing takes minutes in place of an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from kerngen.tuning_db.dist.fields_text import SOURCE_DIGITS, stated
from kerngen.tuning_db.dist.prediction_file import Cell, Family, PredictionFile, dump, parse, rounded
from kerngen.tuning_db.read.canonical_fields import canonical_fields_of, filed_device, named_kernel
from kerngen.tuning_db.read.freshness import source_sha


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """A plan of a family whose source is another today. problem: one that it wins."""

    family: int
    plan: int
    config: Any
    digits: str
    build: Future[Cubin]


def renewed(path: Path, target: Target, compiler: CachedCompiler) -> tuple[str, int]:
    """The text of a predicted sheet of the target's board, and how many of its builds are new.

    Raises DatabaseError where that takes a new search: by another model, or what won cannot be built any more.
    """
    outlook = parse(path.read_text(), str(path))
    anew = _anew(outlook)
    if outlook.model != MODEL:
        raise DatabaseError(f"{path} is by {outlook.model}, and predictions are by {MODEL}", hint=anew)
    if filed_device(target.device) != outlook.device:
        raise DatabaseError(f"{path} is for a {outlook.board} of other figures than kerngen has now", hint=anew)
    rebuilt = list(_rebuilt(outlook, target, compiler))
    families = list(outlook.families)
    for r in rebuilt:
        try:
            build = r.build.result()
        except KerngenError as e:
            raise DatabaseError(f"{path}: {r.config} no longer builds: {e.message}", hint=anew) from e
        if build.nvrtc != outlook.nvrtc:
            raise DatabaseError(f"{path} was built by NVRTC {'.'.join(map(str, outlook.nvrtc))}, and here is "
                                f"{'.'.join(map(str, build.nvrtc))}", hint=anew)  # fmt: skip
        families[r.family] = _with(outlook, families[r.family], r, build, target)
    if not rebuilt:
        return path.read_text(), 0
    return dump(replace(outlook, families=tuple(families))), len(rebuilt)


def _anew(outlook: PredictionFile) -> str:
    return f"python -m tools.prebuilt --device {outlook.board}"


def _rebuilt(outlook: PredictionFile, target: Target, compiler: CachedCompiler) -> Iterator[_Rebuilt]:
    kernel, of = find_kernel(named_kernel(outlook.kernel)), canonical_fields_of(outlook.kernel)
    anew = _anew(outlook)
    for f, family in enumerate(outlook.families):
        for i, plan in enumerate(family.plans):
            if (problem := next(_problems(outlook, family, i), None)) is None:
                raise DatabaseError(f"{outlook.kernel} on {outlook.board}: {plan.config} wins nothing", hint=anew)
            config = kernel.config_type(**filled(plan.config, of.config))
            if (why := kernel.why_invalid(problem, config, target)) is not None:
                raise DatabaseError(
                    f"{outlook.kernel} on {outlook.board}: {config} is no longer valid: {why}", hint=anew
                )
            source = source_of(kernel, problem, config, target.arch)
            if (digits := source_sha(source)[:SOURCE_DIGITS]) != plan.source:
                yield _Rebuilt(f, i, config, digits, compiler.submit(source, target.arch))


def _problems(outlook: PredictionFile, family: Family, plan: int) -> Iterator[Any]:
    """Those that the plan wins."""
    for cell in family.cells:
        for point in cell.points:
            if point.plan == plan:
                yield _problem(outlook, family, cell, point)


def _problem(outlook: PredictionFile, family: Family, cell: Cell, point: Any) -> Any:
    kernel, of = find_kernel(named_kernel(outlook.kernel)), canonical_fields_of(outlook.kernel)
    fields = point.fields or stated(family.static, cell.runtime, outlook.dynamic, point.dynamic)
    return kernel.problem_type(**filled(fields, of.fields))


def _with(outlook: PredictionFile, family: Family, r: _Rebuilt, build: Cubin, target: Target) -> Family:
    """`family` with that plan's digits, and the times that the model gives with what was built."""
    kernel = find_kernel(named_kernel(outlook.kernel))

    def timed(cell: Cell, point: Any) -> Any:
        if point.plan != r.plan:
            return point
        problem = _problem(outlook, family, cell, point)
        return replace(point, us=rounded(predict(kernel, problem, r.config, target, build.entries).latency_us))

    plans = [replace(p, source=r.digits) if i == r.plan else p for i, p in enumerate(family.plans)]
    cells = tuple(replace(c, points=tuple(timed(c, p) for p in c.points)) for c in family.cells)
    return replace(family, plans=tuple(plans), cells=cells)
