"""Random requests and their arrivals from a seed. Time is counted in steps, so that a run can be repeated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from kerngen.runtime.engine import Request
from kerngen.runtime.sampling import Sampling

NUM_PREFIXES = 4  # that requests have in common
SHARED = 0.3  # of requests begin with one of them
CUT = 0.5  # of those end within it
SAMPLED = 0.25  # are sampled, in one of these ways; the others are greedy
WAYS = ((1.0, 40, 0.95), (0.7, 0, 0.9), (1.2, 0, 1.0))  # temperature, top-k, top-p
STOPPED_BY_ID, STOPPED_BY_TEXT = 0.1, 0.1
STOP_EVERY = 96  # of tokens, one ends the answer
LEAST_NEW_TOKENS = 8
OVERLOAD = 1.25  # requests under way at most, of those that run at once: some wait
FULL = 1.4  # more than 1 by how much of the time so many are wanted
HASTE = 0.2  # of those that are missing, how many come in a step


@dataclass(frozen=True, slots=True)
class Asked:
    """cancel_after: steps after which nobody wants the answer any more, None for never."""

    request: Request
    cancel_after: int | None


@dataclass(frozen=True, slots=True)
class RandomRequests:
    """Request number i is a function of these fields and of i alone. Prompts are random tokens.

    max_prompt, max_new_tokens: the longest. cancel: the share of requests that may be cancelled, at a random step; some
    of them have ended by then.
    """

    vocab_size: int
    max_prompt: int
    max_new_tokens: int
    cancel: float
    seed: int

    def ask(self, number: int) -> Asked:
        draw = random.Random(f"{self.seed} request {number}")
        prompt = self._prompt(draw)
        count = draw.randint(min(LEAST_NEW_TOKENS, self.max_new_tokens), self.max_new_tokens)
        sampling = Sampling(*draw.choice(WAYS), seed=number) if draw.random() < SAMPLED else Sampling()
        stop_ids, stops, how = range(0), None, draw.random()
        if how < STOPPED_BY_ID:
            stop_ids = range(draw.randrange(min(STOP_EVERY, self.vocab_size)), self.vocab_size, STOP_EVERY)
        elif how < STOPPED_BY_ID + STOPPED_BY_TEXT:
            stops = stop_text(draw.randrange(STOP_EVERY))
        after = draw.randint(0, count) if draw.random() < self.cancel else None
        return Asked(Request(prompt, count, sampling, stop_ids, stops), after)

    def lengths(self, count: int) -> list[int]:
        """The most tokens, prompt and answer, of each of the first `count` requests."""
        asked = (self.ask(i).request for i in range(count))
        return [len(request.prompt) + request.max_new_tokens for request in asked]

    def _prompt(self, draw: random.Random) -> list[int]:
        length = round(math.exp(draw.uniform(0, math.log(self.max_prompt))))
        if draw.random() >= SHARED:
            return self._tokens(draw, length)
        shared = self._prefix(draw.randrange(NUM_PREFIXES))
        if draw.random() < CUT:
            shared = shared[: draw.randint(1, len(shared))]
        return [*shared, *self._tokens(draw, min(length, self.max_prompt - len(shared)))]

    def _prefix(self, number: int) -> list[int]:
        draw = random.Random(f"{self.seed} prefix {number}")
        return self._tokens(draw, max(draw.randint(self.max_prompt // 8, self.max_prompt // 2), 1))

    def _tokens(self, draw: random.Random, count: int) -> list[int]:
        return draw.choices(range(self.vocab_size), k=count)


def stop_text(rest: int) -> Callable[[int], bool]:
    """Ends an answer as a stop string does: at two tokens in a row that are so and so together."""
    last = -1

    def ends(token: int) -> bool:
        nonlocal last
        before, last = last, token
        return before >= 0 and (before + token) % STOP_EVERY == rest

    return ends


class Arrivals:
    """How many requests come before each step.

    A Poisson number, on average a share of what is missing to an aim that is drawn anew every now and then, from none
    to more than run at once: they come in bursts, and the batch wanders through all its sizes. The first aim is the
    highest, so that memory is asked for early that will be asked for at all.
    """

    def __init__(self, max_batch: int, spell: float, seed: int) -> None:
        """spell: steps between one aim and the next, on average."""
        self._draw = random.Random(f"{seed} arrivals")
        self._most, self._spell = OVERLOAD * max_batch, spell
        self._aim, self._left = self._most, spell

    def now(self, num_live: int) -> int:
        """num_live: requests under way."""
        if self._left <= 0:
            self._aim = min(self._draw.uniform(0, FULL * self._most), self._most)
            self._left = self._draw.expovariate(1 / self._spell)
        self._left -= 1
        return self._poisson(HASTE * max(self._aim - num_live, 0.0))

    def _poisson(self, mean: float) -> int:
        """Source: Knuth, The Art of Computer Programming 2, 3.4.1: products of uniform numbers, until exp(-mean)."""
        least, product, count = math.exp(-mean), self._draw.random(), 0
        while product > least:
            product *= self._draw.random()
            count += 1
        return count
