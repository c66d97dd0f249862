"""vLLM's Gemma-4 with kerngen's kernels around its attention, beside vLLM's own: loaded, run, compiled on the CPU."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import rank, recorded, serves
from torch import Tensor, nn

from kerngen.templates.common.w4.pack import dequantize

if not serves("model"):
    pytest.skip("the part `model` is not for this release of vLLM", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("registered", "small_vllm")

HIDDEN, INTERMEDIATE, GROUP = 64, 96, 32
DENSE: dict[str, Any] = {}
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 32}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
TOKENS = torch.tensor([3, 1, 60, 7, 7, 22, 41])


class Attend(nn.Module):
    """In place of vLLM's Attention, which needs a GPU: one sequence, causal, with its window."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **others: Any) -> None:
        super().__init__()
        self.shape, self.kv_shape, self.scale = (num_heads, head_size), (num_kv_heads, head_size), scale
        self.window: int | None = others["per_layer_sliding_window"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(-1, self.shape).transpose(0, 1)
        k, v = (t.unflatten(-1, self.kv_shape).transpose(0, 1) for t in (k, v))
        apart = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (apart >= 0) & (apart < (self.window or 1 << 30))
        attend = nn.functional.scaled_dot_product_attention
        out = attend(q[None], k[None], v[None], attn_mask=seen, scale=self.scale, enable_gqa=True)[0]
        return out.transpose(0, 1).flatten(1)


class Experts(nn.Module):
    """In place of vLLM's, whose kernels need a GPU: something of both of its inputs."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.num_experts, self.experts = config.num_experts, nn.Identity()

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        return x * router_logits.softmax(-1).amax(-1, keepdim=True).to(x.dtype)


class Gate(nn.Linear):
    """In place of vLLM's GateLinear, whose product of bf16 in fp32 needs a GPU."""

    def __init__(self, k: int, n: int, bias: bool, out_dtype: torch.dtype, prefix: str) -> None:
        super().__init__(k, n, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return nn.functional.linear(x.float(), self.weight.float()), None


@pytest.fixture(scope="module")
def small_vllm(gated_gelu: None) -> Iterator[None]:
    from vllm.model_executor.models import gemma4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma4, "Attention", Attend)
        patch.setattr(gemma4, "Gemma4MoE", Experts)
        patch.setattr(gemma4, "GateLinear", Gate)
        yield


def text_config(**changes: Any) -> Any:
    """Of a small model: K = V in its full layers, four layers of both kinds."""
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    fields = {
        "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "rope_parameters": ropes, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0, "enable_moe_block": False,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def vllm_config(
    hf: Any, quantised: bool, ignore: tuple[str, ...] = (), lora: bool = False, compilation: Any = None
) -> Any:
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    compiled = CompilationConfig(custom_ops=["none"], **(compilation or {"mode": 0}))
    made = VllmConfig(device_config=DeviceConfig(device="cpu"), compilation_config=compiled)
    made.model_config = SimpleNamespace(hf_config=hf, dtype=torch.bfloat16, head_dtype=torch.bfloat16,
                                        quantization=None, enforce_eager=False, compute_hash=lambda: "",
                                        enable_return_routed_experts=False)  # fmt: skip
    made.lora_config = SimpleNamespace() if lora else None
    if quantised:
        int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
        groups = {"group_0": {"targets": ["Linear"], "weights": int4, "format": "pack-quantized"}}
        made.quant_config = CompressedTensorsConfig.from_config(
            {"config_groups": groups, "ignore": list(ignore), "format": "pack-quantized"}
        )
    return made


def make(cls: Any, hf: Any, quantised: bool, checkpoint: list[tuple[str, Tensor]], **settings: Any) -> Any:
    """A model as vLLM makes and loads it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.model_executor.models import utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    # By id: a model that lies where a pipeline's rank was would go without the layers that the rank had not.
    utils._model_to_pp_missing_layer_names.clear()
    config = vllm_config(hf, quantised, **settings)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        made = initialize_model(config, model_class=cls)
        for p in made.parameters():
            p.data.zero_()  # what no checkpoint gave shows
        made.load_weights(iter(checkpoint))
        process_weights_after_loading(made, config.model_config, torch.device("cpu"))
    return made


class Checkpoint:
    """Random weights for a `text_config`, int4 in groups and the same ones dense. ignore: not int4 in either."""

    def __init__(self, hf: Any, ignore: tuple[str, ...] = (), seed: int = 1) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.int4: list[tuple[str, Tensor]] = []
        self.dense: list[tuple[str, Tensor]] = []
        self._both("embed_tokens.weight", self._normal(hf.vocab_size, HIDDEN))
        self._both("norm.weight", self._around_one(HIDDEN))
        ple, layers = hf.hidden_size_per_layer_input, hf.num_hidden_layers
        if ple:
            self._both("embed_tokens_per_layer.weight", self._normal(hf.vocab_size, layers * ple))
            self._matrix("per_layer_model_projection", layers * ple, HIDDEN)
            self._both("per_layer_projection_norm.weight", self._around_one(ple))
        for i, kind in enumerate(hf.layer_types):
            full = kind == "full_attention"
            dim = hf.global_head_dim if full else hf.head_dim
            q = hf.num_attention_heads * dim
            kv = dim * (hf.num_global_key_value_heads if full else hf.num_key_value_heads)
            matrices = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN),
                        "self_attn.o_proj": (HIDDEN, q), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                        "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE)}  # fmt: skip
            if not full:
                matrices["self_attn.v_proj"] = kv, HIDDEN
            norms = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
            if hf.enable_moe_block:
                self._both(f"layers.{i}.router.proj.weight", self._normal(hf.num_experts, HIDDEN))
                self._both(f"layers.{i}.router.scale", self._around_one(HIDDEN))
                norms += [f"{name}_layernorm_{n}" for name, n in
                          (("post_feedforward", 1), ("post_feedforward", 2), ("pre_feedforward", 2))]  # fmt: skip
            sizes = dict.fromkeys(norms, HIDDEN) | {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
            if ple:
                matrices |= {"per_layer_input_gate": (ple, HIDDEN), "per_layer_projection": (HIDDEN, ple)}
                sizes["post_per_layer_input_norm"] = HIDDEN
            for name, size in sizes.items():
                self._both(f"layers.{i}.{name}.weight", self._around_one(size))
            self._both(f"layers.{i}.layer_scalar", self._around_one(1))
            for name, (n, k) in matrices.items():
                self._matrix(f"layers.{i}.{name}", n, k, f"model.layers.{i}.{name}" not in ignore)

    def with_experts(self, hf: Any) -> Checkpoint:
        """The same, with the experts' matrices, and a scale of each expert."""
        inner = hf.moe_intermediate_size
        for layer in range(hf.num_hidden_layers):
            self._both(f"layers.{layer}.router.per_expert_scale", self._around_one(hf.num_experts))
            for expert in range(hf.num_experts):
                for name, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
                    self._matrix(f"layers.{layer}.experts.{expert}.{name}_proj", *shape)
        return self

    def _both(self, name: str, tensor: Tensor) -> None:
        for tensors in (self.int4, self.dense):
            tensors.append((f"model.language_model.{name}", tensor))

    def _matrix(self, name: str, n: int, k: int, int4: bool = True) -> None:
        words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=self.draw).int()
        scales = 2.0 ** torch.randint(-7, -4, (n, k // GROUP), generator=self.draw).bfloat16()  # so W is exact in bf16
        dense = ("weight", dequantize(words, scales, torch.bfloat16))
        packed = ("weight_packed", words), ("weight_scale", scales), ("weight_shape", torch.tensor([n, k]))
        for tensors, parts in ((self.int4, packed if int4 else (dense,)), (self.dense, (dense,))):
            tensors += [(f"model.language_model.{name}.{part}", tensor) for part, tensor in parts]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw).bfloat16()

    def _around_one(self, *shape: int) -> Tensor:
        return (1 + 0.25 * torch.randn(shape, generator=self.draw)).bfloat16()


def ours() -> Any:
    from vllm import ModelRegistry

    cls = ModelRegistry.models["Gemma4ForCausalLM"].load_model_cls()
    assert cls.__module__ == "kerngen.vllm.model_v0_26"
    return cls


def pair(changes: dict[str, Any] | None = None, ignore: tuple[str, ...] = (), **settings: Any) -> tuple[Any, Any]:
    """(kerngen's of int4 weights, vLLM's own of the same ones in bf16)"""
    from vllm.model_executor.models import gemma4

    hf = text_config(**(changes or {}))
    checkpoint = Checkpoint(hf, ignore)
    return (make(ours(), hf, True, checkpoint.int4, ignore=ignore, **settings),
            make(gemma4.Gemma4ForCausalLM, hf, False, checkpoint.dense))  # fmt: skip


def run(model: Any, tokens: Tensor = TOKENS, **inputs: Any) -> Any:
    from vllm.config import set_current_vllm_config

    with torch.no_grad(), set_current_vllm_config(model.model.vllm_config):
        return model(tokens, torch.arange(len(tokens)), **inputs)


def kinds(model: Any) -> list[str]:
    return [type(layer).__name__ for layer in model.model.layers]


def test_registered_twice_is_once_and_looks_like_vllms_own() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models import gemma4
    from vllm.model_executor.models.registry import _ModelInfo

    made = ours()
    assert issubclass(made, gemma4.Gemma4ForCausalLM)
    assert made.load_weights is gemma4.Gemma4ForCausalLM.load_weights
    assert _ModelInfo.from_model_cls(made) == _ModelInfo.from_model_cls(gemma4.Gemma4ForCausalLM)
    others = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
    for name in others:
        assert ModelRegistry.models[name].module_name.startswith("vllm."), "they have theirs made by our name"


def test_the_conditional_classes_have_their_text_model_made_by_the_registry() -> None:
    from vllm.model_executor.models import gemma4

    folder = inspect.getsourcefile(gemma4).rpartition("/")[0]  # type: ignore[union-attr]
    for name in ("gemma4_mm", "gemma4_unified"):
        with open(f"{folder}/{name}.py") as file:
            assert 'architectures=["Gemma4ForCausalLM"]' in file.read()


def test_each_method_takes_what_vllm_gives_it() -> None:
    from kerngen.vllm import model_v0_26 as module

    for cls in (module.Gemma4ForCausalLM, module.Model, module.DecoderLayer):
        base = cls.__bases__[0]
        overridden = [name for name, value in vars(cls).items() if inspect.isfunction(value)]
        assert overridden
        for name in overridden:
            mine, theirs = (inspect.signature(getattr(c, name)).parameters.values() for c in (cls, base))
            assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs], name


@pytest.mark.parametrize("changes", [DENSE, PER_LAYER_INPUTS, EXPERTS], ids=["dense", "per-layer inputs", "experts"])
def test_computes_what_vllms_own_computes(changes: dict[str, Any]) -> None:
    """In fp32 the same; in bf16 as near to that as vLLM's own, which rounds more often in its norms."""
    mine, theirs = pair(changes)
    assert kinds(mine) == ["DecoderLayer"] * 4
    in_bf16 = [run(model).float() for model in (mine, theirs)]
    exact, expected = (run(model.float()) for model in (mine, theirs))
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    errors = [(found - expected).norm() / expected.norm() for found in in_bf16]
    assert errors[0] <= 1.25 * errors[1] < 0.1


def test_a_layer_is_four_launches_around_attention() -> None:
    """No norm, sum, product, GELU or copy of torch's between two layers."""
    mine, _ = pair()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(mine)
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("kerngen::")}
    assert counts == {"kerngen::add_norm_functional": 7, "kerngen::add_post_norm_functional": 1,
                      "kerngen::w4a16_gated": 4, "kerngen::w4a16_gemm": 12}  # fmt: skip


def test_parameters_are_vllms() -> None:
    """Names, and no parameter under two of them: vLLM loads, reloads and offloads by name."""
    from vllm.model_executor.models import gemma4

    hf = text_config()
    checkpoint = Checkpoint(hf).int4
    mine, theirs = (make(cls, hf, True, checkpoint) for cls in (ours(), gemma4.Gemma4ForCausalLM))
    named = [[name for name, _ in m.named_parameters(remove_duplicate=False)] for m in (mine, theirs)]
    assert named[0] == named[1]
    assert mine.state_dict().keys() == theirs.state_dict().keys()


def test_what_comes_from_outside_is_not_written() -> None:
    """vLLM gives embeddings of images, and what another rank of a pipeline sent, in buffers that it keeps."""
    mine, theirs = pair()
    given = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
    kept = given.clone()
    out = run(mine.float(), TOKENS[:5], inputs_embeds=given)
    assert torch.equal(given, kept)
    torch.testing.assert_close(out, run(theirs.float(), TOKENS[:5], inputs_embeds=given), rtol=1e-4, atol=1e-4)


def test_drafters_tap_the_stream() -> None:
    mine, theirs = (model.float() for model in pair())
    for model in (mine, theirs):
        model.model._set_aux_hidden_state_layers((0, 2, 4))
    (out, tapped), (expected, wanted) = run(mine), run(theirs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tapped, wanted, rtol=1e-4, atol=1e-4)


def test_ranks_of_a_pipeline_hand_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    whole, _ = pair()
    hf = text_config()
    parts = []
    for this in (0, 1):
        monkeypatch.setattr(parallel_state, "_PP", rank(this, 2))
        parts.append(make(ours(), hf, True, Checkpoint(hf).int4).float())
    assert [kinds(p) for p in parts] == [["DecoderLayer"] * 2 + ["PPMissingLayer"] * 2,
                                         ["PPMissingLayer"] * 2 + ["DecoderLayer"] * 2]  # fmt: skip
    monkeypatch.setattr(parallel_state, "_PP", rank(0, 2))
    between = run(parts[0])
    assert list(between.tensors) == ["hidden_states"]
    monkeypatch.setattr(parallel_state, "_PP", rank(1, 2))
    out = run(parts[1], intermediate_tensors=between)
    monkeypatch.setattr(parallel_state, "_PP", rank())
    torch.testing.assert_close(out, run(whole.float()), rtol=1e-4, atol=1e-4)


def test_ranks_of_a_divided_model_have_their_rows_of_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    hf = text_config(num_global_key_value_heads=2, intermediate_size=128)
    monkeypatch.setattr(f"{__name__}.INTERMEDIATE", 128)
    checkpoint = Checkpoint(hf).int4
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = make(ours(), hf, True, checkpoint).float().model.layers[0].mlp(x)
    summands = []
    for this in (0, 1):
        monkeypatch.setattr(parallel_state, "_TP", rank(this, 2))
        mlp = make(ours(), hf, True, checkpoint).float().model.layers[0].mlp
        assert mlp.gate_up_proj.weight_packed.numel() == 128 * HIDDEN // 8
        summands.append(mlp(x))
    torch.testing.assert_close(sum(summands), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_served_stay_vllms(caplog: pytest.LogCaptureFixture) -> None:
    """Beside others that are, in whichever order: one line says how many, and why."""
    ignore = tuple(f"model.layers.{i}.mlp.{name}_proj" for i in (0, 2) for name in ("gate", "up"))
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine, theirs = pair(ignore=ignore)
    (line,) = (r.getMessage() for r in caplog.records if r.name == "vllm.kerngen")
    assert line == ("kerngen: norms and residuals of 2 of 4 decoder layers, gate and GELU of 2; "
                    "2 stay vLLM's: gate and up are not kerngen's W4A16")  # fmt: skip
    assert kinds(mine) == ["Gemma4DecoderLayer", "DecoderLayer"] * 2
    torch.testing.assert_close(run(mine.float()), run(theirs.float()), rtol=1e-4, atol=1e-4)


def test_a_model_of_another_format_is_vllms_own(caplog: pytest.LogCaptureFixture) -> None:
    hf = text_config()
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = make(ours(), hf, False, Checkpoint(hf).dense)
    assert kinds(mine) == ["Gemma4DecoderLayer"] * 4
    assert type(mine.model).__name__ == "Gemma4Model"
    assert "of 0 of 4 decoder layers, gate and GELU of 0; 4 stay vLLM's" in caplog.text


@pytest.mark.parametrize(("changes", "settings"), [
    ({}, {"lora": True}), ({"hidden_activation": "gelu"}, {}),
], ids=["adapters", "another activation"])  # fmt: skip
def test_gate_and_up_may_stay_apart(changes: dict[str, Any], settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters add to them before the GELU."""
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine, theirs = pair(changes, **settings)
    assert "of 4 of 4 decoder layers, gate and GELU of 0" in caplog.text
    assert mine.model.layers[0].mlp.gate_up_proj(torch.zeros(1, HIDDEN).bfloat16())[0].shape == (1, 2 * INTERMEDIATE)
    torch.testing.assert_close(run(mine.float()), run(theirs.float()), rtol=1e-4, atol=1e-4)


def test_an_offloaded_layer_is_vllms(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's offloaders wrap a layer's forward, which ours would then not be."""
    from vllm.model_executor.models import gemma4

    init = gemma4.Gemma4DecoderLayer.__init__

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.layer_idx == 1:
            self.forward = self.forward

    monkeypatch.setattr(gemma4.Gemma4DecoderLayer, "__init__", wrapped)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine, theirs = pair()
    assert kinds(mine) == ["DecoderLayer", "Gemma4DecoderLayer", "DecoderLayer", "DecoderLayer"]
    assert "1 stay vLLM's: vLLM offloads them" in caplog.text
    torch.testing.assert_close(run(mine.float()), run(theirs.float()), rtol=1e-4, atol=1e-4)


def test_its_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a forward asks is loaded ahead, and gate and up without the gate is not."""
    from kerngen.vllm import ahead, linear, model_v0_26

    asked = ahead.Ahead()
    for module in (linear, model_v0_26):
        monkeypatch.setattr(module, "AHEAD", asked)
    hf = text_config(**PER_LAYER_INPUTS)
    mine = make(ours(), hf, True, Checkpoint(hf).int4)
    ran = {(call.kernel, call.problem) for call in recorded(lambda: run(mine, TOKENS[:1]))}
    assert ran == set(+asked._asked)


class AttendBetween(Attend):
    """An operator that vLLM cuts its graph at, as it does at its Attention."""

    layers: ClassVar[dict[str, Attend]] = {}

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.name = others["prefix"]
        self.layers[self.name] = Attend(*args, **others)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        torch.ops.kerngen_in_vllm.attend(q, k, v, out, self.name)
        return out


@torch.library.custom_op("kerngen_in_vllm::attend", mutates_args=("out",))
def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None:
    out.copy_(AttendBetween.layers[name](q, k, v))


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None: ...


def compiled_in_pieces(monkeypatch: pytest.MonkeyPatch, folder: Path, splitting_ops: list[str] | None = None) -> Any:
    """Of a CompilationConfig: vLLM's own backend and torch's compiler, without the passes that need vLLM's compiled
    code. splitting_ops: None for vLLM's own.
    """
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import PassConfig

    for name, value in (("CACHE_ROOT", str(folder)), ("USE_AOT_COMPILE", "0"), ("DISABLE_COMPILE_CACHE", "1")):
        monkeypatch.setenv(f"VLLM_{name}", value)
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
    needs_gpu = {f"fuse_{name}": False for name in ("norm_quant", "act_quant", "attn_quant", "allreduce_rms",
                                                    "rope_kvcache", "rope_kvcache_cat_mla")}  # fmt: skip
    return {"mode": 3, "backend": "inductor", "splitting_ops": splitting_ops, "compile_sizes": [],
            "cudagraph_mode": "NONE", "pass_config": PassConfig(enable_sp=False, **needs_gpu)}  # fmt: skip


def require_compiled_right(model: Any) -> None:
    """Of any number of tokens; what is tapped, and what comes from outside, is what it is without the compiler."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    model.compilation_config.compile_sizes = []
    model._set_aux_hidden_state_layers((0, 1, 4))
    torch._dynamo.reset()
    with torch.no_grad(), set_current_vllm_config(model.vllm_config):
        for count in (3, 7, 5):
            given = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))
            kept = given.clone()
            expected = model.forward(None, torch.arange(count), None, given)
            with set_forward_context(None, model.vllm_config, num_tokens=count):
                found = model(None, torch.arange(count), None, given)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(given, kept)
    assert model.compiled


needs_compiler = pytest.mark.skipif(which("c++") is None, reason="torch's compiler for the CPU needs a C++ compiler")


@needs_compiler
def test_compiled_by_vllm_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.model_executor.models import gemma4

    settings, hf = compiled_in_pieces(monkeypatch, tmp_path, ["kerngen_in_vllm::attend"]), text_config()
    monkeypatch.setattr(gemma4, "Attention", AttendBetween)
    require_compiled_right(make(ours(), hf, True, Checkpoint(hf).int4, compilation=settings).float().model)
