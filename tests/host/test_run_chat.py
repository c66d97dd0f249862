"""`kerngen run` on a terminal: turns, what stops an answer or the program, thoughts, a context that is full."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen
from rich.cells import cell_len
from terminal import Terminal
from tiny_gemma import CPU, make_target
from tokenizers import AddedToken, Tokenizer
from tokens import TEMPLATE, write_tokenizer

from kerngen.cli import chat as cli_chat
from kerngen.cli.chat import DIM, PLAIN, CtrlC, Interrupted, Screen, Words, chat
from kerngen.errors import CheckpointError, DeviceError, NumericsError, UsageError
from kerngen.runtime.conversation import ContextFull, Conversation, Parts, Piece
from kerngen.runtime.engine import Engine
from kerngen.runtime.ops.eager import TorchOps
from kerngen.runtime.session import Session, open_checkpoint

TINY = ROOT / "examples" / "tiny" / "gemma-4-tiny-w4a16"
THINKING = "{% if enable_thinking is defined and enable_thinking %}<|turn>system\nthink<turn|>\n{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that babbles to the end of its context, with a template and tokens for thoughts."""
    root = tmp_path_factory.mktemp("checkpoint")
    make_target(root, "k_eq_v")
    write_tokenizer(root)
    path = root / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|channel>", "<channel|>")])
    tokenizer.save(str(path))
    (root / "chat_template.jinja").write_text(TEMPLATE.replace("{% for", f"{THINKING}{{% for", 1))
    return root


@pytest.fixture
def session(folder: Path) -> Session:
    return open_checkpoint(folder, TorchOps(CPU, torch.float32))


@pytest.fixture(scope="module")
def tiny() -> Session:
    return open_checkpoint(TINY, TorchOps(CPU, torch.float32))


def typing(monkeypatch: pytest.MonkeyPatch, *entries: str | BaseException) -> None:
    """Lines that are entered, one after the other; then Ctrl-D."""
    left = iter([*entries, EOFError()])

    def entered(prompt: str = "") -> str:
        entry = next(left)
        if isinstance(entry, BaseException):
            raise entry
        return entry

    monkeypatch.setattr(builtins, "input", entered)
    monkeypatch.setattr(cli_chat.select, "select", lambda *_: ([], [], []))
    monkeypatch.setenv("TERM", "dumb")


def answer(conversation: Conversation, text: str) -> str:
    return "".join(piece.text for piece in conversation.say(text))


# ---- on a terminal


def test_a_chat_on_a_terminal(kerngen: Kerngen, folder: Path) -> None:
    command = ("run", str(folder), "--no-draft", "--device", "cpu", "--system", "be kind", "--top-k", "1")
    with Terminal(*command, "--temperature", "1") as terminal:
        terminal.until("sampled: temperature 1, top-k 1, seed 0\n")
        begins = " ".join(terminal.until("\x1b[22m> ").split())  # its lines are as long as the terminal is wide
        assert "torch on cpu, float32; a context of 1,024 tokens; /help says" in begins
        terminal.type("hello\n")
        terminal.until("hello\n")
        terminal.until_more()
        terminal.type("\x03")
        stopped = terminal.until(" of 1,024 in context\n\x1b[22m> ")
        assert f"\n{DIM}stopped · " in stopped
        terminal.type("/stats\n")
        assert "answers in it: 1\n" in terminal.until("\x1b[22m> ")
        terminal.type("half a line")
        terminal.until("half a line")
        terminal.ctrl_c()
        assert "again" not in terminal.until("> ")
        terminal.type("a \\\n")
        terminal.until(". ")
        terminal.type("b\n")
        terminal.until("b\n")
        terminal.until("in context\n\x1b[22m> ")
        terminal.type("\x1b[200~one\ntwo\x1b[201~\n")
        terminal.until("two\n")
        terminal.until("in context\n\x1b[22m> ")
        terminal.type("/help\n")
        assert "a second Ctrl-C ends.\n" in terminal.until("\x1b[22m> ")
        terminal.ctrl_c()
        assert "Ctrl-C again or /exit ends" in terminal.until("\x1b[22m> ")
        terminal.ctrl_c()
        assert terminal.end() == 130
    assert terminal.shown.endswith("\nstopped\n")
    assert "Traceback" not in terminal.shown


def test_a_terminal_without_a_chat_wants_a_prompt(kerngen: Kerngen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for more in (("--no-chat",), ("--json",), ()):  # at last: stdout is no terminal
        code, out, err = kerngen("run", "nowhere", *more)
        assert (code, out) == (2, "")
        assert err.startswith("UsageError: no prompt\n")
    for option in (("--think",), ("--hide-thinking",), ("--context", "9")):
        code, _, err = kerngen("run", "nowhere", "--prompt", "x", *option)
        assert code == 2
        assert "are for a chat" in err


def test_turns_commands_and_the_end(
    tiny: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "/stats", "What is a fern?", "", "/stats", "/clear", "/stats", "/why so", " /exit", "/exit")
    conversation = Conversation(tiny, max_new_tokens=20)
    chat(conversation)
    said = capsys.readouterr().out
    assert "no answer yet\n" in said
    assert f"{conversation.messages[1]['content']}\nended by --max-new-tokens · 20 tokens, " in said
    assert "answers in it: 1\n" in said
    assert "last answer: 12 tokens" in said or "last answer: 20 tokens" in said
    assert "computed by PyTorch" in said
    assert "forgotten\ncontext: 0 of 2,048 tokens, answers in it: 0\nno answer yet\n" in said
    assert "there is no /why; /help says" in said
    assert conversation.messages[0] == {"role": "user", "content": "/exit"}


def test_a_pasted_command_is_no_part_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    typing(monkeypatch, "one", "two", "/exit")
    ready = iter([[0], [0], []])
    monkeypatch.setattr(cli_chat.select, "select", lambda *_: (next(ready), [], []))
    screen = Screen(CtrlC())
    assert [screen.read(), screen.read()] == ["one\ntwo", "/exit"]


def test_a_full_context_is_said_with_what_to_do(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typing(monkeypatch, "hello", "and then", "x" * 80, "/clear", "again")
    conversation = Conversation(session, context=60)
    chat(conversation)
    said = capsys.readouterr().out
    hint = "/clear forgets the conversation and makes room; --context TOKENS at the start gives more, 1,024 at most"
    assert f"60 of 60 in context · it is full: the answer ends here\n{hint}\n" in said
    assert f" tokens; its context holds 60\n{hint}\n" in said
    assert said.count("the answer ends here") >= 2
    assert conversation.messages[0]["content"] == "again"


def test_an_answer_that_fails_is_no_turn(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(self: Engine) -> Any:
        raise NumericsError("no token can follow", hint="check the weights")

    conversation = Conversation(session, context=100)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", step)
        typing(patch, "hello", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "\ud800")
        chat(conversation)
    said = capsys.readouterr().out
    assert "NumericsError: no token can follow\n  check the weights\n" in said
    assert "that is not UTF-8" in said
    assert "UsageError: the text is not Unicode" in said
    assert conversation.messages == []
    assert answer(conversation, "hello")


def test_ctrl_c_stops_an_answer_and_then_the_program() -> None:
    ctrl_c = CtrlC()
    ctrl_c(2, None)
    assert ctrl_c.count == 1, "the answer looks at it between two steps"
    with pytest.raises(KeyboardInterrupt):
        ctrl_c(2, None)
    ctrl_c.is_reading = True
    with pytest.raises(Interrupted):
        ctrl_c(2, None)


def test_a_context_that_does_not_fit_says_which_option(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(Session, "reserve", full)
    with pytest.raises(DeviceError, match=r"context of 90 tokens.*\n.*--context.*kerngen"):
        Conversation(session, context=90)


# ---- turns


def test_an_answer_that_is_stopped_stays_in_the_history(session: Session) -> None:
    conversation = Conversation(session, system="be kind", context=200)
    shown = ""
    reply = conversation.say("hello")
    for piece in reply:
        shown += piece.text
        if len(shown) > 5:
            reply.stop()
    assert reply.completion.stop_reason == "cancelled"
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[2]["content"] == shown == reply.completion.text
    held = conversation.num_tokens
    second = conversation.say("more")
    next(second)
    second.stop()
    second.stop()
    if second.completion is not None and not second.completion.text:
        assert conversation.num_tokens == held
    conversation.say("again").close()
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "be kind"}]
    assert session.reserve(1).has_work is False


def test_later_turns_are_found_in_the_cache(tiny: Session) -> None:
    notes = (TINY.parent / "prompt.txt").read_text()
    conversation = Conversation(tiny, system=notes, max_new_tokens=8)
    answer(conversation, "Where does Vera keep the red lantern?")
    alone = tiny.generate([*conversation.messages, {"role": "user", "content": "And Emil?"}], max_new_tokens=8).text
    reply = conversation.say("And Emil?")
    assert "".join(piece.text for piece in reply) == alone
    assert reply.completion.stats.num_cached_tokens >= 64


def test_what_does_not_fit_changes_nothing(session: Session) -> None:
    conversation = Conversation(session, context=40)
    with pytest.raises(ContextFull, match=r"context.* 40"):
        conversation.say("x" * 60)
    assert conversation.messages == []
    for wrong in ({"context": 5000}, {"stop": [""]}):
        with pytest.raises(UsageError):
            answer(Conversation(session, **wrong), "x")  # type: ignore[arg-type]


def test_thinking_is_asked_of_the_template(session: Session, tiny: Session) -> None:
    plain, thinking = (Conversation(session, context=99, think=think).say("a") for think in (False, True))
    more = len(session.codec.encode("<|turn>system\nthink<turn|>\n")) - 1
    assert len(thinking._handle.request.prompt) == len(plain._handle.request.prompt) + more
    plain.close(), thinking.close()
    with pytest.raises(UsageError, match=r"thinking.*enable_thinking"):
        Conversation(tiny, think=True)


def test_a_chat_without_a_template_does_not_begin(session: Session) -> None:
    (turns,) = [session.codec.__dict__.pop("_template", None)]
    try:
        session.codec.folder = Path("nowhere")
        with pytest.raises(CheckpointError, match="has no chat template"):
            Conversation(session)
    finally:
        session.codec.__dict__["_template"] = turns


# ---- thoughts


def pieces(session: Session, text: str, *, stop: tuple[str, ...] = (), prompt: str = "") -> list[Piece]:
    """Of an answer of these tokens; like ones joined."""
    parts = Parts(session.codec, stop, session.codec.encode(prompt))
    for token in session.codec.encode(text)[1:]:
        if parts.ends_with(token):
            break
    parts._end_thought()
    joined: list[Piece] = []
    while parts.has_news:
        piece = parts.news()
        if joined and joined[-1].is_thought == piece.is_thought:
            piece = Piece(joined.pop().text + piece.text, piece.is_thought)
        joined.append(piece)
    return joined


def test_thoughts_are_told_from_what_is_said(session: Session) -> None:
    def thought(text: str) -> Piece:
        return Piece(text, is_thought=True)

    whole = "<|channel>thought\nwhoisit\nhmm<channel|>hello<turn|>"
    assert pieces(session, whole) == [thought("whoisit\nhmm"), Piece("hello")]
    assert pieces(session, "hello") == [Piece("hello")]
    assert pieces(session, "<|channel>thought\n<channel|>hi") == [Piece("hi")]
    assert pieces(session, "<|channel>thought\nabc", stop=("b",)) == [thought("abc")]
    assert pieces(session, "<|channel>thought\nb<channel|>abc", stop=("b",)) == [thought("b"), Piece("a")]
    assert pieces(session, "thought\nhm<channel|>hello") == [
        thought("hm"),
        Piece("hello"),
    ]  # its first token is missing
    assert pieces(session, "thought<channel|>hello") == [Piece("hello")]
    assert pieces(session, "thoughabc", stop=("b",)) == [Piece("thougha")]
    assert pieces(session, "abc<channel|>d", prompt="x<|channel>") == [thought("abc"), Piece("d")]
    assert pieces(session, "abc", prompt="x<|channel><channel|>") == [Piece("abc")]


@pytest.mark.parametrize("hide", [False, True])
def test_thoughts_are_dim_or_hidden(
    hide: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def reply() -> Iterator[Piece]:
        yield from (Piece("who ", True), Piece(""), Piece("is it", True), Piece("he\x1b]0;x\x07"), Piece("llo"))

    cli_chat._stream(reply(), Screen(CtrlC()), CtrlC(), hide)  # type: ignore[arg-type]
    shown = "thinking …" if hide else "who is it"
    assert capsys.readouterr().out == f"{DIM}{shown}\n{PLAIN}he\ufffd]0;x\ufffdllo"


# ---- lines


@pytest.mark.parametrize("size", [1, 3, 400])
def test_lines_end_between_words_however_they_come(size: int) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n\n    code stays\n"
    text += "".join(f"{word} " for word in ("x" * 45, "end", "漢字" * 10, "z"))
    words = Words(20)
    shown = "".join(words.add(text[at : at + size]) for at in range(0, len(text), size)) + words.flush()
    assert shown.split()
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    assert shown.startswith("The quick brown fox\njumps over the lazy\ndog.\n\n    code stays\n")
    assert all(cell_len(line) <= 20 for line in shown.splitlines() if "x" * 10 not in line)


def test_what_is_typed_ahead_waits_and_is_not_in_the_answer(kerngen: Kerngen, folder: Path) -> None:
    with Terminal("run", str(folder), "--no-draft", "--device", "cpu", "--temperature", "0") as terminal:
        terminal.until("\x1b[22m> ")
        terminal.type("hello\n")
        terminal.until("hello\n")
        terminal.until_more()
        terminal.type("zzQQzz\x03")
        answer = terminal.until(" in context\n")
        assert "^C" not in answer
        assert "zzQQzz" not in answer
