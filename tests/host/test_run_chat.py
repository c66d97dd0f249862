"""`kerngen run` on a terminal: turns, what stops an answer or the program, thoughts, a context that is full."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from command import ROOT, Kerngen
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.cells import cell_len
from terminal import Terminal
from tiny_gemma import CPU, make_target
from tokenizers import AddedToken, Tokenizer
from tokens import TEMPLATE, write_tokenizer

from kerngen.cli import chat as cli_chat
from kerngen.cli import chat_history
from kerngen.cli.chat import DIM, PLAIN, Screen, chat
from kerngen.cli.chat_history import HistoryFile
from kerngen.cli.chat_keys import CtrlC, Interrupted, Keyboard
from kerngen.cli.word_wrap import Words
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


@contextmanager
def typing(*messages: str) -> Iterator[None]:
    """Within it these are typed, each with Enter behind it; then Ctrl-D."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        typed = "".join(f"{message}\r" for message in messages) + "\x04"
        keys.send_bytes(typed.encode(errors="surrogateescape"))
        yield


def read_all(*messages: str, history: tuple[str, ...] = ()) -> list[str]:
    """The messages that are made of such keys."""
    with typing(*messages):
        keyboard, read = Keyboard(history, cli_chat.COMMANDS), list[str]()
        while True:
            try:
                read.append(keyboard.read())
            except Interrupted:
                read.append(f"^C {keyboard.typed}")
            except EOFError:
                return read


def answer(conversation: Conversation, text: str) -> str:
    return "".join(piece.text for piece in conversation.say(text))


# ---- on a terminal


def test_a_chat_on_a_terminal(kerngen: Kerngen, folder: Path) -> None:
    command = ("run", str(folder), "--no-draft", "--device", "cpu", "--system", "be kind", "--top-k", "1")
    with Terminal(*command, "--temperature", "1") as terminal:
        terminal.until("sampled: temperature 1, top-k 1, seed 0\n")
        begins = " ".join(terminal.until_last(">"))  # its lines are as long as the terminal is wide
        assert "torch on cpu, float32; a context of 1,024 tokens; /help says" in " ".join(begins.split())
        terminal.type("hello\r")
        terminal.until("\x1b[?2004l")
        terminal.until_more()
        terminal.type("\x03")
        stopped = terminal.until_last(">")[-2]
        assert re.fullmatch(r"stopped · \d+ tokens.* of 1,024 in context", stopped)
        assert f"\n{DIM}stopped · " in terminal.shown
        terminal.type("/stats\r")
        terminal.until("answers in it: 1\n")
        terminal.until_last(">")
        terminal.type("again\r\x03")
        terminal.until(f"{DIM}stopped · ")
        terminal.until_last(">")
        terminal.type("half a line")
        terminal.until_last("> half a line")
        terminal.type("\x03")
        assert terminal.until_last(">")[-2] == "> half a line"
        terminal.type("a \\\r")
        terminal.until_last(".")
        terminal.type("b\x1b\r")
        terminal.until_last(".")
        terminal.type("c")
        assert terminal.until_last(". c")[-3:] == ["> a", ". b", ". c"]
        terminal.type("\r")
        terminal.until("\x1b[?2004l")
        terminal.until_more()
        terminal.type("\x03")
        terminal.until_last(">")
        terminal.type("\x1b[200~one\ntwo\x1b[201~")
        assert terminal.until_last(". two")[-2:] == ["> one", ". two"]
        terminal.type("\r")
        terminal.until("\x1b[?2004l")
        terminal.until_more()
        terminal.type("\x03")
        terminal.until_last(">")
        terminal.type("/he\t\r")
        terminal.until("a second Ctrl-C ends.\n")
        terminal.until_last(">")
        terminal.type("\x03")
        terminal.until("Ctrl-C again or /exit ends\n")
        terminal.until_last(">")
        terminal.type("\x03")
        assert terminal.end() == 130
    assert terminal.shown.endswith("\nstopped\n")
    assert "Traceback" not in terminal.shown
    assert "WARNING" not in terminal.shown


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
    monkeypatch.setenv("NO_COLOR", "1")
    conversation = Conversation(tiny, max_new_tokens=20)
    with typing("/stats", "What is a fern?", "", "/stats", "/clear", "/stats", "/why so", " /exit", "/exit"):
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


def test_what_keys_make_of_a_message() -> None:
    assert read_all("one\\\r two", "a\x1b\rb", "c:\\dir", "\tx", "  ") == ["one\n two", "a\nb", "c:\\dir", "\tx", "  "]
    assert read_all("\x1b[200~one\r\ntwo\n\x1b[201~three") == ["one\ntwo\nthree"]
    assert read_all("abc\x1b[D\\") == ["ab\\c"], "a backslash that ends no line is text"
    assert read_all("/st\t", "/cle\t") == ["/stats", "/clear"]
    assert read_all("half\x03x", "\x03y") == ["^C half", "x", "^C ", "y"]
    assert read_all("typed\nby the terminal") == ["typed", "by the terminal"], "before the chat began"


def test_what_was_typed_before_is_found() -> None:
    up = "\x1b[A"
    assert read_all(up, f"{up}{up}{up}", "\x12fir\r", history=("first", "two\nlines")) == [
        "two\nlines", "first", "first"
    ]  # fmt: skip


def test_a_full_context_is_said_with_what_to_do(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    conversation = Conversation(session, context=60)
    with typing("hello", "and then", "x" * 80, "/clear", "again"):
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

    monkeypatch.setenv("NO_COLOR", "1")
    conversation = Conversation(session, context=100)
    with monkeypatch.context() as patch, typing("hello", "\udcff"):
        patch.setattr(Engine, "step", step)
        chat(conversation)
    said = capsys.readouterr().out
    assert "NumericsError: no token can follow\n  check the weights\n" in said
    assert "UsageError: the text is not Unicode" in said
    assert conversation.messages == []
    assert answer(conversation, "hello")


def test_ctrl_c_stops_an_answer_and_then_the_program() -> None:
    ctrl_c = CtrlC()
    ctrl_c(2, None)
    assert ctrl_c.count == 1, "the answer looks at it between two steps"
    with pytest.raises(KeyboardInterrupt):
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

    with typing():
        cli_chat._stream(reply(), Screen(), Keyboard((), {}), CtrlC(), hide)  # type: ignore[arg-type]
    shown = "thinking …" if hide else "who is it"
    assert capsys.readouterr().out == f"{DIM}{shown}\n{PLAIN}he\\x1b]0;x\\x07llo"


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


def wrapped(text: str, columns: int, size: int = 5) -> list[str]:
    words = Words(columns)
    return ("".join(words.add(text[at : at + size]) for at in range(0, len(text), size)) + words.flush()).split("\n")


@pytest.mark.parametrize("size", [1, 2, 400])
def test_code_and_tables_stay_as_they_are(size: int) -> None:
    code = ["```python", "x = 1  # a line that is longer than the terminal is wide", "", "    ``` no end", "````"]
    table = ["| a | a cell that is longer than the terminal is wide |", "|---|:--|"]
    nested = ["- one:", "  ~~~", "  ``` a text that is longer than the terminal", "  ~~~"]
    text = [*code, *table, *nested]
    assert wrapped("\n".join([*text, "and now words again"]), 16, size) == [*text, "and now words", "again"]
    inline = "```not a block``` but words of a line"
    assert wrapped(f"{inline}\nwhich end as others do", 16, size)[-2:] == ["which end as", "others do"]


def test_cells_are_counted_and_not_characters() -> None:
    assert wrapped("e\u0301e\u0301e\u0301 " * 3, 11) == [
        "e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301 e\u0301e\u0301e\u0301"
    ]
    assert wrapped("漢字漢字漢字", 5) == ["漢字", "漢字", "漢字"]
    assert wrapped("漢か\u3099漢", 4) == ["漢か\u3099", "漢"]
    assert wrapped("漢字漢。漢", 6) == ["漢字", "漢。漢"], "a full stop begins no line"
    family = "👨\u200d👩\u200d👧"
    assert wrapped(f"漢字{family}漢", 5, 1) == ["漢字", f"{family}漢"]
    assert wrapped("a\tb c", 10) == ["a\tb", "c"], "a tab leads to the next eighth column"


def test_a_terminal_may_become_narrow_or_wide() -> None:
    words = Words(20)
    shown = words.add("one two three ")
    words.width = 8
    shown += words.add("four five six ")
    words.width = 16
    assert shown + words.add("seven eight ") + words.flush() == "one two three\nfour\nfive six seven\neight"


def test_what_is_typed_ahead_waits_and_is_not_in_the_answer(kerngen: Kerngen, folder: Path) -> None:
    with Terminal("run", str(folder), "--no-draft", "--device", "cpu", "--temperature", "0") as terminal:
        terminal.until_last(">")
        terminal.type("hello\r")
        terminal.until("\x1b[?2004l")
        terminal.until_more()
        terminal.type("zzQQ\x1b[200~p\rq\x1b[201~\x1b[Dz")
        terminal.type("\x03")
        lines = terminal.until_last(". zq")
        assert lines[-2] == "> zzQQp", "what was typed, edited and pasted, as if it were typed now"
        assert re.match("stopped · .* in context", lines[-3])
        answer = "".join(lines[lines.index("> hello") : -2])
        assert "^C" not in answer
        assert "Q" not in answer
        terminal.type("\x03")
        terminal.until_last(">")


def test_messages_that_are_typed_ahead_are_sent_in_turn(kerngen: Kerngen) -> None:
    with Terminal("run", str(TINY), "--no-draft", "--temperature", "0", "-n", "20") as terminal:
        before = terminal.settings
        terminal.type("What is a fern?\n/stats\n")  # while the weights are loaded
        terminal.until("answers in it: 1\n")
        terminal.until_last(">")
        terminal.type("And a warp?\r/stats\r\x04")
        assert terminal.end() == 0
        asked = [line for line in terminal.lines if line.startswith(">")]
        assert asked == ["> What is a fern?", "> /stats", "> And a warp?", "> /stats", ">"]
        assert "context: 0 of 2,048 tokens, answers in it: 0" not in terminal.lines
        assert terminal.settings == before, "it shows what is typed, as before"


def test_an_answer_ends_its_lines_between_words(kerngen: Kerngen, tiny: Session) -> None:
    conversation, questions = Conversation(tiny), ("What is a moon?", "And winter?")
    answers = [answer(conversation, question) for question in questions]
    assert max(map(len, answers)) > 60
    with Terminal("run", str(TINY), "--no-draft", "--temperature", "0", columns=40) as terminal:
        for question, said, columns in zip(questions, answers, (40, 23), strict=True):
            terminal.until_last(">")
            terminal.resize(columns)
            terminal.type(question)
            terminal.until_last(f"> {question}")
            terminal.type("\r")
            after = terminal.until_last(">")
            lines = after[after.index(f"> {question}") + 1 :]
            expected = textwrap.wrap(said, columns, break_on_hyphens=False)
            assert lines[: len(expected)] == expected
        terminal.type("\x04")
        assert terminal.end() == 0


def test_sigterm_ends_a_chat_that_waits_for_a_message(kerngen: Kerngen, folder: Path) -> None:
    with Terminal("run", str(folder), "--no-draft", "--device", "cpu", "--no-history") as terminal:
        before = terminal.settings
        terminal.until_last(">")
        terminal.type("/stats\r")
        terminal.until("no answer yet\n")
        terminal.until_last(">")
        terminal.type("half a line")
        terminal.until_last("> half a line")
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.settings == before
    assert list(kerngen.folder.rglob("*history*")) == []


# ---- the history


def test_the_next_chat_knows_what_was_typed(kerngen: Kerngen, folder: Path) -> None:
    kept = kerngen.folder / ".local" / "state" / "kerngen" / "chat_history.jsonl"
    command = ("run", str(folder), "--no-draft", "--device", "cpu", "-n", "3")
    with Terminal(*command) as terminal, Terminal(*command) as other:
        for chat_, message in ((terminal, "one\\\rtwo"), (other, "three")):
            chat_.until_last(">")
            chat_.type(f"{message}\r")
            chat_.until("in context")
            chat_.until_last(">")
            chat_.type("\x04")
            assert chat_.end() == 0
    assert kept.stat().st_mode & 0o777 == 0o600
    assert HistoryFile(kept).read() == (["one\ntwo", "three"], 0)
    with kept.open("a") as file:
        file.write("half a li")
    with Terminal(*command) as terminal:
        terminal.until_last(">")
        assert "1 line" in "\n".join(terminal.lines)
        terminal.type("\x1b[A")
        terminal.until_last("> three")
        terminal.type("\x1b[A")
        assert terminal.until_last(". two")[-2] == "> one"
        terminal.type("\x03")
        terminal.until_last(">")
        terminal.type("/stats\r\x04")
        assert terminal.end() == 0
    assert HistoryFile(kept).read() == (["one\ntwo", "three", "/stats"], 1), "the line that was cut off stays alone"


def test_chats_that_type_at_the_same_time_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "history"
    monkeypatch.setattr(chat_history, "MAX_BYTES", 4096)

    def type_all(who: int) -> None:
        mine = HistoryFile(path)
        for n in range(200):
            mine.add(f"{who} says é {n}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(type_all, range(4)))
    entries, num_bad = HistoryFile(path).read()
    assert num_bad == 0
    assert 4096 // 2 < path.stat().st_size + 64 <= 4096 + 64, "the newest are kept"
    assert path.stat().st_mode & 0o777 == 0o600
    for who in range(4):
        mine = [entry for entry in entries if entry.startswith(f"{who} ")]
        assert mine == [f"{who} says é {n}" for n in range(200 - len(mine), 200)], "none is missing between others"
    assert sorted(p.name for p in path.parent.iterdir()) == [".history.lock", "history"]


def test_what_the_history_keeps(tmp_path: Path) -> None:
    history = HistoryFile(tmp_path / "history")
    assert history.read() == ([], 0)
    for text in ("a", "a", "b\n\x1b", "x" * chat_history.MAX_ENTRY_BYTES, "\udcff", "a"):
        history.add(text)
    history.path.chmod(0o644)
    history.add("z")
    assert history.path.stat().st_mode & 0o777 == 0o600
    assert history.read() == (["a", "b\n\x1b", "\udcff", "a", "z"], 0)
    with history.path.open("ab") as file:
        file.write(b'{"no": "text"}\n\xff\n')
    assert history.read()[1] == 2


def test_a_history_that_cannot_be_kept_is_said_once(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    conversation = Conversation(session, context=100)
    (tmp_path / "file").write_text("")
    unmade = HistoryFile(tmp_path / "file" / "history")
    pipe = HistoryFile(tmp_path / "pipe")
    os.mkfifo(pipe.path)
    for history, why in ((unmade, "Not a directory"), (pipe, "is no regular file")):
        with typing("/stats", "/stats", "/help"):
            chat(conversation, history=history)
        said = capsys.readouterr().out
        assert said.count(f"not kept for the next chat: {history.path}: {why}; --no-history") == 1
        assert said.count("no answer yet") == 2
