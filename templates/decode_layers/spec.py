"""decode_layers: all layers of a dense W4A16 model for one token, in one launch.

Every block of the grid stays for all of it. One warp of a block fetches what the block needs in its order, as far ahead
as its ring in shared memory reaches: its shares of the weights, and its keys and values. The others multiply (as
integers, common/w4_integers.cuh), attend, and hand rows to each other through L2, word by word, with no barrier
(common/posted.cuh). Rows are short, so every block makes norms and residual anew for itself.

Blocks wait for each other here, so all of them must be on the GPU together: the grid has a block an SM at most, and is
launched as a cooperative one, which starts whole. Such a launch waits for the end of its predecessor; in forwards that
are known to be the only ones on their GPU it is an ordinary launch (runtime/executors/launch.py).

Method: persistent kernels that run many dependent operations, "Look Ma, No Bubbles!" (Hazy Research, 2025), and words
that carry their own flag, NCCL's LL protocol. Attention is split over keys and merged as in Flash-Decoding (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kerngen.templates.common.row_spec import require, require_dtypes, require_vectors
from kerngen.templates.common.w4_tiling import require_matrix
from kerngen.templates.kernel import Arg

HEAD_DIMS = (256, 512)
MAX_PLE_WIDTH = 256  # a vector a lane
TILE_KEYS = 16  # of one page: keys that are fetched and multiplied together


@dataclass(frozen=True, slots=True)
class Problem:
    """One token through `layers`: a letter each, s for sliding and f for full attention; capitals own no K and V and
    attend to those of the last layer of their kind that does. h [hidden] enters as `residual`. In each layer

    q, k, v = norm(h; input_norm) Qkv^T, heads normed and turned (qkv_norm_rope); K and V go to the cache;
    h = h + norm(attention(q) Out^T; post_attention_norm); x = norm(h; pre_ffn_norm);
    h = h + norm((gelu_tanh(x Gate^T) * (x Up^T)) Down^T; post_ffn_norm);
    with ple_width h = h + norm((gelu_tanh(h PleGate^T) * ple) PleProjection^T; post_ple_norm); h = h * layer_scalar.
    out = norm(h; final_norm). kv_len: keys that the token sees in full attention, itself among them.

    inner: rows of Gate, and of Up; shared_inner: the same in layers that own no K and V, 0 where that is inner. k_eq_v:
    full layers have no V of their own but the raw K. Matrices are int4 with scales by group_size, those of the per-layer
    inputs of dtype, as all else but the residual.
    """

    RUNTIME: ClassVar[tuple[str, ...]] = ("kv_len",)
    DYNAMIC: ClassVar[str] = "kv_len"

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

    def __post_init__(self) -> None:
        p = self
        require_dtypes(p.dtype, residual_dtype=p.residual_dtype)
        require(len(p.layers) > 0 and not p.layers.strip("sfSF"), f"layers={p.layers!r} has letters other than s, f, S and F")
        for kind in "sf":
            first = next((letter for letter in p.layers if letter.lower() == kind), kind)
            require(first == kind, f"layers={p.layers!r}: the first {first!r} has no layer before it whose K and V it sees")
        for heads, dim in ((p.num_kv_heads, p.head_dim), (p.num_full_kv_heads, p.full_head_dim)):
            require(dim in HEAD_DIMS, f"a head of {dim} elements is not one of: {HEAD_DIMS}")
            require(heads > 0 and p.num_q_heads % heads == 0, f"{p.num_q_heads} q heads are no groups of {heads} KV heads")
        require(p.window > 0, f"window={p.window}: a sliding layer sees a key at least")
        require(p.page_size % TILE_KEYS == 0, f"page_size={p.page_size} is no multiple of {TILE_KEYS}")
        if p.ple_width:
            require_vectors(ple_width=p.ple_width)
        require(p.ple_width <= MAX_PLE_WIDTH, f"ple_width={p.ple_width} is more than {MAX_PLE_WIDTH}")
        for letter in dict.fromkeys(p.layers):
            for n, k in p.matrices(letter):
                require_matrix(n, k, p.group_size, p.dtype)
            require_matrix(p.inner_of(letter), p.hidden, p.group_size, p.dtype)  # gate, and up: whole strips of each

    def inner_of(self, letter: str) -> int:
        return self.shared_inner or self.inner if letter.isupper() else self.inner

    def heads_of(self, letter: str) -> tuple[int, int]:
        """KV heads and the elements of a head."""
        return (self.num_kv_heads, self.head_dim) if letter in "sS" else (self.num_full_kv_heads, self.full_head_dim)

    def matrices(self, letter: str) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a layer's projections, its output projection, of gate and up together, and of down."""
        num_kv_heads, dim = self.heads_of(letter)
        own = 0 if letter.isupper() else 1 if letter == "f" and self.k_eq_v else 2
        attended, inner = self.num_q_heads * dim, self.inner_of(letter)
        return (
            (attended + own * num_kv_heads * dim, self.hidden), (self.hidden, attended), (2 * inner, self.hidden),
            (self.hidden, inner),
        )  # fmt: skip


# What a layer brings along, in the order in which the kernel finds their addresses; null: k_norm where the layer owns no
# K and V, the per-layer inputs' where there are none. The caches of such a layer are those that it attends to.
LAYER_TENSORS = (
    "input_norm", "qkv_packed", "qkv_scales", "q_norm", "k_norm", "out_packed", "out_scales", "post_attention_norm",
    "pre_ffn_norm", "gate_up_packed", "gate_up_scales", "down_packed", "down_scales", "post_ffn_norm", "ple_gate",
    "ple_projection", "post_ple_norm", "layer_scalar",
)  # fmt: skip
ARGS = {
    "decode_layers": (
        Arg("out", "ptr"),
        Arg("k_caches", "ptrs"),  # a layer each, as `layers`
        Arg("v_caches", "ptrs"),
        Arg("residual", "ptr"),
        Arg("ple", "ptr"),
        Arg("layers", "ptrs"),  # LAYER_TENSORS, layer after layer
        Arg("final_norm", "ptr"),
        Arg("positions", "ptr", align=8),
        Arg("kv_lens", "ptr", align=4),
        Arg("slots", "ptr", align=8),
        Arg("full_slots", "ptr", align=8),
        Arg("block_table", "ptr", align=4),
        Arg("full_block_table", "ptr", align=4),
        Arg("inv_freq", "ptr"),
        Arg("full_inv_freq", "ptr"),
        Arg("workspace", "ptr"),
        Arg("eps", "f32"),
    )
}
OUTPUTS = ("out", "k_caches", "v_caches")
