"""new_kernel: out = x * weight, each row of x times the same vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import VEC, require_dtypes, require_tokens, require_vectors
from kerngen.templates.kernel import Arg, Body, Cost, Launch


@dataclass(frozen=True, slots=True)
class Problem:
    """x, out [num_tokens, hidden], weight [hidden], all dtype."""

    RUNTIME: ClassVar[tuple[str, ...]] = ("num_tokens",)  # may differ between launches of one cubin
    DYNAMIC: ClassVar[str] = "num_tokens"  # the one that tuning has points along

    hidden: int = 5376
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(hidden=self.hidden)
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 128  # of a block, which takes one row


SPACE = {"threads": (32, 64, 128, 256, 512)}
ARGS = {"new_kernel": (Arg("out", "ptr"), Arg("x", "ptr"), Arg("weight", "ptr"))}  # of each entry point
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)  # another for each kind of hardware that needs its own source
OUTPUTS = ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if (held := -(-problem.hidden // (2 * config.threads))) > 64:  # four registers for eight weights
        return f"threads={config.threads} hold {held} registers of weights each; at most 64 of 128"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    return Config(next((t for t in SPACE["threads"] if 2 * VEC * t >= problem.hidden), 512))


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    return (Launch("new_kernel", (problem.num_tokens, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    elements = problem.num_tokens * problem.hidden
    return Cost(bytes=2 * (2 * elements + problem.hidden), flops=elements)
