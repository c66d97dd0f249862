"""gelu_gate: out = activation(gate) * up, the middle of a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    require_activation,
    require_dtypes,
    require_flat,
    require_tokens,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """packed: gate [num_tokens, 2 * width] holds gate | up, and `up` is null. Else: gate [num_tokens, width], and
    row t of `up` starts at element t * up_stride (a multiple of 8), as per-layer embeddings need it.

    out [num_tokens, width]; all dtype. activation: "gelu_tanh" (GELU's tanh form) or "silu". has_bounds: gate, up and
    out are clamped to bounds [3, 2] fp32, the lowest and the highest of each, which dtype holds exactly.
    """

    width: int = 21504
    dtype: str = "bf16"
    packed: bool = True
    num_tokens: int = 1
    has_bounds: bool = False
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_activation(self.activation)
        require_vectors(width=self.width)
        require_tokens(self.num_tokens)
        require_flat(self.num_tokens, self.width)


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 128
    vecs_per_thread: int = 1  # vectors of eight outputs that a thread makes


SPACE = {"threads": (64, 128, 256, 512), "vecs_per_thread": (1, 2, 4)}
ARGS = {
    "gelu_gate": (
        *args("ptr", "out", "gate"),
        Arg("up", "ptr", contiguous=False),
        Arg("bounds", "ptr", align=8, only="has_bounds"),
        *args("i32", "num_tokens", "up_stride"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: at most 512 threads with 32 registers of data


def default_config(problem: Problem, target: Target) -> Config:
    return Config(128 if problem.num_tokens * problem.width < 2**22 else 256, 1)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens * problem.width // (VEC * config.threads * config.vecs_per_thread))
    return (Launch("gelu_gate", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.width
    return Cost(3 * ELEMENT_BYTES[problem.dtype] * elements, 12 * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 14 instructions an element (the exponential and the division included)."""
    in_flight = config.threads * config.vecs_per_thread * VEC * 2 * ELEMENT_BYTES[problem.dtype]
    ops = 14 * problem.num_tokens * problem.width
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
