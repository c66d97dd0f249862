"""What commands say about what they did fits the terminal, on stderr as on stdout, and is whole elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import ROOT, Kerngen
from terminal import Terminal

from kerngen.cli.tables import say

TINY = str(ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16")
ESCAPES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def told(shown: str, begins: str) -> list[str]:
    """The lines of a terminal from the one that begins so."""
    lines = [ESCAPES.sub("", line).rpartition("\r")[2] for line in shown.splitlines()]
    return lines[next(i for i, line in enumerate(lines) if line.startswith(begins)) :]


def test_a_run_says_what_it_did_within_the_terminal(kerngen: Kerngen, tmp_path: Path) -> None:
    command = ("run", TINY, "-p", "What is a warp?", "-n", "4")
    with (tmp_path / "answer").open("wb") as answer, Terminal(*command, stdout=answer) as terminal:
        assert terminal.end() == 0
    lines = told(terminal.shown, "torch on cpu")
    assert max(map(len, lines)) <= 80
    said = " ".join(map(str.strip, lines))
    assert "sampled: temperature 1 (generation_config.json), top-k 64 (generation_config.json), top-p 0.95" in said
    assert len(said) > 400, "drafts, and what is outside our kernels, are said too"


def test_a_chat_begins_within_the_terminal(kerngen: Kerngen) -> None:
    with Terminal("run", TINY) as terminal:
        terminal.until_last(">")
        terminal.type("/exit\r")
        assert terminal.end() == 0
    lines = told(terminal.shown, "sampled: ")
    assert max(map(len, lines)) <= 80
    said = " ".join(map(str.strip, lines))
    assert "gemma-4-tiny-w4a16: torch on cpu, float32, drafting with gemma-4-tiny-assistant; a context of" in said


def test_what_is_left_out_of_a_list_is_said_within_the_terminal(kerngen: Kerngen) -> None:
    with Terminal("db", "ls") as terminal:
        terminal.end()
    lines = told(terminal.shown, "left out: what is shipped for ")
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert "--arch or --device asks for it" in " ".join(map(str.strip, lines))


def test_what_another_program_reads_is_whole(kerngen: Kerngen, capsys: pytest.CaptureFixture[str]) -> None:
    say("word " * 20, err=True)
    assert capsys.readouterr() == ("", "word " * 20 + "\n")
