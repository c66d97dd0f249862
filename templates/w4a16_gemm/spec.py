"""w4a16_gemm: out[M, N] = x[M, K] dequant(W)[N, K]^T with weights in int4 or int8, for one token or for thousands.

A group of weights shares a scale, and with weights=int4_min or int8_min a minimum: code * scale + minimum. With gated,
W's rows are gate and up, interleaved by common/w4/pack.py, and out[M, N / 2] = activation(gate) * up. Every M and every
arch from sm70 is served; Config.body and the tiling differ (common/w4/tiling.py). The bodies tma_warp and tma_block
multiply W as integers: an infinity or a NaN in a token's x makes all outputs of that token NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import require, require_activation, require_tokens
from kerngen.templates.common.w4 import limits, measured, tiling
from kerngen.templates.common.w4.tiling import STREAM_BLOCK_M, STRIP, Packing, packing_of, require_matrix
from kerngen.templates.common.w4.tiling import Tiling as Config
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TensorMap, TokenProblem, args


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """n, k: rows of W and their length. group_size: weights along K that share a scale. dtype: of x, scales and out.

    gated: W is gate and up, and out has n / 2 columns. row_invariant: a token's output has the same bits in every row
    of x. Shared tiles break that if tokens fill several tiles, since stream-K cuts each tile at other columns. weights:
    int4 in -8..7, int4_min in 0..15, int8 or int8_min in -128..127; group_size may be k but for int4. fp16_scales:
    scales and minima are fp16, though dtype is bf16. activation: of gate, gelu_tanh or silu.
    """

    TUNED_AS_DEFAULT: ClassVar[tuple[str, ...]] = ("activation",)

    n: int
    k: int
    group_size: int = 32
    dtype: str = "bf16"
    num_tokens: int = 1
    gated: bool = False
    row_invariant: bool = False
    weights: str = "int4"
    fp16_scales: bool = False
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        require_matrix(self.n, self.k, self.group_size, self.dtype, self.weights)
        require(not self.fp16_scales or self.dtype != "fp16", "fp16_scales=True: with dtype=fp16 they are so")
        require_tokens(self.num_tokens)
        require_activation(self.activation)
        require(self.gated or self.activation == "gelu_tanh", f"activation={self.activation!r} takes gated=True")

    @property
    def packing(self) -> Packing:
        return packing_of(self.weights, self.group_size)

    @property
    def has_limbs(self) -> bool:
        """Whether W may be multiplied as integers, by limbs of x (tma_*)."""
        return self.weights == "int4" and not self.fp16_scales

    @property
    def per_int4(self) -> int:
        """Bytes of W in place of one of int4's."""
        return self.packing.bits // 4


_ARGS = *args("ptr", "out", "x", "w_packed", "scales", "workspace"), Arg("num_tokens", "i32")
_MAPS = Arg("x_map", "map", of="x"), Arg("w_map", "map", of="w_packed"), Arg("scales_map", "map", of="scales")
_TEMPLATES = {
    "mma": "kernel", "wgmma": "kernel", "tma_warp": "stream", "tma_mma": "stream", "tma_block": "block_stream",
}  # fmt: skip
BODIES = tuple(
    Body(f"{_TEMPLATES.get(name, name)}.cu.jinja", {"w4a16_gemm": (*_ARGS, *_MAPS) if name == "wgmma_ws" else _ARGS},
         space, partial(limits.serves, name), {"body": name})
    for name, space in tiling.SPACES.items()
)  # fmt: skip
OUTPUTS = ("out",)
MOST_CANDIDATES = 12
COMPARES_SIZES = True  # of 384 tokens, tiles of 256 leave a third empty
MAX_SPILL_BYTES = 48  # what ptxas may keep in local memory, a thread: of the ring's tiles, outside the loop over stages


def constants(p: Problem, c: Config, arch: Arch) -> dict[str, int]:
    found = {"STREAM_BYTES": c.smem_bytes(p.packing), "BITS": p.packing.bits, "HAS_MINIMA": p.packing.has_minima}
    found["SCALES_BF16"] = p.dtype == "bf16" and not p.fp16_scales
    if c.stream:
        many = limits.stream_has_many(c, limits.stream_tiles(c, p.k, p.group_size))
        found |= {"MANY_TILES": many, "STREAM_BLOCKS": limits.stream_blocks(c)}
    if c.body == "wgmma_ws":
        names = "BOX_ROWS", "BOX_BLOCKS", "PRODUCER_REGISTERS", "CONSUMER_REGISTERS"
        found |= dict(zip(names, x_box(c) + limits.warpgroup_registers(c), strict=True))
        found |= {"OUT_BYTES": _epilogue_bytes(c), "ADDS_BESIDE": c.overlaps_reduce, "MANY_TOKENS": tiling.MANY_TOKENS}
    return found


def x_box(c: Config) -> tuple[int, int]:
    """Tokens, and blocks of 64 columns, that a bulk copy brings of x: a stage's, or of a cluster a block's part."""
    blocks = c.block_k // 64
    return (c.block_m // c.cluster, blocks) if blocks % c.cluster else (c.block_m, blocks // c.cluster)


def _epilogue_bytes(c: Config) -> int:
    """Of what a warpgroup has finished and not stored: a whole tile where others store it, else 16 or 32 tokens."""
    return c.block_m * 64 * 2 if c.overlaps_reduce else (16 if c.block_m % 32 else 32) * (64 * 2 + 16)


def tensor_map(p: Problem, c: Config, of: str, shape: tuple[int, ...]) -> TensorMap | None:
    """x as blocks of 64 columns of all tokens; W as strips of tiles of 32 x 32 weights, its scales as strips too."""
    if of == "x":
        tokens, k = shape
        return TensorMap((64, tokens, k // 64, 1), (k * 2, 128, tokens * k * 2), (64, *x_box(c), 1))
    size, columns = p.packing.tile_bytes, STRIP
    if of == "scales":  # of a group
        size, columns = p.packing.group_bytes, p.group_size
    row = p.k // columns * size
    parts = -(-size // 512)  # a box has up to 256 elements of an axis
    dims = (size // 2 // parts, p.k // columns * parts, p.n // STRIP, 1)
    box = (size // 2 // parts, max(1, c.block_k // columns) * parts, c.block_n // STRIP, 1)
    return TensorMap(dims, (size // parts, row, p.n // STRIP * row), box, swizzled=False)


def smem_bytes(p: Problem, c: Config, target: Target) -> int:
    size = c.smem_bytes(p.packing)
    if c.stream:  # and the sums of all units of a block: of all warps, or of those that others wait for
        units = ceil(p.n // STRIP * c.split_k / num_blocks(p, c, target))
        of_warps, of_block = c.warps_k * p.num_tokens * STRIP * 4, c.shares_tiles * c.unit_bytes
        size += units * (of_block if c.body == "tma_block" else of_warps)
    if c.body == "wgmma_ws":  # and what is on its way out of each warpgroup, and the barriers
        groups = c.block_n // 64
        barriers = 2 * c.num_stages + (c.num_stages if c.prefetch_stages else 1) + c.overlaps_reduce * (2 * groups + 1)
        size += groups * _epilogue_bytes(c) + 8 * barriers
    return size


def why_invalid(p: Problem, c: Config, target: Target) -> str | None:
    why = limits.why_invalid(c, p.num_tokens, p.k, p.packing, target.arch)
    if c.has_limbs and p.fp16_scales:
        why = why or f"fp16_scales=True: limbs of body={c.body} have scales in {p.dtype}; body=tma_mma serves"
    why = why or limits.why_too_many_sums(c, p.packing, p.fp16_scales, target.arch)
    if why := why or target.arch.why_too_large(smem_bytes(p, c, target), max(1, c.blocks_per_sm)):
        return why
    if p.row_invariant and c.blocks_per_sm and p.num_tokens > c.block_m:
        return (f"row_invariant: {p.num_tokens} tokens fill several tiles of block_m={c.block_m}, and with "
                f"blocks_per_sm={c.blocks_per_sm} blocks share tiles; with 0 none does")  # fmt: skip
    return None


def num_blocks(p: Problem, c: Config, target: Target) -> int:
    return c.num_blocks(ceil(p.num_tokens / c.block_m), p.n, p.k, target.device.num_sms)


def launches(p: Problem, c: Config, target: Target) -> tuple[Launch, ...]:
    grid, block = num_blocks(p, c, target), 32 * (c.num_warps + c.extra_warps)
    # Blocks that share a tile wait for each other's sums, so they must be co-resident; gemv's need not (gemv.cuh).
    return (Launch("w4a16_gemm", (grid, 1, 1), (block, 1, 1), smem_bytes(p, c, target), pdl=target.arch.has_pdl,
                   cluster=(c.cluster, 1, 1), cooperative=c.shares_tiles and c.body != "gemv"),)  # fmt: skip


def workspace_bytes(p: Problem, c: Config, target: Target) -> int:
    """The LL mailbox of split-K sums, zero between launches; 0 bytes if no tile is shared. With gemv, a counter for
    each tile of rows comes before it. With tma_block and split_k=1 there is only the counter of claimed n-tiles.
    """
    if c.body == "tma_block" and c.split_k == 1:
        return 16
    counters = 16 * ceil(ceil(p.n / c.block_n) / 4) if c.body == "gemv" and c.shares_tiles else 0
    blocks = ceil(p.n / c.block_n) * c.split_k if c.few_tokens else num_blocks(p, c, target)
    return counters + c.partial_bytes(blocks)


def cost(p: Problem) -> Cost:
    moved = p.num_tokens * (p.k + (p.n // 2 if p.gated else p.n))
    return Cost(p.packing.bytes_of(p.n, p.k) + 2 * moved, 2 * p.num_tokens * p.n * p.k)


def expected_registers(p: Problem, c: Config, target: Target) -> int:
    """What ptxas gives, about: to loops of gemv with several turns also the next turn's loads."""
    need, given = limits.registers(c, p.k, p.packing, target.arch)
    if c.body != "gemv":
        return need
    return min(2 * need - 50, given) if c.block_k * c.split_k < p.k else need - 30


def candidates(p: Problem, target: Target) -> tuple[Config, ...]:
    """By tokens: gemv, bulk copies and mma up to eight, warpgroups for more; mma where warpgroups do not serve."""
    few = p.num_tokens <= STREAM_BLOCK_M[-1] and p.has_limbs
    if p.num_tokens > 8:
        named = _warpgroup_candidates(p, target)
    else:
        tilings = measured.MMA_TILINGS[: 2 if few else None] if p.num_tokens > 1 or not p.has_limbs else ()
        mma = (replace(c, block_k=max(STRIP * c.warps_k, c.block_k // p.per_int4)) for c in tilings)
        named = chain(_gemv_candidates(p, target), _stream_candidates(p, target) if few else (), mma)
    found = [c for c in named if why_invalid(p, c, target) is None]
    if not found or not target.arch.has_wgmma:
        found += (c for c in _any_arch_candidates(p, target.arch) if why_invalid(p, c, target) is None)
    found = found[:MOST_CANDIDATES]
    if p.num_tokens <= 8 and not p.has_limbs:
        found += [c for c in mma_stream_configs(p, target) if why_invalid(p, c, target) is None]
    return tuple(found)


def _gemv_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Long rows, and few strips, are split into so many parts that an SM has about eight warps of two strips. What is
    on its way is as many bytes for each format.
    """
    strips, columns, num_sms = p.n // STRIP, p.k // STRIP, target.device.num_sms
    for warps, each, most_steps in measured.GEMV_TILINGS[: 4 if 1 < p.num_tokens <= STREAM_BLOCK_M[-1] else None]:
        is_split = (each, most_steps) == (2, 3) and (columns > 96 or 2 * strips < num_sms)
        split = max(s for s in (1, 2, 3, 4, 6, 8) if s == 1 or (is_split and s * strips * warps <= 16 * num_sms))
        turns = ceil(columns / (ceil(most_steps / p.per_int4) * warps * split))
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
        early = measured.CTA_PREFETCH_BYTES[waves >= 4.5]
        yield from stream_configs(p, target, 1, warps, stage, 12, early, body="tma_block")
    for parts, warps, *others in measured.TMA_TILINGS[1 if one else 4]:
        if (splits and (parts * waves > 0.9 or parts >= 6)) if parts > 1 else (waves >= 1 or warps > 8 or not one):
            yield from stream_configs(p, target, parts, warps, *others)


def mma_stream_configs(p: Problem, target: Target) -> Iterator[Config]:
    """As those for one token, with as many bytes a stage; K in as many parts as leave registers for x."""
    for parts, warps, tiles, stages, prefetch, *others in measured.TMA_TILINGS[1]:
        yield from stream_configs(p, target, parts, warps, max(1, tiles // p.per_int4), stages, prefetch, *others,
                                  body="tma_mma")  # fmt: skip


def stream_configs(p: Problem, target: Target, parts: int, warps: int, tiles: int, stages: int, prefetch: int,
                   blocks: int = 1, *, body: str = "tma_warp") -> Iterator[Config]:  # fmt: skip
    """The one with as many stages as fit, none if not even two do; prefetch is in stages, or of tma_block in bytes."""
    block_m = 8 if body == "tma_mma" else STREAM_BLOCK_M[p.num_tokens > 1]
    base = Config(block_m, STRIP, 0, STRIP, 1, warps, 2, 1, body, split_k=parts)
    step, most = limits.stream_step(base, p.group_size), limits.stream_tiles(base, p.k, p.group_size)
    base = replace(base, block_k=max(1, min(tiles, most) * STRIP // step) * step * warps)
    if body == "tma_block":
        if most > limits.MOST_QUADS:  # whose digits fill registers
            return
        prefetch = max(1, round(prefetch / base.weight_bytes(p.packing)))
    for n in range(stages, 1, -1):
        config = replace(base, num_stages=n, prefetch_stages=prefetch if prefetch < n else 0)
        fits = n == 2 or blocks * smem_bytes(p, config, target) <= target.arch.max_smem_bytes
        if fits and why_invalid(p, config, target) is None:
            yield config
            return


def _warpgroup_candidates(p: Problem, target: Target) -> Iterator[Config]:
    """Tiles of tokens that make the fewest rows of tiles, those that fill one wave, and a few between.

    A block a tile where waves are nearly full, equal shares where they are not; wide tiles where there are many.
    """
    num_sms, tokens = target.device.num_sms, p.num_tokens
    least = ceil(tokens / max(measured.WARPGROUP_TILINGS))
    one_wave = max(least, min(num_sms // ceil(p.n / 128), ceil(tokens / STRIP)))
    rows = (least, one_wave, *range(least + 1, least + 4), *(ceil(tokens / m) for m in (192, 160, 128)))
    block_ms = dict.fromkeys(min(m for m in measured.WARPGROUP_TILINGS if m * r >= tokens) for r in rows)
    for block_m, (block_n, block_k, stages) in ((m, t) for m in block_ms for t in measured.WARPGROUP_TILINGS[m]):
        if block_m <= tiling.MAX_PREFETCH_TOKENS:  # W is most of a stage
            block_k = max(64, block_k // p.per_int4)
        while p.k % block_k:
            block_k, stages = block_k // 2, min(2 * stages, 12)
        is_limited = block_m <= tiling.MAX_PREFETCH_TOKENS and (block_m, block_n) != (32, 128)
        few = max(1, measured.PREFETCH_COLUMNS // p.per_int4 // block_k) if is_limited else 0
        base = Config(block_m, block_n, block_k, 16, 1, 1, stages, 1, "wgmma_ws", prefetch_stages=few)
        base = base if p.has_limbs else _with_fewer_stages(p, base, target)
        tiles = ceil(tokens / block_m) * ceil(p.n / block_n)
        fill = tiles / (ceil(tiles / num_sms) * num_sms)
        if p.row_invariant and tokens > block_m:
            yield replace(base, blocks_per_sm=0)
        elif base.overlaps_reduce:
            paired = block_m > 128 and ceil(p.n / 128) % 2 == 0
            yield replace(base, cluster=2, l2_prefetch_stages=4 if block_m == 256 else 0) if paired else base
        elif (block_m, block_n) == (16, 128):
            yield replace(base, blocks_per_sm=2, num_stages=min(base.num_stages, 6))
        else:
            yield from [replace(base, blocks_per_sm=0)] if fill > 0.55 or p.k < 4096 else []
            yield from [base] if fill < 0.9 else []


def _with_fewer_stages(p: Problem, c: Config, target: Target) -> Config:
    """Stages of int4 may be too large in other formats."""
    while c.num_stages > 3 and target.arch.why_too_large(smem_bytes(p, c, target)):
        c = replace(c, num_stages=c.num_stages - 1)
    return c


def _any_arch_candidates(p: Problem, arch: Arch) -> Iterator[Config]:
    """mma, and on sm90 wgmma behind cp.async, whose K need not be a multiple of 64. The last is valid everywhere."""
    warp_n, most = 32 if arch.has_ldmatrix else 64, 4 if arch.has_cp_async else 2
    block_m = next((m for m in (8, 16, 32, 64) if m >= p.num_tokens), 128)
    # block_n, block_k, warps_m, num_stages, blocks_per_sm
    if block_m <= 16:  # long stages in each of several blocks: while one waits for a barrier, others multiply
        cuts = [(128, 256 // p.per_int4, 1, 2, blocks) for blocks in (4, 3, 2, 1)]
    elif block_m <= 64:
        cuts = [(128, 128, 1, 3, 2), (128, 128, 1, most, 1), (128, 64, 1, most, 1), (128, 64, 2, most, 1)]
    else:
        cuts = [(256, k, 2, stages, b) for k, stages in ((64, 4), (64, 3), (32, 2)) for b in (1, 0)]
    found = [Config(block_m, n, k, 64 if block_m > 64 else warp_n, m, 1, s, b) for n, k, m, s, b in cuts]
    if block_m > 64 and not p.has_limbs:  # and of fewer sums a lane
        found += [replace(c, block_n=128, warp_n=32) for c in found]
    found += [Config(block_m, n, k, 32, 1, 1, s, b, "wgmma") for n, k, s, b in ((128, 256, 3, 2), (256, 128, 4, 1))]
    for config in (*found, Config(min(block_m, 32), 64, 64, warp_n, 1, 1, 2, 1)):
        yield replace(config, blocks_per_sm=0) if p.row_invariant and p.num_tokens > config.block_m else config
