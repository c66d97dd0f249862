"""Tensors to calls of gelu_gate."""

from __future__ import annotations

from torch import Tensor

from kerngen.templates.call import Call, op
from kerngen.templates.common.rows.spec import VEC, require
from kerngen.templates.common.rows.torch_rows import DTYPE_NAME, empty
from kerngen.templates.gelu_gate.spec import Problem


@op(takes={"gate_up": "D[T, W]"})
def gelu_gate(gate_up: Tensor) -> Call[Tensor]:
    """gelu_tanh(gate) * up. gate_up [T, 2 * I] as gate | up. Returns [T, I]."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    require(gate_up.shape[1] == 2 * width, f"gate_up has {gate_up.shape[1]} columns, which are no two halves")
    out = empty(gate_up, tokens, width)
    problem = Problem(width, DTYPE_NAME[gate_up.dtype], num_tokens=tokens) if tokens else None
    arguments = {"out": out, "gate": gate_up, "up": None, "num_tokens": tokens, "up_stride": 0}
    return Call("gelu_gate", problem, arguments, out)


@op(takes={"gate": "D[T, I]", "up": "D[T, I]"})
def gelu_mul(gate: Tensor, up: Tensor) -> Call[Tensor]:
    """gelu_tanh(gate) * up, both [T, I]. Rows of `up` may lie apart, by a multiple of 8 elements: nothing is copied."""
    tokens, width = gate.shape
    in_vectors = up.stride(1) == 1 and (tokens < 2 or up.stride(0) % VEC == 0)
    require(in_vectors, f"rows of up are {up.stride(0)} elements apart, not a multiple of {VEC}, or have gaps")
    out = empty(gate, tokens, width)
    problem = Problem(width, DTYPE_NAME[gate.dtype], packed=False, num_tokens=tokens) if tokens else None
    arguments = {"out": out, "gate": gate, "up": up, "num_tokens": tokens, "up_stride": up.stride(0)}
    return Call("gelu_gate", problem, arguments, out)
