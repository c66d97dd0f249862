"""Tilings of w4a16_gemm and w4a16_norm that sweeps and steps found good for some shape (docs/experiments.md).

Their specs make candidates of them, by body; what follows from the problem and the board is derived there.
"""

from __future__ import annotations

from kerngen.templates.common.w4.tiling import Tiling

# gemv: warps, strips of each, steps in flight at most
GEMV_TILINGS = (16, 1, 6), (8, 2, 3), (4, 1, 4), (4, 2, 3), (4, 2, 2)
# tma_warp, by tokens of a tile: parts of K, warps, tiles of a warp's stage, stages at most, prefetch_stages; and blocks
# that an SM has shared memory for, the next launch's included
TMA_TILINGS = {
    1: ((1, 12, 6, 5, 0), (1, 8, 4, 6, 0, 2), (3, 8, 4, 6, 0, 2), (3, 8, 8, 6, 0), (6, 8, 4, 6, 0, 2),
        (11, 8, 4, 6, 0, 2)),
    4: ((1, 8, 6, 4, 0), (1, 12, 4, 7, 1), (1, 16, 4, 5, 0), (2, 16, 6, 3, 1), (3, 8, 11, 2, 0), (6, 8, 6, 4, 0),
        (6, 16, 6, 3, 1), (8, 12, 4, 6, 2)),
}  # fmt: skip
CTA_PREFETCH_BYTES = 32 * 1024, 48 * 1024  # tma_block: in flight while a block waits for x; of many strips
# mma, eight tokens: block_n, block_k, warps_k, num_stages, blocks_per_sm, prefetch_stages
MMA_TILINGS = tuple(
    Tiling(8, n, k, 32, 1, warps, stages, blocks, prefetch_stages=few)
    for n, k, warps, stages, blocks, few in (
        (32, 256, 2, 6, 4, 2), (64, 256, 4, 8, 2, 2), (64, 512, 4, 4, 2, 1), (64, 512, 4, 3, 2, 1),
        (128, 256, 1, 2, 4, 0), (128, 256, 1, 2, 3, 0))
)  # fmt: skip
# wgmma_ws: block_m -> block_n, the longest block_k and its stages
WARPGROUP_TILINGS = {
    16: ((128, 256, 3), (192, 256, 5), (256, 256, 4)), 32: ((128, 256, 4), (192, 256, 4), (256, 128, 6)),
    48: ((128, 256, 4), (192, 256, 3), (256, 128, 5)), 64: ((128, 256, 3), (192, 128, 5), (256, 128, 5)),
    80: ((128, 128, 6), (192, 128, 6), (256, 128, 5)), 96: ((128, 128, 6), (192, 128, 5)),
    112: ((128, 128, 5), (192, 128, 5)), 128: ((128, 128, 4), (192, 64, 8)), 160: ((128, 128, 3), (192, 64, 5)),
    192: ((128, 128, 3), (192, 64, 4)), 256: ((128, 64, 4),),
}  # fmt: skip
PREFETCH_COLUMNS = 256  # of a tile, in flight while x is waited for

# w4a16_norm, tma_block and tma_warp: parts of K, warps, tiles of a warp's stage, stages at most; bytes of tma_block in
# flight at any time, and stages of tma_warp while x is waited for (0: all)
NORM_CTA_TILINGS = ((2, 8, 8, 5, 40960), (3, 8, 4, 10, 73728), (6, 8, 4, 10, 57344), (8, 12, 7, 4, 49152))
NORM_WARP_TILINGS = (
    (1, 8, 8, 5, 2), (1, 12, 4, 2, 0), (1, 16, 4, 5, 0), (2, 12, 4, 2, 0), (3, 8, 11, 2, 1), (6, 8, 6, 4, 0),
    (6, 16, 6, 3, 1), (8, 12, 4, 5, 2),
)  # fmt: skip
