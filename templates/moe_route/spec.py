"""moe_route: from router logits to the chosen experts and their weights, in one launch.

The router's norm, scale and projection come before it: rmsnorm without weight, then a dense product.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import ELEMENT_BYTES, require, require_dtypes, require_tokens
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_EXPERTS = 256
MAX_TOP_K = 8


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """logits [num_tokens, num_experts] logits_dtype, per_expert_scale [num_experts] dtype -> topk_ids [num_tokens,
    top_k] int32 in falling order of logit (the lower id first on a tie), topk_weights [num_tokens, top_k] fp32.

    NaN counts as the greatest logit, as in torch.topk, and makes all weights of its row NaN; ids are always distinct
    and valid.
    """

    num_experts: int = 128
    top_k: int = 8
    dtype: str = "bf16"
    logits_dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, logits_dtype=self.logits_dtype)
        require_tokens(self.num_tokens)
        require(0 < self.num_experts <= MAX_EXPERTS, f"num_experts={self.num_experts} is not in 1..{MAX_EXPERTS}")
        limit = min(MAX_TOP_K, self.num_experts)
        require(
            0 < self.top_k <= limit,
            f"top_k={self.top_k} is not in 1..{limit} (num_experts={self.num_experts})",
        )


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 1  # tokens a block: a warp takes one


SPACE = {"num_warps": (1, 2, 4, 8)}
ARGS = {
    "moe_route": (
        *args("ptr", "topk_ids", "topk_weights", "logits", "per_expert_scale"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("topk_ids", "topk_weights")


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return None  # every point of SPACE fits every arch: at most 256 threads and 1 KiB of shared memory


def default_config(problem: Problem, target: Target) -> Config:
    return Config(1 if problem.num_tokens <= 256 else 4)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """per_expert_scale in fp32."""
    return 4 * problem.num_experts


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = -(-problem.num_tokens // config.num_warps)
    return (Launch("moe_route", (blocks, 1, 1), (32 * config.num_warps, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    read = problem.num_experts * ELEMENT_BYTES[problem.logits_dtype]
    scales = problem.num_experts * ELEMENT_BYTES[problem.dtype]
    flops = problem.num_tokens * (problem.num_experts + 4 * problem.top_k)
    return Cost(problem.num_tokens * (read + 8 * problem.top_k) + scales, flops)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: sorting what a lane holds takes 5 an exchange, a round about 10 and 2 for each expert of a lane."""
    per_lane = -(-problem.num_experts // 32)
    sorting = 5 * per_lane * (per_lane - 1) // 2
    ops = problem.num_tokens * 32 * (40 + 6 * per_lane + sorting + problem.top_k * (10 + 2 * per_lane))
    in_flight = config.num_warps * problem.num_experts * ELEMENT_BYTES[problem.logits_dtype]
    return Traffic(cost(problem).bytes, 0, cuda_ops=ops, bytes_in_flight=in_flight)
