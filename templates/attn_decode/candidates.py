"""The few configurations of attn_decode that suit a problem's structure; the cost model chooses among them.

Structure is the rows of a kv head, head_dim, the blocks of one split (groups), and the SMs. Splits follow from waves:
how many blocks an SM gets if all SMs get as many. Of configurations that the model holds for equal the first is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import ceil

from kerngen.arch import Target
from kerngen.errors import ProblemError
from kerngen.templates.attn_decode.spec import (
    MAX_ACCUMULATORS,
    Config,
    Problem,
    resident_cluster_blocks,
    tile_bytes,
    why_invalid,
)
from kerngen.templates.attn_decode.wgmma_ws import TILE
from kerngen.templates.common.rows.spec import KV_BITS, has_codes

PIPELINE_BYTES = 128 * 1024  # of stages of a block with body=mma: more only delay the first tile
MAX_FRAGMENT_ROWS = 40  # of a block of head_dim 512: more leave attn_combine's blocks no registers beside it


def candidates(p: Problem, target: Target) -> Iterator[Config]:
    """The default shape with a ladder of splits, fragment partials, clusters, shapes whose warps have a quarter or an
    eighth of each key, and blocks of eight of many rows. Some may be invalid. Raises ProblemError where no shape fits.
    """
    sms, shape = target.device.num_sms, _default_shape(p, target)
    if not target.arch.has_wgmma or p.head_dim == 128 or p.kv_format != "plain":
        if target.arch.has_wgmma and has_codes(p.kv_format) and p.head_dim > 128 and p.rows <= 8:
            shape = _of_codes(p, sms)
        yield from _mma(p, target, shape, 1 / 4, 1 / 2, 1, 2, 4)
        if target.arch.has_wgmma and p.kv_format == "plain" and p.rows > 32:  # of head_dim 128
            yield from _wave(p, target, Config(64, 16, 4, 4), 20)
            yield from _wave(p, target, Config(48, 16, 4, 8), 20)
        return
    groups, eights, quarters = p.groups(shape.block_m), p.groups(8), Config(8, 16, 4, 8, 3)
    yield from _mma(p, target, shape, *((1 / 2, 1) if 2 * groups <= sms else (2,)))
    yield from _fragment_partials(p, target)
    tile, most = (32, 4) if p.head_dim == 512 else (16, 10)
    if p.rows > tile:  # more than two warpgroups have registers for if each has tiles of its own
        yield from _wave(p, target, Config(tile, 16, 4, 8), most)
    if p.head_dim == 256:
        if p.rows <= 8 and p.window and p.source == "q" and 8 * eights <= sms and p.visible >= 16 * TILE:
            yield Config(8, 16, 4, 4, 6, 8, "wgmma_ws", 8, partial_bits=16, prefetch_stages=2, l2_prefetch_stages=2)
        if p.rows <= 8 and groups > sms:
            yield from (Config(8, 16, 4, warps, 2) for warps in (8, 4))
        elif p.rows <= 8:
            yield from _mma(p, target, quarters, 1, 2)
        elif eights <= sms:
            yield from _mma(p, target, quarters, 2, tiles_each=2)
        return
    # The fewest splits whose two teams of warps have as few rounds of tiles.
    rounds = ceil(p.visible / max(1, min(sms // groups, p.visible // 16)) / 32) or 1
    splits = max(ceil(p.visible / 32 / rounds), 1)
    for few in (1, 2) if splits == 2 else (splits,):
        teams = Config(shape.block_m, 16, 4, 8, num_splits=few, prefetch_stages=1)
        yield from _most_stages(p, teams, target, 4 if p.visible <= few * 64 else 6)
    if p.rows > 8:
        yield from _clusters(p, target)
    if p.rows > 8 and eights <= sms:  # not all SMs, so that the next launch begins beside them
        narrow = Config(8, 16, 4, 8, 5) if eights >= 8 else Config(8, 16, 8, 8, 3)
        yield from islice(_mma(p, target, narrow, 0.73), int(p.rows > tile), None)  # one split is for few rows


def _of_codes(p: Problem, sms: int) -> Config:
    """Shapes that were measured for eight rows. Where V is K, and of four bits, tiles of 32 keys: what a tile costs
    beside its codes is spread over more. Of short heads blocks of two warps, if several an SM are busy.
    """
    if p.head_dim == 256:
        return Config(8, 32, 2, 2, 2) if p.groups(8) > 2 * sms else Config(8, 16, 1, 6, 4)
    if KV_BITS[p.kv_format] == 4:
        return Config(8, 32, 1, 8, 2)
    return Config(8, 32, 2, 8, 2) if p.kv_format == "shared_int8" else Config(8, 16, 2, 12, 3)


def _fragment_partials(p: Problem, target: Target) -> Iterator[Config]:
    """A block an SM. Where that leaves SMs idle, also the splits of two to four waves, if more SMs are busy."""
    long, sms = p.head_dim == 512, target.device.num_sms
    most_rows, warps, few = (MAX_FRAGMENT_ROWS, 8, p.rows <= 16) if long else (32, 4, p.q_len == 1)
    rows = ceil(p.rows / 8) * 8 if p.rows <= most_rows else 32
    groups, busy = p.groups(rows), 0.0
    shape = Config(rows, 16, warps, warps, body="wgmma_ws", k_column_parts=warps // 2, partial_bits=16)
    shape = replace(shape, prefetch_stages=3 if few else 2)
    for waves in (1, 2, 3, 4):
        splits = min(waves * sms // groups, _most_splits(p))
        if splits > 1 and (share := splits * groups / (ceil(splits * groups / sms) * sms)) > busy + 0.05:
            busy = share
            yield from _most_stages(p, replace(shape, num_splits=splits), target, 13 if long or p.source == "q" else 9)


def _most_splits(p: Problem) -> int:
    """Of fragment partials: a tile each, and of long heads two."""
    return ceil(p.visible / (2 * TILE if p.head_dim == 512 else TILE))


def _wave(p: Problem, target: Target, shape: Config, most: int) -> Iterator[Config]:
    """`shape` with fragment partials, as many splits as there are SMs for, and at most `most` stages. Nothing where
    that is one split.
    """
    splits = min(target.device.num_sms // p.groups(shape.block_m), _most_splits(p))
    if splits > 1:
        waved = replace(shape, num_splits=splits, body="wgmma_ws", partial_bits=16)
        yield from _most_stages(p, waved, target, most)


def _clusters(p: Problem, target: Target) -> Iterator[Config]:
    """Many rows of long heads by warpgroups: as many splits as there are SMs for, alone, in pairs and in clusters of
    four or eight. Partials are pushed if the receive buffer leaves stages; pulled if not, or in pairs of many rows.
    """
    sms, resident, tiled = target.device.num_sms, resident_cluster_blocks(target), ceil(p.rows / 8) * 8
    for cluster in (1, 2, 4, 8):
        rows = min(tiled, TILE) if cluster < 8 else tiled if p.rows <= MAX_FRAGMENT_ROWS else 32
        most = min((sms if cluster < 4 else resident) // p.groups(rows), p.visible // TILE, sms // 2)
        splits = max(most // cluster * cluster, 1)
        alone = cluster == 8 and rows <= 16  # a warpgroup has a tile by itself
        pull = Config(rows, 16, 8, 8, num_splits=splits, body="wgmma_ws", cluster=cluster, k_column_parts=4)
        push = replace(pull, split_d=4 if alone else 8, partial_bits=16, prefetch_stages=3)
        pushed = list(_most_stages(p, push, target, 11 if alone else 9)) if cluster > 1 else []
        yield from pushed
        if not pushed or (cluster == 2 and p.rows > MAX_FRAGMENT_ROWS):
            yield from _most_stages(p, pull, target, 10)


def _mma(p: Problem, target: Target, shape: Config, *waves: float, tiles_each: int = 1) -> Iterator[Config]:
    """`shape` with one split, and with those of so many waves of blocks, if that leaves each so many tiles."""
    yield shape
    for wave in waves:
        most = int(wave * target.device.num_sms) // p.groups(shape.block_m)
        yield replace(shape, num_splits=max(1, min(most, p.visible // shape.block_n // tiles_each)))


def _most_stages(p: Problem, shape: Config, target: Target, most: int) -> Iterator[Config]:
    """`shape` with the most stages, up to `most`, that fit."""
    fitting = (replace(shape, num_stages=stages) for stages in range(most, 0, -1))
    yield from islice((c for c in fitting if why_invalid(p, c, target) is None), 1)


def _default_shape(p: Problem, target: Target) -> Config:
    """The largest block_m that the rows fill; few accumulators a lane where two warps a team suffice for that, so that
    nothing spills; then the most warps, at most 8, with about PIPELINE_BYTES of stages.

    Without ldmatrix codes are converted between their loads; of three bits each eight take two, and so more registers.
    Elsewhere they have the shapes of those of four bits, and no measurement of their own.
    """
    arch = target.arch
    few = KV_BITS[p.kv_format] == 3 and not arch.has_ldmatrix
    block_n, block_ms = (16, (32, 16, 8)) if arch.has_ldmatrix else (32, (16, 8))
    for block_m in (m for m in block_ms if m == 8 or m < 2 * p.rows):
        need = block_m * p.head_dim // 32
        split_d = need // MAX_ACCUMULATORS if need >= 192 and arch.has_ldmatrix else max(1, need // 64)
        split_d = min(max(1, need // 32), p.head_dim // 128) if few else split_d
        for num_warps in (8, 6, 4, 3, 2, 1):
            shape = Config(block_m, block_n, split_d, num_warps)
            most = 2 if few else min(4, max(2, PIPELINE_BYTES // (num_warps * tile_bytes(p, shape))))
            for fitting in _most_stages(p, shape, target, most):
                return fitting
    raise ProblemError(f"no shape of attn_decode fits {arch} for head_dim={p.head_dim} and {p.rows} rows")
