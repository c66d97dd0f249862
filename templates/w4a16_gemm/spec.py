"""w4a16_gemm: out[M, N] = x[M, K] dequant(W)[N, K]^T with symmetric int4 weights, for one token or for thousands.

With gated, W's rows are gate and up, interleaved by common/w4/pack.py, and out[M, N / 2] = gelu_tanh(gate) * up. Every
M and every arch from sm70 is served; Config.body and the tiling differ (common/w4/tiling.py). The bodies tma_warp and
tma_block multiply W as integers: an infinity or a NaN in a token's x makes all outputs of that token NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import require_tokens
from kerngen.templates.common.w4 import limits, tiling
from kerngen.templates.common.w4.tiling import STREAM_BLOCK_M, STRIP, matrix_bytes, require_matrix
from kerngen.templates.common.w4.tiling import Tiling as Config
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TensorMap, TokenProblem, args


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
        require_tokens(self.num_tokens)


_ARGS = *args("ptr", "out", "x", "w_packed", "scales", "workspace"), Arg("num_tokens", "i32")
_MAPS = Arg("x_map", "map", of="x"), Arg("w_map", "map", of="w_packed"), Arg("scales_map", "map", of="scales")
ARGS, WARPGROUP_ARGS = {"w4a16_gemm": _ARGS}, {"w4a16_gemm": (*_ARGS, *_MAPS)}


def _body(name: str, template: str) -> Body:
    given, space = WARPGROUP_ARGS if name == "wgmma_ws" else ARGS, tiling.SPACES[name]
    return Body(f"{template}.cu.jinja", given, space, lambda arch: limits.serves(name, arch), {"body": name})


BODIES = (
    _body("mma", "kernel"), _body("wgmma", "kernel"), _body("gemv", "gemv"), _body("tma_warp", "stream"),
    _body("tma_block", "block_stream"), _body("wgmma_ws", "wgmma_ws"),
)  # fmt: skip
OUTPUTS = ("out",)
COMPARES_SIZES = True  # of 384 tokens, tiles of 256 leave a third empty
MAX_SPILL_BYTES = 48  # what ptxas may keep in local memory, a thread: of the ring's tiles, outside the loop over stages


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    found = {"STREAM_BYTES": config.smem_bytes(problem.group_size)}
    if config.stream:
        tiles = limits.stream_tiles(config, problem.k, problem.group_size)
        found |= {"MANY_TILES": limits.stream_has_many(config, tiles), "STREAM_BLOCKS": limits.stream_blocks(config)}
    if config.body == "wgmma_ws":
        rows, blocks = x_box(config)
        copier, multiplier = limits.warpgroup_registers(config)
        found |= {"BOX_ROWS": rows, "BOX_BLOCKS": blocks, "OUT_BYTES": _epilogue_bytes(config)}
        found |= {"ADDS_BESIDE": config.overlaps_reduce, "MANY_TOKENS": tiling.MANY_TOKENS}
        found |= {"PRODUCER_REGISTERS": copier, "CONSUMER_REGISTERS": multiplier}
    return found


def x_box(config: Config) -> tuple[int, int]:
    """Tokens, and blocks of 64 columns, that a bulk copy brings of x: a stage's, or of a cluster a block's part."""
    blocks = config.block_k // 64
    if blocks % config.cluster:
        return config.block_m // config.cluster, blocks
    return config.block_m, blocks // config.cluster


def _epilogue_bytes(config: Config) -> int:
    """Of what a warpgroup has finished and not stored: a whole tile where others store it, else 16 or 32 tokens."""
    if config.overlaps_reduce:
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
    size = config.smem_bytes(problem.group_size)
    if config.stream:  # and the sums of all units of a block: of all warps, or of those that others wait for
        units = ceil(problem.n // STRIP * config.split_k / num_blocks(problem, config, target))
        sums = config.warps_k * problem.num_tokens * STRIP * 4
        if config.body == "tma_block":
            sums = config.unit_bytes if config.split_k > 1 else 0
        size += units * sums
    if config.body == "wgmma_ws":  # and what is on its way out of each warpgroup, and the barriers
        groups = config.block_n // 64
        barriers = 2 * config.num_stages + (config.num_stages if config.prefetch_stages else 1)
        barriers += (2 * groups + 1) * config.overlaps_reduce
        size += groups * _epilogue_bytes(config) + 8 * barriers
    return size


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c = problem, config
    why = limits.why_invalid(c, p.num_tokens, p.k, p.group_size, target.arch)
    if why := why or target.arch.why_too_large(smem_bytes(p, c, target), max(1, c.blocks_per_sm)):
        return why
    if p.row_invariant and c.blocks_per_sm and p.num_tokens > c.block_m:
        return (f"row_invariant: {p.num_tokens} tokens fill several tiles of block_m={c.block_m}, and with "
                f"blocks_per_sm={c.blocks_per_sm} blocks share tiles; with 0 none does")  # fmt: skip
    return None


def num_blocks(problem: Problem, config: Config, target: Target) -> int:
    """The last cluster may have tiles beyond W."""
    rows = config.block_n * config.cluster
    tiles = -(-problem.num_tokens // config.block_m) * -(-problem.n // rows) * config.cluster
    return config.num_blocks(tiles, problem.k, target.device.num_sms)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    grid, block = num_blocks(problem, config, target), 32 * (config.num_warps + config.extra_warps)
    # Blocks that share a tile wait for each other's sums, so they must be co-resident; gemv's need not (gemv.cuh).
    return (Launch("w4a16_gemm", (grid, 1, 1), (block, 1, 1), smem_bytes(problem, config, target),
                   pdl=target.arch.has_pdl, cluster=(config.cluster, 1, 1),
                   cooperative=config.shares_tiles and config.body != "gemv"),)  # fmt: skip


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """The LL mailbox of split-K sums, zero between launches; 0 bytes if no tile is shared.

    With gemv, a counter for each tile of rows comes before it. With cta_pipeline and split_k=1 there is only the
    counter of claimed n-tiles.
    """
    if config.body == "tma_block" and config.split_k == 1:
        return 16
    if not (config.few_tokens):
        return config.partial_bytes(num_blocks(problem, config, target))
    tiles = ceil(problem.n / config.block_n)
    posts = config.partial_bytes(tiles * config.split_k)
    return posts + 16 * ceil(tiles / 4) if config.body == "gemv" and posts else posts


def cost(problem: Problem) -> Cost:
    p, out = problem, problem.n // 2 if problem.gated else problem.n
    weights = matrix_bytes(p.n, p.k, p.group_size)
    return Cost(weights + 2 * p.num_tokens * (p.k + out), 2 * p.num_tokens * p.n * p.k)


def expected_registers(problem: Problem, config: Config, target: Target) -> int:
    """What ptxas gives, about: to loops of gemv with several turns also the next turn's loads."""
    need, given = limits.registers(config, problem.k, problem.group_size, target.arch)
    if config.body != "gemv":
        return need
    return min(2 * need - 50, given) if config.block_k * config.split_k < problem.k else need - 30


# What is tried, by body: tilings that sweeps and steps found good for some shape (docs/experiments).
MOST_CANDIDATES = 12
# gemv: warps, strips of each, steps in flight at most
GEMV_TILINGS = (16, 1, 6), (8, 2, 3), (4, 1, 4), (4, 2, 3), (4, 2, 2)
# tma_warp, by tokens of a tile: parts of K, warps, tiles of a warp's stage, stages at most, prefetch_stages; and blocks
# that an SM has shared memory for, the next launch's included
TMA_TILINGS = {
    1: ((1, 12, 6, 5, 0), (1, 8, 4, 6, 0, 2), (3, 8, 4, 6, 0, 2), (3, 8, 8, 6, 0), (6, 8, 4, 6, 0, 2),
        (11, 8, 4, 6, 0, 2)),
    4: ((1, 8, 6, 4, 0), (1, 12, 4, 7, 1), (1, 16, 4, 5, 0), (2, 16, 6, 3, 1), (3, 8, 11, 2, 0), (6, 8, 6, 4, 0),
        (6, 16, 6, 3, 1), (8, 12, 4, 6, 2)),
}  # fmt: skip
CTA_PREFETCH_BYTES = 32 * 1024, 48 * 1024  # tma_block: in flight while a block waits for x; of many strips
# mma, eight tokens: block_n, block_k, warps_k, num_stages, blocks_per_sm, prefetch_stages
MMA_TILINGS = tuple(
    Config(8, n, k, 32, 1, warps, stages, blocks, prefetch_stages=few)
    for n, k, warps, stages, blocks, few in (
        (32, 256, 2, 6, 4, 2), (64, 256, 4, 8, 2, 2), (64, 512, 4, 4, 2, 1), (64, 512, 4, 3, 2, 1),
        (128, 256, 1, 2, 4, 0), (128, 256, 1, 2, 3, 0))
)  # fmt: skip
# wgmma_ws: block_m -> block_n, the longest block_k and its stages
WARPGROUP_TILINGS = {
    16: ((128, 256, 3), (192, 256, 5), (256, 256, 4)), 32: ((128, 256, 4), (192, 256, 4), (256, 128, 6)),
    48: ((128, 256, 4), (192, 256, 3), (256, 128, 5)), 64: ((128, 256, 3), (192, 128, 5), (256, 128, 5)),
    80: ((128, 128, 6), (192, 128, 6), (256, 128, 5)), 96: ((128, 128, 6), (192, 128, 5)),
    112: ((128, 128, 5), (192, 128, 5)), 128: ((128, 128, 4), (192, 64, 8)), 160: ((128, 128, 3), (192, 64, 5)),
    192: ((128, 128, 3), (192, 64, 4)), 256: ((128, 64, 4),),
}  # fmt: skip
PREFETCH_COLUMNS = 256  # of a tile, in flight while x is waited for


def candidates(problem: Problem, target: Target) -> tuple[Config, ...]:
    """By tokens: gemv, bulk copies and mma up to eight, warpgroups for more; mma where warpgroups do not serve."""
    p, arch = problem, target.arch
    few = p.num_tokens <= STREAM_BLOCK_M[-1]
    if p.num_tokens > 8:
        found = list(_warpgroup_candidates(p, target))
    else:
        found = [*_gemv_candidates(p, target), *(_stream_candidates(p, target) if few else ())]
        found += MMA_TILINGS[: 2 if few else None] if p.num_tokens > 1 else ()
    found = [c for c in found if why_invalid(p, c, target) is None]
    if not found or not arch.has_wgmma:
        found += (c for c in _any_arch_candidates(p, arch) if why_invalid(p, c, target) is None)
    return tuple(found[:MOST_CANDIDATES])


def _gemv_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Long rows, and few strips, are split into so many parts that an SM has about eight warps of two strips."""
    strips, columns, num_sms = p.n // STRIP, p.k // STRIP, target.device.num_sms
    for warps, each, most_steps in GEMV_TILINGS[: 4 if 1 < p.num_tokens <= STREAM_BLOCK_M[-1] else None]:
        is_split = (each, most_steps) == (2, 3) and (columns > 96 or 2 * strips < num_sms)
        split = max(s for s in (1, 2, 3, 4, 6, 8) if s == 1 or (is_split and s * strips * warps <= 16 * num_sms))
        turns = ceil(columns / (most_steps * warps * split))
        steps = ceil(columns / (warps * split * turns))
        yield Config(8, STRIP * each, STRIP * warps * steps, STRIP * each, 1, warps, 1, 0, "gemv", split_k=split)


def _stream_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Whole strips where they make a wave and a half or rows are short, else parts of K that fill the SMs. One pipeline
    a block has stages of two tiles a warp, or of all that it has of a short row.
    """
    waves, tiles, one = p.n / STRIP / target.device.num_sms, p.k // STRIP, p.num_tokens == 1
    splits = waves < 1.5 and p.k >= 4096
    if not one and not splits:
        warps = next((w for w in (14, 12, 10) if tiles % w == 0), 8)
        stage = min(8, ceil(tiles / warps)) if p.k < 3000 else 2
        yield from stream_configs(p, target, 1, warps, stage, 12, CTA_PREFETCH_BYTES[waves >= 4.5], body="tma_block")
    for parts, warps, *others in TMA_TILINGS[1 if one else 4]:
        if (splits and (parts * waves > 0.9 or parts >= 6)) if parts > 1 else (waves >= 1 or warps > 8 or not one):
            yield from stream_configs(p, target, parts, warps, *others)


def stream_configs(p: Problem, target: Target, parts: int, warps: int, tiles: int, stages: int, prefetch: int,
                   blocks: int = 1, *, body: str = "tma_warp") -> list[Config]:  # fmt: skip
    """The one with as many stages as fit, none if not even two do; prefetch is in stages, or of tma_block in bytes."""
    base = Config(STREAM_BLOCK_M[p.num_tokens > 1], STRIP, 0, STRIP, 1, warps, 2, 1, body, split_k=parts)
    step = limits.stream_step(base, p.group_size)
    share = ceil(ceil(ceil(p.k / step) / parts) / warps)  # of a warp, in steps
    base = replace(base, block_k=max(1, min(tiles * STRIP // step, share)) * step * warps)
    if base.body == "tma_block":
        if share * step > limits.MOST_QUADS * STRIP:  # whose digits fill registers
            return []
        prefetch = max(1, round(prefetch / base.weight_bytes(p.group_size)))
    for n in range(stages, 1, -1):
        config = replace(base, num_stages=n, prefetch_stages=prefetch if prefetch < n else 0)
        fits = n == 2 or blocks * smem_bytes(p, config, target) <= target.arch.max_smem_bytes
        if fits and why_invalid(p, config, target) is None:
            return [config]
    return []


def _warpgroup_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Tiles of tokens that make the fewest rows of tiles, those that fill one wave, and a few between.

    A block a tile where waves are nearly full, equal shares where they are not; wide tiles where there are many.
    """
    num_sms, tokens = target.device.num_sms, p.num_tokens
    least = ceil(tokens / max(WARPGROUP_TILINGS))
    one_wave = max(least, min(num_sms // ceil(p.n / 128), ceil(tokens / STRIP)))
    rows = (least, one_wave, *range(least + 1, least + 4), *(ceil(tokens / m) for m in (192, 160, 128)))
    block_ms = dict.fromkeys(min(m for m in WARPGROUP_TILINGS if m * r >= tokens) for r in rows)
    for block_m, cut in ((m, t) for m in block_ms for t in WARPGROUP_TILINGS[m]):
        block_n, block_k, stages = cut
        while p.k % block_k:
            block_k, stages = block_k // 2, min(2 * stages, 12)
        is_limited = block_m <= tiling.MAX_PREFETCH_TOKENS and (block_m, block_n) != (32, 128)
        few = PREFETCH_COLUMNS // block_k if is_limited else 0
        base = Config(block_m, block_n, block_k, 16, 1, 1, stages, 1, "wgmma_ws", prefetch_stages=few)
        tiles = ceil(tokens / block_m) * ceil(p.n / block_n)
        fill = tiles / (ceil(tiles / num_sms) * num_sms)
        if p.row_invariant and tokens > block_m:
            yield replace(base, blocks_per_sm=0)
        elif base.overlaps_reduce and block_m > 128 and ceil(p.n / 128) % 2 == 0:
            yield replace(base, cluster=2, l2_prefetch_stages=4 if block_m == 256 else 0)
        elif base.overlaps_reduce:
            yield base
        elif (block_m, block_n) == (16, 128):
            yield replace(base, blocks_per_sm=2, num_stages=min(stages, 6))
        else:
            yield from [replace(base, blocks_per_sm=0)] if fill > 0.55 or p.k < 4096 else []
            yield from [base] if fill < 0.9 else []


def _any_arch_candidates(p: Problem, arch: Arch) -> Iterator[Config]:
    """mma, and on sm90 wgmma behind cp.async, whose K need not be a multiple of 64. The last is valid everywhere."""
    warp_n, most = 32 if arch.has_ldmatrix else 64, 4 if arch.has_cp_async else 2
    block_m = next((m for m in (8, 16, 32, 64) if m >= p.num_tokens), 128)
    # block_n, block_k, warps_m, num_stages, blocks_per_sm
    if block_m <= 16:  # long stages in each of several blocks: while one waits for a barrier, others multiply
        cuts = [(128, 256, 1, 2, blocks) for blocks in (4, 3, 2, 1)]
    elif block_m <= 64:
        cuts = [(128, 128, 1, 3, 2), (128, 128, 1, most, 1), (128, 64, 1, most, 1), (128, 64, 2, most, 1)]
    else:
        cuts = [(256, k, 2, stages, b) for k, stages in ((64, 4), (64, 3), (32, 2)) for b in (1, 0)]
    found = [Config(block_m, n, k, 64 if block_m > 64 else warp_n, m, 1, s, b) for n, k, m, s, b in cuts]
    found += [Config(block_m, n, k, 32, 1, 1, s, b, "wgmma") for n, k, s, b in ((128, 256, 3, 2), (256, 128, 4, 1))]
    for config in (*found, Config(min(block_m, 32), 64, 64, warp_n, 1, 1, 2, 1)):
        yield replace(config, blocks_per_sm=0) if p.row_invariant and p.num_tokens > config.block_m else config
