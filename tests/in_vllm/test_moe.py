"""Experts where vLLM calls them: chosen, loaded by vLLM's own loader, packed and summed, on the CPU."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import capability, rank, recorded, serves
from torch import Tensor
from torch.nn.functional import gelu

from kerngen.templates.common.w4.pack import dequantize

if not serves("moe"):
    pytest.skip("the part `moe` is not for this release of vLLM", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("registered")

EXPERTS, TOP_K, HIDDEN, INNER = 16, 8, 64, 128
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
MATRICES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


@pytest.fixture(autouse=True)
def _reasons_are_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from kerngen.vllm import plugin

    monkeypatch.setattr(plugin, "_said", set())


def settings(lora: bool = False, **of_int4: Any) -> Any:
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    made = VllmConfig(device_config=DeviceConfig(device="cpu"))
    made.lora_config = SimpleNamespace() if lora else None
    form = of_int4.pop("format", "pack-quantized")
    groups = {"group_0": {"targets": ["Linear"], "weights": INT4 | of_int4, "format": form}}
    made.quant_config = CompressedTensorsConfig.from_config({"config_groups": groups, "ignore": [], "format": form})
    return made


def make(config: Any = None, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """vLLM's RoutedExperts of a rank, as its own factory makes it, with nothing loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoE

    config = config or settings()
    fields = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER,
              "activation": "gelu_tanh", "prefix": "model.layers.0.moe.experts", "quant_config": config.quant_config,
              "dp_size": 1, "pcp_size": 1}  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            return FusedMoE(**(fields | changes)).routed_experts
    finally:
        torch.set_default_dtype(before)


def checkpoint(group_size: int = 32, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A linear of each expert, by names as a checkpoint has them."""
    draw, found = torch.Generator().manual_seed(4), dict[str, Tensor]()
    for expert in range(EXPERTS):
        for name, (n, k) in MATRICES.items():
            scales = (1 + torch.rand(n, k // group_size, generator=draw)) / (6 * k**0.5)
            found[f"{expert}.{name}.weight_packed"] = torch.randint(-(2**31), 2**31, (n, k // 8), generator=draw).int()
            found[f"{expert}.{name}.weight_scale"] = scales.to(dtype)
            found[f"{expert}.{name}.weight_shape"] = torch.tensor([n, k])
    return found


def loaded(tensors: dict[str, Tensor], **given: Any) -> Any:
    """A layer with these weights, by vLLM's own loader, and what it does after."""
    layer = make(**given)
    got = Counter(layer.load_weights(tensors.items()))
    assert got == {n: EXPERTS * (2 if "w13" in n else 1) for n, _ in layer.named_parameters()}, (
        "all is loaded, all of it"
    )
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def routes(tokens: int, uneven: bool = False) -> tuple[Tensor, Tensor]:
    """(weights fp32, ids int32) as Gemma-4's routing gives them: they need not sum to 1."""
    draw = torch.Generator().manual_seed(tokens)
    scores = torch.randn(1 if uneven else tokens, EXPERTS, generator=draw).expand(tokens, -1)
    top = scores.softmax(-1).topk(TOP_K, dim=-1)
    weights = top.values / top.values.sum(-1, keepdim=True) * (1 + 0.2 * torch.randn(tokens, TOP_K, generator=draw))
    return weights, top.indices.int()


def expected(tensors: dict[str, Tensor], x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In fp32, expert by expert of each token."""

    def matrix(expert: int, name: str) -> Tensor:
        return dequantize(*(tensors[f"{expert}.{name}_proj.weight_{part}"] for part in ("packed", "scale")))

    out = torch.zeros(len(x), HIDDEN)
    for t, token in enumerate(x.float()):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            h = gelu(matrix(expert, "gate") @ token, approximate="tanh") * (matrix(expert, "up") @ token)
            out[t] += weight * (matrix(expert, "down") @ h)
    return out


def run(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out: Tensor = layer.forward_modular(
        x=x, topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None
    )
    return out


def inputs(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("uneven", [False, True], ids=["", "same experts"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 65])
def test_is_the_weighted_sum_over_the_experts(tokens: int, uneven: bool) -> None:
    tensors = checkpoint()
    layer = loaded(tensors)
    assert type(layer.quant_method).__name__ == "KerngenMoEMethod", "vLLM's configuration chose it"
    x, chosen = inputs(tokens), routes(tokens, uneven)
    out = run(layer, x, *chosen)
    assert out.shape == (tokens, HIDDEN)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.float(), expected(tensors, x, *chosen), rtol=2**-6, atol=2**-5)
    out = run(layer.float(), x.float(), *chosen)
    torch.testing.assert_close(out, expected(tensors, x, *chosen), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("group_size", "dtype"), [(64, torch.bfloat16), (64, torch.float16), (32, torch.float16)])
def test_groups_and_dtypes(group_size: int, dtype: torch.dtype) -> None:
    tensors = checkpoint(group_size, dtype)
    layer = loaded(tensors, config=settings(group_size=group_size), dtype=dtype)
    x, chosen = inputs(3, dtype), routes(3)
    torch.testing.assert_close(run(layer, x, *chosen).float(), expected(tensors, x, *chosen), rtol=2**-6, atol=2**-5)


def test_ranks_have_whole_groups_of_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their summands, which vLLM adds, are the whole."""
    from vllm.distributed import parallel_state

    tensors, x, chosen = checkpoint(), inputs(7), routes(7)
    summands = []
    for this in (0, 1):
        monkeypatch.setattr(parallel_state, "_TP", rank(this, 2))
        layer = loaded(tensors)
        assert layer.w13_weight_packed.numel() == EXPERTS * INNER * HIDDEN // 8
        assert layer.w2_weight_scale.numel() == EXPERTS * HIDDEN * INNER // 2 // 32
        summands.append(run(layer.float(), x.float(), *chosen))
    assert not torch.equal(*summands)
    torch.testing.assert_close(sum(summands), expected(tensors, x, *chosen), rtol=1e-4, atol=1e-5)


def test_shapes_of_the_26b_a4b(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and halved; a quarter of 704 is no number of groups."""
    from vllm.distributed import parallel_state

    for ranks, served in ((1, True), (2, True), (4, False)):
        monkeypatch.setattr(parallel_state, "_TP", rank(0, ranks))
        shapes = {"num_experts": 128, "hidden_size": 2816, "intermediate_size": 704}
        with torch.device("meta"):
            if served:
                assert type(make(**shapes).quant_method).__name__ == "KerngenMoEMethod"
            else:
                with pytest.raises(ValueError, match="divisible by group_size"):  # vLLM's own cannot either
                    make(**shapes)


def refusals() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """(of the int4 weights, of the layer, why)"""
    yield {"num_bits": 8}, {}, "their weights are int of 8 bits by group, not int4 in groups"
    yield {"strategy": "channel", "group_size": None}, {}, "their weights are int of 4 bits by channel"
    yield {"symmetric": False}, {}, "their weights have zero points"
    yield {"actorder": "weight"}, {}, "their columns were put in an order (actorder weight)"
    yield {"group_size": 16}, {}, "group_size=16 is not one of (32, 64, 128)"
    yield {"lora": True}, {}, "adapters (LoRA) may change them"
    yield {}, {"activation": "silu"}, "their activation is silu, not gelu_tanh"
    yield {}, {"has_bias": True}, "they have a bias"
    yield {}, {"apply_router_weight_on_input": True}, "the router's weights multiply their inputs"
    yield {}, {"top_k": 9}, "top_k=9 is not in 1..8"
    yield {}, {"dtype": torch.float32}, "no body computes in fp32"


@pytest.fixture
def vllms_own(monkeypatch: pytest.MonkeyPatch) -> type:
    """What vLLM's choice gives, without the compiled code that its methods ask for."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    from kerngen.vllm import moe_v0_26

    class Own(FusedMoEMethodBase):
        def create_weights(self, layer: Any, *args: Any, **others: Any) -> None: ...

        def get_fused_moe_quant_config(self, layer: Any) -> None: ...

    monkeypatch.setattr(moe_v0_26, "VLLMS", lambda config, layer, name: Own(layer.moe_config))
    return Own


@pytest.mark.parametrize(("of_int4", "of_layer", "why"), list(refusals()), ids=lambda v: str(v)[:40])
def test_what_is_not_served_is_vllms_and_one_line_says_why(
    of_int4: dict[str, Any], of_layer: dict[str, Any], why: str, vllms_own: type, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        for name in ("a", "b"):
            layer = make(settings(**of_int4), **(of_layer | {"prefix": name}))
            assert type(layer.quant_method) is vllms_own
    (line,) = (r.getMessage() for r in caplog.records if r.name == "vllm.kerngen")
    assert line.startswith(f"kerngen: experts stay vLLM's: {why}"), line


@pytest.mark.parametrize(("fields", "why"), [
    ({"use_ep": True, "ep_size": 2}, "expert parallelism"), ({"enable_eplb": True}, "expert parallelism"),
    ({"dp_size": 2}, "data, context or sequence"), ({"sp_size": 2}, "data, context or sequence"), ({}, None),
], ids=str)  # fmt: skip
def test_layers_divided_in_another_way_are_refused(fields: dict[str, Any], why: str | None) -> None:
    from dataclasses import replace

    from kerngen.vllm.moe_v0_26 import _why_not_run

    moe = make().moe_config
    said = _why_not_run(replace(moe, moe_parallel_config=replace(moe.moe_parallel_config, **fields)))
    assert (said is None) if why is None else (said is not None and why in said)


def test_a_backend_that_is_asked_for_is_vllms(vllms_own: type) -> None:
    config = settings()
    config.kernel_config.moe_backend = "marlin"
    assert type(make(config).quant_method) is vllms_own


def test_scales_in_another_dtype_than_activations_are_vllms(vllms_own: type) -> None:
    config = settings()
    config.model_config = SimpleNamespace(dtype=torch.float16, hf_config=None)
    assert type(make(config, torch.bfloat16).quant_method) is vllms_own


def test_experts_that_are_not_kept_alike_are_vllms(vllms_own: type) -> None:
    config = settings()
    config.quant_config.ignore = ["model.layers.0.moe.experts.0.up_proj"]
    assert type(make(config).quant_method) is vllms_own


@pytest.mark.parametrize(("board", "dtype", "taken"), [
    ((7, 0), torch.float16, True), ((7, 5), torch.bfloat16, False), ((8, 0), torch.bfloat16, True),
    ((12, 1), torch.bfloat16, True), ((6, 1), torch.float16, False),
])  # fmt: skip
def test_boards(
    vllms_own: type, monkeypatch: pytest.MonkeyPatch, board: tuple[int, int], dtype: torch.dtype, taken: bool
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_capability", capability(*board))
    assert (type(make(dtype=dtype).quant_method) is not vllms_own) is taken


def test_registered_twice_is_once() -> None:
    """What is asked after ours is vLLM's own, not ours again."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        CompressedTensorsMoEMethod,
    )

    from kerngen.vllm import moe_v0_26

    assert CompressedTensorsMoEMethod.get_moe_method is moe_v0_26.get_moe_method
    assert moe_v0_26.VLLMS.__module__.startswith("vllm.")


def test_each_method_takes_what_vllm_gives_it() -> None:
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    from kerngen.vllm import moe_v0_26 as module

    def taken(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert taken(module.get_moe_method) == taken(module.VLLMS)
    cls = module.KerngenMoEMethod
    inherited = set(dir(FusedMoEMethodBase)) - {"__init__"}
    overridden = [name for name, value in vars(cls).items() if inspect.isfunction(value) and name in inherited]
    assert FusedMoEMethodBase.__abstractmethods__ <= set(overridden)
    for name in overridden:
        assert taken(getattr(cls, name)) == taken(getattr(FusedMoEMethodBase, name)), name


def test_names_that_vllms_loader_knows_are_none_of_ours() -> None:
    """It transposes what it loads for methods of those names."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    source = inspect.getsource(RoutedExperts.weight_loader)
    assert '"CompressedTensorsWNA16MarlinMoEMethod"' in source
    assert "KerngenMoEMethod" not in source


def test_no_second_copy_of_the_weights_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are packed in their own memory, three experts at a time, or all."""
    from kerngen.vllm import moe_v0_26

    tensors, packed = checkpoint(), []
    for at_once in (3 * 2 * INNER * HIDDEN, moe_v0_26.AT_ONCE):
        monkeypatch.setattr(moe_v0_26, "AT_ONCE", at_once)
        layer = make()
        list(layer.load_weights(tensors.items()))
        before = {name: p.data_ptr() for name, p in layer.named_parameters()}
        layer.quant_method.process_weights_after_loading(layer)
        assert before == {name: p.data_ptr() for name, p in layer.named_parameters()}
        packed.append({name: p.data.clone() for name, p in layer.named_parameters()})
    for name, tensor in packed[0].items():
        assert torch.equal(tensor, packed[1][name]), name


def test_weights_that_are_loaded_again_are_packed_again() -> None:
    """As vLLM's reload does: fresh parameters of the checkpoint's shapes, then the same calls."""
    tensors = checkpoint()
    layer = loaded(tensors)
    fresh = make(prefix="another")
    for name, parameter in fresh.named_parameters():
        setattr(layer, name, parameter)
    again = {n: (t.flip(0).contiguous() if "down" in n and "shape" not in n else t) for n, t in tensors.items()}
    list(layer.load_weights(again.items()))
    layer.quant_method.process_weights_after_loading(layer)
    x, chosen = inputs(2), routes(2)
    torch.testing.assert_close(
        run(layer.float(), x.float(), *chosen), expected(again, x, *chosen), rtol=1e-4, atol=1e-5
    )


def test_its_kernels_are_asked_for_by_all_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a forward asks, whatever its tokens, and nothing else."""
    from dataclasses import replace

    from kerngen.vllm import ahead, moe_v0_26

    asked = ahead.Ahead()
    monkeypatch.setattr(moe_v0_26, "AHEAD", asked)
    layer = loaded(checkpoint())
    make(prefix="another")
    calls = recorded(lambda: run(layer, inputs(5), *routes(5)))
    ran = {(call.kernel, replace(call.problem, num_tokens=1)) for call in calls}
    assert ran == set(+asked._asked)
    assert set(asked._asked.values()) == {2}


def test_gemma_4s_layer_runs_them_behind_its_own_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's runner and its operator, with Gemma-4's routing in torch in place of Triton's."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models import gemma4
    from vllm.utils.torch_utils import set_default_torch_dtype

    monkeypatch.setattr(gemma4, "gemma4_fused_routing_kernel_triton", gemma4.gemma4_routing_function_torch)
    for group in ("_DP", "_PCP"):
        monkeypatch.setattr(parallel_state, group, rank())
    config, tensors = settings(), checkpoint()
    hf = SimpleNamespace(hidden_size=HIDDEN, num_experts=EXPERTS, top_k_experts=TOP_K, moe_intermediate_size=INNER)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.no_grad():
        moe = gemma4.Gemma4MoE(hf, config.quant_config, prefix="model.layers.0.moe")
        moe.per_expert_scale.data.copy_(torch.linspace(0.5, 1.5, EXPERTS))
        experts = moe.experts.routed_experts
        list(experts.load_weights(tensors.items()))
        experts.quant_method.process_weights_after_loading(experts)
        moe.experts.maybe_init_modular_kernel()
        assert type(experts.quant_method).__name__ == "KerngenMoEMethod", "it stays after vLLM's last word on it"
        x, logits = inputs(7), torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(9))
        with set_forward_context(None, config, num_tokens=7):
            out = moe(x, logits)
    chosen = gemma4.gemma4_routing_function_torch(logits, TOP_K, moe.per_expert_scale)
    torch.testing.assert_close(out.float(), expected(tensors, x, *chosen), rtol=2**-6, atol=2**-5)
