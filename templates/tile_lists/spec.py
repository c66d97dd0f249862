"""tile_lists: which tiles of keys each block of queries sees, from their scores; what attn_prefill takes as lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.common.attention.tile_lists import num_entries, num_lists, require_lists
from kerngen.templates.common.rows.spec import require, require_heads
from kerngen.templates.kernel import Arg, Body, Cost, Launch, args

MAX_GROUP = 64  # query heads of a kv head


@dataclass(frozen=True, slots=True)
class Problem:
    """scores [num_lists, num_q_heads, tiles] fp32 as tile_scores makes them -> counts [num_lists, num_kv_heads] int32,
    lists [num_lists, num_kv_heads, tiles] int32, the numbers of `counts` tiles from the last one down, then -1.
    tiles: those of kv_len keys.

    Kept are the first num_first tiles, the num_last up to that of the block's first query and those behind it, and
    those that a query head of the group scores at least log2_alpha above its highest; all where the block's last query
    stands at dense_from[s] or behind. density [2] int64: the entries of all lists are added to the first, and those
    that they would have had with all tiles to the second.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "num_tokens", "kv_len")
    DYNAMIC: ClassVar[str] = "num_tokens"
    REACH: ClassVar[float] = 16

    num_q_heads: int = 32
    num_kv_heads: int = 4
    batch: int = 1
    num_tokens: int = 2048
    kv_len: int = 32768

    def __post_init__(self) -> None:
        require_heads(self.num_q_heads, self.num_kv_heads)
        group = self.num_q_heads // self.num_kv_heads
        require(group <= MAX_GROUP, f"{group} query heads share a kv head; at most {MAX_GROUP}")
        require_lists(self.num_tokens, self.batch)
        require(self.kv_len > 0, f"kv_len={self.kv_len} is not positive")


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 256  # of a block, which makes one list


SPACE = {"threads": (64, 128, 256, 512)}
ARGS = {
    "tile_lists": (
        *args("ptr", "counts", "lists", align=4),
        Arg("density", "ptr", align=8),
        *args("ptr", "scores", "cu_seqlens_q", "kv_lens", "dense_from", align=4),
        Arg("log2_alpha", "f32"),
        *args("i32", "num_first", "num_last", "batch", "max_tiles"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("counts", "lists", "density")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: a few registers a thread


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """A threshold for each head of the group, and how many tiles each warp keeps."""
    return 4 * (problem.num_q_heads // problem.num_kv_heads + config.threads // 32)


def default_config(problem: Problem, target: Target) -> Config:
    return Config()


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    grid = (problem.num_kv_heads, num_lists(problem.num_tokens, problem.batch), 1)
    return (Launch("tile_lists", grid, (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """Scores twice, since the highest comes first, and lists of all tiles."""
    p = problem
    entries = num_lists(p.num_tokens, p.batch) * num_entries(p.kv_len)
    return Cost(4 * entries * (p.num_q_heads + p.num_kv_heads), entries * p.num_q_heads)
