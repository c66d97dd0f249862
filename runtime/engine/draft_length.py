"""Chooses the number of draft tokens of a step, from acceptance rates and step times, so that drafting never costs.

A step with k drafts emits 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens a sequence. a_i is the acceptance rate at
position i, given that all drafts before it were accepted. The length with the most tokens a second is chosen; 0 is one
of them. Without recent data a position is assumed as good as the one before it, and the time of a length is
interpolated from its neighbours. Longer lengths are tried one doubling at a time.

A budget bounds the loss against not drafting. A step with drafts pays its time beyond that of a plain step, and earns
the time that plain steps would have taken for the tokens that it emitted. Every step earns EARNS of its time. The
budget starts at GIFT plain steps and holds at most MOST. A step that the budget could not pay if no draft were accepted
does not draft. So after the time of n steps at most GIFT + EARNS * n is lost, whatever the text, plus the error of a
length's first timing: below 1 % from the 200th step on, and less than one plain step's time before. If drafts are
accepted the budget is full and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EARNS = 0.005
GIFT, MOST = 0.5, 6.0  # plain steps
DECAY = 0.96  # of a count, for each step that adds to it: 25 steps are remembered
FADE = 0.99  # for each step whose drafts say nothing of the position
PRIOR, PRIOR_WEIGHT = 0.7, 1.0  # of the first position's acceptance, in steps
FIRST_LENGTH = 3
MARGIN = 1.01  # that a length must be better by than the present one
STEP_SHARE = 0.08  # what a draft adds to a step, in plain steps, until one was timed; then half as much at least
SMOOTHING = 0.1  # of a length's time, by the latest
PLAIN_STEPS = 3  # timed before the first draft: what all else is measured against
FIRST_LOOK, LAST_LOOK = 16, 256  # steps between looks at a length that seems worse; more each time in vain
LOOK_GROWTH = 1.5
WORTH_A_LOOK = 0.7  # of the best rate, that a length would reach if it were as cheap as the longest one below it


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The number of drafts of a step of a batch of `bucket` rows. is_look: taken to learn, not as the best."""

    length: int
    bucket: int
    is_look: bool = False


class DraftLength:
    """Decides for one engine, whose steps may be observed while the next ones run. lengths: numbers of drafts that it
    may choose beside none, in ascending order; () for none at all.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = (0, *lengths)
        self.longest = longest = self.lengths[-1]
        self.first = self._at_most(FIRST_LENGTH)  # that is tried where none is known to pay
        self._judged = [0.0] * longest
        self._accepted = [0.0] * longest
        self._costs: dict[int, list[float | None]] = {}  # of a step with 0, 1, ... drafts, by batch bucket
        self._timed: dict[int, list[int]] = {}  # when each was timed last
        self._counts: dict[int, list[int]] = {}  # how often
        self._now = 0
        self._account = GIFT  # in plain steps
        self._last = 0
        self._repeats = 0  # steps since the length changed
        self._wait: float = FIRST_LOOK
        self._since_look = 0
        self._latest: Choice | None = None  # not yet observed
        self._held = 0.0  # what it may cost, in plain steps
        self._before = 0  # the length of the last step that was no look

    def choose(self, bucket: int) -> Choice:
        """What the next step of a batch of `bucket` rows is to do. To be given to `observe`, if it is observed."""
        costs = self._costs.setdefault(bucket, [None] * (self.longest + 1))
        if self._counts.setdefault(bucket, [0] * (self.longest + 1))[0] < PLAIN_STEPS:
            return Choice(0, bucket)
        best = self._best(costs)
        is_look = self._since_look >= self._wait
        if is_look:
            best = self._look(bucket, costs, best)
            self._since_look = 0
        if self._latest is not None and costs[self._latest.length] is None:
            best = 0  # what the step under way takes is not known at all
        while best and self._extra(costs, best) > self._account - self._held:
            best = max(k for k in self.lengths if k < best)
        self._latest, self._held = Choice(best, bucket, is_look), self._extra(costs, best)
        return self._latest

    def _look(self, bucket: int, costs: Sequence[float | None], best: int) -> int:
        """A length to try in place of `best`: some drafts where none seem to pay, else what was timed longest ago."""
        reach = self._reach(costs)
        if best == 0:
            return min(self.first, reach)
        rates = self._rates(costs)
        low = [self._cost(costs, max(i for i in range(k + 1) if costs[i] is not None)) for k in range(reach + 1)]
        hopes = [rates[k] * self._cost(costs, k) / low[k] for k in range(reach + 1)]
        timed = self._timed.setdefault(bucket, [0] * (self.longest + 1))
        others = [k for k in self.lengths if k <= reach and k != best]
        worth = [k for k in others if k == 0 or hopes[k] > WORTH_A_LOOK * rates[best]]
        return min(worth, key=lambda k: timed[k])

    def observe(self, choice: Choice, seconds: float, accepted: Sequence[int]) -> None:
        """The step took `seconds`, and so many of each sequence's drafts were accepted."""
        if choice is self._latest:
            self._latest, self._held = None, 0.0
        if not self.longest or seconds <= 0 or not accepted:
            return
        bucket, length = choice.bucket, choice.length
        costs = self._costs.setdefault(bucket, [None] * (self.longest + 1))
        self._now += 1
        self._timed.setdefault(bucket, [0] * (self.longest + 1))[length] = self._now
        counts = self._counts.setdefault(bucket, [0] * (self.longest + 1))
        counts[length] += 1
        self._learn_cost(costs, length, seconds, max(1 / counts[length], SMOOTHING))
        self._learn_acceptance(length, accepted)
        plain = costs[0] or seconds
        took = seconds / plain
        gain = sum(accepted) / len(accepted) + 1 - took if length else 0.0
        self._account = min(self._account + gain + EARNS * took, MOST)
        if choice.is_look:
            found = self._best(costs) != self._before  # it was worth it: there may be more to find
            self._wait = FIRST_LOOK if found else min(LOOK_GROWTH * self._wait, LAST_LOOK)
        else:
            self._since_look += 1
            self._before = length
        self._repeats = self._repeats + 1 if length == self._last else 0
        self._last = length

    def knows_plain(self, bucket: int) -> bool:
        """Whether enough of such steps without drafts were timed for others to be measured against."""
        return not self.longest or self._counts.get(bucket, [0])[0] >= PLAIN_STEPS

    def passed(self, choice: Choice) -> None:
        """The step did other work besides, so its time says nothing; but it was one since the last look."""
        if choice is self._latest:
            self._latest, self._held = None, 0.0
        self._since_look += 1

    def acceptance(self) -> list[float]:
        """The estimate for each position."""
        rates: list[float] = []
        for judged, accepted in zip(self._judged, self._accepted, strict=True):
            prior = rates[-1] if rates else PRIOR
            rates.append((accepted + PRIOR_WEIGHT * prior) / (judged + PRIOR_WEIGHT))
        return rates

    def _reach(self, costs: Sequence[float | None]) -> int:
        """The longest length that may be tried: about twice what was timed, or the next one."""
        timed = max(i for i, cost in enumerate(costs) if cost is not None)
        return self._at_most(2 * timed + 1, above=timed)

    def _at_most(self, length: int, above: int = 0) -> int:
        """The longest of `lengths` up to `length`, or where none of those is beyond `above` the first that is."""
        longer = [k for k in self.lengths if k > above]
        return max((k for k in longer if k <= length), default=longer[0] if longer else above)

    def _rates(self, costs: Sequence[float | None]) -> list[float]:
        """Tokens a second that each length is expected to make of a sequence."""
        emitted, chance, rates = 1.0, 1.0, [1.0 / self._cost(costs, 0)]
        for length, rate in enumerate(self.acceptance(), 1):
            chance *= rate
            emitted += chance
            rates.append(emitted / self._cost(costs, length))
        return rates

    def _best(self, costs: Sequence[float | None]) -> int:
        rates = self._rates(costs)[: self._reach(costs) + 1]
        best = max((k for k in self.lengths if k < len(rates)), key=rates.__getitem__)
        held = min(self._before, len(rates) - 1)
        return best if rates[best] > rates[held] * MARGIN else held

    def _cost(self, costs: Sequence[float | None], length: int) -> float:
        """Seconds; between two lengths that were timed in proportion, beyond them as much a draft as before."""
        if (known := costs[length]) is not None:
            return known
        plain = costs[0] or 1.0
        below = max(i for i in range(length) if costs[i] is not None)
        low = costs[below] or plain
        above = next((i for i in range(length + 1, len(costs)) if costs[i] is not None), None)
        if above is None:
            slope = (low - plain) / below if below else STEP_SHARE * plain
            return low + max(slope, STEP_SHARE * plain / 2) * (length - below)
        high = costs[above] or plain
        return low + (high - low) * (length - below) / (above - below)

    def _extra(self, costs: Sequence[float | None], length: int) -> float:
        """Plain steps that are lost by a step of which nothing is accepted."""
        return self._cost(costs, length) / self._cost(costs, 0) - 1

    def _learn_cost(self, costs: list[float | None], length: int, seconds: float, weight: float) -> None:
        """Steps right after a change say what a length takes beside the others; later ones, how all of them drift."""
        old = costs[length]
        if old is None:
            costs[length] = seconds
            return
        new = old + weight * (min(seconds, 2 * old) - old)  # a step that something else delayed counts as twice as long
        costs[length] = new
        if length == self._last and self._repeats >= 4:
            for i, cost in enumerate(costs):
                if cost is not None and i != length:
                    costs[i] = cost * new / old

    def _learn_acceptance(self, length: int, accepted: Sequence[int]) -> None:
        for i in range(self.longest if length else 0):  # a plain step is no news: what looks are for
            judged = sum(a >= i for a in accepted) / len(accepted) if i < length else 0.0
            decay = DECAY if judged else FADE
            share = sum(a > i for a in accepted) / len(accepted)
            self._judged[i] = decay * self._judged[i] + judged
            self._accepted[i] = decay * self._accepted[i] + (share if judged else 0.0)
