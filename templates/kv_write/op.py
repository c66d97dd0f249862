"""Tensors to calls of kv_write."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import VEC, require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.kv_write.spec import Problem
from kerngen.templates.values import KVView


@op(
    mutates=("k_cache", "v_cache"),
    takes={
        "k": "D[T, NKV, HD]",
        "v": "D[T, NKV, HD]",
        "k_cache": "D[P, NKV, S, HD]",
        "v_cache": "D[P, NKV, S, HD]",
        "slot_mapping": "int64[T]",
    },
    required=("k", "v", "k_cache", "v_cache", "slot_mapping"),
)
def kv_write(k: Tensor, v: Tensor, kv: KVView, slot_mapping: Tensor) -> Call[None]:
    """Finished K and V of new tokens into the caches.

    k, v [T, nkv, d], whose tokens may lie apart, by a multiple of 8 elements, as parts of a projection do. Those of
    token t go to row slot_mapping[t] = page * page_size + row of the caches [num_pages, nkv, page_size, d]; a negative
    slot writes nothing. Caches lie as attn_decode takes them. slot_mapping [T] int64. Returns nothing.
    """
    kv.require_plain()
    tokens, heads, dim = k.shape
    for name, rows in (("k", k), ("v", v)):
        apart, between, step = rows.stride()
        in_vectors = step == 1 and (heads == 1 or between == dim) and (tokens < 2 or apart % VEC == 0)
        lie = f"heads of a token follow each other, and tokens are a multiple of {VEC} elements apart"
        require(in_vectors, f"{name} has strides {rows.stride()}: {lie}")
    problem = None
    if tokens:
        problem = Problem(heads, dim, kv.page_size, DTYPE_NAME[k.dtype], tokens, kv.page_heads)
    arguments = {
        "k_cache": kv.k_cache, "v_cache": kv.v_cache, "k": k, "v": v, "slot_mapping": slot_mapping,
        "k_stride": k.stride(0), "v_stride": v.stride(0), "num_tokens": tokens,
    }  # fmt: skip
    return Call("kv_write", problem, arguments, None)
