"""DFlash: the block that is drafted at once is what numpy says, and no token depends on it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Kerngen
from safetensors.torch import save_file
from test_engine_batches import PAGE, REQUESTS, alone, assert_nothing_is_held, engine_for
from tiny_dflash import BLOCK, MASK, WINDOW, block_by_hand, dflash_json, load_dflash, make_dflash
from tiny_gemma import BASE, CPU, load, make_target, prompt
from torch import Tensor
from transformers import Gemma4ForCausalLM

from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import Keeping, read_drafter_config, read_model_config
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.engine import Engine, Request
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4, Taps
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.weights.loader import load_drafter, load_model

TINY = Path(__file__).parents[2] / "examples" / "tiny"
NUM_LAYERS, TAPS = 5, (0, 1, 3)  # of the variant k_eq_v
Made = tuple[Gemma4ForCausalLM, Gemma4, dict[str, Tensor], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root: Path = tmp_path_factory.mktemp("dflash")
    hf = make_target(root / "target", "k_eq_v")
    tensors = make_dflash(root / "drafter", NUM_LAYERS, TAPS)
    return hf, load(root / "target"), tensors, root


def kept(drafter: DflashDrafter, cache: KVCache, row: int, length: int) -> Tensor:
    """K and V [2 * layers, length, heads, dim] of the first `length` tokens of a sequence."""
    places = torch.arange(length)
    size = cache.page_size
    at = cache.groups["full"].block_table[row, places // size].long(), slice(None), places % size
    pages = [cache.pages(layer) for layer in drafter.policy.cache_layers]
    return torch.stack([pool[at] for page in pages for pool in (page.k_cache, page.v_cache)])


def drafted(
    drafter: DflashDrafter, ids: list[int], chunks: int = 1, page_size: int = PAGE
) -> tuple[Tensor, Tensor, Tensor]:
    """(states, drafts) of the block behind `ids`, from an empty cache, and what is kept of the context, which is
    prefilled in so many chunks.
    """
    model = drafter.target
    own, num_pages = drafter.policy.cache_layers, dict.fromkeys(("full", "sliding"), 40)
    cache = KVCache(model.config, model.ops, num_pages=num_pages, batch=1, max_len=len(ids) + BLOCK,
                    page_size=page_size, drafter_layers=own)  # fmt: skip
    cache.tables.copy_(1 + torch.randperm(39, generator=torch.Generator().manual_seed(1))[: cache.tables.shape[2]])
    begin = 0
    for part in np.array_split(ids[:-1], chunks):
        if len(part):
            taps = Taps(drafter.config.taps)
            batch = Batch.prefill(torch.tensor(part), begin, cache)
            model.forward(batch, cache, taps=taps)
            drafter.ingest(batch, taps.rows, cache)
            begin += len(part)
    at = torch.tensor(ids[-1:]), torch.tensor([len(ids) - 1])
    states = drafter.block(*at, cache, len(ids))[0]
    drafts = drafter.propose(at[0], states[:1], at[1], cache, BLOCK - 1, len(ids))[0]
    return states, drafts, kept(drafter, cache, 0, len(ids) - 1)


@pytest.mark.parametrize("is_causal", [True, False])
@torch.inference_mode()
def test_a_block_is_what_numpy_says(made: Made, is_causal: bool) -> None:
    """Of contexts of one token, around pages, and around the window of the block's first and last token."""
    hf, model, tensors, root = made
    drafter = load_dflash(root / "drafter", model)
    drafter = DflashDrafter(replace(drafter.config, is_causal=is_causal), drafter.weights, model)
    seen = set()
    for length in (1, 2, PAGE, PAGE + 1, WINDOW - BLOCK, WINDOW - BLOCK + 1, WINDOW - 1, WINDOW, WINDOW + 1, 47):
        ids = prompt(length + 1, seed=length)
        expected, logits = block_by_hand(hf, tensors, TAPS, ids, is_causal=is_causal)
        states, drafts, _ = drafted(drafter, ids, chunks=1 + length % 3)
        np.testing.assert_allclose(states.numpy(), expected, rtol=1e-3, atol=1e-3, err_msg=f"{length} tokens")
        np.testing.assert_allclose(model.logits(states).numpy(), logits, rtol=1e-3, atol=2e-3)
        assert drafts.tolist() == logits[1:].argmax(-1).tolist()
        seen |= set(drafts.tolist())
    assert len(seen) > 10, "drafts that are all the same would be right by chance"
    other, _ = block_by_hand(hf, tensors, TAPS, ids, is_causal=not is_causal)
    assert abs(other - expected).max() > 0.1, "the masks do not matter here"


@pytest.mark.parametrize(("weights", "cache_dtype"), [("stored", "auto"), ("int4", "auto"), ("stored", "int8")])
@torch.inference_mode()
def test_kernels_draft_what_torch_does(tmp_path: Path, weights: str, cache_dtype: str) -> None:
    """The released drafters' heads, in fp32; with the engine verification of every number of drafts, too."""
    folder, kept_as = TINY / "gemma-4-tiny-w4a16", Keeping(weights, cache_dtype)
    config = read_model_config(folder).keeping(kept_as)
    make_dflash(tmp_path / "drafter", len(config.layers), (1, 3, 5), hidden_size=config.hidden_size, head_dim=128,
                intermediate_size=192, vocab_size=config.vocab_size)  # fmt: skip
    own = read_drafter_config(tmp_path / "drafter", config).keeping(kept_as)
    assert isinstance(own, DflashConfig)
    pair = []
    for ops in (TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)):
        model = Gemma4(config, load_model(folder, config, ops), ops)
        pair.append(DflashDrafter(own, load_drafter(tmp_path / "drafter", own, ops), model))
    for length in (1, 2, WINDOW - 1, WINDOW + 1, 40):
        ids = prompt(length + 1, seed=length)
        (states, drafts, context), other = (drafted(drafter, ids, 1 + length % 3, page_size=16) for drafter in pair)
        torch.testing.assert_close(other[0], states, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(other[2], context, rtol=1e-3, atol=1e-3)
        assert other[1].tolist() == drafts.tolist()
    for count in (3, 15, None):
        made = []
        for drafter in pair:
            engine = Engine(drafter.target, drafter, max_len=64, num_draft_tokens=count, max_batch=2)
            made.append(engine.generate_many([Request(prompt(n, seed=n), 12) for n in (9, 30)]))
        assert [g.tokens for g in made[0]] == [g.tokens for g in made[1]]
        if count is not None:  # else lengths depend on time
            assert [g.stats.accepted for g in made[0]] == [g.stats.accepted for g in made[1]]


class Noting(DflashDrafter):
    """Notes what it drafts of each sequence, and drafts what is right in its place, up to where dice say no."""

    def __init__(self, drafter: DflashDrafter, known: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__(drafter.config, drafter.weights, drafter.target)
        self.known, self.random = known, random.Random(0)
        self.engine: Engine | None = None
        self.notes: dict[tuple[tuple[int, ...], int], tuple[list[int], Tensor]] = {}

    def propose(
        self, ids: Tensor, hidden: Tensor, lengths: Tensor, cache: KVCache, count: int, max_kv_len: int
    ) -> Tensor:
        assert self.engine is not None
        drafts = super().propose(ids, hidden, lengths, cache, count, max_kv_len)
        for row, (handle, length) in enumerate(zip(self.engine.scheduler.running, lengths.tolist(), strict=False)):
            key = tuple(handle.request.prompt)
            if length < handle.limit:  # not of an answer that has ended, of which the host does not know yet
                self.notes[key, length] = drafts[row].tolist(), kept(self, cache, row, length)
            right = [*self.known[key], *[0] * (count + 1)][length - len(key) + 1 :][:count]
            first_wrong = self.random.choice((0, 1, 3, count // 2, count))
            wrong = [i == first_wrong for i in range(count)]
            drafts[row] = torch.tensor([(t + w) % BASE["vocab_size"] for t, w in zip(right, wrong, strict=True)])
        return drafts


COMMON = prompt(13, seed=90)
ASKED = [
    *REQUESTS[3::2],
    *(Request([*COMMON, *prompt(3 + i, seed=i)[1:]], 18, Sampling(0.8, 20, 0.9, i)) for i in (1, 2)),
]


@pytest.mark.parametrize(("drafts", "depth"), [(2, 0), (6, 1), (15, 1)])
def test_drafts_are_those_of_the_text_alone_and_change_no_token(made: Made, drafts: int, depth: int) -> None:
    """Whatever the batch: chunks, prefixes that are found, blocks behind the end, any number accepted, preemption."""
    _, model, _, root = made
    expected = alone(model, ASKED)
    known = {tuple(r.prompt): t for r, t in zip(ASKED, expected, strict=True)}
    drafter = load_dflash(root / "drafter", model)
    noting = Noting(drafter, known)
    noting.engine = engine = engine_for(model, noting, num_draft_tokens=drafts, async_depth=depth, prefill_chunk=9,
                                        max_batch=5, num_pages={"full": 26, "sliding": 60})  # fmt: skip
    made_ = engine.generate_many(ASKED)
    assert [g.tokens for g in made_] == expected
    assert_nothing_is_held(engine)
    again = engine.generate_many(ASKED[-1:])[0]
    assert (again.tokens, again.stats.num_cached_tokens > 0) == (expected[-1], True)
    assert sum(g.stats.num_preemptions for g in made_) > 0
    every, right = (sum(sum(getattr(g.stats, name)) for g in made_) for name in ("drafted", "accepted"))
    assert 0 < right < every
    whole_blocks = [g.stats.accepted[drafts - 1] for g in made_ if len(g.stats.accepted) == drafts]
    assert max(whole_blocks) > 0
    assert len(noting.notes) > 12
    if (drafts, depth) == (15, 1):  # the others have the same blocks
        with torch.inference_mode():
            for (key, length), (drafts_, context) in noting.notes.items():
                _, alone_, from_scratch = drafted(drafter, [*key, *known[key]][: length + 1])
                assert alone_.tolist() == drafts_, (len(key), length)
                torch.testing.assert_close(context, from_scratch, rtol=1e-3, atol=1e-3)


def test_unaided_it_changes_no_token_and_no_more_is_asked_of_it_than_a_block_has(made: Made) -> None:
    _, model, _, root = made
    engine = engine_for(model, load_dflash(root / "drafter", model), num_draft_tokens=None)
    assert [g.tokens for g in engine.generate_many(ASKED)] == alone(model, ASKED)
    with pytest.raises(UsageError, match="16 draft tokens; its drafter makes at most 15 of them"):
        engine_for(model, load_dflash(root / "drafter", model), num_draft_tokens=16)


def test_int4_is_what_loading_makes_of_it(made: Made) -> None:
    _, model, _, root = made
    config = read_drafter_config(root / "drafter", model.config)
    assert (config.weights, config.keeping(Keeping("int4")).weights) == ("stored", "int4")
    both = (config.keeping(Keeping(weights)) for weights in ("stored", "int4"))
    stored, rounded = (load_drafter(root / "drafter", each, model.ops) for each in both)
    assert 0 < (stored.fc.weight - rounded.fc.weight).abs().max() < 0.3
    assert torch.equal(stored.norm, rounded.norm)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden_size": 64}, "drafts for a hidden size of 64; the target has 32"),
    "layers": ({"num_target_layers": 60}, "drafts for a model of 60 layers; the target has 5"),
    "vocabulary": ({"vocab_size": 100}, "drafts for a vocabulary of 100 tokens; the target has 96"),
    "taps": ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 5]}}, r"target_layer_ids is \[1, 5\]; "
             "it must be layers of the target, 0 to 4, in their order"),
    "order": ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [3, 1]}}, "in their order"),
    "mask": ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1]}}, "mask_token_id is 96; the target has"),
    "block": ({"block_size": 32}, "block_size is 32; blocks of up to 16 tokens"),
    "act": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "rope": ({"rope_scaling": {"factor": 2.0}}, "without scaling"),
    "types": ({"layer_types": ["full_attention"]}, "for each of 3 layers"),
    "heads": ({"num_key_value_heads": 3}, "4 query heads do not split over 3 KV heads"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_said(made: Made, tmp_path: Path, what: str) -> None:
    config = made[1].config
    overrides, message = WRONG[what]
    (tmp_path / "config.json").write_text(json.dumps(dflash_json(NUM_LAYERS, TAPS, **overrides)))
    with pytest.raises((UsageError, CheckpointError), match=message):
        read_drafter_config(tmp_path, config)


def test_fields_may_stand_beside_their_section(made: Made, tmp_path: Path) -> None:
    """As checkpoints of one maker differ; and transformers 5 has RoPE in an object."""
    config = made[1].config
    flat = dflash_json(NUM_LAYERS, TAPS)
    flat |= flat.pop("dflash_config") | {"rope_parameters": {"rope_type": "default", "rope_theta": flat["rope_theta"]}}
    flat["dflash_config"] = {"block_size": flat.pop("block_size")}
    del flat["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(flat))
    found = read_drafter_config(tmp_path, config)
    assert found == read_drafter_config(made[3] / "drafter", config)
    assert isinstance(found, DflashConfig)
    assert (found.taps, found.mask_id, found.policy.max_drafts, found.policy.block) == (TAPS, MASK, 15, 16)
    assert [layer.index for layer in found.policy.cache_layers] == [5, 6, 7]
    assert [layer.window for layer in found.policy.cache_layers] == [WINDOW, WINDOW, 0]


def test_a_table_of_its_own_is_refused(made: Made, tmp_path: Path) -> None:
    _, model, tensors, root = made
    save_file(tensors | {"lm_head.weight": torch.zeros(96, 32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((root / "drafter" / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"holds lm_head.weight, and a DFlash drafter has its target's"):
        load_drafter(tmp_path, read_drafter_config(tmp_path, model.config), model.ops)


def test_it_is_no_model(made: Made) -> None:
    with pytest.raises(UsageError, match="holds a drafter") as error:
        read_model_config(made[3] / "drafter")
    assert "--draft" in error.value.hint


def test_a_plan_says_what_it_is(made: Made, kerngen: Kerngen) -> None:
    root = made[3]
    named = str(root / "target"), "--draft", str(root / "drafter")
    what = "DFlash, 15 tokens at once, by the target's layers 0, 1, 3"
    plain, plan = (json.loads(kerngen.ok("run", named[0], *more, "--plan", "--json")) for more in ((), named[1:]))
    assert ("drafter" in plain, plan["drafter"]) == (False, what)
    # K and V of three layers, 2 heads of 16 in bf16
    assert plan["as released"]["token_bytes"] - plain["as released"]["token_bytes"] == 3 * 2 * 2 * 16 * 2
    assert plan["as released"]["drafter_bytes"] > 0
    assert f"The drafter: {what}." in kerngen.ok("run", *named, "--plan")
