"""The search space of one problem: its valid configurations, and the reason why each other one is refused.

`points` knows a space whole, by far fewer questions than it has points: why_invalid is a function, and what it answered
holds for all configurations that agree in the fields that it read (field_tracing.py). What a search weighs is
`askable`, a part of a large space, and what lies `near` to its best. Nothing is asked before it is needed: the default
configuration is at hand at once, and `walk` gives valid ones as they are found.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice, product
from math import prod
from random import Random
from typing import Any

from kerngen.arch import Target
from kerngen.errors import ConfigRefused
from kerngen.templates.kernel import Body, Kernel, describe, fields_of
from kerngen.tuning.field_tracing import leaves, traced

MOST_CALLS = 1 << 19  # of why_invalid for one body: seconds. Today's largest space takes 114,432 for 1,935,360 points
SAMPLE = 1 << 16  # points that stand for a body's space that takes more
SURVEYED = 1 << 11  # points that stand for one of more than WHOLE in a survey: 10 % are valid to within 0.7 points
# Of a space of more points a search weighs a part: those near the kernel's candidates, and some that are drawn. To
# know attn_decode's whole, up to 60,000 valid points, and time it by the cost model took 8 to 15 s of a core for each
# of a model's 270 problems.
WHOLE, MOST_NEAR, MOST_DRAWN = 1 << 13, 768, 256
DRAWS = 32  # for each point that is to be drawn: most are refused

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
    each once. complete: False where a seeded sample of points stands for a body's space: in a survey, or where it is so
    irregular that it cannot be known whole. num_valid: of all its points, an estimate then; `valid` has the sample's.
    """

    space: Space
    valid: tuple[Any, ...]
    refusals: tuple[Refusal, ...]
    complete: bool
    num_valid: int

    @property
    def size(self) -> int:
        return space_size(self.space)

    @property
    def num_refused(self) -> int:
        """Of the points that were looked at."""
        return sum(r.count for r in self.refusals)


class Candidates:
    """The configurations of one problem. The default, which may lie off the grid, is known at once; what else is valid
    when first asked for.
    """

    def __init__(self, kernel: Kernel, problem: Any, target: Target, default: Any) -> None:
        self.kernel, self.problem, self.target, self.default = kernel, problem, target, default

    @property
    def is_large(self) -> bool:
        """Whether searches weigh a part of the space."""
        return self.space_size > WHOLE

    @property
    def are_known(self) -> bool:
        """Whether asking costs nothing any more."""
        return "points" in self.__dict__

    @property
    def fused(self) -> bool | None:
        """As the default has it; None where the kernel replaces no others."""
        return self.default.fused if self.kernel.is_fused else None

    def own(self, config: Any) -> Any:
        """`config`, of another problem of the kernel, as this one may run it."""
        return config if self.fused is None else replace(config, fused=self.fused)

    @cached_property
    def space(self) -> Space:
        return space_of(self.kernel, self.problem, self.target, self.fused)

    @property
    def space_size(self) -> int:
        return space_size(self.space)

    @cached_property
    def points(self) -> Enumeration:
        return enumerated(self.kernel, self.problem, self.target, self.fused)

    @property
    def valid(self) -> tuple[Any, ...]:
        return self.points.valid

    @cached_property
    def survey(self) -> Enumeration:
        """As `points`, by a sample of SURVEYED points of each body that has more than WHOLE: some hundredths of a
        second for any space. `points` takes minutes for those of a large model.
        """
        return enumerated(self.kernel, self.problem, self.target, self.fused, survey=True)

    @cached_property
    def askable(self) -> tuple[Any, ...]:
        """What a search weighs: what is valid, and the default, wherever that lies. Of a space of more than WHOLE
        points what differs in one or two fields from a candidate of the kernel, and points that a seed draws. In an
        order that is the same in every process.
        """
        if not self.is_large:
            return tuple(dict.fromkeys([*self.valid, self.default]))
        centers = [self.own(c) for c in self.kernel.candidates(self.problem, self.target)]
        near = self.near(dict.fromkeys([self.default, *centers]), {self.default})
        found = dict.fromkeys([self.default, *islice(near, MOST_NEAR)])
        for part in self.space:
            found |= dict.fromkeys(islice(_drawn(self, part), MOST_DRAWN // len(self.space)))
        return tuple(found)

    def near(self, centers: Iterable[Any], asked: set[Any]) -> Iterator[Any]:
        """The valid points that differ from a center, moved onto the grid, in no field, in one, and in two: first those
        of all centers that differ in the fewest. asked: what is left out, to which all that is looked at is added.
        """
        bases = [(part, base) for c in centers for part in self.space if (base := _on_part(part, c)) is not None]
        for num_fields in range(3):
            walks = deque(_varied(part, base, num_fields) for part, base in bases)
            while walks:  # in turn, so that no center has all
                if (values := next(walks[0], None)) is None:
                    walks.popleft()
                    continue
                walks.rotate(-1)
                if (config := self.kernel.config_type(**values)) not in asked:
                    asked.add(config)
                    if self.is_valid(config):
                        yield config

    def is_valid(self, config: Any) -> bool:
        return self.kernel.spec.why_invalid(self.problem, config, self.target) is None

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return self.points.refusals

    @property
    def complete(self) -> bool:
        return self.points.complete


def _on_part(part: Part, config: Any) -> dict[str, Any] | None:
    """`config` with each field at the nearest value that `part` has; None where it is another body's."""
    base = {}
    for name, values in part.items():
        value = getattr(config, name)
        if value not in values and (len(values) == 1 or isinstance(value, str)):
            return None
        base[name] = value if value in values else min(values, key=lambda v: abs(v - value))
    return base


def _varied(part: Part, base: dict[str, Any], num_fields: int) -> Iterator[dict[str, Any]]:
    others = {name: [v for v in values if v != base[name]] for name, values in part.items()}
    for names in combinations([name for name, values in others.items() if values], num_fields):
        for values in product(*(others[name] for name in names)):
            yield base | dict(zip(names, values, strict=True))


def _drawn(found: Candidates, part: Part) -> Iterator[Any]:
    """Valid points of `part` that a fixed seed draws, of so many draws in all."""
    random = Random(0)
    for _ in range(MOST_DRAWN * DRAWS):
        config = found.kernel.config_type(**{name: random.choice(values) for name, values in part.items()})
        if found.is_valid(config):
            yield config


def candidates(kernel: Kernel, problem: Any, target: Target, fused: bool | None = None) -> Candidates:
    """What can run `problem` on `target`. Asks why_invalid only; nothing is compiled. fused: as in space_of.

    Raises ConfigRefused if the kernel does not support the problem there at all, or refuses its own default.
    """
    if (why := kernel.why_unsupported(problem, target)) is not None:
        raise ConfigRefused(f"{kernel.name}{describe(problem)} on {target.arch}: {why}")
    default = kernel.default_config(problem, target)
    if kernel.is_fused and fused is not None:
        default = replace(default, fused=fused)
    kernel.require_valid(problem, default, target)
    return Candidates(kernel, problem, target, default)


def space_of(kernel: Kernel, problem: Any, target: Target, fused: bool | None = None) -> Space:
    """The spaces of the bodies that serve on `target` and are proven, one after the other.

    fused: of a kernel that replaces several, whether steps ask it now; None: as its default says. All configurations
    have that, since no look at the kernel alone can tell which is faster.
    """
    return tuple(part_of(kernel, b, problem, target, fused) for b in kernel.bodies(target.arch) if b.proven)


def part_of(kernel: Kernel, body: Body, problem: Any, target: Target, fused: bool | None = None) -> Part:
    """One body's. fused: as in space_of."""
    found = body.choices(problem, target)
    if kernel.is_fused:
        found["fused"] = (kernel.default_config(problem, target).fused if fused is None else fused,)
    return found


def space_size(space: Space) -> int:
    return sum(prod(len(values) for values in part.values()) for part in space)


def on_grid(space: Space, config: Any) -> int | None:
    """Which part of `space` has `config` among its points, None where none does."""
    fields = fields_of(config)
    defaults = fields_of(type(config)())
    for index, part in enumerate(space):
        if all(v in part.get(k, (defaults[k],)) for k, v in fields.items()):
            return index
    return None


def walk(kernel: Kernel, problem: Any, target: Target) -> Iterator[Any]:
    """The valid configurations as they are found, in no order that means anything: the first one at once."""
    for part in space_of(kernel, problem, target):
        for read, reason in leaves(kernel.config_type, part, lambda c: kernel.spec.why_invalid(problem, c, target)):
            if reason is None:
                chosen = {k: v for k, v in read.items() if k in part}
                yield from (config for _, config in _Places(part).points(kernel.config_type, chosen))


# -- sorted out


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
    """One body's points. refused: a reason without its figures -> how often, the first in full, and of what."""

    valid: tuple[Any, ...]
    refused: dict[str, tuple[int, str, Any]]
    complete: bool
    num_valid: int  # of all its points, estimated where they are a sample's


_known: dict[tuple[Any, ...], list[tuple[dict[str, Any], _Sorted]]] = {}
_together: dict[tuple[_Sorted, ...], Enumeration] = {}


def enumerated(
    kernel: Kernel, problem: Any, target: Target, fused: bool | None = None, *, survey: bool = False
) -> Enumeration:
    """The grid's valid configurations, and the refusals. fused: as in space_of. survey: as in Candidates."""
    space = space_of(kernel, problem, target, fused)
    parts = tuple(_sorted_out(kernel, part, problem, target, survey) for part in space)
    if parts in _together:
        return _together[parts]
    refused: dict[str, tuple[int, str, Any]] = {}
    for part in parts:
        for shape, (count, first, example) in part.refused.items():
            before = refused.get(shape, (0, first, example))
            refused[shape] = (before[0] + count, before[1], before[2])
    in_order = sorted(refused.values(), key=lambda r: (-r[0], r[1]))
    valid = tuple(config for part in parts for config in part.valid)
    complete = all(part.complete for part in parts)
    num_valid = sum(part.num_valid for part in parts)
    _together[parts] = Enumeration(space, valid, tuple(Refusal(*r) for r in in_order), complete, num_valid)
    return _together[parts]


def valid_of(kernel: Kernel, body: Body, problem: Any, target: Target) -> tuple[Any, ...]:
    """The valid configurations of one body, proven or not; of a sample where it is too irregular to be known whole."""
    return _sorted_out(kernel, part_of(kernel, body, problem, target), problem, target).valid


def _sorted_out(kernel: Kernel, part: Part, problem: Any, target: Target, survey: bool = False) -> _Sorted:
    """One body's points, kept by the kernel as it is loaded now and by the fields of the problem that decided.

    Two problems that agree in those get one answer: the many of a workload that differ only in tokens cost one
    enumeration of most bodies.
    """
    survey = survey and space_size((part,)) > WHOLE
    seen = _known.setdefault((kernel.name, kernel.config_type, target, tuple(part.items()), survey), [])
    for read, answer in seen:
        if all(getattr(problem, k) == v for k, v in read.items()):
            return answer
    asked, read = traced(type(problem), lambda name: getattr(problem, name))
    whole = None if survey else _whole(kernel, part, asked, target)
    found = whole or _sample(kernel, part, asked, target, SURVEYED if survey else SAMPLE)
    seen.append((read, found))
    return found


def _whole(kernel: Kernel, part: Part, problem: Any, target: Target) -> _Sorted | None:
    """Every point of `part`; None where that takes more than MOST_CALLS."""
    cases = leaves(kernel.config_type, part, lambda c: kernel.spec.why_invalid(problem, c, target))
    valid: list[tuple[int, Any]] = []
    refused: dict[str, tuple[int, int, str, dict[str, Any]]] = {}  # how often, where first, the first in full, of what
    size, places = space_size((part,)), _Places(part)
    for calls, (read, reason) in enumerate(cases):
        if calls == MOST_CALLS:
            return None
        decided = {k: v for k, v in read.items() if k in part}
        if reason is None:
            valid.extend(places.points(kernel.config_type, decided))
            continue
        shape, at = _shape(reason), places.first(decided)
        covered = size // prod(len(part[k]) for k in decided)
        count, first, of, example = refused.get(shape, (0, at, reason, decided))
        if at < first:
            first, of, example = at, reason, decided
        refused[shape] = count + covered, first, of, example
    valid.sort(key=lambda point: point[0])
    first_of = {k: values[0] for k, values in part.items()}
    return _Sorted(
        tuple(config for _, config in valid),
        {s: (n, why, kernel.config_type(**first_of | example)) for s, (n, _, why, example) in refused.items()},
        complete=True,
        num_valid=len(valid),
    )


def _sample(kernel: Kernel, part: Part, problem: Any, target: Target, most: int) -> _Sorted:
    """As _whole, of `most` points that a fixed seed draws."""
    size = space_size((part,))
    looked_at = min(most, size)
    valid, refused = list[Any](), dict[str, tuple[int, str, Any]]()
    for index in sorted(Random(0).sample(range(size), looked_at)):
        chosen, rest = dict[str, Any](), index
        for name, values in reversed(part.items()):
            rest, at = divmod(rest, len(values))
            chosen[name] = values[at]
        config = kernel.config_type(**chosen)
        if (reason := kernel.spec.why_invalid(problem, config, target)) is None:
            valid.append(config)
        else:
            count, first, example = refused.get(shape := _shape(reason), (0, reason, config))
            refused[shape] = count + 1, first, example
    return _Sorted(tuple(valid), refused, complete=False, num_valid=round(len(valid) * size / looked_at))


def _shape(reason: str) -> str:
    return re.sub(r"\d[\d,.]*", "#", reason)


class _Places:
    """Where points lie in a space's order: the last field runs fastest."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._of: dict[str, dict[Any, int]] = {}
        stride = space_size((part,))
        for name, values in part.items():
            stride //= len(values)
            self._of[name] = {value: i * stride for i, value in enumerate(values)}

    def first(self, chosen: dict[str, Any]) -> int:
        """The place of the first point that has the values `chosen`."""
        return sum(self._of[name][value] for name, value in chosen.items())

    def points(self, cls: type[Any], chosen: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """All points that have the values `chosen`, as a `cls`, each with its place."""
        first, free = self.first(chosen), [name for name in self._part if name not in chosen]
        for values in product(*(self._part[name] for name in free)):
            place = first + sum(self._of[name][value] for name, value in zip(free, values, strict=True))
            yield place, cls(**chosen, **dict(zip(free, values, strict=True)))
