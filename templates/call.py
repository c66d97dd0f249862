"""A kernel call as a value: which kernel, which problem, which arguments. Nothing has run.

Functions marked `@op` in a folder's op.py turn tensors into a Call, and nothing else knows how tensors become a
problem. An executor (runtime/executors) launches it, records it, or answers it by the folder's reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """One computation asked for. kernel: the folder's name. arguments: what its entries take, by name; tuples of
    tensors where they take several.

    problem: None where there is nothing to compute (no tokens). result: what the caller gets, tensors among the
    arguments that are right once the call was executed.
    """

    kernel: str
    problem: Any
    arguments: Mapping[str, Any]
    result: R

    def writing(self, **outputs: Any) -> Call[R]:
        """The same, with other tensors for these of its arguments, which it writes."""
        return Call(self.kernel, self.problem, {**self.arguments, **outputs}, self.result)

    def without_result(self) -> Call[None]:
        """The same, for a caller whose own tensor is written."""
        return Call(self.kernel, self.problem, self.arguments, None)


@dataclass(frozen=True, slots=True)
class Op(Generic[P, R]):
    """A function from tensors to a Call. mutates: arguments whose tensors the call writes, beside its result.

    Parameters may be values: frozen dataclasses of tensors and numbers, or of such values. As an operator of torch the
    op takes their fields instead, by name (`signature`, `of_flat`). required, optional: which of these arguments there
    are, in this order, those with their defaults last; what is left out keeps its default. Neither: all, in order.

    takes: what its tensors must be, "DTYPE[DIM, ...]" by argument; checked where others call it (`kerngen.ops`). DTYPE
    is fp16, bf16, fp32, int32, int64, an argument that is a dtype, or a letter, which stands for one dtype throughout.
    A DIM that is one name stands for one size throughout, "_" for any size, a leading "..." for any number of them;
    others are expressions of those names and of arguments that are numbers. "each DTYPE[DIM, ...]" is said of a list.
    """

    name: str
    make: Callable[P, Call[R]]
    mutates: tuple[str, ...]
    takes: Mapping[str, str]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        return self.make(*args, **kwargs)

    @property
    def signature(self) -> inspect.Signature:
        """Of the operator: flat arguments, with types in place of their names, and a Call's result in place of it.

        Raises NameError for an annotation that names nothing, TypeError where two fields have one name.
        """
        return _flattened(self.make, self.required, self.optional)[0]

    def of_flat(self, arguments: Mapping[str, Any]) -> Call[R]:
        """The call for the operator's arguments, by name; those with a default may be absent."""
        make: Callable[..., Call[R]] = self.make
        return make(**_given(_flattened(self.make, self.required, self.optional)[1], arguments))


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that is made of flat arguments. parts: its fields, each with the value that it is made as, if it is."""

    cls: type
    parts: tuple[tuple[str, _Value | None], ...]


_Parts = tuple[tuple[str, _Value | None], ...]


@cache
def _flattened(
    make: Callable[..., Any], required: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[inspect.Signature, _Parts]:
    """`make` with values taken apart: its flat signature, and how its parameters come from those arguments."""
    hints = get_type_hints(make)
    leaves: dict[str, inspect.Parameter] = {}
    parameters = inspect.signature(make).parameters.values()
    parts = tuple((p.name, _part(p.replace(annotation=hints[p.name]), leaves)) for p in parameters)
    if required:
        first = [leaves[n].replace(annotation=_without_none(leaves[n].annotation), default=inspect.Parameter.empty)
                 for n in required]  # fmt: skip
        leaves = {p.name: p for p in (*first, *(leaves[n] for n in optional))}
    (result,) = get_args(hints["return"])
    signature = inspect.Signature(list(leaves.values()), return_annotation=None if result is NoneType else result)
    return signature, _chosen(parts, leaves)


def _part(parameter: inspect.Parameter, leaves: dict[str, inspect.Parameter]) -> _Value | None:
    """How a parameter or a field is made; what it is made of is added to `leaves`."""
    cls = parameter.annotation
    if not (isinstance(cls, type) and is_dataclass(cls)):
        if parameter.name in leaves:
            raise TypeError(f"two arguments are called {parameter.name}")
        leaves[parameter.name] = parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return None
    hints = get_type_hints(cls)
    made = []
    for f in fields(cls):
        default = inspect.Parameter.empty if f.default is MISSING else f.default
        made.append((f.name, _part(parameter.replace(name=f.name, annotation=hints[f.name], default=default), leaves)))
    return _Value(cls, tuple(made))


def _chosen(parts: _Parts, leaves: Mapping[str, Any]) -> _Parts:
    """`parts` without what no argument in `leaves` makes."""
    kept: list[tuple[str, _Value | None]] = []
    for name, value in parts:
        if value is None:
            kept += [(name, None)] * (name in leaves)
        elif inner := _chosen(value.parts, leaves):
            kept.append((name, _Value(value.cls, inner)))
    return tuple(kept)


def _given(parts: _Parts, arguments: Mapping[str, Any]) -> dict[str, Any]:
    made = {}
    for name, value in parts:
        if value is not None:
            made[name] = value.cls(**_given(value.parts, arguments))
        elif name in arguments:
            made[name] = arguments[name]
    return made


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (UnionType, Union):
        (annotation,) = (a for a in get_args(annotation) if a is not NoneType)
    return annotation


def op(
    *,
    mutates: Iterable[str] = (),
    takes: Mapping[str, str] | None = None,
    required: Iterable[str] = (),
    optional: Iterable[str] = (),
) -> Callable[[Callable[P, Call[R]]], Op[P, R]]:
    """Marks a function of op.py as one of the folder's ops. mutates, takes, required, optional: see Op.

    Its parameters are tensors, lists of them, numbers, strs, bools and dtypes with annotations that torch.library can
    read, or values of those, and it is annotated to return Call[Tensor], Call[tuple[Tensor, ...]] or Call[None]:
    `kerngen.ops` registers it under its name.
    """

    def mark(make: Callable[P, Call[R]]) -> Op[P, R]:
        return Op(make.__name__, make, tuple(mutates), takes or {}, tuple(required), tuple(optional))

    return mark
