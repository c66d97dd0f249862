"""A tune keeps its time budget, whatever is slow, and says each minute what it has gained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Any

import pytest
from test_step import FakeTimer, _key
from test_tune import V100, FakeGpu, TimedGpu

from kerngen.arch import Arch, Target
from kerngen.compiler.compile import Cubin, compile_cubin
from kerngen.errors import CompileError
from kerngen.templates.kernel import Kernel
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.objective import Measured, Objective, Predicted
from kerngen.tuning.report import Report
from kerngen.tuning.step_objective import Choice, Ratio, Stepped, TimedStep
from kerngen.tuning.tuner import Tuner
from kerngen.tuning_db import Store
from kerngen.workload.workload import Item, Use, Workload

BUDGET_S = 60.0
TOKENS = (1, 16, 64, 512, 4096)
Clock = Callable[[], float]


class PlayedCompiler:
    """Compiles one source after another, each in `seconds` of its own clock, which goes on while one is waited for."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self._free_at = 0.0
        self._made: dict[str, Future[Cubin]] = {}

    def submit(self, source: str, arch: Arch) -> Future[Cubin]:
        if source not in self._made:
            self._free_at = max(self._free_at, self.now) + self.seconds
            self._made[source] = _Compiling(self, source, arch, self._free_at)
        return self._made[source]


class _Compiling(Future[Cubin]):
    def __init__(self, compiler: PlayedCompiler, source: str, arch: Arch, at: float) -> None:
        super().__init__()
        self._compiler, self._asked, self._at = compiler, (source, arch), at

    def done(self) -> bool:
        if self._compiler.now >= self._at and not super().done():
            try:
                self.set_result(compile_cubin(*self._asked))
            except CompileError as e:
                self.set_exception(e)
        return super().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._compiler.now += timeout or 0.0
        if not self.done():
            raise TimeoutError
        return super().exception()


def _items(scale: Kernel, tokens: Sequence[int] = TOKENS) -> list[Item]:
    uses = (Use("here", "decode", 1, 1, 10, 512),)
    return [Item("scale", scale.problem_type(num_tokens=t), uses) for t in tokens]


def _tune(folder: Path, objective: Objective, items: Sequence[Item], compiler: Any, clock: Clock, **how: Any) -> Report:
    with Store.open(folder / "a.db") as store:
        return Tuner(objective, store, compiler, time_budget_s=BUDGET_S, clock=clock, **how).run(items)


@pytest.mark.parametrize("seconds", [5.0, 100.0])
@pytest.mark.parametrize("measured", [True, False])
def test_slow_compiles(scale: Kernel, tmp_path: Path, seconds: float, measured: bool) -> None:
    compiler = PlayedCompiler(seconds)
    objective: Objective = Measured(FakeGpu()) if measured else Predicted(Target.of(V100))  # type: ignore[arg-type]
    report = _tune(tmp_path, objective, _items(scale), compiler, lambda: compiler.now)
    assert report.out_of_time == (measured or seconds > BUDGET_S)
    assert compiler.now <= BUDGET_S + 1
    assert any(r.winner is not None for r in report.results) == (seconds < BUDGET_S)


@pytest.mark.parametrize(("trial_s", "final_s"), [(40.0, 0.1), (100.0, 0.1), (0.5, 20.0), (0.5, 200.0)])
def test_slow_trials_and_finals(scale: Kernel, tmp_path: Path, trial_s: float, final_s: float) -> None:
    gpu: Any = TimedGpu(trial_s, final_s)
    report = _tune(tmp_path, Measured(gpu), _items(scale), PlayedCompiler(0.0), lambda: gpu.now)
    assert report.out_of_time
    assert gpu.now <= BUDGET_S
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale", provenance="measured")]
    assert {m.outcome for m in rows} <= {"ok", "compile_failed", "wrong_result"}, "what was cut short has no row"
    assert len(gpu.tried) == len([m for m in rows if m.stage == "trial" and m.outcome != "compile_failed"])


@pytest.mark.parametrize(("model_s", "look_s"), [(30.0, 1.0), (500.0, 1.0), (0.0, 40.0), (0.0, 4.0)])
def test_slow_steps(scale: Kernel, tmp_path: Path, model_s: float, look_s: float) -> None:
    """The first look makes the step's model. A look may get slower than the first ones were."""
    now, looks = [0.0], [0]

    class Slow(FakeTimer):
        def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
            looks[0] += 1
            takes = look_s * (1 + looks[0] / 4) + model_s * (looks[0] == 1)
            now[0] += min(takes, within_s)
            if takes > within_s:
                raise OutOfTime
            return super().compare(base, other, pairs=pairs, within_s=within_s)

    items = _items(scale, (4096, 8192, 16384, 64))
    load = Workload("toy", "sm70", tuple(items))
    gpu: Any = FakeGpu()
    objective = Stepped(gpu, [TimedStep(_key(), Slow(scale))], load.serving)
    report = _tune(tmp_path, objective, items, PlayedCompiler(0.0), lambda: now[0])
    assert looks[0] > 0
    assert now[0] <= BUDGET_S
    assert all(r.winner is not None for r in report.results)
    steps = [r.winner.config for r in report.results[:3] if r.winner is not None]
    if model_s > BUDGET_S or look_s > BUDGET_S / 4:
        assert "could choose" in report.remarks[0]
        assert {c["vectors"] for c in steps} == {1}, "what no step judged does not change a step"
    else:
        _, ends, *taken = report.remarks
        assert ends.startswith("steps at the end: ")
        assert "not judged" not in ends
        assert not taken


def test_what_the_steps_chose_before_looks_got_slower_stands(scale: Kernel, tmp_path: Path) -> None:
    now, looks = [0.0], [0]

    class Slower(FakeTimer):
        def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
            looks[0] += 1
            takes = 0.1 if looks[0] < 6 else 1.0
            now[0] += min(takes, within_s)
            if takes > within_s:
                raise OutOfTime
            return super().compare(base, other, pairs=pairs, within_s=within_s)

    items = _items(scale, (4096, 8192, 16384, 64))
    gpu: Any = FakeGpu()
    timer = Slower(scale)
    objective = Stepped(gpu, [TimedStep(_key(), timer)], Workload("toy", "sm70", tuple(items)).serving)
    _tune(tmp_path, objective, items, PlayedCompiler(0.0), lambda: now[0])
    assert now[0] <= BUDGET_S
    assert objective.descent is not None
    assert not objective.descent.complete, "else this shows nothing"
    assert objective.descent.ratio < 0.9
    assert objective.remarks[1].startswith("steps at the end: 0.")


def test_each_minute_it_says_what_it_has_gained(scale: Kernel, tmp_path: Path) -> None:
    gpu: Any = TimedGpu(9.0, 0.1)
    said: list[str] = []
    items = [*_items(scale, TOKENS), Item("scale", scale.problem_type(num_tokens=3))]
    with Store.open(tmp_path / "a.db") as store:
        compiler: Any = PlayedCompiler(0.0)
        tuner = Tuner(Measured(gpu), store, compiler, time_budget_s=200, clock=lambda: gpu.now,
                      tell=lambda gain: said.append(str(gain)))  # fmt: skip
        report = tuner.run(items)
    assert [g.minutes for g in report.gains] == [1, 2, 3]
    assert [str(g) for g in report.gains] == said
    assert said[0].startswith("after 1 min: decode, batch 1, context 512 ")
    assert "faster than with the defaults (kernels alone, measured; 6 of 6 problems tried)" in said[-1]
    first, *_, last = [g.faster or 0.0 for g in report.gains]
    assert 0 <= first <= last
    best = {r.item.problem.num_tokens: r for r in report.results if r.item.uses}
    default_us = sum(r.default_us or 0.0 for r in best.values())
    assert last <= 1 - sum(min(c for t, c in _us(gpu) if t == n) for n in best) / default_us + 1e-9


def _us(gpu: Any) -> list[tuple[int, float]]:
    found = ((tokens, gpu.times(None, config)) for tokens, config in gpu.tried)
    return [(tokens, us) for tokens, us in found if isinstance(us, float)]
