"""w4a16_norm: an int4 projection and add_norm behind it, for two to eight tokens.

y = x dequant(W)^T; residual_out = (residual + norm(y; post_weight)) * layer_scalar; out = norm(residual_out;
next_weight). Two launches. The first one's blocks write y n-tile by n-tile with flags in the data (LL); the second
one's blocks, one a token, are resident by then and poll for it. So the norm waits neither for the last block's end nor
for a round trip to L2 after that. W is read as in w4a16_gemm: for up to four tokens by bulk copies
(common/w4/warp_pipeline.cuh, common/w4/cta_pipeline.cuh), for more by the cp.async pipeline (common/w4/gemm.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.errors import ProblemError
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    fewest_vecs,
    require_dtypes,
    require_tokens,
    row_scratch_bytes,
    row_threads,
    why_no_dtype,
    why_row_invalid,
)
from kerngen.templates.common.w4 import tiling
from kerngen.templates.common.w4.tiling import BLOCK_STREAM_SPACE, STREAM_BLOCK_M, STREAM_SPACE, STRIP, require_matrix
from kerngen.templates.common.w4.tiling import SPACE as RING_SPACE
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, args, fields_of
from kerngen.templates.w4a16_gemm import spec as gemm

FEW_TOKENS, MOST_TOKENS = STREAM_BLOCK_M[-1], gemm.MAX_MMA_TOKENS  # by bulk copies, and by cp.async
MOST_TILES = 12  # of a warp, where no step chose: their digits fill its registers
MOST_THREADS = 1024
VECS = (1, 2, 3, 4)
RING_VECS = VECS[1:]  # of norms after a pipeline that warps share, by steps


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """x [num_tokens, k] and W [n, k] as w4a16_gemm's, of up to eight tokens; residual [num_tokens, n] residual_dtype,
    weights [n] dtype -> residual_out [num_tokens, n] residual_dtype, which may be residual, and out [num_tokens, n]
    dtype.

    has_scalar: the sum is multiplied by layer_scalar [1] dtype. A token with an infinity or a NaN in x gives NaN.
    """

    n: int = 5376
    k: int = 8192
    group_size: int = 32
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    has_scalar: bool = False
    num_tokens: int = FEW_TOKENS

    def __post_init__(self) -> None:
        require_matrix(self.n, self.k, self.group_size, self.dtype)
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_tokens(self.num_tokens)

    @property
    def product(self) -> gemm.Problem:
        """y = x W^T alone."""
        return _product(self, self.num_tokens)


def _product(p: Problem, num_tokens: int) -> gemm.Problem:
    return gemm.Problem(p.n, p.k, p.group_size, p.dtype, num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    """All fields but vecs_per_thread and fused tile W as in w4a16_gemm: see Tiling. A tile of four tokens uses bulk
    copies, one of eight cp.async.
    """

    block_k: int = 2816
    warps_k: int = 8
    num_stages: int = 2
    split_k: int = 3
    prefetch_stages: int = field(default=0, metadata={"filed": "in_flight"})
    vecs_per_thread: int = 1  # vectors of eight elements that a thread of the norm holds
    block_m: int = FEW_TOKENS
    block_n: int = STRIP
    blocks_per_sm: int = 1
    cta_pipeline: bool = field(default=False, metadata={"filed": "shared_ring"})
    cap_inflight: bool = field(default=False, metadata={"filed": "throughout"})
    fused: bool = True  # False: in a step w4a16_gemm and add_norm are faster, and it asks those

    @property
    def product(self) -> gemm.Config:
        """Of the product alone."""
        return gemm.Config(self.block_m, self.block_n, self.block_k, STRIP, 1, self.warps_k, self.num_stages,
                           self.blocks_per_sm, self._body, split_k=self.split_k, prefetch_stages=self.prefetch_stages,
                           cap_inflight=self.cap_inflight)  # fmt: skip

    @property
    def _body(self) -> str:
        return "mma" if self.block_m != FEW_TOKENS else "tma_block" if self.cta_pipeline else "tma_warp"

    @classmethod
    def of(cls, cut: gemm.Config, vecs_per_thread: int) -> Config:
        """With that product."""
        return cls(cut.block_k, cut.warps_k, cut.num_stages, cut.split_k, cut.prefetch_stages, vecs_per_thread,
                   cut.block_m, cut.block_n, cut.blocks_per_sm, cut.cta_pipeline, cut.cap_inflight)  # fmt: skip


_TILING_FIELDS = ("block_n", "block_k", "warps_k", "num_stages", "blocks_per_sm")
SPACE = {name: STREAM_SPACE[name] for name in (*_TILING_FIELDS, "split_k", "prefetch_stages")} | {
    "vecs_per_thread": VECS
}
CTA_PIPELINE_SPACE = {
    name: BLOCK_STREAM_SPACE[name] for name in (*_TILING_FIELDS, "split_k", "prefetch_stages", "cap_inflight")
} | {"vecs_per_thread": VECS}
MMA_SPACE = {name: RING_SPACE[name] for name in _TILING_FIELDS} | {
    "block_n": (STRIP, *RING_SPACE["block_n"]),
    "blocks_per_sm": tuple(b for b in RING_SPACE["blocks_per_sm"] if b),
    "split_k": (1,),
    "prefetch_stages": (0, 1, 2),
    "vecs_per_thread": VECS,
}
ARGS = {
    "w4a16_posts": (
        *args("ptr", "x", "w_packed", "scales", "workspace"),
        Arg("num_tokens", "i32"),
    ),
    "norm_of_posts": (
        *args("ptr", "residual_out", "out", "residual", "post_weight", "layer_scalar", "next_weight", "workspace"),
        Arg("eps", "f32"),
    ),
}
BODIES = (
    Body("stream.cu.jinja", ARGS, SPACE, when={"block_m": FEW_TOKENS, "cta_pipeline": False}),
    Body("block_stream.cu.jinja", ARGS, CTA_PIPELINE_SPACE, when={"block_m": FEW_TOKENS, "cta_pipeline": True}),
    Body("kernel.cu.jinja", ARGS, MMA_SPACE, when={"block_m": MOST_TOKENS}),
)
OUTPUTS = ("residual_out", "out")


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    found: dict[str, Any] = dict(gemm.constants(_product(problem, config.block_m), config.product, arch))
    if config.cta_pipeline:
        found["BOUND_THREADS"] = _bound(problem, config, arch)
    return found


def _regs_left_by_norm(problem: Problem, config: Config, arch: Arch) -> int:
    """What a block of the norm leaves a thread of the product's, so that both are resident in an SM."""
    vecs = config.vecs_per_thread
    a_thread = 14 + vecs * (_registers_per_vec(problem) + 2)  # by the ptxas reports
    norm = row_threads(problem.n, vecs) * 8 * ceil(a_thread / 8)
    return (arch.regs_per_sm - norm) // (32 * tiling.stream_warps(config.product)) // 8 * 8


def bound_threads(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    """Of entries whose __launch_bounds__ are above their blocks: with fewer registers, which the other's block has."""
    return {"w4a16_posts": _bound(problem, config, arch)} if config.cta_pipeline else {}


def _bound(problem: Problem, config: Config, arch: Arch) -> int:
    """Of the block whose threads ptxas gives no more registers than that."""
    return max(arch.bound_for(_regs_left_by_norm(problem, config, arch)), 32 * tiling.stream_warps(config.product))


def _registers_per_vec(problem: Problem) -> int:
    return 12 + 2 * ELEMENT_BYTES[problem.residual_dtype]


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if not target.arch.has_tma:
        return f"{target.arch} has no bulk copies; w4a16_gemm and add_norm serve it"
    if problem.num_tokens > MOST_TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {MOST_TOKENS}; w4a16_gemm and add_norm serve more"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.block_m not in (FEW_TOKENS, MOST_TOKENS) or config.block_m < problem.num_tokens:
        return (f"block_m={config.block_m} of num_tokens={problem.num_tokens}: all are in one tile, of {FEW_TOKENS} by "
                f"bulk copies or of {MOST_TOKENS} by the ring")  # fmt: skip
    if config.blocks_per_sm < 1:
        return f"blocks_per_sm={config.blocks_per_sm}: blocks are resident while norms wait for them, at least 1 an SM"
    if why := gemm.why_invalid(problem.product, config.product, target):
        return why
    registers, vecs = _registers_per_vec(problem), SPACE["vecs_per_thread"]
    if why := why_row_invalid(problem.n, config.vecs_per_thread, 1, registers, vecs, target.arch):
        return why
    if config.cta_pipeline:
        return _why_not_co_resident(problem, config, target)
    return None


def _why_not_co_resident(problem: Problem, config: Config, target: Target) -> str | None:
    """Why no block of the norm is resident beside one of the product, whose ring is shared."""
    arch, tiles = target.arch, tiling.stream_tiles(config.product, problem.k, problem.group_size)
    need = tiling.stream_registers(config.product, tiles)
    if need > (left := arch.registers_of(_bound(problem, config, arch))):
        return (f"about {need} registers a thread for x of {tiles} tiles; beside a block of the norm an SM has {left} "
                f"for each of {config.warps_k} warps and {tiling.EXTRA_WARPS}")  # fmt: skip
    scratch = 2 * row_scratch_bytes(row_threads(problem.n, config.vecs_per_thread), 1)
    both = gemm.smem_bytes(problem.product, config.product, target) + scratch + 2 * arch.reserved_smem_bytes
    if both > arch.smem_per_sm:
        return f"both blocks need {both:,} B of shared memory, and {arch} has {arch.smem_per_sm:,} B an SM"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """As w4a16_gemm cuts W where it goes through it so; by steps on an H100 and an H200 (docs/experiments.md)."""
    few = problem.num_tokens <= FEW_TOKENS
    for cuts in (_stream_configs, _small_stream_configs) if few else (_mma_configs, _small_mma_configs):
        if (config := _first_valid(problem, cuts(problem, target), target)) is not None:
            return config
    raise ProblemError(f"no default configuration of w4a16_norm serves {problem} on {target.arch}")


def _first_valid(p: Problem, cuts: Iterable[gemm.Config], target: Target) -> Config | None:
    fewest, of_ring = (fewest_vecs(p.n, choices, MOST_THREADS) for choices in (VECS, RING_VECS))
    for cut in cuts:
        for vecs in (of_ring, fewest) if cut.cta_pipeline or not cut.stream else (fewest,):
            if why_invalid(p, config := Config.of(cut, vecs), target) is None:
                return config
    return None


def _stream(
    block_k: int, warps: int, stages: int, split: int, prefetch_stages: int, *, shared: bool = False
) -> gemm.Config:
    return gemm.Config(FEW_TOKENS, STRIP, block_k, STRIP, 1, warps, stages, 1, "tma_block" if shared else "tma_warp",
                       split_k=split, prefetch_stages=prefetch_stages, cap_inflight=shared)  # fmt: skip


def _stream_configs(p: Problem, target: Target) -> Iterator[gemm.Config]:
    """What steps chose, best first; none for what they leave to w4a16_gemm."""
    if target.device.has_fast_memory:
        yield from _cta_pipeline_configs(p, target)
    if p.k >= gemm.MIN_MMA_K:
        yield _stream(1536, 12, 5, 8, 2)
    if (cut := gemm.m4_stream_config(_product(p, FEW_TOKENS), target)) is not None:
        # two slots in three parts: with one on its way the kernels before end sooner, and the norm is waiting already
        yield replace(cut, prefetch_stages=1) if (cut.split_k, cut.num_stages) == (3, 2) else cut


def _cta_pipeline_configs(p: Problem, target: Target) -> Iterator[gemm.Config]:
    """Long rows in parts of some 80 tiles, 48 to 72 KB of them on their way; in halves, by one slot at a time, where
    whole ones are not quite a round of all blocks.
    """
    strips = p.n // STRIP
    if p.k >= gemm.MIN_MMA_K:
        yield _stream(12 * 7 * STRIP, 12, 4, 8, 1, shared=True)
    elif p.k >= gemm.MIN_SPLIT_6_K:
        yield _stream(8 * 4 * STRIP, 8, 10, 6, 3, shared=True)
    elif p.k >= 8192 and strips > target.device.num_sms and p.num_tokens <= 2:  # four sequences lose 1 % of a step
        yield _stream(8 * 4 * STRIP, 8, 10, 3, 4, shared=True)
    elif 3000 <= p.k < 5000 and 0.9 < strips / target.device.num_sms <= 1:
        yield _stream(8 * 8 * STRIP, 8, 5, 2, 1, shared=True)


def _small_stream_configs(p: Problem, target: Target) -> Iterator[gemm.Config]:
    """As few parts as leave a warp registers, in slots of up to four tiles."""
    for split, warps in product(SPACE["split_k"], (12, 8, 4, 2)):
        tiles = tiling.stream_tiles(_stream(0, warps, 2, split, 0), p.k, p.group_size)
        if tiles <= MOST_TILES:
            yield _stream(min(4, tiles) * STRIP * warps, warps, 2, split, 0)


def _mma_configs(p: Problem, target: Target) -> Iterator[gemm.Config]:
    yield from gemm.mma_configs(_product(p, MOST_TOKENS), target)


def _small_mma_configs(p: Problem, target: Target) -> Iterator[gemm.Config]:
    """Few bytes: they fit wherever there are bulk copies."""
    for block_k in (256, 128, 64, STRIP):
        yield gemm.Config(MOST_TOKENS, 2 * STRIP, block_k, STRIP, 1, 1, 3, 2)


def replaces(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    p = problem
    yield "w4a16_gemm", fields_of(p.product)
    yield "add_norm", {
        "hidden": p.n, "dtype": p.dtype, "residual_dtype": p.residual_dtype, "has_scalar": p.has_scalar,
        "num_tokens": p.num_tokens,
    }  # fmt: skip


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Of a block, of whichever launch takes more."""
    scratch = 2 * row_scratch_bytes(row_threads(problem.n, config.vecs_per_thread), 1)
    return max(gemm.smem_bytes(problem.product, config.product, target), scratch)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p, threads = problem, row_threads(problem.n, config.vecs_per_thread)
    (product,) = gemm.launches(p.product, config.product, target)
    norm = Launch("norm_of_posts", (p.num_tokens, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl)
    return replace(product, entry="w4a16_posts"), norm


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Rows of y, and behind them what blocks post to each other; zero between launches."""
    return 2 * config.block_m * problem.n + gemm.workspace_bytes(problem.product, config.product, target)


def cost(problem: Problem) -> Cost:
    """The product's, whose output is as large as out: y stays in L2. And residual and weights."""
    p, product = problem, gemm.cost(problem.product)
    size, stream = ELEMENT_BYTES[p.dtype], ELEMENT_BYTES[p.residual_dtype]
    normed = 2 * p.num_tokens * stream + 2 * size  # bytes a column: residual, and both weights
    return Cost(product.bytes + p.n * normed, product.flops + 9 * p.num_tokens * p.n)
