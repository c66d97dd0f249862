"""Tensors to calls of decode_chain."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.row_spec import require
from kerngen.templates.common.row_torch import DTYPE_NAME, empty
from kerngen.templates.common.w4_tiling import STRIP
from kerngen.templates.decode_chain.spec import Problem


def _w4(name: str, strips: str, tiles: str) -> dict[str, str]:
    groups = f"G{name}"  # per row of W: its own name, since rows differ in length
    return {f"{name}_packed": f"int32[{strips}, {tiles}, 32, 4]", f"{name}_scales": f"D[{strips}, {groups}, 32]"}


_TAKES = {
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
}


@op(mutates=("residual",), takes=_TAKES)
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
    """A dense layer of one token from attention's output on, and the next layer's projection.

    residual [1, H] in attended's dtype or fp32, updated in place; attended [1, A]. Weights as w4a16_gemm's, packed
    [N / 32, K / 32, 32, 4] int32 and scales [N / 32, K / group_size, 32]: out [H, A], gate_up [2 I, H] as w4a16_gated's,
    down [H, I], qkv [Q, H] or None. Norms [H]; layer_scalar [1]. Returns [1, Q], or the normed row [1, H] without qkv.
    The formulas: decode_chain's Problem. Every step is rounded as the model rounds it. sm90 and newer.
    """
    return _call(locals() | dict.fromkeys(("gate", "ple", "projection", "post_ple_weight")))


@op(
    mutates=("residual",),
    takes=_TAKES | {"gate": "D[P, 32 * H]", "ple": "D[1, P]", "projection": "D[32 * H, P]", "post_ple_weight": "D[32 * H]"},
)
def decode_chain_ple(
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
    gate: Tensor,
    ple: Tensor,
    projection: Tensor,
    post_ple_weight: Tensor,
    layer_scalar: Tensor,
    next_weight: Tensor,
    qkv_packed: Tensor | None,
    qkv_scales: Tensor | None,
    eps: float,
) -> Call[Tensor]:
    """As decode_chain, for a layer with per-layer inputs: gate [P, H], ple [1, P], projection [H, P]."""
    return _call(locals())


def _call(given: dict[str, Any]) -> Call[Tensor]:
    """given: the arguments of decode_chain_ple, None for what a layer has not."""
    residual, attended, gate, qkv = (given[name] for name in ("residual", "attended", "gate", "qkv_packed"))
    (tokens, hidden), inner = residual.shape, given["down_packed"].shape[1] * STRIP
    require(tokens == 1, f"decode_chain takes one token, not {tokens}")
    group_sizes = {
        name: given[f"{name}_packed"].shape[1] * STRIP // given[f"{name}_scales"].shape[1]
        for name in ("out", "gate_up", "down", *(("qkv",) if qkv is not None else ()))
    }
    require(len(set(group_sizes.values())) == 1, f"decode_chain takes one group size, not {group_sizes}")
    columns = 0 if qkv is None else qkv.shape[0] * STRIP
    problem = Problem(
        hidden, attended.shape[1], inner, columns, 0 if gate is None else gate.shape[0], group_sizes["out"],
        DTYPE_NAME[attended.dtype], DTYPE_NAME[residual.dtype],
    )  # fmt: skip
    out = empty(attended, 1, columns or hidden)
    return Call("decode_chain", problem, given | {"residual_out": residual, "out": out}, out)
