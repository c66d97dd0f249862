"""`kerngen run --prompts`: what lines may say, in which order answers come, and what an error costs."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen
from terminal import Terminal
from tiny_gemma import CPU, make_target
from tokens import write_tokenizer

from kerngen.cli.prompts import MAX_LINE_BYTES, Defaults, parse_line, read_lines
from kerngen.errors import KerngenError, NumericsError, UsageError
from kerngen.runtime import prompt_file
from kerngen.runtime.engine import Engine
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.prompt_file import Job, Outcomes
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import Session, open_checkpoint
from kerngen.system.progress import Reporter

MODEL = str(ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16")
RUN = ("run", MODEL, "--no-draft", "--device", "cpu", "--temperature", "0")


@pytest.fixture
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_target(folder, "k_eq_v")
    write_tokenizer(folder)
    return open_checkpoint(folder, TorchOps(CPU, torch.float32))


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_answers_come_in_order_with_what_each_line_asked_for(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    story = "Tell me a story about an owl and a lantern."
    lines: tuple[dict[str, Any] | str, ...] = (
        {"id": "long", "prompt": story, "max_new_tokens": 60},
        "",
        {"id": 7, "messages": [{"role": "user", "content": "What is a fern?"}], "max_new_tokens": 4},
        {"prompt": story, "stop": ["named", "never"]},
        {"prompt": "é", "temperature": 1, "top_k": 40, "top_p": 0.9, "seed": 3},
    )
    name = write(kerngen.folder / "prompts.jsonl", *lines)
    code, out, err = kerngen(
        *RUN, "--prompts", name, "--max-new-tokens", "9", "--stop", "zebra", "--system", "Be kind."
    )
    assert code == 0, err
    said = [json.loads(line) for line in out.splitlines()]
    assert [(s["line"], s.get("id")) for s in said] == [(1, "long"), (3, 7), (4, None), (5, None)]
    assert [s["num_tokens"] for s in said[:2]] == [60, 4]
    assert said[2]["text"].endswith("owl ")
    assert [s["stop_reason"] for s in said[:3]] == ["length", "length", "stop"]
    assert {s["acceptance_length"] for s in said} == {1.0}
    assert "4 prompts: " in err
    assert "torch on cpu" in err
    options = {"--max-new-tokens": "9", "--temperature": "1", "--top-k": "40", "--top-p": "0.9", "--seed": "3"}
    alone = kerngen(*RUN, "--prompt", "é", *(x for pair in options.items() for x in pair), "--system", "Be kind.")
    assert alone[1] == f"{said[3]['text']}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(name).read_bytes())))
    again = kerngen(*RUN, "--prompts", "-", "--max-new-tokens", "9", "--stop", "zebra", "--system", "Be kind.")
    assert again[:2] == (0, out)


WRONG = {
    "{": "it is not JSON: ", '"\udcff"': "it is not JSON: 'utf-8' codec can't decode",
    "[" * 100_000: "it is not JSON: maximum recursion depth", "[1]": "it is [1], no object",
    "{}": "it has neither prompt nor messages\n  give one of them",
    '{"prompt": "a", "messages": []}': "it has both prompt and messages",
    '{"prompt": ""}': 'prompt is ""; it must be a text that is not empty',
    '{"prompt": ["a"]}': 'prompt is ["a"]; it must be', '{"messages": []}': "messages is []; it must be a list of",
    '{"messages": [{"content": "a"}]}': 'messages is [{"content": "a"}]; it must be a list of',
    '{"prompt": "a", "max_token": 3}': "unknown field 'max_token'\n  did you mean max_new_tokens?",
    '{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens is 0; at least 1",
    '{"prompt": "a", "max_new_tokens": true}': "max_new_tokens is true; it must be a whole number",
    '{"prompt": "a", "top_k": 1.5}': "top_k is 1.5; it must be a whole number",
    f'{{"prompt": "a", "top_k": {10**30}}}': "does not fit in 64 bits",
    f'{{"prompt": "a", "seed": {10**30}}}': "does not fit in 64 bits",
    '{"prompt": "a", "temperature": NaN}': "temperature nan is not a number from 0",
    '{"prompt": "a", "temperature": "hot"}': 'temperature is "hot"; it must be a number',
    '{"prompt": "a", "top_p": 0}': "top_p 0 is not in (0, 1]",
    '{"prompt": "a", "stop": ""}': 'stop is [""]; it must be a text or a list of texts',
    '{"prompt": "a", "stop": [3]}': "stop is [3]; it must be a text or a list of texts",
    '{"prompt": "a", "id": [3]}': "id is [3]; it must be a text or a whole number",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=lambda t: t[:40])
def test_a_line_that_cannot_be_run_says_why(text: str) -> None:
    asks = parse_line(3, text.encode("utf-8", "surrogateescape")).asks
    assert isinstance(asks, UsageError)
    assert str(asks).startswith(WRONG[text]) or WRONG[text] in str(asks)


def test_what_is_null_is_not_given_and_a_system_turn_stays() -> None:
    turn = {"role": "system", "content": "mine"}
    line = parse_line(1, json.dumps({"messages": [turn], "prompt": None, "seed": None}).encode("utf-8-sig"))
    job = line.job(Defaults(5, {"temperature": 0.5, "seed": 2}, ("x",), system="yours"))
    assert job == Job([turn], 5, Sampling(0.5, seed=2), ("x",))
    job = parse_line(2, b'{"prompt": "hi", "temperature": 0, "stop": "y"}').job(
        Defaults(5, {"seed": 2}, system="yours")
    )
    yours = [{"role": "system", "content": "yours"}, {"role": "user", "content": "hi"}]
    assert job == Job(yours, 5, Sampling(0, seed=2), ("y",))
    assert isinstance(parse_line(1, b'{"messages": [{"role": "user"}]}', chat=False).asks, UsageError)


def test_an_endless_line_is_not_kept() -> None:
    raw = b"x" * (2 * MAX_LINE_BYTES + 5) + b'\n\n{"prompt": "a"}'
    first, second = read_lines(io.BytesIO(raw))
    assert "more than 16,777,216 B" in str(first.asks)
    assert (second.number, second.asks) == (3, {"prompt": "a"})


@pytest.mark.parametrize(("name", "why"), [
    ("/dev/zero", "line 1 does not end within 268,435,456 B"),
    ("/dev/urandom", "1000 of 1000 lines cannot be run; nothing was started"),
])  # fmt: skip
def test_what_has_no_end_is_no_file_of_prompts(kerngen: Kerngen, name: str, why: str) -> None:
    began = time.monotonic()
    code, out, err = kerngen(*RUN, "--prompts", name)
    assert (code, out, why in err) == (2, "", True), err
    assert time.monotonic() - began < 60


def test_a_small_file_with_bad_lines_is_not_started(kerngen: Kerngen) -> None:
    lines = ['{"prompt": "ok"}', "{", *['{"prompt": 3}'] * 12]
    code, out, err = kerngen("run", "nowhere", "--prompts", write(kerngen.folder / "p", *lines))
    assert (code, out) == (2, "")
    assert err.startswith("UsageError: 13 of 14 lines cannot be run; nothing was started\n  line 2: it is not JSON: ")
    assert "\n  line 3: prompt is 3; it must be a text that is not empty\n" in err
    assert err.endswith("\n  and 3 more\n  mend or remove them, and start again\n")
    for content, says in (("", "there are no prompts"), (None, "No such file")):
        path = kerngen.folder / "q"
        path.unlink(missing_ok=True) if content is None else path.write_text(content)
        code, _, err = kerngen("run", "nowhere", "--prompts", str(path))
        assert code == 2
        assert says in err


def test_a_line_that_fails_costs_itself_and_the_exit_code(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerngen.cli.prompts.CHECKED_LINES", 2)
    nobody = [{"role": "nobody", "content": "x"}]
    lines: tuple[dict[str, Any] | str, ...] = (
        {"prompt": "What is a fern?"}, {"id": "n", "messages": nobody}, "{", {"prompt": "hi", "max_new_tokens": 9999},
        {"prompt": "What is a fern?"},
    )  # fmt: skip
    name = write(kerngen.folder / "p", *lines)
    code, out, err = kerngen(*RUN, "--prompts", name, "--max-new-tokens", "3")
    said = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert "5 prompts, 3 of them failed" in err
    assert said[4]["text"] == said[0]["text"]
    assert said[1]["id"] == "n"
    assert said[1]["error"].endswith("unknown role: nobody")
    assert said[2]["error"].startswith("UsageError: it is not JSON")
    assert said[3]["error"].endswith("and 9999 new ones; the model takes 2,048 together")
    assert said[3]["hint"] == "a shorter prompt, or a smaller max_new_tokens"


def test_options_that_contradict_each_other(kerngen: Kerngen) -> None:
    for more, says in (
        (("--prompts", "p", "--prompt", "x"), "a prompt and --prompts contradict"),
        (("--prompt", "x", "--system", "y", "--no-chat"), "--system needs the chat template"),
        (("--prompt", "x", "--stop", ""), "--stop is empty"),
    ):
        code, out, err = kerngen("run", "nowhere", *more)
        assert (code, out) == (2, "")
        assert says in err


# ---- the queue


def test_many_jobs_are_read_as_there_is_room(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is longer than all before it waits for a larger cache, and nobody's text changes."""
    monkeypatch.setattr(prompt_file, "AHEAD", 6)
    monkeypatch.setattr(prompt_file, "MAX_BATCH", 3)
    num_read = most = 0
    jobs = [Job("abcdefgh"[: 1 + i % 8], 40 if i == 9 else 2 + i % 5) for i in range(25)]

    def reading() -> Iterator[Job]:
        nonlocal num_read
        for job in jobs:
            num_read += 1
            yield job

    made = []
    for place, (number, outcome) in enumerate(Outcomes(session, reading())):
        assert number == place
        most = max(most, num_read - place)
        assert not isinstance(outcome, KerngenError)
        made.append(outcome.tokens)
    assert most == 6
    assert made == [session.generate(str(job.prompt), max_new_tokens=job.max_new_tokens).tokens for job in jobs]


def test_a_number_that_is_none_ends_one_job(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Engine._take

    def broken(self: Engine, handle: Any, num_drafts: int, tokens: list[int], is_finite: bool) -> list[int]:
        return take(self, handle, num_drafts, tokens, is_finite and handle.order != 1)

    monkeypatch.setattr(Engine, "_take", broken)
    kinds = [type(outcome).__name__ for _, outcome in Outcomes(session, [Job("a", 3)] * 3)]
    assert kinds == ["Completion", NumericsError.__name__, "Completion"]


def test_nothing_that_is_finished_is_lost_when_it_is_stopped(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    step, count = Engine.step, 0

    def interrupted(self: Engine) -> Any:
        nonlocal count
        count += 1
        if count == 12:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    lines = [{"prompt": "Tell me a story about an owl.", "max_new_tokens": n} for n in (3, 50, 2, 50, 4)]
    code, out, err = kerngen(*RUN, "--prompts", write(kerngen.folder / "p", *lines))
    assert code == 130
    assert err.endswith("stopped\n")
    assert [(s["line"], s["num_tokens"]) for s in map(json.loads, out.splitlines())] == [(1, 3), (3, 2), (5, 4)]


def test_with_the_bar_on_a_terminal_answers_go_to_stdout(kerngen: Kerngen) -> None:
    lines = [{"prompt": "What is a fern?", "max_new_tokens": 12}] * 3
    command = (*RUN, "--prompts", write(kerngen.folder / "p", *lines))
    with open(kerngen.folder / "out", "wb") as file, Terminal(*command, stdout=file) as terminal:
        assert terminal.end() == 0, terminal.shown
    assert "prompts " in terminal.shown
    assert [json.loads(line)["line"] for line in (kerngen.folder / "out").read_text().splitlines()] == [1, 2, 3]


def test_a_bar_on_the_terminal_of_stdout_makes_room_for_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "80")
        with Reporter("prompts") as bar:
            bar.update(0, None, "")
            bar.print("long " * 40)
            bar.update(1, 2, "")
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "prompts " in shown
    assert "long " * 40 + "\r\n" in shown
    assert shown.index("prompts ") < shown.index("\x1b[2K") < shown.index("long "), "the bar is wiped first"
