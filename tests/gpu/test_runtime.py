"""The cuda backend against the torch backend: same weights, same prompt, on the GPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch

from kerngen.runtime.config import NO_DRAFTS, LayerConfig, ModelConfig, QuantConfig
from kerngen.workload.workload import find_model


def _config(*, quant: bool) -> ModelConfig:
    """Two layers of each kind with the 31B's head geometry scaled down; a window shorter than the prompt."""
    target = find_model("gemma-4-31b").target

    def layer(i: int, like: LayerConfig) -> LayerConfig:
        window = 96 if like.is_sliding else 0
        return replace(like, index=i, kv_source=i, intermediate_size=512, window=window,
                       num_kv_heads=2 if like.is_sliding else 1)  # fmt: skip

    layers = tuple(layer(i, target.layers[k]) for i, k in enumerate((0, 5, 1, 11)))
    return replace(target, layers=layers, hidden_size=256, vocab_size=2048, num_q_heads=8,
                   quant=QuantConfig(32, ()) if quant else None)  # fmt: skip


def _model(backend: str, config: ModelConfig) -> Any:
    from kerngen.runtime.backend import open_backend
    from kerngen.runtime.model import Gemma4
    from kerngen.runtime.weights.synthetic import synthetic_model

    ops = open_backend(backend, device="cuda", dtype="bf16")
    return Gemma4(config, synthetic_model(config, ops, seed=3), ops)


def _widened(model: Any) -> Any:
    """The same weights and maths in fp32: what rounding is measured against."""
    from kerngen.runtime.model import Gemma4
    from kerngen.runtime.ops.eager import TorchOps

    return Gemma4(model.config, _widen(model.weights), TorchOps(model.ops.device, torch.float32))


def _widen(value: Any) -> Any:
    """Weights in fp32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_widen(v) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _widen(getattr(value, f.name)) for f in fields(value)})
    return value


def _hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Final hidden states [296, H] of two prefill chunks and ten verification steps of four tokens."""
    from kerngen.runtime.batch import Batch
    from kerngen.runtime.cache import KVCache

    cache = KVCache.whole(model.config, model.ops, batch=1, max_len=400)
    parts = [model.forward(Batch.prefill(ids[i : i + 128], i, cache), cache) for i in range(0, 256, 128)]
    lengths = torch.tensor([256], device="cuda")
    for i in range(256, 296, 4):
        parts.append(model.forward(Batch.decode(ids[None, i : i + 4], lengths, cache, 256, model.ops), cache))
        lengths += 4
    return torch.cat(parts).float()


@pytest.mark.parametrize("quant", [False, True], ids=["bf16", "w4a16"])
def test_no_further_from_fp32_than_torch_is(quant: bool) -> None:
    """Random heads make attention nearly one-hot, so rounding alone moves hidden states a lot: what can be asked of the
    kernels is that they stay as near to the fp32 model as torch's own bf16 does."""
    config = _config(quant=quant)
    ids = torch.randint(0, config.vocab_size, (300,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    with torch.inference_mode():
        torch_model = _model("torch", config)
        exact = _hidden(_widened(torch_model), ids)
        theirs = (_hidden(torch_model, ids) - exact).norm() / exact.norm()
        ours = (_hidden(_model("cuda", config), ids) - exact).norm() / exact.norm()
    assert torch.isfinite(ours)
    assert ours <= 1.3 * theirs, f"cuda {float(ours):.4g}, torch bf16 {float(theirs):.4g} from fp32"


def test_graph_steps_equal_single_steps() -> None:
    """The captured decode step gives the tokens that uncaptured forwards give."""
    from kerngen.runtime.batch import Batch
    from kerngen.runtime.cache import KVCache
    from kerngen.runtime.engine import Engine

    config = _config(quant=True)
    model = _model("cuda", config)
    prompt = list(range(5, 205))
    tokens = Engine(model, max_len=300).generate(prompt, max_new_tokens=24).tokens
    with torch.inference_mode():
        cache = KVCache.whole(config, model.ops, batch=1, max_len=300)
        hidden = model.forward(Batch.prefill(torch.tensor(prompt, device="cuda"), 0, cache), cache, outputs="last")
        expected = [int(model.greedy(hidden))]
        lengths = torch.tensor([len(prompt)], device="cuda")
        while len(expected) < 24:
            batch = Batch.decode(torch.tensor([[expected[-1]]], device="cuda"), lengths, cache, 512, model.ops)
            expected.append(int(model.greedy(model.forward(batch, cache))))
            lengths += 1
    assert tokens == expected


@pytest.mark.parametrize("rows", [(1, 4), (3, 1), (16, 1), (2, 4)], ids=str)
def test_experts_beside_the_dense_mlp_give_what_they_give_one_after_the_other(rows: tuple[int, int]) -> None:
    """As branches of a captured graph, again and again, to the bit: nobody writes to what the other one still reads."""
    from kerngen.runtime.batch import Batch
    from kerngen.runtime.cache import KVCache

    config = replace(_config(quant=True), num_experts=16, top_k_experts=4, moe_intermediate_size=128)
    model = _model("cuda", config)
    batch, q_len = rows
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.inference_mode():
        cache = KVCache.whole(config, model.ops, batch=batch, max_len=300)
        for layer in config.layers:
            cache.pages(layer).k_cache.normal_(generator=generator)
            cache.pages(layer).v_cache.normal_(generator=generator)
        ids = torch.randint(0, 2048, (batch, q_len), device="cuda", generator=generator)
        lengths = torch.full((batch,), 200, device="cuda")

        def forward() -> torch.Tensor:
            return model.forward(Batch.decode(ids, lengths, cache, 512, model.ops), cache)

        expected = [forward() for _ in range(3)][-1].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forward()
        for _ in range(20):
            found.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, expected)


def test_what_fails_in_a_branch_of_a_capture_is_said_and_spoils_no_other() -> None:
    from kerngen.runtime.backend import open_backend

    ops = open_backend("cuda", device="cuda", dtype="bf16")
    x = torch.ones(64, device="cuda")

    def fails() -> torch.Tensor:
        raise LookupError("within a branch")

    def captured_in_part() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)
            ops.overlap(fails)

    with pytest.raises(LookupError, match="within a branch"):
        captured_in_part()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ops.overlap(lambda: x * 2)
        other = x * 3
        both = made() + other
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(both, x * 5)
    assert torch.equal(ops.overlap(lambda: x + 1)(), x + 1), "uncaptured, one after the other"


def test_a_prompt_in_chunks_of_odd_size_runs() -> None:
    """A chunk's ids start wherever the prompt was cut: at a multiple of 8 bytes, and of no more."""
    from kerngen.runtime.engine import Engine

    config = _config(quant=True)
    model = _model("cuda", config)
    prompt = list(range(5, 205))
    made = Engine(model, max_len=300, prefill_chunk=77).generate(prompt, max_new_tokens=8)
    assert len(made.tokens) == 8


@pytest.mark.parametrize("sizes", [(64,), (50,), (1, 40, 23), (300, 7), (512,)], ids=str)
def test_short_prefills_as_graphs_are_the_forwards_that_they_stand_for(sizes: tuple[int, ...]) -> None:
    """What a graph gives of each chunk's last token, and leaves in the cache for the next one, twice in a row."""
    from kerngen.runtime.engine import Engine
    from kerngen.runtime.engine.plan import SamplingMode

    config = _config(quant=True)
    model = _model("cuda", config)
    engine = Engine(model, max_len=1100, max_batch=4, num_pages={"full": 128, "sliding": 128})
    runner, pages = engine.runner, 17
    draw = torch.Generator().manual_seed(sum(sizes))
    with torch.inference_mode():
        runner.capture([NO_DRAFTS], [SamplingMode()])
        tables = 1 + torch.arange(2 * len(sizes) * pages, dtype=torch.int32).view(2, len(sizes), pages)
        made = []
        for is_graph in (False, True):
            starts, hidden = [0] * len(sizes), []
            for _ in range(2):
                ids = torch.randint(5, 205, (sum(sizes),), generator=draw.manual_seed(sum(starts))).tolist()
                if is_graph:
                    size = runner.prefill_graphs.size_for(sum(sizes), len(sizes))
                    found = runner.prefill_graphs.run(ids, starts, sizes, tables, size, "last")
                    assert found is not None
                else:
                    batch, cache = runner.chunks(ids, starts, sizes, tables.cuda())
                    found = model.forward(batch, cache, outputs="last")
                hidden.append(found.float().clone())
                starts = [start + n for start, n in zip(starts, sizes, strict=True)]
            made.append(torch.cat(hidden))
        assert torch.isfinite(made[1]).all()
        apart = (made[1] - made[0]).norm(dim=1) / made[0].norm(dim=1)
        assert apart.max() < 0.05, apart
        assert runner.prefill_graphs.size_for(4, 4) == 0
        assert runner.prefill_graphs.run([5] * 4, [0] * 4, [1] * 4, tables, 64, "last") is None


@pytest.mark.whole_gpu
@pytest.mark.parametrize(("hidden", "inner"), [(256, 512), (2048, 16384)], ids=["host", "device"])
def test_short_prefills_are_padded_where_that_takes_less(hidden: int, inner: int) -> None:
    """Of a model that takes the host longer and of one that takes the device longer, by the medians of more runs. The
    prefills that are timed leave no row and no page behind.
    """
    from kerngen.runtime.engine import Engine
    from kerngen.runtime.engine.plan import SamplingMode
    from kerngen.runtime.engine.prefill_graphs import MOST_EAGER_S

    config = _config(quant=True)
    layers = tuple(replace(layer, intermediate_size=inner) for layer in config.layers)
    model = _model("cuda", replace(config, layers=layers, hidden_size=hidden))
    engine = Engine(model, max_len=1100, max_batch=4)
    runner, graphs = engine.runner, engine.runner.prefill_graphs
    with torch.inference_mode():
        runner.capture([NO_DRAFTS], [SamplingMode()])
        sizes = graphs.captured_sizes
        middles = [(before + 1 + size) // 2 for before, size in pairwise([0, *sizes])]
        for middle in middles:  # compiled
            engine._prefill_seconds(middle, 0)
        plain, eager_s = engine._prefill_seconds, []

        def noted(tokens: int, size: int) -> list[float]:
            times = plain(tokens, size)
            eager_s.append(0.0 if size else sum(times))
            return times

        engine._prefill_seconds = noted
        engine._time_short_prefills()
        engine._prefill_seconds = plain
        assert 0 < sum(eager_s) <= MOST_EAGER_S
        assert graphs.padded is not None
        for size, middle in zip(sizes, middles, strict=True):
            graph, eager = (median(t for _ in range(5) for t in plain(middle, way)) for way in (size, 0))
            chosen, other = (graph, eager) if size in graphs.padded else (eager, graph)
            assert chosen < 1.1 * other, (size, graph, eager)
    assert not runner.ints.any()
    assert not runner.cache.tables.any()


@pytest.mark.parametrize(("sizes", "rows"), [((100,), 3), ((1, 40, 23), 8), ((300, 7), 5)], ids=str)
def test_a_mixed_step_is_the_forwards_that_it_stands_for(sizes: tuple[int, ...], rows: int) -> None:
    """Of the chunks' last tokens and of the rows that decode, from the same caches."""
    from kerngen.runtime.batch import Batch
    from kerngen.runtime.engine import Engine

    config = _config(quant=True)
    model = _model("cuda", config)
    assert model.supports_mixed
    engine = Engine(model, max_len=1100, max_batch=8, num_pages={"full": 256, "sliding": 256})
    runner, pages = engine.runner, 17
    draw = torch.Generator().manual_seed(sum(sizes))
    with torch.inference_mode():
        own_pages = 1 + torch.arange((rows + len(sizes)) * pages, dtype=torch.int32).view(-1, pages)
        of_rows, of_chunks = (half.expand(2, -1, -1).contiguous() for half in own_pages.split((rows, len(sizes))))
        starts = [17 * i + 1 for i in range(rows)]
        ids = torch.randint(5, 205, (sum(starts) + sum(sizes) + rows,), generator=draw).tolist()
        model.forward(*runner.chunks(ids[: sum(starts)], [0] * rows, starts, of_rows.cuda()))
        own = engine.cache.with_tables(of_rows.cuda())
        lengths, last = torch.tensor(starts).cuda(), torch.tensor(ids[-rows:]).cuda()
        new = ids[sum(starts) : -rows]
        found = []
        for is_mixed in (False, True):
            fed = Batch.decode(last[:, None], lengths, own, 512, model.ops)
            batch, cache = runner.chunks(new, [0] * len(sizes), sizes, of_chunks.cuda())
            if is_mixed:
                found.append(torch.cat(model.forward_mixed(batch, cache, fed, own)))
            else:
                states = model.forward(fed, own)
                found.append(torch.cat((model.forward(batch, cache, outputs="last"), states)))
        assert torch.isfinite(found[1]).all()
        apart = (found[1] - found[0]).float().norm(dim=1) / found[0].float().norm(dim=1)
        assert apart.max() < 0.05, apart
