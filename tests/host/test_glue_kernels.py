"""The kernels between the GEMMs and attention, without a GPU.

They take exactly the block of their specs, their references equal transformers' Gemma-4 bit for bit, and what cannot
run is refused with numbers. What holds for every kernel is in test_kernel_folders.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kerngen.arch import Arch, Target, find_arch
from kerngen.compiler.compile import compile_ptx
from kerngen.compiler.render import render
from kerngen.ops import moe_sum
from kerngen.templates import Kernel, find_kernel
from kerngen.templates.kernel import Case
from kerngen.tuning.space import space_of

NAMES = ("add_norm", "embed", "gelu_gate", "moe_combine", "moe_route", "qkv_norm_rope", "rmsnorm", "softcap_argmax")
KERNELS = tuple(find_kernel(name) for name in NAMES)
SM70, SM90 = find_arch("sm70"), find_arch("sm90")


def _name(value: object) -> str:
    return value.name if isinstance(value, Kernel) else str(value)


def _configs(kernel: Kernel, problem: Any, arch: Arch) -> list[Any]:
    (space,) = space_of(kernel, problem, Target.of(arch))
    points = (kernel.config_type(*values) for values in itertools.product(*space.values()))
    return [c for c in points if kernel.why_invalid(problem, c, Target.of(arch)) is None]


@pytest.mark.parametrize("kernel", KERNELS, ids=_name)
def test_block_in_the_template_is_the_block_that_is_launched(kernel: Kernel) -> None:
    for case in kernel.bench.BENCH_CASES[::4]:
        for config in _configs(kernel, case.problem, SM90)[::4]:
            ptx = compile_ptx(render(kernel, case.problem, config, Target.of(SM90)), SM90).image.decode()
            (launch,) = kernel.launches(case.problem, config, Target.of(SM90))
            assert re.findall(r"\.maxntid (\d+)", ptx) == [str(launch.block[0])], f"{case.name} {config}"
            assert "griddepcontrol.launch_dependents" in ptx
            assert "griddepcontrol.wait" in ptx


def test_a_row_that_no_block_can_hold_is_refused_with_the_numbers() -> None:
    kernel = find_kernel("rmsnorm")
    why = kernel.why_invalid(kernel.problem_type(hidden=5376), kernel.config_type(1, 2), Target.of(SM90))
    assert why == "1344 threads a block (2 rows of 5376 by 672 threads); at most 1024"
    why = kernel.why_invalid(kernel.problem_type(hidden=65536), kernel.config_type(8, 1), Target.of(SM90))
    assert why == (
        "64 registers a thread for the data and 36 for the arithmetic; "
        "1024 threads a block (1 rows of 65536 by 1024 threads) leave 64"
    )
    why = kernel.why_invalid(kernel.problem_type(hidden=256), kernel.config_type(2, 1), Target.of(SM90))
    assert why == "vecs_per_thread=2 takes 32 threads a row of 256, as 1 does"


# The references against transformers, bit for bit in bf16: what the kernels are compared with is the model.


@pytest.fixture(scope="module")
def gemma4() -> Any:
    return pytest.importorskip("transformers.models.gemma4.modeling_gemma4")


def _equal(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs.float()), f"{int((ours != theirs.float()).sum())} of {ours.numel()} differ"


def _norm(gemma4: Any, weight: Tensor | None, x: Tensor) -> Tensor:
    module = gemma4.Gemma4RMSNorm(x.shape[-1], eps=1e-6, with_scale=weight is not None)
    if weight is not None:
        module.weight.data = weight
    return module(x).detach()


def _case(kernel: Kernel, **fields: Any) -> tuple[Case, dict[str, Any]]:
    case = kernel.cases.case_for(kernel.problem_type(**fields))
    return case, kernel.cases.inputs(case, "cpu")


def test_rmsnorm_reference_is_the_models(gemma4: Any) -> None:
    kernel = find_kernel("rmsnorm")
    for has_weight in (True, False):
        case, inputs = _case(kernel, hidden=2560, has_weight=has_weight, num_tokens=9)
        _equal(kernel.reference.expected(case.problem, inputs)["out"], _norm(gemma4, inputs["weight"], inputs["x"]))


def test_add_norm_reference_is_the_models(gemma4: Any) -> None:
    kernel = find_kernel("add_norm")
    case, inputs = _case(kernel, hidden=2560, has_scalar=True, num_tokens=9)
    expected = kernel.reference.expected(case.problem, inputs)
    stream = inputs["residual"] + _norm(gemma4, inputs["post_weight"], inputs["h"])
    stream *= inputs["layer_scalar"]
    _equal(expected["residual_out"], stream)
    _equal(expected["out"], _norm(gemma4, inputs["next_weight"], stream))


def test_moe_combine_reference_is_the_models(gemma4: Any) -> None:
    """Up to the experts' sum, whose order and roundings differ: one expert of weight 1 has neither."""
    kernel = find_kernel("moe_combine")
    case, inputs = _case(kernel, hidden=2816, top_k=1, num_tokens=9)
    expected = kernel.reference.expected(case.problem, inputs)
    assert inputs["topk_weights"].eq(1).all()
    h = _norm(gemma4, inputs["dense_norm"], inputs["dense"])
    h = h + _norm(gemma4, inputs["routed_norm"], inputs["routed"][:, 0])
    stream = inputs["residual"] + _norm(gemma4, inputs["post_norm"], h)
    stream *= inputs["layer_scalar"]
    _equal(expected["residual_out"], stream)
    _equal(expected["out"], _norm(gemma4, inputs["next_norm"], stream))


def test_moe_combine_sums_the_experts_by_their_weights() -> None:
    kernel = find_kernel("moe_combine")
    case, inputs = _case(kernel, hidden=64, top_k=3, num_tokens=4)
    routed = torch.einsum("tkh,tk->th", inputs["routed"].double(), inputs["topk_weights"].double())
    one = dataclasses.replace(case.problem, top_k=1)
    summed = inputs | {"routed": routed[:, None].to(torch.bfloat16), "topk_weights": torch.ones(4, 1)}
    expected, again = kernel.reference.expected(case.problem, inputs), kernel.reference.expected(one, summed)
    torch.testing.assert_close(expected["out"], again["out"], rtol=0.02, atol=0.02)
    alone = moe_sum(inputs["routed"], inputs["topk_weights"])
    torch.testing.assert_close(alone, routed.to(torch.bfloat16), rtol=2**-7, atol=2**-16)


def test_gelu_gate_reference_is_the_models(gemma4: Any) -> None:
    from transformers.activations import ACT2FN

    kernel = find_kernel("gelu_gate")
    case, inputs = _case(kernel, width=2048, num_tokens=9)
    gate, up = inputs["gate"].chunk(2, dim=-1)
    _equal(kernel.reference.expected(case.problem, inputs)["out"], ACT2FN["gelu_pytorch_tanh"](gate) * up)


def test_embed_reference_is_the_models(gemma4: Any) -> None:
    kernel = find_kernel("embed")
    case, inputs = _case(kernel, hidden=5376, vocab_size=100, num_tokens=9)
    module = gemma4.Gemma4TextScaledWordEmbedding(100, 5376, 0, embed_scale=inputs["scale"])
    module.weight.data = inputs["table"]
    _equal(kernel.reference.expected(case.problem, inputs)["out"], module(inputs["ids"]).detach())


def test_ple_inputs_reference_is_the_models(gemma4: Any) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    kernel = find_kernel("ple_inputs")
    case, inputs = _case(kernel, num_layers=3, width=256, vocab_size=100, num_tokens=9)
    config = Gemma4TextConfig(
        hidden_size=1536, num_hidden_layers=3, hidden_size_per_layer_input=256, vocab_size_per_layer_input=100,
        vocab_size=100, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, num_kv_shared_layers=0,
    )  # fmt: skip
    model = gemma4.Gemma4TextModel(config).to(torch.bfloat16)
    model.embed_tokens_per_layer.weight.data = inputs["table"]
    model.per_layer_projection_norm.weight.data = inputs["norm_weight"]
    model.per_layer_model_projection.register_forward_hook(lambda module, args, output: inputs["context"])
    with torch.no_grad():
        tokens = model.get_per_layer_inputs(inputs["ids"])
        theirs = model.project_per_layer_inputs(torch.zeros(9, 1536, dtype=torch.bfloat16), tokens)
    _equal(kernel.reference.expected(case.problem, inputs)["out"], theirs)


@pytest.mark.parametrize("layer", ["sliding_attention", "full_attention"])
def test_qkv_norm_rope_reference_is_the_models(gemma4: Any, layer: str) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    kernel = find_kernel("qkv_norm_rope")
    full = layer == "full_attention"
    shape = kernel.cases.FULL if full else kernel.cases.SLIDING
    case, inputs = _case(kernel, num_q_heads=4, num_kv_heads=2, k_eq_v=full, num_tokens=9, **shape)
    p = case.problem
    rotary = gemma4.Gemma4TextRotaryEmbedding(Gemma4TextConfig(head_dim=256, global_head_dim=512))
    torch.testing.assert_close(inputs["inv_freq"], getattr(rotary, f"{layer}_inv_freq"), rtol=0, atol=0)
    cos, sin = rotary(inputs["qkv"], inputs["positions"][None], layer)
    q, k, *v = inputs["qkv"].view(1, 9, -1, p.head_dim).split((4, 2) if full else (4, 2, 2), dim=2)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        return gemma4.apply_rotary_pos_emb(_norm(gemma4, weight, x), cos, sin, unsqueeze_dim=2)[0]

    expected = kernel.reference.expected(case.problem, inputs)
    _equal(expected["q"], turned(q, inputs["q_weight"]))
    new = {"k_cache": turned(k, inputs["k_weight"]), "v_cache": _norm(gemma4, None, v[0] if v else k)[0]}
    for name, values in new.items():
        cache, untouched = expected[name], torch.ones(expected[name].shape[:3], dtype=torch.bool)
        for token, slot in enumerate(inputs["slot_mapping"].tolist()):
            if slot >= 0:
                page, row = divmod(slot, p.page_size)
                _equal(cache[page, :, row], values[token])
                untouched[page, :, row] = False
        assert bool(cache[untouched].isnan().all()), "rows that no slot names keep what they hold"


def test_softcap_reference_is_the_models() -> None:
    kernel = find_kernel("softcap_argmax")
    case, inputs = _case(kernel, vocab_size=4096, write_capped=True, num_tokens=9)
    expected = kernel.reference.expected(case.problem, inputs)
    capped = torch.tanh(inputs["logits"] / inputs["cap"]) * inputs["cap"]
    _equal(expected["capped"], capped)
    _equal(expected["ids"], capped.float().argmax(-1))
