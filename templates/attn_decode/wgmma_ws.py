"""Geometry of attn_decode's body=wgmma_ws: stages, registers, the receive buffer, and fragment partials."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kerngen.arch import Arch

if TYPE_CHECKING:
    from kerngen.templates.attn_decode.spec import Config, Problem

TILE = 64  # keys that a warpgroup multiplies at once
L2_PREFETCH_TILES = 8  # their 32 chunks' pages are known once the pipeline has been filled
FRAGMENT_BYTES_IN_FLIGHT = 80 * 1024  # of a block with fragment partials, once its pipeline has been filled
SPARE_REGS = 24  # of a thread, beside the accumulators and statistics of its warpgroup
PRODUCER_REGS = 32  # with setmaxnreg: of a thread of the producer warpgroup
UNIFORM_SPARE_REGS = 30  # without setmaxnreg: with 24 one of 300 builds spilled
# With fragment partials: warps of a block of attn_combine; its share of an SM's registers beside a block of attn_decode
# (1 / COMBINE_SHARE), for two of its blocks; above so many splits for one, whose weights take more.
COMBINE_WARPS, COMBINE_SHARE, FEW_FRAGMENT_SPLITS = 4, 4, 36


def has_fragment_partials(c: Config) -> bool:
    """Whether blocks store partials in fragment layout for attn_combine (fragment_partials.cuh.jinja)."""
    return c.partial_bits > 0 and c.cluster == 1


def stage_bytes(p: Problem, c: Config) -> int:
    """K of a tile takes k_column_parts stages, by columns, and V as many, by keys."""
    return TILE * p.head_dim * 2 // c.k_column_parts


def max_inflight_stages(p: Problem, c: Config) -> int:
    """The most stages in flight once all have been filled."""
    most = max(2, FRAGMENT_BYTES_IN_FLIGHT // stage_bytes(p, c)) if has_fragment_partials(c) else 64
    return min(c.num_stages, most)


def receive_buffer(p: Problem, c: Config) -> tuple[int, int]:
    """(columns of a pair of rows that one block of a cluster combines; bytes of the buffer for what is pushed to it:
    units and log-sum-exps of each block of the cluster, and an mbarrier).
    """
    columns = min(128, p.head_dim // c.cluster)
    if not c.partial_bits or c.cluster == 1:
        return columns, 0
    slots = ceil(ceil(min(c.block_m, p.rows) / 2) * (p.head_dim // columns) / c.cluster)
    return columns, slots * c.cluster * (4 * columns + 8) + 16


def fragment_combine(p: Problem, c: Config) -> tuple[int, int, int, int, int, int]:
    """How attn_combine reads fragment partials: blocks an SM; loads of a lane in flight; pairs of rows of a block;
    chunks of 128 bytes of a pair; lanes that combine a chunk, eight for every nine splits; and chunks of a pair that a
    warp combines at once, with few splits two or four times as many.
    """
    blocks, loads = (8, 9) if c.num_splits <= FEW_FRAGMENT_SPLITS else (6, 8)
    lanes, chunks = min(32, 8 << (ceil(c.num_splits / 9) - 1).bit_length()), p.head_dim // 32
    more = next(n for n in (4, 2, 1) if n == 1 or n * ceil(c.num_splits * 8 / lanes) <= loads)
    return blocks, loads, ceil(min(c.block_m, p.rows) / 2), chunks, lanes, min(32 // lanes * more, chunks)


def smem_bytes(p: Problem, c: Config) -> int:
    """Queries; the stages; each warpgroup's probabilities, or rotations before; new keys and values; the receive
    buffer; statistics; barriers.
    """
    row, warpgroups = p.head_dim * 2, c.num_warps // 4
    turns, new = 0 if p.source == "q" else p.q_len * row, 2 * p.q_len * row if p.owns_kv else 0
    stages, probabilities = c.num_stages * stage_bytes(p, c), warpgroups * c.block_m * TILE * 2
    stats = warpgroups * c.block_m * (4 + (4 if has_fragment_partials(c) else 0) + 1) * 4
    barriers = 8 * (c.num_stages * (c.num_warps // c.split_d + 1) + 1)
    return c.block_m * row + stages + max(probabilities, turns) + new + receive_buffer(p, c)[1] + stats + barriers


def registers_held(p: Problem, c: Config) -> int:
    """By a thread of a multiplying warpgroup: output, scores, probabilities and statistics of rows."""
    return p.head_dim * c.block_m * 4 // c.split_d // 128 + c.block_m // 2 + c.block_m // 4 + c.block_m // 2


def register_split(p: Problem, c: Config, arch: Arch) -> tuple[int, int, int, int]:
    """(blocks that an SM is to hold, warps beside num_warps, registers of a thread that multiplies, threads of
    __launch_bounds__). Two blocks where shared memory and registers allow that, or one, and those of attn_combine
    beside it. One warp copies, and all have the same registers. Where that is not enough they are dealt out to
    warpgroups by setmaxnreg, and the one that copies has a whole one. A block takes registers by four warps.
    """
    held, threads = registers_held(p, c), 32 * (c.num_warps + 4)

    def dealt(registers: int) -> int:  # of a consumer thread, if every thread starts with so many
        return min(232, (registers // 8 * 8 * (c.num_warps + 4) - 4 * PRODUCER_REGS) // c.num_warps // 8 * 8)

    two = 2 * (smem_bytes(p, c) + arch.reserved_smem_bytes) <= arch.smem_per_sm
    if has_fragment_partials(c) and not two:
        left = arch.regs_per_sm * (COMBINE_SHARE - 1) // COMBINE_SHARE // threads // 8 * 8
        if held + SPARE_REGS <= dealt(left):
            warps, registers = (1, left) if held + SPARE_REGS <= left else (4, dealt(left))
            return 1, warps, registers, max(threads, arch.bound_for(left))
    for blocks in (2, 1) if two else (1,):
        same = min(255, arch.regs_per_sm // (blocks * threads) // 8 * 8)
        if held + UNIFORM_SPARE_REGS <= same:
            return blocks, 1, same, threads
        if held + SPARE_REGS <= dealt(same):
            break
    return blocks, 4, dealt(same), threads


def constants(p: Problem, c: Config, arch: Arch) -> dict[str, int]:
    names = "BLOCKS_PER_SM", "PRODUCER_WARPS", "REGISTERS", "BOUND_THREADS", "UNIT_COLUMNS", "DSMEM_BYTES"
    found = dict(zip(names, register_split(p, c, arch) + receive_buffer(p, c), strict=True))
    found |= {"SMEM_BYTES": smem_bytes(p, c), "PRODUCER_REGISTERS": PRODUCER_REGS, "COMBINE_WARPS": COMBINE_WARPS}
    blocks, loads, _, _, lanes, span = fragment_combine(p, c)
    found |= {"COMBINE_BLOCKS": blocks, "COMBINE_AHEAD": loads, "CHUNK_LANES": lanes, "SPAN": span}
    return found | {"MAX_INFLIGHT_STAGES": max_inflight_stages(p, c)}


ALLOWED = {
    "split_d": ((4, 8), "one warpgroup or two, 4 or 8 warps, share a tile with body=wgmma_ws"),
    "num_warps": ((4, 8), "one warpgroup or two, 4 or 8 warps, multiply with body=wgmma_ws"),
    "block_n": ((16,), "any page is sure to hold boxes of 16 keys; block_n=16"),
    "block_m": (range(8, TILE + 1, 8), f"a multiple of 8 up to {TILE} with body=wgmma_ws"),
    "num_stages": (range(2, 33), "one is in use, one awaited, and a thread has a bit for the phase of each; 2 to 32"),
    "cluster": ((1, 2, 4, 8), "a cluster has 1, 2, 4 or 8 blocks wherever it lies"),
    "k_column_parts": ((2, 4), "2 or 4 parts have whole blocks of 64 columns"),
    "partial_bits": ((0, 16), "values are pushed in 16 bits; 0 pushes none"),
}


def why_not(p: Problem, c: Config, arch: Arch) -> str | None:
    """Why `c` cannot run, but for shared memory that is too small."""
    if not arch.has_wgmma:
        return f"body=wgmma_ws needs wgmma, which {arch} (number {arch.number}) lacks; body=mma"
    if p.kv_format != "plain":
        return f"body=wgmma_ws brings rows in boxes, as they lie; of kv_format={p.kv_format} use body=mma"
    for name, (values, why) in ALLOWED.items():
        if (value := getattr(c, name)) not in values:
            return f"{name}={value}: {why}"
    teams, bits, held = c.num_warps // c.split_d, c.partial_bits, registers_held(p, c)
    limit, left = register_split(p, c, arch)[2], max(L2_PREFETCH_TILES * 2 * c.k_column_parts - c.num_stages, 0)
    results, stages = teams * c.block_m * p.head_dim * 4, c.num_stages * stage_bytes(p, c)
    if c.block_m >= p.rows + 8:
        return f"block_m={c.block_m}: {p.rows} rows fill {c.block_m - 8}"
    if c.k_column_parts > (most := p.head_dim // 64):
        return f"k_column_parts={c.k_column_parts}: parts have whole blocks of 64 columns; {most} at most"
    if not 0 <= c.l2_prefetch_stages <= left:
        return f"l2_prefetch_stages={c.l2_prefetch_stages}: after num_stages={c.num_stages} at most {left}"
    if c.num_splits < 1 or c.num_splits % c.cluster:
        return f"num_splits={c.num_splits}: whole clusters have them; a multiple of cluster={c.cluster}"
    if held + SPARE_REGS > limit:
        return f"a thread holds {held} registers; with {SPARE_REGS} for the rest that is over {limit}"
    if bits and c.num_splits == 1:
        return f"partial_bits={bits}: num_splits=1 leaves nothing to combine; 0"
    if bits and p.head_dim < 32 * (parts := max(c.split_d, c.cluster)):
        return f"partial_bits={bits}: 32 columns are pushed at once, of {parts} parts of head_dim={p.head_dim} each"
    if (teams > 1 or not bits) and results > stages:
        return f"{results:,} B of results of {teams} teams meet in a ring of {stages:,} B"
    return None
