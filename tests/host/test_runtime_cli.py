"""Text handling and `kerngen run`, end to end on a tiny checkpoint with a real tokenizer."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import shard
from safetensors.torch import load_file, save_file
from test_runtime_weights import edit_header
from tiny_gemma import make_assistant, make_target
from tokenizers import Tokenizer
from tokens import write_tokenizer

from kerngen.errors import CheckpointError
from kerngen.runtime.executors.reference import Reference
from kerngen.runtime.fallbacks import FALLBACKS
from kerngen.runtime.ops.kernels import KernelOps
from kerngen.runtime.session import find_drafter
from kerngen.runtime.text import TextCodec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint")
    make_target(root, "k_eq_v")
    make_assistant(root / "assistant", "k_eq_v")
    write_tokenizer(root)
    return root


def copy(folder: Path, to: Path) -> None:
    """The files of a checkpoint, without its drafter."""
    for file in folder.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The checkpoint, to be changed."""
    copy(folder, tmp_path)
    return tmp_path


@pytest.fixture
def codec(folder: Path) -> TextCodec:
    return TextCodec(folder, bos_id=2)


class Terminal:
    """Runs `kerngen …` in this process, as main() does, and remembers what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *args: object, stdin: bytes = b"", code: int = 0) -> SimpleNamespace:
        from kerngen.cli import main

        self.monkeypatch.setattr(sys, "argv", ["kerngen", *map(str, args)])
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self.capsys.readouterr()
        got = 0
        try:
            main()
        except SystemExit as e:
            got = int(e.code or 0)
        out, err = self.capsys.readouterr()
        assert got == code, f"exit {got}: {err}"
        assert "Traceback" not in err
        return SimpleNamespace(out=out, err=err)


@pytest.fixture
def kerngen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capsys, monkeypatch)


def test_bos_stands_at_the_front_exactly_once(codec: TextCodec) -> None:
    assert codec.encode("ab")[0] == 2
    assert codec.encode("<bos>ab") == codec.encode("ab")
    assert codec.encode("") == [2]


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_what_a_tokenizer_cuts_or_pads_is_not_obeyed(
    kerngen: Terminal, folder: Path, copied: Path, setting: str
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if setting == "truncation":
        tokenizer.enable_truncation(max_length=4)
    else:
        tokenizer.enable_padding(length=40, pad_id=0, pad_token="<pad>")
    tokenizer.save(str(copied / "tokenizer.json"))
    common = ("--prompt", "abcdefgh", "--no-chat", "--device", "cpu", "--max-new-tokens", 3, "--json")
    plain, set_ = (json.loads(kerngen("run", place, *common).out) for place in (folder, copied))
    assert set_["num_prompt_tokens"] == plain["num_prompt_tokens"] == 9
    assert set_["tokens"] == plain["tokens"]


def test_chat_renders_gemmas_turns(codec: TextCodec) -> None:
    text = codec.chat([{"role": "user", "content": " hi "}])
    assert text == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    assert codec.encode(text)[:2] == [2, 4]
    assert codec.end_of_turn_ids == (5,)


def test_a_stream_joins_to_the_decoded_text(codec: TextCodec) -> None:
    ids = codec.encode("<bos>abé<turn|>c")[1:]
    for size in (1, 2, 3, len(ids)):
        stream = codec.stream()
        parts = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) + stream.finish() == codec.decode(ids) == "abéc"


def test_a_stream_that_ends_within_a_character_says_so(codec: TextCodec) -> None:
    stream = codec.stream()
    assert stream.push(codec.encode("aé")[1:-1]) == ""
    assert stream.finish() == "a\ufffd"


def test_run_streams_text_and_prints_stats(kerngen: Terminal, folder: Path) -> None:
    said = kerngen("run", folder, "--prompt", "hello", "--max-new-tokens", 12, "--backend", "torch")
    assert said.out.endswith("\n")
    assert "torch on cpu, float32" in said.err
    assert f"{folder / 'assistant'} drafts" in said.err
    assert "computed by PyTorch, as on any machine without a GPU (the torch backend)\n" in said.err
    assert "outside our kernels" not in said.err, "a run on a CPU is no fault"
    assert "tokens accepted a step" in said.err
    again = kerngen("run", folder, "--max-new-tokens", 12, "--no-draft", "--device", "cpu", stdin=b"hello\n")
    assert again.out == said.out
    assert "drafts" not in again.err


def test_run_json_holds_what_was_streamed(kerngen: Terminal, folder: Path) -> None:
    common = ("run", folder, "--prompt", "hello", "--max-new-tokens", 9, "--device", "cpu")
    text = kerngen(*common).out
    report = json.loads(kerngen(*common, "--json", "--draft", folder / "assistant", "--num-draft-tokens", 2).out)
    assert report["text"] + "\n" == text
    assert report["num_tokens"] == len(report["tokens"]) <= 9
    assert report["num_draft_tokens"] == 2
    assert report["backend"] == "torch"
    assert report["drafter"] == str(folder / "assistant")
    assert list(report["outside"]) == ["everything"]
    assert json.loads(kerngen(*common, "--json", "--no-draft").out)["drafter"] is None
    sampled = ("--temperature", 1, "--top-k", 20, "--top-p", 0.9, "--seed")
    one, two, three = (json.loads(kerngen(*common, "--json", *sampled, s).out)["tokens"] for s in (3, 3, 4))
    assert one == two != three


@pytest.mark.parametrize("draft", [(), ("--no-draft",)], ids=["drafting", "alone"])
def test_run_says_what_ran_outside_our_kernels(
    kerngen: Terminal, monkeypatch: pytest.MonkeyPatch, draft: tuple[str, ...]
) -> None:
    """The kernels' own path, answered by their references. Dense matrices are outside where there are many tokens."""
    monkeypatch.setattr("kerngen.runtime.session.open_backend", lambda *_, **__: KernelOps(Reference(), torch.float32))
    tiny = Path(__file__).parents[2] / "examples" / "tiny"
    which = draft or ("--draft", tiny / "gemma-4-tiny-assistant")
    few = ("run", tiny / "gemma-4-tiny-w4a16", "--prompt", "hello", "--max-new-tokens", 3, "--json", *which)
    assert json.loads(kerngen(*few).out)["outside"] == {}
    common = ("run", tiny / "gemma-4-tiny", "--prompt", "hello, " * 20, "--max-new-tokens", 3, *which)
    assert f"outside our kernels: dense matrices ({FALLBACKS['dense matrices']})" in kerngen(*common).err
    assert json.loads(kerngen(*common, "--json").out)["outside"] == {"dense matrices": FALLBACKS["dense matrices"]}


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_run_on_what_git_lfs_left_in_place_of_a_file(kerngen: Terminal, copied: Path, name: str) -> None:
    (copied / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4977169088\n")
    said = kerngen("run", copied, "--prompt", "x", "--device", "cpu", code=1)
    assert said.err.startswith(f"CheckpointError: {copied / name} is a Git LFS pointer: the file that it stands for")
    assert f"in {copied}: git lfs pull; or: hf download" in said.err


def only(name: str) -> Callable[[Path], object]:
    """A folder with one file in it."""

    def make(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / name).write_bytes(b"GGUF\x03")

    return make


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return replace


def having(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def in_shards(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "half a GGUF": (only("gemma-Q4_0.gguf"), "gemma-Q4_0.gguf is truncated: it has 5 B", ""),
    "what embeds images of a GGUF": (only("mmproj-F16.gguf"), "holds no config.json, but a GGUF file: mmproj-F16.gguf",
                                     "name the file itself, in place of the folder"),
    "GGUF with a config": (
        lambda f: [(f / "model.safetensors").rename(f / "gemma-Q4_0.gguf"), (f / "tokenizer.json").unlink()],
        "holds no tokenizer.json and no safetensors, but a GGUF file: gemma-Q4_0.gguf", "name the file itself",
    ),
    "LoRA": (only("adapter_config.json"), "holds no config.json, but a LoRA adapter: adapter_config.json",
             "peft merges one into its model"),
    "LoRA with its model's config": (
        lambda f: (f / "model.safetensors").rename(f / "adapter_model.safetensors"),
        "but a LoRA adapter: adapter_model.safetensors", "peft merges one into its model",
    ),
    "ModelOpt": (having("hf_quant_config.json", "{}"), "hf_quant_config.json: the weights are quantized by NVIDIA Mod",
                 "llm-compressor makes int4"),
    "nothing": (lambda f: [p.unlink() for p in f.iterdir()], "holds no config.json", "name a folder with a checkpoint"),
    "pickles": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "holds no model.safetensors and no model.safetensors.index.json, but pickled weights: pytorch_model.bin",
        "they are programs and are never run; convert them with transformers: from_pretrained, then save_pretrained",
    ),
    "shards without an index": (
        lambda f: (f / "model.safetensors").rename(f / "model-00001-of-00002.safetensors"),
        "but safetensors: model-00001-of-00002.safetensors",
        "several need their model.safetensors.index.json",
    ),
    "a shard is missing": (
        in_shards, "model-00002-of-00002.safetensors is missing; model.safetensors.index.json puts",
        "get the whole folder again: hf download REPO --local-dir FOLDER",
    ),
    "a pipe as config": (instead("config.json", os.mkfifo), "config.json is a pipe", "with files in it"),
    "endless config": (instead("config.json", lambda p: p.symlink_to("/dev/zero")), "config.json is a pipe, a device",
                       "with files in it"),
    "endless weights": (instead("model.safetensors", lambda p: p.symlink_to("/dev/zero")),
                        "model.safetensors is a pipe, a device", "with files in it"),
    "a pipe as tokenizer": (instead("tokenizer.json", os.mkfifo), "tokenizer.json is a pipe", "with files in it"),
    "a link to nothing as template": (instead("chat_template.jinja", lambda p: p.symlink_to("gone")),
                                      "chat_template.jinja is missing", "Hugging Face format"),
    "a link to nothing as settings": (instead("generation_config.json", lambda p: p.symlink_to("gone")),
                                      "generation_config.json is missing", "Hugging Face format"),
    "a link to itself as tokens": (instead("tokenizer_config.json", lambda p: p.symlink_to(p.name)),
                                   "tokenizer_config.json cannot be read: Too many levels", ""),
    "a folder as config": (instead("config.json", os.mkdir), "config.json is a folder", "with files in it"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing", ""),
    "an empty tokenizer": (having("tokenizer.json", "{}"), "is not a tokenizer", ""),
    "half a config": (having("config.json", "{"), "is not JSON", ""),
    "a list as config": (having("config.json", "[]"), "holds a list, not an object", ""),
    "a word as token": (having("generation_config.json", '{"eos_token_id": "end"}'), "must be token ids", ""),
    "a large config": (instead("config.json", lambda p: p.write_bytes(b" " * (17 << 20))), "holds more than", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_run_says_what_a_folder_is_that_it_cannot_run(kerngen: Terminal, copied: Path, case: str) -> None:
    spoil, message, hint = FOLDERS[case]
    spoil(copied)
    first, *rest = kerngen("run", copied, "--prompt", "x", "--device", "cpu", code=1).err.splitlines()
    assert first.startswith(f"CheckpointError: {copied}")
    assert message in first
    assert hint in "".join(rest)


def test_run_on_a_file_says_what_it_takes(kerngen: Terminal, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "gemma.gguf").write_bytes(b"GGUF")
    said = kerngen("run", tmp_path / "gemma.gguf", "--prompt", "x", code=1)
    assert said.err.startswith(f"CheckpointError: {tmp_path / 'gemma.gguf'} is truncated: it has 4 B")
    said = kerngen("run", folder / "config.json", "--prompt", "x", code=2)
    assert "config.json is a file\n  name the folder that holds config.json and the safetensors" in said.err


def test_run_refuses_an_image_that_is_typed(kerngen: Terminal, folder: Path, copied: Path) -> None:
    """transformers would look for pixels; here nothing would stand behind the token."""
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "gemma4", "text_config": text, "image_token_id": 10, "audio_token_id": None}
    (copied / "config.json").write_text(json.dumps(config))
    common = ("run", copied, "--device", "cpu", "--max-new-tokens", 1, "--no-chat", "--prompt")
    kerngen(*common, "bcd")
    said = kerngen(*common, "abc", code=2)
    assert said.err.startswith(
        "UsageError: the prompt holds a placeholder for an image, a video or a sound ('a', token 10)"
    )


@pytest.mark.parametrize("command", [("tune", "--arch", "sm70", "--model"), ("bench", "model")])
def test_a_name_on_the_hub_is_no_folder(
    kerngen: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = kerngen(*command, "google/gemma-4-31B-it", code=2)
    assert said.err.splitlines() == [
        "UsageError: google/gemma-4-31B-it is not a folder here, and nothing is downloaded",
        "  from the Hugging Face hub: hf download google/gemma-4-31B-it --local-dir gemma-4-31B-it; "
        "then name ./gemma-4-31B-it",
    ]
    (tmp_path / "google").mkdir()
    assert "google/gemma-4-31B-it is not a folder\n" in kerngen(*command, "google/gemma-4-31B-it", code=2).err


def test_a_released_models_name_has_no_weights(
    kerngen: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert kerngen("run", "gemma-4-31b", "--prompt", "x", code=2).err.splitlines() == [
        "UsageError: gemma-4-31b is not a folder: as a released model's name it stands for shapes, not for weights",
        "  name a folder in Hugging Face format, or what the Hugging Face hub calls it: OWNER/NAME",
    ]


def test_the_drafter_is_found_beside_its_target(tmp_path: Path) -> None:
    def checkpoint(name: str) -> Path:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        return tmp_path / name

    target, quantized = checkpoint("gemma"), checkpoint("gemma-qat-w4a16-ct")
    assert find_drafter(target) is find_drafter(quantized) is None
    sibling = checkpoint("gemma-assistant")
    assert find_drafter(target) == find_drafter(quantized) == sibling
    inner = checkpoint("gemma/assistant")
    assert find_drafter(target) == inner


def test_run_refuses_a_table_of_per_layer_inputs_that_lacks_tokens(kerngen: Terminal, tmp_path: Path) -> None:
    """transformers fails when such a token comes; any token may."""
    make_target(tmp_path, "shared_ple", vocab_size_per_layer_input=20)
    write_tokenizer(tmp_path)
    said = kerngen("run", tmp_path, "--prompt", "xyz", "--device", "cpu", "--max-new-tokens", 2, code=1)
    assert said.err.startswith("CheckpointError: ")
    assert "vocab_size_per_layer_input is 20" in said.err


def test_run_opens_a_file_larger_than_memory(kerngen: Terminal, folder: Path, copied: Path) -> None:
    """A tower that is not read, twice the size of memory and swap, as a hole in the file."""
    try:
        numbers = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
    except FileNotFoundError:
        pytest.skip("only Linux says in /proc/meminfo how much memory there is")
    size = 2 * 1024 * (int(numbers["MemTotal:"]) + int(numbers["SwapTotal:"]))
    path = copied / "model.safetensors"

    def add_tower(header: dict[str, Any]) -> None:
        end = max(of["data_offsets"][1] for name, of in header.items() if name != "__metadata__")
        header["tower.weight"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}

    edit_header(copied, add_tower)
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError as e:
        pytest.skip(f"no file of {size:,} B can be made here: {e.strerror}")
    common = ("--prompt", "hello", "--device", "cpu", "--max-new-tokens", 3)
    said = kerngen("run", copied, *common)
    assert said.out == kerngen("run", folder, *common, "--no-draft").out
    assert "warning" not in said.err


def test_run_ends_where_the_model_computes_no_numbers(kerngen: Terminal, folder: Path, copied: Path) -> None:
    """Weights that are numbers, and so large that their products are none."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"][-1] = 3e38
    save_file(tensors, copied / "model.safetensors")
    common = ("run", copied, "--prompt", "hello", "--device", "cpu", "--max-new-tokens", 8)
    for more in ((), ("--temperature", 0.8), ("--temperature", 1, "--top-k", 5, "--top-p", 0.9)):
        said = kerngen(*common, *more, code=1)
        assert said.err.startswith("NumericsError: no token can follow 21 tokens: the model computed NaN or infinity")
        assert "check the checkpoint's weights" in said.err
        assert said.out == ""


def test_run_keeps_repacked_weights_and_says_when_they_are_stale(kerngen: Terminal, copied: Path) -> None:
    common = ("run", copied, "--prompt", "hello", "--device", "cpu", "--max-new-tokens", 8)
    plain = kerngen(*common)
    assert kerngen(*common, "--keep-repacked").out == plain.out
    (kept,) = copied.glob("*.kerngen")
    assert kerngen(*common).out == plain.out
    kept.write_bytes(kept.read_bytes()[:-1])
    said = kerngen(*common)
    assert said.out == plain.out
    assert said.err.startswith(f"warning: {kept} is truncated")


def test_run_shows_how_far_loading_is(kerngen: Terminal, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.system.progress.LINE_EVERY_S", 0.0)
    said = kerngen("run", folder, "--prompt", "x", "--device", "cpu", "--max-new-tokens", 1)
    assert re.match(r"weights: loading 0\.\d of 0\.\d MB, 0 s", said.err), said.err
    assert "loading" not in said.out


GENERATION = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95}


def test_run_samples_as_the_checkpoint_recommends(kerngen: Terminal, folder: Path, copied: Path) -> None:
    path = copied / "generation_config.json"
    common = ("--prompt", "hello", "--device", "cpu", "--max-new-tokens", 9)

    def sampled(place: Path, *more: object) -> tuple[str, dict[str, float]]:
        said = kerngen("run", place, *common, *more)
        report = json.loads(kerngen("run", place, *common, *more, "--json").out)
        assert report["text"] + "\n" == said.out
        return next((line for line in said.err.splitlines() if line.startswith("sampled")), ""), report["sampling"]

    path.write_text(json.dumps(GENERATION))
    marked = (
        "temperature 1 (generation_config.json), top-k 64 (generation_config.json), top-p 0.95 (generation_config.json)"
    )
    as_asked = {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "seed": 0}
    assert sampled(copied) == (f"sampled: {marked}, seed 0", as_asked)
    line, _ = sampled(copied, "--temperature", 0.5, "--top-k", 3, "--seed", 7)
    assert line == "sampled: temperature 0.5, top-k 3, top-p 0.95 (generation_config.json), seed 7"
    assert sampled(copied, "--temperature", 0) == ("", as_asked | {"temperature": 0.0})
    path.write_text(json.dumps(GENERATION | {"do_sample": False}))
    assert sampled(copied) == ("", as_asked | {"temperature": 0.0})
    path.write_text(json.dumps({"do_sample": True, "top_k": None}))
    assert sampled(copied)[0] == "sampled: temperature 1 (generation_config.json), seed 0"
    assert sampled(folder)[1] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_k", -1), ("top_p", 2), ("temperature", True)]
)
def test_run_refuses_a_recommendation_that_cannot_be(kerngen: Terminal, copied: Path, name: str, value: Any) -> None:
    (copied / "generation_config.json").write_text(json.dumps(GENERATION | {name: value}))
    said = kerngen("run", copied, "--prompt", "x", "--device", "cpu", code=1)
    assert f"generation_config.json: {name} is {value!r}; it must be" in said.err


def test_run_takes_control_tokens_for_text_unless_asked(kerngen: Terminal, folder: Path) -> None:
    common = ("run", folder, "--prompt", "a<turn|>b", "--max-new-tokens", 1, "--json", "--device", "cpu")
    for more in ((), ("--no-chat",)):
        many, one = (
            json.loads(kerngen(*common, *more, *asked).out)["num_prompt_tokens"]
            for asked in ((), ("--control-tokens",))
        )
        assert many == one - 1 + len("<turn|>")


@pytest.mark.parametrize(("part", "setting", "message"), [
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "cannot encode the text: chunk size must be non-zero"),
    ("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}, "cannot encode the text: WordLevel error"),
    ("decoder", {"type": "Nothing"}, "is not a tokenizer"),
])  # fmt: skip
def test_run_on_a_tokenizer_that_fails(
    kerngen: Terminal, folder: Path, copied: Path, part: str, setting: dict[str, Any], message: str
) -> None:
    """The library panics in Rust on some files, which is no Exception in Python."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {part: setting, "added_tokens": []}
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = kerngen("run", copied, "--prompt", "e", "--device", "cpu", "--max-new-tokens", 3, code=1)
    assert said.err.startswith(f"CheckpointError: {copied / 'tokenizer.json'} {message}")


def test_a_decoder_that_fails_is_one_clear_error(folder: Path, copied: Path) -> None:
    decoder = {"type": "Strip", "content": "e", "start": 0, "stop": 9}  # reads before the start of a token "e"
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": decoder}
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    codec = TextCodec(copied, bos_id=2)
    with pytest.raises(CheckpointError, match=r"tokens.*out of bounds"):
        codec.stream().push(codec.encode("e"))


def test_run_on_a_prompt_or_template_that_is_not_unicode(kerngen: Terminal, folder: Path, copied: Path) -> None:
    said = kerngen("run", folder, "--prompt", os.fsdecode(b"bad \xff byte"), "--device", "cpu", code=2)
    assert said.err == "UsageError: the prompt is not UTF-8: character 4 is '\\udcff'\n"
    said = kerngen("run", folder, "--device", "cpu", stdin=b"bad \xff byte", code=2)
    assert said.err.startswith("UsageError: standard input is not UTF-8")
    (copied / "chat_template.jinja").write_text("{{ '\\ud800' }}")
    said = kerngen("run", copied, "--prompt", "x", "--device", "cpu", code=2)
    assert said.err == "UsageError: the text is not Unicode: character 0 is '\\ud800'\n"
    (copied / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    said = kerngen("run", copied, "--prompt", "x", "--device", "cpu", code=1)
    assert said.err.startswith("CheckpointError: the chat template failed: ")


@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "final_logit_softcapping", "hidden_size", "sliding_window", "vocab_size"]
)
def test_run_on_a_number_beyond_all_bounds(kerngen: Terminal, folder: Path, copied: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text()) | {name: 10**400}
    (copied / "config.json").write_text(json.dumps(config))
    said = kerngen("run", copied, "--prompt", "x", "--device", "cpu", code=1)
    assert said.err.startswith(f"CheckpointError: {copied / 'config.json'}: {name} is 1000000")
    assert len(said.err) < 400 + len(str(copied))


def test_run_says_one_clear_line_when_misused(kerngen: Terminal, folder: Path, tmp_path: Path) -> None:
    suppressing = tmp_path / "suppressing"
    suppressing.mkdir()
    copy(folder, suppressing)
    (suppressing / "generation_config.json").write_text(json.dumps({"suppress_tokens": list(range(96))}))
    usage = (
        (("run", folder, "--prompt", "x", "--draft", tmp_path), "config.json"),
        (("run", folder, "--prompt", "x", "--draft", folder, "--no-draft"), "contradict"),
        (("run", folder, "--prompt", "x", "--backend", "cuda", "--device", "cpu"), "does not run on cpu"),
        (("run", folder / "assistant", "--prompt", "x"), "holds a drafter"),
        (("run", folder, "--prompt", "x", "--dtype", "fp8"), "fp8"),
        (("run", suppressing, "--prompt", "x"), "all 96 tokens are suppressed"),
    )
    for args, message in usage:
        code = 1 if message == "config.json" else 2
        said = kerngen(*args, *(() if "--device" in args else ("--device", "cpu")), code=code)
        assert message in said.err
        assert said.out == ""
    if not torch.cuda.is_available():
        said = kerngen("run", folder, "--prompt", "x", "--backend", "cuda", code=1)
        assert said.err.startswith("DeviceError: there is no CUDA device here\n")
