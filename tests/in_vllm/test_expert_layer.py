"""Gemma-4's layers with experts whose routing and whose end are kerngen's, beside vLLM's own around the same experts.

On the CPU: loaded by a checkpoint's names, run, compiled; and what vLLM's runner of the experts must do itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_model
import torch
from conftest import rank, recorded, serves
from torch import Tensor

if not (serves("model") and serves("moe")):
    pytest.skip("the parts `model` and `moe` are not for this release of vLLM", allow_module_level=True)
from test_model import (
    HIDDEN,
    AttendBetween,
    Checkpoint,
    Gate,
    compiled_in_pieces,
    make,
    needs_compiler,
    ours,
    require_compiled_right,
    text_config,
)

pytestmark = pytest.mark.usefixtures("registered", "vllms_experts")
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 16, "top_k_experts": 3, "moe_intermediate_size": 32
}  # fmt: skip


@pytest.fixture(scope="module")
def vllms_experts(gated_gelu: None) -> Iterator[None]:
    """Gemma-4's own experts and router, with its routing in torch in place of Triton's."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import gemma4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemma4, "Attention", test_model.Attend)
        patch.setattr(gemma4, "GateLinear", Gate)
        patch.setattr(gemma4, "gemma4_fused_routing_kernel_triton", gemma4.gemma4_routing_function_torch)
        for group in ("_DP", "_PCP"):
            patch.setattr(parallel_state, group, rank())
        yield


@pytest.fixture(autouse=True)
def _reasons_are_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from kerngen.vllm import plugin

    monkeypatch.setattr(plugin, "_said", set())


def made(cls: Any = None, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A model with int4 weights of a fixed seed. cls: None for kerngen's."""
    hf = text_config(**(EXPERTS | (changes or {})))
    return make(cls or ours(), hf, True, Checkpoint(hf).with_experts(hf).int4, **settings)


def vllms_own() -> Any:
    from vllm.model_executor.models import gemma4

    return made(gemma4.Gemma4ForCausalLM)


def run(model: Any, tokens: Tensor) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config = model.model.vllm_config
    with (
        torch.no_grad(),
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=len(tokens)),
    ):
        return model(tokens, torch.arange(len(tokens)))


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(count))


def served(model: Any) -> list[bool]:
    return [layer.has_expert_end for layer in model.model.layers]


def test_computes_what_vllms_own_computes() -> None:
    """Of a decode's tokens and of a prefill's. In fp32 the same, in bf16 nearly as near to that as vLLM's own, which
    does not round the router's logits as transformers does.
    """
    mine, theirs = made(), vllms_own()
    assert served(mine) == [True] * 4
    experts = mine.model.layers[0].moe.experts.routed_experts
    assert experts.w13_weight_packed.any()
    assert experts.w2_weight_packed.any()
    counts = (1, 2, 7, 64)
    in_bf16 = [[run(model, tokens_of(n)).float() for n in counts] for model in (mine, theirs)]
    exact, expected = ([run(model.float(), tokens_of(n)) for n in counts] for model in (mine, theirs))
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    right = torch.cat(expected)
    errors = [(torch.cat(found) - right).norm() / right.norm() for found in in_bf16]
    assert errors[0] <= 1.25 * errors[1] < 0.2, errors


def test_a_layer_is_six_calls_between_attention_and_the_next_layer(caplog: pytest.LogCaptureFixture) -> None:
    """No norm, sum, product or choice of torch's between two layers, nor vLLM's runner."""
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made()
    said = [r.getMessage() for r in caplog.records if r.name == "vllm.kerngen"]
    assert said == [
        "kerngen: experts by moe_w4a16, 3 of 16 a token",
        "kerngen: norms and residuals of 4 of 4 decoder layers, gate and GELU of 4",
        "kerngen: routing, and the experts' sum with the norms behind it, in one launch each in 4 of 4 decoder layers",
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(mine, tokens_of(7))
    counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith(("kerngen::", "vllm::"))}
    assert counts == {
        "kerngen::add_norm_functional": 4, "kerngen::moe_router": 4, "kerngen::moe_w4a16": 4,
        "kerngen::moe_combine_functional": 4, "kerngen::w4a16_gated": 4, "kerngen::w4a16_gemm": 12,
    }  # fmt: skip
    assert mine.model.vllm_config.compilation_config.static_all_moe_layers == []


def test_parameters_are_vllms() -> None:
    from vllm.model_executor.models import gemma4

    mine, theirs = made(), made(gemma4.Gemma4ForCausalLM)
    named = [[name for name, _ in m.named_parameters(remove_duplicate=False)] for m in (mine, theirs)]
    assert named[0] == named[1]


def test_its_kernels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a forward asks, whatever its tokens, and nothing else."""
    from dataclasses import replace

    from kerngen.vllm import ahead, expert_layer_v0_26, linear, model_v0_26, moe_v0_26

    asked = ahead.Ahead()
    for module in (expert_layer_v0_26, linear, model_v0_26, moe_v0_26):
        monkeypatch.setattr(module, "AHEAD", asked)
    mine = made()
    calls = recorded(lambda: run(mine, tokens_of(5)))
    ran = {(call.kernel, replace(call.problem, num_tokens=1)) for call in calls}
    assert ran == set(+asked._asked)


REFUSED = "kerngen: routing, and the experts' sum with the norms behind it, in one launch each in 0 of 4 decoder layers"


def require_vllms(mine: Any, expected: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    assert served(mine) == [False] * 4
    assert [type(layer).__name__ for layer in mine.model.layers] == ["DecoderLayer"] * 4
    assert f"{REFUSED}; 4 stay vLLM's: {why}" in [r.getMessage() for r in caplog.records if r.name == "vllm.kerngen"]
    assert len(mine.model.vllm_config.compilation_config.static_all_moe_layers) == 4
    torch.testing.assert_close(run(mine.float(), tokens_of(7)), expected, rtol=1e-4, atol=1e-4)


def test_shapes_that_the_router_does_not_take_are_vllms(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor.models import gemma4

    changes = {"num_experts": 4, "top_k_experts": 2}
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made(changes=changes)
    expected = run(made(gemma4.Gemma4ForCausalLM, changes).float(), tokens_of(7))
    require_vllms(mine, expected, "num_experts=4 is not a positive multiple of 8", caplog)


def test_chosen_experts_that_are_asked_for_are_vllms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's runner tells them, by a function that its router is given."""
    build = test_model.vllm_config

    def asking(*args: Any, **given: Any) -> Any:
        config = build(*args, **given)
        config.model_config.enable_return_routed_experts = True
        return config

    monkeypatch.setattr(test_model, "vllm_config", asking)
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made()
    expected = run(vllms_own().float(), tokens_of(7))
    told: list[Tensor] = []
    mine.model.layers[1].moe.experts.router.set_capture_fn(told.append)
    why = "vLLM is asked which experts it chose (--enable-return-routed-experts)"
    require_vllms(mine, expected, why, caplog)
    assert [ids.shape for ids in told] == [(7, 3)]


def test_experts_that_stay_vllms_are_routed_by_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As without the part `moe`, or with another backend: here by a method that is held for none of ours."""
    from kerngen.vllm import expert_layer_v0_26 as module

    expected = run(vllms_own().float(), tokens_of(7))
    monkeypatch.setattr(module, "KerngenMoEMethod", type("Another", (), {}))
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made()
    require_vllms(mine, expected, "their experts are not kerngen's", caplog)


def test_ranks_leave_routing_and_sums_to_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank has a summand of the experts, which vLLM sums over the ranks before the norm."""
    from vllm.distributed import parallel_state

    changes = {"num_global_key_value_heads": 2, "intermediate_size": 128, "moe_intermediate_size": 64}
    monkeypatch.setattr(test_model, "INTERMEDIATE", 128)
    monkeypatch.setattr(parallel_state, "_TP", rank(0, 2))
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made(changes=changes)
    assert served(mine) == [False] * 4
    assert f"{REFUSED}; 4 stay vLLM's: their experts are summed over ranks before a norm (tensor parallelism)" in (
        r.getMessage() for r in caplog.records
    )


def test_a_simulated_routing_is_vllms(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made()
    assert served(mine) == [False] * 4
    assert "4 stay vLLM's: vLLM routes by RoutingSimulatorRouter" in caplog.text


def test_layers_with_per_layer_inputs_are_vllms(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor.models import gemma4

    changes = {"hidden_size_per_layer_input": 32}
    with caplog.at_level(logging.INFO, "vllm.kerngen"):
        mine = made(changes=changes)
    expected = run(made(gemma4.Gemma4ForCausalLM, changes).float(), tokens_of(7))
    require_vllms(mine, expected, "per-layer inputs come between the experts and the next layer", caplog)


def test_a_layer_whose_next_one_is_vllms_hands_on_the_stream() -> None:
    """And the others' experts are found by vLLM's operator, which may count its calls."""
    ignore = tuple(f"model.layers.2.mlp.{name}_proj" for name in ("gate", "up"))
    hf = text_config(**EXPERTS)
    weights = Checkpoint(hf, ignore).with_experts(hf).int4
    mine = make(ours(), hf, True, weights, ignore=ignore)
    kinds = [type(layer).__name__ for layer in mine.model.layers]
    assert kinds == ["DecoderLayer", "DecoderLayer", "Gemma4DecoderLayer", "DecoderLayer"]
    assert mine.model.vllm_config.compilation_config.static_all_moe_layers == ["model.layers.2.moe.experts"]
    expected = run(vllms_own().float(), tokens_of(7))
    torch.testing.assert_close(run(mine.float(), tokens_of(7)), expected, rtol=1e-4, atol=1e-4)


def test_what_comes_from_outside_is_not_written() -> None:
    mine = made().float()
    given = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5))
    kept = given.clone()
    with torch.no_grad():
        mine.model(None, torch.arange(5), None, given)
    assert torch.equal(given, kept)


@needs_compiler
def test_compiled_by_vllm_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.model_executor.models import gemma4

    settings = compiled_in_pieces(monkeypatch, tmp_path, ["kerngen_in_vllm::attend"])
    monkeypatch.setattr(gemma4, "Attention", AttendBetween)
    model = made(compilation=settings).float().model
    assert all(layer.has_expert_end for layer in model.layers)
    require_compiled_right(model)
