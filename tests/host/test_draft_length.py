"""The adapted draft length on simulated text: never a loss, and near the best fixed length where drafts pay."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kerngen.runtime.config import Arm
from kerngen.runtime.engine.draft_length import EARNS, Choice, DraftLength

LONGEST = 7
EACH = [Arm(k) for k in range(1, LONGEST + 1)]
# Seconds of a step with 0 to 7 drafts: 31B-like (a step reads 19 GB, drafts are cheap), E2B-like (a step is short), a
# batch at which verification costs as much as decoding, and one where the sixth token a row asks for a larger tile.
COSTS = {
    "large": [7.6e-3 * (1 + 0.055 * k) for k in range(8)],
    "small": [1.0e-3 * (1 + 0.22 * k) for k in range(8)],
    "compute-bound": [20e-3 * (1 + 0.8 * k) for k in range(8)],
    "stepped": [5e-3 * (1 + 0.05 * k + 0.5 * (k > 4)) for k in range(8)],
}


@dataclass
class Run:
    """What a simulated generation took and made; `plain` is the time that as many tokens take without drafts."""

    seconds: float
    tokens: float
    plain: float
    lengths: list[int]
    arms: list[Arm]

    @property
    def loss(self) -> float:
        return self.seconds / self.plain - 1


def simulate(lengths: DraftLength, costs: list[float], steps: int, chance: Callable[[int], float], *, batch: int = 1,
             seed: int = 0, noise: float = 0.03, async_depth: int = 1, fading: float = 1.0,
             second: tuple[list[float], float, float] | None = None) -> Run:  # fmt: skip
    """chance: that a draft is accepted, by step; fading: times that for each position behind the first. noise: of a
    step's measured time. lag: steps chosen before it is told. second: costs, chance and fading of a second drafter.

    Now and then a step is never told of, as where all its requests were cancelled.
    """
    untold: deque[tuple[Choice, float, list[int]]] = deque()
    draw = random.Random(seed)
    run = Run(0.0, 0.0, 0.0, [], [])
    for step in range(steps):
        choice = lengths.choose(batch)
        length, accepted = choice.length, []
        table, right, fades = second if second and choice.arm.by else (costs, chance(step), fading)
        for _ in range(batch):
            count = 0
            while count < length and draw.random() < right * fades**count:
                count += 1
            accepted.append(count)
        seconds = table[length] * (1 + draw.uniform(-noise, noise))
        if step < 30 or draw.random() > 0.01:
            untold.append((choice, seconds, accepted))
        if len(untold) > async_depth:
            lengths.observe(*untold.popleft())
        emitted = 1 + sum(accepted) / batch
        run.seconds += table[length]
        run.tokens += emitted
        run.plain += emitted * costs[0]
        run.lengths.append(length)
        run.arms.append(choice.arm)
    return run


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("batch", [1, 16])
def test_where_no_draft_is_accepted_at_most_one_percent_is_lost(costs: str, batch: int) -> None:
    """From the 200 tokens of a short answer on, and less and less after that; before, less than one plain step."""
    for seed in range(4):
        for steps in (20, 200, 1000, 8000):
            run = simulate(DraftLength(EACH), COSTS[costs], steps, lambda _: 0.0, batch=batch, seed=seed)
            assert run.loss * steps < 1 + 1.05 * EARNS * steps
            if steps >= 200:
                assert run.loss <= 0.01
        assert run.loss <= 0.006


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.5, 0.7, 0.85, 0.95])
def test_it_is_near_the_best_fixed_length_and_never_slower_than_none(costs: str, chance: float) -> None:
    table = COSTS[costs]
    emitted = [sum(chance**i for i in range(k + 1)) for k in range(LONGEST + 1)]
    best = max(e / c for e, c in zip(emitted, table, strict=True))
    for seed in range(4):
        run = simulate(DraftLength(EACH), table, 4000, lambda _: chance, seed=seed)
        assert run.loss <= 0.01
        assert run.tokens / run.seconds > 0.93 * best, f"{run.tokens / run.seconds:.0f} of {best:.0f} tokens a second"


def test_it_follows_the_text() -> None:
    """Prose, then code that is easy to draft, then prose: it drafts again within some looks, and stops at once."""
    table = COSTS["large"]
    run = simulate(DraftLength(EACH), table, 9000, lambda step: 0.9 if 3000 <= step < 6000 else 0.0)
    easy, after = run.lengths[3000:6000], run.lengths[6000:]
    assert sum(length >= 3 for length in easy) > 0.75 * len(easy)
    assert sum(length > 0 for length in after) < 0.1 * len(after)
    assert run.loss < 0


# Of a drafter whose block costs the same whatever is verified: steps with 0 to 15 drafts.
BLOCK_LENGTHS = (3, 5, 7, 11, 15)
BLOCK = [Arm(k) for k in BLOCK_LENGTHS]
BLOCK_COSTS = [1.0, *(1.15 + 0.028 * k for k in range(1, 16))]
PROFILES = {"code": (0.92, 1.0), "prose": (0.75, 0.93), "steep": (0.9, 0.85), "lists": (0.08, 1.0)}  # chance, fading


def emitted(length: int, chance: float, fading: float) -> float:
    total, reached = 1.0, 1.0
    for i in range(length):
        reached *= chance * fading**i
        total += reached
    return total


def best_rate(chance: float, fading: float) -> float:
    """Tokens a second of the best of the lengths."""
    return max(emitted(k, chance, fading) / BLOCK_COSTS[k] for k in (0, *BLOCK_LENGTHS))


@pytest.mark.parametrize("profile", PROFILES)
def test_of_a_blocks_lengths_it_finds_the_best(profile: str) -> None:
    chance, fading = PROFILES[profile]
    for seed in range(4):
        run = simulate(DraftLength(BLOCK), BLOCK_COSTS, 3000, lambda _: chance, seed=seed, fading=fading)
        assert set(run.lengths) <= {0, *BLOCK_LENGTHS}
        assert run.loss <= 0.01
        assert run.tokens / run.seconds > 0.95 * best_rate(chance, fading)


def test_it_changes_a_blocks_length_in_the_middle_of_a_text() -> None:
    """Lists, then code, then lists again."""
    lengths, wanted, seconds, made = DraftLength(BLOCK), 0.0, 0.0, 0.0
    for profile in ("lists", "code", "lists"):
        chance, fading = PROFILES[profile]
        run = simulate(lengths, BLOCK_COSTS, 3000, lambda _, c=chance: c, fading=fading)  # type: ignore[misc]
        seconds, made = seconds + run.seconds, made + run.tokens
        wanted += run.tokens / best_rate(chance, fading)
    assert seconds < wanted / 0.95


# Of two drafters: that a draft of the first is accepted, and of the second, whose block costs the same whatever is
# verified (chance, fading).
STEP_BY_STEP = [1 + 0.055 * k for k in range(8)]
BOTH = [*EACH, *(Arm(k, 1) for k in BLOCK_LENGTHS)]
PAIRS = {
    "the block": (0.8, 0.97, (0.93, 1.0)),
    "the block, slightly": (0.85, 1.0, (0.88, 1.0)),
    "one by one": (0.85, 1.0, (0.6, 0.9)),
    "alike": (0.7, 0.95, (0.75, 0.95)),
    "neither": (0.05, 1.0, (0.05, 1.0)),
}


def best_of_both(chance: float, fading: float, block: tuple[float, float]) -> float:
    return max(best_rate(*block), *(emitted(k, chance, fading) / STEP_BY_STEP[k] for k in range(8)))


@pytest.mark.parametrize("pair", PAIRS)
def test_of_two_drafters_it_finds_the_better_one(pair: str) -> None:
    chance, fading, block = PAIRS[pair]
    for seed in range(4):
        run = simulate(DraftLength(BOTH), STEP_BY_STEP, 4000, lambda _: chance, seed=seed, fading=fading,
                       second=(BLOCK_COSTS, *block))  # fmt: skip
        assert run.loss <= 0.01
        assert run.tokens / run.seconds > 0.95 * best_of_both(chance, fading, block), seed


def test_it_changes_drafters_in_the_middle_of_a_text() -> None:
    lengths, wanted, seconds = DraftLength(BOTH), 0.0, 0.0
    for pair in ("one by one", "the block", "neither", "one by one"):
        chance, fading, block = PAIRS[pair]
        run = simulate(lengths, STEP_BY_STEP, 4000, lambda _, c=chance: c, fading=fading,  # type: ignore[misc]
                       second=(BLOCK_COSTS, *block))  # fmt: skip
        used = [arm.by for arm in run.arms[1500:] if arm.length]
        if pair != "neither":
            assert sum(by == (pair == "the block") for by in used) > 0.8 * len(used), pair
        seconds += run.seconds
        wanted += run.tokens / best_of_both(chance, fading, block)
    assert seconds < wanted / 0.95


def test_costs_that_grow_with_the_context_do_not_mislead_it() -> None:
    """Every step takes longer and longer, in proportion: what a draft pays does not change."""
    lengths, table = DraftLength(EACH), COSTS["large"]
    draw = random.Random(0)
    used = []
    for step in range(3000):
        choice = lengths.choose(1)
        count = 0
        while count < choice.length and draw.random() < 0.8:
            count += 1
        lengths.observe(choice, table[choice.length] * (1 + step / 1000), [count])
        used.append(choice.length)
    assert sum(3 <= length <= 7 for length in used[500:]) > 0.9 * len(used[500:])


def test_without_a_choice_there_is_none() -> None:
    lengths = DraftLength(())
    for _ in range(5):
        choice = lengths.choose(1)
        assert choice.length == 0
        lengths.observe(choice, 1.0, [0])


def test_a_batch_is_timed_by_its_size() -> None:
    """What pays for one row does not for many: the verification of a large batch is dear."""
    lengths = DraftLength(EACH)
    one = simulate(lengths, COSTS["large"], 600, lambda _: 0.6)
    many = simulate(lengths, COSTS["compute-bound"], 600, lambda _: 0.6, batch=64)
    again = simulate(lengths, COSTS["large"], 100, lambda _: 0.6)
    assert sum(one.lengths[100:]) > 0
    assert many.loss <= 0.01
    assert sum(length > 0 for length in again.lengths) > 80
