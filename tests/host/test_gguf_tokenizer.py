"""The tokenizer and the template of a GGUF file: tokens and text as of the tokenizer.json that the file was made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import Gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kerngen.errors import CheckpointError
from kerngen.runtime.gguf.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from kerngen.runtime.text import TextCodec

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples" / "tiny"
TEXTS = 10_000
TEMPLATE = (TINY / "gemma-4-tiny" / "chat_template.jinja").read_text()
# By their ids, as Gemma-4 has them: the control tokens, and the user-defined, which tokenizer.json calls special, too.
_ADDED = json.loads((TINY / "gemma-4-tiny" / "tokenizer.json").read_text())["added_tokens"]
SPECIAL = {token["id"]: token["content"] for token in _ADDED}
DEFINED = frozenset(t for t in SPECIAL.values() if t.strip("<|>") in ("tool", "tool_call", "tool_response", '"'))
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """BPE as Gemma-4's, trained on a page: line feeds of their own, bytes for what it lacks."""
    page = (ROOT / "README.md").read_text()
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    reserved = [SPECIAL.get(index, f"<unused{index}>") for index in range(107)]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=[*reserved, *BYTES], show_progress=False)
    trained.train_from_iterator(page.split("\n\n"), trainer)
    made = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in made["merges"]]
    tokenizer = Tokenizer(models.BPE(made["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL.values()])
    return tokenizer


def keys_of(tokenizer: Tokenizer) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    types = [
        UNKNOWN if t == "<unk>" else BYTE if t in BYTES else USER_DEFINED if t in DEFINED
        else CONTROL if t in SPECIAL.values() else NORMAL
        for t in tokens
    ]  # fmt: skip
    return {
        "general.architecture": "gemma4", "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 106, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": TEMPLATE,
    }  # fmt: skip


def write(tokenizer: Tokenizer, path: Path, **changed: object) -> Path:
    return Gguf(list((keys_of(tokenizer) | changed).items())).write(path)


def texts(rng: random.Random, words: list[str]) -> list[str]:
    odd = [
        "\n",
        "\n\n",
        "\n\n\n",
        " ",
        "  ",
        "\t",
        "é",
        "ü",
        "漢字",
        "🙂",
        "\u200d",
        "a\nb",
        "▁",
        "\r\n",
        "<0x0A>",
        "<unk>",
    ]

    def one() -> str:
        parts = rng.choices([*words, *odd * 4, *SPECIAL.values()], k=rng.randrange(12))
        return rng.choice(("", " ")).join(parts)

    return [one() for _ in range(TEXTS)]


def test_ids_and_text_are_those_of_tokenizer_json(gemma: Tokenizer, tmp_path: Path) -> None:
    codec = TextCodec(write(gemma, tmp_path / "m.gguf"), 2)
    words = (ROOT / "README.md").read_text().split()
    cases = texts(random.Random(0), words)
    want = [encoded.ids for encoded in gemma.encode_batch(cases, add_special_tokens=False)]
    lengths = 0
    for text, ids in zip(cases, want, strict=True):
        assert codec.encode(text, with_bos=False) == ids, repr(text)
        lengths += len(ids)
    assert lengths > 10 * TEXTS, "texts have tokens"
    assert [codec.decode(ids) for ids in want] == gemma.decode_batch(want, skip_special_tokens=True)
    rng = random.Random(1)
    anything = [[rng.randrange(codec.vocab_size) for _ in range(rng.randrange(20))] for _ in range(2000)]
    assert [codec.decode(ids) for ids in anything] == gemma.decode_batch(anything, skip_special_tokens=True)
    assert {id_ for ids in want for id_ in ids} >= {SPECIAL_ID for SPECIAL_ID in SPECIAL if SPECIAL_ID > 4}
    assert codec.path == tmp_path / "m.gguf"


def test_a_chat_has_one_bos_and_the_files_own_template(gemma: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    gemma.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    codec, plain = TextCodec(write(gemma, tmp_path / "m.gguf"), 2), TextCodec(folder, 2)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <turn|> there\n\n"}]
    for typed in (False, True):
        ids = codec.encode_chat(messages, plain=typed)
        assert ids == plain.encode_chat(messages, plain=typed)
        assert ids.count(2) == 1
        assert ids[0] == 2
    assert codec.end_of_turn_ids == (106,)
    assert codec.channel_ids == plain.channel_ids == (100, 101)
    assert codec.call_ids == plain.call_ids == (48, 49, 52)


def test_a_tokenizer_json_beside_the_file_is_preferred(gemma: Tokenizer, tmp_path: Path) -> None:
    path = write(gemma, tmp_path / "m.gguf")
    gemma.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec(path, 2).path == tmp_path / "tokenizer.json"


def test_a_tokenizer_json_of_another_model_is_not(gemma: Tokenizer, tmp_path: Path) -> None:
    path = write(gemma, tmp_path / "m.gguf")
    (tmp_path / "tokenizer.json").write_text((TINY / "gemma-4-tiny" / "tokenizer.json").read_text())
    with pytest.warns(UserWarning, match=r"tokenizer.json is not used: it has .* as token \d+, and m.gguf as"):
        codec = TextCodec(path, 2)
    assert codec.path == path


def test_a_file_without_a_template_says_so(gemma: Tokenizer, tmp_path: Path) -> None:
    made = Gguf([(k, v) for k, v in keys_of(gemma).items() if k != "tokenizer.chat_template"])
    codec = TextCodec(made.write(tmp_path / "m.gguf"), 2)
    assert not codec.has_template
    with pytest.raises(CheckpointError, match=r"m\.gguf has no chat template") as error:
        codec.chat([{"role": "user", "content": "x"}])
    assert error.value.hint == "--no-chat passes the prompt as it is"


def _merge(pair: str) -> Callable[[dict[str, list[str]]], dict[str, object]]:
    return lambda keys: {"tokenizer.ggml.merges": [*keys["tokenizer.ggml.merges"], pair]}


def _with_line_feed(keys: dict[str, list[str]]) -> dict[str, object]:
    more = [*keys["tokenizer.ggml.tokens"], "a\n"]
    return {"tokenizer.ggml.tokens": more, "tokenizer.ggml.token_type": [1] * len(more),
            "tokenizer.ggml.merges": ["a \n"]}  # fmt: skip


WRONG: dict[str, tuple[Callable[[dict[str, list[str]]], dict[str, object]], str]] = {
    "another kind": (lambda _: {"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    "too few types": (lambda _: {"tokenizer.ggml.token_type": [1]}, "is of 1 tokens; there are"),
    "a token twice": (lambda k: {"tokenizer.ggml.tokens": ["<eos>", *k["tokenizer.ggml.tokens"][1:]]},
                      "has '<eos>' twice"),
    "no pair": (_merge("ab"), "which is no pair of tokens"),
    "a pair of what is no token": (_merge("q zzz"), "which is no pair of tokens"),
    "a merge over a line feed": (_with_line_feed, "joins a line feed with something else"),
    "no unknown token": (lambda _: {"tokenizer.ggml.unknown_token_id": 1 << 20}, "unknown_token_id is 1048576"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tokenizers_that_contradict_themselves(gemma: Tokenizer, tmp_path: Path, case: str) -> None:
    change, words = WRONG[case]
    path = write(gemma, tmp_path / "m.gguf", **change(keys_of(gemma)))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as error:
        TextCodec(path, 2)
    assert words in error.value.message
