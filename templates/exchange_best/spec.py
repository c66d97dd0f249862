"""exchange_best: the best token of a vocabulary whose rows are divided among ranks, in one launch.

Each rank of a model that is divided among GPUs has the best row of its own rows of the output head. It makes that row's
logit, stores it with the token into the memory of its peers, and takes the best of what they store into its own: all
ranks choose the same token. The exchange is that of exchange_norm, of one vector a token; docs/kernels.md has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    INT32_MAX,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
)
from kerngen.templates.common.w4.table import DENSE, OfTable, require_table, row_bytes
from kerngen.templates.common.w4.tiling import STRIP
from kerngen.templates.exchange_norm.spec import MOST_RANKS
from kerngen.templates.kernel import Arg, Body, Choices, Cost, Launch, TokenProblem, Traffic, args

SOURCES = ("rows", "logits")
POSTED = VEC  # 16-bit elements of what a rank posts of a token: Peers are of memory for rows of so many


@dataclass(frozen=True, slots=True)
class Problem(OfTable, TokenProblem):
    """rows [num_tokens] int64, each token's best row among this rank's -> ids [num_tokens] int64, the best token of
    `ranks` ranks, and values [num_tokens] fp32, its logit.

    source: "rows", where a logit is the product of x [num_tokens, width] and its row of table [., width], in fp32 and
    rounded to dtype; "logits", where table [num_tokens, width] has this rank's logits, to be capped in fp32. The lowest
    id wins a tie, and ids is -1 where the greatest logit is NaN or infinite. table, group_size: how the table of
    source="rows" is stored, as of embed; a packed one's values are rounded to dtype.
    """

    ranks: int = 2
    width: int = 5376
    dtype: str = "bf16"
    source: str = "rows"
    num_tokens: int = 1
    table: str = DENSE
    group_size: int = 0

    def __post_init__(self) -> None:
        require(2 <= self.ranks <= MOST_RANKS, f"ranks={self.ranks} is not in 2..{MOST_RANKS}")
        require(self.source in SOURCES, f"source={self.source!r} is not one of: {', '.join(SOURCES)}")
        require_dtypes(self.dtype)
        require_vectors(width=self.width)
        require(self.width <= INT32_MAX, f"width={self.width} does not fit in 31 bits")
        require_tokens(self.num_tokens)
        require_table(self.table, self.group_size, STRIP, self.width)
        require(self.multiplies or not self.is_packed, f"table={self.table}: logits are of the dtype")

    @property
    def multiplies(self) -> bool:
        return self.source == "rows"


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 1  # of a block, each with a token
    loads: int = 24  # of 16 bytes that a lane has in flight, of the token's row of `table` and as many of its x


LOADS = (6, 12, 24)
SPACE: dict[str, Choices] = {
    "num_warps": (1, 2, 4),
    "loads": lambda problem, target: LOADS if problem.multiplies else LOADS[:1],
}
ARGS = {
    "exchange_best": (
        Arg("ids", "ptr", 8),
        Arg("values", "ptr", 4),
        Arg("rows", "ptr", 8),
        *args("ptr", "x", "table"),
        Arg("addresses", "ptr", 8),
        Arg("cap", "f32"),
        *args("i32", "first_row", "rank", "max_rows", "num_tokens"),
        Arg("table_scales", "ptr", only="group_size"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("ids", "values")


def _vecs(p: Problem) -> int:
    """Vectors of a row that a lane loads."""
    return ceil(p.width / (32 * VEC)) if p.multiplies else 0


def _ahead(p: Problem, loads: int) -> int:
    """Those of them that are in flight together: rounds are equal."""
    return ceil(_vecs(p) / ceil(_vecs(p) / loads)) if _vecs(p) else 0


def _registers(p: Problem, c: Config) -> int:
    """Of a thread, by the ptxas reports."""
    return (11 if p.is_packed else 8) * _ahead(p, c.loads) + 56


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c = problem, config
    twin = next((n for n in LOADS if n < c.loads and _ahead(p, n) == _ahead(p, c.loads)), None)
    if twin is not None:
        return f"loads={c.loads} has {_ahead(p, c.loads)} loads of a row of {p.width} in flight, as {twin} has"
    if (need := _registers(p, c)) > target.arch.max_regs_per_thread:
        return (
            f"about {need} registers a thread for loads={c.loads}; {target.arch} has {target.arch.max_regs_per_thread}"
        )
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """All of a row in flight, and each token in an SM of its own: there are no more tokens than SMs, nearly always."""
    if problem.is_packed:
        return Config(loads=next((n for n in LOADS[:2] if _ahead(problem, n) == _vecs(problem)), LOADS[1]))
    return Config(loads=next((n for n in LOADS if _ahead(problem, n) == _vecs(problem)), LOADS[-1]))


def blocks_per_sm(problem: Problem, config: Config, arch: Arch) -> int:
    """Blocks that are resident in an SM at once, at least; the body's __launch_bounds__ hold ptxas to it."""
    registers = 8 * ceil(_registers(problem, config) / 8)
    by_registers = arch.regs_per_sm // (32 * config.num_warps * registers)
    return min(arch.max_warps_per_sm // config.num_warps, arch.max_blocks_per_sm, by_registers)


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    return {"BLOCKS_PER_SM": blocks_per_sm(problem, config, arch)}


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    """No more blocks than are resident at once: a warp polls for what a peer's warp of the same token posts."""
    resident = target.device.num_sms * blocks_per_sm(problem, config, target.arch)
    blocks = min(ceil(problem.num_tokens / config.num_warps), resident)
    return (Launch("exchange_best", (blocks, 1, 1), (32 * config.num_warps, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """Of each token its logit, and of each peer what is posted to it and by it."""
    p = problem
    of_logit = ELEMENT_BYTES[p.dtype] * (p.width if p.multiplies else 1)
    of_logit += row_bytes(p.table, p.group_size, p.width, p.dtype) if p.multiplies else 0
    moved = of_logit + 2 * ELEMENT_BYTES["fp16"] * POSTED * (p.ranks - 1) + 8 + 8 + 4
    return Cost(p.num_tokens * moved, 2 * p.num_tokens * p.width if p.multiplies else 0)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 40 instructions a vector and lane, and 60 beside them. waits: its row's number, its logit, and
    peers' words.
    """
    p, c = problem, config
    (launch,) = launches(p, c, target)
    rounds = ceil(p.num_tokens / (launch.grid[0] * c.num_warps))
    return Traffic(cost(p).bytes, 0, cuda_ops=32 * p.num_tokens * (40 * _vecs(p) + 60), waits=3 * rounds,
                   bytes_in_flight=c.num_warps * 32 * 16 * max(1, 2 * _ahead(p, c.loads)))  # fmt: skip
