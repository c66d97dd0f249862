"""`kerngen convert`: what is written loads as what it was made of."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from checkpoints import WIDE, logits, quantize
from click.testing import CliRunner
from gguf_files import gguf_of
from safetensors.torch import load_file
from test_converted_weights import WAYS, stored_as
from test_gguf_model import all_of, make, q4_k_m_26b, q4_k_m_of_qkv, quiet_load
from tiny_gemma import load, make_target
from torch import Tensor

from kerngen.cli import cli
from kerngen.errors import CheckpointError, UsageError
from kerngen.runtime.config import read_model_config
from kerngen.runtime.weights import conversion
from kerngen.runtime.weights.conversion import Conversion, convert


@pytest.fixture(autouse=True)
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models' files have none; test_gguf_cli.py runs one that has."""
    monkeypatch.setattr(conversion, "_texts", lambda *_: {"tokenizer.json": "{}"})


def of_a_model(name: str, values: Tensor) -> str:
    """Of several types in a matrix, and an embedding of another one."""
    return "Q6_K" if name.startswith("token_embd") else q4_k_m_of_qkv(name, values)


@pytest.mark.parametrize("variant", ["dense", "moe", "shared_ple"])
def test_a_gguf_file_is_the_same_model_as_a_folder(tmp_path: Path, variant: str) -> None:
    make(tmp_path / "m", variant)
    choose = {"dense": of_a_model, "moe": q4_k_m_26b}.get(variant, all_of("Q4_0"))
    path = gguf_of(tmp_path / "m", choose).write(tmp_path / "m.gguf")
    done = convert(path, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (load(place, torch.bfloat16) for place in (tmp_path / "out", path))
    assert torch.equal(logits(ours), logits(theirs))
    assert done.packed > 20
    assert done.decoded == (7 if variant == "shared_ple" else 0)  # a table and small matrices of per-layer embeddings
    assert read_model_config(tmp_path / "out") == read_model_config(path)


@pytest.mark.parametrize("case", WAYS)
def test_other_orders_become_the_one(tmp_path: Path, case: str) -> None:
    make_target(tmp_path / "q", "moe" if case == "AWQ" else "dense", **WIDE, moe_intermediate_size=128)
    stored_as(tmp_path / "q", WAYS[case][0])
    convert(tmp_path / "q", tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "q")))
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "zero" in name]


def test_what_lies_in_order_stays_as_it_is(tmp_path: Path) -> None:
    make_target(tmp_path / "q", "moe", **WIDE)
    quantize(tmp_path / "q", 32)
    convert(tmp_path / "q", tmp_path / "out")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "q"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    of_both = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "q")]
    assert of_both[0] == of_both[1]


def test_a_conversion_that_ends_early_leaves_no_model(tmp_path: Path) -> None:
    make(tmp_path / "m", "dense")
    path = gguf_of(tmp_path / "m", all_of("Q8_0")).write(tmp_path / "m.gguf")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", advance=stop)
    assert list((tmp_path / "out").iterdir()) == []
    convert(path, tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out", torch.bfloat16)), logits(quiet_load(path, torch.bfloat16)))
    with pytest.raises(UsageError, match="holds a model already"):
        convert(path, tmp_path / "out")


def test_a_disk_without_room_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "m", "dense")
    path = gguf_of(tmp_path / "m", all_of("Q8_0")).write(tmp_path / "m.gguf")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=r"GB are needed, 0\.0 GB are free"):
        convert(path, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("edit", "message"), [
    ({"packed": 3}, "packed is 3; it must be a list of forms"),
    ({"packed": [{"bits": 4, "group_size": 16, "has_minima": False, "modules": []}]}, "group_size is 16; only 32"),
    ({"packed": [{"bits": 8, "group_size": 32, "has_minima": False, "modules": 5}]}, "modules is 5"),
    ({"packed": []}, "embed_tokens is packed, and config.json does not name it"),
])  # fmt: skip
def test_a_config_that_says_something_else_is_refused(tmp_path: Path, edit: dict[str, object], message: str) -> None:
    make(tmp_path / "m", "dense")
    convert(gguf_of(tmp_path / "m", all_of("Q8_0")).write(tmp_path / "m.gguf"), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | edit}))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "out")
    assert message in str(caught.value)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    make(tmp_path / "m", "shared_ple")
    path = gguf_of(tmp_path / "m", all_of("Q4_0")).write(tmp_path / "m.gguf")
    done = CliRunner().invoke(cli, ["convert", str(path), str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert Conversion(**{field: said[field] for field in Conversion.__dataclass_fields__}).decoded == 7
    assert said["num_bytes"] + 8 < (tmp_path / "out" / "model.safetensors").stat().st_size
    done = CliRunner().invoke(cli, ["convert", str(path), str(tmp_path / "again")])
    assert "matrices are packed" in done.output
    assert "7 that were quantised are bf16 now" in done.output
