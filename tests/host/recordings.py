"""Recordings of a truth that is known, of the toy kernel and of real ones: no GPU, no compile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import pairwise, product
from typing import Any

from kerngen.arch import Device, Target, default_device, find_arch
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import predict
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.timing.gpu import Clocks
from kerngen.tuning.recorded import Head, Recorded, Row, completed
from kerngen.tuning.worker import Observed


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


class FakeGpu:
    """A V100 that times the toy kernel by a formula, and says what it was asked. No two looks are quite alike.

    "spilling" gives wrong results; vectors=4 with 64 threads runs once, and not at the second look. after: called with
    the number of measurements so far, before each one.
    """

    def __init__(self, board: str = "GPU-1", after: Callable[[int], object] = lambda n: None) -> None:
        self.measured: list[tuple[Any, Any]] = []
        self.together: list[list[Any]] = []
        self._board, self._after = board, after

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def device(self) -> Device:
        return default_device(find_arch("sm70"))

    def environment(self) -> dict[str, Any]:
        return {"driver": "555.1", "gpu": "fake"}

    def uuid(self) -> str:
        return self._board

    def clocks(self) -> Clocks:
        return Clocks(1530, None, 40, None, ())

    def measure(
        self, kernel: Kernel, problem: Any, config: Any, image: bytes, *, samples: int, target_ms: float
    ) -> Observed:
        self._after(len(self.measured))
        self.measured.append((problem, config))
        assert image[:4] == b"\x7fELF"
        if config.flavour == "spilling":
            return Observed("wrong_result", "out[0] is 1,\nreference 2")
        us = self.us(problem, config)
        return Observed("ok", "", us, us - 0.01, us + 0.01, us - 0.02, samples, gpu={"sm_mhz": 1530})

    def finals(
        self,
        kernel: Kernel,
        problem: Any,
        configs: list[tuple[Any, bytes]],
        *,
        rounds: int,
        samples: int,
        target_ms: float,
    ) -> list[Observed]:
        self.together.append([c for c, _ in configs])
        return [
            Observed("launch_failed", "no more")
            if (c.vectors, c.threads) == (4, 64)
            else Observed("ok", "", self.us(problem, c) + 0.5, 1.0, 2.0, 1.0, samples * rounds)
            for c, _ in configs
        ]

    @staticmethod
    def us(problem: Any, config: Any) -> float:
        return 100.0 + problem.num_tokens - config.vectors * 10 - config.threads / 64
