"""Bytes and instructions of an attn_decode configuration, for the cost model. Counted from the bodies' loops."""

from __future__ import annotations

from math import ceil

from kerngen.arch import Target
from kerngen.templates.attn_decode.spec import (
    Config,
    Problem,
    combine_shape,
    cost,
    partials,
    workspace_bytes,
)
from kerngen.templates.attn_decode.wgmma_ws import (
    COMBINE_WARPS,
    TILE,
    fragment_combine,
    has_fragment_partials,
    max_inflight_stages,
    stage_bytes,
)
from kerngen.templates.kernel import Traffic

# Instructions of a lane for one score (scale, maximum, exponential, sum, conversion), for one row's reductions, and
# for one 16-byte copy with its address. From the SASS of the sm90 and sm70 bodies, rounded.
SCORE_OPS, ROW_OPS, COPY_OPS = 10, 20, 4
HEAD_OPS, TURN_OPS = 10, 15  # instructions for an element of a head's norm and RoPE, for an element's sine and cosine
# Clocks that a tile takes a warp however idle its SM is: a product that waits for the one before it along head_dim (an
# mma.sync's latency), the softmax with its reductions over lanes, and, where warps share a tile, their exchange.
MMA_CLOCKS, SOFTMAX_CLOCKS, EXCHANGE_CLOCKS = 33, 500, 100
# Of a block: kv_lens, the block table, the first keys, the teams' merge, twice; for 32 rows that it ends with; for each
# further head that a group of lanes makes, one after the other.
WAITS, ROWS_WAITS, HEAD_WAITS = 5, 3, {"mma": 3, "wgmma_ws": 4}
COMBINE_LOADS = 8  # 16-byte loads that a thread of the combine has under way
PRODUCT_CLOCKS = 48  # that a product by a warpgroup takes at least, its operands from shared memory
DSMEM_WAITS = 1  # where what a block merges is pushed to it
# Of the memory's rate: the part of an SM's share that nobody takes where it has no block, and the even shares that an
# SM takes at most where others have done their blocks.
IDLE_COSTS, MOST_SHARES = 0.2, 1.3
COMBINE_WAITS = 2  # where they read each other's: partial results to shared memory, and the others' from it


def traffic(problem: Problem, config: Config, target: Target) -> tuple[Traffic, ...]:
    """One Traffic for the decode launch and, with several partials of a row, one for the combine."""
    p, c, arch = problem, config, target.arch
    if c.warpgroups:
        return _wgmma_ws_traffic(p, c, target)
    dim, warps = p.head_dim // c.split_d, c.num_warps
    m_blocks = ceil(p.rows / c.block_m)
    streams = p.batch * p.num_kv_heads * m_blocks  # of keys, each through its own blocks
    tiles = streams * ceil(max(p.visible, 1) / c.block_n)
    tile_bytes = c.block_n * p.head_dim * 2 * 2  # K and V
    scores = c.block_n * c.block_m * 4
    # Through shared memory, a tile.
    if arch.has_ldmatrix:
        queries = c.block_m * p.head_dim * 2 if c.block_m // 8 * dim > 256 else 0
        moved = 2 * tile_bytes + queries
    else:
        moved = c.block_n // 8 * c.block_m * p.head_dim * 2 + c.split_d * c.block_m * c.block_n * 2 * 5
    if c.split_d > 1:
        dealt = arch.has_ldmatrix and c.block_m // 8 % c.split_d == 0
        moved += scores * c.split_d * (2 if dealt else 1 + c.split_d)
    # Instructions of a warp, a tile.
    q_tiles, k_tiles, d_tiles = c.block_m // 8, c.block_n // 16, dim // 16
    products = 2 * k_tiles * d_tiles * q_tiles * (1 if arch.has_mma16816 else 2)
    copies = tile_bytes // c.split_d // (16 * 32) * COPY_OPS
    softmax = k_tiles * q_tiles * 4 * SCORE_OPS + q_tiles * ROW_OPS
    warp_ops = products + copies + softmax + 2 * k_tiles * d_tiles
    # A block ends with its accumulators of every team through shared memory and back.
    blocks = streams * c.num_splits
    heads = 0 if p.source == "q" else min(c.block_m, p.rows) + (2 * p.q_len if p.owns_kv else 0)  # that it makes
    turns = 0 if p.source == "q" else p.q_len
    teams = warps // c.split_d
    merge = blocks * teams * c.block_m * p.head_dim * 4 * 2
    tile_clocks = (
        dim // (16 if arch.has_mma16816 else 8) * MMA_CLOCKS
        + SOFTMAX_CLOCKS
        + (EXCHANGE_CLOCKS if c.split_d > 1 else 0)
    )
    moved_on = workspace_bytes(p, c, target)
    least = cost(p).bytes
    decode = Traffic(
        dram_bytes=least,
        flops=tiles * 4 * c.block_m * c.block_n * p.head_dim,
        l2_bytes=least + (m_blocks - 1) * tiles // m_blocks * tile_bytes + moved_on,
        smem_bytes=tiles * moved,
        join_bytes=merge,
        cuda_ops=tiles * c.split_d * warp_ops * 32 + blocks * p.head_dim * (heads * HEAD_OPS + turns * TURN_OPS),
        bytes_in_flight=int(bytes_in_flight(p, c, target)),
        memory_share=_memory_share(blocks, target),
        copies=arch.has_cp_async,
        joins=1,
        waits=WAITS + _own_waits(p, c),
        clocks=ceil(ceil(tiles / blocks) / teams) * tile_clocks,
        fit=_fit(c),
    )
    return (decode,) if c.num_splits == 1 else (decode, _combine(p, c, moved_on))


def bytes_in_flight(p: Problem, c: Config, target: Target) -> float:
    """Bytes of KV of a block in flight, on average: a warp waits for one of its tiles and uses another."""
    dim = p.head_dim // c.split_d
    if c.warpgroups:  # two stages are in use
        return min(max(c.num_stages - 2, 1), max_inflight_stages(p, c)) * stage_bytes(p, c)
    if not target.arch.has_ldmatrix:
        return c.num_warps * (c.num_stages - 0.5) * 32 * 4 * 16  # batches of four 16-byte loads a lane
    return c.num_warps * max(c.num_stages - 0.5, 0.5) * c.block_n * dim * 2


def _combine(p: Problem, c: Config, moved: int) -> Traffic:
    slices, columns = combine_shape(p.head_dim, partials(c))
    in_flight = slices * columns * 16 * min(COMBINE_LOADS, ceil(partials(c) / slices))
    return Traffic(0, 0, l2_bytes=moved, cuda_ops=moved // 2, bytes_in_flight=in_flight, fit="combine")


def _wgmma_ws_traffic(p: Problem, c: Config, target: Target) -> tuple[Traffic, ...]:
    """Of wgmma_ws.cu.jinja: each warpgroup of a team makes all scores of a tile, and its columns of the output."""
    m_blocks, teams, sharing = ceil(p.rows / c.block_m), c.num_warps // c.split_d, c.split_d // 4
    streams = p.batch * p.num_kv_heads * m_blocks
    blocks, tiles = streams * c.num_splits, streams * ceil(max(p.visible, 1) / TILE)
    tile_bytes = TILE * p.head_dim * 2 * 2
    scores, outputs = p.head_dim // 16 * sharing, p.head_dim // 64 * (TILE // 16)  # products, of a tile
    operands = (TILE + c.block_m) * 16 * 2  # of a product, both from shared memory
    heads = 0 if p.source == "q" else min(c.block_m, p.rows) + (2 * p.q_len if p.owns_kv else 0)
    turns = 0 if p.source == "q" else p.q_len
    results = blocks * teams * c.block_m * p.head_dim * 4 * 2  # written to shared memory and read
    if c.partial_bits:
        pushed = 0 if has_fragment_partials(c) else blocks * min(c.block_m, p.rows) * p.head_dim * 2 * 2
        results = results * (teams > 1) + pushed
    moved_on, least = workspace_bytes(p, c, target), cost(p).bytes
    in_cluster = 0 if c.cluster == 1 else DSMEM_WAITS if c.partial_bits else COMBINE_WAITS
    decode = Traffic(
        dram_bytes=least,
        flops=tiles * (scores + outputs) * 2 * TILE * c.block_m * 16,
        l2_bytes=least + (m_blocks - 1) * tiles // m_blocks * tile_bytes + moved_on,
        smem_bytes=tiles * (tile_bytes + (scores + outputs) * operands) + results,
        cuda_ops=tiles * sharing * TILE * c.block_m * SCORE_OPS
        + blocks * p.head_dim * (heads * HEAD_OPS + turns * TURN_OPS),
        bytes_in_flight=int(bytes_in_flight(p, c, target)),
        memory_share=_memory_share(blocks, target),
        copies=True,
        tensor="roles",
        joins=1,
        waits=WAITS + _own_waits(p, c) + in_cluster,
        clocks=ceil(ceil(tiles / blocks) / teams) * ((scores + outputs) // sharing * PRODUCT_CLOCKS + SOFTMAX_CLOCKS),
        fit=_fit(c),
    )
    if partials(c) == 1:
        return (decode,)
    if not has_fragment_partials(c):
        return (decode, _combine(p, c, moved_on))
    _, _, _, _, lanes, span = fragment_combine(p, c)
    loads = ceil(c.num_splits * 8 / lanes) * (span * lanes // 32)  # of 16 bytes, of a lane for its part of a span
    in_flight = COMBINE_WARPS * 32 * 16 * min(COMBINE_LOADS, loads)
    return (decode, Traffic(0, 0, moved_on, cuda_ops=moved_on, bytes_in_flight=in_flight, fit="fragment_combine"))


def _memory_share(blocks: int, target: Target) -> float:
    on_sm = blocks / target.device.num_sms
    return 1 - IDLE_COSTS * (1 - on_sm) if on_sm <= 1 else min(1.0, MOST_SHARES * on_sm / ceil(on_sm))


def _own_waits(p: Problem, c: Config) -> float:
    """Of a block for its rows, and for the heads that it makes: rows of q, new keys and values, 16 elements a lane."""
    rows = min(c.block_m, p.rows)
    heads = 0 if p.source == "q" else rows + (2 * p.q_len if p.owns_kv else 0)
    groups = c.num_warps * 32 // (p.head_dim // 16)
    return ROWS_WAITS * rows / 32 + HEAD_WAITS[c.body] * max(ceil(heads / groups) - 1, 0)


def _fit(c: Config) -> str:
    """Which fitted constants hold of the decode launch."""
    if not c.warpgroups:
        return "mma"
    if c.cluster > 1:
        return "push" if c.partial_bits else "cluster"
    return "fragments" if c.partial_bits else "wgmma"
