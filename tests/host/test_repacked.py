"""Repacked weights beside a checkpoint: served where they are what would be made, and else not."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WIDE, edit_config, edit_tensors, logits, quantize, save_compressed
from tiny_gemma import CPU, make_target

from kerngen.runtime.config import read_model_config
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.model import Gemma4
from kerngen.runtime.ops import Linear, Ops, dense_weights
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.weights.loader import load_model
from kerngen.runtime.weights.repacked import leaves, seal
from kerngen.runtime.weights.safetensors import SafetensorsFile
from kerngen.runtime.weights.source import CheckpointSource
from kerngen.runtime.weights.tensors import Wanted

UP = "model.layers.0.mlp.up_proj.weight_packed"


def torch_ops() -> Ops:
    return TorchOps(CPU, torch.float32)


def kernel_ops() -> Ops:
    return KernelOps(Reference(), torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_target(tmp_path, "k_eq_v", **WIDE)
    quantize(tmp_path, 32)
    return tmp_path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoint's tensors that were read."""
    names: list[str] = []
    real = CheckpointSource._copy_all

    def copy(self: CheckpointSource, wanted: Sequence[Wanted], **kwargs: Any) -> None:
        if not self.is_dry:
            names.extend(name for name, *_ in wanted)
        real(self, wanted, **kwargs)

    monkeypatch.setattr(CheckpointSource, "_copy_all", copy)
    return names


def load(folder: Path, ops: Ops | None = None, **options: Any) -> Gemma4:
    ops, config = ops or torch_ops(), read_model_config(folder)
    return Gemma4(config, load_model(folder, config, ops, **options), ops)


def kept_file(folder: Path) -> Path:
    (path,) = folder.glob("*.kerngen")
    return path


@pytest.mark.parametrize("make_ops", [torch_ops, kernel_ops])
@pytest.mark.parametrize("variant", ["k_eq_v", "moe", "shared_ple"])
def test_a_second_start_reads_the_repacked_weights(
    tmp_path: Path, read: list[str], variant: str, make_ops: Callable[[], Ops]
) -> None:
    more = {"moe_intermediate_size": 128} if variant == "moe" else {}
    make_target(tmp_path, variant, **WIDE, **more)
    if variant != "shared_ple":
        save_compressed(tmp_path, 32, "one by one")
    before = load(tmp_path, make_ops())
    assert not list(tmp_path.glob("*.kerngen")), "nothing is written unless it is asked for"
    first = load(tmp_path, make_ops(), keep_repacked=True)
    read.clear()
    told: list[tuple[int, int]] = []
    second = load(tmp_path, make_ops(), advance=lambda done, total: told.append((done, total)))
    assert not read
    assert told[-1][0] == told[-1][1] > 100_000
    for model in (first, second):
        for (path, want), (again, got) in zip(leaves(before.weights), leaves(model.weights), strict=True):
            assert path == again
            assert torch.equal(want, got), path
    head = second.weights.head
    assert head.is_dense
    assert head.weight is second.weights.embed.weight, "a tied head shares the table's memory"
    if make_ops is torch_ops:  # the kernels have no heads of 32
        assert torch.equal(logits(second), logits(before))


def test_a_head_of_its_own_is_kept_as_such(folder: Path, read: list[str]) -> None:
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}))
    with pytest.warns(UserWarning, match=r"lm_head.weight differs"):
        first = load(folder, keep_repacked=True)
    read.clear()
    assert torch.equal(logits(load(folder)), logits(first))
    assert not read


def test_another_backend_or_dtype_has_a_file_of_its_own(folder: Path, read: list[str]) -> None:
    for ops in (torch_ops(), kernel_ops(), TorchOps(CPU, torch.bfloat16)):
        read.clear()
        load(folder, ops, keep_repacked=True)
        assert UP in read
    assert len(list(folder.glob("*.kerngen"))) == 3
    read.clear()
    load(folder, kernel_ops())
    assert not read


class Turned(TorchOps):
    """A backend whose order of dense matrices is another one than yesterday's."""

    def prepare(self, weights: Linear) -> Linear:
        made = super().prepare(weights)
        return dense_weights(made.weight.flip(0).contiguous()) if made.weight.shape[0] != 96 else made


def test_another_order_is_another_file(folder: Path, read: list[str]) -> None:
    load(folder, keep_repacked=True)
    read.clear()
    load(folder, Turned(CPU, torch.float32))
    assert UP in read


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def other_weights(folder: Path) -> None:
    edit_tensors(folder, lambda t: t["model.norm.weight"].mul_(2))


def flip(folder: Path) -> None:
    path = kept_file(folder)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def zero_a_page(folder: Path) -> None:
    path = kept_file(folder)
    data = bytearray(path.read_bytes())
    begin = len(data) // 2
    data[begin : begin + 4096] = bytes(4096)
    path.write_bytes(data)


def cut(folder: Path) -> None:
    os.truncate(kept_file(folder), kept_file(folder).stat().st_size - 1)


def empty(folder: Path) -> None:
    kept_file(folder).write_bytes(b"")


def foreign(folder: Path) -> None:
    kept_file(folder).write_bytes((folder / "model.safetensors").read_bytes())


def pipe(folder: Path) -> None:
    path = kept_file(folder)
    path.unlink()
    os.mkfifo(path)


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = kept_file(folder)
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    return edit


def reshape(header: dict[str, Any]) -> None:
    header["layers.0.qkv.weight"]["shape"].reverse()


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "other weights": (other_weights, "was made from other files, or by another kerngen"),
    "same size, another time": (touch, "was made from other files"),
    "another config": (lambda f: edit_config(f, lambda c: c.update(note=1)), "was made from other files"),
    "a bit": (flip, "is not what was written"),
    "a page of zeros": (zero_a_page, "is not what was written"),
    "cut": (cut, "is truncated"),
    "empty": (empty, "truncated: 0 B"),
    "another file": (foreign, "was made from other files"),
    "a pipe": (pipe, "is a pipe, a device or a socket"),
    "a tensor is gone": (rewrite(lambda h: h.update(other=h.pop("norm"))), "KeyError: 'norm'"),
    "no seals": (rewrite(lambda h: h["__metadata__"].pop("seals")), "KeyError: 'seals'"),
    "seals of another form": (rewrite(lambda h: h["__metadata__"].update(seals="7")), "TypeError"),
    "metadata of another form": (rewrite(lambda h: h.update(__metadata__=[])), "was made from other files"),
    "metadata that is text": (rewrite(lambda h: h.update(__metadata__="x")), "AttributeError"),
    "another shape": (rewrite(reshape), "layers.0.qkv.weight is not what config.json implies"),
    "an alias to another tensor": (
        rewrite(lambda h: h["__metadata__"].update(aliases='{"norm": "embed.weight", "head.weight": "embed.weight"}')),
        "norm is not what config.json implies",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_stale_torn_or_foreign_is_not_served(folder: Path, read: list[str], case: str) -> None:
    spoil, message = SPOILED[case]
    load(folder, keep_repacked=True)
    spoil(folder)
    read.clear()
    with pytest.warns(UserWarning, match="checkpoint is read") as caught:
        found = logits(load(folder))
    assert message in str(caught[0].message)
    assert str(kept_file(folder)) in str(caught[0].message)
    assert UP in read
    with pytest.warns(UserWarning, match="checkpoint is read"):
        load(folder, keep_repacked=True)  # makes it anew
    read.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(load(folder)), found)
    assert not read
    kept_file(folder).unlink()
    assert torch.equal(logits(load(folder)), found)


def test_a_file_that_cannot_be_written_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kerngen.system.files.os.fsync", full)
        with pytest.warns(UserWarning, match=r"not kept in .*: No space left on device"):
            load(folder, keep_repacked=True)
    assert [p.name for p in folder.iterdir() if "kerngen" in p.name] == [], "nothing is left of it"
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.warns(UserWarning, match=r"not kept in .* GB .*0\.0 GB"):
        load(folder, keep_repacked=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
def test_seals_see_what_changed_and_what_moved(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 100, (70_001,), generator=generator).to(dtype)
    want = seal(tensor).tolist()
    assert seal(tensor.clone()).tolist() == want
    assert seal(torch.cat((tensor[:3], tensor))[3:]).tolist() == want
    for place in (0, 35_000, 70_000):
        other = tensor.clone()
        other[place] += 1
        assert seal(other).tolist() != want
    size = 4096 * 8 // dtype.itemsize
    if len(tensor) > 2 * size:
        moved = torch.cat((tensor[size : 2 * size], tensor[:size], tensor[2 * size :]))
        assert seal(moved).tolist() != want
    assert seal(torch.empty(0, dtype=dtype)).tolist() == [0, 0]


def test_the_file_is_safetensors(folder: Path) -> None:
    load(folder, keep_repacked=True)
    file = SafetensorsFile(kept_file(folder))
    assert "layers.0.qkv.weight" in file.entries
