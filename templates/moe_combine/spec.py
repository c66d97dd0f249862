"""moe_combine: the end of a layer with experts: their sum, the dense MLP beside it, the residual, and four norms.

h = norm(dense; dense_norm) + norm(sum_i w_i routed_i; routed_norm); residual_out = (residual + norm(h; post_norm)) *
layer_scalar; out = norm(residual_out; next_norm). One pass, where torch makes a product, a sum and four kernels. Or the
sum alone, for a runtime that norms it itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kerngen.arch import Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    fewest_vecs,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    row_scratch_bytes,
    row_threads,
    why_row_invalid,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_TOP_K = 8


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """dense [num_tokens, hidden] and routed [num_tokens, top_k, hidden] dtype, topk_weights [num_tokens, top_k] fp32,
    residual [num_tokens, hidden] residual_dtype, norms [hidden] and layer_scalar [1] dtype.

    residual_out, which may be residual, in residual_dtype; out [num_tokens, hidden] in dtype. Without has_norms out is
    the experts' sum, and routed and topk_weights are all that is read.
    """

    hidden: int = 2816
    top_k: int = 8
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    has_norms: bool = True
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden)
        require_tokens(self.num_tokens)
        require(0 < self.top_k <= MAX_TOP_K, f"top_k={self.top_k} is not in 1..{MAX_TOP_K}")
        require(
            self.has_norms or self.residual_dtype == self.dtype,
            f"residual_dtype={self.residual_dtype!r} without norms, and so without a residual; {self.dtype!r}",
        )


@dataclass(frozen=True, slots=True)
class Config:
    vecs_per_thread: int = 1  # vectors of eight elements that a thread holds; decides the threads of a row
    rows_per_block: int = 1


SPACE = {"vecs_per_thread": (1, 2, 3, 4), "rows_per_block": (1, 2, 4)}
ARGS = {
    "moe_combine": (
        *args("ptr", "residual_out", "out", "residual", "dense", "routed"),
        Arg("topk_weights", "ptr", align=4),
        *args("ptr", "dense_norm", "routed_norm", "post_norm"),
        Arg("layer_scalar", "ptr", align=2),
        Arg("next_norm", "ptr"),
        Arg("eps", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual_out", "out")
MAX_SPILL_BYTES = 8  # ptxas stops at 56 registers for a row of 264 with top_k=3 on sm80, and keeps 8 bytes in memory


def outputs(problem: Problem) -> tuple[str, ...]:
    return OUTPUTS if problem.has_norms else ("out",)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    # Of each vector: four norms, both sums and the stream; the experts' rows and weights wait for one vector at a time.
    held = -(-5 * problem.top_k // config.vecs_per_thread)
    if problem.has_norms:
        held += 4 * 6 + 2 * ELEMENT_BYTES[problem.residual_dtype]
    return why_row_invalid(
        problem.hidden, config.vecs_per_thread, config.rows_per_block, held, SPACE["vecs_per_thread"], target.arch
    )


def default_config(problem: Problem, target: Target) -> Config:
    """Few tokens: as many threads a row as registers allow. Many: rows small enough for several a SM."""
    most = 384 if problem.num_tokens <= 64 else 256
    wanted = fewest_vecs(problem.hidden, SPACE["vecs_per_thread"], most)
    for vecs in sorted(SPACE["vecs_per_thread"], key=lambda v: (abs(v - wanted), v)):
        if why_invalid(problem, Config(vecs), target) is None:
            threads = row_threads(problem.hidden, vecs)
            rows = 1 if problem.num_tokens <= 64 else next((r for r in (4, 2) if r * threads <= 128), 1)
            return Config(vecs, rows)
    return Config(wanted)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    if not problem.has_norms:
        return 0
    return 4 * row_scratch_bytes(row_threads(problem.hidden, config.vecs_per_thread), config.rows_per_block)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    threads = config.rows_per_block * row_threads(problem.hidden, config.vecs_per_thread)
    blocks = -(-problem.num_tokens // config.rows_per_block)
    return (Launch("moe_combine", (blocks, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    p = problem
    elements = p.num_tokens * p.hidden
    size, stream = ELEMENT_BYTES[p.dtype], ELEMENT_BYTES[p.residual_dtype]
    if not p.has_norms:
        return Cost(elements * size * (p.top_k + 1) + 4 * p.num_tokens * p.top_k, 2 * elements * p.top_k)
    moved = elements * (size * (p.top_k + 2) + 2 * stream) + 4 * p.num_tokens * p.top_k
    return Cost(moved + 4 * p.hidden * size, elements * (2 * p.top_k + 18))


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 30 instructions an element, 1 without the norms, 2 for each expert, in every lane: that those of
    a row that is not there have nothing to do makes the others no faster.
    """
    p = problem
    (launch,) = launches(p, config, target)
    lanes = prod(launch.grid) * prod(launch.block) * config.vecs_per_thread
    beside = ELEMENT_BYTES[p.dtype] + ELEMENT_BYTES[p.residual_dtype] if p.has_norms else 0  # the dense row, the stream
    row_bytes = p.hidden * (ELEMENT_BYTES[p.dtype] * p.top_k + beside)
    ops = ((30 if p.has_norms else 1) + 2 * p.top_k) * VEC * lanes
    return Traffic(cost(p).bytes, 0, cuda_ops=ops, bytes_in_flight=config.rows_per_block * row_bytes)
