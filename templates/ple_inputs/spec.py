"""ple_inputs: out = (norm(context * context_scale) + table[ids] * table_scale) / sqrt(2), for every layer at once.

What per-layer embeddings (PLE) begin with, once a step: a projection of each token's embedding, normed layer by layer,
and the token's row of a table of gigabytes. Rows are read in whole vectors, each once: the table may lie wherever the
GPU can read it.
"""

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
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_WIDTH = 2048  # eight vectors a lane
MAX_DATA_REGISTERS = 128  # of 255: what is left suffices for the arithmetic


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """ids [num_tokens] int64, table [vocab_size, num_layers * width], context [num_tokens, num_layers * width],
    norm_weight [width] -> out [num_tokens, num_layers, width]; floats are dtype.

    The norm runs over each `width` of a row, and every step is rounded to dtype: the scaled context, its norm, the
    scaled table row, their sum, and that over sqrt(2). An id outside 0..vocab_size - 1 gives NaN for its token and
    reads nothing of the table: a wrong id shows itself in its own row.
    """

    num_layers: int = 35
    width: int = 256
    vocab_size: int = 262144
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(width=self.width)
        require(self.width <= MAX_WIDTH, f"width={self.width} is more than {MAX_WIDTH}")
        require(self.num_layers > 0, f"num_layers={self.num_layers} is not positive")
        require(self.vocab_size > 0, f"vocab_size={self.vocab_size} is not positive")
        require_tokens(self.num_tokens)
        require_flat(self.num_tokens, self.num_layers * self.width)

    @property
    def num_slices(self) -> int:
        """Rows that are normed: one for each token and layer."""
        return self.num_tokens * self.num_layers


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 1
    slices_per_warp: int = 1  # that a warp has on their way together


SPACE = {"num_warps": (1, 2, 4, 8), "slices_per_warp": (1, 2, 4)}
ARGS = {
    "ple_inputs": (
        Arg("out", "ptr"),
        Arg("ids", "ptr", align=8),
        *args("ptr", "table", "context", "norm_weight"),
        *args("f32", "table_scale", "context_scale", "eps"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    vecs = -(-problem.width // (32 * VEC))
    if (data := 4 * vecs * (1 + 2 * config.slices_per_warp)) > MAX_DATA_REGISTERS:
        return (
            f"slices_per_warp={config.slices_per_warp} of width={problem.width} take {data} registers a thread; "
            f"at most {MAX_DATA_REGISTERS}"
        )
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """Few tokens: a warp on an SM of its own for each slice. Many: fewer blocks to start."""
    return Config(1 if problem.num_slices <= 8 * target.device.num_sms else 4)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_slices // (config.num_warps * config.slices_per_warp))
    return (Launch("ple_inputs", (blocks, 1, 1), (32 * config.num_warps, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_slices * problem.width
    size = ELEMENT_BYTES[problem.dtype]
    return Cost(3 * size * elements + size * problem.width + 8 * problem.num_tokens, 9 * elements)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 14 instructions an element, in every lane of the warp, idle ones included."""
    lanes = problem.num_slices * -(-problem.width // (32 * VEC)) * 32
    slices = config.num_warps * config.slices_per_warp
    in_flight = slices * problem.width * 2 * ELEMENT_BYTES[problem.dtype]
    return Traffic(cost(problem).bytes, 0, cuda_ops=14 * VEC * lanes, bytes_in_flight=in_flight)
