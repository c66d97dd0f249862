"""Which embeddings of images and sounds a runner holds. It has no tensors; runner.py has them.

An item is embedded when a chunk of a prompt first needs it, and found by its digest from then on: by the next chunk, by
a request that was preempted and begins again, by the next turn of a chat. What was used longest ago is let go where
there is more than `capacity` bytes; what the forward at hand needs, or the next chunk of a prompt goes on with, stays
meanwhile, whatever it takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from kerngen.runtime.engine.plan import SAME_MEDIA, MediaUpdate
from kerngen.runtime.media.values import Media

MEDIA_CACHE_BYTES = 1 << 28  # 89 images of 280 tokens in 16 bits, of a model whose hidden size is 5376


class MediaCache:
    """Of one engine. capacity: bytes of embeddings that are kept; 0 keeps none. token_bytes: of a soft token."""

    def __init__(self, capacity: int, token_bytes: int) -> None:
        self._capacity, self._token_bytes = capacity, token_bytes
        self._held: OrderedDict[bytes, int] = OrderedDict()  # bytes by digest, longest ago first
        self._resets = False
        self.num_bytes = 0

    def take_update(self, needed: Iterable[Media], kept: Container[bytes] = ()) -> MediaUpdate:
        """What becomes of the embeddings before a forward that reads those of `needed`. kept: digests of what later
        chunks go on with.
        """
        embed: list[Media] = []
        now = set[bytes]()
        for media in needed:
            now.add(media.digest)
            if media.digest not in self._held:
                embed.append(media)
                self._held[media.digest] = media.num_tokens * self._token_bytes
                self.num_bytes += self._held[media.digest]
            self._held.move_to_end(media.digest)
        forget = self._forgotten(now, kept) if self.num_bytes > self._capacity else ()
        if not (self._resets or embed or forget):
            return SAME_MEDIA
        update = MediaUpdate(self._resets, forget, tuple(embed))
        self._resets = False
        return update

    def _forgotten(self, now: Container[bytes], kept: Container[bytes]) -> tuple[bytes, ...]:
        forget: list[bytes] = []
        excess = self.num_bytes - self._capacity
        for digest, size in self._held.items():
            if excess <= 0:
                break
            if digest not in now and digest not in kept:
                forget.append(digest)
                excess -= size
        for digest in forget:
            self.num_bytes -= self._held.pop(digest)
        return tuple(forget)

    def restart(self) -> None:
        """Nothing is held: what a step that was interrupted left is not known, and what it computed may be wrong."""
        self._held.clear()
        self.num_bytes = 0
        self._resets = True
