"""How many tokens of prompts a step prefills beside those who decode, so that they do not wait long for their next one.

A step's prefill may take MAX_STALL times as long as its decode: then no two tokens of an answer are further apart than
1 + MAX_STALL decode steps, however long the prompts are that come meanwhile. How many tokens that is follows from what
chunks and steps took lately. Where more wait for their first token than for their next one, as when many come at once,
a step prefills more by so many times: few gaps are long then, and short chunks, most of whose time is reading the
weights, would keep all others waiting. Where nobody decodes, chunks are as long as they may be.
"""

from __future__ import annotations

MAX_STALL = 1.5  # 2.5 steps between two tokens: a margin to three times the median
LEAST = 128  # tokens: below, reading the weights is all that a chunk takes
MULTIPLE = 128  # tokens of a whole tile of an int4 product
SMOOTHING = 0.2  # of a decode step's time, by the latest


class PrefillBudget:
    """Of one engine. most: tokens of a step. max_stall: in decode steps, None for any."""

    def __init__(self, most: int, max_stall: float | None = MAX_STALL) -> None:
        self._most, self._max_stall = most, max_stall
        self._tokens = min(most, max(most // 4, LEAST))
        self._decode_s = 0.0

    def tokens(self, num_prefilling: int, num_running: int) -> int:
        """What the next step may prefill, of so many prompts, beside so many that decode."""
        if num_running == 0 or self._max_stall is None:
            return self._most
        return min(self._most, self._tokens * max(num_prefilling, num_running) // num_running)

    def decoded(self, seconds: float) -> None:
        """A decode step took `seconds`; 0 where that is not known."""
        if seconds > 0:
            self._decode_s += (SMOOTHING if self._decode_s else 1.0) * (seconds - self._decode_s)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took `seconds`, whoever decoded beside it."""
        if self._max_stall is None or not self._decode_s or seconds <= 0:
            return
        wanted = self._max_stall * self._decode_s
        if 2 * tokens < self._tokens and seconds <= wanted:
            return  # the end of a prompt, which says little of a longer chunk
        found = tokens * wanted / seconds
        found = min(max(found, self._tokens / 2), 2 * self._tokens)  # the first chunk of a kind takes much longer
        rounded = int(found) // MULTIPLE * MULTIPLE
        self._tokens = min(max(rounded, LEAST), self._most)
