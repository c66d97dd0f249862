"""Tensors to calls of attn_relative."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.attn_relative.spec import Problem
from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty


@op(
    takes={
        "qkv": "D[T, W]", "q_scale": "fp32[HD]", "relative_keys": "fp32[N, K, HD]", "bounds": "fp32[4, 2]",
    },
)  # fmt: skip
def attn_relative(
    qkv: Tensor,
    q_scale: Tensor,
    relative_keys: Tensor,
    bounds: Tensor,
    k_scale: float,
    logit_cap: float,
    seq_len: int,
) -> Call[Tensor]:
    """Attention of each token to itself and those less than K - 1 before it, of its sound of seq_len tokens, in fp32.

    qkv [T, 3 * N * HD] as q | k | v. A score is (q * q_scale) . (k * k_scale + relative key), logit_cap * tanh(score /
    logit_cap) what softmax takes. q_scale [HD]; relative_keys [N, K, HD], of distances from K - 1, which none sees, to
    0. bounds [4, 2], numbers of qkv's dtype or infinite: what q, k, v and the result are clamped to, lowest and
    highest. Returns [T, N * HD].
    """
    (tokens, width), (heads, rows, dim) = qkv.shape, relative_keys.shape
    require(width == 3 * heads * dim, f"qkv has {width} columns, which are no q, k and v of {heads} heads of {dim}")
    require(seq_len > 0 and tokens % seq_len == 0, f"qkv has {tokens} rows, which are no sounds of {seq_len} tokens")
    out = empty(qkv, tokens, heads * dim)
    problem = Problem(heads, dim, rows - 1, DTYPE_NAME[qkv.dtype], tokens) if tokens else None
    arguments = {
        "out": out, "qkv": qkv, "q_scale": q_scale, "relative_keys": relative_keys, "bounds": bounds,
        "k_scale": k_scale, "logit_cap": logit_cap, "num_tokens": tokens, "seq_len": seq_len,
    }  # fmt: skip
    return Call("attn_relative", problem, arguments, out)
