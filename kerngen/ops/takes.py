"""Checks an op's tensors against its declaration (`Op.takes`).

A kernel trusts its arguments: given one row too few, it reads what lies behind them. Callers from outside are told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from kerngen.errors import ProblemError
from kerngen.templates.call import Op
from kerngen.templates.common.rows.torch_rows import TORCH_DTYPE
from kerngen.templates.kernel import spread

DTYPES = TORCH_DTYPE | {"int32": torch.int32, "int64": torch.int64}
_TEXT = re.compile(r"(?:each )?(\w+)\[(.*)\]")
_ANY = "_"  # a dim of any size
_KEPT = 4096  # combinations of shapes and dtypes that are known to be right


@dataclass(frozen=True, slots=True)
class _Dim:
    text: str
    code: CodeType

    @property
    def is_name(self) -> bool:
        return self.text.isidentifier()


@dataclass(frozen=True, slots=True)
class _Tensor:
    text: str
    dtype: str
    leading: bool  # any number of dims before `dims`
    dims: tuple[_Dim, ...]


class Takes:
    """The check of one op. Raises ValueError where `takes` is not as `Op` says."""

    def __init__(self, op: Op[..., Any], tensors: tuple[str, ...], numbers: tuple[str, ...]) -> None:
        """tensors: the op's parameters that are tensors; numbers: those that are numbers or dtypes."""
        if set(op.takes) != set(tensors):
            raise ValueError(f"takes of {op.name} describes {sorted(op.takes)}; its tensors are {sorted(tensors)}")
        self.name, self.numbers = op.name, numbers
        self.tensors = {name: _parsed(text) for name, text in op.takes.items()}
        self._right: set[tuple[Any, ...]] = set()

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ProblemError unless the tensors among `arguments` are what the op takes."""
        key = tuple(map(_key, arguments.values()))
        if key in self._right:
            return
        self.check_anew(arguments)
        if len(self._right) == _KEPT:
            self._right.clear()
        self._right.add(key)

    def check_anew(self, arguments: Mapping[str, Any]) -> None:
        """As `check`, for sizes that may be symbols."""
        asked = {n: arguments[n] for n in self.tensors if arguments[n] is not None}
        given = [(shown, tensor, self.tensors[name]) for name, shown, tensor in spread(asked)]
        sizes: dict[str, Any] = {n: arguments[n] for n in self.numbers}
        dtypes: dict[str, Any] = {**DTYPES, **sizes}
        for shown, tensor, wants in given:
            self._require_rank(shown, tensor, wants)
            dtypes.setdefault(wants.dtype, tensor.dtype)
            for dim, size in zip(wants.dims, _last(tensor, len(wants.dims)), strict=True):
                if dim.is_name and dim.text != _ANY:
                    sizes.setdefault(dim.text, size)
        for shown, tensor, wants in given:
            last = _last(tensor, len(wants.dims))
            shape = tuple(
                size if dim.text == _ANY else eval(dim.code, {"__builtins__": {}}, sizes)
                for dim, size in zip(wants.dims, last, strict=True)
            )
            if tensor.dtype != dtypes[wants.dtype] or last != shape:
                names = sorted({n for d in wants.dims for n in d.code.co_names} - {_ANY})
                known = {wants.dtype: dtypes[wants.dtype]} | {n: sizes[n] for n in names}
                terms = ", ".join(f"{n} = {v}" for n, v in known.items() if n not in DTYPES)
                raise ProblemError(self._says(shown, tensor, wants) + (f" with {terms}" if terms else ""))

    def _require_rank(self, shown: str, tensor: Tensor, wants: _Tensor) -> None:
        if not (tensor.ndim >= len(wants.dims) if wants.leading else tensor.ndim == len(wants.dims)):
            raise ProblemError(self._says(shown, tensor, wants))

    def _says(self, shown: str, tensor: Tensor, wants: _Tensor) -> str:
        shape = ", ".join(map(str, tensor.shape))
        return f"{self.name}: {shown} is {tensor.dtype} [{shape}]; it takes {wants.text}"


def _key(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_key, value))
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value


def _parsed(text: str) -> _Tensor:
    if (match := _TEXT.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not DTYPE[DIM, ...], or each DTYPE[DIM, ...] of a list")
    dims = [d.strip() for d in match[2].split(",") if d.strip()]
    leading = dims[:1] == ["..."]
    return _Tensor(text, match[1], leading, tuple(_Dim(d, compile(d, text, "eval")) for d in dims[leading:]))


def _last(tensor: Tensor, count: int) -> tuple[int, ...]:
    return tuple(tensor.shape[tensor.ndim - count :])
