"""The linear kernel where vLLM calls it: chosen, packed, multiplied and compiled, on the CPU."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import capability
from torch import Tensor
from torch._dynamo.utils import counters

from kerngen.errors import ProblemError
from kerngen.templates.common.w4.pack import dequantize

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def kernel(registered: None) -> Any:
    from kerngen.vllm.linear import KerngenLinearKernel

    return KerngenLinearKernel


def config(k: int = 256, n: int = 96, **changes: Any) -> Any:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    fields = {
        "full_weight_shape": (k, n), "partition_weight_shape": (k, n), "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16, "group_size": 32, "zero_points": False, "has_g_idx": False,
    }  # fmt: skip
    known = inspect.signature(MPLinearLayerConfig).parameters
    return MPLinearLayerConfig(**{name: value for name, value in (fields | changes).items() if name in known})


def weights(k: int, n: int, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a checkpoint stores them: [N, K / 8] int32, [N, K / group_size]."""
    draw = torch.Generator().manual_seed(k + n)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=draw).int()
    return words, (torch.rand(n, k // group_size, generator=draw) / 64).to(dtype)


def layer_of(k: int, n: int, group_size: int, dtype: torch.dtype, bias: bool = False) -> tuple[Any, Any, Tensor]:
    """(scheme, layer, W): vLLM's own scheme made the layer and chose its kernel; W [N, K] fp32 is what it loaded."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    scheme = CompressedTensorsWNA16("group", 4, group_size, layer_name="layer")
    layer = torch.nn.Module()
    scheme.create_weights(layer, n, k, [n], k, dtype, weight_loader=lambda *_: None)
    words, scales = weights(k, n, group_size, dtype)
    layer.weight_packed.data.copy_(words)
    layer.weight_scale.data.copy_(scales)
    layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, n).to(dtype), requires_grad=False) if bias else None
    scheme.process_weights_after_loading(layer)
    return scheme, layer, dequantize(words, scales)


def test_registered_twice_is_once_and_first(kernel: Any) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    assert kernels[0] is kernel
    assert kernels.count(kernel) == 1
    assert linear.MarlinLinearKernel in kernels


def test_compiled_graphs_of_a_start_without_the_plug_in_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are in another order, and vLLM's key says nothing of plug-ins."""
    from vllm import envs

    assert "KERNGEN_VLLM" in envs.environment_variables
    with_it = envs.compile_factors()
    monkeypatch.delitem(envs.environment_variables, "KERNGEN_VLLM")
    without = envs.compile_factors()
    assert with_it != without
    assert "linear" in str(with_it["KERNGEN_VLLM"])


def test_each_method_takes_what_vllm_gives_it(kernel: Any) -> None:
    """The names of the parameters of what is overridden, in this release's order."""
    (base,) = kernel.__bases__
    overridden = [name for name in vars(kernel) if name in vars(base) and callable(getattr(kernel, name))]
    assert {"can_implement", "apply_weights", "process_weights_after_loading", "get_min_capability"} <= set(overridden)
    assert base.__abstractmethods__ <= set(overridden)
    for name in overridden:
        ours, theirs = (inspect.signature(getattr(c, name)).parameters.values() for c in (kernel, base))
        named = [p.name for p in ours if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
        takes_all = len(named) < len(ours)
        wanted = [p.name for p in theirs]
        assert named == wanted[: len(named)] if takes_all else named == wanted, name


def test_the_configuration_has_the_fields_that_are_asked(kernel: Any) -> None:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig

    asked = {"partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points", "out_type"}
    assert asked <= set(inspect.signature(MPLinearLayerConfig).parameters)


@pytest.mark.parametrize(("k", "n"), [(5376, 16384), (5376, 43008), (21504, 5376), (1056, 352), (352, 1056)])
@pytest.mark.parametrize("group_size", [32])
def test_shapes_of_any_rank_are_taken(kernel: Any, k: int, n: int, group_size: int) -> None:
    assert kernel.can_implement(config(k, n, group_size=group_size)) == (True, None)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups_and_dtypes_are_taken(kernel: Any, group_size: int, dtype: torch.dtype) -> None:
    assert kernel.can_implement(config(group_size=group_size, act_type=dtype))[0]


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"k": 528}, r"k=528 is not a positive multiple of group_size=32"
    yield {"n": 176}, r"n=176 is not a positive multiple of 32"
    yield {"group_size": 16}, r"group_size=16 is not one of \(32, 64, 128\)"
    yield {"group_size": -1}, r"group_size=-1 is not one of"
    yield {"act_type": torch.float32}, "not torch.float32"
    yield {"act_type": torch.float8_e4m3fn}, "not torch.float8_e4m3fn"
    yield {"out_type": torch.float32}, "not torch.bfloat16 and torch.float32"
    yield {"zero_points": True}, "with zero points"


@pytest.mark.parametrize(("changes", "why"), list(refusals()), ids=lambda v: str(v)[:40])
def test_what_is_not_served_is_refused_with_the_reason(kernel: Any, changes: dict[str, Any], why: str) -> None:
    from vllm.scalar_type import scalar_types

    taken, said = kernel.can_implement(config(**changes))
    assert not taken
    assert re.search(why, said), said
    assert not kernel.can_implement(config(weight_type=scalar_types.uint8b128))[0]


def test_columns_in_another_order_are_refused(kernel: Any) -> None:
    if not hasattr(config(), "has_g_idx"):
        pytest.skip("this release has no g_idx")
    taken, why = kernel.can_implement(config(has_g_idx=True))
    assert not taken
    assert "g_idx" in why


@pytest.mark.parametrize(("board", "dtype", "taken"), [
    ((7, 0), torch.float16, True), ((7, 5), torch.bfloat16, False), ((8, 0), torch.bfloat16, True),
    ((12, 1), torch.bfloat16, True), ((6, 1), torch.float16, False),
])  # fmt: skip
def test_boards(kernel: Any, monkeypatch: pytest.MonkeyPatch, board: tuple[int, int], dtype: Any, taken: bool) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_capability", capability(*board))
    found, why = kernel.can_implement(config(act_type=dtype))
    assert found is taken
    assert (why is None) is taken


def test_off_by_vllms_own_switch(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs
    from vllm.model_executor.kernels import linear

    monkeypatch.setattr(linear.MarlinLinearKernel, "can_implement", classmethod(lambda cls, c: (True, None)))
    monkeypatch.setattr(linear.MacheteLinearKernel, "can_implement", classmethod(lambda cls, c: (False, "no")))
    assert linear.choose_mp_linear_kernel(config()) is kernel
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", kernel.__name__)
    assert [kernel.__name__] == envs.VLLM_DISABLED_KERNELS
    assert linear.choose_mp_linear_kernel(config()) is linear.MarlinLinearKernel


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("group_size", "dtype"), [(32, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16)])
def test_packed_and_multiplied_is_the_dequantised_product(group_size: int, dtype: torch.dtype, bias: bool) -> None:
    k, n = 256, 96
    scheme, layer, dense = layer_of(k, n, group_size, dtype, bias)
    assert type(scheme.kernel).__name__ == "KerngenLinearKernel", "vLLM's scheme chose it"
    for shape in ((1, k), (5, k), (2, 3, k), (0, k)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = (x.float() @ dense.T).to(dtype)
        if bias:
            expected = expected + layer.bias
        out = scheme.apply_weights(layer, x, layer.bias)
        assert out.shape == (*shape[:-1], n)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)


def test_no_second_copy_of_the_weights_is_kept() -> None:
    k, n = 256, 96
    _, layer, _ = layer_of(k, n, 32, torch.bfloat16)
    kept = sum(t.untyped_storage().nbytes() for t in (*layer.parameters(), *layer.buffers()) if t.ndim > 1)
    assert kept == k * n // 2 + k // 32 * n * 2
    assert set(dict(layer.named_parameters())) >= {"weight_packed", "weight_scale"}, "vLLM reloads weights by name"


def test_weights_that_are_loaded_again_are_packed_again() -> None:
    """As vLLM's reload does: fresh parameters of the checkpoint's shapes, then the same call."""
    k, n = 64, 32
    scheme, layer, _ = layer_of(k, n, 32, torch.bfloat16)
    words, scales = weights(k, n, 32, torch.bfloat16)
    layer.weight_packed = torch.nn.Parameter(words.flip(0).contiguous(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales.flip(0).contiguous(), requires_grad=False)
    scheme.process_weights_after_loading(layer)
    x = torch.eye(k, dtype=torch.bfloat16)
    torch.testing.assert_close(scheme.apply_weights(layer, x, None).T.float(), dequantize(words, scales).flip(0),
                               rtol=2**-7, atol=0)  # fmt: skip


def test_gptqs_order_is_packed_too(kernel: Any) -> None:
    """K first in both tensors, as parameters of vLLM's that say so."""
    k, n = 128, 64
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter

    words, scales = weights(k, n, 64, torch.float16)
    layer = torch.nn.Module()
    loader = {"weight_loader": lambda *_: None}
    layer.qweight = PackedvLLMParameter(
        data=words.T.contiguous(), input_dim=0, output_dim=1, packed_dim=0, packed_factor=8, **loader
    )
    layer.scales = GroupQuantScaleParameter(data=scales.T.contiguous(), input_dim=0, output_dim=1, **loader)
    made = kernel(config(k, n, group_size=64, act_type=torch.float16), "qweight", "scales")
    made.process_weights_after_loading(layer)
    x = torch.eye(k, dtype=torch.float16)
    torch.testing.assert_close(made.apply_weights(layer, x).T.float(), dequantize(words, scales), rtol=2**-9, atol=0)


def test_weights_that_are_packed_along_columns_are_refused(kernel: Any) -> None:
    """As AWQ packs them; vLLM brings them into the other order first."""
    k, n = 128, 64
    layer = torch.nn.Module()
    layer.w = torch.nn.Parameter(torch.zeros(n // 8, k, dtype=torch.int32), requires_grad=False)
    layer.s = torch.nn.Parameter(torch.ones(n, k // 32, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(ProblemError, match=r"w is \(8, 128\).*64 x 128 in groups of 32"):
        kernel(config(k, n), "w", "s").process_weights_after_loading(layer)


def test_compiled_by_torch_for_any_number_of_tokens() -> None:
    """One graph, without a break: the op's fake says what comes of a number of tokens that is a symbol."""
    scheme, layer, _ = layer_of(64, 32, 32, torch.bfloat16, bias=True)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = scheme.apply_weights(layer, x, layer.bias)
        return out

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for tokens in (2, 3, 17, 64):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        if tokens == 2:
            torch._dynamo.mark_dynamic(x, 0)  # raises where a number of tokens is compiled in
        assert torch.equal(compiled(x), forward(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_gated_matrix_gives_the_product_of_both_halves(kernel: Any) -> None:
    k, n = 256, 192
    words, scales = weights(k, n, 32, torch.bfloat16)
    layer = torch.nn.Module()
    layer.w, layer.s = (torch.nn.Parameter(t.clone(), requires_grad=False) for t in (words, scales))
    made = kernel(config(k, n), "w", "s")
    assert made.gate() is None
    made.process_weights_after_loading(layer)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(2)).bfloat16()
    gate, up = (x.float() @ dequantize(words, scales).T).bfloat16().chunk(2, -1)
    expected = torch.nn.functional.gelu(gate.float(), approximate="tanh").bfloat16() * up
    torch.testing.assert_close(made.apply_weights(layer, x), expected, rtol=2**-6, atol=2**-7)


def test_a_matrix_may_go_without_its_last_rows(kernel: Any) -> None:
    k, n, kept = 256, 192, 128
    words, scales = weights(k, n, 32, torch.bfloat16)
    layer = torch.nn.Module()
    layer.w, layer.s = (torch.nn.Parameter(t.clone(), requires_grad=False) for t in (words, scales))
    made = kernel(config(k, n), "w", "s")
    assert made.keep_rows(kept) is None
    made.process_weights_after_loading(layer)
    assert layer.w.numel() == kept * k // 8
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = (x.float() @ dequantize(words[:kept], scales[:kept]).T).bfloat16()
    torch.testing.assert_close(made.apply_weights(layer, x), expected, rtol=2**-6, atol=2**-7)


def test_kernels_of_all_layers_are_loaded_at_once(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which is played: each shape once, for as many tokens as vLLM's scheduler sends."""
    from kerngen.vllm import ahead, linear

    asked: list[tuple[list[Any], int]] = []
    settings = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False),
                               scheduler_config=SimpleNamespace(max_num_batched_tokens=2048))  # fmt: skip
    monkeypatch.setattr(ahead, "get_current_vllm_config_or_none", lambda: settings)
    monkeypatch.setattr(
        ahead,
        "load_ahead",
        lambda problems, most, device, exactly: asked.append((list(problems), most)) or Counter(default=1),
    )
    ours = ahead.Ahead()
    monkeypatch.setattr(linear, "AHEAD", ours)
    made = [kernel(config(k, n), "w", "s") for k, n in ((256, 96), (256, 96), (128, 64), (256, 192), (256, 96))]
    assert made[3].gate() is None
    assert made[4].keep_rows(64) is None
    for _ in made:
        ours.load(torch.device("cuda", 0))
    ((problems, most),) = asked
    assert most == 2048
    assert [(name, p.n, p.k, p.gated) for name, p in problems] == [
        ("w4a16_gemm", 96, 256, False), ("w4a16_gemm", 64, 128, False), ("w4a16_gemm", 192, 256, True),
        ("w4a16_gemm", 64, 256, False),
    ]  # fmt: skip


@pytest.mark.parametrize("sleeps", [True, False])
def test_scratch_is_not_in_what_sleep_empties(sleeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says of the pool that vLLM loads into: it makes only the current thread's allocations route to it."""
    from vllm.config import ModelConfig

    from kerngen.vllm import ahead

    assert "enable_sleep_mode" in ModelConfig.__dataclass_fields__
    assert "only current thread's allocations" in " ".join((torch.cuda.use_mem_pool.__doc__ or "").split())
    settings = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps),
                               scheduler_config=SimpleNamespace(max_num_batched_tokens=16))  # fmt: skip
    monkeypatch.setattr(ahead, "get_current_vllm_config_or_none", lambda: settings)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    threads: list[int] = []

    def load_ahead(*args: Any) -> Counter[str]:
        threads.append(get_ident())
        if len(threads) == 2:
            raise ProblemError("what loading says", hint="")
        return Counter()

    monkeypatch.setattr(ahead, "load_ahead", load_ahead)
    asked = ahead.Ahead()
    asked.ask("a kernel", 1)
    asked.load(torch.device("cpu"))
    assert (threads[0] != get_ident()) == sleeps
    asked.ask("a kernel", 1)
    with pytest.raises(ProblemError, match="what loading says"):
        asked.load(torch.device("cpu"))
