"""Bytes and instructions of W4A16 kernels under a Tiling, for the cost model: w4a16_gemm's and moe_w4a16's products."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from kerngen.arch import Arch, Target
from kerngen.templates.common.w4 import limits
from kerngen.templates.common.w4.tiling import STRIP, Packing, Tiling
from kerngen.templates.kernel import Traffic

# Instructions of a lane, from the SASS of the sm90 bodies, rounded. For 8 weights, by bits: out of their codes and
# times their scales in bf16, and in fp16; of nibbles in bf16 there is no exponent trick to spare the subtraction.
# Without both where the products are scaled (BIASED). As integers, their product included. For a stage: its barrier and
# addresses, and each 16 bytes copied. For a turn of gemv and stream.
UNPACK, UNPACK_FP16 = {4: 18, 8: 22}, {4: 14, 8: 13}
UNPACK_BIASED, UNPACK_BIASED_FP16 = {4: 11, 8: 17}, {4: 14, 8: 11}
MINIMA_OPS, GROUP_OPS = (1, 3), (1, 3)  # more for minima, and for two groups in a tile; where products are scaled
AS_INTEGERS = {1: 6, 2: 11, 4: 9}  # and multiplied, by tokens of a tile (x_registers.cuh; 2: of data/recorded alone)
STAGE_OPS, COPY_OPS, TURN_OPS = 40, 4, 40
SLOTS_PER_MMA = 2  # of a scheduler: a tensor instruction, and the loads of its operands
WAITS_A_TILE = 0.25, 0.5  # of a warp with stream, for the digits of x; and if it has many (limits.stream_has_many)
LEAST_COLUMNS = 32  # a wgmma of fewer tokens takes as long
LINE_BYTES = 128  # a load takes a clock of L1 for each line that it touches
MEETING_WAITS = 2  # partial sums out, and the count of who arrived; then come the others' partial sums
# Of warpgroups, and where warps beside them add up sums: waits of a tile's end; of sums posted and received; and for
# each 1024 sums of a tile, without helpers more by the parts that it has (regressions of 4,100 times of an H200).
WAVE_WAITS, POSTED_WAITS, SUM_WAITS, WAITS_BY_PARTS = (3.4, 6.8), (10, 3), (0.58, 1.64), (0.85, 0)
PARTS_AHEAD, WIDE_PARTS_AHEAD = 16, 4  # of 16 bytes, that the last to arrive loads at once (gemm.cuh, FLIGHT)


@dataclass(frozen=True, slots=True)
class Product:
    """out[rows, n] = x[rows, k] W^T, of one W or, where row_tiles says into how many tiles the rows fall, of several.

    dram_bytes: what the launch has to read and write of memory. gated: out has n / 2 columns.
    """

    n: int
    k: int
    packing: Packing
    dtype: str
    rows: int
    row_tiles: int
    dram_bytes: int
    gated: bool

    @property
    def tile_rows(self) -> int:
        """Of x in a tile, on average."""
        return -(-self.rows // self.row_tiles)

    @property
    def out_bytes(self) -> int:
        return 2 * self.rows * self.n // (2 if self.gated else 1)


def traffic(p: Product, c: Tiling, target: Target, blocks: int) -> Traffic:
    """Of a launch of `blocks` blocks that have something to do.

    What is fitted tells bodies apart, the tokens of their tiles, and their warps along K (of wgmma_ws: blocks an SM);
    and of gemv and stream whether all of a warp's part is in flight at once.
    """
    return _register_traffic(p, c, target.arch) if c.few_tokens else _staged(p, c, target.arch, blocks)


def _unpack_ops(weights: int, p: Product, products_scaled: bool) -> int:
    if products_scaled:
        by_eight = (UNPACK_BIASED if p.dtype == "bf16" else UNPACK_BIASED_FP16)[p.packing.bits]
    else:
        by_eight = (UNPACK if p.dtype == "bf16" else UNPACK_FP16)[p.packing.bits]
    by_eight += p.packing.has_minima * MINIMA_OPS[products_scaled]
    by_eight += (p.packing.tile_groups - 1) * GROUP_OPS[products_scaled]
    return weights * by_eight // 8


def _staged(p: Product, c: Tiling, arch: Arch, blocks: int) -> Traffic:
    """Bodies with stages (cp.async). Tiles read W once for each row of tiles and x once for each column, through L2.

    Blocks have equal shares. The last to arrive at a tile that several of them share adds up their sums: `parts` of
    them, of which a thread has `quads` quads each.
    """
    tiles = p.row_tiles * -(-p.n // c.block_n)
    tile_stages = -(-p.k // c.block_k)
    stages = tiles * tile_stages
    w_stage, x_stage = c.weight_bytes(p.packing), c.block_m * c.block_k * 2
    tile_rows = min(c.block_m, p.tile_rows)
    columns = -(-p.n // (c.block_n * c.cluster))  # of tiles, whose blocks share what they read of x
    copied = stages * w_stage + columns * p.rows * p.k * 2  # rows beyond the last are not read
    flops = 2 * stages * c.block_m * c.block_n * c.block_k
    if c.body in ("wgmma", "wgmma_ws"):  # 64 rows of W at a time read the tokens
        read = stages * (w_stage + x_stage * (c.block_n // 64))
        flops = flops * max(c.block_m, LEAST_COLUMNS) // c.block_m
        mma_ops = 0
    else:
        read = stages * (w_stage * c.warps_m + x_stage * (c.block_n // c.warp_n))
        mma_ops = _mma_ops(flops, arch)
    weights = stages * c.block_n * c.block_k * c.warps_m
    unpack = _unpack_ops(weights, p, products_scaled=c.block_m // c.warps_m == 8 and arch.has_ldmatrix)
    # a prefetch into L2 costs little, and gains nothing here
    overhead = stages * 32 * (c.num_warps * STAGE_OPS + c.l2_prefetch_stages)
    if c.body != "wgmma_ws":  # whose copies are in bulk
        overhead += stages * ((w_stage + x_stage) // 16 * COPY_OPS)
    waits, shared, rest = 0.0, 0, tiles % blocks
    if c.body == "wgmma_ws":
        waits = WAVE_WAITS[c.overlaps_reduce] * (max(1, tiles // blocks) if c.blocks_per_sm else 1)
    if c.blocks_per_sm and rest:
        parts = min(-(-tile_stages // max(1, stages // blocks)) + 1, tile_stages)
        quads = c.warp_n * (c.block_m // c.warps_m) // 128
        if c.body == "wgmma_ws":  # of the last wave alone
            of_parts = 1 + WAITS_BY_PARTS[c.overlaps_reduce] * log(blocks / rest)
            waits += POSTED_WAITS[c.overlaps_reduce]
            waits += SUM_WAITS[c.overlaps_reduce] / 1024 * c.block_m * c.block_n * of_parts
            shared = 6 * blocks * c.block_m * c.block_n * 4  # and zero again
        else:
            waits = MEETING_WAITS + -(-parts * quads // (PARTS_AHEAD if quads < 32 else WIDE_PARTS_AHEAD))
            shared = 4 * blocks * tile_rows * c.block_n * 4  # of two tiles each, out and back
    ahead = c.num_stages - (2 if c.body == "wgmma" else 1) if arch.has_cp_async else 1
    way = "overlap" if c.overlaps_reduce else c.blocks_per_sm if c.body == "wgmma_ws" else f"{c.block_n}x{c.warps_k}"
    return Traffic(
        p.dram_bytes,
        flops,
        l2_bytes=copied + p.out_bytes + shared,
        smem_bytes=copied + read,
        cuda_ops=unpack + mma_ops + overhead,
        bytes_in_flight=ahead * (w_stage + tile_rows * c.block_k * 2),
        copies=arch.has_cp_async,
        tensor="wgmma" if c.body in ("wgmma", "wgmma_ws") else "mma",
        units=blocks,
        joins=-(-stages // blocks) / tile_stages if c.warps_k > 1 else 0,
        join_bytes=2 * (c.warps_k - 1) * tiles * c.block_m * c.block_n * 4,
        waits=waits,
        fit=f"{c.body}_{c.block_m}_{way}",
    )


def _register_traffic(p: Product, c: Tiling, arch: Arch) -> Traffic:
    """gemv and tma_*: a block's warps synchronise only at a tile's end.

    What is on its way early (prefetch_stages, cap_inflight) and who shares stages is no part: of those that differ in
    that alone the first stands.

    gemv's lanes load x four bytes at a time, each warp for itself, and a load touches a line for each row.
    """
    tiles = p.row_tiles * -(-p.n // c.block_n)
    units = tiles * c.split_k
    turns = -(-p.k // (c.block_k * c.split_k))
    turn = c.weight_bytes(p.packing)
    moved = p.row_tiles * p.packing.bytes_of(p.n, p.k)
    weights = units * turns * c.block_n * c.block_k
    sums = units * c.block_m * c.block_n * 4
    ops = units * turns * 32 * c.num_warps * TURN_OPS
    flops, waits = 0, MEETING_WAITS + 1.0 if c.shares_tiles else 0.0
    if c.has_limbs:
        ops += weights * AS_INTEGERS[c.block_m] // 8
        tiles_a_warp = limits.stream_tiles(c, p.k, p.packing.group_size)
        waits += WAITS_A_TILE[limits.stream_has_many(c, tiles_a_warp)] * tiles_a_warp
    else:
        flops = 2 * c.block_m * weights
        ops += _unpack_ops(weights, p, products_scaled=True) + _mma_ops(flops, arch)
    lines = weights // (STRIP * c.warp_n) * 4 * min(p.tile_rows, c.block_m)  # of gemv's x
    smem_bytes = 2 * moved if c.stream else lines * LINE_BYTES
    way = "_loop" if c.body == "gemv" and c.blocks_per_sm else "_once" if turns == 1 else ""
    return Traffic(
        p.dram_bytes,
        flops,
        l2_bytes=moved + tiles * p.tile_rows * p.k * 2 + p.out_bytes + (2 * sums if c.shares_tiles else 0),
        smem_bytes=smem_bytes,
        cuda_ops=ops,
        bytes_in_flight=turn * c.num_stages,
        copies=c.stream,
        units=units,
        joins=1 if c.warps_k > 1 else 0,
        join_bytes=2 * c.warps_k * sums if c.warps_k > 1 else 0,
        waits=waits,
        fit=f"{c.body}_{c.block_m}_{c.warps_k}{way}",
    )


def _mma_ops(flops: int, arch: Arch) -> int:
    """Of m16n8k16, or of the four m8n8k4 of a warp."""
    return SLOTS_PER_MMA * 32 * flops // (4096 if arch.has_ldmatrix else 2048)
