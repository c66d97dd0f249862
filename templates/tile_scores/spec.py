"""tile_scores: how much of a block of queries' attention each tile of keys is estimated to have, by means of keys.

A block of threads multiplies the queries of one list and one query head with BLOCK_N means, a GEMM over head_dim, and
keeps of each tile of keys the base-2 logarithm of its sum of exponentials: no maximum is shared among blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.attention.tile_lists import (
    LIST_KEYS,
    LIST_QUERIES,
    num_entries,
    num_lists,
    require_lists,
    require_means,
)
from kerngen.templates.common.rows.spec import require, require_dtypes, require_heads, why_no_dtype
from kerngen.templates.kernel import Arg, Body, Cost, Launch, Traffic, args

HEAD_DIMS = (128, 256, 512)
BLOCK_K = 64  # of head_dim, a stage
WARPS_M = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """q [num_tokens, num_q_heads, head_dim], means [num_pages, num_kv_heads, page_size / mean_keys, head_dim] as
    key_means makes them, both dtype -> scores [num_lists, num_q_heads, tiles] fp32: common/attention/tile_lists.py says
    which list is whose, tile_lists_torch.tile_scores what a score is. tiles: those of kv_len keys; behind a sequence's
    NOTHING.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "num_tokens", "kv_len")
    DYNAMIC: ClassVar[str] = "num_tokens"
    REACH: ClassVar[float] = 4

    head_dim: int = 512
    num_q_heads: int = 32
    num_kv_heads: int = 4
    page_size: int = 64
    mean_keys: int = 32
    dtype: str = "bf16"
    batch: int = 1
    num_tokens: int = 2048
    kv_len: int = 32768

    def __post_init__(self) -> None:
        known = ", ".join(map(str, HEAD_DIMS))
        require(self.head_dim in HEAD_DIMS, f"head_dim={self.head_dim}: tile_scores has {known}")
        require_heads(self.num_q_heads, self.num_kv_heads)
        require_lists(self.num_tokens, self.batch)
        require(self.kv_len > 0, f"kv_len={self.kv_len} is not positive")
        require_dtypes(self.dtype)
        require_means(self.mean_keys, self.page_size)


@dataclass(frozen=True, slots=True)
class Config:
    """block_n: means a block. num_warps: two rows of warps share the queries. num_stages: of 64 of head_dim."""

    block_n: int = 128
    num_warps: int = 8
    num_stages: int = 3


SPACE = {"block_n": (64, 128, 256), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
ARGS = {
    "tile_scores": (
        *args("ptr", "scores", "q", "means"),
        *args("ptr", "cu_seqlens_q", "kv_lens", "block_table", align=4),
        Arg("sm_scale", "f32"),
        *args("i32", "batch", "max_pages", "max_tiles"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE, serves=lambda arch: arch.has_ldmatrix),)
OUTPUTS = ("scores",)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if not target.arch.has_ldmatrix:
        return f"tile_scores multiplies with ldmatrix, which {target.arch} lacks; use attention over all tiles there"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    c = config
    columns = c.block_n // (c.num_warps // WARPS_M)
    if columns % 16 or c.num_warps % WARPS_M:
        return f"block_n={c.block_n} over {c.num_warps // WARPS_M} columns of warps is {columns}, no multiple of 16"
    held = LIST_QUERIES // WARPS_M * columns // 32
    if held > 128:
        return f"block_n={c.block_n} num_warps={c.num_warps}: {held} accumulators a thread; at most 128"
    if c.num_stages > 2 and not target.arch.has_cp_async:
        return f"num_stages={c.num_stages} needs cp.async, which {target.arch} lacks; use num_stages=2"
    if c.num_stages > problem.head_dim // BLOCK_K:
        return f"num_stages={c.num_stages}: head_dim={problem.head_dim} has {problem.head_dim // BLOCK_K} stages"
    return target.arch.why_too_large(smem_bytes(problem, c, target))


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Stages of queries and means; at the end what rows of warps found of each tile lies there."""
    return config.num_stages * (LIST_QUERIES + config.block_n) * BLOCK_K * 2


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """A block alone on its SM has a stage more in flight than two that share one."""
    if not target.arch.has_cp_async:
        return [Config(n, w, 2) for n, w in ((128, 8), (64, 4), (64, 8))]
    two = [Config(n, w, s) for n, w in ((128, 8), (128, 4), (64, 4)) for s in (3, 2)]
    return [*two, Config(256, 8, 3), Config(256, 8, 4)]


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    return {"BLOCK_K": BLOCK_K, "WARPS_M": WARPS_M}


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    """Blocks that share means, the heads of a group, are neighbours."""
    p, c = problem, config
    means = num_entries(p.kv_len) * (LIST_KEYS // p.mean_keys)
    grid = (p.num_q_heads, -(-means // c.block_n), num_lists(p.num_tokens, p.batch))
    return (Launch("tile_scores", grid, (32 * c.num_warps, 1, 1), smem_bytes(p, c, target), pdl=target.arch.has_pdl),)


def visible_means(problem: Problem) -> int:
    """Of one head, that the queries of all lists see together: in whole lists, of sequences that are equally long."""
    p = problem
    each = p.num_tokens // p.batch or 1
    blocks = [min(p.kv_len, p.kv_len - each + n) for n in range(LIST_QUERIES, each + LIST_QUERIES, LIST_QUERIES)]
    return p.batch * sum(max(n, 0) // p.mean_keys for n in blocks)


def cost(problem: Problem) -> Cost:
    """Queries and means once, and a product of each query with the means that it sees."""
    p = problem
    rows = p.num_tokens * p.num_q_heads * p.head_dim * 2
    means = p.batch * p.num_kv_heads * (p.kv_len // p.mean_keys) * p.head_dim * 2
    scores = num_lists(p.num_tokens, p.batch) * p.num_q_heads * num_entries(p.kv_len) * 4
    products = min(LIST_QUERIES, p.num_tokens) * visible_means(p)
    return Cost(rows + means + scores, 2 * p.num_q_heads * p.head_dim * products)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Each block reads its queries and means through L2; a score takes about eight instructions, a tensor instruction
    with its operands about two slots of a scheduler.
    """
    p, c = problem, config
    blocks = max(p.num_q_heads * -(-visible_means(p) // c.block_n), 1)
    flops = 2 * blocks * LIST_QUERIES * c.block_n * p.head_dim
    stage = (LIST_QUERIES + c.block_n) * BLOCK_K * 2
    read = blocks * stage * (p.head_dim // BLOCK_K)
    shared = LIST_QUERIES * (c.num_warps // WARPS_M) + c.block_n * WARPS_M  # rows that warps read, each once
    return Traffic(
        cost(p).bytes, flops, l2_bytes=read, smem_bytes=read + blocks * shared * p.head_dim * 2,
        cuda_ops=8 * blocks * LIST_QUERIES * c.block_n + 2 * 32 * flops // (4096 if target.arch.has_mma16816 else 2048),
        bytes_in_flight=(c.num_stages - 1) * stage, copies=target.arch.has_cp_async,
    )  # fmt: skip
