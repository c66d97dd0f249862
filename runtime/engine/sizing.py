"""Sizes of the cache: how many pages the engine allocates, and how many sequences of a length fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kerngen.runtime.cache import KINDS, PAGE_SIZE
from kerngen.runtime.config import NO_DRAFTER, DraftPolicy, ModelConfig
from kerngen.runtime.engine.scheduler import pages_for, window_pages
from kerngen.templates.values import KV_FORMATS

PREFILL_CHUNK = 2048
LEAST_CHUNK = 256  # where memory is short: the scheduler shortens chunks to the pages there are


def step_of(most: int, async_depth: int, drafter: DraftPolicy) -> int:
    """Tokens that may be under way beyond those that the host knows of: of a step with `most` drafts, or what its
    drafter writes ahead of it, and of the steps that the host reads behind.
    """
    return async_depth * (most + 1) + max(most + 1, drafter.block)


def usual_step(drafter: DraftPolicy) -> int:
    """What step_of gives where a step behind the host is under way; 16 at least, two steps of 8 tokens."""
    return max(16, step_of(drafter.max_drafts, 1, drafter))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides how much cache a sequence takes.

    step: tokens that may be under way beyond those that the host knows of, drafts and the steps behind included.
    chunk: tokens prefilled at once, of all sequences together. drafter: what it keeps, and how far it writes behind a
    sequence's last token. longest_block: the most tokens of an image, which are prefilled at once whatever the chunk; 0
    where a chunk may end within one.
    """

    config: ModelConfig
    dtype: torch.dtype
    page_size: int = PAGE_SIZE
    step: int = usual_step(NO_DRAFTER)
    chunk: int = PREFILL_CHUNK
    drafter: DraftPolicy = NO_DRAFTER
    longest_block: int = 0

    @property
    def page_bytes(self) -> dict[str, int]:
        """Of one page, K and V, in all layers of each kind; and means of its keys, where prompts choose by them."""
        total = dict.fromkeys(KINDS, 0)
        for layer in (*self.config.layers, *self.drafter.cache_layers):
            if layer.owns_kv:
                total[layer.kind] += KV_FORMATS[self.config.kv_format_of(layer)].page_bytes(
                    layer.num_kv_heads, self.page_size, layer.head_dim, self.dtype
                )
        if (sparse := self.config.sparse) is not None:
            owners = [layer for layer in self.config.layers if layer.owns_kv and layer.kind == "full"]
            values = sum(layer.num_kv_heads * layer.head_dim for layer in owners)
            total["full"] += values * (self.page_size // sparse.mean_keys) * self.dtype.itemsize
        return total

    @property
    def token_bytes(self) -> int:
        """What a sequence grows by with each token: K and V of the full-attention layers."""
        return self.page_bytes["full"] // self.page_size

    @property
    def window_bytes(self) -> int:
        """What the sliding layers of a sequence take that is longer than their window."""
        return self.page_bytes["sliding"] * self._window_pages

    @property
    def _window_pages(self) -> int:
        return window_pages(self.config.window, self.step, self.page_size)

    def pages(self, sequences: int, context: int, chunk: int | None = None) -> dict[str, int]:
        """Pages of each kind in which `sequences` of `context` tokens, drafts included, all run at once.

        chunk: of prefill, if another than the shape's. Its sliding pages are held while its forward is handed in.
        """
        full = pages_for(context + self.drafter.block, self.page_size)
        chunk = pages_for(max(self.chunk if chunk is None else chunk, self.longest_block), self.page_size)
        sliding = min(sequences * self._window_pages + chunk, sequences * full)
        return {"full": sequences * full + 1, "sliding": sliding + 1}  # and page 0

    def num_bytes(self, pages: dict[str, int]) -> int:
        return sum(pages[kind] * size for kind, size in self.page_bytes.items())

    def fits(self, budget_bytes: int, sequences: int, context: int) -> bool:
        """Whether `sequences` of `context` tokens run at once in `budget_bytes`, prefilled in chunks of LEAST_CHUNK."""
        least = min(self.chunk, LEAST_CHUNK)
        return self.num_bytes(self.pages(sequences, context, least)) <= budget_bytes

    def most_sequences(self, budget_bytes: int, context: int) -> int:
        """How many sequences of `context` tokens fit in `budget_bytes`; 0 where not one does."""
        fits, too_many = 0, 1
        while self.fits(budget_bytes, too_many, context):
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.fits(budget_bytes, middle, context):
                fits = middle
            else:
                too_many = middle
        return fits

    def most_tokens(self, budget_bytes: int) -> int:
        """The longest single sequence that fits in `budget_bytes`, in whole pages; 0 where not one page does."""
        pages = 0
        for bit in reversed(range(40)):
            more = pages + (1 << bit)
            if self.fits(budget_bytes, 1, more * self.page_size):
                pages = more
        return min(pages * self.page_size, self.config.max_positions)

    def split(self, budget_bytes: int, max_batch: int, context: int) -> tuple[int, dict[str, int]]:
        """(sequences at once, pages of each kind) that use up `budget_bytes`.

        As many sequences as fit with `context` tokens each, max_batch of them at most; what is left goes first to the
        sliding pages of a whole chunk, then to the full-attention layers, for longer sequences and kept prefixes.
        """
        sequences = min(max(self.most_sequences(budget_bytes, context), 1), max_batch)
        pages = self.pages(sequences, context, min(self.chunk, LEAST_CHUNK))
        wanted = {"sliding": self.pages(sequences, context)["sliding"] - pages["sliding"], "full": 1 << 40}
        for kind, more in wanted.items():
            left = max(budget_bytes - self.num_bytes(pages), 0)
            if self.page_bytes[kind]:
                pages[kind] += min(more, left // self.page_bytes[kind])
        return sequences, pages
