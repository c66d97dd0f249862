"""The recorder, whole, on a fake GPU: the toy kernel compiled with the real NVRTC, killed, cut and continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recordings import FakeGpu
from toy import TOYS, toy_kernels

from kerngen.arch import Target, find_arch, find_device
from kerngen.compiler.cache import CachedCompiler, CompileCache
from kerngen.errors import RecordingError
from kerngen.templates.kernel import Kernel
from kerngen.tuning.record import RETIMED, Recording, estimates, main, record
from kerngen.tuning.record_plan import Wanted, points, read_plan
from kerngen.tuning.recorded import Recorded, read, read_folder
from kerngen.tuning.worker import Observed

ROOT = Path(__file__).resolve().parents[2]
H200_PLAN = ROOT / "data" / "recorded" / "h200.plan.json"
PROBLEMS: list[dict[str, Any]] = [
    {"name": "one", "kernel": "scale", "problem": {"width": 512}},
    {"name": "two", "kernel": "scale", "problem": {"num_tokens": 512}, "held_out": True,
     "grid": [{"threads": [32, 64, 256], "vectors": [1, 4]}]},
    {"name": "three", "kernel": "scale", "problem": {"num_tokens": 4096}, "sample": 5},
]  # fmt: skip


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    with toy_kernels(monkeypatch) as kernel:
        yield kernel


@pytest.fixture
def plan(tmp_path: Path, scale: Kernel) -> Path:
    path = tmp_path / "v100.plan.json"
    path.write_text(json.dumps({"v": 1, "device": "V100", "problems": PROBLEMS}))
    return path


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachedCompiler]:
    """The toy's 50 sources are the same in every test."""
    with CachedCompiler(1, CompileCache(tmp_path_factory.mktemp("cache"))) as compiler:
        yield compiler


@pytest.fixture
def run(tmp_path: Path, plan: Path, compiler: CachedCompiler) -> Callable[..., Recording]:
    def run(folder: str, gpu: FakeGpu, **how: Any) -> Recording:
        (tmp_path / folder).mkdir(exist_ok=True)
        return record(read_plan(plan), tmp_path / folder, gpu, compiler, **({"minutes": 5} | how))

    return run


def _said(folder: Path) -> dict[str, Recorded]:
    """The recordings, without what differs between two runs."""
    found = read_folder(folder)
    return {r.head.name: replace(r, head=replace(r.head, clocks=(), board="")) for r in found}


def test_all_of_a_plan_is_recorded(tmp_path: Path, run: Callable[..., Recording], scale: Kernel) -> None:
    gpu = FakeGpu()
    done = run("a", gpu, commit="abc")
    assert done.complete == ("scale-one.csv", "scale-two.csv", "scale-three.csv")
    assert done.left == {}
    found = {r.head.name: r for r in read_folder(tmp_path / "a")}
    target = Target.of(find_arch("sm70"))
    for wanted in read_plan(tmp_path / "v100.plan.json").problems:
        head, rows = found[wanted.name].head, found[wanted.name].rows
        meant = points(wanted, target)
        assert {r.config for r in rows} == set(meant.configs), "all of the grid, and no more"
        assert head.complete
        assert (head.held_out, head.exhaustive) == (wanted.held_out, not wanted.sample)
        assert (head.folder_digest, head.commit, head.board) == (scale.folder_digest, "abc", "")
        assert head.environment["driver"] == "555.1"
        assert [c["temperature_c"] for c in head.clocks] == [40, 40]
        for r in rows:
            assert r.outcome == {"broken": "compile_failed", "spilling": "wrong_result"}.get(
                r.config.flavour, "launch_failed" if r.final_us is None and r.us is None else "ok"
            )
            assert (r.takes is None) == (r.outcome == "compile_failed")
            assert bool(r.reason) == (r.outcome != "ok")
            if r.us is not None:
                assert (r.us, r.mhz) == (round(FakeGpu.us(found[wanted.name].problem, r.config), 3), 1530)
    two = found["two"]
    assert [(r.config.threads, r.reason) for r in two.rows if r.outcome == "launch_failed"] == [
        (64, "at the second look: no more")
    ]
    assert any("this flavour is broken" in r.reason for r in two.rows)
    assert any(r.reason == "out[0] is 1, reference 2" for r in two.rows)
    assert two.best.config == scale.config_type(256, 4)
    assert all(r.final_us is None for r in found["three"].rows), "a sample has no second look"
    assert sum(done.outcomes.values()) == done.rows == sum(len(r.rows) for r in found.values())


def test_the_fastest_have_a_second_look_together_and_so_has_the_default(
    tmp_path: Path, run: Callable[..., Recording], scale: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kerngen.tuning.record.RETIMED", 3)
    gpu = FakeGpu()
    run("a", gpu)
    assert len(gpu.together) == 2
    assert RETIMED >= 30
    for configs in gpu.together:
        times = sorted(FakeGpu.us(scale.problem_type(), c) for c in configs)
        assert scale.config_type(32) in configs, "the default, which is the slowest"
        assert len(configs) == 4
        assert times[-1] == FakeGpu.us(scale.problem_type(), scale.config_type(32))


def test_a_second_look_that_is_lost_loses_nothing(
    tmp_path: Path, run: Callable[..., Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Observed("launch_failed", "the kernel took its process down")
    monkeypatch.setattr(FakeGpu, "finals", lambda self, kernel, problem, configs, **how: [lost] * len(configs))
    done = run("a", FakeGpu())
    assert done.left == {}
    for recorded in read_folder(tmp_path / "a"):
        assert all(r.final_us is None and "second look" not in r.reason for r in recorded.rows)
        assert recorded.best.us == min(r.us for r in recorded.rows if r.us is not None)


def test_the_order_is_shuffled_with_the_default_first(run: Callable[..., Recording], scale: Kernel) -> None:
    gpu, again = FakeGpu(), FakeGpu()
    run("a", gpu)
    run("b", again)
    assert gpu.measured == again.measured, "the same shuffle every time"
    order = [c for p, c in gpu.measured if p.width == 512]
    assert order[0] == scale.config_type(32)
    keys = [(c.threads, c.vectors, c.flavour) for c in order]
    assert keys != sorted(keys)


@pytest.mark.parametrize("kill_after", [0, 7, 30])
def test_killed_and_continued_it_is_as_if_nothing_had_been(
    tmp_path: Path, plan: Path, run: Callable[..., Recording], compiler: CachedCompiler, kill_after: int
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    environment = os.environ | {
        "KERNGEN_TEMPLATES": str(TOYS), "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).parent / "record_fake.py"), str(plan), str(folder),
               str(compiler.cache.dir), str(kill_after)]  # fmt: skip
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    growing = next(p for p in folder.glob("*.csv") if not read(p, torn=True).head.complete)
    whole = len(read(growing).rows)
    if whole:
        growing.write_bytes(growing.read_bytes()[:-5])  # as a write that was under way leaves it
    before = sum(len(read(p, torn=True).rows) for p in folder.glob("*.csv"))
    gpu = FakeGpu()
    done = run("killed", gpu)
    run("whole", FakeGpu())
    assert done.left == {}
    assert _said(folder) == _said(tmp_path / "whole")
    assert done.rows + before == sum(len(r.rows) for r in _said(folder).values()), "nothing is measured twice"


def test_out_of_time_the_end_of_the_plan_is_left(tmp_path: Path, run: Callable[..., Recording]) -> None:
    now = [0.0]

    def after(measured: int) -> None:
        now[0] = 100.0 if measured >= 30 else 0.0

    done = run("cut", FakeGpu(after=after), minutes=1, clock=lambda: now[0])
    assert done.complete == ("scale-one.csv",)
    assert list(done.left) == ["scale-two.csv", "scale-three.csv"]
    assert done.left["scale-three.csv"] in (5, 6), "the default may be among the sample"
    assert 0 < done.left["scale-two.csv"] < 18
    finished = (tmp_path / "cut" / "scale-one.csv").read_bytes()
    assert not read(tmp_path / "cut" / "scale-two.csv").head.complete
    again = run("cut", FakeGpu())
    assert again.left == {}
    assert (tmp_path / "cut" / "scale-one.csv").read_bytes() == finished
    run("whole", FakeGpu())
    assert _said(tmp_path / "cut") == _said(tmp_path / "whole")
    assert run("cut", FakeGpu()).rows == 0


def test_a_file_of_another_board_or_source_is_not_continued(
    tmp_path: Path, run: Callable[..., Recording], plan: Path
) -> None:
    now = [0.0]

    def after(measured: int) -> None:
        now[0] = 100.0 if measured >= 30 else 0.0

    run("a", FakeGpu(after=after), minutes=1, clock=lambda: now[0])
    other = FakeGpu("GPU-2")
    with pytest.raises(RecordingError, match=r"scale-two\.csv:1: .*another board.*'GPU-1'"):
        run("a", other)
    assert other.measured == []
    done = run("a", other, anew=True)
    assert done.left == {}
    assert {r.head.board for r in read_folder(tmp_path / "a")} == {""}, "of what is complete nobody asks for the board"
    plan.write_text(plan.read_text().replace("[32, 64, 256]", "[32, 64]"))
    with pytest.raises(RecordingError, match=r"scale-two\.csv:1: .*another grid"):
        run("a", FakeGpu())


def test_another_gpu_than_the_plans_is_refused(run: Callable[..., Recording], monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (find_device("H200"), replace(find_device("V100"), num_sms=40)):
        monkeypatch.setattr(FakeGpu, "device", lambda self, device=device: device)
        gpu = FakeGpu()
        with pytest.raises(RecordingError, match=r"V100 \(sm70, 80 SMs\)"):
            run("a", gpu)
        assert gpu.measured == []


# -- plans


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ({"grid": [{"threads": [33]}]}, r"scale-x: threads is never \[33\] there; it is one of"),
        ({"grid": [{"thread": [32]}]}, r"scale-x: the body with {} has no thread"),
        ({"grid": [{"threads": [2048]}]}, r"scale-x: none of the grid's 9 points is valid"),
        ({"problem": {"breadth": 1}}, r"scale-x: .*breadth"),
        ({"problem": {"width": 7}}, r"scale-x: .*pad it to 8"),
        ({"kernel": "scales"}, r"scales-x: unknown kernel 'scales'"),
    ],
)
def test_what_a_plan_gets_wrong_is_said_of_its_problem(scale: Kernel, problem: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"name": "x", "kernel": "scale", "problem": {}} | problem
    grid = tuple({k: tuple(v) for k, v in part.items()} for part in given.pop("grid", []))
    with pytest.raises(RecordingError, match=says):
        points(Wanted(**given, grid=grid), Target.of(find_arch("sm70")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ('{"v": 2, "device": "V100", "problems": []}', "a plan is"),
        ('{"v": 1, "device": "V100", "problems": [{"name": "x"}]}', "problem 1 has no name, kernel or problem"),
        ('{"v": 1, "device": "V100", "problems": [{"name": "../x", "kernel": "scale", "problem": {}}]}', "a name is"),
        ('{"v": 1, "device": "V100", "problems": [{"name": "x", "kernel": "scale", "problem": {}, "held": 1}]}',
         "unknown held"),
        ('{"v": 1, "device": "V100", "problems": [{"name": "x", "kernel": "s", "problem": {}, "grid": [{"a": 1}]}]}',
         "grid is a list of fields"),
        ('{"v": 1, "device": "V100", "problems": [{"name": "x", "kernel": "scale", "problem": {}}, '
         '{"name": "x", "kernel": "scale", "problem": {}}]}', "scale-x is there twice"),
    ],
)  # fmt: skip
def test_a_plan_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(RecordingError, match=says):
        read_plan(tmp_path / "p.json")


def test_the_h200_plan_has_whole_grids_of_four_kernels() -> None:
    plan = read_plan(H200_PLAN)
    target = Target.of(find_device(plan.device))
    whole = [w for w in plan.problems if not w.sample]
    samples = [w for w in plan.problems if w.sample]
    assert plan.problems == (*whole, *samples), "a cut costs the fit set first"
    assert len(whole) >= 13
    assert {w.kernel for w in whole} == {"attn_decode", "w4a16_gemm", "dense_gemv", "greedy_head"}
    sizes = {f"{w.kernel}-{w.name}": len(points(w, target).configs) for w in whole}
    assert min(sizes.values()) >= 300, sizes
    assert sum(sizes.values()) < 10_000, "more than one session of a GPU records"
    assert len(samples) >= 30
    for wanted in whole, samples:
        assert 0.15 < sum(w.held_out for w in wanted) / len(wanted) < 0.4
    fitted = {(w.kernel, w.problem.get("num_tokens")) for w in samples if w.kernel == "w4a16_gemm"}
    assert {m for _, m in fitted} >= {128, 256, 512, 1024, 2048, 4096}
    assert {"attn_prefill", "moe_w4a16"} <= {w.kernel for w in samples}


def test_a_sample_spreads_over_bodies_values_and_predicted_times() -> None:
    target = Target.of(find_device("H200"))
    wanted = next(w for w in read_plan(H200_PLAN).problems if w.sample and w.problem.get("num_tokens") == 2048)
    found = points(wanted, target)
    assert found == points(wanted, target), "the same every time"
    assert len(found.configs) - wanted.sample in (0, 1), "the default may be among them"
    assert {c.wgmma for c in found.configs} == {False, True}
    for name in ("block_m", "block_k", "num_stages", "blocks_per_sm"):
        assert len({getattr(c, name) for c in found.configs}) >= 3, name


# -- the command


def test_a_dry_run_counts_and_estimates(scale: Kernel, plan: Path) -> None:
    said = CliRunner().invoke(main, [str(plan), "--dry-run", "--jobs", "4"])
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[1].split()[:3] == ["scale-one.csv", "45", "33"]
    assert "held out" in lines[2]
    assert "sample" in lines[3]
    assert re.match("3 problems, 5[67] configurations; 2 whole grids of 18 or more", lines[4]), (
        "or the default is drawn"
    )
    made = list(estimates(read_plan(plan), Target.of(find_arch("sm70"))))
    assert all(e.compile_s > 0 and e.gpu_s > 2 for e in made)


def test_the_command_says_what_is_done_and_what_is_left(
    tmp_path: Path, scale: Kernel, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("kerngen.tuning.record.GpuWorker", FakeGpu)
    switching = sys.getswitchinterval()
    try:
        command = [str(plan), "-o", str(tmp_path / "out"), "--jobs", "1", "--minutes"]
        cut = CliRunner().invoke(main, [*command, "0.0001"])
        whole = CliRunner().invoke(main, [*command, "5"])
    finally:
        sys.setswitchinterval(switching)
    assert cut.exit_code == 1
    assert "0 of 3 files complete" in cut.output
    told = re.search(r"recorded (.*?) in .*left: scale-one.csv: (\d+) configurations", cut.output, re.DOTALL)
    assert told is not None, cut.output
    done = sum(map(int, re.findall(r"\d+", told[1])))  # in so little time a fast host may record one
    assert int(told[2]) + done == 33
    assert whole.exit_code == 0, whole.output
    assert re.search("recorded 1[89] compile_failed, ", whole.output)
    assert "3 of 3 files complete" in whole.output
    assert len(read_folder(tmp_path / "out")) == 3


def test_the_command_without_a_gpu_says_so(tmp_path: Path, scale: Kernel, plan: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "kerngen.tuning.record", str(plan)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (said.returncode, said.stderr.splitlines()[0]) == (2, "UsageError: -o FOLDER says where the recordings go")
    said = subprocess.run([*command, "-o", str(tmp_path / "out")], env=environment, capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert said.returncode == 1
    assert "DeviceError: torch sees no CUDA device" in said.stderr
    assert "Traceback" not in said.stderr
