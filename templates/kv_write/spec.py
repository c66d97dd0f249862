"""kv_write: finished K and V of new tokens into a paged cache; what vLLM calls reshape_and_cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    require,
    require_dtypes,
    require_flat,
    require_page_heads,
    require_tokens,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """k, v [num_tokens, num_kv_heads, head_dim], whose tokens start k_stride and v_stride elements apart (multiples of
    8), go to row slot_mapping[t] = page * page_size + row of the caches [num_pages, num_kv_heads, page_size, head_dim],
    where a negative slot writes nothing. page_heads: that a page of each cache has in memory (values.py, page_strides),
    0 for num_kv_heads. All tensors dtype, slot_mapping int64.
    """

    TUNED_AS_DEFAULT: ClassVar[tuple[str, ...]] = ("page_heads",)

    num_kv_heads: int = 16
    head_dim: int = 256
    page_size: int = 64  # tokens
    dtype: str = "bf16"
    num_tokens: int = 1
    page_heads: int = 0

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(head_dim=self.head_dim)
        require_tokens(self.num_tokens)
        require(self.num_kv_heads > 0, f"num_kv_heads={self.num_kv_heads} is not positive")
        require(self.page_size > 0, f"page_size={self.page_size} is not positive")
        require_page_heads(self.page_heads, self.num_kv_heads)
        require_flat(self.num_tokens, 2 * self.num_kv_heads * self.head_dim)

    @property
    def elements(self) -> int:
        """Of K and V of all tokens."""
        return 2 * self.num_tokens * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 128
    vecs_per_thread: int = 1  # vectors of eight elements that a thread copies


SPACE = {"threads": (64, 128, 256, 512), "vecs_per_thread": (1, 2, 4)}
ARGS = {
    "kv_write": (
        *args("ptr", "k_cache", "v_cache", page_heads="page_heads"),
        *(Arg(name, "ptr", contiguous=False) for name in ("k", "v")),
        Arg("slot_mapping", "ptr", align=8),
        *args("i64", "k_stride", "v_stride"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("k_cache", "v_cache")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: at most 512 threads with 16 registers of data


def default_config(problem: Problem, target: Target) -> Config:
    return Config(128 if problem.elements < 2**22 else 256, 1)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.elements // (VEC * config.threads * config.vecs_per_thread))
    return (Launch("kv_write", (blocks, 1, 1), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    return Cost(2 * ELEMENT_BYTES[problem.dtype] * problem.elements + 8 * problem.num_tokens, 0)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 30 instructions for the addresses of a vector."""
    in_flight = config.threads * config.vecs_per_thread * VEC * ELEMENT_BYTES[problem.dtype]
    return Traffic(cost(problem).bytes, 0, cuda_ops=30 * problem.elements // VEC, bytes_in_flight=in_flight)
