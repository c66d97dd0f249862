"""Tensors to calls of qkv_norm_rope."""

from __future__ import annotations

from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.qkv_norm_rope.spec import Problem
from kerngen.templates.values import HeadNorms, KVView

_TAKES = {
    "qkv": "D[T, W]",
    "q_weight": "D[HD]",
    "k_weight": "D[HD]",
    "inv_freq": "fp32[HD // 2]",
    "positions": "int64[T]",
    "k_cache": "D[P, NKV, S, HD]",
    "v_cache": "D[P, NKV, S, HD]",
    "slot_mapping": "int64[T]",
}
_REQUIRED = (
    "qkv", "q_weight", "k_weight", "inv_freq", "positions", "k_cache", "v_cache", "slot_mapping", "num_q_heads",
    "num_rotated_pairs", "eps",
)  # fmt: skip


@op(mutates=("k_cache", "v_cache"), takes=_TAKES, required=_REQUIRED)
def qkv_norm_rope(qkv: Tensor, heads: HeadNorms, positions: Tensor, kv: KVView, slot_mapping: Tensor) -> Call[Tensor]:
    """Head norms, RoPE and the cache write, from the fused projection's output.

    qkv [T, (nq + nkv + nkv) * d] as q | k | v, or [T, (nq + nkv) * d] as q | k where V is the raw K projection. q =
    rope(norm(q; q_weight)); k = rope(norm(k; k_weight)); v = norm(v), neither weighted nor rotated. k and v of token
    t go to row slot_mapping[t] = page * page_size + row of the caches [num_pages, nkv, page_size, d]; -1 writes
    nothing. Caches lie as attn_decode takes them. inv_freq [d / 2] fp32, its first num_rotated_pairs entries rotate;
    positions, slot_mapping [T] int64.
    Returns q [T, nq, d].
    """
    return _call(qkv, heads, positions, kv, slot_mapping, v_norm=True)


@op(mutates=("k_cache", "v_cache"), takes=_TAKES, required=_REQUIRED)
def qk_norm_rope(qkv: Tensor, heads: HeadNorms, positions: Tensor, kv: KVView, slot_mapping: Tensor) -> Call[Tensor]:
    """As qkv_norm_rope of q | k | v, with v = v: not normed. num_q_heads 0 means k | v, and a result without elements.
    Rows of qkv may lie apart, by whole heads: nothing is copied.
    """
    return _call(qkv, heads, positions, kv, slot_mapping, v_norm=False)


@op(
    mutates=("k_cache", "v_cache"),
    takes={**{name: kind for name, kind in _TAKES.items() if name != "qkv"}, "kv_rows": "D[T, W]",
           "k_weight": "D[N, HD]"},
    required=("kv_rows", *_REQUIRED[1:]),
)  # fmt: skip
def kv_norm_rope(kv_rows: Tensor, heads: HeadNorms, positions: Tensor, kv: KVView, slot_mapping: Tensor) -> Call[None]:
    """As qk_norm_rope of k | v, of n layers at once, whose pools are one: kv has n * num_pages pages, a layer's behind
    the other's, and slots count in each.

    kv_rows [T, n * (nkv + nkv) * d]: k | v of each layer; heads.k_weight [n, d], heads.num_q_heads 0.
    """
    weights, (_, width) = heads.k_weight, kv_rows.shape
    if weights is None or weights.dim() != 2:
        raise ProblemError("k_weight has a row for each layer: [layers, head_dim]")
    num_layers, num_kv_heads, dim, pages = len(weights), kv.num_kv_heads, kv.head_dim, len(kv.k_cache)
    heads_fit = width == num_layers * 2 * num_kv_heads * dim
    require(heads_fit, f"kv_rows has {width} columns; k | v of {num_layers} layers, {num_kv_heads} heads of {dim} each")
    require(pages % num_layers == 0, f"{pages} pages are not as many for each of {num_layers} layers")
    given = kv_rows.contiguous(), heads, positions, kv, slot_mapping
    return _call(*given, v_norm=False, num_layers=num_layers).without_result()


def _call(
    qkv: Tensor, heads: HeadNorms, positions: Tensor, kv: KVView, slot_mapping: Tensor, *, v_norm: bool,
    num_layers: int = 0,
) -> Call[Tensor]:  # fmt: skip
    kv.require_known()
    require(heads.owns_kv, "k_weight is None: such a layer has q alone, which q_norm_rope takes")
    (tokens, width), num_kv_heads, dim = qkv.shape, kv.num_kv_heads, kv.head_dim
    layers = max(num_layers, 1)
    k_eq_v = heads.v_is_k(width // layers, kv)
    q = empty(qkv, tokens, heads.num_q_heads, dim)
    problem = None
    if tokens:
        problem = Problem(
            heads.num_q_heads, num_kv_heads, dim, heads.num_rotated_pairs, kv.page_size, DTYPE_NAME[qkv.dtype],
            k_eq_v=k_eq_v, num_tokens=tokens, page_heads=kv.page_heads,
            kv_format=kv.format.name, v_norm=v_norm, row_heads=_row_heads(qkv, dim), num_layers=num_layers,
        )  # fmt: skip
    arguments = {
        "q": q, "k_cache": kv.k_cache, "v_cache": kv.v_cache, "qkv": qkv, "q_weight": heads.q_weight,
        "k_weight": heads.k_weight, "inv_freq": heads.inv_freq, "positions": positions, "slot_mapping": slot_mapping,
        "eps": heads.eps, "layer_entries": kv.k_cache.numel() // layers, "num_tokens": tokens,
    }  # fmt: skip
    return Call("qkv_norm_rope", problem, arguments, q)


def _row_heads(x: Tensor, dim: int) -> int:
    """From a row of x [T, W] to the next one, in heads; 0 where they follow each other. Raises ProblemError for rows
    that are no whole heads apart.
    """
    tokens, width = x.shape
    apart = x.stride(0) if tokens > 1 else width
    whole = x.stride(1) == 1 and apart >= width and apart % dim == 0
    require(
        whole, f"rows of {width} columns have strides {x.stride()}; rows lie a whole number of heads of {dim} apart"
    )
    return 0 if apart == width else apart // dim


@op(
    takes={"q_raw": "D[T, W]", "q_weight": "D[HD]", "inv_freq": "fp32[HD // 2]", "positions": "int64[T]"},
    required=("q_raw", "q_weight", "inv_freq", "positions", "num_rotated_pairs", "eps"),
)
def q_norm_rope(q_raw: Tensor, heads: HeadNorms, positions: Tensor) -> Call[Tensor]:
    """As qkv_norm_rope for a layer that owns no cache: q_raw [T, nq * d]. Returns q [T, nq, d]."""
    (tokens, width), dim = q_raw.shape, heads.head_dim
    require(width % dim == 0, f"q_raw has {width} columns, which are no heads of {dim}")
    q = empty(q_raw, tokens, width // dim, dim)
    problem = None
    if tokens:
        problem = Problem(
            q.shape[1], 0, dim, heads.num_rotated_pairs, dtype=DTYPE_NAME[q_raw.dtype], q_only=True, num_tokens=tokens,
            row_heads=_row_heads(q_raw, dim),
        )  # fmt: skip
    arguments = {
        "q": q, "k_cache": None, "v_cache": None, "qkv": q_raw, "q_weight": heads.q_weight, "k_weight": None,
        "inv_freq": heads.inv_freq, "positions": positions, "slot_mapping": None, "eps": heads.eps,
        "layer_entries": 0, "num_tokens": tokens,
    }  # fmt: skip
    return Call("qkv_norm_rope", problem, arguments, q)
