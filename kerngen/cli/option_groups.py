"""Options that commands share, in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Decorator = Callable[[Any], Any]
_C = TypeVar("_C", bound=Callable[..., Any])


def with_options(*groups: Sequence[Decorator]) -> Callable[[_C], _C]:
    """A decorator that gives a command all options of `groups`, which --help shows in this order."""

    def decorate(command: _C) -> _C:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate
