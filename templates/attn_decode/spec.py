"""attn_decode: split-KV attention for 1 to 16 new tokens a sequence over a paged KV cache, head norms and RoPE too.

A block has one kv head and one split of the sequence's visible key tiles. Its rows are the query heads of that kv head
times the new tokens (GQA packing), so KV is read once a kv head. Method: Flash-Decoding (Dao et al., 2023) over the
online softmax of arXiv 1805.02867. docs/kernels.md says how partials are combined, and how blocks make q, k and v
themselves (Problem.source); new_heads.cuh.jinja why every new token is written by some block, and why no block reads a
new key that only another block has written.

Before its predecessor has completed (PDL, docs/kernels.md) a block reads kv_lens, positions, slot_mapping, the block
table and keys older than the new tokens. The kernel right before may write q and, with sources q and raw_q, the new
tokens' K and V; it may write nothing else that is read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.attn_decode import wgmma_ws
from kerngen.templates.common.rows.spec import (
    KV_BITS,
    KV_GROUPS,
    has_codes,
    is_shared,
    kv_row_bytes,
    require,
    require_dtypes,
    require_heads,
    require_kv_format,
    require_page_heads,
    require_shared,
)
from kerngen.templates.kernel import Arg, Body, Choices, Cost, Launch, TensorMap, args

SOURCES = {"q": 0, "raw_q": 0, "qkv": 2, "qk": 1}  # what `q` holds: heads of K and V in it, for each kv head
MAX_Q_LEN = 16  # new tokens a sequence: more are a prefill's


@dataclass(frozen=True, slots=True)
class Problem:
    """Softmax(q k^T * sm_scale) v over the keys that each query sees. window: keys seen, the query's own included; 0:
    all. num_rotated_pairs: RoPE rotates the pairs (j, j + head_dim / 2) of a head for j below that.

    source: what `q` holds of a token. "q": final heads, with K and V in the cache. "raw_q": heads before norm and RoPE.
    "qkv": q | k | v before both. "qk": q | k, where V is the raw K. With the last two, rope(norm(k; k_weight)) and
    norm(v) are written to the caches, as qkv_norm_rope does; op.py says which tokens' are not.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "kv_len")
    DYNAMIC: ClassVar[str] = "kv_len"
    REACH: ClassVar[float] = 4  # contexts are tuned at powers of four
    TUNED_AS_DEFAULT: ClassVar[tuple[str, ...]] = ("page_heads",)
    FINER: ClassVar[tuple[str, ...]] = ("batch",)  # by sequences that share the SMs: of seven each has more of them

    head_dim: int = 128
    num_q_heads: int = 32
    num_kv_heads: int = 8
    q_len: int = 1  # new tokens a sequence
    page_size: int = 64  # tokens
    window: int = 0
    dtype: str = "bf16"
    logit_cap: bool = False
    batch: int = 1
    kv_len: int = 8192  # tokens valid in a sequence, the new ones included
    source: str = "q"
    num_rotated_pairs: int = 0  # 0 with source q
    page_heads: int = 0  # that a page of each cache has in memory (values.py, page_strides); 0: num_kv_heads
    kv_format: str = "plain"  # of the caches (values.py, KVFormat)
    causal: bool = True  # a query sees no key behind its own; without that no kv_len is below q_len

    def __post_init__(self) -> None:
        require(self.head_dim in (128, 256, 512), f"head_dim={self.head_dim}: attn_decode serves 128, 256 and 512")
        require_heads(self.num_q_heads, self.num_kv_heads)
        group = self.num_q_heads // self.num_kv_heads
        require(group in (1, 2, 4, 8, 16), f"{group} q heads per kv head: attn_decode serves 1, 2, 4, 8 and 16")
        tokens = f"attn_decode serves 1 to {MAX_Q_LEN}; attn_prefill serves more"
        require(1 <= self.q_len <= MAX_Q_LEN, f"q_len={self.q_len}: {tokens}")
        require(self.page_size >= 16 and not self.page_size % 16, f"page_size={self.page_size} is no multiple of 16")
        require_dtypes(self.dtype)
        least = f"window={self.window}, batch={self.batch} and kv_len={self.kv_len} must be >= 0, 1, 0"
        require(self.window >= 0 and self.batch >= 1 and self.kv_len >= 0, least)
        require(self.source in SOURCES, f"source={self.source!r} is not one of: {', '.join(SOURCES)}")
        pairs, most = self.num_rotated_pairs, 0 if self.source == "q" else self.head_dim // 2
        require(0 <= pairs <= most, f"num_rotated_pairs={pairs} is not in 0..{most} (source {self.source})")
        require_page_heads(self.page_heads, self.num_kv_heads)
        ready = self.causal or self.source == "q"
        require(ready, f"causal=False is for keys that are in the cache: source={self.source} makes them; use source=q")
        if self.source != "q":
            require_shared(self.kv_format, self.source != "qkv", self.num_rotated_pairs)
        require_kv_format(self.kv_format, self.head_dim, self.page_size, self.page_heads)

    @property
    def rows(self) -> int:
        """Rows of the matrix that one kv head's queries form."""
        return self.num_q_heads // self.num_kv_heads * self.q_len

    def groups(self, block_m: int) -> int:
        """Blocks of one split."""
        return ceil(self.rows / block_m) * self.num_kv_heads * self.batch

    @property
    def owns_kv(self) -> bool:
        """Whether K and V of the new tokens are made here."""
        return SOURCES[self.source] > 0

    @property
    def kv_row_bytes(self) -> int:
        """What a key, or a value, of a head takes in the caches."""
        return kv_row_bytes(self.kv_format, self.head_dim, self.dtype)

    @property
    def num_heads(self) -> int:
        """Heads in a row of `q`."""
        return self.num_q_heads + SOURCES[self.source] * self.num_kv_heads

    @property
    def visible(self) -> int:
        """Keys of a sequence that at least one query sees."""
        return min(self.kv_len, self.window + self.q_len - 1) if self.window else self.kv_len


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int = 8  # rows a block takes; the others go to other blocks, which read KV again
    block_n: int = 16  # keys a tile
    split_d: int = 1  # warps that share a tile, each with a part of head_dim
    num_warps: int = 4
    num_stages: int = 2  # tiles of K or V on their way to each warp (always 1 where the body has no cp.async)
    num_splits: int = 1  # parts of the visible keys
    # mma: each warp loads its own tiles by cp.async and multiplies them by mma.sync.
    # wgmma_ws: a producer warp loads TMA boxes of block_n keys; consumer warpgroups multiply. split_d warps, one or two
    #   warpgroups, share a tile of 64 keys, whose K and V take k_column_parts stages each.
    body: str = field(default="mma", metadata={"filed": {"wgmma_ws": {"warpgroups": True}}})
    cluster: int = 1  # with wgmma_ws: consecutive splits of the same rows, reduced through DSMEM
    # With wgmma_ws: parts of head_dim in which K of a tile is loaded, one stage each; each is multiplied as it arrives.
    k_column_parts: int = field(default=2, metadata={"filed": "key_parts"})
    # With wgmma_ws: 16, the bits of partials that a block writes straight from registers (dsmem_reduce.cuh.jinja, or
    # without a cluster fragment_partials.cuh.jinja). 0: the cluster reads them in fp32 in the block's own stages.
    partial_bits: int = field(default=0, metadata={"filed": "push_bits"})
    # The most stages in flight until the pipeline has been filled once: these loads compete with the predecessor's
    # traffic and with the queries. 0: all.
    prefetch_stages: int = field(default=0, metadata={"filed": "in_flight"})
    # With wgmma_ws: stages after the first num_stages that are prefetched into L2 when those have been issued.
    l2_prefetch_stages: int = field(default=0, metadata={"filed": "prefetch"})

    @property
    def warpgroups(self) -> bool:
        return self.body == "wgmma_ws"


def resident_cluster_blocks(target: Target) -> int:
    """Blocks, one an SM, of clusters of four and eight that are resident at once: some SMs of each GPC are left."""
    return target.device.num_sms * 6 // 7


def split_choices(p: Problem, target: Target) -> tuple[int, ...]:
    """Candidates for num_splits: a ladder, what gives every SM of the board or of resident clusters an equal share of
    the blocks, and the next fewer of all these that clusters of up to 8 blocks divide.
    """
    blocks = p.num_kv_heads * p.batch  # of one split, where one block takes all rows
    sms, resident = target.device.num_sms, resident_cluster_blocks(target)
    shares = *(sms * waves for waves in (0.25, 1 / 3, 0.5, 1, 2, 4)), resident, resident // 2
    choices = {1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 27, *(s for n in shares if 1 <= (s := int(n / blocks)) <= sms)}
    return tuple(sorted(choices | {s // 8 * 8 for s in choices if s >= 8}))


_ARGS = (
    *args("ptr", "out", "q"), *args("ptr", "k_cache", "v_cache", page_heads="page_heads"),
    *args("ptr", "block_table", "kv_lens", align=4),
    *args("ptr", "workspace", "q_weight", "k_weight", "inv_freq"), *args("ptr", "positions", "slot_mapping", align=8),
    *args("f32", "sm_scale", "logit_cap", "eps"), *args("i32", "batch", "max_pages"),
)  # fmt: skip
_MAPS = Arg("k_map", "map", of="k_cache"), Arg("v_map", "map", of="v_cache")
ARGS = {"attn_decode": _ARGS, "attn_combine": (*args("ptr", "out", "workspace"), Arg("batch", "i32"))}
_VOLTA_SPACE: dict[str, Choices] = {
    "block_m": (8, 16), "block_n": (32,), "split_d": (1, 2, 4, 8), "num_warps": (2, 3, 4, 6, 8, 12),
    "num_splits": split_choices, "num_stages": (2, 4),
}  # fmt: skip
_MMA_SPACE = _VOLTA_SPACE | {
    "block_m": (8, 16, 32), "block_n": (16, 32), "num_stages": (1, 2, 3, 4, 6), "prefetch_stages": (0, 2),
}  # fmt: skip
_WGMMA_WS_SPACE: dict[str, Choices] = {
    "block_m": (8, 16, 24, 32, 40, 48, 56, 64), "block_n": (16,), "split_d": (4, 8), "num_warps": (4, 8),
    "num_stages": (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 20, 24), "num_splits": split_choices, "cluster": (1, 2, 4, 8),
    "k_column_parts": (2, 4), "partial_bits": (0, 16), "prefetch_stages": (0, 3),
}  # fmt: skip
BODIES = (  # mma serves sm75 (m16n8k8, no cp.async) and newer (m16n8k16); Volta's has K and V straight to registers
    Body("kernel.cu.jinja", ARGS, _MMA_SPACE, lambda arch: arch.has_ldmatrix, {"body": "mma"}),
    Body("wgmma_ws.cu.jinja", ARGS | {"attn_decode": (*_ARGS, *_MAPS)}, _WGMMA_WS_SPACE, lambda arch: arch.has_wgmma,
         {"body": "wgmma_ws"}),
    Body("volta.cu.jinja", ARGS, _VOLTA_SPACE, lambda arch: not arch.has_ldmatrix),
)  # fmt: skip
OUTPUTS = ("out", "k_cache", "v_cache")

MAX_ACCUMULATORS = 128  # of a lane, block_m * head_dim / split_d / 32: of its 255 registers others need some too
# On sm70 a register with head_dim 128, where a cap of 128 registers lets two blocks share an SM, and five of a shared
# cache of int4, whose codes are converted between their loads.
MAX_SPILL_BYTES = 24
MAX_SLICES = 8  # of the splits, in a block of the combine


def constants(p: Problem, c: Config, arch: Arch) -> dict[str, int]:
    found = {"MAX_SLICES": MAX_SLICES, "FRAGMENT_PARTIALS": int(wgmma_ws.has_fragment_partials(c))}
    found["IS_CODES"] = int(has_codes(p.kv_format))
    return found | (wgmma_ws.constants(p, c, arch) if c.warpgroups else {})


def bound_threads(p: Problem, c: Config, arch: Arch) -> dict[str, int]:
    """Entries whose __launch_bounds__ exceed their blocks, to leave registers to attn_combine's blocks."""
    return {"attn_decode": wgmma_ws.register_split(p, c, arch)[3]} if wgmma_ws.has_fragment_partials(c) else {}


def expected_registers(p: Problem, c: Config, target: Target) -> int:
    """Of a thread. With body=mma as many for the queries as for the accumulators, and 64 for the rest; what is more
    than there can be will be spilled.
    """
    if c.warpgroups:
        return target.arch.registers_of(wgmma_ws.register_split(p, c, target.arch)[3])
    return 64 + 2 * (c.block_m * p.head_dim // c.split_d // 32)


def tensor_map(p: Problem, c: Config, of: str, shape: tuple[int, ...]) -> TensorMap:
    """Of the caches as 64 columns, 8 rows, blocks of columns, blocks of rows, and the heads of all pages, those between
    two pages' included. So a box of
    block_n rows, which no page boundary divides, has the layout that wgmma reads. One of all columns, as for values, is
    contiguous in the cache.
    """
    pages, heads, size, dim = shape
    last = (pages - 1) * (p.page_heads or heads) + heads
    dims, row = (64, 8, dim // 64, size // 8, last), dim * 2
    blocks = dim // 64 // (c.k_column_parts if of == "k_cache" else 1)
    return TensorMap(dims, (row, 128, 8 * row, size * row), (64, 8, blocks, c.block_n // 8, 1))


def outputs(p: Problem) -> tuple[str, ...]:
    """The caches only where the problem owns K and V; else they are read."""
    return OUTPUTS if p.owns_kv else ("out",)


def why_invalid(p: Problem, c: Config, target: Target) -> str | None:
    arch, dim = target.arch, p.head_dim // c.split_d
    if c.prefetch_stages and not arch.has_pdl:
        return f"prefetch_stages={c.prefetch_stages} is for launches that begin before others end, on sm90 and newer; 0"
    if not 0 <= c.prefetch_stages < c.num_stages:
        return f"prefetch_stages={c.prefetch_stages} of num_stages={c.num_stages}: fewer, or 0 for all"
    if c.num_warps % c.split_d:
        return f"num_warps={c.num_warps} is no multiple of split_d={c.split_d}"
    if c.warpgroups:
        return wgmma_ws.why_not(p, c, arch) or arch.why_too_large(smem_bytes(p, c, target))
    for name, only in (("cluster", 1), ("k_column_parts", 2), ("l2_prefetch_stages", 0), ("partial_bits", 0)):
        if (value := getattr(c, name)) != only:
            return f"{name}={value} is body=wgmma_ws's; {name}={only}"
    if dim < (least := 64 if arch.has_ldmatrix else 128):
        return f"split_d={c.split_d} leaves a warp {dim} of head_dim={p.head_dim}; at least {least} on {arch}"
    if c.block_m != 8 and c.block_m % 16:  # teams are merged by tiles of 8 rows, two at once
        return f"block_m={c.block_m}: a block has 8 rows or a multiple of 16 with body=mma"
    if c.block_m > 8 and c.block_m >= 2 * p.rows:
        return f"block_m={c.block_m} is twice the {p.rows} rows or more; block_m={c.block_m // 2} does the same"
    if (need := c.block_m * dim // 32) > MAX_ACCUMULATORS:
        return f"{need} accumulators a lane (block_m * head_dim / split_d / 32); at most {MAX_ACCUMULATORS}"
    if not arch.has_ldmatrix and (c.block_m > 16 or c.block_n != 32 or c.num_stages not in (2, 4)):
        return f"{arch} has registers for block_m=8 or 16, of tiles of block_n=32 keys in num_stages=2 or 4"
    if arch.has_ldmatrix and (c.num_stages > 1) != arch.has_cp_async:
        return f"num_stages={c.num_stages}: with cp.async, from sm80 on, 2 at least, and 1 without it"
    return arch.why_too_large(smem_bytes(p, c, target))


def smem_bytes(p: Problem, c: Config, target: Target) -> int:
    if c.warpgroups:
        return wgmma_ws.smem_bytes(p, c)
    teams = c.num_warps // c.split_d
    queries, stats = c.block_m * p.head_dim * 2, 2 * teams * c.block_m * 4
    turns = 0 if p.source == "q" else p.q_len * p.head_dim * 2  # a cosine and a sine for each pair of a token
    scores = c.num_warps * c.block_n * c.block_m * 4 if c.split_d > 1 else 0
    if not target.arch.has_ldmatrix:
        merge, probabilities = teams * 8 * 128 * c.split_d * 4, c.num_warps * c.block_m * 80
        return queries + stats + turns + merge + probabilities + 2 * scores
    ring = c.num_warps * max(c.num_stages * tile_bytes(p, c), 8 * p.head_dim // c.split_d * 4)
    dealt = c.split_d > 1 and c.block_m // 8 % c.split_d == 0  # rows, to the warps of a team
    exchange = scores + teams * c.block_m * (c.block_n * 2 + 4) if dealt else 2 * scores
    meeting = 16 if target.arch.has_cp_async and c.split_d > 1 and teams > 1 else 0
    return queries + stats + turns + ring + exchange + meeting


def tile_bytes(p: Problem, c: Config) -> int:
    """What block_n keys of a warp take in a stage, with body=mma: of codes its own, and all scales of a head; where it
    is shared also K's codes of the 64 dims of each 256 that are turned, and their scales.
    """
    dim, group, bits = p.head_dim // c.split_d, KV_GROUPS[p.kv_format], KV_BITS[p.kv_format]
    if not group:
        return c.block_n * dim * 2
    turned, scaled = (max(1, dim // 256), p.head_dim + 128) if is_shared(p.kv_format) else (0, p.head_dim)
    codes = _row_bytes(bits, dim // 64) + turned * _row_bytes(bits, 1)
    return c.block_n * (codes + 2 * scaled // group)


def _row_bytes(bits: int, blocks: int) -> int:
    """Of so many blocks of 64 codes of a key in a tile: of few bits padded, as row_bytes in kv_rotated.cuh."""
    if bits == 8:
        return blocks * 64
    return (blocks | 1) * 32 if bits == 4 else (ceil(blocks * 24 / 16) | 1) * 16


def partials(c: Config) -> int:
    """Partial results of a row that are left to combine: num_splits, after the clusters' reduction."""
    return c.num_splits // c.cluster


def launches(p: Problem, c: Config, target: Target) -> tuple[Launch, ...]:
    arch, sms, groups = target.arch, target.device.num_sms, p.groups(c.block_m)
    grid = ceil(p.rows / c.block_m) * c.num_splits, p.num_kv_heads, p.batch
    warps = c.num_warps + (wgmma_ws.register_split(p, c, arch)[1] if c.warpgroups else 0)
    decode = Launch("attn_decode", grid, (warps * 32, 1, 1), smem_bytes(p, c, target), pdl=arch.has_pdl,
                    reads_ahead=arch.has_pdl, cluster=(c.cluster, 1, 1))  # fmt: skip
    if partials(c) == 1:
        return (decode,)
    if wgmma_ws.has_fragment_partials(c):
        beside, _, pairs, chunks, _, span = wgmma_ws.fragment_combine(p, c)
        blocks, warps = groups * c.num_splits, wgmma_ws.COMBINE_WARPS
        room = 2 * min(blocks, sms) + beside * max(sms - blocks, 0)
        merging = min(ceil(groups * pairs * chunks // span / warps), room), 1, 1
    else:
        slices, columns = combine_shape(p.head_dim, partials(c))
        warps, merging = slices * columns // 32, (p.batch * p.q_len * p.num_q_heads, p.head_dim // (4 * columns), 1)
    return (decode, Launch("attn_combine", merging, (warps * 32, 1, 1), 0, pdl=arch.has_pdl))


def combine_shape(head_dim: int, num_partials: int) -> tuple[int, int]:
    """(slices that share the partials, columns of 4 elements) of a combine block."""
    slices = min(num_partials, MAX_SLICES)
    return slices, min(head_dim // 4, 32 if slices > 4 else 64 if slices > 2 else 128)


def workspace_bytes(p: Problem, c: Config, target: Target) -> int:
    """Partials for attn_combine, fp32: o [rows, partials, head_dim], then lse [rows, partials]. Fragment partials: for
    each group, the blocks with the same rows, [pairs of rows, chunks, num_splits] chunks of 128 bytes; then, for all
    groups, the lse [rows, num_splits].
    """
    if partials(c) == 1:
        return 0
    if wgmma_ws.has_fragment_partials(c):
        _, _, pairs, chunks, _, _ = wgmma_ws.fragment_combine(p, c)
        return p.groups(c.block_m) * c.num_splits * pairs * (chunks * 128 + 2 * 4)
    return p.batch * p.q_len * p.num_q_heads * partials(c) * (p.head_dim + 1) * 4


def cost(p: Problem) -> Cost:
    """Each visible key and value once, q and out once, new keys and values written once; two products."""
    new = p.q_len if p.owns_kv else 0  # tokens whose keys and values are written
    cached = p.batch * (p.visible + new) * p.num_kv_heads * 2 * p.kv_row_bytes
    ends = p.batch * p.q_len * (p.num_heads + p.num_q_heads)
    constants = 0 if p.source == "q" else 3 if p.owns_kv else 2  # norms; frequencies, half as many, in fp32
    flops = 4 * p.batch * p.q_len * p.num_q_heads * p.visible * p.head_dim
    return Cost(bytes=cached + (ends + constants) * p.head_dim * 2, flops=flops)
