"""Tensors to calls of decode_chain."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.row_spec import require
from kerngen.templates.common.row_torch import DTYPE_NAME, empty
from kerngen.templates.common.w4_tiling import STRIP
from kerngen.templates.decode_chain.spec import Problem


def _w4(name: str, strips: str, tiles: str) -> dict[str, str]:
    return {f"{name}_packed": f"int32[{strips}, {tiles}, 32, 4]", f"{name}_scales": f"D[{strips}, G{name}, 32]"}


@op(
    mutates=("residual",),
    takes={
        "residual": "R[1, 32 * H]",
        "attended": "D[1, 32 * A]",
        **_w4("out", "H", "A"),
        "post_attention_weight": "D[32 * H]",
        "pre_ffn_weight": "D[32 * H]",
        **_w4("gate_up", "2 * I", "H"),
        **_w4("down", "H", "I"),
        "post_ffn_weight": "D[32 * H]",
        "layer_scalar": "D[1]",
        "next_weight": "D[32 * H]",
        **_w4("qkv", "Q", "H"),
    },
)
def decode_chain(
    residual: Tensor,
    attended: Tensor,
    out_packed: Tensor,
    out_scales: Tensor,
    post_attention_weight: Tensor,
    pre_ffn_weight: Tensor,
    gate_up_packed: Tensor,
    gate_up_scales: Tensor,
    down_packed: Tensor,
    down_scales: Tensor,
    post_ffn_weight: Tensor,
    layer_scalar: Tensor,
    next_weight: Tensor,
    qkv_packed: Tensor | None,
    qkv_scales: Tensor | None,
    eps: float,
) -> Call[Tensor]:
    """A dense layer of one token from attention's output on, and the next layer's projections. sm90 and newer.

    residual [1, H] in attended's dtype or fp32, updated in place; attended [1, A]. Matrices as w4a16_gemm's, packed
    [N / 32, K / 32, 32, 4] int32 and scales [N / 32, K / group_size, 32]: out [H, A], gate_up [2 I, H] as
    w4a16_gated's, down [H, I], and qkv [Q, H] or None twice. Norms [H]; layer_scalar [1]. Returns [1, Q], or without
    qkv the normed row [1, H]. The formulas: decode_chain's Problem. Every step is rounded as the model rounds it.
    """
    require(len(residual) == 1, f"decode_chain takes one token, not {len(residual)}")
    require((qkv_packed is None) == (qkv_scales is None), "qkv_packed and qkv_scales belong together")
    matrices = [("out", out_packed, out_scales), ("gate_up", gate_up_packed, gate_up_scales)]
    matrices.append(("down", down_packed, down_scales))
    if qkv_packed is not None and qkv_scales is not None:
        matrices.append(("qkv", qkv_packed, qkv_scales))
    group_sizes = {name: packed.shape[1] * STRIP // scales.shape[1] for name, packed, scales in matrices}
    group_size = group_sizes["out"]
    require(all(g == group_size for g in group_sizes.values()), f"decode_chain takes one group size, not {group_sizes}")
    hidden, inner = residual.shape[1], down_packed.shape[1] * STRIP
    columns = 0 if qkv_packed is None else qkv_packed.shape[0] * STRIP
    problem = Problem(
        hidden, attended.shape[1], inner, columns, group_size,
        DTYPE_NAME[attended.dtype], DTYPE_NAME[residual.dtype],
    )  # fmt: skip
    out = empty(attended, 1, columns or hidden)
    arguments = {
        "residual_out": residual, "out": out, "residual": residual, "attended": attended, "out_packed": out_packed,
        "out_scales": out_scales, "post_attention_weight": post_attention_weight, "pre_ffn_weight": pre_ffn_weight,
        "gate_up_packed": gate_up_packed, "gate_up_scales": gate_up_scales, "down_packed": down_packed,
        "down_scales": down_scales, "post_ffn_weight": post_ffn_weight,
        "layer_scalar": layer_scalar,
        "next_weight": next_weight, "qkv_packed": qkv_packed, "qkv_scales": qkv_scales, "eps": eps,
    }  # fmt: skip
    return Call("decode_chain", problem, arguments, out)
