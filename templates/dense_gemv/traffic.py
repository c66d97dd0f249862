"""Bytes and instructions of one configuration of dense_gemv, for the cost model."""

from __future__ import annotations

from kerngen.arch import Target
from kerngen.templates.dense_gemv.spec import (
    COLUMNS,
    ROWS,
    STEP_BYTES,
    TOKENS,
    Config,
    Problem,
    cost,
    launches,
    num_tiles,
    smem_bytes,
    workspace_bytes,
)
from kerngen.templates.kernel import Traffic

LINE_BYTES = 128  # a load takes a clock of L1 for each line that it touches
W_LINES = 16  # of a step: two loads of 64 bytes of each of 8 rows
MEETING_WAITS, PARTS_AHEAD = 5, 4  # partial sums out and the count of who arrived; of the others', loaded at once
MEETING_JOINS = 3  # of warps that share rows: sums out, a barrier, and sums in


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Each row tile reads x once, from L1 where an SM's other warps have read it: L2 sees it once a block.

    cuda_ops: a step of a warp takes 56 slots for its loads and addresses, and each product 12 with its operands.
    bytes_in_flight: two steps of a warp more than it has loads for, as good as that: their lines were fetched with
    their neighbours'.
    """
    p, c = problem, config
    tiles = num_tiles(p, c)
    (launch,) = launches(p, c, target)
    steps = tiles * c.warps_n * c.row_tiles * -(-p.k // COLUMNS)
    token_tiles = c.block_m // TOKENS
    flops = 2 * steps * ROWS * COLUMNS * c.block_m
    blocks = launch.grid[0]
    x_bytes = blocks * p.num_tokens * p.k * 2 // c.split_k
    return Traffic(
        cost(p).bytes,
        flops,
        l2_bytes=cost(p).bytes + x_bytes + 2 * workspace_bytes(p, c, target),
        cuda_ops=32 * steps * (56 + 12 * token_tiles),
        bytes_in_flight=c.warps_n * c.warps_k * (c.unroll + 2) * c.row_tiles * STEP_BYTES,
        smem_bytes=steps * (W_LINES + token_tiles * min(p.num_tokens, TOKENS)) * LINE_BYTES,
        joins=MEETING_JOINS if c.warps_k > 1 else 0,
        join_bytes=2 * tiles * c.split_k * (smem_bytes(p, c, target) // (1 + c.persistent)),
        units=tiles * c.split_k,
        waits=MEETING_WAITS + -(-c.split_k // PARTS_AHEAD) if c.split_k > 1 else 0,
    )
