"""The policy that chooses winners, as a function of observations. No database."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from test_tuning_db import STATIC, measured, predicted

from kerngen.compiler.compile import Resources
from kerngen.errors import DatabaseError
from kerngen.tuning_db import Build, Measurement, Observation
from kerngen.tuning_db.store.winners import Choice, choose, noise_of


def build(n: int, spill: int = 0) -> Build:
    entries = {"toy": Resources(40, spill, 0, 0, 0)}
    return Build(
        f"b{n}", "toy", "sm90", "sm_90a", (12, 9), (), {"block_n": n}, STATIC, f"src{n}", "ok", "k", "i", entries, ""
    )


def observed(*rows: Measurement) -> list[Observation]:
    return [Observation(f"m{i}", m) for i, m in enumerate(rows)]


def pick(rows: list[Observation], builds: list[Build] | None = None, **options: Any) -> Choice | None:
    builds = builds if builds is not None else [build(n) for n in range(10)]
    return choose(rows, {b.id: b for b in builds}, **options)


def won(rows: list[Observation], *args: Any, **options: Any) -> str:
    choice = pick(rows, *args, **options)
    return choice.build_id


def test_nothing_observed_nothing_won() -> None:
    assert pick([]) is None
    assert pick(observed(measured(None, 1, None, outcome="invalid", reason="too large"))) is None


def test_the_fastest_wins_and_says_by_how_much() -> None:
    choice = pick(observed(measured("b1", 1, 20.0), measured("b2", 2, 10.0), measured("b3", 3, 30.0)))
    assert (choice.build_id, choice.latency_us, choice.margin) == ("b2", 10.0, 1.0)
    assert choice.reason == "fastest of 3 measured: 10.00 us, the next takes 100.0% longer"


def test_a_patched_source_never_wins() -> None:
    patched = replace(measured("b1", 1, 1.0), tags={"ab": "patch", "patch": {"name": "late"}})
    assert won(observed(patched, measured("b2", 2, 10.0))) == "b2"
    assert pick(observed(patched)) is None, "not as a stale one either"


def test_measured_beats_predicted_however_slow() -> None:
    rows = observed(measured("b1", 1, 99.0), predicted("b2", 2, 1.0))
    choice = pick(rows)
    assert (choice.build_id, choice.provenance, choice.margin) == ("b1", "measured", None)
    assert "the only one measured" in choice.reason


@pytest.mark.parametrize("outcome", ["wrong_result", "launch_failed", "timed_out", "compile_failed", "invalid"])
@pytest.mark.parametrize("provenance", ["measured", "predicted"])
def test_a_failed_trial_never_wins(outcome: str, provenance: str) -> None:
    failed = measured("b1", 1, 0.5, outcome=outcome, reason="why", provenance=provenance)
    choice = pick(observed(failed, measured("b2", 2, 10.0)))
    assert choice.build_id == "b2"
    assert choice.why["refused"] == {outcome: 1}


def test_a_wrong_source_never_wins() -> None:
    rows = observed(measured("b1", 1, 1.0), measured("b2", 2, 10.0))
    assert won(rows, wrong_sources={"src1"}) == "b2"
    assert pick(rows, wrong_sources={"src1", "src2"}) is None


def test_the_latest_launch_decides_whether_a_build_runs() -> None:
    good = measured("b1", 1, 1.0, at="2026-01-01")
    crash = measured("b1", 1, None, outcome="launch_failed", reason="illegal address", at="2026-01-02")
    other = measured("b2", 2, 10.0, at="2026-01-01")
    assert won(observed(good, crash, other)) == "b2"
    assert won(observed(replace(good, at="2026-01-03"), crash, other)) == "b1"
    assert pick(observed(predicted("b1", 1, 1.0), crash)) is None


def test_what_is_revoked_does_not_count() -> None:
    rows = observed(measured("b1", 1, 1.0), measured("b2", 2, 10.0))
    assert won(rows, revoked={"b1"}) == "b2"
    assert won(rows, revoked={"m0"}) == "b2"


def test_finalists_beat_lucky_trials() -> None:
    rows = observed(
        measured("b1", 1, 1.0), measured("b2", 2, 10.0, stage="final"), measured("b3", 3, 11.0, stage="final")
    )
    choice = pick(rows)
    assert choice.build_id == "b2"
    assert "2 timed again together" in choice.reason


def test_finals_outrank_only_what_they_were_compared_with() -> None:
    """An A/B of two configurations shuts out none that a tune found, and a tune's finals outrank its lucky trials."""
    ab = [
        measured(f"b{n}", n, us, stage=stage, run="ab")
        for n, us in ((2, 10.0), (3, 11.0))
        for stage in ("trial", "final")
    ]
    lucky = measured("b4", 4, 9.0, run="ab")
    tuned = measured("b1", 1, 8.0, run="tune", tags={"search": "s"})
    assert won(observed(*ab, lucky)) == "b2"
    assert won(observed(*ab, lucky, tuned)) == "b1"
    later = [measured("b5", 5, 9.5, stage="final", run="later", tags={"search": "s"})]
    assert won(observed(*ab, tuned, *later)) == "b5", "the same search went on: it had that trial to choose from"
    assert won(observed(*ab, replace(tuned, tags={}), *later)) == "b1"


def test_the_median_of_repeats_counts() -> None:
    rows = [measured("b1", 1, us, run=str(us)) for us in (1.0, 50.0, 60.0)]
    assert won(observed(*rows, measured("b2", 2, 40.0))) == "b2"


def test_only_the_newest_cost_model_counts() -> None:
    rows = observed(predicted("b1", 1, 1.0, model="roofline-9"), predicted("b2", 2, 10.0, model="roofline-10"))
    assert won(rows) == "b2"


def test_stale_wins_only_alone() -> None:
    rows = observed(measured("b1", 1, 1.0), measured("b2", 2, 10.0))
    assert won(rows, is_current=lambda b: b.id == "b2") == "b2"
    choice = pick(rows, is_current=lambda b: False)
    assert (choice.build_id, choice.why["stale"]) == ("b1", True)
    assert choice.reason.endswith("older source of this kernel")


def test_a_current_prediction_beats_a_stale_measurement() -> None:
    rows = observed(measured("b1", 1, 10.0), predicted("b2", 2, 20.0), predicted("b3", 3, 5.0),
                    measured("b3", 3, None, outcome="launch_failed", reason="illegal address"))  # fmt: skip
    assert won(rows, is_current=lambda b: b.id != "b1") == "b2", "what failed here does not win by a prediction"
    assert won(rows, is_current=lambda b: False) == "b1"


def test_one_machine_code_is_one_candidate() -> None:
    """Of two sources, one measured: with the same image, the current one has its time."""
    builds = [build(1), replace(build(2), config={"block_n": 1}), build(3)]
    choice = pick(observed(measured("b1", 1, 10.0), measured("b3", 3, 12.0)), builds, is_current=lambda b: b.id != "b1")
    assert (choice.build_id, choice.latency_us, choice.why["stale"]) == ("b2", 10.0, False)
    assert choice.why["adopted"] == "b1"
    assert choice.reason.endswith("measured on a build of another source with the same machine code")
    other = [build(1), replace(build(2), config={"block_n": 1}, image_sha="j"), build(3)]
    choice = pick(observed(measured("b1", 1, 10.0), measured("b3", 3, 12.0)), other, is_current=lambda b: b.id != "b1")
    assert (choice.build_id, choice.why.get("adopted")) == ("b3", None)


def test_what_keeps_a_build_from_winning_keeps_its_like() -> None:
    builds = [build(1), replace(build(2), config={"block_n": 1}), build(3)]
    rows = observed(measured("b1", 1, 10.0), measured("b2", 1, 10.0), measured("b3", 3, 12.0))
    assert won(rows, builds) == "b1"
    assert won(rows, builds, revoked={"b2"}) == "b3"
    assert won(rows, builds, wrong_sources={"src2"}) == "b3"


def test_only_contenders_are_rendered() -> None:
    asked: list[str] = []

    def is_current(b: Build) -> bool:
        asked.append(b.id)
        return True

    won(observed(*(measured(f"b{n}", n, 10.0 * n) for n in range(1, 10))), is_current=is_current)
    assert asked == ["b1", "b2"]


def test_two_tunes_agree_within_the_noise() -> None:
    """Times that differ by less than the noise band give the same winner, whichever of them came out ahead."""
    rng = random.Random(7)
    winners = set()
    for _ in range(50):
        rows = [measured(f"b{n}", n, 10.0 * (1 + rng.uniform(0, 0.004))) for n in range(1, 6)]
        rows += [measured("b7", 7, 10.3), measured("b0", 0, 12.0)]
        rng.shuffle(rows)
        winners.add(won(observed(*rows)))
    assert winners == {"b1"}


def test_order_and_repetition_of_rows_change_nothing() -> None:
    rng = random.Random(3)
    rows = observed(
        *(measured(f"b{n}", n, 10.0 + (n * 7) % 5 * 0.04, at=f"2026-01-0{n}") for n in range(1, 9)),
        *(predicted(f"b{n}", n, 5.0) for n in range(3)),
    )
    first = pick(rows)
    for _ in range(20):
        rng.shuffle(rows)
        assert pick(rows) == first


def test_in_a_tie_the_default_wins_then_of_predictions_the_one_without_spills() -> None:
    rows = observed(*(measured(f"b{n}", n, 10.0 + n * 0.01) for n in range(4)))
    builds = [build(0, spill=8), build(1), build(2), build(3)]
    assert won(rows, builds) == "b0", "the clock has seen what it spills, and another compiler spills otherwise"
    assert won(observed(*(predicted(f"b{n}", n, 10.0 + n * 0.01) for n in range(4))), builds) == "b1"
    choice = pick(rows, builds, default={"block_n": 3})
    assert choice.build_id == "b3"
    assert -0.01 < choice.margin < 0
    assert choice.reason.startswith("the default configuration of 4 that differ by less than 1.0%")


def test_a_default_outside_the_noise_loses_and_is_mentioned() -> None:
    choice = pick(observed(measured("b1", 1, 10.0), measured("b2", 2, 12.0)), default={"block_n": 2})
    assert choice.build_id == "b1"
    assert choice.reason.endswith("the default takes 12.00 us")


def test_a_prediction_replaces_the_default_only_by_a_margin() -> None:
    def of(other_us: float, default_us: float = 10.0, **how: Any) -> Any:
        rows = observed(predicted("b1", 1, other_us), predicted("b2", 2, default_us))
        return pick(rows, default={"block_n": 2}, **how)

    kept = of(9.0)
    assert (kept.build_id, kept.latency_us) == ("b2", 10.0)
    assert kept.margin == pytest.approx(-0.1)
    assert "is not 12% ahead, and by less a prediction puts nothing in its place" in kept.reason
    assert of(8.9).build_id == "b1"
    assert of(9.0, is_current=lambda b: b.id != "b2").build_id == "b1", "of a default that is no more nothing is known"
    assert won(observed(measured("b1", 1, 9.0), measured("b2", 2, 10.0)), default={"block_n": 2}) == "b1"


def carried(build_id: str, n: int, **fields: Any) -> Measurement:
    row = replace(measured(build_id, n, 1.0), provenance="carried", reason="steps on an H200", p50_us=None)
    return replace(row, p10_us=None, p90_us=None, min_us=None, samples=0, error_abs=None, error_rel=None, **fields)


def test_what_is_carried_ranks_between_what_was_measured_and_what_was_predicted() -> None:
    """Without a time, and without the margin that a prediction needs over the default."""
    rows = [carried("b1", 1), predicted("b2", 2, 0.1), predicted("b0", 0, 0.2)]
    choice = pick(observed(*rows), default={"block_n": 0})
    assert (choice.build_id, choice.provenance, choice.latency_us, choice.margin) == ("b1", "carried", None, None)
    assert (choice.reason, choice.times) == ("carried: steps on an H200", {})
    assert (choice.why["default_us"], choice.why["fastest"]["us"]) == (None, None)
    choice = pick(observed(*rows, measured("b3", 3, 99.0)))
    assert (choice.build_id, choice.provenance) == ("b3", "measured"), "at once, however slow"


def test_of_two_that_are_carried_the_default_wins_then_the_first_in_canonical_order() -> None:
    rows = observed(carried("b2", 2), carried("b1", 1), carried("b3", 3))
    assert won(rows) == "b1"
    choice = pick(rows, default={"block_n": 3})
    assert choice.build_id == "b3"
    assert choice.reason.endswith("; the default configuration of 3 carried, none of which has a time")


def test_what_is_carried_gives_way_as_what_was_measured_does() -> None:
    """To a measured failure of its build, to a revocation, and, where it does not hold, to what does."""
    crash = measured("b1", 1, None, outcome="launch_failed", reason="illegal address")
    assert pick(observed(carried("b1", 1), crash)) is None
    assert pick(observed(carried("b1", 1)), revoked={"b1"}) is None
    rows = observed(measured("b1", 1, 1.0), carried("b2", 2), predicted("b3", 3, 1.0))
    for current, winner in (("b1", "b1"), ("b2", "b2"), ("b3", "b3"), ("", "b1")):
        choice = pick(rows, is_current=lambda b, current=current: b.id == current)
        assert (choice.build_id, choice.why["stale"]) == (winner, not current)


@pytest.mark.parametrize(
    "said", [{"p50_us": 1.0}, {"reason": ""}, {"model": "roofline-5"}, {"stage": "final"}, {"outcome": "wrong_result"}]
)
def test_what_is_carried_passes_for_nothing_else(said: dict[str, Any]) -> None:
    with pytest.raises(DatabaseError, match="carried"):
        carried("b1", 1, **said)


def test_the_noise_follows_the_spread() -> None:
    def m(p10: float, p90: float, samples: int) -> Measurement:
        return measured("b1", 1, 10.0, p10_us=p10, p90_us=p90, samples=samples)

    assert noise_of(m(10.0, 10.0, 100)) == 0.01
    assert noise_of(m(9.0, 11.0, 100)) == pytest.approx(3 * 1.253 * 2 / 2.563 / 10 / 10)
    assert noise_of(m(5.0, 20.0, 4)) == 0.05
    assert noise_of(predicted("b1", 1, 10.0)) == 0.005


# ---- where steps were run


def in_step(n: int, us: float, ratio: float, **values: Any) -> Measurement:
    """Configuration n, `us` alone, whose step takes `ratio` times that of the base."""
    how = {"stage": "step", "step_id": "decode", "base_id": "base", "at": "2026-01-02", **values}
    return measured(f"b{n}", n, us, step_us=5000.0 * ratio, base_step_us=5000.0, **how)


WEIGHTS = {"decode": 1.0, "verify": 3.0}


def test_the_step_decides_among_what_was_tried_there() -> None:
    rows = [in_step(1, 10.0, 1.02), in_step(2, 12.0, 0.98), in_step(3, 20.0, 0.981), measured("b4", 4, 1.0)]
    choice = pick(observed(*rows), weights=WEIGHTS)
    assert (choice.build_id, choice.latency_us) == ("b2", 12.0), "of equals in the step the fastest alone"
    assert choice.margin is not None
    assert choice.why["step"] == {"judged": 3, "lost": 1, "ratio": 0.98}
    assert "of 3 that were tried in the step, 1 no faster there" in choice.reason
    assert won(observed(*rows)) == "b4", "what is not known of the step does not count"


def test_what_was_chosen_in_the_step_stands_unless_another_is_faster_by_more_than_noise() -> None:
    chosen, near = in_step(1, 10.0, 1.0), in_step(2, 9.0, 0.996)
    assert won(observed(chosen, near), weights=WEIGHTS) == "b1", "of equals what was chosen, not the fastest alone"
    assert won(observed(chosen, near, in_step(3, 12.0, 0.994)), weights=WEIGHTS) == "b2", "and the chosen one lost"
    assert won(observed(chosen, in_step(2, 9.0, 1.004)), weights=WEIGHTS) == "b1"
    assert won(observed(near, in_step(3, 8.0, 0.999)), weights=WEIGHTS) == "b3", "nothing is known of the chosen one"


def test_steps_count_by_their_weight() -> None:
    rows = [
        in_step(1, 10.0, 1.0), in_step(2, 10.0, 0.97),
        in_step(1, 10.0, 1.0, step_id="verify"), in_step(2, 10.0, 1.02, step_id="verify"),
    ]  # fmt: skip
    assert won(observed(*rows), weights=WEIGHTS) == "b1"
    assert won(observed(*rows), weights={"decode": 3.0, "verify": 1.0}) == "b2"
    assert won(observed(*rows[:3]), weights=WEIGHTS) == "b1", "who was tried in all of them is known best"


def test_only_the_newest_base_compares() -> None:
    old = [in_step(1, 10.0, 0.5, base_id="old", at="2026-01-01"), in_step(2, 10.0, 1.0, base_id="old", at="2026-01-01")]
    new = [in_step(2, 10.0, 1.0), in_step(1, 10.0, 1.1)]
    assert won(observed(*old, *new), weights=WEIGHTS) == "b2"
    assert won(observed(*old), weights=WEIGHTS) == "b1"


def test_what_is_current_wins_without_the_step_too() -> None:
    """A source changed since: its steps say nothing of the new one."""
    rows = observed(in_step(1, 10.0, 1.0), in_step(2, 11.0, 1.01), measured("b3", 3, 14.0), measured("b4", 4, 12.0))
    assert won(rows, weights=WEIGHTS, is_current=lambda b: b.id in ("b3", "b4")) == "b4"
    assert won(rows, weights=WEIGHTS, is_current=lambda b: b.id != "b1") == "b2"
    assert won(rows, weights=WEIGHTS, revoked={"b1"}) == "b2"


def test_a_build_that_was_timed_again_is_known_by_that() -> None:
    rows = [
        in_step(1, 9.0, 0.98), measured("b1", 1, 9.0), measured("b1", 1, 11.0, stage="final"), in_step(2, 10.0, 0.98),
        measured("b2", 2, 10.0),
    ]  # fmt: skip
    choice = pick(observed(*rows), weights=WEIGHTS)
    assert (choice.build_id, choice.latency_us) == ("b2", 10.0)
