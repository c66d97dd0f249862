"""Traces which fields of a Problem or a Config a function reads.

`traced` makes a value whose fields are asked for as they are read; everything else of it (methods, properties,
equality, hash) is its class's own. What a pure function answered holds for all values that agree in the fields that it
read: so `leaves` knows a function on a whole grid after far fewer calls than the grid has points, and `Remembered`
calls one again only where an argument differs in what counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kerngen.errors import TemplateError

R = TypeVar("R")


class _Field:
    """Asks for a field where it is read first. The value goes to the instance's own dict, which comes before this:
    later reads cost what they do of any object.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, value: Any, owner: type[Any]) -> Any:
        found = value._ask(self._name)
        value._seen[self._name] = value.__dict__[self._name] = found
        return found


_classes: dict[type[Any], type[Any]] = {}


def _watching(cls: type[Any]) -> type[Any]:
    """A subclass of the dataclass `cls` that asks for its fields as they are read."""
    if cls not in _classes:
        members: dict[str, Any] = {f.name: _Field(f.name) for f in dataclasses.fields(cls)}
        members["__slots__"] = ("__dict__", "_ask", "_seen") if not cls.__dictoffset__ else ("_ask", "_seen")
        members["__class__"] = property(lambda self: cls)  # for ==, hash and dataclasses.replace, which ask for it
        _classes[cls] = type(f"Watched{cls.__name__}", (cls,), members)
    return _classes[cls]


def traced(cls: type[Any], ask: Callable[[str], Any]) -> tuple[Any, dict[str, Any]]:
    """A value of the dataclass `cls`, whose fields `ask` gives; and those read so far, in the order of reading."""
    made, seen = object.__new__(_watching(cls)), dict[str, Any]()
    object.__setattr__(made, "_ask", ask)  # __setattr__ of a frozen dataclass refuses
    object.__setattr__(made, "_seen", seen)
    return made, seen


def leaves(
    cls: type[Any], grid: Mapping[str, Sequence[Any]], of: Callable[[Any], R]
) -> Iterator[tuple[dict[str, Any], R]]:
    """The whole of `of` on the grid: of each case that it told apart the fields that it read, and its answer.

    Fields of `cls` that the grid leaves out have their default. Every point of the grid belongs to exactly one case,
    the one whose values it has. Depth first in the order of reading: after each call the field read last takes its next
    value. Raises TemplateError where `of` is found to be no function: equal values so far, another field read next.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    path: list[tuple[str, Sequence[Any], int]] = []  # fields read, their values, which of these
    depth = 0  # of the call under way

    def ask(name: str) -> Any:
        nonlocal depth
        if (values := grid.get(name)) is None:
            return defaults[name]
        if depth == len(path):
            path.append((name, values, 0))
        elif path[depth][0] != name:
            raise TemplateError(f"{cls.__module__}: what is asked of a {cls.__name__} reads {name} where it read "
                                f"{path[depth][0]} of an equal one: it is no function of its arguments")  # fmt: skip
        at = path[depth][2]
        depth += 1
        return values[at]

    while True:
        depth = 0
        value, seen = traced(cls, ask)
        answer = of(value)
        yield seen, answer
        while path and path[-1][2] + 1 == len(path[-1][1]):
            path.pop()
        if not path:
            return
        name, values, at = path[-1]
        path[-1] = name, values, at + 1


class Remembered(Generic[R]):
    """`of`, a pure function of a dataclass, called once for all arguments that agree in the fields that it reads."""

    def __init__(self, cls: type[Any], of: Callable[[Any], R]) -> None:
        self.num_calls = 0
        self._cls, self._of = cls, of
        self._root: list[Any] = []  # [the field read next, its value -> the node after it], or [None, the answer]

    def __call__(self, value: Any) -> R:
        node = self._root
        while node:
            name, rest = node
            if name is None:
                answer: R = rest
                return answer
            node = rest.setdefault(getattr(value, name), [])
        self.num_calls += 1
        asked, seen = traced(self._cls, lambda name: getattr(value, name))
        found = self._of(asked)
        node = self._root
        for name, read in seen.items():
            if not node:
                node.extend((name, {}))
            node = node[1].setdefault(read, [])
        node.extend((None, found))
        return found
