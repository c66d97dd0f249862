"""embed: out = table[ids] * scale, the start of the residual stream (and per-layer embeddings' token part)."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    require,
    require_dtypes,
    require_flat,
    require_tokens,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """ids [num_tokens] int64, table [vocab_size, hidden] dtype -> out [num_tokens, hidden] residual_dtype.

    An id outside 0..vocab_size - 1 gives a row of NaN and reads nothing: a wrong id shows itself in its own row.
    """

    hidden: int = 5376
    vocab_size: int = 262144
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden)
        require(self.vocab_size > 0, f"vocab_size={self.vocab_size} is not positive")
        require_tokens(self.num_tokens)
        require_flat(self.num_tokens, self.hidden)


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 128
    vecs_per_thread: int = 1  # vectors of eight elements that a thread moves


SPACE = {"threads": (64, 128, 256, 512), "vecs_per_thread": (1, 2, 4)}
ARGS = {
    "embed": (
        Arg("out", "ptr"),
        Arg("ids", "ptr", align=8),
        Arg("table", "ptr"),
        Arg("scale", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: at most 512 threads with 24 registers of data


def default_config(problem: Problem, target: Target) -> Config:
    return Config(128 if problem.num_tokens * problem.hidden < 2**22 else 256, 1)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens * problem.hidden // (VEC * config.threads * config.vecs_per_thread))
    return (Launch("embed", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.hidden
    moved = ELEMENT_BYTES[problem.dtype] + ELEMENT_BYTES[problem.residual_dtype]
    return Cost(elements * moved + 8 * problem.num_tokens, elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 4 instructions an element."""
    in_flight = config.threads * config.vecs_per_thread * VEC * ELEMENT_BYTES[problem.dtype]
    ops = 4 * problem.num_tokens * problem.hidden
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
