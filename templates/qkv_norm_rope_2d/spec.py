"""qkv_norm_rope_2d: head norms and RoPE along both sides of an image, in place in a fused projection's output."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.errors import ProblemError
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_HEAD_DIM = 256  # a vector for each lane of a warp


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """qkv [num_tokens, 3, num_heads, head_dim] as q | k | v: q = rope(norm(q; q_weight)), k = rope(norm(k; k_weight))
    and v = norm(v) take the places of what they are made of.

    A token is a patch. RoPE turns pairs (j, j + head_dim / 4) within each half of a head: cos and sin [num_positions,
    head_dim], of which token t has row t modulo num_positions, hold what multiplies an element and its partner.
    has_bounds: before the norm q, k and v are clamped to bounds [3, 2] fp32, the lowest and the highest of each, which
    dtype holds exactly. All other tensors are dtype.
    """

    num_heads: int = 16
    head_dim: int = 72
    dtype: str = "bf16"
    has_bounds: bool = False
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(head_dim=self.head_dim)
        require(self.head_dim <= MAX_HEAD_DIM, f"head_dim={self.head_dim} is more than {MAX_HEAD_DIM}")
        require(self.num_heads > 0, f"num_heads={self.num_heads} is not positive")
        require_tokens(self.num_tokens)
        if (heads := self.num_tokens * self.num_heads) > INT32_MAX:  # torch.compile's numbers have no format
            raise ProblemError(f"num_tokens={self.num_tokens} of {self.num_heads} heads are {heads:,} heads; "
                               f"at most {INT32_MAX:,}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 4
    heads_per_group: int = 1  # of q, k and v each: that a group of head_dim / 8 lanes does, with one row of cos and sin


SPACE = {"num_warps": (1, 2, 4, 8), "heads_per_group": (1, 2, 3, 4)}
ARGS = {
    "qkv_norm_rope_2d": (
        *args("ptr", "qkv", "q_weight", "k_weight", "cos", "sin"),
        Arg("bounds", "ptr", align=8),
        Arg("eps", "f32"),
        *args("i32", "num_tokens", "num_positions"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("qkv",)


def _groups(problem: Problem, config: Config) -> int:
    """Groups of lanes that the whole problem takes."""
    return problem.num_tokens * -(-problem.num_heads // config.heads_per_group)


def _groups_per_block(problem: Problem, config: Config) -> int:
    return config.num_warps * (32 // (problem.head_dim // VEC))


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.heads_per_group > problem.num_heads:
        return f"heads_per_group={config.heads_per_group}, of {problem.num_heads} heads"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """Few patches: a head to a group, for the most warps. Many: two share their cosines and sines."""
    config = Config(4, 2)
    warps = 4 * _groups(problem, config) // _groups_per_block(problem, config)
    enough = warps >= 16 * target.device.num_sms
    return config if enough and why_invalid(problem, config, target) is None else Config(4, 1)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-_groups(problem, config) // _groups_per_block(problem, config))
    return (Launch("qkv_norm_rope_2d", (blocks, 1, 1), (32 * config.num_warps, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """cos and sin are counted once for each token: images that share them find them in L2."""
    size, row = ELEMENT_BYTES[problem.dtype], 3 * problem.num_heads * problem.head_dim
    moved = problem.num_tokens * (2 * row + 2 * problem.head_dim) + 2 * problem.head_dim
    return Cost(size * moved + 24 * problem.has_bounds, 8 * problem.num_tokens * row)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 11 instructions an element and 60 a thread, in every lane, those of no head too."""
    (launch,) = launches(problem, config, target)
    lanes = launch.grid[0] * launch.block[0]
    ops = lanes * (60 + 11 * VEC * 3 * config.heads_per_group)
    loads = 3 * config.heads_per_group + 2
    in_flight = _groups_per_block(problem, config) * problem.head_dim * ELEMENT_BYTES[problem.dtype] * loads
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
