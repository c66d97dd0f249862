"""`kerngen tune` as a user meets it: repeated, killed, stopped, and asked for all that a model needs.

What it refuses is test_cli_errors.py's subject.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from command import Kerngen
from played_gpu import PlayedGpu

from kerngen.arch import Target, find_arch
from kerngen.cli.tune_objective import objective_for
from kerngen.compiler.compile import compile_cubin
from kerngen.compiler.render import render
from kerngen.templates import find_kernel
from kerngen.templates.kernel import static_fields
from kerngen.timing.gpu import GpuLock
from kerngen.tuning.checks import why_not_cubin
from kerngen.tuning.plan import DryRun, KernelPlan
from kerngen.tuning.report import Report, Result
from kerngen.tuning_db import Store
from kerngen.tuning_db.dist.results_parser import parse
from kerngen.workload.workload import MODELS, find_model, find_workload

TUNE = ("tune", "--arch", "sm70", "--model", "gemma-4-31b")


def _json(done: tuple[int, str, str]) -> Any:
    code, out, err = done
    assert code == 0, err
    return json.loads(out)


def test_tunes_repeats_and_says_what_it_did(kerngen: Kerngen) -> None:
    first = _json(kerngen.run(*TUNE, "--kernel", "embed", "--jobs", "2", "--json"))
    assert first["objective"] == "predicted"
    assert {r["provenance"] for r in first["results"]} == {"predicted"}
    assert all(r["spill_bytes"] == 0 and r["smem_bytes"] <= 96 * 1024 for r in first["results"])
    assert first["num_compiled"] > 0
    code, out, err = kerngen.run(*TUNE, "--kernel", "embed")
    assert code == 0, err
    assert "predicted by" in out
    assert "not measured" in out
    assert "0 compiles" in out
    assert str(kerngen.folder / "tuning.db") in out
    (usual,) = [r for r in first["results"] if r["problem"]["num_tokens"] == 1]
    us, gain = f"{usual['latency_us']:.1f}", f"{usual['default_us'] / usual['latency_us']:.2f}x"
    (row,) = [line.split() for line in out.splitlines() if line.startswith("embed  ")]
    assert row == ["embed", str(len(first["results"])), f"{usual['default_us']:.1f}", "us", us, "us", gain, "decode"]
    assert out.splitlines()[-1] == "decode: one token, context 512"
    assert not re.search(r"^step|\b0\.00\b", out, re.MULTILINE), "a part of the model is no step"
    assert "differs from the default in" not in out
    _, more, _ = kerngen(*TUNE, "--kernel", "embed", "--verbose")
    (line,) = [line for line in more.splitlines() if re.match(r"embed .* num_tokens=1 ", line)]
    assert re.search(rf" {re.escape(us)} +{re.escape(gain)} ", line), line
    assert line.split()[-2] == str(len(first["results"]))
    assert more.splitlines()[-3].startswith("kernel"), "it ends as without"
    second = _json(kerngen(*TUNE, "--kernel", "embed", "--json"))
    assert [r["config"] for r in second["results"]] == [r["config"] for r in first["results"]]


def test_the_table_has_ten_rows_and_their_sums_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the whole 31B, as though each default took a fifth longer than its winner, but for what has no winner."""
    arch = find_arch("sm70")
    load = find_workload("gemma-4-31b", arch)
    report = Report(Target.of(arch), "predicted", "predicted by nobody, for a test that reads the table", "run")
    for at, item in enumerate(load.items):
        winner: Any = None if item.kernel == "embed" else SimpleNamespace(latency_us=10.0 + at, provenance="predicted",
                                                                         config={"threads": 32})  # fmt: skip
        report.results.append(Result(item, winner, default={"threads": 64}, default_us=12.0 + 1.2 * at, num_tried=3))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kerngen.cli.tables.line_width", lambda **_: 80)  # as on a terminal
    tune = import_module("kerngen.cli.tune")
    tune._print(report, load, "tuning.db", whole=True, verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("kernel "))
    rows = [line for line in lines[start + 1 :] if ":" not in line]
    assert len(rows) <= 12
    assert any(row.startswith("w4a16_gemm") and "1.20x" in row for row in rows)
    assert any(re.match(r"\d others +\d+ ", row) for row in rows)
    assert not any(row.startswith("step, batch 1 ") for row in rows), "no sum without embed's time"
    for r in report.results:
        r.winner = r.winner or SimpleNamespace(latency_us=10.0, provenance="predicted", config={})  # type: ignore[assignment]
    tune._print(report, load, "tuning.db", whole=True, verbose=True)
    told = capsys.readouterr().out
    assert all(len(line) <= 80 for line in told.splitlines())
    us = sum(n * (10.0 + load.items.index(i)) for i, n in load.step("decode", 1, 512) if i.kernel != "embed") + 10.0
    (total,) = re.findall(r"^step, batch 1 +\S+ ms +(\S+) ms", told, re.MULTILINE)
    assert float(total) == pytest.approx(us / 1e3, abs=0.006)
    shares = [float(s) for s in re.findall(r" ([\d.]+)% of decode$", told, re.MULTILINE)]
    assert 98 < sum(shares) <= 101
    assert "left to torch, and not tuned: dense matrices" in told


def test_dry_run_writes_nothing(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = _json(kerngen(*TUNE, "--kernel", "embed,rmsnorm", "--dry-run", "--json"))
    assert {k["kernel"] for k in plan["kernels"]} == {"embed", "rmsnorm"}
    assert all(k["num_compiles"] > 0 for k in plan["kernels"])
    _, shown, _ = kerngen(*TUNE, "--kernel", "embed", "--dry-run")
    assert "nothing is written" in shown
    assert not (kerngen.folder / "tuning.db").exists()


def test_a_plan_says_how_far_it_is_and_marks_estimates(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kerngen.system.progress.LINE_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    code, shown, err = kerngen(*TUNE, "--kernel", "embed,dense_gemv", "--dry-run")
    assert code == 0, err
    assert re.search(r"^plan sm70: (\d+)/\d+, .* s left; dense_gemv$", err, re.MULTILINE), err
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("embed", "dense_gemv"))}
    assert not any("~" in cell for cell in rows["embed"])
    assert "~" in rows["dense_gemv"][4]
    assert "~: an estimate" in shown
    row = KernelPlan("k", 84, 62, 12_468_620, 1_647_999, 10_820_621, 1_008, 215, 35.0, complete=False)
    import_module("kerngen.cli.tune")._print_plan(DryRun((row,), (), 2), "a plan")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("k ")]
    assert line.split() == ["k", "84", "62", "12,468,620", "~1,650,000", "~10,800,000", "1,008", "215", "35"]


def test_no_more_time_is_said_to_be_left_than_the_budget_has(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.system.progress.LINE_EVERY_S", 0.0)
    code, _, err = kerngen(*TUNE, "--time-budget", "6")
    assert code == 0, err
    told = [(float(s), float(left)) for s, left in re.findall(r": \S+, (\d+) s, at most (\d+) s left", err)]
    assert told
    assert all(elapsed + left <= 7 for elapsed, left in told), told


def test_killed_it_leaves_no_process_and_continues(kerngen: Kerngen) -> None:
    command = [sys.executable, "-m", "kerngen", *TUNE, "--kernel", "attn_prefill", "--jobs", "2"]
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        children = psutil.Process(started.pid).children(recursive=True)
        if _cubins(kerngen) and len(children) >= 2:
            break
        time.sleep(0.1)
    assert len(children) >= 2, "no compiler process was seen"
    started.send_signal(signal.SIGKILL)
    started.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, f"orphans: {alive}"
    assert _cubins(kerngen)
    done = _json(kerngen.run(*TUNE, "--kernel", "attn_prefill", "--trials", "1", "--json"))
    assert all(r["winner" if "winner" in r else "config"] for r in done["results"])
    with Store.open(kerngen.folder / "tuning.db", read_only=True) as store:
        assert len(store.winners("attn_prefill")) == len(done["results"])


def _cubins(kerngen: Kerngen) -> list[Path]:
    """What lies in its compile cache by now."""
    return list((kerngen.folder / "cache").glob("v1/*/*.cubin"))


@pytest.mark.parametrize("objective", ["measured", "step"])
def test_measuring_needs_the_gpu(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, objective: str) -> None:
    from kerngen.tuning import worker

    monkeypatch.setattr(worker, "present_arch", lambda: None)
    code, _, err = kerngen(*TUNE, "--kernel", "embed", "--objective", objective)
    assert code == 1
    assert "no GPU to measure on" in err
    assert "--objective predicted" in err


FakeGpu = partial(PlayedGpu, board="V100")  # on which no step can be run


@pytest.mark.parametrize(("asked", "here", "chosen", "says"), [
    ((), "sm70", "step", r"on this machine's V100, and \d steps of gemma-4-31b choose"),
    (("--kernel", "embed"), "sm70", "measured", r"each kernel alone: --kernel names a part of the model"),
    (("--kernel", "embed"), "sm90", "predicted", r"no sm70 GPU is here"),
    (("--kernel", "embed"), None, "predicted", r"no sm70 GPU is here"),
    (("--kernel", "embed", "--device", "V100"), "sm70", "predicted", r"--device names a profile, V100"),
])  # fmt: skip
def test_auto_says_what_it_chose(
    kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], here: str | None, chosen: str, says: str
) -> None:
    from kerngen.tuning import worker

    judged: list[Any] = []
    monkeypatch.setattr(worker, "present_arch", lambda: None if here is None else find_arch(here))
    monkeypatch.setattr(worker, "GpuWorker", FakeGpu)
    monkeypatch.setattr(import_module("kerngen.cli.tune"), "_dry_run", lambda load, by, *rest: judged.append(by))
    code, _, err = kerngen(*TUNE, *asked, "--dry-run")
    assert code == 0, err
    assert re.search(rf"^--objective {chosen}: .*{says}", err, re.MULTILINE), err
    (by,) = judged
    assert by.name == chosen
    lock = GpuLock(FakeGpu().uuid())
    assert lock.try_acquire(), "nothing holds the GPU"
    lock.release()


def test_without_an_arch_it_is_that_of_the_gpu_here(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    from kerngen.tuning import worker

    judged: list[Any] = []
    monkeypatch.setattr(worker, "GpuWorker", FakeGpu)
    monkeypatch.setattr(import_module("kerngen.cli.tune"), "_dry_run", lambda load, by, *rest: judged.append(by))
    args = ("tune", "--model", "gemma-4-e2b", "--kernel", "embed", "--dry-run")
    monkeypatch.setattr(worker, "present_arch", lambda: find_arch("sm70"))
    code, _, err = kerngen(*args)
    assert code == 0, err
    assert [(by.name, by.target.arch.name) for by in judged] == [("measured", "sm70")]
    monkeypatch.setattr(worker, "present_arch", lambda: None)
    code, _, err = kerngen(*args)
    assert code == 2
    assert "no GPU" in err
    assert "--arch sm70" in err


def test_several_models_are_tuned_one_after_the_other(kerngen: Kerngen) -> None:
    args = ("tune", "--arch", "sm70", "--kernel", "embed", "--trials", "1", "--jobs", "1", "--json")
    code, out, err = kerngen(*args, "--model", "gemma-4-e2b,gemma-4-31b", "--results", "text")
    assert code == 0, err
    reports = [json.loads(line) for line in out.splitlines()]
    assert [r["model"] for r in reports] == ["gemma-4-e2b", "gemma-4-31b"]
    (path,) = (kerngen.folder / "text").rglob("*.txt")
    file = parse(path.read_text())
    assert (path.name, path.parent.name) == ("embed.txt", "V100")
    assert {p.static.get("hidden") for p in file.problems} >= {1536, None}  # the 31B's is the default
    code, out, err = kerngen(*args, "--model", "all", "--time-budget", "0.001")
    first, *others = MODELS
    assert [json.loads(line)["model"] for line in out.splitlines()] == [first]
    assert [line.partition(":")[0] for line in err.splitlines() if "not begun" in line] == others
    code, _, err = kerngen(*args, "--model", "gemma-4-e2b,gemma-4-32b")
    assert code == 2
    assert "unknown model 'gemma-4-32b'" in err, "before anything is tuned"
    code, _, err = kerngen(*args, "--model", "gemma-4-e2b,")
    assert (code, "names no model before or after a comma" in err) == (2, True)
    code, _, err = kerngen(*args, "--model", "gemma-4-e2b", "--results", "/proc/nowhere")
    assert (code, "name another place with --results" in err) == (1, True)


@pytest.mark.parametrize(
    ("budget", "took", "shares"),
    [(None, (5.0, 5.0), [None, None]), (60.0, (50.0, 1.0), [30.0, 10.0]), (60.0, (51.0,), [30.0])],
)
def test_models_share_the_time_budget(
    monkeypatch: pytest.MonkeyPatch, budget: float | None, took: tuple[float, ...], shares: list[float | None]
) -> None:
    """What one leaves the next ones have; what one takes too long they lack, and none begins that has no time."""
    module = import_module("kerngen.cli.tune")
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    found = []
    models: list[Any] = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    for (model, since, seconds), spent in zip(module._shares(models, 100.0, budget), took, strict=True):
        found.append(seconds)
        assert (model, since) == (models[len(found) - 1], clock[0])
        clock[0] += spent
    assert found == shares


def test_a_model_without_such_steps_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    load = find_workload("gemma-4-31b", find_arch("sm70"))
    none = replace(load, steps=())
    with ExitStack() as stack:
        by, why = objective_for(
            stack, gpu, "auto", find_arch("sm70"), None, find_model("gemma-4-31b"), none, whole=True
        )
    assert by.name == "measured"
    assert "takes none of the steps" in why


def test_every_problem_of_the_31b_gets_a_v100_cubin(kerngen: Kerngen) -> None:
    """The default of each; how deep a search goes is test_tune.py's subject. attn_decode and w4a16_gemm, most of the
    builds, are built case by case in test_kernel_folders.py: here each matrix is built with one of the tiles that its
    numbers of tokens get, by turns.
    """
    load, target = find_workload("gemma-4-31b", find_arch("sm70")), Target.of(find_arch("sm70"))
    names = {i.kernel for i in load.items} - {"attn_decode", "w4a16_gemm"}
    gemm = find_kernel("w4a16_gemm")
    matrices: dict[str, dict[Any, Any]] = {}
    for item in load.only([gemm.name]).items:
        tiles = matrices.setdefault(str(static_fields(item.problem)), {})
        tiles.setdefault(gemm.default_config(item.problem, target), item.problem)
    assert len(matrices) > 5
    for turn, tiles in enumerate(matrices.values()):
        config, problem = list(tiles.items())[turn % len(tiles)]
        cubin = compile_cubin(render(gemm, problem, config, target), target.arch)
        assert not cubin.spills, f"{problem} {config}"
        assert gemm.smem_bytes(problem, config, target) <= 96 * 1024
    some = ("--kernel", ",".join(sorted(names)))
    done = _json(kerngen(*TUNE, *some, "--objective", "predicted", "--trials", "1", "--json"))
    assert done["missing"] == ["dense matrices"], "which torch multiplies, by choice"
    assert len(done["results"]) == len([i for i in load.items if i.kernel in names]) > 250
    for row in done["results"]:
        what = f"{row['kernel']} {row['problem']}"
        assert row["config"] is not None, f"{what}: {row['note']}"
        assert row["provenance"] == "predicted"
        assert row["smem_bytes"] <= 96 * 1024, what
        assert row["spill_bytes"] == 0 or "spills" in row["note"], what
    with Store.open(kerngen.folder / "tuning.db", read_only=True) as store:
        winners = store.winners(arch="sm70")
        assert len(winners) == len(done["results"])
        for build_id in {w.build_id for w in winners}:
            image = store.image(store.build(build_id))
            assert why_not_cubin(image.image, find_arch("sm70")) is None
