"""Prefill attention: softmax(q kᵀ · sm_scale) v for many query tokens a sequence, over a dense or a paged KV.

A block has BLOCK_M packed rows (row = query token · group + head in the group) of one sequence and kv head. It
processes that sequence's keys in tiles of BLOCK_N, from the last one down. Tiles that no row sees are not read; tiles
that every row sees need no mask. The block table is read from global memory, so its length costs no shared memory.

Few query tokens behind many keys make too few blocks for a GPU. With Config.split_kv several blocks have the same rows,
each with a part of the keys, and a second launch, attn_combine, combines their partials, as in attn_decode. The number
of parts follows from each launch (num_splits), so one cubin serves any number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.attention.tile_lists import LIST_KEYS, LIST_QUERIES
from kerngen.templates.common.rows.spec import (
    has_codes,
    is_rotated,
    kv_row_bytes,
    require,
    require_dtypes,
    require_heads,
    require_kv_format,
    require_page_heads,
    why_no_dtype,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TensorMap, args

HEAD_DIMS = (128, 256, 512)
# Of the 255 registers of a thread, what addresses, row statistics and operands in flight take beside the accumulators.
SPARE_REGS = 58
WGMMA_SPARE_REGS = 30
CHUNK_BYTES = 8192  # of keys or values, by wgmma_ws_split_d.cu.jinja
# Of a producer warp of body=wgmma_ws that converts codes (common/attention/wgmma_code_copy.cuh): two stages of 64 lines
# of 64 codes, with the four bytes each that a scale is in.
RAW_BYTES = 2 * 64 * (64 + 4)
MAX_SPLITS = 16
MAX_PARTIAL_BYTES = 64 << 20  # of partial results: more rows than that fill any GPU


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of `num_tokens` query tokens in `batch` sequences of at most `kv_len` keys.

    page_size: tokens a page; 0 means dense k and v, [total_k, num_kv_heads, head_dim]. window: keys that a query sees,
    itself included; 0 means all. Query i of a sequence sits at position kv_len - seqlen_q + i; with `causal` it sees
    keys up to itself. logit_cap: whether scores pass through cap · tanh(s / cap). num_q_heads is a multiple of
    num_kv_heads. page_heads: that a page of each cache has in memory (values.py, page_strides); 0 means num_kv_heads.
    kv_format: of the caches (values.py, KVFormat); dense k and v are plain.
    ends: a query sees keys up to an end of its own (values.py, Mask), which `causal` problems alone have. lists: a
    query sees keys of its list's tiles alone (common/attention/tile_lists.py), those that a causal mask leaves.
    Raises ProblemError otherwise.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "num_tokens", "kv_len")
    DYNAMIC: ClassVar[str] = "num_tokens"
    REACH: ClassVar[float] = 4
    TUNED_AS_DEFAULT: ClassVar[tuple[str, ...]] = ("page_heads", "ends", "lists")

    head_dim: int = 256
    num_q_heads: int = 32
    num_kv_heads: int = 16
    page_size: int = 0
    window: int = 0
    causal: bool = True
    dtype: str = "bf16"
    logit_cap: bool = False
    batch: int = 1
    num_tokens: int = 8192
    kv_len: int = 8192
    page_heads: int = 0
    ends: bool = False
    kv_format: str = "plain"
    lists: bool = False

    def __post_init__(self) -> None:
        known = ", ".join(map(str, HEAD_DIMS))
        require(self.head_dim in HEAD_DIMS, f"head_dim={self.head_dim}: attn_prefill has {known}")
        require_dtypes(self.dtype)
        require_heads(self.num_q_heads, self.num_kv_heads)
        least = min(self.page_size, self.window, self.batch, self.num_tokens, self.kv_len)
        require(least >= 0, "page_size, window, batch, num_tokens and kv_len cannot be negative")
        require_page_heads(self.page_heads, self.num_kv_heads)
        require(not self.page_heads or self.page_size > 0, f"page_heads={self.page_heads}: dense k and v have no pages")
        require_kv_format(self.kv_format, self.head_dim, self.page_size, self.page_heads)
        paged = self.page_size > 0 or self.kv_format == "plain"
        require(paged, f"kv_format={self.kv_format!r}: dense k and v are plain")
        require(self.causal or not self.ends, "ends=True: without causal=True a query sees all keys")
        alone = self.causal and not (self.window or self.ends)
        require(alone or not self.lists, f"lists=True is for a causal mask: window={self.window} causal={self.causal}")


@dataclass(frozen=True, slots=True)
class Config:
    """block_m: packed query rows a block. block_n: keys a tile. num_warps: consumer warps. warps_d: warps that share
    their query rows, each accumulating head_dim / warps_d columns of the output. num_stages: stages of K and of V, a
    tile each; with body=wgmma_ws and warps_d=2 chunks of 8 KB, for each of two warpgroups. q_in_regs: queries stay in
    registers instead of being read from shared memory for each tile. body: mma is mma.sync; wgmma_ws is
    warp-specialised, consumer warpgroups of 64 rows and a producer warpgroup. ping_pong: two warpgroups alternate on
    the tensor cores. use_tma: whole tiles of keys and values are loaded by TMA. cluster: blocks that share tiles by
    multicast. split_kv: several blocks share the keys of a tile of rows (split-KV) if there are few tiles.
    """

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    warps_d: int = 1
    num_stages: int = 1
    q_in_regs: bool = False
    body: str = field(default="mma", metadata={"filed": {"wgmma_ws": {"wgmma": True}}})
    ping_pong: bool = False
    use_tma: bool = field(default=False, metadata={"filed": "boxes"})
    cluster: int = 1
    split_kv: bool = field(default=False, metadata={"filed": "split"})

    @property
    def wgmma(self) -> bool:
        return self.body == "wgmma_ws"


SPACE = {
    "block_m": (16, 32, 64, 128),
    "block_n": (16, 32, 64, 128),
    "num_warps": (4, 8),
    "warps_d": (1, 2, 4, 8),
}

WGMMA_SPACE = {
    "block_m": (128, 192),
    "block_n": (48, 64, 80, 96, 112, 128, 144, 160, 176),
    "num_warps": (8, 12),
    "num_stages": (1, 2),
    "ping_pong": (False, True),
    "use_tma": (False, True),
    "cluster": (1, 2),
}

SPLIT_D_SPACE = {
    "block_m": (64,),
    "block_n": (64,),
    "num_warps": (8,),
    "num_stages": (7, 8, 9),
    "use_tma": (False, True),
    "cluster": (1, 2, 4),
}

# k, v: dense [total_k, num_kv_heads, head_dim] or the paged caches. cu_seqlens_k is null when paged, kv_lens and
# block_table when dense. ends [num_tokens]. counts [lists, num_kv_heads] and lists [lists, num_kv_heads, max_tiles] are
# tile_lists'. sm_scale is positive. max_seqlen_q is for a body whose grid needs it: the
# ones here search cu_seqlens_q instead and do not read it.
ARGS = {
    "attn_prefill": (
        *args("ptr", "out", "q"),
        *args("ptr", "k", "v", page_heads="page_heads"),
        *args("ptr", "cu_seqlens_q", "cu_seqlens_k", "kv_lens", "block_table", align=4),
        Arg("ends", "ptr", align=4, only="ends"),
        *(Arg(name, "ptr", align=4, only="lists") for name in ("counts", "lists")),
        Arg("max_tiles", "i32", only="lists"),
        *args("f32", "sm_scale", "logit_cap"),
        *args("i32", "batch", "max_pages", "max_seqlen_q"),
    )
}
_MAPS = (Arg("k_map", "map", of="k"), Arg("v_map", "map", of="v"))
WGMMA_ARGS = {"attn_prefill": (*ARGS["attn_prefill"], *_MAPS)}
SPLIT_ARGS = {
    "attn_prefill": (*ARGS["attn_prefill"], Arg("workspace", "ptr"), *_MAPS),
    "attn_combine": (
        Arg("out", "ptr"), Arg("workspace", "ptr"), Arg("cu_seqlens_q", "ptr", align=4), Arg("batch", "i32"),
    ),
}  # fmt: skip
BODIES = (
    Body(
        "kernel.cu.jinja", ARGS, SPACE | {"num_stages": (1, 2), "q_in_regs": (False, True)},
        serves=lambda arch: arch.has_ldmatrix, when={"body": "mma", "split_kv": False},
    ),
    Body(
        "wgmma.cu.jinja", WGMMA_ARGS, WGMMA_SPACE, serves=lambda arch: arch.has_wgmma,
        when={"body": "wgmma_ws", "warps_d": 1, "split_kv": False},
    ),
    Body(
        "wgmma_ws_split_d.cu.jinja", WGMMA_ARGS, SPLIT_D_SPACE, serves=lambda arch: arch.has_wgmma,
        when={"body": "wgmma_ws", "warps_d": 2, "split_kv": False},
    ),
    Body(
        "wgmma_ws_split_d.cu.jinja", SPLIT_ARGS, SPLIT_D_SPACE, serves=lambda arch: arch.has_wgmma,
        when={"body": "wgmma_ws", "warps_d": 2, "split_kv": True},
    ),
    Body(
        "volta.cu.jinja", ARGS, SPACE, serves=lambda arch: not arch.has_ldmatrix,
        when={"body": "mma", "split_kv": False},
    ),
)  # fmt: skip
OUTPUTS = ("out",)
MIN_SAVED_TILES = 6  # of a block's key tiles: partials go through memory, and a launch of its own combines them
# What ptxas may keep in local memory, a thread: the accumulators fill the register file. 96 at most in the test cases.
MAX_SPILL_BYTES = 128


def box_rows(problem: Problem, config: Config, of: str = "k") -> int:
    """Rows of k or v of a TMA box: a page's, or fewer if a stage (a tile; in wgmma_ws_split_d.cu.jinja a chunk, or a
    block's part of one) has fewer. 0: no TMA."""
    together = config.block_n
    if config.warps_d == 2:
        together = CHUNK_BYTES // problem.head_dim if of == "v" else config.block_n // config.cluster
    rows = gcd(problem.page_size, together)  # no box crosses the end of a page
    if problem.kv_format != "plain":  # boxes bring rows as they lie
        return 0
    return rows if config.use_tma and rows and rows % 8 == 0 else 0


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    found = {"BOX_ROWS": box_rows(problem, config), "V_BOX_ROWS": box_rows(problem, config, "v")}
    found |= {"RAW_BYTES": raw_bytes(problem) // 4}
    producer, consumer = registers(problem, config)
    found |= {"PRODUCER_REGISTERS": producer, "CONSUMER_REGISTERS": consumer}
    return found | ({"MAX_SPLITS": MAX_SPLITS} if config.split_kv else {})


def raw_bytes(problem: Problem) -> int:
    """Of four producer warps' stages of codes and scales (common/attention/wgmma_code_copy.cuh)."""
    return 4 * RAW_BYTES * has_codes(problem.kv_format)


def registers(problem: Problem, config: Config) -> tuple[int, int]:
    """A thread's, of body=wgmma_ws: of the producer and of the consumer warpgroups."""
    if config.num_warps == 12:
        return 32, 160
    return (56, 224) if has_codes(problem.kv_format) else (40, 232)


def tensor_map(problem: Problem, config: Config, of: str, shape: tuple[int, ...]) -> TensorMap | None:
    """Of k and v as head_dim, rows, heads and pages, the dense ones being a single page."""
    if not (rows := box_rows(problem, config, of)):
        return None
    if problem.page_size:
        pages, heads, size, dim = shape
        strides = (dim * 2, size * dim * 2, (problem.page_heads or heads) * size * dim * 2)
        return TensorMap((dim, size, heads, pages), strides, (64, rows, 1, 1), l2_bytes=256)
    total, heads, dim = shape
    strides = (heads * dim * 2, dim * 2, total * heads * dim * 2)
    return TensorMap((dim, total, heads, 1), strides, (64, rows, 1, 1), l2_bytes=256)


def accumulator_regs(problem: Problem, config: Config) -> int:
    """32-bit registers a thread for the output, the scores, and what of Q is held."""
    rows = config.block_m * config.warps_d // config.num_warps
    output = rows * problem.head_dim // config.warps_d // 32
    scores = rows * config.block_n // config.warps_d // 32
    return output + scores + (rows * problem.head_dim // 64 if config.q_in_regs else 0)


def staging_regs(problem: Problem, config: Config, target: Target) -> int:
    """32-bit registers a thread that carry the next tile where there is no cp.async."""
    return 0 if target.arch.has_cp_async else config.block_n * problem.head_dim // (64 * config.num_warps)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if problem.lists and not target.arch.has_ldmatrix:
        return f"lists=True needs ldmatrix, which {target.arch} lacks; use lists=False, which sees all tiles"
    if is_rotated(problem.kv_format):
        return f"kv_format={problem.kv_format} holds rotated values: use gather_kv, and plain pages"
    return why_no_dtype(target.arch, problem.dtype)


def _why_not_wgmma(problem: Problem, config: Config, target: Target) -> str | None:
    c, arch = config, target.arch
    if not arch.has_wgmma:
        return f"body=wgmma_ws needs wgmma, which {arch} lacks"
    why_not = _why_not_split_d if c.warps_d == 2 else _why_not_split_m
    if (why := why_not(problem, c)) is not None:
        return why
    if c.q_in_regs:
        return "body=wgmma_ws reads queries from shared memory; use q_in_regs=False"
    if c.use_tma and problem.kv_format != "plain":
        made = f"and those of kv_format={problem.kv_format} are made as they are copied"
        return f"use_tma=True brings rows as they lie, {made}; use use_tma=False"
    if c.use_tma and not (box_rows(problem, c) and box_rows(problem, c, "v")):
        return f"use_tma=True: page_size={problem.page_size} is no multiple of 8 rows"
    if c.cluster > 1 and not c.use_tma:
        return f"cluster={c.cluster} copies to all its blocks in boxes; use use_tma=True"
    return None


def _why_not_split_d(problem: Problem, config: Config) -> str | None:
    """Of wgmma_ws_split_d.cu.jinja: two warpgroups share their rows and split head_dim."""
    c = config
    if problem.head_dim != 512:
        return f"body=wgmma_ws with warps_d=2 is for head_dim=512, not {problem.head_dim}; use warps_d=1"
    if (c.block_m, c.block_n, c.num_warps) != (64, 64, 8):
        return (
            f"block_m={c.block_m} block_n={c.block_n} num_warps={c.num_warps}: with warps_d=2 two warpgroups, 8 warps, "
            "share 64 rows and take turns at tiles of 64 keys"
        )
    if c.num_stages < 4:
        return f"num_stages={c.num_stages}: products of two chunks are under way while others come; it takes 4"
    if c.ping_pong:
        return "ping_pong=True is for warps_d=1: with warps_d=2 warpgroups wait for each other's probabilities"
    if c.cluster not in (1, 2, 4):
        return f"cluster={c.cluster}: chunks come in one, two or four parts"
    return None


def _why_not_split_m(problem: Problem, config: Config) -> str | None:
    """Of wgmma.cu.jinja: each warpgroup has rows of its own."""
    c = config
    if problem.lists:
        return (
            "lists=True is for body=mma, or body=wgmma_ws with warps_d=2, whose tiles are parts of a list's; use those"
        )
    if c.num_warps not in (8, 12) or c.warps_d != 1 or c.block_m != 16 * c.num_warps:
        return (
            f"block_m={c.block_m} warps_d={c.warps_d} num_warps={c.num_warps}: warpgroups, two or three, have 64 rows "
            "each"
        )
    if c.block_n % 16 or not 16 <= c.block_n <= 256:
        return f"block_n={c.block_n} is no multiple of 16 up to 256"
    if problem.head_dim // 64 % c.cluster:
        return f"head_dim={problem.head_dim} has {problem.head_dim // 64} blocks of columns, no multiple of {c.cluster}"
    if c.ping_pong and c.num_warps != 8:
        return f"ping_pong=True takes turns between two warpgroups of num_warps=8; there are {c.num_warps} warps"
    if problem.head_dim > 256:
        return f"head_dim={problem.head_dim}: a warpgroup has 256 columns of the output at most; use warps_d=2"
    if has_codes(problem.kv_format) and (c.num_warps != 8 or problem.head_dim * c.block_n != 16384):
        return (
            f"num_warps={c.num_warps} block_n={c.block_n}: kv_format={problem.kv_format} is converted beside two "
            f"warpgroups, 8 warps, in tiles of {16384 // problem.head_dim} keys"
        )
    held, limit = problem.head_dim // 2 + c.block_n * 3 // 4, registers(problem, c)[1]
    if held + WGMMA_SPARE_REGS > limit:
        return (
            f"output, scores and probabilities take {held} registers a thread; with {WGMMA_SPARE_REGS} for the rest "
            f"that is over {limit}"
        )
    return None


def _why_not_mma(problem: Problem, config: Config, target: Target) -> str | None:
    c, arch = config, target.arch
    unit = 16 if arch.has_ldmatrix else 32
    if c.num_warps % c.warps_d:
        return f"num_warps={c.num_warps} is no multiple of warps_d={c.warps_d}"
    rows = c.block_m * c.warps_d // c.num_warps
    if rows not in (16, 32):
        return f"block_m={c.block_m} over {c.num_warps // c.warps_d} row groups is {rows} rows a warp; it has 16 or 32"
    if c.block_n // c.warps_d < 8 or c.block_n % 16:
        return f"block_n={c.block_n} over warps_d={c.warps_d} is {c.block_n // c.warps_d} keys a warp; it needs 8"
    if problem.head_dim // c.warps_d < unit:
        return f"head_dim={problem.head_dim} over warps_d={c.warps_d} is under {unit} columns a warp"
    if c.num_stages > 1 and not arch.has_cp_async:
        return f"num_stages={c.num_stages} needs cp.async, which {arch} lacks; use num_stages=1"
    if c.q_in_regs and not arch.has_ldmatrix:
        return f"q_in_regs=True needs ldmatrix fragments, which {arch} lacks; use q_in_regs=False"
    chunks = problem.head_dim // 8
    if min(c.block_m, c.block_n) * chunks < 32 * c.num_warps:
        return (
            f"a tile of {min(c.block_m, c.block_n)} rows is {min(c.block_m, c.block_n) * chunks} chunks of 16 B, "
            f"fewer than {32 * c.num_warps} threads"
        )
    held, staged = accumulator_regs(problem, c), staging_regs(problem, c, target)
    limit = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * c.num_warps))
    if held + staged + SPARE_REGS > limit:
        return (
            f"accumulators take {held} registers a thread and staged tiles {staged}; with {SPARE_REGS} for the rest "
            f"that is over {limit}"
        )
    return None


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.split_kv and not (config.wgmma and config.warps_d == 2):
        return "split_kv=True is for body=wgmma_ws with warps_d=2"
    if problem.lists and (why := _why_not_lists(problem, config)) is not None:
        return why
    why_not = _why_not_wgmma if config.wgmma else _why_not_mma
    why = why_not(problem, config, target)
    return target.arch.why_too_large(smem_bytes(problem, config, target)) if why is None else why


def _why_not_lists(problem: Problem, config: Config) -> str | None:
    c, rows = config, LIST_QUERIES * (problem.num_q_heads // problem.num_kv_heads)
    if rows % (c.block_m * c.cluster):
        return f"block_m={c.block_m} cluster={c.cluster}: the {rows} rows of a list are no multiple of both together"
    if LIST_KEYS % c.block_n:
        return f"block_n={c.block_n} does not divide the {LIST_KEYS} keys of a list's entry"
    return None


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Q, the K and V stages (one tile for both where there is no cp.async), and what warps of a row exchange."""
    c, row = config, problem.head_dim * 2
    if c.wgmma and c.warps_d == 2:  # two rings, and for each of two warpgroups probabilities and their bases; barriers
        shown, barriers = c.block_m * c.block_n * 2 + c.block_m * 4, 8 * (1 + 4 * c.num_stages)
        return c.block_m * row + 2 * (c.num_stages * CHUNK_BYTES + shown) + raw_bytes(problem) + barriers
    if c.wgmma:  # and the barriers
        tiles = 2 * c.num_stages * c.block_n * row
        return c.block_m * row + tiles + raw_bytes(problem) + 8 * (1 + 4 * c.num_stages)
    tiles = 2 * c.num_stages if target.arch.has_cp_async else 1
    probabilities = c.block_m * c.block_n * 2 if c.warps_d > 1 or not target.arch.has_ldmatrix else 0
    maxima = c.warps_d * c.block_m * 4 if c.warps_d > 1 else 0
    return c.block_m * row + tiles * c.block_n * row + probabilities + maxima


# (block_m, block_n, num_warps, warps_d) where there is no wgmma: large tiles, and smaller ones for less shared memory.
_MMA_TILES = {
    128: ((128, 64, 4, 1), (128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (128, 32, 4, 1)),
    256: ((128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 1), (64, 32, 8, 2), (64, 32, 4, 1)),
    512: ((64, 64, 8, 4), (64, 32, 8, 4), (64, 32, 8, 2), (64, 16, 8, 2), (32, 32, 8, 4), (32, 16, 4, 2)),
}
_WGMMA_TILES = {
    128: (Config(192, 80, 12, 1, 2, body="wgmma_ws"), Config(128, 128, 8, 1, 2, body="wgmma_ws")),
    256: (Config(128, 80, 8, 1, 2, body="wgmma_ws"), Config(128, 64, 8, 1, 2, body="wgmma_ws")),
    512: (Config(64, 64, 8, 2, 8, body="wgmma_ws", cluster=2),),
}
_CONVERTING_TILES = {  # of codes
    128: (Config(128, 128, 8, 1, 2, body="wgmma_ws"),),
    256: (Config(128, 64, 8, 1, 2, body="wgmma_ws"),),
    512: (Config(64, 64, 8, 2, 7, body="wgmma_ws"),),
}


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """By warpgroups where there is wgmma, with TMA where pages allow it."""
    if not target.arch.has_wgmma or (problem.lists and problem.head_dim < 512):
        return [Config(*fields) for fields in _MMA_TILES[problem.head_dim]]
    found = []
    tiles = _CONVERTING_TILES if has_codes(problem.kv_format) else _WGMMA_TILES
    for config in tiles[problem.head_dim]:
        boxed = replace(config, use_tma=True)
        config = boxed if box_rows(problem, boxed) else replace(config, cluster=1)
        # A tuned point's winner serves down to half as many tokens.
        split_kv = config.warps_d == 2 and _blocks(problem, config) <= 2 * target.device.num_sms
        found.append(replace(config, split_kv=split_kv))
    return found


def num_splits(problem: Problem, config: Config, target: Target) -> int:
    """Splits of a row tile's keys: as many as fill SMs that would be idle, if the longest block saves enough tiles.

    More waves of shorter blocks may win if contexts are as long as kv_len allows and lose as much if they are not.
    """
    p, sms = problem, target.device.num_sms
    blocks = _blocks(p, config)
    if not config.split_kv or not blocks:
        return 1
    pairs = -(-visible_keys(p) // (2 * config.block_n))  # of tiles, which are dealt
    rounds = -(-blocks // sms)
    splits = max(min(rounds * sms // blocks, MAX_SPLITS, pairs, MAX_PARTIAL_BYTES // _partial_bytes(p, 1)), 1)
    longest = -(-pairs // splits)
    return -(-pairs // longest) if 2 * rounds * (pairs - longest) >= MIN_SAVED_TILES else 1


def _row_tiles(problem: Problem, config: Config) -> int:
    """Of a kv head: clusters' tiles of packed rows, the sequences taken together."""
    group = problem.num_q_heads // problem.num_kv_heads
    return -(-problem.num_tokens * group // (config.block_m * config.cluster))


def _blocks(problem: Problem, config: Config) -> int:
    """Those with rows, where keys are whole."""
    return _row_tiles(problem, config) * problem.num_kv_heads * config.cluster


def visible_keys(problem: Problem) -> int:
    """That the last query of a sequence sees."""
    return min(problem.kv_len, problem.window or problem.kv_len)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    """One block for each kv head and each tile that any split of num_tokens into `batch` sequences could need, and for
    each part of its keys; then what merges these."""
    p, c, splits = problem, config, num_splits(problem, config, target)
    tiles = _row_tiles(p, c) + p.batch
    attend = Launch(
        "attn_prefill",
        (max(1, tiles * p.num_kv_heads) * c.cluster, splits, 1),
        (32 * (c.num_warps + (4 if c.wgmma else 0)), 1, 1),
        smem_bytes(p, c, target),
        pdl=target.arch.has_pdl,
        cluster=(c.cluster, 1, 1),
    )
    if splits == 1:
        return (attend,)
    combine = Launch("attn_combine", (p.num_tokens * p.num_q_heads, 1, 1), (p.head_dim // 4, 1, 1), 0, attend.pdl)
    return (attend, combine)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The splits' partial outputs and log-sum-exps; none without splits."""
    splits = num_splits(problem, config, target)
    return _partial_bytes(problem, splits) if splits > 1 else 0


def _partial_bytes(problem: Problem, splits: int) -> int:
    return problem.num_tokens * problem.num_q_heads * (MAX_SPLITS + splits * problem.head_dim) * 4


def visible_pairs(problem: Problem) -> int:
    """Query-key pairs of one head, all sequences, taking the sequences as equally long."""
    if not problem.batch:
        return 0
    queries, kv_len = problem.num_tokens // problem.batch, problem.kv_len
    first = kv_len - queries  # position of the first query

    def upto(position: int) -> int:
        """Keys seen by all queries at positions 0 .. position - 1, under the causal mask and the window."""
        ramp = position if problem.window == 0 else min(position, problem.window)
        return ramp * (ramp + 1) // 2 + (position - ramp) * problem.window

    if problem.causal:
        return problem.batch * (upto(kv_len) - upto(max(first, 0)))
    if problem.window == 0:
        return problem.batch * queries * kv_len
    hidden = sum(max(0, first + i - problem.window + 1) for i in range(queries))
    return problem.batch * (queries * kv_len - hidden)


def cost(problem: Problem) -> Cost:
    """Every q, out, k and v element once (keys left of all windows excepted); two products over the visible pairs."""
    queries = problem.num_tokens // max(problem.batch, 1)
    keys = min(problem.kv_len, queries + problem.window - 1) if problem.window else problem.kv_len
    rows = 2 * problem.num_tokens * problem.num_q_heads * problem.head_dim * 2
    cached = 2 * problem.batch * keys * problem.num_kv_heads
    flops = 4 * problem.head_dim * problem.num_q_heads * visible_pairs(problem)
    return Cost(rows + cached * kv_row_bytes(problem.kv_format, problem.head_dim, problem.dtype), flops)
