"""Prompts with images on the GPU: kernels against the torch backend, and an engine with its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_runtime import _config, _model, _widened
from torch import Tensor

from kerngen.runtime.media.input import MediaInput
from kerngen.runtime.media.values import Media, Placed

IMAGE = 7
PLACES = ((20, 150), (180, 40), (221, 60))  # where images begin, and their tokens; one is longer than the window of 96
LENGTH = 300


def _rows(media: Media, hidden: int) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(media.digest[:7], "little"))
    return torch.randn(media.num_tokens, hidden, generator=generator)


def _taking_images(model: Any) -> Any:
    def embed(items: Sequence[Media]) -> list[Tensor]:
        rows = torch.cat([_rows(item, model.config.hidden_size) for item in items])
        there = rows.to(model.ops.dtype).pin_memory().to(model.ops.device, non_blocking=True)
        return list(there.split([item.num_tokens for item in items]))

    from kerngen.runtime.model import Gemma4

    media = MediaInput(embed, {"image": IMAGE}, bidirectional=True)
    return Gemma4(model.config, model.weights, model.ops, media=media)


def _image(num_tokens: int, seed: int) -> Media:
    return Media.of("image", np.full((num_tokens, 3), seed, np.uint8), (num_tokens, 1), num_tokens)


def _prompt(seed: int, length: int = LENGTH) -> tuple[list[int], tuple[Placed, ...]]:
    drawn = torch.randint(IMAGE + 1, 2048, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    media = tuple(Placed(start, _image(count, seed + i)) for i, (start, count) in enumerate(PLACES))
    for placed in media:
        drawn[placed.start : placed.end] = [IMAGE] * placed.media.num_tokens
    return drawn, media


def _hidden(model: Any) -> Tensor:
    """Final hidden states [LENGTH, H], prefilled in two chunks."""
    from kerngen.runtime.batch import Batch, MediaRows
    from kerngen.runtime.cache import KVCache

    ids, media = _prompt(1)
    parts, device = [], model.ops.device
    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=LENGTH + 20)
    for start, end in ((0, 175), (175, LENGTH)):
        inside = [placed for placed in media if start <= placed.start < end]
        tokens, ends = torch.tensor(ids[start:end]), torch.arange(start, end)
        rows = torch.cat([_rows(placed.media, model.config.hidden_size) for placed in inside])
        places = torch.cat([torch.arange(placed.start - start, placed.end - start) for placed in inside])
        tokens[places] = 0
        for placed in inside:
            ends[placed.start - start : placed.end - start] = placed.end - 1
        batch = Batch.prefill(tokens.to(device), start, cache)
        merged = MediaRows(rows.to(device, model.ops.dtype), places.to(device))
        batch = replace(batch, media=merged, ends=ends.to(device, torch.int32))
        parts.append(model.forward(batch, cache))
    return torch.cat(parts).float()


@pytest.mark.parametrize("quant", [False, True], ids=["bf16", "w4a16"])
def test_images_are_no_further_from_fp32_than_torch_has_them(quant: bool) -> None:
    config = _config(quant=quant)
    with torch.inference_mode():
        torch_model = _model("torch", config)
        exact = _hidden(_widened(torch_model))
        theirs = (_hidden(torch_model) - exact).norm() / exact.norm()
        ours = (_hidden(_model("cuda", config)) - exact).norm() / exact.norm()
    assert torch.isfinite(ours)
    assert ours <= 1.3 * theirs, f"cuda {float(ours):.4g}, torch bf16 {float(theirs):.4g} from fp32"


def test_a_prompt_with_images_has_its_tokens_in_any_company() -> None:
    """Beside text that prefills in graphs and decodes, and once more from the pages and embeddings that were kept."""
    from kerngen.runtime.engine import Engine, Request

    model = _taking_images(_model("cuda", _config(quant=True)))
    prompts = [_prompt(seed) for seed in (1, 2)]
    requests = [Request(ids, 12, media=media) for ids, media in prompts]
    requests += [Request([token for token in ids if token != IMAGE], 20) for ids, _ in prompts]
    options = {"max_len": LENGTH + 40, "max_batch": 4, "prefill_chunk": 128}
    single = Engine(model, **options, reproducible=True)
    expected = [single.generate_many([request])[0].tokens for request in requests]
    company = Engine(model, **options, reproducible=True)
    assert [g.tokens for g in company.generate_many(requests)] == expected
    usual = Engine(model, **options, num_pages={"full": 60, "sliding": 60})
    usual.make_ready()
    for again in range(2):
        made = usual.generate_many(requests)
        assert all(len(g.tokens) == request.max_new_tokens for g, request in zip(made, requests, strict=True))
        assert not {IMAGE} & {token for g in made for token in g.tokens}
        assert [g.stats.num_cached_tokens > LENGTH // 2 for g in made[:2]] == [again > 0] * 2
