"""residual_norms: residual <- residual + norm(h), and one norm or two of the sum, as a conformer's layers have them."""

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
    """residual, h, out [num_tokens, hidden], weights [hidden], all dtype:

        sum = residual + norm(clamp(h; 0); post_weight)       (without has_post: + clamp(h; 0))
        residual = sum, out = clamp(norm(clamp(sum; 1); next_weight); 2)

    and with has_last, where the sum's norm takes the place of the residual:

        residual = norm(clamp(sum; 1); next_weight), out = clamp(norm(clamp(residual; 1); last_weight); 2)

    The numbers are rows of bounds [3, 2] fp32, the lowest and the highest, which dtype holds exactly, or infinite.
    """

    hidden: int = 1024
    dtype: str = "bf16"
    has_post: bool = True
    has_last: bool = False
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(hidden=self.hidden)
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    vecs_per_thread: int = 1  # vectors of eight elements that a thread holds; decides the threads of a row
    rows_per_block: int = 1


SPACE = {"vecs_per_thread": (1, 2, 3, 4, 6, 8), "rows_per_block": (1, 2, 4, 8)}
ARGS = {
    "residual_norms": (
        *args("ptr", "residual", "out", "h", "post_weight", "next_weight", "last_weight"),
        Arg("bounds", "ptr", align=8),
        Arg("eps", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual", "out")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    registers = 4 * (3 + problem.has_post + problem.has_last)
    return why_row_invalid(
        problem.hidden, config.vecs_per_thread, config.rows_per_block, registers, SPACE["vecs_per_thread"], target.arch
    )


def default_config(problem: Problem, target: Target) -> Config:
    """A sound has few rows: many threads for each."""
    return Config(fewest_vecs(problem.hidden, SPACE["vecs_per_thread"], 256))


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return 3 * row_scratch_bytes(row_threads(problem.hidden, config.vecs_per_thread), config.rows_per_block)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    threads = config.rows_per_block * row_threads(problem.hidden, config.vecs_per_thread)
    blocks = -(-problem.num_tokens // config.rows_per_block)
    return (Launch("residual_norms", (blocks, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements, size = problem.num_tokens * problem.hidden, ELEMENT_BYTES[problem.dtype]
    norms = 1 + problem.has_post + problem.has_last
    return Cost(size * (4 * elements + norms * problem.hidden), (1 + 4 * norms) * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 4 instructions an element and 5 for each norm, in every lane, those of no row too."""
    (launch,) = launches(problem, config, target)
    lanes = prod(launch.grid) * prod(launch.block) * config.vecs_per_thread
    ops = VEC * lanes * (4 + 5 * (1 + problem.has_post + problem.has_last))
    row_bytes = 2 * problem.hidden * ELEMENT_BYTES[problem.dtype]
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=config.rows_per_block * row_bytes)
