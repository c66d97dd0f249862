"""vLLM 0.26's W4A16 experts by moe_w4a16, and their weighted sum by moe_combine.

The loading of weights and the sum over ranks are vLLM's, and routing where `expert_layer_v0_26` does not serve it.
Source of the contract: vLLM 0.26, vllm/model_executor/layers/fused_moe/fused_moe_method_base.py and routed_experts.py
beside it (which loads), and of what a checkpoint may say, its class CompressedTensorsMoEMethod.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, SharedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    int4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    CompressedTensorsMoEMethod,
)
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.utils import set_weight_attrs

from kerngen.errors import DeviceError, ProblemError, UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.common.w4.pack import pack_experts
from kerngen.templates.moe_combine import spec as combine
from kerngen.templates.moe_w4a16 import spec as experts
from kerngen.vllm.ahead import AHEAD
from kerngen.vllm.linear import target
from kerngen.vllm.plugin import say_once

AT_ONCE = 1 << 24  # weights that are packed at a time, which takes about 20 bytes each beside them
VLLMS = CompressedTensorsMoEMethod.get_moe_method


def install() -> None:
    """Put `get_moe_method` in place of vLLM's, which it asks in turn: vLLM has no list of methods to add one to."""
    CompressedTensorsMoEMethod.get_moe_method = staticmethod(get_moe_method)


def get_moe_method(
    quant_config: CompressedTensorsConfig, layer: torch.nn.Module, layer_name: str
) -> FusedMoEMethodBase:
    """kerngen's method for a layer's experts where it serves them; else vLLM's own, and one line a reason says why."""
    scheme = _scheme(quant_config, layer, layer_name)
    if (why := _why_not(scheme, layer)) is None:
        moe: FusedMoEConfig = layer.moe_config
        say_once(logging.INFO, f"kerngen: experts by moe_w4a16, {moe.experts_per_token} of {moe.num_experts} a token")
        return KerngenMoEMethod(layer.moe_config, scheme["weights"].group_size)
    say_once(logging.INFO, f"kerngen: experts stay vLLM's: {why}")
    method: FusedMoEMethodBase = VLLMS(quant_config, layer, layer_name)
    return method


class KerngenMoEMethod(FusedMoEMethodBase):
    """Experts' MLPs with GELU (tanh) and symmetric int4 weights in groups of 32, 64 or 128 along the columns, times
    fp16 or bf16 activations, summed in fp32. A rank of a divided model has a part of each expert's inner size.
    """

    def __init__(self, moe: FusedMoEConfig, group_size: int) -> None:
        super().__init__(moe)
        self._group_size = group_size
        self._asked = dict(_problems(moe, group_size))
        for kernel, problem in self._asked.items():
            AHEAD.ask(kernel, problem)

    def leave_sum(self) -> None:
        """Say that `multiply` is called in place of `apply`: the sum's kernels are not loaded."""
        AHEAD.withdraw("moe_combine", self._asked["moe_combine"])

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters by vLLM's names, rows first as checkpoints have them: w13 is gate | up, w2 is down.

        vLLM's loader transposes for its own methods, which it knows by name, and for no other.
        """
        attributes = extra_weight_attrs | {"quant_method": FusedMoeWeightScaleSupported.GROUP.value}
        inner = intermediate_size_per_partition
        for name, rows, columns in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            tensors = {
                "packed": torch.empty(num_experts, rows, columns // 8, dtype=torch.int32),
                "scale": torch.ones(num_experts, rows, columns // self._group_size, dtype=params_dtype),
                "shape": torch.empty(num_experts, 2),
            }
            for part, tensor in tensors.items():
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(f"{name}_weight_{part}", parameter)
                set_weight_attrs(parameter, attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the experts a few at a time, in the memory that they were loaded into, and have the kernels of all
        layers loaded, as `KerngenLinearKernel.process_weights_after_loading` does. Raises TuningMiss as `load_ahead`.
        """
        for name, gated in (("w13", True), ("w2", False)):
            names = f"{name}_weight_packed", f"{name}_weight_scale"
            loaded = tuple(getattr(layer, n).data for n in names)
            for n, made in zip(names, _pack_in_place(*loaded, gated=gated), strict=True):
                replace_parameter(layer, n, torch.nn.Parameter(made, requires_grad=False))
        if (device := layer.w13_weight_packed.device).type == "cuda":
            torch.cuda.synchronize(device)  # kernels may read weights before the one that wrote them has ended
            AHEAD.load(device)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """What vLLM may ask of the weights' format."""
        shape = [0, self._group_size]
        config: FusedMoEQuantConfig = int4_w4a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale, w2_scale=layer.w2_weight_scale, block_shape=shape
        )
        return config

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: SharedExperts | None,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """The sum of each token's experts by its weights, on a rank its summand of it: [T, hidden] in x's dtype.

        x [T, hidden]; topk_weights [T, top_k] fp32; topk_ids [T, top_k] int32. Shared experts are run by the caller.
        """
        routed = multiply(layer, x, topk_ids.to(torch.int32))
        out: Tensor = torch.ops.kerngen.moe_sum(routed, topk_weights.float())
        return out


def multiply(layer: RoutedExperts, x: Tensor, topk_ids: Tensor) -> Tensor:
    """Each token's experts by `KerngenMoEMethod`'s weights: [T, top_k, hidden] in x's dtype.

    x [T, hidden]; topk_ids [T, top_k] int32.
    """
    weights = layer.w13_weight_packed, layer.w13_weight_scale, layer.w2_weight_packed, layer.w2_weight_scale
    routed: Tensor = torch.ops.kerngen.moe_w4a16(x, topk_ids, *weights)
    return routed


def _pack_in_place(words: Tensor, scales: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """What `pack_experts` makes of both, in their own memory: it takes as much."""
    num_experts = len(words)
    step = max(1, AT_ONCE // (8 * words[0].numel()))
    shapes: list[torch.Size] = []
    for first in range(0, num_experts, step):
        parts = words[first : first + step], scales[first : first + step]
        made = pack_experts(*parts, gated=gated)
        for part, packed in zip(parts, made, strict=True):
            part.copy_(packed.view(part.shape))
        shapes = [packed.shape[1:] for packed in made]
    return words.view(num_experts, *shapes[0]), scales.view(num_experts, *shapes[1])


def _problems(moe: FusedMoEConfig, group_size: int) -> tuple[tuple[str, Any], ...]:
    """(kernel, problem) of what a layer asks. Raises ProblemError for shapes and dtypes that kernels do not take."""
    top_k, hidden, inner = moe.experts_per_token, moe.hidden_dim, moe.intermediate_size_per_partition
    dtype = DTYPE_NAME[moe.in_dtype]
    return (
        ("moe_w4a16", experts.Problem(moe.num_experts, top_k, hidden, inner, group_size, dtype)),
        ("moe_combine", combine.Problem(hidden, top_k, dtype, dtype, has_norms=False)),
    )


def _scheme(quant_config: CompressedTensorsConfig, layer: torch.nn.Module, layer_name: str) -> dict[str, Any]:
    """How the checkpoint keeps all three matrices of a layer's experts; empty where they are not kept alike."""
    quant_config._add_fused_moe_to_target_scheme_map()
    names = [f"{layer_name}.0.{name}_proj" for name in ("gate", "up", "down")]
    first, *others = (quant_config.get_scheme_dict(layer, name) for name in names)
    return first if first is not None and all(other == first for other in others) else {}


def _why_not(scheme: dict[str, Any], layer: torch.nn.Module) -> str | None:
    """Why kerngen does not serve a layer's experts, or None. layer: vLLM's RoutedExperts, not finished yet."""
    moe: FusedMoEConfig = layer.moe_config
    if why := _why_not_weights(scheme) or _why_not_run(moe):
        return why
    if layer.apply_router_weight_on_input:
        return "the router's weights multiply their inputs"
    if layer.params_dtype != moe.in_dtype:
        return f"their scales are {layer.params_dtype} and their activations {moe.in_dtype}"
    try:
        problems = _problems(moe, scheme["weights"].group_size)
        found = (find_kernel(kernel).why_unsupported(problem, target()) for kernel, problem in problems)
        return next(filter(None, found), None)
    except (DeviceError, ProblemError, UnknownName) as e:
        return e.message


def _why_not_weights(scheme: dict[str, Any]) -> str | None:
    weights = scheme.get("weights")
    if weights is None or scheme.get("format") != "pack-quantized":
        return "they are not all pack-quantized"
    if (weights.type, weights.num_bits, weights.strategy) != ("int", 4, "group") or weights.dynamic:
        return f"their weights are {weights.type} of {weights.num_bits} bits by {weights.strategy}, not int4 in groups"
    if not weights.symmetric:
        return "their weights have zero points"
    if weights.actorder:
        return f"their columns were put in an order (actorder {weights.actorder})"
    if scheme.get("input_activations") is not None:
        return "their activations are quantized"
    return None


def _why_not_run(moe: FusedMoEConfig) -> str | None:
    parallel = moe.moe_parallel_config
    if parallel.use_ep or parallel.enable_eplb:
        return "they are divided among ranks by expert (expert parallelism)"
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel:
        return "they see tokens of other ranks (data, context or sequence parallelism)"
    if moe.is_lora_enabled:
        return "adapters (LoRA) may change them"
    if moe.activation is not MoEActivation.GELU_TANH:
        return f"their activation is {moe.activation.value}, not {MoEActivation.GELU_TANH.value}"
    if moe.has_bias:
        return "they have a bias"
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend} names one of vLLM's"
    return None
