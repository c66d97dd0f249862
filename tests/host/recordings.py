"""Recordings of a truth that is known, of the toy kernel and of real ones: no GPU, no compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import product
from typing import Any

from kerngen.arch import Target
from kerngen.compile import Resources
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.tuning.recorded import Head, Recorded, Row, completed


def recording(
    kernel: Kernel,
    problem: Any,
    target: Target,
    us: Callable[[Any], float | str],
    name: str = "made",
    fewer: Mapping[str, tuple[Any, ...]] | None = None,
    **head: Any,
) -> Recorded:
    """The space of `problem`, each valid configuration with the time that `us` gives, or why it failed.

    fewer: tunables of which only these values are recorded.
    """
    default, kept = kernel.default_config(problem, target), fewer or {}
    grid = tuple(
        {k: tuple(v for v in vs if v in kept.get(k, vs)) for k, vs in body.choices(problem, target).items()}
        for body in kernel.bodies(target.arch)
    )
    points = [kernel.config_type(**dict(zip(p, v, strict=True))) for p in grid for v in product(*p.values())]
    valid = dict.fromkeys(c for c in [*points, default] if kernel.why_invalid(problem, c, target) is None)
    entries = tuple(kernel.bodies(target.arch)[0].args)
    takes = {e: Resources(40, 0, 0, 0, 0) for e in entries}

    def row(config: Any) -> Row:
        if isinstance(took := us(config), str):
            return Row(config, "wrong_result", takes=takes, reason=took)
        return Row(config, "ok", took, took * 0.99, took * 1.02, None, 1980, takes)

    about = Head(
        kernel.name, name, fields_of(problem), target.arch.name, asdict(target.device), grid, fields_of(default),
        len(valid), entries, **head,
    )  # fmt: skip
    return completed(about, map(row, valid))
