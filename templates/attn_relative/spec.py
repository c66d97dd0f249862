"""attn_relative: attention to the last few tokens by content and distance, as a conformer has it."""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import ELEMENT_BYTES, VEC, require, require_dtypes, require_tokens
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

HEAD_DIMS = (8, 16, 32, 64, 128, 256)  # whose vectors a power of two of a warp's lanes holds
MAX_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """qkv [num_tokens, 3, num_heads, head_dim] as q | k | v, of whole sounds of seq_len tokens each. Token i sees
    itself and window - 1 tokens before it, those of its sound:

        score(i, j) = (q_i * q_scale) . (k_j * k_scale + relative_keys[i - j])
        out_i = softmax(logit_cap * tanh(score / logit_cap)) v

    in fp32 from qkv to out. qkv, out [num_tokens, num_heads * head_dim] dtype; q_scale [head_dim] and relative_keys
    [num_heads, window + 1, head_dim], of distances from window to 0, fp32. bounds [4, 2] fp32: what q, k, v and out are
    clamped to, the lowest and the highest of each, which dtype holds exactly, or infinite.
    """

    num_heads: int = 8
    head_dim: int = 128
    window: int = 12
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require(self.head_dim in HEAD_DIMS, f"head_dim={self.head_dim} is not one of: {', '.join(map(str, HEAD_DIMS))}")
        require(0 < self.num_heads <= 65_535, f"num_heads={self.num_heads} is not in 1..65535")
        require(0 < self.window <= MAX_WINDOW, f"window={self.window} is not in 1..{MAX_WINDOW}")
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 4
    queries: int = 2  # that a group of head_dim / 8 lanes answers, with the keys that they share


SPACE = {"num_warps": (1, 2, 4, 8), "queries": (1, 2, 4)}
ARGS = {
    "attn_relative": (
        *args("ptr", "out", "qkv", "q_scale", "relative_keys"),
        Arg("bounds", "ptr", align=8),
        *args("f32", "k_scale", "logit_cap"),
        *args("i32", "num_tokens", "seq_len"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def _registers(problem: Problem, queries: int) -> int:
    """Of keys or values, of scores, of queries or sums."""
    keys = problem.window + queries - 1
    return 4 * keys + queries * (problem.window + VEC)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if (held := _registers(problem, config.queries)) > 184:
        return f"queries={config.queries} of {problem.window} keys hold {held} registers; at most 184 of 255"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    return Config() if why_invalid(problem, Config(), target) is None else Config(4, 1)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return 4 * problem.window * problem.head_dim


def _queries_per_block(problem: Problem, config: Config) -> int:
    return config.queries * config.num_warps * (32 * VEC // problem.head_dim)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens // _queries_per_block(problem, config))
    threads = 32 * config.num_warps
    return (Launch("attn_relative", (blocks, problem.num_heads, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    size, row = ELEMENT_BYTES[problem.dtype], problem.num_heads * problem.head_dim
    constants = 4 * (problem.head_dim + problem.num_heads * problem.window * problem.head_dim)
    return Cost(4 * size * problem.num_tokens * row + constants, 6 * problem.num_tokens * row * problem.window)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: for each element, query and key three products, and about two instructions in which a key and a value
    are unpacked, shared by the queries; for each query and key 10 a lane, in which its score is summed up and its share
    of the softmax comes back.
    """
    p, keys = problem, problem.window + config.queries - 1
    (launch,) = launches(problem, config, target)
    lanes = launch.grid[0] * launch.grid[1] * launch.block[0]
    ops = lanes * (config.queries * (p.window * (3 * VEC + 10) + 60) + 2 * keys * 2 * VEC)
    size = ELEMENT_BYTES[p.dtype]
    block = p.head_dim * (4 * p.window + 2 * size * (_queries_per_block(p, config) + p.window - 1))
    read = launch.grid[0] * launch.grid[1] * block
    in_flight = launch.block[0] * 16 * keys
    return Traffic(cost(p).bytes, 0, l2_bytes=read + 2 * size * p.num_tokens * p.num_heads * p.head_dim, cuda_ops=ops,
                   bytes_in_flight=in_flight)  # fmt: skip
