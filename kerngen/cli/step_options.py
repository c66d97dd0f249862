"""What commands that run one step of a model have in common: how the step is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kerngen.cli.option_groups import with_options

if TYPE_CHECKING:
    from kerngen.workload.steps import Step

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
    """--phase, --batch, --context and --tokens: the arguments of step_of."""
    return with_options(_OPTIONS)(command)


def step_of(phase: str, batch: int, context: int, tokens: int | None) -> Step:
    """The step that the options name. Raises UsageError for what such a step does not have."""
    from kerngen.errors import UsageError
    from kerngen.workload.steps import Step

    if phase == "prefill" and batch > 1:
        raise UsageError("a prefill is of one sequence", hint="leave out --batch")
    if tokens is not None and phase not in ("verify", "prefill"):
        raise UsageError(f"--tokens says how many a verify or a prefill has; {phase} has one a sequence")
    return {
        "decode": Step.decode(batch, context), "draft": Step.draft(batch, context),
        "verify": Step.verify(batch, tokens or 4, context), "prefill": Step.prefill(tokens or context, context),
    }[phase]  # fmt: skip
