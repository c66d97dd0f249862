"""gather_kv: rows of a compressed paged cache, in 16 bits, for kernels that read plain pages.

attn_prefill multiplies each key with many queries, and converts what its cache holds once for each block of them. Long
prompts convert once: this kernel gathers the keys and values that the queries of a forward see into plain pages, and
attn_prefill reads those. vLLM does so for MLA (gather_and_maybe_dequant_cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    VEC,
    kv_row_bytes,
    require,
    require_dtypes,
    require_kv_format,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, Traffic, args

HEAD_DIMS = (128, 256, 512)
MOST_GRID = 65535


@dataclass(frozen=True, slots=True)
class Problem:
    """k, v [num_pages, num_kv_heads, page_size, row_entries] in kv_format (values.py, KVFormat) -> k_out, v_out
    [batch * pages, heads, page_size, head_dim] dtype, and table_out [batch, max_pages] int32, which names their pages.

    heads: of the cache, the ones that are gathered at once, which follow each other. num_keys: of a sequence, at most,
    in whole pages: `pages` of them. Page i of sequence s goes to page s * pages + i, counted from the one that has the
    first key that is seen: of queries at positions kv_len - q_len and on with a window its length before them; without
    one, key 0. Rows that nobody sees are not written, nor are entries of table_out without such rows. Of a shared cache
    K's dims that RoPE does not turn are V's, as everywhere. Raises ProblemError for a plain cache.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "heads", "num_keys")
    DYNAMIC: ClassVar[str] = "num_keys"
    REACH: ClassVar[float] = 4

    head_dim: int = 512
    num_kv_heads: int = 4
    page_size: int = 64
    kv_format: str = "int8"
    dtype: str = "bf16"
    batch: int = 1
    heads: int = 4
    num_keys: int = 8192

    def __post_init__(self) -> None:
        known = ", ".join(map(str, HEAD_DIMS))
        require(self.head_dim in HEAD_DIMS, f"head_dim={self.head_dim}: gather_kv has {known}")
        require(self.num_kv_heads > 0, f"num_kv_heads={self.num_kv_heads} is not positive")
        require(0 < self.heads <= MOST_GRID, f"heads={self.heads} is not in 1..{MOST_GRID}")
        require(0 < self.batch <= MOST_GRID, f"batch={self.batch} is not in 1..{MOST_GRID}")
        require(self.num_keys > 0, f"num_keys={self.num_keys} is not positive")
        require_dtypes(self.dtype)
        require(self.kv_format != "plain", "kv_format='plain': a plain cache is read where it lies")
        require(self.page_size > 0, f"page_size={self.page_size} is not positive")
        require_kv_format(self.kv_format, self.head_dim, self.page_size, 0)

    @property
    def pages(self) -> int:
        """Of a sequence."""
        return -(-self.num_keys // self.page_size)


@dataclass(frozen=True, slots=True)
class Config:
    """threads: of a block, which has a page of a head. rows: that a thread has in flight, of K and of V."""

    threads: int = 256
    rows: int = 4


SPACE = {"threads": (64, 128, 256, 512), "rows": (1, 2, 4, 8)}
ARGS = {
    "gather_kv": (
        *args("ptr", "k_out", "v_out"),
        Arg("table_out", "ptr", align=4),
        *args("ptr", "k", "v"),
        *args("ptr", "kv_lens", "cu_seqlens_q", "block_table", align=4),
        *args("i32", "max_pages", "window", "first_head"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("k_out", "v_out", "table_out")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    chunks = problem.head_dim // VEC
    if config.threads % chunks:
        return f"threads={config.threads} is no multiple of the {chunks} chunks of a row of head_dim={problem.head_dim}"
    if (at_once := config.threads // chunks * config.rows) > problem.page_size:
        return (
            f"threads={config.threads} rows={config.rows} take {at_once} rows at once; a page has {problem.page_size}"
        )
    return None


def default_config(problem: Problem, target: Target) -> Config:
    ordered = (Config(256, 4), Config(256, 2), Config(128, 4), Config(128, 2), Config(64, 1), Config(128, 1))
    return next(c for c in ordered if why_invalid(problem, c, target) is None)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p = problem
    return (Launch("gather_kv", (p.pages, p.heads, p.batch), (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def out_bytes(problem: Problem) -> int:
    """Of k_out and v_out."""
    p = problem
    return 2 * p.batch * p.pages * p.heads * p.page_size * p.head_dim * 2


def cost(problem: Problem) -> Cost:
    """K and V once as they are stored, and once in 16 bits."""
    p = problem
    stored = 2 * p.batch * p.heads * p.num_keys * kv_row_bytes(p.kv_format, p.head_dim, p.dtype)
    return Cost(stored + out_bytes(p), 2 * p.batch * p.heads * p.num_keys * p.head_dim)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: some 40 instructions for eight values, and the address of each row."""
    p, c = problem, config
    vecs = 2 * p.batch * p.heads * p.num_keys * p.head_dim // VEC
    row = kv_row_bytes(p.kv_format, p.head_dim, p.dtype)
    in_flight = 2 * c.rows * (c.threads * VEC // p.head_dim) * row
    return Traffic(cost(p).bytes, 0, cuda_ops=40 * vecs, bytes_in_flight=in_flight)
