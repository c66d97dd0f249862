"""The dealing of common/w4/warp_pipeline.cuh and cta_pipeline.cuh, restated: every tile of W is fetched and multiplied
once, by one warp.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from math import ceil

import pytest

from kerngen.arch import Target, find_device
from kerngen.templates import find_kernel
from kerngen.templates.common.w4.limits import stream_step, stream_tiles
from kerngen.templates.common.w4.tiling import SPACES, STREAM_BLOCK_M, STRIP
from kerngen.templates.w4a16_gemm.spec import Config, Problem

KERNEL = find_kernel("w4a16_gemm")
H200 = Target.of(find_device("H200"))


def dealt(problem: Problem, config: Config) -> Counter[tuple[int, int]]:
    """(strip, tile) of all copies, each at its place in a slot; and of all products, which must be the same."""
    strips, tiles, group = problem.n // STRIP, problem.k // STRIP, problem.group_size // STRIP
    step = stream_step(config, problem.group_size) // STRIP
    slot_steps = config.block_k // STRIP // step // config.warps_k
    steps = ceil(tiles / step)
    most = ceil(ceil(steps / config.split_k) / config.warps_k)
    units, blocks = strips * config.split_k, KERNEL.launches(problem, config, H200)[0].grid[0]
    copied: Counter[tuple[int, int]] = Counter()
    multiplied: Counter[tuple[int, int]] = Counter()
    for unit in range(units):
        assert sum(units * b // blocks <= unit < units * (b + 1) // blocks for b in range(blocks)) == 1
        part, strip = divmod(unit, strips)
        begin = steps * part // config.split_k
        whole = steps * (part + 1) // config.split_k - begin
        for warp in range(config.warps_k):
            first, last = begin + whole * warp // config.warps_k, begin + whole * (warp + 1) // config.warps_k
            assert last - first <= most
            owned = min((last - first) * step, tiles - first * step)
            for round_ in range(ceil(most / slot_steps)):
                at = (first + round_ * slot_steps) * step
                count = max(0, min(min(slot_steps, last - first - round_ * slot_steps) * step, tiles - at))
                assert count % group == 0
                assert at % group == 0 or count == 0
                copied.update((strip, at + i) for i in range(count))
                for i in range(slot_steps):
                    if round_ * slot_steps + i < most:
                        own = (round_ * slot_steps + i) * step
                        multiplied.update((strip, first * step + own + j) for j in range(step) if own + j < owned)
    assert copied == multiplied
    return copied


Drawn = tuple[Problem, Config]


def drawn(rng: random.Random) -> Drawn:
    group = rng.choice((32, 64, 128))
    problem = Problem(STRIP * rng.randrange(1, 40), group * rng.randrange(2, 60), group, "bf16", rng.randint(1, 4))
    config = Config(
        rng.choice(STREAM_BLOCK_M), STRIP, 32 * rng.randrange(8, 120), STRIP, 1, rng.choice((2, 3, 4, 8, 12, 16)), 2, 1,
        split_k=rng.choice(SPACES["tma_warp"]["split_k"]), body="tma_warp",
    )  # fmt: skip
    return problem, config


def dealt_by_rounds(problem: Problem, config: Config) -> Counter[tuple[int, int]]:
    """As `dealt`, where the ring is shared: copies by rounds of a unit, products by warps."""
    strips, step = problem.n // STRIP, problem.group_size // STRIP
    steps, slot, warps = problem.k // problem.group_size, config.block_k // problem.group_size, config.warps_k
    most = ceil(steps / config.split_k)
    rounds = ceil(most / slot)
    before = (rounds - 1) * slot  # steps, of all rounds but the last
    last = ceil((most - before) / warps)
    digits = ((rounds - 1) * (slot // warps) + last) * step  # tiles of x that a warp has room for
    assert digits == stream_tiles(config, problem.k, problem.group_size)
    copied: Counter[tuple[int, int]] = Counter()
    multiplied: Counter[tuple[int, int]] = Counter()
    for unit in range(strips * config.split_k):
        part, strip = divmod(unit, strips)
        begin = steps * part // config.split_k
        whole = steps * (part + 1) // config.split_k - begin
        assert whole >= before
        for round_ in range(rounds):
            count = min(slot, whole - round_ * slot)
            assert count >= 0
            copied.update((strip, (begin + round_ * slot) * step + i) for i in range(count * step))
        for warp in range(warps):
            left = whole - before
            first = left * warp // warps
            owned = before // warps + left * (warp + 1) // warps - first
            assert owned * step <= digits
            for j in range(owned):
                round_, at = divmod(j, slot // warps) if j < before // warps else (rounds - 1, j - before // warps)
                place = first + at if round_ == rounds - 1 else warp * (slot // warps) + at  # in the slot, in steps
                assert place < min(slot, whole - round_ * slot), "within what was copied"
                multiplied.update((strip, (begin + round_ * slot + place) * step + i) for i in range(step))
    assert copied == multiplied
    return copied


def drawn_with_a_shared_ring(rng: random.Random) -> Drawn:
    group, warps = rng.choice((32, 64, 128)), rng.choice((2, 3, 4, 8, 10, 12, 14))
    problem = Problem(STRIP * rng.randrange(1, 40), group * rng.randrange(2, 160), group, "bf16", rng.randint(2, 4))
    config = Config(
        4, STRIP, group * warps * rng.randrange(1, 8), STRIP, 1, warps, 3, 1, body="tma_block",
        split_k=rng.choice(SPACES["tma_warp"]["split_k"]),
    )  # fmt: skip
    return problem, config


@pytest.mark.parametrize(
    ("draw", "deal", "seed"), [(drawn, dealt, 5), (drawn_with_a_shared_ring, dealt_by_rounds, 6)], ids=["own", "shared"]
)
def test_every_tile_is_multiplied_once(
    draw: Callable[[random.Random], Drawn], deal: Callable[[Problem, Config], Counter[tuple[int, int]]], seed: int
) -> None:
    rng, seen = random.Random(seed), 0
    while seen < 60:
        problem, config = draw(rng)
        if KERNEL.why_invalid(problem, config, H200) is None:
            seen += 1
            found = deal(problem, config)
            assert len(found) == problem.n // STRIP * (problem.k // STRIP)
            assert set(found.values()) == {1}


def test_claimed_strips_are_dealt_once() -> None:
    """As W4BlockStream::Fetcher deals whole strips: some are a block's own, who asks first has the next of the others,
    and who asks last resets the counter.
    """
    rng = random.Random(7)
    for _ in range(200):
        grid, stages, rounds = rng.randint(1, 140), rng.randint(2, 12), rng.randint(2, 12)
        units = rng.randint(grid, 14 * grid)
        own = max(min(ceil(stages / rounds), units // grid), units // grid - 2)
        dealt = Counter(i * grid + block for block in range(grid) for i in range(own))
        left, counter, resets = units - own * grid, 0, 0
        claims = {}
        for block in rng.sample(range(grid), grid):  # each claims the one behind before it fetches what it has
            claims[block], counter = counter, counter + 1
        while claims:
            block = rng.choice(list(claims))
            if claims[block] >= left:
                resets += claims.pop(block) == left + grid - 1
                continue
            dealt[own * grid + claims[block]] += 1
            claims[block], counter = counter, counter + 1
        assert dealt == Counter(range(units))
        assert counter == left + grid
        assert resets == 1
