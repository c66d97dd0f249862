"""`python -m kerngen.tuning.exchange`: configurations exchanged in a step, which is played here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import ROOT
from played_gpu import PlayedWorker

from kerngen.arch import Target, find_device
from kerngen.cli import run_command
from kerngen.errors import CompileError, LaunchError
from kerngen.templates.kernel import fields_of
from kerngen.tuning import exchange
from kerngen.tuning.exchange import PAIRS, SURE_PAIRS, Exchange, Kept, Look, Place
from kerngen.tuning.worker import Observed
from kerngen.workload.steps import Ratio, Step
from kerngen.workload.workload import find_model

MODEL, STEP, TARGET = find_model("gemma-4-31b"), Step.verify(2, 5, 512), Target.of(find_device("H200"))
FIRST, SECOND = exchange.places_of(MODEL, STEP, TARGET, ["add_norm"])
DEFAULT = FIRST.default  # two vectors a thread, one row a block
ONE_VECTOR, TWO_ROWS, FOUR = (
    replace(DEFAULT, **change) for change in ({"vecs_per_thread": 1}, {"rows_per_block": 2}, {"vecs_per_thread": 4})
)


class PlayedGpu(PlayedWorker):
    """An H200. A step's time is the product of the factors that `times` has for what is exchanged, by problem,
    configuration and pairs of the look; a text says that it breaks. `wrong` has what the reference refuses.
    """

    def __init__(self, times: Callable[[Any, Any, int], float | str], wrong: Sequence[Any] = ()) -> None:
        self.times, self.wrong = times, wrong
        self.looks: list[tuple[dict[Any, Any], dict[Any, Any], int]] = []
        self.checked: list[Any] = []

    def __call__(self, timeout_s: float) -> PlayedGpu:
        return self

    def check(self, kernel: Any, problem: Any, config: Any, image: bytes) -> Observed:
        assert image[:4] == b"\x7fELF"
        self.checked.append(config)
        return Observed("wrong_result", "out[0] is 2") if config in self.wrong else Observed("ok")

    def compare(self, model: Any, step: Any, base: Sequence[Any], other: Sequence[Any], *, pairs: int) -> Any:
        assert (model, step) == (MODEL, STEP)
        before, after = ({e.problems[0]: e.config for e in chosen} for chosen in (base, other))
        self.looks.append((before, after, pairs))
        factors = [[self.times(p, c, pairs) for p, c in chosen.items()] for chosen in (before, after)]
        if broken := [f for f in factors[0] + factors[1] if isinstance(f, str)]:
            return Observed("launch_failed", broken[0])
        us = [1000 * prod(f for f in of if not isinstance(f, str)) for of in factors]
        return Ratio(us[1] / us[0], 0.0001, us[0])


def _exchange(gpu: PlayedGpu, *places: tuple[Place, Sequence[Any]], broken: Sequence[Any] = ()) -> Exchange:
    """With a compiler that breaks at texts of `broken`."""
    made = [replace(place, configs=list(configs)) for place, configs in places]

    def submit(source: str, arch: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if any(exchange.render(FIRST.kernel, p.problem, c, TARGET) == source for p in made for c in broken):
            answer.set_exception(CompileError("ptxas: no"))
        else:
            answer.set_result(SimpleNamespace(image=b"\x7fELF" + source.encode()))
        return answer

    compiler: Any = SimpleNamespace(submit=submit)
    return Exchange(MODEL, STEP, made, TARGET, gpu, compiler, 0.001)  # type: ignore[arg-type]


def _factors(of: dict[Any, float | str]) -> Callable[[Any, Any, int], float | str]:
    return lambda problem, config, pairs: of.get(config, 1.0)


def test_what_gains_is_looked_at_again_checked_and_beside_all_that_follows() -> None:
    gpu = PlayedGpu(_factors({ONE_VECTOR: 0.9, TWO_ROWS: 0.8}))
    run = _exchange(gpu, (FIRST, [ONE_VECTOR, TWO_ROWS]), (SECOND, [ONE_VECTOR]))
    found = list(run.round())
    assert [(type(f), f.place.problem, f.config) for f in found] == [
        (Look, FIRST.problem, ONE_VECTOR), (Look, FIRST.problem, TWO_ROWS), (Kept, FIRST.problem, TWO_ROWS),
        (Look, SECOND.problem, ONE_VECTOR), (Kept, SECOND.problem, ONE_VECTOR),
    ]  # fmt: skip
    assert [pairs for _, _, pairs in gpu.looks] == [PAIRS, PAIRS, SURE_PAIRS, PAIRS, SURE_PAIRS]
    first = {FIRST.problem: TWO_ROWS}
    assert [before for before, _, _ in gpu.looks] == [{}, {}, {}, first, first]
    assert gpu.looks[-1][1] == {**first, SECOND.problem: ONE_VECTOR}
    assert gpu.checked == [TWO_ROWS, ONE_VECTOR]
    whole = run.against_defaults()
    assert isinstance(whole, Ratio)
    assert whole.median == pytest.approx(0.72)


def test_what_gains_by_luck_or_nothing_is_not_kept() -> None:
    """0.9 in a short look and 1.0 in a long one; and a place whose best is slower, which gets no long look."""
    gpu = PlayedGpu(lambda problem, config, pairs: 0.9 if config == ONE_VECTOR and pairs == PAIRS else 1.01)
    run = _exchange(gpu, (FIRST, [ONE_VECTOR, TWO_ROWS]), (SECOND, [TWO_ROWS]))
    assert not [f for f in run.round() if isinstance(f, Kept)]
    assert [pairs for _, _, pairs in gpu.looks] == [PAIRS, PAIRS, SURE_PAIRS, PAIRS]
    assert not run.kept
    assert not gpu.checked


def test_a_second_round_goes_back_where_that_is_faster_by_then() -> None:
    """One vector gains alone, and loses beside the other place's two rows."""
    beside = {"rows": False}

    def times(problem: Any, config: Any, pairs: int) -> float:
        if config == TWO_ROWS and problem == SECOND.problem:
            beside["rows"] = True
            return 0.8
        return (1.1 if beside["rows"] else 0.9) if config == ONE_VECTOR else 1.0

    gpu = PlayedGpu(times)
    run = _exchange(gpu, (FIRST, [ONE_VECTOR]), (SECOND, [TWO_ROWS]))
    list(run.round())
    assert run.kept == {FIRST.called: ONE_VECTOR, SECOND.called: TWO_ROWS}
    (kept,) = (f for f in run.round() if isinstance(f, Kept))
    assert (kept.place.problem, kept.config) == (FIRST.problem, DEFAULT)
    assert run.kept == {SECOND.called: TWO_ROWS}


def test_what_is_wrong_does_not_stand_in_the_way() -> None:
    gpu = PlayedGpu(_factors({ONE_VECTOR: 0.9, TWO_ROWS: 0.8, FOUR: 0.7}), wrong=(TWO_ROWS, FOUR))
    run = _exchange(gpu, (FIRST, [ONE_VECTOR, TWO_ROWS, FOUR]))
    found = list(run.round())
    wrong = [f.config for f in found if isinstance(f.seen, Observed)]
    assert wrong == [FOUR, TWO_ROWS]
    assert run.kept == {FIRST.called: ONE_VECTOR}
    again = list(run.round())
    assert {f.config for f in again} == {DEFAULT}, "what was wrong is not looked at again"


def test_what_breaks_is_told_once() -> None:
    gpu = PlayedGpu(_factors({FOUR: "the kernel took its process down"}))
    run = _exchange(gpu, (FIRST, [FOUR, TWO_ROWS]), broken=[TWO_ROWS])
    seen = [f.seen for f in run.round() if isinstance(f.seen, Observed)]
    assert [(s.outcome, s.reason) for s in seen] == [
        ("launch_failed", "the kernel took its process down"), ("compile_failed", "ptxas: no"),
    ]  # fmt: skip
    assert not list(run.round())


def test_a_step_that_does_not_run_is_said_before_any_look() -> None:
    gpu = PlayedGpu(_factors({}))
    gpu.compare = lambda *_, pairs: Observed("timed_out", "no answer within 1 s")  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match=r"default.* 1 s"):
        _exchange(gpu, (FIRST, [TWO_ROWS])).begin()


# -- the command


def _run(monkeypatch: pytest.MonkeyPatch, gpu: PlayedGpu, *arguments: str) -> int:
    monkeypatch.setattr(exchange, "GpuWorker", gpu)
    step = ["--phase", "verify", "--batch", "2", "--tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["exchange", "gemma-4-31b", *step, "--jobs", "2", *arguments])
    return run_command(exchange.main, "exchange")


def _plan(tmp_path: Path, *configs: str) -> Path:
    fields = ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in fields_of(FIRST.problem).items()
    )
    path = tmp_path / "plan.txt"
    path.write_text(f"add_norm {fields}\n" + "".join(f"  {c}\n" for c in configs))
    return path


def test_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = PlayedGpu(_factors({ONE_VECTOR: 0.9, TWO_ROWS: 0.8}), wrong=(TWO_ROWS,))
    plan = _plan(tmp_path, "vecs_per_thread=1", "rows_per_block=2")
    assert _run(monkeypatch, gpu, "--plan", str(plan), "--rounds", "1") == 1
    out, err = capsys.readouterr()
    assert "reads 4580 GB/s; gemma-4-31b, verify 5 tokens, batch 2, context 512" in out
    assert "  wrong_result: out[0] is 2  " in out
    assert "  kept: 0.9000 +- 0.0001  " in out
    *_, kept, last = out.splitlines()
    assert kept.startswith("kept: add_norm ")
    assert "vecs_per_thread=1" in kept
    assert last.endswith("1.000 ms by default, with what was kept 0.9000 +- 0.0001 of it")
    assert "1 configurations are wrong or failed" in err


def test_it_lists_problems(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, PlayedGpu(_factors({})), "--kernel", "add_norm", "--most", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("add_norm [hidden=5376 ") and ", 60 launches: [" in line for line in lines)


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
    assert _run(monkeypatch, PlayedGpu(_factors({})), *arguments) == 2
    assert says in capsys.readouterr().err


def test_a_plan_of_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan := tmp_path / "plan.txt").write_text("w4a16_gemm n=512,k=256,num_tokens=4\n  block_m=16\n")
    assert _run(monkeypatch, PlayedGpu(_factors({})), "--plan", str(plan)) == 2
    assert "the step does not launch w4a16_gemm" in capsys.readouterr().err


def test_draws_are_of_every_body_and_the_same_each_time() -> None:
    places = exchange.places_of(MODEL, Step.verify(1, 4, 512), TARGET)
    moved = [p.launches * p.kernel.cost(p.problem).bytes for p in places]
    assert moved == sorted(moved, reverse=True)
    place = places[0]
    assert place.kernel.name == "w4a16_gemm"
    drawn = exchange.drawn(place, TARGET, 20, seed=0)
    assert drawn == exchange.drawn(place, TARGET, 20, seed=0) != exchange.drawn(place, TARGET, 20, seed=1)
    assert len(drawn) == len(set(drawn)) == 20
    assert place.default not in drawn
    assert {(c.gemv, c.stream) for c in drawn} == {(True, False), (False, True), (False, False)}
    for config in drawn:
        place.kernel.require_valid(place.problem, config, TARGET)


def test_plans_that_are_kept_can_run() -> None:
    """A folder for each board that they were for, a file for each model's step."""
    paths = sorted((ROOT / "data" / "exchanges").glob("*/*.txt"))
    assert paths
    for path in paths:
        model, _, phase = path.stem.partition("--")
        name, _, tokens = phase.partition("-")
        step = Step.verify(1, int(tokens), 512) if name == "verify" else Step.decode(int(tokens), 512)
        target = Target.of(find_device(path.parent.name.upper()))
        places = exchange.places_of(find_model(model), step, target)
        assert all(p.configs for p in exchange.planned(places, path, target))
