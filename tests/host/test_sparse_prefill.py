"""Block-sparse prefill in engine, plans, workload and command line, on a tiny checkpoint without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Kerngen
from test_engine_batches import assert_nothing_is_held

from kerngen.arch import ARCHES, find_arch
from kerngen.errors import UsageError
from kerngen.runtime.config import Keeping, ModelConfig, SparsePrefill, read_model_config
from kerngen.runtime.engine import Engine, Load, Request
from kerngen.runtime.engine.pages import page_keys
from kerngen.runtime.engine.plan import PrefillChunk, StepPlan
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.serve.metrics import Metrics
from kerngen.runtime.session import Session, load, open_checkpoint
from kerngen.templates.common.attention.attention_torch import gather_pages
from kerngen.templates.common.attention.tile_lists_torch import means_of
from kerngen.workload.steps import Step, sequence
from kerngen.workload.workload import find_model

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny" / "gemma-4-tiny"
CPU = torch.device("cpu")
FULL = 5  # the tiny model's layer of full attention
LENGTH = 1700


@cache
def session_of(alpha: float | None) -> Session:
    return load(MODEL, draft=False, device="cpu", backend="torch", sparse_prefill=alpha)


def prompt(n: int = LENGTH, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(10, session_of(None).config.vocab_size, (n,), generator=draw).tolist()


def engine_of(alpha: float | None, **options: Any) -> Engine:
    return Engine(session_of(alpha).model, **{"max_len": 2048, **options})


def tokens_of(engine: Engine, ids: list[int], count: int = 12) -> list[int]:
    return engine.generate(ids, max_new_tokens=count).tokens


# ---- what it is


def test_alpha_says_whether_prompts_choose() -> None:
    config = read_model_config(MODEL)
    assert Keeping().sparse is None
    assert Keeping(sparse_prefill=1.0).sparse is Keeping(sparse_prefill=7).sparse is None
    assert config.keeping(Keeping(sparse_prefill=0.2)).sparse == SparsePrefill(0.2)
    assert Keeping(sparse_prefill=0.2).options == ("--sparse-prefill", "0.2")
    for wrong in (0.0, -0.1, float("nan")):
        with pytest.raises(UsageError, match=f"alpha is a number above 0, not {wrong:g}\n  0.1, say: below 1"):
            Keeping(sparse_prefill=wrong)


@pytest.mark.parametrize(("length", "dense_from"), [(1, 0), (256, 0), (257, 128), (384, 128), (1000, 768)])
def test_the_last_blocks_of_a_prompt_read_all(length: int, dense_from: int) -> None:
    assert SparsePrefill(0.1).dense_from(length) == dense_from


def test_a_page_of_another_alpha_is_another() -> None:
    keys = [page_keys(range(130), 64, made_by=s.key) for s in (SparsePrefill(0.1), SparsePrefill(0.2))]
    assert len(set(keys[0] + keys[1] + page_keys(range(130), 64))) == 6


# ---- what it gives


def test_a_tiny_alpha_gives_what_all_keys_give_and_density_falls() -> None:
    ids, shares = prompt(), []
    dense = tokens_of(engine_of(None), ids)
    for alpha in (1e-30, 0.3, 0.9, 0.99):
        engine = engine_of(alpha)
        found = tokens_of(engine, ids)
        assert alpha > 1e-30 or found == dense
        assert engine.load.density.keys() == {FULL}
        shares.append(engine.load.density[FULL])
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.9
    assert tokens_of(engine_of(2.0), ids) == dense
    assert engine_of(2.0).load.density == engine_of(None).load.density == {}


@pytest.mark.parametrize(
    "options", [{"prefill_chunk": 256}, {"prefill_chunk": 500}, {"page_size": 128}, {"page_size": 32}]
)
def test_chunks_and_pages_change_nothing(options: dict[str, Any]) -> None:
    whole, parts = engine_of(0.9), engine_of(0.9, **options)
    ids = prompt()
    assert tokens_of(parts, ids) == tokens_of(whole, ids)
    (kept, of_all), (kept_of_parts, all_of_parts) = (e.load.key_tiles[FULL] for e in (whole, parts))
    assert all_of_parts - kept_of_parts == of_all - kept > 0  # chunks whose queries see all keys are not counted


def test_many_prompts_at_once_choose_as_each_alone() -> None:
    prompts = [prompt(n, seed=n) for n in (1700, 900, 5, 1281)]
    alone = [tokens_of(engine_of(0.9), ids) for ids in prompts]
    engine = engine_of(0.9, max_batch=3, prefill_chunk=300)
    made = engine.generate_many([Request(ids, 12) for ids in prompts])
    assert [g.tokens for g in made] == alone
    assert_nothing_is_held(engine)


def test_a_prefix_is_found_as_far_as_whole_blocks_go() -> None:
    """And what was generated, whose means nobody wrote, gets them when it is found."""
    engine, ids = engine_of(0.9), prompt(900)
    answer = tokens_of(engine, ids, 300)
    longer = [*ids, *answer, *prompt(300, seed=4)]
    chunks: list[PrefillChunk] = []
    runs = engine.runner.run

    def seen(plan: StepPlan, *others: Any) -> Any:
        chunks.extend(plan.chunks)
        return runs(plan, *others)

    engine.runner.run = seen  # type: ignore[method-assign]
    found = engine.generate(longer, max_new_tokens=8)
    assert found.stats.num_cached_tokens == 1152  # 18 of 1199 tokens' pages, which are nine blocks
    assert (chunks[0].start, chunks[0].means_from) == (1152, 896)  # 14 whole pages of the prompt
    assert chunks[0].dense_from == 1280
    _assert_means(engine, chunks[0], len(longer))
    again = engine.generate(longer, max_new_tokens=8)
    assert again.tokens == found.tokens
    assert chunks[-1].means_from == chunks[-1].start


def _assert_means(engine: Engine, chunk: PrefillChunk, length: int) -> None:
    layer = engine.model.config.layers[FULL]
    table, means = torch.tensor(chunk.pages[0]), engine.cache.means(layer)
    assert means is not None
    keys = gather_pages(engine.cache.pages(layer).k_cache, table, 0, length)
    found = means[table].transpose(1, 2).flatten(0, 1)[: length // 32]
    torch.testing.assert_close(found, means_of(keys, 32))


def test_a_preempted_prompt_goes_on() -> None:
    """Two prompts, and pages for little more than one: each gets the tokens that it gets alone."""
    prompts = [prompt(700, seed=1), prompt(760, seed=2)]
    alone = [tokens_of(engine_of(0.9, max_len=1024), ids, 150) for ids in prompts]
    engine = engine_of(0.9, max_len=1024, max_batch=2, num_pages={"full": 26, "sliding": 40})
    made = engine.generate_many([Request(ids, 150) for ids in prompts])
    assert engine.load.num_preemptions
    assert [g.tokens[:1] for g in made] == [tokens[:1] for tokens in alone]
    assert_nothing_is_held(engine)


def test_the_kernels_path_has_the_oracles_tokens() -> None:
    """With the references in place of kernels, in fp32: only sums in another order differ."""
    kept, found = Keeping(sparse_prefill=0.9), []
    for ops in (TorchOps(CPU, torch.float32), KernelOps(Reference(), torch.float32)):
        engine = Engine(open_checkpoint(MODEL, ops, kept=kept).model, max_len=1300, prefill_chunk=640)
        found.append((tokens_of(engine, prompt(1250), 4), engine.load.key_tiles))
    assert found[0] == found[1]
    kept_tiles, of_all = found[0][1][FULL]
    assert kept_tiles < of_all


# ---- what refuses it, and says so


def test_what_cannot_be_is_refused_in_words() -> None:
    model = session_of(0.1).model
    with pytest.raises(UsageError, match=r"sparse prefill by alpha 0.1 keeps keys by an estimate.*no run is reprod"):
        Engine(model, max_len=64, reproducible=True)
    with pytest.raises(UsageError, match="a mean of each 32 keys of a page, and pages of 16 tokens have no whole ones"):
        Engine(model, max_len=64, page_size=16)
    Engine(session_of(3.0).model, max_len=64, page_size=16, reproducible=True)
    with pytest.raises(UsageError, match="inside vLLM prompts read all keys"):
        find_model("gemma-4-31b", kept=Keeping(sparse_prefill=0.1)).on("vllm")


def test_plans_say_it_and_are_held_to_it() -> None:
    engine = engine_of(0.9, max_len=256)
    chunk = PrefillChunk((5,) * 128, 128, ((1, 2, 3, 4), (1, 2, 3, 4)), means_from=64, dense_from=256)
    plan = StepPlan(num_running=0, chunks=(chunk,))
    assert StepPlan.from_json(plan.to_json(), engine.runner.limits) == plan
    for wrong in ({"means_from": 129}, {"means_from": -1}, {"dense_from": -1}, {"dense_from": 10_000}):
        bad = replace(plan, chunks=(replace(chunk, **wrong),))
        with pytest.raises(UsageError, match=r"means begin|reads all keys"):
            StepPlan.from_json(bad.to_json(), engine.runner.limits)


# ---- what it takes, and what is asked of kernels


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-12b", "gemma-4-e4b"])
def test_long_prefills_alone_ask_for_lists(name: str) -> None:
    sparse, dense = (find_model(name, kept=Keeping(sparse_prefill=alpha)) for alpha in (0.1, None))
    new = {"key_means", "tile_scores", "tile_lists"}
    for step, asked in (
        (Step.prefill(2048, 32768), new), (Step.prefill(512, 768), {"key_means"}), (Step.decode(1, 32768), set()),
    ):  # fmt: skip
        calls = [[(c.kernel, c.problem) for c in sequence(m, step, find_arch("sm90"))] for m in (sparse, dense)]
        assert {kernel for kernel, _ in calls[0]} - {kernel for kernel, _ in calls[1]} == asked, step.name
        listed = [p for kernel, p in calls[0] if kernel == "attn_prefill" and p.lists]
        assert bool(listed) == (len(asked) == 3)
        unlisted = [replace(p, lists=False) if k == "attn_prefill" else p for k, p in calls[0] if k not in new]
        assert unlisted == [p for _, p in calls[1]]


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_the_cache_takes_what_is_said(alpha: float | None) -> None:
    engine = engine_of(alpha)
    assert engine.cache.num_bytes == engine.shape.num_bytes(engine.cache.num_pages)
    shape = session_of(alpha).cache_shape
    layer = engine.model.config.layers[FULL]
    more = layer.head_dim * layer.num_kv_heads * 4 / 32 if alpha else 0.0  # fp32
    assert shape.token_bytes == session_of(None).cache_shape.token_bytes + more


def test_an_arch_without_the_kernels_is_refused_as_a_model_opens() -> None:
    from kerngen.templates import find_kernel

    for arch in ARCHES.values():
        from kerngen.arch import Target

        problem: Any = find_kernel("tile_scores").problem_type(dtype="fp16")
        why = find_kernel("tile_scores").why_unsupported(problem, Target.of(arch))
        assert (why is None) == arch.has_ldmatrix


# ---- what is shown


class _Engines:
    replicas = ()

    def __init__(self, load: Load) -> None:
        self.load = load


def test_metrics_have_tiles_by_layer() -> None:
    pages = {"full": 1, "sliding": 1}
    load = Load(0, 0, 0, 0, 0, pages, pages, {5: (30, 120), 11: (60, 120)})
    text = Metrics("m", _Engines(load)).text().decode()  # type: ignore[arg-type]
    assert 'kerngen:prefill_key_tiles_read_total{layer="5",model_name="m"} 30.0' in text
    assert 'kerngen:prefill_key_tiles_total{layer="11",model_name="m"} 120.0' in text
    assert load.density == {5: 0.25, 11: 0.5}
    assert "key_tiles" not in Metrics("m", _Engines(Load(0, 0, 0, 0, 0, pages, pages))).text().decode()  # type: ignore[arg-type]


def test_metrics_name_the_cache() -> None:
    pages = {"full": 1, "sliding": 1}
    cache = {"block_size": "64", "cache_dtype": "int8"}
    text = Metrics("m", _Engines(Load(0, 0, 0, 0, 0, pages, pages)), cache).text().decode()  # type: ignore[arg-type]
    assert 'vllm:cache_config_info{block_size="64",cache_dtype="int8",model_name="m"} 1.0' in text


@pytest.fixture(scope="module")
def long_text() -> str:
    return " ".join(f"The {i}th ship left the harbour in the rain." for i in range(90))


def test_run_says_what_prompts_read(kerngen: Kerngen, long_text: str) -> None:
    how = ("--no-chat", "--backend", "torch", "--device", "cpu", "--max-new-tokens", "2", "--no-draft")
    code, out, _ = kerngen("run", str(MODEL), "--prompt", long_text, *how, "--sparse-prefill", "0.9", "--json")
    said = json.loads(out)
    assert code == 0
    assert 0 < said["prefill_density"]["5"] <= 1
    code, _, err = kerngen("run", str(MODEL), "--prompt", "hi", *how, "--sparse-prefill", "-1")
    assert code == 2
    assert "alpha is a number above 0, not -1" in err
    assert "0.1, say" in err


@pytest.mark.parametrize("alpha", ["1", "2", "inf"])
def test_an_alpha_that_leaves_nothing_out_is_said(kerngen: Kerngen, alpha: str) -> None:
    model = ("run", "gemma-4-e2b", "--plan")
    code, out, err = kerngen(*model, "--sparse-prefill", alpha)
    assert (code, out) == (0, kerngen.ok(*model))
    assert f"--sparse-prefill {alpha}: prompts read all keys, as without it" in err
    _, _, err = kerngen(*model, "--sparse-prefill", "0.5")
    assert "prompts read all keys" not in err


def test_reproducible_is_refused_before_anything_is_loaded(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*args: object, **more: object) -> None:
        raise AssertionError("something is loaded")

    monkeypatch.setattr("kerngen.runtime.serve.server.run", must_not_run)
    monkeypatch.setattr("kerngen.soak.models.open_model", must_not_run)
    how = ("--backend", "torch", "--reproducible", "--sparse-prefill", "0.1")
    for command in (("serve", str(MODEL), *how, "--no-draft", "--port", "0"), ("soak", str(MODEL), *how)):
        code, _, err = kerngen(*command)
        assert code == 2, err
        assert "sparse prefill by alpha 0.1 keeps keys by an estimate" in err
        assert "leave sparse prefill out, or reproducible" in err


def test_the_configuration_is_one_value() -> None:
    fields = {name for name in ModelConfig.__dataclass_fields__ if "sparse" in name}
    assert fields == {"sparse"}
