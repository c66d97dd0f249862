"""dense_gemv: out[M, N] = x[M, K] W[N, K]^T with dense 16-bit weights as they are stored, for up to 16 tokens.

It takes the time to read W once. Operands are swapped (swap-AB): rows of W are the tensor core's A operand and tokens
its 8 columns, so that one token costs no more than eight. A warp keeps `unroll` loads of each row in registers and
issues the next one as soon as it has used one. The first loads start before the kernel that makes x has ended.

The order in which the columns of a row are summed depends on the configuration's unroll, warps_k and split_k, and never
on M, block_m or the order in which blocks finish: a token's outputs are the same bits alone and among fifteen others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    require_dtypes,
    require_tokens,
    require_vectors,
    why_block_too_large,
    why_no_dtype,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, args

MAX_TOKENS = 16
ROWS, COLUMNS, TOKENS = 16, 32, 8  # of a fragment: DenseLane of common/rows/dense_rows.cuh
STEP_BYTES = ROWS * COLUMNS * 2  # of W: 32 bytes a lane
MAX_STATIC_SMEM = 48 * 1024
MAX_CANDIDATES = 12
MAX_UNROLL = 8
OTHER_REGISTERS = 48  # beside what is loaded and summed, by the ptxas reports


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """x [num_tokens, k], W [n, k] -> out [num_tokens, n], all of them dtype; sums in fp32."""

    n: int
    k: int
    dtype: str = "bf16"
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_vectors(n=self.n, k=self.k)
        require_tokens(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Config:
    block_m: int = 8  # tokens that the cubin can take
    row_tiles: int = 1  # of 16 rows of W, that a warp owns
    warps_n: int = 1  # warps of a block that differ in rows
    warps_k: int = 8  # warps that share rows and differ in columns; summed through shared memory
    # Loads of 32 columns that a warp keeps in flight, 1 KiB each and row tile.
    unroll: int = field(default=4, metadata={"filed": "steps"})
    split_k: int = 1  # blocks that share rows and differ in columns; summed by the last of them, in their order
    blocks_per_sm: int = 2  # that registers must suffice for
    persistent: bool = False  # blocks_per_sm blocks an SM go through all rows; else each block has its own


SPACE = {
    "block_m": (8, 16),
    "row_tiles": (1, 2),
    "warps_n": (1, 2, 4),
    "warps_k": (1, 2, 4, 8, 16),
    "unroll": (1, 2, 3, 4, 5, 6, 8),
    "split_k": (1, 2, 4, 8),
    "blocks_per_sm": (1, 2, 3, 4),
    "persistent": (False, True),
}
ARGS = {
    "dense_gemv": (
        *args("ptr", "out", "x", "w", "workspace"),
        Arg("num_tokens", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out",)


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    return {"COUNTER_BYTES": _counter_bytes(problem, config)}


def num_tiles(problem: Problem, config: Config) -> int:
    """Blocks of rows."""
    return -(-problem.n // (ROWS * config.row_tiles * config.warps_n))


def num_turns(problem: Problem, config: Config) -> int:
    """Iterations of the k loop, of `unroll` times 32 columns each, of the warp that has the most."""
    groups = -(-problem.k // (COLUMNS * config.unroll))
    return -(-groups // (config.warps_k * config.split_k))


def _threads(config: Config) -> int:
    return 32 * config.warps_n * config.warps_k


def _fragments(config: Config) -> int:
    return config.row_tiles * config.block_m // TOKENS


def _counter_bytes(problem: Problem, config: Config) -> int:
    return -(-4 * num_tiles(problem, config) // 16) * 16


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if problem.num_tokens > MAX_TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {MAX_TOKENS}; torch's dense product serves more"
    return why_no_dtype(target.arch, problem.dtype)


def registers(config: Config, arch: Arch) -> int:
    """A thread's, about: loads of W and x under way, sums, and the rest."""
    x_loads, accumulators = (1, 4) if arch.has_ldmatrix else (2, 8)
    loaded = 4 * config.unroll * (2 * config.row_tiles + x_loads * config.block_m // TOKENS)
    return loaded + accumulators * _fragments(config) + OTHER_REGISTERS


def expected_registers(problem: Problem, config: Config, target: Target) -> int:
    """Of what ptxas may take, what it does, by its reports."""
    c = config
    available = target.arch.regs_per_sm // (_threads(c) * c.blocks_per_sm)
    return min(available, 10 * c.unroll * (c.row_tiles + c.block_m // TOKENS) + 20)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    c, arch = config, target.arch
    if problem.num_tokens > c.block_m:
        return f"block_m={c.block_m} holds fewer than num_tokens={problem.num_tokens}"
    if why := why_block_too_large(_threads(c), f"warps_n={c.warps_n} x warps_k={c.warps_k} warps"):
        return why
    groups, shares = -(-problem.k // (COLUMNS * c.unroll)), c.warps_k * c.split_k
    if groups < shares:
        return (f"k={problem.k} is {groups} groups of unroll={c.unroll} x {COLUMNS} columns; warps_k={c.warps_k} x "
                f"split_k={c.split_k} warps share them")  # fmt: skip
    if c.persistent and c.split_k > 1:
        return f"persistent=True with split_k={c.split_k}: blocks that wait for each other take one tile each"
    available = min(arch.max_regs_per_thread, arch.regs_per_sm // (_threads(c) * c.blocks_per_sm) // 8 * 8)
    if (need := registers(c, arch)) > available:
        return (f"about {need} registers a thread; {c.blocks_per_sm} blocks an SM of {_threads(c)} threads leave "
                f"{available}")  # fmt: skip
    warps = _threads(c) // 32 * c.blocks_per_sm
    if warps > arch.max_warps_per_sm:
        return f"{warps} warps in {c.blocks_per_sm} blocks; {arch} holds {arch.max_warps_per_sm} an SM"
    if (smem := smem_bytes(problem, c, target)) > MAX_STATIC_SMEM:
        return f"needs {smem:,} B of shared memory; {MAX_STATIC_SMEM:,} B are static"
    return arch.why_too_large(smem, c.blocks_per_sm)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The fragments of the warps that share rows, twice where tiles follow each other; who arrived last."""
    c = config
    exchange = (1 + c.persistent) * _threads(c) // 32 * _fragments(c) * 512 if c.warps_k > 1 else 0
    return exchange + 4 * (c.split_k > 1)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks = num_tiles(problem, config) * config.split_k
    if config.persistent:
        blocks = min(blocks, config.blocks_per_sm * target.device.num_sms)
    return (Launch("dense_gemv", (blocks, 1, 1), (_threads(config), 1, 1), 0, pdl=target.arch.has_pdl),)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """With split_k: a counter a tile, zero between launches, then every block's sums. The same for every num_tokens."""
    c = config
    if c.split_k == 1:
        return 0
    sums = num_tiles(problem, c) * c.split_k * c.warps_n * _fragments(c) * 512
    return _counter_bytes(problem, c) + sums


def cost(problem: Problem) -> Cost:
    p, size = problem, ELEMENT_BYTES[problem.dtype]
    return Cost(size * (p.n * p.k + p.num_tokens * (p.k + p.n)), 2 * p.num_tokens * p.n * p.k)


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """The same for all num_tokens up to 8, and but for block_m, up to 16: so are the bits of a token's outputs."""
    widest = replace(problem, num_tokens=MAX_TOKENS)
    valid = [c for c in dict.fromkeys(_cuts(widest, target)) if why_invalid(widest, c, target) is None]
    least = Config(MAX_TOKENS, warps_k=1, unroll=1, blocks_per_sm=1)  # valid everywhere
    block_m = TOKENS if problem.num_tokens <= TOKENS else MAX_TOKENS
    return [replace(c, block_m=block_m) for c in valid[:MAX_CANDIDATES] or [least]]


def ranked_as(problem: Problem, config: Config) -> tuple[Problem, Config]:
    """As for eight tokens, whatever their number: see candidates."""
    return replace(problem, num_tokens=TOKENS), replace(config, block_m=TOKENS)


def _cuts(p: Problem, target: Target) -> Iterator[Config]:
    """Of few rows, eight warps an SM or sixteen, as many of them along n as leave each SM one block at most, and each
    of those along k with as many loads in flight as it has; where blocks are fewer than SMs, several along k. Of many
    rows, small blocks, each of which has its own or goes through many.
    """
    steps, tiles, num_sms = -(-p.k // COLUMNS), -(-p.n // ROWS), target.device.num_sms

    def cut(warps_n: int, warps_k: int, unroll: int, *, split_k: int = 1, blocks: int = 1,
            persistent: bool = False) -> Config:  # fmt: skip
        return Config(MAX_TOKENS, 1, warps_n, warps_k, unroll, split_k, blocks, persistent)

    def longest(shares: int) -> int:
        """Loads in flight of a warp, where so many share the columns and each has some."""
        return max(n for n in range(1, MAX_UNROLL + 1) if n == 1 or -(-steps // n) >= shares)

    if tiles > 8 * num_sms:
        for warps_k, unroll in ((4, 5), (2, 7)):
            yield cut(1, warps_k, unroll, blocks=3)
            yield cut(1, warps_k, unroll, blocks=3, persistent=True)
        yield cut(2, 2, 3, blocks=4, persistent=True)
        yield cut(4, 2, 6)
        yield cut(8, 1, 8)
        yield cut(8, 1, 6)
    else:
        warps_n = next((n for n in (1, 2, 4) if tiles <= n * num_sms), 8)
        for split_k in (1, 2, 4, 8):
            if split_k == 1 or -(-tiles // warps_n) * split_k <= num_sms:
                unroll = longest(8 // warps_n * split_k)
                yield cut(warps_n, 8 // warps_n, unroll, split_k=split_k)
                if split_k <= 2:
                    yield cut(warps_n, 8 // warps_n, min(6, unroll), split_k=split_k)
        yield cut(1, 16, min(4, longest(16)))
        yield cut(1, 16, min(2, longest(16)))
        yield cut(1, 8, longest(8))
        yield cut(4, 2, longest(2))
        yield cut(1, 4, longest(4))
        yield cut(1, 4, 5, blocks=3)
