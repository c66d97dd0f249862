"""The protocol of exchange_norm as a model: ranks, launches and stores in any order, and no word too early or too late.

What is modelled is what decides: words that are zero until they are posted, the phase that an epoch on the device
chooses, launches that begin while their predecessor runs (PDL) and wait for its end, stores that arrive late, rows of
other numbers of tokens, sums that travel in a second shot. A launch's end is when its stores have arrived.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerngen.templates.exchange_norm.spec import NUM_PHASES

Place = tuple[int, int, int, int, int]  # rank whose memory it is in, phase, source's slot, row, column
Word = tuple[str, int, int]  # what, of which launch, of which rank


class Broken(Exception):
    """A word was read or overwritten that was not for this launch."""


@dataclass
class Machine:
    """ranks of one host. A column is what one rank sums for all in two shots, so there are as many as ranks."""

    ranks: int
    tokens: list[int]  # of each launch
    two_shots: list[bool]
    phases: int = NUM_PHASES
    waits: bool = True  # a launch posts only behind its PDL wait
    words: dict[Place, Word] = field(default_factory=dict)
    epochs: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, row)
    flying: list[tuple[tuple[int, int], Place, Word | None]] = field(default_factory=list)  # (rank, launch) that stored
    running: dict[tuple[int, int], int] = field(default_factory=dict)  # rows of a launch that have not ended
    begun: dict[int, int] = field(default_factory=dict)  # rank -> launches that have begun
    sums: dict[tuple[int, int, int, int], frozenset[Word]] = field(default_factory=dict)

    def ended(self, rank: int, launch: int) -> bool:
        return launch < 0 or (
            self.running.get((rank, launch), 1) == 0 and not any(by == (rank, launch) for by, *_ in self.flying)
        )

    def store(self, by: tuple[int, int], place: Place, word: Word | None) -> None:
        self.flying.append((by, place, word))

    def land(self, index: int) -> None:
        """One store arrives: any that flies, but those of one rank to one place in their order."""
        (rank, _), place, _ = self.flying[index]
        same = (i for i, ((r, _), p, _) in enumerate(self.flying) if (r, p) == (rank, place))
        _, _, word = self.flying.pop(next(same))
        if word is None:
            del self.words[place]
        elif place in self.words:
            raise Broken(f"{word} overwrites {self.words[place]} at {place}")
        else:
            self.words[place] = word

    def row(self, rank: int, launch: int, row: int) -> Iterator[None]:
        """What the threads of one row do, between any two steps of which others go on."""
        by, shots = (rank, launch), 2 if self.two_shots[launch] else 1
        while self.waits and not self.ended(rank, launch - 1):
            yield
        phase = self.epochs.get((rank, row), 0) % self.phases
        others = [p for p in range(self.ranks) if p != rank]
        for column in range(self.ranks):
            for peer in others if shots == 1 else [column] if column != rank else []:
                self.store(by, (peer, phase, rank, row, column), ("h", launch, rank))
                yield
        summed = range(self.ranks) if shots == 1 else [rank]
        for column in summed:
            for peer in others:
                place = (rank, phase, peer, row, column)
                while place not in self.words:
                    yield
                self.take(by, place, ("h", launch, peer))
                yield
            self.sums[rank, launch, row, column] = frozenset(("h", launch, p) for p in range(self.ranks))
        if shots == 2:
            for peer in others:
                self.store(by, (peer, phase, rank, row, rank), ("sum", launch, rank))
                yield
            for column in others:
                place = (rank, phase, column, row, column)
                while place not in self.words:
                    yield
                self.take(by, place, ("sum", launch, column))
                self.sums[rank, launch, row, column] = self.sums[column, launch, row, column]
                yield
        self.epochs[rank, row] = self.epochs.get((rank, row), 0) + 1
        self.running[by] -= 1

    def take(self, by: tuple[int, int], place: Place, wanted: Word) -> None:
        """A polled word is there: it is read, and a zero is stored behind it."""
        if (found := self.words[place]) != wanted:
            raise Broken(f"launch {by} takes {found} for {wanted}")
        self.store(by, place, None)

    def begin(self, rank: int) -> list[Iterator[None]]:
        """The next launch of a rank: it may begin while the one before runs, all of whose rows have begun."""
        launch = self.begun.get(rank, 0)
        self.begun[rank] = launch + 1
        self.running[rank, launch] = self.tokens[launch]
        return [self.row(rank, launch, row) for row in range(self.tokens[launch])]

    def run(self, draw: random.Random) -> None:
        """Every step and every arrival in an order that `draw` chooses."""
        rows: list[Iterator[None]] = []
        while True:
            starting = [r for r in range(self.ranks) if self.begun.get(r, 0) < len(self.tokens)]
            choices = [*("land" for _ in self.flying[:1]), *("row" for _ in rows[:1]), *("begin" for _ in starting[:1])]
            if not choices:
                return
            what = draw.choice(choices)
            if what == "land":
                self.land(draw.randrange(len(self.flying)))
            elif what == "begin":
                rows += self.begin(draw.choice(starting))
            else:
                going = draw.choice(rows)
                if next(going, "ended") == "ended":
                    rows.remove(going)


def machine(draw: random.Random, ranks: int, launches: int, **given: object) -> Machine:
    tokens = [draw.randint(1, 3) for _ in range(launches)]
    return Machine(ranks, tokens, [draw.random() < 0.5 for _ in tokens], **given)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_no_word_is_read_or_overwritten_too_early(ranks: int, launches: int, seed: int) -> None:
    draw = random.Random(seed)
    ran = machine(draw, ranks, launches)
    ran.run(draw)
    assert not ran.words, "every word is zero again"
    rows = [(launch, row) for launch, tokens in enumerate(ran.tokens) for row in range(tokens)]
    assert len(ran.sums) == ranks * ranks * len(rows)
    for (_, launch, _, _), of in ran.sums.items():
        assert of == {("h", launch, p) for p in range(ranks)}


@pytest.mark.parametrize(
    "given", [{"phases": 1}, {"waits": False}], ids=["one-buffer", "posts-before-its-predecessor-ended"]
)
def test_the_model_sees_what_two_buffers_and_the_wait_are_for(given: dict[str, object]) -> None:
    """Of 200 orders some break it: a rank that is a launch ahead overwrites what a slower one has not read."""
    broken = 0
    for seed in range(200):
        draw = random.Random(seed)
        ran = machine(draw, 3, 5, **given)
        try:
            ran.run(draw)
        except Broken:
            broken += 1
    assert broken
