"""What one configuration of attn_decode moves and executes, for the cost model."""

from __future__ import annotations

from kerngen.arch import Arch
from kerngen.templates.attn_decode.spec import Config, Problem, cost, workspace_bytes
from kerngen.templates.kernel import Traffic


def traffic(problem: Problem, config: Config, arch: Arch) -> list[Traffic]:
    """KV is read once for each block of rows, the first time from memory; a split reads whole tiles.

    The grid is as long as its longest split: with fewer tiles than teams, warps wait. cuda_ops: a score takes about 12
    instructions, a tensor instruction and its operands about two slots of a scheduler.
    """
    p, c = problem, config
    teams, m_blocks = c.num_warps // c.split_d, -(-p.rows // c.block_m)
    tiles = -(-max(p.visible, 1) // c.block_n)
    per_split = -(-tiles // c.num_splits)
    turns = -(-per_split // teams)  # tiles that the busiest team of a split works through
    heads = p.batch * p.num_kv_heads
    kv_row = p.head_dim * 2 * 2  # K and V
    read = heads * min(tiles, per_split * c.num_splits) * c.block_n * kv_row
    worked = heads * c.num_splits * turns * teams * c.block_n  # rows of KV, idle teams counted as working
    idle = worked * kv_row / max(read, 1)  # at least 1: what waiting costs
    flops = 4 * m_blocks * c.block_m * worked * p.head_dim
    if arch.has_cp_async:
        in_flight = teams * (c.num_stages - 0.5) * c.block_n * p.head_dim * 2
        smem = worked * kv_row * m_blocks * 2
    elif arch.has_ldmatrix:
        in_flight = teams * 0.5 * c.block_n * p.head_dim * 2
        smem = worked * kv_row * m_blocks * 2
    else:  # batches of four 16-byte loads a lane, straight to registers
        in_flight = c.num_warps * (c.num_stages - 0.5) * 32 * 4 * 16
        smem = 0
    scores = worked * m_blocks * c.block_m * c.split_d
    partials = workspace_bytes(p, c, arch)
    main = Traffic(
        int(cost(p).bytes * idle),
        flops,
        l2_bytes=int(read * idle) * m_blocks + partials,
        smem_bytes=smem,
        cuda_ops=12 * scores + 2 * 32 * flops // (4096 if arch.has_ldmatrix else 2048),
        bytes_in_flight=int(in_flight),
    )
    if not partials:
        return [main]
    out = p.batch * p.q_len * p.num_q_heads * p.head_dim * 2
    return [main, Traffic(out, 0, l2_bytes=partials + out, cuda_ops=partials)]
