"""Default configurations of attn_decode, for problems that were not tuned.

Those of an H200 and an H100 were measured (docs/experiments.md, docs/performance.md); others follow from a model of
waves.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod

from kerngen.arch import Target
from kerngen.errors import ProblemError
from kerngen.templates.attn_decode.spec import (
    MAX_ACCUMULATORS,
    TILE,
    Config,
    Problem,
    bytes_in_flight,
    grid_of,
    partials,
    register_split,
    resident_cluster_blocks,
    smem_bytes,
    split_choices,
    why_invalid,
    workspace_bytes,
)

FEW_KEYS, FEW_KEYS_BLOCKS = 2048, 96  # of one sequence's, for more than eight rows of head_dim 512: blocks of eight
FEW_KEYS_SPLITS = 16  # of head_dim 256, for more than eight rows of few heads
WINDOW_SPLITS = 8  # of a window's keys by warpgroups, a cluster
MOST_SPLITS = 66  # of many rows of long heads by warpgroups
MAX_CLUSTER_OF_8_KEYS = 8192  # of one sequence's few KV heads that are read by clusters of eight
DSMEM_STAGES = (9, 8, 7, 6)  # of those; fewer keep too little under way, and results are read where they were found
MIN_FRAGMENT_KEYS = 8192  # of all sequences and heads, whose blocks store what they found
MAX_FRAGMENT_ROWS = 40  # of a block of head_dim 512: what registers beside those that merge have room for
MOST_REREAD_KEYS = 1024  # of such a block, where another one of the same keys has the other half of the rows
MIN_WAVE_KEYS = 256  # of such a block, where SMs have several after each other
MOST_STREAMED_KEYS = 2048  # of a block of warpgroups, where others need not read them twice: those stream faster
MOST_NARROW_KEYS = 2048  # that few rows see of head_dim 256, where a warp has a quarter of each
# What the wave model charges, us: a block's start and end; the second launch; a tile that most teams only wait for.
BLOCK_US, COMBINE_US, TILE_US = 2.0, 2.5, 0.6
# And where there is wgmma: of an SM, shares of the memory; keys that are read again; memory that idle SMs leave idle;
# warpgroups, for what they read and for their end.
MOST_SHARES, AGAIN, IDLE_COSTS, WARPGROUPS_TAKE, WARPGROUPS_US = 1.3, 0.6, 0.2, 1.06, 2.0
# Pipeline stages of a block: 128 KB keep an H200's memory busy, more only delays the first tile.
PIPELINE_BYTES = 128 * 1024
# Bytes in flight that an SM needs to cover the memory's latency (~0.8 us times the SM's share of the bandwidth).
LATENCY_US = 0.8


def chosen_for(problem: Problem, target: Target) -> Config:
    """The shape follows from the rows, head_dim and shared memory; num_splits from `predicted_us`.

    Where there is wgmma, what was fastest of few shapes on an H200 (docs/performance.md): warpgroups for many rows of
    long heads, where there are keys for all SMs, and on an H100 (docs/experiments.md) for a lone KV head of many keys;
    for few rows of few sequences, and of many, warps that have a quarter of each key, but where many blocks stream for
    long; of few keys of one sequence blocks of eight rows. By steps, these two. Blocks that store go before all of
    those where they serve. Where q is ready a window's few rows are left to clusters of warpgroups: those are faster
    alone, but not in a step, whose launches overlap.
    """
    p, num_sms = problem, target.device.num_sms
    if target.arch.has_wgmma:
        for choose in (_window_config, _fragment_partials_config, _cluster_of_8_config):
            if (found := choose(p, target)) is not None:
                return found
    shape, choices = _default_shape(p, target), split_choices(p, target)
    if not target.arch.has_wgmma:
        return min(_split_candidates(p, shape, choices), key=lambda c: predicted_us(p, c, target))
    heads = p.num_kv_heads * p.batch
    blocks_of_8 = ceil(p.rows / 8) * heads
    if (
        p.head_dim == 256
        and p.visible <= MOST_NARROW_KEYS
        and (2 * heads <= num_sms if p.rows <= 8 else blocks_of_8 <= 8)
    ):
        # up to twice as many blocks as SMs, which hold two, but not for a few keys each; more rows read them again
        twice = 2 * num_sms // blocks_of_8
        worth = max(num_sms // blocks_of_8, p.visible * 5 // (8 * TILE)) if p.rows <= 8 else FEW_KEYS_SPLITS
        choices = (1, min(twice, worth, max(1, p.visible // shape.block_n)))
        shape = Config(8, shape.block_n, 4, 8, 3)
    elif p.head_dim == 256 and p.rows <= 8 and 2 * heads > 3 * num_sms and p.source != "q":
        shape = Config(8, shape.block_n, 4, 4 if heads > 3 * num_sms else 8, 2)
    elif p.head_dim == 512 and p.rows > 8 and p.batch == 1 and p.visible <= FEW_KEYS:
        choices = (1, max(1, min(FEW_KEYS_BLOCKS // blocks_of_8, p.visible // shape.block_n)))
        shape = Config(8, shape.block_n, 4, 8, 5) if blocks_of_8 >= 8 else Config(8, shape.block_n, 8, 8, 3)
    elif p.head_dim == 512 and p.rows <= 32 and (p.batch == 1 if p.rows <= 16 else heads == 1):
        splits = _fewest_splits(p, shape, min(num_sms // heads, max(1, p.visible // shape.block_n)))
        choices = (1, splits)
        stages = (4,) if p.visible <= splits * 4 * shape.block_n else (6, 5, 4)  # four places have all keys of a team
        shapes = (Config(shape.block_m, shape.block_n, 4, 8, s, prefetch_stages=1) for s in stages)
        shape = next(c for c in shapes if why_invalid(p, c, target) is None)
    elif p.head_dim == 512 and p.rows > 16:
        clustered = min(_cluster_candidates(p, target), key=lambda c: _hopper_us(p, c, target))
        has_keys = 2 * p.visible // TILE >= min(num_sms // (ceil(p.rows / TILE) * heads), MOST_SPLITS)
        if has_keys and (p.rows > 32 or p.visible <= MOST_STREAMED_KEYS * clustered.num_splits):
            return clustered
    valid = [c for c in _split_candidates(p, shape, choices) if why_invalid(p, c, target) is None]
    return min(valid, key=lambda c: _hopper_us(p, c, target))


def _split_candidates(p: Problem, shape: Config, choices: tuple[int, ...]) -> list[Config]:
    return [replace(shape, num_splits=s) for s in choices if s == 1 or s * shape.block_n <= p.visible]


def _fewest_splits(p: Problem, shape: Config, most: int) -> int:
    """Those with which the two teams of the busiest block have as few rounds of tiles as with `most`."""
    tiles = ceil(p.visible / shape.block_n)

    def waves(splits: int) -> int:
        return ceil(ceil(tiles / splits) / 2)

    return next(s for s in range(1, most + 1) if waves(s) == waves(most))


def _cluster_candidates(p: Problem, target: Target) -> list[Config]:
    """Of many rows by warpgroups: as many splits as there are SMs for, in pairs, or all of a row's in one cluster.

    The first of those that the model holds for equal is taken.
    """
    rows, num_sms = min(ceil(p.rows / 8) * 8, TILE), target.device.num_sms
    blocks = ceil(p.rows / rows) * p.num_kv_heads * p.batch  # of one split
    most = max(1, min(num_sms // blocks, p.visible // TILE, MOST_SPLITS))
    choices = [(1, most), *((c, c) for c in (4, 8) if c <= most and c * blocks <= resident_cluster_blocks(target))]
    if most > 1:
        choices.append((2, most // 2 * 2))
    found = [c for cluster, splits in choices for c in _many_row_candidates(p, rows, splits, cluster)]
    return [c for c in found if why_invalid(p, c, target) is None]


def _window_config(p: Problem, target: Target) -> Config | None:
    """Of few rows of a window, where q is ready: a cluster for each KV head, as long as each has an SM a block."""
    blocks = p.num_kv_heads * p.batch * WINDOW_SPLITS
    if p.source != "q" or not p.window or p.head_dim != 256 or p.rows > 8 or blocks > target.device.num_sms:
        return None
    config = Config(
        8,
        16,
        4,
        4,
        6,
        WINDOW_SPLITS,
        body="wgmma_ws",
        cluster=WINDOW_SPLITS,
        partial_bits=16,
        prefetch_stages=2,
        l2_prefetch_stages=2,
    )
    return config if p.visible >= WINDOW_SPLITS * 2 * TILE and why_invalid(p, config, target) is None else None


def _fragment_partials_config(p: Problem, target: Target) -> Config | None:
    """A block an SM, which stores what it found and ends. None where something else was faster (docs/experiments.md).

    Few keys in all leave SMs without any, and a cluster that has all of a row's is done sooner; of one sequence by
    steps the next launch's weights come as blocks end. Rows of two blocks have their keys read twice, from L2 where
    that is soon.
    """
    long, one, ready = p.head_dim == 512, p.batch == 1, p.source == "q"
    if p.head_dim not in (256, 512) or (long and one and not ready):
        return None
    most_rows = MAX_FRAGMENT_ROWS if long else 32
    m_blocks = 1 if p.rows <= most_rows else ceil(p.rows / 32)
    groups = m_blocks * p.num_kv_heads * p.batch  # blocks of one split
    splits = min(_fragment_splits(groups, p, target), ceil(p.visible / (2 * TILE if long else TILE)))
    if splits < 2 or not _enough_fragment_keys(p, groups, target):
        return None
    if m_blocks > 1 and not (long and m_blocks == 2 and 8 * TILE < p.visible <= splits * MOST_REREAD_KEYS):
        return None
    few = ((groups > 1 and p.rows <= 16) or p.rows <= 8) if long else ready or p.q_len == 1
    rows = min(ceil(p.rows / 8) * 8, most_rows if m_blocks == 1 else 32)
    warps, k_column_parts, most_stages = (8, 4, 13) if long else (4, 2, 13 if ready else 9)
    one_block = Config(
        rows,
        16,
        warps,
        warps,
        0,
        splits,
        body="wgmma_ws",
        k_column_parts=k_column_parts,
        partial_bits=16,
        prefetch_stages=3 if few else 2,
    )
    found = (replace(one_block, num_stages=stages) for stages in range(most_stages, 5, -1))
    return next((c for c in found if why_invalid(p, c, target) is None), None)


def _enough_fragment_keys(p: Problem, groups: int, target: Target) -> bool:
    """Whether there are keys enough that blocks which store them gain: in all, or for as many as a cluster has."""
    keys, one = p.num_kv_heads * p.batch * p.visible, p.batch == 1
    if p.head_dim == 512 and p.rows > 16:
        cluster = next(
            (c for c in (8, 4) if p.rows <= MAX_FRAGMENT_ROWS and c * groups <= resident_cluster_blocks(target)), 2
        )
        return p.visible >= FEW_KEYS if one else p.visible > 2 * TILE * cluster
    if p.head_dim == 512 and p.rows > 8:
        return keys >= FEW_KEYS
    if p.head_dim == 512:
        return keys >= MIN_FRAGMENT_KEYS or p.visible >= 2 * FEW_KEYS or (not one and keys >= 2 * FEW_KEYS)
    return keys >= MIN_FRAGMENT_KEYS


def _fragment_splits(groups: int, p: Problem, target: Target) -> int:
    """As many as there are SMs for. Where that leaves many SMs idle, as many as two rounds of blocks have, or three or
    four, if those keep more of them busy and have keys enough. 0 where one split does as well.
    """
    sms = target.device.num_sms
    once = sms // groups
    busy = max(once, 1) * groups / (ceil(groups / sms) * sms)
    if once >= 2 and (p.rows > 16 or busy >= 0.8):  # of many rows more splits are as many results more
        return once
    least = FEW_KEYS if p.rows > 16 else 0
    shares: dict[int, float] = {}  # of the SMs that are busy, the fewest rounds first
    for waves in (2, 3, 4):
        splits = waves * sms // groups
        if splits >= 2 and p.visible >= max(splits * MIN_WAVE_KEYS, least) and p.rows <= MAX_FRAGMENT_ROWS:
            shares.setdefault(splits, splits * groups / (waves * sms))
    enough = (splits for splits, share in shares.items() if share >= 0.9 or p.rows > 16)
    more = next(enough, max(shares, key=lambda splits: shares[splits], default=0))
    if shares.get(more, 0.0) >= busy + 0.1:
        return more
    return once if once >= 2 else 0


def _cluster_of_8_config(p: Problem, target: Target) -> Config | None:
    """Of one sequence's few KV heads: rows in blocks of up to 40, which are pushed to by more than two at once.

    None beyond what was timed (docs/experiments.md): 64 keys a split at least, 8192 in all. Of one head, whose splits
    are many, up to 96 rows, for whose blocks L2 has the keys again.
    """
    if p.head_dim != 512 or p.batch > 1 or p.num_kv_heads not in (1, 2, 4):
        return None
    most_rows, block_rows, few_keys, prefetch_stages = (96, 32, 0, 3) if p.num_kv_heads == 1 else (40, 40, FEW_KEYS, 2)
    rows = min(ceil(p.rows / 8) * 8, block_rows)
    splits = resident_cluster_blocks(target) // (ceil(p.rows / rows) * p.num_kv_heads) // 8 * 8
    if not 16 <= p.rows <= most_rows or splits < 8 or p.visible <= few_keys:
        return None
    if not splits * TILE <= p.visible <= MAX_CLUSTER_OF_8_KEYS:
        return None
    one = Config(
        rows, 16, 4 if rows <= 16 else 8, 8, 0, splits, body="wgmma_ws", cluster=8, k_column_parts=4, partial_bits=16,
        prefetch_stages=prefetch_stages,
    )  # fmt: skip
    found = (replace(one, num_stages=stages) for stages in (11, *DSMEM_STAGES))
    return next((c for c in found if why_invalid(p, c, target) is None), None)


def _many_row_candidates(p: Problem, rows: int, splits: int, cluster: int) -> list[Config]:
    """The most stages first. Clusters push partials if the receive buffer leaves enough stages, unless blocks stream
    for long: then more stages gain more.
    """
    one = Config(rows, 16, 8, 8, num_splits=splits, body="wgmma_ws", cluster=cluster, k_column_parts=4)
    found = [replace(one, num_stages=stages) for stages in (10, 9, 8)]
    if cluster > 1 and p.visible <= MOST_STREAMED_KEYS * splits:
        found = [replace(one, num_stages=stages, partial_bits=16, prefetch_stages=3) for stages in DSMEM_STAGES] + found
    return found


def _default_shape(p: Problem, target: Target) -> Config:
    """The largest block_m that the rows fill; few accumulators a lane where two warps a team suffice for that, so that
    nothing spills; then the most warps, at most 8, with about PIPELINE_BYTES of stages.
    """
    arch = target.arch
    most_rows = 32 if arch.has_ldmatrix else 16
    block_n = 16 if arch.has_ldmatrix else 32
    for block_m in (m for m in (32, 16, 8) if m <= most_rows and (m == 8 or m < 2 * p.rows)):
        need = block_m * p.head_dim // 32
        split_d = max(1, need // 64)
        if split_d > 2 and arch.has_ldmatrix:
            split_d = need // MAX_ACCUMULATORS
        for num_warps in (8, 6, 4, 3, 2, 1):
            stage = num_warps * block_n * p.head_dim // split_d * 2
            most_stages = min(4, max(2, PIPELINE_BYTES // stage))
            for num_stages in range(most_stages, 0, -1):
                c = Config(block_m, block_n, split_d, num_warps, num_stages)
                if why_invalid(p, c, target) is None:
                    return c
    raise ProblemError(f"no shape of attn_decode fits {arch} for head_dim={p.head_dim} and {p.rows} rows")


def predicted_us(problem: Problem, config: Config, target: Target) -> float:
    """The wave model behind default_config's num_splits where there is no wgmma. Not a promise of time.

    The busiest SM works through ceil(blocks / SMs) blocks, as fast as its share of the memory allows or as its bytes in
    flight allow, and pays for each round of resident blocks; splits pay for the combine.
    """
    p, c, device = problem, config, target.device
    resident, on_sm, tiles = _waves(p, c, target)
    teams = c.num_warps // c.split_d
    idle = ceil(tiles / teams) - tiles / teams  # rounds in which only some teams have a tile
    gbps = device.mem_gbps * 0.92
    sm_rate = gbps * 1e3 / device.num_sms  # bytes a us
    rate = min(sm_rate, min(resident, on_sm) * bytes_in_flight(p, c, target) / LATENCY_US)
    us = on_sm * tiles * c.block_n * p.head_dim * 2 * 2 / rate + ceil(on_sm / resident) * (BLOCK_US + idle * TILE_US)
    if partials(c) > 1:  # partial results are written and read through L2, at about twice the memory's rate
        us += COMBINE_US + workspace_bytes(p, c, target) / gbps / 1e3
    return us


def _waves(p: Problem, c: Config, target: Target) -> tuple[int, int, int]:
    """(blocks that an SM holds at once, that the busiest one gets, tiles of each), of the first two about."""
    arch, num_sms = target.arch, target.device.num_sms
    if c.warpgroups:
        resident = register_split(p, c, arch)[0]
    else:
        warps = 12 if c.block_m * p.head_dim // c.split_d // 32 <= 64 else 8  # that the registers allow an SM
        smem = smem_bytes(p, c, target) + arch.reserved_smem_bytes
        resident = max(1, min(arch.smem_per_sm // smem, warps // c.num_warps))
    return resident, ceil(prod(grid_of(p, c)) / num_sms), ceil(ceil(max(p.visible, 1) / c.block_n) / c.num_splits)


def _hopper_us(p: Problem, c: Config, target: Target) -> float:
    """The same where there is wgmma, fitted to 330 launches on an H200 (docs/performance.md). Not a promise of time.

    The memory is shared by the SMs that work, each of which takes up to MOST_SHARES of an even share. Rows that are in
    several blocks have their keys read again, then mostly from L2.
    """
    device = target.device
    resident, on_sm, tiles = _waves(p, c, target)
    gbps = device.mem_gbps * 0.92 * 1e3  # bytes a us
    block_bytes, again = tiles * c.block_n * p.head_dim * 2 * 2, ceil(p.rows / c.block_m) - 1
    total = c.num_splits * p.num_kv_heads * p.batch * block_bytes * (1 + AGAIN * again)
    idle = max(0.0, 1 - prod(grid_of(p, c)) / device.num_sms)
    in_flight = min(resident, on_sm) * bytes_in_flight(p, c, target)
    sm_rate = min(MOST_SHARES * gbps / device.num_sms, in_flight / LATENCY_US)
    us = max(total / gbps / (1 - IDLE_COSTS * idle), on_sm * block_bytes / sm_rate) + ceil(on_sm / resident)
    if partials(c) > 1:
        us += COMBINE_US + 1.5 * workspace_bytes(p, c, target) / gbps
    return us * WARPGROUPS_TAKE + WARPGROUPS_US if c.warpgroups else us
