"""Chooses what a step drafts, from acceptance rates and step times, so that drafting never costs: how many tokens, and
where there are several drafters by which. Each such pair is an arm (DraftPolicy.arms); drafting nothing is one, too.

A step with k drafts emits 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens a sequence. a_i is the acceptance rate of the
drafter at position i, given that all drafts before it were accepted. The arm with the most tokens a second is chosen.
Without recent data a position is assumed as good as the one before it, a drafter's first as good as another drafter's,
and the time of a length is interpolated from its neighbours. Longer lengths are tried one doubling at a time.

A budget bounds the loss against not drafting. A step with drafts pays its time beyond that of a plain step, and earns
the time that plain steps would have taken for the tokens that it emitted. Every step earns EARNS of its time. The
budget starts at GIFT plain steps and holds at most MOST. A step that the budget could not pay if no draft were accepted
does not draft. So after the time of n steps at most GIFT + EARNS * n is lost, whatever the text, plus the error of an
arm's first timing: below 1 % from the 200th step on, and less than one plain step's time before. If drafts are
accepted the budget is full and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from kerngen.runtime.config import NO_DRAFTS, Arm

EARNS = 0.005
GIFT, MOST = 0.5, 6.0  # plain steps
DECAY = 0.96  # of a count, for each step that adds to it: 25 steps are remembered
FADE = 0.99  # for each step whose drafts say nothing of the position
PRIOR, PRIOR_WEIGHT = 0.7, 1.0  # of the first position's acceptance, in steps
FIRST_LENGTH = 3
MARGIN = 1.01  # that an arm must be better by than the present one
STEP_SHARE = 0.08  # what a draft adds to a step, in plain steps, until one was timed; then half as much at least
SMOOTHING = 0.1  # of an arm's time, by the latest
PLAIN_STEPS = 3  # timed before the first draft: what all else is measured against
FIRST_LOOK, LAST_LOOK = 16, 256  # steps between looks at an arm that seems worse; more each time in vain
LOOK_GROWTH = 1.5
WORTH_A_LOOK = 0.7  # of the best rate, that an arm would reach if it were as cheap as its drafter's longest below it


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a step of a batch of `bucket` rows drafts. is_look: taken to learn, not as the best."""

    arm: Arm
    bucket: int
    is_look: bool = False

    @property
    def length(self) -> int:
        return self.arm.length


class _Acceptance:
    """Of one drafter's drafts, by position: how many were judged, and how many of them accepted, of late."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = (0, *lengths)
        self._judged = [0.0] * self.longest
        self._accepted = [0.0] * self.longest

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def weight(self) -> float:
        """Of what is known of the first position, in steps."""
        return self._judged[0]

    def at_most(self, length: int, above: int = 0) -> int:
        """The longest length up to `length`, or where none of those is beyond `above` the first that is."""
        longer = [k for k in self.lengths if k > above]
        return max((k for k in longer if k <= length), default=longer[0] if longer else above)

    def rates(self, prior: float) -> Iterator[float]:
        """The estimate for each position, from the first on. prior: of that one."""
        for judged, accepted in zip(self._judged, self._accepted, strict=True):
            prior = (accepted + PRIOR_WEIGHT * prior) / (judged + PRIOR_WEIGHT)
            yield prior

    def learn(self, length: int, accepted: Sequence[int]) -> None:
        """Of a step with `length` drafts of this drafter, 0 for another's: so many of each sequence's were accepted."""
        reached = [sum(a >= i for a in accepted) / len(accepted) for i in range(length + 1)]
        for i in range(self.longest):
            if i < length and (judged := reached[i]):
                self._judged[i] = DECAY * self._judged[i] + judged
                self._accepted[i] = DECAY * self._accepted[i] + reached[i + 1]
            else:
                self._judged[i] *= FADE
                self._accepted[i] *= FADE


@dataclass(slots=True, eq=False)
class _Timings:
    """Of the steps of one bucket: the seconds of each arm that was timed, when it was last, and how often."""

    seconds: dict[Arm, float] = field(default_factory=dict)
    last: dict[Arm, int] = field(default_factory=dict)
    counts: dict[Arm, int] = field(default_factory=dict)

    def of(self, arm: Arm) -> float:
        """Seconds; between two lengths that were timed in proportion, beyond them as much a draft as before."""
        if (known := self.seconds.get(arm)) is not None:
            return known
        plain = self.seconds.get(NO_DRAFTS, 1.0)
        timed = {0: plain} | {a.length: s for a, s in self.seconds.items() if a.length and a.by == arm.by}
        below = max(n for n in timed if n <= arm.length)
        low, above = timed[below], min((n for n in timed if n > arm.length), default=None)
        if above is None:
            slope = (low - plain) / below if below else STEP_SHARE * plain
            return low + max(slope, STEP_SHARE * plain / 2) * (arm.length - below)
        return low + (timed[above] - low) * (arm.length - below) / (above - below)

    def longest(self, by: int) -> int:
        """The most drafts of that drafter that were timed."""
        return max((arm.length for arm in self.seconds if arm.by == by), default=0)

    def extra(self, arm: Arm) -> float:
        """Plain steps that are lost by a step of which nothing is accepted."""
        return self.of(arm) / self.of(NO_DRAFTS) - 1

    def as_cheap_as_below(self, arm: Arm) -> float:
        """Seconds of the longest of the drafter's lengths up to this one that were timed."""
        below = max((a.length for a in self.seconds if a.by == arm.by and a.length <= arm.length), default=0)
        return self.of(Arm(below, arm.by) if below else NO_DRAFTS)

    def learn(self, arm: Arm, seconds: float, *, drifts: bool) -> None:
        """drifts: the step was one of many alike, so that its time says how all arms' have changed; those right after
        a change say what an arm takes beside the others.
        """
        count = self.counts[arm] = self.counts.get(arm, 0) + 1
        if (old := self.seconds.get(arm)) is None:
            self.seconds[arm] = seconds
            return
        # A step that something else delayed counts as twice as long.
        new = self.seconds[arm] = old + max(1 / count, SMOOTHING) * (min(seconds, 2 * old) - old)
        if drifts:
            for other in self.seconds:
                if other != arm:
                    self.seconds[other] *= new / old


class DraftLength:
    """Decides for one engine, whose steps may be observed while the next ones run. arms: what it may choose beside not
    drafting, each drafter's in ascending order; () for nothing at all.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = (NO_DRAFTS, *arms)
        self._drafters = [
            _Acceptance([arm.length for arm in arms if arm.by == by]) for by in sorted({arm.by for arm in arms})
        ]
        # What is tried where nothing is known to pay.
        self.first = tuple(Arm(found.at_most(FIRST_LENGTH), by) for by, found in enumerate(self._drafters))
        self._timings: defaultdict[int, _Timings] = defaultdict(_Timings)  # by batch bucket
        self._now = 0
        self._account = GIFT  # in plain steps
        self._last = NO_DRAFTS
        self._repeats = 0  # steps since the arm changed
        self._wait: float = FIRST_LOOK
        self._since_look = 0
        self._latest: Choice | None = None  # not yet observed
        self._held = 0.0  # what it may cost, in plain steps
        self._before = NO_DRAFTS  # the arm of the last step that was no look

    def choose(self, bucket: int) -> Choice:
        """What the next step of a batch of `bucket` rows is to do. To be given to `observe`, if it is observed."""
        timings = self._timings[bucket]
        if timings.counts.get(NO_DRAFTS, 0) < PLAIN_STEPS:
            return Choice(NO_DRAFTS, bucket)
        best = self._best(timings)
        is_look = self._since_look >= self._wait
        if is_look:
            best = self._look(timings, best)
            self._since_look = 0
        if self._latest is not None and self._latest.arm not in timings.seconds:
            best = NO_DRAFTS  # what the step under way takes is not known at all
        while best.length and timings.extra(best) > self._account - self._held:
            best = self._shorter(best)
        self._latest, self._held = Choice(best, bucket, is_look), timings.extra(best)
        return self._latest

    def observe(self, choice: Choice, seconds: float, accepted: Sequence[int]) -> None:
        """The step took `seconds`, and so many of each sequence's drafts were accepted."""
        if choice is self._latest:
            self._latest, self._held = None, 0.0
        if not self._drafters or seconds <= 0 or not accepted:
            return
        arm, timings = choice.arm, self._timings[choice.bucket]
        self._now += 1
        timings.last[arm] = self._now
        timings.learn(arm, seconds, drifts=arm == self._last and self._repeats >= 4)
        for by, drafter in enumerate(self._drafters):
            if arm.length:  # a plain step is no news: what looks are for
                drafter.learn(arm.length if by == arm.by else 0, accepted)
        took = seconds / timings.seconds.get(NO_DRAFTS, seconds)
        gain = sum(accepted) / len(accepted) + 1 - took if arm.length else 0.0
        self._account = min(self._account + gain + EARNS * took, MOST)
        if choice.is_look:
            found = self._best(timings) != self._before  # it was worth it: there may be more to find
            self._wait = FIRST_LOOK if found else min(LOOK_GROWTH * self._wait, LAST_LOOK)
        else:
            self._since_look += 1
            self._before = arm
        self._repeats = self._repeats + 1 if arm == self._last else 0
        self._last = arm

    def knows_plain(self, bucket: int) -> bool:
        """Whether enough of such steps without drafts were timed for others to be measured against."""
        return not self._drafters or self._timings[bucket].counts.get(NO_DRAFTS, 0) >= PLAIN_STEPS

    def passed(self, choice: Choice) -> None:
        """The step did other work besides, so its time says nothing; but it was one since the last look."""
        if choice is self._latest:
            self._latest, self._held = None, 0.0
        self._since_look += 1

    def acceptance(self, by: int = 0) -> list[float]:
        """The estimate for each position of that drafter's."""
        others = [drafter for other, drafter in enumerate(self._drafters) if other != by]
        known = max(others, key=lambda drafter: drafter.weight, default=None)
        return list(self._drafters[by].rates(PRIOR if known is None else next(known.rates(PRIOR))))

    def _look(self, timings: _Timings, best: Arm) -> Arm:
        """An arm to try in place of `best`: some drafts where none seem to pay, else what was timed longest ago."""
        rates = self._rates(timings)
        if not best.length:
            tried = [Arm(min(arm.length, self._reach(timings, arm.by)), arm.by) for arm in self.first]
            return min(tried, key=lambda arm: timings.last.get(arm, 0))
        hopes = {arm: rate * timings.of(arm) / timings.as_cheap_as_below(arm) for arm, rate in rates.items()}
        worth = [
            arm for arm, hope in hopes.items()
            if arm != best and (not arm.length or hope > WORTH_A_LOOK * rates[best] or not timings.longest(arm.by))
        ]  # fmt: skip
        return min(worth, key=lambda arm: timings.last.get(arm, 0))

    def _reach(self, timings: _Timings, by: int) -> int:
        """The most drafts of that drafter that may be tried: about twice what was timed, or the next length."""
        timed = timings.longest(by)
        return self._drafters[by].at_most(2 * timed + 1, above=timed)

    def _shorter(self, arm: Arm) -> Arm:
        length = max(k for k in self._drafters[arm.by].lengths if k < arm.length)
        return Arm(length, arm.by) if length else NO_DRAFTS

    def _rates(self, timings: _Timings) -> dict[Arm, float]:
        """Tokens a second that each arm that may be tried is expected to make of a sequence."""
        rates = {NO_DRAFTS: 1.0 / timings.of(NO_DRAFTS)}
        for by, drafter in enumerate(self._drafters):
            reach = self._reach(timings, by)
            emitted = list(accumulate(accumulate(self.acceptance(by)[:reach], mul), initial=1.0))
            for length in drafter.lengths[1:]:
                if length <= reach:
                    arm = Arm(length, by)
                    rates[arm] = emitted[length] / timings.of(arm)
        return rates

    def _best(self, timings: _Timings) -> Arm:
        rates = self._rates(timings)
        best, held = max(rates, key=rates.__getitem__), self._before
        while held not in rates:  # timed with another batch alone
            held = self._shorter(held)
        return best if rates[best] > rates[held] * MARGIN else held
