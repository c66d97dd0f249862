"""Coordinate descent over a made-up step whose kernels interact, with a planted best assignment and a noisy clock."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise, product

import pytest

from kerngen.tuning.descent import Descent, Place, Spent, descend

NOISE = 0.004  # that the descent is told; the clock's is SIGMA
SIGMA = 0.001
NUM_PLACES, NUM_CONFIGS = 7, 5
Chosen = Mapping[str, int]


class Step:
    """Places in a ring. Each takes a time by its configuration, and each two that follow each other one by both."""

    def __init__(self, seed: int, *, planted: bool = True, sigma: float = SIGMA) -> None:
        self._rng = random.Random(seed)
        self._sigma, self.num_judged = sigma, 0
        self.names = [f"k{i}" for i in range(NUM_PLACES)]
        self.pairs = [*pairwise(self.names), (self.names[-1], self.names[0])]
        self.alone = {n: [self._rng.uniform(30, 60) + 3 * c for c in range(NUM_CONFIGS)] for n in self.names}
        self.both = {(pair, x, y): 0.0 for pair in self.pairs for x, y in product(range(NUM_CONFIGS), repeat=2)}
        self.default = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.alone[name] = sorted(self.alone[name])
        if planted:  # two that gain together, and lose by themselves
            a, b = self.pair = self.pairs[self._rng.randrange(NUM_PLACES)]
            self.alone[a][2], self.alone[b][1] = self.alone[a][0] * 1.1, self.alone[b][0] * 1.1
            self.both[self.pair, 2, 1] = -0.3 * (self.alone[a][0] + self.alone[b][0])
            others = [p for p in self.pairs if not {a, b} & set(p)]
            first, second = self._rng.choice(others)  # one that its successor pays for: fastest alone is not best
            self.both |= {((first, second), 0, y): 15.0 for y in range(NUM_CONFIGS)}

    def us(self, chosen: Chosen) -> float:
        return sum(self.alone[n][c] for n, c in chosen.items()) + sum(
            self.both[(a, b), chosen[a], chosen[b]] for a, b in self.pairs
        )

    def judge(self, base: Chosen, other: Chosen) -> float:
        self.num_judged += 1
        return self.us(other) / self.us(base) * (1 + self._rng.gauss(0, self._sigma))

    def best(self) -> Chosen:
        every = (dict(zip(self.names, c, strict=True)) for c in product(range(NUM_CONFIGS), repeat=NUM_PLACES))
        return min(every, key=self.us)

    def places(self) -> list[Place[str, int]]:
        whole = sum(self.alone[n][0] for n in self.names)
        return [Place(n, tuple(range(NUM_CONFIGS)), self.alone[n][0] / whole) for n in self.names]

    def descend(self, most: int = 2000, *, joint: bool = True, starts: tuple[Chosen, ...] = ()) -> Descent[str, int]:
        pairs = self.pairs if joint else []
        return descend(
            self.places(), pairs, self.judge, starts or (self.default,), noise=lambda _: NOISE, max_evaluations=most
        )


@pytest.mark.parametrize("seed", range(12))
def test_the_planted_best_is_found(seed: int) -> None:
    step = Step(seed)
    best = step.best()
    found = step.descend()
    assert step.us(found.chosen) <= step.us(best) * (1 + NOISE)
    planted = dict(sorted(zip(step.pair, (2, 1), strict=True)))
    assert {n: found.chosen[n] for n in planted} == {n: best[n] for n in planted} == planted
    assert found.ratio == pytest.approx(step.us(found.chosen) / step.us(step.default), abs=5 * SIGMA)
    assert found.complete
    assert found.num_evaluations == step.num_judged < 600
    assert {name for move in found.moves for name, _ in move.to} >= set(step.pair)
    seen = {i.pair: i.excess for i in reversed(found.interactions)}  # the first look at each
    assert seen[tuple(planted.items())] < -0.03


def test_without_joint_moves_it_is_not() -> None:
    """What one place at a time cannot reach: the joint moves are what finds it."""
    for seed in range(4):
        step = Step(seed)
        found = step.descend(joint=False)
        assert step.us(found.chosen) > step.us(step.best()) * 1.02
        assert found.interactions == ()


@pytest.mark.parametrize("seed", range(12))
def test_noise_alone_moves_nothing(seed: int) -> None:
    step = Step(seed, planted=False)
    step.alone = {n: [50.0] * NUM_CONFIGS for n in step.names}
    found = step.descend()
    assert found.chosen == step.default
    assert (found.ratio, found.moves) == (1.0, ())


def test_the_luckiest_of_many_looks_is_looked_at_again() -> None:
    """A clock so noisy that one look would often be believed."""
    step = Step(3, planted=False, sigma=NOISE / 1.5)
    step.alone = {n: [50.0] * NUM_CONFIGS for n in step.names}
    step.both = dict.fromkeys(step.both, 0.0)
    first_looks = [step.judge(step.default, step.default) for _ in range(100)]
    assert any(r < 1 - NOISE for r in first_looks)
    found = step.descend(joint=False)
    assert len(found.moves) <= 2


def test_the_better_start_is_where_it_begins() -> None:
    step = Step(5)
    near = dict(step.best())
    plain, helped = step.descend(), Step(5).descend(starts=(step.default, near))
    assert helped.moves[0].to == tuple((n, c) for n, c in near.items() if c)
    assert helped.num_evaluations < plain.num_evaluations
    assert step.us(helped.chosen) <= step.us(step.best()) * (1 + NOISE)
    worse = Step(5).descend(starts=(step.default, dict.fromkeys(step.names, 4)))
    assert step.us(worse.chosen) <= step.us(step.best()) * (1 + NOISE)


@pytest.mark.parametrize("most", [1, 2, 7, 20, 60])
def test_it_stops_when_told_with_the_best_so_far(most: int) -> None:
    step = Step(1)
    step.alone["k3"] = [100.0, 99.0, 98.0, 97.0, 20.0]  # most of the time, and most to gain
    found = step.descend(most)
    assert step.num_judged == found.num_evaluations <= most
    assert not found.complete
    assert step.us(found.chosen) <= step.us(step.default)
    if most >= 7:
        assert found.chosen["k3"] == 4, "what takes most time comes first"


def test_what_cannot_run_is_never_chosen() -> None:
    step = Step(2)

    def judge(base: Chosen, other: Chosen) -> float:
        return float("inf") if other["k0"] in (1, 2) else step.judge(base, other)

    found = descend(step.places(), step.pairs, judge, (step.default,), noise=lambda _: NOISE, max_evaluations=2000)
    assert found.chosen["k0"] not in (1, 2)
    assert found.complete


def test_an_answer_that_is_no_faster_after_all_is_the_start() -> None:
    """A clock that flatters every exchange at first and not at the end."""
    step = Step(4)
    flattered = 1 + NUM_PLACES * NUM_CONFIGS  # a first look at each exchange, a second one at each place's best

    def judge(base: Chosen, other: Chosen) -> float:
        nonlocal flattered
        flattered -= 1
        return 0.9 if flattered > 0 else 1.01

    found = descend(step.places(), [], judge, (step.default,), noise=lambda _: NOISE, max_evaluations=2000)
    assert (found.chosen, found.ratio, found.moves) == (step.default, 1.0, ())


@pytest.mark.parametrize("most", [1, 3, 40, 120])
def test_where_the_judge_has_no_more_time_nothing_stands_that_was_not_judged_at_the_end(most: int) -> None:
    step, looks = Step(1), 0

    def judge(base: Chosen, other: Chosen) -> float:
        nonlocal looks
        looks += 1
        if looks > most:
            raise Spent
        return step.judge(base, other)

    found = descend(step.places(), step.pairs, judge, (step.default,), noise=lambda _: NOISE, max_evaluations=2000)
    assert not found.complete
    assert (found.chosen, found.ratio) == (step.default, 1.0)
