"""Gemma-4's layers whose backend makes q, K and V, beside vLLM's own in the same model, on the CPU."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_attention
import test_model
import torch
from conftest import recorded, serves
from torch import Tensor

if not (serves("model") and serves("attention")):
    pytest.skip("the parts `model` and `attention` are not for this release of vLLM", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("registered", "kerngens_backend")

SIZE, BLOCKS = 64, 8
TABLES = torch.tensor([[3, 5], [6, 1], [2, 7]], dtype=torch.int32)
V_IS_K: dict[str, Any] = {}
OWN_V: dict[str, Any] = {"attention_k_eq_v": False, "num_global_key_value_heads": 2}


@pytest.fixture(scope="module")
def kerngens_backend(gated_gelu: None) -> Iterator[None]:
    """vLLM's own Attention, for which its platform would choose the backend."""
    from vllm.model_executor.layers.attention import attention

    from kerngen.vllm.attention_v0_26 import Backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "get_attn_backend", lambda *args, **options: Backend)
        yield


def text_config(**changes: Any) -> Any:
    """Of a small model, in heads that attention's kernels take."""
    fields = {"head_dim": 128, "global_head_dim": 256, "sliding_window": 9, "max_position_embeddings": 256}
    return test_model.text_config(**(fields | changes))


def make(monkeypatch: pytest.MonkeyPatch, cls: Any = None, hf: Any = None, seed: int = 1, **settings: Any) -> Any:
    made = test_model.vllm_config

    def vllm_config(*args: Any, **given: Any) -> Any:
        config = made(*args, **given)
        config.model_config.max_model_len, config.model_config.is_mm_prefix_lm = 256, False
        return config

    monkeypatch.setattr(test_model, "vllm_config", vllm_config)
    hf = hf or text_config()
    checkpoint = test_model.Checkpoint(hf, seed=seed)
    if not hf.attention_k_eq_v:
        for i, kind in enumerate(hf.layer_types):
            if kind == "full_attention":
                rows = hf.num_key_value_heads * hf.global_head_dim
                checkpoint._matrix(f"layers.{i}.self_attn.v_proj", rows, test_model.HIDDEN)
    try:
        return test_model.make(cls or test_model.ours(), hf, True, checkpoint.int4, **settings)
    finally:
        monkeypatch.setattr(test_model, "vllm_config", made)


def with_vllms_own(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """The model whose layers' attention begins in vLLM's own forward."""
    from kerngen.vllm import self_attention_v0_26 as ours

    with monkeypatch.context() as patch:
        patch.setattr(ours, "serve", lambda *args: "a test wants it so")
        return make(monkeypatch, **settings)


def pair(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, Any]:
    """(with kerngen's heads, with vLLM's), of the same weights."""
    hf = text_config(**changes)
    return make(monkeypatch, hf=hf), with_vllms_own(monkeypatch, hf=hf)


def attentions(model: Any) -> dict[str, Any]:
    """vLLM's Attention of each layer, by name."""
    return {layer.self_attn.attn.layer_name: layer.self_attn.attn for layer in model.model.layers}


def in_fp32(model: Any) -> Any:
    """Angles' sines and cosines too, which vLLM has rounded by then."""
    for layer in model.float().model.layers:
        rope = layer.self_attn.rotary_emb
        rope.cos_sin_cache = rope._compute_cos_sin_cache()
    return model


class Batch:
    """Sequences of `kv_lens` tokens, the last `q_lens` of which are new. tokens: with those that pad a graph."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], tokens: int = 0, padded_slots: bool = True) -> None:
        self.q_lens, self.kv_lens = q_lens, kv_lens
        at = [range(n - q, n) for q, n in zip(q_lens, kv_lens, strict=True)]
        self.num_tokens = sum(q_lens)
        slots = [int(t[p // SIZE]) * SIZE + p % SIZE for t, row in zip(TABLES, at, strict=False) for p in row]
        padding = max(0, tokens - self.num_tokens)
        self.positions = torch.tensor([p for row in at for p in row] + [0] * padding)
        self.slots = torch.tensor(slots + [-1] * padding * padded_slots)
        self.ids = torch.arange(len(self.positions)) % 64

    def run(self, model: Any, has_metadata: bool = True, call: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        """(hidden states of the new tokens, caches by layer), from caches that are the same each time. call: in place
        of the model's own.
        """
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        from kerngen.vllm.attention_v0_26 import Backend, Builder

        call, config = call or model, model.model.vllm_config
        random = torch.Generator().manual_seed(3)
        dtype = model.model.norm.weight.dtype
        spec: Any = SimpleNamespace(block_size=SIZE)
        common = test_attention.common(self.q_lens, self.kv_lens, TABLES[: len(self.q_lens)])
        metadata, slots = {}, {}
        for name, layer in attentions(model).items():
            shape = Backend.get_kv_cache_shape(BLOCKS, SIZE, layer.num_kv_heads, layer.head_size)
            layer.kv_cache = torch.randn(shape, generator=random).to(torch.bfloat16).to(dtype)
            if (shared := layer.kv_sharing_target_layer_name) is not None:
                layer.kv_cache = attentions(model)[shared].kv_cache
            metadata[name] = Builder(spec, [name], config, torch.device("cpu")).build(0, common)
            slots[name] = self.slots
        given: Any = (metadata, {"slot_mapping": slots}) if has_metadata else (None, {})
        with (
            torch.no_grad(), set_current_vllm_config(config),
            set_forward_context(given[0], config, num_tokens=len(self.ids), **given[1]),
        ):  # fmt: skip
            out = call(self.ids, self.positions)[: self.num_tokens]
        return out, {name: layer.kv_cache for name, layer in attentions(model).items()}


BATCHES = {
    "decodes": Batch([1, 1], [70, 3]),
    "prefill": Batch([75], [75]),
    "mixed": Batch([1, 30, 2], [100, 94, 2]),
    "a padded graph": Batch([1, 1, 1], [9, 64, 65], tokens=8),
    "padding without slots": Batch([1, 20], [9, 64], tokens=24, padded_slots=False),
}


def kinds(model: Any) -> list[str]:
    return [type(layer.self_attn).__name__ for layer in model.model.layers]


@pytest.mark.parametrize("changes", [V_IS_K, OWN_V], ids=["K = V", "V apart"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
def test_heads_are_vllms(batch: Batch, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sliding and full layers: in fp32 the same, what is cached too; in bf16 as near to that as vLLM's own."""
    mine, theirs = pair(monkeypatch, **changes)
    assert (kinds(mine), kinds(theirs)) == (["SelfAttention"] * 4, ["Gemma4Attention"] * 4)
    in_bf16 = [batch.run(model)[0].float() for model in (mine, theirs)]
    (found, caches), (expected, wanted) = (batch.run(in_fp32(model)) for model in (mine, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert caches.keys() == wanted.keys()
    for name, cache in caches.items():
        torch.testing.assert_close(cache, wanted[name], rtol=1e-4, atol=1e-4)
    errors = [(out - expected).norm() / expected.norm() for out in in_bf16]
    assert errors[0] <= 1.25 * errors[1] < 0.1


def test_while_vllm_measures_memory_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """And attention gives zeros, as vLLM's own layers; what q takes is counted."""
    mine, theirs = (in_fp32(model) for model in pair(monkeypatch))
    batch = BATCHES["mixed"]
    (found, caches), (expected, _) = (batch.run(model, has_metadata=False) for model in (mine, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    _, there = batch.run(theirs, has_metadata=False)
    assert all(torch.equal(caches[name], there[name]) for name in there)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        batch.run(mine, has_metadata=False)
    made = [e.input_shapes[0] for e in profile.events() if e.name == "aten::empty_like"]
    assert [made.count([batch.num_tokens, 4, dim]) for dim in (128, 256)] == [2, 2]


def test_layers_whose_keys_are_anothers_stay_vllms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine, theirs = pair(monkeypatch, num_kv_shared_layers=2)
    assert kinds(mine) == ["SelfAttention"] * 2 + ["Gemma4Attention"] * 2
    line = ("kerngen: norms of heads, RoPE and cache write in one launch in 2 of 4 decoder layers, K as V in 1; "
            "2 stay vLLM's: their K and V are another layer's")  # fmt: skip
    assert line in [r.getMessage() for r in caplog.records]
    found, expected = (BATCHES["mixed"].run(in_fp32(model))[0] for model in (mine, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SCALED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 10000.0}


@pytest.mark.parametrize(("rope", "why"), [
    (SCALED, "their RoPE is LinearScalingRotaryEmbedding of 128 dims"),
    (PARTIAL, "their RoPE is RotaryEmbedding of 64 dims"),
], ids=["scaled", "of a part of the head"])  # fmt: skip
def test_another_rope_is_vllms(
    rope: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ropes = text_config().rope_parameters | {"sliding_attention": rope}
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine, theirs = pair(monkeypatch, rope_parameters=ropes)
    assert kinds(mine) == ["Gemma4Attention", "SelfAttention"] * 2
    assert f"in 2 of 4 decoder layers, K as V in 2; 2 stay vLLM's: {why}" in caplog.text
    found, expected = (BATCHES["decodes"].run(in_fp32(model))[0] for model in (mine, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_serve_is_vllms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kerngen.templates import find_kernel
    from kerngen.vllm import attention_v0_26 as ours

    class Refusing:
        def why_unsupported(self, problem: Any, target: Any) -> str:
            return "a board without it"

    monkeypatch.setattr(ours, "find_kernel", lambda n: Refusing() if n == "qkv_norm_rope" else find_kernel(n))
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = make(monkeypatch)
    assert kinds(mine) == ["Gemma4Attention"] * 4
    assert "in 0 of 4 decoder layers, K as V in 0; 4 stay vLLM's: a board without it" in caplog.text
    assert [projected(layer) for layer in mine.model.layers] == [1024, 1536] * 2


def projected(layer: Any) -> int:
    """Columns of q, k and v, by what is multiplied and by how many weights there are."""
    proj = layer.self_attn.qkv_proj
    columns = int(proj(torch.zeros(1, test_model.HIDDEN, dtype=torch.bfloat16))[0].shape[1])
    packed, scales = proj.weight_packed, proj.weight_scale
    assert packed.numel() * 8 == columns * test_model.HIDDEN
    assert scales.numel() * test_model.GROUP == columns * test_model.HIDDEN
    for kept in (packed, scales):
        assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size(), "of a larger tensor"
    return columns


@pytest.mark.parametrize(("changes", "settings", "columns"), [
    ({}, {}, [1024, 1280]), (OWN_V, {}, [1024, 2048]), ({}, {"lora": True}, [1024, 1536]),
], ids=["K = V", "V apart", "adapters"])  # fmt: skip
def test_where_v_is_k_its_rows_are_not_kept(
    changes: dict[str, Any], settings: Any, columns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 heads of q; of k and of v 2 in sliding layers, and in full ones 1 or 2. Adapters add to V alone."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    loaded: list[Any] = []
    pack = CompressedTensorsWNA16.process_weights_after_loading

    def packing(self: Any, layer: Any) -> None:
        loaded.extend(StorageWeakRef(w.untyped_storage()) for w in (layer.weight_packed, layer.weight_scale))
        pack(self, layer)

    monkeypatch.setattr(CompressedTensorsWNA16, "process_weights_after_loading", packing)
    mine = make(monkeypatch, hf=text_config(**changes), **settings)
    assert kinds(mine) == ["SelfAttention"] * 4
    assert [projected(layer) for layer in mine.model.layers] == columns * 2
    assert loaded
    assert all(storage.expired() for storage in loaded), "what was loaded is still there"


def test_weights_that_are_loaded_again_are_served_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's reload, which puts the loaded shapes back first: in the memory that CUDA graphs hold."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    mine, other = make(monkeypatch), make(monkeypatch, seed=2)
    before, expected = (BATCHES["mixed"].run(model)[0] for model in (mine, other))
    assert not torch.equal(before, expected)
    lie = {name: tensor.data_ptr() for name, tensor in [*mine.named_parameters(), *mine.named_buffers()]}
    config = mine.model.vllm_config
    with set_current_vllm_config(config), torch.no_grad(), torch.device("cpu"):
        initialize_layerwise_reload(mine)
        mine.load_weights(iter(test_model.Checkpoint(text_config(), seed=2).int4))
        finalize_layerwise_reload(mine, config.model_config)
    assert lie == {name: tensor.data_ptr() for name, tensor in [*mine.named_parameters(), *mine.named_buffers()]}
    assert torch.equal(BATCHES["mixed"].run(mine)[0], expected)


def test_its_kernels_are_asked_for_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a forward asks for beside attention's, whose grid has its own test; kv_write is not among them."""
    from kerngen.vllm import ahead, linear, model_v0_26
    from kerngen.vllm import attention_v0_26 as ours

    asked = ahead.Ahead()
    for module in (linear, model_v0_26, ours):
        monkeypatch.setattr(module, "AHEAD", asked)
    mine = make(monkeypatch)
    ran = {(call.kernel, call.problem) for call in recorded(lambda: Batch([1], [70]).run(mine))}
    there = {(kernel, p) for kernel, p in ran if not kernel.startswith("attn_")}
    assert there == set(+asked._asked)
    assert {kernel for kernel, _ in there} == {"w4a16_gemm", "add_norm", "qkv_norm_rope"}


def test_a_layer_is_one_launch_before_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = make(monkeypatch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        BATCHES["decodes"].run(mine)
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith(("kerngen::", "vllm::"))}
    assert counts.pop("kerngen::qkv_norm_rope") == counts.pop("kerngen::attn_decode_into") == 4
    assert counts == {"vllm::unified_attention_with_output": 4, "kerngen::add_norm_functional": 7,
                      "kerngen::add_post_norm_functional": 1, "kerngen::w4a16_gated": 4,
                      "kerngen::w4a16_gemm": 12}  # fmt: skip


def test_parameters_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = pair(monkeypatch)
    named = [[name for name, _ in m.named_parameters(remove_duplicate=False)] for m in (mine, theirs)]
    assert named[0] == named[1]
    assert mine.state_dict().keys() == theirs.state_dict().keys()


def test_each_method_takes_what_vllm_gives_it() -> None:
    from kerngen.vllm.self_attention_v0_26 import SelfAttention

    base = SelfAttention.__bases__[0]
    mine, theirs = (inspect.signature(c.forward).parameters.values() for c in (SelfAttention, base))
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


def require_compiled_right(mine: Any) -> None:
    """As vLLM compiles it, for any number of tokens."""
    model = mine.model
    model.compilation_config.compile_sizes = []
    torch._dynamo.reset()
    for batch in (BATCHES["decodes"], BATCHES["mixed"], BATCHES["a padded graph"]):
        expected, wanted = batch.run(mine, call=lambda ids, at: model.forward(ids, at, None, None))
        found, caches = batch.run(mine, call=lambda ids, at: model(ids, at, None, None))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for name, cache in caches.items():
            torch.testing.assert_close(cache, wanted[name], rtol=1e-4, atol=1e-4)


@test_model.needs_compiler
def test_vllm_cuts_its_graphs_around_heads_and_attention(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By vLLM's own list of operators that it cuts at."""
    from vllm.compilation import backends

    graphs: list[Any] = []
    split = backends.split_graph

    def splitting(*args: Any, **options: Any) -> Any:
        graphs.append(split(*args, **options))
        return graphs[-1]

    monkeypatch.setattr(backends, "split_graph", splitting)
    require_compiled_right(in_fp32(make(monkeypatch, compilation=test_model.compiled_in_pieces(monkeypatch, tmp_path))))
    ((_, items),) = graphs
    cuts = [item for item in items if item.is_splitting_graph]
    assert len(cuts) == 4
    called = [[str(n.target) for n in item.graph.graph.nodes if n.op == "call_function"] for item in cuts]
    assert all(ops == ["vllm.unified_attention_with_output"] for ops in called), called


@test_model.needs_compiler
@pytest.mark.parametrize("cuts", [None, []], ids=["in pieces", "in one"])
def test_graphs_that_vllm_keeps_serve_the_next_start(
    cuts: list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of other weights, here, without tracing its model."""
    from vllm.compilation.counter import compilation_counter as counter
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "compute_hash", lambda self: "the same")  # stand-ins in it have none
    settings = test_model.compiled_in_pieces(monkeypatch, tmp_path, cuts)
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    before = counter.num_aot_compiles, counter.num_aot_artifacts_loaded
    for seed in (1, 2):
        require_compiled_right(in_fp32(make(monkeypatch, compilation=settings, seed=seed)))
    assert (counter.num_aot_compiles, counter.num_aot_artifacts_loaded) == (before[0] + 1, before[1] + 1)
