"""What an encoder does to rows beside products and attention: norms, residuals, RoPE of heads, and the gate of an MLP.

By torch, or by our kernels: a launch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.runtime.media.config import VisionConfig
from kerngen.runtime.media.towers.linear import NO_BOUNDS, Bounds, clamp_
from kerngen.templates.add_norm.op import add_norm, add_post_norm, bounded_add_norm, bounded_add_post_norm
from kerngen.templates.call import Call
from kerngen.templates.gelu_gate.op import bounded_gelu_gate, gelu_gate
from kerngen.templates.qkv_norm_rope_2d.op import qkv_norm_rope_2d
from kerngen.templates.rmsnorm.op import rmsnorm

# Powers of two, up to which kernels are got ready. At the least budget the narrowest image has 35 tokens of 9 patches,
# and no forward has more than 10,080.
READY_ROWS = tuple(1 << e for e in range(9, 15))
Turn = tuple[Tensor, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]


class Rows(Protocol):
    """Tensors are [rows, width] and weights [width], all of one dtype. bounds: of linears before and behind, if any."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * (mean(x^2) + eps)^(-1/2) * weight, in fp32, rounded once."""

    def add_norm(
        self, residual: Tensor, y: Tensor, post: Tensor, following: Tensor | None, bounds: Bounds | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """residual + norm(y; post), and its norm by `following`, or itself where there is none. `residual` and y are
        the caller's no more: they may be written. bounds: of y and of the norm by `following`.
        """

    def heads(self, qkv: Tensor, norms: Turn, turn: Turn, bounds: Bounds | None, eps: float) -> Heads:
        """q, k and v [images, patches, heads, d] of q | k | v [rows, 3 * heads * d], which is the caller's no more:
        clamped to the three of `bounds`, each head normed, and q and k turned.

        norms: the weights of q and k, as they are and with the elements of each pair exchanged, both [2, 1, d]. turn:
        cos and sin [patches, 1, 1, d] of an image's patches, sin negative for the first of a pair.
        """

    def gelu_gate(self, gate_up: Tensor, bounds: Bounds | None) -> Tensor:
        """gelu_tanh(gate) * up [rows, width] of gate | up [rows, 2 * width], which is the caller's no more. bounds: of
        gate, up and the result.
        """


def partner(x: Tensor) -> Tensor:
    """x [..., d] with the two elements of each pair exchanged."""
    return x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3)


def in_heads(qkv: Tensor, turn: Turn) -> Tensor:
    """qkv as [images, patches, 3, heads, d]."""
    patches, dim = len(turn[0]), turn[0].shape[-1]
    return qkv.view(-1, patches, 3, qkv.shape[1] // (3 * dim), dim)


class TorchRows:
    """By torch."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, residual: Tensor, y: Tensor, post: Tensor, following: Tensor | None, bounds: Bounds | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        of_y, of_norm = (NO_BOUNDS, NO_BOUNDS) if bounds is None else bounds.each
        x = residual + self.norm(clamp_(y, of_y), post, eps)
        return x, x if following is None else clamp_(self.norm(x, following, eps), of_norm)

    def heads(self, qkv: Tensor, norms: Turn, turn: Turn, bounds: Bounds | None, eps: float) -> Heads:
        if bounds is not None:
            for part, interval in zip(qkv.chunk(3, -1), bounds.each, strict=True):
                clamp_(part, interval)
        (of_own, of_partners), (cos, sin) = norms, turn
        normed = F.rms_norm(in_heads(qkv, turn), cos.shape[-1:], None, eps)
        # The norm's weight goes into the rotation: each is then one pass over queries and keys together.
        qk = normed[:, :, :2]
        qk = torch.addcmul(qk * (of_own * cos), partner(qk), of_partners * sin)
        return qk[:, :, 0], qk[:, :, 1], normed[:, :, 2]

    def gelu_gate(self, gate_up: Tensor, bounds: Bounds | None) -> Tensor:
        of_gate, of_up, of_out = (NO_BOUNDS,) * 3 if bounds is None else bounds.each
        gate, up = gate_up.chunk(2, -1)
        return clamp_(F.gelu(clamp_(gate, of_gate), approximate="tanh").mul_(clamp_(up, of_up)), of_out)


class KernelRows:
    """By kernels. run: gives what a call, which is made in a place of the model, leaves (KernelOps.run)."""

    def __init__(self, run: Callable[[Call[Any], str], Any]) -> None:
        self._run = run

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        made: Tensor = self._run(rmsnorm(x, weight, eps, x.dtype), "norm (vision)")
        return made

    def add_norm(
        self, residual: Tensor, y: Tensor, post: Tensor, following: Tensor | None, bounds: Bounds | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if following is None:
            last = (
                add_post_norm(residual, y, post, None, eps)
                if bounds is None
                else bounded_add_post_norm(residual, y, post, bounds.table, eps)
            )
            self._run(last, "residual and norm (vision)")
            return residual, residual
        call = (
            add_norm(residual, y, post, None, following, eps)
            if bounds is None
            else bounded_add_norm(residual, y, post, following, bounds.table, eps)
        )
        return residual, self._run(call, "residual and norms (vision)")

    def heads(self, qkv: Tensor, norms: Turn, turn: Turn, bounds: Bounds | None, eps: float) -> Heads:
        q_weight, k_weight = norms[0].flatten(0, 1)
        cos, sin = (t.flatten(0, 2) for t in turn)
        table = None if bounds is None else bounds.table
        call = qkv_norm_rope_2d(qkv, q_weight, k_weight, cos, sin, table, eps)
        self._run(call, "head norms and RoPE (vision)")
        q, k, v = in_heads(qkv, turn).unbind(2)
        return q, k, v

    def gelu_gate(self, gate_up: Tensor, bounds: Bounds | None) -> Tensor:
        call = gelu_gate(gate_up) if bounds is None else bounded_gelu_gate(gate_up, bounds.table)
        made: Tensor = self._run(call, "gate (vision)")
        return made


def ask_all(rows: Rows, config: VisionConfig, dtype: torch.dtype) -> None:
    """Ask `rows` for all that the encoder of `config` asks for at any number of patches. The tensors have no memory: it
    is for who listens, and not for who computes.
    """
    if (encoder := config.encoder) is None:
        return

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width, inner, dim = config.hidden_size, encoder.intermediate_size, encoder.head_dim
    norms = empty(2, 1, dim), empty(2, 1, dim)
    of_two, of_three = (Bounds.of([(-1.0, 1.0)] * n, norms[0]) for n in (2, 3))
    for count in READY_ROWS:
        x, turn = empty(count, width), (empty(count, 1, 1, dim), empty(count, 1, 1, dim))
        rows.norm(x, x[0], 1.0)
        for two, three in [(None, None), (of_two, of_three)][: 1 + encoder.clips]:
            rows.add_norm(x, x, x[0], x[0], two, 1.0)
            rows.add_norm(x, x, x[0], None, two, 1.0)
            rows.heads(empty(count, 3 * encoder.num_heads * dim), norms, turn, three, 1.0)
            rows.gelu_gate(empty(count, 2 * inner), three)
