"""Weight formats of the kernel backend: how each is prepared and which kernels multiply it (FORMATS)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from kerngen.runtime.ops import fallbacks
from kerngen.runtime.ops.values import Experts, Linear, ResidualNorms
from kerngen.templates.call import Call
from kerngen.templates.common.rows.spec import VEC
from kerngen.templates.common.w4.pack import interleave, pack, pack_experts
from kerngen.templates.dense_gemv.op import dense_gemv
from kerngen.templates.dense_gemv.spec import MAX_TOKENS
from kerngen.templates.gelu_gate.op import gelu_gate, silu_gate
from kerngen.templates.moe_w4a16.op import moe_w4a16
from kerngen.templates.values import Peers
from kerngen.templates.w4a16_gemm.op import w4a16_gated, w4a16_gemm
from kerngen.templates.w4a16_norm import spec as norm_spec
from kerngen.templates.w4a16_norm.op import w4a16_exchange_norm, w4a16_norm

if TYPE_CHECKING:
    from kerngen.runtime.ops.kernels import KernelOps


class Format(Protocol):
    """What `KernelOps` needs of a format, each as the method of `Ops` that is called so. ops: runs the calls."""

    def prepare(self, weights: Linear) -> Linear: ...
    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]: ...
    def linear(self, ops: KernelOps, x: Tensor, weights: Linear) -> Tensor: ...
    def gated(self, ops: KernelOps, x: Tensor, gate_up: Linear, activation: str) -> Tensor: ...
    def experts(self, ops: KernelOps, x: Tensor, gate_up: Experts, down: Experts, topk_ids: Tensor) -> Tensor: ...

    def norm_call(
        self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms, peers: Peers | None
    ) -> Call[Tensor] | None:
        """linear_norm's call, if the format has a kernel for it. peers: where ranks have a summand each."""


class Dense:
    """16-bit matrices, as they are stored."""

    def prepare(self, weights: Linear) -> Linear:
        return weights

    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]:
        return gate_up, down

    def linear(self, ops: KernelOps, x: Tensor, weights: Linear) -> Tensor:
        if len(x) <= MAX_TOKENS and weights.out_features % VEC == 0 and weights.in_features % VEC == 0:
            return ops.run(dense_gemv(x, weights.weight), "dense matrix")
        ops.went_outside("dense matrices")
        return fallbacks.dense(x, weights.weight)

    def gated(self, ops: KernelOps, x: Tensor, gate_up: Linear, activation: str) -> Tensor:
        gate, what = {"gelu_tanh": (gelu_gate, "GELU gate"), "silu": (silu_gate, "SiLU gate")}[activation]
        return ops.run(gate(self.linear(ops, x, gate_up)), what)

    def experts(self, ops: KernelOps, x: Tensor, gate_up: Experts, down: Experts, topk_ids: Tensor) -> Tensor:
        ops.went_outside("dense experts")
        return fallbacks.experts(x, gate_up.weight, down.weight, topk_ids)

    def norm_call(
        self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms, peers: Peers | None
    ) -> Call[Tensor] | None:
        return None


class Int4:
    """Symmetric int4 with a scale a group, repacked in strips of 32 rows. Of experts down may be in another format."""

    def prepare(self, weights: Linear) -> Linear:
        """Raises ProblemError for shapes that w4a16_gemm does not take."""
        tensors = (weights.packed, weights.scales)
        return replace(weights, tensors=pack(*(interleave(*tensors) if weights.gated else tensors)))

    def prepare_experts(self, gate_up: Experts, down: Experts) -> tuple[Experts, Experts]:
        made = (
            pack_experts(gate_up.packed, gate_up.scales, gated=True),
            pack_experts(down.packed, down.scales, gated=False),
        )
        return replace(gate_up, tensors=made[0]), replace(down, tensors=made[1])

    def linear(self, ops: KernelOps, x: Tensor, weights: Linear) -> Tensor:
        if weights.gated:
            raise TypeError(f"{weights.name} holds gate and up, interleaved: Ops.gated multiplies with it")
        packed, scales = weights.tensors
        return ops.run(w4a16_gemm(x, packed, scales, ops.row_invariant), weights.name)

    def gated(self, ops: KernelOps, x: Tensor, gate_up: Linear, activation: str) -> Tensor:
        packed, scales = gate_up.tensors
        return ops.run(w4a16_gated(x, packed, scales, ops.row_invariant, activation), gate_up.name)

    def experts(self, ops: KernelOps, x: Tensor, gate_up: Experts, down: Experts, topk_ids: Tensor) -> Tensor:
        (up_packed, up_scales), (down_packed, down_scales) = gate_up.tensors, down.tensors
        return ops.run(moe_w4a16(x, topk_ids, up_packed, up_scales, down_packed, down_scales), "experts")

    def norm_call(
        self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms, peers: Peers | None
    ) -> Call[Tensor] | None:
        if not 1 < len(x) <= norm_spec.MOST_TOKENS:
            return None
        packed, scales = weights.tensors
        given = residual, x, packed, scales, norms.post_weight, norms.layer_scalar, norms.next_weight, norms.eps
        return w4a16_norm(*given) if peers is None else w4a16_exchange_norm(*given, peers)


class Grouped(Int4):
    """int8, and int4 or int8 with minima: the other formats of w4a16_gemm and moe_w4a16. No kernel has norms behind."""

    def norm_call(
        self, residual: Tensor, x: Tensor, weights: Linear, norms: ResidualNorms, peers: Peers | None
    ) -> Call[Tensor] | None:
        return None


FORMATS: dict[str, Format] = {
    "dense": Dense(), "int4": Int4(), "int4_min": Grouped(), "int8": Grouped(), "int8_min": Grouped(),
}  # fmt: skip
