"""The page allocator: reference counts, and shared prefixes by key. It has no tensors; cache.py has the pools.

A full page may be published under a key, a hash of its tokens and all before them; a request whose prompt starts with
the same tokens shares it. Where images or sounds are, the key is of their content too: a page is found where the text
and each of them that it touches are equal. A page without references stays cached until it is reused, the least
recently used first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kerngen.runtime.media.input import Block, touched


class PagePool:
    """Pages 1 to num_pages - 1 of one kind; page 0 belongs to nobody (cache.py)."""

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages - 1
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by nobody, findable; longest ago first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A page for one holder. The caller sees to it that one is available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._holders[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def is_idle(self, page: int) -> bool:
        """Whether nobody holds it: sharing it then takes one of those available."""
        return self._holders[page] == 0

    def share(self, page: int) -> None:
        """One more holder of a page that was found."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each. Of pages that nobody holds then, those named first are found longest."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page] < 0:
                raise RuntimeError(f"page {page} was released more often than it was held")
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, page: int, key: bytes) -> None:
        """Let `page` be found by `key`. Another page that is found by it already stays the one."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def forget_all(self) -> None:
        """Nothing is findable any more: what the pages hold may be wrong."""
        self._page_of.clear()
        self._key_of.clear()
        self._free += self._idle
        self._idle.clear()

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]


def page_keys(
    tokens: Sequence[int], page_size: int, known: Sequence[bytes] = (), blocks: Sequence[Block] = (),
    made_by: bytes = b"",
) -> list[bytes]:  # fmt: skip
    """The key of every full page of `tokens`, of which the first len(known) are known already. blocks: of all media.
    made_by: what K and V depend on beside tokens and media.

    All tokens of an image have one id, and K and V of its first may depend on its last: a page's key has the digest of
    each block that it touches, and where in that it begins.
    """
    keys = list(known)
    for begin in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        content = array("q", tokens[begin : begin + page_size]).tobytes()
        content += b"".join(block.key(begin) for block in touched(blocks, begin, begin + page_size))
        keys.append(hashlib.blake2b(content, digest_size=16, key=keys[-1] if keys else made_by).digest())
    return keys
