"""examples/serving: what vLLM is given to be put under the same load. vLLM itself is not there."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

HERE = Path(__file__).parents[2] / "examples/serving"


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module


def test_the_folder_says_what_the_text_model_is(serving: Any, tmp_path: Path) -> None:
    peer = serving("peer")
    place = Path(peer.generated("gemma-4-31b", tmp_path))
    config = json.loads((place / "config.json").read_text())
    assert config["architectures"] == ["Gemma4ForCausalLM"]
    assert (config["num_hidden_layers"], config["head_dim"], config["global_head_dim"]) == (60, 256, 512)
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert (place / "tokenizer.json").is_file()
    command = peer.command("python", str(place), 9224, generated=True)
    assert command[command.index("--load-format") + 1] == "dummy"
    assert "--load-format" not in peer.command("python", str(place), 9224, generated=False)


def test_the_plugin_is_found(serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = serving("peer")
    peer.generated("gemma-4-e2b", tmp_path)
    found = peer.environment(tmp_path)["PYTHONPATH"].split(":")
    assert {str(tmp_path), str(HERE)} <= set(found)
    (plugin,) = Distribution.at(tmp_path / "kerngen_generated-0.dist-info").entry_points
    assert plugin.group == "vllm.general_plugins"
    assert plugin.load() is serving("peer_weights").register


def test_weights_are_numbers_that_rows_live_through(serving: Any) -> None:
    torch.manual_seed(0)
    inputs, outputs = 4096, 256
    layer = nn.Module()
    for name, tensor in {
        "weight_packed": torch.zeros(outputs, inputs // 8, dtype=torch.int32),
        "weight_scale": torch.full((outputs, inputs // 32), float("nan"), dtype=torch.bfloat16),
        "weight_shape": torch.tensor([outputs, inputs]),
        "norm": torch.zeros(7),
        "embedding": torch.full((64, inputs), float("nan")),
    }.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    serving("peer_weights").fill(layer)
    held = layer.state_dict()
    assert held["weight_shape"].tolist() == [outputs, inputs]
    assert held["norm"].eq(1).all()
    nibbles = torch.stack([held["weight_packed"] >> 4 * i & 15 for i in range(8)], dim=-1).reshape(outputs, inputs)
    assert torch.bincount(nibbles.flatten(), minlength=16).float().std() < 0.01 * nibbles.numel()
    weights = (nibbles.float() - 8) * held["weight_scale"].float().repeat_interleave(32, dim=1)
    assert 0.5 < float((torch.randn(inputs) @ weights.T).std()) < 2
    assert 0.5 < float(held["embedding"].norm(dim=1).mean()) < 2


def test_weights_are_the_same_whichever_way_round_a_method_holds_them(serving: Any) -> None:
    layers = nn.Module(), nn.Module()
    packed, scale = ("w13_weight_packed", torch.int32), ("w13_weight_scale", torch.bfloat16)
    for layer, order, turn in ((layers[0], (packed, scale), False), (layers[1], (scale, packed), True)):
        for name, dtype in order:
            tensor = torch.zeros(3, 64, 16, dtype=dtype)
            tensor = tensor.mT.contiguous() if turn else tensor
            layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        serving("peer_weights").fill(layer)
    for name, _ in (packed, scale):
        one, other = (layer.get_parameter(name) for layer in layers)
        assert one.eq(other.mT).all()
        assert one.unique().numel() > 100
