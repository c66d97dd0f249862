"""Prompts that come while others are answered do not make them wait: how much of them a step prefills."""

from __future__ import annotations

import random

import numpy as np
import paced
import pytest
import torch

from kerngen.runtime.engine import Request
from kerngen.runtime.engine.prefill_budget import MOST_STALL, MULTIPLE, PrefillBudget

STEP_S = 0.02


def _seconds(tokens: int) -> float:
    return paced.CHUNK_S + paced.TOKEN_S * tokens


@pytest.mark.parametrize("step_s", [0.005, 0.02, 0.03, 0.1])
def test_a_chunk_takes_as_long_as_it_may(step_s: float) -> None:
    budget = PrefillBudget(2048)
    for _ in range(300):
        budget.decoded(step_s, 5)
        tokens = budget.tokens(5, 5)
        budget.prefilled(tokens, _seconds(tokens))
    assert tokens in (MULTIPLE, 2048) or 0.5 * MOST_STALL * step_s < _seconds(tokens) <= MOST_STALL * step_s
    assert (tokens == MULTIPLE) == (step_s == 0.005)
    budget.prefilled(17, _seconds(17))  # a prompt's end
    assert budget.tokens(5, 5) == tokens
    budget.prefilled(tokens, 5.0)  # a kernel was compiled
    assert budget.tokens(5, 5) >= max(tokens // 4, MULTIPLE)
    assert budget.tokens(1, 0) == 2048


def test_chunks_are_as_long_as_those_who_decode_allow() -> None:
    """Steps of more sequences take longer, and so may chunks beside them."""
    budget = PrefillBudget(2048)
    budget.know({64: 0.004, 128: 0.006, 256: 0.009, 512: 0.016}.items())
    for rows, seconds in ((1, 0.002), (8, 0.004), (32, 0.008)):
        for _ in range(50):
            budget.decoded(seconds, rows)
    assert [budget.tokens(1, rows) for rows in (1, 8, 32)] == [64, 128, 256]
    assert [budget.tokens(1, rows) for rows in (2, 12, 20)] == [64, 128, 256], "by the nearest that was seen"
    assert budget.tokens(1, 100) == 576, "of more than is known by what tokens took so far"


@pytest.mark.parametrize("extra_s", [0.0, 0.002])
def test_what_was_timed_lets_chunks_grow_that_all_take_long(extra_s: float) -> None:
    """Reading the weights takes twice as long as a decode step, and 512 tokens hardly more: 64 at a time would starve
    whoever waits.
    """
    times = {64: 0.004, 128: 0.007, 192: 0.0045, 512: 0.0067}  # one is odd
    budget = PrefillBudget(2048)
    budget.know(times.items())
    for step in range(400):
        budget.decoded(0.004, 20)
        tokens = 64 if step < 50 else budget.tokens(5, 20)
        seconds = extra_s + float(np.interp(tokens, *zip(*times.items(), strict=True)))
        budget.prefilled(tokens, seconds)
        assert seconds <= MOST_STALL * 0.004
    assert tokens == (512 if extra_s == 0 else 192)


def test_two_sizes_that_took_the_same_do_not_let_chunks_be_of_any_length() -> None:
    budget = PrefillBudget(2048)
    budget.know([(64, 0.002), (384, 0.008), (512, 0.008)])
    budget.decoded(0.005, 20)
    assert 512 <= budget.tokens(5, 20) <= 1024


def test_a_chunk_is_as_long_as_what_it_runs_as() -> None:
    """Between two sizes that were timed it would be filled up to the larger, and take its time."""
    times, chosen = {64: 0.004, 256: 0.008, 512: 0.012}, set()
    for step_us in range(1000, 12000, 100):
        budget = PrefillBudget(2048)
        budget.know(times.items())
        budget.decoded(step_us * 1e-6, 20)
        chosen.add(budget.tokens(1, 20))
    assert {64, 256, 512} < chosen
    assert all(n in times or n > 512 for n in chosen)


def test_the_end_of_a_prompt_says_nothing_of_longer_chunks() -> None:
    """It takes as long as what it is filled up to or, without a graph, as its tokens do."""
    budget = PrefillBudget(2048)
    budget.know({64: 0.004, 128: 0.006, 512: 0.012}.items())
    budget.decoded(0.0073, 20)
    for tokens, seconds in ((512, 0.012), (64, 0.004), (320, 0.009), (1, 0.004)) * 20:
        budget.prefilled(tokens, seconds)
    assert budget.tokens(5, 20) == 512


def test_a_chunk_beside_which_others_decode_is_what_the_step_takes() -> None:
    """It may take LONGEST decode steps, and has room for who decodes."""
    times = {64: 0.004, 128: 0.006, 256: 0.009, 512: 0.016}
    apart, mixed = PrefillBudget(2048), PrefillBudget(2048)
    for budget in (apart, mixed):
        budget.know(times.items())
        budget.decoded(0.004, 8)
    assert apart.tokens(1, 8) == 128
    assert [mixed.tokens(1, 8, beside) for beside in (8, 64, 100)] == [256 - 8, 256 - 64, 256 - 100]
    assert mixed.tokens(8, 8, 8) == 256 - 8
    assert mixed.tokens(80, 8, 8) == 512 - 8, "not more than can be joined"
    for _ in range(200):
        mixed.prefilled(256, 0.010)
    assert mixed.tokens(1, 8, 8) == 256 - 8
    assert mixed.tokens(1, 40, 48) == 512 - 48, "a step of more sequences takes longer, though none was seen alone"
    mixed.prefilled(256, 0.0)
    mixed.decoded(0.001, 1)
    assert [mixed.tokens(1, 1, 8, least) for least in (64, 128)] == [64 - 8, 128 - 8], "with fewer it takes no less"
    assert mixed.tokens(1, 0) == 2048


def test_many_who_wait_outweigh_few_who_decode() -> None:
    budget = PrefillBudget(2048)
    few = budget.tokens(1, 1)
    assert MULTIPLE < few < 1024
    assert [budget.tokens(n, 8) for n in (1, 8, 80)] == [few, few, 2048]
    assert few < budget.tokens(12, 8) < budget.tokens(16, 8) < 2048


def test_any_stall() -> None:
    budget = PrefillBudget(2048, None)
    budget.decoded(0.001, 1)
    budget.prefilled(2048, 10.0)
    assert budget.tokens(1, 1) == 2048
    assert PrefillBudget(48).tokens(1, 1) == 48


class _Clock:
    """Time passes only where somebody waits."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("max_stall", [MOST_STALL, None])
def test_tokens_come_evenly_while_prompts_arrive(
    max_stall: float | None, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of a fixed pace, whose host is as far behind it as on a GPU."""
    clock, draw = _Clock(), random.Random(1)
    monkeypatch.setattr(paced, "time", clock)
    session = paced.paced_session(str(paced.TINY))
    engine = session.reserve(2048, 16)
    engine._budget, engine._mixes = PrefillBudget(2048, max_stall), mixed
    arrivals = [0.5 * i for i in range(30)]
    last: dict[object, float] = {}
    gaps = []
    with torch.inference_mode():
        while arrivals or engine.has_work:
            while arrivals and arrivals[0] <= clock.now:
                arrivals.pop(0)
                engine.submit(Request(draw.choices(range(300, 1000), k=1800), 80))
            if not engine.has_work:
                clock.now = arrivals[0]
                continue
            for event in engine.step():
                if event.handle in last:
                    gaps.append(clock.now - last[event.handle])
                last[event.handle] = clock.now
    assert len(last) == 30
    middle, most = np.percentile(gaps, 50), np.percentile(gaps, 99)
    assert middle < 3 * STEP_S
    assert (most <= 3 * middle) == (max_stall is not None), (middle, most)
