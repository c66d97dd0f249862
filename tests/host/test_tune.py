"""The tuner on a toy kernel, compiled with the real NVRTC."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from math import inf
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from played_gpu import PlayedGpu
from toy import TOYS

import kerngen.tuning.plan
from kerngen.arch import Arch, Target, default_device, find_arch, find_device
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.compiler.compile import Cubin, compile_cubin
from kerngen.compiler.render import render
from kerngen.compiler.source_digest import source_digest_of
from kerngen.cost.predict import MODEL, predict
from kerngen.templates import TEMPLATES_VARIABLE, find_kernel
from kerngen.templates.kernel import Kernel, fields_of
from kerngen.timing.gpu import GpuLock
from kerngen.tuning.budget import OutOfTime
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning.describe import Describer
from kerngen.tuning.features import described_space
from kerngen.tuning.objective import Measured, Objective, Outcome, Predicted, Selections
from kerngen.tuning.plan import dry_run, rank, rank_space
from kerngen.tuning.report import Report, Result, groups, notes, step_us
from kerngen.tuning.space import candidates
from kerngen.tuning.study import Search
from kerngen.tuning.task import Trial
from kerngen.tuning.tuner import Tuner
from kerngen.tuning.worker import Observed
from kerngen.tuning_db import Measurement, Store, lookup, problem_key
from kerngen.workload.workload import Item, Use, Workload, find_workload

SM70 = find_arch("sm70")
V100 = default_device(SM70)


@pytest.fixture
def tune(tmp_path: Path, scale: Kernel) -> Callable[..., Report]:
    """tune(tokens, db="a", jobs=1, ...) tunes `scale` for these token counts."""

    def run(
        tokens: tuple[int, ...], *, db: str = "a", jobs: int = 1, objective: Objective | None = None, **how: Any
    ) -> Report:
        items = [Item("scale", scale.problem_type(num_tokens=t)) for t in tokens]
        cache = CompileCache(tmp_path / "cache")
        with Store.open(tmp_path / f"{db}.db") as store, CachedCompiler(jobs, cache) as compiler:
            return Tuner(objective or Predicted(Target.of(SM70)), store, compiler, **how).run(items)

    return run


def _configs(report: Report) -> list[dict[str, Any]]:
    return [r.winner.config for r in report.results if r.winner is not None]


def test_the_winner_is_the_best_of_the_whole_space(tune: Callable[..., Report], scale: Kernel) -> None:
    report = tune((1, 4096), trials=100)
    for result in report.results:
        problem, best = result.item.problem, float("inf")
        for config in candidates(scale, problem, Target.of(SM70)).valid:
            if config.flavour != "broken":
                entries = compile_cubin(render(scale, problem, config, Target.of(SM70)), SM70).entries
                best = min(best, predict(scale, problem, config, Target.of(V100), entries).latency_us)
        assert result.winner.provenance == "predicted"
        assert result.winner.latency_us == pytest.approx(best, rel=0.006), "beaten by more than a prediction's noise"
        assert result.winner.latency_us <= result.default_us
        assert result.spill_bytes == 0
        assert result.num_tried < result.num_valid, "what cannot win should not be compiled"


def test_every_outcome_is_a_row_with_its_reason(tune: Callable[..., Report], tmp_path: Path) -> None:
    objective = Predicted(Target.of(SM70))
    objective.batch = 2  # the second of which is broken
    report = tune((4096,), trials=100, objective=objective)
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale")]
        (winner,) = store.winners("scale")
        image = store.image(store.build(winner.build_id))
    tried = [m for m in rows if "closed" not in m.tags]
    assert len(tried) == report.num_trials == len({str(m.config) for m in tried})
    failed = [m for m in tried if m.outcome == "compile_failed"]
    assert failed
    assert all("this flavour is broken" in m.reason for m in failed)
    assert {m.model for m in rows} == {MODEL}
    assert {m.provenance for m in rows} == {"predicted"}
    assert report.failures[0][0] == "scale"
    assert "this flavour is broken" in report.failures[0][2]
    assert why_not_cubin(image.image, SM70) is None


def test_workers_and_their_order_change_nothing(tune: Callable[..., Report]) -> None:
    one = tune((1, 16, 512), db="one", trials=6)
    two = tune((1, 16, 512), db="two", jobs=2, trials=6)
    assert _configs(one) == _configs(two)
    assert [r.winner.reason for r in one.results if r.winner] == [r.winner.reason for r in two.results if r.winner]


def test_a_second_run_is_answered_by_the_database(tune: Callable[..., Report], tmp_path: Path) -> None:
    first = tune((1, 512), trials=6)
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        before = [o.id for o in store.measurements()]
    second = tune((1, 512), trials=6)
    assert second.num_compiled == second.num_trials == 0
    assert second.num_from_database == first.num_trials
    assert _configs(first) == _configs(second)
    assert [r.default_us for r in first.results] == [r.default_us for r in second.results]
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        assert [o.id for o in store.measurements()] == before


def test_two_seeds_predict_the_same_and_are_both_resumed(tune: Callable[..., Report], tmp_path: Path) -> None:
    """A prediction is the same fact whoever asks; that a search was finished is noted of each."""

    def predictions() -> list[tuple[str, float | None]]:
        with Store.open(tmp_path / "a.db", read_only=True) as store:
            rows = [o.measurement for o in store.measurements("scale")]
        return [(f"{m.problem.id} {m.config}", m.p50_us) for m in rows]

    tune((1, 512), trials=6, seed=1)
    tune((1, 512), trials=6, seed=2)
    found = predictions()
    assert len(found) == len(set(found))
    for seed in (1, 2):
        assert tune((1, 512), trials=6, seed=seed).num_trials == 0
    assert predictions() == found


def test_a_comment_that_renders_nothing_costs_no_compile_and_no_cubin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build is found by its source and noted under the new source digest; then no lookup has to render."""
    shutil.copytree(TOYS / "scale", tmp_path / "toys" / "rescale")
    spec = tmp_path / "toys" / "rescale" / "spec.py"
    spec.write_text(spec.read_text().replace('"plain", "broken", "spilling"', '"plain",'))  # all that compiles is built
    monkeypatch.setenv(TEMPLATES_VARIABLE, f"{TOYS}{os.pathsep}{tmp_path / 'toys'}")
    scale = find_kernel("rescale")
    item = Item("rescale", scale.problem_type(num_tokens=1))

    def tune() -> Report:
        with Store.open(tmp_path / "a.db") as store, CachedCompiler(1, CompileCache(tmp_path / "cache")) as compiler:
            return Tuner(Predicted(Target.of(SM70)), store, compiler, trials=4).run([item])

    def known() -> set[str]:
        with Store.open(tmp_path / "a.db", read_only=True) as store:
            return store.rendered(problem_key(scale, item.problem).static_key, source_digest_of(scale))

    assert tune().num_compiled == len(known()) > 0
    before = known()
    template = scale.folder / "kernel.cu.jinja"
    template.write_text(template.read_text() + "{# nobody sees this #}")
    vars(scale).pop("folder_digest")
    assert known() == set()
    assert tune().num_compiled == 0
    assert known() == before
    monkeypatch.setattr("kerngen.compiler.render.source_of", None)
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        (winner,) = store.winners("rescale")
        found = lookup([store], scale, item.problem, Target(SM70, winner.device))
    assert found.cubin is not None


def test_a_longer_search_continues_a_shorter_one(tune: Callable[..., Report]) -> None:
    first = tune((4096,), trials=3)
    second = tune((4096,), trials=100)
    fresh = tune((4096,), db="fresh", trials=100)
    assert second.num_from_database >= first.num_trials - first.results[0].num_failed
    assert _configs(second) == _configs(fresh)


def test_the_time_budget_leaves_an_answer_for_every_problem(tune: Callable[..., Report]) -> None:
    class Late:
        """Time runs out once every problem has had its first trial."""

        now = 0.0

        def update(self, done: int, total: int, text: str) -> None:
            self.now = 100.0 if done >= 3 else 0.0

    late = Late()
    report = tune((1, 16, 512), trials=100, time_budget_s=50, clock=lambda: late.now, progress=late)
    assert report.out_of_time
    assert all(r.winner is not None for r in report.results)
    assert sum(r.num_tried for r in report.results) == 3
    resumed = tune((1, 16, 512), trials=100)
    assert not resumed.out_of_time
    assert _configs(resumed) == _configs(tune((1, 16, 512), db="fresh", trials=100))


class StallingCompiler:
    """Compiles the first source that it is given and no other. Each look at another takes a second."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.now = 0.0

    def submit(self, source: str, arch: Arch) -> Future[Cubin]:
        if source not in self.sources:
            self.sources.append(source)
        compiler = self

        class Stalled(Future[Cubin]):
            def done(self) -> bool:
                compiler.now += not super().done()
                return super().done()

        answer: Future[Cubin] = Stalled()
        if source == self.sources[0]:
            answer.set_result(compile_cubin(source, arch))
        return answer


def test_out_of_time_what_carries_the_steps_has_its_default_and_the_others_are_named(
    scale: Kernel, tmp_path: Path
) -> None:
    def item(width: int, num_tokens: int, *uses: tuple[str, int, int, int]) -> Item:
        found = (Use("here", phase, batch, 1, count, context) for phase, batch, context, count in uses)
        return Item("scale", scale.problem_type(width, num_tokens), tuple(found))

    many, odd = item(32, 8, ("decode", 8, 512, 60)), item(64, 8, ("decode", 7, 512, 1))
    small = item(128, 1, ("decode", 1, 512, 1))
    large = item(256, 1, ("decode", 1, 512, 60), ("decode", 1, 32768, 60))
    verify = item(256, 4, ("decode", 7, 512, 60))  # compiles to the same as `large`
    compiler = StallingCompiler()
    with Store.open(tmp_path / "a.db") as store:
        objective = Predicted(Target.of(V100))
        tuner = Tuner(objective, store, compiler, time_budget_s=9.0, clock=lambda: compiler.now)
        report = tuner.run([many, odd, small, large, verify])
    widths = [re.findall(r"WIDTH = (\d+)", source) for source in compiler.sources]
    assert widths == [["256"], ["32"], ["64"], ["128"]], "by their parts of the steps"
    assert report.out_of_time
    won = {r.item: r.winner for r in report.results}
    assert won[large] is not None
    assert won[verify] is not None, "its kernel was compiled: judging that takes no time"
    assert won[large].config == {"threads": 32, "vectors": 1, "flavour": "plain"}
    for r in report.results:
        assert bool(r.note) == (r.winner is None)
    assert won[many] is won[odd] is won[small] is None
    assert {r.note for r in report.results if r.note} == {
        "the time was over before it was tried: what ran before still does"
    }
    assert compiler.now <= 9 + 3, "no compile is waited for after that"


def test_stopped_by_hand_it_does_not_blame_the_time(scale: Kernel, tmp_path: Path) -> None:
    class Stopped(Predicted):
        def judge(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
            yield from islice(super().judge(trials), 1)
            raise KeyboardInterrupt

    items = [Item("scale", scale.problem_type(num_tokens=t)) for t in (1, 512)]
    with Store.open(tmp_path / "a.db") as store, CachedCompiler(1, CompileCache(tmp_path / "cache")) as compiler:
        report = Tuner(Stopped(Target.of(V100)), store, compiler).run(items)
    assert report.interrupted
    assert not report.out_of_time
    assert sorted(r.note for r in report.results) == ["", "stopped before it was tried: what ran before still does"]


def test_what_cannot_be_tuned_says_why(tune: Callable[..., Report], scale: Kernel, tmp_path: Path) -> None:
    items = [Item("scale", scale.problem_type(width=7)), Item("scale", scale.problem_type())]
    with Store.open(tmp_path / "b.db") as store, CachedCompiler(1, CompileCache(tmp_path / "cache")) as compiler:
        report = Tuner(Predicted(Target.of(V100)), store, compiler, trials=2).run(items)
    refused = next(r for r in report.results if r.item.problem.width == 7)
    assert refused.winner is None
    assert "pad it to 8" in refused.note
    assert sum(r.winner is not None for r in report.results) == 1


def _us(problem: Any, config: Any) -> float | str:
    us = 100.0 - config.vectors * 10 + config.threads / 64
    return "out[0] is 1, reference 2" if config.flavour == "spilling" else us


class FakeGpu(PlayedGpu):
    """A V100 that times by a formula; "spilling" gives wrong results."""

    def __init__(self) -> None:
        super().__init__(_us, board="V100")


def test_measuring_checks_times_and_retimes_the_finalists(tune: Callable[..., Report], tmp_path: Path) -> None:
    report = tune((512,), trials=12, objective=Measured(FakeGpu()))
    (result,) = report.results
    assert result.winner.provenance == "measured"
    assert result.winner.config["flavour"] == "plain"
    assert result.winner.config["vectors"] == 4
    assert result.winner.latency_us < (result.default_us or 0)
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale", provenance="measured")]
    assert any(m.outcome == "wrong_result" and "reference 2" in m.reason for m in rows)
    assert sum(m.stage == "final" for m in rows) >= 2
    assert all(m.reason for m in rows if m.outcome == "invalid")
    assert {m.environment["driver"] for m in rows if m.outcome == "ok"} == {"555.1"}
    again = FakeGpu()
    tune((512,), trials=12, objective=Measured(again))
    assert again.measured == [], "a finished search is not measured again"


def test_one_tune_at_a_time_has_the_gpu_and_waiting_is_not_on_the_budget(
    tune: Callable[..., Report], tmp_path: Path
) -> None:
    """Another has it for as long as the whole budget is. What is compiled meanwhile is compiled."""
    other, ours, now = GpuLock("GPU-1", tmp_path), GpuLock("GPU-1", tmp_path), [0.0]
    said: list[str] = []
    assert other.try_acquire()

    class Slow(FakeGpu):
        def measure(self, kernel: Kernel, problem: Any, config: Any, image: bytes, **options: Any) -> Observed:
            assert not GpuLock("GPU-1", tmp_path).try_acquire()
            now[0] += 1.0
            return replace(super().measure(kernel, problem, config, image, **options), gpu={"sm_mhz": 1980})

    class Told:
        def update(self, done: int, total: int, text: str) -> None:
            said.append(text)

    def acquire(say: Callable[[str], None], poll_s: float = 0.5) -> float:
        if ours._file is not None:
            return 0.0
        say(f"waiting for the GPU: {ours.holder()} measures on it")
        other.release()
        assert ours.try_acquire()
        now[0] += 100.0
        return 100.0

    ours.acquire = acquire  # type: ignore[method-assign]
    report = tune((512,), trials=12, objective=Measured(Slow(), ours), time_budget_s=50, clock=lambda: now[0],
                  progress=Told())  # fmt: skip
    assert not report.out_of_time
    assert report.results[0].winner is not None
    assert any(f"pid {os.getpid()}" in text for text in said)
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale", provenance="measured")]
    assert {m.tags["gpu"]["sm_mhz"] for m in rows if m.outcome == "ok"} == {1980}
    ours.release()


def test_a_measured_winner_outranks_a_predicted_one(tune: Callable[..., Report]) -> None:
    tune((512,), trials=4)
    tune((512,), trials=4, objective=Measured(FakeGpu()))
    report = tune((512,), trials=5)
    assert report.results[0].winner.provenance == "measured"


class TimedGpu(FakeGpu):
    """Each measurement takes a second, and so does each configuration of a final. What happened is listed."""

    def __init__(self, trial_s: float = 1.0, final_s: float = 1.0) -> None:
        super().__init__()
        self.now, self.trial_s, self.final_s = 0.0, trial_s, final_s
        self.tried: list[tuple[int, Any]] = []
        self.decided: list[int] = []

    def measure(self, kernel: Kernel, problem: Any, config: Any, image: bytes, **options: Any) -> Observed:
        self._spend(self.trial_s, **options)
        self.tried.append((problem.num_tokens, config))
        return super().measure(kernel, problem, config, image, **options)

    def finals(self, kernel: Kernel, problem: Any, configs: list[tuple[Any, bytes]], **options: Any) -> list[Observed]:
        self._spend(self.final_s * len(configs), **options)
        self.decided.append(problem.num_tokens)
        return [super(TimedGpu, self).measure(kernel, problem, c, image) for c, image in configs]

    def _spend(self, seconds: float, within_s: float) -> None:
        self.now += min(seconds, within_s)
        if seconds > within_s:
            raise OutOfTime


def test_what_was_not_measured_in_time_has_no_row_and_says_so(tune: Callable[..., Report], tmp_path: Path) -> None:
    """Five problems, time for two. A later run measures the others."""
    gpu = TimedGpu()
    tokens = (1, 16, 64, 512, 4096)
    report = tune(tokens, objective=Measured(gpu), time_budget_s=2.5, clock=lambda: gpu.now)
    assert len(gpu.tried) == 2
    assert report.out_of_time
    assert (report.num_of("measured"), report.num_of("predicted"), report.num_of("")) == (2, 0, 3)
    untried = {r.note for r in report.results if r.winner is None}
    assert untried == {"the time was over before it was tried: what ran before still does"}
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        assert not list(store.measurements("scale", provenance="predicted"))
    later = tune(tokens, objective=Measured(TimedGpu()), trials=3)
    assert later.num_of("measured") == 5
    assert not later.out_of_time


def test_what_takes_most_of_a_step_is_searched_first(
    scale: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def item(num_tokens: int, *uses: Use) -> Item:
        return Item("scale", scale.problem_type(num_tokens=num_tokens), uses)

    monkeypatch.setattr("kerngen.tuning.tuner.PORTIONS", 1)
    monkeypatch.setattr("kerngen.tuning.tuner.FIRST_TRIALS", 0)
    light, heavy = Use("here", "decode", 1, 1, 1, 512), Use("here", "decode", 1, 1, 1000, 512)
    items = [item(512, light), item(1, light), item(16, heavy), item(64, light)]
    gpu = TimedGpu(final_s=0.1)
    with Store.open(tmp_path / "a.db") as store, CachedCompiler(1, CompileCache(tmp_path / "cache")) as compiler:
        tuner = Tuner(Measured(gpu), store, compiler, time_budget_s=40, clock=lambda: gpu.now)
        report = tuner.run(items)
    order = [tokens for tokens, _ in gpu.tried]
    first = order.index(next(tokens for tokens in order if tokens != 16))
    assert first > 6, "no other has its default before that"
    defaults = dict(reversed(gpu.tried))
    assert {tokens: scale.default_config(scale.problem_type(num_tokens=tokens), Target.of(V100)) for tokens in defaults
            } == defaults, "the first trial of each"  # fmt: skip
    found = [c for tokens, c in gpu.tried if tokens == 16]
    second = [[c for tokens, c in gpu.tried if tokens == t][1] for t in (1, 64) if order.count(t) > 1]
    assert second
    assert set(second) <= set(found), "what was found there, its neighbours try before all else"
    assert report.out_of_time
    assert gpu.decided[0] == 16
    assert gpu.now <= 40
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        finals = [o.measurement for o in store.measurements("scale") if o.measurement.stage == "final"]
        closed = store.closed_searches(finals[0].tags["search"])
    assert len(closed) < 4, "what time cut short is not over"
    assert report.results[2].provenance == "measured"


def test_what_the_database_has_is_tried_first(tune: Callable[..., Report], scale: Kernel) -> None:
    first = tune((64,), objective=Measured(TimedGpu()))
    (won,) = _configs(first)
    gpu = TimedGpu()
    tune((64, 128), objective=Measured(gpu), trials=3)
    before, default = [c for tokens, c in gpu.tried if tokens == 128][:2]
    assert fields_of(before) == won, "what runs today: the winner of a problem near in shape"
    assert default == scale.default_config(scale.problem_type(num_tokens=128), Target.of(SM70)) != before


class FewestThreads:
    """An objective of this test's own. It judges a round's trials as one set, the last first, and so its finalists."""

    name, how, provenance = "fewest-threads", "counted by a test", "predicted"
    row: Mapping[str, Any] = {"model": "threads-1"}
    trials, batch, sampler, margin = 6, 3, "model", 0.0
    needs_image, takes_time, final_stage = True, False, "final"
    final_s = finals_s = waited_s = 0.0
    settings = remarks = ()
    selections: Selections | None = None

    def __init__(self) -> None:
        self.target = Target.of(V100)
        self.judged: list[list[Trial]] = []
        self.decided: list[list[Trial]] = []

    def can_win(self, kernel: Kernel, problem: Any, config: Any, best_us: float) -> bool:
        return config.threads < best_us

    def answer(self, trial: Trial, rows: Sequence[Measurement]) -> Outcome | None:
        return None

    def judge(self, trials: Iterable[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        self.judged.append(list(trials))
        for trial in reversed(self.judged[-1]):
            assert why_not_cubin(trial.image(), SM70) is None
            yield trial, Outcome("ok", float(trial.config.threads), figures={"samples": 7})

    def finalists(self, search: Search) -> list[Any]:
        return [c for c, o in search.outcomes.items() if o.ok]

    def undecided(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        return iter(())

    def decide(self, finalists: Iterable[Sequence[Trial]]) -> Iterator[tuple[Trial, Outcome]]:
        self.decided.append([t for trials in finalists for t in trials])
        for trial in reversed(self.decided[-1]):
            yield trial, Outcome("ok", trial.config.threads + 0.5)


def test_any_object_that_keeps_the_protocol_is_an_objective(tune: Callable[..., Report], tmp_path: Path) -> None:
    objective = FewestThreads()
    report = tune((1, 512), objective=objective)
    assert (report.objective, report.how) == ("fewest-threads", "counted by a test")
    assert {t.problem.num_tokens for t in objective.judged[0]} == {1, 512}, "a round is judged together"
    for result in report.results:
        tried = [t.config.threads for ts in objective.judged for t in ts if t.item is result.item]
        assert result.winner.config["threads"] == min(tried)
        assert result.winner.latency_us == min(tried) + 0.5, "the finals have the last word"
        assert result.num_tried <= 6
    assert {t.problem.num_tokens for ts in objective.decided for t in ts} == {1, 512}
    with Store.open(tmp_path / "a.db", read_only=True) as store:
        rows = [o.measurement for o in store.measurements("scale")]
    assert {m.model for m in rows} == {"threads-1"}
    assert {m.stage for m in rows} == {"trial", "final"}
    assert {m.samples for m in rows if m.stage == "trial" and m.outcome == "ok"} == {7}
    again = FewestThreads()
    tune((1, 512), objective=again)
    assert not [ts for ts in again.judged if ts], "its finished searches are closed"
    assert tune((512,), trials=2).num_trials > 0, "another objective's searches are not"


def _search(scale: Kernel, trials: int, seed: int = 1) -> Search:
    problem = scale.problem_type(num_tokens=64)
    found = candidates(scale, problem, Target.of(SM70))
    return Search(scale, problem, found, Measured(FakeGpu()), trials=trials, seed=seed)


def _outcome(config: Any) -> Outcome:
    if config.flavour == "broken":
        return Outcome("compile_failed", reason="broken", excess=1.0)
    return Outcome("ok", 50.0 + config.threads / config.vectors, registers=32)


def _asked(search: Search, batch: int) -> list[Any]:
    """All that `search` asks for, answered."""
    asked = []
    while configs := search.ask(batch):
        asked += configs
        for config in configs:
            search.tell(config, _outcome(config))
    return asked


@pytest.mark.parametrize("objective", [Measured(FakeGpu()), Predicted(Target.of(SM70))], ids=lambda o: o.name)
def test_optuna_sees_failures_as_pruned_with_a_constraint(scale: Kernel, objective: Objective) -> None:
    """Whoever proposed what was tried: a study can be looked at."""
    from optuna.trial import TrialState

    problem = scale.problem_type(num_tokens=64)
    search = Search(scale, problem, candidates(scale, problem, Target.of(SM70)), objective, trials=20, seed=1)
    asked = _asked(search, 4)
    assert len(asked) == len(set(asked)) == len(search.outcomes)
    trials = search.study.get_trials()
    assert len(trials) == len(asked)
    assert {search._config_of(_Frozen(t)) for t in trials} == set(asked)
    failed = [c for c in asked if c.flavour == "broken"]
    assert sum(t.state == TrialState.PRUNED for t in trials) == len(failed)
    assert sum(t.state == TrialState.COMPLETE for t in trials) == len(asked) - len(failed)
    for t in trials:
        infeasible = any(value > 0 for value in t.constraints.values())
        assert infeasible == (t.state == TrialState.PRUNED)
    assert search.best == min(asked, key=lambda c: _outcome(c).latency_us or 1e9)
    assert search.study.best_value == search.best_us


class _Frozen:
    """Answers what is suggested from a trial that is over."""

    def __init__(self, trial: Any) -> None:
        self._params = trial.params

    def suggest_int(self, name: str, low: int, high: int) -> Any:
        return self._params[name]

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self._params[name]


def test_what_is_measured_is_learned_from(scale: Kernel) -> None:
    """The model knows nothing of what the clock shows here; twelve trials of 27 find the best all the same."""
    search = _search(scale, trials=12)
    _asked(search, 3)
    best = min((_outcome(c).latency_us or 1e9) for c in search.candidates.valid)
    assert search.best_us == best
    assert sum(not o.ok for o in search.outcomes.values()) <= 4


def test_a_space_is_described_alike_wherever_that_is_done(scale: Kernel) -> None:
    """In another process the same as here, and here if that process dies."""
    found = candidates(scale, scale.problem_type(num_tokens=4096), Target.of(V100))
    here = described_space(found, 40)
    assert set(here.configs) == {*found.valid, found.default}

    def same(there: Any) -> bool:
        pairs = ((here.features, there.features), (here.model, there.model))
        return here.configs == there.configs and all((a == b).all() for a, b in pairs)

    before = set(active_children())
    describer = Describer(1)
    try:
        assert same(describer.submit(found, 40)())
        (process,) = set(active_children()) - before
        process.kill()
        assert same(describer.submit(found, 40)())
        assert same(describer.submit(found, 40)())
    finally:
        describer.close()


@pytest.mark.parametrize(("name", "fields"), [
    ("w4a16_gemm", {"n": 5376, "k": 21504, "num_tokens": 64}),
    ("attn_decode", {"head_dim": 256, "num_q_heads": 8, "num_kv_heads": 2, "window": 512, "q_len": 4, "batch": 4}),
])  # fmt: skip
def test_a_descent_finds_what_a_large_space_has(name: str, fields: dict[str, Any]) -> None:
    """Of thousands of valid configurations, few of which come near the best, without asking about most of them."""
    target, kernel = Target.of(find_device("B200")), find_kernel(name)
    problem = kernel.problem_type(**fields)
    found = candidates(kernel, problem, target)
    order = rank_space(found)
    assert not found.are_known
    assert len(order) < len(found.valid) / 2
    whole = rank(kernel, problem, target, found.valid)
    best = whole[0][0]
    assert sum(us < 1.02 * best for us, _ in whole) < len(whole) / 30
    assert order[0][0] == best
    assert [us for us, _ in order] == sorted(us for us, _ in order)
    times = {c: us for us, c in whole}
    assert all(kernel.will_spill(problem, c, target) == (us == inf) for us, c in order)
    assert all(times[c] == us for us, c in order if c in times and us < inf), "the default may lie off the grid"
    registers = kernel.expected_registers(problem, whole[0][1], target)
    assert best == predict(kernel, problem, whole[0][1], target, registers=registers).latency_us


def test_the_same_seed_asks_the_same_questions(scale: Kernel) -> None:
    assert _asked(_search(scale, 18, 5), 3) == _asked(_search(scale, 18, 5), 3)


def test_a_small_space_is_exhausted_not_sampled(scale: Kernel) -> None:
    search = _search(scale, trials=1000)
    assert set(_asked(search, 10)) == set(search.candidates.valid)
    assert search.num_left == 0


def test_neighbours_winners_come_first(scale: Kernel) -> None:
    search = _search(scale, trials=10)
    (default,) = search.ask(4)
    search.tell(default, _outcome(default))
    hint = scale.config_type(64, 4)
    of_another_version: Any = "64"
    search.suggest([default, scale.config_type(of_another_version), hint, scale.config_type(2048)])
    assert search.ask(1) == [hint]


def test_refusals_are_counted_with_an_example(scale: Kernel) -> None:
    found = candidates(scale, scale.problem_type(width=128), Target.of(SM70))
    reasons = {r.reason: r.count for r in found.refusals}
    assert reasons["threads=2048; at most 1024 a block"] == 9
    assert sum(reasons.values()) + len(found.valid) == found.space_size == 45
    assert all(any(ch.isdigit() for ch in reason) for reason in reasons)
    narrow = candidates(scale, scale.problem_type(width=32), Target.of(SM70))
    assert len(narrow.valid) < len(found.valid), "an enumeration must not be shared where width differs"


def test_a_dry_run_compiles_no_candidate(scale: Kernel) -> None:
    items = [Item("scale", scale.problem_type(num_tokens=t)) for t in (1, 2)]
    plan = dry_run([*items, Item("scale", scale.problem_type(width=7))], Target.of(V100), trials=5, jobs=2)
    (row,) = plan.kernels
    assert (row.num_problems, row.num_trials) == (2, 10)
    assert 5 <= row.num_compiles <= 10
    assert "pad it to 8" in plan.unsupported[0][1]


def test_a_space_that_problems_share_is_counted_once(tune: Callable[..., Report], scale: Kernel) -> None:
    problems = [scale.problem_type(num_tokens=t) for t in (1, 16, 512)]
    (points,) = {candidates(scale, p, Target.of(SM70)).points for p in problems}
    other = candidates(scale, scale.problem_type(width=32), Target.of(SM70)).points
    assert points.num_refused > 0
    assert other.num_refused > points.num_refused
    items = [Item("scale", p) for p in (*problems, scale.problem_type(width=32))]
    (row,) = dry_run(items, Target.of(SM70), trials=2, jobs=1).kernels
    assert (row.num_problems, row.num_spaces, row.space_size) == (4, 2, 90)
    assert row.num_refused == points.num_refused + other.num_refused
    assert row.num_valid == 90 - row.num_refused
    report = tune((1, 16, 512), trials=1)
    assert (report.num_spaces, report.num_refused) == (1, points.num_refused)


def test_a_dry_run_ranks_a_few_problems_of_many_that_are_alike(scale: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []

    def counting(kernel: Kernel, problem: Any, *args: Any, **more: Any) -> list[tuple[float, Any]]:
        ranked.append(problem.num_tokens)
        return rank(kernel, problem, *args, **more)

    monkeypatch.setattr(kerngen.tuning.plan, "rank", counting)
    items = [Item("scale", scale.problem_type(num_tokens=t)) for t in range(1, 42)]
    (row,) = dry_run(items, Target.of(V100), trials=5, jobs=1).kernels
    assert ranked == [1, 21, 41]
    assert (row.num_problems, row.num_trials) == (41, 205)


def test_a_cubin_of_another_arch_is_noticed(scale: Kernel) -> None:
    problem = scale.problem_type()
    for arch in ("sm75", "sm90", "sm120"):
        a = find_arch(arch)
        t = Target.of(a)
        image = compile_cubin(render(scale, problem, scale.default_config(problem, t), t), a).image
        assert why_not_cubin(image, a) is None
        assert f"not {SM70}" in (why_not_cubin(image, SM70) or "")
    assert "ELF" in (why_not_cubin(b"PTX", SM70) or "")


def test_no_two_groups_of_a_report_read_alike() -> None:
    target = Target.of(SM70)
    load = find_workload("gemma-4-31b", SM70)
    report = Report(target, "predicted", "predicted", "run", [Result(i) for i in load.items])
    found = groups(report, load)
    assert len(found) < len(load.items) / 10
    assert len({(g.kernel, g.where) for g in found}) == len(found)
    decode = [g for g in found if g.kernel == "attn_decode"]
    assert any("q_len=4" in g.where for g in decode)
    assert {g.point for g in decode if "(full)" in g.where} == {"batch=1 kv_len=8192"}
    assert {g.point for g in found if g.kernel == "attn_prefill"} == {"batch=1 num_tokens=8192 kv_len=8192"}
    assert {id(r) for g in found for r in g.results} == {id(r) for r in report.results}
    assert {"gate_proj+up_proj (sliding, full)", "embedding", "embedding (drafter)"} < {g.where for g in found}
    assert step_us(report, load) == {}, "no sum where a winner is missing"


def test_a_group_says_what_it_won_and_what_is_missing(tune: Callable[..., Report]) -> None:
    report = tune((1, 4096), trials=100)
    load = Workload("toy", "sm70", tuple(r.item for r in report.results))
    (group,) = groups(report, load)
    changed = [r for r in report.results if r.changes]
    assert (group.num_won, group.num_changed, group.point) == (2, len(changed), "num_tokens=1")
    assert changed, "the default of 32 threads is not the best for 4096 tokens"
    default = fields_of(find_kernel("scale").config_type(32))
    for result in report.results:
        assert result.winner is not None
        assert result.changes == {k: v for k, v in result.winner.config.items() if v != default[k]}
    report.results[0].winner, report.results[0].note = None, "time"
    (group,) = groups(report, load)
    assert (group.num_won, group.point) == (1, "num_tokens=4096"), "one with a winner stands for the group"
    assert notes(report.results) == {"time": {"scale": 1}}
