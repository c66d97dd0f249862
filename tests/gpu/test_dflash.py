"""A DFlash drafter on the GPU: its block against fp32 and as a graph, and the tokens that there are without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_runtime import _config, _model, _widen, _widened
from torch import Tensor

from kerngen.runtime.batch import Batch
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import ModelConfig
from kerngen.runtime.dflash import DflashDrafter
from kerngen.runtime.dflash_config import DflashConfig
from kerngen.runtime.drafters import forward
from kerngen.runtime.engine import Engine
from kerngen.runtime.weights.dflash import DflashWeights
from kerngen.runtime.weights.synthetic import synthetic_drafter
from kerngen.workload.workload import find_model

CONTEXTS = (5, 130, 300)  # before, around and behind the windows


def _drafter_config(target: ModelConfig) -> DflashConfig:
    """The 31B's layers and heads, beside a smaller target; windows of 128."""
    config = find_model("gemma-4-31b", "dflash").drafter
    assert isinstance(config, DflashConfig)
    first = len(target.layers)
    layers = tuple(
        replace(layer, index=first + i, kv_source=first + i, window=min(layer.window, 128), intermediate_size=512)
        for i, layer in enumerate(config.text.layers)
    )
    text = replace(config.text, layers=layers, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    return replace(config, text=text, taps=(0, 2, 3))


def _drafter(model: Any, like: DflashDrafter | None = None) -> DflashDrafter:
    """Of generated weights, or of those of `like` in fp32."""
    config = _drafter_config(model.config)
    weights = synthetic_drafter(config, model.ops, seed=4) if like is None else _widen(like.weights)
    return DflashDrafter(config, weights, model)


def _block(drafter: DflashDrafter, ids: Tensor, length: int) -> Tensor:
    """States [16, H] of the block behind ids[:length], whose context was prefilled in two chunks."""
    model = drafter.target
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=length + 16,
                          drafter_layers=drafter.policy.cache_layers)  # fmt: skip
    for begin, end in ((0, length // 2), (length // 2, length)):
        forward(model, drafter, Batch.prefill(ids[begin:end], begin, cache), cache)
    at = torch.tensor([length], device=ids.device)
    return drafter.block(ids[length : length + 1], at, cache, length)[0].float()


def _ids(config: ModelConfig) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.randint(0, config.vocab_size, (CONTEXTS[-1] + 1,), device="cuda", generator=generator)


@pytest.mark.parametrize("length", CONTEXTS)
def test_a_block_is_no_further_from_fp32_than_torchs(length: int) -> None:
    config = _config(quant=False)
    ids = _ids(config)
    with torch.inference_mode():
        torchs = _drafter(_model("torch", config))
        exact = _block(_drafter(_widened(torchs.target), torchs), ids, length)
        theirs = (_block(torchs, ids, length) - exact).norm() / exact.norm()
        ours = (_block(_drafter(_model("cuda", config)), ids, length) - exact).norm() / exact.norm()
    assert torch.isfinite(ours)
    assert ours <= 1.3 * theirs, f"cuda {float(ours):.4g}, torch bf16 {float(theirs):.4g} from fp32"


def _louder(weights: DflashWeights) -> DflashWeights:
    """With layers that outweigh the embedding, which their target's head makes the mask token of, for all drafts."""
    layers = (replace(w, input_norm=16 * w.input_norm, post_attention_norm=16 * w.post_attention_norm)
              for w in weights.layers)  # fmt: skip
    return replace(weights, layers=tuple(layers))


@pytest.mark.parametrize("count", [3, 7, 15])
def test_drafts_of_a_graph_are_those_of_single_launches(count: int) -> None:
    config = _config(quant=True)
    model, ids = _model("cuda", config), _ids(config)
    with torch.inference_mode():
        generated, length = _drafter(model), CONTEXTS[1]
        drafter = DflashDrafter(generated.config, _louder(generated.weights), model)
        cache = KVCache.whole(config, model.ops, batch=1, max_len=length + 16,
                              drafter_layers=drafter.policy.cache_layers)  # fmt: skip
        forward(model, drafter, Batch.prefill(ids[:length], 0, cache), cache)
        last, lengths = ids[length : length + 1].clone(), torch.tensor([length], device="cuda")
        hidden = torch.empty(1, config.hidden_size, dtype=model.ops.dtype, device="cuda")

        def propose() -> Tensor:
            return drafter.propose(last, hidden, lengths, cache, count, 512)

        for _ in range(3):
            propose()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = propose()
        drafted: set[int] = set()
        for first in (length, 1, 2, 3, 5, 8):
            last.copy_(ids[first : first + 1])
            expected = propose().clone()
            drafted.update(expected[0].tolist())
            for _ in range(20):
                found.fill_(-1)
                graph.replay()
                assert torch.equal(found, expected)
    assert len(drafted) > 1


@pytest.mark.parametrize("drafts", [7, 15, None])
def test_drafting_changes_no_token(drafts: int | None) -> None:
    """In steps that are graphs. Sums of several tokens have another order than those of one: what is all but equal may
    fall otherwise, and the text goes on otherwise then.
    """
    config = _config(quant=True)
    model, prompt = _model("cuda", config), list(range(5, 205))
    plain = Engine(model, max_len=300, reproducible=True).generate(prompt, max_new_tokens=40)
    drafted = Engine(model, _drafter(model), max_len=300, num_draft_tokens=drafts).generate(prompt, max_new_tokens=40)
    alike = next((i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)) if a != b), 40)
    assert alike >= 8, (plain.tokens, drafted.tokens)
    assert sum(drafted.stats.drafted) > 0
