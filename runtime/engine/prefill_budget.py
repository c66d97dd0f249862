"""The token budget of chunked prefill: how many prompt tokens a step prefills while other sequences decode.

It bounds inter-token latency: a gap between two tokens may take LONGEST times a decode step of the sequences that
decode now. A gap is the decode step plus a chunk, or one mixed batch of both. If more requests wait for their first
token than sequences decode, the budget grows by that ratio: then few gaps are long. If none decodes, chunks have the
maximum size.

The time of a chunk is not proportional to its tokens: a short chunk mostly reads the weights, so eight times as many
tokens may take twice as long. An engine that was warmed up has timed a few sizes, and tracks how much longer chunks
take lately, since they attend to longer contexts. Another engine uses the last chunk's time per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

LONGEST = 2.7  # decode steps that a gap takes: a margin to three
MOST_STALL = LONGEST - 1  # that a chunk takes beside one
MULTIPLE = 64  # tokens of a whole tile of an int4 product
SMOOTHING = 0.2  # of a step's and a chunk's time, by the latest


class PrefillBudget:
    """Of one engine. most: tokens of a step. max_stall: in decode steps, None for any."""

    def __init__(self, most: int, max_stall: float | None = MOST_STALL) -> None:
        self._most, self._max_stall = most, max_stall
        self._points: list[tuple[int, float]] = []  # tokens and seconds of a chunk
        self._knows = False
        self._extra_s = 0.0  # that chunks take longer lately
        self._decodes: dict[int, float] = {}  # seconds of steps alone, by the bits of how many decode

    def know(self, timed: Iterable[tuple[int, float]]) -> None:
        """What chunks of so many tokens take in seconds, of prompts that begin. From one size nothing follows."""
        if len(points := sorted(timed)) > 1:
            # No fewer tokens take longer: what is odd of one size is not to keep chunks from being longer.
            least = points[-1][1]
            self._points = [(n, least := min(least, s)) for n, s in reversed(points)][::-1]
            self._knows = True

    @property
    def knows_decode(self) -> bool:
        """Whether any decode step was timed, if that matters: what gaps are measured against."""
        return self._max_stall is None or bool(self._decodes)

    def tokens(self, num_prefilling: int, num_running: int, beside: int = 0, least: int = MULTIPLE) -> int:
        """What the next step may prefill, of so many prompts, beside so many that decode. beside: rows of those in the
        chunk's own forward, whose time is then the step's; 0 where they decode by themselves. least: tokens of the
        shortest forward that there is: with fewer it takes no less.
        """
        if num_running == 0 or self._max_stall is None:
            return self._most
        times = max(num_prefilling, num_running) / num_running
        if not self._decodes or not self._points:
            return min(self._most, max(int(self._most // 4 * times), MULTIPLE))
        allowed_s = (self._max_stall * times + (beside > 0)) * self._decode_seconds(num_running)
        longest = (self._most + beside) // MULTIPLE * MULTIPLE
        if beside and self._knows:
            longest = min(longest, self._points[-1][0])
        least = max(least, MULTIPLE * (1 + beside // MULTIPLE))
        found = (n for n in range(longest, least, -MULTIPLE) if self._run_as(n) == n and self._seconds(n) <= allowed_s)
        return min(self._most, next(found, least) - beside)

    def _decode_seconds(self, rows: int) -> float:
        """Of a step of so many sequences, by the nearest number that decoded alone lately: forwards that prefill, too,
        say nothing of it. Of more sequences it grows as the root of them, about.
        """
        bits = rows.bit_length()
        nearest = min(self._decodes, key=lambda known: abs(known - bits))
        return self._decodes[nearest] * max(2.0 ** (0.5 * (bits - nearest)), 1.0)

    def _run_as(self, tokens: int) -> int:
        """What a chunk of so many is filled up to: the next size that is known, where there is one."""
        return next((n for n, _ in self._points if n >= tokens), tokens) if self._knows else tokens

    def _seconds(self, tokens: int) -> float:
        """Of a chunk. Beyond the sizes that are known each token takes what it does between the last two, and no less
        than between the first and the last: two that took the same would let chunks be of any length.
        """
        (n, s), (last_n, last_s) = self._points[0], self._points[-1]
        index = min(max(bisect_left(self._points, (tokens, 0.0)), 1), len(self._points) - 1)
        (n0, s0), (n1, s1) = self._points[index - 1], self._points[index]
        each = (s1 - s0) / (n1 - n0)
        if tokens > last_n:
            return last_s + max(each, (last_s - s) / (last_n - n)) * (tokens - last_n) + self._extra_s
        return s0 + each * max(tokens - n0, 0) + self._extra_s

    def decoded(self, seconds: float, rows: int) -> None:
        """A decode step of so many sequences took `seconds`; 0 where that is not known."""
        if seconds > 0:
            known = self._decodes.get(rows.bit_length(), seconds)
            self._decodes[rows.bit_length()] = known + SMOOTHING * (seconds - known)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A forward of so many tokens, its padding among them, took `seconds`, whoever decoded beside it or in it; 0
        where that is not known.
        """
        if self._max_stall is None or not self._decodes or seconds <= 0:
            return
        if self._knows:
            expected = self._seconds(tokens)
            longest = 2 * expected  # whatever else happened meanwhile
            self._extra_s += SMOOTHING * (min(seconds, longest) - expected)
            return
        if self._points and 2 * tokens < self._points[1][0] and seconds <= min(self._decodes.values()):
            return  # the end of a prompt, which says little of a longer chunk
        each = seconds / tokens
        if self._points:  # the first chunk of a kind takes much longer
            known = self._points[1][1] / self._points[1][0]
            each = min(max(each, known / 2), 2 * known)
        self._points = [(0, 0.0), (tokens, each * tokens)]
