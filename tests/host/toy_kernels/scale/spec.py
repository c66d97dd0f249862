"""scale: out = x * 2, a kernel that compiles in milliseconds, with configurations that spill or do not compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.kernel import Arg, Body, Cost, Launch, Traffic


@dataclass(frozen=True, slots=True)
class Problem:
    RUNTIME: ClassVar[tuple[str, ...]] = ("num_tokens",)
    DYNAMIC: ClassVar[str] = "num_tokens"

    width: int = 1024
    num_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 128
    vectors: int = 1
    flavour: str = "plain"  # "broken" does not compile, "spilling" spills


SPACE = {"threads": (32, 64, 128, 256, 2048), "vectors": (1, 2, 4), "flavour": ("plain", "broken", "spilling")}
ARGS = {"scale": (Arg("out", "ptr"), Arg("x", "ptr"), Arg("num_tokens", "i32"))}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    return "width=7 is odd; pad it to 8" if problem.width == 7 else None


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.threads > 1024:
        return f"threads={config.threads}; at most 1024 a block"
    if config.vectors * config.threads > problem.width:
        return f"{config.vectors} x {config.threads} is more than width={problem.width}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    return Config(32)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return 0


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens * problem.width // (config.threads * config.vectors))
    return (Launch("scale", (blocks, 1, 1), (config.threads, 1, 1), 0),)


def cost(problem: Problem) -> Cost:
    return Cost(8 * problem.num_tokens * problem.width, problem.num_tokens * problem.width)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    ops = 8 * problem.num_tokens * problem.width
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=4 * config.threads * config.vectors)
