"""vLLM 0.26's Gemma-4 with kerngen's kernels around its attention.

The modules, their parameters and how a checkpoint is loaded are vLLM's; layers that kerngen can serve get another
forward after vLLM has made them. Source of what they compute: vLLM 0.26, vllm/model_executor/models/gemma4.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.models import gemma4

from kerngen.errors import ProblemError
from kerngen.templates import find_kernel
from kerngen.templates.add_norm.spec import Problem
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.vllm import expert_layer_v0_26 as expert_layer
from kerngen.vllm import self_attention_v0_26 as self_attention
from kerngen.vllm.ahead import AHEAD
from kerngen.vllm.exchange_v0_26 import share
from kerngen.vllm.linear import kernel_of, target

log = logging.getLogger("vllm.kerngen")


class Gemma4ForCausalLM(gemma4.Gemma4ForCausalLM):
    """vLLM's, whose decoder layers are `DecoderLayer` where kerngen serves them."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _serve(self.model, vllm_config)


class Model(gemma4.Gemma4Model):
    """vLLM's, whose layers may hand on the stream as `residual`, with the next layer's normed input before it."""

    def _maybe_add_hidden_state(
        self, aux_hidden_states: list[Tensor], layer_idx: int, hidden_states: Tensor, residual: Tensor | None
    ) -> list[Tensor]:
        """As vLLM's, of the stream, which a drafter taps."""
        stream = hidden_states if residual is None else residual
        added: list[Tensor] = super()._maybe_add_hidden_state(aux_hidden_states, layer_idx, stream, None)
        return added


class DecoderLayer(gemma4.Gemma4DecoderLayer):
    """vLLM's, with each post-norm, the residual, the layer's scalar and the norm that follows in one launch.

    next_norm: the next layer's input norm, if that layer is one of these; else None. has_expert_end: `expert_layer`
    serves its experts and what follows. attention_is_summand, mlp_is_summand: o_proj and down_proj give this rank's
    summand, which is summed with the norms behind it.
    """

    next_norm: Any = None
    has_expert_end: bool = False
    attention_is_summand: bool = False
    mlp_is_summand: bool = False

    def forward(
        self,
        positions: Tensor,
        hidden_states: Tensor,
        residual: Tensor | None,
        per_layer_input: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states, residual [T, hidden] in the model's dtype: the layer's normed input and the stream; or the
        stream and None. Returns either for the next layer. T are the tokens.
        """
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states, **kwargs)
        residual, hidden_states = _add_norm(
            residual, hidden_states, self.post_attention_layernorm, None, self.pre_feedforward_layernorm,
            self.attention_is_summand,
        )  # fmt: skip
        hidden_states, is_summand = self.mlp(hidden_states), self.mlp_is_summand
        if self.has_expert_end:
            return expert_layer.end_of_layer(self, residual, hidden_states, self.next_norm)
        if self.enable_moe_block:
            routed = self.moe(self.pre_feedforward_layernorm_2(residual), self.router(residual))
            hidden_states = self.post_feedforward_layernorm_1(hidden_states) + self.post_feedforward_layernorm_2(routed)
        post_norm = self.post_feedforward_layernorm
        if per_layer_input is not None and self.per_layer_input_gate is not None:
            residual = _add_post_norm(residual, hidden_states, post_norm, None, is_summand)
            gate = torch.nn.functional.gelu(self.per_layer_input_gate(residual), approximate="tanh")
            hidden_states = self.per_layer_projection(gate * per_layer_input)
            post_norm, is_summand = self.post_per_layer_input_norm, False
        if self.next_norm is None:
            return _add_post_norm(residual, hidden_states, post_norm, self.layer_scalar, is_summand), None
        residual, hidden_states = _add_norm(
            residual, hidden_states, post_norm, self.layer_scalar, self.next_norm, is_summand
        )
        return hidden_states, residual


# vLLM cuts its graph at attention, and takes out copies that it holds to be useless: nothing is written in place.


def _add_norm(
    residual: Tensor, h: Tensor, post_norm: Any, scalar: Tensor | None, next_norm: Any, is_summand: bool
) -> tuple[Tensor, Tensor]:
    op = torch.ops.kerngen_vllm.exchange_add_norm if is_summand else torch.ops.kerngen.add_norm_functional
    stream, normed = op(residual, h, post_norm.weight.data, scalar, next_norm.weight.data, post_norm.variance_epsilon)
    return stream, normed


def _add_post_norm(residual: Tensor, h: Tensor, post_norm: Any, scalar: Tensor | None, is_summand: bool) -> Tensor:
    op = torch.ops.kerngen_vllm.exchange_add_post_norm if is_summand else torch.ops.kerngen.add_post_norm_functional
    stream: Tensor = op(residual, h, post_norm.weight.data, scalar, post_norm.variance_epsilon)
    return stream


def _serve(model: gemma4.Gemma4Model, config: VllmConfig) -> None:
    """Make each decoder layer of this rank a `DecoderLayer` that can be one, and say which stay vLLM's, and why."""
    layers = [layer for layer in model.layers if isinstance(layer, gemma4.Gemma4DecoderLayer)]
    dtype = config.model_config.dtype
    reasons = [_why_not(layer, dtype) for layer in layers]
    served = [layer for layer, why in zip(layers, reasons, strict=True) if why is None]
    if served:
        model.__class__ = Model
    for layer in served:
        layer.__class__ = DecoderLayer
    # vLLM's fast prefill keeps of the stream what lies between two layers, and calls the others with that.
    for layer, after in zip(layers, [] if model.fast_prefill_enabled else layers[1:], strict=False):
        if isinstance(layer, DecoderLayer) and isinstance(after, DecoderLayer):
            # Past Module.__setattr__, by which the norm's weight would be a parameter of both layers.
            object.__setattr__(layer, "next_norm", after.input_layernorm)
    gated = [layer for layer in served if _gate(layer, config)]
    log.info("kerngen: norms and residuals of %d of %d decoder layers, gate and GELU of %d%s",
             len(served), len(layers), len(gated), _left(Counter(reasons)))  # fmt: skip
    _serve_experts([layer for layer in served if layer.enable_moe_block], len(layers), config)
    for layer in served:
        after_attention, *ends = _norm_problems(layer, dtype)
        for problem in (after_attention, *(() if layer.has_expert_end else ends)):
            AHEAD.ask("add_norm", problem)
    _sum_with_norms(model.config.hidden_size, served, config)
    _serve_attention([layer.self_attn for layer in served], len(layers), config)


def _serve_attention(served: list[Any], num_layers: int, config: VllmConfig) -> None:
    """Of layers that are served, those whose attention is kerngen's too; a line says how many of them."""
    mine = [attention for attention in served if self_attention.has_kerngens_backend(attention)]
    if not mine:
        return
    reasons = Counter(self_attention.serve(attention, config) for attention in mine)
    log.info("kerngen: norms of heads, RoPE and cache write in one launch in %d of %d decoder layers, K as V in %d%s",
             reasons[None], num_layers, sum(map(self_attention.has_k_as_v, mine)), _left(reasons))  # fmt: skip


def _serve_experts(with_experts: list[Any], num_layers: int, config: VllmConfig) -> None:
    """Of layers that are served, those with experts; a line says how many have these served with their routing."""
    if not with_experts:
        return
    reasons = Counter[str | None]()
    for layer in with_experts:
        why = expert_layer.serve(layer, config)
        layer.has_expert_end = why is None
        reasons[why] += 1
    log.info("kerngen: routing, and the experts' sum with the norms behind it, in one launch each in %d of %d decoder "
             "layers%s", reasons[None], num_layers, _left(reasons))  # fmt: skip


def _left(reasons: Counter[str | None]) -> str:
    """What a line says of layers that are not served, by why they are not."""
    return "".join(f"; {n} stay vLLM's: {why}" for why, n in reasons.items() if why is not None)


def _sum_with_norms(hidden: int, layers: list[Any], config: VllmConfig) -> None:
    """Have attention and MLP of these layers give this rank's summand, if the norms behind them can take the sum over
    ranks along. Not an MLP that experts stand beside: each has a norm of its own. All ranks come here.
    """
    sums, behind = [], []
    for layer in layers:
        after_attention, *after_mlp = _norm_problems(layer, config.model_config.dtype)
        sums.append([layer.layer_idx, "attention"])
        behind.append(after_attention)
        if not layer.enable_moe_block:
            sums.append([layer.layer_idx, "mlp"])
            behind += after_mlp
    if share(hidden, sums, behind, config):
        for layer in layers:
            layer.attention_is_summand, layer.mlp_is_summand = True, not layer.enable_moe_block
            layer.self_attn.o_proj.reduce_results = False
            layer.mlp.down_proj.reduce_results = layer.enable_moe_block


def _gate(layer: gemma4.Gemma4DecoderLayer, config: VllmConfig) -> bool:
    """Have the MLP's first matrix give GELU(gate) * up, if it can: vLLM's forward then has nothing left to do to it.

    Adapters (LoRA) add to gate and up before the GELU.
    """
    kernel, act = kernel_of(layer.mlp.gate_up_proj), layer.mlp.act_fn
    if config.lora_config is not None or not (isinstance(act, GeluAndMul) and act.approximate == "tanh"):
        return False
    if kernel is None or kernel.gate() is not None:
        return False
    layer.mlp.act_fn = torch.nn.Identity()
    return True


def _why_not(layer: gemma4.Gemma4DecoderLayer, dtype: torch.dtype) -> str | None:
    """Kernels of norms are loaded with those of matrices (`Ahead`): a layer without any is not served."""
    if "forward" in vars(layer):
        return "vLLM offloads them, by a forward of its own"
    if kernel_of(layer.mlp.gate_up_proj) is None:
        return "gate and up are not kerngen's W4A16"
    try:
        problems = _norm_problems(layer, dtype)
    except ProblemError as e:
        return e.message
    return next(filter(None, (find_kernel("add_norm").why_unsupported(p, target()) for p in problems)), None)


def _norm_problems(layer: gemma4.Gemma4DecoderLayer, dtype: torch.dtype) -> list[Problem]:
    """What a layer asks of add_norm, more or less by which layers follow. Raises ProblemError for a hidden size or a
    dtype that it does not take.
    """
    name = DTYPE_NAME.get(dtype, str(dtype))
    last = [Problem(layer.hidden_size, name, name, has_scalar=True, has_next=n) for n in (False, True)]
    ple = [Problem(layer.hidden_size, name, name, has_next=False)] if layer.per_layer_input_gate is not None else []
    return [Problem(layer.hidden_size, name, name), *ple, *last]
