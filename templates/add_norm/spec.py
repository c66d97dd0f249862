"""add_norm: residual_out = (residual + norm(h; post_weight)) * layer_scalar; out = norm(residual_out; next_weight).

What stands between two sublayers of a decoder layer, in one pass: the norm after one, the residual, the norm before
the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    fewest_vecs,
    require_dtypes,
    require_tokens,
    require_vectors,
    row_scratch_bytes,
    row_threads,
    why_row_invalid,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """h [num_tokens, hidden] dtype, residual [num_tokens, hidden] residual_dtype, weights [hidden] dtype.

    has_post: h is normed before it is added, else added as it is. has_scalar: the sum is multiplied by layer_scalar
    [1] dtype. has_next: out [num_tokens, hidden] dtype is written, else only residual_out, which may be residual.
    has_bounds: h, before anything, and out are clamped to bounds [2, 2] fp32, the lowest and the highest of each, which
    dtype holds exactly.
    """

    hidden: int = 5376
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    has_post: bool = True
    has_scalar: bool = False
    has_next: bool = True
    num_tokens: int = 1
    has_bounds: bool = False

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden)
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    vecs_per_thread: int = 1  # vectors of eight elements that a thread holds; decides the threads of a row
    rows_per_block: int = 1


SPACE = {"vecs_per_thread": (1, 2, 3, 4, 6, 8), "rows_per_block": (1, 2, 4, 8)}
ARGS = {
    "add_norm": (
        *args("ptr", "residual_out", "out", "residual", "h", "post_weight", "layer_scalar", "next_weight"),
        Arg("bounds", "ptr", align=8, only="has_bounds"),
        Arg("eps", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual_out", "out")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    registers = 4 * (1 + problem.has_post + problem.has_next) + 2 * ELEMENT_BYTES[problem.residual_dtype]
    return why_row_invalid(
        problem.hidden, config.vecs_per_thread, config.rows_per_block, registers, SPACE["vecs_per_thread"], target.arch
    )


def default_config(problem: Problem, target: Target) -> Config:
    """Few tokens: enough threads that one SM issues at its full rate. Many: rows small enough for several a SM."""
    if problem.num_tokens <= 64:
        return Config(fewest_vecs(problem.hidden, SPACE["vecs_per_thread"], 384))
    vecs = fewest_vecs(problem.hidden, SPACE["vecs_per_thread"], 256)
    threads = row_threads(problem.hidden, vecs)
    return Config(vecs, next((r for r in (8, 4, 2) if r * threads <= 128), 1))


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    if not (problem.has_post or problem.has_next):
        return 0
    return 2 * row_scratch_bytes(row_threads(problem.hidden, config.vecs_per_thread), config.rows_per_block)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    threads = config.rows_per_block * row_threads(problem.hidden, config.vecs_per_thread)
    blocks = -(-problem.num_tokens // config.rows_per_block)
    return (Launch("add_norm", (blocks, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.hidden
    size, stream = ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.residual_dtype]
    weights = problem.hidden * size * (problem.has_post + problem.has_next)
    return Cost(elements * (size + 2 * stream + size * problem.has_next) + weights, 9 * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 12 instructions an element, in every lane: that those of a row that is not there have
    nothing to do makes the others no faster.
    """
    (launch,) = launches(problem, config, target)
    lanes = prod(launch.grid) * prod(launch.block) * config.vecs_per_thread
    row_bytes = problem.hidden * (ELEMENT_BYTES[problem.dtype] + ELEMENT_BYTES[problem.residual_dtype])
    return Traffic(cost(problem).bytes, 0, cuda_ops=12 * VEC * lanes, bytes_in_flight=config.rows_per_block * row_bytes)
