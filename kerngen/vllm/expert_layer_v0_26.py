"""vLLM 0.26's Gemma-4 layers with experts, whose routing, and whose end behind them, are one launch each.

vLLM's runner of the experts (MoERunner) loads them and stays where it is; its forward is not called. Source of what is
computed: vLLM 0.26, vllm/model_executor/models/gemma4.py, rounded where transformers rounds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.models import gemma4

from kerngen.errors import ProblemError
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.moe_combine.spec import Problem as EndOfLayer
from kerngen.templates.moe_router.spec import Problem as Router
from kerngen.vllm.ahead import AHEAD
from kerngen.vllm.linear import target
from kerngen.vllm.moe_v0_26 import KerngenMoEMethod, multiply


def end_of_layer(
    layer: gemma4.Gemma4DecoderLayer, residual: Tensor, dense: Tensor, next_norm: Any | None
) -> tuple[Tensor, Tensor | None]:
    """A layer from its MLP's output `dense` on, as its forward returns: the stream's norm by `next_norm`, and the
    stream; without that norm the stream and None.

    residual: the stream after attention, which the experts read too. All [T, hidden] in the model's dtype.
    """
    eps = layer.router.norm.variance_epsilon  # of all norms: the configuration has one
    experts = layer.moe.experts
    ids, weights, x = torch.ops.kerngen.moe_router(
        residual, layer.router.scale.data, layer.router.proj.weight.data, layer.moe.per_expert_scale.data,
        layer.pre_feedforward_layernorm_2.weight.data, experts.moe_config.experts_per_token, eps,
    )  # fmt: skip
    routed = multiply(experts.routed_experts, x, ids)
    last = layer.post_feedforward_layernorm  # and in place of none behind it: what that launch always gives is dropped
    stream, normed = torch.ops.kerngen.moe_combine_functional(
        residual, dense, routed, weights, layer.post_feedforward_layernorm_1.weight.data,
        layer.post_feedforward_layernorm_2.weight.data, last.weight.data,
        layer.layer_scalar, (last if next_norm is None else next_norm).weight.data, eps,
    )  # fmt: skip
    return (stream, None) if next_norm is None else (normed, stream)


def serve(layer: gemma4.Gemma4DecoderLayer, config: VllmConfig) -> str | None:
    """Have what `end_of_layer` asks loaded ahead, in place of the experts' sum alone. Returns why a layer's end cannot
    be that, or None: then it can.
    """
    if (why := _why_not(layer, config)) is not None:
        return why
    experts = layer.moe.experts
    experts.routed_experts.quant_method.leave_sum()
    for kernel, problem in _problems(layer, config.model_config.dtype):
        AHEAD.ask(kernel, problem)
    # Without hoisted names (before torch 2.11) vLLM's operator counts its calls to know its layer by this list.
    config.compilation_config.static_all_moe_layers.remove(experts.layer_name)
    return None


def _why_not(layer: gemma4.Gemma4DecoderLayer, config: VllmConfig) -> str | None:
    """What vLLM's runner may do beside the experts is not done by `end_of_layer`. The part `moe` refuses other ranks'
    tokens, balanced experts (EPLB) and adapters; vLLM's Gemma-4 has no shared experts and no transforms around them.
    """
    experts = layer.moe.experts
    if type(experts) is not MoERunner or not isinstance(experts.routed_experts.quant_method, KerngenMoEMethod):
        return "their experts are not kerngen's"
    if experts.moe_config.tp_size > 1:
        return "their experts are summed over ranks before a norm (tensor parallelism)"
    if type(experts.router) is not CustomRoutingRouter:
        return f"vLLM routes by {type(experts.router).__name__}"
    if config.model_config.enable_return_routed_experts:
        return "vLLM is asked which experts it chose (--enable-return-routed-experts)"
    if layer.per_layer_input_gate is not None:
        return "per-layer inputs come between the experts and the next layer"
    try:
        problems = _problems(layer, config.model_config.dtype)
        return next(filter(None, (find_kernel(kernel).why_unsupported(p, target()) for kernel, p in problems)), None)
    except ProblemError as e:
        return e.message


def _problems(layer: gemma4.Gemma4DecoderLayer, dtype: torch.dtype) -> tuple[tuple[str, Any], ...]:
    """(kernel, problem) of what `end_of_layer` asks beside the experts. Raises ProblemError for shapes and dtypes that
    they do not take.
    """
    moe, name = layer.moe.experts.moe_config, DTYPE_NAME.get(dtype, str(dtype))
    hidden, top_k = layer.hidden_size, moe.experts_per_token
    return (
        ("moe_router", Router(hidden, moe.num_experts, top_k, name, name)),
        ("moe_combine", EndOfLayer(hidden, top_k, name, name)),
    )
