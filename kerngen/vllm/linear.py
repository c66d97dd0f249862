"""vLLM's W4A16 linear layers by w4a16_gemm. For all releases in `plugin.PARTS`: what they call differs in no name.

vLLM asks its list of kernels, in order, for each quantised matrix of a model, which one takes it; the first that does
loads and multiplies it. q, k and v are one matrix by then, as are gate and up, and with tensor parallelism a matrix is
the rank's part. Source of the contract: vLLM, model_executor/kernels/linear/mixed_precision/MPLinearKernel.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from kerngen.arch import Target, arch_of_capability, default_device
from kerngen.errors import DeviceError, ProblemError, UnknownName
from kerngen.ops import pack_w4
from kerngen.templates import find_kernel
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME
from kerngen.templates.common.w4.pack import interleave
from kerngen.templates.w4a16_gemm.spec import Problem
from kerngen.vllm.ahead import AHEAD


def install() -> None:
    """Put the kernel before vLLM's own for CUDA, once. vLLM's `register_linear_kernel` would put it behind them."""
    kernels = _POSSIBLE_KERNELS[PlatformEnum.CUDA]
    if KerngenLinearKernel not in kernels:
        kernels.insert(0, KerngenLinearKernel)


class KerngenLinearKernel(MPLinearKernel):
    """Symmetric int4 weights in groups of 32, 64 or 128 along K, times fp16 or bf16 activations, summed in fp32.

    VLLM_DISABLED_KERNELS=KerngenLinearKernel leaves all layers to vLLM's kernels.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """Of the GPU, as vLLM counts: 70 is Volta. bf16 takes 80, which `can_implement` says."""
        return 70

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether kerngen serves such a matrix on the GPU at hand, and if not, why."""
        why = _why_not(c)
        return why is None, why

    def __init__(self, c: MPLinearLayerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(c, *args, **kwargs)
        self._problem = _problem(c)
        AHEAD.ask("w4a16_gemm", self._problem)

    def gate(self) -> str | None:
        """Have `apply_weights` give GELU(gate) * up [..., N / 2] of a matrix that is gate | up, before it is packed.

        Returns why the kernel does not serve that, or None: then it will.
        """
        return self._serve(replace(self._problem, gated=True))

    def keep_rows(self, rows: int) -> str | None:
        """Have `apply_weights` give the first `rows` columns [..., rows], of a matrix whose other rows repeat some of
        them, before it is packed: the others are not kept.

        Returns why the kernel does not serve that, or None: then it will.
        """
        return self._serve(replace(self._problem, n=rows))

    def _serve(self, problem: Problem) -> str | None:
        """Have another problem served in place of this one. Why the kernel cannot, or None."""
        if why := find_kernel("w4a16_gemm").why_unsupported(problem, target()):
            return why
        AHEAD.withdraw("w4a16_gemm", self._problem)
        AHEAD.ask("w4a16_gemm", problem)
        self._problem = problem
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the layer's weights, in place of those that it loaded, and have its kernels loaded.

        vLLM makes all layers of a model before it comes here, and comes here before it runs any forward: to measure
        memory, to compile, or to capture CUDA graphs. The first layer has the kernels of all of them built beside each
        other, for any number of tokens, so that none of those forwards compiles, loads or allocates for a kernel.
        Raises ProblemError for weights in an order that is not of vLLM's contract, TuningMiss as `load_ahead`.
        """
        loaded, scales = (_rows_first(getattr(layer, name)) for name in (self.w_q_name, self.w_s_name))
        k, n = self.config.partition_weight_shape
        if loaded.shape != (n, k // 8) or scales.shape != (n, k // self.config.group_size):
            raise ProblemError(
                f"{self.w_q_name} is {tuple(loaded.shape)} and {self.w_s_name} {tuple(scales.shape)}, rows first; a W "
                f"of {n} x {k} in groups of {self.config.group_size} is packed along its rows",
                hint=f"leave this model to vLLM's kernels: VLLM_DISABLED_KERNELS={type(self).__name__}",
            )
        loaded, scales = loaded[: self._problem.n], scales[: self._problem.n]
        if self._problem.gated:
            loaded, scales = interleave(loaded, scales)
        packed = pack_w4(loaded, scales.to(self.config.act_type))
        for name, made in ((self.w_q_name, packed.w_packed), (self.w_s_name, packed.scales)):
            replace_parameter(layer, name, torch.nn.Parameter(made, requires_grad=False))
        if loaded.is_cuda:
            torch.cuda.synchronize(loaded.device)  # kernels may read weights before the one that wrote them has ended
            AHEAD.load(loaded.device)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times W^T, and the bias [N]: [..., N] in x's dtype. See `gate` and `keep_rows`."""
        multiply = torch.ops.kerngen.w4a16_gated if self._problem.gated else torch.ops.kerngen.w4a16_gemm
        packed, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        out: Tensor = multiply(x.reshape(-1, x.shape[-1]), packed, scales)
        if bias is not None:
            out = out + bias
        return out.reshape(*x.shape[:-1], out.shape[-1])


def kernel_of(linear: Any) -> KerngenLinearKernel | None:
    """What multiplies by a linear layer's matrix and nothing else, if that is kerngen's kernel."""
    method = linear.quant_method
    kernel = getattr(linear.scheme if isinstance(method, CompressedTensorsLinearMethod) else method, "kernel", None)
    return kernel if isinstance(kernel, KerngenLinearKernel) else None


def _rows_first(weights: Tensor) -> Tensor:
    """A parameter as [N, ...], contiguous. What GPTQ checkpoints store has K first, and says so."""
    return (weights.data.t() if getattr(weights, "output_dim", 0) == 1 else weights.data).contiguous()


def _problem(c: MPLinearLayerConfig) -> Problem:
    """Raises ProblemError for shapes that the kernel does not take."""
    k, n = c.partition_weight_shape
    return Problem(n, k, c.group_size, DTYPE_NAME[c.act_type])


def _why_not(c: MPLinearLayerConfig) -> str | None:
    if c.weight_type != scalar_types.uint4b8 or c.zero_points:
        zeros = " with zero points" if c.zero_points else ""
        return f"kerngen multiplies symmetric int4 weights (uint4b8), not {c.weight_type}{zeros}"
    if getattr(c, "has_g_idx", False):  # gone in 0.30
        return "kerngen takes columns in their order, without g_idx"
    if c.act_type not in (torch.float16, torch.bfloat16) or c.out_type not in (None, c.act_type):
        return f"kerngen's activations and results are both fp16 or bf16, not {c.act_type} and {c.out_type}"
    try:
        return find_kernel("w4a16_gemm").why_unsupported(_problem(c), target())
    except (DeviceError, ProblemError, UnknownName) as e:
        return f"kerngen: {e.message}"


def target() -> Target:
    """Of the GPU at hand. Raises UnknownName where kerngen has no kernels for it, DeviceError where vLLM sees none."""
    capability = current_platform.get_device_capability()
    if capability is None:
        raise DeviceError("vLLM sees no GPU in this process")
    arch = arch_of_capability(*capability)
    return Target(arch, default_device(arch))
