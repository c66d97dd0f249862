"""moe_router: from the residual stream to the chosen experts, their weights, and the experts' normed input.

What runs as rmsnorm, two products with scales, a dense product, moe_route and a second rmsnorm is one launch: a block
norms the rows of its tokens once for both results, keeps the scaled ones in shared memory, and multiplies them with its
experts' rows of W, which came before the kernel that writes the residual had finished. With few tokens, several blocks
share the experts, and the last of them to arrive chooses; with many, a block has all experts and chooses itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, product

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    why_block_too_large,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args

MAX_EXPERTS = 256
MAX_TOP_K = 8
MAX_CANDIDATES = 12
MAX_TILES = 1024  # of tokens, that several blocks share: so many counters begin the workspace
ROWS, COLUMNS, TOKENS = 16, 32, 8  # of a fragment: DenseLane of common/rows/dense_rows.cuh
ROW_CLOCKS = 1000  # that a row takes the warps that norm it however idle their SM is
OTHER_REGISTERS = 70  # beside what is loaded and summed, by the ptxas reports


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """residual [num_tokens, hidden] residual_dtype; router_scale, pre_norm [hidden], router [num_experts, hidden] and
    per_expert_scale [num_experts] dtype -> topk_ids [num_tokens, top_k] int32 in falling order of logit (the lower id
    first on a tie), topk_weights [num_tokens, top_k] fp32, x [num_tokens, hidden] dtype.

    t = norm(residual) * router_scale * hidden^-0.5, each of the three rounded to dtype; logits = t router^T, rounded to
    dtype; from there as moe_route, NaN included. x = norm(residual; pre_norm).
    """

    hidden: int = 2816
    num_experts: int = 128
    top_k: int = 8
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden, num_experts=self.num_experts)
        require_tokens(self.num_tokens)
        require(self.num_experts <= MAX_EXPERTS, f"num_experts={self.num_experts} is not in 8..{MAX_EXPERTS}")
        limit = min(MAX_TOP_K, self.num_experts)
        require(0 < self.top_k <= limit, f"top_k={self.top_k} is not in 1..{limit}")


@dataclass(frozen=True, slots=True)
class Config:
    block_t: int = 8  # tokens of a block
    row_tiles: int = 1  # of 16 experts, that a warp owns
    warps_n: int = 1  # warps of a block that differ in experts
    warps_k: int = 8  # warps that share experts and differ in columns; summed through shared memory
    # Loads of 32 columns of W that a warp keeps in flight.
    unroll: int = field(default=6, metadata={"filed": "steps"})
    row_warps: int = 4  # warps that share a token's row while it is normed


SPACE = {
    "block_t": (8, 16, 32),
    "row_tiles": (1, 2),
    "warps_n": (1, 2, 4, 8, 16),
    "warps_k": (1, 2, 4, 8, 16),
    "unroll": (1, 2, 3, 4, 5, 6, 8, 11),
    "row_warps": (1, 2, 4, 8, 16),
}
ARGS = {
    "moe_router": (
        *args("ptr", "topk_ids", "topk_weights", "x", "residual", "router_scale", "router"),
        *args("ptr", "per_expert_scale", "pre_norm", "workspace"),
        Arg("eps", "f32"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("topk_ids", "topk_weights", "x")


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, float | int]:
    return {"MAX_TILES": MAX_TILES, "ROOT": problem.hidden**-0.5}


def expert_blocks(problem: Problem, config: Config) -> int:
    """Blocks that share a tile of tokens."""
    return -(-problem.num_experts // (ROWS * config.row_tiles * config.warps_n))


def num_tiles(problem: Problem, config: Config) -> int:
    return -(-problem.num_tokens // config.block_t)


def _warps(config: Config) -> int:
    return config.warps_n * config.warps_k


def _row_vecs(problem: Problem, config: Config) -> int:
    """Vectors of eight elements that a thread holds of a row."""
    return -(-problem.hidden // (VEC * 32 * config.row_warps))


def registers(problem: Problem, config: Config, arch: Arch) -> int:
    """A thread's, about: loads of W under way, and the more of what a row takes and what the products take."""
    c = config
    x_loads, accumulators = (1, 4) if arch.has_ldmatrix else (2, 8)
    token_tiles = c.block_t // TOKENS
    row = _row_vecs(problem, c) * (2 * ELEMENT_BYTES[problem.residual_dtype] + 14)
    products = token_tiles * c.row_tiles * accumulators + 4 * x_loads * min(token_tiles, 2)
    return 8 * c.unroll * c.row_tiles + max(row, products) + OTHER_REGISTERS


def expected_registers(problem: Problem, config: Config, target: Target) -> int:
    return registers(problem, config, target.arch)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    c, arch = config, target.arch
    warps, groups = _warps(c), -(-problem.hidden // (COLUMNS * c.unroll))
    if why := why_block_too_large(32 * warps, f"warps_n={c.warps_n} x warps_k={c.warps_k} warps"):
        return why
    if warps % c.row_warps:
        return f"{warps} warps are not made of groups of row_warps={c.row_warps}"
    if groups <= c.warps_k // 2:
        return (f"hidden={problem.hidden} is {groups} groups of unroll={c.unroll} x {COLUMNS} columns; half of "
                f"warps_k={c.warps_k} warps do")  # fmt: skip
    if (rows := ROWS * c.row_tiles * c.warps_n) >= 2 * max(problem.num_experts, ROWS):
        return f"row_tiles={c.row_tiles} x warps_n={c.warps_n} warps hold {rows} experts of {problem.num_experts}"
    available = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * warps) // 8 * 8)
    if (need := registers(problem, c, arch)) > available:
        return f"about {need} registers a thread; {32 * warps} threads leave {available}"
    if (why := arch.why_too_large(smem_bytes(problem, c, target))) is not None:
        return why
    tiles = num_tiles(problem, c)
    if expert_blocks(problem, c) > 1 and tiles > MAX_TILES:
        return f"{tiles} tiles of {c.block_t} tokens shared by {expert_blocks(problem, c)} blocks; at most {MAX_TILES}"
    if tiles * expert_blocks(problem, c) > INT32_MAX:
        return f"{tiles * expert_blocks(problem, c):,} blocks; at most {INT32_MAX:,}"
    return None


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The tokens' tile or the warps' sums, the keys of a block with all experts, scales, row sums, who came last."""
    p, c = problem, config
    steps = -(-p.hidden // COLUMNS) * 4
    tile = 16 * c.block_t * (steps if steps % 8 == 4 else steps + 4)
    sums = 512 * _warps(c) * c.row_tiles * c.block_t // TOKENS if c.warps_k > 1 else 0
    keys = 4 * c.block_t * p.num_experts if expert_blocks(p, c) == 1 else 0
    row_sums = _warps(c) // c.row_warps * -(-c.row_warps // 4) * 16 if c.row_warps > 1 else 0
    return max(tile, sums) + keys + 4 * p.num_experts + 2 * row_sums + 16


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = num_tiles(problem, config) * expert_blocks(problem, config)
    smem = smem_bytes(problem, config, target)
    return (Launch("moe_router", (blocks, 1, 1), (32 * _warps(config), 1, 1), smem, pdl=target.arch.has_pdl),)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Where blocks share tokens: counters, zero between launches, then a key for each token and expert."""
    if expert_blocks(problem, config) == 1:
        return 0
    return 4 * MAX_TILES + 4 * problem.num_tokens * problem.num_experts


def cost(problem: Problem) -> Cost:
    p, size = problem, ELEMENT_BYTES[problem.dtype]
    weights = size * (p.hidden * (p.num_experts + 2) + p.num_experts)
    rows = p.num_tokens * (p.hidden * (ELEMENT_BYTES[p.residual_dtype] + size) + 8 * p.top_k)
    return Cost(weights + rows, 2 * p.num_tokens * p.hidden * p.num_experts)


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """Eight warps a block, over a few tokens and some experts, or over many tokens and all experts; fewer and smaller
    ones for short rows, small shared memory and few registers.
    """
    rows = [(4, (8, 1, 8, 6)), (2, (8, 1, 8, 6)), (4, (8, 1, 4, 11)), (2, (8, 2, 4, 6)), (2, (16, 2, 4, 6)),
            (2, (16, 4, 2, 6)), (2, (32, 4, 2, 6)), (2, (32, 8, 1, 6)), (4, (32, 8, 1, 6))]  # fmt: skip
    rows += product((8, 4, 1), ((16, 8, 1, 6), (8, 8, 1, 4), (8, 1, 8, 3), (8, 1, 4, 1), (8, 1, 1, 1)))
    found = (
        Config(block_t, 1, warps_n, warps_k, unroll, row_warps)
        for row_warps, (block_t, warps_n, warps_k, unroll) in rows
        if block_t < 2 * max(problem.num_tokens, 8)
    )
    return tuple(islice((c for c in found if why_invalid(problem, c, target) is None), MAX_CANDIDATES))


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Every tile of tokens reads all of W, and all blocks that share a tile read its rows: through L2.

    cuda_ops: about 20 instructions an element of a row for two norms and their roundings, 12 and 20 for each product of
    a warp's step, and moe_route's 500 of a warp for each token. bytes_in_flight: rows twice, once for each norm; W's
    loads are issued as others are used. clocks: groups of warps norm one row after another.
    """
    p, c = problem, config
    tiles, shared = num_tiles(p, c), expert_blocks(p, c)
    token_tiles = c.block_t // TOKENS
    steps = tiles * shared * c.warps_n * c.row_tiles * -(-p.hidden // COLUMNS)
    flops = 2 * steps * ROWS * COLUMNS * c.block_t
    row_bytes = p.hidden * ELEMENT_BYTES[p.residual_dtype]
    w_bytes = 2 * p.num_experts * p.hidden
    l2 = cost(p).bytes + (tiles - 1) * w_bytes + (shared - 1) * p.num_tokens * row_bytes
    read = steps * COLUMNS * 2 * c.block_t + tiles * shared * c.block_t * p.hidden * 2
    tokens, groups = min(c.block_t, p.num_tokens), _warps(c) // c.row_warps
    return Traffic(
        cost(p).bytes,
        flops,
        l2_bytes=l2 + 2 * workspace_bytes(p, c, target),
        smem_bytes=read,
        cuda_ops=20 * shared * p.num_tokens * p.hidden + 32 * (steps * (12 + 20 * token_tiles) + 500 * p.num_tokens),
        bytes_in_flight=2 * min(tokens, groups) * row_bytes
        + _warps(c) * c.unroll * c.row_tiles * 6 * ROWS * COLUMNS // 5,
        clocks=ROW_CLOCKS * -(-tokens // groups),
        waits=2 if shared > 1 else 0,
    )
