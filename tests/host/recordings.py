"""Recordings of a truth that is known, of the toy kernel and of real ones: no GPU, no compile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import pairwise, product
from typing import Any

from kerngen.arch import Target
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import predict
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
    parts = (
        {k: tuple(v for v in vs if v in kept.get(k, vs)) for k, vs in body.choices(problem, target).items()}
        for body in kernel.bodies(target.arch)
    )
    grid = tuple(part for part in parts if all(part.values()))
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


def distorted(
    kernel: Kernel, problem: Any, target: Target, *, strength: float = 0.4, noise: float = 0.01, seed: int = 0
) -> Callable[[Any], float]:
    """A truth that the cost model gets wrong as it does on a GPU: by a factor for each tunable's value and for some
    pairs of them, of `strength` as a standard deviation of its logarithm, and by noise that nothing explains.
    """
    drawn: dict[Any, float] = {}

    def normal(*key: Any) -> float:
        if key not in drawn:
            drawn[key] = random.Random(repr((seed, *key))).gauss(0.0, 1.0)
        return drawn[key]

    def us(config: Any) -> float:
        chosen = fields_of(config)
        numbers = {k: math.log2(1 + v) / 8 for k, v in chosen.items() if isinstance(v, int)}
        names = sorted(numbers)
        wrong = sum(normal(n, "slope") * numbers[n] + normal(n, "bend") * numbers[n] ** 2 for n in names)
        wrong += sum(2 * normal(a, b, "pair") * numbers[a] * numbers[b] for a, b in pairwise(names))
        model = predict(kernel, problem, config, target, registers=96).latency_us
        return model * math.exp(strength * wrong + noise * normal(config, "noise"))

    return us
