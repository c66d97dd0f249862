"""What one configuration of dense_gemv moves and executes, for the cost model."""

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
    num_turns,
    workspace_bytes,
)
from kerngen.templates.kernel import Traffic


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Each row tile reads x once, from L1 where an SM's other warps have read it: L2 sees it once a block.

    cuda_ops: a step of a warp takes about 12 instructions for its loads and addresses, and each product about 4 slots
    with its operands. A tile is one step of the model's: there the warps meet.
    """
    p, c = problem, config
    tiles = num_tiles(p, c)
    (launch,) = launches(p, c, target)
    steps = tiles * c.warps_n * c.row_tiles * -(-p.k // COLUMNS)
    token_tiles = c.block_m // TOKENS
    flops = 2 * steps * ROWS * COLUMNS * c.block_m
    blocks = launch.grid[0]
    x_bytes = blocks * p.num_tokens * p.k * 2 // c.split_k
    turns = num_turns(p, c) * -(-tiles * c.split_k // blocks)
    return Traffic(
        cost(p).bytes,
        flops,
        l2_bytes=cost(p).bytes + x_bytes + 2 * workspace_bytes(p, c, target),
        cuda_ops=32 * steps * (12 + 8 * token_tiles),
        bytes_in_flight=c.warps_n * c.warps_k * c.steps * c.row_tiles * STEP_BYTES,
        steps=turns + (16 if c.split_k > 1 else 0),
    )
