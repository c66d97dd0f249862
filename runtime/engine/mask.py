"""Token masks from outside the engine, one step at a time: guided decoding.

A mask depends on the token before it. So a request with a mask takes no drafts, and while one runs the host reads each
step before the next one begins. Other rows draft as usual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kerngen.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kerngen.runtime.engine.request import Handle


class TokenMask(Protocol):
    """What may follow, in one sequence: each request has a mask of its own.

    Whatever it raises ends its request: a KerngenError is that request's alone, anything else is raised by the engine.
    """

    def accept(self, token: int) -> None:
        """The token was generated. Told each once, in order, the last one included, before `Request.stops` is."""

    def fill(self, bits: NDArray[np.int32]) -> bool:
        """Says which tokens may come next: sets all of bits [ceil(vocab / 32)], where token t is bit t % 32 of word
        t // 32, and 1 allows it. False: every token may, whatever is in `bits`. May be asked twice before a token.
        """


def allowed_bits(mask: TokenMask, vocab: int, never: Iterable[int], length: int) -> NDArray[np.int32]:
    """What `mask` allows next, [ceil(vocab / 32)] int32, without the tokens of `never`.

    length: of the answer so far. Raises UsageError where nothing is left.
    """
    bits = np.full(-(-vocab // 32), -1, dtype=np.int32)
    if not mask.fill(bits):
        bits.fill(-1)
    words = bits.view(np.uint32)
    if vocab % 32:
        words[-1] &= np.uint32((1 << vocab % 32) - 1)
    for token in never:
        words[token // 32] &= ~np.uint32(1 << token % 32)
    if not words.any():
        raise UsageError(f"the request's mask allows no token after {length} of its answer",
                         hint="a mask that is through with its text must allow a stop token")  # fmt: skip
    return bits


def bits_of(handle: Handle) -> NDArray[np.int32]:
    """What a request with a mask may choose next; where it makes its tokens again, the one that it had."""
    if handle.num_made == len(handle.tokens):
        return handle.allowed
    bits = np.zeros_like(handle.allowed)
    token = handle.tokens[handle.num_made]
    bits.view(np.uint32)[token // 32] = 1 << token % 32
    return bits
