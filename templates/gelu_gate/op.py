"""Tensors to calls of gelu_gate."""

from __future__ import annotations

from dataclasses import replace

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
    arguments = {"out": out, "gate": gate_up, "up": None, "bounds": None, "num_tokens": tokens, "up_stride": 0}
    return Call("gelu_gate", problem, arguments, out)


@op(takes={"gate_up": "D[T, W]"})
def silu_gate(gate_up: Tensor) -> Call[Tensor]:
    """As gelu_gate, with silu(gate) = gate * sigmoid(gate) in place of GELU (SwiGLU, arXiv 2002.05202)."""
    gelu = gelu_gate(gate_up)
    problem = None if gelu.problem is None else replace(gelu.problem, activation="silu")
    return Call("gelu_gate", problem, gelu.arguments, gelu.result)


@op(takes={"gate_up": "D[T, W]", "bounds": "fp32[3, 2]"})
def bounded_gelu_gate(gate_up: Tensor, bounds: Tensor) -> Call[Tensor]:
    """As gelu_gate, where gate, up and the result are clamped to the rows of `bounds` [3, 2], lowest and highest,
    numbers of gate_up's dtype: what a bounded linear gives, and what the next one takes.
    """
    free = gelu_gate(gate_up)
    problem = None if free.problem is None else replace(free.problem, has_bounds=True)
    return Call("gelu_gate", problem, {**free.arguments, "bounds": bounds}, free.result)


@op(takes={"gate": "D[T, I]", "up": "D[T, I]"})
def gelu_mul(gate: Tensor, up: Tensor) -> Call[Tensor]:
    """gelu_tanh(gate) * up, both [T, I]. Rows of `up` may lie apart, by a multiple of 8 elements: nothing is copied."""
    tokens, width = gate.shape
    in_vectors = up.stride(1) == 1 and (tokens < 2 or up.stride(0) % VEC == 0)
    require(in_vectors, f"rows of up are {up.stride(0)} elements apart, not a multiple of {VEC}, or have gaps")
    out = empty(gate, tokens, width)
    problem = Problem(width, DTYPE_NAME[gate.dtype], packed=False, num_tokens=tokens) if tokens else None
    arguments = {
        "out": out, "gate": gate, "up": up, "bounds": None, "num_tokens": tokens, "up_stride": up.stride(0),
    }  # fmt: skip
    return Call("gelu_gate", problem, arguments, out)
