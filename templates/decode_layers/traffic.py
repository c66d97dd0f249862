"""Bytes and instructions of one configuration of decode_layers, for the cost model."""

from __future__ import annotations

from math import ceil

from kerngen.arch import Target
from kerngen.templates.common.w4.tiling import STRIP, matrix_bytes
from kerngen.templates.decode_layers.spec import (
    Config,
    Problem,
    cost,
    key_bytes,
    max_peers,
    num_blocks,
    num_summed,
    slot_bytes,
)
from kerngen.templates.kernel import Traffic

WAITS, EXPERT_WAITS = 15, 4  # of a layer, and of its router and experts beside
PEER_WAITS = 0.27  # for the sums of one more block
RANK_WAITS = 2.0  # for those of one more GPU: predicted, as what a word takes from one to another
UNEVEN = 0.5  # of what the busiest block has more than others, that the loads of the next product do not hide
DRAINED = 0.6  # of what a third stage in flight holds, that a layer's exchanges wait for
TILE_OPS = 24  # of 44 instructions of a lane for a tile of 32 x 32 weights, those that loads do not hide
# Instructions for a byte of keys and values, as if they were all that a block waits for: what the 31B's take on an H200
# at 32,768 to 131,072 tokens beyond their bytes (data/experiments/decode_layers.toml, long-contexts-31b), by the full
# layers' format; of int8 and shared_int8 at 131,072 (long-contexts-31b-codes, decode-layers-codes-instructions).
# shared: predicted, plain's for a key; of 4 bits too: attn_decode's time for them, whose instructions they take.
KEY_OPS = {"plain": 4.4, "int8": 12.0, "shared": 7.0, "shared_int8": 13.0}


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Every block reads every row through L2. dram_bytes: half of what the busiest block of out and down reads more
    than others is waited for, as if all SMs read it, and the loads of a third stage are in front of a layer's rows.
    waits: of a layer, for each product, norm and attention that all blocks meet at, and for the blocks that share an
    n-tile.
    """
    p, c, blocks, num_sms = problem, config, num_blocks(problem, config, target), target.device.num_sms
    tile_bytes = matrix_bytes(STRIP, STRIP, p.group_size)
    least, weights, rows, uneven, waits = cost(problem).bytes, 0, 0, 0.0, 0.0
    for letter in p.layers:
        weights += sum(n * k for n, k in p.matrices(letter))
        rows += 4 * (p.matrices(letter)[1][1] + p.inner_of(letter)) + 8 * p.hidden * c.max_peers
        if p.num_experts:
            rows += 4 * (p.num_experts + p.top_k * p.expert_inner) + 4 * p.hidden * c.max_peers
        waits += WAITS + (EXPERT_WAITS if p.num_experts else 0) + RANK_WAITS * num_summed(p) * (p.ranks > 1)
        for (n, k), parts in list(zip(p.matrices(letter), c.parts, strict=False))[1::2]:  # out, and down
            strips, tiles = n // STRIP, k // STRIP
            uneven += num_sms * ceil(strips * parts / blocks) * ceil(tiles / parts) - strips * tiles
            waits += PEER_WAITS * (max_peers(strips, parts, min(blocks, strips * parts)) - 1)
    in_flight, more = c.max_inflight_stages * slot_bytes(p, c), max(c.max_inflight_stages - 2, 0) * slot_bytes(p, c)
    dram = least + UNEVEN * uneven * tile_bytes + DRAINED * len(p.layers) * blocks * more
    return Traffic(
        round(dram), 0, l2_bytes=least + blocks * rows, smem_bytes=2 * least,
        cuda_ops=weights * TILE_OPS // 32 + int(KEY_OPS[p.kv_format] * key_bytes(p)), bytes_in_flight=in_flight,
        copies=True, waits=waits,
    )  # fmt: skip
