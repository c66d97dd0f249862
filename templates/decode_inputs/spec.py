"""decode_inputs: positions, lengths and cache slots of a decode step's tokens.

It comes before a forward's `embed`, and what it writes is read ahead by attention (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import require, require_tokens
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, args


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """lengths [B] int64, tables [2, B, max_pages] int32 -> positions [num_tokens] int64, kv_lens [B] int32, slots
    [2, num_tokens] int64, for num_tokens / B tokens that follow `lengths` ones of each sequence.

    Position p of a sequence lies in row p % page_size of page table[p / page_size]: that is its slot. The caller keeps
    positions within the tables.
    """

    page_size: int = 64
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require(self.page_size > 0, f"page_size={self.page_size} is not positive")
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 32  # of a block; each takes a token


SPACE = {"threads": (32, 128)}
ARGS = {
    "decode_inputs": (
        Arg("positions", "ptr", align=8),
        Arg("kv_lens", "ptr", align=4),
        *args("ptr", "slots", "lengths", align=8),
        Arg("tables", "ptr", align=4, contiguous=False),
        *args("i64", "table_stride", "row_stride"),
        *args("i32", "q_len", "num_tokens"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("positions", "kv_lens", "slots")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: a few registers a thread


def default_config(problem: Problem, target: Target) -> Config:
    return Config(32 if problem.num_tokens <= 32 else 128)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens // config.threads)
    return (Launch("decode_inputs", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """Of tokens that are a sequence each: a length, two table entries, and what is written."""
    return Cost(problem.num_tokens * (8 + 2 * 4 + 8 + 4 + 2 * 8), 0)
