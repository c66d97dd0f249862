"""Sampling with parameters as tensors: random numbers, filters a row, and the distribution of what drafts leave."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kerngen.runtime.sampling import (
    CUTS,
    Parameters,
    Sampling,
    accepted,
    choose,
    cut_for,
    distribution,
    likeliest,
    uniforms,
)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations chi-square lies above its mean (Wilson and Hilferty's normal approximation)."""
    degrees = len(expected) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def test_random_numbers_are_those_of_splitmix64() -> None:
    """Its first outputs for seed 1234567, as published with the generator; the stream begins at the key."""
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    drawn = uniforms(torch.full((5,), 1234567), torch.arange(5))
    assert drawn.tolist() == [(word >> 40) * 2.0**-24 for word in words]


def test_random_numbers_are_uniform_and_neighbours_have_nothing_in_common() -> None:
    """16 x 16 cells of pairs: along a sequence, of two sequences with neighbouring seeds, of far positions; 2^20 each.

    A cell that is 2 % off among the 256 moves chi-square by more than 5 deviations nine times of ten.
    """
    count = 1 << 20
    at = torch.arange(count)
    keys = [Sampling(1.0, seed=s).key for s in (0, 1, -1, 2**62)]
    streams = [uniforms(torch.full((count,), key), at) for key in keys]
    seeds = torch.tensor([Sampling(1.0, seed=s).key for s in range(1 << 16)]).repeat_interleave(16)
    by_seed = uniforms(seeds, torch.arange(16).repeat(1 << 16))
    for x, y in (
        (streams[0][:-1], streams[0][1:]), (streams[0], streams[1]), (streams[2], streams[3]),
        (streams[0], streams[0].roll(4096)), (by_seed[:-16], by_seed[16:]),
    ):  # fmt: skip
        assert float(x.min()) >= 0
        assert float(x.max()) < 1
        cells = torch.bincount((x * 16).long() * 16 + (y * 16).long(), minlength=256).double()
        assert abs(chi_square(cells, torch.full((256,), len(x) / 256))) < 5


def test_a_row_has_its_own_parameters() -> None:
    """Rows of different filters together give what each gives alone, whatever `cut` the others allow."""
    logits = 3 * torch.randn(7, 3000, generator=torch.Generator().manual_seed(0))
    ways = [
        Sampling(), Sampling(0.7), Sampling(1.0, 5, 1.0, 1), Sampling(1.3, 64, 0.9, 2), Sampling(0.5, 0, 0.5, 3),
        Sampling(2.0, 900, 0.95, 4), Sampling(1e-9, 3, 1.0, 5),
    ]  # fmt: skip
    at = torch.arange(100, 107)
    together = choose(logits, at, Parameters.of(ways), cut_for(ways))
    alone = [
        int(choose(logits[i : i + 1], at[i : i + 1], Parameters.of([w]), cut_for([w]))) for i, w in enumerate(ways)
    ]
    assert together.tolist() == alone
    assert together[0] == likeliest(logits)[0]
    assert together[6] == likeliest(logits)[6]
    assert [cut_for([w]) for w in ways] == [CUTS[0], 0, 64, 64, 0, 1024, 64]
    assert cut_for(ways) == 0
    assert cut_for([ways[2], ways[5]]) == 1024
    for cut in (64, 1024, 0):
        ids, probs = distribution(logits[3:4], Parameters.of([ways[3]]), cut)
        assert int((probs > 0).sum()) <= 64
        torch.testing.assert_close(probs.sum(), torch.tensor(1.0))
        assert int(ids[0, 0]) == int(logits[3].argmax())


VOCAB, LENGTH, ROWS = 4, 3, 120_000
CHAIN = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7))  # logits of the next token, by the last


def speculated(wanted: Parameters, drafted: Tensor, flaw: float = 0.0) -> Tensor:
    """LENGTH tokens [ROWS, LENGTH] after token 0, in steps of two drafts: drafted[t] is what is guessed after t.

    flaw: the share of first drafts that are taken without asking the model.
    """
    made = torch.zeros(ROWS, LENGTH + 3, dtype=torch.int64)  # position 0 holds token 0
    length = torch.ones(ROWS, dtype=torch.int64)  # known tokens
    rows = torch.arange(ROWS)
    rigged = torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) < flaw
    while int(length.min()) <= LENGTH:
        last = made[rows, length - 1]
        drafts = torch.stack((drafted[last], drafted[drafted[last]]), dim=1)
        fed = torch.cat((last[:, None], drafts), dim=1)  # [ROWS, 3]
        positions = length[:, None] + torch.arange(3)
        tokens = choose(CHAIN[fed.flatten()], positions.flatten(), wanted.repeated(3)).view(ROWS, 3)
        tokens[:, 0] = torch.where(rigged, drafts[:, 0], tokens[:, 0])
        count = accepted(drafts, tokens) + 1
        for i in range(3):
            put = (i < count) & (length + i <= LENGTH)
            made[rows[put], (length + i)[put]] = tokens[put, i]
        length = torch.minimum(length + count, torch.tensor(LENGTH + 1))
    return made[:, 1 : LENGTH + 1]


@pytest.mark.parametrize("sampling", [(0.9, 0, 1.0), (1.1, 3, 0.9)])
@pytest.mark.parametrize("drafted", [[1, 2, 3, 0], [3, 3, 3, 3]])
def test_drafts_keep_the_joint_distribution(sampling: tuple[float, int, float], drafted: list[int]) -> None:
    """The 64 sequences of three tokens, 120,000 draws, against the product of the model's probabilities.

    Five standard deviations of chi-square: a false alarm in 3 million runs. Drafts that were taken in two sequences of
    a hundred without asking, an error of at most 2 % in any probability, are found: the last lines do that.
    """
    temperature, top_k, top_p = sampling
    keys = torch.tensor([Sampling(1.0, seed=s).key for s in range(ROWS)])
    one = Parameters.of([Sampling(temperature, top_k, top_p)])
    wanted = Parameters(*(t.expand(ROWS) for t in (one.temperature, one.top_p, one.top_k)), keys)
    ids, kept = distribution(CHAIN, Parameters.of([Sampling(temperature, top_k, top_p)] * VOCAB))
    step = torch.zeros_like(kept).scatter(1, ids, kept)
    joint = step[0][:, None, None] * step[:, :, None] * step[None, :, :]
    cells = torch.tensor([VOCAB**2, VOCAB, 1])
    possible = joint.flatten() > 0

    def far(made: Tensor) -> float:
        counts = torch.bincount((made * cells).sum(1), minlength=VOCAB**3)
        assert not counts[~possible].any()
        return chi_square(counts[possible].double(), ROWS * joint.flatten()[possible].double())

    guesses = torch.tensor(drafted)
    made = speculated(wanted, guesses)
    assert abs(far(made)) < 5
    if bool(step[torch.arange(VOCAB), guesses].gt(0).all()):
        assert far(speculated(wanted, guesses, flaw=0.02)) > 5
