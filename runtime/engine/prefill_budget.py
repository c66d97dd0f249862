"""How many tokens of prompts a step prefills beside those who decode, so that they do not wait long for their next one.

Tokens come evenly where no gap between two of them is LONGEST times as long as most are, and that is what is kept to:
from the median of the last steps, their prefill included, follows how long the next one may take, and from what chunks
and steps took lately, how many tokens that is. So where prompts come now and then, their chunks are short; where
somebody waits at each step, gaps are all alike, and chunks grow until they take MOST_STALL times as long as the decode:
then more sequences decode at once, and a token costs less of everybody's time. Where more wait for their first token
than for their next one, as when many come at once, a step prefills more by so many times: few gaps are long then.
Where nobody decodes, chunks are as long as they may be.
"""

from __future__ import annotations

from collections import deque

LONGEST = 2.7  # medians: a margin to three
MOST_STALL = 2.5  # decode steps
REMEMBERED = 1024  # steps
LOOKED_AT_EVERY = 16  # steps
LEAST = 64  # tokens: below, reading the weights is all that a chunk takes
MULTIPLE = 64  # tokens of a whole tile of an int4 product
SMOOTHING = 0.2  # of a decode step's time, by the latest


class PrefillBudget:
    """Of one engine. most: tokens of a step. max_stall: in decode steps, None for any."""

    def __init__(self, most: int, max_stall: float | None = MOST_STALL) -> None:
        self._most, self._max_stall = most, max_stall
        self._tokens = float(min(most, max(most // 4, LEAST)))  # that take as long as a decode step
        self._decode_s = 0.0
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self._median_s, self._num_gaps = 0.0, 0
        self._since_s = 0.0  # prefill since the last decode step

    def tokens(self, num_prefilling: int, num_running: int) -> int:
        """What the next step may prefill, of so many prompts, beside so many that decode."""
        if num_running == 0 or self._max_stall is None:
            return self._most
        stall = LONGEST - 1
        if self._decode_s:
            stall = max(stall, LONGEST * self._median_s / self._decode_s - 1)
        found = self._tokens * min(stall, self._max_stall) * max(num_prefilling, num_running) / num_running
        return min(self._most, max(int(found) // MULTIPLE * MULTIPLE, LEAST))

    def decoded(self, seconds: float) -> None:
        """A decode step took `seconds`; 0 where that is not known."""
        if seconds <= 0:
            return
        self._decode_s += (SMOOTHING if self._decode_s else 1.0) * (seconds - self._decode_s)
        self._gaps.append(seconds + self._since_s)
        self._since_s = 0.0
        if self._num_gaps % LOOKED_AT_EVERY == 0:
            self._median_s = sorted(self._gaps)[len(self._gaps) // 2]
        self._num_gaps += 1

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took `seconds`, whoever decoded beside it."""
        if self._max_stall is None or not self._decode_s or seconds <= 0:
            return
        self._since_s += seconds
        if 2 * tokens < self._tokens and seconds <= self._decode_s:
            return  # the end of a prompt, which says little of a longer chunk
        found = tokens * self._decode_s / seconds
        found = min(max(found, self._tokens / 2), 2 * self._tokens)  # the first chunk of a kind takes much longer
        self._tokens = min(max(found, LEAST / (1 + self._max_stall)), self._most)
