"""What one configuration of w4a16_gemm moves and executes, for the cost model."""

from __future__ import annotations

from kerngen.arch import Target
from kerngen.templates.kernel import Traffic
from kerngen.templates.w4a16_gemm.spec import Config, Problem, cost, num_blocks, workspace_bytes

# What a tile that blocks share adds at the end, as steps: partial sums out, a counter, the others' partial sums back.
MEETING_STEPS = 16


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Tiles read W once for each row of tiles and x once for each column, through L2; memory gives each byte once.

    cuda_ops: unpacking and scaling 8 weights takes about 14 instructions (20 for bf16, which has no exponent trick to
    spare the subtraction), in each of the warps_m warps that need them; a tensor instruction and the loads of its
    operands take about two slots of a scheduler.
    """
    if config.gemv or config.stream:
        return _straight(problem, config, target)
    p, c = problem, config
    tiles_m, tiles_n = -(-p.num_tokens // c.block_m), -(-p.n // c.block_n)
    stages = tiles_m * tiles_n * -(-p.k // c.block_k)
    stage = c.stage_bytes(p.group_size)
    x_stage = c.block_m * c.block_k * 2
    w_stage = stage - x_stage
    tokens = min(p.num_tokens, tiles_m * c.block_m)
    copied = stages * w_stage + tiles_n * tokens * p.k * 2  # tokens beyond the last are not read
    warps_n = c.block_n // c.warp_n
    read = stages * (w_stage * c.warps_m + x_stage * warps_n)
    flops = 2 * stages * c.block_m * c.block_n * c.block_k
    weights = stages * c.block_n * c.block_k * c.warps_m
    per_mma = 4096 if target.arch.has_ldmatrix else 2048  # flops of m16n8k16, and of the four m8n8k4 of a warp
    ops = weights * (20 if p.dtype == "bf16" else 14) // 8 + 2 * 32 * flops // per_mma
    shared = 0 if c.blocks_per_sm == 0 else 2 * num_blocks(p, c, target) * c.block_m * c.block_n * 4
    ahead = c.num_stages - 1 if target.arch.has_cp_async else 1
    return Traffic(
        cost(p).bytes,
        flops,
        l2_bytes=copied + 2 * p.num_tokens * p.n + shared,
        smem_bytes=copied + read,
        cuda_ops=ops,
        bytes_in_flight=ahead * (stage if p.num_tokens >= c.block_m else w_stage),
        steps=-(-stages // num_blocks(p, c, target)) + (MEETING_STEPS if shared else 0),
    )


def _straight(problem: Problem, config: Config, target: Target) -> Traffic:
    """Without stages, or a ring for each warp: a block's warps wait for each other at its end alone.

    cuda_ops: as integers, unpacking and scaling 8 weights takes about 11 instructions, their products included.
    """
    p, c = problem, config
    tiles = -(-p.n // c.block_n)
    turns = -(-p.k // (c.block_k * c.split_k))
    turn = c.weight_bytes(p.group_size)
    moved = tiles * c.split_k * turns * turn
    flops = 2 * 8 * tiles * c.block_n * c.split_k * turns * c.block_k
    weights = tiles * c.block_n * c.split_k * turns * c.block_k
    shared = 2 * workspace_bytes(p, c, target)
    rounds = -(-tiles * c.split_k // num_blocks(p, c, target))
    return Traffic(
        cost(p).bytes,
        flops,
        l2_bytes=moved + tiles * p.num_tokens * p.k * 2 + 2 * p.num_tokens * p.n + shared,
        smem_bytes=2 * (moved if c.stream else num_blocks(p, c, target) * rounds * c.smem_bytes(p.group_size)),
        cuda_ops=weights * 11 // 8 if c.stream else weights * (20 if p.dtype == "bf16" else 14) // 8 + flops // 64,
        bytes_in_flight=turn * c.num_stages,
        steps=rounds + (MEETING_STEPS if shared else 0),
    )
