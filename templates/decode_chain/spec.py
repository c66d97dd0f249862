"""decode_chain: from attention's output to the next layer's q, k and v, for one token, in one launch.

What a dense layer of W4A16 weights does between two attentions: the output projection, the norms around it and the
residual, gate, up and down, the layer's scalar, the norm before the next layer, and that layer's projection. Every
block of the grid stays for all of it. One warp of a block fetches the block's shares of all weights, in their order, as
far ahead as the ring reaches: across the launch's own dependencies, and before the kernel that makes the attention's
output has ended. The others multiply (as integers, common/w4_integers.cuh) and hand rows to each other through L2, word
by word, with no barrier (common/posted.cuh). Rows are short, so every block makes norms and residual anew for itself.

Blocks wait for each other here, so all of them must be on the GPU together: the grid has a block an SM at most, and is
launched as a cooperative one, which starts whole. Such a launch waits for the end of its predecessor; in forwards that
are known to be the only ones on their GPU it is an ordinary launch (runtime/executors/launch.py).

Method: persistent kernels that run many dependent operations, "Look Ma, No Bubbles!" (Hazy Research, 2025), and words
that carry their own flag, NCCL's LL protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil, lcm
from typing import ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.row_spec import ELEMENT_BYTES, VEC, require_dtypes, why_no_dtype
from kerngen.templates.common.w4_tiling import STRIP, matrix_bytes, require_matrix
from kerngen.templates.kernel import Arg, Body, Cost, Launch, Traffic

LEAST_SMEM_BYTES = 160 * 1024  # with less a launch each was not compared with
RING_LIMIT = 200 * 1024  # of shared memory, for the default configuration
SUM_TILES = 24  # what waiting for the sums of one more block is worth, in tiles that a block multiplies
MAX_ROW_WORDS = 40  # of partial sums that a thread waits for at once: more of them and the registers spill


@dataclass(frozen=True, slots=True)
class Problem:
    """One row. attended [attended], residual and residual_out [hidden], which may be the same, out [qkv], or [hidden].

    r = residual + norm(attended Out^T; post_attention_weight); x = norm(r; pre_ffn_weight);
    r = r + norm((gelu_tanh(x Gate^T) * (x Up^T)) Down^T; post_ffn_weight); inner: rows of Gate, and of Up.
    residual_out = r * layer_scalar; out = norm(residual_out; next_weight), times Qkv^T where qkv > 0.
    Matrices are int4 with scales by group_size; all else is of dtype but the residual.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ()
    DYNAMIC: ClassVar[str] = ""

    hidden: int = 5376
    attended: int = 8192
    inner: int = 21504
    qkv: int = 16384
    group_size: int = 32
    dtype: str = "bf16"
    residual_dtype: str = "bf16"

    def __post_init__(self) -> None:
        require_dtypes(self.dtype, residual_dtype=self.residual_dtype)
        require_matrix(self.inner, self.hidden, self.group_size, self.dtype)  # gate, and up: whole strips of each
        for n, k in self.matrices:
            require_matrix(n, k, self.group_size, self.dtype)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the output projection, of gate and up together, of down, and of what follows, if any."""
        follows = ((self.qkv, self.hidden),) if self.qkv else ()
        return ((self.hidden, self.attended), (2 * self.inner, self.hidden), (self.hidden, self.inner), *follows)


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 8  # that multiply
    stage_tiles: int = 24  # tiles of 32 x 32 weights in a slot of the ring
    num_stages: int = 8
    in_flight: int = 4  # slots on their way at most
    tiles_together: int = 3  # that a warp fetches ahead from the ring
    out_parts: int = 2  # parts of a strip of 32 rows of the output projection, where blocks' shares may end
    down_parts: int = 3  # the same of down
    slots: int = 3  # for partial sums of a strip: blocks that meet in one at most


SPACE = {
    "num_warps": (8, 12, 16),
    "stage_tiles": (24, 32, 40, 48, 56, 64, 80),
    "num_stages": (3, 4, 5, 6, 7, 8, 10, 12),
    "in_flight": (1, 2, 3, 4),
    "tiles_together": (2, 3, 4, 5),
    "out_parts": (1, 2, 3, 4, 5, 8, 11, 33),
    "down_parts": (1, 2, 3, 4, 5, 8, 11, 33),
    "slots": (1, 2, 3, 4, 5),
}
ARGS = {
    "decode_chain": (
        Arg("residual_out", "ptr"),
        Arg("out", "ptr"),
        Arg("residual", "ptr"),
        Arg("attended", "ptr"),
        Arg("out_packed", "ptr"),
        Arg("out_scales", "ptr"),
        Arg("post_attention_weight", "ptr"),
        Arg("pre_ffn_weight", "ptr"),
        Arg("gate_up_packed", "ptr"),
        Arg("gate_up_scales", "ptr"),
        Arg("down_packed", "ptr"),
        Arg("down_scales", "ptr"),
        Arg("post_ffn_weight", "ptr"),
        Arg("layer_scalar", "ptr", align=2),
        Arg("next_weight", "ptr"),
        Arg("qkv_packed", "ptr"),
        Arg("qkv_scales", "ptr"),
        Arg("workspace", "ptr"),
        Arg("eps", "f32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("residual_out", "out")


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, int]:
    return {
        "MAX_TILES": _max_tiles(problem),
        "SHARED_BYTES": _shared_bytes(problem, config),
        "WORKSPACE_BYTES": _workspace_bytes(problem, config),
    }


def _max_tiles(p: Problem) -> int:
    return max(p.hidden, p.attended, p.inner) // STRIP


def _slot_bytes(p: Problem, c: Config) -> int:
    return matrix_bytes(STRIP, STRIP * c.stage_tiles, p.group_size)


def _shared_bytes(p: Problem, c: Config) -> int:
    """Of a block without the sums: the ring and its barriers, x by tiles, sums of a row, four shares."""
    ring = ceil((c.num_stages * (_slot_bytes(p, c) + 16)) / 128) * 128
    rows = _max_tiles(p) * 96 + ceil(_max_tiles(p) / 4) * 16 + 4 * 40 + 2 * 4 * c.num_warps
    return ceil((ring + rows + 4) / 128) * 128


def _strips(p: Problem, c: Config) -> dict[str, tuple[int, int]]:
    """Of each product: its strips of rows, and the parts of a strip where shares may end."""
    return {
        "out": (p.hidden // STRIP, c.out_parts),
        "gate_up": (2 * p.inner // STRIP, 1),
        "down": (p.hidden // STRIP, c.down_parts),
        "qkv": (p.qkv // STRIP, 1),
    }


def _most_that_meet(strips: int, parts: int, blocks: int) -> int:
    """How many blocks have a share of the same strip, at most, of strips * parts units dealt evenly."""
    least = max(1, strips * parts // blocks)  # units of a block that has any
    return min(parts, ceil((parts - 1) / least) + 1)


def num_blocks(problem: Problem, config: Config, target: Target) -> int:
    """A block an SM, but no more than have a share of everything that all wait for."""
    strips = _strips(problem, config)
    shares = [strips[name][0] * strips[name][1] for name in ("gate_up", "down")]
    return min(target.device.num_sms, *shares)


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    p, c, blocks = problem, config, num_blocks(problem, config, target)
    pieces = max(
        min(ceil(n * parts / blocks), ceil(n * parts / blocks / parts) + 1) for n, parts in _strips(p, c).values()
    )
    return _shared_bytes(p, c) + 128 * c.num_warps * pieces


@cache
def why_unsupported(problem: Problem, target: Target) -> str | None:
    arch, otherwise = target.arch, "w4a16_gemm and add_norm serve it, a launch each"
    if not arch.has_tma:
        return f"{arch} has no bulk copies; {otherwise}"
    if arch.max_smem_bytes < LEAST_SMEM_BYTES:
        return f"{arch} allows {arch.max_smem_bytes:,} B of shared memory a block: no ring beside the rows; {otherwise}"
    if why := why_no_dtype(arch, problem.dtype):
        return why
    config = default_config(problem, target)
    if why := why_invalid(problem, config, target):  # where the smallest does not fit, none does
        return f"{why} (by {num_blocks(problem, config, target)} blocks); {otherwise}"
    return None


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c, arch = problem, config, target.arch
    group = p.group_size // STRIP
    if c.stage_tiles % c.num_warps:
        return f"stage_tiles={c.stage_tiles} is no multiple of num_warps={c.num_warps}"
    if c.stage_tiles % (2 * group):
        return f"stage_tiles={c.stage_tiles} is no multiple of {2 * group}, two groups of group_size={p.group_size}"
    if c.in_flight > c.num_stages:
        return f"in_flight={c.in_flight} is more than num_stages={c.num_stages}"
    for name, parts, k in (("out_parts", c.out_parts, p.attended), ("down_parts", c.down_parts, p.inner)):
        if parts > k // p.group_size:
            return f"{name}={parts} is more than the {k // p.group_size} groups of a row of {k}"
    for name, (strips, parts) in _strips(p, c).items():
        if parts > 1 and (meet := _most_that_meet(strips, parts, num_blocks(p, c, target))) > c.slots:
            return f"{name}_parts={parts}: {meet} blocks meet in a strip; slots={c.slots}"
    vecs = _row_vecs(p, c.num_warps)
    if (words := 8 * vecs * c.slots) > MAX_ROW_WORDS:
        return (f"{words} words of partial sums a thread ({vecs} vectors of hidden={p.hidden}, slots={c.slots}); "
                f"at most {MAX_ROW_WORDS}")  # fmt: skip
    if (need := smem_bytes(p, c, target)) > arch.max_smem_bytes:
        return f"needs {need:,} B of shared memory; {arch} allows {arch.max_smem_bytes:,} B a block"
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """Whole rows of the hidden size in as few slots as hold them, shares of equal size, and as deep a ring as fits. By
    measurement on an H200. Where none fits, the smallest: see why_unsupported.
    """
    p, blocks = problem, target.device.num_sms
    warps = 8 if p.hidden <= 4096 else 12
    most = max(1, MAX_ROW_WORDS // (8 * _row_vecs(p, warps)))
    out = _parts(p.hidden, p.attended, p.group_size, blocks, most, everywhere=False)
    down = _parts(p.hidden, p.inner, p.group_size, blocks, most, everywhere=True)
    slots = max(_most_that_meet(p.hidden // STRIP, parts, blocks) for parts in (out, down))
    sizes = [t for t in SPACE["stage_tiles"] if t % lcm(warps, 2 * p.group_size // STRIP) == 0 and t <= 48]
    sizes.sort(key=lambda t: (ceil(p.hidden // STRIP / t), t))
    for tiles, stages in product((sizes[0], min(sizes)), (6, 5, 4, 3)):
        config = Config(warps, tiles, stages, 2, 3, out, down, slots)
        if smem_bytes(p, config, target) <= min(target.arch.max_smem_bytes, RING_LIMIT):
            break
    return config


def _row_vecs(p: Problem, num_warps: int) -> int:
    """Vectors of a row of the hidden size that a thread has."""
    return ceil(p.hidden / VEC / (32 * num_warps))


def _parts(rows: int, columns: int, group_size: int, blocks: int, most: int, *, everywhere: bool) -> int:
    """Into how many parts a strip of a matrix is cut. everywhere: all blocks must have a share, if there is enough.
    most: blocks that may meet in a strip.

    What the busiest block multiplies, in tiles, and what waiting for the sums of one more block costs, as many tiles.
    """
    strips, tiles, groups = rows // STRIP, columns // STRIP, columns // group_size

    def price(parts: int) -> float:
        busiest = ceil(strips * parts / blocks) * tiles / parts
        return busiest + SUM_TILES * _most_that_meet(strips, parts, min(blocks, strips * parts))

    choices = [c for c in SPACE["down_parts"] if c <= groups]
    choices = [c for c in choices if _most_that_meet(strips, c, min(blocks, strips * c)) <= most]
    enough = [c for c in choices if strips * c >= blocks] if everywhere else choices
    return min(enough or choices[-1:], key=price)


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks, threads = num_blocks(problem, config, target), 32 * (config.num_warps + 1)
    smem = smem_bytes(problem, config, target)
    return (Launch("decode_chain", (blocks, 1, 1), (threads, 1, 1), smem, pdl=True, cooperative=True),)


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """A count, partial sums of the output projection and of down, the MLP's inner row. All zero between launches."""
    return _workspace_bytes(problem, config)


def _workspace_bytes(p: Problem, c: Config) -> int:
    parts = 2 * c.slots * 4 * p.hidden
    return 16 + parts + 2 * p.inner


def cost(problem: Problem) -> Cost:
    p = problem
    size, g = ELEMENT_BYTES[p.dtype], p.group_size
    rows = size * (p.attended + (p.qkv or p.hidden) + 4 * p.hidden)
    rows += 2 * ELEMENT_BYTES[p.residual_dtype] * p.hidden
    weights = sum(matrix_bytes(n, k, g) for n, k in p.matrices)
    return Cost(weights + rows, 2 * sum(n * k for n, k in p.matrices) + 40 * p.hidden)


def traffic(problem: Problem, config: Config, target: Target) -> Traffic:
    """Every block reads every row through L2. cuda_ops: about 44 instructions a tile of 32 x 32 weights and lane.
    steps: of each of the four products two, and two for each of the four norms.
    """
    p, c, blocks = problem, config, num_blocks(problem, config, target)
    weights, least = sum(n * k for n, k in p.matrices), cost(problem).bytes
    rows = 4 * (p.attended + p.inner) + 8 * p.hidden * c.slots
    return Traffic(
        least, 0, l2_bytes=least + blocks * rows, smem_bytes=2 * least,
        cuda_ops=weights * 44 // 32, bytes_in_flight=c.in_flight * _slot_bytes(p, c), steps=16,
    )  # fmt: skip
