"""What to record: the problems, and the part of each one's space, in a file that people write and review.

    {"v": 1, "device": "H200", "problems": [
       {"name": "down-m1", "kernel": "w4a16_gemm", "problem": {"n": 5376, "k": 21504}, "held_out": true,
        "grid": [{"body": ["gemv"], "block_n": [32, 64]}, {"body": ["tma_warp"]}]},
       {"name": "prefill-2k", "kernel": "attn_prefill", "problem": {...}, "sample": 16}]}

Each part of `grid` keeps, of the space of every body that it does not exclude, the points whose fields have one of the
values named; without a grid the whole space is meant. All that is valid of it is recorded, and the default. `sample`
takes so many of it instead, spread over how fast the cost model holds them to be: for fitting that model, which asks
for many problems rather than for many configurations of one. A plan's order is the order of recording.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from kerngen.arch import Target, find_device
from kerngen.errors import KerngenError, RecordingError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.tuning.plan import rank
from kerngen.tuning.recorded import Part

VERSION = 1
DRAWN_FROM = 32  # of a sample, times its size: so many valid points are ranked by the cost model
MOST_DRAWS = 1 << 16  # of a space in which next to nothing is valid; of a small one REPEATS times its points
REPEATS = 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """One problem of a plan. sample: 0 for all of its grid."""

    name: str
    kernel: str
    problem: Mapping[str, Any]
    grid: tuple[Part, ...] = ()
    held_out: bool = False
    sample: int = 0


@dataclass(frozen=True, slots=True)
class RecordPlan:
    device: str
    problems: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """What a Wanted means on a target. grid: the parts, restricted. configs: what to record, the default first.

    size: points of the grid, valid or not.
    """

    kernel: Kernel
    problem: Any
    grid: tuple[Part, ...]
    default: Any
    configs: tuple[Any, ...] = field(repr=False)
    size: int


def read_plan(path: Path) -> RecordPlan:
    """The plan in `path`. Raises RecordingError that names the file and the problem; OSError."""
    try:
        given = json.loads(path.read_bytes())
    except ValueError as e:
        raise RecordingError(f"{path}: no JSON: {e}") from None
    if not isinstance(given, dict) or given.get("v") != VERSION or given.keys() != {"v", "device", "problems"}:
        raise RecordingError(f'{path}: a plan is {{"v": {VERSION}, "device": NAME, "problems": [...]}}')
    problems = tuple(_wanted(path, i, w) for i, w in enumerate(given["problems"]))
    names = [(w.kernel, w.name) for w in problems]
    if twice := sorted({f"{k}-{n}" for k, n in names if names.count((k, n)) > 1}):
        raise RecordingError(f"{path}: {', '.join(twice)} is there twice")
    find_device(given["device"])
    return RecordPlan(given["device"], problems)


def _wanted(path: Path, index: int, given: Any) -> Wanted:
    where = f"{path}: problem {index + 1}"
    if not isinstance(given, dict) or not {"name", "kernel", "problem"} <= given.keys():
        raise RecordingError(f"{where} has no name, kernel or problem")
    where += f" ({given['kernel']}-{given['name']})"
    if unknown := sorted(given.keys() - {f.name for f in fields(Wanted)}):
        raise RecordingError(f"{where}: unknown {', '.join(unknown)}")
    if not str(given["name"]).replace("-", "").replace("_", "").isalnum():
        raise RecordingError(f"{where}: a name is letters, digits, - and _: it becomes a file's")
    grid = given.get("grid", [])
    if not all(isinstance(p, dict) and all(isinstance(v, list) and v for v in p.values()) for p in grid):
        raise RecordingError(f"{where}: grid is a list of fields with lists of values")
    return Wanted(**(given | {"grid": tuple({k: tuple(v) for k, v in p.items()} for p in grid)}))


def points(wanted: Wanted, target: Target) -> Points:
    """What to record of `wanted` on `target`. Asks why_invalid and the cost model; compiles nothing.

    Raises RecordingError, naming the problem, where the kernel cannot serve it, or where the grid names a field or a
    value that the space has not or leaves nothing that is valid.
    """
    try:
        return _points(wanted, target)
    except (KerngenError, TypeError) as e:
        raise RecordingError(f"{wanted.kernel}-{wanted.name}: {getattr(e, 'message', e)}") from e


def _points(wanted: Wanted, target: Target) -> Points:
    kernel = find_kernel(wanted.kernel)
    problem = kernel.problem_type(**wanted.problem)
    default = kernel.default_config(problem, target)
    kernel.require_valid(problem, default, target)
    grid = _restricted(kernel, problem, target, wanted.grid)
    size = sum(prod(map(len, part.values())) for part in grid)
    if wanted.sample:
        found = _sample(kernel, problem, target, grid, wanted.sample)
    else:
        found = [c for c in _every(kernel, grid) if kernel.why_invalid(problem, c, target) is None]
    if not found:
        raise RecordingError(f"none of the grid's {size:,} points is valid")
    return Points(kernel, problem, grid, default, tuple(dict.fromkeys([default, *found])), size)


def _restricted(kernel: Kernel, problem: Any, target: Target, wanted: tuple[Part, ...]) -> tuple[Part, ...]:
    """Each body's space, or the parts of it that `wanted` keeps."""
    found: list[Part] = []
    for part in wanted or ({},):
        known, fits = set[str](), False
        for body in (b for b in kernel.bodies(target.arch) if b.proven):
            space = body.choices(problem, target)
            known |= space.keys()
            if any(name in part and not set(part[name]) & set(space[name]) for name in body.when):
                continue
            fits = True
            for name in part.keys() & space.keys() - body.when.keys():
                if absent := [v for v in part[name] if v not in space[name]]:
                    raise RecordingError(f"{name} is never {absent} there; it is one of {space[name]}")
            if lost := sorted(part.keys() - space.keys()):
                raise RecordingError(f"the body with {dict(body.when)} has no {', '.join(lost)}")
            found.append({k: tuple(v for v in vs if v in part.get(k, vs)) for k, vs in space.items()})
        if not fits:
            raise RecordingError(f"no body has the grid's {dict(part)}")
    return tuple(found)


def _every(kernel: Kernel, grid: tuple[Part, ...]) -> Iterator[Any]:
    for part in grid:
        for values in product(*part.values()):
            yield kernel.config_type(**dict(zip(part, values, strict=True)))


def _sample(kernel: Kernel, problem: Any, target: Target, grid: tuple[Part, ...], count: int) -> list[Any]:
    """`count` valid points: of many that are spread evenly over the grid, ranked by the cost model, the best, the worst
    and others between, the closer to each other the faster.
    """
    drawn: list[Any] = []
    for part in grid:
        drawn += _spread(kernel, problem, target, part, count * DRAWN_FROM // len(grid))
    ranked = [c for _, c in rank(kernel, problem, target, dict.fromkeys(drawn))]
    if len(ranked) <= count:
        return ranked
    places: dict[int, None] = {}
    for i in range(count):
        at = round((i / max(count - 1, 1)) ** 2 * (len(ranked) - 1))
        while at in places:
            at = (at + 1) % len(ranked)
        places[at] = None
    return [ranked[at] for at in sorted(places)]


def _spread(kernel: Kernel, problem: Any, target: Target, part: Part, count: int) -> list[Any]:
    """Up to `count` valid points of `part`, the first of an additive recurrence by powers of one number.

    That is a sequence of low discrepancy in as many dimensions as the part has fields with a choice (M. Roberts, 2018:
    the root of x ** (d + 1) = x + 1): any prefix of it holds every value of every field about equally often.
    """
    only = {k: vs[0] for k, vs in part.items() if len(vs) == 1}
    several = {k: vs for k, vs in part.items() if len(vs) != 1}
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (len(several) + 1))
    steps = [root ** -(d + 1) for d in range(len(several))]
    found: dict[Any, None] = {}
    for n in range(1, min(MOST_DRAWS, REPEATS * prod(map(len, part.values())))):
        chosen = {k: vs[int((0.5 + n * s) % 1.0 * len(vs))] for (k, vs), s in zip(several.items(), steps, strict=True)}
        config = kernel.config_type(**only, **chosen)
        if config not in found and kernel.why_invalid(problem, config, target) is None:
            found[config] = None
            if len(found) == count:
                break
    return list(found)
