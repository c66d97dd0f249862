"""What tilings of W4A16 kernels take of registers and shared memory, and what each body refuses."""

from __future__ import annotations

from math import ceil

from kerngen.arch import Arch
from kerngen.templates.common.w4.tiling import SPACES, STRIP, Packing, Tiling

MOST_PAIRS, MOST_QUADS = 6, 14  # tiles of one and of four tokens, whose limbs a warp keeps beside their sums' start
MOST_GROUP = 128  # weights of a row that share a scale, with tma_*
MOST_SUMS = 64  # of a lane with mma.sync, where weights take more registers than int4 with scales of x's dtype
_NEEDS = {
    "gemv": "ldmatrix", "tma_warp": "tma", "tma_block": "tma", "tma_mma": "tma", "wgmma": "wgmma", "wgmma_ws": "wgmma",
}  # fmt: skip
_WARPGROUP_REGISTERS = {128: (40, 232), 192: (32, 160), 256: (32, 112)}  # by the rows of a tile


def serves(body: str, arch: Arch) -> bool:
    """Whether `arch` has what `body` is written with."""
    return body == "mma" or bool(getattr(arch, f"has_{_NEEDS[body]}"))


def stream_step(c: Tiling, group_size: int) -> int:
    """Columns of a step with tma_*: those of scales that are shared, and for one token of two tiles."""
    return max(group_size, STRIP if c.block_m > 1 else 2 * STRIP)


def stream_tiles(c: Tiling, k: int, group_size: int) -> int:
    """The most tiles of a strip's part of K = k that a warp has with tma_*."""
    step = stream_step(c, group_size)
    steps = ceil(ceil(k / step) / c.split_k)
    return ceil(steps / c.warps_k) * step // STRIP


def stream_has_many(c: Tiling, tiles: int) -> bool:
    """Whether a warp with so many keeps the digits of them alone (int_limbs_m1.cuh, int_limbs_m4.cuh)."""
    if not c.has_limbs:
        return False
    return tiles > MOST_QUADS if c.block_m > 1 else ceil(tiles / 2) > MOST_PAIRS


def stream_blocks(c: Tiling) -> int:
    """An SM, that have registers with tma_warp and tma_mma: of up to eight warps also one of the next launch."""
    return 1 if c.warps_k > 8 else 2


def warpgroup_registers(c: Tiling) -> tuple[int, int]:
    """What setmaxnreg gives a thread that copies, and one that multiplies."""
    if c.overlaps_reduce:  # some of those that copy add up sums
        return 72, 216
    return (24, 104) if c.blocks_per_sm == 2 else _WARPGROUP_REGISTERS.get(c.block_n, (0, 0))


def registers(c: Tiling, k: int, packing: Packing, arch: Arch) -> tuple[int, int]:
    """About how many a thread takes that multiplies, K being k, and how many it may have."""
    scales = packing.group_bytes // 32 * packing.tile_groups  # of a tile's four rows
    if c.body == "wgmma_ws":
        return c.block_m // 2 + 44, warpgroup_registers(c)[1]
    blocks = stream_blocks(c) if c.body in ("tma_warp", "tma_mma") else max(1, c.blocks_per_sm)
    given = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * c.num_warps * blocks) // 8 * 8)
    if c.body == "gemv":
        strips = c.warp_n // STRIP
        step = (packing.bits + scales) * strips + 4  # words of 4-bit codes are as many as their bits
        base = 44 + 3 * packing.bits + 12 * packing.has_minima
        return c.block_k // STRIP // c.warps_k * step + 8 * strips + base, given
    if not c.stream:  # without cp.async also what is on its way to shared memory
        chunks = -(-c.stage_bytes(packing) // (512 * c.num_warps))
        carried = 0 if arch.has_cp_async else 4 * chunks + 44 + 12 * packing.has_minima
        return c.warp_n * (c.block_m // c.warps_m) // 32 + carried + 56, given
    tiles = stream_tiles(c, k, packing.group_size)
    many, pairs = stream_has_many(c, tiles), ceil(tiles / 2)
    if c.body == "tma_mma":
        return 4 * tiles + 2 * (packing.bits + scales) + 60, given
    if c.body == "tma_block":
        return 52 + tiles * (3 if many else 6), arch.registers_of(32 * (c.num_warps + c.extra_warps))
    if c.block_m == 1:
        return 72 + 5 * pairs // 2 if many else 48 + 12 * pairs, given
    return 60 + tiles * (2 if many else 6), given


def why_too_many_sums(c: Tiling, packing: Packing, fp16_scales: bool, arch: Arch) -> str | None:
    """Why mma has no registers to unpack W beside so many sums, or None. fp16_scales: they are not in x's dtype."""
    sums = c.warp_n * (c.block_m // c.warps_m) // 32  # of a lane
    is_plain = packing.is_int4 and not fp16_scales
    if c.body != "mma" or sums <= MOST_SUMS or is_plain or not arch.has_ldmatrix:
        return None
    return f"{sums} sums a lane leave no registers to unpack {packing.name}: at most {MOST_SUMS}"


def why_invalid(c: Tiling, rows: int, k: int, packing: Packing, arch: Arch) -> str | None:
    """Why no product of K = k by a W that is packed so can be cut so on `arch`, or None.

    rows: of x, of one W at most. Shared memory is c.smem_bytes', to which w4a16_gemm adds what depends on its problem.
    """
    group_size = packing.group_size
    if not serves(c.body, arch):
        return f"body={c.body}: {arch} has no {_NEEDS[c.body]}; body=mma serves every arch"
    if c.has_limbs and not packing.is_int4:
        kind = f"{packing.bits}-bit codes" + (" with minima" if packing.has_minima else "")
        return f"body={c.body} multiplies int4 without minima as integers, not {kind}; body=tma_mma serves"
    if c.stream and group_size > MOST_GROUP:
        return f"group_size={group_size}: a stage of body={c.body} has groups of up to {MOST_GROUP}; body=gemv serves"
    if c.prefetch_stages and not arch.has_pdl:
        return f"prefetch_stages={c.prefetch_stages} is for launches that begin before others end, on sm90 and newer"
    if not 0 <= c.prefetch_stages < c.num_stages:
        return f"prefetch_stages={c.prefetch_stages}: fewer than num_stages={c.num_stages}, or 0 for all"
    if c.few_tokens and rows > c.block_m:
        return f"body={c.body}: all {rows} rows of x are in one tile, not in tiles of block_m={c.block_m}"
    step = stream_step(c, group_size) if c.stream else STRIP
    if c.block_n % c.warp_n or c.block_k % (step * c.warps_k):
        return (f"block_n={c.block_n} block_k={c.block_k} is not made of warps of warp_n={c.warp_n} rows, and of "
                f"warps_k={c.warps_k} warps of a multiple of {step} columns")  # fmt: skip
    if c.body == "mma" and not arch.has_ldmatrix and c.warp_n != 64:
        return f"warp_n={c.warp_n}: with m8n8k4 a lane of {arch} owns two of 64 rows"
    if c.body == "mma" and not arch.has_cp_async and c.num_stages != 2:
        return f"num_stages={c.num_stages}: without cp.async, {arch} keeps 2 stages and one on its way in registers"
    if c.body == "mma" and c.block_m % (8 * c.warps_m):
        return f"block_m={c.block_m} is not made of warps_m={c.warps_m} warps of a multiple of 8 tokens"
    if c.body == "gemv" and (c.block_k - STRIP * c.warps_k) * c.split_k >= k:
        return f"block_k={c.block_k} split_k={c.split_k}: a warp's last step lies beyond k={k}"
    if c.body == "gemv" and c.split_k > 1 and (c.warps_k == 1 or c.blocks_per_sm):
        return f"split_k={c.split_k} takes warps_k > 1 and blocks_per_sm=0, not {c.warps_k} and {c.blocks_per_sm}"
    if c.cap_inflight and not c.prefetch_stages:
        return "cap_inflight=True is for a limit, not with prefetch_stages=0"
    if c.stream:
        stage, most = c.block_k // step // c.warps_k, stream_tiles(c, k, group_size) * STRIP // step
        if stage > most or k // step < c.split_k:
            return f"block_k={c.block_k} split_k={c.split_k}: of k={k} a warp has {most} steps, a stage takes {stage}"
    if c.body == "wgmma_ws" and c.blocks_per_sm == 2 and (c.block_n != 128 or c.cluster != 1):
        return f"block_n={c.block_n} cluster={c.cluster}: two blocks an SM have registers for 128 rows, and no cluster"
    if c.body == "wgmma_ws" and k % c.block_k:
        return f"block_k={c.block_k} of k={k}: body=wgmma_ws takes whole stages"
    warps, blocks, most = c.num_warps + c.extra_warps, max(1, c.blocks_per_sm), 32 if c.body == "gemv" else 20
    if warps > most or warps * blocks > arch.max_warps_per_sm:
        return f"{warps} warps x {blocks} blocks an SM: at most {most} a block, and {arch.max_warps_per_sm} an SM"
    need, given = registers(c, k, packing, arch)
    if need > given:
        return f"about {need} registers a thread; {warps} warps x {blocks} blocks an SM leave {given}"
    free = ("block_k", "prefetch_stages") if c.few_tokens else ("prefetch_stages",)
    for name, taken in SPACES[c.body].items():  # last, since it reads all fields (kerngen/tuning/field_tracing.py)
        value = getattr(c, name)
        if name == "num_stages" and value > taken[0] > 1:  # any more than the fewest, as far as there is room
            continue
        if name not in free and value not in taken:
            return f"{name}={value}: body={c.body} takes {' or '.join(map(str, taken))}"
    return arch.why_too_large(c.smem_bytes(packing), blocks)
