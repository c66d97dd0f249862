"""`python -m kerngen.tuning.exchange`: configurations exchanged in a step, which is played here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from command import ROOT

from kerngen.arch import Device, Target, find_device
from kerngen.cli import run_command
from kerngen.measure import Ceilings
from kerngen.steps import Ratio, Step
from kerngen.templates.kernel import fields_of
from kerngen.tuning import exchange
from kerngen.tuning.worker import Observed
from kerngen.workload import find_model

MODEL, STEP, TARGET = find_model("gemma-4-31b"), Step.verify(1, 4, 512), Target.of(find_device("H200"))
DEFAULT = exchange.places_of(MODEL, STEP, TARGET, ["add_norm"])[0].default  # two vectors a thread, one row a block


class PlayedGpu:
    """An H200 whose step is 1 ms, takes a tenth less with an add_norm of one vector a thread, a fifth with one of two
    rows a block, and faults where a thread has three vectors. `wrong` rows a block are.
    """

    wrong: tuple[int, ...] = ()
    looks: list[tuple[Any, ...]]

    def __init__(self, timeout_s: float) -> None:
        type(self).looks = []

    def __enter__(self) -> PlayedGpu:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def device(self) -> Device:
        return find_device("H200")

    def ceilings(self) -> Ceilings:
        return Ceilings(4580.0, 4100.0, 790.0, {})

    def check(self, kernel: Any, problem: Any, config: Any, image: bytes) -> Observed:
        assert image[:4] == b"\x7fELF"
        return Observed("wrong_result", "out[0] is 2") if config.rows_per_block in self.wrong else Observed("ok")

    def compare(self, model: Any, step: Any, base: Sequence[Any], other: Sequence[Any], *, pairs: int) -> Any:
        assert (model, step) == (MODEL, STEP)
        type(self).looks.append((tuple(e.config for e in base), tuple(e.config for e in other), pairs))
        if any(e.config.vecs_per_thread == 3 for e in other):
            return Observed("launch_failed", "the kernel took its process down")
        gains = [[0.9 if e.config.vecs_per_thread == 1 else 0.8 for e in chosen if e.config != DEFAULT]
                 for chosen in (base, other)]  # fmt: skip
        us = [1000 * prod(factors) for factors in gains]
        return Ratio(us[1] / us[0], 0.0001, us[0])


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str, wrong: tuple[int, ...] = ()) -> int:
    monkeypatch.setattr(exchange, "GpuWorker", type("Played", (PlayedGpu,), {"wrong": wrong}))
    monkeypatch.setattr(sys, "argv", ["exchange", "gemma-4-31b", "--phase", "verify", "--jobs", "2", *arguments])
    return run_command(exchange.main, "exchange")


def _fields(problem: Any) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in fields_of(problem).items()}  # fmt: skip


def _plan(tmp_path: Path, *configs: str) -> Path:
    place = exchange.places_of(MODEL, STEP, TARGET, ["add_norm"])[0]
    fields = ",".join(f"{k}={v}" for k, v in _fields(place.problem).items())
    path = tmp_path / "plan.txt"
    path.write_text(f"add_norm {fields}\n" + "".join(f"  {c}\n" for c in configs))
    return path


def test_what_gains_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan(tmp_path, "vecs_per_thread=1", "rows_per_block=2")
    assert _run(monkeypatch, "--plan", str(plan), "--rounds", "1") == 0
    out = capsys.readouterr().out
    assert "reads 4580 GB/s; gemma-4-31b, verify 4 tokens, batch 1, context 512" in out
    assert "  kept: 0.8000 +- 0.0001  " in out
    assert "1.000 ms by default, with what was kept 0.8000" in out
    assert out.splitlines()[-1].startswith("  add_norm ")
    assert "rows_per_block=2" in out.splitlines()[-1]


def test_what_stays_is_beside_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first round keeps what gains at the one place; all looks at the other are beside it."""
    assert _run(monkeypatch, "--kernel", "add_norm", "--most", "3", "--rounds", "1", "--seed", "3") in (0, 1)
    out = capsys.readouterr().out
    assert out.count("  kept: ") == 2
    assert (
        "with what was kept 0.6400" in out or "with what was kept 0.7200" in out or "with what was kept 0.8100" in out
    )


def test_what_is_wrong_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan(tmp_path, "rows_per_block=2", "vecs_per_thread=1")
    assert _run(monkeypatch, "--plan", str(plan), "--rounds", "1", wrong=(2,)) == 1
    out, err = capsys.readouterr()
    assert "wrong_result: out[0] is 2" in out
    assert "vecs_per_thread=1" in out.splitlines()[-1]
    assert "1 configurations are wrong or failed" in err


def test_a_fault_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--plan", str(_plan(tmp_path, "vecs_per_thread=3")), "--rounds", "2") == 1
    assert capsys.readouterr().out.count("launch_failed: the kernel took its process down") == 1  # once is enough


def test_places_and_draws() -> None:
    places = exchange.places_of(MODEL, STEP, TARGET)
    moved = [p.launches * p.kernel.cost(p.problem).bytes for p in places]
    assert moved == sorted(moved, reverse=True)
    place = next(p for p in places if p.kernel.name == "w4a16_gemm" and p.launches > 1)
    drawn = exchange.drawn(place, TARGET, 20, seed=0)
    assert drawn == exchange.drawn(place, TARGET, 20, seed=0) != exchange.drawn(place, TARGET, 20, seed=1)
    assert len(drawn) == len(set(drawn)) == 20
    assert place.default not in drawn
    assert {(c.gemv, c.stream, c.warpgroups) for c in drawn} >= {(True, False, False), (False, True, False)}
    for config in drawn:
        place.kernel.require_valid(place.problem, config, TARGET)


def test_it_lists_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--kernel", "add_norm", "--most", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("add_norm hidden=5376") or "launches" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kernel", "moe_w4a16"), "launches no moe_w4a16"),
        (("--kernel", "add_nom"), "unknown kernel 'add_nom'"),
        (("--context", "300000"), "positions"),
    ],
)
def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    assert says in capsys.readouterr().err


def test_a_plan_of_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan := tmp_path / "plan.txt").write_text("w4a16_gemm n=512,k=256,num_tokens=4\n  block_m=16\n")
    assert _run(monkeypatch, "--plan", str(plan)) == 2
    assert "the step does not launch w4a16_gemm" in capsys.readouterr().err


def test_plans_that_are_kept_can_run() -> None:
    """A folder for each board that they were for, and below it one for each model's step."""
    paths = sorted((ROOT / "data" / "exchanges").glob("*/*.txt"))
    assert paths
    for path in paths:
        model, _, phase = path.stem.partition("--")
        name, _, tokens = phase.partition("-")
        step = Step.verify(1, int(tokens), 512) if name == "verify" else Step.decode(int(tokens), 512)
        target = Target.of(find_device(path.parent.name.upper()))
        places = exchange.places_of(find_model(model), step, target)
        assert all(p.configs for p in exchange.planned(places, path, target))
