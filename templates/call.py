"""A kernel call as a value: which kernel, which problem, which arguments. Nothing has run.

Functions marked `@op` in a folder's op.py turn tensors into a Call, and nothing else knows how tensors become a
problem. An executor (runtime/executors) launches it, records it, or answers it by the folder's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

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


@dataclass(frozen=True, slots=True)
class Op(Generic[P, R]):
    """A function from tensors to a Call. mutates: parameters whose tensors the call writes, beside its result.

    takes: what its tensors must be, "DTYPE[DIM, ...]" by parameter; checked where others call it (`kerngen.ops`). DTYPE
    is fp16, bf16, fp32, int32, int64, a parameter that is a dtype, or a letter, which stands for one dtype throughout.
    A DIM that is one name stands for one size throughout, "_" for any size, a leading "..." for any number of them;
    others are expressions of those names and of parameters that are numbers. "each DTYPE[DIM, ...]" is said of a list.
    """

    name: str
    make: Callable[P, Call[R]]
    mutates: tuple[str, ...]
    takes: Mapping[str, str]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        return self.make(*args, **kwargs)


def op(
    *, mutates: Iterable[str] = (), takes: Mapping[str, str] | None = None
) -> Callable[[Callable[P, Call[R]]], Op[P, R]]:
    """Marks a function of op.py as one of the folder's ops. mutates, takes: see Op.

    Its parameters are tensors, lists of them, numbers, strs, bools and dtypes with annotations that torch.library can
    read, and it is annotated to return Call[Tensor], Call[tuple[Tensor, ...]] or Call[None]: `kerngen.ops` registers it
    under its name.
    """

    def mark(make: Callable[P, Call[R]]) -> Op[P, R]:
        return Op(make.__name__, make, tuple(mutates), takes or {})

    return mark
