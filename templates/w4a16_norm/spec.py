"""w4a16_norm: an int4 projection and add_norm behind it, for two to eight tokens.

y = x dequant(W)^T; residual_out = (residual + norm(y; post_weight)) * layer_scalar; out = norm(residual_out;
next_weight). Two launches. The first one's blocks write y n-tile by n-tile with flags in the data (LL); the second
one's blocks, one a token, are resident by then and poll for it. So the norm waits neither for the last block's end nor
for a round trip to L2 after that. W is read as in w4a16_gemm: for up to four tokens by bulk copies
(common/w4/warp_pipeline.cuh, common/w4/cta_pipeline.cuh), for more by the cp.async pipeline (common/w4/gemm.cuh).

Of a divided model the second launch's blocks post what arrives to the other ranks, and norm the sum over all, as
exchange_norm does and through the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    fewest_vecs,
    require,
    require_dtypes,
    require_tokens,
    row_scratch_bytes,
    row_threads,
    why_no_dtype,
    why_row_invalid,
)
from kerngen.templates.common.w4 import limits, measured
from kerngen.templates.common.w4.tiling import SPACES, STREAM_BLOCK_M, STRIP, Packing, require_matrix
from kerngen.templates.exchange_norm.spec import MOST_RANKS
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, args, fields_of
from kerngen.templates.w4a16_gemm import spec as gemm

FEW_TOKENS, MOST_TOKENS = STREAM_BLOCK_M[-1], 8  # by bulk copies, and by cp.async
MOST_THREADS = 1024
FEWEST = 3  # candidates, below which smaller ones join
VECS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """x [num_tokens, k] and W [n, k] as w4a16_gemm's, of up to eight tokens; residual [num_tokens, n] residual_dtype,
    weights [n] dtype -> residual_out [num_tokens, n] residual_dtype, which may be residual, and out [num_tokens, n]
    dtype.

    has_scalar: the sum is multiplied by layer_scalar [1] dtype. ranks: whose y, rounded, are added up in fp32 and in
    their order, and rounded, before the norm; each has some of the columns of x and W. A token with an infinity or a
    NaN in x gives NaN.
    """

    n: int = 5376
    k: int = 8192
    group_size: int = 32
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    has_scalar: bool = False
    num_tokens: int = FEW_TOKENS
    ranks: int = 1

    def __post_init__(self) -> None:
        require(1 <= self.ranks <= MOST_RANKS, f"ranks={self.ranks} is not in 1..{MOST_RANKS}")
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
                   cut.block_m, cut.block_n, cut.blocks_per_sm, cut.body == "tma_block",
                   cut.cap_inflight)  # fmt: skip


_TILING_FIELDS = ("block_n", "block_k", "warps_k", "num_stages", "blocks_per_sm")
SPACE = {name: SPACES["tma_warp"][name] for name in (*_TILING_FIELDS, "split_k", "prefetch_stages")} | {
    "vecs_per_thread": VECS
}
CTA_PIPELINE_SPACE = {
    name: SPACES["tma_block"][name] for name in (*_TILING_FIELDS, "split_k", "prefetch_stages", "cap_inflight")
} | {"vecs_per_thread": VECS}
MMA_SPACE = {name: SPACES["mma"][name] for name in _TILING_FIELDS} | {
    "blocks_per_sm": tuple(b for b in SPACES["mma"]["blocks_per_sm"] if b),
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
        Arg("addresses", "ptr", align=8),  # of several ranks, and null of one
        *args("i32", "rank", "max_rows"),
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
    return (arch.regs_per_sm - norm) // (32 * _warps(config)) // 8 * 8


def _warps(config: Config) -> int:
    return config.product.num_warps + config.product.extra_warps


def bound_threads(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    """Of entries whose __launch_bounds__ are above their blocks: with fewer registers, which the other's block has."""
    return {"w4a16_posts": _bound(problem, config, arch)} if config.cta_pipeline else {}


def _bound(problem: Problem, config: Config, arch: Arch) -> int:
    """Of the block whose threads ptxas gives no more registers than that."""
    return max(arch.bound_for(_regs_left_by_norm(problem, config, arch)), 32 * _warps(config))


def _registers_per_vec(problem: Problem) -> int:
    """Of each vector. Of ranks: words of up to four peers at a time, and the sum."""
    received = 4 * min(problem.ranks, 4) + 8 if problem.ranks > 1 else 0
    return 12 + 2 * ELEMENT_BYTES[problem.residual_dtype] + received


def why_unsupported(problem: Problem, target: Target) -> str | None:
    others = " and ".join(name for name, _ in replaces(problem))
    if not target.arch.has_tma:
        return f"{target.arch} has no bulk copies; {others} serve it"
    if problem.num_tokens > MOST_TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {MOST_TOKENS}; {others} serve more"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.block_m not in (FEW_TOKENS, MOST_TOKENS) or config.block_m < problem.num_tokens:
        return (f"block_m={config.block_m} of num_tokens={problem.num_tokens}: all are in one tile, of {FEW_TOKENS} by "
                f"bulk copies or of {MOST_TOKENS} by the ring")  # fmt: skip
    if config.cta_pipeline and config.block_m != FEW_TOKENS:
        return f"cta_pipeline=True: tiles of {FEW_TOKENS} tokens share a pipeline, not block_m={config.block_m}"
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
    arch = target.arch
    need = limits.registers(config.product, problem.k, Packing(problem.group_size), arch)[0]
    if need > (left := arch.registers_of(_bound(problem, config, arch))):
        return f"about {need} registers a thread; beside a block of the norm {_warps(config)} warps have {left} each"
    scratch = 2 * row_scratch_bytes(row_threads(problem.n, config.vecs_per_thread), 1)
    both = gemm.smem_bytes(problem.product, config.product, target) + scratch + 2 * arch.reserved_smem_bytes
    if both > arch.smem_per_sm:
        return f"both blocks need {both:,} B of shared memory, and {arch} has {arch.smem_per_sm:,} B an SM"
    return None


def candidates(problem: Problem, target: Target) -> tuple[Config, ...]:
    """W is tiled as w4a16_gemm tiles it. Threads of a norm whose product's warps share stages have at least two vectors
    where they may: fewer threads leave the product more registers.
    """
    p, product = problem, _product(problem, FEW_TOKENS)
    if p.num_tokens > FEW_TOKENS:
        short = (gemm.Config(MOST_TOKENS, 2 * STRIP, block_k, STRIP, 1, 1, 3, 2) for block_k in (256, 64, STRIP))
        cuts = [*measured.MMA_TILINGS[:4], *short]
    else:
        shared = [
            c for t in measured.NORM_CTA_TILINGS for c in gemm.stream_configs(product, target, *t, body="tma_block")
        ]
        cuts = [replace(c, cap_inflight=c.prefetch_stages > 0) for c in shared]
        cuts += [c for t in measured.NORM_WARP_TILINGS for c in gemm.stream_configs(product, target, *t)]
    found = [config for cut in cuts for config in _with_norm(p, cut, target)]
    if len(found) < FEWEST and p.num_tokens <= FEW_TOKENS:  # little shared memory, or the longest rows
        small = ((parts, warps, 4, 2, 0) for parts in SPACE["split_k"] for warps in (12, 8, 4))
        cuts = [c for t in small for c in gemm.stream_configs(product, target, *t)]
        found += [config for cut in cuts for config in _with_norm(p, cut, target)]
    return tuple(found[: gemm.MOST_CANDIDATES])


def _with_norm(p: Problem, cut: gemm.Config, target: Target) -> Iterator[Config]:
    """The product so, and the first norm that may run behind it; none where digits of x fill a warp's registers."""
    if cut.stream and limits.stream_tiles(cut, p.k, p.group_size) > limits.MOST_QUADS:
        return
    of_warps, of_block = (fewest_vecs(p.n, choices, MOST_THREADS) for choices in (VECS, VECS[1:]))
    for vecs in (of_warps,) if cut.body == "tma_warp" else (of_block, of_warps):
        if why_invalid(p, config := Config.of(cut, vecs), target) is None:
            yield config
            return


def replaces(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    p = problem
    yield "w4a16_gemm", fields_of(p.product)
    of_ranks = {"ranks": p.ranks} if p.ranks > 1 else {}
    yield "exchange_norm" if of_ranks else "add_norm", of_ranks | {
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
    normed += 2 * p.num_tokens * size * (p.ranks - 1)  # to the peers, and from them
    return Cost(product.bytes + p.n * normed, product.flops + 9 * p.num_tokens * p.n)
