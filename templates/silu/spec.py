"""silu: x <- x * sigmoid(x), in place, between two bounded linears."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    require_dtypes,
    require_flat,
    require_tokens,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """x [num_tokens, width] dtype is clamped, activated and clamped again, to bounds [2, 2] fp32: the lowest and the
    highest of x and of the result, which dtype holds exactly, or infinite.
    """

    width: int = 4096
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(width=self.width)
        require_tokens(self.num_tokens)
        require_flat(self.num_tokens, self.width)


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 256
    vecs_per_thread: int = 2  # vectors of eight elements


SPACE = {"threads": (64, 128, 256, 512), "vecs_per_thread": (1, 2, 4)}
ARGS = {"silu": (Arg("x", "ptr"), Arg("bounds", "ptr", align=8), Arg("num_tokens", "i32"))}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("x",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: at most 512 threads with 16 registers of data


def default_config(problem: Problem, target: Target) -> Config:
    return Config()


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens * problem.width // (VEC * config.threads * config.vecs_per_thread))
    return (Launch("silu", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.width
    return Cost(2 * ELEMENT_BYTES[problem.dtype] * elements, 4 * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 16 instructions an element, the exponential and the division included."""
    in_flight = config.threads * config.vecs_per_thread * VEC * ELEMENT_BYTES[problem.dtype]
    ops = 16 * problem.num_tokens * problem.width
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
