"""w4a16_norm: an int4 projection and add_norm behind it, for two to four tokens.

y = x dequant(W)^T; residual_out = (residual + norm(y; post_weight)) * layer_scalar; out = norm(residual_out;
next_weight). Two launches: the blocks of the first post what they have of y's rows, a strip of W at a time, to the
second (common/w4_stream.cuh), whose blocks, one a token, are there by then and take it as it comes. So the norm waits
neither for the last block's end nor for what is written until then to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, ClassVar

from kerngen.arch import Arch, Target
from kerngen.errors import ProblemError
from kerngen.templates.common import w4_tiling
from kerngen.templates.common.row_spec import (
    ELEMENT_BYTES,
    fewest_vecs,
    require_dtypes,
    require_tokens,
    row_scratch_bytes,
    row_threads,
    why_no_dtype,
    why_row_invalid,
)
from kerngen.templates.common.w4_tiling import STREAM_SPACE, STREAMED, STRIP, require_matrix
from kerngen.templates.kernel import Arg, Body, Cost, Launch
from kerngen.templates.w4a16_gemm import spec as gemm

TOKENS = STREAMED[-1]
# block_k, warps_k, num_stages, split_k and in_flight of rows that w4a16_gemm leaves to its ring where memory is slower.
_LONG_ROWS = (1536, 12, 5, 8, 2)
MOST_TILES = 12  # of a warp, where no step chose: their digits fill its registers
MOST_THREADS = 1024
_Cut = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """x [num_tokens, k] and W [n, k] as w4a16_gemm's, of two to four tokens; residual [num_tokens, n] residual_dtype,
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
    num_tokens: int = TOKENS

    RUNTIME: ClassVar[tuple[str, ...]] = ("num_tokens",)
    DYNAMIC: ClassVar[str] = "num_tokens"

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
    """The first fields cut W as w4a16_gemm's stream does: see Tiling."""

    block_k: int = 2816
    warps_k: int = 8
    num_stages: int = 2
    split_k: int = 3
    in_flight: int = 0
    vecs_per_thread: int = 1  # vectors of eight elements that a thread of the norm holds

    @property
    def product(self) -> gemm.Config:
        """Of the product alone."""
        return gemm.Config(TOKENS, STRIP, self.block_k, STRIP, 1, self.warps_k, self.num_stages, 1,
                           split_k=self.split_k, stream=True, in_flight=self.in_flight)  # fmt: skip


SPACE = {name: STREAM_SPACE[name] for name in ("block_k", "warps_k", "num_stages", "split_k", "in_flight")} | {
    "vecs_per_thread": (1, 2, 3, 4)
}
ARGS = {
    "w4a16_posts": (
        Arg("x", "ptr"),
        Arg("w_packed", "ptr"),
        Arg("scales", "ptr"),
        Arg("workspace", "ptr"),
        Arg("num_tokens", "i32"),
    ),
    "norm_of_posts": (
        Arg("residual_out", "ptr"),
        Arg("out", "ptr"),
        Arg("residual", "ptr"),
        Arg("post_weight", "ptr"),
        Arg("layer_scalar", "ptr"),
        Arg("next_weight", "ptr"),
        Arg("workspace", "ptr"),
        Arg("eps", "f32"),
    ),
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual_out", "out")


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    return gemm.constants(_product(problem, TOKENS), config.product, arch) | {"TOKENS": TOKENS}


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if not target.arch.has_tma:
        return f"{target.arch} has no bulk copies; w4a16_gemm and add_norm serve it"
    if problem.num_tokens > TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {TOKENS}; w4a16_gemm and add_norm serve more"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if why := gemm.why_invalid(problem.product, config.product, target):
        return why
    registers = 12 + 2 * ELEMENT_BYTES[problem.residual_dtype]
    return why_row_invalid(problem.n, config.vecs_per_thread, 1, registers, SPACE["vecs_per_thread"], target.arch)


def default_config(problem: Problem, target: Target) -> Config:
    """As w4a16_gemm cuts W where it goes through it so; by steps on an H100 (docs/experiments.md)."""
    for cuts in (_streamed, _others):
        if (config := _first_valid(problem, cuts(problem, target), target)) is not None:
            return config
    raise ProblemError(f"no default configuration of w4a16_norm serves {problem} on {target.arch}")


def _first_valid(p: Problem, cuts: Iterable[_Cut], target: Target) -> Config | None:
    vecs = fewest_vecs(p.n, SPACE["vecs_per_thread"], MOST_THREADS)
    configs = (Config(*cut, vecs) for cut in cuts)
    return next((c for c in configs if why_invalid(p, c, target) is None), None)


def _streamed(p: Problem, target: Target) -> Iterator[_Cut]:
    """What steps chose, best first; none for what they leave to w4a16_gemm."""
    if p.k >= gemm.LEFT_TO_RING:
        yield _LONG_ROWS
    if (cut := gemm.streamed_by_fours(_product(p, TOKENS), target)) is not None:
        # two slots in three parts: with one on its way the kernels before end sooner, and the norm is waiting already
        few = 1 if (cut.split_k, cut.num_stages) == (3, 2) else cut.in_flight
        yield cut.block_k, cut.warps_k, cut.num_stages, cut.split_k, few


def _others(p: Problem, target: Target) -> Iterator[_Cut]:
    """As few parts as leave a warp registers, in slots of up to four tiles."""
    for split, warps in product(SPACE["split_k"], (12, 8, 4, 2)):
        tiles = w4_tiling.stream_tiles(Config(warps_k=warps, split_k=split).product, p.k, p.group_size)
        if tiles <= MOST_TILES:
            yield min(4, tiles) * STRIP * warps, warps, 2, split, 0


@cache
def pays(problem: Problem, target: Target) -> bool:
    """Whether it is faster than w4a16_gemm and add_norm, one after the other: where steps cut W so on the board that
    its arch is mostly of. So what a step asks for is the same on all of them.
    """
    usual = Target.of(target.arch)
    return problem.num_tokens > 1 and _first_valid(problem, _streamed(problem, usual), usual) is not None


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
    """What blocks post to each other, and the rows of y behind it; zero between launches."""
    return gemm.workspace_bytes(problem.product, config.product, target) + 2 * TOKENS * problem.n


def cost(problem: Problem) -> Cost:
    """The product's, whose output is as large as out: y stays in L2. And residual and weights."""
    p, product = problem, gemm.cost(problem.product)
    size, stream = ELEMENT_BYTES[p.dtype], ELEMENT_BYTES[p.residual_dtype]
    normed = 2 * p.num_tokens * stream + 2 * size  # bytes a column: residual, and both weights
    return Cost(product.bytes + p.n * normed, product.flops + 9 * p.num_tokens * p.n)
