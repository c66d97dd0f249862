"""MLPs whose middle leaves the range of fp16: loading makes it safe with powers of two that cancel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import WIDE, edit_tensors, quantize, save_compressed
from safetensors.torch import load_file
from tiny_gemma import BASE, CPU, make_target, prompt
from torch import Tensor

from kerngen.runtime.config import read_model_config
from kerngen.runtime.engine.core import Engine
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Ops, dense_weights
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.fp16_range import mlp_exponents, times_power
from kerngen.runtime.weights.loader import load_model

PROMPT = prompt(24, seed=5)
GATE = 2.0**6  # so that gelu(gate) * up is some 100 before anything is scaled
EXPONENTS = {"up": (11, -11), "down": (-11, 11), "up alone": (11, 0), "down alone": (-3, 8)}


def torch_ops(dtype: torch.dtype) -> Ops:
    return TorchOps(CPU, dtype)


def kernel_ops(dtype: torch.dtype) -> Ops:
    return KernelOps(Reference(), dtype)


def tokens(folder: Path, ops: Ops) -> list[int]:
    config = read_model_config(folder)
    engine = Engine(Gemma4(config, load_model(folder, config, ops), ops), max_len=48, page_size=16)
    return engine.generate(PROMPT, max_new_tokens=8).tokens


def scale(folder: Path, up: int, down: int, gate: float = 1.0) -> None:
    """Multiply MLPs, dense and experts', by powers of two: weights, or the scales of those that are packed."""

    def edit(stored: dict[str, Tensor]) -> None:
        for name, tensor in stored.items():
            if name.endswith(("_packed", "_shape")) or ".layers." not in name:
                continue
            if "gate_up_proj" in name:
                halves = tensor.float().chunk(2, dim=-2)
                stored[name] = torch.cat((halves[0] * gate, halves[1] * 2.0**up), dim=-2).to(tensor.dtype)
            for part, factor in (("gate_proj", gate), ("up_proj", 2.0**up), ("down_proj", 2.0**down)):
                if f".{part}" in name:
                    stored[name] = (tensor.float() * factor).to(tensor.dtype)

    edit_tensors(folder, edit)


def in_bf16(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items() if v.is_floating_point()}))


FORMATS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "dense bf16": ("dense", in_bf16),
    "dense fp32": ("shared_ple", lambda folder: None),
    "int4": ("dense", lambda folder: quantize(folder, 32)),
    "experts bf16": ("moe", in_bf16),
    "int4 experts": ("moe", lambda folder: save_compressed(folder, 32, "with a shape")),
    "int4 experts, one by one": ("moe", lambda folder: save_compressed(folder, 32, "one by one")),
}


@pytest.fixture(scope="module", params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp16")
    variant, store = FORMATS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BASE, "global_head_dim", 128)  # that kernels take
        make_target(path, variant, **WIDE | {"head_dim": 128, "global_head_dim": 128, "moe_intermediate_size": 64})
    store(path)
    scale(path, 0, 0, GATE)
    return path


@pytest.mark.parametrize("way", EXPONENTS)
def test_a_model_with_a_scaled_mlp_gives_the_tokens_of_fp32(folder: Path, tmp_path: Path, way: str) -> None:
    """Where the powers cancel also the very tokens of the model before it was scaled."""
    scaled = tmp_path / "scaled"
    shutil.copytree(folder, scaled)
    scale(scaled, *EXPONENTS[way])
    want = tokens(scaled, torch_ops(torch.float32))
    assert tokens(scaled, torch_ops(torch.float16)) == want
    assert tokens(scaled, kernel_ops(torch.float16)) == want
    if sum(EXPONENTS[way]) == 0:
        assert tokens(folder, torch_ops(torch.float16)) == want


def test_no_input_leaves_the_range_and_no_smaller_power_would_do() -> None:
    """The worst input of the worst row: behind an RMS norm, its squares sum up to hidden_size."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner = 64, 32
    gate, up = (torch.randn(inner, hidden, generator=generator) * 2.0**7 for _ in range(2))
    norm = torch.rand(hidden, generator=generator) + 0.5
    down = dense_weights(torch.randn(hidden, inner, generator=generator) * 2.0**-16)
    gate_up = dense_weights(torch.cat((gate, up)))
    up_exponents, down_exponents = mlp_exponents(gate_up, down, norm)
    a, b = gate.double() * norm, up.double() * norm
    worst = a / a.norm(dim=-1, keepdim=True) + b / b.norm(dim=-1, keepdim=True)  # halfway between two rows
    worst *= hidden**0.5 / worst.norm(dim=-1, keepdim=True)
    largest = float(((a * worst).sum(-1) * (b * worst).sum(-1)).amax())
    assert 2.0**14 < largest * 2.0 ** int(up_exponents) <= 2.0**15
    assert up_exponents.tolist() == [-down_exponents.item()]


@pytest.mark.parametrize("exponent", [-11, 0, 11])
def test_powers_of_two_lose_nothing(exponent: int) -> None:
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = torch.where(values.abs() < 2.0**-3, 1.0, values)
    want = values.double() * 2.0**exponent
    assert torch.equal(times_power(values.clone(), torch.tensor([exponent] * 2, dtype=torch.int32)).double(), want)


def test_an_mlp_in_range_is_loaded_as_it_is_stored(tmp_path: Path) -> None:
    make_target(tmp_path, "dense")
    config, stored = read_model_config(tmp_path), load_file(tmp_path / "model.safetensors")
    layer = load_model(tmp_path, config, torch_ops(torch.float16)).layers[1]
    gate_and_up = [stored[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.gate_up.weight, torch.cat(gate_and_up).half())
    assert torch.equal(layer.down.weight, stored["model.layers.1.mlp.down_proj.weight"].half())
