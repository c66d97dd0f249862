"""Tensors to calls of gelu_gate."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.row_torch import DTYPE_NAME
from kerngen.templates.gelu_gate.spec import Problem


@op()
def gelu_gate(gate_up: Tensor) -> Call[Tensor]:
    """gelu_tanh(gate) * up. gate_up [T, 2 * I] as gate | up. Returns [T, I]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    problem = Problem(width, DTYPE_NAME[gate_up.dtype], num_tokens=tokens) if tokens else None
    arguments = {"out": out, "gate": gate_up, "up": None, "num_tokens": tokens, "up_stride": 0}
    return Call("gelu_gate", problem, arguments, out)


@op()
def gelu_mul(gate: Tensor, up: Tensor) -> Call[Tensor]:
    """gelu_tanh(gate) * up, both [T, I]. Rows of `up` may lie apart: its stride is passed, and nothing is copied."""
    tokens, width = gate.shape
    out = gate.new_empty((tokens, width))
    problem = Problem(width, DTYPE_NAME[gate.dtype], packed=False, num_tokens=tokens) if tokens else None
    arguments = {"out": out, "gate": gate, "up": up, "num_tokens": tokens, "up_stride": up.stride(0)}
    return Call("gelu_gate", problem, arguments, out)
