"""What an encoder does to the rows of its residual stream beside products and attention: norms, and the gate of an MLP.

By torch, or by our kernels, which add and norm in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kerngen.templates.add_norm.op import add_norm, add_post_norm
from kerngen.templates.call import Call
from kerngen.templates.gelu_gate.op import gelu_gate
from kerngen.templates.rmsnorm.op import rmsnorm

# Powers of two, up to which kernels are got ready. At the least budget the narrowest image has 35 tokens of 9 patches,
# and no forward has more than 10,080.
READY_ROWS = tuple(1 << e for e in range(9, 15))


class Rows(Protocol):
    """Tensors are [rows, width] and weights [width], all of one dtype."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * (mean(x^2) + eps)^(-1/2) * weight, in fp32, rounded once."""

    def add_norm(
        self, residual: Tensor, y: Tensor, post: Tensor, following: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """residual + norm(y; post), and its norm by `following`, or itself where there is none. `residual` is the
        caller's no more: it may be written.
        """

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        """gelu_tanh(gate) * up [rows, width] of gate | up [rows, 2 * width]."""


class TorchRows:
    """By torch."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, residual: Tensor, y: Tensor, post: Tensor, following: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = residual + self.norm(y, post, eps)
        return x, x if following is None else self.norm(x, following, eps)

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)


class KernelRows:
    """By kernels. run: gives what a call, which is made in a place of the model, leaves (KernelOps.run)."""

    def __init__(self, run: Callable[[Call[Any], str], Any]) -> None:
        self._run = run

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        made: Tensor = self._run(rmsnorm(x, weight, eps, x.dtype), "norm (vision)")
        return made

    def add_norm(
        self, residual: Tensor, y: Tensor, post: Tensor, following: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if following is None:
            self._run(add_post_norm(residual, y, post, None, eps), "residual and norm (vision)")
            return residual, residual
        return residual, self._run(add_norm(residual, y, post, None, following, eps), "residual and norms (vision)")

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        made: Tensor = self._run(gelu_gate(gate_up), "gate (vision)")
        return made


def ask_all(rows: Rows, width: int, inner: int, dtype: torch.dtype) -> None:
    """Ask `rows` for all that an encoder of `width`, whose MLPs are `inner` wide, asks for at any number of patches.
    The tensors have no memory: it is for who listens, and not for who computes.
    """
    for count in READY_ROWS:
        x, gate_up = (torch.empty(count, n, dtype=dtype, device="meta") for n in (width, 2 * inner))
        rows.add_norm(x, rows.norm(x, x[0], 1.0), x[0], x[0], 1.0)
        rows.add_norm(x, x, x[0], None, 1.0)
        rows.gelu_gate(gate_up)
