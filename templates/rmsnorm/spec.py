"""rmsnorm: out = x * (mean(x^2) + eps)^(-1/2) * weight, one row a token."""

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
    """x [num_tokens, hidden] residual_dtype, weight [hidden] dtype (has_weight) -> out [num_tokens, hidden] dtype."""

    hidden: int = 5376
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    has_weight: bool = True
    num_tokens: int = 1

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
    "rmsnorm": (
        *args("ptr", "out", "x", "weight"),
        Arg("eps", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    registers = 4 * problem.has_weight + 2 * ELEMENT_BYTES[problem.residual_dtype]
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
    return row_scratch_bytes(row_threads(problem.hidden, config.vecs_per_thread), config.rows_per_block)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    threads = config.rows_per_block * row_threads(problem.hidden, config.vecs_per_thread)
    blocks = -(-problem.num_tokens // config.rows_per_block)
    return (Launch("rmsnorm", (blocks, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.hidden
    weight = problem.hidden * ELEMENT_BYTES[problem.dtype] * problem.has_weight
    moved = ELEMENT_BYTES[problem.residual_dtype] + ELEMENT_BYTES[problem.dtype]
    return Cost(elements * moved + weight, 4 * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 5 instructions an element, in every lane: that those of a row that is not there have
    nothing to do makes the others no faster.
    """
    (launch,) = launches(problem, config, target)
    lanes = prod(launch.grid) * prod(launch.block) * config.vecs_per_thread
    row_bytes = problem.hidden * ELEMENT_BYTES[problem.residual_dtype]
    return Traffic(cost(problem).bytes, 0, cuda_ops=5 * VEC * lanes, bytes_in_flight=config.rows_per_block * row_bytes)
