"""decode_layers: a megakernel: all layers of a W4A16 model for one token, in one launch.

The kernel is persistent: every block runs through all layers. A block's producer warp loads its shares of the weights,
and its keys and values, in order of use, as far ahead as the smem pipeline allows. The consumer warps multiply (as
integers, common/w4/int8_unpack.cuh), attend, and exchange rows with other blocks by LL through L2, without a barrier
(common/pipeline/ll_exchange.cuh). Rows are short, so every block recomputes norms and residual for itself.

Blocks wait for each other, so all must be co-resident: the grid has at most one block an SM, and the launch is
cooperative. Such a launch starts only when its predecessor has completed; forwards that are known to be alone on their
GPU use an ordinary launch instead (runtime/executors/launch.py).

In layers with experts every block selects the experts for itself, from router logits that arrive by LL. The experts'
weights cannot be loaded before that, so the dense MLP runs between the row that the router reads and the experts.

Of a model that is divided among GPUs each rank runs the layers' parts that it has. A block posts its partial sums of
out and down to every rank's memory as it posts them to its own (common/pipeline/peer_exchange.cuh), and every block
adds up those of all ranks: the sum over ranks takes no launch and no further trip through memory.

Method: persistent kernels that run many dependent operations, "Look Ma, No Bubbles!" (Hazy Research, 2025); NCCL's LL
protocol; split-KV attention as in Flash-Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import ceil, lcm
from typing import Any, ClassVar

from kerngen.arch import Arch, Target
from kerngen.templates.common.rows.spec import (
    ELEMENT_BYTES,
    KV_GROUPS,
    TAP_SCALE,
    VEC,
    has_codes,
    is_rotated,
    is_shared,
    is_static,
    keys_that_matter,
    kv_row_bytes,
    require,
    require_dtypes,
    require_kv_format,
    require_shared,
    require_vectors,
    sliding_format,
    why_no_dtype,
)
from kerngen.templates.common.w4.tiling import STRIP, matrix_bytes, require_matrix
from kerngen.templates.exchange_norm.spec import MOST_RANKS, NUM_PHASES
from kerngen.templates.kernel import Arg, Body, Cost, Launch, args

MATRICES = ("qkv", "out", "gate_up", "down")  # int4, of a layer; "NAME_packed" and "NAME_scales" are its tensors
EXPERT_MATRICES = ("expert_gate_up", "expert_down")  # the same of a layer with experts, all of its experts' in one
GATE_UP = 2  # which of a layer's products this is; behind it those of the MLPs alone
DOWN = (3, 5)  # and this: the dense one, and the experts'
HEAD_DIMS = (256, 512)
ROTATED = 128  # dims of K that a cache keeps beside V where they share it (values.py)
MAX_PLE_WIDTH = 256  # a vector a lane
MAX_EXPERTS, MAX_TOP_K = 128, 8  # logits of four a lane; choices of eight lanes
TILE_KEYS = 16  # of one page: keys that are fetched and multiplied together
KEY_BATCH = 4  # tiles of K that are multiplied before their V
UNIT_HEADS = 8  # q heads of one KV head that a block takes, at most
ATTENTION_BYTES = 2 * 8 * 640 + 2 * 8 * 520  # of shared memory: scores by warps, of two batches, and Q
OFFSET_BYTES = 8 * 8 * 4  # and where caches hold codes: sums of Q by heads and 64 dims
GATED_COPIES = 4  # of the gated per-layer row: all blocks wait for its few lines, and the copies serve them in turn
LEAST_SMEM_BYTES = 160 * 1024  # with less a launch each was not compared with
MAX_CANDIDATES = 12
# What ptxas may keep in local memory, a thread, where caches are not plain: outside the loops over keys and weights,
# but for five words over keys of 4 bits. Of 8 bits it is 176 at most.
MAX_SPILL_BYTES = 256
MAILBOXES = 3  # layers whose words are there at a time
MOST_SUMMED = 3  # products of a layer that are summed over ranks: out, down, and the experts' down
MOST_PEERS = 5  # blocks that share an n-tile, of all configurations: ranks' memory is laid out for so many
# Rows of a slot of the memory that ranks share (exchange_norm's `exchange_bytes`), each as long as half of a row of
# partial sums. The count of layers is where its epochs are.
PEER_ROWS = MAILBOXES * MOST_SUMMED * MOST_PEERS * 2 // NUM_PHASES
MAX_ROW_WORDS = 40  # of partial sums that a thread waits for at once: more of them and the registers spill


@dataclass(frozen=True, slots=True)
class Problem:
    """One token through `layers`: a letter each, s for sliding and f for full attention; capitals own no K and V and
    attend to those of the last layer of their kind that does. Of a drafter's layers, all capitals, none does, and all
    of a kind attend to the same cache, which is given. h [hidden] enters as `residual`. In each layer

    q, k, v = norm(h; input_norm) Qkv^T, heads normed and turned (qkv_norm_rope); K and V go to the cache;
    h = h + norm(attention(q) Out^T; post_attention_norm); x = norm(h; pre_ffn_norm);
    h = h + norm((gelu_tanh(x Gate^T) * (x Up^T)) Down^T; post_ffn_norm);
    with ple_width h = h + norm((gelu_tanh(h PleGate^T) * ple) PleProjection^T; post_ple_norm); h = h * layer_scalar.
    With experts what down gives is y = norm(it; dense_norm) + norm(experts(h); expert_norm), and h = h + norm(y;
    post_ffn_norm): experts(h) = sum_k weight_k down_k((gelu_tanh(z gate_k^T) * (z up_k^T))), z = norm(h;
    pre_expert_norm), of the top_k experts k of num_experts that moe_router chooses by h.
    out = norm(h; final_norm). kv_len: keys that the token sees in full attention, itself among them where a layer owns
    K and V; a drafter's sees those of the cache alone, and of them its sliding layers the last `window`.

    inner: rows of Gate, and of Up; shared_inner: the same in layers that own no K and V, 0 where that is inner;
    expert_inner: of each expert. num_experts: 0 for none. k_eq_v:
    full layers have no V of their own but the raw K. Matrices are int4 with scales by group_size, those of the
    per-layer inputs of dtype, as all else but the residual.

    With ranks, heads, inner and expert_inner are those of one rank's part, the same on all; what out, down and the
    experts' down give is added up over the ranks, in fp32 and in their order, before it is rounded. mlp_is_whole: each
    rank has all of the MLP, a drafter's, and what out gives alone is added up.

    taps: a letter a layer, t where the h that it ends with is put down too, times TAP_SCALE and rounded to dtype, and -
    where not; "" for none at all. out is [1 + taps, hidden] then: the row above, and these in the layers' order.
    """

    TUNED_AS_DEFAULT: ClassVar[tuple[str, ...]] = ("taps",)  # a row that one block writes, beside the others' work
    RUNTIME: ClassVar[tuple[str, ...]] = ("kv_len",)
    DYNAMIC: ClassVar[str] = "kv_len"
    REACH: ClassVar[float] = 4  # contexts are tuned at powers of four

    layers: str = "sssssf"
    hidden: int = 5376
    num_q_heads: int = 32
    num_kv_heads: int = 16
    head_dim: int = 256
    num_full_kv_heads: int = 4
    full_head_dim: int = 512
    k_eq_v: bool = True
    inner: int = 21504
    shared_inner: int = 0
    ple_width: int = 0
    window: int = 1024
    page_size: int = 64
    num_rotated_pairs: int = 128
    num_full_rotated_pairs: int = 64
    group_size: int = 32
    dtype: str = "bf16"
    residual_dtype: str = "bf16"
    kv_len: int = 512
    num_experts: int = 0
    top_k: int = 0
    expert_inner: int = 0
    ranks: int = 1
    mlp_is_whole: bool = False
    kv_format: str = "plain"  # of the full layers' caches, and so of the sliding ones': kv_format_of
    taps: str = ""

    def __post_init__(self) -> None:
        p = self
        require_dtypes(p.dtype, residual_dtype=p.residual_dtype)
        require(
            len(p.layers) > 0 and not p.layers.strip("sfSF"),
            f"layers={p.layers!r} has letters other than s, f, S and F",
        )
        for kind in "sf" if p.makes_kv else "":
            first = next((letter for letter in p.layers if letter.lower() == kind), kind)
            require(
                first == kind, f"layers={p.layers!r}: the first {first!r} has no layer before it whose K and V it sees"
            )
        for heads, dim in ((p.num_kv_heads, p.head_dim), (p.num_full_kv_heads, p.full_head_dim)):
            require(dim in HEAD_DIMS, f"a head of {dim} elements is not one of: {HEAD_DIMS}")
            require(
                heads > 0 and p.num_q_heads % heads == 0, f"{p.num_q_heads} q heads are no groups of {heads} KV heads"
            )
        for name, pairs, dim in (
            ("num_rotated_pairs", p.num_rotated_pairs, p.head_dim),
            ("num_full_rotated_pairs", p.num_full_rotated_pairs, p.full_head_dim),
        ):
            require(0 <= pairs <= dim // 2, f"{name}={pairs} is not in 0..{dim // 2} (half of the head)")
        require(
            not p.taps or (len(p.taps) == len(p.layers) and set(p.taps) <= {"t", "-"}),
            f"taps={p.taps!r}: t or - for each of layers={p.layers!r}, or nothing",
        )
        require(p.window > 0, f"window={p.window}: a sliding layer sees a key at least")
        require(p.kv_len >= 0, f"kv_len={p.kv_len} is negative")
        require(p.page_size % TILE_KEYS == 0, f"page_size={p.page_size} is no multiple of {TILE_KEYS}")
        p._require_kv_formats()
        if p.ple_width:
            require_vectors(ple_width=p.ple_width)
        require(p.ple_width <= MAX_PLE_WIDTH, f"ple_width={p.ple_width} is more than {MAX_PLE_WIDTH}")
        if p.num_experts:
            self._require_experts()
        require(
            p.num_experts > 0 or p.top_k == p.expert_inner == 0,
            f"top_k={p.top_k}, expert_inner={p.expert_inner} of no experts",
        )
        if p.ranks != 1:
            require(1 < p.ranks <= MOST_RANKS, f"ranks={p.ranks} is not in 1..{MOST_RANKS}")
            require(not p.ple_width, "layers with per-layer inputs are not divided among ranks")
        require(
            not p.mlp_is_whole or (p.ranks > 1 and not p.num_experts),
            f"mlp_is_whole of ranks={p.ranks}, num_experts={p.num_experts}: said of several ranks without experts",
        )
        for letter in dict.fromkeys(p.layers):
            for n, k in p.matrices(letter):
                require_matrix(n, k, p.group_size, p.dtype)
            require_matrix(p.inner_of(letter), p.hidden, p.group_size, p.dtype)  # gate, and up: whole strips of each

    def _require_kv_formats(self) -> None:
        p = self
        for kind in dict.fromkeys(p.layers.lower()):
            require_kv_format(p.kv_format_of(kind), p.heads_of(kind)[1], p.page_size, 0)
        rotated = f"kv_format={p.kv_format}: decode_layers reads no rotated codes"
        require(not is_rotated(p.kv_format), rotated)
        require(not is_static(p.kv_format), f"kv_format={p.kv_format}: decode_layers reads no codes in e4m3")
        if "f" in p.layers.lower():  # of a drafter's layers it is another's projection whose V is K
            require_shared(p.kv_format, p.k_eq_v or "f" not in p.layers, p.num_full_rotated_pairs)
            reads = is_shared(p.kv_format) and p.makes_kv and "F" in p.layers
            require(not reads, f"kv_format={p.kv_format}: an F of layers={p.layers!r} reads another's K and V")
        else:
            of_full = p.kv_format != sliding_format(p.kv_format)
            require(not of_full, f"kv_format={p.kv_format} is full layers', and layers={p.layers!r} has none")

    def _require_experts(self) -> None:
        p = self
        require(
            0 < p.num_experts <= MAX_EXPERTS and p.num_experts % VEC == 0,
            f"num_experts={p.num_experts} is no multiple of {VEC} up to {MAX_EXPERTS}",
        )
        most = min(MAX_TOP_K, p.num_experts)
        require(0 < p.top_k <= most, f"top_k={p.top_k} is not in 1..{most}")
        require(not p.ple_width, "a layer has experts or per-layer inputs, not both")
        require_matrix(p.expert_inner, p.hidden, p.group_size, p.dtype)  # gate, and up: whole strips of each
        require_matrix(p.hidden, p.expert_inner, p.group_size, p.dtype)

    @property
    def tapped(self) -> tuple[int, ...]:
        """The layers whose output is put down."""
        return tuple(index for index, letter in enumerate(self.taps) if letter == "t")

    @property
    def makes_kv(self) -> bool:
        """Whether any layer owns K and V: then the token's own key is the last that it sees."""
        return not self.layers.isupper()

    def inner_of(self, letter: str) -> int:
        return self.shared_inner or self.inner if letter.isupper() else self.inner

    def kv_format_of(self, letter: str) -> str:
        """Of the cache of such a layer."""
        return self.kv_format if letter in "fF" else sliding_format(self.kv_format)

    def heads_of(self, letter: str) -> tuple[int, int]:
        """KV heads and the elements of a head."""
        return (self.num_kv_heads, self.head_dim) if letter in "sS" else (self.num_full_kv_heads, self.full_head_dim)

    @property
    def expert_matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of each expert's EXPERT_MATRICES."""
        return (2 * self.expert_inner, self.hidden), (self.hidden, self.expert_inner)

    def matrices(self, letter: str) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a layer's MATRICES, and of EXPERT_MATRICES those of the chosen experts: gate and up one
        below the other, down side by side.
        """
        num_kv_heads, dim = self.heads_of(letter)
        own = 0 if letter.isupper() else 1 if letter == "f" and self.k_eq_v else 2
        attended, inner = self.num_q_heads * dim, self.inner_of(letter)
        dense = (
            (attended + own * num_kv_heads * dim, self.hidden), (self.hidden, attended), (2 * inner, self.hidden),
            (self.hidden, inner),
        )  # fmt: skip
        if not self.num_experts:
            return dense
        (up_rows, up_columns), (down_rows, down_columns) = self.expert_matrices
        return (*dense, (self.top_k * up_rows, up_columns), (down_rows, self.top_k * down_columns))


@dataclass(frozen=True, slots=True)
class Config:
    num_warps: int = 8  # consumers
    stage_tiles: int = 24  # tiles of 32 x 32 weights a stage
    num_stages: int = 8
    max_inflight_stages: int = field(default=4, metadata={"filed": "in_flight"})
    # Tiles that a warp reads to registers ahead of the MMAs, in pairs.
    prefetch_tiles: int = field(default=3, metadata={"filed": "tiles_together"})
    # Stream-K: the parts of K that an n-tile (32 rows) of the output projection is cut into, and an n-tile of down. A
    # block's share begins and ends between two parts.
    out_split_k: int = field(default=2, metadata={"filed": "out_parts"})
    down_split_k: int = field(default=3, metadata={"filed": "down_parts"})
    max_peers: int = field(default=3, metadata={"filed": "slots"})  # blocks that may share an n-tile
    split_tiles: int = 1  # of keys, in a block, before more blocks take some
    fused: bool = True  # False: in a step kernels one after the other are faster, and it asks those

    @property
    def parts(self) -> tuple[int, ...]:
        """Of each of MATRICES, and of EXPERT_MATRICES: the parts of K that an n-tile is cut into."""
        return 1, self.out_split_k, 1, self.down_split_k, 1, self.down_split_k


SPACE = {
    "num_warps": (8, 10, 11, 12, 16),
    "stage_tiles": (24, 32, 40, 44, 48, 56, 64, 80),
    "num_stages": (3, 4, 5, 6, 7, 8, 10, 12),
    "max_inflight_stages": (1, 2, 3, 4),
    "prefetch_tiles": (2, 3, 5),  # one, two and three pairs
    "out_split_k": (1, 2, 3, 4, 5, 8, 11, 33),
    "down_split_k": (1, 2, 3, 4, 5, 8, 11, 33),
    "max_peers": tuple(range(1, MOST_PEERS + 1)),
    "split_tiles": (1, 2, 4),
}
# What a layer brings along, in the order in which the kernel finds their addresses; null: k_norm where the layer owns
# no K and V, the per-layer inputs' where there are none. The caches of such a layer are those that it attends to.
_LAYER_TENSORS = (
    "input_norm", "qkv_packed", "qkv_scales", "q_norm", "k_norm", "out_packed", "out_scales", "post_attention_norm",
    "pre_ffn_norm", "gate_up_packed", "gate_up_scales", "down_packed", "down_scales", "post_ffn_norm", "ple_gate",
    "ple_projection", "post_ple_norm", "layer_scalar",
)  # fmt: skip
_EXPERT_TENSORS = (
    "router_scale", "router", "per_expert_scale", "pre_expert_norm", "dense_norm", "expert_norm",
    *(f"{name}_{part}" for name in EXPERT_MATRICES for part in ("packed", "scales")),
)  # fmt: skip
ARGS = {
    "decode_layers": (
        Arg("out", "ptr"),
        Arg("k_caches", "ptrs"),  # a layer each, as `layers`
        Arg("v_caches", "ptrs"),
        *args("ptr", "residual", "ple"),
        Arg("layers", "ptrs"),  # layer_tensors(), layer after layer
        Arg("final_norm", "ptr"),
        Arg("positions", "ptr", align=8),
        Arg("kv_lens", "ptr", align=4),
        *args("ptr", "slots", "full_slots", align=8),
        *args("ptr", "block_table", "full_block_table", align=4),
        *args("ptr", "inv_freq", "full_inv_freq", "workspace"),
        Arg("eps", "f32"),
        Arg("addresses", "ptr", align=8),  # of several ranks, and null of one
        Arg("rank", "i32"),
    )
}
BODIES = (Body("kernel.cu.jinja", ARGS, SPACE),)
OUTPUTS = ("out", "k_caches", "v_caches")


def outputs(problem: Problem) -> tuple[str, ...]:
    """The caches only where a layer owns K and V; else they are read."""
    return OUTPUTS if problem.makes_kv else ("out",)


def layer_tensors(num_experts: int) -> tuple[str, ...]:
    """What a layer brings along, in the order in which the kernel finds the addresses."""
    return _LAYER_TENSORS + _EXPERT_TENSORS if num_experts else _LAYER_TENSORS


def sources(layers: str) -> tuple[int, ...]:
    """The layers whose caches a caller gives: those that own K and V, or if none does the first of each kind."""
    own = tuple(index for index, letter in enumerate(layers) if letter.islower())
    return own or tuple(layers.index(letter) for letter in dict.fromkeys(layers))


def constants(problem: Problem, config: Config, arch: Arch) -> dict[str, Any]:
    p, c = problem, config
    kinds = _kinds(p)
    return {
        "KINDS": [
            {
                "shapes": _work_shapes(p, c, kind),
                "is_full": str(kind in "fF").lower(),
                "owns_kv": str(kind in "sf").lower(),
                "attended": p.matrices(kind)[1][1],
            }
            for kind in kinds
        ],
        "KIND_OF": ", ".join(str(kinds.index(letter)) for letter in p.layers),
        "MAX_TILES": _max_tiles(p),
        "MAX_QKV": _most(p, 0, 0),
        "MAX_ATTENDED": _most(p, 1, 1),
        "MAX_INNER": _most(p, 3, 1),
        "CHOSEN": p.top_k * p.expert_inner,
        "EXPERT_X": _expert_x(p),
        "ROOT": p.hidden**-0.5,
        "TENSORS": [name.upper() for name in layer_tensors(p.num_experts)],
        "NEW_KEY": int(p.makes_kv),  # of the keys that are seen: one, the last, is none of the cache's
        "UNIT_ELEMENTS": _unit_elements(p),
        "IS_PLAIN": p.kv_format == "plain",
        "HAS_CODES": has_codes(p.kv_format),
        "SLIDING_FORMAT": p.kv_format_of("s"),
        "FULL_FORMAT": p.kv_format_of("f"),
        "WORK_BYTES": _work_bytes(p),
        "SHARED_BYTES": _shared_bytes(p, c),
        "COPIES": GATED_COPIES,
        "TILE_KEYS": TILE_KEYS,
        "TILE_BYTES": _tile_bytes(p),
        "KEY_BATCH": KEY_BATCH,
        "MAILBOXES": MAILBOXES,
        "MOST_SUMMED": MOST_SUMMED,
        "MOST_PEERS": MOST_PEERS,
        "TAP_OF": ", ".join(str(p.tapped.index(i) if i in p.tapped else -1) for i in range(len(p.layers))),
        "TAP_SCALE": TAP_SCALE[p.dtype],
    }


def _work_shapes(p: Problem, c: Config, kind: str) -> list[tuple[int, int, int]]:
    """Of each of a layer's products: n-tiles, k-tiles of an n-tile, and the parts of K that it is cut into."""
    matrices = p.matrices(kind)
    return [(n // STRIP, k // STRIP, of) for (n, k), of in zip(matrices, c.parts[: len(matrices)], strict=True)]


def _kinds(p: Problem) -> str:
    return "".join(dict.fromkeys(p.layers))


def _most(p: Problem, matrix: int, side: int) -> int:
    """Rows (side 0) or columns of the largest of the layers' matrices."""
    return max(p.matrices(kind)[matrix][side] for kind in _kinds(p))


def _least_columns(p: Problem, *matrices: int) -> int:
    """Of those of these that there are."""
    return min(k for kind in _kinds(p) for i, (_, k) in enumerate(p.matrices(kind)) if i in matrices)


def _max_tiles(p: Problem) -> int:
    experts = max(p.top_k * p.expert_inner, STRIP * _expert_x(p) + p.hidden) if p.num_experts else 0
    return max(p.hidden, _most(p, 1, 1), _most(p, 3, 1), experts) // STRIP


def _expert_x(p: Problem) -> int:
    """From which tile on the experts' x is kept, beside the dense MLP's rows."""
    return max(p.hidden, _most(p, 3, 1)) // STRIP


def _unit_heads(p: Problem, kind: str) -> int:
    return min(p.num_q_heads // p.heads_of(kind)[0], UNIT_HEADS)


def _unit_elements(p: Problem) -> int:
    """Of attention's output, that a block makes."""
    return max(_unit_heads(p, kind) * p.heads_of(kind)[1] for kind in "sf")


def slot_bytes(problem: Problem, config: Config) -> int:
    """Of a stage: `stage_tiles` k-tiles of an n-tile, with their scales."""
    return matrix_bytes(STRIP, STRIP * config.stage_tiles, problem.group_size)


def _tile_bytes(p: Problem) -> int:
    """Of a tile's keys or values, the longest of the layers': see _tile_bytes_of."""
    return max(_tile_bytes_of(p, kind) for kind in _tiled_kinds(p))


def _tiled_kinds(p: Problem) -> str:
    """Kinds of layers that there is code for: of caches that are plain, those that there are; else both."""
    return _kinds(p) if p.kv_format == "plain" else "sf"


def _tile_bytes_of(p: Problem, kind: str) -> int:
    """Of a tile's keys or values, by pairs and padded, and their scales; where K is V of both."""
    kv_format, dim = p.kv_format_of(kind), p.heads_of(kind)[1]
    size = 1 if has_codes(kv_format) else ELEMENT_BYTES[p.dtype]
    rows = [dim, ROTATED] if is_shared(kv_format) else [dim]
    scales = TILE_KEYS * 2 * sum(rows) // KV_GROUPS[kv_format] if has_codes(kv_format) else 0
    padded = 1 if has_codes(kv_format) else len(rows)
    return TILE_KEYS * size * sum(rows) + TILE_KEYS // 2 * 16 * padded + scales


def _least_slot_bytes(p: Problem) -> int:
    """A stage must hold a whole tile of keys, and a whole row of the per-layer gate or of the router."""
    return max(_tile_bytes(p), 2 * p.hidden if p.ple_width or p.num_experts else 0)


def _work_bytes(p: Problem) -> int:
    codes = OFFSET_BYTES if has_codes(p.kv_format) else 0
    return max(_max_tiles(p) * 96, ATTENTION_BYTES + codes)


def _shared_bytes(p: Problem, c: Config) -> int:
    """Of a block, without the sums: the pipeline and its barriers; x by tiles, or attention's workspace; the token's
    own keys and rotations; scales of x's tiles; the gated row; sums of a row; addresses, of ranks' memory too; the
    block's shares; the experts.
    """
    ring = ceil((c.num_stages * (slot_bytes(p, c) + 16)) / 128) * 128 + ceil(_work_bytes(p) / 128) * 128
    keys = 2 * 2048 + 2 * 32 * 32 + 512
    scratch = (2 if p.num_experts else 1) * 16 * c.num_warps
    rows = 4 * (_max_tiles(p) + 6) + 4 * max(p.ple_width, 4) + scratch + 32
    addresses, shares = 2 * 8 * (len(layer_tensors(p.num_experts)) + 2), len(_kinds(p)) * _num_products(p) * 24
    choice = 4 * p.num_experts + 4 * 2 * MAX_TOP_K + 16 if p.num_experts else 0
    addresses += 8 * (p.ranks + 1) if p.ranks > 1 else 0
    return ceil((ring + keys + rows + addresses + shares + 2 * 48 + choice) / 128) * 128


def _num_products(p: Problem) -> int:
    """With int4 matrices, of a layer."""
    return len(MATRICES) + (len(EXPERT_MATRICES) if p.num_experts else 0)


def num_summed(problem: Problem) -> int:
    """Of a layer's products, those that ranks have partial sums of."""
    return 3 if problem.num_experts else 2 - problem.mlp_is_whole


def _units(p: Problem, c: Config, matrix: int) -> int:
    """The fewest work units of a product, which blocks share: parts of n-tiles."""
    return min(p.matrices(kind)[matrix][0] for kind in _kinds(p)) // STRIP * c.parts[matrix]


def max_peers(strips: int, parts: int, blocks: int) -> int:
    """The most blocks that share an n-tile, where strips * parts units are dealt evenly."""
    least = max(1, strips * parts // blocks)  # units of a block that has any
    return min(parts, ceil((parts - 1) / least) + 1)


def num_blocks(problem: Problem, config: Config, target: Target) -> int:
    """A block an SM, but no more than have a share of each gate_up and down: a block that has all sums of the last down
    then knows that all blocks have read what was written before. Where out is all that ranks exchange, the same holds
    of its sums.
    """
    p, c = problem, config
    least = [_units(p, c, i) for i in range(GATE_UP, _num_products(p))]
    return min(target.device.num_sms, *least, *([_units(p, c, 1)] if p.mlp_is_whole else []))


def smem_bytes(problem: Problem, config: Config, target: Target) -> int:
    p, c, blocks = problem, config, num_blocks(problem, config, target)
    strips = [(n, parts) for kind in _kinds(p) for n, _, parts in _work_shapes(p, c, kind)]
    pieces = max(min(ceil(n * parts / blocks), ceil(n * parts / blocks / parts) + 1) for n, parts in strips)
    return _shared_bytes(p, c) + max(
        128 * c.num_warps * pieces,
        4 * c.num_warps * max(_padded_share(rows, blocks) for rows in (p.ple_width, p.num_experts)),
        4 * 16 * ceil(p.hidden / STRIP / blocks),
    )


def _padded_share(rows: int, blocks: int) -> int:
    """Rows of the per-layer gate or the router of a block, a multiple of four."""
    return 4 * ceil(rows / 4 / blocks)


def replaces(problem: Problem) -> Iterator[tuple[str, dict[str, Any]]]:
    """As runtime/model.py goes through the layers, one kernel after another."""
    p = problem
    row = {"hidden": p.hidden, "dtype": p.dtype, "residual_dtype": p.residual_dtype}

    def w4(matrix: tuple[int, int], *, gated: bool = False) -> tuple[str, dict[str, Any]]:
        n, k = matrix
        return "w4a16_gemm", {"n": n, "k": k, "group_size": p.group_size, "dtype": p.dtype, "gated": gated}

    def added(**fields: Any) -> tuple[str, dict[str, Any]]:
        return ("add_norm", row | fields) if p.ranks == 1 else ("exchange_norm", row | {"ranks": p.ranks} | fields)

    yield "rmsnorm", row
    for letter in p.layers:
        qkv, out, gate_up, down = p.matrices(letter)[: len(MATRICES)]
        yield w4(qkv)
        yield "attn_decode", _attention(p, letter)
        yield w4(out)
        yield added()
        yield w4(gate_up, gated=True)
        yield w4(down)
        if p.num_experts:
            yield "moe_router", row | {"num_experts": p.num_experts, "top_k": p.top_k}
            yield "moe_w4a16", {
                "num_experts": p.num_experts, "top_k": p.top_k, "hidden": p.hidden, "inner": p.expert_inner,
                "group_size": p.group_size, "dtype": p.dtype,
            }  # fmt: skip
            yield ("moe_combine", row | {"top_k": p.top_k}) if p.ranks == 1 else added(top_k=p.top_k, has_scalar=True)
        elif p.ple_width:
            yield "ple_block", row | {"width": p.ple_width}
        else:
            yield ("add_norm", row | {"has_scalar": True}) if p.mlp_is_whole else added(has_scalar=True)


def _attention(p: Problem, letter: str) -> dict[str, Any]:
    """attn_decode's problem in a layer."""
    (heads, dim), slides = p.heads_of(letter), letter in "sS"
    window = p.window if slides else 0
    return {
        "head_dim": dim, "num_q_heads": p.num_q_heads, "num_kv_heads": heads, "page_size": p.page_size,
        "window": window, "dtype": p.dtype, "kv_len": keys_that_matter(p.kv_len, 1, window),
        "source": "raw_q" if letter.isupper() else "qk" if letter == "f" and p.k_eq_v else "qkv",
        "num_rotated_pairs": p.num_rotated_pairs if slides else p.num_full_rotated_pairs,
        "kv_format": p.kv_format_of(letter),
    }  # fmt: skip


@lru_cache(maxsize=1024)
def why_unsupported(problem: Problem, target: Target) -> str | None:
    p, arch, otherwise = problem, target.arch, "other kernels serve it, a launch each"
    if not arch.has_tma:
        return f"{arch} has no bulk copies; {otherwise}"
    if arch.max_smem_bytes < LEAST_SMEM_BYTES:
        return f"{arch} allows {arch.max_smem_bytes:,} B of shared memory a block: no ring beside the rows; {otherwise}"
    if why := why_no_dtype(arch, p.dtype):
        return why
    for kind in "sf":
        heads = p.num_q_heads // p.heads_of(kind)[0]
        if heads % _unit_heads(p, kind):
            return f"{heads} q heads to a KV head are neither {UNIT_HEADS} at most nor a multiple; {otherwise}"
    whys = {config: why_invalid(p, config, target) for config in candidates(p, target)}
    if None in whys.values():
        return None
    config, why = next(iter(whys.items()))  # where the smallest does not fit, none does
    return f"{why} (by {num_blocks(p, config, target)} blocks); {otherwise}"


def why_invalid(problem: Problem, config: Config, target: Target) -> str | None:
    p, c, arch, blocks = problem, config, target.arch, num_blocks(problem, config, target)
    group = p.group_size // STRIP
    if c.stage_tiles % c.num_warps:
        return f"stage_tiles={c.stage_tiles} is no multiple of num_warps={c.num_warps}"
    if c.stage_tiles % (2 * group):
        return f"stage_tiles={c.stage_tiles} is no multiple of {2 * group}, two groups of group_size={p.group_size}"
    if c.max_inflight_stages > c.num_stages:
        return f"max_inflight_stages={c.max_inflight_stages} is more than num_stages={c.num_stages}"
    if (slot := slot_bytes(p, c)) < (least := _least_slot_bytes(p)):
        return f"stage_tiles={c.stage_tiles}: a slot of {slot:,} B holds no keys, or no dense row: {least:,} B"
    for name, parts, matrices in (("out_split_k", c.out_split_k, (1,)), ("down_split_k", c.down_split_k, DOWN)):
        if parts > (groups := _least_columns(p, *matrices) // p.group_size):
            return f"{name}={parts} is more than the {groups} groups of a row"
        if parts > 1 and (peers := max_peers(p.hidden // STRIP, parts, blocks)) > c.max_peers:
            return f"{name}={parts}: {peers} blocks share an n-tile; max_peers={c.max_peers}"
    for kind in "sf":
        if (units := p.num_q_heads // _unit_heads(p, kind)) > blocks:
            return f"attention's heads are {units} units; {blocks} blocks take one each"
    vecs = _row_vecs(p, c.num_warps)
    if (words := 8 * vecs * c.max_peers) > MAX_ROW_WORDS:
        return (f"{words} words of partial sums a thread ({vecs} vectors of hidden={p.hidden}, "
                f"max_peers={c.max_peers}); at most {MAX_ROW_WORDS}")  # fmt: skip
    if p.ple_width and (rows := _padded_share(p.ple_width, blocks) * GATED_COPIES) > 32 * c.num_warps:
        return f"{rows} results of the per-layer gate a block; {c.num_warps} warps make {32 * c.num_warps} at a time"
    return arch.why_too_large(smem_bytes(p, c, target))


def candidates(problem: Problem, target: Target) -> Sequence[Config]:
    """As few stages as hold a whole row of the hidden size, and as deep a pipeline as fits, of which two stages are in
    flight, or three where a row has more; K of out and down cut as _split_choices says. If none fits, the smallest:
    see why_unsupported.
    """
    p, blocks = problem, target.device.num_sms

    def sizes_of(warps: int) -> list[int]:
        return [t for t in SPACE["stage_tiles"] if t % lcm(warps, 2 * p.group_size // STRIP) == 0]

    warps = min((n for n in (8, 10, 11, 12) if sizes_of(n)), key=lambda n: _row_vecs(p, n))
    most = max(1, MAX_ROW_WORDS // (8 * _row_vecs(p, warps)))
    outs = _split_choices(p.hidden, (_least_columns(p, 1),), p.group_size, blocks, most, everywhere=False)
    columns = [_least_columns(p, i) for i in DOWN if i < _num_products(p)]
    downs = _split_choices(p.hidden, columns, p.group_size, blocks, most, everywhere=True)
    sizes = sizes_of(warps)
    sizes = [t for t in sizes if matrix_bytes(STRIP, STRIP * t, p.group_size) >= _least_slot_bytes(p)] or sizes[-1:]
    sizes = [t for t in sizes if t <= 48] or sizes[:1]
    sizes.sort(key=lambda t: (ceil(p.hidden // STRIP / t), t))
    found = []
    for down, out in product(downs, outs):
        peers = max(max_peers(p.hidden // STRIP, parts, blocks) for parts in (out, down))
        for tiles, stages in product((sizes[0], min(sizes)), (10, 8, 7, 6, 5, 4, 3)):
            config = Config(warps, tiles, stages, 2, 2, out, down, peers)
            if smem_bytes(p, config, target) <= target.arch.max_smem_bytes:
                break
        found += [replace(config, max_inflight_stages=n) for n in (2, 3) if n <= max(2, p.hidden // STRIP // tiles)]
    return found[:MAX_CANDIDATES]


def _row_vecs(p: Problem, num_warps: int) -> int:
    """Vectors of a row of the hidden size that a thread has."""
    return ceil(p.hidden / VEC / (32 * num_warps))


def _split_choices(
    rows: int, columns: Sequence[int], group_size: int, blocks: int, most: int, *, everywhere: bool
) -> list[int]:
    """Parts of K of an n-tile of a matrix, or of several that are cut alike, of so many columns each: those that no
    other beats both in the tiles of the busiest block and in how many blocks share an n-tile. everywhere: nearly all
    blocks must have a share, if there is enough work. most: blocks that may share an n-tile.
    """
    strips, groups = rows // STRIP, min(columns) // group_size

    def peers(parts: int) -> int:
        return max_peers(strips, parts, min(blocks, strips * parts))

    choices = [c for c in SPACE["down_split_k"] if c <= groups and peers(c) <= most]
    if everywhere:
        choices = [c for c in choices if strips * c >= 0.95 * blocks] or choices[-1:]
    best: dict[int, tuple[int, int]] = {}  # peers -> the fewest tiles of the busiest block, and the parts
    for parts in choices:
        tiles = ceil(strips * parts / blocks) * sum(ceil(k // STRIP / parts) for k in columns)
        best[peers(parts)] = min(best.get(peers(parts), (tiles, parts)), (tiles, parts))
    return [parts for n, (tiles, parts) in best.items() if all(tiles < best[m][0] for m in best if m < n)]


def launches(problem: Problem, config: Config, target: Target) -> tuple[Launch, ...]:
    blocks, threads = num_blocks(problem, config, target), 32 * (config.num_warps + 2)
    smem = smem_bytes(problem, config, target)
    return (
        Launch("decode_layers", (blocks, 1, 1), (threads, 1, 1), smem, pdl=True, reads_ahead=True, cooperative=True),
    )


def workspace_bytes(problem: Problem, config: Config, target: Target) -> int:
    """Two counters, and three layers' LL mailboxes (kernel.cu.jinja). All zero between launches."""
    p, c, blocks = problem, config, num_blocks(problem, config, target)
    sums = 2 * c.max_peers * p.hidden // 8
    rows = (_most(p, 0, 0) + _most(p, 1, 1) + _most(p, 3, 1)) // 8 + 2 * sums
    per_layer = GATED_COPIES * p.ple_width // 4 + p.hidden // 8 if p.ple_width else 0
    chosen = p.num_experts // 4 + p.top_k * p.expert_inner // 8 + sums if p.num_experts else 0
    return 16 + MAILBOXES * 16 * (rows + per_layer + chosen + blocks * (_unit_elements(p) // 32 * 9))


def key_bytes(problem: Problem) -> int:
    """Of the keys and values that all layers see."""
    p = problem

    def row_bytes(letter: str) -> int:
        heads, dim = p.heads_of(letter)
        return 2 * heads * kv_row_bytes(p.kv_format_of(letter), dim, p.dtype)

    return sum(row_bytes(letter) * _seen(p, letter) for letter in p.layers)


def _seen(p: Problem, letter: str) -> int:
    return min(p.kv_len, p.window) if letter in "sS" else p.kv_len


def cost(problem: Problem) -> Cost:
    p = problem
    size, weights, flops = ELEMENT_BYTES[p.dtype], 0, 0
    for letter in p.layers:
        _, dim = p.heads_of(letter)
        matrices = p.matrices(letter)
        weights += sum(matrix_bytes(n, k, p.group_size) for n, k in matrices) + 2 * size * p.ple_width * p.hidden
        weights += size * (4 * p.hidden + 2 * dim)
        weights += size * (p.num_experts * (p.hidden + 1) + 4 * p.hidden) if p.num_experts else 0
        dense = (2 * p.ple_width + p.num_experts) * p.hidden
        flops += 2 * (sum(n * k for n, k in matrices) + dense) + 4 * _seen(p, letter) * p.num_q_heads * dim
    rows = (ELEMENT_BYTES[p.residual_dtype] + 2 * size) * p.hidden + size * len(p.layers) * p.ple_width
    rows += size * p.hidden * len(p.tapped)
    rows += 2 * 4 * p.hidden * len(p.layers) * num_summed(p) * (p.ranks - 1)  # to the peers, and from them
    return Cost(weights + key_bytes(p) + rows, flops)
