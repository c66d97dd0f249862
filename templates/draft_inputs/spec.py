"""draft_inputs: out = [table[ids] * scale, hidden], what a drafter's first projection reads."""

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
from kerngen.templates.common.w4.table import DENSE, OfTable, require_table, row_bytes
from kerngen.templates.embed import spec as embed
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args


@dataclass(frozen=True, slots=True)
class Problem(OfTable, TokenProblem):
    """ids [num_tokens] int64, table [vocab_size, embed_size] dtype, hidden [num_tokens, hidden] dtype
    -> out [num_tokens, embed_size + hidden] dtype.

    An id outside 0..vocab_size - 1 gives NaN in the place of its embedding and reads nothing. table, group_size: as of
    embed.
    """

    embed_size: int = 5376
    hidden: int = 5376
    vocab_size: int = 262144
    dtype: str = "bf16"
    num_tokens: int = 1
    table: str = DENSE
    group_size: int = 0

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(embed_size=self.embed_size, hidden=self.hidden)
        require(self.vocab_size > 0, f"vocab_size={self.vocab_size} is not positive")
        require_tokens(self.num_tokens)
        require_flat(self.num_tokens, self.width)
        require_table(self.table, self.group_size, self.vocab_size, self.embed_size)

    @property
    def embedding(self) -> embed.Problem:
        """What is on the left of out."""
        return embed.Problem(self.embed_size, self.vocab_size, self.dtype, num_tokens=self.num_tokens,
                             residual_dtype=self.dtype, table=self.table, group_size=self.group_size)  # fmt: skip

    @property
    def width(self) -> int:
        """Elements of a row of out."""
        return self.embed_size + self.hidden


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 128  # of a block; each moves a vector of eight elements


SPACE = {"threads": (64, 128, 256, 512)}
ARGS = {
    "draft_inputs": (
        Arg("out", "ptr"),
        Arg("ids", "ptr", align=8),
        *args("ptr", "table", "hidden"),
        Arg("scale", "f32"),
        Arg("num_tokens", "i32"),
        Arg("table_scales", "ptr", only="group_size"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: at most 512 threads with a vector each


def default_config(problem: Problem, target: Target) -> Config:
    return Config(128 if problem.num_tokens * problem.width < 2**22 else 256)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens * problem.width // (VEC * config.threads))
    return (Launch("draft_inputs", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    p, size = problem, ELEMENT_BYTES[problem.dtype]
    of_row = row_bytes(p.table, p.group_size, p.embed_size, p.dtype)
    return Cost(p.num_tokens * (of_row + (p.hidden + p.width) * size + 8), p.num_tokens * p.embed_size)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 4 instructions an element. waits: for an id, and for the row that it names."""
    in_flight = config.threads * VEC * ELEMENT_BYTES[problem.dtype]
    ops = 4 * problem.num_tokens * problem.width
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight, waits=2)
