"""Bytes and instructions of one configuration of w4a16_gemm, for the cost model."""

from __future__ import annotations

from kerngen.arch import Target
from kerngen.templates.common.w4.counts import Product
from kerngen.templates.common.w4.counts import traffic as of_product
from kerngen.templates.kernel import Traffic
from kerngen.templates.w4a16_gemm.spec import Config, Problem, cost, num_blocks


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Memory gives each byte once."""
    p = problem
    row_tiles = -(-p.num_tokens // config.block_m)
    product = Product(p.n, p.k, p.packing, p.dtype, p.num_tokens, row_tiles, cost(p).bytes, p.gated)
    return of_product(product, config, target, num_blocks(p, config, target))
