"""Models whose shapes no kernel serves are refused as they are loaded, with the backend that runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_gemma
import torch

from kerngen.cli import main
from kerngen.runtime.config import read_drafter_config, read_model_config
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.served_shapes import require_served
from kerngen.runtime.weights.source import CheckpointSource

TINY = Path(__file__).parents[2] / "examples" / "tiny"
SERVED = {"head_dim": 128, "global_head_dim": 256, "hidden_size": 64, "intermediate_size": 96}
UNSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "heads of 32": ({"head_dim": 32}, "head_dim=32: attn_decode serves 128"),
    "global heads of 64": ({"global_head_dim": 64}, "head_dim=64"),
    "three heads a KV head": ({"num_attention_heads": 6}, "3 q heads per kv head"),
    "hidden size of 60": ({"hidden_size": 60}, "60 is not a positive multiple of 8"),
}


@pytest.fixture
def ops() -> KernelOps:
    return KernelOps(Reference(), torch.float32)


def make(folder: Path, monkeypatch: pytest.MonkeyPatch, variant: str, **changes: Any) -> None:
    for name, value in (SERVED | changes).items():
        monkeypatch.setitem(tiny_gemma.BASE, name, value)
    tiny_gemma.make_target(folder, variant)


@pytest.mark.parametrize("case", UNSERVED)
def test_a_shape_without_a_kernel_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ops: KernelOps, case: str
) -> None:
    """By `kerngen run` on the kernels' backend, which is pretended; --backend torch runs it."""
    changes, words = UNSERVED[case]
    make(tmp_path, monkeypatch, "dense", **changes)
    monkeypatch.setattr("kerngen.runtime.session.TextCodec", lambda *_: type("Codec", (), {"vocab_size": 96}))
    monkeypatch.setattr("kerngen.runtime.session.open_backend", lambda *_, **__: ops)
    monkeypatch.setattr(CheckpointSource, "begin", lambda _: pytest.fail("weights were about to be read"))
    monkeypatch.setattr(sys, "argv", ["kerngen", "run", str(tmp_path), "--prompt", "x"])
    with pytest.raises(SystemExit) as caught:
        main()
    first, hint = capsys.readouterr().err.splitlines()[-2:]
    assert caught.value.code == 2
    assert first.startswith(f"UsageError: no kernel serves the model in {tmp_path}: ")
    assert words in first
    assert "--backend torch" in hint


@pytest.mark.parametrize("variant", tiny_gemma.VARIANTS)
def test_what_kernels_serve_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ops: KernelOps, variant: str
) -> None:
    make(tmp_path / "target", monkeypatch, variant)
    tiny_gemma.make_assistant(tmp_path / "draft", variant)
    config = read_model_config(tmp_path / "target")
    drafter = read_drafter_config(tmp_path / "draft", config)
    require_served(tmp_path / "target", config, ops, [(tmp_path / "draft", drafter)])
    monkeypatch.setattr(tiny_gemma.MtpDrafter, "step", lambda *_, **__: pytest.fail("the drafter was asked for"))
    require_served(tmp_path / "target", config, ops)


def test_the_int4_example_is_served(ops: KernelOps) -> None:
    folder = TINY / "gemma-4-tiny-w4a16"
    require_served(folder, read_model_config(folder), ops)
