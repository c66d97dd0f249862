"""w4a16_gemm: out[M, N] = x[M, K] dequant(W)[N, K]^T with symmetric int4 weights, for one token or for thousands.

With gated, W's rows are gate and up, interleaved by common/w4/pack.py, and out[M, N / 2] = gelu_tanh(gate) * up. Every
M and every arch from sm70 is served; Config.body and the tiling (common/w4/tiling.py) differ. Bodies:

- mma, and on sm90 wgmma: a cp.async pipeline and stream-K (common/w4/gemm.cuh).
- wgmma_ws: warp-specialised, sm90's default from nine tokens on (wgmma_ws.cu.jinja; stages of 64 columns).
- gemv: few tokens, W straight to registers, best for a small W (common/w4/gemv.cuh).
- tma_warp, tma_block: up to four tokens, bulk copies into one pipeline a warp (common/w4/warp_pipeline.cuh), or with
  two to four tokens into one for all warps of a block (common/w4/cta_pipeline.cuh). They are best for a large W. W is
  multiplied as integers; an infinity or a NaN in a token's x makes all outputs of that token NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from kerngen.arch import Arch, Target
from kerngen.errors import ProblemError
from kerngen.templates.common.w4 import tiling
from kerngen.templates.common.w4.tiling import (
    BLOCK_STREAM_SPACE,
    GEMV_SPACE,
    SPACE,
    STREAM_BLOCK_M,
    STREAM_SPACE,
    STRIP,
    WARPGROUP_SPACE,
    WGMMA_SPACE,
    Tiling,
    matrix_bytes,
    require_matrix,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TensorMap, TokenProblem, args


@dataclass(frozen=True, slots=True)
class Config(Tiling):
    """How tiles are cut: see Tiling."""


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """n, k: rows of W and their length. group_size: weights along K that share a scale. dtype: of x, scales and out.

    gated: W is gate and up, and out has n / 2 columns. row_invariant: a token's output has the same bits in every row
    of x. Shared tiles break that if tokens fill several tiles, since stream-K cuts each tile at other columns.
    """

    n: int
    k: int
    group_size: int = 32
    dtype: str = "bf16"
    num_tokens: int = 1
    gated: bool = False
    row_invariant: bool = False

    def __post_init__(self) -> None:
        require_matrix(self.n, self.k, self.group_size, self.dtype)
        if self.num_tokens < 1:
            raise ProblemError(f"num_tokens={self.num_tokens} is not positive")


ARGS = {
    "w4a16_gemm": (
        *args("ptr", "out", "x", "w_packed", "scales", "workspace"),
        Arg("num_tokens", "i32"),
    )
}
WARPGROUP_ARGS = {
    "w4a16_gemm": (
        *ARGS["w4a16_gemm"],
        Arg("x_map", "map", of="x"),
        Arg("w_map", "map", of="w_packed"),
        Arg("scales_map", "map", of="scales"),
    )
}
MAX_PREFETCH_TOKENS = (
    64  # tokens up to which defaults and searches limit what weights are on their way while x is waited for
)


def _prefetch_stages(problem: Problem, target: Target) -> tuple[int, ...]:
    return (0, 1) if target.arch.has_pdl and 1 < problem.num_tokens <= MAX_PREFETCH_TOKENS else (0,)


def _has_bulk_copies(arch: Arch) -> bool:
    return arch.has_tma


BODIES = (
    Body("kernel.cu.jinja", ARGS, SPACE | {"prefetch_stages": _prefetch_stages}, when={"body": "mma"}),
    Body("kernel.cu.jinja", ARGS, WGMMA_SPACE, serves=lambda arch: arch.has_wgmma, when={"body": "wgmma"}),
    Body("gemv.cu.jinja", ARGS, GEMV_SPACE, serves=lambda arch: arch.has_ldmatrix, when={"body": "gemv"}),
    Body("stream.cu.jinja", ARGS, STREAM_SPACE, serves=_has_bulk_copies, when={"body": "tma_warp"}),
    Body("block_stream.cu.jinja", ARGS, BLOCK_STREAM_SPACE, serves=_has_bulk_copies, when={"body": "tma_block"}),
    Body(
        "wgmma_ws.cu.jinja",
        WARPGROUP_ARGS,
        WARPGROUP_SPACE | {"prefetch_stages": _prefetch_stages},
        serves=lambda arch: arch.has_wgmma,
        when={"body": "wgmma_ws"},
    ),
)
OUTPUTS = ("out",)
COMPARES_SIZES = True  # of 384 tokens, tiles of 256 leave a third empty
# Columns of a tile of many tokens that a block may idle for in a last round that is not full, before its tiles are
# shared: behind whole rounds, which hide how their sums are added up, and with none.
LEAST_IDLE, LEAST_IDLE_ALONE = 1000, 1600
MAX_SPILL_BYTES = 48  # what ptxas may keep in local memory, a thread: of the ring's tiles, outside the loop over stages


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    found = {"STREAM_BYTES": config.smem_bytes(problem.group_size)}
    if config.stream:
        tiles = tiling.stream_tiles(config, problem.k, problem.group_size)
        found |= {
            "MANY_TILES": tiling.stream_has_many(config, tiles),
            "STREAM_BLOCKS": tiling.stream_blocks(config),
        }
    if not config.warpgroups:
        return found
    rows, blocks = x_box(config)
    copier, multiplier = tiling.warpgroup_registers(config)
    found |= {"BOX_ROWS": rows, "BOX_BLOCKS": blocks, "OUT_BYTES": _epilogue_bytes(config)}
    found |= {"LEAST_IDLE": LEAST_IDLE, "LEAST_IDLE_ALONE": LEAST_IDLE_ALONE}
    found |= {"ADDS_BESIDE": tiling.overlaps_reduce(config), "MANY_TOKENS": tiling.MANY_TOKENS}
    return found | {"PRODUCER_REGISTERS": copier, "CONSUMER_REGISTERS": multiplier}


def x_box(config: Config) -> tuple[int, int]:
    """Tokens, and blocks of 64 columns, that a bulk copy brings of x: a stage's, or of a cluster a block's part."""
    blocks = config.block_k // 64
    if blocks % config.cluster:
        return config.block_m // config.cluster, blocks
    return config.block_m, blocks // config.cluster


def _epilogue_bytes(config: Config) -> int:
    """Of what a warpgroup has finished and not stored: a whole tile where others store it, else 16 or 32 tokens."""
    if tiling.overlaps_reduce(config):
        return config.block_m * 64 * 2
    return (16 if config.block_m % 32 else 32) * (64 * 2 + 16)


def tensor_map(problem: Problem, config: Config, of: str, shape: tuple[int, ...]) -> TensorMap | None:
    """x as blocks of 64 columns of all tokens; W as strips of tiles of 32 x 32 weights, its scales as strips too."""
    strips, groups = problem.n // STRIP, problem.k // problem.group_size
    if of == "x":
        tokens, k = shape
        return TensorMap((64, tokens, k // 64, 1), (k * 2, 128, tokens * k * 2), (64, *x_box(config), 1))
    rows = config.block_n // STRIP
    if of == "w_packed":
        tiles = problem.k // STRIP
        box = (256, config.block_k // STRIP, rows, 1)
        return TensorMap((256, tiles, strips, 1), (512, tiles * 512, strips * tiles * 512), box, swizzled=False)
    box = (STRIP, max(1, config.block_k // problem.group_size), rows, 1)
    return TensorMap((STRIP, groups, strips, 1), (64, groups * 64, strips * groups * 64), box, swizzled=False)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    if config.stream:  # and the sums of all units of a block: of all warps, or of those that others wait for
        units = ceil(problem.n // STRIP * config.split_k / num_blocks(problem, config, target))
        sums = config.warps_k * problem.num_tokens * STRIP * 4
        if config.cta_pipeline:
            sums = config.unit_bytes if config.split_k > 1 else 0
        return config.smem_bytes(problem.group_size) + units * sums
    if config.warpgroups:  # stages, what is on its way out of each warpgroup, and the barriers
        stage = -(-config.stage_bytes(problem.group_size) // 1024) * 1024
        groups = config.block_n // 64
        barriers = 8 * (2 * config.num_stages + (config.num_stages if config.prefetch_stages else 1))
        if tiling.overlaps_reduce(config):
            barriers += 8 * (2 * groups + 1)
        return config.num_stages * stage + groups * _epilogue_bytes(config) + barriers
    return config.smem_bytes(problem.group_size)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    if config.prefetch_stages and config.gemv:
        return f"prefetch_stages={config.prefetch_stages}: body=gemv has no stages; prefetch_stages=0"
    if config.cap_inflight and not config.stream:
        return f"cap_inflight={config.cap_inflight} is for body=tma_block"
    if config.stream:
        p, c, arch = problem, config, target.arch
        if why := tiling.why_not_stream(c, p.num_tokens, p.k, p.group_size, arch):
            return why
        return arch.why_too_large(smem_bytes(p, c, target), c.blocks_per_sm)
    if config.gemv:
        return tiling.why_not_gemv(config, problem.num_tokens, problem.k, target.arch)
    if config.warpgroups:
        if why := tiling.why_not_warpgroups(config, problem.k, problem.group_size, target.arch):
            return why
        if why := target.arch.why_too_large(smem_bytes(problem, config, target), max(1, config.blocks_per_sm)):
            return why
    if problem.row_invariant and config.blocks_per_sm and problem.num_tokens > config.block_m:
        return (
            f"row_invariant: {problem.num_tokens} tokens fill several tiles of block_m={config.block_m}, and with "
            f"blocks_per_sm={config.blocks_per_sm} blocks share tiles; with 0 none does"
        )
    return None if config.warpgroups else tiling.why_invalid(config, problem.group_size, target.arch)


def num_blocks(problem: Problem, config: Config, target: Target) -> int:
    return config.num_blocks(_num_tiles(problem, config), problem.k, target.device.num_sms)


def _num_tiles(problem: Problem, config: Config) -> int:
    """Of whole clusters: the last one may have tiles beyond W."""
    rows = config.block_n * config.cluster
    return -(-problem.num_tokens // config.block_m) * -(-problem.n // rows) * config.cluster


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    grid = num_blocks(problem, config, target), 1, 1
    # Producer and reduction warps.
    beside = 4 if config.warpgroups else tiling.EXTRA_WARPS if config.cta_pipeline else 0
    block = 32 * (config.num_warps + beside), 1, 1
    smem, cluster = smem_bytes(problem, config, target), (config.cluster, 1, 1)
    # Blocks that share a tile wait for each other's sums, so they must be co-resident; gemv's need not (gemv.cuh).
    cooperative = config.shares_tiles and not config.gemv
    return (Launch("w4a16_gemm", grid, block, smem, pdl=target.arch.has_pdl, cluster=cluster, cooperative=cooperative),)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The LL mailbox of split-K sums, zero between launches; 0 bytes if no tile is shared.

    With gemv, a counter for each tile of rows comes before it. With cta_pipeline and split_k=1 there is only the
    counter of claimed n-tiles.
    """
    if config.cta_pipeline and config.split_k == 1:
        return 16  # the counter of claimed n-tiles
    if config.gemv or config.stream:
        tiles = ceil(problem.n / config.block_n)
        counters = 16 * ceil(tiles / 4) if config.gemv else 0
        posts = config.partial_bytes(tiles * config.split_k)
    else:
        counters, posts = 0, config.partial_bytes(num_blocks(problem, config, target))
    return counters + posts if posts else 0


def cost(problem: Problem) -> Cost:
    p = problem
    out = p.n // 2 if p.gated else p.n
    weights = matrix_bytes(p.n, p.k, p.group_size)
    return Cost(weights + 2 * p.num_tokens * (p.k + out), 2 * p.num_tokens * p.n * p.k)


# What is tried, by body: tilings that sweeps and steps found good for some shape (docs/experiments.md). Those that fit
# a problem and a board are its candidates; which is best there is for the cost model to say.
# gemv: warps, strips of a warp, and steps that it has in flight at most.
GEMV_TILINGS = ((16, 1, 6), (8, 2, 3), (4, 2, 3), (4, 1, 4), (4, 2, 2))
SPLITS = (1, 2, 3, 4, 6, 8)  # of K, by gemv
# tma_warp, one token: parts of K, warps, tiles of a warp's stage, stages at most, and blocks an SM that they leave room
# for, the next kernel's included.
TMA_ONE_TOKEN = ((1, 12, 6, 5, 1), (1, 8, 4, 6, 2), (3, 8, 4, 6, 2), (3, 8, 8, 6, 1), (6, 8, 4, 6, 2), (11, 8, 4, 6, 2))
# tma_warp, four tokens: the first four as above, and stages in flight while a warp waits for x (0: all).
TMA_WHOLE_STRIPS = ((1, 8, 6, 4, 0), (1, 12, 4, 7, 1), (1, 16, 4, 5, 0))
TMA_SPLIT_STRIPS = (
    (1, 16, 4, 5, 0), (2, 16, 6, 3, 1), (3, 8, 11, 2, 0), (6, 8, 6, 4, 0), (6, 16, 6, 3, 1), (8, 12, 4, 6, 2),
)  # fmt: skip
CTA_PREFETCH_BYTES = 32 * 1024, 48 * 1024  # tma_block: an SM's in flight while it waits for x; of many strips
# mma, eight tokens: block_n, block_k, warps_k, num_stages, blocks_per_sm. The first two serve two to four tokens too.
MMA_PIPELINES = (
    (32, 256, 2, 6, 4), (64, 256, 4, 8, 2), (64, 512, 4, 4, 2), (64, 512, 4, 3, 2), (128, 256, 1, 2, 4),
    (128, 256, 1, 2, 3), (128, 128, 1, 4, 4),
)  # fmt: skip
# wgmma_ws: block_m -> block_n, the longest block_k and its stages.
WARPGROUP_TILINGS = {
    16: ((128, 256, 3), (192, 256, 5), (256, 256, 4)),
    32: ((128, 256, 4), (192, 256, 4), (256, 128, 6)),
    48: ((128, 256, 4), (192, 256, 3), (256, 128, 5)),
    64: ((128, 256, 3), (192, 128, 5), (256, 128, 5)),
    80: ((128, 128, 6), (192, 128, 6), (256, 128, 5)),
    96: ((128, 128, 6), (192, 128, 5)),
    112: ((128, 128, 5), (192, 128, 5)),
    128: ((128, 128, 4), (192, 64, 8)),
    160: ((128, 128, 3), (192, 64, 5)),
    192: ((128, 128, 3), (192, 64, 4)),
    256: ((128, 64, 4),),
}
MOST_BLOCK_MS, MOST_CANDIDATES = 5, 12
LONG_SHARE = 3500  # columns that an SM has of all tiles: so many are shared out evenly whatever their number
PREFETCH_COLUMNS, MMA_PREFETCH_BYTES = 256, 32 * 1024  # in flight while x is waited for: of a tile, and of an SM


def candidates(problem: Problem, target: Target) -> tuple[Config, ...]:
    """By tokens: gemv, bulk copies and mma up to eight, warpgroups for more, and mma where no other body serves."""
    p, arch, tokens = problem, target.arch, problem.num_tokens
    few = tokens <= STREAM_BLOCK_M[-1]
    found: list[Config] = []
    if tokens <= 8 and arch.has_ldmatrix:
        found += _gemv_candidates(p, target)
    if few and arch.has_tma:
        found += _stream_candidates(p, target)
    if 1 < tokens <= 8 and arch.has_cp_async:
        found += mma_candidates()[: 2 if few else None]
    if tokens > 8 and arch.has_wgmma and p.k % 64 == 0:
        found += _warpgroup_candidates(p, target)
    found = [c for c in found if why_invalid(p, c, target) is None]
    return tuple(found or _any_arch_candidates(p, arch))[:MOST_CANDIDATES]


def _gemv_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Long rows that few strips share are split into so many parts that an SM has about eight warps of two strips."""
    strips, columns = p.n // STRIP, p.k // STRIP
    several = 1 < p.num_tokens <= STREAM_BLOCK_M[-1]
    for warps, each, most_steps in GEMV_TILINGS[: -1 if several else None]:
        split = 1
        if (each, most_steps) == (2, 3) and (columns > 96 or 2 * strips < target.device.num_sms):
            split = max(s for s in SPLITS if s == 1 or s * strips * warps <= 16 * target.device.num_sms)
        turns = ceil(columns / (most_steps * warps * split))
        steps = ceil(columns / (warps * split * turns))
        yield Config(8, STRIP * each, STRIP * warps * steps, STRIP * each, 1, warps, 1, 0, "gemv", split_k=split)


def _stream_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Whole strips where they make a wave and a half or rows are short, else parts of K that fill the SMs."""
    waves = p.n / STRIP / target.device.num_sms
    if p.num_tokens == 1:
        for parts, warps, tiles, stages, blocks in TMA_ONE_TOKEN:
            if parts == 1 or waves < 1.5:
                yield from stream_configs(p, target, parts, warps, tiles, stages, blocks=blocks)
        return
    splits = waves < 1.5 and p.k >= 4096
    if not splits:
        yield from cta_pipeline_configs(p, target)
    for parts, warps, tiles, stages, prefetch in TMA_SPLIT_STRIPS if splits else TMA_WHOLE_STRIPS:
        yield from stream_configs(p, target, parts, warps, tiles, stages, prefetch)


def stream_configs(
    p: Problem, target: Target, parts: int, warps: int, tiles: int, stages: int, prefetch: int = 0, *,
    blocks: int = 1, body: str = "tma_warp",
) -> Iterator[Config]:  # fmt: skip
    """With as many stages as `blocks` blocks an SM have shared memory for; none if not even two fit."""
    base = Config(STREAM_BLOCK_M[p.num_tokens > 1], STRIP, 0, STRIP, 1, warps, 2, 1, body, split_k=parts)
    step = tiling.stream_step(base, p.group_size)
    share = ceil(ceil(ceil(p.k / step) / parts) / warps)  # of a warp, in steps
    if base.cta_pipeline and share * step > tiling.MOST_QUADS * STRIP:  # whose digits fill registers
        return
    base = replace(base, block_k=max(1, min(tiles * STRIP // step, share)) * step * warps)
    for num_stages in range(stages, 1, -1):
        config = replace(base, num_stages=num_stages, prefetch_stages=prefetch if prefetch < num_stages else 0)
        fits = num_stages == 2 or smem_bytes(p, config, target) * blocks <= target.arch.max_smem_bytes
        if fits and why_invalid(p, config, target) is None:
            yield config
            return


def cta_pipeline_configs(p: Problem, target: Target) -> Iterator[Config]:
    """Whole strips by one pipeline a block: stages of two tiles a warp, or of all that it has of a short row."""
    tiles, step = p.k // STRIP, p.group_size
    warps = next((w for w in (14, 12, 10) if tiles % w == 0), 8)
    stage = min(8, ceil(tiles / warps)) if p.k < 3000 else 2
    stage_bytes = STRIP * (max(1, stage * STRIP // step) * step * warps) * (1 / 2 + 2 / step)
    few = max(1, round(CTA_PREFETCH_BYTES[p.n / STRIP >= 4.5 * target.device.num_sms] / stage_bytes))
    yield from stream_configs(p, target, 1, warps, stage, 12, few, body="tma_block")


def mma_candidates() -> list[Config]:
    """Two to eight tokens by mma."""
    found = []
    for block_n, block_k, warps_k, stages, blocks in MMA_PIPELINES:
        few = MMA_PREFETCH_BYTES // (blocks * block_n * block_k // 2)
        found.append(Config(8, block_n, block_k, 32, 1, warps_k, stages, blocks,
                            prefetch_stages=few if 0 < few < stages - 1 else 0))  # fmt: skip
    return found


def _warpgroup_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Tiles of as many tokens as leave the fewest rows of tiles, of those that fill one wave, and of a few between."""
    num_sms, columns = target.device.num_sms, ceil(p.n / 128)
    least = ceil(p.num_tokens / max(WARPGROUP_TILINGS))
    one_wave = max(least, min(num_sms // columns, ceil(p.num_tokens / STRIP)))
    rows = (least, one_wave, *range(least + 1, least + 4), *(ceil(p.num_tokens / m) for m in (192, 160, 128)))
    block_ms = dict.fromkeys(min(m for m in WARPGROUP_TILINGS if m * r >= p.num_tokens) for r in rows)
    for block_m in list(block_ms)[:MOST_BLOCK_MS]:
        for block_n, block_k, stages in WARPGROUP_TILINGS[block_m]:
            yield from _warpgroup_configs(p, target, block_m, block_n, block_k, stages)


def _warpgroup_configs(
    p: Problem, target: Target, block_m: int, block_n: int, block_k: int, stages: int
) -> Iterator[Config]:
    """A block a tile where waves are nearly full, equal shares where they are not; wide tiles where there are many."""
    num_sms = target.device.num_sms
    while p.k % block_k:
        block_k, stages = block_k // 2, min(2 * stages, 12)
    base = Config(block_m, block_n, block_k, 16, 1, 1, stages, 1, "wgmma_ws")
    if p.row_invariant and p.num_tokens > block_m:
        yield replace(base, blocks_per_sm=0)
        return
    if tiling.overlaps_reduce(base):
        if block_m > 128 and ceil(p.n / block_n) % 2 == 0:
            yield replace(base, cluster=2, l2_prefetch_stages=4 if block_m == 256 else 0)
        else:
            block_k = min(block_k, 128 if block_m == 128 else 64)
            yield replace(base, block_k=block_k, num_stages=stages * base.block_k // block_k)
        return
    few = PREFETCH_COLUMNS // block_k if block_m <= MAX_PREFETCH_TOKENS and (block_m, block_n) != (32, 128) else 0
    base = replace(base, prefetch_stages=few if few < stages else 0)
    tiles = ceil(p.num_tokens / block_m) * ceil(p.n / block_n)
    is_long = tiles * p.k >= LONG_SHARE * num_sms  # what an SM has of K
    if (block_m, block_n) == (16, 128):
        yield replace(base, blocks_per_sm=2, num_stages=min(stages, 6))
        return
    fill = tiles / (ceil(tiles / num_sms) * num_sms)
    if block_n > 128 and block_m > 16 and tiles < 0.75 * num_sms and not is_long:
        return
    if fill > 0.55 or p.k < 4096:
        yield replace(base, blocks_per_sm=0)
    if fill < 0.9:
        yield base


def expected_registers(problem: Problem, config: Config, target: Target) -> int:
    """Of a thread: what the refusals count with, or what ptxas may give where it takes all."""
    c, arch = config, target.arch
    if c.warpgroups:
        return arch.registers_of((128 + 2 * c.block_n) * max(1, c.blocks_per_sm))
    if c.stream:
        return tiling.stream_registers(c, tiling.stream_tiles(c, problem.k, problem.group_size))
    return tiling.gemv_registers(c) if c.gemv else tiling.mma_registers(c, problem.group_size, arch)


def _any_arch_candidates(p: Problem, arch: Arch) -> Iterator[Config]:
    """mma, and on sm90 wgmma behind cp.async, whose K need not be a multiple of 64. The last is valid everywhere."""
    warp_n, stages = 32 if arch.has_ldmatrix else 64, 4 if arch.has_cp_async else 2
    block_m = next((m for m in (8, 16, 32) if m >= p.num_tokens), 64)
    if block_m <= 16:  # long stages in each of several blocks: while one waits for a barrier, others multiply
        found = [Config(block_m, 128, 256, warp_n, 1, 1, 2, blocks) for blocks in (4, 3, 2, 1)]
    elif p.num_tokens <= 64:
        cuts = (128, 128, 1, 3, 2), (128, 128, 1, stages, 1), (128, 64, 1, stages, 1), (128, 64, 2, stages, 1)
        found = [Config(block_m, n, k, warp_n, warps_m, 1, s, b) for n, k, warps_m, s, b in cuts]
        cuts = (128, 256, 1, 3, 2), (256, 128, 1, 4, 1)
        found += [Config(block_m, n, k, 32, 1, 1, s, b, "wgmma") for n, k, _, s, b in cuts]
    else:
        cuts = (64, 4), (64, 3), (32, 2)
        found = [Config(128, 256, k, 64, 2, 1, s, b) for k, s in cuts for b in (1, 0)]
        found += [Config(128, 256, 128, 32, 1, 1, 4, b, "wgmma") for b in (1, 0)]
    for config in (*found, Config(min(block_m, 32), 64, 64, warp_n, 1, 1, 2, 1)):
        shares = config.blocks_per_sm and not (p.row_invariant and p.num_tokens > config.block_m)
        yield config if shares else replace(config, blocks_per_sm=0)
