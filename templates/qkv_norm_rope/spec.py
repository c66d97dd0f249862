"""qkv_norm_rope: head norms, RoPE and the paged cache write, from the fused projection's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    kv_row_bytes,
    require,
    require_dtypes,
    require_kv_format,
    require_page_heads,
    require_shared,
    require_tokens,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

HEAD_DIMS = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """qkv [num_tokens, num_heads * head_dim] as q | k | v; q | k with k_eq_v (v is the raw k); q alone with q_only;
    k | v where num_q_heads is 0. row_heads: from a token's row to the next one's; 0 for num_heads. num_layers: a row is
    k | v of so many layers, one after the other, each with its row of k_weight [num_layers, head_dim] and its part of
    the caches, [num_layers * num_pages, ...], in which slot_mapping counts; 0 for one layer.

    q = rope(norm(q; q_weight)) goes to q [num_tokens, num_q_heads, head_dim]; k = rope(norm(k; k_weight)) and v =
    norm(v), or v as it is without v_norm, go to row slot_mapping[t] = page * page_size + row of the caches [num_pages,
    num_kv_heads, page_size, head_dim], where a negative slot writes nothing; page_heads: that a page of each has in
    memory (values.py, page_strides), 0 for num_kv_heads; kv_format: theirs (values.py, KVFormat). RoPE turns pairs
    (j, j + head_dim / 2) for j < num_rotated_pairs by positions[t] * inv_freq[j]; the other dims pass unchanged. All
    tensors dtype, inv_freq [head_dim / 2] fp32.
    """

    TUNED_AS_DEFAULT: ClassVar[tuple[str, ...]] = ("page_heads", "v_norm", "row_heads", "num_layers")

    num_q_heads: int = 32
    num_kv_heads: int = 16  # 0 with q_only
    head_dim: int = 256
    num_rotated_pairs: int = 128
    page_size: int = 64  # tokens
    dtype: str = "bf16"
    k_eq_v: bool = False
    q_only: bool = False
    num_tokens: int = 1
    page_heads: int = 0
    kv_format: str = "plain"
    v_norm: bool = True
    row_heads: int = 0
    num_layers: int = 0

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_tokens(self.num_tokens)
        require(self.head_dim in HEAD_DIMS, f"head_dim={self.head_dim} is not one of: {HEAD_DIMS}")
        require(
            0 <= self.num_rotated_pairs <= self.head_dim // 2,
            f"num_rotated_pairs={self.num_rotated_pairs} is not in 0..{self.head_dim // 2} (half of head_dim)",
        )
        kv_only = self.num_q_heads == 0 and self.num_kv_heads > 0 and not self.k_eq_v
        require(self.num_q_heads > 0 or kv_only, f"num_q_heads={self.num_q_heads} is not positive, nor 0 with k | v")
        require(
            self.v_norm or not (self.q_only or self.k_eq_v), "v_norm=False takes a v of its own: q | k | v or k | v"
        )
        require(
            self.row_heads == 0 or self.row_heads >= self.num_heads,
            f"row_heads={self.row_heads} are fewer than the {self.num_heads} of a token",
        )
        require(self.num_layers >= 0, f"num_layers={self.num_layers} is negative")
        rows_of_one = self.num_q_heads > 0 or self.row_heads > 0 or self.page_heads > 0
        require(
            not (self.num_layers and rows_of_one),
            f"num_layers={self.num_layers}: k | v of several layers are whole rows, without q, for whole pages",
        )
        require(self.page_size > 0, f"page_size={self.page_size} is not positive")
        if self.q_only:
            require(
                self.num_kv_heads == 0 and not self.k_eq_v,
                f"q_only has no keys: num_kv_heads={self.num_kv_heads} must be 0 and k_eq_v={self.k_eq_v} false",
            )
        else:
            require(self.num_kv_heads > 0, f"num_kv_heads={self.num_kv_heads} is not positive (or set q_only)")
        require(not self.page_heads or not self.q_only, f"page_heads={self.page_heads}: q_only has no caches")
        require_page_heads(self.page_heads, self.num_kv_heads)
        require(
            not self.q_only or self.kv_format == "plain", f"kv_format={self.kv_format!r}: q_only has no caches; plain"
        )
        require_shared(self.kv_format, self.k_eq_v, self.num_rotated_pairs)
        require_kv_format(self.kv_format, self.head_dim, self.page_size, self.page_heads)

    @property
    def num_heads(self) -> int:
        """Heads in a row of qkv, of each layer."""
        return self.num_q_heads + (1 if self.k_eq_v else 2) * self.num_kv_heads

    @property
    def num_rows(self) -> int:
        """Of qkv, one of each layer."""
        return self.num_tokens * max(self.num_layers, 1)


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 4
    heads_per_group: int = 1  # heads that a group of head_dim / 16 lanes does, with one sine and cosine for all


SPACE = {"num_warps": (1, 2, 4, 8), "heads_per_group": (1, 2, 4, 8)}
ARGS = {
    "qkv_norm_rope": (
        Arg("q", "ptr"),
        *args("ptr", "k_cache", "v_cache", page_heads="page_heads"),
        Arg("qkv", "ptr", contiguous=False),
        *args("ptr", "q_weight", "k_weight", "inv_freq"),
        *args("ptr", "positions", "slot_mapping", align=8),
        Arg("eps", "f32"),
        Arg("layer_entries", "i64", only="num_layers"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("q", "k_cache", "v_cache")


def _heads_per_block(problem: Problem, config: Config) -> int:
    return config.num_warps * 32 // (problem.head_dim // 16) * config.heads_per_group


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    room = _heads_per_block(problem, config)
    if (config.num_warps > 1 or config.heads_per_group > 1) and room >= 2 * problem.num_heads:
        return f"a block has room for {room} heads and a token has {problem.num_heads}: half of it would idle"
    if (blocks := problem.num_rows * -(-problem.num_heads // room)) > INT32_MAX:
        return f"{blocks:,} blocks; at most {INT32_MAX:,}"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """Few tokens: a head to a group and small blocks, for the most SMs. Many: four heads share sine and cosine."""
    few = problem.num_rows <= 64
    wanted = (Config(4, 1), Config(2, 1)) if few else (Config(2, 4), Config(2, 2), Config(2, 1))
    return next((c for c in wanted if why_invalid(problem, c, target) is None), Config(1, 1))


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = problem.num_rows * -(-problem.num_heads // _heads_per_block(problem, config))
    return (Launch("qkv_norm_rope", (blocks, 1, 1), (32 * config.num_warps, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    size = ELEMENT_BYTES[problem.dtype]
    elements = problem.num_rows * problem.head_dim
    cached = 2 * problem.num_kv_heads * kv_row_bytes(problem.kv_format, problem.head_dim, problem.dtype)
    weights = problem.head_dim * (size * (1 if problem.q_only else 2) + 2)
    return Cost(
        elements * (problem.num_heads + problem.num_q_heads) * size + problem.num_rows * (cached + 16) + weights,
        8 * elements * problem.num_heads,
    )


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 10 instructions an element, and 30 for each sine and cosine, made once a group and token."""
    groups = problem.num_rows * -(-problem.num_heads // config.heads_per_group)
    ops = 10 * problem.num_rows * problem.num_heads * problem.head_dim + 30 * groups * problem.head_dim // 2
    block_heads = min(_heads_per_block(problem, config), problem.num_heads)
    in_flight = block_heads * problem.head_dim * ELEMENT_BYTES[problem.dtype]
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
