"""`python -m kerngen.tuning.sweep`: a body's configurations on a GPU, which is played here."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import ROOT
from played_gpu import PlayedWorker

from kerngen.arch import Target, find_device
from kerngen.cli import run_command
from kerngen.templates import find_kernel
from kerngen.tuning import sweep
from kerngen.tuning.worker import Observed

GEMM = find_kernel("w4a16_gemm")
ARGUMENTS = ("w4a16_gemm", "--body", "wgmma_ws.cu.jinja", "--problem", "n=512,k=256,gated=false,num_tokens=40")


class PlayedGpu(PlayedWorker):
    """An H200 on which tiles of 64 tokens are quick, and the second configuration of a case is wrong."""

    def __init__(self, timeout_s: float) -> None:
        assert timeout_s == 3.0
        self.seen: list[Any] = []

    def measure(self, kernel: Any, problem: Any, config: Any, image: bytes) -> Observed:
        assert image[:4] == b"\x7fELF"
        self.seen.append(config)
        if len(self.seen) == 2:
            return Observed("wrong_result", "out[3, 1] is nan, reference 1")
        return Observed("ok", p50_us=5.0 if config.block_m == 64 else 10.0)


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
    return run_command(sweep.main, "sweep")


def test_it_tells_what_came_of_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "GpuWorker", PlayedGpu)
    assert _run(monkeypatch, *ARGUMENTS, "--most", "6", "--timeout", "3", "--jobs", "2") == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 1 + 1 + 1 + 6 + 1
    assert "reads 4580 GB/s, multiplies 790 TFLOP/s" in lines[0]
    assert "n=512" in lines[1]
    assert "wrong_result: out[3, 1] is nan, reference 1" in lines[3]
    assert lines[2].split()[1] == "us"
    assert all("body=wgmma_ws" in line for line in lines[3:9])
    assert "best: " in lines[-1]
    assert "1 configurations are wrong or failed" in err


def test_configurations_that_are_written_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "GpuWorker", PlayedGpu)
    given = ("--config", "block_m=16", "--config", "block_m=64,num_stages=3", "--timeout", "3", "--jobs", "2")
    assert _run(monkeypatch, ARGUMENTS[0], *ARGUMENTS[3:], *given) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 3 + 1
    assert "block_m=16" in lines[3]
    assert "block_m=64" in lines[4]
    assert "num_stages=3" in lines[4]


def test_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "GpuWorker", PlayedGpu)
    plan = tmp_path / "plan.txt"
    plan.write_text("# two problems\nw4a16_gemm n=512,k=256,num_tokens=40\n  block_m=16  # small\n\n"
                    "w4a16_gemm n=512,k=256,num_tokens=1\n  block_n=64,warp_n=64\n")  # fmt: skip
    assert _run(monkeypatch, "--plan", str(plan), "--timeout", "3", "--jobs", "2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["H2", "w4", "  ", "  ", "  ", "w4", "  ", "  ", "  "]
    assert "block_m=16" in lines[3]
    assert "block_n=64" in lines[7]
    assert "best: " in lines[8]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "plans nothing"),
        ("  block_m=32\n", "line 1: a configuration stands before the first problem"),
        ("\nw4a16 n=512,k=256\n", "line 2: unknown kernel 'w4a16'"),
        ("w4a16_gemm n=512\n", "line 1: k must be given"),
    ],
)
def test_a_plan_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (plan := tmp_path / "plan.txt").write_text(text)
    assert _run(monkeypatch, "--plan", str(plan)) == 2
    assert says in capsys.readouterr().err


def test_plans_that_are_kept_can_run() -> None:
    """A folder for each board that they were for."""
    paths = sorted((ROOT / "data" / "sweeps").glob("*/*.txt"))
    assert {path.parent.name for path in paths} == {"h100", "h200"}
    for path in paths:
        target = Target.of(find_device(path.parent.name.upper()))
        for planned in sweep.read_plan(path):
            assert planned.texts
            assert sweep.written_out(planned.kernel, planned.case.problem, target, planned.texts)


def test_the_quickest_by_the_model_are_tried_first() -> None:
    body = sweep.body_of(GEMM, "wgmma_ws.cu.jinja")
    problem = GEMM.problem_type(n=5376, k=8192, num_tokens=4096)
    target = Target.of(find_device("H200"))
    case, gpu = GEMM.cases.case_for(problem), PlayedGpu(3.0)
    made: Future[Any] = Future()
    made.set_result(SimpleNamespace(image=b"\x7fELF"))
    compiler: Any = SimpleNamespace(submit=lambda source, arch: made)  # the order does not follow from what it is
    best = sweep.of_body(GEMM, body, problem, target, 10)
    planned = sweep.Planned(GEMM, case, [], [c for c in best if c != GEMM.default_config(problem, target)])
    _, *found = sweep.sweep([planned], target, gpu, compiler)  # type: ignore[arg-type]
    assert len(found) in (9, 10)
    assert [t.expected_us for t in found] == sorted(t.expected_us for t in found)
    assert all(t.config.warpgroups for t in found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("rmsnorm", "--body", "x.cu"), "rmsnorm has 0 bodies"),
        (("w4a16_gemm", "--body", "kernel.cu.jinja"), "w4a16_gemm has 2 bodies"),
        (("rmsnorm",), "what to try is not clear"),
        ((), "what to try is not clear"),
        (("--config", "block_m=32"), "what to try is not clear"),
        ((*ARGUMENTS, "--config", "block_m=32"), "what to try is not clear"),
        ((*ARGUMENTS[:4], "tokens=3"), "unknown problem field 'tokens'"),
        ((*ARGUMENTS[:4], "n=many"), "n='many' is not of type int"),
        ((*ARGUMENTS[:3], "--case", "nonsense"), "no bench case of w4a16_gemm contains 'nonsense'"),
    ],
)
def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    assert says in capsys.readouterr().err
