"""How a model takes media in, and which of a prompt's tokens belong together because of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from kerngen.errors import UsageError
from kerngen.runtime.media.images import BUDGETS
from kerngen.runtime.media.values import DIGEST_BYTES, Kind, Media, Placed

if TYPE_CHECKING:
    from torch import Tensor

MOST_IMAGE_TOKENS = BUDGETS[-1]  # soft tokens of an image at the largest budget


class Block(NamedTuple):
    """Tokens [start, end) of a prompt whose K and V are decided together. digest: of what is there.

    sees_itself: its tokens see each other both ways in sliding layers, so they are prefilled in one chunk.
    """

    start: int
    end: int
    digest: bytes
    sees_itself: bool

    def key(self, begin: int) -> bytes:
        """What is at position `begin` and behind it, of what lies in this block."""
        return self.digest + (begin - self.start).to_bytes(8, "little", signed=True)


@dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """What a model has beside its text part.

    embed: of items of any kind and shape, their embeddings [num_tokens, hidden] each, in the order of the items, in the
    model's dtype on its device; which of them are computed together is its own affair. They take the place of rows of
    the embedding table, and are not scaled as those are. Waits for nothing on the host.
    placeholders: the token that stands where an item of a kind is; a kind that the model does not take has none.
    bidirectional: tokens of an image, or of several that follow each other without a token between them, see each other
    both ways in sliding layers (use_bidirectional_attention: "vision").
    require_fits: raises UsageError for an item that `embed` would refuse, before a request with it begins: what `embed`
    raises costs others their steps.
    warm_up: asks for the kernels that `embed` needs, where it is loaded; nothing is computed.
    unloaded_bytes: of device memory that `embed` takes for weights when it is first called, 0 once it has them.
    """

    embed: Callable[[Sequence[Media]], list[Tensor]]
    placeholders: Mapping[Kind, int]
    bidirectional: bool = False
    require_fits: Callable[[Media], None] = lambda _: None
    unloaded_bytes: Callable[[], int] = lambda: 0
    warm_up: Callable[[], None] = lambda: None

    @property
    def longest_block(self) -> int:
        """Tokens of the largest image, where all must be in one chunk; 0 where none must."""
        return MOST_IMAGE_TOKENS if self.bidirectional else 0

    def require_placed(self, prompt: Sequence[int], media: Sequence[Placed]) -> None:
        """Raises UsageError unless `media` are sorted, do not overlap, and stand where `prompt` has the placeholders of
        their kinds, all of them, and can be embedded.
        """
        behind, expected = 0, dict[int, int]()
        for placed in media:
            kind, start, end = placed.media.kind, placed.start, placed.end
            if kind not in self.placeholders:
                takes = ", ".join(sorted(self.placeholders))
                raise UsageError(f"the request has {kind} input; the model takes {takes}")
            if not behind <= start < end <= len(prompt):
                raise UsageError(
                    f"{kind} input takes tokens {start} up to {end} of a prompt of {len(prompt)}, and what is before "
                    f"it ends at {behind}",
                    hint="media are sorted by `start`, do not overlap, and take a token or more within the prompt",
                )
            self.require_fits(placed.media)
            expected |= dict.fromkeys(range(start, end), self.placeholders[kind])
            behind = end
        known = set(self.placeholders.values())
        found = {i: token for i, token in enumerate(prompt) if token in known}
        wrong = min((i for i in found.keys() | expected.keys() if found.get(i) != expected.get(i)), default=None)
        if wrong is not None:
            wants = f"the placeholder {expected[wrong]}" if wrong in expected else "no placeholder"
            raise UsageError(
                f"token {wrong} of the prompt is {prompt[wrong]} and should be {wants}",
                hint="a prompt has the placeholder of its kind at each soft token of an item, and nowhere else",
            )

    def blocks(self, media: Iterable[Placed]) -> tuple[Block, ...]:
        """The blocks of a prompt with `media`, which are sorted."""
        found: list[Block] = []
        for placed in media:
            sees_itself = self.bidirectional and placed.sees_itself
            block = Block(placed.start, placed.end, placed.media.digest, sees_itself)
            if sees_itself and found and found[-1].sees_itself and found[-1].end == block.start:
                last = found.pop()
                digest = blake2b(last.key(block.start) + block.digest, digest_size=DIGEST_BYTES).digest()
                block = Block(last.start, block.end, digest, sees_itself=True)
            found.append(block)
        return tuple(found)


def longest_block(blocks: Iterable[Block]) -> int:
    """Tokens of the largest of `blocks` whose tokens see each other; 0 where there is none."""
    return max((block.end - block.start for block in blocks if block.sees_itself), default=0)


def touched(blocks: Sequence[Block], start: int, end: int) -> Sequence[Block]:
    """Those of `blocks`, which are sorted, that have tokens in [start, end)."""
    first = bisect_right(blocks, start, key=lambda block: block.end)
    return blocks[first : bisect_left(blocks, end, lo=first, key=lambda block: block.start)]
