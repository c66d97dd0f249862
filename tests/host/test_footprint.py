"""The memory that a model is said to take, against what is really allocated and what README.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command import ROOT, Kerngen

from kerngen.runtime.cache import KVCache
from kerngen.runtime.config import read_drafter_config, read_model_config
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.footprint import _bytes, footprint
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import load_drafter, load_model
from kerngen.workload import MODELS, find_model

TINY = ROOT / "examples" / "tiny"


@pytest.mark.parametrize("name", ["gemma-4-tiny", "gemma-4-tiny-w4a16"])
def test_what_is_loaded_takes_as_much_as_is_said(name: str) -> None:
    config = read_model_config(TINY / name)
    drafter = read_drafter_config(TINY / "gemma-4-tiny-assistant", config)
    ops = KernelOps(Reference(), torch.bfloat16)
    said = footprint(config, drafter, torch.bfloat16, 500)
    assert said.weight_bytes == _bytes(load_model(TINY / name, config, ops))
    assert said.drafter_bytes == _bytes(load_drafter(TINY / "gemma-4-tiny-assistant", drafter, ops))
    assert said.cache_bytes == KVCache(config, ops, batch=1, max_len=500, max_step=500).num_bytes
    assert said.total_bytes == said.weight_bytes + said.drafter_bytes + said.cache_bytes


def test_int4_weights_take_a_quarter_and_their_scales() -> None:
    config = read_model_config(TINY / "gemma-4-tiny-w4a16")
    packed = footprint(config, None, torch.bfloat16, 64).weight_bytes
    dense = footprint(config, None, torch.bfloat16, 64, dense=True).weight_bytes
    whole = read_model_config(TINY / "gemma-4-tiny")
    assert dense == footprint(whole, None, torch.bfloat16, 64).weight_bytes
    assert packed < dense


def test_readme_says_what_the_released_models_take() -> None:
    rows = re.findall(r"^\| (gemma-4-\S+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(MODELS)
    for name, cells in rows:
        model = find_model(name)
        short, dense, long = (
            footprint(model.target, model.drafter, torch.bfloat16, context, dense=whole)
            for context, whole in ((8192, False), (8192, True), (131072, False))
        )
        sizes = (short.weight_bytes, dense.weight_bytes, short.drafter_bytes, short.cache_bytes, long.cache_bytes)
        assert cells.split(" | ") == [f"{size / 1e9:.1f}" for size in sizes], name


def test_doctor_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kerngen = Kerngen(tmp_path, monkeypatch, capsys)
    which = ("doctor", "--model", str(TINY / "gemma-4-tiny-w4a16"), "--arch", "sm80", "--context", "500")
    memory = json.loads(kerngen(*which, "--json")[1])["model"]["memory"]
    said = footprint(read_model_config(TINY / "gemma-4-tiny-w4a16"), None, torch.bfloat16, 500)
    assert memory["as released"] == {"weights": said.weight_bytes, "drafter": 0, "cache": said.cache_bytes}
    assert memory["unquantized"]["weights"] > said.weight_bytes
    assert "memory, as released: 0.0 GB at 500 tokens" in kerngen(*which)[1]
