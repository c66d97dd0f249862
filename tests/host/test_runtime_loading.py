"""How weights get from a file to the device: in pieces, with progress, little memory, and a look at every value."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WIDE, edit_config, edit_tensors, logits, quantize, shard
from command import ROOT
from tiny_gemma import CPU, load, make_target
from torch import Tensor

from kerngen.errors import CheckpointError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.weights import mapped
from kerngen.runtime.weights.loader import load_model
from kerngen.runtime.weights.safetensors import Checkpoint, SafetensorsFile
from kerngen.runtime.weights.staging import Stage

MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_target(tmp_path / "model", "k_eq_v", **WIDE)
    return tmp_path / "model"


@pytest.mark.parametrize("piece_bytes", [1, 1000, 4096])
@pytest.mark.parametrize("quantized", [False, True])
def test_pieces_of_any_size_make_the_same_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, quantized: bool
) -> None:
    if quantized:
        quantize(folder, 32)
    expected = logits(load(folder))
    monkeypatch.setattr(mapped, "PIECE_BYTES", piece_bytes)
    assert torch.equal(logits(load(folder)), expected)


def test_pieces_of_a_file_that_is_not_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors itself aligns what it writes; the format does not ask for it."""
    monkeypatch.setattr(mapped, "PIECE_BYTES", 64)
    want = torch.arange(700, dtype=torch.float32).view(100, 7)
    spans = {"a": ("U8", [3], 0, 3), "b": ("F32", [100, 7], 3, 2803), "c": ("F32", [], 2803, 2807)}
    header = {n: {"dtype": d, "shape": s, "data_offsets": [i, j]} for n, (d, s, i, j) in spans.items()}
    text = json.dumps(header).encode()
    data = b"abc" + want.numpy().tobytes() + torch.tensor(5.0).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    file = SafetensorsFile(tmp_path / "x.safetensors")
    rows = [row for row, _ in file.pieces("b")]
    assert rows == list(range(0, 100, 2))
    assert torch.equal(torch.cat([piece.clone() for _, piece in file.pieces("b")]), want)
    assert torch.equal(torch.cat([piece.clone() for _, piece in file.pieces("b", rows=32)]), want)
    assert [row for row, _ in file.pieces("b", rows=32)] == [0, 32, 64, 96]
    assert [float(piece) for _, piece in file.pieces("c")] == [5.0]


class Event:
    """Stands for a CUDA event: what the host must wait for before it fills a buffer again."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("wait")

    def record(self, stream: object) -> None:
        self.log.append("record")


def test_a_gpu_gets_its_pieces_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path through pinned memory, without any: each buffer is waited for before it is filled again."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    stage, events = Stage(CPU), [Event(), Event()]
    monkeypatch.setattr(stage, "_buffers", [torch.full((64,), 7, dtype=torch.uint8) for _ in events])
    monkeypatch.setattr(stage, "_free", events)
    for count in (1, 16, 17):  # the last is larger than a buffer
        for dtype in (torch.float32, torch.bfloat16):
            piece, out = torch.randn(count), torch.zeros(count, dtype=dtype)
            stage.copy(piece, out)
            assert torch.equal(out, piece.to(dtype))
    piece, out = torch.randn(4, 3), torch.zeros(3, 8)
    stage.copy(piece, out[:, 4:], is_transposed=True)
    assert torch.equal(out, torch.cat((torch.zeros(3, 4), piece.T), 1))
    stage.copy(torch.empty(0, 4), torch.empty(0, 4))
    fits, large = ["wait", "record"], ["record"]
    assert events[1].log == [*fits, *fits, *large, *fits]
    assert events[0].log == [*fits, *fits, *large]


def test_towers_are_never_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is any other tensor that the text model does not have."""
    text = set(Checkpoint(folder).names)
    towers = {f"{name}.weight": torch.full((64,), torch.nan) for name in ("vision_tower.x", "audio_tower.y", "embed_v")}
    edit_tensors(folder, lambda t: t.update(towers))
    read: set[str] = set()
    real = SafetensorsFile.pieces

    def pieces(self: SafetensorsFile, name: str, *how: Any, **box: Any) -> Iterator[tuple[int, Tensor]]:
        read.add(name)
        return real(self, name, *how, **box)

    monkeypatch.setattr(SafetensorsFile, "pieces", pieces)
    monkeypatch.setattr(SafetensorsFile, "tensor", lambda self, name: pytest.fail(f"{name} was read"))
    load(folder)
    assert read == text


def test_progress_ends_with_all_bytes_of_the_text_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(folder)
    monkeypatch.setattr(mapped, "PIECE_BYTES", 4096)
    seen: list[tuple[int, int]] = []
    ops = TorchOps(CPU, torch.float32)
    load_model(folder, read_model_config(folder), ops, advance=lambda done, total: seen.append((done, total)))
    total = sum(Checkpoint(folder).num_bytes(name) for name in Checkpoint(folder).names)
    assert seen[-1] == (total, total)
    assert {t for _, t in seen} == {total}
    assert len(seen) > 2 * len(Checkpoint(folder).names)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_named(folder: Path, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "PIECE_BYTES", 1000)
    name = "model.layers.1.mlp.down_proj.weight"  # [128, 256]

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][77, 5] = value
        tensors[name][90:92] = value

    edit_tensors(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"model.safetensors: {name} holds NaN or infinity: 513 of 32,768 values, the first at [77, 5]" in str(
        caught.value
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scales_that_are_no_numbers_are_named(folder: Path, value: float) -> None:
    quantize(folder, 32)
    name = "model.layers.1.mlp.down_proj.weight_scale"
    edit_tensors(folder, lambda t: t[name][3, 1].fill_(value))
    with pytest.raises(CheckpointError, match=rf"{name}.*NaN or infinity.* 1 of 1,024 .*\[3, 1\]"):
        load(folder)


def test_values_that_fp16_cannot_hold_are_named(folder: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    edit_tensors(folder, lambda t: t[name][3, 1].fill_(1e5))
    load(folder)
    with pytest.raises(CheckpointError, match=rf"{name}.*1e\+05.*float16"):
        load(folder, torch.float16)


LOAD = """
import sys, threading, time
import psutil, torch
from pathlib import Path
from kerngen.runtime.config import read_model_config
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.weights.loader import load_model

torch.set_num_threads(1)
me, peak, done = psutil.Process(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, me.memory_info().rss)
        time.sleep(0.002)
before = me.memory_info().rss
thread = threading.Thread(target=watch)
thread.start()
folder = Path(sys.argv[1])
weights = load_model(folder, read_model_config(folder), TorchOps(torch.device("cpu"), torch.bfloat16))
done = True
thread.join()
print(peak - before, me.memory_info().rss - before)
"""


def test_loading_takes_little_memory_beside_the_weights(tmp_path: Path) -> None:
    """A third of a gigabyte, most of it in one tensor, from a file that would fill as much again if it stayed."""
    make_target(tmp_path, "dense", num_hidden_layers=1, layer_types=None)
    table = torch.zeros(5_000_000, 32, dtype=torch.bfloat16)
    edit_tensors(tmp_path, lambda t: t.update({"model.embed_tokens.weight": table}))
    edit_config(tmp_path, lambda c: c.update(vocab_size=len(table)))
    weights = sum(Checkpoint(tmp_path).num_bytes(name) for name in Checkpoint(tmp_path).names)
    assert weights > 300 * MIB
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    peak, after = map(int, done.stdout.split())
    assert weights - 8 * MIB < after
    assert peak < weights + 100 * MIB, f"{peak / MIB:.0f} MiB for {weights / MIB:.0f} MiB of weights"
