"""exchange_norm: the sum over ranks of h, and behind it add_norm, in one launch.

Of a layer with experts it is the end of moe_combine. Each rank of a model that is divided among GPUs has a partial h.
It stores it into the memory of its peers, sums what they store into its own, in fp32 and in the order of the ranks, and
norms the sum: all ranks hold the same bits. No multicast, no barrier, no fence: a word is zero until it is posted
(common/pipeline/peer_exchange.cuh). docs/kernels.md says why no word is read or overwritten too early.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    SPARE_REGISTERS,
    VEC,
    require,
    require_dtypes,
    require_tokens,
    require_vectors,
    row_scratch_bytes,
    row_threads,
    why_row_invalid,
)
from kerngen.templates.kernel import Arg, Body, Cost, Launch, TokenProblem, Traffic, args
from kerngen.templates.moe_combine.spec import MAX_TOP_K

MOST_RANKS = 8
NUM_PHASES = 2  # buffers of a row, taken in turn


@dataclass(frozen=True, slots=True)
class Problem(TokenProblem):
    """h [num_tokens, hidden] dtype of this rank, residual [num_tokens, hidden] residual_dtype, weights [hidden] dtype,
    of `ranks` ranks.

    residual_out = (residual + norm(sum; post_weight)) * layer_scalar, and with has_next out = norm(residual_out;
    next_weight) in dtype. has_scalar: layer_scalar is a tensor [1], else 1. top_k: a token has a second row, which is
    summed over the ranks too: the sum of its top_k experts' rows, routed [num_tokens, top_k, hidden] dtype, weighted by
    topk_weights [num_tokens, top_k] fp32, in fp32 and rounded to dtype before it is exchanged. What is normed last is
    then norm(sum; h_norm) + norm(sum of those; routed_norm). 0: h alone.
    """

    ranks: int = 2
    hidden: int = 5376
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    top_k: int = 0
    has_scalar: bool = False
    has_next: bool = True
    num_tokens: int = 1

    def __post_init__(self) -> None:
        require(2 <= self.ranks <= MOST_RANKS, f"ranks={self.ranks} is not in 2..{MOST_RANKS}")
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_vectors(hidden=self.hidden)
        require_tokens(self.num_tokens)
        require(0 <= self.top_k <= MAX_TOP_K, f"top_k={self.top_k} is not in 0..{MAX_TOP_K}")

    @property
    def rows(self) -> int:
        """Of a token, in the exchange."""
        return 2 if self.top_k else 1


@dataclass(frozen=True, slots=True)
class Config:
    vecs_per_thread: int = 1  # vectors of eight elements that a thread holds; decides the threads of a row
    rows_per_block: int = 1


SPACE = {"vecs_per_thread": (1, 2, 3, 4), "rows_per_block": (1, 2, 4)}
ARGS = {
    "exchange_norm": (
        *args("ptr", "residual_out", "out", "residual", "h", "routed", "h_norm", "routed_norm", "post_weight",
              "layer_scalar", "next_weight"),
        Arg("addresses", "ptr", 8),
        Arg("eps", "f32"),
        *args("i32", "rank", "max_rows", "two_shot_from", "num_tokens"),
        Arg("topk_weights", "ptr", align=4),  # last: the machine code of problems without experts is as it was
    )
}  # fmt: skip
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual_out", "out")


def exchange_bytes(ranks: int, max_rows: int, hidden: int) -> int:
    """Of a rank's workspace, zero at first: for each phase a slot of max_rows rows for each rank, and an epoch for each
    row. 16-bit elements. The own slot is no other rank's to write: it keeps experts' sums, and is not zeroed.
    """
    return NUM_PHASES * ranks * max_rows * hidden * 2 + ceil(4 * max_rows / 16) * 16


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    return why_row_invalid(
        problem.hidden, config.vecs_per_thread, config.rows_per_block, _registers_per_vec(problem, config),
        SPACE["vecs_per_thread"], target.arch,
    )  # fmt: skip


def _registers_per_vec(p: Problem, c: Config) -> int:
    """Of each vector, by the ptxas reports: norms; while peers are polled the words of up to four, sums, the stream and
    addresses; before that what is posted, and the experts' rows and weights, which wait for one vector at a time.
    """
    words = 4 * min(p.ranks, 4) + (8 if p.ranks > 4 else 0) + 4 * p.rows
    received = words + 2 * ELEMENT_BYTES[p.residual_dtype] + 20
    posted = 4 * p.rows + ceil(5 * p.top_k / c.vecs_per_thread)
    return 4 * (3 * p.rows - 2 + p.has_next) + max(received, posted)


def default_config(problem: Problem, target: Target) -> Config:
    """As many threads a row as registers allow: a thread polls its vectors, and few do so sooner."""
    return next(
        (c for c in map(Config, SPACE["vecs_per_thread"]) if why_invalid(problem, c, target) is None),
        Config(SPACE["vecs_per_thread"][-1]),
    )


def blocks_per_sm(problem: Problem, config: Config, arch: Arch) -> int:
    """Blocks that are resident in an SM at once, at least; the body's __launch_bounds__ hold ptxas to it."""
    warps = config.rows_per_block * row_threads(problem.hidden, config.vecs_per_thread) // 32
    registers = ceil((config.vecs_per_thread * _registers_per_vec(problem, config) + SPARE_REGISTERS) / 8) * 8
    by_registers = arch.regs_per_sm // (ceil(warps / 4) * 128 * registers)
    return max(1, min(arch.max_warps_per_sm // warps, arch.max_blocks_per_sm, by_registers))


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    return {"BLOCKS_PER_SM": blocks_per_sm(problem, config, arch)}


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    norms = 2 * problem.rows  # and an unused one without has_next
    return norms * row_scratch_bytes(row_threads(problem.hidden, config.vecs_per_thread), config.rows_per_block)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    """No more blocks than are resident at once: a block polls for what a peer's block of the same rows posts."""
    threads = config.rows_per_block * row_threads(problem.hidden, config.vecs_per_thread)
    resident = target.device.num_sms * blocks_per_sm(problem, config, target.arch)
    blocks = min(-(-problem.num_tokens // config.rows_per_block), resident)
    return (Launch("exchange_norm", (blocks, 1, 1), (threads, 1, 1), 0, pdl=target.arch.has_pdl),)


def cost(problem: Problem) -> Cost:
    """What add_norm moves, experts' rows and weights, and of each peer what it posts here and what is posted to it."""
    p = problem
    elements, size = p.num_tokens * p.hidden, ELEMENT_BYTES[p.dtype]
    rows = 1 + p.top_k + 2 * (p.ranks - 1) * p.rows + p.has_next
    moved = elements * (size * rows + 2 * ELEMENT_BYTES[p.residual_dtype]) + 4 * p.num_tokens * p.top_k
    weights = p.hidden * size * (3 * p.rows - 2 + p.has_next)
    return Cost(moved + weights, elements * (p.rows * (8 + p.ranks) + 2 * p.top_k))


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """cuda_ops: about 16 instructions an element, 6 for each rank and 2 for each expert, in every lane. waits: what is
    posted, then peers' words.
    """
    p = problem
    (launch,) = launches(p, config, target)
    lanes = prod(launch.grid) * prod(launch.block) * config.vecs_per_thread
    rounds = ceil(p.num_tokens / (launch.grid[0] * config.rows_per_block))
    row_bytes = p.hidden * (ELEMENT_BYTES[p.dtype] * (p.top_k + 1) + ELEMENT_BYTES[p.residual_dtype])
    return Traffic(cost(p).bytes, 0, cuda_ops=((16 + 6 * p.ranks) * p.rows + 2 * p.top_k) * VEC * lanes * rounds,
                   bytes_in_flight=config.rows_per_block * row_bytes, waits=2 * rounds)  # fmt: skip
