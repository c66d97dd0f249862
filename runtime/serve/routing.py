"""Which of several engines a request goes to. It has no processes and no HTTP.

Each engine keeps the pages of prompts it has seen, so the second turn of a conversation is cheap where the first one
was. But who only follows prefixes sends all who share a system prompt to one engine, and the others idle. Both are
tokens: a request goes where the fewest have to be computed before its first one,

    pending tokens of the engine + tokens of the prompt - those of them that its cache has.

So a match is followed as long as its engine is not busier than the idlest one by more than the match saves, and a
choice puts an engine at most that request's tokens ahead of the idlest (`tests/host/test_serve_routing.py`).
Engines with a free row come before those without: who waits for a row waits for the end of an answer, which is longer
than any prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


class PrefixIndex:
    """Keys of the pages (engine/pages.py) that an engine's cache probably holds: those that it was sent last.

    capacity: pages of its cache; older ones are forgotten, as they are there. Approximate: what the engine gave up for
    requests under way is still here, and a page that is sent counts before it is computed.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # longest ago first

    def __len__(self) -> int:
        return len(self._keys)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of the first `keys` are there, without a gap."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def note(self, keys: Sequence[bytes]) -> None:
        """They are used now. The first are kept longest: without them the others are never found."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine as one request sees it. pending_tokens: that it has still to compute for others. num_found: tokens of
    the request's prompt that its cache has. has_row: another sequence can begin.
    """

    pending_tokens: float
    num_found: int
    has_row: bool


def choose(candidates: Sequence[Candidate], turn: int) -> int:
    """The place of the one that a request goes to. turn: which one is first among equals."""
    count = len(candidates)

    def cost(at: int) -> tuple[bool, float, int]:
        found = candidates[at]
        return not found.has_row, found.pending_tokens - found.num_found, (at - turn) % count

    return min(range(count), key=cost)
