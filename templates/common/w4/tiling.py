"""Tilings of W4A16 kernels and the resources they need, shared by the specs of w4a16_gemm and moe_w4a16.

Swap-AB: weights are the tensor core's A operand (in strips, n-tiles of 32 rows), tokens its 8 columns, so one token
costs no more MMAs than eight. The units of work are block_k columns of a tile. Either each block has one tile, or all
blocks have equal shares of all units (stream-K); wgmma_ws splits only the partial wave and processes the other tiles
whole. Partial sums of a shared tile go through the workspace, in fp32, and are added in the order of the blocks. Device
code: gemm.cuh; for few tokens gemv.cuh, warp_pipeline.cuh and cta_pipeline.cuh, whose blocks share a tile by split_k
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from kerngen.arch import Arch
from kerngen.errors import ProblemError
from kerngen.templates.common.rows.spec import DTYPES

STRIP = 32  # rows of W, and columns of K, in one packed tile: 512 bytes, 16 a lane
GROUP_SIZES = (32, 64, 128)
STREAM_BLOCK_M = (1, 4)  # tokens of a tile with stream (x_registers.cuh)
MOST_PAIRS = 6  # of tiles, whose limbs a warp keeps beside the start values of their sums: see stream_has_many
MOST_QUADS = 14  # the same with four tokens
X_SCRATCH_BYTES = 1024  # shared memory of a warp, for the layout change of four tokens
EXTRA_WARPS = 2  # of tma_block, beside the consumers: producer and reduction warp
MAX_PENDING_UNITS = 2  # whose sums may wait for the reduction warp


# What rows have in place of `body`, which were flags once (templates/kernel.py, defaults_of).
BODIES_AS_FILED = {
    "wgmma": {"wgmma": True},
    "gemv": {"gemv": True},
    "tma_warp": {"stream": True},
    "tma_block": {"stream": True, "shared_ring": True},
    "wgmma_ws": {"warpgroups": True},
}


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
    # mma: mma.sync, a cp.async pipeline.
    # wgmma: wgmma in place of mma.sync.
    # wgmma_ws: warp-specialised; each consumer warpgroup multiplies 64 rows of W by all tokens of a tile.
    # gemv: up to 8 tokens, W from memory straight to registers (gemv.cuh). block_k is what the warps of a tile have in
    #   flight, num_stages is 1, and blocks_per_sm blocks an SM loop over all tiles (0: each has its own).
    # tma_warp: up to four tokens, W by bulk copies into a pipeline of each warp (warp_pipeline.cuh). A tile is a strip,
    #   block_k is one stage of every warp, num_stages are a warp's.
    # tma_block: two to four tokens, one pipeline for all warps of a block, which a producer warp fills, one copy a
    # stage
    #   (cta_pipeline.cuh). block_k is one stage; num_stages and prefetch_stages are the block's.
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
    def wgmma(self) -> bool:
        return self.body == "wgmma"

    @property
    def gemv(self) -> bool:
        return self.body == "gemv"

    @property
    def stream(self) -> bool:
        """Whether W is loaded by bulk copies, into pipelines of warps or of a block."""
        return self.body in ("tma_warp", "tma_block")

    @property
    def cta_pipeline(self) -> bool:
        return self.body == "tma_block"

    @property
    def warpgroups(self) -> bool:
        return self.body == "wgmma_ws"

    @property
    def shares_tiles(self) -> bool:
        """Whether blocks exchange partial sums through the workspace."""
        return self.split_k > 1 if self.gemv or self.stream else self.blocks_per_sm > 0

    @property
    def num_warps(self) -> int:
        return self.block_n // self.warp_n * self.warps_m * self.warps_k

    @property
    def accumulators(self) -> int:
        """Of a thread, with mma and wgmma."""
        return self.warp_n * (self.block_m // self.warps_m) // 32

    @property
    def unit_bytes(self) -> int:
        """The sums of a tile."""
        return self.block_m * self.block_n * 4

    def weight_bytes(self, group_size: int) -> int:
        """Of W and its scales in block_k of a tile."""
        return self.block_n * self.block_k // 2 + self.block_n * max(1, self.block_k // group_size) * 2

    def stage_bytes(self, group_size: int) -> int:
        if self.stream:
            return self.weight_bytes(group_size)
        used = self.weight_bytes(group_size) + self.block_m * self.block_k * 2
        return -(-used // 1024) * 1024 if self.wgmma else used

    def smem_bytes(self, group_size: int) -> int:
        """The stages, and the exchange of the warps that split K. All dynamic.

        gemv: the exchange alone, double-buffered if a block has several tiles, and 16 bytes that say which block
        started last. tma_warp: the stages, a barrier each, and scratch for x of four tokens. tma_block: also the sums
        of pending units.
        """
        if self.cta_pipeline:
            places = self.num_stages + MAX_PENDING_UNITS  # two barriers and whose it is
            ring = -(-(self.num_stages * self.stage_bytes(group_size) + places * (16 + 4)) // 16) * 16
            ring += MAX_PENDING_UNITS * self.warps_k * self.unit_bytes
            return -(-ring // 128) * 128 + X_SCRATCH_BYTES * self.warps_k
        if self.stream:
            ring = -(-self.num_stages * (self.stage_bytes(group_size) + 8 * self.warps_k) // 16) * 16
            return ring + (X_SCRATCH_BYTES * self.warps_k if self.block_m > 1 else 0)
        if self.gemv:
            sums = self.warps_k * self.block_m * self.block_n * 4
            return 0 if self.warps_k == 1 else sums * (2 if self.blocks_per_sm else 1) + 16 * (self.split_k > 1)
        exchange = (self.warps_k - 1) * self.block_m * self.block_n * 4
        return self.num_stages * self.stage_bytes(group_size) + exchange

    def num_blocks(self, tiles: int, k: int, num_sms: int) -> int:
        """Of a launch that multiplies `tiles` tiles of K = k."""
        if self.blocks_per_sm == 0:
            return tiles * self.split_k
        if self.gemv or self.stream:
            return min(self.blocks_per_sm * num_sms, tiles * self.split_k)
        if self.warpgroups:  # whole clusters; units are of their tiles
            units = tiles // self.cluster * -(-k // self.block_k)
            resident = max(1, self.blocks_per_sm * num_sms // self.cluster)
            return self.cluster * min(resident, units)
        return min(self.blocks_per_sm * num_sms, tiles * -(-k // self.block_k))

    def partial_bytes(self, blocks: int) -> int:
        """An fp32 tile a block, two with warpgroups, one a unit with gemv and stream. 0 where no tile is shared."""
        return self.shares_tiles * blocks * (2 if self.warpgroups else 1) * self.unit_bytes


SPACE = {
    "block_m": (8, 16, 32, 64, 128, 256),
    "block_n": (64, 128, 256),
    "block_k": (32, 64, 128, 256, 512),
    "warp_n": (32, 64),
    "warps_m": (1, 2, 4),
    "warps_k": (1, 2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6, 8),
    "blocks_per_sm": (0, 1, 2, 3, 4),
}
# Four warps of a strip each, all tokens in every warp (_why_not_wgmma).
WGMMA_SPACE = SPACE | {
    "block_m": (8, 16, 32, 64, 128),
    "block_n": (128, 256),
    "block_k": (64, 128, 256, 512),
    "warp_n": (32,),
    "warps_m": (1,),
    "warps_k": (1,),
    "num_stages": (3, 4, 5, 6, 8),
}
# For few tokens: see Tiling.gemv.
GEMV_SPACE = {
    "block_m": (8,),
    "block_n": (32, 64, 128),
    "block_k": (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096),
    "warp_n": (32, 64),
    "warps_m": (1,),
    "warps_k": (1, 2, 4, 8, 16),
    "num_stages": (1,),
    "blocks_per_sm": (0, 2, 3),
    "split_k": (1, 2, 3, 4, 6, 8),
}
# For few tokens: see Tiling.stream.
STREAM_SPACE = {
    "block_m": STREAM_BLOCK_M,
    "block_n": (STRIP,),
    "block_k": (512, 768, 1024, 1280, 1536, 1792, 1920, 2048, 2304, 2560, 2816, 3072, 4096, 5376),
    "warp_n": (STRIP,),
    "warps_m": (1,),
    "warps_k": (8, 12, 14, 16),
    "num_stages": (2, 3, 4, 5, 6, 7, 9),
    "blocks_per_sm": (1,),
    "split_k": (1, 2, 3, 4, 6, 8, 11),
    "prefetch_stages": (0, 1, 2),
}
# See Tiling.cta_pipeline.
BLOCK_STREAM_SPACE = STREAM_SPACE | {
    "block_m": STREAM_BLOCK_M[1:],
    "block_k": (768, 896, 1024, 1280, 1344, 1536, 1792, 1920, 2048, 2560, 2688),
    "warps_k": (8, 10, 12, 14),
    "num_stages": (3, 4, 5, 6, 7, 8, 10, 12),
    "prefetch_stages": (0, 1, 2, 3, 4),
    "cap_inflight": (False, True),
}


# See Tiling.warpgroups.
WARPGROUP_SPACE = {
    "block_m": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
    "block_n": (128, 192, 256, 384),
    "block_k": (64, 128, 256),
    "warp_n": (16,),
    "warps_m": (1,),
    "warps_k": (1,),
    "num_stages": (3, 4, 5, 6, 8, 10, 12),
    "blocks_per_sm": (0, 1, 2),
    "cluster": (1, 2),
    "l2_prefetch_stages": (0, 4, 8),
}


def require_matrix(n: int, k: int, group_size: int, dtype: str) -> None:
    """Raises ProblemError unless a W of n x k can be packed in groups of group_size."""
    if group_size not in GROUP_SIZES:
        raise ProblemError(f"group_size={group_size} is not one of {GROUP_SIZES}")
    if dtype not in DTYPES:
        raise ProblemError(f"dtype={dtype!r} is not one of: {', '.join(DTYPES)}")
    if n < STRIP or n % STRIP:
        raise ProblemError(f"n={n} is not a positive multiple of {STRIP}: pad the rows of W with zeros")
    if k < group_size or k % group_size:
        raise ProblemError(f"k={k} is not a positive multiple of group_size={group_size}")


def matrix_bytes(n: int, k: int, group_size: int) -> int:
    """Of one W and its scales."""
    return n * k // 2 + n * (k // group_size) * 2


def _why_not_wgmma(c: Tiling, arch: Arch) -> str | None:
    if not arch.has_wgmma:
        return f"body=wgmma: {arch} has no warpgroup products; body=mma serves every arch"
    if c.warp_n != STRIP or c.warps_m != 1 or c.warps_k != 1 or c.block_n % 128:
        return (f"wgmma takes four warps of {STRIP} rows and all tokens: warp_n={c.warp_n} warps_m={c.warps_m} "
                f"warps_k={c.warps_k} block_n={c.block_n} is not {STRIP}, 1, 1 and a multiple of 128")  # fmt: skip
    if c.block_m < 16:
        return f"block_m={c.block_m}: wgmma scales weights; tiles of 8 tokens scale mma.sync's products"
    if c.block_m > 128:
        return f"block_m={c.block_m}: a strip's two products of more than 128 tokens do not fit in registers"
    if c.block_k % 64 or c.num_stages < 3:
        return f"block_k={c.block_k} num_stages={c.num_stages}: wgmma needs a multiple of 64, and at least 3"
    return None


def why_not_gemv(c: Tiling, rows: int, k: int, arch: Arch) -> str | None:
    """As why_invalid where `gemv` is chosen: of tiles of at most `rows` rows of x, and K = k."""
    if c.l2_prefetch_stages:
        return f"l2_prefetch_stages={c.l2_prefetch_stages} is for body=wgmma_ws"
    if not arch.has_ldmatrix:
        return f"body=gemv: {arch}'s m8n8k4 has other operands; body=mma serves every arch"
    if c.block_m != 8 or rows > 8 or c.warps_m != 1 or c.num_stages != 1:
        return (f"gemv takes 8 rows of x at most, and no stages: rows={rows} block_m={c.block_m} warps_m={c.warps_m} "
                f"num_stages={c.num_stages} are not 8, 8, 1 and 1")  # fmt: skip
    if c.block_n % c.warp_n or c.warp_n % STRIP or c.block_k % (STRIP * c.warps_k):
        return (f"block_n={c.block_n} is not made of warps of warp_n={c.warp_n} rows, or block_k={c.block_k} not of "
                f"warps_k={c.warps_k} warps of a multiple of {STRIP}")  # fmt: skip
    if (c.block_k - STRIP * c.warps_k) * c.split_k >= k:
        return f"block_k={c.block_k} split_k={c.split_k}: a warp's last step lies beyond k={k}"
    if c.split_k > 1 and (c.warps_k == 1 or c.blocks_per_sm):
        return f"split_k={c.split_k} takes warps_k > 1 and blocks_per_sm=0, not {c.warps_k} and {c.blocks_per_sm}"
    if (warps := c.num_warps) > 32:
        return f"{warps} warps a block; at most 32"
    blocks = max(1, c.blocks_per_sm)
    available = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * warps * blocks) // 8 * 8)
    if (need := gemv_registers(c)) > available:
        return f"about {need} registers a thread; {warps} warps x {blocks} blocks an SM leave {available}"
    if warps * blocks > arch.max_warps_per_sm:
        return f"{warps} warps x {blocks} blocks an SM; {arch} holds {arch.max_warps_per_sm} warps"
    if (together := blocks * (c.smem_bytes(32) + arch.reserved_smem_bytes)) > min(arch.smem_per_sm, blocks * 49152):
        return f"{blocks} blocks an SM need {together:,} B; they have 48 KiB each, and {arch.smem_per_sm:,} B together"
    return None


def gemv_registers(c: Tiling) -> int:
    """Of a thread with gemv, about."""
    steps, strips = c.block_k // STRIP // c.warps_k, c.warp_n // STRIP
    return steps * (6 * strips + 4) + 8 * strips + 56


def why_not_stream(c: Tiling, rows: int, k: int, group_size: int, arch: Arch) -> str | None:
    """As why_invalid, for body=tma_warp and tma_block: `rows` rows of x, and K = k. Without shared memory."""
    if c.l2_prefetch_stages:
        return f"l2_prefetch_stages={c.l2_prefetch_stages} is for body=wgmma_ws"
    if not arch.has_tma:
        return f"body={c.body}: {arch} has no bulk copies; body=gemv serves up to 8 tokens from sm75 on"
    if c.block_m not in STREAM_BLOCK_M or rows > c.block_m or c.block_n != STRIP or c.warp_n != STRIP:
        return (f"body={c.body} takes block_n=warp_n={STRIP} and rows of x in a block_m of "
                f"{', '.join(map(str, STREAM_BLOCK_M))}: not rows={rows} block_m={c.block_m} block_n={c.block_n} "
                f"warp_n={c.warp_n}")  # fmt: skip
    if c.warps_m != 1:
        return f"body={c.body} goes with warps_m=1, not {c.warps_m}"
    if why := _why_not_prefetch_stages(c, arch):
        return why
    if c.warps_k < 2 or c.num_stages < 2 or c.blocks_per_sm < 1:
        return (f"warps_k={c.warps_k} num_stages={c.num_stages} blocks_per_sm={c.blocks_per_sm}: body={c.body} takes "
                "at least 2, 2 and 1")  # fmt: skip
    if c.cta_pipeline and (c.block_m == 1 or c.blocks_per_sm > 1):
        return (f"body=tma_block: a tile of several tokens in one block an SM, not block_m={c.block_m} "
                f"blocks_per_sm={c.blocks_per_sm}")  # fmt: skip
    if c.cap_inflight and not (c.cta_pipeline and c.prefetch_stages):
        return (f"cap_inflight=True is for body=tma_block with a limit, not {c.body} with "
                f"prefetch_stages={c.prefetch_stages}")  # fmt: skip
    step = stream_step(c, group_size)
    if c.block_k % (step * c.warps_k):
        return f"block_k={c.block_k} is no multiple of warps_k={c.warps_k} times a step of {step} columns"
    if (warps := stream_warps(c) * c.blocks_per_sm) > 16:
        return f"{warps} warps in {c.blocks_per_sm} blocks an SM; the registers serve 16"
    tiles = stream_tiles(c, k, group_size)
    stage, most = c.block_k // step // c.warps_k, tiles * STRIP // step
    if stage > most or k // step < c.split_k:
        return (f"block_k={c.block_k} split_k={c.split_k}: a part of k={k} has {most} steps a warp, a stage takes "
                f"{stage}")  # fmt: skip
    if c.cta_pipeline:
        available = arch.registers_of(32 * stream_warps(c))
    else:
        available = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * c.warps_k * stream_blocks(c)) // 8 * 8)
    if (need := stream_registers(c, tiles)) > available:
        return f"about {need} registers a thread for x of {tiles} tiles; {warps} warps an SM leave {available}"
    return None


def stream_step(c: Tiling, group_size: int) -> int:
    """Columns of a step with tma_*: those of scales that are shared, and for one token of two tiles."""
    return max(group_size, STRIP if c.block_m > 1 else 2 * STRIP)


def stream_registers(c: Tiling, tiles: int) -> int:
    """Registers of a thread with tma_*, about, if a warp has so many tiles of a strip's part."""
    many = stream_has_many(c, tiles)
    if c.cta_pipeline:
        return 52 + tiles * (3 if many else 6)
    if c.block_m > 1:
        return 60 + tiles * (2 if many else 6)
    pairs = ceil(tiles / 2)
    return 72 + 5 * pairs // 2 if many else 48 + 12 * pairs


def stream_warps(c: Tiling) -> int:
    """Of a block, with stream."""
    return c.warps_k + (EXTRA_WARPS if c.cta_pipeline else 0)


def stream_tiles(c: Tiling, k: int, group_size: int) -> int:
    """The most tiles of a strip's part of K = k that a warp has with tma_*."""
    step = stream_step(c, group_size)
    if c.cta_pipeline:
        steps, slot = ceil(ceil(k / step) / c.split_k), c.block_k // step
        full_slots = (steps - 1) // slot  # but for the last one
        return (full_slots * (slot // c.warps_k) + ceil((steps - full_slots * slot) / c.warps_k)) * step // STRIP
    return ceil(ceil(ceil(k / step) / c.split_k) / c.warps_k) * step // STRIP


def stream_has_many(c: Tiling, tiles: int) -> bool:
    """Whether a warp with so many keeps the digits of them alone (int_limbs_m1.cuh, int_limbs_m4.cuh)."""
    return tiles > MOST_QUADS if c.block_m > 1 else ceil(tiles / 2) > MOST_PAIRS


def stream_blocks(c: Tiling) -> int:
    """An SM, that have registers with stream: of up to eight warps as many again, which are the next launch's."""
    return c.blocks_per_sm * (1 if c.cta_pipeline or c.warps_k * c.blocks_per_sm > 8 else 2)


MANY_TOKENS = 128  # of a tile of warpgroups: from here on sums may be added up beside, and the last tile begins early
# Of a thread that copies and of one that multiplies, by the rows of a tile: 64 a warpgroup, and one that copies.
_REGISTERS = {128: (40, 232), 192: (32, 160), 256: (32, 112), 384: (24, 80)}
_REGISTERS_TWO_BLOCKS = 24, 104  # where two blocks of 128 rows share an SM
_REGISTERS_OVERLAPPED = 72, 216  # of 128 rows, where some of those that copy add up sums


def warpgroup_registers(c: Tiling) -> tuple[int, int]:
    """What setmaxnreg gives a thread that copies, and one that multiplies."""
    if overlaps_reduce(c):
        return _REGISTERS_OVERLAPPED
    return _REGISTERS_TWO_BLOCKS if c.blocks_per_sm == 2 else _REGISTERS[c.block_n]


def overlaps_reduce(c: Tiling) -> bool:
    """Whether warps beside those that multiply add up the sums of shared tiles, for which there must be registers."""
    return c.blocks_per_sm == 1 and c.block_n == 128 and c.block_m >= MANY_TOKENS


def why_not_warpgroups(c: Tiling, k: int, group_size: int, arch: Arch) -> str | None:
    """As why_invalid where `warpgroups` is chosen. Without shared memory."""
    if not arch.has_wgmma:
        return f"body=wgmma_ws: {arch} has no wgmma; body=mma serves every arch"
    if c.block_m not in range(16, 257, 16) or c.block_n not in _REGISTERS or c.warp_n != 16:
        wants = f"a multiple of 16 tokens up to 256, {', '.join(map(str, _REGISTERS))} rows, and warp_n=16"
        return f"warpgroups takes {wants}, not block_m={c.block_m} block_n={c.block_n} warp_n={c.warp_n}"
    if c.blocks_per_sm == 2 and (c.block_n != 128 or c.cluster != 1):
        return (f"blocks_per_sm=2 block_n={c.block_n} cluster={c.cluster}: two blocks have registers for 128 rows "
                "each, and no cluster")  # fmt: skip
    # with few registers and several groups of 64 columns ptxas lets products wait for each other (C7510)
    sums, spare = c.block_m // 2, 60 if c.block_n == 384 and c.block_k > 64 else 44
    if sums + spare > (limit := warpgroup_registers(c)[1]):
        return f"block_m={c.block_m} is {sums} sums a thread; with {spare} for the rest that is over {limit}"
    if c.warps_m != 1 or c.warps_k != 1 or c.split_k != 1:
        return "body=wgmma_ws goes with warps_m, warps_k and split_k of 1"
    if not 0 <= c.l2_prefetch_stages <= 64:
        return f"l2_prefetch_stages={c.l2_prefetch_stages}: at most 64 stages may be prefetched into L2"
    if c.blocks_per_sm > 2 or c.cluster not in (1, 2) or c.num_stages < 3:
        return (f"blocks_per_sm={c.blocks_per_sm} cluster={c.cluster} num_stages={c.num_stages}: body=wgmma_ws takes "
                "at most 2, 1 or 2, and at least 3")  # fmt: skip
    if why := _why_not_prefetch_stages(c, arch):
        return why
    if c.block_k % 64 or k % c.block_k:
        return f"block_k={c.block_k} of k={k}: body=wgmma_ws takes whole stages of a multiple of 64"
    return _why_not_groups(c, group_size)


def _why_not_prefetch_stages(c: Tiling, arch: Arch) -> str | None:
    if c.prefetch_stages and not arch.has_pdl:
        return (f"prefetch_stages={c.prefetch_stages} is for launches that begin before others end, on sm90 and newer; "
                "prefetch_stages=0")  # fmt: skip
    if not 0 <= c.prefetch_stages < c.num_stages:
        return f"prefetch_stages={c.prefetch_stages}: fewer than num_stages={c.num_stages}, or 0 for all"
    return None


def _why_not_groups(c: Tiling, group_size: int) -> str | None:
    if c.block_k % group_size and group_size % c.block_k:
        return f"block_k={c.block_k}: a stage has whole groups of {group_size} columns, or lies in one"
    return None


def mma_registers(c: Tiling, group_size: int, arch: Arch) -> int:
    """Of a thread with mma and wgmma, at least: without cp.async also what is on its way to shared memory."""
    carried = 0 if arch.has_cp_async else 4 * -(-c.stage_bytes(group_size) // (512 * c.num_warps)) + 44
    return c.accumulators + carried + 56


def why_invalid(c: Tiling, group_size: int, arch: Arch) -> str | None:
    """Why no product with scales by `group_size` can be cut so on `arch`, or None. Without gemv, stream, warpgroups."""
    if c.warpgroups or c.cluster > 1 or c.l2_prefetch_stages:
        return (
            f"body={c.body} cluster={c.cluster} l2_prefetch_stages={c.l2_prefetch_stages}: only w4a16_gemm's wgmma_ws"
        )
    if c.split_k != 1:
        return f"split_k={c.split_k}: only gemv and tma_* use split_k; here blocks_per_sm splits K, and split_k is 1"
    if c.block_n % c.warp_n or c.warp_n % STRIP:
        return f"block_n={c.block_n} is not made of warps of warp_n={c.warp_n} rows, each a multiple of {STRIP}"
    if not arch.has_ldmatrix and c.warp_n != 64:
        return f"warp_n={c.warp_n}: with m8n8k4 a lane of {arch} owns two of 64 rows"
    if c.wgmma and (why := _why_not_wgmma(c, arch)):
        return why
    if why := _why_not_prefetch_stages(c, arch):
        return why
    if c.block_m % (8 * c.warps_m):
        return f"block_m={c.block_m} is not made of warps_m={c.warps_m} warps of a multiple of 8 tokens"
    if c.block_k % (STRIP * c.warps_k):
        return f"block_k={c.block_k} is not made of warps_k={c.warps_k} warps of a multiple of {STRIP}"
    if (warps := c.num_warps) > 16:
        return f"{warps} warps a block; 16 is the most that leaves 128 registers a thread"
    if c.accumulators > 128:
        return f"{c.accumulators} accumulators a thread (warp_n={c.warp_n} x {c.block_m // c.warps_m} tokens); 128 fit"
    blocks = max(1, c.blocks_per_sm)
    available = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * warps * blocks))
    if (need := mma_registers(c, group_size, arch)) > available:
        return (f"about {need} registers a thread, {c.accumulators} of them accumulators; {warps} warps x {blocks} "
                f"blocks an SM leave {available}")  # fmt: skip
    if warps * blocks > arch.max_warps_per_sm:
        return f"{warps} warps x {blocks} blocks an SM; {arch} holds {arch.max_warps_per_sm} warps"
    if not arch.has_cp_async and c.num_stages != 2:
        return f"num_stages={c.num_stages}: without cp.async, {arch} keeps 2 stages and one on its way in registers"
    if c.block_k % 64 and c.block_k != STRIP:
        return f"block_k={c.block_k}: x lies in blocks of 64 columns, or one of {STRIP}"
    if why := _why_not_groups(c, group_size):
        return why
    threads, strips = 32 * warps, c.block_n // STRIP
    scales = 4 * max(1, c.block_k // group_size)
    copied = (("weights", strips, c.block_k), ("scales", strips, scales), ("x", c.block_m, c.block_k // 8))
    for what, rows, row in copied:  # row: in chunks of 16 bytes
        if rows * row > threads and row % threads and threads % row:
            return (f"block_k={c.block_k}: {threads} threads copy rows of {row} chunks of {what}, and take whole rows "
                    "or equal shares of one")  # fmt: skip
    return arch.why_too_large(c.smem_bytes(group_size), blocks)
