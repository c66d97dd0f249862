"""Spaces known whole: against brute force, on small made-up spaces and on parts of every kernel's own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from typing import Any, ClassVar

import pytest
from command import Kerngen

import kerngen.tuning.space
from kerngen.arch import ARCHES, Target, find_arch
from kerngen.errors import TemplateError
from kerngen.templates import find_kernel, kernel_names
from kerngen.templates.kernel import Kernel
from kerngen.tuning.field_tracing import Remembered, leaves, traced
from kerngen.tuning.space import Part, candidates, enumerated, space_of, space_size, walk

SM90 = Target.of(find_arch("sm90"))
SOME_POINTS = 1500  # of a kernel's body: brute force takes 20 us each


@dataclass(frozen=True, slots=True)
class Five:
    a: int = 0
    b: int = 0
    c: str = "x"
    d: bool = False
    e: int = 7

    @property
    def both(self) -> int:
        return self.a + self.b

    def scaled(self, by: int) -> int:
        return self.e * by


def _brute(grid: Part, of: Callable[[Any], Any]) -> dict[Any, Any]:
    return {c: of(c) for c in (Five(**dict(zip(grid, v, strict=True))) for v in product(*grid.values()))}


def _made_up(rng: random.Random) -> Callable[[Five], str | None]:
    """Checks in a random order, each of which reads some fields, more of them where the first ones say so."""
    names = ("a", "b", "c", "d", "e", "both")
    checks = [(rng.choice(names), rng.choice(names), rng.randrange(2, 4), rng.randrange(4)) for _ in range(4)]

    def why(c: Five) -> str | None:
        for i, (first, then, modulus, rest) in enumerate(checks):
            number = ord(c.c) if first == "c" else int(getattr(c, first))
            if number % modulus == 0 and (number + len(str(getattr(c, then)))) % 4 == rest:
                return f"check {'abcd'[i]}: {first} is {number}"
        return None

    return why


@pytest.mark.parametrize("seed", range(60))
def test_the_whole_is_what_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    values = {"a": range(6), "b": range(5), "c": "xyz", "d": (False, True), "e": range(4)}
    grid: Part = {k: tuple(sorted(rng.sample(list(v), rng.randrange(1, len(v) + 1)))) for k, v in values.items()}
    for left_out in rng.sample(list(grid), rng.randrange(2)):
        del grid[left_out]
    grid = dict(rng.sample(list(grid.items()), len(grid)))
    why, found = _made_up(rng), Counter[str | None]()
    every, calls = _brute(grid, why), 0
    for read, answer in leaves(Five, grid, why):
        calls += 1
        same = [c for c in every if all(getattr(c, k) == v for k, v in read.items())]
        assert same
        assert {every[c] for c in same} == {answer}
        found[answer] += len(same)
    assert found == Counter(every.values())
    assert calls <= len(every)
    remembered = Remembered(Five, why)
    assert {c: remembered(c) for c in every} == every == {c: remembered(c) for c in every}
    assert remembered.num_calls == calls, "a case each, as there"


def test_what_is_watched_is_like_what_it_stands_for() -> None:
    value, read = traced(Five, {"a": 1, "b": 2, "c": "x", "d": True, "e": 5}.__getitem__)
    assert (value.both, value.scaled(2)) == (3, 10)
    assert list(read) == ["a", "b", "e"], "through a property and a method too"
    assert value == Five(1, 2, "x", True, 5) == value
    assert hash(value) == hash(Five(1, 2, "x", True, 5))
    assert len(read) == 5
    changed = replace(value, a=9)
    assert type(changed) is Five
    assert changed.a == 9
    assert isinstance(value, Five)
    with pytest.raises(AttributeError):
        value.a = 3


def test_what_is_no_function_is_named() -> None:
    turns = iter("abcabdabe" * 20)
    with pytest.raises(TemplateError, match=r"no function of its arguments"):
        list(leaves(Five, dict.fromkeys("abde", (0, 1)), lambda c: [getattr(c, next(turns)) for _ in range(3)]))


def _some(part: Part, rng: random.Random) -> Part:
    """A grid within `part` of at most SOME_POINTS points."""
    grid = dict(part)
    while space_size((grid,)) > SOME_POINTS:
        name = rng.choice([k for k, v in grid.items() if len(v) > 1])
        grid[name] = tuple(sorted(rng.sample(grid[name], len(grid[name]) - 1), key=part[name].index))
    return grid


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_is_known_as_brute_force_knows_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all that an enumeration says: the valid ones in order, and each reason with its count and first example."""
    kernel, rng = find_kernel(name), random.Random(name)
    cases = [c.problem for c in kernel.cases.CASES]
    for arch in rng.sample(list(ARCHES.values()), 3):
        target = Target.of(arch)
        served = [p for p in cases if kernel.why_unsupported(p, target) is None]
        for problem in rng.sample(served, min(2, len(served))):
            grids = tuple(_some(part, rng) for part in space_of(kernel, problem, target))
            monkeypatch.setattr("kerngen.tuning.space.space_of", lambda *_, grids=grids: grids)
            found = enumerated(kernel, problem, target)
            assert found.complete
            valid, counts = [], Counter[str]()
            first: dict[str, tuple[str, Any]] = {}
            for grid in grids:
                for values in product(*grid.values()):
                    config = kernel.config_type(**dict(zip(grid, values, strict=True)))
                    if (why := kernel.spec.why_invalid(problem, config, target)) is None:
                        valid.append(config)
                    else:
                        shape = kerngen.tuning.space._shape(why)
                        counts[shape] += 1
                        first.setdefault(shape, (why, config))
            assert list(found.valid) == valid
            expected = {(counts[shape], *first[shape]) for shape in counts}
            assert {(r.count, r.reason, r.config) for r in found.refusals} == expected
            assert set(walk(kernel, problem, target)) == set(valid)
            monkeypatch.undo()


def _layers() -> tuple[Kernel, Any]:
    kernel = find_kernel("decode_layers")
    return kernel, kernel.cases.CASES[0].problem


def test_the_largest_space_is_known_whole() -> None:
    """With far fewer questions than it has points. Contexts share it: why_invalid reads none, in methods neither."""
    kernel, problem = _layers()
    problem = kernel.problem_type()  # a period of the 31B
    found = enumerated(kernel, problem, SM90)
    assert found.complete
    assert found.size > 1_900_000
    assert len(found.valid) > 20_000
    assert found.num_refused + len(found.valid) == found.size
    assert enumerated(kernel, replace(problem, kv_len=8192), SM90) is found
    assert enumerated(kernel, replace(problem, inner=problem.inner // 2), SM90) is not found


def test_nothing_is_asked_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, problem = _layers()
    asked = 0
    refuse = kernel.spec.why_invalid

    def counting(*args: Any) -> str | None:
        nonlocal asked
        asked += 1
        return refuse(*args)

    monkeypatch.setattr(kernel.spec, "why_invalid", counting)
    found = candidates(kernel, problem, SM90)
    assert not found.are_known
    assert asked <= 13, "the checks of the few that the default is chosen among, and its own"
    assert found.space_size > 1_000_000
    first = list(islice(walk(kernel, problem, SM90), 3))
    assert asked < 2000
    assert all(refuse(problem, c, SM90) is None for c in first)


@dataclass(frozen=True)
class WithDict:
    """A dataclass whose values have a __dict__, where a cached property leaves what it computed."""

    width: int = 8

    @cached_property
    def halved(self) -> int:
        return self.width // 2


def test_what_is_not_a_field_is_not_read() -> None:
    value, read = traced(WithDict, lambda name: 20)
    assert (value.halved, value.halved, value.width) == (10, 10, 20)
    assert read == {"width": 20}


@dataclass(frozen=True, slots=True)
class Sized:
    """A problem whose property and method read `width`, and nothing reads `tokens`."""

    RUNTIME: ClassVar[tuple[str, ...]] = ("tokens",)
    DYNAMIC: ClassVar[str] = "tokens"
    width: int = 8
    tokens: int = 1

    @property
    def wide(self) -> bool:
        return self.width > 8

    def halves(self) -> int:
        return self.width // 2


def test_a_problem_is_told_apart_by_what_properties_and_methods_read() -> None:
    value, read = traced(Sized, lambda name: getattr(Sized(16, 3), name))
    assert value.wide
    assert value.halves() == 8
    assert read == {"width": 16}


def test_a_space_that_cannot_be_known_whole_says_so(monkeypatch: pytest.MonkeyPatch, kerngen: Kerngen) -> None:
    monkeypatch.setattr("kerngen.tuning.space.MOST_CALLS", 3)
    monkeypatch.setattr("kerngen.tuning.space.SAMPLE", 20)
    monkeypatch.setattr("kerngen.tuning.space._known", {})
    kernel = find_kernel("attn_prefill")
    target = Target.of(find_arch("sm70"))
    found = candidates(kernel, kernel.problem_type(dtype="fp16"), target)
    assert not found.complete
    assert len(found.valid) + found.points.num_refused == 20 < found.space_size
    assert all(kernel.why_invalid(found.problem, c, target) is None for c in found.valid)
    out = kerngen.ok("kernel", "show", "attn_prefill", "--arch", "sm70", "--no-source")
    assert f"of a sample of 20 of {found.space_size} configurations, too irregular to be known whole, can run" in out
    out = kerngen.ok("tune", "--arch", "sm70", "--model", "gemma-4-31b", "--kernel", "attn_prefill", "--dry-run")
    assert "~: an estimate, by a sample" in out


def test_a_survey_estimates_a_large_space_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = find_kernel("dense_gemv")
    problem = next(c.problem for c in kernel.cases.CASES if candidates(kernel, c.problem, SM90).is_large)
    monkeypatch.setattr(kerngen.tuning.space, "WHOLE", 1 << 9)
    monkeypatch.setattr(kerngen.tuning.space, "SURVEYED", 1 << 8)
    monkeypatch.setattr(kerngen.tuning.space, "_known", {})
    asked: list[Any] = []
    why_invalid = kernel.spec.why_invalid
    monkeypatch.setattr(kernel.spec, "why_invalid", lambda *a: (asked.append(a), why_invalid(*a))[1])
    found = candidates(kernel, problem, SM90)
    survey = found.survey
    num_bodies = len(space_of(kernel, problem, SM90))
    assert len(asked) <= num_bodies << 9
    assert found.points.complete
    assert not survey.complete
    assert survey.size == found.points.size
    assert survey.num_valid == pytest.approx(len(found.valid), rel=0.3)
    assert set(survey.valid) < set(found.valid)
    assert candidates(kernel, problem, SM90).survey is survey
    assert found.points.num_valid == len(found.valid)


def test_a_survey_of_a_small_space_is_all_of_it() -> None:
    kernel = find_kernel("embed")
    found = candidates(kernel, kernel.cases.CASES[0].problem, SM90)
    assert found.survey is found.points
