"""Values that ops take: attention's cache of a layer, batch, mask and head norms; the peers of an exchange.

An op that takes one is a flat operator of torch all the same: its fields are arguments there (`call.Op`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kerngen.templates.common.rows.spec import keys_that_matter, require


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the pools of a cache hold keys and values.

    name: kernels are told by it. dtype: of a pool's entries; None for that of the activations. group: values of a head
    that share a scale in fp16; 0 for none. bits: of the code of a value that has a scale; an entry of 8 bits holds one
    of 8 or two of 4, three hold eight of 3 (kv_formats_torch.py). is_shared: one pool has V and the ROTATED dims of
    K that RoPE turns, of heads whose other dims of K are V's, times a weight that is in q. is_static: codes are floats,
    e4m3, and a pool's scales are those of its heads, which whoever makes the pool puts into all rows (`put_scales` in
    kv_formats_torch.py): kernels read them there, and write codes alone.

    A pool is [num_pages, num_kv_heads, page_size, row_entries]. The memory of a head's page is its parts, one after the
    other: page_size rows of V, or of K; where it is shared, of the turned dims of K; with scales, those of the first
    [page_size, head_dim / group] and of the second. So whatever moves, divides or wipes pages takes all along, and rows
    begin at multiples of 16 bytes.
    """

    name: str
    dtype: torch.dtype | None = None
    group: int = 0
    bits: int = 8
    is_shared: bool = False
    is_static: bool = False

    @property
    def is_rotated(self) -> bool:
        """Whether values are rotated before they become codes."""
        return self.bits < 8

    def entries(self, values: int) -> int:
        """That so many values take, without their scales."""
        return values * self.bits // 8 if self.group else values

    def row_entries(self, head_dim: int) -> int:
        """Entries that a head of a token takes, its scales included."""
        values = head_dim + ROTATED * self.is_shared
        return self.entries(values) + (2 * values // self.group if self.group else 0)

    def head_dim(self, row_entries: int) -> int:
        values = row_entries * 8 * self.group // (self.bits * self.group + 16) if self.group else row_entries
        return values - ROTATED * self.is_shared

    def page_bytes(self, num_kv_heads: int, page_size: int, head_dim: int, activations: torch.dtype) -> int:
        """Of one page of one layer, K and V."""
        entries = num_kv_heads * page_size * self.row_entries(head_dim) * (1 if self.is_shared else 2)
        return entries * (self.dtype or activations).itemsize

    def allocate(self, shape: tuple[int, int, int, int], activations: torch.dtype, device: torch.device) -> KVView:
        """Pools of zeros, which are zeros in every format. shape: num_pages, num_kv_heads, page_size, head_dim."""
        dtype = self.dtype or activations
        pools = [torch.zeros(*shape[:3], self.row_entries(shape[3]), dtype=dtype, device=device)
                 for _ in range(1 if self.is_shared else 2)]  # fmt: skip
        return KVView(pools[0], pools[-1], self)


ROTATED = 128  # dims of a head of 512 that RoPE turns: the first and the last 64 of each half's
PLAIN = KVFormat("plain")
INT8 = KVFormat("int8", torch.int8, 64)
SHARED = KVFormat("shared", is_shared=True)
SHARED_INT8 = KVFormat("shared_int8", torch.int8, 64, is_shared=True)
INT4 = KVFormat("int4", torch.int8, 32, bits=4)
SHARED_INT4 = KVFormat("shared_int4", torch.int8, 32, bits=4, is_shared=True)
INT3 = KVFormat("int3", torch.int8, 32, bits=3)
SHARED_INT3 = KVFormat("shared_int3", torch.int8, 32, bits=3, is_shared=True)
FP8 = KVFormat("fp8", torch.int8, 64, is_static=True)
KV_FORMATS = {form.name: form for form in (PLAIN, INT8, SHARED, SHARED_INT8, INT4, SHARED_INT4, INT3, SHARED_INT3, FP8)}


def page_strides(shape: tuple[int, ...], page_heads: int) -> tuple[int, ...]:
    """Strides, in elements, of a cache [num_pages, num_kv_heads, page_size, head_dim] that is a part of a tensor
    [num_pages, page_heads, page_size, head_dim]: some heads of each page, which follow each other.
    """
    _, _, size, dim = shape
    return page_heads * size * dim, size * dim, dim, 1


def lies_in_pages(cache: Tensor, page_heads: int) -> bool:
    """Whether a cache [num_pages, num_kv_heads, page_size, head_dim] has `page_strides`; of one entry any stride."""
    axes = zip(cache.shape, cache.stride(), page_strides(cache.shape, page_heads), strict=True)
    return page_heads >= cache.shape[1] and all(size == 1 or stride == its for size, stride, its in axes)


@dataclass(frozen=True, slots=True)
class KVView:
    """The paged cache of one layer: k_cache, v_cache [num_pages, num_kv_heads, page_size, head_dim], in `format`, whose
    rows have more entries than head_dim where it has scales.

    K is stored normed and rotated, V normed. Pages are named by a block table (`AttnBatch`). Each cache is contiguous,
    or has some heads of each page of a larger tensor, as of one [num_pages, 2 * num_kv_heads, page_size, head_dim] both
    do.
    """

    k_cache: Tensor
    v_cache: Tensor
    format: KVFormat = PLAIN

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[2]

    @property
    def head_dim(self) -> int:
        return self.format.head_dim(self.k_cache.shape[3])

    @property
    def page_heads(self) -> int:
        """Heads that a page of each cache has in memory, whose strides are `page_strides`; 0 where both are contiguous.

        Raises ProblemError where they lie in another way, or do not begin at a multiple of 16 bytes of their storage.
        """
        caches = {"k_cache": self.k_cache, "v_cache": self.v_cache}
        if all(cache.is_contiguous() for cache in caches.values()):
            return 0
        alone = self.format == PLAIN
        require(alone, f"a cache in {self.format.name} is contiguous: its pages have no other heads")
        heads, strides = self.num_kv_heads, self.k_cache.stride()
        page_heads = max(strides[0] // (self.page_size * self.head_dim), heads)
        for name, cache in caches.items():
            require(
                lies_in_pages(cache, page_heads),
                f"{name} {tuple(cache.shape)} has strides {cache.stride()}: both caches are contiguous, or heads of "
                f"pages [num_pages, page_heads, page_size, head_dim]; with {page_heads} page_heads the strides are "
                f"{page_strides(cache.shape, page_heads)}",
            )
            offset = cache.storage_offset() * cache.element_size()
            require(offset % 16 == 0, f"{name} begins {offset} bytes into its storage, which is no multiple of 16")
        return page_heads

    def chunk(self, layers: int) -> tuple[KVView, ...]:
        """Of pools of so many layers, one's pages behind the other's: those of each, one tensor where K and V share
        it.
        """
        keys = self.k_cache.chunk(layers)
        values = keys if self.v_cache is self.k_cache else self.v_cache.chunk(layers)
        return tuple(KVView(k, v, self.format) for k, v in zip(keys, values, strict=True))

    def require_plain(self) -> None:
        """Raises ProblemError for a format that kernels of a single one do not read."""
        if self.format is not PLAIN:
            require(self.format == PLAIN, f"this kernel reads {PLAIN.name} caches, not {self.format.name} ones")

    def require_known(self) -> None:
        """Raises ProblemError for a format that no kernel reads."""
        known = KV_FORMATS.get(self.format.name) == self.format
        require(known, f"kernels read caches in {', '.join(KV_FORMATS)}, not in {self.format.name}")

    @property
    def num_bytes(self) -> int:
        pools = {pool.data_ptr() if not pool.is_meta else id(pool): pool for pool in (self.k_cache, self.v_cache)}
        return sum(pool.numel() * pool.element_size() for pool in pools.values())


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys of its sequence a query sees.

    kind: "causal", those at or before its own position; "full", all. window: of those the last so many up to its own
    position; 0 for no limit. ends [T] int32, of "causal": the position in its sequence of the last key that each query
    sees, which is its own or, of a token of an image, that image's last one. Ends never fall within a sequence; one
    behind a sequence's keys means its last key. So query q sees q - window < k <= ends[q]. counts, lists int32, of
    "causal" without a window: the tiles of keys that each block of queries sees, as tile_lists makes them; it sees no
    others. What needs more than that is a kind of its own, and has its tensors here. An op refuses a mask that its
    kernel does not have. Raises ProblemError for ends or lists of another kind.
    """

    kind: Literal["causal", "full"] = "causal"
    window: int = 0
    ends: Tensor | None = None
    counts: Tensor | None = None
    lists: Tensor | None = None

    def __post_init__(self) -> None:
        fits = self.ends is None or self.kind == "causal"
        require(fits, f"kind={self.kind!r}: only queries of a causal mask have ends")
        require((self.counts is None) == (self.lists is None), "lists of tiles have counts, and counts have lists")
        alone = self.kind == "causal" and not self.window and self.ends is None
        require(self.lists is None or alone, "lists of tiles are for a causal mask without window and ends")

    def require_no_tensors(self) -> None:
        """Raises ProblemError for ends or lists, which attn_prefill alone has."""
        plain = self.ends is None and self.lists is None
        require(plain, "attn_decode has causal and full masks: attn_prefill takes ends and lists of keys")

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all keys up to itself, as far as the window goes, and no other."""
        return self.kind == "causal" and self.ends is None and self.lists is None


CAUSAL = Mask()


@dataclass(frozen=True, slots=True)
class AttnBatch:
    """What the T new tokens of B sequences attend to, in layers of one kind. vLLM calls it CommonAttentionMetadata.

    block_table [B, max_pages] int32: position p of a sequence lies in page block_table[p / page_size]. kv_lens [B]
    int32, the new tokens included. max_kv_len: no kv_len is longer, nor will be when a captured step is replayed; 0 for
    what the block table holds.
    q_len: new tokens of each sequence, where all have as many (decode, verification). Query i of a sequence sits at
    kv_len - q_len + i. cu_seqlens_q [B + 1] int32, of ragged queries: sequence s owns tokens cu_seqlens_q[s] to
    cu_seqlens_q[s + 1], max_seqlen_q of them at most; q_len says nothing then.
    positions [T] int64: what RoPE turns by. slot_mapping [T] int64: the cache row page * page_size + row that a token's
    K and V go to, negative for none; None where nothing is written.
    """

    block_table: Tensor
    kv_lens: Tensor
    mask: Mask = CAUSAL
    max_kv_len: int = 0
    q_len: int = 1
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0
    positions: Tensor | None = None
    slot_mapping: Tensor | None = None

    def keys_that_matter(self, page_size: int) -> int:
        """What a problem's kv_len is: the keys of the longest sequence, or fewer where a window leaves out the rest."""
        queries = self.q_len if self.cu_seqlens_q is None else self.max_seqlen_q
        return keys_that_matter(self.max_kv_len or self.block_table.shape[1] * page_size, queries, self.mask.window)


@dataclass(frozen=True, slots=True)
class PagesInUse:
    """What the new tokens of B sequences are about to use of two pools of pages (check_pages/spec.py).

    tables [2, B, max_pages] int32, the block tables of full and sliding layers. kv_lens [B] int64, the new tokens
    included. cu_seqlens [B + 1] int32: sequence s owns tokens cu_seqlens[s] to cu_seqlens[s + 1]. slots [2, T] int64.
    """

    tables: Tensor
    kv_lens: Tensor
    cu_seqlens: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class PageLimits:
    """What PagesInUse keeps to. page_size: tokens. lookback: positions before a sequence's new tokens that sliding
    layers read, the most. max_kv_len: of any sequence. first_row: what the first sequence counts as.
    """

    num_full_pages: int
    num_sliding_pages: int
    page_size: int
    lookback: int
    max_kv_len: int
    first_row: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """How the heads of a layer's projection become q and k: normed, then rotated. V is normed without a weight, but for
    an op that says otherwise.

    q_weight, k_weight [head_dim]; k_weight is None for a layer that owns no K and V. inv_freq [head_dim / 2] fp32:
    pairs (j, j + head_dim / 2) turn by position * inv_freq[j]; the first num_rotated_pairs do, the others pass
    unchanged. num_q_heads: where k, or k and v, follow q in the projection; q alone tells its heads by its columns.
    shared_k_weight: of a layer that owns no K and V, k_weight of the one whose it reads, where that cache is shared.
    """

    q_weight: Tensor
    inv_freq: Tensor
    num_rotated_pairs: int
    eps: float
    k_weight: Tensor | None = None
    num_q_heads: int = 0
    shared_k_weight: Tensor | None = None

    def folded(self, form: KVFormat) -> Tensor | None:
        """The weight [head_dim] that q's dims that are not turned take in place of K's: where the cache is shared.

        Raises ProblemError where that is not known.
        """
        if not form.is_shared:
            return None
        weight = self.k_weight if self.k_weight is not None else self.shared_k_weight
        require(
            weight is not None, f"a cache in {form.name} is read with the weight of its keys' norm, which is missing"
        )
        return weight

    @property
    def head_dim(self) -> int:
        return 2 * self.inv_freq.shape[0]

    @property
    def owns_kv(self) -> bool:
        return self.k_weight is not None

    def v_is_k(self, width: int, kv: KVView) -> bool:
        """Whether a projection of `width` columns is q | k, whose V is the raw K, and not q | k | v.

        Raises ProblemError where it is neither.
        """
        num_q_heads, num_kv_heads, dim = self.num_q_heads, kv.num_kv_heads, kv.head_dim
        k_eq_v = width == (num_q_heads + num_kv_heads) * dim
        heads = f"{num_q_heads} q heads and {num_kv_heads} kv heads of {dim}"
        whole = k_eq_v or width == (num_q_heads + 2 * num_kv_heads) * dim
        require(whole, f"qkv has {width} columns, not those of {heads}")
        return k_eq_v


@dataclass(frozen=True, slots=True)
class Routed:
    """What the experts of each token gave. routed [T, K, H]; topk_weights [T, K] fp32, by which they are summed;
    routed_norm [H] norms the sum.
    """

    routed: Tensor
    topk_weights: Tensor
    routed_norm: Tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory that this rank and its peers exchange rows of one width through (runtime/executors/peer_memory.py).

    addresses: [ranks + 1] int64, of each rank's workspace as this GPU sees it, then of the abort word: once that is not
    zero, what has not arrived is NaN. rank: this one. max_rows: rows of a slot; a launch exchanges no more.
    two_shot_from: tokens from which each rank sums a part of every row for all, in place of whole rows for itself: less
    travels, and twice; 0 for never. All but `addresses` and `rank` are the same on every rank.
    """

    addresses: Tensor
    rank: int
    max_rows: int
    two_shot_from: int = 0

    def holds(self, x: Tensor, rows: int = 1) -> bool:
        """Whether a launch exchanges so many rows for each token of x [T, ...]: of 16-bit elements, and few enough."""
        return len(x) * rows <= self.max_rows and x.element_size() == 2
