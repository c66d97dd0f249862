"""key_means: means of keys that follow each other in a page, by which block-sparse attention chooses what to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.attention.tile_lists import require_means
from kerngen.templates.common.rows.spec import (
    VEC,
    kv_row_bytes,
    require,
    require_dtypes,
    require_kv_format,
    require_tokens,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, Traffic, args

HEAD_DIMS = (128, 256, 512)
MOST_BLOCKS = 65535  # of a sequence and head; each goes on with the next mean


@dataclass(frozen=True, slots=True)
class Problem:
    """k [num_pages, num_kv_heads, page_size, row_entries], keys in kv_format (values.py, KVFormat) -> means [num_pages,
    num_kv_heads, page_size / mean_keys, head_dim], dtype: row r of a page's head is the mean of its keys r * mean_keys
    and on.

    Of each sequence those are made from the one that holds position starts[s] on, as far as all of its keys are there
    (kv_lens); others stay as they are. num_tokens: positions from starts[s] on, of all sequences, that are usual.
    Raises ProblemError for a page without whole means.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("batch", "num_tokens")
    DYNAMIC: ClassVar[str] = "num_tokens"
    REACH: ClassVar[float] = 4

    head_dim: int = 512
    num_kv_heads: int = 4
    page_size: int = 64
    mean_keys: int = 32
    kv_format: str = "plain"
    dtype: str = "bf16"
    batch: int = 1
    num_tokens: int = 2048

    def __post_init__(self) -> None:
        known = ", ".join(map(str, HEAD_DIMS))
        require(self.head_dim in HEAD_DIMS, f"head_dim={self.head_dim}: key_means has {known}")
        require(0 < self.num_kv_heads <= 65535, f"num_kv_heads={self.num_kv_heads} is not in 1..65535")
        require(0 < self.batch <= 65535, f"batch={self.batch} is not in 1..65535")
        require_tokens(self.num_tokens)
        require_dtypes(self.dtype)
        require_means(self.mean_keys, self.page_size)
        require_kv_format(self.kv_format, self.head_dim, self.page_size, 0)

    @property
    def num_means(self) -> int:
        """Of each head, the least that num_tokens positions have."""
        return max(self.num_tokens // self.mean_keys, 1)


@dataclass(frozen=True, slots=True)
class Config:
    threads: int = 256  # of a block, which makes one mean after another; some share its keys


SPACE = {"threads": (64, 128, 256, 512)}
ARGS = {
    "key_means": (
        *args("ptr", "means", "k"),
        *args("ptr", "kv_lens", "block_table", "starts", align=4),
        Arg("max_pages", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("means",)


def parts(problem: Problem, config: Config) -> int:
    """Into which a block's threads divide a mean's keys."""
    return config.threads * VEC // problem.head_dim


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    shared, left = divmod(problem.mean_keys, parts(problem, config) or 1)
    if not parts(problem, config) or left or not shared:
        return (
            f"threads={config.threads} hold {config.threads * VEC} columns, {parts(problem, config)} rows of "
            f"head_dim={problem.head_dim}: no divisor of mean_keys={problem.mean_keys}"
        )
    if shared > 16:
        return f"threads={config.threads} leave {shared} keys to a thread, which has registers for 16 in flight"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    return next(c for c in map(Config, (256, 512, 128, 64)) if why_invalid(problem, c, target) is None)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The sums of all parts, where there are several."""
    return config.threads * VEC * 4 if parts(problem, config) > 1 else 0


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = min(-(-problem.num_tokens // (problem.mean_keys * problem.batch)) + 1, MOST_BLOCKS)
    grid = (blocks, problem.batch, problem.num_kv_heads)
    return (Launch("key_means", grid, (config.threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """Keys once, and their means."""
    p = problem
    keys = p.num_means * p.mean_keys * kv_row_bytes(p.kv_format, p.head_dim, p.dtype)
    return Cost(p.num_kv_heads * (keys + p.num_means * p.head_dim * 2), p.num_kv_heads * p.num_tokens * p.head_dim)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: some 20 instructions for eight values, and the address of each row."""
    p, made = problem, cost(problem)
    vecs = p.num_kv_heads * p.num_means * p.mean_keys * p.head_dim // VEC
    return Traffic(made.bytes, 0, cuda_ops=40 * vecs, bytes_in_flight=p.mean_keys * p.head_dim * 2)


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    return {"PARTS": parts(problem, config)}
