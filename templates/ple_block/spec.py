"""ple_block: the end of a layer with per-layer embeddings, for few tokens, in two launches.

All that such a layer does from the MLP's output on: the norm after the MLP and the residual, the gate's dense product,
GELU and the product with the layer's own input, the projection, its norm, the residual, the layer's scalar, and the
norm before the next layer.

ple_gate: each block makes the whole residual row anew (a few KB from L2) and multiplies some rows of the gate with it.
ple_project: each block multiplies some rows of the projection; the last block to finish does the norms. Both have their
weights on the way before they wait for the kernel before them.

Why not one launch: between gate and projection every block needs every other's results. Waiting for them within one
launch is right only if all blocks are on the GPU together, which nothing promises where another stream's kernel, or a
second one that waits like this, holds SMs: two half-resident grids would wait for each other for ever. A cluster is
always resident, but a portable one has 8 blocks, whose shared memory does not hold 2.6 MB of weights, and which only
sm90 and newer have. Here no block waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    row_scratch_bytes,
    why_no_dtype,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_TOKENS = 64
MAX_HIDDEN = 4096
MAX_WIDTH = 256  # a vector a lane
MAX_ROW_VECS = 10  # vectors of a residual row that a thread holds
FEW_ROW_VECS = 6  # with which two blocks share an SM
MAX_STATIC_SMEM = 48 * 1024
# One register of ple_gate on sm70 and sm75, four tokens, fp16 stream: ptxas stops at 80, with which three blocks fit.
MAX_SPILL_BYTES = 4


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """dtype: h, out [num_tokens, hidden], gate [width, hidden], projection [hidden, width], weights of norms [hidden],
    layer_scalar [1], and ple, whose row t is the `width` elements from t * ple_stride on. residual_dtype: residual and
    residual_out, which may be residual, [num_tokens, hidden].

    r = residual + norm(h; ffn_weight); p = (gelu_tanh(r gate^T) * ple) projection^T;
    residual_out = (r + norm(p; post_weight)) * layer_scalar; out = norm(residual_out; next_weight).
    """

    hidden: int = 1536
    width: int = 256
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden, width=self.width)
        require(self.hidden <= MAX_HIDDEN, f"hidden={self.hidden} is more than {MAX_HIDDEN}")
        require(self.width <= MAX_WIDTH, f"width={self.width} is more than {MAX_WIDTH}")
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int = 1  # tokens of a block
    gate_warps: int = 4  # of a block of ple_gate, a row of the gate each
    num_warps: int = 8  # of a block of ple_project
    rows_per_warp: int = 2  # of the projection


SPACE = {"block_m": (1, 2, 4, 8), "gate_warps": (4, 8), "num_warps": (4, 8), "rows_per_warp": (1, 2, 4)}
ARGS = {
    "ple_gate": (
        *args("ptr", "residual", "h", "ffn_weight", "gate"),
        Arg("ple", "ptr", align=2, contiguous=False),
        Arg("workspace", "ptr"),
        Arg("eps", "f32"),
        *args("i32", "num_tokens", "ple_stride"),
    ),
    "ple_project": (
        *args("ptr", "residual_out", "out", "projection", "post_weight"),
        Arg("layer_scalar", "ptr", align=2),
        *args("ptr", "next_weight", "workspace"),
        Arg("eps", "f32"),
        Arg("num_tokens", "i32"),
    ),
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual_out", "out")


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if problem.num_tokens > MAX_TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {MAX_TOKENS}; dense products and add_norm serve more"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c = problem, config
    for name, warps in (("gate_warps", c.gate_warps), ("num_warps", c.num_warps)):
        if c.block_m > warps:
            return f"{name}={warps} for block_m={c.block_m} rows; a row takes a warp at least"
        if (held := _row_vecs(p, c, warps)) > MAX_ROW_VECS:
            return f"{name}={warps} hold {held} vectors of a row a thread (block_m={c.block_m}); at most {MAX_ROW_VECS}"
    if (need := smem_bytes(p, c, target)) > MAX_STATIC_SMEM:
        return f"block_m={c.block_m} rows take {need:,} B of shared memory; at most {MAX_STATIC_SMEM:,}"
    if c.block_m > 1 and c.block_m >= 2 * p.num_tokens:
        return f"block_m={c.block_m} for {p.num_tokens} tokens; {c.block_m // 2} do"
    return None


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """Few tokens in a block, though each block reads the weights again, from L2: its time is its tokens'. Or as many as
    leave two blocks room on an SM.
    """
    few = [Config(), Config(1, 8, 8, 4), Config(2, 4, 8, 4)]
    many = [Config(2, 4), Config(4, 8), Config(4, 8, 8, 4), Config(8, 8)]
    return few + [c for c in many if max(_row_vecs(problem, c, w) for w in (c.gate_warps, c.num_warps)) <= FEW_ROW_VECS]


def expected_registers(problem: Problem, config: Config, target: Target) -> dict[str, int]:
    """About: a row's vectors, and the sums of its tokens."""
    vecs = _row_vecs(problem, config, config.gate_warps)
    return {
        "ple_gate": 40 + 10 * vecs + 4 * config.block_m,
        "ple_project": 28 + 5 * config.block_m + 5 * _row_vecs(problem, config, config.num_warps),
    }


def _row_vecs(p: Problem, c: Config, warps: int) -> int:
    return ceil(p.hidden / VEC / (32 * warps // c.block_m))


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    return {
        "TOKEN_BYTES": _token_bytes(problem),
        "GATE_BYTES": _gate_bytes(problem, config),
        "PROJECT_BYTES": _project_bytes(config),
    }


def _token_bytes(p: Problem) -> int:
    """Of the workspace, for one token: a count, zero between launches, the residual, the gated, the projected."""
    return 16 + ELEMENT_BYTES[p.residual_dtype] * p.hidden + 2 * p.width + 2 * p.hidden


def _scratch_bytes(c: Config, warps: int) -> int:
    return max(16, row_scratch_bytes(32 * warps // c.block_m, c.block_m))


def _gate_bytes(p: Problem, c: Config) -> int:
    """Shared memory of ple_gate: the residual rows in dtype, padded to whole warps' vectors, and their sums."""
    return c.block_m * ceil(p.hidden / VEC / 32) * 32 * 16 + _scratch_bytes(c, c.gate_warps)


def _project_bytes(c: Config) -> int:
    """Shared memory of ple_project: two sums, and which block this was."""
    return 2 * _scratch_bytes(c, c.num_warps) + 16


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    return max(_gate_bytes(problem, config), _project_bytes(config))


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p, c, pdl = problem, config, target.arch.has_pdl
    tiles = ceil(p.num_tokens / c.block_m)
    gates, rows = ceil(p.width / c.gate_warps), ceil(p.hidden / (c.num_warps * c.rows_per_warp))
    return (
        Launch("ple_gate", (tiles * gates, 1, 1), (32 * c.gate_warps, 1, 1), 0, pdl=pdl),
        Launch("ple_project", (tiles * rows, 1, 1), (32 * c.num_warps, 1, 1), 0, pdl=pdl),
    )


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """What _token_bytes says for each token. A token's part begins where it does for any number of tokens: a count is
    never where another launch left something else.
    """
    return problem.num_tokens * _token_bytes(problem)


def cost(problem: Problem) -> Cost:
    p, size, stream = problem, ELEMENT_BYTES[problem.dtype], ELEMENT_BYTES[problem.residual_dtype]
    rows = p.num_tokens * (p.hidden * (2 * size + 2 * stream) + p.width * size)
    products = 4 * p.num_tokens * p.hidden * p.width
    return Cost(rows + 2 * size * p.hidden * p.width + 3 * size * p.hidden, products + 20 * p.num_tokens * p.hidden)


def traffic(problem: Problem, config: Config, target: Target) -> list[Traffic]:
    """cuda_ops: a lane takes about 4 instructions an element of the gate's product and one of the projection's, whose
    rows are shorter, 3 of a norm, and 24 for a block of the projection. clocks: a block's own chain, whatever else its
    SM does: the norm's sums and a warp's row for each token; and of the projection the meeting of all blocks.
    """
    p, c, size = problem, config, ELEMENT_BYTES[problem.dtype]
    tiles = ceil(p.num_tokens / c.block_m)
    row = p.hidden * (size + ELEMENT_BYTES[p.residual_dtype])
    weights, products = size * p.hidden * p.width, p.num_tokens * p.hidden * p.width
    gates, rows = ceil(p.width / c.gate_warps), ceil(p.hidden / (c.num_warps * c.rows_per_warp))
    return [
        Traffic(
            weights + 2 * p.num_tokens * row, 0, l2_bytes=tiles * (weights + gates * c.block_m * row),
            cuda_ops=4 * products + 3 * gates * p.num_tokens * p.hidden, bytes_in_flight=c.gate_warps * size * p.hidden,
            clocks=700 + 45 * c.block_m * p.hidden // 100,
        ),
        Traffic(
            weights + 2 * p.num_tokens * row, 0, l2_bytes=tiles * weights,
            cuda_ops=products + 3 * p.num_tokens * p.hidden + 24 * tiles * rows * 32 * c.num_warps,
            bytes_in_flight=c.num_warps * c.rows_per_warp * size * p.width,
            clocks=2200 + 80 * c.block_m * c.rows_per_warp,
        ),
    ]  # fmt: skip
