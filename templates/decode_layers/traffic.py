"""Bytes and instructions of one configuration of decode_layers, for the cost model."""

from __future__ import annotations

from kerngen.arch import Target
from kerngen.templates.decode_layers.spec import Config, Problem, cost, key_bytes, num_blocks, slot_bytes
from kerngen.templates.kernel import Traffic

WAITS, EXPERT_WAITS = 15, 4  # of a layer, and of its router and experts beside
TILE_OPS = 44  # instructions of a lane for a tile of 32 x 32 weights
# Instructions for a byte of keys and values, as if they were all that a block waits for: what the 31B's take on an H200
# at 32,768 to 131,072 tokens beyond their bytes (data/experiments/decode_layers.toml, long-contexts-31b).
KEY_OPS = 5.7


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Every block reads every row through L2. waits: of a layer, for each product, norm and attention that all blocks
    meet at.
    """
    p, c, blocks = problem, config, num_blocks(problem, config, target)
    least, weights, rows, keys = cost(problem).bytes, 0, 0, key_bytes(problem)
    for letter in p.layers:
        weights += sum(n * k for n, k in p.matrices(letter))
        rows += 4 * (p.matrices(letter)[1][1] + p.inner_of(letter)) + 8 * p.hidden * c.max_peers
        if p.num_experts:
            rows += 4 * (p.num_experts + p.top_k * p.expert_inner) + 4 * p.hidden * c.max_peers
    return Traffic(
        least, 0, l2_bytes=least + blocks * rows, smem_bytes=2 * least,
        cuda_ops=weights * TILE_OPS // 32 + int(KEY_OPS * keys),
        bytes_in_flight=c.max_inflight_stages * slot_bytes(p, c), copies=True,
        waits=(WAITS + (EXPERT_WAITS if p.num_experts else 0)) * len(p.layers),
    )  # fmt: skip
