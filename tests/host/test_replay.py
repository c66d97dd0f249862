"""Replays of searches on recordings whose answer is known. What is on an H200: data/recorded, where it is there."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recordings import distorted, recording
from toy import toy_kernels

from kerngen.arch import Target, find_arch
from kerngen.cost.predict import predict
from kerngen.errors import RecordingError, UnknownName
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.tuning.budget import LEAST_GAIN
from kerngen.tuning.objective import Objective
from kerngen.tuning.recorded import Recorded, completed, write
from tools.recordings import read_folder
from tools.replay import SAMPLERS, Recalled, main, replay, table

SM90 = Target.of(find_arch("sm90"))
DENSE = find_kernel("dense_gemv")
PROBLEM = DENSE.problem_type(n=8192, k=1024)
FEWER = {"row_tiles": (1,), "warps_n": (1, 4), "unroll": (2, 4, 8), "blocks_per_sm": (1, 2, 3)}
QUICK = [s for s in SAMPLERS.values() if s.is_here and not s.needs]


def _model_us(config: Any) -> float:
    return predict(DENSE, PROBLEM, config, SM90, registers=40).latency_us


@pytest.fixture(scope="module")
def right() -> Recorded:
    """The cost model is right of all 300 and more configurations."""
    return recording(DENSE, PROBLEM, SM90, _model_us, "right", FEWER)


@pytest.fixture(scope="module")
def wrong() -> Recorded:
    """The cost model has the order upside down."""
    return recording(DENSE, PROBLEM, SM90, lambda c: 1e4 / _model_us(c), "wrong", FEWER)


@pytest.fixture(scope="module")
def distorted_one() -> Recorded:
    return recording(DENSE, PROBLEM, SM90, distorted(DENSE, PROBLEM, SM90), "distorted", FEWER)


@pytest.mark.parametrize("sampler", QUICK, ids=lambda s: s.name)
def test_a_trace_is_of_what_was_recorded(distorted_one: Recorded, sampler: Any) -> None:
    trace = replay(distorted_one, sampler, trials=20, seed=1)
    assert len(trace.tried) == 20
    configs = [c for c, _ in trace.tried]
    assert configs[0] == DENSE.default_config(PROBLEM, SM90)
    assert len(set(configs)) == 20, "nothing is measured twice"
    assert all(us == distorted_one.by_config[c].us for c, us in trace.tried)
    assert trace == replay(distorted_one, sampler, trials=20, seed=1)
    regrets = [trace.regret(n) for n in range(1, 21)]
    assert all(a >= b for a, b in pairwise(regrets)), "more trials are never worse where no second look turns them over"
    took = min(us for _, us in trace.tried if us is not None)
    assert regrets[-1] == pytest.approx(took / min(r.us or 1e9 for r in distorted_one.rows) - 1)


def test_seeds_differ_where_there_is_chance(distorted_one: Recorded) -> None:
    for name in ("random", "tpe"):
        assert replay(distorted_one, SAMPLERS[name], 20, 1) != replay(distorted_one, SAMPLERS[name], 20, 2)


def test_a_model_that_is_right_is_followed_at_once(right: Recorded) -> None:
    assert replay(right, SAMPLERS["model"]).regret(2) == 0
    assert replay(right, SAMPLERS["residual"]).regret(2) < 0.005, "but for what it assumes of registers"


def test_a_model_that_is_wrong_leads_astray(wrong: Recorded) -> None:
    """It tries the slowest first; the default is found all the same, and is the answer if it is the best of them."""
    trace = replay(wrong, SAMPLERS["model"])
    slowest = sorted((r.us or 0.0 for r in wrong.rows if r.config != wrong.default), reverse=True)[:39]
    assert [us for _, us in trace.tried[1:]] == pytest.approx(slowest, rel=0.02), "but for what it expects of registers"
    assert trace.regret() > 0.3
    assert all(replay(wrong, SAMPLERS["random"], seed=s).regret() < trace.regret() for s in range(5))


def test_random_finds_what_chance_does(wrong: Recorded) -> None:
    """The chance that 40 of N draws miss the best k is known; 25 replays lie near it."""
    good = sum((r.us or 0.0) <= (wrong.best.us or 0.0) * 1.25 for r in wrong.rows)
    count, missed = len(wrong.rows), 1.0
    for i in range(39):
        missed *= (count - good - i) / (count - i)
    assert 0.1 < missed < 0.9, (good, count)
    found = sum(replay(wrong, SAMPLERS["random"], seed=s).regret() <= 0.25 for s in range(25)) / 25
    assert abs(found - (1 - missed)) < 0.25


def test_a_space_that_is_small_is_searched_whole(right: Recorded) -> None:
    kept = random.Random(0).sample(right.rows, 25)
    rows = {r.config: r for r in [*kept, right.by_config[right.default]]}
    small = completed(replace(right.head, num_configs=len(rows)), rows.values())
    for name in ("model", "residual"):
        trace = replay(small, SAMPLERS[name], trials=100)
        assert {c for c, _ in trace.tried} == set(rows)
        assert trace.regret(100) == 0


def test_failures_are_trials_and_never_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy_kernels(monkeypatch) as scale:
        target, problem = Target.of(find_arch("sm70")), scale.problem_type(width=512)

        def us(config: Any) -> float | str:
            return 50.0 if config == scale.default_config(problem, target) else "it is broken"

        recorded = recording(scale, problem, target, us)
        for sampler in QUICK:
            trace = replay(recorded, sampler, trials=12)
            assert sum(t is None for _, t in trace.tried) == len(trace.tried) - 1
            assert trace.regret() == 0
            assert trace.chosen() == scale.default_config(problem, target)
        nothing = completed(recorded.head, [
            replace(r, outcome="timed_out", us=None, p10_us=None, p90_us=None) for r in recorded.rows
        ])  # fmt: skip
        assert replay(nothing, SAMPLERS["model"]).regret() == float("inf")


def test_the_second_look_decides_among_the_fastest(right: Recorded) -> None:
    fastest = sorted(right.rows, key=lambda r: r.us or 0)
    turned = {fastest[0].config: 2.0, fastest[1].config: 1.0}  # the first was lucky
    rows = [replace(r, final_us=turned[r.config] * (r.us or 0)) if r.config in turned else r for r in right.rows]
    recorded = completed(right.head, rows)
    assert recorded.best.config == fastest[1].config
    trace = replay(recorded, SAMPLERS["model"])
    assert trace.chosen() == fastest[1].config
    assert trace.regret() == 0


def test_a_default_off_the_grid_is_tried_all_the_same(right: Recorded) -> None:
    default = replace(right.default, unroll=5)
    row = replace(right.rows[0], config=default, us=0.5, p10_us=0.5, p90_us=0.5)
    head = replace(right.head, default=dict(right.head.default) | {"unroll": 5}, num_configs=len(right.rows) + 1)
    recorded = completed(head, [*right.rows, row])
    for sampler in QUICK:
        assert replay(recorded, sampler, trials=10).tried[0] == (default, 0.5)


def test_what_is_not_whole_cannot_be_replayed(right: Recorded) -> None:
    for change, says in (({"complete": False}, "is not complete"), ({"exhaustive": False}, "is a sample")):
        with pytest.raises(RecordingError, match=says):
            replay(replace(right, head=replace(right.head, **change)), SAMPLERS["model"])


def test_recalled_is_an_objective_and_knows_only_what_was_recorded(right: Recorded) -> None:
    objective: Objective = Recalled(right)
    assert objective.provenance == "measured"
    with pytest.raises(RecordingError, match=r"dense_gemv-right\.csv.*block_m=8 row_tiles=2"):
        Recalled(right).outcome(replace(right.default, row_tiles=2))


def test_the_table_is_of_all_problems_and_of_each_kernel(right: Recorded, wrong: Recorded) -> None:
    scores = {(s.sampler, s.kernel): s for s in table([right, wrong], [SAMPLERS["model"]], seeds=2)}
    assert set(scores) == {("model", "all"), ("model", "dense_gemv")}
    score = scores["model", "all"]
    assert (score.share, score.num_problems) == (0.5, 2)
    astray = replay(wrong, SAMPLERS["model"]).regret()
    assert score.worst == astray
    assert score.median == pytest.approx(astray / 2)


def test_the_command_compares_samplers(tmp_path: Path, right: Recorded, wrong: Recorded) -> None:
    for r in (right, wrong):
        held_out = replace(r.head, held_out=r is wrong)
        write(tmp_path / r.head.file_name, replace(r, head=held_out))
    how = [str(tmp_path), "--sampler", "model", "--trials", "10", "--seeds", "1"]
    said = CliRunner().invoke(main, how)
    assert said.exit_code == 0, said.output
    assert "2 problems, 1 seeds, 10 trials each" in said.output
    assert said.output.splitlines()[2].split()[:4] == ["model", "all", "2", "50%"]
    scores = json.loads(CliRunner().invoke(main, [*how, "--held-out", "--json"]).output)
    assert [(s["kernel"], s["num_problems"], s["share"]) for s in scores] == [("all", 1, 0.0), ("dense_gemv", 1, 0.0)]
    refused = CliRunner().invoke(main, [str(tmp_path), "--sampler", "best"])
    assert isinstance(refused.exception, UnknownName)


def test_todays_kernel_may_allow_more_than_was_recorded(right: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording outlives a change of why_invalid: what it does not hold is not asked for."""
    kept = [r for r in right.rows if r.config.split_k == 1 or r.config == right.default]
    fewer = completed(replace(right.head, num_configs=len(kept)), kept)
    known = {r.config for r in kept}
    for sampler in QUICK:
        assert {c for c, _ in replay(fewer, sampler, seed=3).tried} <= known


def test_kernels_of_several_bodies_replay() -> None:
    kernel: Kernel = find_kernel("w4a16_gemm")
    problem = kernel.problem_type(n=4096, k=2048, num_tokens=1)
    fewer = {"block_m": (1, 8), "block_n": (32, 64), "num_stages": (1, 3, 4), "blocks_per_sm": (0, 1), "warps_m": (1,)}
    recorded = recording(kernel, problem, SM90, distorted(kernel, problem, SM90), fewer=fewer)
    assert len(recorded.rows) > 300
    assert len({(r.config.body == "gemv", r.config.stream) for r in recorded.rows}) == 3
    for sampler in QUICK:
        trace = replay(recorded, sampler, trials=20)
        assert len(trace.tried) > 10, "the search ends where a sampler proposes nothing valid for long"
        assert 0 <= trace.regret() < 10


RECORDINGS = Path(__file__).resolve().parents[2] / "data" / "recorded" / "h200"


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="no recordings of an H200 are committed: docs/tuning.md")
def test_on_an_h200_what_is_learned_finds_the_best() -> None:
    whole = [r for r in read_folder(RECORDINGS) if r.head.exhaustive and r.head.complete]
    assert len(whole) >= 12
    assert len({r.head.kernel for r in whole}) == 4
    assert min(len(r.rows) for r in whole) >= 300
    scores = {
        s.sampler: s for s in table(whole, [SAMPLERS[n] for n in ("residual", "model", "random")]) if s.kernel == "all"
    }
    assert scores["residual"].share >= 0.9, scores
    assert scores["residual"].share >= max(scores["model"].share, scores["random"].share), scores
    assert scores["residual"].median < scores["model"].median, scores
    assert scores["residual"].num_tried == 40


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="no recordings of an H200 are committed: docs/tuning.md")
def test_on_an_h200_a_search_that_hopes_for_nothing_has_found_the_best() -> None:
    """As the tuner ends a search: with half the trials."""
    whole = [r for r in read_folder(RECORDINGS) if r.head.exhaustive and r.head.complete]
    score = table(whole, [SAMPLERS["residual"]], seeds=2, least_gain=LEAST_GAIN)[0]
    assert score.share >= 0.87, score
    assert score.median < 0.01, score
    assert score.num_tried < 30, score
