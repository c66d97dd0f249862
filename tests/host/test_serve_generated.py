"""`kerngen serve --generated`: a model's shapes behind a server, and that server under load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Kerngen
from served import TINY, Served, served

from kerngen.errors import UsageError
from kerngen.workload.generated_session import CONTROL, FIRST_BYTE, LEAST_VOCAB, generated_tokenizer

LOAD = ("--vocab", "1024", "--prompt-tokens", "12", "--answer-tokens", "8", "--concurrency", "4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Of shapes alone, with a drafter of shapes alone."""
    folder = tmp_path_factory.mktemp("shapes")
    for name, source in (("shapes", TINY), ("drafter", TINY.with_name("gemma-4-tiny-assistant"))):
        (folder / name).mkdir()
        shutil.copy(source / "config.json", folder / name)
    with served("--generated", "--draft", str(folder / "drafter"), "--num-draft-tokens", "2", "--reproducible",
                model=str(folder / "shapes")) as found:  # fmt: skip
        yield found


def test_what_it_says_is_text(server: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = server.http.post(f"{server.url}/v1/chat/completions", json=asked).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert len(answer["choices"][0]["message"]["content"].split()) > 8
    assert answer["model"] == "shapes-generated"
    assert any("weights are generated" in line and "made-up words" in line for line in server.said)
    assert any("drafts by" in line for line in server.said)


def test_it_is_put_under_load(server: Served, kerngen: Kerngen) -> None:
    code, out, err = kerngen(
        "bench", "serve", server.url, *LOAD, "--requests", "6", "--warmup", "2", "--as", "chat", "--json"
    )
    assert (code, err) == (0, "")
    (run,) = json.loads(out)["runs"]
    assert (run["completed"], run["answer_tokens"]) == (6, 48)
    assert run["prompt_tokens"] > 6 * 12
    assert run["drafting"]["acceptance_length"] >= 1
    code, out, _ = kerngen("bench", "soak", server.url, *LOAD, "--minutes", "0.05", "--reference", "2", "--json",
                           "--max-growth", "200")  # fmt: skip
    said = json.loads(out)
    assert (code, said["num_faults"]) == (0, 0), said
    assert len(said["processes"]) >= 2
    assert sum(said["counts"].values()) > 4


def test_each_token_is_a_text() -> None:
    tokenizer = generated_tokenizer(5000)
    assert tokenizer.get_vocab_size() == 5000
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(5000)]
    assert all(texts)
    assert {i: texts[i] for i in CONTROL} == CONTROL
    words = [i for i in range(5000) if i not in CONTROL and not FIRST_BYTE <= i < FIRST_BYTE + 256]
    assert len({texts[i] for i in words}) == len(words)
    assert tokenizer.encode("".join(texts[i] for i in words)).ids == words
    text = " Grüße, 😀\n babe2 <turn|>"
    ids = tokenizer.encode(text).ids
    assert ids[-1] == 106
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    with pytest.raises(UsageError, match="no room"):
        generated_tokenizer(LEAST_VOCAB - 1)


def test_what_is_not_generated(kerngen: Kerngen, tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    for arguments, status, says in (
        (("gemma-4-31b",), 2, "take random weights: --generated"),
        (("gemma-4-31b", "--generated", "--keep-repacked"), 2, "--keep-repacked"),
        (("gemma-4-99b", "--generated"), 2, "unknown model"),
        (("gemma-4-31b", "--generated", "--reproducible"), 2, "--num-draft-tokens 3"),
        ((str(tmp_path), "--generated"), 2, "no drafter goes with its shapes"),
    ):  # fmt: skip
        code, out, err = kerngen("serve", *arguments, "--port", "0", "--backend", "torch")
        assert (code, out) == (status, ""), (arguments, err)
        assert says in err
