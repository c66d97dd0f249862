"""What a request may ask of the choice of its tokens, against an oracle that does one thing after the other, slowly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_engine_batches import Graphless, Oracle, assert_nothing_is_held, oracle_for
from test_runtime_engine import Deviceless, NoWaiting
from tiny_gemma import BASE, CPU, load, load_assistant, make_assistant, make_target, prompt
from transformers import RepetitionPenaltyLogitsProcessor

import kerngen
from kerngen.errors import KerngenError, NumericsError, UsageError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import Arm
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Generation, Handle, Request, TokenLogprobs
from kerngen.runtime.engine.logit_processors import LogitProcessors
from kerngen.runtime.engine.mask import allowed_bits
from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.engine.planning import prefill_chunk, sampling_mode
from kerngen.runtime.engine.scheduler import Chunk
from kerngen.runtime.logprobs import MOST_LOGPROBS, logprob_words, read_logprobs
from kerngen.runtime.model import Gemma4
from kerngen.runtime.penalties import counts_at, penalized
from kerngen.runtime.prompt_file import Job, Outcomes
from kerngen.runtime.sampling import Parameters, Sampling, choose, likeliest, uniforms

VOCAB = BASE["vocab_size"]
EOS = 1  # of the tiny models' config.json
PAGE = 4
Models = tuple[Gemma4, MtpDrafter]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root: Path = tmp_path_factory.mktemp("choosing")
    make_target(root / "target", "dense")
    make_assistant(root / "assistant", "dense")
    model = load(root / "target")
    assert model.config.eos_ids == (EOS,)
    return model, load_assistant(root / "assistant", model)


@pytest.fixture(scope="module")
def model(models: Models) -> Gemma4:
    return models[0]


@dataclass
class Thirds:
    """A mask: at each place two tokens of three, which ones the tokens before decide; at every fourth place all."""

    told: list[int] = field(default_factory=list)

    def allows(self, token: int) -> bool:
        return len(self.told) % 4 == 3 or (token + sum(self.told) + len(self.told)) % 3 > 0

    def accept(self, token: int) -> None:
        assert self.allows(token)
        self.told.append(token)

    def fill(self, bits: NDArray[np.int32]) -> bool:
        assert bits.dtype == np.int32
        assert bits.shape == (-(-VOCAB // 32),)
        if len(self.told) % 4 == 3:
            bits[:] = 0  # means nothing
            return False
        write(bits, [t for t in range(VOCAB) if self.allows(t)])
        return True


def write(bits: NDArray[np.int32], tokens: Sequence[int]) -> None:
    bits[:] = [sum(1 << t % 32 for t in tokens if t // 32 == w) - (1 << 32) * ((w * 32 + 31) in tokens)
               for w in range(len(bits))]  # fmt: skip


class Script:
    """A mask: one set of tokens for each place."""

    def __init__(self, *allowed: Sequence[int]) -> None:
        self.allowed, self.told = allowed, list[int]()

    def accept(self, token: int) -> None:
        self.told.append(token)

    def fill(self, bits: NDArray[np.int32]) -> bool:
        write(bits, self.allowed[len(self.told)])
        return True


# -- the oracle


LOGITS: dict[tuple[int, tuple[int, ...]], list[float]] = {}


@torch.inference_mode()
def logits_after(model: Gemma4, known: list[int]) -> list[float]:
    key = id(model), tuple(known)
    if key not in LOGITS:
        cache = KVCache.whole(model.config, model.ops, batch=1, max_len=len(known))
        hidden = model.forward(Batch.prefill(torch.tensor(known), 0, cache), cache, outputs="last")
        LOGITS[key] = model.logits(hidden)[0].tolist()
    return LOGITS[key]


def expected(model: Gemma4, request: Request) -> tuple[list[int], list[TokenLogprobs]]:
    """The tokens of `request` and what is said of them, one at a time, each from the logits of all before it."""
    s, prompt = request.sampling, list(request.prompt)
    mask = fresh(request).mask
    made: list[int] = []
    said: list[TokenLogprobs] = []
    while len(made) < request.max_new_tokens:
        raw = logits_after(model, prompt + made)
        x = list(raw)
        banned = set(request.suppressed_ids)
        if len(made) < s.min_tokens:
            banned |= {*request.stop_ids, EOS}
        bits = np.zeros(-(-VOCAB // 32), np.int32)
        if mask is not None and mask.fill(bits):
            banned |= {t for t in range(VOCAB) if not int(bits[t // 32]) >> t % 32 & 1}
        for t, bias in s.logit_bias:
            x[t] += bias
        for t in {*prompt, *made}:
            x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
        for t, count in Counter(made).items():
            x[t] -= s.frequency_penalty * count + s.presence_penalty
        order = sorted(set(range(VOCAB)) - banned, key=lambda t: -x[t])
        token = order[0] if s.is_greedy else drawn(x, order, s, len(prompt) + len(made))
        made.append(token)
        if mask is not None:
            mask.accept(token)
        if request.logprobs is not None:
            total = math.log(sum(math.exp(v - max(raw)) for v in raw)) + max(raw)
            top = sorted(range(VOCAB), key=lambda t: -raw[t])[: request.logprobs]
            said.append(TokenLogprobs(token, raw[token] - total, tuple((t, raw[t] - total) for t in top)))
        if token in request.stop_ids:
            break
    return made, said


def drawn(x: list[float], order: list[int], s: Sampling, position: int) -> int:
    weights = [math.exp((x[t] - x[order[0]]) / s.temperature) for t in order]
    kept = [w for w in weights if w >= s.min_p]
    kept = kept[: s.top_k] if s.top_k else kept
    before = [sum(kept[:i]) / sum(kept) for i in range(len(kept))]
    kept = [w for w, b in zip(kept, before, strict=True) if b < s.top_p or s.top_p == 1]
    at = float(uniforms(torch.tensor([s.key]), torch.tensor([position]))) * sum(kept)
    return order[next(i for i in range(len(kept)) if sum(kept[: i + 1]) > at)]


def fresh(request: Request) -> Request:
    """`request` with a mask that was told nothing yet."""
    return request if request.mask is None else replace(request, mask=type(request.mask)())


def assert_made(made: Generation | Handle, model: Gemma4, request: Request, length: int | None = None) -> None:
    """What the oracle says, as far as `length`; each said token's place is its own."""
    tokens, said = expected(model, request)
    assert made.tokens == tokens[:length]
    assert [p.token for p in made.logprobs] == (made.tokens if request.logprobs is not None else [])
    for got, want in zip(made.logprobs, said, strict=False):
        assert [t for t, _ in got.top] == [t for t, _ in want.top]
        values = [got.logprob, *(v for _, v in got.top)], [want.logprob, *(v for _, v in want.top)]
        assert values[0] == pytest.approx(values[1], abs=2e-4)  # a prefill's logits and a step's differ by 1e-4 at most


FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "encouraged": {"repetition_penalty": 0.6},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 2.0},
    "all penalties": {"repetition_penalty": 1.2, "frequency_penalty": -0.4, "presence_penalty": 1.1},
    "bias": {"logit_bias": ((5, 4.0), (9, -100.0), (17, 3.5), (40, 2.0))},
    "min_tokens": {"min_tokens": 7},
    "all": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.5, "min_tokens": 5,
            "logit_bias": ((5, 4.0), (9, -1.0))},
}  # fmt: skip
SAMPLED: dict[str, dict[str, Any]] = {
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "min_p, top_k, top_p": {"temperature": 2.5, "min_p": 0.05, "top_k": 12, "top_p": 0.9},
    "hot": {"temperature": 1.3, "top_p": 0.95},
}
STOPS = tuple(range(30, 60))


def requests_of_all_kinds(count: int = 14) -> list[Request]:
    """Each of its own prompt, plain ones between them."""
    asked = [
        *({"sampling": Sampling(**f)} for f in FEATURES.values()),
        *({"sampling": Sampling(**s, seed=i)} for i, s in enumerate(SAMPLED.values())),
        {"sampling": Sampling(**FEATURES["all"], **SAMPLED["min_p, top_k, top_p"], seed=4)},
        {},
        {"suppressed_ids": (5, 6, 7), "logprobs": 3},
        {"mask": Thirds(), "logprobs": 0},
        {"mask": Thirds(), "sampling": Sampling(**FEATURES["all"], **SAMPLED["hot"]), "suppressed_ids": (8, 9)},
        {"logprobs": 5},
        {"sampling": Sampling(0.9, 30, 0.9, 3), "logprobs": 20},
    ]  # fmt: skip
    made = []
    for i, options in enumerate(asked):
        stop_ids = STOPS if options.get("sampling", Sampling()).min_tokens else ()
        made.append(Request(prompt(3 + i, seed=i), count + i % 3, stop_ids=stop_ids, **options))
    return made


def engine_for(model: Gemma4, drafter: MtpDrafter | None = None, **options: Any) -> Engine:
    options = {"max_len": 50, "max_batch": 8, "page_size": PAGE, "num_draft_tokens": 3} | options
    return Engine(model, drafter, **options)


def knowing(models: Models, requests: list[Request], **options: Any) -> tuple[Engine, Oracle]:
    """An engine whose drafter is right most of the time."""
    model, drafter = models
    # Steps that were started before a stop token was read go on beyond it.
    oracle = oracle_for(drafter, requests, [expected(model, r)[0] + [0] * r.max_new_tokens for r in requests])
    oracle.engine = engine_for(model, oracle, **options)
    return oracle.engine, oracle


@pytest.mark.parametrize("drafts", [0, 3, 7])
@pytest.mark.parametrize("mode", [{}, *SAMPLED.values()], ids=["greedy", *SAMPLED])
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_gives_the_oracles_tokens(models: Models, feature: str, mode: dict[str, Any], drafts: int) -> None:
    sampling = Sampling(**FEATURES[feature], **mode, seed=7)
    request = Request(prompt(8), 18, sampling, STOPS if sampling.min_tokens else (), logprobs=4)
    tokens, _ = expected(models[0], request)
    engine, _ = knowing(models, [request], max_batch=1, num_draft_tokens=drafts)
    made = engine.generate_many([request])[0]
    assert_made(made, models[0], request)
    plain = replace(request, sampling=Sampling(**mode, seed=7))
    assert tokens != expected(models[0], plain)[0], "the feature must change something"
    if drafts and len(tokens) > 8:
        assert made.stats.acceptance_length > 1


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_prompt_is_weighed_as_its_tokens_were_when_they_were_made(model: Gemma4, chunk: int) -> None:
    """In chunks, beside requests that do not ask, when the cache has the prompt, and preempted."""
    first = Request(prompt(6), 12, logprobs=3)
    engine = engine_for(model, max_batch=3, prefill_chunk=chunk)
    (made,) = engine.generate_many([first])
    whole = [*first.prompt, *made.tokens]
    asked = Request(whole, 4, logprobs=1, prompt_logprobs=3)
    handles = [engine.submit(r) for r in (Request(whole, 4), asked, replace(asked, prompt_logprobs=None))]
    while engine.has_work:
        engine.step()
        if len(handles[1].tokens) == 1 and not handles[1].num_preemptions:
            engine.scheduler._preempt(handles[1])
    told = handles[1].prompt_logprobs
    assert handles[1].num_preemptions == 1
    assert [x.token for x in told] == whole[1:]
    for got, want in zip(told[len(first.prompt) - 1 :], made.logprobs, strict=True):
        assert [got.token, *(t for t, _ in got.top)] == [want.token, *(t for t, _ in want.top)]
        values = [want.logprob, *(v for _, v in want.top)]
        assert [got.logprob, *(v for _, v in got.top)] == pytest.approx(values, abs=1e-4)
    assert handles[0].tokens == handles[1].tokens == handles[2].tokens
    assert not handles[0].prompt_logprobs
    with pytest.raises(UsageError, match="prompt_logprobs 21"):
        engine.submit(replace(asked, prompt_logprobs=21))


PADDED = (3, 8, 20)


@pytest.mark.parametrize(
    ("drafts", "async_depth", "buckets"),
    [(0, 0, None), (0, 1, PADDED), (2, 1, None), (3, 0, PADDED), (7, 1, PADDED), (None, 0, None), (None, 1, PADDED)],
)
def test_mixed_batches_give_each_its_own(models: Models, drafts: int | None, async_depth: int, buckets: Any) -> None:
    """Rows move as others leave; those with a mask take no drafts, the others do."""
    requests = requests_of_all_kinds()
    for max_batch in (5, 20):
        engine, _ = knowing(models, requests, num_draft_tokens=drafts, async_depth=async_depth, buckets=buckets,
                            prefill_chunk=11, max_batch=max_batch)  # fmt: skip
        made = engine.generate_many([fresh(r) for r in requests])
        for generation, request in zip(made, requests, strict=True):
            assert_made(generation, models[0], request)
            if request.mask is not None:
                assert generation.stats.drafted == ()
        assert_nothing_is_held(engine)
        if drafts:
            assert sum(sum(g.stats.accepted) for g in made) > 20


@pytest.mark.parametrize("drafts", [0, 3])
def test_preemption_makes_the_state_again(models: Models, drafts: int) -> None:
    requests = requests_of_all_kinds()[-11:]
    for caching in (False, True):
        engine, _ = knowing(models, requests, num_draft_tokens=drafts, prefill_chunk=8, prefix_caching=caching,
                            async_depth=1, num_pages={"full": 16, "sliding": 24})  # fmt: skip
        made = engine.generate_many([fresh(r) for r in requests])
        for generation, request in zip(made, requests, strict=True):
            assert_made(generation, models[0], request)
        assert sum(g.stats.num_preemptions for g in made) > 3
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("order", [1, -1], ids=["as they are", "reversed"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_what_is_made_again_is_said_once(models: Models, drafts: int, order: int) -> None:
    """A reproducible engine makes a preempted request's tokens again, masked ones and all; the latest are preempted."""
    model, _ = models
    requests = requests_of_all_kinds()[::order]
    engine, _ = knowing(models, requests, num_draft_tokens=drafts, prefill_chunk=8, reproducible=True, max_batch=4,
                        num_pages={"full": 16, "sliding": 40})  # fmt: skip
    asked = [fresh(r) for r in requests]
    handles = [engine.submit(r) for r in asked]
    seen: dict[Handle, list[tuple[int, TokenLogprobs | None]]] = {h: [] for h in handles}
    while engine.has_work:
        for event in engine.step():
            said = event.logprobs or [None] * len(event.tokens)
            seen[event.handle] += zip(event.tokens, said, strict=True)
    for handle, request in zip(handles, requests, strict=True):
        assert_made(handle, model, request)
        assert [t for t, _ in seen[handle]] == handle.tokens
        assert [p for _, p in seen[handle] if p] == handle.logprobs
        if isinstance(handle.request.mask, Thirds):
            assert handle.request.mask.told == handle.tokens
    assert sum(h.num_preemptions for h in handles) > 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_captured_steps_read_what_rows_have_now(models: Models, monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Capturing counts nothing, and a graph serves whoever stands in its rows."""
    requests = requests_of_all_kinds()
    with monkeypatch.context() as patch:
        engine, _ = knowing(models, requests, num_draft_tokens=drafts, buckets=(2, 6), async_depth=1, max_batch=6)
        graphs = Graphless(engine, patch)
        for _ in range(2):
            for generation, request in zip(engine.generate_many([fresh(r) for r in requests]), requests, strict=True):
                assert_made(generation, models[0], request)
        assert 3 < graphs.num_captured < graphs.num_replayed


def test_a_step_with_every_feature_never_waits_for_the_device(models: Models) -> None:
    model, drafter = models
    held = [(holder, holder.ops) for holder in (model, model.stack, drafter, drafter.stack)]
    try:
        for holder, _ in held:
            holder.ops = Deviceless(CPU, torch.float32)
        engine = engine_for(model, drafter)
        sampling = Sampling(**FEATURES["all"], **SAMPLED["min_p, top_k, top_p"])
        handle = Handle(Request([3], 9, sampling, suppressed_ids=(4,), logprobs=3, mask=Thirds()), 0, 0.0, goal=1)
        handle.allowed = allowed_bits(Thirds(), VOCAB, (), 0)
        with torch.inference_mode():
            engine.runner.join(0, [prefill_chunk(Chunk(handle, 0, [3], True), (EOS,), VOCAB)])
            mode = sampling_mode([handle])
            assert all(mode), "each field of it"
            with NoWaiting():
                result = engine.runner.step(2, Arm(3), mode, 64)
    finally:
        for holder, was in held:
            holder.ops = was
    assert result.shape == (2, 6 + 4 * (1 + 2 * MOST_LOGPROBS))


def tensors_of(logit_processors: LogitProcessors) -> list[str]:
    return [name for name, value in vars(logit_processors).items() if isinstance(value, torch.Tensor)]


def test_what_nobody_asks_for_costs_nothing(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensors, no logits, no other graphs; and what one request asked for is forgotten by the next steps."""
    model, drafter = models
    engine = engine_for(model, drafter, max_batch=2)
    assert sampling_mode([Handle(Request([3], 4, Sampling()), 0, 0.0)]) == SamplingMode()
    assert sampling_mode([Handle(Request([3], 4, Sampling(0.5, 7)), 0, 0.0)]) == SamplingMode(True, 64)
    assert sampling_mode([Handle(Request([3], 4, Sampling(min_p=0.3)), 0, 0.0)]) == SamplingMode(), (
        "greedy keeps the likeliest"
    )
    plain = Request(prompt(9), 8)
    tokens, _ = expected(model, plain)
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", None)
        assert engine.generate_many([plain])[0].tokens == tokens
    assert tensors_of(engine.runner.logit_processors) == []
    for options, names in (
        ({"sampling": Sampling(0.8, min_p=0.1)}, []),
        ({"logprobs": 2}, []),
        ({"sampling": Sampling(logit_bias=((4, 1.0),))}, ["_bias"]),
        ({"sampling": Sampling(min_tokens=2)}, ["_stops", "_first_stop"]),
        ({"sampling": Sampling(presence_penalty=1.0)}, ["_made", "_prompt", "_penalties"]),
        ({"mask": Thirds()}, ["_forbidden", "_guided"]),
    ):
        engine = engine_for(model, drafter, max_batch=2)
        engine.generate_many([replace(plain, **options)])
        assert tensors_of(engine.runner.logit_processors) == sorted(
            names, key=[*vars(engine.runner.logit_processors)].index
        )
        addresses = [t.data_ptr() for t in vars(engine.runner.logit_processors).values() if isinstance(t, torch.Tensor)]
        with monkeypatch.context() as patch:
            patch.setattr(model, "logits", None)
            assert engine.generate_many([plain])[0].tokens == tokens
        engine.generate_many([fresh(replace(plain, **options))])
        assert addresses == [
            t.data_ptr() for t in vars(engine.runner.logit_processors).values() if isinstance(t, torch.Tensor)
        ]


def test_an_answer_that_is_long_enough_takes_the_short_way_again(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = models
    request = Request(prompt(9), 12, Sampling(min_tokens=4))
    engine = engine_for(model)
    handle = engine.submit(request)
    while len(handle.tokens) < 4:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", None)
        while engine.has_work:
            engine.step()
    assert_made(handle, model, request)


def test_min_tokens_hold_back_what_is_made_again(model: Gemma4) -> None:
    request = Request(prompt(8), 18, Sampling(min_tokens=7), STOPS)
    tokens, _ = expected(model, request)
    assert tokens[:7] != expected(model, replace(request, sampling=Sampling()))[0][:7]
    engine = engine_for(model, reproducible=True)
    handle = engine.submit(request)
    while len(handle.tokens) < 7:
        engine.step()
    engine.scheduler.restart()
    while engine.has_work:
        engine.step()
    assert_made(handle, model, request)


def test_the_models_own_end_is_held_back_too(model: Gemma4) -> None:
    forced = Sampling(logit_bias=((EOS, 90.0), (7, 60.0)), min_tokens=3)
    for stop_ids in ((EOS,), ()):
        made = engine_for(model).generate_many([Request(prompt(4), 5, forced, stop_ids)])[0]
        assert made.tokens[:4] == [7, 7, 7, EOS]
        assert made.stop_reason == ("stop" if stop_ids else "length")


@st.composite
def asked(draw: st.DrawFn, number: int) -> Request:
    tokens = st.integers(0, VOCAB - 1)
    count = draw(st.integers(1, 12))
    sampling = Sampling(
        temperature=draw(st.sampled_from((0.0, 0.0, 0.7, 1.4))),
        top_k=draw(st.sampled_from((0, 0, 5, 70))),
        top_p=draw(st.sampled_from((1.0, 0.9, 0.4))),
        seed=number,
        min_p=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0))),
        presence_penalty=draw(st.sampled_from((0.0, 0.0, 1.3, -2.0))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.0, 0.6, -0.8))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1.4, 0.8))),
        logit_bias=tuple(draw(st.dictionaries(tokens, st.integers(-100, 10), max_size=4)).items()),
        min_tokens=draw(st.integers(0, count)),
    )
    return Request(
        prompt(draw(st.integers(1, 20)), seed=number) if number else prompt(21), count, sampling,
        tuple(draw(st.lists(tokens, max_size=30))), suppressed_ids=tuple(draw(st.lists(tokens, max_size=10))),
        logprobs=draw(st.sampled_from((None, None, 0, 3))), mask=draw(st.sampled_from((None, None, Thirds()))),
    )  # fmt: skip


@settings(max_examples=24, deadline=None)
@given(data=st.data())
def test_whatever_is_asked_together(models: Models, data: st.DataObject) -> None:
    requests = []
    for i in range(data.draw(st.integers(1, 5))):
        requests.append(data.draw(asked(i)))
    requests = list({tuple(r.prompt): r for r in requests}.values())
    full = data.draw(st.integers(10, 40))
    engine, _ = knowing(
        models, requests, num_draft_tokens=data.draw(st.sampled_from((None, 0, 1, 5))),
        async_depth=data.draw(st.integers(0, 2)), max_batch=data.draw(st.integers(1, 4)),
        prefill_chunk=data.draw(st.integers(3, 30)), prefix_caching=data.draw(st.booleans()),
        num_pages={"full": full, "sliding": full + 12},
    )  # fmt: skip
    for made, request in zip(engine.generate_many([fresh(r) for r in requests]), requests, strict=True):
        assert_made(made, models[0], request)
    assert_nothing_is_held(engine)


# -- masks


def test_a_mask_is_told_each_token_once_and_read_at_once(models: Models) -> None:
    """Neither lag nor drafts for it; its neighbour drafts as ever, and lags again once it is alone."""
    model, _ = models
    guided, other = Request(prompt(6), 9, mask=Thirds(), stop_ids=(EOS,)), Request(prompt(5), 30)
    engine, _ = knowing(models, [guided, other], async_depth=1, num_draft_tokens=3)
    mask = Thirds()
    handle, neighbour = engine.submit(replace(guided, mask=mask)), engine.submit(other)
    while not handle.is_done:
        known = len(handle.tokens)
        engine.step()
        assert len(handle.tokens) == known + 1
        assert not engine._pending or not engine.scheduler.running
        assert mask.told == handle.tokens
    engine.step()
    assert engine._pending, "the next step runs while this one is read"
    while engine.has_work:
        engine.step()
    assert_made(handle, model, guided)
    assert_made(neighbour, model, other)
    assert (handle.drafted, handle.num_steps, handle.num_emitted) == ([], 8, 8)
    assert sum(neighbour.accepted) > 5


def test_nobody_drafts_where_nobody_would_accept(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = models
    for drafts in (3, None):
        engine = engine_for(model, drafter, num_draft_tokens=drafts)
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "propose", None)
            made = engine.generate_many([Request(prompt(6), 9, mask=Thirds()), Request(prompt(7), 9, mask=Thirds())])
        assert [len(g.tokens) for g in made] == [9, 9]


def test_a_mask_that_allows_nothing_ends_its_request_alone(models: Models) -> None:
    model, drafter = models
    other = Request(prompt(5), 12)
    engine = engine_for(model, drafter, async_depth=1)
    good = engine.submit(other)
    for _ in range(3):
        engine.step()
    mask = Script([8, 11], [9, 95], [])
    handle = engine.submit(Request(prompt(6), 9, mask=mask))
    events = []
    while engine.has_work:
        events += [e for e in engine.step() if e.handle is handle]
    assert (handle.stop_reason, len(handle.tokens)) == ("error", 2)
    assert mask.told == handle.tokens
    assert handle.tokens[0] in (8, 11)
    assert handle.tokens[1] in (9, 95)
    assert [t for e in events for t in e.tokens] == handle.tokens
    with pytest.raises(UsageError, match=r"no token after 2\b"):
        raise handle.error or AssertionError
    assert_made(good, model, other)
    with pytest.raises(UsageError, match="allows no token after 0"):
        engine.submit(Request(prompt(6), 9, mask=Script([])))
    assert_nothing_is_held(engine)


def test_who_waits_for_many_is_told_of_an_error_in_anothers_step(model: Gemma4) -> None:
    engine = engine_for(model)
    made = engine.finished([Request(prompt(5), 1), Request(prompt(6), 9, mask=Script([8, 11], [9, 95], []))])
    assert next(made)[0] == 0
    while engine.has_work:
        engine.step()
    with pytest.raises(UsageError, match=r"no token after 2\b"):
        next(made)
    assert_nothing_is_held(engine)


def test_what_is_never_chosen_does_not_count_as_allowed(model: Gemma4) -> None:
    for options in ({"suppressed_ids": (8, 9)}, {"stop_ids": (8, 9), "sampling": Sampling(min_tokens=1)}):
        with pytest.raises(UsageError, match="allows no token after 0"):
            engine_for(model).submit(Request(prompt(6), 9, mask=Script([8, 9]), **options))
    late = Request(prompt(6), 9, Sampling(min_tokens=2), (8,), mask=Script([8, 20], [8]))
    with pytest.raises(UsageError, match="allows no token after 1"):
        engine_for(model).generate_many([late])
    silent = Gemma4(model.config, model.weights, model.ops, suppressed_ids=(8,))
    with pytest.raises(UsageError, match="allows no token after 0"):
        engine_for(silent).submit(Request(prompt(6), 9, mask=Script([8])))
    ends = Request(prompt(6), 9, Sampling(min_tokens=1), (8,), mask=Script([8, 20], [8]))
    assert engine_for(model).generate_many([ends])[0].tokens == [20, 8]


@pytest.mark.parametrize("error", [UsageError("no such rule"), ZeroDivisionError()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", ["accept", "fill"])
def test_a_mask_that_raises_has_ended_its_request(models: Models, at: str, error: Exception) -> None:
    """What kerngen raises on purpose is that request's error; anything else is somebody's mistake, and is raised."""

    class Raising(Thirds):
        def raising(self) -> None:
            if len(self.told) == 3:
                raise error

        def accept(self, token: int) -> None:
            super().accept(token)
            if at == "accept":
                self.raising()

        def fill(self, bits: NDArray[np.int32]) -> bool:
            if at == "fill":
                self.raising()
            return super().fill(bits)

    model, drafter = models
    other = Request(prompt(5), 12)
    engine = engine_for(model, drafter)
    good, bad = engine.submit(other), engine.submit(Request(prompt(6), 9, mask=Raising(), logprobs=0))
    raised = 0
    while engine.has_work:
        try:
            engine.step()
        except ZeroDivisionError:
            raised += 1
    is_ours = isinstance(error, KerngenError)
    assert raised == (not is_ours)
    assert (bad.stop_reason, bad.error) == (("error", error) if is_ours else ("cancelled", None))
    assert len(bad.tokens) == (2 if at == "accept" and not is_ours else 3)
    assert [p.token for p in bad.logprobs] == bad.tokens
    assert_made(good, model, other)
    assert_nothing_is_held(engine)


def test_bits_beyond_the_vocabulary_are_nobodys() -> None:
    class All:
        def accept(self, token: int) -> None:
            raise AssertionError

        def fill(self, bits: NDArray[np.int32]) -> bool:
            bits[:] = -1
            return True

    bits = allowed_bits(All(), 33, (31, 32), 0)
    assert bits.tolist() == [(1 << 31) - 1, 0]
    assert allowed_bits(All(), 64, (), 0).tolist() == [-1, -1]


# -- log-probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = 5 * torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits[1, 7:] = -math.inf
    tokens = torch.tensor([3, 5, 299, 0, 17, -1])
    words = logprob_words(logits, tokens).numpy()
    exact = torch.log_softmax(logits.double(), -1)
    for row, token, want in zip(words[:5], tokens.tolist(), exact, strict=False):
        said = read_logprobs(row, token, 20)
        assert said.token == token
        assert said.logprob == pytest.approx(float(want[token]), abs=1e-5)
        assert len(said.top) == (7 if math.isinf(want[-1]) else 20), "what cannot be is not among the likeliest"
        assert [v for _, v in said.top] == pytest.approx([float(want[t]) for t, _ in said.top], abs=1e-5)
        assert [v for _, v in said.top] == pytest.approx(want.topk(len(said.top)).values.tolist(), abs=1e-5)
        assert read_logprobs(row, token, 2).top == said.top[:2]
    few = logprob_words(logits[:, :4], torch.tensor([3, 1, 2, 0, 1, 1])).numpy()
    assert len(read_logprobs(few[0], 3, 20).top) == 4


def test_logprobs_end_with_the_tokens(models: Models) -> None:
    """At a stop token within a step's tokens, at a limit, at a callback, and where the model breaks."""
    model, _ = models
    base = Request(prompt(7), 20, logprobs=2)
    tokens, _ = expected(model, base)
    for request in (replace(base, stop_ids=(tokens[9],)), replace(base, max_new_tokens=6)):
        engine, _ = knowing(models, [request], num_draft_tokens=7)
        assert_made(engine.generate_many([request])[0], model, request)
    engine, _ = knowing(models, [base], num_draft_tokens=7)
    handle = engine.submit(replace(base, stops=lambda token: token == tokens[4]))
    events = []
    while engine.has_work:
        events += engine.step()
    assert_made(handle, model, base, tokens.index(tokens[4]) + 1)
    assert [p for e in events for p in e.logprobs] == handle.logprobs == handle.generation.logprobs
    engine = engine_for(model)
    handle = engine.submit(base)
    for _ in range(4):
        engine.step()
    engine.cache.pages(model.config.donor("full")).v_cache.fill_(float("nan"))
    while engine.has_work:
        engine.step()
    assert isinstance(handle.error, NumericsError)
    assert_made(handle, model, base, 4)


# -- the maths, alone


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = 4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 50, (3, 30), generator=torch.Generator().manual_seed(1))
    want = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    prompt_has = torch.zeros(3, 50, dtype=torch.bool).scatter(1, ids[:, :10], True)
    made = torch.zeros(3, 50, dtype=torch.int32).scatter_add(1, ids[:, 10:], torch.ones(3, 20, dtype=torch.int32))
    penalties = torch.tensor([[1.3], [0.0], [0.0]]).expand(3, 3)
    assert torch.equal(penalized(logits, made, prompt_has, penalties), want)


def test_rows_without_penalties_keep_their_logits() -> None:
    logits = torch.tensor([[1.5, -math.inf, -2.5, 30.0, math.nan, math.inf]] * 2)
    made = torch.tensor([[0, 3, 7, 1, 0, 2]] * 2, dtype=torch.int32)
    has = torch.tensor([[True, True, False, False, True, True]] * 2)
    nothing = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(penalized(logits, made, has, nothing), logits, rtol=0, atol=0, equal_nan=True)


def test_drafts_count_for_those_after_them() -> None:
    made = torch.tensor([[1, 0, 0, 2], [0, 0, 0, 0]], dtype=torch.int32)
    counts = counts_at(made, torch.tensor([[3, 0, 3], [2, 2, 2]]))
    assert counts.view(2, 4, 4).tolist() == [
        [[1, 0, 0, 2], [1, 0, 0, 3], [2, 0, 0, 3], [2, 0, 0, 4]],
        [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 3, 0]],
    ]
    assert made.tolist() == [[1, 0, 0, 2], [0, 0, 0, 0]]
    assert counts_at(made, None) is made


def test_extreme_penalties_stay_numbers() -> None:
    logits = 30 * torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).tanh()
    made, has = torch.ones(1, 40, dtype=torch.int32), torch.zeros(1, 40, dtype=torch.bool)
    for value in (5e-324, 1e-46, 1e300):
        penalties = torch.tensor(Sampling(repetition_penalty=value).penalties)[:, None]
        changed = penalized(logits, made, has, penalties)
        assert changed.isfinite().all()
        assert likeliest(changed) >= 0
        for sampling in (Sampling(1e-46, min_p=0.5), Sampling(1e300, min_p=1.0)):
            assert choose(changed, torch.tensor([3]), Parameters.of([sampling])) >= 0


# -- what cannot be


@pytest.mark.parametrize(("options", "message"), [
    ({"min_p": 1.1}, r"min_p 1.1 is not in \[0, 1\]"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": math.nan}, "min_p"),
    ({"presence_penalty": 2.1}, r"presence_penalty 2.1 is not in \[-2, 2\]"),
    ({"frequency_penalty": -3}, r"frequency_penalty -3 is not in \[-2, 2\]"),
    ({"frequency_penalty": math.nan}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty 0 is not a number above 0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"logit_bias": ((3, 101.0),)}, r"logit_bias 101.0 of token 3 is not in \[-100, 100\]"),
    ({"logit_bias": ((3, math.nan),)}, "logit_bias nan of token 3"),
    ({"logit_bias": ((3, 1.0), (3, 2.0))}, "names a token twice"),
    ({"min_tokens": -1}, "min_tokens -1 is negative"),
    ({"temperature": -1.0}, "temperature"), ({"top_k": -1}, "top_k"), ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
])  # fmt: skip
def test_impossible_sampling_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(("options", "message"), [
    ({"sampling": Sampling(logit_bias=((96, 1.0),))}, "token 96 of logit_bias is outside the vocabulary of 96"),
    ({"sampling": Sampling(logit_bias=((-1, 1.0),))}, "token -1 of logit_bias"),
    ({"sampling": Sampling(min_tokens=10)}, "min_tokens 10 is more than the 9 new tokens"),
    ({"sampling": Sampling(min_tokens=1), "stop_ids": range(96)}, "suppressed or end the answer before min_tokens"),
    ({"logprobs": 21}, "there are 0 to 20"),
    ({"logprobs": -1}, "there are 0 to 20"),
])  # fmt: skip
def test_impossible_requests_are_refused(model: Gemma4, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_for(model).submit(Request(prompt(4), 9, **options))


# -- sessions


TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def session() -> kerngen.Session:
    return kerngen.load(TINY / "gemma-4-tiny-w4a16", draft=TINY / "gemma-4-tiny-assistant", device="cpu")


def test_a_session_takes_all_of_it(session: kerngen.Session) -> None:
    question = "What is a warp?"
    plain = session.generate(question, max_new_tokens=20)
    assert plain.logprobs == []
    said = session.generate(question, max_new_tokens=20, logprobs=3)
    assert said.tokens == plain.tokens == [p.token for p in said.logprobs]
    assert all(p.top[0] == (p.token, p.logprob) for p in said.logprobs), "greedy takes the likeliest"
    sampling = Sampling(1.5, seed=3, repetition_penalty=2.5, min_p=0.02)
    one = session.generate(question, max_new_tokens=20, sampling=sampling)
    many = session.generate_many([question, "Why?"], max_new_tokens=20, sampling=sampling, logprobs=1)
    assert many[0].tokens == one.tokens != plain.tokens
    assert [p.token for p in many[1].logprobs] == many[1].tokens
    jobs = [Job(question, 20, sampling, logprobs=2), Job(question, 4, mask=Banning(plain.tokens[:2]))]
    outcomes: list[Any] = [outcome for _, outcome in Outcomes(session, jobs)]
    assert [p.token for p in outcomes[0].logprobs] == one.tokens
    assert not set(outcomes[1].tokens) & set(plain.tokens[:2])
    guided = session.generate(question, max_new_tokens=4, mask=Banning(plain.tokens[:2]))
    assert guided.tokens == outcomes[1].tokens
    with pytest.raises(UsageError, match="contradict"):
        session.generate(question, temperature=0.5, sampling=sampling)


class Banning:
    def __init__(self, banned: Sequence[int]) -> None:
        self.banned = banned

    def accept(self, token: int) -> None:
        assert token not in self.banned

    def fill(self, bits: NDArray[np.int32]) -> bool:
        bits.fill(-1)
        for token in self.banned:
            bits[token // 32] ^= np.array(1 << token % 32, np.uint32).view(np.int32)
        return True


def test_the_samplings_four_old_parameters_still_stand_alone(session: kerngen.Session) -> None:
    answer: Callable[..., Any] = session.generate
    old = answer("Why?", max_new_tokens=9, temperature=0.9, top_k=20, top_p=0.9, seed=5)
    assert old.tokens == answer("Why?", max_new_tokens=9, sampling=Sampling(0.9, 20, 0.9, 5)).tokens
