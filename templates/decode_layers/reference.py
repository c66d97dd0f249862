"""The layers' steps in torch, each computed in fp32 and rounded where the model rounds.

Source: Gemma4TextModel.forward and Gemma4TextDecoderLayer.forward in transformers 5.22, modeling_gemma4.py. Every
product, norm, head, activation and sum is a tensor of the model's dtype, and so is attention's output; the stream alone
may be kept in fp32. Heads and attention: common/attention/*_torch.py. Router and
experts are moe_router's and moe_w4a16's references, and the experts' sum is as in moe_combine's: of rounded products,
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, cat

from kerngen.templates.common.attention.attention_torch import attend, first_key, gather_pages
from kerngen.templates.common.attention.heads_torch import new_heads, written_both
from kerngen.templates.common.attention.kv_formats_torch import all_values, code_flip
from kerngen.templates.common.rows.spec import TAP_SCALE, has_codes
from kerngen.templates.common.rows.torch_rows import (
    TORCH_DTYPE,
    add_normed,
    add_per_layer,
    gelu_gated,
    rms_norm,
    rounded,
    tolerance_of_flips,
)
from kerngen.templates.common.w4.pack import dequantize, separate, unpack
from kerngen.templates.decode_layers.spec import Problem, layer_tensors
from kerngen.templates.kernel import Tolerance
from kerngen.templates.moe_router import spec as moe_router
from kerngen.templates.moe_router.reference import expected as route
from kerngen.templates.moe_w4a16 import spec as moe_w4a16
from kerngen.templates.moe_w4a16.reference import expected as multiply
from kerngen.templates.values import KV_FORMATS


def expected(problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """out [1 + taps, hidden], and if any layer owns K and V k_caches and v_caches, a tuple of a layer each, in fp32,
    holding values of their dtypes, or in their format where that is not plain (`values`). Layers without K and V of
    their own give the caches that they attend to. With ranks as `expected_of` where every rank has these layers: what a
    launch gives that is its own peers (cases.py).
    """
    return expected_of(problem, [inputs] * problem.ranks)[0]


def expected_of(problem: Problem, inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of each rank, of the inputs of all: residual, norms, routers and scalars, and an MLP that is whole, are
    those of the first.
    """
    p, first, eps = problem, inputs[0], inputs[0]["eps"]
    parts = {id(given): _Part(p, given) for given in inputs}  # ranks that have the same make the same

    def summed(made: Callable[..., Tensor], *of: Any) -> Tensor:
        each = {key: made(part, *of) for key, part in parts.items()}
        total = each[id(first)]
        for given in inputs[1:]:
            total = total + each[id(given)]
        return rounded(total, p.dtype)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rounded(rms_norm(x, weight, eps), p.dtype)

    def add(stream: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return add_normed(stream, x, weight, eps, p.dtype, p.residual_dtype)

    stream, tapped = first["residual"].float(), []
    for index in range(len(p.layers)):
        w = _tensors(p, first, index)
        stream = add(stream, summed(_Part.attended, index, norm(stream, w["input_norm"])), w["post_attention_norm"])
        x = norm(stream, w["pre_ffn_norm"])
        of_mlp = rounded(parts[id(first)].mlp(index, x), p.dtype) if p.mlp_is_whole else summed(_Part.mlp, index, x)
        if p.num_experts:
            routed = summed(_Part.routed, index, stream, w)
            of_mlp = rounded(norm(of_mlp, w["dense_norm"]) + norm(routed, w["expert_norm"]), p.dtype)
        stream = add(stream, of_mlp, w["post_ffn_norm"])
        if p.ple_width:
            of_ple = w["ple_gate"], w["ple_projection"], w["post_ple_norm"]
            stream = add_per_layer(stream, first["ple"][:, index], *of_ple, eps, p.dtype, p.residual_dtype)
        stream = rounded(stream * w["layer_scalar"].float(), p.residual_dtype)
        if index in p.tapped:
            tapped.append(rounded(rounded(stream * TAP_SCALE[p.dtype], p.residual_dtype), p.dtype))
    out = cat([norm(stream, first["final_norm"]), *tapped])
    return [{"out": out} | parts[id(given)].written() for given in inputs]


class _Part:
    """What a rank makes of its inputs, layer after layer."""

    def __init__(self, p: Problem, inputs: dict[str, Any]) -> None:
        self.p, self.inputs = p, inputs
        self.caches: list[tuple[Tensor, Tensor]] = []
        self.last: dict[str, tuple[Tensor, Tensor]] = {}  # caches, with the new token, by the kind of layer

    def attended(self, index: int, x: Tensor) -> Tensor:
        p, inputs, letter, last = self.p, self.inputs, self.p.layers[index], self.last
        w = _tensors(p, inputs, index)
        q, k, v = _heads(p, letter, rounded(_product(x, w, "qkv"), p.dtype), w, inputs)
        if letter.islower():
            slots = _given(inputs, letter, "slots").where(inputs["kv_lens"] > 0, -1)
            old = inputs["k_caches"][index], inputs["v_caches"][index]
            made = written_both(*old, slots, k, v, p.kv_format_of(letter))
            last[letter] = made[0], made[1]
        elif not p.makes_kv:
            last[letter.lower()] = inputs["k_caches"][index], inputs["v_caches"][index]
        self.caches.append(last[letter.lower()])
        return _product(_attended(p, letter, q, self.caches[-1], inputs), w, "out")

    def mlp(self, index: int, x: Tensor) -> Tensor:
        p, w = self.p, _tensors(self.p, self.inputs, index)
        gate, up = rounded(_product(x, w, "gate_up", gated=True), p.dtype).chunk(2, dim=-1)
        return _product(gelu_gated(gate, up, p.dtype), w, "down")

    def routed(self, index: int, stream: Tensor, router: dict[str, Any]) -> Tensor:
        """[1, hidden]: what the experts give that `router` chooses, by their weights."""
        p, w = self.p, _tensors(self.p, self.inputs, index)
        given = {name: router[name] for name in ("router_scale", "router", "per_expert_scale")}
        asked = moe_router.Problem(p.hidden, p.num_experts, p.top_k, p.dtype, p.residual_dtype, 1)
        eps = self.inputs["eps"]
        chosen = route(asked, given | {"residual": stream, "pre_norm": router["pre_expert_norm"], "eps": eps})
        experts = moe_w4a16.Problem(p.num_experts, p.top_k, p.hidden, p.expert_inner, p.group_size, p.dtype, 1)
        matrices = {
            "gate_up": w["expert_gate_up_packed"], "gate_up_scales": w["expert_gate_up_scales"],
            "down": w["expert_down_packed"], "down_scales": w["expert_down_scales"],
        }  # fmt: skip
        by_expert = multiply(experts, matrices | {"x": chosen["x"], "topk_ids": chosen["topk_ids"].int()})["y"]
        return (rounded(by_expert, p.dtype) * chosen["topk_weights"][..., None]).sum(1)

    def written(self) -> dict[str, Any]:
        if not self.p.makes_kv:
            return {}
        k_caches, v_caches = zip(*self.caches, strict=True)
        return {"k_caches": k_caches, "v_caches": v_caches}


def _tensors(p: Problem, inputs: dict[str, Any], index: int) -> dict[str, Any]:
    """Those of layer `index`, by name."""
    names = layer_tensors(p.num_experts)
    begin = index * len(names)
    return dict(zip(names, inputs["layers"][begin : begin + len(names)], strict=True))


def _given(inputs: dict[str, Any], letter: str, name: str) -> Tensor:
    """Of two arguments the one for a layer of this kind: NAME, or full_NAME."""
    tensor: Tensor = inputs[name if letter in "sS" else f"full_{name}"]
    return tensor


def _product(x: Tensor, w: dict[str, Any], name: str, gated: bool = False) -> Tensor:
    packed, scales = unpack(w[f"{name}_packed"], w[f"{name}_scales"])
    dense = dequantize(separate(packed), separate(scales)) if gated else dequantize(packed, scales)
    return x @ dense.T


def _heads(
    p: Problem, letter: str, raw: Tensor, w: dict[str, Any], inputs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [1, heads, head_dim] of the projections `raw`; no k and v for a layer that owns none."""
    is_full = letter in "fF"
    given = {
        "q_weight": w["q_norm"], "k_weight": w["k_norm"], "inv_freq": _given(inputs, letter, "inv_freq"),
        "positions": inputs["positions"], "eps": inputs["eps"],
    }  # fmt: skip
    return new_heads(
        raw, p.num_q_heads, p.heads_of(letter)[0] if letter.islower() else 0, letter == "f" and p.k_eq_v,
        p.num_full_rotated_pairs if is_full else p.num_rotated_pairs, p.dtype, given,
        shared=KV_FORMATS[p.kv_format_of(letter)].is_shared,
    )  # fmt: skip


def _attended(p: Problem, letter: str, q: Tensor, caches: tuple[Tensor, Tensor], inputs: dict[str, Any]) -> Tensor:
    """[1, num_q_heads * head_dim]: what the token sees, rounded."""
    (kv_len,), window = inputs["kv_lens"].tolist(), 0 if letter in "fF" else p.window
    pages = _given(inputs, letter, "block_table")[0]
    form, dtype, first = p.kv_format_of(letter), TORCH_DTYPE[p.dtype], first_key(kv_len, 1, window)
    k, v = (gather_pages(cache, pages, first, kv_len, form, dtype, keys=keys)
            for cache, keys in zip(caches, (True, False), strict=True))  # fmt: skip
    return rounded(attend(q, k, v, kv_len, window=window).flatten(1), p.dtype)


def values(problem: Problem, name: str, tensor: Tensor) -> Tensor:
    """What an output holds, in the caches' format or not, and without TAP_SCALE; a cache's rows tell whose layers' it
    is.
    """
    p = problem
    if name == "out":
        return cat((tensor[:1], tensor[1:] / TAP_SCALE[p.dtype]))
    if p.kv_format == "plain":
        return tensor
    is_full = tensor.shape[3] == KV_FORMATS[p.kv_format].row_entries(p.full_head_dim)
    return all_values(tensor, p.kv_format_of("f" if is_full else "s"), TORCH_DTYPE[p.dtype])


def tolerance(problem: Problem) -> Tolerance:
    """cases.py keeps every row near a deviation of 1. A flip in a row that is multiplied next reaches all that follows,
    and so does one of attention's weights, which a kernel may round. With other sums and rounded weights out was off by
    up to 4 units in the last place of 1 behind one layer of the cases, 11 behind two, and 23 behind more. Of the
    experts' products the kernel rounds the sum alone. Where caches hold codes the token's own keys may have others, and
    P is rounded by scales.
    """
    codes = 2 * has_codes(problem.kv_format)
    return tolerance_of_flips(problem.dtype, 4.0, 2 + 2 * min(3, len(problem.layers)) + codes)


def tolerance_of(problem: Problem, name: str) -> Tolerance:
    """Of the caches too: a rounding that flips may flip a code."""
    plain = tolerance(problem)
    is_code = name != "out" and has_codes(problem.kv_format)
    return replace(plain, atol=plain.atol + _flip(problem)) if is_code else plain


def _flip(p: Problem) -> float:
    """By which a value differs where its code is the next one, in whichever cache."""
    return max(code_flip(KV_FORMATS[p.kv_format_of(kind)]) for kind in dict.fromkeys(p.layers))
