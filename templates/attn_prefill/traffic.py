"""Bytes and instructions of one configuration of attn_prefill, for the cost model."""

from __future__ import annotations

from kerngen.arch import Target
from kerngen.templates.attn_prefill.spec import (
    CHUNK_BYTES,
    Config,
    Problem,
    box_rows,
    cost,
    num_splits,
    visible_pairs,
)
from kerngen.templates.kernel import Traffic

# Clocks that a tile takes a warp however idle its SM is: a product that waits for the one before it along head_dim (an
# mma.sync's latency), the softmax and two barriers, and, where warps share rows, their exchange and its barrier.
MMA_CLOCKS, SOFTMAX_CLOCKS, EXCHANGE_CLOCKS = 33, 500, 250
# A warpgroup's product of 64 rows takes a clock for so many of columns times depth (PTX ISA: m64nNk16, full rate).
WGMMA_PER_CLOCK = 32
BOX_CLOCKS, BOX_COLUMNS = 24, 64  # of a producer warp for each TMA box of so many columns
WAITS = 3  # of a block: which rows, which pages, the first keys


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Every block walks over the tiles of keys that its rows see, and reads them through L2.

    The tiles at the ends of its range are partly unseen: half a tile of keys, and half the queries of the block, at the
    diagonal, and again at the far end of a window. cuda_ops: a score takes about 12 instructions, a tensor instruction
    and its operands about two slots of a scheduler. clocks: of the longest block; where an SM has up to two, nothing
    makes up for that it sees more keys than others do. Parts of the keys are blocks of their own; what merges them is
    the second launch, which reads what they leave.
    """
    p, c, splits = problem, config, num_splits(problem, config, target)
    group = p.num_q_heads // p.num_kv_heads
    queries = p.num_tokens // max(p.batch, 1)
    blocks = p.batch * p.num_kv_heads * -(-queries * group // c.block_m) * splits
    ends = 1 + (0 < p.window < p.kv_len)
    waste = ends * (c.block_n + min(c.block_m // group, queries)) // 2 if p.causal or p.window else c.block_n // 2
    rows = p.batch * p.num_q_heads * queries
    pairs = p.num_q_heads * visible_pairs(p) + rows * waste
    pairs = pairs * blocks * c.block_m // max(rows * splits, 1)  # a block multiplies rows that it does not have
    pairs = max(pairs, blocks * c.block_m * c.block_n)  # a block works on one tile at least
    tiles = -(-pairs // (c.block_m * c.block_n))
    longest = -(-min(p.kv_len, (p.window or p.kv_len) + c.block_m // group) // c.block_n) or 1  # of all parts
    longest = -(-longest // splits)
    flops = 4 * p.head_dim * tiles * c.block_m * c.block_n
    kv_tile = 2 * c.block_n * p.head_dim * 2
    q_tile = c.block_m * p.head_dim * 2
    if c.wgmma:  # one product's time is the other's softmax'; rows and columns come from shared memory
        readers, q_read = c.block_m // 64, q_tile
        exchange = 2 * c.block_m * c.block_n * 2 if c.warps_d > 1 else 0
        product = c.block_n * p.head_dim // WGMMA_PER_CLOCK
        tile_clocks = (
            product + max(product, SOFTMAX_CLOCKS)
        ) // c.warps_d  # who share the scores of tiles, and columns
        if rows_of_box := box_rows(p, c):
            tile_clocks += 2 * (c.block_n // rows_of_box) * (p.head_dim // BOX_COLUMNS) * BOX_CLOCKS
        instructions = 0
    else:
        readers, q_read = c.num_warps // c.warps_d, 0 if c.q_in_regs else q_tile * c.warps_d
        exchange = c.block_m * c.block_n * 2 * (1 + c.warps_d) if c.warps_d > 1 else 0
        chain = p.head_dim // c.warps_d // (16 if target.arch.has_mma16816 else 8)
        tile_clocks = chain * MMA_CLOCKS + SOFTMAX_CLOCKS + (EXCHANGE_CLOCKS if c.warps_d > 1 else 0)
        instructions = 2 * 32 * flops // (4096 if target.arch.has_ldmatrix else 2048)
    tiles_ahead = 2 * c.num_stages - 1 if target.arch.has_cp_async else 1
    in_flight = tiles_ahead * c.block_n * p.head_dim * 2
    if c.wgmma and c.warps_d > 1:  # what two rings of chunks hold beside those in use
        in_flight = 2 * (c.num_stages - 3) * CHUNK_BYTES
    elif c.wgmma:  # a place is free when its product is done, and the next waits for it
        in_flight -= kv_tile // 4
    return Traffic(
        cost(p).bytes,
        flops,
        l2_bytes=tiles * kv_tile // c.cluster + 2 * rows * p.head_dim * 2,
        smem_bytes=tiles * (kv_tile * (1 + readers) + q_read + exchange),
        cuda_ops=12 * tiles * c.block_m * c.block_n + instructions,
        bytes_in_flight=in_flight,
        clocks=longest * tile_clocks,
        units=min(-(-tiles // longest), blocks) if blocks <= 2 * target.device.num_sms else blocks,
        waits=WAITS,
        copies=target.arch.has_cp_async,
        tensor="roles" if c.wgmma else "mma",
    )
