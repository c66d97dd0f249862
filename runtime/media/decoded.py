"""What files were decoded to, for whoever sends the same bytes again: a chat sends its earlier images at each turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from hashlib import blake2b

from kerngen.runtime.media.limits import MediaLimits
from kerngen.runtime.media.values import Media, Source

Key = tuple[object, ...]


def key_of(source: Source, limits: MediaLimits) -> Key:
    """Of all that decides what `source`, which has its bytes, becomes; whatever name or URL it came by."""
    if source.data is None:
        raise ValueError("a source without its bytes")
    return source.kind, source.num_tokens, limits, blake2b(source.data, digest_size=32).digest()


class Decoded:
    """Of one model's decoders. capacity: bytes of `Media.data` that are kept, the least recently used go first; 0 keeps
    none. Any thread may ask.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[Key, Media] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: Key) -> Media | None:
        with self._lock:
            if (media := self._held.get(key)) is not None:
                self._held.move_to_end(key)
            return media

    def put(self, key: Key, media: Media) -> None:
        """Keep `media`, whose data nobody writes to."""
        with self._lock:
            if key in self._held or media.data.nbytes > self._capacity:
                return
            self._held[key] = media
            self.num_bytes += media.data.nbytes
            while self.num_bytes > self._capacity:
                self.num_bytes -= self._held.popitem(last=False)[1].data.nbytes
