"""A drafter of another kind: one that taps layers of its target, and keeps K and V of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_batches import REQUESTS, alone, assert_nothing_is_held, engine_for, kind_of, plans_of
from tiny_gemma import BASE, VARIANTS, load, make_target, prompt
from torch import Tensor
from transformers import Gemma4ForCausalLM

from kerngen.errors import UsageError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import DraftPolicy, LayerConfig
from kerngen.runtime.engine import CacheShape, Engine, Request
from kerngen.runtime.engine.plan import SamplingMode
from kerngen.runtime.model import Gemma4, Taps
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import Session
from kerngen.soak.drive import Settings, pages_of
from kerngen.soak.drive import engine_for as engine_of_soak
from kerngen.soak.models import Opened

Made = dict[str, tuple[Gemma4ForCausalLM, Gemma4]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root: Path = tmp_path_factory.mktemp("drafters")
    return {name: (make_target(root / name, name), load(root / name)) for name in VARIANTS}


def tapped(model: Gemma4, layers: tuple[int, ...], ids: Sequence[int]) -> list[Tensor]:
    """The outputs [T, H] of `layers` for `ids`, as one prompt."""
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=len(ids))
    taps = Taps(layers)
    model.forward(Batch.prefill(torch.tensor(ids), 0, cache), cache, taps=taps)
    return list(taps.rows.chunk(len(layers), dim=-1))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_tap_is_what_transformers_says_of_the_layer(made: Made, variant: str) -> None:
    """Also of layers that share K and V, and of one token, which one kernel would compute at once."""
    hf, model = made[variant]
    last = len(model.config.layers) - 1
    ids = prompt(21)
    theirs = hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for state, layer in zip(tapped(model, tuple(range(last)), ids), range(last), strict=True):
        torch.testing.assert_close(state, theirs[layer + 1][0], rtol=1e-4, atol=1e-4)
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=4)
    taps = Taps((0, last))
    hidden = model.forward(Batch.decode(torch.tensor([[5]]), torch.tensor([0]), cache, 4, model.ops), cache, taps=taps)
    assert taps.rows.shape == (1, 64)
    normed = model.ops.rmsnorm(taps.rows[:, 32:].contiguous(), model.weights.norm, model.config.rms_norm_eps)
    torch.testing.assert_close(normed, hidden)


def test_layers_are_not_tapped_where_tokens_stop_short_of_them(made: Made) -> None:
    _, model = made["shared_ple"]
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=4)
    with pytest.raises(TypeError, match="outputs='last'"):
        model.forward(Batch.prefill(torch.tensor([5, 6]), 0, cache), cache, outputs="last", taps=Taps((0,)))


class TappingDrafter:
    """Keeps the tapped states of each position as K and the token as V, and drafts what it knows to be right, but for
    every third position. Notes what it has of a sequence whenever it drafts.
    """

    def __init__(self, target: Gemma4, taps: tuple[int, ...], known: dict[tuple[int, ...], list[int]]) -> None:
        size, index = BASE["hidden_size"], len(target.config.layers)
        layer = LayerConfig(index, False, size, len(taps), 0, 0, False, index)
        self.policy = DraftPolicy(7, taps, (layer,))
        self.engine: Engine | None = None
        self.known = known
        self.notes: dict[tuple[tuple[int, ...], int], tuple[Tensor, Tensor]] = {}

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        assert self.engine is not None
        pages, size = cache.pages(self.policy.cache_layers[0]), cache.page_size
        drafts = torch.zeros(len(ids), count, dtype=torch.int64)
        for row, (handle, length) in enumerate(zip(self.engine.scheduler.running, lengths.tolist(), strict=False)):
            places = torch.arange(length)
            table = cache.groups["full"].block_table[row, places // size].long()
            key = tuple(handle.request.prompt)
            if length < handle.limit - 1:  # beyond its end a row may hold anything
                self.notes[key, length] = (
                    pages.k_cache[table, :, places % size],
                    pages.v_cache[table, 0, places % size, 0],
                )
            right = [*self.known[key], *[0] * (count + 1)][length - len(key) + 1 :]
            drafts[row] = torch.tensor([t + ((length + i) % 3 == 0) for i, t in enumerate(right[:count])])
        return drafts % BASE["vocab_size"]

    def ingest(self, batch: Batch, rows: Tensor, cache: KVCache) -> None:
        pages, slots = cache.pages(self.policy.cache_layers[0]), batch.slots["full"]
        at = slots // cache.page_size, slice(None), slots % cache.page_size
        pages.k_cache[at] = rows.unflatten(1, (-1, BASE["hidden_size"]))  # [T, taps, H]
        pages.v_cache[at] = batch.ids.to(pages.v_cache.dtype)[:, None, None]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("drafts", "async_depth"), [(2, 0), (3, 1), (None, 1)])
def test_it_has_taken_in_each_token_and_no_draft_that_was_wrong(
    made: Made, variant: str, drafts: int | None, async_depth: int
) -> None:
    """Whatever the batch: chunks of prompts, shared prefixes, rejected drafts, rows that move, preemption."""
    _, model = made[variant]
    common = prompt(13, seed=90)
    asked = [*REQUESTS, *(Request([*common, *prompt(3 + i, seed=i)[1:]], 9, Sampling(0.8, 20, 0.9, i)) for i in (1, 2))]
    expected = alone(model, asked)
    last = len(model.config.layers) - 1
    drafter = TappingDrafter(model, (1, last), {tuple(r.prompt): t for r, t in zip(asked, expected, strict=True)})
    drafter.engine = engine = engine_for(model, drafter, num_draft_tokens=drafts, async_depth=async_depth,
                                         prefill_chunk=9, max_batch=5,
                                         num_pages={"full": 24, "sliding": 40})  # fmt: skip
    kinds: list[str] = []
    with plans_of(engine, lambda plan: kinds.append(kind_of(plan))):
        generations = engine.generate_many(asked)
    assert [g.tokens for g in generations] == expected
    assert_nothing_is_held(engine)
    assert set(kinds) - {"mixed"} == {"prefill", "decode"}
    assert ("mixed" in kinds) == (drafts is None and model.supports_mixed)
    again = engine.generate_many(asked[-1:])[0]
    assert (again.tokens, again.stats.num_cached_tokens > 0) == (expected[-1], True)
    if drafts is not None:
        assert sum(g.stats.num_preemptions for g in generations) > 0
        assert 0 < sum(sum(g.stats.accepted) for g in generations) < sum(sum(g.stats.drafted) for g in generations)
        assert len(drafter.notes) > 30
    for request, tokens in zip(asked, expected, strict=True):
        whole = [*request.prompt, *tokens]
        with torch.inference_mode():
            states = torch.stack(tapped(model, (1, last), whole), dim=1)
        for (key, length), (k, v) in drafter.notes.items():
            if key == tuple(request.prompt):
                assert v.tolist() == whole[:length]
                torch.testing.assert_close(k, states[:length], rtol=1e-3, atol=1e-3)


def test_what_it_keeps_counts_as_cache(made: Made) -> None:
    _, model = made["dense"]
    drafter = TappingDrafter(model, (0, 1, 2), {})
    plain, engine = engine_for(model), engine_for(model, drafter)
    pages = engine.cache.num_pages["full"]
    own = 2 * pages * 3 * BASE["hidden_size"] * engine.cache.page_size * 4
    assert engine.cache.num_bytes == plain.cache.num_bytes + own
    assert engine.shape.num_bytes(engine.cache.num_pages) == engine.cache.num_bytes
    assert engine.shape.page_bytes["sliding"] == CacheShape(model.config, torch.float32, 4).page_bytes["sliding"]


def test_what_it_keeps_is_counted_before_it_is_allocated(made: Made) -> None:
    """Of a session, and of a soak that is told how much it may take."""
    _, model = made["dense"]
    drafter = TappingDrafter(model, (0, 1, 2), {})
    codec: Any = None  # no text is read here
    plain = Session(Path(), model.config, codec, model, None, (), 0.0)
    session = replace(plain, drafter=drafter)  # type: ignore[arg-type]
    own = 2 * 3 * BASE["hidden_size"] * session.cache_shape.page_size * 4
    assert session.cache_shape.page_bytes["full"] == plain.cache_shape.page_bytes["full"] + own

    budget = 10**7
    settings = Settings(1.0, 1.0, max_batch=8, max_prompt=64, max_new_tokens=8, cache_bytes=budget, page_size=8)
    pages = pages_of(settings, model, drafter)
    opened = Opened("dense", model, None, "random weights", 0.0)
    assert engine_of_soak(settings, opened, drafter, pages).cache.num_bytes <= budget


def test_a_layer_of_its_own_is_none_of_the_targets(made: Made) -> None:
    _, model = made["dense"]
    drafter = TappingDrafter(model, (0,), {})
    layer = replace(drafter.policy.cache_layers[0], index=1, kv_source=1)
    drafter.policy = replace(drafter.policy, cache_layers=(layer,))
    with pytest.raises(UsageError, match="two layers of a cache have the index 1"):
        engine_for(model, drafter)


@torch.inference_mode()
def test_it_takes_in_what_a_captured_prefill_and_a_mixed_step_compute(made: Made) -> None:
    """Tokens that fill such a forward up are written to page 0."""
    _, model = made["dense"]
    drafter = TappingDrafter(model, (0, 3), {})
    runner = engine_for(model, drafter, max_len=100, num_draft_tokens=None).runner
    graphs, ids = runner.prefill_graphs, [prompt(9, seed=1), prompt(20, seed=2)]
    tables = torch.tensor([[[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]] * 2, dtype=torch.int32)
    pages = runner.cache.pages(drafter.policy.cache_layers[0])
    tokens = [token for of in ids for token in of]
    for run in ("prefill", "mixed"):
        pages.v_cache.fill_(-1)
        graphs.put(tokens, [0, 0], [9, 20], tables, 64)
        if run == "prefill":
            graphs.forward(64, "last", False)
        else:
            runner.mixed_step(2, SamplingMode(), *graphs.batch(64))
        kept = pages.v_cache[:, 0, :, 0]
        assert kept[1:9].flatten()[:9].tolist() == ids[0]
        assert kept[4:9].flatten().tolist() == ids[1]
        states = torch.stack(tapped(model, (0, 3), ids[1]), dim=1)
        torch.testing.assert_close(pages.k_cache[4:9].transpose(1, 2).flatten(0, 1), states, rtol=1e-3, atol=1e-3)
        assert set(kept[9:].flatten().tolist()) <= {-1.0}


def test_prompts_are_prefilled_as_without_it(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = made["dense"]
    monkeypatch.setattr(model.ops, "supports_graphs", True, raising=False)
    options: dict[str, Any] = {"max_len": 100, "num_draft_tokens": None}
    engine = engine_for(model, TappingDrafter(model, (0,), {}), **options)
    assert engine.runner.short_sizes == engine_for(model, **options).runner.short_sizes != []
    assert engine._mixes
