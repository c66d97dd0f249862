"""Every op of every kernel folder as a function on torch tensors, and as torch.ops.kerngen.NAME.

CUDA tensors go to kerngen's kernels, with the winners of the tuning databases (`use_stores` says which). CPU tensors,
fp32 too, are answered by the folder's reference: right, and slow. An op has no gradient. docs/library.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kerngen.ops import library
from kerngen.ops.devices import load_ahead, use_stores
from kerngen.ops.w4 import W4Weights, pack_w4, w4a16_gemm
from kerngen.templates.common.screen.screen import head_screen

if TYPE_CHECKING:  # the ops that ship, with their types; at run time they are found in the folders
    from typing import ParamSpec, TypeVar

    from kerngen.templates.add_norm import op as _add_norm
    from kerngen.templates.attn_decode import op as _attn_decode
    from kerngen.templates.attn_prefill import op as _attn_prefill
    from kerngen.templates.attn_relative import op as _attn_relative
    from kerngen.templates.call import Op
    from kerngen.templates.centroid_head import op as _centroid_head
    from kerngen.templates.check_pages import op as _check_pages
    from kerngen.templates.decode_advance import op as _decode_advance
    from kerngen.templates.decode_inputs import op as _decode_inputs
    from kerngen.templates.decode_layers import op as _decode_layers
    from kerngen.templates.dense_gemv import op as _dense_gemv
    from kerngen.templates.draft_inputs import op as _draft_inputs
    from kerngen.templates.embed import op as _embed
    from kerngen.templates.exchange_best import op as _exchange_best
    from kerngen.templates.exchange_norm import op as _exchange_norm
    from kerngen.templates.gelu_gate import op as _gelu_gate
    from kerngen.templates.glu_conv import op as _glu_conv
    from kerngen.templates.greedy_head import op as _greedy_head
    from kerngen.templates.key_means import op as _key_means
    from kerngen.templates.kv_write import op as _kv_write
    from kerngen.templates.mel_conv import op as _mel_conv
    from kerngen.templates.moe_combine import op as _moe_combine
    from kerngen.templates.moe_route import op as _moe_route
    from kerngen.templates.moe_router import op as _moe_router
    from kerngen.templates.moe_w4a16 import op as _moe_w4a16
    from kerngen.templates.ple_block import op as _ple_block
    from kerngen.templates.ple_inputs import op as _ple_inputs
    from kerngen.templates.qkv_norm_rope import op as _qkv_norm_rope
    from kerngen.templates.qkv_norm_rope_2d import op as _qkv_norm_rope_2d
    from kerngen.templates.residual_norms import op as _residual_norms
    from kerngen.templates.rmsnorm import op as _rmsnorm
    from kerngen.templates.silu import op as _silu
    from kerngen.templates.softcap_argmax import op as _softcap_argmax
    from kerngen.templates.tile_lists import op as _tile_lists
    from kerngen.templates.tile_scores import op as _tile_scores
    from kerngen.templates.w4a16_gemm import op as _w4a16_gemm
    from kerngen.templates.w4a16_norm import op as _w4a16_norm

    P = ParamSpec("P")
    R = TypeVar("R")

    def _run(op: Op[P, R]) -> Callable[P, R]: ...
    def _flat(op: Op[..., R]) -> Callable[..., R]: ...  # whose arguments are the fields of its parameters

    add_norm = _run(_add_norm.add_norm)
    add_norm_functional = _run(_add_norm.add_norm_functional)
    add_post_norm = _run(_add_norm.add_post_norm)
    add_post_norm_functional = _run(_add_norm.add_post_norm_functional)
    add_rmsnorm = _run(_add_norm.add_rmsnorm)
    argmax = _run(_softcap_argmax.argmax)
    attn_decode = _flat(_attn_decode.attn_decode)
    attn_decode_into = _flat(_attn_decode.attn_decode_into)
    attn_decode_qkv = _flat(_attn_decode.attn_decode_qkv)
    attn_decode_raw_q = _flat(_attn_decode.attn_decode_raw_q)
    attn_prefill = _flat(_attn_prefill.attn_prefill)
    attn_prefill_dense = _flat(_attn_prefill.attn_prefill_dense)
    attn_prefill_into = _flat(_attn_prefill.attn_prefill_into)
    attn_relative = _run(_attn_relative.attn_relative)
    bounded_add_norm = _run(_add_norm.bounded_add_norm)
    bounded_add_post_norm = _run(_add_norm.bounded_add_post_norm)
    bounded_gelu_gate = _run(_gelu_gate.bounded_gelu_gate)
    bounded_silu = _run(_silu.bounded_silu)
    centroid_greedy = _run(_centroid_head.centroid_greedy)
    centroid_logits = _run(_centroid_head.centroid_logits)
    check_pages = _flat(_check_pages.check_pages)
    decode_advance = _run(_decode_advance.decode_advance)
    decode_inputs = _run(_decode_inputs.decode_inputs)
    decode_layers = _flat(_decode_layers.decode_layers)
    decode_layers_over_ranks = _flat(_decode_layers.decode_layers_over_ranks)
    dense_gemv = _run(_dense_gemv.dense_gemv)
    draft_inputs = _run(_draft_inputs.draft_inputs)
    draft_inputs_packed = _run(_draft_inputs.draft_inputs_packed)
    embed = _run(_embed.embed)
    embed_packed = _run(_embed.embed_packed)
    exchange_best = _flat(_exchange_best.exchange_best)
    exchange_best_logits = _flat(_exchange_best.exchange_best_logits)
    exchange_best_packed = _flat(_exchange_best.exchange_best_packed)
    exchange_norm = _flat(_exchange_norm.exchange_norm)
    exchange_norm_functional = _flat(_exchange_norm.exchange_norm_functional)
    exchange_pair_norm = _flat(_exchange_norm.exchange_pair_norm)
    exchange_post_norm = _flat(_exchange_norm.exchange_post_norm)
    exchange_post_norm_functional = _flat(_exchange_norm.exchange_post_norm_functional)
    gelu_gate = _run(_gelu_gate.gelu_gate)
    gelu_mul = _run(_gelu_gate.gelu_mul)
    glu_conv = _run(_glu_conv.glu_conv)
    greedy_head = _run(_greedy_head.greedy_head)
    greedy_head_packed = _run(_greedy_head.greedy_head_packed)
    key_means = _flat(_key_means.key_means)
    kv_norm_rope = _flat(_qkv_norm_rope.kv_norm_rope)
    kv_write = _flat(_kv_write.kv_write)
    mel_conv = _run(_mel_conv.mel_conv)
    moe_combine = _run(_moe_combine.moe_combine)
    moe_combine_functional = _run(_moe_combine.moe_combine_functional)
    moe_sum = _run(_moe_combine.moe_sum)
    moe_route = _run(_moe_route.moe_route)
    moe_w4a16 = _run(_moe_w4a16.moe_w4a16)
    ple_block = _run(_ple_block.ple_block)
    ple_inputs = _run(_ple_inputs.ple_inputs)
    moe_router = _run(_moe_router.moe_router)
    q_norm_rope = _flat(_qkv_norm_rope.q_norm_rope)
    qk_norm_rope = _flat(_qkv_norm_rope.qk_norm_rope)
    qkv_norm_rope = _flat(_qkv_norm_rope.qkv_norm_rope)
    qkv_norm_rope_2d = _run(_qkv_norm_rope_2d.qkv_norm_rope_2d)
    residual_norms = _run(_residual_norms.residual_norms)
    rmsnorm = _run(_rmsnorm.rmsnorm)
    silu_gate = _run(_gelu_gate.silu_gate)
    softcap = _run(_softcap_argmax.softcap)
    tile_lists = _flat(_tile_lists.tile_lists)
    tile_scores = _flat(_tile_scores.tile_scores)
    w4a16_gated = _run(_w4a16_gemm.w4a16_gated)
    w4a16_exchange_norm = _flat(_w4a16_norm.w4a16_exchange_norm)
    w4a16_norm = _run(_w4a16_norm.w4a16_norm)

__all__ = [
    "W4Weights",
    "add_norm",
    "add_norm_functional",
    "add_post_norm",
    "add_post_norm_functional",
    "add_rmsnorm",
    "argmax",
    "attn_decode",
    "attn_decode_into",
    "attn_decode_qkv",
    "attn_decode_raw_q",
    "attn_prefill",
    "attn_prefill_dense",
    "attn_prefill_into",
    "attn_relative",
    "bounded_add_norm",
    "bounded_add_post_norm",
    "bounded_gelu_gate",
    "bounded_silu",
    "centroid_greedy",
    "centroid_logits",
    "check_pages",
    "decode_advance",
    "decode_inputs",
    "decode_layers",
    "decode_layers_over_ranks",
    "dense_gemv",
    "draft_inputs",
    "draft_inputs_packed",
    "embed",
    "embed_packed",
    "exchange_best",
    "exchange_best_logits",
    "exchange_best_packed",
    "exchange_norm",
    "exchange_norm_functional",
    "exchange_pair_norm",
    "exchange_post_norm",
    "exchange_post_norm_functional",
    "gelu_gate",
    "gelu_mul",
    "glu_conv",
    "greedy_head",
    "greedy_head_packed",
    "head_screen",
    "key_means",
    "kv_norm_rope",
    "kv_write",
    "load_ahead",
    "mel_conv",
    "moe_combine",
    "moe_combine_functional",
    "moe_route",
    "moe_router",
    "moe_sum",
    "moe_w4a16",
    "pack_w4",
    "ple_block",
    "ple_inputs",
    "q_norm_rope",
    "qk_norm_rope",
    "qkv_norm_rope",
    "qkv_norm_rope_2d",
    "residual_norms",
    "rmsnorm",
    "silu_gate",
    "softcap",
    "tile_lists",
    "tile_scores",
    "use_stores",
    "w4a16_exchange_norm",
    "w4a16_gated",
    "w4a16_gemm",
    "w4a16_norm",
]


def _expose() -> None:
    for name, function in library.functions().items():
        globals().setdefault(name, function)


def __getattr__(name: str) -> Callable[..., Any]:
    """An op of a kernel folder that was named after this module was imported."""
    if not name.startswith("_"):
        _expose()
        if name in globals():
            found: Callable[..., Any] = globals()[name]
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_expose()
