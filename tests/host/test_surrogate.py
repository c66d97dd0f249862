"""The sampler that learns what the cost model gets wrong: its features, its process, its proposals. No GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recordings import distorted, recording

from kerngen.arch import Target, find_arch
from kerngen.templates import find_kernel
from kerngen.tuning.features import described, described_space
from kerngen.tuning.recorded import Recorded, completed
from kerngen.tuning.sampler import ResidualSampler, log_expected_improvement
from kerngen.tuning.surrogate import NOISES, _covariance, apart, fit
from tools.replay import SAMPLERS, _search, replay, table

SM90 = Target.of(find_arch("sm90"))
RNG = np.random.default_rng(0)
POINTS = RNG.random((60, 5))


def _wrong(points: Any) -> Any:
    """Off by a third everywhere, and by more the larger the first feature is, unless the second is large too."""
    return 0.3 + 0.8 * points[:, 0] - 0.5 * points[:, 0] * points[:, 1]


# -- the process


def test_it_goes_through_what_was_measured_and_says_how_sure_it_is() -> None:
    between = apart(POINTS, POINTS)
    measured = list(range(0, 60, 2))
    learned = fit(apart(POINTS[measured], POINTS[measured]), _wrong(POINTS[measured]))
    mean, deviation = learned.at(apart(POINTS, POINTS[measured]))
    assert np.abs(mean - _wrong(POINTS))[measured].max() < 0.02
    others = [i for i in range(60) if i not in measured]
    error = np.abs(mean - _wrong(POINTS))[others]
    assert error.mean() < 0.25 * np.abs(_wrong(POINTS) - _wrong(POINTS).mean()).mean(), "it tells beforehand, too"
    assert (error < 3 * deviation[others] + 0.01).mean() > 0.95
    assert deviation[measured].max() < deviation[others].min()
    far = np.full((1, 5), 3.0)
    assert learned.at(apart(far, POINTS[measured]))[1][0] > deviation.max()
    assert between.rows([1, 2]).single.shape == (2, 60)


def test_a_common_factor_is_learned_from_one_measurement() -> None:
    learned = fit(apart(POINTS[:1], POINTS[:1]), np.array([0.9]))
    mean, deviation = learned.at(apart(POINTS, POINTS[:1]))
    assert np.abs(mean - 0.9).max() < 0.1, "the model is off by that everywhere, as far as one can know"
    assert 0.1 < deviation[1:].min() < deviation.max() < 0.6, "and by about as much as the prior says beside"


def test_noise_is_told_from_what_features_explain() -> None:
    between = apart(POINTS, POINTS)
    clean = fit(between, _wrong(POINTS))
    noisy = fit(between, RNG.normal(0, 0.3, 60))
    assert clean.noise == min(NOISES)
    assert noisy.noise == max(NOISES)
    mean, _ = noisy.at(between)
    assert np.abs(mean).mean() < 0.2, "it does not chase what nothing explains"


def test_what_is_believed_moves_nothing_but_makes_sure() -> None:
    measured, believed = list(range(20)), [40, 41]
    learned = fit(apart(POINTS[measured], POINTS[measured]), _wrong(POINTS[measured]))
    mean, deviation = learned.at(apart(POINTS, POINTS[measured]))
    field = learned.over(apart(POINTS, POINTS[measured]))
    for i in believed:
        field.believe(i, apart(POINTS, POINTS[i : i + 1]))
    mean_after, deviation_after = field.mean, field.deviation
    assert np.abs(mean_after - mean).max() < 0.01
    assert (deviation_after[believed] < 0.7 * deviation[believed]).all()
    assert (deviation_after <= deviation + 1e-9).all()
    # As if they had been measured, and nothing of the process been chosen anew.
    both = [*measured, *believed]
    values = np.concatenate([_wrong(POINTS[measured]), mean[believed]])
    covariance = _covariance(apart(POINTS[both], POINTS[both]), learned.share, learned.reach)
    factor = np.linalg.cholesky(covariance + learned.noise * np.eye(22))
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, values))
    anew = replace(learned, factor=factor, weights=weights).at(apart(POINTS, POINTS[both]))
    assert np.allclose(anew[0], mean_after, atol=1e-6)
    assert np.allclose(anew[1], deviation_after, atol=1e-6)


# -- features


@pytest.mark.parametrize(("name", "problem"), [
    ("w4a16_gemm", {"n": 4096, "k": 2048}),
    ("attn_decode", {"kv_len": 512}),
    ("dense_gemv", {"n": 128, "k": 512}),
    ("greedy_head", {"vocab_size": 4096}),
    ("moe_w4a16", {"num_experts": 8, "top_k": 2, "hidden": 512, "inner": 256}),
])  # fmt: skip
def test_features_tell_configurations_apart(name: str, problem: dict[str, Any]) -> None:
    kernel = find_kernel(name)
    made = kernel.problem_type(**problem)
    draw = random.Random(0)
    configs: dict[Any, None] = {}
    for body in kernel.bodies(SM90.arch):
        space, before = body.choices(made, SM90), len(configs)
        for _ in range(100_000):
            config = kernel.config_type(**{k: draw.choice(v) for k, v in space.items()})
            if kernel.why_invalid(made, config, SM90) is None:
                configs[config] = None
            if len(configs) - before == 30:
                break
    seen = described(kernel, made, SM90, list(configs), 96)
    features, model = seen.features, seen.model
    assert features.shape[0] == len(model) == len(configs) > 20
    assert features.min(0).tolist() == [0.0] * features.shape[1], "scaled"
    assert features.max(0).tolist() == [1.0] * features.shape[1], "and none that says nothing"
    assert len({tuple(f) for f in features.tolist()}) == len(configs)
    assert np.isfinite(features).all()
    assert np.isfinite(model).all()


# -- the sampler


def _recorded(kernel_name: str, problem: dict[str, Any], seed: int, fewer: dict[str, tuple[Any, ...]]) -> Recorded:
    kernel = find_kernel(kernel_name)
    made = kernel.problem_type(**problem)
    truth = distorted(kernel, made, SM90, strength=2.0, noise=0.02, seed=seed)
    return recording(kernel, made, SM90, truth, f"made-{seed}", fewer)


def test_expected_improvement_is_the_integral_it_stands_for() -> None:
    margin, deviation = np.array([0.5, 0.0, -0.4, -3.0, 0.2, -60.0]), np.array([0.1, 0.3, 0.2, 0.5, 0.0, 0.5])
    draws = np.random.default_rng(1).normal(size=4_000_000)
    found = np.exp(log_expected_improvement(margin, deviation))
    for m, d, gain in zip(margin[:3], deviation[:3], found[:3], strict=True):
        assert gain == pytest.approx(np.maximum(m + d * draws, 0).mean(), rel=0.02)
    assert found[4] == pytest.approx(0.2)
    far = log_expected_improvement(np.array([-2.4999, -2.5001, -60.0, -61.0]), np.full(4, 0.5))
    assert far[0] == pytest.approx(far[1], abs=0.02), "one formula goes over into the other"
    assert far[0] > far[2] > far[3] > -1e5, "and tells apart what is hopeless"


@pytest.fixture(scope="module")
def made() -> list[Recorded]:
    dense = {"row_tiles": (1,), "warps_n": (1, 4), "unroll": (2, 4, 8), "blocks_per_sm": (1, 2, 3)}
    w4 = {"block_m": (2, 8), "block_n": (32, 64), "num_stages": (1, 3, 4), "blocks_per_sm": (0, 1), "warps_m": (1,)}
    attention = {"num_warps": (2, 4, 8), "num_stages": (2, 3, 4), "num_splits": (1, 2, 4, 8, 16)}
    greedy = {"column_parts": (1, 2), "choose_warps": (4, 8), "unroll": (2, 4, 6)}
    return [
        *(_recorded("dense_gemv", {"n": 8192, "k": 1024}, s, dense) for s in range(2)),
        *(_recorded("w4a16_gemm", {"n": 4096, "k": 2048}, s, w4) for s in range(2)),
        *(_recorded("attn_decode", {"head_dim": 256, "kv_len": 8192}, s, attention) for s in range(2)),
        *(_recorded("greedy_head", {"num_tokens": 8}, s, greedy) for s in range(2)),
    ]


def test_what_is_learned_beats_the_model_and_chance(made: list[Recorded]) -> None:
    """The truth is the cost model's times factors of the tunables and of pairs of them, and noise of 2 %."""
    scores = {s.sampler: s for s in table(made, [SAMPLERS[n] for n in ("residual", "model", "random")], seeds=1)
              if s.kernel == "all"}  # fmt: skip
    assert scores["residual"].share >= 0.9, scores
    assert scores["residual"].share > scores["model"].share + 0.2, scores
    assert scores["residual"].share > scores["random"].share + 0.2, scores
    assert scores["residual"].worst < 0.15, scores


def test_a_batch_is_of_different_valid_configurations_that_spread(made: list[Recorded]) -> None:
    for recorded in made[1::2]:
        search, objective = _search(recorded, SAMPLERS["residual"], 40, 0)
        for config in search.ask(6):
            search.tell(config, objective.outcome(config))
        first = search.ask(6)
        assert len(set(first)) == 6
        assert set(first) <= set(recorded.by_config) - set(search.outcomes)
        assert search.ask(0) == []
        assert set(search.pending) == set(first)
        # Without belief in what is under way, the next proposal would be the first again.
        sampler = ResidualSampler(search, described_space(search.candidates), 0)
        assert sampler.propose() not in first


def test_all_is_asked_once_and_then_it_is_over(made: list[Recorded]) -> None:
    for recorded in (made[0], made[2]):
        kept = random.Random(1).sample(recorded.rows, 30)
        rows = {r.config: r for r in [*kept, recorded.by_config[recorded.default]]}
        small = completed(replace(recorded.head, num_configs=len(rows)), rows.values())
        trace = replay(small, SAMPLERS["residual"], trials=100)
        assert len(trace.tried) == len(rows)
        assert {c for c, _ in trace.tried} == set(rows)


def test_what_failed_is_asked_once_and_the_rest_is_learned_from(made: list[Recorded]) -> None:
    """Of the later trials far fewer fail than of the space: one search may be unlucky, four are not."""
    failing, late, regrets = [], [], []
    for recorded in made[:2]:
        for name, wrong in (("warps_k", (4, 8)), ("blocks_per_sm", (1,))):
            rows = [
                r if r.config == recorded.default or getattr(r.config, name) not in wrong else
                replace(r, outcome="wrong_result", us=None, p10_us=None, p90_us=None, reason="no")
                for r in recorded.rows
            ]  # fmt: skip
            failing += [r.us is None for r in rows]
            trace = replay(completed(recorded.head, rows), SAMPLERS["residual"])
            assert len({c for c, _ in trace.tried}) == len(trace.tried) == 40
            regrets.append(trace.regret())
            late += [us is None for _, us in trace.tried[20:]]
    assert sum(r < 0.05 for r in regrets) >= 3, regrets
    assert sum(failing) / len(failing) > 0.25
    assert sum(late) / len(late) < sum(failing) / len(failing) / 2, "what failed tells of what is like it"
