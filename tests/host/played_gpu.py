"""The GPU's process, played: it times by a formula, and remembers what it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, Self

from kerngen.arch import ARCHES, Device, Target, find_device
from kerngen.timing.gpu import Clocks
from kerngen.timing.measure import Ceilings
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning.worker import Observed
from kerngen.workload.steps import Ratio

Times = Callable[[Any, Any], float | str]


class PlayedGpu:
    """In place of GpuWorker: `board`, on which a configuration of a problem takes what `times` gives, in microseconds.

    A text is why its result is wrong; one that begins with "!" is why it does not run. In a step a configuration is a
    factor of the step's time, by problem, configuration and pairs of the look; a text says that the step breaks.
    after: called with the number of measurements so far, before each.
    """

    def __init__(
        self,
        times: Times = lambda problem, config: 10.0,
        *,
        board: str = "H200",
        uuid: str = "GPU-1",
        factors: Callable[[Any, Any, int], float | str] = lambda problem, config, pairs: 1.0,
        again: Times | None = None,
        after: Callable[[int], object] = lambda n: None,
    ) -> None:
        self.times, self.factors, self.again, self._after = times, factors, again or times, after
        self.board, self._uuid = board, uuid
        self.measured: list[tuple[Any, Any]] = []
        self.together: list[list[Any]] = []
        self.looks: list[tuple[dict[Any, Any], dict[Any, Any], int]] = []

    def __call__(self, timeout_s: float) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def device(self) -> Device:
        return find_device(self.board)

    def target(self) -> Target:
        return Target.of(self.device())

    def environment(self) -> dict[str, Any]:
        return {"driver": "555.1", "gpu": "played"}

    def uuid(self) -> str:
        return self._uuid

    def clocks(self) -> Clocks:
        return Clocks(1530, None, 40, None, ())

    def ceilings(self) -> Ceilings:
        return Ceilings(4580.0, 4100.0, 790.0, {})

    def start(self) -> None:
        pass

    def measure(
        self,
        kernel: Any,
        problem: Any,
        config: Any,
        image: bytes,
        *,
        samples: int = 15,
        target_ms: float = 0.0,
        within_s: float = inf,
    ) -> Observed:
        assert why_not_cubin(image, ARCHES[self.device().arch]) is None
        self._after(len(self.measured))
        self.measured.append((problem, config))
        return self._seen(self.times(problem, config), samples, is_timed_wrong=False)

    def finals(
        self, kernel: Any, problem: Any, configs: list[tuple[Any, bytes]], *, within_s: float = inf
    ) -> list[Observed]:
        return [self.measure(kernel, problem, c, image) for c, image in configs]

    def in_turn(
        self, kernel: Any, problem: Any, candidates: Sequence[tuple[Any, bytes, bool]], *, samples: int
    ) -> list[Observed]:
        self.together.append([config for config, _, _ in candidates])
        return [self._seen(self.again(problem, c), samples, is_timed_wrong=wrong) for c, _, wrong in candidates]

    def _seen(self, what: float | str, samples: int, *, is_timed_wrong: bool) -> Observed:
        if isinstance(what, str) and what.startswith("!"):
            return Observed("launch_failed", what[1:])
        if isinstance(what, str):
            us = 1.0 if is_timed_wrong else None
            return Observed("wrong_result", what, us, us, us, us, samples)
        return Observed("ok", "", what, what - 0.01, what + 0.01, what - 0.02, samples, 1e-3, 1e-4, {"sm_mhz": 1530})

    def compare(
        self,
        model: Any,
        step: Any,
        base: Sequence[Any],
        other: Sequence[Any],
        *,
        pairs: int,
        within_s: float = inf,
        fused: Any = None,
    ) -> Any:
        before, after = ({e.problems[0]: e.config for e in chosen} for chosen in (base, other))
        self.looks.append((before, after, pairs))
        factors = [[self.factors(p, c, pairs) for p, c in chosen.items()] for chosen in (before, after)]
        if broken := [f for f in factors[0] + factors[1] if isinstance(f, str)]:
            return Observed("launch_failed", broken[0])
        us = [1000 * prod(f for f in of if not isinstance(f, str)) for of in factors]
        return Ratio(us[1] / us[0], 0.0001, us[0])
