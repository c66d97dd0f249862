"""Which problems of attention's kernels a layer asks for inside vLLM, for all batches that there can be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kerngen.runtime.selection import lengths_up_to
from kerngen.templates import find_kernel
from kerngen.templates.attn_decode.spec import Problem as Decode
from kerngen.templates.attn_prefill.spec import Problem as Prefill
from kerngen.templates.common.rows.spec import keys_that_matter
from kerngen.templates.kv_write.spec import Problem as Write
from kerngen.templates.qkv_norm_rope.spec import Problem as Make
from kerngen.tuning_db.read.ids import bucketed

PAGE_SIZE = 64  # tokens: what the kernels are tuned for
LEAST_KV_LEN = 512  # shorter sequences are served as this long, as in kerngen's own engine


def bucket_of(longest: int, most: int) -> int:
    """What stands for a longest sequence of `longest` tokens where a model takes `most`: a power of two, or `most`."""
    return min(most, 1 << (max(longest, LEAST_KV_LEN) - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's on one rank. window: keys that a query sees, its own included; 0 for all. dtype: "bf16" or "fp16".
    sees_images: whether a token of an image sees the image's later ones, too (image_ends.py).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    dtype: str
    has_logit_cap: bool = False
    sees_images: bool = False

    @property
    def page_heads(self) -> int:
        """Of a page: those of K, then those of V."""
        return 2 * self.num_kv_heads

    def decode(self, q_len: int, batch: int, kv_len: int) -> Decode:
        """Raises ProblemError, as the others, for what the kernel does not take."""
        keys = keys_that_matter(kv_len, q_len, self.window)
        return Decode(self.head_dim, self.num_q_heads, self.num_kv_heads, q_len, PAGE_SIZE, self.window, self.dtype,
                      self.has_logit_cap, batch, keys, page_heads=self.page_heads)  # fmt: skip

    def prefill(self, batch: int, num_tokens: int, keys: int, ends: bool = False) -> Prefill:
        """ends: of a batch with images."""
        return Prefill(self.head_dim, self.num_q_heads, self.num_kv_heads, PAGE_SIZE, self.window, True, self.dtype,
                       self.has_logit_cap, batch, num_tokens, keys, self.page_heads, ends)  # fmt: skip

    def write(self, num_tokens: int = 1) -> Write:
        return Write(self.num_kv_heads, self.head_dim, PAGE_SIZE, self.dtype, num_tokens, self.page_heads)

    def make(self, num_rotated_pairs: int, v_is_k: bool) -> Make:
        """q, K and V of the projection's output q | k | v, or q | k where V is K."""
        return Make(self.num_q_heads, self.num_kv_heads, self.head_dim, num_rotated_pairs, PAGE_SIZE, self.dtype,
                    v_is_k, page_heads=self.page_heads)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Grid:
    """Problems of attn_decode and attn_prefill that layers with these heads ask for.

    q_lens: new tokens of each sequence of a decode. max_batch: sequences, max_tokens: new tokens of a forward.
    max_kv_len: tokens of a sequence.
    """

    heads: Heads
    q_lens: tuple[int, ...]
    max_batch: int
    max_tokens: int
    max_kv_len: int

    def problems(self) -> Iterator[tuple[str, Any]]:
        """One at least of all that share a choice (runtime/selection.py), of those the one that takes most scratch."""
        buckets = sorted({bucket_of(1 << e, self.max_kv_len) for e in range(self.max_kv_len.bit_length() + 1)})
        for q_len in self.q_lens:
            decodes = [self.heads.decode(q_len, batch, buckets[0]) for batch in range(1, self.max_batch + 1)]
            for batch in _batches("attn_decode", decodes):
                for keys in sorted({keys_that_matter(kv_len, q_len, self.heads.window) for kv_len in buckets}):
                    yield "attn_decode", self.heads.decode(q_len, batch, keys)
        queries = [1 << e for e in range(self.max_tokens.bit_length())]  # of a sequence: with them a window's keys grow
        every = sorted({keys_that_matter(kv_len, q, self.heads.window) for kv_len in buckets for q in queries})
        prefills = [self.heads.prefill(batch, batch, buckets[0]) for batch in range(1, self.max_batch + 1)]
        with_and_without = sorted({False, self.heads.sees_images})
        for batch in _batches("attn_prefill", prefills):
            for num_tokens in lengths_up_to(self.max_tokens):
                for keys in every if num_tokens >= batch else ():
                    if keys * batch >= num_tokens:
                        for ends in with_and_without:
                            yield "attn_prefill", self.heads.prefill(batch, num_tokens, keys, ends)


def _batches(kernel: str, problems: Iterable[Any]) -> list[int]:
    """The largest batch of each bucket that the kernel's configurations are looked up by."""
    found = find_kernel(kernel)
    return list({bucketed(found, p)["batch"]: p.batch for p in problems}.values())
