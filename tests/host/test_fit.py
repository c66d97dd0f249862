"""Scores of the cost model on recordings whose truth is known, and on what an H200 recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recordings import recording

from kerngen.arch import Target, find_arch
from kerngen.compiler.compile import Resources
from kerngen.cost.predict import CONSTANTS, MODEL, Predictor, predict
from kerngen.errors import RecordingError
from kerngen.templates import find_kernel
from kerngen.templates.kernel import fields_of
from kerngen.tuning.recorded import Recorded, completed, write
from kerngen.tuning_db.store.winners import PREDICTED_MARGIN
from tools.fit import FITTED, Score, fit, loss, main, sample, score, spearman, summaries
from tools.recordings import read_folder

SM90 = Target.of(find_arch("sm90"))
DENSE = find_kernel("dense_gemv")
PROBLEM = DENSE.problem_type(n=8192, k=1024)
FEWER = {"row_tiles": (1,), "warps_n": (1, 4), "unroll": (2, 4), "blocks_per_sm": (1, 2)}
H200 = Path(__file__).parents[2] / "data" / "recorded" / "h200"
TAKES = {"dense_gemv": Resources(40, 0, 0, 0, 0)}


def _model_us(config: Any) -> float:
    return predict(DENSE, PROBLEM, config, SM90, TAKES).latency_us


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 99]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4), "equals share a rank"
    assert spearman([5, 5, 5], [1, 2, 3]) == 0, "who tells none apart knows nothing"


def test_a_model_that_is_right_scores_so() -> None:
    found = score(recording(DENSE, PROBLEM, SM90, lambda c: 2 * _model_us(c), fewer=FEWER))
    assert found.spearman > 0.99, "times are recorded to a nanosecond"
    assert found.regret <= PREDICTED_MARGIN, "of the default, where nothing is predicted to be further ahead of it"
    assert found.ratio == pytest.approx(0.5, rel=1e-3)
    assert found.off == pytest.approx(1.0, rel=1e-3)


def test_a_model_that_is_wrong_scores_so() -> None:
    found = score(recording(DENSE, PROBLEM, SM90, lambda c: 1e4 / _model_us(c), fewer=FEWER))
    assert found.spearman < -0.99
    assert found.regret > 0.3


def test_what_a_kernel_takes_decides() -> None:
    """A score is of what the model says of the compiled kernel: the registers that were recorded."""
    recorded = recording(DENSE, PROBLEM, SM90, _model_us, fewer=FEWER)
    heavy = {"dense_gemv": Resources(255, 0, 0, 0, 0)}
    assert (
        score(completed(recorded.head, [replace(r, takes=heavy) for r in recorded.rows])).ratio > score(recorded).ratio
    )


def test_failures_are_no_times() -> None:
    recorded = recording(DENSE, PROBLEM, SM90, lambda c: _model_us(c) if c.warps_k > 1 else "it is wrong", fewer=FEWER)
    ok = [r for r in recorded.rows if r.outcome == "ok"]
    assert 0 < score(recorded).num_configs == len(ok) < len(recorded.rows)
    nothing = recording(DENSE, PROBLEM, SM90, lambda c: "it is wrong", fewer=FEWER)
    with pytest.raises(RecordingError, match="no configuration"):
        score(nothing)


def test_the_default_is_the_choice_among_equals() -> None:
    """As the tuner has it, and not another that is predicted to take the same: with the registers given, and blocks for
    all rows, blocks_per_sm makes no difference.
    """
    recorded = recording(DENSE, PROBLEM, SM90, lambda c: 10.0, fewer=FEWER | {"persistent": (False,)})
    groups: dict[float, list[Any]] = {}
    for row in recorded.rows:
        groups.setdefault(_model_us(row.config), []).append(row.config)
    equal = max(groups.values(), key=len)
    assert len(equal) > 1

    def regret(default: Any, fastest: Any) -> float:
        kept = [r for r in recorded.rows if r.config in equal]
        rows = tuple(replace(r, us=8.0, p10_us=8.0) if r.config == fastest else r for r in kept)
        return score(Recorded(replace(recorded.head, default=fields_of(default)), rows)).regret

    assert regret(equal[-1], equal[-1]) == 0
    assert regret(equal[-1], equal[0]) == pytest.approx(0.25)


def test_the_second_look_counts_against_its_like() -> None:
    """All that had one were 10 % faster in it; what was not looked at again is no worse for that."""
    recorded = recording(DENSE, PROBLEM, SM90, _model_us, fewer=FEWER)
    again = {r.config for r in sorted(recorded.rows, key=lambda r: r.us or 0)[1::2]}
    rows = [replace(r, final_us=0.9 * r.us) if r.config in again and r.us else r for r in recorded.rows]
    found = score(completed(recorded.head, rows))
    assert found.spearman > 0.99
    assert found.ratio == pytest.approx(1.0, rel=2e-3)


def test_held_out_problems_are_summed_up_apart() -> None:
    def one(kernel: str, held_out: bool, regret: float) -> Score:
        return Score(kernel, "p", held_out, 10, 1 - regret, regret, 1 + regret, regret)

    found = {s.name: s for s in summaries([one("a", True, 0.5), one("a", False, 0.1), one("b", False, 0.3)])}
    assert set(found) == {"held out", "fitted to", "a", "b"}
    assert (found["held out"].num_problems, found["held out"].regret) == (1, 0.5)
    assert found["fitted to"].regret == pytest.approx(0.2)
    assert found["fitted to"].worst_regret == 0.3
    assert found["a"].worst_spearman == 0.5


def test_the_command(tmp_path: Path) -> None:
    for name, held_out in (("one", True), ("two", False)):
        recorded = recording(DENSE, PROBLEM, SM90, _model_us, name, FEWER, held_out=held_out)
        write(tmp_path / recorded.head.file_name, recorded)
    said = CliRunner().invoke(main, [str(tmp_path)], catch_exceptions=False).output
    assert "* dense_gemv one" in said
    assert "held out" in said
    given = json.loads(CliRunner().invoke(main, [str(tmp_path), "--json"], catch_exceptions=False).output)
    assert given["model"] == MODEL
    assert [p["problem"] for p in given["problems"]] == ["one", "two"]
    assert {s["name"]: s["num_problems"] for s in given["summaries"]} == {
        "held out": 1,
        "fitted to": 1,
        "dense_gemv": 2,
    }


def test_a_recording_under_way_is_left_out(tmp_path: Path) -> None:
    recorded = recording(DENSE, PROBLEM, SM90, _model_us, fewer=FEWER)
    half = replace(recorded, head=replace(recorded.head, complete=False), rows=recorded.rows[:3])
    write(tmp_path / half.head.file_name, half)
    found = CliRunner().invoke(main, [str(tmp_path)])
    assert isinstance(found.exception, RecordingError)
    assert "no complete recording" in found.exception.message


# -- the fit


def test_a_fit_finds_what_made_the_times() -> None:
    """Times by the model with other constants: the fit goes there, and not by what is held out."""
    true = replace(CONSTANTS, launch_clocks=2 * CONSTANTS.launch_clocks, latency=1.5 * CONSTANTS.latency)

    def us(config: Any) -> float:
        return Predictor(DENSE, PROBLEM, SM90, true).predict(config, TAKES).latency_us

    given = recording(DENSE, PROBLEM, SM90, us, "given", FEWER)
    astray = recording(DENSE, PROBLEM, SM90, lambda c: 1e4 / _model_us(c), "astray", FEWER, held_out=True)
    found = fit([given, astray])
    seen = [sample(given)]
    assert loss(seen, found) < 0.02 * loss(seen, CONSTANTS)
    assert found.latency == pytest.approx(true.latency, rel=0.1)
    with pytest.raises(RecordingError, match=r"recording.*held out"):
        fit([astray])


def test_a_sample_has_the_fastest() -> None:
    recorded = recording(DENSE, PROBLEM, SM90, _model_us, fewer=FEWER)
    few = sample(recorded, 12)
    assert len(few.measured_us) <= 12 < len(recorded.rows)
    assert min(few.measured_us) == min(r.us or 1e9 for r in recorded.rows)


@pytest.fixture(scope="module")
def h200() -> tuple[Recorded, ...]:
    if not H200.is_dir():
        pytest.skip(f"{H200} is not there: recordings are no part of a package")
    return read_folder(H200)


def test_what_is_held_out_meets_its_goals(h200: tuple[Recorded, ...]) -> None:
    """Problems that no constant was chosen by: the order is right, and the choice costs little."""
    (held,) = (s for s in summaries([score(r) for r in h200]) if s.name == "held out")
    assert held.num_problems >= 10
    assert held.spearman >= 0.8, held
    assert held.regret <= 0.10, held
    assert held.worst_regret <= 0.25, held


def test_no_constant_could_do_better_alone(h200: tuple[Recorded, ...]) -> None:
    """The constants that are there are those of the fit: who changes a formula fits again."""
    samples = [sample(r) for r in h200 if not r.head.held_out]
    least = loss(samples, CONSTANTS)
    for name in FITTED:
        for factor in (0.9, 1.1):
            other = loss(samples, replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)}))
            assert other > 0.99 * least, f"{name} x {factor}: {other:.5f} is less than {least:.5f}; fit again (--refit)"
