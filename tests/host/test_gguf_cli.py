"""Commands on a GGUF file: what they say of it, and what they run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen
from gguf_files import TYPES, Gguf, gguf_of
from tiny_gemma import make_assistant, make_target
from tokenizers import Tokenizer
from tokens import write_tokenizer

from kerngen.runtime.gguf.tokenizer import CONTROL, NORMAL
from kerngen.runtime.session import load
from kerngen.runtime.weights.opened import open_tensors

ASK = ("--prompt", "hello", "--device", "cpu", "--temperature", "0", "--max-new-tokens", "8", "--json")


def add_tokenizer(made: Gguf, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    made.keys += [
        ("tokenizer.ggml.model", "gemma4"), ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", [CONTROL if t in special else NORMAL for t in tokens]),
        ("tokenizer.ggml.bos_token_id", 2), ("tokenizer.ggml.eos_token_id", 1),
        ("tokenizer.chat_template", (folder / "chat_template.jinja").read_text()),
    ]  # fmt: skip


def said(kerngen: Kerngen, *args: object, code: int | None = 0) -> tuple[str, str]:
    """What `kerngen ARGS` writes, after it ended with `code`, None for any."""
    ended, out, err = kerngen(*map(str, args))
    assert code in (None, ended), err
    return out, err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of safetensors, and a GGUF file of the same weights with a drafter beside it."""
    root = tmp_path_factory.mktemp("gguf")
    folder = root / "hf"
    make_target(folder, "k_eq_v", initializer_range=0.02)
    write_tokenizer(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = gguf_of(folder, lambda _, t: "Q4_0" if t.shape[-1] % TYPES["Q4_0"].block == 0 else "F16")
    add_tokenizer(file, folder)
    (root / "files").mkdir()
    make_assistant(root / "files" / "gemma-4-tiny-it-assistant", "k_eq_v")
    return folder, file.write(root / "files" / "gemma-4-tiny-it-qat-q4_0.gguf")


def test_run_answers_as_with_the_same_weights_in_a_folder(kerngen: Kerngen, made: tuple[Path, Path]) -> None:
    folder, path = made
    want = json.loads(said(kerngen, "run", folder, *ASK)[0])
    out, err = said(kerngen, "run", path, *ASK, "--no-draft")
    found = json.loads(out)
    assert found["text"] == want["text"]
    assert found["tokens"] == want["tokens"]
    assert found["tokenizer"] == str(path)
    assert want["tokenizer"] == str(folder / "tokenizer.json")
    assert "warning: gemma-4-tiny-it-qat-q4_0.gguf: kept as they are: tensors 29 of Q4_0" in err


def test_the_drafter_beside_it_is_found(kerngen: Kerngen, made: tuple[Path, Path]) -> None:
    _, path = made
    alone = json.loads(said(kerngen, "run", path, *ASK, "--no-draft")[0])
    found = json.loads(said(kerngen, "run", path, *ASK)[0])
    assert found["drafter"] == str(path.with_name("gemma-4-tiny-it-assistant"))
    assert found["tokens"] == alone["tokens"]


def test_a_folder_with_one_file_stands_for_it(kerngen: Kerngen, made: tuple[Path, Path]) -> None:
    _, path = made
    _, err = said(kerngen, "run", path.parent, *ASK[:-1])
    assert f"tokenizer of {path.name}" in err
    Gguf().write(path.with_name("another.gguf"))
    _, err = said(kerngen, "run", path.parent, *ASK, code=2)
    path.with_name("another.gguf").unlink()
    assert "holds 2 GGUF files: another.gguf, gemma-4-tiny-it-qat-q4_0.gguf\n  name one:" in err


def test_a_split_file_runs_by_any_part(kerngen: Kerngen, made: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = made
    split = Gguf()
    whole = gguf_of(shutil.copytree(folder, tmp_path / "hf"), lambda *_: "F32")
    add_tokenizer(whole, folder)
    split.keys, split.tensors = whole.keys, whole.tensors
    parts = split.write_split(tmp_path / "m", 3)
    want = json.loads(said(kerngen, "run", folder, *ASK)[0])["tokens"]
    assert json.loads(said(kerngen, "run", parts[1], *ASK)[0])["tokens"] == want


def test_plan_and_doctor_size_it(kerngen: Kerngen, tmp_path: Path) -> None:
    """The tiny model that kerngen comes with, whose tokenizer is beside it: its own is of another kind."""
    folder = Path(shutil.copytree(ROOT / "examples" / "tiny" / "gemma-4-tiny", tmp_path / "hf"))
    path = gguf_of(folder, lambda name, _: "F16" if "ffn_down" in name else "Q4_0").write(tmp_path / "hf" / "tiny.gguf")
    plans: dict[str, Any] = json.loads(said(kerngen, "run", path, "--plan", "--json")[0])
    assert plans["model"] == str(path)
    assert plans["as released"]["weight_bytes"] < plans["unquantized"]["weight_bytes"]
    found = json.loads(said(kerngen, "doctor", "--model", path, "--arch", "sm80", "--json", code=None)[0])
    problems = json.dumps(found["model"])
    assert "w4a16_gemm" in problems
    assert "dense_gemv" in problems
    session = load(path, device="cpu", draft=False)
    assert session.codec.path == folder / "tokenizer.json"
    want = load(folder, device="cpu", draft=False).generate("The cat", chat=False, max_new_tokens=16)
    assert session.generate("The cat", chat=False, max_new_tokens=16).text == want.text


def test_repacked_weights_lie_beside_the_file(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, path = made
    copied = Path(shutil.copy(path, tmp_path / "m.gguf"))
    first = load(copied, device="cpu", draft=False, keep_repacked=True)
    (kept,) = tmp_path.glob("m.repacked-*.kerngen")
    before = kept.stat().st_mtime_ns
    again = load(copied, device="cpu", draft=False)
    assert torch.equal(first.model.weights.layers[0].qkv.weight, again.model.weights.layers[0].qkv.weight)
    assert kept.stat().st_mtime_ns == before
    assert open_tensors(copied).has_repacked()
    other = Path(shutil.copy(path, tmp_path / "other.gguf"))
    assert not open_tensors(other).has_repacked(), "it is of the file by that name"
