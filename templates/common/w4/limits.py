"""What tilings of W4A16 kernels take of registers and shared memory, and what each body refuses."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from kerngen.arch import Arch
from kerngen.templates.common.w4.tiling import EXTRA_WARPS, STREAM_BLOCK_M, STRIP, Tiling

MOST_PAIRS, MOST_QUADS = 6, 14  # tiles of one and of four tokens, whose limbs a warp keeps beside their sums' start


def stream_step(c: Tiling, group_size: int) -> int:
    """Columns of a step with tma_*: those of scales that are shared, and for one token of two tiles."""
    return max(group_size, STRIP if c.block_m > 1 else 2 * STRIP)


def stream_tiles(c: Tiling, k: int, group_size: int) -> int:
    """The most tiles of a strip's part of K = k that a warp has with tma_*."""
    step = stream_step(c, group_size)
    steps = ceil(ceil(k / step) / c.split_k)
    if not c.cta_pipeline:
        return ceil(steps / c.warps_k) * step // STRIP
    slot = c.block_k // step
    full_slots = (steps - 1) // slot  # but for the last one
    return (full_slots * (slot // c.warps_k) + ceil((steps - full_slots * slot) / c.warps_k)) * step // STRIP


def stream_has_many(c: Tiling, tiles: int) -> bool:
    """Whether a warp with so many keeps the digits of them alone (int_limbs_m1.cuh, int_limbs_m4.cuh)."""
    return tiles > MOST_QUADS if c.block_m > 1 else ceil(tiles / 2) > MOST_PAIRS


def stream_blocks(c: Tiling) -> int:
    """An SM, that have registers with stream: of up to eight warps as many again, which are the next launch's."""
    return c.blocks_per_sm * (1 if c.cta_pipeline or c.warps_k * c.blocks_per_sm > 8 else 2)


def warpgroup_registers(c: Tiling) -> tuple[int, int]:
    """What setmaxnreg gives a thread that copies, and one that multiplies."""
    if c.overlaps_reduce:  # some of those that copy add up sums
        return 72, 216
    return (24, 104) if c.blocks_per_sm == 2 else _WARPGROUP_REGISTERS[c.block_n]


_WARPGROUP_REGISTERS = {128: (40, 232), 192: (32, 160), 256: (32, 112), 384: (24, 80)}  # by the rows of a tile


def _accumulators(c: Tiling) -> int:
    """Of a thread, with mma and wgmma."""
    return c.warp_n * (c.block_m // c.warps_m) // 32


def registers(c: Tiling, k: int, group_size: int, arch: Arch) -> tuple[int, int]:
    """About how many a thread takes that multiplies, K being k, and how many it may have."""
    given = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * c.num_warps * max(1, c.blocks_per_sm)))
    if c.warpgroups:  # with few, and several groups of 64 columns, ptxas lets products wait for each other (C7510)
        return c.block_m // 2 + (60 if c.block_n == 384 and c.block_k > 64 else 44), warpgroup_registers(c)[1]
    if c.gemv:
        strips = c.warp_n // STRIP
        return c.block_k // STRIP // c.warps_k * (6 * strips + 4) + 8 * strips + 56, given // 8 * 8
    if not c.stream:  # without cp.async also what is on its way to shared memory
        carried = 0 if arch.has_cp_async else 4 * -(-c.stage_bytes(group_size) // (512 * c.num_warps)) + 44
        return _accumulators(c) + carried + 56, given
    tiles = stream_tiles(c, k, group_size)
    many = stream_has_many(c, tiles)
    if c.cta_pipeline:
        return 52 + tiles * (3 if many else 6), arch.registers_of(32 * (c.num_warps + EXTRA_WARPS))
    given = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * c.warps_k * stream_blocks(c)) // 8 * 8)
    pairs = ceil(tiles / 2)
    one = 72 + 5 * pairs // 2 if many else 48 + 12 * pairs
    return (one if c.block_m == 1 else 60 + tiles * (2 if many else 6)), given


def expected_registers(c: Tiling, k: int, group_size: int, arch: Arch) -> int:
    """What ptxas gives, about: to warpgroups all, to loops of gemv with several turns also the next turn's loads."""
    if c.warpgroups:
        return arch.registers_of(32 * (c.num_warps + c.extra_warps) * max(1, c.blocks_per_sm))
    need, given = registers(c, k, group_size, arch)
    if not c.gemv:
        return need
    return min(2 * need - 50, given) if c.block_k * c.split_k < k else need - 30


def serves(body: str, arch: Arch) -> bool:
    """Whether `arch` has what `body` is written with."""
    return not _NEEDS[body][0] or bool(getattr(arch, _NEEDS[body][0]))


# What a body needs of an arch, and what it takes of the fields that it does not leave free.
_NEEDS = {
    "mma": ("", ""), "gemv": ("has_ldmatrix", "operands as m16n8k16's"), "wgmma": ("has_wgmma", "wgmma"),
    "tma_warp": ("has_tma", "bulk copies"), "tma_block": ("has_tma", "bulk copies"), "wgmma_ws": ("has_wgmma", "wgmma"),
}  # fmt: skip
_Takes = dict[str, Collection[int]]
_ONE, _ANY = (1,), range(1, 1000)
_NO_SPLIT: _Takes = {"split_k": _ONE, "cluster": _ONE, "l2_prefetch_stages": (0,), "cap_inflight": (False,)}
_ONE_WARP: _Takes = {"warps_m": _ONE, "warps_k": _ONE}
_TMA: _Takes = _NO_SPLIT | {
    "block_m": STREAM_BLOCK_M, "block_n": (STRIP,), "warp_n": (STRIP,), "warps_m": _ONE, "split_k": _ANY,
    "warps_k": range(2, 17), "num_stages": range(2, 100), "blocks_per_sm": range(1, 9),
}  # fmt: skip
_TAKES: dict[str, _Takes] = {
    "mma": _NO_SPLIT,
    # tiles of 8 tokens scale mma.sync's products; of more than 128, a strip's two products do not fit in registers
    "wgmma": _NO_SPLIT | _ONE_WARP | {
        "block_m": range(16, 129, 8), "block_n": range(128, 1025, 128), "block_k": range(64, 2049, 64),
        "warp_n": (STRIP,), "num_stages": range(3, 100)},
    "gemv": _NO_SPLIT | {
        "block_m": (8,), "warps_m": _ONE, "num_stages": _ONE, "prefetch_stages": (0,), "split_k": _ANY},
    "tma_warp": _TMA,
    "tma_block": _TMA | {"block_m": STREAM_BLOCK_M[1:], "blocks_per_sm": _ONE, "cap_inflight": (False, True)},
    "wgmma_ws": _NO_SPLIT | _ONE_WARP | {
        "block_m": range(16, 257, 16), "block_n": tuple(_WARPGROUP_REGISTERS), "block_k": range(64, 2049, 64),
        "warp_n": (16,), "num_stages": range(3, 100), "blocks_per_sm": range(3), "cluster": (1, 2),
        "l2_prefetch_stages": range(65)},
}  # fmt: skip


def why_invalid(c: Tiling, rows: int, k: int, group_size: int, arch: Arch) -> str | None:
    """Why no product of K = k, with scales by `group_size`, can be cut so on `arch`, or None.

    rows: of x, of one W at most. Shared memory is counted for mma, wgmma and gemv alone.
    """
    if not serves(c.body, arch):
        return f"body={c.body}: {arch} has no {_NEEDS[c.body][1]}; body=mma serves every arch"
    for name, taken in _TAKES[c.body].items():
        if (value := getattr(c, name)) not in taken:
            return f"{name}={value}: body={c.body} takes {_shown(taken)}"
    if c.prefetch_stages and not arch.has_pdl:
        return f"prefetch_stages={c.prefetch_stages} is for launches that begin before others end, on sm90 and newer"
    if not 0 <= c.prefetch_stages < c.num_stages:
        return f"prefetch_stages={c.prefetch_stages}: fewer than num_stages={c.num_stages}, or 0 for all"
    if (c.gemv or c.stream) and rows > c.block_m:
        return f"body={c.body}: all {rows} rows of x are in one tile, not in tiles of block_m={c.block_m}"
    if c.block_n % c.warp_n or (c.warp_n % STRIP and not c.warpgroups):
        return f"block_n={c.block_n} is not made of warps of warp_n={c.warp_n} rows, each a multiple of {STRIP}"
    step = stream_step(c, group_size) if c.stream else STRIP
    if c.block_k % (step * c.warps_k):
        return f"block_k={c.block_k} is not made of warps_k={c.warps_k} warps of a multiple of {step}"
    if not (c.gemv or c.stream) and c.block_k % group_size and group_size % c.block_k:
        return f"block_k={c.block_k}: a stage has whole groups of {group_size} columns, or lies in one"
    why_not = _why_not_gemv if c.gemv else _why_not_stream if c.stream else _why_not_mma
    if why := _why_not_warpgroups(c, k) if c.warpgroups else why_not(c, k, group_size, arch):
        return why
    warps, blocks = c.num_warps + (EXTRA_WARPS if c.cta_pipeline else 0), max(1, c.blocks_per_sm)
    most, most_on_sm = 32 if c.gemv else 16, 16 if c.stream else arch.max_warps_per_sm
    if not c.warpgroups and (warps > most or warps * blocks > most_on_sm):
        return f"{warps} warps x {blocks} blocks an SM: at most {most} a block, and {most_on_sm} an SM"
    need, given = registers(c, k, group_size, arch)
    if need > given:
        return f"about {need} registers a thread; {warps} warps x {blocks} blocks an SM leave {given}"
    return None if c.stream or c.warpgroups or c.gemv else arch.why_too_large(c.smem_bytes(group_size), blocks)


def _shown(taken: Collection[int]) -> str:
    if isinstance(taken, range):
        return f"{taken.start} to {taken[-1]}" + (f" by {taken.step}" if taken.step > 1 else "")
    return " or ".join(map(str, taken))


def _why_not_gemv(c: Tiling, k: int, group_size: int, arch: Arch) -> str | None:
    if (c.block_k - STRIP * c.warps_k) * c.split_k >= k:
        return f"block_k={c.block_k} split_k={c.split_k}: a warp's last step lies beyond k={k}"
    if c.split_k > 1 and (c.warps_k == 1 or c.blocks_per_sm):
        return f"split_k={c.split_k} takes warps_k > 1 and blocks_per_sm=0, not {c.warps_k} and {c.blocks_per_sm}"
    blocks = max(1, c.blocks_per_sm)
    if (together := blocks * (c.smem_bytes(32) + arch.reserved_smem_bytes)) > min(arch.smem_per_sm, blocks * 49152):
        return f"{blocks} blocks an SM need {together:,} B; they have 48 KiB each, and {arch.smem_per_sm:,} B together"
    return None


def _why_not_stream(c: Tiling, k: int, group_size: int, arch: Arch) -> str | None:
    if c.cap_inflight and not c.prefetch_stages:
        return "cap_inflight=True is for a limit, not with prefetch_stages=0"
    step = stream_step(c, group_size)
    stage, most = c.block_k // step // c.warps_k, stream_tiles(c, k, group_size) * STRIP // step
    if stage > most or k // step < c.split_k:
        return f"block_k={c.block_k} split_k={c.split_k}: of k={k} a warp has {most} steps, and a stage takes {stage}"
    return None


def _why_not_warpgroups(c: Tiling, k: int) -> str | None:
    if c.blocks_per_sm == 2 and (c.block_n != 128 or c.cluster != 1):
        return f"block_n={c.block_n} cluster={c.cluster}: two blocks an SM have registers for 128 rows, and no cluster"
    return f"block_k={c.block_k} of k={k}: body=wgmma_ws takes whole stages" if k % c.block_k else None


def _why_not_mma(c: Tiling, k: int, group_size: int, arch: Arch) -> str | None:
    if not arch.has_ldmatrix and c.warp_n != 64:
        return f"warp_n={c.warp_n}: with m8n8k4 a lane of {arch} owns two of 64 rows"
    if c.block_m % (8 * c.warps_m):
        return f"block_m={c.block_m} is not made of warps_m={c.warps_m} warps of a multiple of 8 tokens"
    if _accumulators(c) > 128:
        return (
            f"{_accumulators(c)} accumulators a thread (warp_n={c.warp_n} x {c.block_m // c.warps_m} tokens); 128 fit"
        )
    if not arch.has_cp_async and c.num_stages != 2:
        return f"num_stages={c.num_stages}: without cp.async, {arch} keeps 2 stages and one on its way in registers"
    if c.block_k % 64 and c.block_k != STRIP:
        return f"block_k={c.block_k}: x lies in blocks of 64 columns, or one of {STRIP}"
    threads, strips = 32 * c.num_warps, c.block_n // STRIP
    scales = 4 * max(1, c.block_k // group_size)
    copied = (("weights", strips, c.block_k), ("scales", strips, scales), ("x", c.block_m, c.block_k // 8))
    for what, rows, row in copied:  # row: in chunks of 16 bytes
        if rows * row > threads and row % threads and threads % row:
            return f"block_k={c.block_k}: {threads} threads copy rows of {row} chunks of {what}: whole ones, or shares"
    return None
