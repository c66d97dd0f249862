"""`kerngen db verify --run`: what is proved of a database on a GPU, and what is said where there is none. None here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Kerngen
from played_gpu import PlayedGpu
from toy import toy_kernels

import kerngen.tuning.worker as worker
from kerngen.arch import Device, Target, find_arch, find_device
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.system.processes import ProcessDied
from kerngen.templates.kernel import Kernel
from kerngen.timing.gpu import GpuLock
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning.objective import Measured, Predicted
from kerngen.tuning.tuner import Tuner
from kerngen.tuning.worker import GpuWorker, Observed
from kerngen.tuning_db import Store
from kerngen.workload.workload import Item

SM70 = find_arch("sm70")
TOKENS = (64, 512, 4096)


class FakeGpu(PlayedGpu):
    """A V100 that takes `factor(problem, look)` of what it took when it was tuned."""

    def __init__(self, factor: Callable[[Any, int], float] = lambda problem, look: 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.profile = find_device("V100")
        self.seen: dict[Any, int] = {}
        self.loaded: list[str] = []
        self.wrong: set[int] = set()  # token counts
        self.held_back: set[int] = set()
        self.unloadable = ""

    def device(self) -> Device:
        return self.profile

    def target(self) -> Target:
        return Target.of(self.profile)

    def load(self, what: str, image: bytes, entries: tuple[str, ...]) -> str:
        assert why_not_cubin(image, SM70) is None
        assert entries
        self.loaded.append(what)
        return f"{what}: {self.unloadable}" if self.unloadable else ""

    def check(self, kernel: Kernel, problem: Any, config: Any, image: bytes) -> Observed:
        assert why_not_cubin(image, SM70) is None
        if problem.num_tokens in self.wrong:
            return Observed("wrong_result", "out[0] is 1, reference 2\nand more", error_abs=1.0)
        return Observed("ok", error_abs=0.0, error_rel=0.0)

    def measure(self, kernel: Kernel, problem: Any, config: Any, image: bytes, **options: Any) -> Observed:
        if (seen := self.check(kernel, problem, config, image)).outcome != "ok":
            return seen
        look = self.seen[problem] = self.seen.get(problem, 0) + 1
        us = (100.0 - config.vectors * 10 + config.threads / 64) * self.factor(problem, look)
        gpu = {"reasons": ["hw_thermal_slowdown"]} if problem.num_tokens in self.held_back else {"reasons": []}
        return replace(seen, p50_us=us, p10_us=us - 0.01, p90_us=us + 0.01, min_us=us - 0.02, samples=15, gpu=gpu)


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a measured database of three points, tuning.db, and a predicted one, guessed.db."""
    folder = tmp_path_factory.mktemp("databases")
    with pytest.MonkeyPatch.context() as m, toy_kernels(m) as scale:
        items = [Item("scale", scale.problem_type(num_tokens=t)) for t in TOKENS]
        for name, objective in (("tuning", Measured(FakeGpu())), ("guessed", Predicted(Target.of(SM70)))):  # type: ignore[arg-type]
            with Store.open(folder / f"{name}.db") as store, CachedCompiler(1, CompileCache(folder / "c")) as c:
                Tuner(objective, store, c, trials=4).run(items)
    return folder


@pytest.fixture
def kerngen(
    databases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Kerngen]:
    """Where those two are."""
    made = Kerngen(tmp_path, monkeypatch, capsys)
    for name in ("tuning.db", "guessed.db"):
        shutil.copy(databases / name, tmp_path / name)
    with toy_kernels(monkeypatch):
        yield made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    monkeypatch.setattr(worker, "GpuWorker", lambda: made)
    monkeypatch.setattr(worker, "present_arch", lambda: SM70)
    return made


def _levels(out: str) -> dict[str, dict[str, Any]]:
    return {v["level"]: v for v in json.loads(out)["verdicts"]}


def test_what_is_as_it_says_is_proved(kerngen: Kerngen, gpu: FakeGpu) -> None:
    gpu.factor = lambda problem, look: {64: 1.0, 512: 1.02, 4096: 0.9}[problem.num_tokens]
    code, out, err = kerngen("db", "verify", "tuning.db", "--run", "fast")
    assert code == 0, out + err
    assert "ok  loads" in out
    assert "ok  correct    3 of 3 winners for sm70 agree with the reference on this V100" in out
    assert "ok  fast       3 of 3 winners that were measured take what it says: 1.000 of it in the median" in out
    assert "1.020 at worst (scale[" in out
    assert "up to 5.0% longer, beside the noise, is as fast" in out
    assert set(gpu.seen.values()) == {1}
    with Store.open("tuning.db", read_only=True) as store:
        assert len(gpu.loaded) == len(store.kept_builds())
    lock = GpuLock(gpu.uuid())
    assert lock.try_acquire(), "it was let go"
    lock.release()


def test_a_level_is_what_was_asked_for(kerngen: Kerngen, gpu: FakeGpu) -> None:
    assert list(_levels(kerngen("db", "verify", "tuning.db", "--run", "loads", "--json")[1]))[3:] == ["loads"]
    levels = _levels(kerngen("db", "verify", "tuning.db", "--run", "correct", "--json")[1])
    assert list(levels)[3:] == ["loads", "correct"]
    assert gpu.seen == {}, "nothing was timed"


def test_what_is_wrong_slow_or_held_back_is_named(kerngen: Kerngen, gpu: FakeGpu) -> None:
    gpu.wrong = {64}
    gpu.held_back = {512}
    gpu.factor = lambda problem, look: 1.5
    code, out, _ = kerngen("db", "verify", "tuning.db", "--run", "fast", "--json")
    assert code == 1
    levels = _levels(out)
    assert [levels[n]["ok"] for n in ("loads", "correct", "fast")] == [True, False, False]
    (wrong,) = levels["correct"]["faults"]
    assert "num_tokens=64" in wrong
    assert wrong.endswith("wrong_result: out[0] is 1, reference 2")
    held, slow = sorted(levels["fast"]["faults"], key=lambda f: "num_tokens=4096" in f)
    assert "not compared: this GPU is held back (hw_thermal_slowdown)" in held
    assert "(1.500 of it" in slow
    assert levels["fast"]["figures"] == {
        "winners": 3, "fast": 0, "tolerance": 0.05, "median": 1.5, "worst": 1.5,
        "worst_of": levels["fast"]["figures"]["worst_of"],
    }  # fmt: skip
    assert kerngen("db", "verify", "tuning.db", "--run", "fast", "--tolerance", "60")[0] == 1, "wrong all the same"
    gpu.wrong, gpu.held_back = set(), set()
    assert kerngen("db", "verify", "tuning.db", "--run", "fast", "--tolerance", "60")[0] == 0


def test_one_bad_look_is_not_the_last(kerngen: Kerngen, gpu: FakeGpu) -> None:
    gpu.factor = lambda problem, look: 2.0 if look == 1 else 1.01
    code, out, _ = kerngen("db", "verify", "tuning.db", "--run", "fast")
    assert code == 0, out
    assert "1.010 at worst" in out
    assert set(gpu.seen.values()) == {3}


def test_an_image_that_does_not_load_is_named(kerngen: Kerngen, gpu: FakeGpu) -> None:
    gpu.unloadable = "the driver cannot load it on this GPU: CUDA_ERROR_NO_BINARY_FOR_GPU"
    code, out, _ = kerngen("db", "verify", "tuning.db", "--run", "loads")
    assert code == 1
    assert "NO  loads      0 of " in out
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in out


def test_the_time_ends_it_and_what_was_not_reached_is_said(
    kerngen: Kerngen, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("kerngen.cli.db.verify._left", lambda began, budget: lambda: (budget or 0.0) - now[0])

    def slowly(problem: Any, look: int) -> float:
        now[0] += 60.0
        return 1.0

    gpu.factor = slowly
    code, out, _ = kerngen("db", "verify", "tuning.db", "--run", "fast", "--time-budget", "90s", "--json")
    assert code == 1
    levels = _levels(out)
    assert levels["loads"]["ok"]
    for name in ("correct", "fast"):
        assert (levels[name]["ok"], levels[name]["done"]) == (False, False)
        (late,) = levels[name]["faults"]
        assert late.startswith("not reached in the time: scale[")
    assert levels["fast"]["figures"]["fast"] == 2


@pytest.mark.parametrize(
    ("here", "why"), [(None, "this machine has no GPU"), ("sm90", "it is for sm70, and this machine's GPU is sm90")]
)
def test_where_it_cannot_be_done_it_is_not_proved(
    kerngen: Kerngen, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, here: str | None, why: str
) -> None:
    monkeypatch.setattr(worker, "present_arch", lambda: None if here is None else find_arch(here))
    code, out, err = kerngen("db", "verify", "tuning.db", "--run", "fast")
    assert (code, err) == (1, "")
    for level in ("loads", "correct", "fast"):
        assert f"NO  {level:10} not done: {why}" in out
    assert gpu.loaded == []


def test_a_prediction_is_not_as_fast_as_anything(kerngen: Kerngen, gpu: FakeGpu) -> None:
    code, out, _ = kerngen("db", "verify", "guessed.db", "--run", "fast")
    assert code == 1
    assert "ok  correct    3 of 3" in out
    assert "NO  fast       not done: no winner was measured on a board like this V100" in out
    gpu.profile = replace(gpu.profile, name="half", num_sms=40)
    code, out, _ = kerngen("db", "verify", "tuning.db", "--run", "fast")
    assert code == 1
    assert "not done: no winner was measured on a board like this half" in out


def test_nothing_of_a_file_that_failed_is_run(kerngen: Kerngen, gpu: FakeGpu) -> None:
    assert kerngen("db", "export", "--db", "tuning.db", "--unsigned", "-o", "out.kgdb")[0] == 0
    code, out, _ = kerngen("db", "verify", "out.kgdb", "--run", "loads")
    assert code == 1
    assert "NO  loads      not done: signature failed, and what is not proved is not run" in out
    assert gpu.loaded == []
    code, out, _ = kerngen("db", "verify", "out.kgdb", "--run", "correct", "--allow-unsigned")
    assert code == 0, out
    assert gpu.loaded


def test_what_others_may_have_written_is_not_run(kerngen: Kerngen, gpu: FakeGpu) -> None:
    (kerngen.folder / "tuning.db").chmod(0o666)
    code, _, err = kerngen("db", "verify", "tuning.db", "--run", "loads")
    assert code == 1
    assert "TrustError" in err
    assert gpu.loaded == []


def test_a_budget_is_of_what_runs(kerngen: Kerngen) -> None:
    code, _, err = kerngen("db", "verify", "tuning.db", "--time-budget", "5s")
    assert (code, "goes with --run" in err) == (2, True)


@pytest.mark.parametrize(
    ("error", "says"), [(ProcessDied(True), "took its process down"), (TimeoutError(), "no answer within")]
)
def test_a_fault_costs_its_process_alone(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def call(self: GpuWorker, function: Any, *arguments: Any, within_s: float = 0.0) -> Any:
        raise error

    with toy_kernels(monkeypatch) as scale, GpuWorker() as gpu:
        monkeypatch.setattr(GpuWorker, "_call", call)
        assert says in gpu.load("scale 12ab", b"", ("scale",))
        seen = gpu.check(scale, scale.problem_type(), scale.config_type(), b"")
        assert says in seen.reason
        assert seen.outcome in ("launch_failed", "timed_out")
