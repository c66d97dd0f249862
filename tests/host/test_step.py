"""Finalists judged by whole steps: a made-up step whose kernels interact, on the toy kernel and a made-up GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from test_tune import V100, FakeGpu

from kerngen.arch import Target
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.errors import DeviceError
from kerngen.templates.kernel import Kernel
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.objective import Measured, Outcome
from kerngen.tuning.report import Report
from kerngen.tuning.space import candidates
from kerngen.tuning.step_objective import (
    BAND,
    MOST,
    Choice,
    Ratio,
    Stepped,
    StepPoint,
    TimedStep,
    footprint,
    of_whole_step,
)
from kerngen.tuning.study import Search
from kerngen.tuning.tuner import Tuner
from kerngen.tuning_db import Store
from kerngen.tuning_db.read.values import StepKey
from kerngen.workload.workload import Item, Use, Workload

TOKENS = (4096, 8192, 16384)  # of the problems of the step, in its order
CACHE = Path()
CROWDED = 128  # threads: below, a block's kernel holds up the one after it


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What one test compiled, the others have."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr("test_step.CACHE", tmp_path_factory.mktemp("cache"))
        yield


def _key(name: str = "decode", weight: float = 1.0) -> StepKey:
    return StepKey("toy", "sm70", name, 1, 1, 512, 0, 2, f"launches of {name}", weight)


class FakeTimer:
    """A step of `tokens`, ten launches each. Small blocks of the second problem hold up the third's, by far more than
    they gain; two that are wide both, of the first and the second, gain together what neither does alone.
    """

    def __init__(self, scale: Kernel, tokens: Sequence[int] = TOKENS, *, broken: int = 0) -> None:
        self._points = tuple(StepPoint("scale", scale.problem_type(num_tokens=t), 10, 80.0) for t in tokens)
        self._default = {p: scale.default_config(p.problem, Target.of(V100)) for p in self._points}
        self._broken = broken  # threads that do not run here
        self.num_looks = 0

    def stand_for(self, times: dict[int, float]) -> None:
        """By token counts: how many launches of the whole step each stands for."""
        self._default = {replace(p, times=times[p.problem.num_tokens]): config for p, config in self._default.items()}
        self._points = tuple(self._default)

    def points(self) -> tuple[StepPoint, ...]:
        return self._points

    def us(self, chosen: dict[StepPoint, Any]) -> float:
        total = sum(10 * (100.0 - 10 * c.vectors + c.threads / 64) for c in chosen.values())
        configs = [chosen[p] for p in self._points]
        for before, after in pairwise(configs[1:]):
            total += 100.0 * (before.threads < CROWDED)
            assert after is not None
        if len(configs) == 3 and configs[0].threads == configs[1].threads == 256:
            total -= 150.0
        return total

    def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
        assert pairs > 0
        assert all(image[:4] == b"\x7fELF" for choice in (base, other) for _, image in choice.values())
        self.num_looks += 1
        times = []
        for choice in (base, other):
            chosen = self._default | {p: config for p, (config, _) in choice.items()}
            if any(c.threads == self._broken for c in chosen.values()):
                raise DeviceError("it does not run in a graph", hint="never mind")
            times.append(self.us(chosen))
        return Ratio(times[1] / times[0], 1e-4, times[0])


def _tune(
    scale: Kernel, folder: Path, timers: dict[StepKey, FakeTimer], tokens: Sequence[int] = TOKENS, **how: Any
) -> tuple[Report, Stepped]:
    items = tuple(
        Item("scale", scale.problem_type(num_tokens=t), (Use("here", "decode", 1, 1, 10, 512),)) for t in tokens
    )
    load = Workload("toy", "sm70", items)
    objective = Stepped(FakeGpu(), [TimedStep(k, t) for k, t in timers.items()], load.serving)  # type: ignore[arg-type]
    with Store.open(folder / "a.db") as store, CachedCompiler(1, CompileCache(CACHE)) as compiler:
        return Tuner(objective, store, compiler, **how).run(items), objective


def _won(report: Report) -> dict[int, dict[str, Any]]:
    return {r.item.problem.num_tokens: r.winner.config for r in report.results if r.winner is not None}


def test_the_step_overrules_the_clock(scale: Kernel, tmp_path: Path) -> None:
    timer = FakeTimer(scale)
    report, objective = _tune(scale, tmp_path, {_key(): timer}, (*TOKENS, 64))
    won = _won(report)
    assert {t: (c["threads"], c["vectors"]) for t, c in won.items()} == {
        4096: (256, 4), 8192: (256, 4), 16384: (32, 4), 64: (32, 4)
    }, "two wide ones together, which neither the clock nor one exchange at a time finds"  # fmt: skip
    assert objective.descent.complete
    assert any(i.excess < -0.01 for i in objective.descent.interactions)
    assert report.remarks
    assert "faster than with the defaults" in report.remarks[0]
    wide = next(r.winner for r in report.results if r.item.problem.num_tokens == 8192)
    assert wide.latency_us == pytest.approx(64.0), "its time alone"
    assert "in the step" in wide.reason
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale")]
        (step,) = store.steps().values()
    assert step == _key()
    in_step = [m for m in rows if m.stage == "step"]
    assert {m.problem.fields["num_tokens"] for m in in_step} == set(TOKENS)
    assert {m.problem.fields["num_tokens"] for m in rows if m.stage == "final"} == {64}
    assert len({m.base_id for m in in_step}) == 1
    for m in in_step:
        assert m.provenance == "measured"
        assert m.p50_us == pytest.approx(100.0 - 10 * m.config["vectors"] + m.config["threads"] / 64)
        assert m.error_abs == 1e-3
        assert (m.step_us == m.base_step_us) == (m.config == won[m.problem.fields["num_tokens"]])
    assert any("descent" in m.tags for m in in_step)


@pytest.mark.parametrize(("changed", "to_us"), [(0, 8.0), (1, 45.0), (2, 50.0)])
def test_a_step_of_few_layers_is_scaled_to_the_whole_models(changed: int, to_us: float) -> None:
    """Twelve of sixty layers: what a kernel of theirs gains it gains five times, what the head gains once."""
    a, b, head = (
        StepPoint("k", i, n, us, t) for i, (n, us, t) in enumerate([(12, 10.0, 5.0), (2, 30.0, 5.0), (1, 100.0, 1.0)])
    )
    points = [(p, p.us) for p in (a, b, head)]
    run, whole = 280.0, 1000.0  # 12 x 10 + 2 x 30 + 100; 60 x 10 + 10 x 30 + 100
    point, us = points[changed]
    gains = point.launches * (us - to_us)
    seen = Ratio((run - gains) / run, 0.01, 2 * run)  # launched one after another they take twice as long as alone
    found = of_whole_step(seen, points, {point})
    assert found.base_us == pytest.approx(2 * whole)
    assert found.median == pytest.approx((whole - point.times * gains) / whole)
    assert found.spread == pytest.approx(0.01 * point.times * run / whole)
    same = of_whole_step(Ratio(1.002, 0.01, 2 * run), points, set())
    assert (same.median, same.spread) == (pytest.approx(1.002), pytest.approx(0.01)), "noise is what it is"
    alike = [(StepPoint("k", p.problem, p.launches, p.us), p.us) for p, _ in points]
    assert of_whole_step(seen, alike, {alike[changed][0]}) is seen, "all layers were run"


def test_rows_have_the_whole_models_step(scale: Kernel, tmp_path: Path) -> None:
    timer = FakeTimer(scale)
    timer.stand_for({4096: 5.0, 8192: 5.0, 16384: 1.0})
    report, _ = _tune(scale, tmp_path, {_key(): timer})
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale") if o.measurement.stage == "step"]
        chosen = {w.problem.fields["num_tokens"]: w.latency_us for w in store.winners("scale")}
    run, whole = (sum(10 * t * us for t, us in zip(times, (chosen[n] for n in TOKENS), strict=True))
                  for times in ((1, 1, 1), (5, 5, 1)))  # fmt: skip
    base_us = {m.base_step_us for m in rows}
    assert len(base_us) == 1
    (shown,) = base_us
    by_tokens = {p.problem.num_tokens: p for p in timer.points()}
    best = {by_tokens[n]: scale.config_type(**config) for n, config in _won(report).items()}
    assert shown == pytest.approx(timer.us(best) * whole / run)


def test_the_winners_follow_from_the_file_alone(scale: Kernel, tmp_path: Path) -> None:
    report, _ = _tune(scale, tmp_path, {_key(): FakeTimer(scale)})
    with Store.open(tmp_path / "a.db") as store:
        for w in store.winners("scale"):
            again = store.recompute_winners(scale, w.problem.static_key, Target.of(V100))
            assert {v.problem.dynamic: v.config for v in again} == _won(report)


def test_a_second_run_looks_at_nothing_again(scale: Kernel, tmp_path: Path) -> None:
    first, _ = _tune(scale, tmp_path, {_key(): FakeTimer(scale)})
    timer = FakeTimer(scale)
    second, _ = _tune(scale, tmp_path, {_key(): timer})
    assert timer.num_looks == 0
    assert _won(second) == _won(first)
    other = FakeTimer(scale)
    _tune(scale, tmp_path, {_key("verify"): other})
    assert other.num_looks > 0, "other steps are another search"


def test_two_steps_are_weighed(scale: Kernel, tmp_path: Path) -> None:
    """The second problem is held up in one step, and in the other it is alone, where small blocks are best."""
    timers = {_key("decode", 0.01): FakeTimer(scale), _key("draft", 1.0): FakeTimer(scale, (8192, 64))}
    report, _ = _tune(scale, tmp_path, timers, (*TOKENS, 64))
    assert _won(report)[8192]["threads"] == 32
    heavy = {_key("decode", 1.0): FakeTimer(scale), _key("draft", 0.01): FakeTimer(scale, (8192, 64))}
    (tmp_path / "other").mkdir()
    report, _ = _tune(scale, tmp_path / "other", heavy, (*TOKENS, 64))
    assert _won(report)[8192]["threads"] == 256


def test_what_makes_a_step_slower_than_before_is_taken_back(scale: Kernel, tmp_path: Path) -> None:
    """As `two steps are weighed`, with all problems tuned alone before: the light step would pay for the heavy one."""
    tokens = (*TOKENS, 64)
    items = [Item("scale", scale.problem_type(num_tokens=t), (Use("here", "decode", 1, 1, 10, 512),)) for t in tokens]
    gpu: Any = FakeGpu()
    with Store.open(tmp_path / "a.db") as store, CachedCompiler(1, CompileCache(CACHE)) as compiler:
        alone = _won(Tuner(Measured(gpu), store, compiler).run(items))
    light = FakeTimer(scale, (8192, 64))
    timers = {_key("decode", 1.0): FakeTimer(scale), _key("draft", 0.01): light}
    report, objective = _tune(scale, tmp_path, timers, tokens)
    by_tokens = {p.problem.num_tokens: p for p in light.points()}
    chosen = {by_tokens[p.num_tokens]: c for (_, p), c in objective.descent.chosen.items() if p.num_tokens in by_tokens}
    before = {by_tokens[t]: scale.config_type(**alone[t]) for t in by_tokens}
    assert light.us(chosen) > light.us(before) * 1.005, "what the descent chose by weight"
    assert _won(report)[8192] == alone[8192]
    assert {t: c for t, c in _won(report).items() if t in by_tokens} == {t: alone[t] for t in by_tokens}
    _, ends, taken = report.remarks
    assert re.fullmatch(
        r"steps at the end: 1\.000 of before \(.*decode.*: \S+ \+- \S+; .*draft.*: 1\.000 \+- \S+\)", ends
    )
    assert taken.startswith("taken back, since a step was slower with it: scale[width=1024 num_tokens=8192]")
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale") if "taken_back" in o.measurement.tags]
    assert (8192, True) in {(m.problem.fields["num_tokens"], m.step_us == m.base_step_us) for m in rows}


def test_what_does_not_run_in_the_step_is_never_chosen(scale: Kernel, tmp_path: Path) -> None:
    report, _ = _tune(scale, tmp_path, {_key(): FakeTimer(scale, broken=256)})
    assert all(c["threads"] != 256 for c in _won(report).values())
    assert _won(report)[8192]["threads"] == 128


def test_where_the_step_cannot_be_timed_the_clock_decides(scale: Kernel, tmp_path: Path) -> None:
    report, _ = _tune(scale, tmp_path, {_key(): FakeTimer(scale, broken=32)})
    assert "could not be timed" in report.remarks[0]
    assert {c["vectors"] for c in _won(report).values()} == {4}


def test_out_of_time_what_was_chosen_by_then_stands(scale: Kernel, tmp_path: Path) -> None:
    now = [0.0]

    class Slow(FakeTimer):
        def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
            now[0] += 10.0
            return super().compare(base, other, pairs=pairs, within_s=within_s)

    timers = {_key(): Slow(scale)}
    report, objective = _tune(scale, tmp_path, timers, (64, *TOKENS), time_budget_s=200, clock=lambda: now[0])
    assert objective.descent.num_evaluations > 1
    assert not objective.descent.complete
    assert len(_won(report)) == 4
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale")]

    def of_stage(stage: str) -> set[int]:
        return {m.problem.fields["num_tokens"] for m in rows if m.stage == stage}

    assert of_stage("step") == set(TOKENS), "each has a row at least"
    assert of_stage("final") == {64}, "the steps leave time for what no step launches"


@pytest.mark.parametrize("look_s", [1.0, 3.0, 9.0, 30.0])
def test_twenty_seconds_leave_an_answer_for_all(scale: Kernel, tmp_path: Path, look_s: float) -> None:
    """However long a look takes, none goes on after the end, and what no step judged does not change the steps."""
    now = [0.0]

    class Slow(FakeTimer):
        def compare(self, base: Choice, other: Choice, *, pairs: int, within_s: float = inf) -> Ratio:
            now[0] += min(look_s, within_s)
            if look_s > within_s:
                raise OutOfTime
            return super().compare(base, other, pairs=pairs, within_s=within_s)

    timers: dict[StepKey, FakeTimer] = {_key("decode"): Slow(scale), _key("draft"): Slow(scale)}
    report, objective = _tune(scale, tmp_path, timers, (*TOKENS, 64), time_budget_s=20, clock=lambda: now[0])
    assert set(_won(report)) == {*TOKENS, 64}
    assert now[0] <= 20
    if look_s > 1:
        assert objective.descent is None
        assert report.remarks == ["the time was over before the steps could choose: what ran before stands"]
        assert {t: c["vectors"] for t, c in _won(report).items()} == dict.fromkeys(TOKENS, 1) | {64: 4}
        later, _ = _tune(scale, tmp_path, {k: FakeTimer(scale) for k in timers}, (*TOKENS, 64))
        assert {c["vectors"] for c in _won(later).values()} == {4}, "a run with more time goes on"


@pytest.mark.parametrize("objective", ["measured", "step"])
def test_what_is_not_measured_in_twenty_seconds_has_no_row(scale: Kernel, tmp_path: Path, objective: str) -> None:
    now = [0.0]

    class Slow(FakeGpu):
        def measure(self, *asked: Any, **options: Any) -> Any:
            now[0] += 8.0
            return super().measure(*asked, **options)

    tokens = (*TOKENS, 64, 128, 256, 512)
    items = [Item("scale", scale.problem_type(num_tokens=t), (Use("here", "decode", 1, 1, 10, 512),)) for t in tokens]
    load, timer = Workload("toy", "sm70", tuple(items)), FakeTimer(scale)
    gpu: Any = Slow()
    by = Measured(gpu) if objective == "measured" else Stepped(gpu, [TimedStep(_key(), timer)], load.serving)
    with Store.open(tmp_path / "a.db") as store, CachedCompiler(1, CompileCache(CACHE)) as compiler:
        report = Tuner(by, store, compiler, time_budget_s=20, clock=lambda: now[0]).run(items)
    assert report.out_of_time
    assert now[0] <= 20 + 8
    assert 0 < len(_won(report)) < len(tokens) / 2
    assert {r.winner.provenance for r in report.results if r.winner is not None} == {"measured"}
    assert timer.num_looks == 0


def test_finalists_are_near_alone_and_of_different_footprints(scale: Kernel) -> None:
    problem = scale.problem_type(num_tokens=8192)
    load = Workload("toy", "sm70", (Item("scale", problem),))
    objective = Stepped(FakeGpu(), [TimedStep(_key(), FakeTimer(scale))], load.serving)  # type: ignore[arg-type]
    search = Search(scale, problem, candidates(scale, problem, Target.of(V100)), objective, trials=99, seed=0)
    default = search.candidates.default
    for config in search.candidates.valid:
        us = 60.0 + config.threads / 64 + 10 * (config.flavour != "plain") - config.vectors
        search.tell(config, Outcome("ok", 500.0 if config == default else us, registers=32))
    found = objective.finalists(search)
    assert default in found, "however slow"
    others = [c for c in found if c != default]
    times = [search.outcomes[c].latency_us or 0.0 for c in others]
    assert times == sorted(times)
    assert times[-1] <= times[0] * BAND
    classes = [footprint(scale, problem, c, objective.target, 32) for c in others]
    assert len(set(classes)) == len(classes) <= MOST
    assert {c.threads for c in others} >= {128, 256}
    search.stored = next(c for c in search.candidates.valid if c not in found)
    assert search.stored in objective.finalists(search), "what an earlier run chose is looked at"
    elsewhere = scale.problem_type(num_tokens=7)
    alone = Search(scale, elsewhere, candidates(scale, elsewhere, Target.of(V100)), objective, trials=9, seed=0)
    alone.outcomes = dict(search.outcomes)
    assert alone.objective.finalists(alone) == Measured(FakeGpu()).finalists(alone)  # type: ignore[arg-type]
