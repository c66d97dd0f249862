"""The memory that a model is said to take, against what is really allocated and what docs/models.md says."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from command import ROOT, Kerngen

from kerngen.errors import ProblemError
from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import KV_CACHES, Keeping, read_drafter_config, read_model_config
from kerngen.runtime.engine import MEDIA_CACHE_BYTES, CacheShape, Engine
from kerngen.runtime.executors.record import Record
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import CONTEXTS, Plan, _bytes, footprint, plan, tower_bytes
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.templates.kv_write.op import kv_write
from kerngen.templates.values import AttnBatch, HeadNorms, KVFormat
from kerngen.workload.workload import MODELS, find_media, find_model

TINY = ROOT / "examples" / "tiny"


@pytest.mark.parametrize(("name", "weights"), [("gemma-4-tiny", "stored"), ("gemma-4-tiny-w4a16", "int4")])
def test_what_is_loaded_takes_as_much_as_is_said(name: str, weights: str) -> None:
    config = read_model_config(TINY / name)
    drafter = read_drafter_config(TINY / "gemma-4-tiny-assistant", config).keeping(Keeping(weights))
    ops = KernelOps(Reference(), torch.bfloat16)
    said = footprint(config, drafter, torch.bfloat16, 500)
    assert said.weight_bytes == _bytes(load_model(TINY / name, config, ops))
    assert said.drafter_bytes == _bytes(load_drafter(TINY / "gemma-4-tiny-assistant", drafter, ops))
    model = Gemma4(config, load_model(TINY / name, config, ops), ops)
    engine = Engine(model, max_len=500, num_draft_tokens=7, async_depth=1)
    assert said.cache_bytes == engine.cache.num_bytes


def test_int4_weights_take_a_quarter_and_their_scales() -> None:
    config = read_model_config(TINY / "gemma-4-tiny-w4a16")
    packed = footprint(config, None, torch.bfloat16, 64).weight_bytes
    dense = footprint(config, None, torch.bfloat16, 64, dense=True).weight_bytes
    whole = read_model_config(TINY / "gemma-4-tiny")
    assert dense == footprint(whole, None, torch.bfloat16, 64).weight_bytes
    assert packed < dense


def test_doctor_prints_it(kerngen: Kerngen) -> None:
    which = ("doctor", "--model", str(TINY / "gemma-4-tiny-w4a16"), "--arch", "sm80", "--context", "500")
    memory = json.loads(kerngen(*which, "--json")[1])["model"]["memory"]
    said = footprint(read_model_config(TINY / "gemma-4-tiny-w4a16"), None, torch.bfloat16, 500)
    assert memory["as released"] == {"weights": said.weight_bytes, "drafter": 0, "cache": said.cache_bytes}
    assert memory["unquantized"]["weights"] > said.weight_bytes
    assert "memory, as released: 0.0 GB at 500 tokens" in kerngen(*which)[1]


def size_row(name: str, packed: Plan, dense: Plan) -> str:
    """A model's row of the first table in docs/models.md."""
    gb = (packed.weight_bytes, dense.weight_bytes, packed.drafter_bytes, max(packed.screen_bytes.values()))
    cache = f"{packed.token_bytes / 1e3:.1f} | {packed.window_bytes / 1e6:.0f}"
    return f"| {name} | {' | '.join(f'{size / 1e9:.1f}' for size in gb)} | {cache} |"


def fits_rows(name: str, plan: Plan) -> list[str]:
    """A model's rows of the second: one a GPU size, empty cells for contexts that the model does not take."""
    rows = []
    for gb, row in plan.sequences.items():
        cells = ["" if c not in row else f"{row[c]:,}" if row[c] else "-" for c in CONTEXTS]
        longest = plan.longest[gb]
        rows.append(f"| {name} | {gb} | {' | '.join(cells)} | {f'{longest:,}' if longest else '-'} |")
    return rows


def format_rows(name: str) -> list[str]:
    """A model's rows of the third: one a format of the cache."""
    rows = []
    shares = any(layer.v_is_k for layer in find_model(name).target.layers)
    for dtype, layout in KV_CACHES[1:]:
        if layout == "shared" and not shares:
            continue
        model = find_model(name, kept=Keeping(kv_cache_dtype=dtype, kv_cache_layout=layout))
        made = plan(model.target, model.drafter, torch.bfloat16)
        longest = (f"{made.longest[gb]:,}" if made.longest[gb] else "-" for gb in (16, 24, 32))
        rows.append(f"| {name} | {dtype}, {layout} | {made.token_bytes / 1e3:.1f} | {made.window_bytes / 1e6:.0f} "
                    f"| {' | '.join(longest)} | {made.sequences[80][8192]:,} |")  # fmt: skip
    return rows


def test_what_embeds_images_counts_where_it_is_asked_for() -> None:
    target = find_model("gemma-4-26b-a4b").target
    media = find_media("gemma-4-26b-a4b")
    assert media is not None
    without, counted = (plan(target, None, torch.bfloat16, media=m) for m in (None, media))
    assert (without.tower_bytes, counted.tower_bytes) == (0, tower_bytes(media, torch.bfloat16))
    # the published 1.146 GB, the standard twice as wide, and norms of heads once more
    assert counted.tower_bytes == 2 * (569_548_080 + 3_244_032 + 27 * 2 * 72) + 4 * 2304
    assert counted.weight_bytes == without.weight_bytes
    assert (without.media_cache_bytes, counted.media_cache_bytes) == (0, MEDIA_CACHE_BYTES)
    assert counted.sequences[24][2048] < without.sequences[24][2048]
    assert counted.longest[80] <= without.longest[80]


def test_the_page_of_models_says_what_the_code_computes() -> None:
    """On failure: the tables as they should be."""
    sizes, fits, formats = [], [], []
    for name in MODELS:
        model = find_model(name)
        packed, dense = (plan(model.target, model.drafter, torch.bfloat16, dense=d) for d in (False, True))
        sizes.append(size_row(name, packed, dense))
        fits += fits_rows(name, packed)
        formats += format_rows(name)
    said = re.findall(r"^\| gemma-4-.*\|$", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    wanted = [*sizes, "", *fits, "", *formats]
    assert said == [row for row in wanted if row], "docs/models.md should have:\n" + "\n".join(wanted)


def test_the_page_of_models_says_what_images_and_sound_take() -> None:
    said = dict(re.findall(r"([\d,]+) MB of\s+the (\w+(?:-\w+)?)", (ROOT / "docs" / "models.md").read_text()))
    found = {}
    for name in MODELS:
        media = find_media(name)
        assert media is not None
        for part in media.parts:
            only = media.only([part])
            assert only is not None
            found[f"{tower_bytes(only, torch.bfloat16) / 1e6:,.0f}"] = name.removeprefix("gemma-4-").upper()
    assert said == found


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-e2b"])
def test_what_fits_is_what_the_engine_would_allocate(name: str) -> None:
    """The last sequence that fits does, the next one does not; and what is split stays within the budget."""
    target = find_model(name).target
    shape = CacheShape(target, torch.bfloat16)
    ops = KernelOps(Record(lambda *_: None, lambda _: None), torch.bfloat16)
    for budget in (3 * 10**9, 50 * 10**9):
        for context in (2048, 32768):
            most = shape.most_sequences(budget, context)
            assert shape.fits(budget, most, context)
            assert not shape.fits(budget, most + 1, context)
            sequences, pages = shape.split(budget, 64, context)
            cache = KVCache(target, ops, num_pages=pages, batch=sequences, max_len=context)
            assert cache.num_bytes == shape.num_bytes(pages)
            if most:
                assert sequences == min(most, 64)
                assert budget - shape.page_bytes["full"] < cache.num_bytes <= budget
        longest = shape.most_tokens(budget)
        assert longest == target.max_positions or not shape.fits(budget, 1, longest + 1)


def test_a_format_of_the_cache_says_what_its_pages_take() -> None:
    """In int8: what is allocated, what is said to fit, and what kernels are told."""
    target, ops = find_model("gemma-4-e2b").target, KernelOps(Record(lambda *_: None, lambda _: None), torch.bfloat16)
    small, pages = target.keeping(Keeping(kv_cache_dtype="int8")), {"full": 5, "sliding": 9}
    shape, plain = CacheShape(small, torch.bfloat16), CacheShape(target, torch.bfloat16)
    cache = KVCache(small, ops, num_pages=pages, batch=1, max_len=64)
    assert cache.num_bytes == shape.num_bytes(pages)
    assert shape.num_bytes(pages) / plain.num_bytes(pages) == (1 + 2 / 64) / 2
    layer, ints = target.layers[0], torch.empty(1, dtype=torch.int64, device="meta")
    kv, batch = cache.pages(layer), AttnBatch(cache.tables[0], ints.int(), positions=ints, slot_mapping=ints)
    assert (kv.head_dim, kv.num_kv_heads, kv.page_size) == (layer.head_dim, layer.num_kv_heads, 64)
    weights = torch.empty(2, layer.head_dim, dtype=torch.bfloat16, device="meta")
    heads = HeadNorms(weights[0], weights[0, ::2].float(), 8, 1e-6, weights[1], target.num_q_heads)
    columns = (target.num_q_heads + 2 * kv.num_kv_heads) * layer.head_dim
    projected = torch.empty(1, columns, dtype=torch.bfloat16, device="meta")
    assert ops.attend_decode(projected, heads, kv, batch).shape[1] == target.num_q_heads
    unknown = replace(kv, format=KVFormat("bytes", torch.int8, 64))
    with pytest.raises(
        ProblemError,
        match="kernels read caches in plain, int8, shared, shared_int8, int4, shared_int4, int3, shared_int3, fp8, "
        "not in bytes",
    ):
        ops.attend_decode(projected, heads, unknown, batch)
    with pytest.raises(ProblemError, match="this kernel reads plain caches, not int8 ones"):
        kv_write(projected.view(1, -1, layer.head_dim), projected.view(1, -1, layer.head_dim), kv, ints)


def test_run_prints_the_plan(kerngen: Kerngen) -> None:
    model = str(TINY / "gemma-4-tiny-w4a16")
    config = read_model_config(TINY / "gemma-4-tiny-w4a16")
    code, out, _ = kerngen("run", model, "--plan", "--json")
    said = json.loads(out)
    expected = plan(config, None, torch.bfloat16)
    assert code == 0
    assert said["as released"]["weight_bytes"] == expected.weight_bytes
    assert said["as released"]["sequences"]["80"]["2048"] == expected.sequences[80][2048]
    assert said["unquantized"]["weight_bytes"] > expected.weight_bytes
    assert said["media_bytes"] == {}
    text = kerngen("run", model, "--plan")[1]
    assert f"{expected.sequences[141][2048]:,}" in text
    assert "unquantized" in text
    assert "Predicted" not in text
    assert "Predicted on T4 of 16 GiB, ms a step" in kerngen.ok("run", model, "--plan", "--device", "T4")
    code, _, err = kerngen("run", model, "--plan", "--device", "cuda:0")
    assert (code, "unknown device 'cuda:0'" in err) == (2, True)
    code, _, err = kerngen("run", "no-such-model", "--plan")
    assert code != 0
    assert "unknown model 'no-such-model'" in err


def test_run_says_what_images_take(kerngen: Kerngen) -> None:
    media = find_media("gemma-4-31b")
    assert media is not None
    said = json.loads(kerngen("run", "gemma-4-31b", "--plan", "--json")[1])
    assert said["media_bytes"] == {"vision": tower_bytes(media, torch.bfloat16)}
    assert said["as released"]["tower_bytes"] == 0
    counted = json.loads(kerngen("run", "gemma-4-31b", "--plan", "--media", "images", "--json")[1])
    assert counted["as released"]["tower_bytes"] == said["media_bytes"]["vision"]
    told = kerngen("run", "gemma-4-31b", "--plan", "--media", "images")[1]
    assert "What embeds images takes 1,151 MB more, which are counted above" in told
    assert "Embeddings that are kept take up to 268 MB" in told
    assert "What embeds images takes 1,151 MB more, not counted above" in kerngen("run", "gemma-4-31b", "--plan")[1]
