"""Tilings and weight formats of W4A16 kernels and the resources they need, shared by w4a16_gemm and moe_w4a16.

Swap-AB: weights are the tensor core's A operand (in strips, n-tiles of 32 rows), tokens its 8 columns, so one token
costs no more MMAs than eight. The units of work are block_k columns of a tile. Either each block has one tile, or all
blocks have equal shares of all units (stream-K); wgmma_ws splits only the partial wave and processes the other tiles
whole. Partial sums of a shared tile go through the workspace, in fp32, and are added in the order of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import require, require_dtypes

STRIP = 32  # rows of W, and columns of K, in one packed tile: 16 bytes a lane for 4-bit codes, 32 for 8-bit ones
GROUP_SIZES = (32, 64, 128)
STREAM_BLOCK_M = (1, 4)  # tokens of a tile with stream (x_registers.cuh)
X_SCRATCH_BYTES = 1024  # shared memory of a warp, for the layout change of four tokens
MAX_PENDING_UNITS = 2  # whose sums may wait for the reduction warp
MAX_PREFETCH_TOKENS = 64  # up to which candidates and searches limit what is in flight while x is waited for
MANY_TOKENS = 128  # of a tile of warpgroups: from here on sums may be added up beside, and the last tile begins early

# What rows have in place of `body`, which were flags once (templates/kernel.py, defaults_of).
BODIES_AS_FILED = {
    "wgmma": {"wgmma": True}, "gemv": {"gemv": True}, "tma_warp": {"stream": True},
    "tma_block": {"stream": True, "shared_ring": True}, "wgmma_ws": {"warpgroups": True}, "tma_mma": {"tma_mma": True},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """How W is packed (pack.py). group_size: weights of a row that share a scale. bits: of a code.

    has_minima: a weight is code * scale + minimum, which lies beside its scale; if not, code * scale.
    """

    group_size: int
    bits: int = 4
    has_minima: bool = False

    @property
    def name(self) -> str:
        """As in WEIGHTS."""
        return f"int{self.bits}" + ("_min" if self.has_minima else "")

    @property
    def is_int4(self) -> bool:
        """Whether it is symmetric int4, as W4A16 releases are."""
        return self.bits == 4 and not self.has_minima

    @property
    def tile_bytes(self) -> int:
        return STRIP * STRIP * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """Of the scales, and minima, of a group of each row of a strip."""
        return STRIP * 2 * (2 if self.has_minima else 1)

    @property
    def tile_groups(self) -> int:
        """That a tile's row has."""
        return max(1, STRIP // self.group_size)

    def bytes_of(self, rows: int, columns: int) -> int:
        """Of so much of W with its scales, where columns are whole groups or lie in one."""
        groups = rows // STRIP * max(1, columns // self.group_size)
        return rows * columns * self.bits // 8 + groups * self.group_bytes


# Formats of W by name: `weights` of w4a16_gemm's problem.
WEIGHTS = {
    "int4": Packing(0), "int4_min": Packing(0, has_minima=True),
    "int8": Packing(0, 8), "int8_min": Packing(0, 8, has_minima=True),
}  # fmt: skip


@cache
def packing_of(weights: str, group_size: int) -> Packing:
    return replace(WEIGHTS[weights], group_size=group_size)


@dataclass(frozen=True, slots=True)
class Tiling:
    block_m: int = 8  # tokens of a tile
    block_n: int = 128  # rows of W of a tile
    block_k: int = 128  # of one pipeline stage
    warp_n: int = 32  # rows of W of a warp
    warps_m: int = 1  # warps that share rows of W and differ in tokens
    warps_k: int = 1  # warps that share a tile and differ in K; summed through shared memory
    num_stages: int = 4
    blocks_per_sm: int = 1  # stream-K over this many blocks an SM (wgmma_ws: of the last waves); 0: one block a tile
    # mma: a cp.async pipeline (gemm.cuh). wgmma: wgmma in place of mma.sync. wgmma_ws: for nine tokens and more; each
    #   consumer warpgroup multiplies 64 rows of W by all tokens of a tile. docs/kernels.md tells all bodies apart.
    # gemv: up to 8 tokens (gemv.cuh). block_k is what a tile's warps have in flight; blocks_per_sm blocks an SM loop
    #   over all tiles (0: each has its own).
    # tma_warp: up to four tokens (warp_pipeline.cuh). A tile is a strip, block_k is one stage of every warp, num_stages
    #   are a warp's. tma_block: two to four tokens (cta_pipeline.cuh). All three are the block's. These two multiply W
    #   as integers, by limbs of x; tma_mma is tma_warp with 16-bit operands, up to eight tokens and any format of W.
    body: str = field(default="mma", metadata={"filed": BODIES_AS_FILED})
    split_k: int = 1  # with gemv or tma_*: parts of K whose sums one of the blocks adds up
    cluster: int = 1  # with wgmma_ws: blocks with other rows of W and the same tokens; x is multicast to them
    # With wgmma_ws: stages after the first num_stages whose weights are prefetched into L2.
    l2_prefetch_stages: int = field(default=0, metadata={"filed": "prefetch"})
    # The most stages of weights in flight while a block (tma_warp: a warp) waits for x. 0: all.
    prefetch_stages: int = field(default=0, metadata={"filed": "in_flight"})
    # With tma_block: at most prefetch_stages are in flight even after x has arrived.
    cap_inflight: bool = field(default=False, metadata={"filed": "throughout"})

    @property
    def stream(self) -> bool:
        """Whether W is loaded by bulk copies, into pipelines of warps or of a block."""
        return self.body in ("tma_warp", "tma_block", "tma_mma")

    @property
    def has_limbs(self) -> bool:
        """Whether W is multiplied as integers."""
        return self.body in ("tma_warp", "tma_block")

    @property
    def few_tokens(self) -> bool:
        """Whether all tokens are in one tile, which blocks share by split_k alone."""
        return self.stream or self.body == "gemv"

    @property
    def overlaps_reduce(self) -> bool:
        """Whether warps beside those that multiply add up the sums of shared tiles; there must be registers."""
        is_wide = self.block_n == 128 and self.block_m >= MANY_TOKENS
        return is_wide and self.body == "wgmma_ws" and self.blocks_per_sm == 1

    @property
    def shares_tiles(self) -> bool:
        """Whether blocks exchange partial sums through the workspace."""
        return self.split_k > 1 if self.few_tokens else self.blocks_per_sm > 0

    @property
    def num_warps(self) -> int:
        """Of a block, that multiply."""
        return self.block_n // self.warp_n * self.warps_m * self.warps_k

    @property
    def extra_warps(self) -> int:
        """Of a block, that copy or add up: producer warps, and those that reduce."""
        return {"wgmma_ws": 4, "tma_block": 2}.get(self.body, 0)

    @property
    def unit_bytes(self) -> int:
        """The sums of a tile."""
        return self.block_m * self.block_n * 4

    def weight_bytes(self, packing: Packing) -> int:
        """Of W and its scales in block_k of a tile."""
        return packing.bytes_of(self.block_n, self.block_k)

    def stage_bytes(self, packing: Packing) -> int:
        if self.stream:
            return self.weight_bytes(packing)
        used = self.weight_bytes(packing) + self.block_m * self.block_k * 2
        return -(-used // 1024) * 1024 if "wgmma" in self.body else used

    def smem_bytes(self, packing: Packing) -> int:
        """The stages, and the exchange of the warps that split K; with gemv that alone. All dynamic."""
        stages = self.num_stages * self.stage_bytes(packing)
        if self.body == "tma_block":  # also the sums of pending units, and scratch for x
            places = self.num_stages + MAX_PENDING_UNITS  # two barriers and whose it is
            ring = -(-(stages + places * (16 + 4)) // 16) * 16 + MAX_PENDING_UNITS * self.warps_k * self.unit_bytes
            return -(-ring // 128) * 128 + X_SCRATCH_BYTES * self.warps_k
        if self.stream:  # also a barrier of each warp's stages, and scratch for limbs of four tokens
            ring = -(-(stages + self.num_stages * 8 * self.warps_k) // 16) * 16
            return ring + (X_SCRATCH_BYTES * self.warps_k if self.has_limbs and self.block_m > 1 else 0)
        if self.body == "gemv":  # double-buffered if a block has several tiles; which block started last
            sums = self.warps_k * self.unit_bytes * (2 if self.blocks_per_sm else 1)
            return 0 if self.warps_k == 1 else sums + 16 * (self.split_k > 1)
        return stages + (self.warps_k - 1) * self.unit_bytes

    def num_blocks(self, row_tiles: int, n: int, k: int, num_sms: int) -> int:
        """Of a launch that multiplies so many rows of tiles by W [n, k]. The last cluster may have tiles beyond W."""
        clusters = row_tiles * -(-n // (self.block_n * self.cluster))  # of tiles
        if self.blocks_per_sm == 0:
            return clusters * self.cluster * self.split_k
        units = clusters * (self.split_k if self.few_tokens else -(-k // self.block_k))
        return self.cluster * min(max(1, self.blocks_per_sm * num_sms // self.cluster), units)

    def partial_bytes(self, blocks: int) -> int:
        """An fp32 tile a block, two with warpgroups, one a unit with gemv and stream. 0 where no tile is shared."""
        return self.shares_tiles * blocks * (2 if self.body == "wgmma_ws" else 1) * self.unit_bytes


def _prefetch_stages(problem: Any, target: Target) -> tuple[int, ...]:
    return (0, 1) if target.arch.has_pdl and 1 < problem.num_tokens <= MAX_PREFETCH_TOKENS else (0,)


# What each body takes of the fields, and searches. Where block_k follows from K it may be another; of num_stages there
# may be more than the fewest where they fit, and of prefetch_stages any that num_stages leaves.
_FIXED: dict[str, Any] = {f.name: (f.default,) for f in fields(Tiling) if f.name != "body"}
SPACES: dict[str, dict[str, Any]] = {
    "mma": _FIXED | {
        "block_m": (8, 16, 32, 64, 128, 256), "block_n": (32, 64, 128, 256), "block_k": (32, 64, 128, 256, 512),
        "warp_n": (32, 64), "warps_m": (1, 2, 4), "warps_k": (1, 2, 4, 8), "num_stages": (2, 3, 4, 5, 6, 8),
        "blocks_per_sm": (0, 1, 2, 3, 4), "prefetch_stages": _prefetch_stages},
    # tiles of 8 tokens scale mma.sync's products; of more than 128, a strip's two products do not fit in registers
    "wgmma": _FIXED | {
        "block_m": (16, 32, 64, 128), "block_n": (128, 256), "block_k": (64, 128, 256, 512),
        "num_stages": (3, 4, 5, 6, 8), "blocks_per_sm": (0, 1, 2, 3, 4)},
    "gemv": _FIXED | {
        "block_n": (32, 64, 128), "block_k": (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
        "warp_n": (32, 64), "warps_k": (1, 2, 4, 8, 16), "num_stages": (1,), "blocks_per_sm": (0, 2, 3),
        "split_k": (1, 2, 3, 4, 6, 8)},
    "tma_warp": _FIXED | {
        "block_m": STREAM_BLOCK_M, "block_n": (STRIP,),
        "block_k": (512, 768, 1024, 1280, 1536, 1792, 1920, 2048, 2304, 2560, 2816, 3072, 4096, 5376),
        "warps_k": (4, 8, 12, 14, 16), "num_stages": (2, 3, 4, 5, 6, 7, 9), "split_k": (1, 2, 3, 4, 6, 8, 11),
        "prefetch_stages": (0, 1, 2)},
    "tma_mma": _FIXED | {
        "block_n": (STRIP,), "block_k": (256, 384, 512, 768, 1024, 1280, 1536, 2048, 2304, 3072),
        "warps_k": (4, 8, 12, 14, 16), "num_stages": (2, 3, 4, 5, 6, 7, 9), "split_k": (1, 2, 3, 4, 6, 8, 11),
        "prefetch_stages": (0, 1, 2)},
    "tma_block": _FIXED | {
        "block_m": STREAM_BLOCK_M[1:], "block_n": (STRIP,), "split_k": (1, 2, 3, 4, 6, 8, 11),
        "block_k": (768, 896, 1024, 1280, 1344, 1536, 1792, 1920, 2048, 2560, 2688), "warps_k": (8, 10, 12, 14),
        "num_stages": (2, 3, 4, 5, 6, 7, 8, 10, 11, 12), "prefetch_stages": (0, 1, 2, 3, 4),
        "cap_inflight": (False, True)},
    "wgmma_ws": _FIXED | {
        "block_m": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256), "block_n": (128, 192, 256),
        "block_k": (64, 128, 256), "warp_n": (16,), "num_stages": (3, 4, 5, 6, 8, 10, 12), "blocks_per_sm": (0, 1, 2),
        "cluster": (1, 2), "l2_prefetch_stages": (0, 4, 8), "prefetch_stages": _prefetch_stages},
}  # fmt: skip


def require_matrix(n: int, k: int, group_size: int, dtype: str, weights: str = "int4") -> None:
    """Raises ProblemError unless a W of n x k can be packed in groups of group_size."""
    require(weights in WEIGHTS, f"weights={weights} is not one of {', '.join(WEIGHTS)}")
    sizes = GROUP_SIZES if weights == "int4" else (*((16,) if WEIGHTS[weights].bits == 8 else ()), *GROUP_SIZES, k)
    require(group_size in sizes, f"group_size={group_size} is not one of {sizes}")
    require_dtypes(dtype)
    require(n >= STRIP and n % STRIP == 0, f"n={n} is not a positive multiple of {STRIP}: pad the rows of W with zeros")
    require(k >= group_size and k % group_size == 0, f"k={k} is not a positive multiple of group_size={group_size}")
    require(k % STRIP == 0, f"k={k} is not a multiple of {STRIP}")


def matrix_bytes(n: int, k: int, group_size: int) -> int:
    """Of one W in int4, and its scales."""
    return n * k // 2 + n * (k // group_size) * 2
