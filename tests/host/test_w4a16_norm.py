"""w4a16_norm's spec: which of its bodies serves how many tokens, what it refuses, and where steps ask for it."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest

from kerngen.arch import Target, find_device
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.spec import ELEMENT_BYTES
from kerngen.templates.common.w4 import limits
from kerngen.templates.common.w4.tiling import Packing
from kerngen.templates.w4a16_gemm import spec as gemm
from kerngen.templates.w4a16_norm.spec import Config, Problem, workspace_bytes

KERNEL = find_kernel("w4a16_norm")
H100, H200 = (Target.of(find_device(name)) for name in ("H100", "H200"))
DOWN = Problem(5376, 21504, has_scalar=True)


@pytest.mark.parametrize(("num_tokens", "body"), [(4, "tma_warp"), (8, "mma")])
def test_w_is_cut_as_w4a16_gemm_cuts_it(num_tokens: int, body: str) -> None:
    """So what is learned of one serves the other; what a block has in flight apart."""
    problem = Problem(5376, 16384, num_tokens=num_tokens)
    ours = {replace(c.product, prefetch_stages=0) for c in KERNEL.candidates(problem, H200)}
    theirs = [c for c in gemm.candidates(problem.product, H200) if c.body == body]
    assert len(ours.intersection(replace(c, prefetch_stages=0) for c in theirs)) >= min(3, len(theirs))


@pytest.mark.parametrize(("n", "k", "num_tokens", "asks"), [
    (5376, 8192, 4, True), (5376, 21504, 4, True), (5376, 16384, 8, True), (5376, 21504, 8, True),
    (3840, 8192, 8, False), (1024, 8192, 8, False),
])  # fmt: skip
def test_where_steps_ask_for_it_by_default(n: int, k: int, num_tokens: int, asks: bool) -> None:
    problem = Problem(n, k, num_tokens=num_tokens)
    assert {KERNEL.default_config(problem, t).fused for t in (H100, H200)} == {asks}


def test_what_it_refuses() -> None:
    ring = KERNEL.default_config(replace(DOWN, num_tokens=8), H200)
    stream = KERNEL.default_config(DOWN, H200)  # by bulk copies
    eight = replace(DOWN, num_tokens=8)
    assert "of 4 by bulk copies or of 8 by the ring" in str(KERNEL.why_invalid(eight, stream, H200))
    assert "block_m=16" in str(KERNEL.why_invalid(DOWN, replace(ring, block_m=16), H200))
    assert "at least 1 an SM" in str(KERNEL.why_invalid(eight, replace(ring, blocks_per_sm=0), H200))
    assert "split_k=2" in str(KERNEL.why_invalid(eight, replace(ring, split_k=2), H200))
    assert "at most 8" in str(KERNEL.why_unsupported(replace(DOWN, num_tokens=9), H200))


@pytest.mark.parametrize(
    ("n", "k", "num_tokens"), [(5376, 8192, 2), (5376, 16384, 4), (5376, 21504, 4), (3840, 4096, 4)]
)
def test_a_block_of_the_norm_has_registers_beside_one_whose_ring_is_shared(n: int, k: int, num_tokens: int) -> None:
    problem = Problem(n, k, num_tokens=num_tokens)
    config: Config = next(c for c in KERNEL.candidates(problem, H200) if c.cta_pipeline)
    assert config.cap_inflight
    entries = compile_cubin(render(KERNEL, problem, config, H200), H200.arch).entries
    launches = KERNEL.launches(problem, config, H200)
    assert sum(8 * ceil(entries[x.entry].registers / 8) * x.block[0] for x in launches) <= H200.arch.regs_per_sm
    assert all(e.spill_store_bytes == 0 for e in entries.values())
    more = replace(config, warps_k=14, block_k=14 * 32, split_k=k // 8192 * 3 or 1)
    assert "beside a block of the norm" in str(KERNEL.why_invalid(problem, more, H200))


def test_no_way_to_share_a_ring_takes_the_registers_that_a_block_of_the_norm_needs() -> None:
    rng, seen = random.Random(4), 0
    body = next(b for b in KERNEL.spec.BODIES if b.when.get("cta_pipeline"))
    while seen < 200:
        n, k = rng.choice(((5376, 21504), (5376, 8192), (3840, 4096), (2816, 8192), (2560, 10240)))
        problem = Problem(n, k, residual_dtype=rng.choice(("bf16", "fp32")))
        drawn = {name: rng.choice(choices) for name, choices in body.choices(problem, H200).items()}
        config = Config(**drawn)
        if KERNEL.why_invalid(problem, config, H200) is not None:
            continue
        seen += 1
        constants = KERNEL.spec.constants(problem, config, H200.arch)
        product, norm = KERNEL.launches(problem, config, H200)
        assert product.block[0] <= constants["BOUND_THREADS"] <= 1024
        granted = H200.arch.registers_of(constants["BOUND_THREADS"])
        vecs = config.vecs_per_thread * (14 + 2 * ELEMENT_BYTES[problem.residual_dtype])
        assert granted * product.block[0] + norm.block[0] * 8 * ceil((14 + vecs) / 8) <= H200.arch.regs_per_sm
        assert limits.registers(config.product, k, Packing(32), H200.arch)[0] <= granted
        assert product.smem_bytes + 2 * H200.arch.reserved_smem_bytes < H200.arch.smem_per_sm


def test_the_workspace_has_a_tile_of_rows_before_what_blocks_post() -> None:
    for problem in (DOWN, replace(DOWN, num_tokens=8)):
        config: Config = KERNEL.default_config(problem, H200)
        posts = gemm.workspace_bytes(problem.product, config.product, H200)
        assert workspace_bytes(problem, config, H200) == 2 * config.block_m * problem.n + posts
