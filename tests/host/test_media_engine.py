"""Images and sounds in the engine, against transformers, with the embeddings that towers would give handed in."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_sessions import opens_with_media
from test_engine_batches import Graphless, assert_nothing_is_held
from test_step_plan import Recorded
from tiny_gemma import BASE, load_assistant, make_assistant
from tiny_media import (
    HIDDEN,
    PLACEHOLDERS,
    VISION,
    Towers,
    hf_greedy,
    hf_logits,
    hf_logits_of_pixels,
    interleaved,
    item,
    load,
    make_model,
    make_with_vision,
)
from tiny_towers import media_config, towers
from torch import Tensor
from transformers import Gemma4ForConditionalGeneration

from kerngen.errors import KerngenError, UsageError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import NO_DRAFTS, read_model_config
from kerngen.runtime.drafting import MtpDrafter
from kerngen.runtime.engine import Engine, Handle, Request, prefill_budget, prefill_graphs
from kerngen.runtime.engine.media_cache import MediaCache
from kerngen.runtime.engine.pages import page_keys
from kerngen.runtime.engine.plan import SAME_MEDIA, StepPlan
from kerngen.runtime.engine.planning import prefill_chunk
from kerngen.runtime.engine.runner import StepOutput
from kerngen.runtime.engine.scheduler import Chunk
from kerngen.runtime.engine.warmup import warm_up
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.media.input import Block, MediaInput
from kerngen.runtime.media.values import Media, Placed
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import CACHE_SHARE
from kerngen.runtime.weights.loader import load_model

PAGE = 4
LONG = item(24, 1)  # longer than the window
CASES: dict[str, tuple[int | Media, ...]] = {
    "text": (30,),
    "an image": (5, LONG, 7),
    "three images": (5, LONG, 3, item(9, 2), item(1, 3), 20),
    "a sound": (4, item(20, 1, "audio"), 9, LONG, 2),
    "a video": (3, item(6, 1, "video"), 2, item(6, 2, "video"), item(5, 3), 6),
}
Made = tuple[Path, Gemma4ForConditionalGeneration]
VARIANTS = ["dense", "dense causal", "k_eq_v", "shared_ple", "shared_ple causal", "moe"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    root = tmp_path_factory.mktemp("media")
    found = {}
    for name in VARIANTS:
        variant, _, causal = name.partition(" ")
        found[name] = root / name, make_model(root / name, variant, **({} if causal else VISION))
    return found


def opened(made: dict[str, Made], name: str, towers: Towers | None = None) -> Gemma4:
    return load(made[name][0], bidirectional="causal" not in name, towers=towers)


def engine_of(model: Gemma4, drafter: MtpDrafter | None = None, **options: Any) -> Engine:
    return Engine(model, drafter, **({"max_len": 160, "page_size": PAGE, "num_draft_tokens": 3} | options))


def asked(*parts: int | Media, count: int = 8, seed: int = 0, **more: Any) -> Request:
    ids, media = interleaved(*parts, seed=seed)
    return Request(ids, count, media=media, **more)


def tokens_of(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [g.tokens for g in engine.generate_many(requests)]


def alone(model: Gemma4, requests: Sequence[Request]) -> list[list[int]]:
    """Each request's tokens of an engine of its own, prefilled at once."""
    return [tokens_of(engine_of(model, prefix_caching=False), [request])[0] for request in requests]


@torch.inference_mode()
def logits_of(model: Gemma4, request: Request, cuts: Sequence[int] = ()) -> Tensor:
    """Of all of a prompt's tokens, prefilled in chunks that end at `cuts`."""
    engine, size = engine_of(model), len(request.prompt)
    engine._check(request)
    handle = Handle(request, 0, 0.0, engine._blocks(request))
    pages = list(range(1, 1 + -(-size // PAGE)))
    handle.pages = {"full": pages, "sliding": pages}
    found = []
    for start, end in zip((0, *cuts), (*cuts, size), strict=True):
        handle.num_cached = start
        chunk = Chunk(handle, start, list(request.prompt[start:end]), is_last=False)
        runner, plan = engine.runner, prefill_chunk(chunk, (), model.config.vocab_size)
        runner._update_media(engine._media_update([chunk]))
        batch, cache = runner.chunks(*runner._layout([plan]))
        media = runner._media_of([plan])
        found.append(model.logits(model.forward(runner.with_media(batch, media), cache)))
    return torch.cat(found)


# -- as transformers has it


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in VARIANTS for case in CASES if name not in ("k_eq_v", "moe") or case == "three images"],
)
def test_logits_and_tokens_equal_transformers(made: dict[str, Made], name: str, case: str) -> None:
    model, hf = opened(made, name), made[name][1]
    request = asked(*CASES[case], count=5)
    ours, theirs = logits_of(model, request), hf_logits(hf, request.prompt, request.media)
    never = list(PLACEHOLDERS.values())
    assert theirs.std() > 0.5, "the random model must not be flat"
    assert ours[:, never].isneginf().all(), "placeholders are never generated"
    theirs[:, never] = -torch.inf
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    expected = hf_greedy(hf, request.prompt, request.media, 5)
    for options in ({}, {"prefill_chunk": 7}, {"prefill_chunk": 11, "reproducible": True}):
        engine = engine_of(model, **({"num_draft_tokens": 0} | options))
        assert tokens_of(engine, [request]) == [expected], options
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("name", ["dense", "shared_ple"])
def test_so_do_the_kernels_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The calls of the launched path, a prompt in chunks."""
    monkeypatch.setitem(BASE, "head_dim", 128)
    monkeypatch.setitem(BASE, "global_head_dim", 256)
    folder, hf = tmp_path, make_model(tmp_path, name, **VISION)
    ops = KernelOps(Reference(), torch.float32)
    config = read_model_config(folder)
    media = MediaInput(Towers().embed, PLACEHOLDERS, bidirectional=True)
    model = Gemma4(config, load_model(folder, config, ops), ops, media=media)
    request = asked(*CASES["three images"], count=5)
    expected = hf_greedy(hf, request.prompt, request.media, 5)
    engine = engine_of(model, num_draft_tokens=0, prefill_chunk=20, page_size=16)
    assert tokens_of(engine, [request]) == [expected]


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_from_patches_to_tokens(tmp_path: Path, family: str) -> None:
    """With a tower as it is loaded, or the 12B's projector; transformers is given the pixels."""
    hf, images = make_with_vision(tmp_path, family)
    config, ops = read_model_config(tmp_path), TorchOps(torch.device("cpu"), torch.float32)
    media = MediaInput(towers(tmp_path, "vision").embed, PLACEHOLDERS, media_config(tmp_path).bidirectional)
    assert media.bidirectional
    model = Gemma4(config, load_model(tmp_path, config, ops), ops, media=media)
    assert [i.num_tokens for i in images] == [24, 6, 24]
    request = asked(4, images[0], 3, images[1], images[2], 5, count=4)
    theirs = hf_logits_of_pixels(hf, request.prompt, images)
    theirs[:, list(PLACEHOLDERS.values())] = -torch.inf
    torch.testing.assert_close(logits_of(model, request), theirs, atol=1e-3, rtol=0)
    (tokens,) = tokens_of(engine_of(model, num_draft_tokens=0, prefill_chunk=20), [request])
    assert tokens[0] == int(theirs[-1].argmax())


def test_what_is_causal_and_what_sees_itself_differ(made: dict[str, Made]) -> None:
    """Else the comparison above would say nothing of the mask; and a sound is the same in both."""
    folder, _ = made["dense"]
    both, causal = load(folder, bidirectional=True), load(folder, bidirectional=False)
    for parts, differ in (((5, LONG, 7), True), ((5, item(20, 1, "audio"), 7), False)):
        apart = (logits_of(both, asked(*parts)) - logits_of(causal, asked(*parts))).nan_to_num().abs().max()
        assert (apart > 0.5) == differ


def test_several_prompts_at_once_and_beside_who_decodes(made: dict[str, Made]) -> None:
    """Ragged chunks of several prompts, and mixed batches: each gets what it gets alone."""
    for name in ("dense", "shared_ple causal"):
        model = opened(made, name)
        requests = [asked(*parts, count=6 + 3 * i, seed=i) for i, parts in enumerate(CASES.values())]
        expected, kinds = alone(model, requests), set[tuple[bool, bool]]()
        engine = engine_of(model, num_draft_tokens=0, max_batch=5, prefill_chunk=40)
        run = engine.runner.run

        def noted(plan: StepPlan, run: Any = run, kinds: set[tuple[bool, bool]] = kinds) -> StepOutput:
            kinds.add((plan.decode is not None, any(c.media for c in plan.chunks)))
            return run(plan)

        engine.runner.run = noted  # type: ignore[method-assign]
        handles = [engine.submit(requests[0])]
        while len(handles) < len(requests) or engine.has_work:
            engine.step()
            if len(handles) < len(requests) and len(handles[0].tokens) > len(handles):
                handles.append(engine.submit(requests[len(handles)]))
        assert [h.tokens for h in handles] == expected
        assert ((True, True) in kinds) == model.supports_mixed
        assert_nothing_is_held(engine)


# -- chunks


def allowed(request: Request, blocks: Sequence[Block], at: int) -> bool:
    return not any(b.sees_itself and b.start < at < b.end for b in blocks)


@pytest.mark.parametrize("name", ["dense", "shared_ple causal"])
def test_chunks_that_may_be_are_as_one(made: dict[str, Made], name: str) -> None:
    model, draw = opened(made, name), random.Random(3)
    for case in ("three images", "a sound"):
        request = asked(*CASES[case])
        assert model.media is not None
        blocks = model.media.blocks(request.media)
        ends = [at for at in range(1, len(request.prompt)) if allowed(request, blocks, at)]
        whole = logits_of(model, request)
        for count in (3, len(ends)):
            cuts = sorted(draw.sample(ends, count))
            torch.testing.assert_close(logits_of(model, request, cuts), whole, atol=1e-4, rtol=0)


def test_a_cut_within_an_image_is_not(made: dict[str, Made]) -> None:
    """Why there is a rule."""
    request = asked(*CASES["an image"])
    model, at = opened(made, "dense"), request.media[0].start + 10
    whole = logits_of(model, request)
    assert (logits_of(model, request, [at]) - whole)[at:].nan_to_num().abs().max() > 0.5


def test_blocks_are_runs_of_images(made: dict[str, Made]) -> None:
    """Images without a token between them see each other, and one's pages depend on the other's content."""
    media = MediaInput(Towers().embed, PLACEHOLDERS, bidirectional=True)
    items = [item(4, 1), item(3, 2, "video"), item(2, 3, "audio"), item(5, 4)]
    starts = [1, 5, 8, 10]
    placed = [Placed(s, i) for s, i in zip(starts, items, strict=True)]
    blocks = media.blocks(placed)
    assert [(b.start, b.end, b.sees_itself) for b in blocks] == [(1, 8, True), (8, 10, False), (10, 15, True)]
    other = media.blocks([placed[0], Placed(5, item(3, 9, "video")), *placed[2:]])
    prompt = [2, *[90] * 4, *[92] * 3, *[91] * 2, *[90] * 5]
    keys = [page_keys(prompt, 2, blocks=b) for b in (blocks, other)]
    assert all(mine != its for mine, its in zip(*keys, strict=True))
    causal = replace(media, bidirectional=False)
    assert [(b.start, b.end, b.sees_itself) for b in causal.blocks(placed)] == [
        (start, start + i.num_tokens, False) for start, i in zip(starts, items, strict=True)
    ]
    request = Request(prompt, 4, media=tuple(placed))
    model, hf = opened(made, "dense"), made["dense"][1]
    theirs = hf_logits(hf, prompt, placed)
    theirs[:, list(PLACEHOLDERS.values())] = -torch.inf
    torch.testing.assert_close(logits_of(model, request), theirs, atol=1e-4, rtol=0)


# -- the prefix cache


def cached(engine: Engine, request: Request) -> tuple[int, list[int]]:
    (made,) = engine.generate_many([request])
    return made.stats.num_cached_tokens, made.tokens


@pytest.mark.parametrize("name", ["dense", "shared_ple causal"])
def test_a_prefix_is_found_where_its_images_are_the_same(made: dict[str, Made], name: str) -> None:
    model = opened(made, name)
    engine = engine_of(model, num_draft_tokens=0)
    first, again = asked(9, LONG, 10), asked(9, item(24, 1), 10)  # equal content, another object
    size = len(first.prompt)
    assert cached(engine, first) == (0, alone(model, [first])[0])
    assert cached(engine, again) == ((size - 1) // PAGE * PAGE, alone(model, [again])[0])
    other = asked(9, item(24, 2), 10)  # ids are equal, too
    assert other.prompt == first.prompt
    begins = first.media[0].start // PAGE * PAGE
    assert cached(engine, other) == (begins, alone(model, [other])[0]), "a miss from the image's first page on"
    text = asked(9, seed=0)
    assert cached(engine, Request([*text.prompt, 7, 8, 9, 10], 4))[0] == len(text.prompt) // PAGE * PAGE
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("name", ["dense", "dense causal"])
@pytest.mark.parametrize("pages", [2, 3, 5, 7])
def test_a_prefix_that_ends_within_an_image(made: dict[str, Made], name: str, pages: int) -> None:
    """What is left of the image is one chunk, whatever the budget, and the tokens are those without the cache."""
    model = opened(made, name)
    request = asked(5, LONG, 3, count=12)
    (expected,) = alone(model, [request])
    engine = engine_of(model, num_draft_tokens=0, prefill_chunk=6, num_pages={"full": 60, "sliding": 60})
    assert tokens_of(engine, [request]) == [expected]
    for kind in ("full", "sliding"):  # the first pages stay, as if others had been used for somebody else
        pool = engine.pools[kind]
        for key in page_keys(request.prompt, PAGE, blocks=engine._blocks(request))[pages:]:
            if (page := pool._page_of.pop(key, None)) is not None:
                del pool._key_of[page], pool._idle[page]
                pool._free.append(page)
    recorded = Recorded(engine)
    count, tokens = cached(engine, request)
    assert (count, tokens) == (pages * PAGE, expected)
    image, chunks = request.media[0], [c for plan in recorded.plans for c in plan.chunks]
    assert chunks[0].start == count
    sizes = [len(c.tokens) for c in chunks]
    if image.start < count and name == "dense":
        assert chunks[0].start + sizes[0] >= image.end
    if name != "dense":
        assert max(sizes) == 6, "a causal image may be cut"


# -- preemption, drafts, company


@pytest.fixture(scope="module")
def drafted(made: dict[str, Made], tmp_path_factory: pytest.TempPathFactory) -> tuple[Gemma4, MtpDrafter]:
    folder = tmp_path_factory.mktemp("assistant")
    make_assistant(folder, "dense")
    model = opened(made, "dense")
    return model, load_assistant(folder, model)


class Placeholders(MtpDrafter):
    """Drafts what comes next, and placeholders in between."""

    def __init__(self, drafter: MtpDrafter, known: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(drafter.config, drafter.weights, drafter.target)
        self.known = known
        self.engine: Engine | None = None
        self.draw = random.Random(0)

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        real = super().propose(ids, hidden, lengths, cache, count, max_kv_len)
        assert self.engine is not None
        for row, handle in enumerate(self.engine.scheduler.running):
            key = tuple(handle.request.prompt)
            at = int(lengths[row]) - len(key) + 1
            right = [*self.known[key], *[0] * (count + 1)][at : at + count]
            real[row] = torch.tensor([PLACEHOLDERS["image"] if self.draw.random() < 0.3 else t for t in right])
        return real


PRESSED = {"max_batch": 4, "prefill_chunk": 10, "num_pages": {"full": 26, "sliding": 24}}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 20, 0.95, 5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"async_depth": 1}, {"reproducible": True}], ids=str)
def test_drafts_and_preemption_change_no_token(
    drafted: tuple[Gemma4, MtpDrafter], sampling: Sampling, options: dict[str, Any]
) -> None:
    """Few pages: prompts with images are sent back, before, within and behind an image, and begin again."""
    model, drafter = drafted
    requests = [asked(3 + i, item(20 - i, i), 2, item(3, i), 4, count=14, seed=i, sampling=sampling) for i in range(4)]
    requests.append(asked(25, count=14, seed=9, sampling=sampling))
    expected = alone(model, requests)
    for drafts in (0, 3):
        noting = Placeholders(drafter, {tuple(r.prompt): t for r, t in zip(requests, expected, strict=True)})
        noting.engine = engine = engine_of(model, noting, num_draft_tokens=drafts, **PRESSED, **options)
        made = engine.generate_many(requests)
        assert [g.tokens for g in made] == expected
        assert sum(g.stats.num_preemptions for g in made) > 0
        if drafts:
            assert sum(sum(g.stats.accepted) for g in made) > 10
        assert_nothing_is_held(engine)


def test_placeholders_are_never_generated(made: dict[str, Made], drafted: tuple[Gemma4, MtpDrafter]) -> None:
    """However likely they are: greedy, sampled, biased, guided, and as a draft."""
    model, drafter = drafted
    head = model.weights.head.weight
    kept = head[list(PLACEHOLDERS.values())].clone()
    try:
        # the likeliest of all wherever the true model is sure of anything
        head[list(PLACEHOLDERS.values())] = 3 * head[:85].mean(0) + head[20:23] * 4
        request = asked(5, LONG, 7, count=20)
        raw = model.ops.logits(torch.randn(64, HIDDEN), model.weights.head, 0.0).argmax(-1)
        assert torch.isin(raw, torch.tensor(list(PLACEHOLDERS.values()))).any(), "the head must prefer them somewhere"
        sampling = [Sampling(), Sampling(1.5, seed=1), Sampling(1.0, seed=2, logit_bias=((90, 100.0), (91, 100.0)))]
        for how in sampling:
            noting = Placeholders(drafter, {tuple(request.prompt): [90] * 30})
            noting.engine = engine = engine_of(model, noting)
            (tokens,) = tokens_of(engine, [replace(request, sampling=how)])
            assert len(tokens) == 20
            assert not set(tokens) & set(PLACEHOLDERS.values())
    finally:
        head[list(PLACEHOLDERS.values())] = kept


def test_a_causal_image_is_preempted_within(made: dict[str, Made]) -> None:
    """Chunks end in images, and a prompt that is sent back there begins again."""
    model = opened(made, "dense causal")
    requests = [asked(3 + i, item(20 - i, i), 2, item(3, i), 4, count=14, seed=i) for i in range(5)]
    engine = engine_of(model, num_draft_tokens=0, **(PRESSED | {"max_batch": 5}))
    recorded = Recorded(engine)
    assert tokens_of(engine, requests) == alone(model, requests)
    assert engine.load.num_preemptions > 0
    cut = [p for plan in recorded.plans for c in plan.chunks for p in c.media if p.first or p.count in (1, 2)]
    assert cut


# -- what is embedded, and when


def test_an_item_is_embedded_once(made: dict[str, Made]) -> None:
    """For all chunks, requests and turns; all that a forward needs in one call, whatever their shapes."""
    for name in ("dense", "dense causal"):
        towers = Towers()
        model = opened(made, name, towers)
        engine = engine_of(model, num_draft_tokens=0, prefill_chunk=100, max_batch=3)
        request = asked(2, item(6, 1), 3, item(6, 2), 1, item(6, 1), 2, item(5, 3), item(4, 1, "audio"), 4)
        expected = alone(opened(made, name), [request])
        assert tokens_of(engine, [request]) == expected
        assert towers.calls == [4]
        longer = Request([*request.prompt, *expected[0], 5, 6], 4, media=request.media)
        engine.generate_many([longer, replace(request, prompt_logprobs=0), longer])
        assert towers.calls == [4], "the next turn of a chat"


def test_embeddings_stay_until_the_prompt_goes_on_behind_them(made: dict[str, Made]) -> None:
    """Without room for any, an item whose soft tokens are in several chunks is embedded once all the same."""
    towers = Towers()
    model = opened(made, "dense causal", towers)
    engine = engine_of(model, num_draft_tokens=0, prefill_chunk=5, media_cache_bytes=0, max_batch=2,
                       prefix_caching=False)  # fmt: skip
    requests = [asked(3, item(17, i), 2, item(11, 5 + i), 4, seed=i) for i in range(2)]
    assert tokens_of(engine, requests) == alone(opened(made, "dense causal"), requests)
    assert sum(towers.calls) == 4
    assert len(engine.runner._embeddings) <= 1, "what the last forward with an item needed goes with the next one"
    tokens_of(engine, requests)
    assert sum(towers.calls) == 8, "nothing is kept"


def test_what_was_used_longest_ago_goes_first() -> None:
    one, two, three = (item(10, i) for i in range(3))
    cache = MediaCache(capacity=250, token_bytes=10)
    assert cache.take_update([]) is SAME_MEDIA
    assert cache.take_update([one, two, one]).embed == (one, two)
    assert cache.take_update([one]) is SAME_MEDIA
    update = cache.take_update([three])
    assert (update.forget, update.embed, cache.num_bytes) == ((two.digest,), (three,), 200)
    update = cache.take_update([two], kept={one.digest})
    assert (update.forget, update.embed) == ((three.digest,), (two,))
    big = item(40, 7)
    update = cache.take_update([big], kept={one.digest})
    assert update.forget == (two.digest,), "what a prompt goes on with stays, whatever it takes"
    assert cache.num_bytes == 500
    assert cache.take_update([]).forget == (one.digest, big.digest)
    cache.take_update([one])
    cache.restart()
    update = cache.take_update([one])
    assert (update.reset, update.embed) == (True, (one,))
    assert cache.take_update([one]) is SAME_MEDIA


def test_what_interrupts_a_step_costs_no_token(made: dict[str, Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C within a tower, or behind it: what was embedded is not relied on."""
    towers = Towers()
    model = opened(made, "dense", towers)
    requests = [asked(3, item(17, i), 2, item(11, 5 + i), 4, seed=i) for i in range(3)]
    expected, embed, calls = alone(opened(made, "dense"), requests), towers.embed, 0

    def interrupted(items: Sequence[Media]) -> list[Tensor]:
        nonlocal calls
        calls += 1
        if calls in (2, 5):
            raise KeyboardInterrupt
        return embed(items)

    monkeypatch.setattr(model, "media", replace(model.media, embed=interrupted))
    engine, raised = engine_of(model, num_draft_tokens=0, max_batch=2, prefill_chunk=24), 0
    handles = [engine.submit(r) for r in requests]
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            raised += 1
    assert raised == 2
    assert [h.tokens for h in handles] == expected
    assert_nothing_is_held(engine)


def test_a_tower_that_gives_something_else_is_an_error(made: dict[str, Made]) -> None:
    model = opened(made, "dense")
    model.media = MediaInput(lambda items: [torch.zeros(3, HIDDEN) for _ in items], PLACEHOLDERS, bidirectional=True)
    with pytest.raises(UsageError, match=r"embeddings \(3, 32\) in place of \(24, 32\)"):
        engine_of(model).generate_many([asked(5, LONG, 2)])


@pytest.mark.parametrize(
    ("error", "told", "says"),
    [
        (UsageError("an image of 9 patches"), UsageError, "an image of 9 patches"),
        (torch.OutOfMemoryError("CUDA out of memory"), KerngenError, "no memory left to embed image input"),
        (ValueError("odd"), KerngenError, "image input cannot be embedded: ValueError: odd"),
    ],
)
def test_what_cannot_be_embedded_ends_its_requests_alone(
    made: dict[str, Made], error: Exception, told: type[KerngenError], says: str
) -> None:
    """Of two requests with an item that fails, one that decodes, one with another image and one that waits."""
    embed, bad, good = Towers().embed, item(8, 7), item(8, 8)

    def failing(items: Sequence[Media]) -> list[Tensor]:
        if any(one.digest == bad.digest for one in items):
            raise error
        return embed(items)

    others = [asked(9, seed=1, count=12), asked(3, good, 4, seed=2), asked(6, seed=3)]
    expected = alone(opened(made, "dense"), others)
    model = opened(made, "dense")
    model.media = MediaInput(failing, PLACEHOLDERS, bidirectional=True)
    engine = engine_of(model, num_draft_tokens=0, max_batch=3)
    handles = [engine.submit(others[0])]
    engine.step()
    wrong = [engine.submit(asked(3, bad, 4, seed=4)), engine.submit(asked(2, good, 1, bad, seed=5))]
    handles += [engine.submit(request) for request in others[1:]]
    told_of = set()
    while engine.has_work:
        told_of |= {event.handle for event in engine.step() if event.handle.is_done}
    assert told_of == {*handles, *wrong}
    assert [h.tokens for h in handles] == expected
    assert [(type(h.error), h.stop_reason, says in str(h.error)) for h in wrong] == [(told, "error", True)] * 2
    assert all(h.error is not None and h.error.__traceback__ is None for h in wrong)
    assert_nothing_is_held(engine)


# -- the rest of what a request may ask


def test_log_probabilities_of_a_prompt_with_an_image(made: dict[str, Made]) -> None:
    """Of text they are transformers'; a token that stands for an image has none."""
    model, hf = opened(made, "dense"), made["dense"][1]
    request = asked(5, LONG, 7, prompt_logprobs=2)
    engine = engine_of(model, prefill_chunk=9)
    handle = engine.submit(request)
    while engine.has_work:
        engine.step()
    logits = hf_logits(hf, request.prompt, request.media)
    logits[:, list(PLACEHOLDERS.values())] = -torch.inf
    expected = logits.log_softmax(-1)[range(len(request.prompt) - 1), request.prompt[1:]]
    found = torch.tensor([x.logprob for x in handle.prompt_logprobs])
    assert torch.equal(found.isneginf(), torch.tensor([t == 90 for t in request.prompt[1:]]))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["dense", "shared_ple"])
def test_chunks_with_media_run_in_graphs_of_their_own(
    made: dict[str, Made], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Filled up to a graph's size, alone and beside others, each prompt gets the tokens that it has alone."""
    model = opened(made, variant)
    requests = [
        asked(9, LONG, 3, count=6),
        *[asked(7 + i, count=9, seed=i) for i in range(3)],
        asked(2, LONG, 2, count=6),
    ]
    expected = alone(model, requests)
    monkeypatch.setattr(prefill_graphs, "SIZES", (4, 8, 16, 32))
    monkeypatch.setattr(prefill_budget, "MULTIPLE", 4)
    engine = engine_of(model, num_draft_tokens=0, prefill_chunk=32, max_batch=4, buckets=(1, 2, 4), async_depth=1,
                       prefix_caching=False)  # fmt: skip
    graphs, recorded, ran = Graphless(engine, monkeypatch), Recorded(engine), list[tuple[int, str, bool]]()
    plain = prefill_graphs.PrefillGraphs.forward

    def noted(short: prefill_graphs.PrefillGraphs, size: int, outputs: str, has_media: bool) -> Tensor:
        ran.append((size, outputs, has_media))
        return plain(short, size, outputs, has_media)

    monkeypatch.setattr(prefill_graphs.PrefillGraphs, "forward", noted)
    engine.make_ready()
    engine.runner.prefill_graphs.padded = None
    recorded.plans.clear()
    ran.clear()
    for order in (requests, requests[::-1]):
        assert tokens_of(engine, order) == (expected if order is requests else expected[::-1])
    assert graphs.num_replayed > 0
    media = [plan for plan in recorded.plans if any(c.media for c in plan.chunks)]
    assert any(plan.num_tokens for plan in media)
    assert all(plan.decode is None for plan in media), "a forward of its own"
    assert {has_media for _, _, has_media in ran} == {False, True}


# -- refusals

PLACED = interleaved(3, LONG, 2)


@pytest.mark.parametrize(
    ("prompt", "media", "says"),
    [
        (PLACED[0], (), "token 5 of the prompt is 90 and should be no placeholder"),
        ([7, 90, 8], (), "token 1 of the prompt is 90 and should be no placeholder"),
        (PLACED[0][:20], PLACED[1], "takes tokens 5 up to 29 of a prompt of 20"),
        (PLACED[0], (Placed(6, LONG),), "token 5 of the prompt is 90"),
        (PLACED[0], (Placed(4, LONG),), "token 4 of the prompt is 88 and should be the placeholder 90"),
        (PLACED[0], (PLACED[1][0], PLACED[1][0]), "what is before it ends at 29"),
        (PLACED[0], (Placed(-1, LONG),), "takes tokens -1 up to 23"),
        (PLACED[0], (Placed(5, item(24, 1, "audio")),), "is 90 and should be the placeholder 91"),
        (PLACED[0], (Placed(5, replace(LONG, num_tokens=0)),), "takes tokens 5 up to 5"),
    ],
)
def test_media_stand_where_their_placeholders_are(
    made: dict[str, Made], prompt: list[int], media: tuple[Placed, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        engine_of(opened(made, "dense")).submit(Request(prompt, 4, media=media))


def test_a_model_says_what_it_does_not_take(made: dict[str, Made]) -> None:
    model = opened(made, "dense")
    model.media = MediaInput(Towers().embed, {"image": 90}, bidirectional=True)
    with pytest.raises(UsageError, match="has audio input; the model takes image"):
        engine_of(model).submit(asked(4, item(3, 1, "audio"), 2))
    model.media = None
    with pytest.raises(UsageError, match="has image input, and this model was opened for text alone"):
        engine_of(model).submit(asked(4, LONG, 2))


def test_an_image_that_never_fits_is_refused_at_once(made: dict[str, Made]) -> None:
    """Its sliding pages are held at once; text of that length needs those of its window alone."""
    pages = {"full": 40, "sliding": 14}
    engine = engine_of(opened(made, "dense"), num_draft_tokens=0, num_pages=pages)
    with pytest.raises(UsageError, match="with an image of 40 tokens at once; the cache has 13"):
        engine.submit(asked(5, item(40, 1), 20))
    assert len(tokens_of(engine, [asked(70), asked(5, item(24, 1), 20)])) == 2
    causal = engine_of(opened(made, "dense causal"), num_draft_tokens=0, num_pages=pages)
    assert len(tokens_of(causal, [asked(5, item(40, 1), 20)])) == 1


# -- plans


def test_a_plan_with_media_makes_the_same_elsewhere(made: dict[str, Made]) -> None:
    """Written down and read again, on a runner of its own."""
    requests = [asked(*parts, seed=i) for i, parts in enumerate(CASES.values())]
    options = {"num_draft_tokens": 0, "max_batch": 3, "prefill_chunk": 13, "media_cache_bytes": 3000,
               "num_pages": {"full": 40, "sliding": 40}}  # fmt: skip
    engine = engine_of(opened(made, "dense"), **options)
    recorded = Recorded(engine)
    engine.generate_many(requests)
    assert any(plan.media.forget for plan in recorded.plans)
    towers = Towers()
    runner = engine_of(opened(made, "dense", towers), **options).runner
    with torch.inference_mode():
        for line, expected in zip(recorded.lines, recorded.made, strict=True):
            plan = StepPlan.from_json(line, runner.limits)
            assert plan.to_json() == line
            output = runner.run(plan)
            waits = [None if w is None else w.result().tokens for w in (output.decoded, output.first)]
            assert waits == expected[:2]
    assert sum(towers.calls) >= 8


def damaged(values: dict[str, Any], what: str) -> None:
    (chunk,), (embedded,) = values["chunks"], values["media"]["embed"]
    part = chunk["media"][0]
    if what == "media of kind 'audio'":
        embedded["kind"] = "audio"
    elif what == "another's digest":
        embedded["num_tokens"] = 23
    elif what.startswith("plan.media.embed.data"):
        embedded["data"][0] = "<f8"
    elif what.startswith("plan.media.embed.kind"):
        embedded["kind"] = "smell"
    elif what == "where media are in a chunk is 99":
        part["at"] = 99
    elif what == "where media end in a chunk is 129":
        part["count"] = 124
    elif what == "the tokens of a block but one is -1":
        chunk["blocks"] = [[5, 5]]
    elif what == "the tokens between blocks is -1":
        chunk["blocks"] = [[-1, 5]]
    else:
        chunk["blocks"] = [[5, 33]]


@pytest.mark.parametrize("what", [
    "media of kind 'audio'", "another's digest", "plan.media.embed.data is", "plan.media.embed.kind is",
    "where media are in a chunk is 99", "where media end in a chunk is 129", "the tokens of a block but one is -1",
    "the tokens between blocks is -1", "the tokens behind blocks is -1",
])  # fmt: skip
def test_a_plan_that_asks_for_what_is_not_there_is_refused(made: dict[str, Made], what: str) -> None:
    model = opened(made, "dense")
    model.media = MediaInput(Towers().embed, {"image": 90}, bidirectional=True)
    engine = engine_of(model, num_draft_tokens=0)
    recorded = Recorded(engine)
    engine.generate_many([asked(3, LONG, 2)])
    values = json.loads(recorded.lines[0])
    assert StepPlan.from_json(json.dumps(values), engine.runner.limits).chunks == recorded.plans[0].chunks
    damaged(values, what)
    with pytest.raises(UsageError) as refused:
        StepPlan.from_json(json.dumps(values), engine.runner.limits)
    assert what in str(refused.value)


def test_a_plan_reads_no_embeddings_that_are_not_held(made: dict[str, Made]) -> None:
    engine = engine_of(opened(made, "dense"), num_draft_tokens=0)
    recorded = Recorded(engine)
    engine.generate_many([asked(3, LONG, 2)])
    runner = engine_of(opened(made, "dense"), num_draft_tokens=0).runner
    with (
        torch.inference_mode(),
        pytest.raises(UsageError, match="24 soft tokens from 0 on of an item"),
    ):
        runner.run(replace(recorded.plans[0], media=SAME_MEDIA))


def test_memory_is_left_for_embeddings_and_the_largest_image(
    made: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, causal = (engine_of(opened(made, name), prefill_chunk=256).shape for name in ("dense", "dense causal"))
    assert both.pages(2, 4000)["sliding"] - causal.pages(2, 4000)["sliding"] == (1120 - 256) // PAGE
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**10))
    session = opens_with_media(made["dense"][0], None, None, None)
    session.media_cache_bytes = 3 * 10**8
    assert session.cache_budget == int(CACHE_SHARE * 10**9) - 3 * 10**8
    assert session.cache_shape.longest_block == 1120
    assert session.reserve(40)._media._capacity == 3 * 10**8
    assert session.model.media is not None
    session.model.media = replace(session.model.media, unloaded_bytes=lambda: 2 * 10**8)  # --media auto
    assert session.cache_budget == int(CACHE_SHARE * (10**9 - 2 * 10**8)) - 3 * 10**8
    session.model.media = None
    assert session.cache_budget == int(CACHE_SHARE * 10**9)


@pytest.mark.parametrize("name", ["dense", "dense causal"])
def test_warm_up_runs_what_images_need(made: dict[str, Made], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Their attention is a kernel of its own: no request is to wait for its compilation."""
    asked_for = dict[tuple[int, int], set[bool]]()
    forward = Gemma4.forward

    def noted(model: Gemma4, batch: Batch, *args: Any, **kwargs: Any) -> Tensor:
        if batch.cu_seqlens is not None:
            shape = len(batch.ids), len(batch.kv_lens)
            asked_for.setdefault(shape, set()).add(batch.ends is not None)
        return forward(model, batch, *args, **kwargs)

    monkeypatch.setattr(Gemma4, "forward", noted)
    with torch.inference_mode():
        warm_up(engine_of(opened(made, name), num_draft_tokens=0, max_batch=2).runner, [NO_DRAFTS], 8)
    assert asked_for
    assert set(map(frozenset, asked_for.values())) == {frozenset({False, True} if name == "dense" else {False})}
