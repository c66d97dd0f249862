"""w4a16_gemm: out[M, N] = x[M, K] dequant(W)[N, K]^T with symmetric int4 weights, for one token or for thousands.

Weights are the tensor core's A operand (rows of 32 in a strip), tokens its 8 columns, so one token costs no more MMAs
than eight. One source serves every M and every arch from sm70: tiles, warps and the way the work is cut differ. It
makes two bodies on sm90, mma.sync and wgmma, each with its space.

The work is a line of units, (tile, BLOCK_K of its K), cut into equal pieces: one a block (stream-K), or one tile a
block. A tile that several blocks share is summed in fp32 through the workspace in the order of the blocks, by the one
that arrives last: the result does not depend on which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.errors import ProblemError
from kerngen.templates.common.row_spec import DTYPES, why_no_dtype
from kerngen.templates.kernel import Arg, Body, Cost, Launch

STRIP = 32  # rows of W, and columns of K, in one packed tile: 512 bytes, 16 a lane
MAX_BLOCKS = 1024  # that share tiles
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Problem:
    """n, k: rows of W and their length. group_size: weights along K that share a scale. dtype: of x, scales and out."""

    n: int
    k: int
    group_size: int = 32
    dtype: str = "bf16"
    num_tokens: int = 1

    RUNTIME: ClassVar[tuple[str, ...]] = ("num_tokens",)
    DYNAMIC: ClassVar[str] = "num_tokens"

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ProblemError(f"group_size={self.group_size} is not one of {GROUP_SIZES}")
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype={self.dtype!r} is not one of: {', '.join(DTYPES)}")
        if self.n < STRIP or self.n % STRIP:
            raise ProblemError(f"n={self.n} is not a positive multiple of {STRIP}: pad the rows of W with zeros")
        if self.k < self.group_size or self.k % self.group_size:
            raise ProblemError(f"k={self.k} is not a positive multiple of group_size={self.group_size}")
        if self.num_tokens < 1:
            raise ProblemError(f"num_tokens={self.num_tokens} is not positive")


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int = 8  # tokens of a tile
    block_n: int = 128  # rows of W of a tile
    block_k: int = 128  # of one pipeline stage
    warp_n: int = 32  # rows of W of a warp
    warps_m: int = 1  # warps that share rows of W and differ in tokens
    warps_k: int = 1  # warps that share a tile and differ in K; summed through shared memory
    num_stages: int = 4
    blocks_per_sm: int = 1  # stream-K over this many blocks an SM; 0: one block a tile, no split
    wgmma: bool = False  # Hopper's warpgroup products instead of mma.sync


SPACE = {
    "block_m": (8, 16, 32, 64, 128, 256),
    "block_n": (64, 128, 256),
    "block_k": (32, 64, 128, 256, 512),
    "warp_n": (32, 64),
    "warps_m": (1, 2, 4),
    "warps_k": (1, 2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6, 8),
    "blocks_per_sm": (0, 1, 2, 3, 4),
}
# Four warps of a strip each, all tokens in every warp (_why_not_wgmma).
WGMMA_SPACE = SPACE | {
    "block_m": (8, 16, 32, 64, 128),
    "block_n": (128, 256),
    "block_k": (64, 128, 256, 512),
    "warp_n": (32,),
    "warps_m": (1,),
    "warps_k": (1,),
    "num_stages": (3, 4, 5, 6, 8),
}

ARGS = {
    "w4a16_gemm": (
        Arg("out", "ptr"),
        Arg("x", "ptr"),
        Arg("w_packed", "ptr"),
        Arg("scales", "ptr"),
        Arg("workspace", "ptr"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (
    Body("kernel.cu.jinja", ARGS, SPACE, when={"wgmma": False}),
    Body("kernel.cu.jinja", ARGS, WGMMA_SPACE, serves=lambda arch: arch.has_wgmma, when={"wgmma": True}),
)
OUTPUTS = ("out",)
MAX_SPILL_BYTES = 16  # what ptxas may keep in local memory, a thread; 8 at most in the test cases (sm75, sm120)


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    return {"STRIP": STRIP, "MAX_BLOCKS": MAX_BLOCKS}


def why_unsupported(problem: Problem, target: Target) -> str | None:
    return why_no_dtype(target.arch, problem.dtype)


def num_warps(config: Config) -> int:
    return config.block_n // config.warp_n * config.warps_m * config.warps_k


def _groups_per_stage(problem: Problem, config: Config) -> int:
    return max(1, config.block_k // problem.group_size)


def stage_bytes(problem: Problem, config: Config) -> int:
    c = config
    used = c.block_n * c.block_k // 2 + c.block_m * c.block_k * 2 + c.block_n * _groups_per_stage(problem, c) * 2
    return -(-used // 1024) * 1024 if c.wgmma else used


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The stages, what the warps that split K exchange, and 16 bytes for who arrived last. All dynamic."""
    exchange = (config.warps_k - 1) * config.block_m * config.block_n * 4
    return config.num_stages * stage_bytes(problem, config) + exchange + 16


def _why_not_wgmma(config: Config, target: Target) -> str | None:
    c = config
    if not target.arch.has_wgmma:
        return f"wgmma=True: {target.arch} has none; wgmma=False serves every arch"
    if c.warp_n != STRIP or c.warps_m != 1 or c.warps_k != 1 or c.block_n % 128:
        return (f"wgmma takes four warps of {STRIP} rows and all tokens: warp_n={c.warp_n} warps_m={c.warps_m} "
                f"warps_k={c.warps_k} block_n={c.block_n} is not {STRIP}, 1, 1 and a multiple of 128")  # fmt: skip
    if c.block_m > 128:
        return f"block_m={c.block_m}: a strip's two products of more than 128 tokens do not fit in registers"
    if c.block_k % 64 or c.num_stages < 3:
        return f"block_k={c.block_k} num_stages={c.num_stages}: wgmma needs a multiple of 64, and at least 3"
    return None


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    c, arch = config, target.arch
    if c.block_n % c.warp_n or c.warp_n % STRIP:
        return f"block_n={c.block_n} is not made of warps of warp_n={c.warp_n} rows, each a multiple of {STRIP}"
    if not arch.has_ldmatrix and c.warp_n != 64:
        return f"warp_n={c.warp_n}: with m8n8k4 a lane of {arch} owns two of 64 rows"
    if c.wgmma and (why := _why_not_wgmma(c, target)):
        return why
    if c.block_m % (8 * c.warps_m):
        return f"block_m={c.block_m} is not made of warps_m={c.warps_m} warps of a multiple of 8 tokens"
    if c.block_k % (STRIP * c.warps_k):
        return f"block_k={c.block_k} is not made of warps_k={c.warps_k} warps of a multiple of {STRIP}"
    if (warps := num_warps(c)) > 16:
        return f"{warps} warps a block; 16 is the most that leaves 128 registers a thread"
    accumulators = c.warp_n * (c.block_m // c.warps_m) // 32
    if accumulators > 128:
        return f"{accumulators} accumulators a thread (warp_n={c.warp_n} x {c.block_m // c.warps_m} tokens); 128 fit"
    blocks = max(1, c.blocks_per_sm)
    registers = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * warps * blocks))
    carried = 0 if arch.has_cp_async else 4 * -(-stage_bytes(problem, c) // (512 * warps))
    others = 56 if arch.has_cp_async else 100
    if registers < accumulators + carried + others:
        return (f"{warps} warps x {blocks} blocks an SM leave {registers} registers a thread; {accumulators} "
                f"accumulators, {carried} on their way to shared memory and {others} others are needed")  # fmt: skip
    if warps * blocks > arch.max_warps_per_sm:
        return f"{warps} warps x {blocks} blocks an SM; {arch} holds {arch.max_warps_per_sm} warps"
    if not arch.has_cp_async and c.num_stages != 2:
        return f"num_stages={c.num_stages}: without cp.async, {arch} keeps 2 stages and one on its way in registers"
    if (need := smem_bytes(problem, c, target)) > arch.max_smem_bytes:
        return f"needs {need:,} B of shared memory; {arch} allows {arch.max_smem_bytes:,} B a block"
    if (together := blocks * (need + arch.reserved_smem_bytes)) > arch.smem_per_sm:
        return f"{blocks} blocks an SM need {together:,} B of shared memory; {arch} has {arch.smem_per_sm:,} B"
    return None


def _tiles(problem: Problem, config: Config) -> int:
    return -(-problem.num_tokens // config.block_m) * -(-problem.n // config.block_n)


def num_blocks(problem: Problem, config: Config, target: Target) -> int:
    tiles = _tiles(problem, config)
    if config.blocks_per_sm == 0:
        return tiles
    units = tiles * -(-problem.k // config.block_k)
    return min(config.blocks_per_sm * target.device.num_sms, units, MAX_BLOCKS)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    grid = (num_blocks(problem, config, target), 1, 1)
    block = (32 * num_warps(config), 1, 1)
    return (Launch("w4a16_gemm", grid, block, smem_bytes(problem, config, target), pdl=target.arch.has_pdl),)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """A counter a block, zero between launches, then two fp32 tiles a block. 0 where no tile is shared."""
    if config.blocks_per_sm == 0:
        return 0
    return 4 * MAX_BLOCKS + num_blocks(problem, config, target) * 2 * config.block_m * config.block_n * 4


def cost(problem: Problem) -> Cost:
    p = problem
    weights = p.n * p.k // 2 + p.n * (p.k // p.group_size) * 2
    return Cost(weights + 2 * p.num_tokens * (p.k + p.n), 2 * p.num_tokens * p.n * p.k)


def default_config(problem: Problem, target: Target) -> Config:
    for config in _preferred(problem, target):
        if why_invalid(problem, config, target) is None:
            return config
    raise ProblemError(f"no default configuration of w4a16_gemm serves {problem} on {target.arch}")


def _preferred(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Best first, from sweeps on an H200; the last is valid everywhere."""
    arch = target.arch
    m = problem.num_tokens
    stages = 4 if arch.has_cp_async else 2
    warp_n = 32 if arch.has_ldmatrix else 64
    block_m = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64
    last = Config(min(block_m, 32), 64, 64, warp_n, 1, 1, 2, 1)
    if m <= 16:
        # two long stages in each of several blocks: while one waits for a barrier, others multiply
        even = problem.n % 128 == 0 and problem.k % 256 == 0
        most = 4 if even and (m <= 8 or arch.has_cp_async) else 3  # by registers
        return (*(Config(block_m, 128, 256, warp_n, 1, 1, 2, b) for b in range(most, 0, -1)), last)
    if m <= 64:
        return (
            Config(block_m, 256, 128, 32, 1, 1, 4, 1, wgmma=True),
            Config(block_m, 128, 128, warp_n, 1, 1, 3, 2),
            Config(block_m, 128, 128, warp_n, 1, 1, stages, 1),
            Config(block_m, 128, 64, warp_n, 1, 1, stages, 1),
            Config(block_m, 128, 64, warp_n, 2, 1, stages, 1),
            last,
        )
    # a last wave that leaves most SMs idle costs more than sharing the tiles evenly does
    waves = -(-m // 128) * -(-problem.n // 256) / target.device.num_sms
    split = 1 if waves < 8 else 0
    return (
        Config(128, 256, 128, 32, 1, 1, 4, split, wgmma=True),
        Config(128, 256, 64, 64, 2, 1, 4, split),
        Config(128, 256, 64, 64, 2, 1, 3, split),
        Config(128, 256, 32, 64, 2, 1, 2, split),
        last,
    )
