"""A step is a plan: data of which another process makes the same tokens, and that is checked before it is run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import plan_replay
import pytest
import torch
from command import ROOT
from numpy.typing import NDArray
from test_engine_batches import assert_nothing_is_held, kind_of

from kerngen.errors import UsageError
from kerngen.runtime.config import Arm
from kerngen.runtime.engine import Engine, Handle, Request
from kerngen.runtime.engine import plan as plans
from kerngen.runtime.engine.draft_length import Choice
from kerngen.runtime.engine.mixed_batches import Shape
from kerngen.runtime.engine.plan import (
    PLAIN,
    DecodeRows,
    Limits,
    NewPage,
    NewRow,
    PrefillChunk,
    RowUpdate,
    SamplingMode,
    StepPlan,
)
from kerngen.runtime.engine.prefill_graphs import SEQUENCES
from kerngen.runtime.engine.runner import StepOutput
from kerngen.runtime.sampling import Sampling


class EveryThird:
    """A mask that allows other tokens after each."""

    def __init__(self) -> None:
        self.told = 0

    def accept(self, token: int) -> None:
        self.told += 1

    def fill(self, bits: NDArray[np.int32]) -> bool:
        bits[:] = (0x49249249, 0x12492492, 0x24924924)[self.told % 3]
        return self.told % 4 < 3


class Recorded:
    """What an engine plans, as JSON, and what came of it."""

    def __init__(self, engine: Engine) -> None:
        self.lines: list[str] = []
        self.made: list[Any] = []
        self.plans: list[StepPlan] = []
        self._run = engine.runner.run
        engine.runner.run = self.run  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> StepOutput:
        output = self._run(plan)
        self.plans.append(plan)
        self.lines.append(plan.to_json())
        self.made.append(plan_replay.said(output))
        return output


def asked(draw: random.Random, number: int) -> Request:
    """A request of any kind; some prompts begin alike."""
    common = [2, *range(300, 340)][: draw.choice((1, 1, 17, 33))]
    prompt = [*common, *(draw.randrange(300, 1000) for _ in range(draw.randint(1, 30)))]
    sampling = draw.choice((
        Sampling(), Sampling(), Sampling(0.9, 30, 0.9, number), Sampling(1.2, min_p=0.1, seed=number),
        Sampling(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2),
        Sampling(0.8, 12, seed=number, logit_bias=((301, 4.0), (7, -100.0)), min_tokens=2),
    ))  # fmt: skip
    kind = draw.choice(("", "", "", "mask", "weighed", "suppressed"))
    return Request(
        prompt, draw.randint(2, 18), sampling, (1, 106), suppressed_ids=range(310, 330) if kind == "suppressed" else (),
        logprobs=draw.choice((None, None, 3)), mask=EveryThird() if kind == "mask" else None,
        prompt_logprobs=2 if kind == "weighed" else None,
    )  # fmt: skip


def played(engine: Engine, draw: random.Random, count: int) -> list[Handle]:
    """`count` requests that come, go on, are cancelled or raise at random; numbers of drafts at random, too."""

    def choose() -> Choice:
        bucket = engine.runner.bucket(len(engine.scheduler.running))
        guided = all(h.request.mask is not None for h in engine.scheduler.running)
        return Choice(Arm(0 if guided else draw.choice((0, 0, 0, 1, 3))), bucket)

    def raising(token: int) -> bool:
        raise ZeroDivisionError

    engine._choose = choose  # type: ignore[method-assign]
    handles: list[Handle] = []
    while len(handles) < count or engine.has_work:
        while len(handles) < count and draw.random() < 0.6:
            request = asked(draw, len(handles))
            handles.append(engine.submit(replace(request, stops=raising) if len(handles) == count // 2 else request))
        try:
            engine.step()
        except ZeroDivisionError:
            assert not engine.scheduler.running, "all begin again"
        live = [h for h in handles if not h.is_done]
        if live and draw.random() < 0.06:
            engine.cancel(draw.choice(live))
    return handles


def test_an_interrupted_plan_loses_no_wipe() -> None:
    """A plan that was to wipe page 0 and was never run is followed by one that does."""
    engine = plan_replay.engine()
    engine.submit(Request([2, 300], 2))
    engine.scheduler.distrust_cache()
    run = engine.runner.run

    def interrupted(plan: StepPlan) -> StepOutput:
        assert plan.update.wipe
        raise KeyboardInterrupt

    engine.runner.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.run = run  # type: ignore[method-assign]
    assert engine.scheduler.take_update().wipe


def test_another_process_makes_the_same_tokens_of_the_plans() -> None:
    """Of prefills, mixed steps, drafts, masks, penalties, log-probabilities, preempted, cancelled and interrupted."""
    engine = plan_replay.engine()
    recorded = Recorded(engine)
    handles = played(engine, random.Random(46), 200)
    assert_nothing_is_held(engine)
    for line, plan in zip(recorded.lines, recorded.plans, strict=True):
        assert StepPlan.from_json(line, engine.runner.limits) == plan
    done = subprocess.run(
        [sys.executable, plan_replay.__file__], input="\n".join(recorded.lines), capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == len(recorded.made)
    for plan, here, there in zip(recorded.plans, recorded.made, made, strict=True):
        assert there == here, plan

    found = recorded.plans
    decodes = [plan.decode for plan in found if plan.decode is not None]
    assert {kind_of(plan) for plan in found} == {"prefill", "mixed", "decode"}
    assert {decode.num_drafts for decode in decodes} == {0, 1, 3}
    assert any(len(row) > 1 for plan, tokens in zip(found, made, strict=True) if plan.decode for row in tokens[0])
    assert any(decode.masks for decode in decodes)
    assert any(plan.update.moves for plan in found)
    assert any(plan.update.new_pages for plan in found)
    assert sum(plan.update.reset for plan in found) == 1
    assert any(chunk.targets for plan in found for chunk in plan.chunks)
    assert {h.stop_reason for h in handles} >= {"cancelled", "length"}
    assert sum(h.num_preemptions for h in handles) > 3


# -- what is refused

LIMITS = Limits(max_batch=4, max_len=64, max_drafts=(7,), vocab_size=100, page_size=16, num_pages=(20, 30))
MASK = bytes(16)
CHUNK = PrefillChunk((5, 6, 7), 16, ((1, 2), (0, 9)), NewRow(40, Sampling(0.5, 3, seed=-9), mask=MASK))
PLAN = StepPlan(
    num_running=2, update=RowUpdate(moves=((0, 2),), new_pages=(NewPage("sliding", 1, 3, 29),)),
    decode=DecodeRows(batch=3, longest=50, mode=SamplingMode(masked=True, guided=True), masks=((1, MASK),)),
    chunks=(CHUNK,), first_mode=SamplingMode(sampled=True, cut=64, masked=True, guided=True), num_tokens=8,
)  # fmt: skip


def test_a_plan_survives_being_written_down() -> None:
    weighed = replace(CHUNK, new_row=None, targets=(6, 7), first_target=1)
    prefill = replace(PLAN, decode=None, chunks=(weighed,))
    for plan in (PLAN, StepPlan(0), prefill, replace(prefill, num_tokens=0)):
        assert StepPlan.from_json(plan.to_json(), LIMITS) == plan
    assert StepPlan(0).to_json() == '{"num_running":0}', "fields that have their default are left out"


Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, Damage] = {
    "the number of rows is 5": lambda v: v.update(num_running=5),
    "plan.num_running is True": lambda v: v.update(num_running=True),
    "plan.num_running is 2.0": lambda v: v.update(num_running=2.0),
    "plan must have num_running": lambda v: v.pop("num_running"),
    "['more']": lambda v: v.update(more=1),
    "plan.chunks is ": lambda v: v.update(chunks={}),
    "plan.update.moves is ": lambda v: v["update"].update(moves=[[1, 2, 3]]),
    "a row that leaves is 3": lambda v: v["update"].update(moves=[[3, 2]]),
    "a row that leaves is -1": lambda v: v["update"].update(moves=[[-1, 2]]),
    "row 3 take the place of row 0; row 2 is the last": lambda v: v["update"].update(moves=[[0, 3]]),
    "row 1 take the place of row 0; row 2 is the last": lambda v: v["update"].update(moves=[[0, 1]]),
    "row 2 take the place of row 1; row 3 is the last": lambda v: v["update"].update(moves=[[1, 2], [0, 2]]),
    "the number of rows before some leave is 5": lambda v: v["update"].update(moves=[[0, 4], [0, 3], [0, 2]]),
    "resets all rows, and 3 of them": lambda v: v["update"].update(reset=True),
    "a page is 30": lambda v: v["update"]["new_pages"][0].update(page=30),
    "kind 'half'": lambda v: v["update"]["new_pages"][0].update(kind="half"),
    "the place of a page in its table is 4": lambda v: v["update"]["new_pages"][0].update(index=4),
    "a row that gets a page is -1": lambda v: v["update"]["new_pages"][0].update(row=-1),
    "a row that gets a page is 2": lambda v: v["update"]["new_pages"][0].update(row=2),
    "the rows that are computed is 5": lambda v: v["decode"].update(batch=5),
    "the rows that decode is 1": lambda v: v["decode"].update(batch=1),
    "the number of drafts beside a prefill is 1": lambda v: v["decode"].update(num_drafts=1),
    "the drafter is 1": lambda v: v["decode"].update(drafter=1),
    "the number of drafts is 8": lambda v: v["decode"].update(num_drafts=8),
    "a step's tokens is 64": lambda v: v.update(decode=v["decode"] | {"longest": 61, "num_drafts": 3}, chunks=[]),
    "a row with a mask is 2": lambda v: v["decode"].update(masks=[[2, v["decode"]["masks"][0][1]]]),
    "a mask has 3 B": lambda v: v["decode"].update(masks=[[1, "AAAA"]]),
    "plan.decode.masks is 'A!'": lambda v: v["decode"].update(masks=[[1, "A!"]]),
    "looks at the 65 likeliest": lambda v: v["first_mode"].update(cut=65),
    "a mode that is not masked and guided": lambda v: v["decode"].update(mode={"masked": True}, num_drafts=1),
    "and a mode that is not masked and guided": lambda v: v.update(first_mode={"guided": True}),
    "the tokens of a forward that are none is -1": lambda v: v.update(num_tokens=5),
    "the tokens of a forward that are none is -2": lambda v: v.update(decode=None, num_tokens=1),
    "the tokens of a forward that are none is 64": lambda v: v.update(decode=None, num_tokens=67),
    "that is not filled up is 9": lambda v: v.update(chunks=[], num_tokens=9),
    "the targets of chunks beside a decode step is 2": lambda v: v["chunks"][0].update(targets=[6, 7]),
    "a token is 100": lambda v: v["chunks"][0].update(tokens=[5, 6, 100]),
    "the tokens of a chunk is -1": lambda v: v["chunks"][0].update(tokens=[], targets=[]),
    "the pages of a chunk that lack is -1": lambda v: v["chunks"][0].update(pages=[[1, 2], [1]]),
    "a page is 20": lambda v: v["chunks"][0].update(pages=[[1, 20], [1, 2]]),
    "pages of 1 kinds": lambda v: v["chunks"][0].update(pages=[[1, 2]]),
    "where a chunk ends is 65": lambda v: v["chunks"][0].update(start=62),
    "the targets of a chunk is 4": lambda v: v.update(
        decode=None, num_tokens=0, chunks=[v["chunks"][0] | {"targets": [6, 7], "first_target": 2}]
    ),
    "the most tokens of a sequence is 64": lambda v: v["chunks"][0]["new_row"].update(limit=64),
    "the tokens that a sequence may still get is -1": lambda v: v["chunks"][0]["new_row"].update(limit=18),
    "temperature -1": lambda v: v["chunks"][0]["new_row"]["sampling"].update(temperature=-1),
    "temperature nan": lambda v: v["chunks"][0]["new_row"]["sampling"].update(temperature=float("nan")),
    "temperature is 1000": lambda v: v["chunks"][0]["new_row"]["sampling"].update(temperature=10**400),
    "the number of requests is 4": lambda v: v.update(requests=[7, 8, 9, 10]),
    "plan.requests is ": lambda v: v.update(requests=[None]),
    "a token is 999": lambda v: v["chunks"][0]["new_row"]["sampling"].update(logit_bias=[[999, 1.0]]),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_plan_that_asks_for_what_the_runner_does_not_have_is_refused(what: str) -> None:
    values = json.loads(PLAN.to_json())
    DAMAGES[what](values)
    with pytest.raises(UsageError) as refused:
        StepPlan.from_json(json.dumps(values), LIMITS)
    assert what in str(refused.value)


def test_a_plan_of_what_the_runner_cannot_do_is_refused() -> None:
    """No drafter: no drafts. One that takes in tokens, or arithmetic that is not to depend on others: two forwards."""
    drafts = StepPlan(1, decode=DecodeRows(1, 20, 1)).to_json()
    engine = plan_replay.engine()
    assert StepPlan.from_json(drafts, engine.runner.limits).decode == DecodeRows(1, 20, 1)
    engine.runner.drafter = None
    with pytest.raises(UsageError, match="the number of drafts is 1"):
        StepPlan.from_json(drafts, engine.runner.limits)

    mixed = replace(PLAN, update=RowUpdate(), decode=DecodeRows(2, 50), first_mode=PLAIN, num_tokens=5)
    mixed = replace(mixed, chunks=(PrefillChunk((5, 6, 7), 0, ((1,), (1,))),))
    assert StepPlan.from_json(mixed.to_json(), engine.runner.limits) == mixed
    reproducible = plan_replay.engine(reproducible=True, num_draft_tokens=0)
    with pytest.raises(UsageError, match="this model and its options need two"):
        StepPlan.from_json(mixed.to_json(), reproducible.runner.limits)


def test_chunks_that_no_captured_forward_has_room_for_run_as_they_are() -> None:
    """A captured mixed batch has room for SEQUENCES - 1 chunks."""
    engine = plan_replay.engine()
    recorded = Recorded(engine)
    first = engine.submit(Request([2, 300, 301], 8))
    while not first.tokens:
        engine.step()
    runner = engine.runner
    chunks = tuple(PrefillChunk((2, 310 + i), 0, ((10 + i,), (10 + i,)), NewRow(10)) for i in range(SEQUENCES))
    plan = StepPlan(1, decode=DecodeRows(1, 20), chunks=chunks, num_tokens=2 * SEQUENCES + 1)

    def captured() -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("it has no room")

    runner.mixed_graphs.replay = captured  # type: ignore[method-assign,assignment]
    runner.mixed_graphs._captured[Shape(plan.num_tokens, 1, PLAIN)] = captured  # type: ignore[assignment]
    with torch.inference_mode():
        runner.run(StepPlan.from_json(plan.to_json(), runner.limits))
    decoded, new, _ = recorded.made[-1]
    assert [len(row) for row in (*decoded, *new)] == [1] * (1 + SEQUENCES)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"num_running":' + "9" * 5000 + "}"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        StepPlan.from_json(text, LIMITS)


def test_a_plan_of_too_many_bytes_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_JSON_BYTES", 10)
    monkeypatch.setattr(plans.json, "loads", None)
    with pytest.raises(UsageError, match="10 B are read at most"):
        StepPlan.from_json(PLAN.to_json(), LIMITS)
