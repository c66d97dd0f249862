"""Tensors to calls of attn_decode."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.attn_decode.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.values import AttnBatch, HeadNorms, KVView

# What the ops share: the cache and where a sequence lies in it; what turns heads of a projection.
_CACHED = {
    "k_cache": "D[P, NKV, S, HD]",
    "v_cache": "D[P, NKV, S, HD]",
    "block_table": "int32[B, M]",
    "kv_lens": "int32[B]",
}
_HEADS = {"q_weight": "D[HD]", "inv_freq": "fp32[HD // 2]", "positions": "int64[B * q_len]"}
_OPTIONAL = ("window", "max_kv_len", "sm_scale", "logit_cap")


@op(takes={"q": "D[B * q_len, NQ, HD]"} | _CACHED, required=("q", *_CACHED, "q_len"), optional=_OPTIONAL)
def attn_decode(q: Tensor, kv: KVView, batch: AttnBatch, sm_scale: float = 1.0, logit_cap: float = 0.0) -> Call[Tensor]:
    """softmax(q k^T * sm_scale) v for `q_len` new tokens of each sequence, which the cache already holds.

    q [B * q_len, nq, d]; caches [num_pages, nkv, page_size, d], contiguous, or the same heads of each page of a
    larger tensor (KVView.page_heads); block_table [B, max_pages] int32; kv_lens [B] int32, the new tokens included.
    Query i of a sequence sits at kv_len - q_len + i and sees keys at or before it, or under a full mask all keys, where
    kv_len is at least q_len. It sees those that are less than `window` before it if
    window > 0. max_kv_len: no kv_len is longer, which decides the splits of KV; 0 for what the block table holds.
    logit_cap: 0 for none. Returns [B * q_len, nq, d]; a query that sees no key gives zeros.
    """
    return _call(q, empty(q, *q.shape), "q", None, kv, batch, sm_scale, logit_cap)


@op(
    mutates=("out",),
    takes={"out": "D[B * q_len, NQ, HD]", "q": "D[B * q_len, NQ, HD]"} | _CACHED,
    required=("out", "q", *_CACHED, "q_len"),
    optional=_OPTIONAL,
)
def attn_decode_into(
    out: Tensor, q: Tensor, kv: KVView, batch: AttnBatch, sm_scale: float = 1.0, logit_cap: float = 0.0
) -> Call[None]:
    """As attn_decode, with its result in out [B * q_len, nq, d], which is contiguous. Returns nothing."""
    return _call(q, out, "q", None, kv, batch, sm_scale, logit_cap).without_result()


@op(
    mutates=("k_cache", "v_cache"),
    takes={"qkv": "D[B * q_len, W]"} | _HEADS | {"k_weight": "D[HD]", "slot_mapping": "int64[B * q_len]"} | _CACHED,
    required=(
        "qkv", "q_weight", "k_weight", "inv_freq", "positions", "k_cache", "v_cache", "slot_mapping", "block_table",
        "kv_lens", "num_q_heads", "num_rotated_pairs", "eps", "q_len",
    ),
    optional=_OPTIONAL,
)  # fmt: skip
def attn_decode_qkv(
    qkv: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch, sm_scale: float = 1.0, logit_cap: float = 0.0
) -> Call[Tensor]:
    """qkv_norm_rope and then attn_decode, in one: their arguments, and the latter's result.

    slot_mapping[t] must be the row that the block table names for the token's position (kv_len - q_len + i for token i
    of a sequence), or negative. A token at a negative position is not written. What one sequence of the call writes no
    other may read: pages that sequences share hold older tokens only.
    """
    require(heads.k_weight is not None and batch.slot_mapping is not None, "k_weight or slot_mapping is None")
    source = "qk" if heads.v_is_k(qkv.shape[1], kv) else "qkv"
    out = empty(qkv, qkv.shape[0], heads.num_q_heads, kv.head_dim)
    return _call(qkv, out, source, heads, kv, batch, sm_scale, logit_cap)


@op(
    takes={"q_raw": "D[B * q_len, W]"} | _HEADS | _CACHED,
    required=("q_raw", *_HEADS, *_CACHED, "num_rotated_pairs", "eps", "q_len"),
    optional=_OPTIONAL,
)
def attn_decode_raw_q(
    q_raw: Tensor, heads: HeadNorms, kv: KVView, batch: AttnBatch, sm_scale: float = 1.0, logit_cap: float = 0.0
) -> Call[Tensor]:
    """q_norm_rope and then attn_decode, in one, for a layer that owns no cache: their arguments and its result."""
    (tokens, width), dim = q_raw.shape, kv.head_dim
    require(width % dim == 0, f"q_raw has {width} columns, which are no heads of {dim}")
    return _call(q_raw, empty(q_raw, tokens, width // dim, dim), "raw_q", heads, kv, batch, sm_scale, logit_cap)


def _call(
    q: Tensor,
    out: Tensor,
    source: str,
    heads: HeadNorms | None,
    kv: KVView,
    batch: AttnBatch,
    sm_scale: float,
    logit_cap: float,
) -> Call[Tensor]:
    """source: what `q` holds, as Problem has it. heads: None where it holds q itself."""
    kv.require_known()
    require(heads is None or batch.positions is not None, "positions is None: RoPE turns q and k by them")
    require(batch.cu_seqlens_q is None, "attn_decode has one q_len for all: attn_prefill takes ragged queries")
    batch.mask.require_no_tensors()
    sequences, max_pages = batch.block_table.shape
    page_size = kv.page_size
    problem = Problem(
        kv.head_dim, out.shape[1], kv.num_kv_heads, batch.q_len, page_size, batch.mask.window, DTYPE_NAME[q.dtype],
        logit_cap > 0, sequences, batch.keys_that_matter(page_size), source,
        heads.num_rotated_pairs if heads else 0, kv.page_heads, kv.format.name, batch.mask.kind == "causal",
    ) if sequences else None  # fmt: skip
    owns_kv = source in ("qk", "qkv")
    k_weight = heads and (heads.k_weight if owns_kv else heads.folded(kv.format))
    arguments = {
        "out": out, "q": q, "k_cache": kv.k_cache, "v_cache": kv.v_cache, "block_table": batch.block_table,
        "kv_lens": batch.kv_lens, "q_weight": heads and heads.q_weight,
        "k_weight": k_weight, "inv_freq": heads and heads.inv_freq,
        "positions": batch.positions if heads else None, "slot_mapping": batch.slot_mapping if owns_kv else None,
        "sm_scale": sm_scale, "logit_cap": logit_cap, "eps": heads.eps if heads else 0.0, "batch": sequences,
        "max_pages": max_pages,
    }  # fmt: skip
    return Call("attn_decode", problem, arguments, out)
