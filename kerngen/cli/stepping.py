"""What commands that run one step of a model have in common: how the step is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--phase", type=click.Choice(["decode", "verify", "prefill", "draft"]), default="decode", show_default=True
    ),
    click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences; of a prefill one."),
    click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Keys of a sequence."),
    click.option(
        "--tokens", type=click.IntRange(1), default=None, help="Of a verify or a prefill. Default: 4, the context."
    ),
)


def step_options(command: C) -> C:
    """--phase, --batch, --context and --tokens: the arguments of Step.of_phase."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
