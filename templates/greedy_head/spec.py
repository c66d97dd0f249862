"""greedy_head: the exact greedy token of an output head, from half of its bytes or less, in two launches.

Bound-pruned argmax. greedy_screen multiplies the table in four to eight bits (screen/screen.py) and writes to the
workspace an upper bound of each row's logit and the highest lower bound. greedy_choose multiplies the few rows of the
table itself whose upper bound reaches that, each rounded as a dense product is; the last block to finish writes the id.
The result is exact however many rows remain: bounds rule rows out, never a guess. (With likely bounds, which a drafter
may use, it is a guess.)

In six and seven bits a row's interval is wide, about a standard deviation of the logits to each side, and thousands of
rows reach the highest lower bound. The row of that bound is multiplied first: its logit is near the middle of its
interval, and rows that do not reach it are ruled out too.

With seven bits, few tokens read only the first six of all rows. The last bit halves the interval; it is read for the
few thousand rows of 262,144 that remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import ceil, prod, sqrt
from statistics import NormalDist
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    why_block_too_large,
    why_no_dtype,
)
from kerngen.templates.common.screen.screen_spec import (
    COLUMNS,
    FIRST_BITS,
    GROUP_TILES,
    ROWS,
    TOKEN_STEPS,
    least_bytes,
    num_bounds,
    padded,
    require_bits,
    screen_bytes,
)
from kerngen.templates.common.w4.table import DENSE, OfTable, require_table, row_bytes
from kerngen.templates.kernel import Arg, Body, Choices, Cost, Launch, TokenProblem, Traffic, args

MAX_TOKENS = 32
MAX_HIDDEN = 7680  # of which the digits of four tokens fit in every architecture's shared memory
TILE_CODES = ROWS * COLUMNS
PROGRESS_BYTES = 32  # of a token in the workspace
LOOKS_FIRST = (6, 7)  # bits for which one row's logit is the threshold, see above
LONG_ROW = 4096  # columns from which on wide blocks choose
MOST_BY_DOT = 8  # tokens whose sums fit in registers where there is no tensor core for bytes
MAX_SPILL_BYTES = 48  # a thread's, of the sums of 32 tokens: in 8 bits still faster than fewer warps without
TILE_CLOCKS = 100  # that a tile takes a warp however idle its SM is
OTHER_REGISTERS, STRIP_REGISTERS = 56, 24  # of a thread, beside tiles under way and sums; for each further strip
UNPACKING = {4: 12, 6: 28, 7: 44, 8: 0}  # instructions a lane and tile
ROW_OPS = 10  # instructions, of a column of a row that is left, or whose last bit is looked at
CHOOSE_WARPS_PER_SM = 16  # that there is room for, and over all tokens as many


@dataclass(frozen=True, slots=True)
class Problem(OfTable, TokenProblem):
    """x [num_tokens, hidden] and weight [vocab_size, hidden] in dtype; codes of `bits` and bounds of weight
    (head_screen) -> ids [num_tokens] int64, the row with the greatest product x . weight[row] rounded to dtype, the
    lowest one on a tie. table, group_size: how weight is stored, as of embed; a packed one's values are rounded to
    dtype.

    Rows whose bounds are NaN are never chosen. A token with a NaN, or an infinity, gives 0.
    """

    vocab_size: int = 262144
    hidden: int = 5376
    dtype: str = "bf16"
    num_tokens: int = 1
    bits: int = 8
    table: str = DENSE
    group_size: int = 0

    def __post_init__(self) -> None:
        require_dtypes(self.dtype)
        require_bits(self.bits)
        require_vectors(hidden=self.hidden)
        require(
            0 < self.vocab_size <= INT32_MAX - ROWS, f"vocab_size={self.vocab_size} is not in 1..{INT32_MAX - ROWS}"
        )
        require(self.hidden <= MAX_HIDDEN, f"hidden={self.hidden} is more than {MAX_HIDDEN}")
        require_tokens(self.num_tokens)
        require_table(self.table, self.group_size, self.vocab_size, self.hidden)


@dataclass(frozen=True, slots=True)
class Config:
    block_tokens: int = 4  # that share a read of the codes
    column_parts: int = 1  # of K: shared memory holds the limbs of one part at a time
    num_warps: int = 16  # of a block of greedy_screen, each with `row_tiles` at a time
    # Tiles of `bits` / 8 KiB of each row tile that a warp keeps in flight: whole groups of tiles.
    unroll: int = field(default=4, metadata={"filed": "steps"})
    blocks_per_sm: int = 1  # of greedy_screen; they loop over all row tiles
    choose_warps: int = 8  # of a block of greedy_choose, each of which checks up to 1024 rows at a time
    row_tiles: int = field(default=1, metadata={"filed": "strips"})  # of 16 rows, that a warp multiplies at a time
    # Of a code's seven bits, those that greedy_screen multiplies: six. greedy_choose reads the last bit of the rows
    # that remain. 0: greedy_screen multiplies all bits.
    first_bits: int = 0


SPACE_TOKENS, SPACE_PARTS = (4, 8, 16, 32), (1, 2, 3, 4, 6)
UNROLLS = {4: (1, 2, 4, 6, 8, 12, 16), 6: (2, 4, 6, 8, 12), 7: (4, 8, 12), 8: (1, 2, 3, 4, 5, 6, 8)}
SPACE: dict[str, Choices] = {
    "block_tokens": SPACE_TOKENS,
    "column_parts": SPACE_PARTS,
    "num_warps": (4, 8, 16),
    "unroll": lambda problem, target: UNROLLS[problem.bits],
    "blocks_per_sm": (1, 2, 3, 4),
    "choose_warps": (4, 8, 16),
    "row_tiles": lambda problem, target: (1, 2) if problem.bits == 7 and problem.num_tokens > 16 else (1,),
    "first_bits": lambda problem, target: (0, FIRST_BITS[problem.bits]) if problem.bits in FIRST_BITS else (0,),
}
# By bits, (num_warps, unroll, row_tiles): 48 KiB of tiles and more in flight an SM, less where sums take the registers.
CUTS = {
    4: ((8, 16, 1), (16, 8, 1), (8, 8, 1), (16, 4, 1), (8, 4, 1), (4, 4, 1)),
    6: ((16, 4, 1), (8, 8, 1), (4, 4, 1)),
    7: ((16, 4, 1), (8, 4, 2), (8, 8, 1), (4, 4, 1)),
    8: ((16, 4, 1), (16, 3, 1), (8, 6, 1), (8, 4, 1), (4, 4, 1)),
}
# Half of what a row's interval is wide, over the logits' standard deviation, of normal numbers: what W is rounded by,
# over the square root of K where bounds are sure, and what is the same in any bits for each of K (screen/screen.py).
ROUNDED, EACH_COLUMN = {4: 0.43, 6: 0.0310, 7: 0.0162, 8: 0.0080}, 1 / 65_000
ARGS = {
    "greedy_screen": (
        *args("ptr", "x", "codes", "bounds", "workspace"),
        Arg("num_tokens", "i32"),
    ),
    "greedy_choose": (
        Arg("ids", "ptr", align=8),
        *args("ptr", "x", "weight", "codes", "bounds", "workspace"),
        Arg("table_scales", "ptr", only="group_size"),
    ),
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("ids",)


def most_tokens(target: Target | None) -> int:
    """The most tokens for which greedy_head is used on `target`; None: any architecture without bulk copies.

    Those share one recorded workload (workload.py). On sm70 and sm75 more than eight tokens read the codes several
    times, and take as long as the dense product.
    """
    return MAX_TOKENS if target is not None and target.arch.has_tma else MOST_BY_DOT


def bits_for(hidden: int, *, likely: bool = False) -> int:
    """Of a code, for rows of `hidden` elements: what is fastest for one token and not slow for 32.

    The fewer bits, the more rows of the table are left to multiply, each token's own: of 262,144 rows of normal numbers
    200 in six bits of 1,536 elements, 530 of 2,560, 900 of 2,816, thousands of 5,376; in seven bits 30 of 2,816, 80 of
    3,840, 200 of 5,376. Seven are six that few tokens read, and one of those rows that six leave (docs/experiments.md).
    likely: for bounds that are (head_screen): four bits leave 50 rows of 1,024 elements.
    """
    return 4 if likely else 6 if hidden <= 2560 else 7


def rows_left(problem: Problem, bits: int) -> float:
    """Rows whose upper bound reaches the highest lower bound, in `bits` of their codes, if elements are normal."""
    normal, k = NormalDist(), problem.hidden
    half = ROUNDED[bits] * (1.0 if bits == 4 else sqrt(k)) + k * EACH_COLUMN
    highest = normal.inv_cdf(1 - 1 / (problem.vocab_size + 1))
    return problem.vocab_size * (1 - normal.cdf(highest - half * (1 if bits in LOOKS_FIRST else 2)))


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    return {
        "TOKEN_STEPS": f"{TOKEN_STEPS}.0f",
        "MAX_TOKENS": MAX_TOKENS,
        "PROGRESS_BYTES": PROGRESS_BYTES,
        "LOOKS_FIRST": "true" if problem.bits in LOOKS_FIRST else "false",
        "CHOOSE_LOOKS": _choose_looks(config),
        "CHOOSE_WARPS_PER_SM": CHOOSE_WARPS_PER_SM,
        "FIRST_BITS": _first_bits(problem, config),
        "NUM_BOUNDS": num_bounds(problem.bits),
    }


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if problem.num_tokens > MAX_TOKENS:
        return f"num_tokens={problem.num_tokens}: at most {MAX_TOKENS}; a dense product and softcap_argmax serve more"
    return why_no_dtype(target.arch, problem.dtype)


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c, arch = problem, config, target.arch
    threads = 32 * max(c.num_warps, c.choose_warps)
    if why := why_block_too_large(threads, f"{threads // 32} warps"):
        return why
    if c.first_bits and c.first_bits != FIRST_BITS.get(p.bits):
        return f"first_bits={c.first_bits}: of seven bits six may come first, not of {p.bits}"
    if c.unroll % (group := GROUP_TILES[p.bits]):
        return f"unroll={c.unroll} are no whole groups of {group} tiles, as codes of {p.bits} bits are"
    if c.unroll * c.column_parts > (tiles := _tiles(p)):
        return f"unroll={c.unroll} in column_parts={c.column_parts}, and a row has {tiles} tiles"
    if c.block_tokens > MOST_BY_DOT and not arch.has_mma16816:
        return f"block_tokens={c.block_tokens}: {arch} has sums of at most {MOST_BY_DOT} tokens in registers"
    if c.column_parts > 1 and _part_tiles(p, c) * (c.column_parts - 1) >= tiles:
        return f"column_parts={c.column_parts} of {_part_tiles(p, c)} tiles are more than the {tiles} of a row"
    warps = c.num_warps * c.blocks_per_sm
    if warps > arch.max_warps_per_sm:
        return f"{warps} warps in {c.blocks_per_sm} blocks; {arch} holds {arch.max_warps_per_sm} an SM"
    available = min(arch.max_regs_per_thread, arch.regs_per_sm // (32 * warps) // 8 * 8)
    if (need := registers(p, c, arch)) > available:
        return f"about {need} registers a thread; {warps} warps an SM leave {available}"
    return arch.why_too_large(_screen_smem_bytes(p, c), c.blocks_per_sm) or arch.why_too_large(_choose_smem_bytes(p, c))


def registers(problem: Problem, config: Config, arch: Arch) -> int:
    """A thread's of greedy_screen, about: tiles under way, sums, and the rest."""
    sums = 4 if arch.has_mma16816 else 16
    each = _first_bits(problem, config) * config.unroll + sums * config.block_tokens // 4
    others = OTHER_REGISTERS + (config.row_tiles - 1) * STRIP_REGISTERS
    return config.row_tiles * each + config.block_tokens // 2 + others


def expected_registers(problem: Problem, config: Config, target: Target) -> int:
    return registers(problem, config, target.arch)


def _first_bits(problem: Problem, config: Config) -> int:
    return config.first_bits or problem.bits


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """The codes are read for as many tokens at once as fit, in as few parts of the columns; those of seven bits whole,
    or but for the last bit.
    """
    p = problem
    widest = next(n for n in SPACE_TOKENS if n >= p.num_tokens)
    max_unroll = max(s for s in UNROLLS[p.bits] if s <= _tiles(p))
    cuts = [cut for cut in CUTS[p.bits] if cut[2] == 1 or p.num_tokens > 16]
    first_bits = (0, FIRST_BITS[p.bits]) if p.bits in FIRST_BITS else (0,)
    choose_warps = 16 if p.hidden >= LONG_ROW else 8
    for block_tokens, parts in product([n for n in reversed(SPACE_TOKENS) if n <= widest], SPACE_PARTS):
        found = [
            Config(block_tokens, parts, warps, min(unroll, max_unroll), 1, choose_warps, row_tiles, first)
            for first, (warps, unroll, row_tiles) in product(first_bits, cuts)
        ]
        if valid := [c for c in found if why_invalid(p, c, target) is None]:
            return valid
    return ()


def _tiles(p: Problem) -> int:
    """Of a strip, in whole groups."""
    return padded(ceil(p.hidden / COLUMNS), GROUP_TILES[p.bits])


def _part_tiles(p: Problem, c: Config) -> int:
    """Tiles of a part of the columns, a multiple of `unroll`."""
    return padded(ceil(_tiles(p) / c.column_parts), c.unroll)


def _digit_bytes(p: Problem, c: Config) -> int:
    """128 a tile of columns and token."""
    return 128 * c.block_tokens * _part_tiles(p, c)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Of a block, of whichever launch takes more."""
    return max(_screen_smem_bytes(problem, config), _choose_smem_bytes(problem, config))


def _screen_smem_bytes(p: Problem, c: Config) -> int:
    """The tokens' digits, and what warps exchange."""
    return _digit_bytes(p, c) + c.block_tokens * (8 * c.num_warps + 20 + 8 * c.column_parts)


def _choose_smem_bytes(p: Problem, c: Config) -> int:
    """The lists of rows found, a token's limbs for the last bits, and what warps exchange."""
    exchanged = 4 * c.choose_warps * ((p.bits in LOOKS_FIRST) + (c.first_bits > 0))
    return _choose_looks(c) * 256 * c.choose_warps + exchanged + 16 + _last_digit_bytes(p, c)


def _choose_looks(c: Config) -> int:
    """Loads of four rows each that a thread of greedy_choose has in flight: with few tokens each has more blocks."""
    return 4 if c.block_tokens == 4 else 8


def _last_digit_bytes(p: Problem, c: Config) -> int:
    """Of a token, for the last bits of rows: 128 a tile of columns, and 64 between each four of them."""
    return 0 if not c.first_bits else 576 * _tiles(p) // GROUP_TILES[p.bits]


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    p, c, pdl = problem, config, target.arch.has_pdl
    spans = ceil(_rows(p) / ROWS / c.row_tiles)
    blocks = min(ceil(spans / c.num_warps), c.blocks_per_sm * target.device.num_sms)
    reads = ceil(p.num_tokens / c.block_tokens)
    most = ceil(_rows(p) / (128 * c.choose_warps))
    choosing = max(1, min(most, CHOOSE_WARPS_PER_SM // c.choose_warps * target.device.num_sms // p.num_tokens))
    return (
        Launch("greedy_screen", (blocks, reads, 1), (32 * c.num_warps, 1, 1), _digit_bytes(p, c), pdl=pdl),
        Launch(
            "greedy_choose", (choosing, p.num_tokens, 1), (32 * c.choose_warps, 1, 1), _last_digit_bytes(p, c), pdl=pdl
        ),
    )


def _rows(p: Problem) -> int:
    return padded(p.vocab_size, ROWS)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """For each token the state that blocks share, zero between launches, and an upper bound of each row."""
    return PROGRESS_BYTES * MAX_TOKENS + 4 * problem.num_tokens * _rows(problem)


def cost(problem: Problem) -> Cost:
    """Codes, of seven bits the first six, and bounds once, and one row of the table."""
    p = problem
    of_token = ELEMENT_BYTES[p.dtype] * p.hidden + row_bytes(p.table, p.group_size, p.hidden, p.dtype) + 8
    moved = least_bytes(p.vocab_size, p.hidden, p.bits) + of_token * p.num_tokens
    return Cost(moved, 2 * p.num_tokens * p.vocab_size * p.hidden)


def _resident(p: Problem, c: Config, target: Target) -> int:
    """Blocks of greedy_screen that an SM has room for, about."""
    arch = target.arch
    by_registers = arch.regs_per_sm // (32 * c.num_warps * registers(p, c, arch))
    by_smem = arch.smem_per_sm // (_screen_smem_bytes(p, c) + arch.reserved_smem_bytes)
    return min(arch.max_warps_per_sm // c.num_warps, by_registers, by_smem)


def traffic(problem: Problem, config: Config, target: Target) -> list[Traffic]:
    """cuda_ops: a tile takes about 12 instructions a lane, those that unpack it, and for each four tokens two products
    and a load of their digits, without the tensor core 40 a token; a row's end 10 a token, and the digits about 16 an
    element and block. Blocks that read the codes for different tokens find them in L2 where they run beside each other.
    clocks: a tile's two products, one after the other, and a load before them. Rows are left to choose from as of
    normal numbers.
    """
    p, c = problem, config
    reads, blocks = ceil(p.num_tokens / c.block_tokens), prod(launches(p, c, target)[0].grid)
    strips, fours = _rows(p) // ROWS, c.block_tokens // 4
    tiles = strips * _tiles(p) * reads
    uppers = 4 * p.num_tokens * _rows(p)
    bits = _first_bits(p, c)
    once = screen_bytes(p.vocab_size, p.hidden, p.bits, bits)
    codes = once * reads
    x_bytes = 2 * p.num_tokens * p.hidden
    tensor = target.arch.has_mma16816
    each = 12 + UNPACKING[bits] + (5 * fours if tensor else 40 * min(p.num_tokens, c.block_tokens))
    ends = p.num_tokens * (10 * c.column_parts * _rows(p) + 16 * blocks * p.hidden)
    beside = max(1, _resident(p, c, target) // c.blocks_per_sm)
    screen = Traffic(
        once * ceil(reads / beside),
        tiles * fours * TILE_CODES * 8 if tensor else 0,  # two of eight bits an element, at the rate of one of 16
        l2_bytes=codes + uppers * (2 * c.column_parts - 1) + 2 * blocks * x_bytes,
        smem_bytes=tiles * fours * 512 // c.row_tiles,
        cuda_ops=32 * tiles * each + ends,
        bytes_in_flight=c.num_warps * c.row_tiles * c.unroll * TILE_CODES * bits // 8,
        units=ceil(strips / c.row_tiles / c.num_warps) * reads,
        clocks=_tiles(p) * TILE_CLOCKS,
        waits=2,
    )
    first, left = (ceil(p.num_tokens * rows_left(p, b)) for b in (bits, p.bits))
    last = first if c.first_bits else 0  # rows whose last bit is asked for: half of the bytes are other rows'
    rows = left * row_bytes(p.table, p.group_size, p.hidden, p.dtype)
    choose = Traffic(
        x_bytes + last * p.hidden // 4 + rows, 0, l2_bytes=uppers + 2 * x_bytes,
        cuda_ops=8 * p.num_tokens * _rows(p) + ROW_OPS * (last + left) * p.hidden, waits=4 + (c.first_bits > 0),
    )  # fmt: skip
    return [screen, choose]
