"""Many sequences at once give each the tokens that it has alone, whatever joins, leaves, waits or is preempted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_gemma import BASE, VARIANTS, WINDOW, load, load_assistant, make_assistant, make_target, prompt
from torch import Tensor

from kerngen.errors import NumericsError, UsageError
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import NO_DRAFTS, Arm
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Handle, Request, prefill_budget, prefill_graphs
from kerngen.runtime.engine.graphs import Captured, Graphs
from kerngen.runtime.engine.plan import SamplingMode, StepPlan
from kerngen.runtime.engine.prefill_graphs import OUTPUTS, PrefillGraphs, sizes_worth_padding
from kerngen.runtime.engine.request import Phase
from kerngen.runtime.engine.runner import StepOutput
from kerngen.runtime.engine.scheduler import window_pages
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Linear
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.fallbacks import GATHERED_ROWS
from kerngen.runtime.sampling import Sampling, cut_for
from kerngen.templates.values import AttnBatch, KVView

PAGE = 4
LENGTHS = (1, 2, 7, 8, 9, 13, 21, 30)  # prompts: around pages, around the window, and far beyond it
COUNTS = (1, 2, 9, 17, 12, 24, 5, 20)
REQUESTS = [Request(prompt(n, seed=i), c) for i, (n, c) in enumerate(zip(LENGTHS, COUNTS, strict=True))]
Models = dict[str, tuple[Gemma4, MtpDrafter]]
ALONE: dict[tuple[int, str], list[list[int]]] = {}  # models live as long as the module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root: Path = tmp_path_factory.mktemp("batches")
    made = {}
    for variant in VARIANTS:
        make_target(root / variant, variant)
        make_assistant(root / f"{variant}-assistant", variant, num_centroids=12 if variant == "shared_ple" else 0)
        model = load(root / variant)
        made[variant] = model, load_assistant(root / f"{variant}-assistant", model)
    return made


@pytest.fixture(scope="module")
def model(models: Models) -> Gemma4:
    return models["k_eq_v"][0]


def alone(model: Gemma4, requests: list[Request]) -> list[list[int]]:
    """Each request's tokens without anyone beside it, without drafts, in one chunk of prefill."""
    key = id(model), repr(requests)
    if key not in ALONE:
        engine = Engine(model, max_len=100, page_size=PAGE, prefix_caching=False)
        ALONE[key] = [g.tokens for r in requests for g in engine.generate_many([r])]
    return ALONE[key]


def engine_for(model: Gemma4, drafter: MtpDrafter | None = None, **options: Any) -> Engine:
    options = {"max_len": 60, "max_batch": 8, "page_size": PAGE, "num_draft_tokens": 3} | options
    return Engine(model, drafter, **options)


def tokens_of(engine: Engine, requests: list[Request]) -> list[list[int]]:
    return [g.tokens for g in engine.generate_many(requests)]


def assert_nothing_is_held(engine: Engine) -> None:
    assert not engine.has_work
    for pool in engine.pools.values():
        assert pool.num_available == pool.capacity
        assert not any(pool._holders)
        assert len(set(pool._free)) == len(pool._free)
        assert not set(pool._free) & set(pool._idle)
        assert set(pool._idle) <= set(pool._key_of)
    with torch.inference_mode():
        engine.runner.update(engine.scheduler.take_update())  # who has left since the last plan
    assert not engine.runner.ints[1:].any(), "a row that stands for nobody must be all zeros: it writes to page 0"
    assert not engine.cache.tables.any()


@contextmanager
def plans_of(engine: Engine, told: Callable[[StepPlan], object]) -> Iterator[None]:
    """Tell what the engine plans meanwhile, behind its forward."""
    run = engine.runner.run

    def noted(plan: StepPlan) -> StepOutput:
        output = run(plan)
        told(plan)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "run", noted)
        yield


def kind_of(plan: StepPlan) -> str:
    return "prefill" if plan.decode is None else "mixed" if plan.chunks else "decode"


class Oracle(MtpDrafter):
    """Drafts each row's right continuation, except where a coin says no: every acceptance length happens."""

    def __init__(self, drafter: MtpDrafter, known: dict[tuple[int, ...], list[int]], chance: float = 0.7) -> None:
        super().__init__(drafter.config, drafter.weights, drafter.target)
        self.known, self.chance = known, chance
        self.random = random.Random(0)
        self.engine: Engine | None = None

    def step(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, max_kv_len: int,
        kv_lens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = super().step(ids, hidden, lengths, cache, max_kv_len, kv_lens)
        assert y.isfinite().all(), "a draft saw a key that was let go"
        return y

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        real = super().propose(ids, hidden, lengths, cache, count, max_kv_len)
        for row, handle in enumerate(self.engine.scheduler.running):
            key = tuple(handle.request.prompt)
            at = int(lengths[row]) - len(key) + 1
            right = [*self.known[key], *[0] * (count + 1)][at : at + count]
            wrong = [self.random.random() > self.chance for _ in right]
            real[row] = torch.tensor([(t + w) % BASE["vocab_size"] for t, w in zip(right, wrong, strict=True)])
        return real


def oracle_for(drafter: MtpDrafter, requests: list[Request], expected: list[list[int]], chance: float = 0.7) -> Oracle:
    return Oracle(drafter, {tuple(r.prompt): t for r, t in zip(requests, expected, strict=True)}, chance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("buckets", [None, (3, 8)], ids=["exact", "padded"])
def test_a_ragged_batch_gives_each_its_own_tokens(models: Models, variant: str, buckets: Any) -> None:
    model, drafter = models[variant]
    expected = alone(model, REQUESTS)
    for chunk, drafts in ((5, 0), (64, 3)):
        engine = engine_for(model, drafter, prefill_chunk=chunk, num_draft_tokens=drafts, buckets=buckets)
        assert tokens_of(engine, REQUESTS) == expected
        assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("drafts", "async_depth"), [(k, k % 2) for k in range(8)] + [(3, 0), (2, 1), (None, 0), (None, 1)]
)
def test_drafts_of_every_length_change_no_token_of_a_batch(
    models: Models, drafts: int | None, async_depth: int
) -> None:
    model, drafter = models["k_eq_v"]
    expected = alone(model, REQUESTS)
    oracle = oracle_for(drafter, REQUESTS, expected)
    oracle.engine = engine = engine_for(
        model, oracle, num_draft_tokens=drafts, async_depth=async_depth, prefill_chunk=11
    )
    made = engine.generate_many(REQUESTS)
    assert [g.tokens for g in made] == expected
    assert_nothing_is_held(engine)
    if drafts and drafts > 1:
        accepted = [a for g in made for a in g.stats.accepted]
        assert 0 < sum(accepted) < sum(d for g in made for d in g.stats.drafted)


class Noting(Oracle):
    """Leaves the real drafts, and notes them by prompt and length."""

    def __init__(self, drafter: MtpDrafter) -> None:
        super().__init__(drafter, {})
        self.notes: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        drafts = MtpDrafter.propose(self, ids, hidden, lengths, cache, count, max_kv_len)
        for handle, length, row in zip(self.engine.scheduler.running, lengths.tolist(), drafts.tolist(), strict=False):
            if length < handle.limit - 1:  # beyond its end a row may draft anything
                self.notes[tuple(handle.request.prompt), length] = row
        return drafts


@pytest.mark.parametrize("async_depth", [0, 1])
def test_a_row_drafts_what_its_sequence_drafts_alone(models: Models, async_depth: int) -> None:
    """Rows move when others leave, with the hidden state that the next draft begins with."""
    model, drafter = models["dense"]
    notes = []
    for max_batch, late in ((1, 0), (8, async_depth)):
        noting = Noting(drafter)
        noting.engine = engine_for(model, noting, max_batch=max_batch, prefix_caching=False, async_depth=late)
        noting.engine.generate_many(REQUESTS)
        notes.append(noting.notes)
    assert len(notes[0]) > 40
    assert {key: notes[1][key] for key in notes[0]} == notes[0]


def test_the_host_reads_one_step_behind(model: Gemma4) -> None:
    engine = engine_for(model, async_depth=1)
    handle = engine.submit(Request(prompt(5), 9))
    known = []
    for _ in range(4):
        engine.step()
        known.append(len(handle.tokens))
    assert known == [1, 1, 2, 3], "the first token at once, and then each with the next step under way"
    assert engine.runner.ints[1, 0] == 5 + 3, "where the device is"


@pytest.mark.parametrize("chunk", [1, 3, PAGE, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_chunks_of_awkward_sizes_over_a_window_that_moves_on(model: Gemma4, chunk: int) -> None:
    """Chunks of several prompts in one forward, and what is let go behind the window overwritten at once."""
    engine = engine_for(model, prefill_chunk=chunk, prefix_caching=False)
    poison(engine)
    assert tokens_of(engine, REQUESTS) == alone(model, REQUESTS)
    assert_nothing_is_held(engine)


def poison(engine: Engine) -> None:
    """Make every page NaN that is let go and cannot be found: if it were read again, so would be the tokens."""
    for kind, pool in engine.pools.items():
        layers = [layer for layer in engine.model.config.layers if layer.kind == kind and layer.owns_kv]

        def release(pages: Any, pool: Any = pool, layers: Any = layers, real: Any = pool.release) -> None:
            pages = list(pages)
            real(pages)
            for page in pages:
                if pool.is_idle(page) and page not in pool._key_of:
                    for layer in layers:
                        engine.cache.pages(layer).k_cache[page] = float("nan")
                        engine.cache.pages(layer).v_cache[page] = float("nan")

        pool.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize("variant", ["dense", "shared_ple"])
def test_no_page_that_was_let_go_is_read_by_drafts_either(models: Models, variant: str) -> None:
    """Rejected drafts go back, and the drafter's windows are one key wider."""
    model, drafter = models[variant]
    expected = alone(model, REQUESTS)
    oracle = oracle_for(drafter, REQUESTS, expected, chance=0.5)
    oracle.engine = engine = engine_for(model, oracle, prefix_caching=False, num_draft_tokens=7, prefill_chunk=3)
    poison(engine)
    assert tokens_of(engine, REQUESTS) == expected


def test_the_sliding_layers_hold_a_window_and_not_the_chunk(model: Gemma4) -> None:
    engine = engine_for(model, max_len=400, max_batch=1, prefill_chunk=16)
    handle = engine.submit(Request(prompt(300), 60))
    most = window_pages(WINDOW, engine.shape.step, PAGE)
    assert most < 8
    while not handle.is_done:
        engine.step()
        assert sum(page > 0 for page in handle.pages["sliding"]) <= most
    assert engine.pools["sliding"].capacity <= most + 16 // PAGE


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 20, 0.95, 5)], ids=["greedy", "sampled"])
def test_preemption_changes_no_token(models: Models, drafts: int, sampling: Sampling) -> None:
    """Pages for two requests, four of them: some are sent back, more than once, and begin again."""
    model, drafter = models["dense"]
    requests = [Request(prompt(9 + i, seed=i), 20, sampling) for i in range(4)]
    expected = alone(model, requests)
    for caching in (False, True):
        engine = engine_for(model, drafter, num_draft_tokens=drafts, prefill_chunk=8, prefix_caching=caching,
                            num_pages={"full": 16, "sliding": 22})  # fmt: skip
        made = engine.generate_many(requests)
        assert [g.tokens for g in made] == expected
        assert engine.load.num_preemptions == sum(g.stats.num_preemptions for g in made) >= 2
        assert made[0].stats.num_preemptions == 0, "who came first is never sent back"
        assert_nothing_is_held(engine)


def test_a_request_that_cannot_fit_alone_is_refused_with_the_numbers(model: Gemma4) -> None:
    engine = engine_for(model, num_pages={"full": 6, "sliding": 12})
    with pytest.raises(UsageError, match=r"18 .* 3 .* 6 pages of 4 tokens.*full"):
        engine.submit(Request(prompt(18), 3))
    assert len(engine.generate_many([Request(prompt(18), 2)])[0].tokens) == 2


def test_cancelling_frees_at_once_wherever_a_request_is(models: Models) -> None:
    model, drafter = models["dense"]
    requests = [Request(prompt(30, seed=i), 20) for i in range(4)]
    expected = alone(model, requests)
    for steps in (0, 1, 2, 3, 6, 9):
        engine = engine_for(model, drafter, max_batch=3, prefill_chunk=16, async_depth=steps % 2, prefix_caching=False)
        handles = [engine.submit(r) for r in requests]
        for _ in range(steps):
            engine.step()
        for handle in handles[::2]:
            held = {kind: sum(p > 0 for p in handle.pages[kind]) for kind in engine.pools}
            before = {kind: pool.num_available for kind, pool in engine.pools.items()}
            engine.cancel(handle)
            assert engine.load.free_pages == {kind: before[kind] + held[kind] for kind in held}
            assert {k: p.num_available - before[k] for k, p in engine.pools.items()} == held
            assert handle.stop_reason == "cancelled"
        while engine.has_work:
            engine.step()
        assert [h.tokens for h in handles[1::2]] == expected[1::2]
        assert all(h.tokens == e[: len(h.tokens)] for h, e in zip(handles, expected, strict=True))
        assert_nothing_is_held(engine)


def test_a_callback_ends_its_request_or_another(model: Gemma4) -> None:
    expected = alone(model, REQUESTS[5:6])[0]
    told: list[int] = []

    def third(token: int) -> bool:
        told.append(token)
        return len(told) == 3

    engine = engine_for(model)
    other: list[Handle] = []

    def stop_other(token: int) -> bool:
        engine.cancel(other[0])
        return False

    handle = engine.submit(Request(REQUESTS[5].prompt, 24, stops=third))
    canceller = engine.submit(Request(prompt(4), 3, stops=stop_other))
    other.append(engine.submit(Request(prompt(5), 20)))
    while engine.has_work:
        engine.step()
    assert (handle.tokens, handle.stop_reason, told) == (expected[:3], "stop", expected[:3])
    assert canceller.stop_reason == "length"
    assert other[0].stop_reason == "cancelled"
    assert len(other[0].tokens) < 20
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("async_depth", [0, 1])
def test_what_interrupts_a_step_costs_no_token(
    models: Models, monkeypatch: pytest.MonkeyPatch, async_depth: int
) -> None:
    """Ctrl-C wherever it comes, and a callback that raises: the others go on, and no page is lost."""
    model, drafter = models["dense"]
    expected = alone(model, REQUESTS)
    engine = engine_for(model, drafter, async_depth=async_depth, prefill_chunk=13)
    forward, calls = Gemma4.forward, 0

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        hidden = forward(*args, **kwargs)
        if calls % 4 == 3 and calls < 20:
            raise KeyboardInterrupt
        return hidden

    def raising(token: int) -> bool:
        raise ZeroDivisionError

    handles = [engine.submit(r) for r in REQUESTS]
    bad = engine.submit(Request(prompt(6), 4, stops=raising))
    raised = []
    with monkeypatch.context() as patch:
        patch.setattr(Gemma4, "forward", interrupted)
        while engine.has_work:
            try:
                engine.step()
            except (KeyboardInterrupt, ZeroDivisionError) as e:
                raised.append(type(e))
    assert raised.count(KeyboardInterrupt) == 5
    assert raised.count(ZeroDivisionError) == 1
    assert [h.tokens for h in handles] == expected
    assert (bad.tokens, bad.stop_reason) == ([], "cancelled")
    assert_nothing_is_held(engine)


SHARED = prompt(5 * WINDOW + 1, seed=50)


@pytest.mark.parametrize("variant", ["dense", "shared_ple"])
@pytest.mark.parametrize("length", [3, PAGE, PAGE + 1, WINDOW + PAGE, 3 * WINDOW, len(SHARED)])
def test_a_prefix_that_is_found_changes_no_token(models: Models, variant: str, length: int) -> None:
    model, drafter = models[variant]
    first = Request([*SHARED[:length], *prompt(9, seed=1)[1:]], 12)
    second = Request([*SHARED[:length], *prompt(7, seed=2)[1:]], 12)
    expected = alone(model, [first, second])
    engine = engine_for(model, drafter, max_len=80, prefill_chunk=PAGE)
    for request, tokens in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
        made = engine.generate_many([request])[0]
        assert made.tokens == tokens
        if request is second:
            assert made.stats.num_cached_tokens == length // PAGE * PAGE
    assert made.stats.num_cached_tokens == (len(first.prompt) - 1) // PAGE * PAGE
    assert_nothing_is_held(engine)


def test_a_page_is_found_only_behind_what_it_was_computed_behind(model: Gemma4) -> None:
    """The same tokens at the same place after another beginning are another page."""
    p, q, x, y = (prompt(2 * PAGE, seed=i) for i in range(70, 74))
    requests = [Request([*a, *b, 5], 8) for a, b in ((p, x), (q, y), (q, x))]
    engine = engine_for(model)
    assert [engine.generate_many([r])[0].tokens for r in requests] == alone(model, requests)
    assert engine.generate_many(requests[2:])[0].stats.num_cached_tokens == 4 * PAGE


def test_a_prefix_is_shared_while_others_use_it(model: Gemma4) -> None:
    """Also the pages of generated tokens, as the next turn of a chat has them in its prompt."""
    requests = [Request([*SHARED, *prompt(3 + i, seed=i)[1:]], 8) for i in range(6)]
    expected = alone(model, requests)
    engine = engine_for(model, max_len=80, max_batch=6)
    first = engine.submit(requests[0])
    while not first.tokens:
        engine.step()
    rest = [engine.submit(r) for r in requests[1:]]
    engine.step()
    common = len(SHARED) // PAGE
    assert all(h.pages["full"][:common] == first.pages["full"][:common] for h in rest)
    while engine.has_work:
        engine.step()
    assert [h.tokens for h in (first, *rest)] == expected
    turn = Request([*requests[0].prompt, *expected[0], 7, 8], 8)
    again = engine.generate_many([turn])[0]
    assert again.tokens == alone(model, [turn])[0]
    assert again.stats.num_cached_tokens == (len(turn.prompt) - 3) // PAGE * PAGE
    assert_nothing_is_held(engine)


def test_a_prefix_without_its_sliding_pages_is_no_prefix(model: Gemma4) -> None:
    """They are fewer and sooner taken for something else: a shorter prefix is found, or none, and never a wrong one."""
    request = Request([*SHARED, *prompt(4, seed=3)[1:]], 8)
    expected = alone(model, [request])[0]
    found = []
    for num_lost in (0, 2, 5, 8, 11, 15):
        engine = engine_for(model, max_len=80, prefill_chunk=PAGE)
        engine.generate_many([request])
        sliding = engine.pools["sliding"]
        order = list(sliding._idle)
        for page in order[:num_lost]:  # those that would be taken first
            del sliding._idle[page]
            sliding._forget(page)
            sliding._free.append(page)
        made = engine.generate_many([request])[0]
        assert made.tokens == expected
        found.append(made.stats.num_cached_tokens)
    most = (len(request.prompt) - 1) // PAGE * PAGE
    assert found[0] == most
    assert found[-1] == 0
    assert len(set(found)) > 1


def test_a_request_that_breaks_breaks_alone(models: Models) -> None:
    """NaN in one sequence's cache is its error; the others go on, and nobody finds its pages later."""
    model, _ = models["dense"]
    requests = [Request(prompt(12, seed=i), 16) for i in range(3)]
    expected = alone(model, requests)
    engine = engine_for(model)
    handles = [engine.submit(r) for r in requests]
    for _ in range(3):
        engine.step()
    layer = model.config.donor("full")
    engine.cache.pages(layer).v_cache[handles[1].pages["full"][0]] = float("nan")
    while engine.has_work:
        engine.step()
    assert isinstance(handles[1].error, NumericsError)
    assert handles[1].stop_reason == "error"
    assert handles[1].tokens == expected[1][: len(handles[1].tokens)]
    assert [handles[0].tokens, handles[2].tokens] == [expected[0], expected[2]]
    assert_nothing_is_held(engine)
    assert tokens_of(engine, requests) == expected


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_cancellations_and_preemptions(models: Models, seed: int) -> None:
    """Whatever happens, each has the tokens that it has alone, and no page is lost."""
    draw = random.Random(seed)
    variant = draw.choice(list(VARIANTS))
    model, drafter = models[variant]
    requests = []
    for i in range(14):
        start = SHARED[: draw.choice((0, 0, 11, 25))]
        sampling = draw.choice((Sampling(), Sampling(0.9, 30, 0.9, i)))
        requests.append(Request([*start, *prompt(draw.randint(1, 20), seed=i)], draw.randint(1, 20), sampling))
    expected = alone(model, requests)
    oracle = oracle_for(drafter, requests, expected)
    engine = engine_for(
        model, oracle, max_len=70, max_batch=draw.randint(2, 5), num_draft_tokens=draw.choice((None, 0, 2, 5, 7)),
        prefill_chunk=draw.randint(3, 40), num_pages={"full": draw.randint(19, 40), "sliding": draw.randint(22, 40)},
        buckets=draw.choice((None, (2, 5))), async_depth=draw.randint(0, 1), prefix_caching=draw.random() < 0.8,
        mixed_batches=draw.random() < 0.5,
    )  # fmt: skip
    oracle.engine = engine
    waiting, handles = list(enumerate(requests)), {}
    cancelled = set()
    while waiting or engine.has_work:
        while waiting and draw.random() < 0.4:
            i, request = waiting.pop(0)
            handles[i] = engine.submit(request)
        for event in engine.step():
            assert event.handle.tokens[len(event.handle.tokens) - len(event.tokens) :] == event.tokens
        live = [i for i, h in handles.items() if not h.is_done]
        if live and draw.random() < 0.05:
            cancelled.add(i := draw.choice(live))
            engine.cancel(handles[i])
    for i, handle in handles.items():
        assert handle.phase is Phase.DONE
        assert handle.tokens == expected[i][: len(handle.tokens)], f"request {i} of seed {seed} on {variant}"
        assert (i in cancelled) or len(handle.tokens) == len(expected[i])
    assert_nothing_is_held(engine)


class Graphless:
    """What stands for torch.cuda's graphs and streams on a machine without: a replay runs the step again.

    As a capture does, it leaves what the step would have written alone.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner, self.num_captured, self.num_replayed = engine.runner, 0, 0
        self.asked = self.most_tokens = 0  # tokens of a step, and of one that is captured
        stream = SimpleNamespace(wait_stream=lambda other: None)
        self.captured, self.step = Graphs.capture, engine.runner.step
        monkeypatch.setattr(Graphs, "capture", lambda graphs, run, written: self.noted(graphs, run, written))
        monkeypatch.setattr(engine.runner, "step", self.sized)
        monkeypatch.setattr(engine.runner.model.ops, "supports_graphs", True, raising=False)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda s: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None, pool=lambda: "pool"))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    def sized(self, batch: int, arm: Arm, *args: Any) -> Tensor:
        self.asked = batch * (arm.length + 1)
        return self.step(batch, arm, *args)

    def noted(self, graphs: Graphs, run: Callable[[], Tensor], written: Sequence[Tensor]) -> Captured:
        graph, result = self.captured(graphs, run, written)
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            for left, made in zip(*([r] if isinstance(r, Tensor) else r for r in (result, run())), strict=True):
                left.copy_(made)

        graph.replay = replay  # type: ignore[method-assign]
        return graph, result

    @contextmanager
    def capture(self, graph: Any, pool: Any) -> Iterator[None]:
        assert pool == ("pool" if self.num_captured else None)
        saved, self.asked = [(tensor, tensor.clone()) for tensor in self.runner.written], 0
        yield
        self.most_tokens = max(self.most_tokens, self.asked)
        for tensor, was in saved:
            tensor.copy_(was)


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_that_are_captured_when_first_needed(
    models: Models, monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """One graph for each size of batch, way to choose and context; capturing changes no row, whoever runs meanwhile."""
    model, drafter = models["shared_ple"]
    requests = [Request(r.prompt, r.max_new_tokens, Sampling(0.8, 9, seed=i) if i % 3 == 2 else Sampling())
                for i, r in enumerate(REQUESTS)]  # fmt: skip
    expected = alone(model, requests)
    oracle = oracle_for(drafter, requests, expected)
    with monkeypatch.context() as patch:
        oracle.engine = engine = engine_for(model, oracle, num_draft_tokens=drafts, prefill_chunk=9,
                                            buckets=(1, 2, 4, 8), async_depth=1)  # fmt: skip
        graphs = Graphless(engine, patch)
        assert tokens_of(engine, requests) == expected
        once = graphs.num_captured
        assert 3 <= once <= 8 < graphs.num_replayed
        assert tokens_of(engine, requests) == expected
        assert graphs.num_captured <= once + 2, "what was captured once is replayed"


def test_who_decodes_does_not_wait_for_a_capture(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the longest contexts, greedy and as usual, are there before anybody asks. For shorter ones one sequence
    waits for a step of its own, several go on with those.
    """
    model, _ = models["dense"]
    usual = Sampling(0.8, 9, seed=1)
    requests = [Request(r.prompt, 6, usual if i % 2 else Sampling()) for i, r in enumerate(REQUESTS[:5])]
    expected = alone(model, requests)
    engine = engine_for(model, max_len=1000, buckets=(1, 2, 4, 8), async_depth=1)
    graphs = Graphless(engine, monkeypatch)
    engine.make_ready(usual=usual)
    ready, longest = graphs.num_captured, engine.runner.max_kv_len
    assert {key[0] for key in engine.runner._steps} == {1, 2, 4, 8}
    assert {key[2] for key in engine.runner._steps} == {
        SamplingMode(),
        SamplingMode(sampled=True, cut=cut_for([usual])),
    }
    assert {key[3] for key in engine.runner._steps} == {longest}
    assert tokens_of(engine, requests) == expected
    fresh = [key for key in engine.runner._steps if key[3] != longest]
    assert all(key[0] == 1 for key in fresh)
    assert graphs.num_captured == ready + len(fresh)
    assert tokens_of(engine, requests[:1]) == expected[:1]
    assert (1, NO_DRAFTS, SamplingMode(), engine.runner.least_kv_len) in engine.runner._steps


@pytest.mark.parametrize("variant", ["dense", "moe", "shared_ple"])
def test_short_prefills_that_were_captured(models: Models, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Chunks of one prompt and of several, filled up to a graph's size: each gets the tokens that it has alone, and
    nothing is captured once requests come.
    """
    model, drafter = models[variant]
    expected = alone(model, REQUESTS)
    monkeypatch.setattr(prefill_graphs, "SIZES", (4, 6, 16))
    engine = engine_for(model, drafter, num_draft_tokens=2, prefill_chunk=12, buckets=(1, 2, 4, 8), async_depth=1,
                        prefix_caching=False)  # fmt: skip
    graphs, ran = Graphless(engine, monkeypatch), Counter[tuple[int, str]]()
    plain = PrefillGraphs.forward

    def counted(short: PrefillGraphs, size: int, outputs: str, has_media: bool) -> Tensor:
        assert not has_media, "of a model of text alone"
        ran[size, outputs] += 1
        return plain(short, size, outputs, has_media)

    monkeypatch.setattr(PrefillGraphs, "forward", counted)
    engine.make_ready()
    engine.runner.prefill_graphs.padded = None  # whatever this machine's clock says
    sizes = [size for size in (4, 6, 16) if engine.runner.captures(size)]
    assert {key for key, count in ran.items() if count >= 3} == {(size, o) for size in sizes for o in OUTPUTS}
    ran.clear()
    once = graphs.num_captured
    assert tokens_of(engine, REQUESTS) == expected
    assert_nothing_is_held(engine)
    assert [tokens_of(engine, [request])[0] for request in REQUESTS] == expected
    assert set(ran) == {(size, "last") for size in sizes} | ({(16, "none")} & {(size, "none") for size in sizes})
    usual = [key for key in engine.runner._steps if key[3] < engine.runner.max_kv_len]
    assert graphs.num_captured == once + len(usual), "steps of shorter contexts alone"


class PrefillClock:
    """A clock that prefills alone move: the device takes 1 ms a token, and the host host_ms for an eager forward.

    ran: of each prefill its graph's size, 0 for none, and its tokens.
    """

    def __init__(self, engine: Engine, host_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
        runner, self.now, self.ran = engine.runner, 0.0, list[tuple[int, int]]()
        chunks, replayed = runner.chunks, runner.prefill_graphs.run

        def eager(ids: Sequence[int], *args: Any) -> Any:
            self.ran.append((0, len(ids)))
            self.now += 1e-3 * max(host_ms, len(ids))
            return chunks(ids, *args)

        def graph(ids: Sequence[int], starts: Any, sizes: Any, tables: Tensor, size: int, *args: Any) -> Any:
            found = replayed(ids, starts, sizes, tables, size, *args)
            if found is not None:
                self.ran.append((size, len(ids)))
                self.now += 1e-3 * size
            return found

        monkeypatch.setattr(runner, "chunks", eager)
        monkeypatch.setattr(runner.prefill_graphs, "run", graph)
        monkeypatch.setattr(runner, "_now", lambda: self.now)


def timed_engine(
    model: Gemma4, host_ms: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Engine, PrefillClock]:
    """An engine with graphs of 4, 8 and 16 tokens that is not ready yet, and its clock."""
    monkeypatch.setattr(prefill_graphs, "SIZES", (4, 8, 16))
    engine = engine_for(model, num_draft_tokens=0, prefill_chunk=16, buckets=(1,), async_depth=1, max_batch=1,
                        prefix_caching=False, **options)  # fmt: skip
    Graphless(engine, monkeypatch)
    return engine, PrefillClock(engine, host_ms, monkeypatch)


PADDED_TO = {0: (), 3: (), 5: (4,), 7: (4,), 8: (4, 8), 15: (4, 8), 16: (4, 8, 16), 40: (4, 8, 16)}


@pytest.mark.parametrize("host_ms", PADDED_TO)
def test_a_prefill_runs_as_what_took_less(models: Models, monkeypatch: pytest.MonkeyPatch, host_ms: int) -> None:
    """Padded where the host is slow, eagerly where it is quick; a graph of a prefill's own length in any case."""
    model, _ = models["dense"]
    lengths = range(1, 17)
    requests = [Request(prompt(n, seed=n), 2) for n in lengths]
    expected = alone(model, requests)
    engine, clock = timed_engine(model, host_ms, monkeypatch)
    engine.make_ready()
    assert engine.runner.prefill_graphs.padded == set(PADDED_TO[host_ms])
    clock.ran.clear()
    assert tokens_of(engine, requests) == expected
    larger = [next(size for size in (4, 8, 16) if size >= n) for n in lengths]
    assert clock.ran == [
        (size if size == n or size in PADDED_TO[host_ms] else 0, n) for n, size in zip(lengths, larger, strict=True)
    ]
    clock.ran.clear()
    engine.generate_many([Request(prompt(3), 1, prompt_logprobs=1)])
    assert clock.ran == [(0, 3)], "no graph has the states of all tokens"


def test_a_follower_runs_what_rank_0_has_timed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clock says otherwise, and is not asked."""
    model, _ = models["dense"]
    plans: list[StepPlan] = []
    with monkeypatch.context() as patch:
        leader, led = timed_engine(model, 7, patch)
        with plans_of(leader, plans.append):
            leader.make_ready()
            tokens_of(leader, [Request(prompt(n, seed=n), 1) for n in range(1, 17)])
    assert {(4, 3), (0, 6), (8, 8), (0, 12)} < set(led.ran)
    follower, followed = timed_engine(model, 40, monkeypatch)
    follower.prepare()
    assert not followed.ran
    with torch.inference_mode():
        for plan in plans:
            follower.runner.run(StepPlan.from_json(plan.to_json(), follower.runner.limits))
    assert followed.ran == led.ran


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_who_has_no_graphs_times_nothing(
    models: Models, monkeypatch: pytest.MonkeyPatch, is_reproducible: bool
) -> None:
    """A reproducible engine asks no clock: its prefills are eager. So are those of a backend without graphs."""
    model, _ = models["dense"]
    if is_reproducible:
        engine, clock = timed_engine(model, 40, monkeypatch, reproducible=True)
    else:
        engine = engine_for(model, num_draft_tokens=0, prefill_chunk=16, max_batch=1)
        clock = PrefillClock(engine, 40, monkeypatch)
    engine.make_ready()
    assert not clock.ran
    tokens_of(engine, [Request(prompt(n, seed=n), 2) for n in (3, 4, 12)])
    assert clock.ran == [(0, 3), (0, 4), (0, 12)]


@pytest.mark.parametrize("scale", [0.01, 0.1, 1, 10, 100])
def test_eager_forwards_are_timed_for_a_bounded_time(scale: float) -> None:
    """Those that there is time for, where a graph says how much they take. Nothing is padded to the others."""
    graphs = [(size, scale * 1e-4 * size) for size in prefill_graphs.SIZES]
    spent = [0.0]

    def eager(tokens: int) -> list[float]:
        times = [scale * 1e-4 * tokens] * prefill_graphs.TIMED_RUNS
        spent.append(sum(times))
        return times

    assert sizes_worth_padding(graphs, eager, 2048) == frozenset()
    assert sum(spent) <= prefill_graphs.MOST_EAGER_S
    assert len(spent) - 1 == {0.01: 8, 0.1: 8, 1: 6, 10: 1, 100: 0}[scale]


def test_what_was_timed_of_fewer_tokens_is_not_timed_again() -> None:
    """The graphs are the 26B-A4B's on an H200, where 192 tokens take less than 128."""
    graphs = [(64, 3.8e-3), (128, 6.7e-3), (192, 5.0e-3), (512, 8.5e-3)]
    asked: list[int] = []

    def padded(host_s: float, longest: int = 2048) -> frozenset[int]:
        asked.clear()
        return sizes_worth_padding(graphs, lambda tokens: (asked.append(tokens), [2 * host_s, host_s])[1], longest)

    assert (padded(14.2e-3), asked) == ({64, 128, 192, 512}, [32])
    assert (padded(6e-3), asked) == ({64, 192}, [32, 96, 352])
    assert (padded(6e-3, 100), asked) == ({64, 192}, [32, 82]), "no prefill is longer"


@pytest.mark.parametrize("variant", ["dense", "k_eq_v", "moe"])
@pytest.mark.parametrize("async_depth", [0, 1])
def test_who_decodes_joins_a_prefill(models: Models, variant: str, async_depth: int) -> None:
    """One forward for both: each has the tokens that it has alone, and no weights are read by a decode step beside."""
    model, _ = models[variant]
    expected = alone(model, REQUESTS)
    engine = engine_for(model, prefill_chunk=9, async_depth=async_depth, num_pages={"full": 40, "sliding": 50})
    assert tokens_of(engine, REQUESTS[2:3]) == expected[2:3]  # what a step takes that only decodes
    ran = Counter[str]()
    with plans_of(engine, lambda plan: ran.update([kind_of(plan)])):
        assert tokens_of(engine, REQUESTS) == expected
    assert ran["mixed"] > 4
    assert ran["prefill"] <= 2, "only while nobody decodes"
    assert_nothing_is_held(engine)
    assert tokens_of(engine, REQUESTS[::-1]) == expected[::-1]


def test_mixed_steps_that_were_captured(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled up to what was captured, in rows and in tokens; nothing is captured once requests come."""
    model, _ = models["k_eq_v"]
    expected = alone(model, REQUESTS)
    monkeypatch.setattr(prefill_graphs, "SIZES", (4, 8, 16))
    monkeypatch.setattr(prefill_budget, "MULTIPLE", 4)
    engine = engine_for(model, prefill_chunk=16, buckets=(1, 2, 3, 4, 6, 8), async_depth=1, prefix_caching=False)
    graphs, ran = Graphless(engine, monkeypatch), Counter[tuple[int, int]]()
    engine.make_ready()
    captured = engine.runner.mixed_graphs
    assert {(s.size, s.batch) for s in captured._captured} == {(8, 3), (16, 3), (16, 8)}
    plain = captured.replay
    monkeypatch.setattr(captured, "replay", lambda s: (ran.update([(s.size, s.batch)]), plain(s))[1])
    once = graphs.num_captured
    assert tokens_of(engine, REQUESTS) == expected
    assert {batch for _, batch in ran} == {3, 8}
    usual = [key for key in engine.runner._steps if key[3] < engine.runner.max_kv_len]
    assert graphs.num_captured == once + len(usual), "steps of shorter contexts alone"
    assert_nothing_is_held(engine)


def test_what_only_decodes_is_timed_before_anybody_joins(models: Models) -> None:
    """Gaps are measured against it, and drafts: where somebody is prefilled at each step, too."""
    model, drafter = models["dense"]
    requests = [Request(prompt(30, seed=i), 6) for i in range(20)]
    for engine in (
        engine_for(model, prefill_chunk=5),
        engine_for(model, drafter, prefill_chunk=5, num_draft_tokens=None),
    ):
        ran: list[str] = []
        with plans_of(engine, lambda plan, ran=ran: ran.append(kind_of(plan))):
            assert tokens_of(engine, requests) == alone(model, requests)
        assert next(kind for kind in ran if kind != "prefill") == "decode"
        assert "mixed" in ran
        assert engine._budget.knows_decode
        timed = [bucket for bucket, timings in engine._lengths._timings.items() if NO_DRAFTS in timings.seconds]
        assert all(map(engine._lengths.knows_plain, timed))
    tried = [arm for timings in engine._lengths._timings.values() for arm in timings.seconds]
    assert any(arm.length for arm in tried), "drafts were tried"


def test_a_mixed_step_has_no_more_chunks_than_were_captured(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many short prompts some wait for the next step, rather than all for a forward that is handed in."""
    model, _ = models["k_eq_v"]
    requests = [Request(prompt(2, seed=i), 20 if i == 0 else 4) for i in range(7)]
    expected = alone(model, requests)
    monkeypatch.setattr(prefill_graphs, "SIZES", (16, 32))
    engine = engine_for(model, prefill_chunk=32, buckets=(8,), async_depth=1, prefix_caching=False)
    Graphless(engine, monkeypatch)
    engine.make_ready()
    handles = [engine.submit(requests[0])]
    while len(handles[0].tokens) < 4:
        engine.step()
    handles += [engine.submit(request) for request in requests[1:]]
    planned: list[StepPlan] = []
    with plans_of(engine, planned.append):
        while engine.has_work:
            engine.step()
    assert [h.tokens for h in handles] == expected
    mixed = [(len(plan.chunks), plan.num_tokens) for plan in planned if kind_of(plan) == "mixed"]
    assert mixed == [(3, 16), (3, 16)], "forwards of 16 tokens, filled up"


def test_a_layer_with_an_input_of_its_own_joins_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all layers own their K and V: of no released model."""
    monkeypatch.setitem(VARIANTS, "ple", {"hidden_size_per_layer_input": 16})
    make_target(tmp_path / "ple", "ple")
    model = load(tmp_path / "ple")
    assert not model.supports_mixed
    assert tokens_of(engine_for(model, prefill_chunk=9), REQUESTS) == alone(model, REQUESTS)


NEVER: tuple[dict[str, Any], ...] = ({"max_batch": 1}, {"num_draft_tokens": 2}, {"reproducible": True})


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": None}, *NEVER], ids=str)
def test_who_could_never_join_captures_nothing_for_it(models: Models, options: dict[str, Any]) -> None:
    model, drafter = models["dense"]
    assert engine_for(model, drafter, **{"num_draft_tokens": 0, **options})._mixes is (options not in NEVER)


def test_who_is_drafted_for_joins_nobody(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a model whose last layers see what others wrote, nor a prompt whose tokens are weighed."""
    for variant, options in (("dense", {"num_draft_tokens": 2}), ("shared_ple", {"num_draft_tokens": 0})):
        model, drafter = models[variant]
        engine = engine_for(model, drafter, prefill_chunk=9, **options)
        monkeypatch.setattr(engine.runner, "mixed_step", None)
        assert tokens_of(engine, REQUESTS) == alone(model, REQUESTS)
    model, _ = models["dense"]
    weighed = [replace(r, prompt_logprobs=2) for r in REQUESTS]
    engine = engine_for(model, prefill_chunk=9)
    handles = [engine.submit(request) for request in weighed]
    while engine.has_work:
        engine.step()
    assert [h.tokens for h in handles] == alone(model, REQUESTS)
    assert [len(h.prompt_logprobs) for h in handles] == [len(r.prompt) - 1 for r in REQUESTS]


class Fickle(TorchOps):
    """Rounds otherwise for every number of tokens and of sequences, for every limit of context and, unless told not to,
    in every row, as kernels may.
    """

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        out = super().linear(x, weights) * (1 + 0.01 * (len(x) % 7))
        if not self.row_invariant:
            out[:, ::2] *= 1 + 0.01 * (torch.arange(len(x)) % 3)[:, None]
        return out

    def attn_decode(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        return super().attn_decode(q, kv, batch) * (1 + 0.01 * (len(batch.kv_lens) % 5))

    def attn_prefill(self, q: Tensor, kv: KVView, batch: AttnBatch) -> Tensor:
        more = 0.01 * (batch.max_seqlen_q % 5) + 0.02 * len(batch.kv_lens)
        return super().attn_prefill(q, kv, batch) * (1 + more)


@pytest.mark.parametrize(("drafts", "async_depth"), [(0, 0), (3, 1)])
def test_what_is_reproducible_does_not_depend_on_company(models: Models, drafts: int, async_depth: int) -> None:
    """Kernels whose rounding depends on shapes: alone, together, preempted, interrupted, the tokens are the same."""
    model, drafter = models["dense"]
    ops = Fickle(model.ops.device, torch.float32)
    held = [(holder, holder.ops) for holder in (model, model.stack, drafter, drafter.stack)]
    try:
        for holder, _ in held:
            holder.ops = ops
        options = {"num_draft_tokens": drafts, "prefill_chunk": 8, "max_batch": 5, "reproducible": True}
        requests = [Request(prompt(7 + 3 * i, seed=i), 20) for i in range(7)]
        single = engine_for(model, drafter, **options)
        expected = [single.generate_many([r])[0].tokens for r in requests]
        careless = engine_for(model, drafter, **(options | {"reproducible": False}))
        assert tokens_of(careless, requests) != expected, "the kernels must be fickle enough"
        engine = engine_for(model, drafter, async_depth=async_depth, num_pages={"full": 24, "sliding": 40}, **options)
        made = engine.generate_many(requests)
        assert [g.tokens for g in made] == expected
        assert sum(g.stats.num_preemptions for g in made) > 0
        handles = [engine.submit(r) for r in requests]
        for _ in range(6):
            engine.step()
        engine.scheduler.restart()
        while engine.has_work:
            engine.step()
        assert [h.tokens for h in handles] == expected
        assert_nothing_is_held(engine)
        with pytest.raises(UsageError, match="adapts"):
            engine_for(model, drafter, num_draft_tokens=None, reproducible=True)
    finally:
        for holder, was in held:
            holder.ops = was


def test_a_step_whose_experts_wait_for_the_host_is_not_captured(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense experts of more rows than are gathered: such a step runs as it is, smaller ones as graphs."""
    model, drafter = models["moe"]
    most = GATHERED_ROWS // model.config.top_k_experts
    expected = alone(model, REQUESTS)
    with monkeypatch.context() as patch:
        engine = engine_for(model, drafter, num_draft_tokens=3, buckets=(1, 2, 4, 8), async_depth=1)
        graphs = Graphless(engine, patch)
        assert tokens_of(engine, REQUESTS) == expected
    assert 0 < graphs.most_tokens <= most < 8 * 4
