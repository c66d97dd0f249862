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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import NamedTuple

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
# Up to so many weights the default is gemv where looks at steps chose nothing else: what counts is when the first
# bytes arrive. For one token stream is faster alone from far fewer on, but in the one run in which the 26B-A4B's
# small products took it, its step was slower.
MAX_GEMV_WEIGHTS = 1 << 26
MIN_STREAM_WEIGHTS = 1 << 25  # from so many on stream serves one token, and two to four where no step was looked at
LONG_ROW = 3840  # of W: from here on stream's default takes twelve warps for whole strips
LONGEST_ROW = 5 * LONG_ROW  # from here on it takes all of shared memory also where strips are cut into parts
MAX_MMA_TOKENS = 8  # tokens, of a large W with long rows where there is wgmma
MIN_SPLIT_6_K = 3 << 12  # of two to four tokens, rows from here on are cut into six parts
MIN_MMA_K = (1 << 14) + 1  # and from here on the ring was faster in an H100's step
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


def default_config(problem: Problem, target: Target) -> Config:
    for config in _preferred(problem, target):
        if problem.row_invariant and problem.num_tokens > config.block_m and not config.warpgroups:
            config = replace(config, blocks_per_sm=0)
        if why_invalid(problem, config, target) is None:
            return config
    raise ProblemError(f"no default configuration of w4a16_gemm serves {problem} on {target.arch}")


def _gemv_configs(problem: Problem, target: Target) -> tuple[Config, ...]:
    """body=gemv, best first. Sweeps on an H200: about eight warps an SM, two n-tiles each if there are many."""
    strips, columns, num_sms = problem.n // STRIP, problem.k // STRIP, target.device.num_sms
    split = 1
    if strips > 2 * num_sms:
        strips_each, warps_k, most_steps = (1, 4, 4) if strips <= 4 * num_sms else (2, 4, 2)
    elif columns <= 96 and (strips <= num_sms or columns <= 64):
        strips_each, warps_k, most_steps = 1, 16, 6
    else:
        strips_each, warps_k, most_steps = 2, 8 if strips <= num_sms or columns <= 96 else 4, 3
        if columns > 96:
            fitting = 2 * 8 * num_sms // (strips * warps_k)
            split = max(s for s in (1, 2, 3, 4, 6, 8) if s <= max(1, fitting))
    found = []
    for k in (k for k in (16, 8, 4, 2, 1) if k <= warps_k):
        parts = split if k > 1 else 1
        turns = -(-columns // (most_steps * k * parts))
        steps = -(-columns // (k * parts * turns))
        found += [Config(8, STRIP * each, STRIP * k * s, STRIP * each, 1, k, 1, 0, "gemv", split_k=parts)
                  for each in dict.fromkeys((strips_each, 1)) for s in range(steps, 0, -1)]  # fmt: skip
    return tuple(found)


def _stream_configs(problem: Problem, target: Target) -> Config | None:
    """body=tma_warp for one token: whole n-tiles if there are enough for all blocks, else split-K.

    Sweeps on an H200 (docs/performance.md). Many long n-tiles want twelve warps and all of shared memory; others want
    eight warps and room for the next kernel's pipeline, except the longest. Unmeasured on other boards.
    """
    strips, blocks = problem.n // STRIP, target.device.num_sms
    is_long = problem.k >= LONG_ROW
    are_enough = 2 * strips >= 3 * blocks or (0.9 * blocks <= strips <= blocks and not is_long)
    for split in (1, 3, 6, 11) if are_enough else (3, 6, 11, 1):
        base = Config(1, STRIP, 0, STRIP, 1, 1, 1, 1, "tma_warp", split_k=split)
        step = tiling.stream_step(base, problem.group_size)
        steps = ceil(ceil(problem.k / step) / split)
        takes_all = split == 1 and is_long
        has_all = takes_all or problem.k >= LONGEST_ROW
        most_bytes = target.arch.max_smem_bytes // (1 if has_all else 2)
        for warps in sorted((12, 8, 16), key=lambda w: -steps % w) if takes_all else (8, 12, 16):
            slot = min(max(1, (6 if takes_all else 8 if has_all else 4) * STRIP // step), ceil(steps / warps))
            for stages in (6, 5, 4, 3, 2):
                config = replace(base, block_k=slot * step * warps, warps_k=warps, num_stages=stages)
                if smem_bytes(problem, config, target) > most_bytes and stages > 2:
                    continue
                if why_invalid(problem, config, target) is None:
                    return config
    return None


class _StreamTiling(NamedTuple):
    """Tiling of a bulk-copy body: parts of K, warps of a block, a warp's k-tiles a stage and stages, at most; how many
    of these are in flight while it waits for x, 0: all; and whether all warps share a pipeline: then that is in bytes.
    """

    parts: int
    warps: int
    tiles: int
    slots: int
    prefetch_stages: int
    shared: bool = False


def m4_stream_config(problem: Problem, target: Target) -> Config | None:
    """Two to four tokens by bulk copies, where rows of W are not too long: their digits fill registers."""
    for plan in _m4_tilings(problem.n // STRIP, problem.k, target):
        base = Config(STREAM_BLOCK_M[-1], STRIP, 0, STRIP, 1, plan.warps, 1, 1,
                      "tma_block" if plan.shared else "tma_warp", split_k=plan.parts)  # fmt: skip
        step = tiling.stream_step(base, problem.group_size)
        share = ceil(ceil(ceil(problem.k / step) / plan.parts) / plan.warps)  # of a warp, in steps
        slot = max(1, min(plan.tiles * STRIP // step, share))
        cut = replace(base, block_k=slot * step * plan.warps)
        few = plan.prefetch_stages
        if plan.shared:
            few = max(1, round(few / cut.weight_bytes(problem.group_size)))
        for stages in range(plan.slots, 1, -1):
            config = replace(cut, num_stages=stages, prefetch_stages=few if few < stages else 0)
            if why_invalid(problem, config, target) is None:
                return config
    return None


def _m4_tilings(strips: int, k: int, target: Target) -> tuple[_StreamTiling, ...]:
    """Best first, by looks at the verification steps of the 31B, the 12B, E4B and the 26B-A4B on an H100 and, of E2B as
    well, on an H200, each matrix exchanged alone (docs/experiments.md). None for what is left to other bodies.
    """
    waves = strips / target.device.num_sms  # that blocks make of whole strips
    if not target.device.has_fast_memory:
        return _m4_tilings_h100(waves, strips, k)
    return *_m4_cta_tilings(waves, k // STRIP), *(
        _m4_tilings_fast_memory(waves, k) or _m4_tilings_h100(waves, strips, k)
    )


def _m4_tilings_h100(waves: float, strips: int, k: int) -> tuple[_StreamTiling, ...]:
    """As an H100's steps chose, and for what no look on an H200 changed."""
    whole_share = k // STRIP  # at least: all that a warp has of a unit goes into one slot
    if waves >= 1.5 and k < 2048:  # E2B's, whose steps were looked at on an H200 alone
        return (_StreamTiling(1, 8, ceil(k / STRIP / 16), 4, 0),) if strips * STRIP * k > MIN_STREAM_WEIGHTS else ()
    if waves >= 4.5:  # gate and up
        if k < LONG_ROW:
            return (_StreamTiling(1, 8, whole_share, 4, 2),)
        return (_StreamTiling(1, 12, ceil(k / STRIP / 24), 4, 0),) if k < 5000 else (_StreamTiling(1, 12, 2, 9, 2),)
    if waves >= 1.5:  # q, k and v
        return (_StreamTiling(1, 12, 4, 7, 1),) if k < 5000 else (_StreamTiling(1, 14, 4, 5, 1),)
    if k > 5000:  # in parts of K, which fill the blocks
        if waves < 0.5 or k >= MIN_MMA_K:
            return ()
        if k >= MIN_SPLIT_6_K:
            return (_StreamTiling(6, 16, whole_share, 3, 1),)
        return _StreamTiling(3, 8, whole_share, 2, 0), _StreamTiling(6, 16, whole_share, 2, 0)
    if k >= 3000:
        return (_StreamTiling(1, 16, 3, 7, 0),) if waves >= 0.9 else ()
    return (_StreamTiling(1, 8, 6, 4, 0),) if k >= 2048 and waves >= 2 / 3 else ()


def _m4_cta_tilings(waves: float, tiles: int) -> tuple[_StreamTiling, ...]:
    """Whole strips through a ring for all warps of a block, of `tiles` tiles each, where there are enough of them and
    registers hold their digits: in slots of two tiles a warp, or of what it has of a short row. q, k and v follow what
    blocks wait for each other in, and ask for less at a time.
    """
    warps = next((w for w in (14, 12, 10) if tiles % w == 0), 8)
    is_short = tiles * STRIP < 3000
    if ceil(tiles / warps) > tiling.MOST_QUADS or not (waves >= 1.5 or (waves == 1 and tiles >= 64)):
        return ()
    of_slot = min(8, ceil(tiles / warps)) if is_short else 2
    return (_StreamTiling(1, warps, of_slot, 12, CTA_PREFETCH_BYTES[waves >= 4.5], shared=True),)


def _m4_tilings_fast_memory(waves: float, k: int) -> tuple[_StreamTiling, ...]:
    """As _m4_tilings, where an H200's steps chose otherwise."""
    if k < 2048:
        return (_StreamTiling(1, 12, 4, 7 if waves >= 4.5 else 4, 1) if waves >= 1.5 else _StreamTiling(1, 8, 6, 4, 0),)
    if waves >= 4.5:  # gate and up
        if k < LONG_ROW:
            return (_StreamTiling(1, 16, 5, 4, 1),)
        return (_StreamTiling(1, 14, 4, 5, 1),) if k >= 5000 else ()
    if k >= MIN_MMA_K:
        return (_StreamTiling(8, 12, 4, 6, 2),)
    if waves >= 1:
        return ()
    if 3000 <= k < 5000:
        return (_StreamTiling(1, 16, 4, 5, 0),)
    if waves < 0.4:  # E2B's
        return (
            _StreamTiling(1, 8, 8, 5, 2)
            if k < 3000
            else _StreamTiling(2, 16, 6, 3, 1)
            if k < 8192
            else _StreamTiling(6, 8, 6, 4, 0),
        )
    return ()


def mma_configs(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Two to eight tokens of a large W with long rows by the ring, for sm90: by such looks as _m4_tilings."""
    if target.device.has_fast_memory:
        return _limit_prefetch(_mma_configs_fast_memory(problem, target) or _mma_configs_any_board(problem))
    return _mma_configs_any_board(problem)


def prefers_mma(problem: Problem) -> bool:
    """Whether W goes by the ring so on every board."""
    return bool(_mma_configs_any_board(problem))


def _mma_configs_any_board(problem: Problem) -> tuple[Config, ...]:
    """As an H100's steps chose, and for what no look on an H200 changed."""
    if problem.k < LONG_ROW or problem.n * problem.k < 7 << 22:
        return ()
    if problem.k >= MIN_MMA_K:
        return (Config(8, 64, 256, 32, 1, 4, 8, 2),)
    if problem.k >= MIN_SPLIT_6_K:
        return (Config(8, 64, 512, 32, 1, 4, 4, 2),)
    return (Config(8, 128, 256, 32, 1, 1, 2, 3) if problem.n >= 20480 else Config(8, 32, 256, 32, 1, 2, 6, 4),)


def _limit_prefetch(configs: Sequence[Config]) -> tuple[Config, ...]:
    """The same with MMA_PREFETCH_BYTES bytes of weights on their way to an SM at a time while x is waited for."""
    stages = ((c, MMA_PREFETCH_BYTES // (c.blocks_per_sm * c.block_n * c.block_k // 2)) for c in configs)
    return tuple(replace(c, prefetch_stages=few if 0 < few < c.num_stages - 1 else 0) for c, few in stages)


def _mma_configs_fast_memory(problem: Problem, target: Target) -> tuple[Config, ...]:
    """As _mma_configs, where an H200's steps chose otherwise."""
    n, k = problem.n, problem.k
    if k >= MIN_MMA_K:
        return (Config(8, 64, 512, 32, 1, 4, 4, 2),)
    if n >= 16384:
        if n >= 20480 and k >= 5000:
            return (Config(8, 128, 128, 32, 1, 1, 4, 4),)
        return (Config(8, 128, 256, 32, 1, 1, 2, 4 if k >= 2048 else 3),)
    waves = n / STRIP / target.device.num_sms
    if (0.7 <= waves < 1 and 2048 <= k < 3000) or 10000 <= k < MIN_SPLIT_6_K:
        return (Config(8, 64, 512, 32, 1, 4, 3, 2),)
    if waves < 0.4 and 5000 <= k < 10000:
        return (Config(8, 32, 256, 32, 1, 2, 6, 4),)
    return ()


# Tiles of warpgroups, from sweeps on an H200 over the family's matrices: block_n, the longest block_k and its stages.
_WARPGROUP_TILES = {
    16: ((192, 256, 5), (256, 256, 4), (128, 256, 3)),  # 128 rows in two blocks an SM, where W is large
    32: ((192, 256, 4), (128, 256, 4), (256, 128, 6)),
    48: ((128, 256, 4), (192, 256, 3), (256, 128, 5)),
    64: ((128, 256, 3), (192, 128, 5), (256, 128, 5)),
    80: ((128, 128, 6), (192, 128, 6), (256, 128, 5)),
    96: ((128, 128, 6), (192, 128, 5)),
    112: ((128, 128, 5), (192, 128, 5)),
    128: ((128, 128, 4), (192, 64, 8), (256, 64, 6)),
    160: ((128, 64, 8), (192, 64, 5)),
    192: ((128, 64, 6), (192, 64, 4)),
    256: ((128, 64, 4),),
}
# Of those that add up beside: block_k, its stages, cluster and prefetch.
_OVERLAPPED_REDUCE_TILES = {
    128: ((128, 4, 1, 0), (128, 4, 2, 0)),
    160: ((64, 6, 1, 0), (128, 3, 2, 0)),
    192: ((64, 6, 1, 0), (128, 3, 2, 0)),
    256: ((64, 4, 1, 0), (64, 4, 2, 4)),
}
# What an SM takes, in nanoseconds, fitted to those sweeps: for 64 rows of W by 16 columns and block_m tokens; where
# each tile has a block, for each that an SM gets; where tiles are shared, for that and for each of a tile's sums.
_STEP_NS = {
    16: 21.0, 32: 23.5, 48: 28.5, 64: 32.5, 80: 37.0, 96: 41.0, 112: 45.5, 128: 49.0, 160: 62.5, 192: 72.0, 256: 93.0,
}  # fmt: skip
_BLOCK_NS, _SHARED_NS, _SUM_NS = 1000.0, 2000.0, 0.3
_TWO_BLOCKS_FACTOR = 0.95  # of those times, of two blocks an SM
# The same of tiles whose sums are added up beside (an H100's, docs/experiments.md), and what more of it a column of W
# costs those that are not in pairs: x comes from memory where it is long.
_OVERLAPPED_STEP_NS = {128: 47.0, 160: 57.5, 192: 67.0, 256: 87.0}
_NO_CLUSTER_A_COLUMN = 1e-5
# By looks at steps on an H200 (docs/experiments.md), for such memory alone, since an H100's steps gain nothing or lose:
# of those times, tiles of 192 rows, which read 32 tokens less often; columns whose weights are on their way at once
# while x is waited for, and bytes of them an SM by the ring; rows from which 16 tokens go to tiles of more than 128 in
# one block an SM.
_FEWER_READS = 0.96
PREFETCH_COLUMNS, MMA_PREFETCH_BYTES = 256, 32 * 1024
CTA_PREFETCH_BYTES = 32 * 1024, 48 * 1024  # bytes an SM by a shared ring: of q, k and v, of gate and up
MANY_ROWS = 1 << 15


def _wgmma_ws_ns(problem: Problem, c: Config, target: Target) -> float:
    """By the figures above, what tiles of warpgroups take."""
    if tiling.overlaps_reduce(c):
        return _overlapped_reduce_ns(problem, c, target)
    num_sms = target.device.num_sms
    tiles = ceil(problem.num_tokens / c.block_m) * ceil(problem.n / c.block_n)
    tile_ns = c.block_n / 64 * problem.k / 16 * _STEP_NS[c.block_m]
    if c.blocks_per_sm == 0:
        return ceil(tiles / num_sms) * (tile_ns + _BLOCK_NS)
    whole, sums_ns = tiles / num_sms * tile_ns, c.block_m * c.block_n * _SUM_NS
    if target.device.has_fast_memory and (c.block_m, c.block_n) == (32, 192):
        whole *= _FEWER_READS
    if c.blocks_per_sm == 2:
        return whole * _TWO_BLOCKS_FACTOR + _SHARED_NS + sums_ns
    return whole + _SHARED_NS + sums_ns


def _overlapped_reduce_ns(problem: Problem, c: Config, target: Target) -> float:
    """Whole rounds, and of what is left either one more or what each cluster has of it, with its sums."""
    clusters, tiles = target.device.num_sms // c.cluster, _num_tiles(problem, c) // c.cluster
    tile_ns = c.block_n / 64 * problem.k / 16 * _OVERLAPPED_STEP_NS[c.block_m]
    if c.cluster == 1 and c.block_m > tiling.MANY_TOKENS:
        tile_ns *= 1 + _NO_CLUSTER_A_COLUMN * problem.k
    waves, rest = divmod(tiles, clusters)
    least = LEAST_IDLE if waves else LEAST_IDLE_ALONE
    if rest == 0 or (clusters - rest) * problem.k < clusters * least:
        return ceil(tiles / clusters) * tile_ns + _BLOCK_NS
    sums_ns = c.block_m * c.block_n * _SUM_NS * (1 + rest / clusters)
    return tiles / clusters * tile_ns + _BLOCK_NS + sums_ns + (0 if waves else _SHARED_NS)


def prefer(problem: Problem, configs: Sequence[Config], target: Target) -> Config:
    """Of the defaults of more and fewer tokens, the one for `problem`: of 384, tiles of 256 leave a third empty."""
    timed = [c for c in configs if c.warpgroups and c.block_m in _STEP_NS]
    if configs[0] not in timed:
        return configs[0]
    return min(timed, key=lambda c: _wgmma_ws_ns(problem, c, target))


def _wgmma_ws_configs(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Best first; with shorter stages where K is no multiple of a tile's own."""
    found = []
    for block_m, tiles in _WARPGROUP_TILES.items():
        if block_m > 16 and block_m >= 2 * problem.num_tokens:
            continue
        for (block_n, block_k, stages), shared in product(tiles, (1, 0)):
            if shared and block_n == 128 and block_m in _OVERLAPPED_REDUCE_TILES:
                continue
            if block_n == 128 and block_m == 16:
                is_wide = problem.n >= MANY_ROWS and target.device.has_fast_memory
                if problem.n * problem.k < MAX_GEMV_WEIGHTS // 2 or is_wide or not shared:
                    continue
                shared = 2
            while block_k > 64 and problem.k % block_k:
                block_k, stages = block_k // 2, min(2 * stages, 12 // max(1, shared))
            limited = (
                block_m <= MAX_PREFETCH_TOKENS and (block_m, block_n) != (32, 128) and target.device.has_fast_memory
            )
            few = PREFETCH_COLUMNS // block_k
            prefetch_stages = few if limited and few < stages else 0
            found.append(Config(block_m, block_n, block_k, 16, 1, 1, stages, shared, "wgmma_ws",
                                prefetch_stages=prefetch_stages))  # fmt: skip
        for block_k, stages, cluster, l2_prefetch_stages in _OVERLAPPED_REDUCE_TILES.get(block_m, ()):
            if problem.k % block_k:
                block_k, stages = 64, 2 * stages
            found.append(Config(block_m, 128, block_k, 16, 1, 1, stages, 1, "wgmma_ws", cluster=cluster,
                                l2_prefetch_stages=l2_prefetch_stages))  # fmt: skip
    return tuple(sorted(found, key=lambda c: _wgmma_ws_ns(problem, c, target)))


def _preferred(problem: Problem, target: Target) -> tuple[Config, ...]:
    """Best first, from sweeps on an H200; the last is valid everywhere."""
    arch = target.arch
    m = problem.num_tokens
    stages = 4 if arch.has_cp_async else 2
    warp_n = 32 if arch.has_ldmatrix else 64
    block_m = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64
    last = Config(min(block_m, 32), 64, 64, warp_n, 1, 1, 2, 1)
    found = None
    if m == 1 and arch.has_tma and problem.n * problem.k > MIN_STREAM_WEIGHTS:
        found = _stream_configs(problem, target)
    elif 1 < m <= STREAM_BLOCK_M[-1] and arch.has_tma:
        found = m4_stream_config(problem, target)
    if found is not None:
        return (found, last)
    first: tuple[Config, ...] = ()
    if m > 1 and arch.has_wgmma:  # not of every K
        first = mma_configs(problem, target) if m <= MAX_MMA_TOKENS else _wgmma_ws_configs(problem, target)
    if not first and m <= 8 and arch.has_ldmatrix and problem.n * problem.k <= MAX_GEMV_WEIGHTS:
        return (*_gemv_configs(problem, target), last)
    if m <= 16:
        # two long stages in each of several blocks: while one waits for a barrier, others multiply
        even = problem.n % 128 == 0 and problem.k % 256 == 0
        most = 4 if even and (m <= 8 or arch.has_cp_async) else 3  # by registers
        return (*first, *(Config(block_m, 128, 256, warp_n, 1, 1, 2, b) for b in range(most, 0, -1)), last)
    if m <= 64:
        # 53 cuts of the 31B's four matrices, 32 tokens: long stages of two blocks an SM take 7 to 13 % less than four
        # stages of one
        long_stages = Config(block_m, 128, 256, 32, 1, 1, 3, 2, "wgmma")
        return (
            *first,
            *((long_stages,) if m <= 32 else ()),
            Config(block_m, 256, 128, 32, 1, 1, 4, 1, "wgmma"),
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
        *first,
        Config(128, 256, 128, 32, 1, 1, 4, split, "wgmma"),
        Config(128, 256, 64, 64, 2, 1, 4, split),
        Config(128, 256, 64, 64, 2, 1, 3, split),
        Config(128, 256, 32, 64, 2, 1, 2, split),
        last,
    )
