"""moe_w4a16: each token through its chosen experts' MLPs in int4 or int8, from one token to thousands, without a host
wait.

y[t, i] = down[e] (gelu_tanh(gate) * up), gate | up = gate_up[e] x[t], for the i-th expert e of token t. The sum with
the router's weights is the next kernel's. Launches:

1. plan (not for up to 4 tokens): the routes, token * top_k + i, sorted by expert, and a table of tiles. One block.
2. gate_up: tiles of the routes of one expert; x's rows are gathered, h = gelu(gate) * up is stored in sorted order.
3. down: h's rows are contiguous, y's are scattered to the routes.

Without a plan each block sorts the routes by itself, by the first of each expert (Config.groups_routes), or every route
is a tile of one row: weights that two tokens share are read twice, the second time from L2.
One token reads only the chosen experts' weights. gate_up triggers `down` only after its own PDL wait, so `down` may
read the table, and load weights by it, before gate_up has completed. Tilings: common/w4/tiling.py, common/w4/gemm.cuh,
common/w4/gemv.cuh. gate_up and down are each in a weight format of w4a16_gemm's, whose scales are of one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import require, require_tokens
from kerngen.templates.common.w4 import limits
from kerngen.templates.common.w4.tiling import BODIES_AS_FILED, STRIP, Packing, Tiling, packing_of, require_matrix
from kerngen.templates.kernel import Arg, Body, Choices, Cost, Launch, TokenProblem, args

MAX_EXPERTS = 256
PLAN_THREADS = 1024
ALONE_TOKENS = 4  # up to so many tokens nothing is planned
MOST_GROUPED = 32  # routes that a warp of each block sorts: one a lane


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """x [num_tokens, hidden] dtype, topk_ids [num_tokens, top_k] int32, per expert gate | up [2 inner, hidden] and down
    [hidden, inner] -> y [num_tokens, top_k, hidden] dtype.

    up_weights, down_weights: formats of gate | up and of down, as w4a16_gemm's `weights`; group_size and
    down_group_size: weights along K that share a scale, down's 0 for as many as gate | up's. fp16_scales: all scales
    and minima are fp16, though dtype is bf16.
    """

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    group_size: int = 32
    dtype: str = "bf16"
    num_tokens: int = 1
    up_weights: str = "int4"
    down_weights: str = "int4"
    down_group_size: int = 0
    fp16_scales: bool = False

    def __post_init__(self) -> None:
        require(0 < self.num_experts <= MAX_EXPERTS, f"num_experts={self.num_experts} is not in 1..{MAX_EXPERTS}")
        require(0 < self.top_k <= self.num_experts, f"top_k={self.top_k} is not in 1..{self.num_experts}")
        same = self.down_group_size == self.group_size  # one problem has one spelling
        require(not same, f"down_group_size={self.down_group_size} is group_size: 0 says that")
        require(not self.fp16_scales or self.dtype != "fp16", "fp16_scales=True: with dtype=fp16 they are so")
        for phase in PHASES:
            require_matrix(*shape(self, phase), self.groups(phase), self.dtype, self.weights(phase))
        require_tokens(self.num_tokens * self.top_k)

    def weights(self, phase: str) -> str:
        """phase: up or down."""
        return self.up_weights if phase == "up" else self.down_weights

    def groups(self, phase: str) -> int:
        """Weights of a row that share a scale."""
        return self.group_size if phase == "up" else self.down_group_size or self.group_size

    def packing(self, phase: str) -> Packing:
        return packing_of(self.weights(phase), self.groups(phase))


@dataclass(frozen=True, slots=True)
class Config:
    """How gate_up's and down's work is cut: see Tiling. They share what a row of tiles is.

    No tile is shared by blocks: where a shared tile is cut follows from how many tiles there are, which all tokens of a
    batch decide together, and a token's bits must not depend on what its neighbours chose.
    """

    block_m: int = 8
    warp_n: int = 32
    warps_m: int = 1
    body: str = field(default="mma", metadata={"filed": {b: BODIES_AS_FILED[b] for b in ("wgmma", "gemv")}})
    up_block_n: int = 128
    up_block_k: int = 256
    up_warps_k: int = 1
    up_num_stages: int = 2
    up_blocks_per_sm: int = 0
    down_block_n: int = 128
    down_block_k: int = 128
    down_warps_k: int = 1
    down_num_stages: int = 2
    down_blocks_per_sm: int = 0
    groups_routes: bool = False  # of up to ALONE_TOKENS tokens: routes of an expert share a tile

    def tiling(self, phase: str) -> Tiling:
        """phase: up or down."""
        own = {n: getattr(self, f"{phase}_{n}") for n in _OWN}
        return Tiling(self.block_m, warp_n=self.warp_n, warps_m=self.warps_m, body=self.body, **own)


_OWN = ("block_n", "block_k", "warps_k", "num_stages", "blocks_per_sm")  # of each phase
PHASES = ("up", "down")


def _stages(problem: Problem, target: Target) -> tuple[int, ...]:
    return (2, 3, 4) if target.arch.has_cp_async else (2,)


def _warp_n(problem: Problem, target: Target) -> tuple[int, ...]:
    return (32, 64) if target.arch.has_ldmatrix else (64,)


def _groups_routes(problem: Problem, target: Target) -> tuple[bool, ...]:
    groups = 1 < problem.num_tokens <= ALONE_TOKENS and problem.num_tokens * problem.top_k <= MOST_GROUPED
    return (False, True) if groups else (False,)


# Of the tiles that w4a16_gemm searches those that serve few rows an expert, or many: two products multiply the choices.
SPACE: dict[str, Choices] = {
    "block_m": (8, 16, 32, 64, 128),
    "warp_n": _warp_n,
    "warps_m": (1, 2),
    "up_block_n": (64, 128, 256),
    "up_block_k": (64, 128, 256),
    "up_warps_k": (1, 2, 4),
    "up_num_stages": _stages,
    "up_blocks_per_sm": (0,),
    "down_block_n": (64, 128, 256),
    "down_block_k": (64, 128, 256),
    "down_warps_k": (1, 2, 4),
    "down_num_stages": _stages,
    "down_blocks_per_sm": (0,),
    "groups_routes": _groups_routes,
}
WGMMA_SPACE = SPACE | {
    "warp_n": (32,), "warps_m": (1,), "up_warps_k": (1,), "down_warps_k": (1,),
    "up_block_n": (128, 256), "up_num_stages": (3, 4, 5), "down_block_n": (128, 256), "down_num_stages": (3, 4, 5),
}  # fmt: skip

GEMV_SPACE = SPACE | {
    "block_m": (8,), "warps_m": (1,), "warp_n": (32, 64),
    "up_block_n": (32, 64, 128), "up_block_k": (256, 512, 768, 1024, 1536, 2048), "up_warps_k": (2, 4, 8, 16),
    "down_block_n": (32, 64, 128), "down_block_k": (128, 256, 384, 512, 768), "down_warps_k": (1, 2, 4, 8),
    "up_num_stages": (1,), "down_num_stages": (1,), "up_blocks_per_sm": (0, 2, 3), "down_blocks_per_sm": (0, 2, 3),
}  # fmt: skip

_ARGS = (
    *args("ptr", "y", "x", "gate_up", "gate_up_scales", "down", "down_scales"),
    Arg("topk_ids", "ptr", align=4),
    Arg("workspace", "ptr"),
    Arg("num_tokens", "i32"),
)
ARGS = dict.fromkeys(("plan", "gate_up", "down"), _ARGS)
BODIES = (
    Body("kernel.cu.jinja", ARGS, SPACE, when={"body": "mma"}),
    Body("gemv.cu.jinja", ARGS, GEMV_SPACE, serves=lambda arch: arch.has_ldmatrix, when={"body": "gemv"}),
    Body(
        "kernel.cu.jinja",
        ARGS,
        WGMMA_SPACE,
        serves=lambda arch: arch.has_wgmma,
        when={"body": "wgmma"},
    ),
)
OUTPUTS = ("y",)
MAX_SPILL_BYTES = 16  # as w4a16_gemm


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    found = {"PLAN_THREADS": PLAN_THREADS, "ALONE_TOKENS": ALONE_TOKENS, "MOST_GROUPED": MOST_GROUPED}
    found["SCALES_BF16"] = problem.dtype == "bf16" and not problem.fp16_scales
    for phase, packing in ((phase.upper(), problem.packing(phase)) for phase in PHASES):
        found |= {f"{phase}_BITS": packing.bits, f"{phase}_HAS_MINIMA": packing.has_minima}
    return found | {"DOWN_GROUP_SIZE": problem.groups("down")}


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The largest launch's. The products' is dynamic; static are plan's (counts by warp and expert, two tables) and
    what a block sorts, behind which dynamic memory begins at a multiple of 1024 bytes.
    """
    products = max(config.tiling(phase).smem_bytes(problem.packing(phase)) for phase in PHASES)
    if problem.num_tokens <= ALONE_TOKENS:
        return products + 1024 * config.groups_routes
    plan = 4 * (PLAN_THREADS // 32 * problem.num_experts + 2 * (problem.num_experts + 1))
    return max(-(-plan // 1024) * 1024, products)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.groups_routes and not any(_groups_routes(problem, target)):
        return (f"groups_routes=True is for 2 to {ALONE_TOKENS} tokens of at most {MOST_GROUPED} routes, not for "
                f"num_tokens={problem.num_tokens} top_k={problem.top_k}")  # fmt: skip
    for phase in PHASES:
        tiling, packing, k = config.tiling(phase), problem.packing(phase), shape(problem, phase)[1]
        why = limits.why_invalid(tiling, config.block_m, k, packing, target.arch)
        why = why or limits.why_too_many_sums(tiling, packing, problem.fp16_scales, target.arch)
        if tiling.blocks_per_sm and config.body != "gemv":
            why = f"blocks_per_sm={tiling.blocks_per_sm}: where shared tiles are cut depends on all tokens; 0 cuts none"
        if why is not None:
            return f"{phase}: {why}"
    return None


def shape(problem: Problem, phase: str) -> tuple[int, int]:
    """(n, k) of one expert's W."""
    return (2 * problem.inner, problem.hidden) if phase == "up" else (problem.hidden, problem.inner)


def max_row_tiles(problem: Problem, config: Config) -> int:
    """No routing makes more tiles of routes of one expert."""
    routes = problem.num_tokens * problem.top_k
    if problem.num_tokens <= ALONE_TOKENS:
        return routes
    return min(routes, routes // config.block_m + problem.num_experts)


def num_blocks(problem: Problem, config: Config, target: Target, phase: str) -> int:
    row_tiles, (n, k) = max_row_tiles(problem, config), shape(problem, phase)
    return config.tiling(phase).num_blocks(row_tiles, n, k, target.device.num_sms)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    pdl = target.arch.has_pdl
    made = []
    if problem.num_tokens > ALONE_TOKENS:
        made.append(Launch("plan", (1, 1, 1), (PLAN_THREADS, 1, 1), 0, pdl=pdl))
    for entry, phase in (("gate_up", "up"), ("down", "down")):
        tiling = config.tiling(phase)
        grid = (num_blocks(problem, config, target, phase), 1, 1)
        smem = tiling.smem_bytes(problem.packing(phase))
        made.append(Launch(entry, grid, (32 * tiling.num_warps, 1, 1), smem, pdl=pdl))
    return tuple(made)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """How many tiles; the table; the routes; h. See the template."""
    routes = problem.num_tokens * problem.top_k
    table = min(routes, routes // config.block_m + problem.num_experts)
    return 16 + 16 * table + _padded(4 * routes) + _padded(2 * routes * problem.inner)


def _padded(size: int) -> int:
    return -(-size // 16) * 16


def cost(problem: Problem) -> Cost:
    """Weights of as many experts as the routes may meet, each once; h stays in L2."""
    p = problem
    routes = p.num_tokens * p.top_k
    each = sum(p.packing(phase).bytes_of(*shape(p, phase)) for phase in PHASES)
    return Cost(
        bytes=min(routes, p.num_experts) * each + 2 * p.num_tokens * p.hidden + 2 * routes * p.hidden + 4 * routes,
        flops=6 * routes * p.hidden * p.inner,
    )


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """A tile has about as many rows as an expert, or the fewest that there are; the last fits everywhere."""
    arch = target.arch
    deep = 4 if arch.has_cp_async else 2
    if problem.num_tokens <= ALONE_TOKENS and arch.has_ldmatrix:
        found = [
            Config(8, 32, 1, "gemv", 32, 384, 4, 1, 0, 32, 256, 4, 1, 0),
            Config(8, 64, 1, "gemv", 64, 512, 4, 1, 0, 64, 256, 4, 1, 0),
        ]
        if problem.num_tokens > 1:
            found += (
                replace(c, groups_routes=groups) for c in _few_tiles(deep) for groups in _groups_routes(problem, target)
            )
        last = Config(8, 32, 1, "gemv", 32, 32, 1, 1, 0, 32, 32, 1, 1, 0)
    else:
        rows = problem.num_tokens * problem.top_k / problem.num_experts
        block_ms = [m for m in (8, 16, 32, 64, 128) if min(rows, 127) / 4 < m < max(4 * rows, 16)]
        found = [config for m in block_ms for config in _tiles(m, deep, arch)]
        last = _tiles(8, 2, arch)[-1]
    return (*(_with_bytes_of_int4(problem, config) for config in found), last)


def _few_tiles(deep: int) -> tuple[Config, ...]:
    """For two to four tokens: tiles of 64 rows, so that there are several blocks an SM. deep: the most stages."""
    return (
        Config(8, 32, 1, "mma", 64, 256, 1, min(3, deep), 0, 64, 64, 1, deep, 0),
        Config(8, 64, 1, "mma", 64, 256, 2, 2, 0, 64, 64, 2, deep, 0),
    )


def _with_bytes_of_int4(problem: Problem, c: Config) -> Config:
    """`c` with half the columns of a matrix of 8-bit codes on their way, where the weights are most of what is on its
    way, and no fewer than a step of each warp, of stages than 64.
    """
    if c.block_m > 16:
        return c

    def columns(phase: str) -> int:
        tiling = c.tiling(phase)
        if problem.packing(phase).bits == 4:
            return tiling.block_k
        if c.body == "gemv":
            steps = tiling.block_k // STRIP // tiling.warps_k
            return STRIP * tiling.warps_k * -(-steps // 2)
        return min(tiling.block_k, max(2 * STRIP, tiling.block_k // 2))

    return replace(c, up_block_k=columns("up"), down_block_k=columns("down"))


def expected_registers(problem: Problem, config: Config, target: Target) -> dict[str, int]:
    """About, by the ptxas reports."""
    c = config

    def of(phase: str) -> int:
        tiling, packing = c.tiling(phase), problem.packing(phase)
        k = tiling.block_k // tiling.warps_k  # that a warp multiplies at a time
        if c.body == "gemv" and not packing.is_int4:
            need, given = limits.registers(tiling, (columns := shape(problem, phase)[1]), packing, target.arch)
            return min(2 * need - 50, given) if tiling.block_k < columns else need - 30  # of a loop the next loads, too
        if c.body == "mma" and c.block_m > 8 and not packing.is_int4:
            return 64 + c.warp_n * (c.block_m // c.warps_m) // 16
        if c.body == "wgmma":
            return 120 + c.block_m
        if c.body == "gemv":
            return min(255, 64 + k * c.warp_n // 32)
        return 48 + 4 * c.warp_n // 5 + k // 3 if c.block_m == 8 else 85 + k // 12

    return {"plan": 32, "gate_up": of("up"), "down": of("down")}


def _tiles(block_m: int, deep: int, arch: Arch) -> list[Config]:
    """Of block_m rows. deep: stages, where there is room."""
    warp_n = 32 if arch.has_ldmatrix else 64

    def config(warp: int, body: str, up: tuple[int, int, int], down: tuple[int, int, int], up_warps_k: int = 1,
               warps_m: int = 1) -> Config:  # fmt: skip
        (up_n, up_k, up_stages), (down_n, down_k, down_stages) = up, down
        return Config(block_m, warp, warps_m, body, up_n, up_k, up_warps_k, up_stages, 0,
                      down_n, down_k, 1, down_stages, 0)  # fmt: skip

    long = (config(warp_n, "mma", (128, 256, 2), (128, 128, 2)), config(warp_n, "mma", (128, 128, 2), (128, 64, 2)))
    small = config(warp_n, "mma", (64, 64, 2), (64, 64, 2))
    if block_m == 8:
        wide = (
            config(64, "mma", (128, 256, 2), (128, 64, 3)),
            config(64, "mma", (128, 128, deep), (128, 64, deep), 2),
            config(64, "mma", (128, 128, 3), (128, 64, deep)),
        )
        return [*(wide if arch.has_cp_async else long), small]
    if block_m == 16:
        return list(long)
    block_k = 64 if block_m == 128 else 128
    if arch.has_wgmma:
        return [config(32, "wgmma", (128, block_k, deep), (128, 64, deep))]
    if block_m == 128:
        return [config(32, "mma", (128, 64, deep), (128, 64, deep), warps_m=2)]
    large = config(warp_n, "mma", (128, 64, deep), (128, 64, deep))
    return [large, config(64, "mma", (128, 32, 2), (128, 32, 2), warps_m=2), small] if block_m == 64 else [large, small]
