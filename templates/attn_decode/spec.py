"""attn_decode: split-KV attention for 1 to 8 new tokens a sequence over a paged KV cache, head norms and RoPE too.

A block has one kv head and one split of the sequence's visible key tiles. Its rows are the query heads of that kv head
times the new tokens (GQA packing), so KV is read once a kv head. Method: Flash-Decoding (Dao et al., 2023) over the
online softmax of arXiv 1805.02867. Split-KV partials are combined in one of these ways:

- attn_combine, a second launch, reads them from the workspace (fp32).
- Config.fused_combine: in the same launch, by LL exchange (fused_combine.cuh.jinja); all blocks are co-resident.
- Config.cluster, with body=wgmma_ws: blocks of a cluster reduce their splits through DSMEM, after a cluster barrier
  (pull) or with st.async (push: Config.partial_bits, dsmem_reduce.cuh.jinja). attn_combine combines the clusters'
  results; with fused_combine the last block to arrive does, and none waits.
- Config.partial_bits without a cluster: each block stores its accumulators in fragment layout for attn_combine and
  exits (fragment_partials.cuh.jinja).

body=wgmma_ws is warp-specialised: one TMA producer warp, consumer warpgroups (wgmma_ws.cu.jinja).

If `q` is the projection itself (Problem.source), each block applies norm and RoPE to its own rows of q, and makes K and
V of the new tokens among its keys, for itself and for the cache. new_heads.cuh.jinja says why every new token is
written by some block, and why no block reads a new key that only another block has written.

Programmatic dependent launch: a block reads kv_lens, positions, slot_mapping, the block table and keys older than the
new tokens before its predecessor has completed. In a forward all of these are complete before `embed` triggers its
successor (docs/kernels.md). The kernel right before may write q and, with sources q and raw_q, the new tokens' K and V;
it may write nothing else that is read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.errors import ProblemError
from kerngen.templates.common.rows.spec import DTYPES
from kerngen.templates.kernel import Arg, Body, Choices, Cost, Launch, TensorMap

SOURCES = ("q", "raw_q", "qkv", "qk")
MAX_Q_LEN = 8  # new tokens a sequence: more are a prefill's


@dataclass(frozen=True, slots=True)
class Problem:
    """Softmax(q k^T * sm_scale) v over the keys that each query sees. window: keys seen, the query's own included; 0:
    all.

    source: what `q` holds of a token. "q": final heads, with K and V in the cache. "raw_q": heads before norm and RoPE.
    "qkv": q | k | v before both. "qk": q | k, where V is the raw K. With the last two, rope(norm(k; k_weight)) and
    norm(v) are written to row slot_mapping[t] = page * page_size + row of the caches, where the block table has the
    token's position; a negative slot is not written. As qkv_norm_rope, except that a token at a negative position
    (kv_len < q_len) is not written either. RoPE rotates the pairs (j, j + head_dim / 2) of a head for j <
    num_rotated_pairs.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "kv_len")
    DYNAMIC: ClassVar[str] = "kv_len"
    FINER: ClassVar[tuple[str, ...]] = ("batch",)  # by sequences that share the SMs: of seven each has more of them

    head_dim: int = 128
    num_q_heads: int = 32
    num_kv_heads: int = 8
    q_len: int = 1  # new tokens a sequence, causal among themselves
    page_size: int = 64  # tokens
    window: int = 0
    dtype: str = "bf16"
    logit_cap: bool = False
    batch: int = 1
    kv_len: int = 8192  # tokens valid in a sequence, the new ones included
    source: str = "q"
    num_rotated_pairs: int = 0  # 0 with source q

    def __post_init__(self) -> None:
        if self.head_dim not in (128, 256, 512):
            raise ProblemError(f"head_dim={self.head_dim}: attn_decode serves 128, 256 and 512")
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ProblemError(f"{self.num_q_heads} q heads are no multiple of {self.num_kv_heads} kv heads")
        if self.group not in (1, 2, 4, 8, 16):
            raise ProblemError(f"{self.group} q heads per kv head: attn_decode serves 1, 2, 4, 8 and 16")
        if not 1 <= self.q_len <= MAX_Q_LEN:
            raise ProblemError(f"q_len={self.q_len}: attn_decode serves 1 to {MAX_Q_LEN}; attn_prefill serves more")
        if self.page_size < 16 or self.page_size % 16:
            raise ProblemError(f"page_size={self.page_size} is no multiple of 16")
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype={self.dtype!r} is not one of: {', '.join(DTYPES)}")
        if self.window < 0 or self.batch < 1 or self.kv_len < 0:
            raise ProblemError(f"window={self.window}, batch={self.batch} and kv_len={self.kv_len} must be >= 0, 1, 0")
        if self.source not in SOURCES:
            raise ProblemError(f"source={self.source!r} is not one of: {', '.join(SOURCES)}")
        most = 0 if self.source == "q" else self.head_dim // 2
        if not 0 <= self.num_rotated_pairs <= most:
            raise ProblemError(f"num_rotated_pairs={self.num_rotated_pairs} is not in 0..{most} (source {self.source})")

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of the matrix that one kv head's queries form."""
        return self.group * self.q_len

    @property
    def owns_kv(self) -> bool:
        """Whether K and V of the new tokens are made here."""
        return self.source in ("qkv", "qk")

    @property
    def num_heads(self) -> int:
        """Heads in a row of `q`."""
        return self.num_q_heads + {"qkv": 2, "qk": 1}.get(self.source, 0) * self.num_kv_heads

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
    # Splits are combined in this launch, by the blocks that made them. mma: they wait for each other, so all must be
    # co-resident. wgmma_ws: the last block to arrive combines, and none waits.
    fused_combine: bool = field(default=False, metadata={"filed": "together"})
    # mma: each warp loads its own tiles by cp.async and multiplies them by mma.sync.
    # wgmma_ws: a producer warp loads TMA boxes of block_n keys; consumer warpgroups multiply. split_d warps, one or two
    #   warpgroups, share a tile of 64 keys, which takes stages_per_tile of the num_stages stages.
    body: str = field(default="mma", metadata={"filed": {"wgmma_ws": {"warpgroups": True}}})
    cluster: int = 1  # with wgmma_ws: consecutive splits of the same rows, reduced through DSMEM
    # With wgmma_ws: parts of head_dim in which K of a tile is loaded, one stage each; each is multiplied as it arrives.
    # 1: K is loaded in whole rows, as V is, and multiplied once all have arrived.
    k_column_parts: int = field(default=2, metadata={"filed": "key_parts"})
    # With wgmma_ws: bits, 16 or 32, of partials that a block writes straight from registers: in a cluster to the block
    # that combines them, by DSMEM (dsmem_reduce.cuh.jinja), else to the workspace (fragment_partials.cuh.jinja). 0:
    # fp32 partials stay in the block's own stages, and the cluster reads them there.
    partial_bits: int = field(default=0, metadata={"filed": "push_bits"})
    # The most stages in flight until the pipeline has been filled once: these loads compete with the predecessor's
    # traffic and with the queries. 0: all.
    prefetch_stages: int = field(default=0, metadata={"filed": "in_flight"})
    # With wgmma_ws: stages after the first num_stages that are prefetched into L2 when those have been issued.
    l2_prefetch_stages: int = field(default=0, metadata={"filed": "prefetch"})

    @property
    def warpgroups(self) -> bool:
        return self.body == "wgmma_ws"


def split_choices(problem: Problem, target: Target) -> tuple[int, ...]:
    """Candidates for num_splits: a ladder, and what gives every SM of the board an equal share of the blocks."""
    blocks = problem.num_kv_heads * problem.batch  # of one split, where one block takes all rows
    sms = target.device.num_sms
    even = {int(sms * waves / blocks) for waves in (0.25, 1 / 3, 0.5, 1, 2, 4)}
    return tuple(sorted({*LADDER, *(s for s in even if 1 <= s <= sms)}))


def cluster_split_choices(problem: Problem, target: Target) -> tuple[int, ...]:
    """Those, and the next fewer that clusters of up to 8 blocks divide; of these as many as are resident, and half."""
    choices = split_choices(problem, target)
    resident = resident_cluster_blocks(target) // (problem.num_kv_heads * problem.batch)
    return tuple(sorted({s // 8 * 8 for s in (*choices, resident, resident // 2) if s >= 8} | set(choices)))


def partial_bits_choices(problem: Problem, target: Target) -> tuple[int, ...]:
    """Few rows have few results, which come as soon in 32 bits; those of many need half the room in 16."""
    return (0, 32 if problem.rows <= 8 or problem.head_dim == 128 else 16)


def resident_cluster_blocks(target: Target) -> int:
    """Blocks, one an SM, of clusters of four and eight that are resident at once: some SMs of each GPC are left."""
    return target.device.num_sms * 6 // 7


LADDER = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 27)
_VOLTA_SPACE: dict[str, Choices] = {
    "block_m": (8, 16, 32),
    "block_n": (16, 32),
    "split_d": (1, 2, 4, 8),
    "num_warps": (2, 3, 4, 6, 8, 12),
    "num_splits": split_choices,
}

ARGS: dict[str, tuple[Arg, ...]] = {
    "attn_decode": (
        Arg("out", "ptr"), Arg("q", "ptr"), Arg("k_cache", "ptr"), Arg("v_cache", "ptr"),
        Arg("block_table", "ptr", align=4), Arg("kv_lens", "ptr", align=4), Arg("workspace", "ptr"),
        Arg("q_weight", "ptr"), Arg("k_weight", "ptr"), Arg("inv_freq", "ptr"), Arg("positions", "ptr", align=8),
        Arg("slot_mapping", "ptr", align=8), Arg("sm_scale", "f32"), Arg("logit_cap", "f32"), Arg("eps", "f32"),
        Arg("batch", "i32"), Arg("max_pages", "i32"),
    ),
    "attn_combine": (Arg("out", "ptr"), Arg("workspace", "ptr"), Arg("batch", "i32")),
}  # fmt: skip
# Volta: m8n8k4, K and V straight to registers. The other body serves sm75 (m16n8k8, no cp.async) and newer (m16n8k16).
# `fused_combine` was right and, of batch 7, 10 % faster on an H200 (docs/performance.md); its layout has changed since.
_MMA_SPACE = _VOLTA_SPACE | {"num_stages": (1, 2, 3, 4, 6), "prefetch_stages": (0, 2)}
_MAPS = (Arg("k_map", "map", of="k_cache"), Arg("v_map", "map", of="v_cache"))
_WGMMA_WS_SPACE: dict[str, Choices] = {
    "block_m": (8, 16, 24, 32, 40, 48, 56, 64),
    "block_n": (16,),
    "split_d": (4, 8),
    "num_warps": (4, 8, 12),
    "num_stages": (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 20, 24),
    "num_splits": cluster_split_choices,
    "cluster": (1, 2, 4, 8),
    "k_column_parts": (1, 2, 4),
    "partial_bits": partial_bits_choices,
    "prefetch_stages": (0, 3),
}
BODIES = (
    Body(
        "kernel.cu.jinja", ARGS, _MMA_SPACE, serves=lambda arch: arch.has_ldmatrix,
        when={"fused_combine": False, "body": "mma"},
    ),
    Body(
        "kernel.cu.jinja", ARGS, _MMA_SPACE, serves=lambda arch: arch.has_ldmatrix,
        when={"fused_combine": True, "body": "mma"}, proven=False,
    ),
    Body(
        "wgmma_ws.cu.jinja", ARGS | {"attn_decode": (*ARGS["attn_decode"], *_MAPS)}, _WGMMA_WS_SPACE,
        serves=lambda arch: arch.has_wgmma, when={"fused_combine": False, "body": "wgmma_ws"},
    ),
    Body(
        "wgmma_ws.cu.jinja", ARGS | {"attn_decode": (*ARGS["attn_decode"], *_MAPS)}, _WGMMA_WS_SPACE,
        serves=lambda arch: arch.has_wgmma, when={"fused_combine": True, "body": "wgmma_ws"},
    ),
    Body(
        "volta.cu.jinja", ARGS, _VOLTA_SPACE | {"block_m": (8, 16), "block_n": (32,), "num_stages": (2, 4)},
        serves=lambda arch: not arch.has_ldmatrix,
    ),
)  # fmt: skip
OUTPUTS = ("out", "k_cache", "v_cache")

# A lane holds block_m * head_dim / split_d / 32 accumulators: 128 of the 255 registers leave room for the rest.
MAX_ACCUMULATORS = 128
# One register on sm70 with head_dim 128, where a cap of 128 registers lets two blocks share an SM.
MAX_SPILL_BYTES = 8
# Of a thread, beside the accumulators and statistics of its warpgroup.
WARPGROUP_SPARE_REGS = 24
PRODUCER_REGS = 32  # with setmaxnreg: of a thread of the producer warpgroup
UNIFORM_SPARE_REGS = 30  # without setmaxnreg: with 24 one of 300 builds spilled


MAX_SLICES = 8  # of the splits, in a block of the combine
LINE_QUADS = 8  # of 4 fp32, a line: a block combines a multiple of it


TILE = 64  # keys that a warpgroup multiplies at once
L2_PREFETCH_TILES = 8  # their 32 chunks' pages are known once the pipeline has been filled
FRAGMENT_BYTES_IN_FLIGHT = 80 * 1024  # of a block with fragment partials, once its pipeline has been filled
# With fragment partials: warps of a block of attn_combine; its share of an SM's registers beside a block of attn_decode
# (1 / COMBINE_SHARE), for two of its blocks; above so many splits for one, whose weights take more.
COMBINE_WARPS, COMBINE_SHARE, FEW_FRAGMENT_SPLITS = 4, 4, 36


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    found = {"MAX_SLICES": MAX_SLICES, "FRAGMENT_PARTIALS": int(has_fragment_partials(config))}
    if config.warpgroups:
        found |= {"SMEM_BYTES": _wgmma_ws_smem_bytes(problem, config)}
        found["PRODUCER_REGISTERS"] = PRODUCER_REGS
        found["BLOCKS_PER_SM"], found["PRODUCER_WARPS"], found["REGISTERS"] = register_split(problem, config, arch)
        found["ITEM_WORDS"] = item_words(config)
        found["MAX_INFLIGHT_STAGES"] = max_inflight_stages(problem, config)
        found["BOUND_THREADS"] = _bound_threads(problem, config, arch)
        if has_fragment_partials(config):
            blocks, ahead = combine_blocks(config)
            found |= {"COMBINE_WARPS": COMBINE_WARPS, "COMBINE_BLOCKS": blocks, "COMBINE_AHEAD": ahead}
            found["CHUNK_LANES"], found["SPAN"] = chunk_lanes(config), span(problem, config)
        found["UNIT_COLUMNS"], found["DSMEM_BYTES"] = unit_columns(problem, config), dsmem_bytes(problem, config)
    elif config.fused_combine:
        piece, owners, rows = combine_tiles(problem, config)
        found |= {"PIECE": piece, "OWNERS": owners, "PIECE_ROWS": rows, "CELL": cell_quads(piece, rows)}
    return found


def bound_threads(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    """Entries whose __launch_bounds__ exceed their blocks, to leave registers to attn_combine's blocks."""
    return {"attn_decode": _bound_threads(problem, config, arch)} if has_fragment_partials(config) else {}


def _bound_threads(problem: Problem, config: Config, arch: Arch) -> int:
    """Of attn_decode by warpgroups."""
    threads = (config.num_warps // 4 + 1) * 128
    beside = _regs_left_by_combine(problem, config, arch)
    return max(threads, arch.bound_for(beside)) if beside else threads


def _regs_left_by_combine(p: Problem, c: Config, arch: Arch) -> int:
    """Registers that a thread starts with if attn_combine's blocks must fit beside; 0 if those would be too few, with
    or without setmaxnreg.
    """
    if not has_fragment_partials(c) or _two_blocks_fit(p, c, arch):
        return 0
    left = arch.regs_per_sm * (COMBINE_SHARE - 1) // COMBINE_SHARE // (32 * (c.num_warps + 4)) // 8 * 8
    return left if registers_held(p, c) + WARPGROUP_SPARE_REGS <= _consumer_regs(left, c) else 0


def _consumer_regs(registers: int, c: Config) -> int:
    """Registers of a consumer thread after setmaxnreg, if every thread of the block starts with so many."""
    return min(232, (registers * (c.num_warps + 4) - 4 * PRODUCER_REGS) // c.num_warps // 8 * 8)


def combine_tiles(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Pieces of a block's output that the num_splits blocks with the same rows combine in the same launch.

    (4-element quads of a piece, whole lines of their fp32; pieces, one a block; rows that a piece touches at most)
    """
    p, c = problem, config
    row = p.head_dim // 4
    quads = min(c.block_m, p.rows) * row
    piece = ceil(quads / c.num_splits / LINE_QUADS) * LINE_QUADS
    owners = ceil(quads / piece)
    ends = ((i * piece, min((i + 1) * piece, quads)) for i in range(owners))
    return piece, owners, max((end - 1) // row - first // row + 1 for first, end in ends)


def cell_quads(piece: int, piece_rows: int) -> int:
    """What a split sends to a piece's owner, in quads of fp32: the piece, then lines with the lse of its rows."""
    return piece + ceil(piece_rows / 4 / LINE_QUADS) * LINE_QUADS


def stages_per_tile(config: Config) -> int:
    """Stages that K of a tile takes, by columns or by keys; V takes as many, by keys."""
    return TILE // config.block_n if config.k_column_parts == 1 else config.k_column_parts


def stage_bytes(problem: Problem, config: Config) -> int:
    return TILE * problem.head_dim * 2 // stages_per_tile(config)


def partials(config: Config) -> int:
    """Partial results of a row that are left to combine: num_splits, after the clusters' reduction."""
    return config.num_splits // config.cluster


def has_fragment_partials(config: Config) -> bool:
    """Whether blocks store partials in fragment layout for attn_combine (fragment_partials.cuh.jinja)."""
    return config.warpgroups and config.partial_bits > 0 and config.cluster == 1


def combine_blocks(config: Config) -> tuple[int, int]:
    """(blocks of attn_combine an SM, loads of a lane in flight), with fragment partials."""
    return (8, 9) if config.num_splits <= FEW_FRAGMENT_SPLITS else (6, 8)


def max_inflight_stages(problem: Problem, config: Config) -> int:
    """The most stages in flight once all have been filled."""
    return min(
        config.num_stages,
        max(2, FRAGMENT_BYTES_IN_FLIGHT // stage_bytes(problem, config)) if has_fragment_partials(config) else 64,
    )


def chunk_lanes(config: Config) -> int:
    """Lanes of attn_combine that combine a chunk: eight for every nine splits, up to a warp."""
    return min(32, 8 << (ceil(config.num_splits / 9) - 1).bit_length())


def span(problem: Problem, config: Config) -> int:
    """Chunks of a pair that a warp of attn_combine combines at once: with few splits twice or four times as many."""
    lanes, (_, ahead) = chunk_lanes(config), combine_blocks(config)
    more = next(n for n in (4, 2, 1) if n == 1 or n * ceil(config.num_splits * 8 / lanes) <= ahead)
    return min(32 // lanes * more, chunks(problem, config)[1])


def loads_per_lane(problem: Problem, config: Config) -> int:
    """Loads of 16 bytes of a lane of attn_combine for its part of a span."""
    lanes = chunk_lanes(config)
    return ceil(config.num_splits * 8 / lanes) * (span(problem, config) * lanes // 32)


def chunks(problem: Problem, config: Config) -> tuple[int, int]:
    """(pairs of rows, chunks of 128 bytes of each) that a block stores."""
    return ceil(min(config.block_m, problem.rows) / 2), problem.head_dim * config.partial_bits // 512


def item_words(config: Config) -> int:
    """Words of the workspace for 128 columns of a row that the last block combines (wgmma_ws with fused_combine).

    Each cluster's partial; then, on lines of their own, the arrival counter and the clusters' lse.
    """
    return partials(config) * 128 + ceil((1 + partials(config)) / 32) * 32


def unit_columns(problem: Problem, config: Config) -> int:
    """Columns of a pair of rows that one block of a cluster combines, if partials are pushed (st.async).

    At most an item's (item_words); exactly those if the last block combines the clusters.
    """
    return 128 if config.fused_combine else min(128, problem.head_dim // config.cluster)


def dsmem_bytes(problem: Problem, config: Config) -> int:
    """The receive buffer for pushed partials: of each block of the cluster units and log-sum-exps; and an mbarrier."""
    p, c = problem, config
    if not c.partial_bits or has_fragment_partials(c):
        return 0
    columns = unit_columns(p, c)
    slots = ceil(ceil(min(c.block_m, p.rows) / 2) * (p.head_dim // columns) / c.cluster)
    return slots * c.cluster * (2 * columns * c.partial_bits // 8 + 8) + 16


def tensor_map(problem: Problem, config: Config, of: str, shape: tuple[int, ...]) -> TensorMap | None:
    """Of the caches as 64 columns, 8 rows, blocks of columns, blocks of rows, and the heads of all pages.

    So a box of block_n rows, which no page boundary divides, has the layout that wgmma reads. One of all columns, as
    for values, is contiguous in the cache.
    """
    if not config.warpgroups or 0 in shape:
        return None
    pages, heads, size, dim = shape
    row, blocks = dim * 2, dim // 64 // (config.k_column_parts if of == "k_cache" else 1)
    return TensorMap(
        (64, 8, dim // 64, size // 8, pages * heads), (row, 128, 8 * row, size * row),
        (64, 8, blocks, config.block_n // 8, 1),
    )  # fmt: skip


def outputs(problem: Problem) -> tuple[str, ...]:
    """The caches only where the problem owns K and V; else they are read."""
    return OUTPUTS if problem.owns_kv else ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c, arch = problem, config, target.arch
    dim = p.head_dim // c.split_d
    if c.prefetch_stages and not arch.has_pdl:
        return (
            f"prefetch_stages={c.prefetch_stages} is for launches that begin before others end, on sm90 and newer; "
            "prefetch_stages=0"
        )
    if not 0 <= c.prefetch_stages < c.num_stages:
        return f"prefetch_stages={c.prefetch_stages} of num_stages={c.num_stages}: fewer, or 0 for all"
    if c.num_warps % c.split_d:
        return f"num_warps={c.num_warps} is no multiple of split_d={c.split_d}"
    if c.warpgroups:
        return _why_not_wgmma_ws(p, c, arch) or arch.why_too_large(smem_bytes(p, c, target))
    if c.cluster != 1 or c.k_column_parts != 2:
        return (
            f"cluster={c.cluster}, k_column_parts={c.k_column_parts} are body=wgmma_ws's; cluster=1, k_column_parts=2"
        )
    if c.l2_prefetch_stages:
        return f"l2_prefetch_stages={c.l2_prefetch_stages} is body=wgmma_ws's; l2_prefetch_stages=0"
    if c.partial_bits:
        return f"partial_bits={c.partial_bits} is body=wgmma_ws's; partial_bits=0"
    least = 64 if arch.has_ldmatrix else 128
    if dim < least:
        return f"split_d={c.split_d} leaves a warp {dim} of head_dim={p.head_dim}; at least {least} on {arch}"
    if c.block_m != 8 and c.block_m % 16:  # teams are merged by tiles of 8 rows, two at once
        return f"block_m={c.block_m}: a block has 8 rows or a multiple of 16 with body=mma"
    if c.block_m > 8 and c.block_m >= 2 * p.rows:
        return f"block_m={c.block_m} is twice the {p.rows} rows or more; block_m={c.block_m // 2} does the same"
    if (need := c.block_m * dim // 32) > MAX_ACCUMULATORS:
        return f"{need} accumulators a lane (block_m * head_dim / split_d / 32); at most {MAX_ACCUMULATORS}"
    if not arch.has_ldmatrix and c.block_m > 16:
        return f"block_m={c.block_m}: scores of more than 16 rows leave {arch} no registers to load ahead; at most 16"
    if not arch.has_ldmatrix and c.block_n != 32:
        return f"block_n={c.block_n}: the four quad-pairs of a warp take 8 keys each on {arch}; block_n=32"
    if not arch.has_ldmatrix and c.num_stages not in (2, 4):
        return f"num_stages={c.num_stages} batches in registers do not divide a tile on {arch}; 2 or 4"
    if arch.has_ldmatrix and not arch.has_cp_async and c.num_stages != 1:
        return f"num_stages={c.num_stages} needs cp.async, which {arch} lacks; num_stages=1"
    if arch.has_cp_async and c.num_stages < 2:
        return f"num_stages={c.num_stages} leaves nothing on its way while a tile is used; at least 2 on {arch}"
    return why_not_fused_combine(p, c, target) or arch.why_too_large(smem_bytes(p, c, target))


def registers_held(p: Problem, c: Config) -> int:
    """By a thread of a multiplying warpgroup: output, scores, probabilities and statistics of rows."""
    return p.head_dim * c.block_m * 4 // c.split_d // 128 + c.block_m // 2 + c.block_m // 4 + c.block_m // 2


def register_split(p: Problem, c: Config, arch: Arch) -> tuple[int, int, int]:
    """(blocks that an SM is to hold; warps beside num_warps; registers of a thread that multiplies), by warpgroups.

    Two blocks where shared memory and registers allow that, or one, and those of attn_combine beside it. One warp
    copies, and all have the same. Where that is not enough registers are dealt out to warpgroups, and the one that
    copies has a whole one. A block takes them by four warps.
    """
    if beside := _regs_left_by_combine(p, c, arch):
        if registers_held(p, c) + WARPGROUP_SPARE_REGS <= beside:
            return 1, 1, beside
        return 1, 4, _consumer_regs(beside, c)
    held, warps = registers_held(p, c), c.num_warps + 4  # with those of the copier, or in their place
    for blocks in (2, 1) if _two_blocks_fit(p, c, arch) else (1,):
        same = min(255, arch.regs_per_sm // (32 * blocks * warps) // 8 * 8)
        if held + UNIFORM_SPARE_REGS <= same:
            return blocks, 1, same
        more = _consumer_regs(same // 8 * 8, c)
        if held + WARPGROUP_SPARE_REGS <= more:
            break
    return blocks, 4, more


def _two_blocks_fit(p: Problem, c: Config, arch: Arch) -> bool:
    """Blocks by warpgroups in an SM's shared memory; not of twelve warps, with 64 registers too few for clusters."""
    return 2 * (_wgmma_ws_smem_bytes(p, c) + arch.reserved_smem_bytes) <= arch.smem_per_sm and c.num_warps < 12


def _why_not_wgmma_ws(p: Problem, c: Config, arch: Arch) -> str | None:
    if not arch.has_wgmma:
        return f"body=wgmma_ws needs wgmma, which {arch} (number {arch.number}) lacks; body=mma"
    if c.split_d not in (4, 8):
        return f"split_d={c.split_d}: one warpgroup or two, 4 or 8 warps, share a tile with body=wgmma_ws"
    if c.num_warps not in (4, 8, 12):
        return f"num_warps={c.num_warps}: one to three warpgroups, 4, 8 or 12 warps, multiply with body=wgmma_ws"
    if c.block_n != 16:
        return f"block_n={c.block_n}: a page of page_size={p.page_size} is sure to hold boxes of 16 keys; block_n=16"
    if c.block_m % 8 or not 8 <= c.block_m <= TILE:
        return f"block_m={c.block_m} is no multiple of 8 up to {TILE}"
    if c.block_m >= p.rows + 8:
        return f"block_m={c.block_m}: {p.rows} rows fill {c.block_m - 8}"
    most = min(4, p.head_dim // 64)
    if c.k_column_parts not in (1, 2, 4) or c.k_column_parts > most:
        return f"k_column_parts={c.k_column_parts}: 1, 2 or 4 parts have whole blocks of 64 columns; {most} at most"
    if c.k_column_parts == 1 and c.num_stages % (TILE // c.block_n):
        return f"num_stages={c.num_stages}: whole keys take four stages; a multiple of 4 with k_column_parts=1"
    if c.num_stages < 2:
        return f"num_stages={c.num_stages}: a stage is in use while the next one is awaited; at least 2"
    if c.num_stages > 32:
        return f"num_stages={c.num_stages}: a thread has a bit for the phase of each stage; at most 32"
    most = L2_PREFETCH_TILES * 2 * stages_per_tile(c)
    if c.l2_prefetch_stages < 0 or (c.l2_prefetch_stages and c.num_stages + c.l2_prefetch_stages > most):
        left = max(most - c.num_stages, 0)
        return f"l2_prefetch_stages={c.l2_prefetch_stages}: after num_stages={c.num_stages} at most {left}"
    if c.cluster not in (1, 2, 4, 8):
        return f"cluster={c.cluster}: a cluster has 1, 2, 4 or 8 blocks wherever it lies"
    if c.num_splits < 1 or c.num_splits % c.cluster:
        return f"num_splits={c.num_splits}: whole clusters have them; a multiple of cluster={c.cluster}"
    if c.fused_combine and not 2 <= partials(c) <= 32:
        return (
            f"fused_combine=True: the last block merges 2 to 32 results of a row; num_splits / cluster is {partials(c)}"
        )
    held, (*_, limit) = registers_held(p, c), register_split(p, c, arch)
    if held + WARPGROUP_SPARE_REGS > limit:
        return (
            f"output, scores and statistics take {held} registers a thread; with {WARPGROUP_SPARE_REGS} for the rest "
            f"that is over {limit}"
        )
    if c.partial_bits and (why := _why_no_partial_bits(p, c, arch)):
        return why
    if c.partial_bits and c.num_warps == c.split_d:
        return None  # one team, which has nobody of its block to meet
    results, room = c.num_warps // c.split_d * c.block_m * p.head_dim * 4, c.num_stages * stage_bytes(p, c)
    if results > room:
        return f"{results:,} B of results of {c.num_warps // c.split_d} teams meet in a ring of {room:,} B"
    return None


def _why_no_partial_bits(p: Problem, c: Config, arch: Arch) -> str | None:
    bits, columns = c.partial_bits, unit_columns(p, c)
    if bits not in (16, 32):
        return f"partial_bits={bits}: values are pushed in 16 or 32 bits; 0 pushes none"
    if c.cluster == 1 and (c.fused_combine or c.num_splits == 1):
        return f"partial_bits={bits}: of cluster=1 they go to attn_combine; fused_combine=False and several splits"
    if bits == 16 and p.head_dim * 4 < 128 * c.split_d:
        return (
            f"partial_bits=16: split_d={c.split_d} leaves a warpgroup one block of 64 columns; two are pushed at once"
        )
    if bits == 16 and columns < 32:
        return (
            f"partial_bits=16: of each row a block merges {columns} columns; 32 are pushed at once, or partial_bits=32"
        )
    if register_split(p, c, arch)[0] < register_split(p, replace(c, partial_bits=0), arch)[0]:
        return f"partial_bits={bits}: its {dsmem_bytes(p, c):,} B cost an SM its second block; fewer num_stages, or 0"
    return None


def why_not_fused_combine(problem: Problem, config: Config, target: Target) -> str | None:
    """Why fused_combine, if set, cannot work.

    A waiting block keeps its SM's registers and shared memory, so the whole grid must be co-resident. One block an SM
    always is.
    """
    p, c, sms = problem, config, target.device.num_sms
    if not c.fused_combine:
        return None
    if not target.arch.has_ldmatrix:
        return f"fused_combine=True: splits are merged by a second launch on {target.arch}; fused_combine=False serves"
    if c.num_splits == 1:
        return "fused_combine=True: num_splits=1 leaves nothing to merge; fused_combine=False"
    if (blocks := prod(grid_of(p, c))) > sms:
        return f"fused_combine=True: {blocks} blocks wait for each other, and {sms} SMs hold one each; at most {sms}"
    return None


def grid_of(p: Problem, c: Config) -> tuple[int, int, int]:
    return ceil(p.rows / c.block_m) * c.num_splits, p.num_kv_heads, p.batch


def _wgmma_ws_smem_bytes(p: Problem, c: Config) -> int:
    """Queries; the stages; each warpgroup's probabilities, or rotations before; new keys and values; the receive
    buffer; statistics; barriers."""
    row, warpgroups = p.head_dim * 2, c.num_warps // 4
    new = 2 * p.q_len * row if p.owns_kv else 0
    turns = 0 if p.source == "q" else p.q_len * row
    stats = warpgroups * c.block_m * (4 + (4 if has_fragment_partials(c) else 0) + 1) * 4
    barriers = 8 * (c.num_stages * (c.num_warps // c.split_d + 1) + 1)
    shown = warpgroups * c.block_m * TILE * 2
    ring = c.num_stages * stage_bytes(p, c)
    return c.block_m * row + ring + max(shown, turns) + new + dsmem_bytes(p, c) + stats + barriers


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    p, c = problem, config
    if c.warpgroups:
        return _wgmma_ws_smem_bytes(p, c)
    teams = c.num_warps // c.split_d
    queries = c.block_m * p.head_dim * 2
    scores = c.num_warps * c.block_n * c.block_m * 4 if c.split_d > 1 else 0
    stats = 2 * teams * c.block_m * 4
    turns = 0 if p.source == "q" else p.q_len * p.head_dim * 2  # a cosine and a sine for each pair of a token
    if target.arch.has_ldmatrix:
        ring = teams * c.num_stages * c.block_n * p.head_dim * 2
        if c.split_d > 1 and c.block_m // 8 % c.split_d == 0:  # rows are dealt to the warps of a team
            exchange = scores + teams * c.block_m * (c.block_n * 2 + 4)
        else:
            exchange = 2 * scores
        meeting = 16 if target.arch.has_cp_async and c.split_d > 1 and teams > 1 and not c.fused_combine else 0
        return ring + queries + exchange + stats + meeting + turns
    merge = teams * 8 * 128 * c.split_d * 4
    probabilities = c.num_warps * c.block_m * 80
    return merge + queries + probabilities + 2 * scores + stats + turns


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p, c = problem, config
    decode = Launch(
        "attn_decode",
        grid=grid_of(p, c),
        block=((c.num_warps + (register_split(p, c, target.arch)[1] if c.warpgroups else 0)) * 32, 1, 1),
        smem_bytes=smem_bytes(p, c, target),
        pdl=target.arch.has_pdl,
        reads_ahead=target.arch.has_pdl,
        cluster=(c.cluster, 1, 1),
        cooperative=c.fused_combine and not c.warpgroups,
    )
    if partials(c) == 1 or c.fused_combine:
        return (decode,)
    if has_fragment_partials(c):
        pairs, of_pair = chunks(p, c)
        spans = prod(decode.grid) // c.num_splits * pairs * of_pair // span(p, c)
        busy = min(prod(decode.grid), target.device.num_sms)
        room = 2 * busy + combine_blocks(c)[0] * (target.device.num_sms - busy)
        grid = (min(ceil(spans / COMBINE_WARPS), room), 1, 1)
        return (decode, Launch("attn_combine", grid, (COMBINE_WARPS * 32, 1, 1), 0, pdl=target.arch.has_pdl))
    slices, columns = combine_shape(p.head_dim, partials(c))
    rows = p.batch * p.q_len * p.num_q_heads
    grid = (rows, p.head_dim // (4 * columns), 1)
    combine = Launch("attn_combine", grid, (slices * columns, 1, 1), 0, pdl=target.arch.has_pdl)
    return (decode, combine)


def combine_shape(head_dim: int, num_partials: int) -> tuple[int, int]:
    """(slices that share the partials, columns of 4 elements) of a combine block."""
    slices = min(num_partials, MAX_SLICES)
    return slices, min(head_dim // 4, 32 if slices > 4 else 64 if slices > 2 else 128)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Partials for attn_combine, fp32: o [rows, partials, head_dim], then lse [rows, partials].

    A group is the blocks with the same rows. fused_combine, body=mma: for each group [owners, num_splits] cells
    (cell_quads), zero between launches. fused_combine, body=wgmma_ws: for each group [rows, head_dim / 128] items
    (item_words), counters zero between launches. Fragment partials: for each group [pairs of rows, chunks, num_splits]
    chunks of 128 bytes; then, for all groups, the lse [rows, num_splits].
    """
    p, c = problem, config
    if partials(c) == 1:
        return 0
    groups = prod(grid_of(p, c)) // c.num_splits
    if has_fragment_partials(c):
        pairs, of_pair = chunks(p, c)
        return groups * pairs * c.num_splits * (of_pair * 128 + 2 * 4)
    if c.fused_combine and c.warpgroups:
        return groups * min(c.block_m, p.rows) * p.head_dim // 128 * item_words(c) * 4
    if c.fused_combine:
        piece, owners, rows = combine_tiles(p, c)
        return groups * owners * c.num_splits * cell_quads(piece, rows) * 16
    return p.batch * p.q_len * p.num_q_heads * partials(c) * (p.head_dim + 1) * 4


def cost(problem: Problem) -> Cost:
    """Each visible key and value once, q and out once, new keys and values written once; two products."""
    p = problem
    kv = p.batch * p.num_kv_heads * p.visible * p.head_dim * 2 * 2
    new = 2 * p.num_kv_heads if p.owns_kv else 0
    ends = p.batch * p.q_len * (p.num_heads + p.num_q_heads + new) * p.head_dim * 2
    constants = 0 if p.source == "q" else p.head_dim * (4 if p.owns_kv else 2) + p.head_dim * 2  # norms, frequencies
    return Cost(bytes=kv + ends + constants, flops=4 * p.batch * p.q_len * p.num_q_heads * p.visible * p.head_dim)


def bytes_in_flight(p: Problem, c: Config, target: Target) -> float:
    """Bytes of KV of a block in flight, on average: a warp waits for one of its tiles and uses another."""
    dim = p.head_dim // c.split_d
    if c.warpgroups:  # two stages are in use, or those of a tile's whole keys
        stages_in_flight = max(c.num_stages - (stages_per_tile(c) if c.k_column_parts == 1 else 2), 1)
        return min(stages_in_flight, max_inflight_stages(p, c)) * stage_bytes(p, c)
    if not target.arch.has_ldmatrix:
        return c.num_warps * (c.num_stages - 0.5) * 32 * 4 * 16  # batches of four 16-byte loads a lane
    return c.num_warps * max(c.num_stages - 0.5, 0.5) * c.block_n * dim * 2


def candidates(problem: Problem, target: Target) -> list[Config]:
    """See candidates.py. Raises ProblemError where no shape fits."""
    from kerngen.templates.attn_decode.candidates import candidates as found  # which imports this module

    return found(problem, target)
