"""Bytes and instructions of one configuration of w4a16_norm, for the cost model."""

from __future__ import annotations

from dataclasses import replace

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import ELEMENT_BYTES
from kerngen.templates.kernel import Traffic
from kerngen.templates.w4a16_gemm.spec import cost as cost_of_product
from kerngen.templates.w4a16_gemm.traffic import traffic as of_product
from kerngen.templates.w4a16_norm.spec import FEW_TOKENS, Config, Problem, cost


def traffic(problem: Problem, config: Config, target: Target) -> list[Traffic]:
    """The product's, and the norm's: a block a token, resident while the product runs, which takes its row from L2."""
    p, elements = problem, problem.num_tokens * problem.n
    normed = cost(p).bytes - cost_of_product(p.product).bytes
    norm = Traffic(normed, 0, l2_bytes=2 * elements * ELEMENT_BYTES[p.dtype], cuda_ops=12 * elements,
                   waits=2 + (p.ranks > 1), hidden=True)  # fmt: skip
    product = of_product(p.product, config.product, target)
    return [product if config.block_m == FEW_TOKENS else replace(product, fit="mma"), norm]
