"""Bytes and instructions of one configuration of moe_w4a16, for the cost model: of tokens whose experts are random."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kerngen.arch import Target
from kerngen.templates.common.w4.counts import Product
from kerngen.templates.common.w4.counts import traffic as of_product
from kerngen.templates.common.w4.tiling import Tiling
from kerngen.templates.kernel import Traffic
from kerngen.templates.moe_w4a16.spec import ALONE_TOKENS, PHASES, Config, Problem, num_blocks, shape


@lru_cache(maxsize=4096)
def expected(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> tuple[float, float]:
    """(experts that a token chose, tiles of block_m routes of one expert), each expert as likely as any other.

    A token chooses an expert with probability top_k / num_experts, so an expert's routes are binomial.
    """
    p, chance, count = top_k / num_experts, 1.0, 0.0
    if p >= 1:
        return num_experts, num_experts * -(-num_tokens // block_m)
    chance = (1 - p) ** num_tokens
    none = chance
    for routes in range(1, num_tokens + 1):
        chance *= (num_tokens - routes + 1) / routes * p / (1 - p)
        count += chance * -(-routes // block_m)
    return num_experts * (1 - none), num_experts * count


def traffic(problem: Problem, config: Config, target: Target) -> tuple[Traffic, ...]:
    """One for each launch; blocks for tiles that the routing did not make end at once."""
    p = problem
    routes = p.num_tokens * p.top_k
    experts, tiles = expected(p.num_tokens, p.top_k, p.num_experts, config.block_m)
    unplanned = p.num_tokens <= ALONE_TOKENS
    if alone := unplanned and not config.groups_routes:
        tiles = routes
    row_tiles = max(1, round(tiles))
    found = [] if unplanned else [Traffic(4 * routes, 0, l2_bytes=8 * routes, cuda_ops=40 * routes, waits=4)]
    for phase in PHASES:
        tiling, packing, (n, k) = config.tiling(phase), p.packing(phase), shape(p, phase)
        gated = phase == "up"
        read = p.num_tokens * p.hidden * 2 if gated else 0  # h stays in L2
        written = 0 if gated else routes * p.hidden * 2
        dram = round(experts * packing.bytes_of(n, k)) + read + written
        blocks = min(row_tiles * -(-n // tiling.block_n), num_blocks(p, config, target, phase))
        product = Product(n, k, packing, p.dtype, routes, row_tiles, dram, gated)
        found.append(replace(of_product(product, tiling, target, blocks), fit=_fit(config, tiling, alone)))
    return tuple(found)


def _fit(config: Config, tiling: Tiling, alone: bool) -> str:
    """Which fitted constants apply: by body and rows of a tile, of gemv of W; and how few rows' stages are cut."""
    if config.body == "gemv":
        return f"gemv_{tiling.block_n}" if alone else ""
    if config.body == "wgmma" or config.block_m > 8:
        return f"{config.body}_{config.block_m}"
    return "mma_8_long" if tiling.block_k == 256 else "mma_8_split" if tiling.warps_k > 1 else "mma_8"
