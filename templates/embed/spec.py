"""embed: out = table[ids] * scale, the start of the residual stream. The table may be packed, in the order in which
w4a16_gemm multiplies it: then a model's embedding and its output head are one copy (common/w4/table.py).
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
from kerngen.templates.common.w4.table import DENSE, OfTable, require_table, row_bytes
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic


@dataclass(frozen=True, slots=True)
class Problem(OfTable, TokenProblem):
    """ids [num_tokens] int64, table [vocab_size, hidden] dtype -> out [num_tokens, hidden] residual_dtype.

    An id outside 0..vocab_size - 1 gives a row of NaN and reads nothing: a wrong id shows itself in its own row.
    table: "dense", or a format of w4a16_gemm's weights with fp16 scales for groups of group_size, in the order of
    `pack`; its values are rounded to dtype before they are scaled.
    """

    hidden: int = 5376
    vocab_size: int = 262144
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    num_tokens: int = 1
    table: str = DENSE
    group_size: int = 0

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden)
        require(self.vocab_size > 0, f"vocab_size={self.vocab_size} is not positive")
        require_tokens(self.num_tokens)
        require_flat(self.num_tokens, self.hidden)
        require_table(self.table, self.group_size, self.vocab_size, self.hidden)


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
        Arg("table_scales", "ptr", only="group_size"),
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
    p = problem
    of_token = row_bytes(p.table, p.group_size, p.hidden, p.dtype) + p.hidden * ELEMENT_BYTES[p.residual_dtype] + 8
    return Cost(p.num_tokens * of_token, p.num_tokens * p.hidden)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 4 instructions an element, 8 of a packed one."""
    in_flight = config.threads * config.vecs_per_thread * VEC * ELEMENT_BYTES[problem.dtype]
    ops = (8 if problem.is_packed else 4) * problem.num_tokens * problem.hidden
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
