"""Between two tuned points: what a judge finds to be faster at the real size is served there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_tuning_db import H200
from test_tuning_db_lookup import Config, Problem, fake_render, make_kernel, record

from kerngen.arch import Target, find_arch
from kerngen.cost.crossover import judge_of
from kerngen.cost.predict import predict
from kerngen.errors import TuningMiss
from kerngen.templates import find_kernel
from kerngen.templates.kernel import Kernel
from kerngen.tuning_db import Store, lookup, problem_key
from kerngen.tuning_db.read.ids import canonical
from kerngen.tuning_db.read.reader import Reader
from kerngen.tuning_db.store.crossovers import SIZES, Judge, TunedPoint, switches

TARGET = Target.of(H200)
ENTRIES: Mapping[str, Any] = {}


def blocks(problem: Problem, config: Config, entries: Any) -> float:
    """A launch of blocks of block_n tokens, one after another: each takes 1 us, and 0.1 a token of it."""
    return float(-(-problem.num_tokens // config.block_n) * (1 + config.block_n / 10))


def wave(block_n: int, at: int, us: float | None = None, **others: float) -> TunedPoint:
    """others: what was seen there besides, n16=2.6 for 16 tokens a block."""
    problem, config = Problem(num_tokens=at), Config(block_n)
    us = us or blocks(problem, config, None)
    seen = {f"n{block_n}": us} | others
    return TunedPoint(problem, config, us, {canonical({"block_n": int(k[1:])}): v for k, v in seen.items()})


def choose(below: TunedPoint, above: TunedPoint, judge: Judge = blocks, **patched: Any) -> list[Any]:
    kernel = make_kernel()
    for name, value in patched.items():
        setattr(kernel.spec, name, value)
    return switches(kernel, TARGET, below, above, lambda config: ENTRIES, judge)


def test_the_lower_winner_serves_as_far_as_it_is_faster() -> None:
    """32 tokens a block take 4.2 us a block, 4 tokens 1.4: up to 8 tokens the small ones are better."""
    found = choose(wave(4, 4), wave(32, 32))
    ((upto, at),) = found
    assert at == 4
    assert 8 <= upto < 12
    assert all(blocks(Problem(num_tokens=n), Config(4), None) < 4.2 for n in range(5, upto + 1))


def test_what_was_seen_at_the_points_counts_more_than_the_judge() -> None:
    """The judge thinks well of the lower one, which was measured to take four times what it says."""
    assert choose(wave(4, 4, us=5.6, n32=6.0), wave(32, 32)) == []
    assert choose(wave(4, 4), wave(32, 32)) != []


def test_what_was_not_tried_at_a_point_is_no_better_there_than_its_winner() -> None:
    """The judge finds the lower one twice as good everywhere; it was seen to be as good as it says at 4 alone."""

    def fond(problem: Problem, config: Config, entries: Any) -> float:
        return problem.num_tokens * (0.5 if config.block_n == 4 else 1.0)

    ((upto, at),) = choose(wave(4, 4, us=2.0), wave(32, 32, us=32.0), fond)
    assert (at, upto < 31) == (4, True)
    assert choose(wave(4, 4, us=2.0, n32=2.05), wave(32, 32, us=32.0, n4=33.0), fond) == []


def test_a_difference_that_a_judge_cannot_see_changes_nothing() -> None:
    assert choose(wave(32, 4), wave(33, 32)) == []


def test_the_default_serves_where_it_is_faster_and_was_timed() -> None:
    def default(problem: Problem, target: Any) -> Config:
        return Config(16 if problem.num_tokens <= 16 else 32)

    kept = {"default_config": default}
    ((upto, at),) = choose(wave(4, 4, n16=2.6), wave(64, 64, n32=8.4), **kept)
    assert at is None
    assert 24 < upto <= 32, "16 tokens a block take 2.6 us, 32 take 4.2, and 64 take 7.4"
    without = choose(wave(4, 4), wave(64, 64), **kept)
    assert all(at is not None for _, at in without), "nobody knows what it takes here"


def test_what_cannot_run_there_does_not_serve() -> None:
    def refuses(problem: Problem, config: Config, target: Any) -> str | None:
        return "too many tokens" if config.block_n == 4 and problem.num_tokens > 4 else None

    def breaks(problem: Problem, config: Config, target: Any) -> str | None:
        return f"{1 // (config.block_n - 4)}" and None

    assert choose(wave(4, 4), wave(32, 32), why_invalid=refuses) == []
    assert choose(wave(4, 4), wave(32, 32), why_invalid=breaks) == []


def test_a_configuration_that_nobody_built_is_not_judged() -> None:
    assert switches(make_kernel(), TARGET, wave(4, 4), wave(32, 32), lambda config: None, blocks) == []


def test_neighbours_have_nothing_between_and_far_ones_are_judged_at_some_sizes() -> None:
    assert choose(wave(4, 4), wave(32, 5)) == []
    asked = []

    def counting(problem: Problem, config: Config, entries: Any) -> float:
        asked.append(problem.num_tokens)
        return blocks(problem, config, entries)

    choose(wave(4, 4), wave(1 << 13, 1 << 13), counting)
    assert len(set(asked)) <= SIZES + 2


# ---- chosen with the winners, and served


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr("kerngen.compiler.render.source_of", fake_render)
    monkeypatch.setattr(
        "kerngen.compiler.source_digest.source_digest_of", lambda kernel: f"closure of version {kernel.spec.version}"
    )
    kernel = make_kernel()
    kernel.spec.default_config = lambda problem, target: Config(48)  # type: ignore[attr-defined]
    return kernel


@pytest.fixture
def path(kernel: Kernel, tmp_path: Path) -> Path:
    """4 tokens a block won at 4 tokens, 64 at 64; 48, the default, was timed at both."""
    path = tmp_path / "tuning.db"
    with Store.open(path) as store:
        for at, block_n in ((4, 4), (4, 48), (64, 64), (64, 48)):
            problem = Problem(num_tokens=at)
            record(store, kernel, block_n, blocks(problem, Config(block_n), None), problem=problem)
        store.recompute_winners(kernel, problem_key(kernel, Problem()).static_key, TARGET, judge=blocks)
    return path


@pytest.fixture(params=["store", "reader"])
def source(path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with Store.open(path, read_only=True) if request.param == "store" else _reader(path) as opened:
        yield opened


def _reader(path: Path) -> Reader:
    found = Reader.open(path)
    assert found is not None
    return found


def served(source: Any, kernel: Kernel, tokens: int) -> int | None:
    found = lookup([source], kernel, Problem(num_tokens=tokens), TARGET)
    return None if found is None else found.config["block_n"]


def test_a_run_takes_what_is_fastest_between_two_points(source: Any, kernel: Kernel) -> None:
    found = {n: served(source, kernel, n) for n in range(1, 70)}
    assert (found[3], found[4], found[64], found[65]) == (None, 4, 64, None), "the points stay their own"
    assert found[5] == found[14] == 4, "5.6 us at 14 tokens, and the default 5.8"
    assert found[20] is found[48] is None, "the default"
    assert found[53] == 64, "7.4 us, and two of the default's blocks 11.6"


def test_a_command_says_that_the_default_serves(source: Any, kernel: Kernel) -> None:
    with pytest.raises(TuningMiss, match="faster than their winners"):
        lookup([source], kernel, Problem(num_tokens=20), TARGET, strict=True)
    with pytest.raises(TuningMiss, match="no record for toy"):
        lookup([source], kernel, Problem(num_tokens=65), TARGET, strict=True)


def test_another_version_of_the_kernel_is_not_bound_by_it(
    source: Any, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it renders the same sources: its defaults may be others."""
    assert served(source, kernel, 20) is None
    monkeypatch.setattr("kerngen.compiler.source_digest.source_digest_of", lambda kernel: "another")
    assert served(source, kernel, 20) == 64


def test_a_lower_winner_that_cannot_run_leaves_the_size_to_the_upper(path: Path, kernel: Kernel) -> None:
    kernel.spec.why_invalid = lambda p, c, t: "no" if c.block_n == 4 and p.num_tokens > 4 else None  # type: ignore
    with _reader(path) as source:
        assert served(source, kernel, 5) == 64


def test_a_carried_winner_serves_all_of_its_stretch(path: Path, kernel: Kernel) -> None:
    """It has no time to judge by. What was measured below and above it is judged as if it were not there."""
    with Store.open(path) as store:
        for at, block_n in ((256, 7), (1024, 9)):
            record(store, kernel, block_n, 0.0, problem=Problem(num_tokens=at), provenance="carried")
        record(store, kernel, 80, 100.0, problem=Problem(num_tokens=4096))
        store.recompute_winners(kernel, problem_key(kernel, Problem()).static_key, TARGET, judge=blocks)
    with _reader(path) as source:
        assert (served(source, kernel, 14), served(source, kernel, 20)) == (4, None), "as without them"
        assert served(source, kernel, 2000) == 80, "what was measured comes first, also between its points"
    with Store.open(path) as store:
        switches = {w.problem.dynamic: w.why.get("switch") for w in store.winners() if w.provenance == "carried"}
    assert switches == {256: None, 1024: None}


def test_winners_chosen_without_a_judge_have_no_switch(path: Path, kernel: Kernel) -> None:
    with Store.open(path) as store:
        store.recompute_winners(kernel, problem_key(kernel, Problem()).static_key, TARGET)
    with _reader(path) as source:
        assert {served(source, kernel, n) for n in range(5, 65)} == {64}


def test_the_cost_model_is_a_judge() -> None:
    kernel, target = find_kernel("rmsnorm"), Target.of(find_arch("sm90"))
    problem = kernel.problem_type(num_tokens=64)
    config = kernel.default_config(problem, target)
    said = judge_of(kernel, target)(problem, config, {})
    assert said == predict(kernel, problem, config, target, {}).latency_us > 0
    assert judge_of(kernel, target)(replace(problem, num_tokens=8192), config, {}) > said
