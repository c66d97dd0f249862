"""w4a16_norm: an int4 projection and add_norm behind it, for two to four tokens.

y = x dequant(W)^T; residual_out = (residual + norm(y; post_weight)) * layer_scalar; out = norm(residual_out;
next_weight). Two launches: the blocks of the first post what they have of y's rows, a strip of W at a time, to the
second (common/w4_stream.cuh), whose blocks, one a token, are there by then and take it as it comes. So the norm waits
neither for the last block's end nor for what is written until then to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil
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
from kerngen.templates.common.w4_tiling import STREAM_SPACE, STREAMED, STRIP, Tiling, matrix_bytes, require_matrix
from kerngen.templates.common.w4_traffic import Product
from kerngen.templates.common.w4_traffic import traffic as of_product
from kerngen.templates.kernel import Arg, Body, Cost, Launch, Traffic
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
    def tiling(self) -> Tiling:
        return Tiling(TOKENS, STRIP, self.block_k, STRIP, 1, self.warps_k, self.num_stages, 1, split_k=self.split_k,
                      stream=True, in_flight=self.in_flight)  # fmt: skip


_SPACE_VECS = (1, 2, 3, 4)
SPACE = {name: STREAM_SPACE[name] for name in ("block_k", "warps_k", "num_stages", "split_k", "in_flight")} | {
    "vecs_per_thread": _SPACE_VECS
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
    tiling = config.tiling
    tiles = w4_tiling.stream_tiles(tiling, problem.k, problem.group_size)
    return {
        "TOKENS": TOKENS,
        "STREAM_BYTES": tiling.smem_bytes(problem.group_size),
        "MANY_TILES": "true" if w4_tiling.stream_has_many(tiling, tiles) else "false",
        "STREAM_BLOCKS": w4_tiling.stream_blocks(tiling),
    }


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if not target.arch.has_tma:
        return f"{target.arch} has no bulk copies; w4a16_gemm and add_norm serve it"
    if problem.num_tokens > TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {TOKENS}; w4a16_gemm and add_norm serve more"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c, arch = problem, config, target.arch
    if why := w4_tiling.why_not_stream(c.tiling, p.num_tokens, p.k, p.group_size, arch):
        return why
    registers = 12 + 2 * ELEMENT_BYTES[p.residual_dtype]
    if why := why_row_invalid(p.n, c.vecs_per_thread, 1, registers, SPACE["vecs_per_thread"], arch):
        return why
    return arch.why_too_large(_smem_bytes(p, c, target))


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
    of_gemm = gemm.Problem(p.n, p.k, p.group_size, p.dtype, TOKENS)
    if (cut := gemm.streamed_by_fours(of_gemm, target)) is not None:
        # two slots in three parts: with one on its way the kernels before end sooner, and the norm is waiting already
        few = 1 if (cut.split_k, cut.num_stages) == (3, 2) else cut.in_flight
        yield cut.block_k, cut.warps_k, cut.num_stages, cut.split_k, few


def _others(p: Problem, target: Target) -> Iterator[_Cut]:
    """As few parts as leave a warp registers, in slots of up to four tiles."""
    step = w4_tiling.stream_step(Config(split_k=1).tiling, p.group_size)
    for split, warps in product(SPACE["split_k"], (12, 8, 4, 2)):
        share = ceil(ceil(p.k / step / split) / warps)  # of a warp, in steps
        if share * step // STRIP <= MOST_TILES:
            yield max(1, min(4 * STRIP // step, share)) * step * warps, warps, 2, split, 0


@cache
def pays(problem: Problem, target: Target) -> bool:
    """Whether it is faster than w4a16_gemm and add_norm, one after the other: where steps cut W so on the board that
    its arch is mostly of. So what a step asks for is the same on all of them.
    """
    usual = Target.of(target.arch)
    return problem.num_tokens > 1 and _first_valid(problem, _streamed(problem, usual), usual) is not None


def num_blocks(problem: Problem, config: Config, target: Target) -> int:
    return config.tiling.num_blocks(problem.n // STRIP, problem.k, target.device.num_sms)


def _smem_bytes(p: Problem, c: Config, target: Target) -> int:
    """Of a block that multiplies: slots, and the sums of all its units."""
    units = ceil(p.n // STRIP * c.split_k / num_blocks(p, c, target))
    return c.tiling.smem_bytes(p.group_size) + units * c.warps_k * p.num_tokens * STRIP * 4


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Of a block, of whichever launch takes more."""
    scratch = 2 * row_scratch_bytes(row_threads(problem.n, config.vecs_per_thread), 1)
    return max(_smem_bytes(problem, config, target), scratch)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p, c, pdl = problem, config, target.arch.has_pdl
    smem = _smem_bytes(p, c, target)
    return (
        Launch("w4a16_posts", (num_blocks(p, c, target), 1, 1), (32 * c.warps_k, 1, 1), smem, pdl=pdl),
        Launch("norm_of_posts", (p.num_tokens, 1, 1), (row_threads(p.n, c.vecs_per_thread), 1, 1), 0, pdl=pdl),
    )


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """What blocks post to each other of each strip and part of K, and the rows of y; zero between launches."""
    sums = config.split_k if config.split_k > 1 else 0
    return problem.n * TOKENS * (4 * sums + 2)


def cost(problem: Problem) -> Cost:
    p = problem
    size, stream = ELEMENT_BYTES[p.dtype], ELEMENT_BYTES[p.residual_dtype]
    rows = p.num_tokens * (p.k * size + p.n * (size + 2 * stream))
    moved = matrix_bytes(p.n, p.k, p.group_size) + rows + 2 * p.n * size
    return Cost(moved, 2 * p.num_tokens * p.n * p.k + 9 * p.num_tokens * p.n)


def traffic(problem: Problem, config: Config, target: Target) -> list[Traffic]:
    """The product's, as w4a16_gemm's, and the norm's: a block a token, which takes its row from L2."""
    p, c = problem, config
    sums_of = Product(p.n, p.k, p.group_size, p.dtype, p.num_tokens, 1, cost(p).bytes, gated=False)
    elements = p.num_tokens * p.n
    norm = Traffic(0, 0, l2_bytes=2 * elements * ELEMENT_BYTES[p.dtype], cuda_ops=12 * elements, waits=2)
    return [of_product(sums_of, c.tiling, target, num_blocks(p, c, target)), norm]
