"""Drafters whose own config.json says that they are stored in int4."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import edit_tensors, quantize
from command import ROOT

from kerngen.errors import CheckpointError
from kerngen.runtime.config import read_drafter_config, read_model_config
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops import Ops
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import load
from kerngen.runtime.weights.layout import DrafterWeights
from kerngen.runtime.weights.loader import load_drafter

TINY = ROOT / "examples" / "tiny"
TARGET, ASSISTANT = TINY / "gemma-4-tiny-w4a16", TINY / "gemma-4-tiny-assistant"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ASSISTANT, tmp_path / "assistant")
    return tmp_path / "assistant"


def loaded(folder: Path, ops: Ops) -> DrafterWeights:
    return load_drafter(folder, read_drafter_config(folder, read_model_config(TARGET)), ops)


def test_it_is_what_is_stored(folder: Path) -> None:
    dense = quantize(folder, 64)
    made = loaded(folder, TorchOps(torch.device("cpu"), torch.float32))
    assert torch.equal(made.pre.weight, dense["pre_projection.weight"])
    assert torch.equal(made.layers[3].down.weight, dense["model.layers.3.mlp.down_proj.weight"])
    packed = loaded(folder, KernelOps(Reference(), torch.bfloat16)).layers[0].gate_up
    assert (packed.format.name, packed.format.group_size, packed.gated) == ("int4", 64, True)


def test_it_changes_no_token(folder: Path) -> None:
    quantize(folder, 32)
    alone, drafted = (
        load(TARGET, draft=draft, device="cpu", num_draft_tokens=3).generate("What is a warp?", max_new_tokens=32)
        for draft in (False, folder)
    )
    assert drafted.tokens == alone.tokens
    assert drafted.stats.acceptance_length > 1.5


def test_a_packed_head_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    quantize(folder, 32, ignore=())
    with pytest.raises(CheckpointError, match="lm_head is packed"):
        loaded(folder, KernelOps(Reference(), torch.bfloat16))
