"""`kerngen run` on a terminal: a chat. What it shows and heeds; the turns are runtime/conversation.py's."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kerngen.cli.chat_keys import CtrlC, Interrupted, Keyboard
from kerngen.cli.model_options import chosen_lines
from kerngen.cli.tables import fitted
from kerngen.cli.word_wrap import Words
from kerngen.errors import KerngenError, printable
from kerngen.runtime.config import in_int4
from kerngen.runtime.conversation import ContextFull, Conversation, Piece, Reply

if TYPE_CHECKING:
    from kerngen.cli.chat_history import HistoryFile
    from kerngen.runtime.completion import Completion

DIM, PLAIN = "\x1b[2m", "\x1b[22m"
COMMANDS = {
    "/help": "this",
    "/stats": "what the last answer took, and what the context holds",
    "/image": "FILE: show it with the next message; without one, forget those",
    "/video": "FILE: show it with the next message; without one, forget those",
    "/audio": "FILE: play it with the next message; without one, forget those",
    "/clear": "forget the conversation",
    "/exit": "end, as Ctrl-D does",
}
FILE_COMMANDS = ("/image", "/video", "/audio")
KEYS = (
    "Enter sends. Alt-Enter, or \\ at the end of a line, begins another one. What is pasted is one message.\n"
    "Up, Down and Ctrl-R find what was typed before; Tab completes /. A space before / makes it text.\n"
    "Ctrl-C stops an answer and keeps what it says so far; a second Ctrl-C ends."
)
ENDS = {"stop": "complete", "length": "ended by --max-new-tokens", "context": "ended where the context was full",
        "cancelled": "stopped"}  # fmt: skip


class Screen:
    """What is shown, in two shades."""

    def __init__(self) -> None:
        self._has_shades = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._is_dim = False
        self._column = 0  # 0 at the start of a line
        self._words: Words | None = None  # of an answer

    def show(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        if dim != self._is_dim and self._has_shades:
            sys.stdout.write(DIM if dim else PLAIN)
        self._is_dim = dim
        sys.stdout.write(text)
        sys.stdout.flush()
        self._column = 0 if text.endswith("\n") else 1

    def stream(self, text: str, *, dim: bool = False) -> None:
        """A piece of an answer, in lines that end between words where this is a terminal. What a terminal takes for a
        command is escaped: to move, to set a title, to answer as if it were typed.
        """
        text = printable(text)
        if not sys.stdout.isatty():
            self.show(text, dim=dim)
            return
        columns = shutil.get_terminal_size().columns
        if self._words is None:
            self._words = Words(columns)
        self._words.width = columns
        self.show(self._words.add(text), dim=dim)

    def _end_words(self) -> None:
        if self._words is not None:
            self.show(self._words.flush(), dim=self._is_dim)
            self._words = None

    def line(self, text: str, *, dim: bool = True) -> None:
        """`text` on lines of its own, as long as the terminal is wide."""
        self.end_line()
        self.show("".join(f"{fitted(line)}\n" for line in printable(text).splitlines()), dim=dim)
        self.show_plainly()

    def end_line(self) -> None:
        self._end_words()
        if self._column:
            self.show("\n", dim=self._is_dim)

    def show_plainly(self) -> None:
        self._end_words()
        if self._is_dim and self._has_shades:
            sys.stdout.write(PLAIN)
            sys.stdout.flush()
        self._is_dim = False


@dataclass(slots=True)
class Files:
    """What goes with the next message."""

    images: list[Path] = field(default_factory=list)
    videos: list[Path] = field(default_factory=list)
    audio: list[Path] = field(default_factory=list)

    def add(self, command: str, name: str = "") -> str:
        """What there is after `command` (of FILE_COMMANDS) with a file's name."""
        found = {"/image": self.images, "/video": self.videos, "/audio": self.audio}[command]
        path = Path(name.strip().strip("'\"")).expanduser()
        if not name.strip():
            found.clear()
        elif not path.is_file():
            return f"there is no file {path}"
        else:
            found.append(path)
        names = ", ".join(path.name for path in (*self.images, *self.videos, *self.audio))
        return f"with the next message: {names}" if names else "nothing goes with the next message"

    def forget(self) -> None:
        self.images, self.videos, self.audio = [], [], []


def chat(conversation: Conversation, *, hide_thinking: bool = False, history: HistoryFile | None = None) -> None:
    """Read, answer, until Ctrl-D, /exit or a second Ctrl-C (KeyboardInterrupt). history: None keeps nothing."""
    ctrl_c, screen, files = CtrlC(), Screen(), Files()
    screen.line(title(conversation))
    last: Completion | None = None
    entries, history = _opened(history, screen)
    keyboard = Keyboard(entries, COMMANDS)
    with ctrl_c.heeded(), keyboard.unechoed():
        while True:
            screen.end_line()
            try:
                said = keyboard.read()
            except EOFError:
                return
            except Interrupted:
                ctrl_c.count = 0 if keyboard.typed else ctrl_c.count + 1
                if ctrl_c.count > 1:
                    raise KeyboardInterrupt from None
                if ctrl_c.count:
                    screen.line("Ctrl-C again or /exit ends")
                continue
            ctrl_c.count = 0
            if history is not None and said.strip():
                history = _kept(said, history, screen)
            if said.startswith("/"):
                if said.strip() == "/exit":
                    return
                if said.strip() == "/clear":
                    last = None
                    files = Files()
                if said.split()[0] in FILE_COMMANDS:
                    screen.line(files.add(*said.split(maxsplit=1)))
                    continue
                screen.line(obey(said.strip(), conversation, last))
            elif said.strip():
                last = _answer(conversation, said.strip(), files, screen, keyboard, ctrl_c, hide_thinking) or last


def _opened(history: HistoryFile | None, screen: Screen) -> tuple[list[str], HistoryFile | None]:
    """What was typed before, oldest first, and the file, None if there is none to be had, which is said."""
    if history is None:
        return [], None
    try:
        entries, num_bad = history.read()
    except OSError as e:
        screen.line(_unkept(history, e))
        return [], None
    if num_bad:
        lines = "1 line is" if num_bad == 1 else f"{num_bad} lines are"
        screen.line(f"{history.path}: {lines} damaged and left out")
    return entries, history


def _kept(said: str, history: HistoryFile, screen: Screen) -> HistoryFile | None:
    """Keep what was said; the file, or None if it can keep nothing, which is said."""
    try:
        history.add(said)
    except OSError as e:
        screen.line(_unkept(history, e))
        return None
    return history


def _unkept(history: HistoryFile, error: OSError) -> str:
    why = error.strerror or str(error)
    return f"what is typed is not kept for the next chat: {history.path}: {why}; --no-history keeps nothing"


def title(conversation: Conversation) -> str:
    session = conversation.session
    drafting = ""
    if session.drafter_folders:
        drafting = f", drafting with {session.drafter_names}{in_int4(session.draft_weights)}"
    dtype = str(session.ops.dtype).removeprefix("torch.")
    return (
        f"{session.folder.name}: {session.ops.name} on {session.ops.device}, {dtype}{drafting}; "
        f"a context of {conversation.context:,} tokens; /help says what there is"
    )


def obey(command: str, conversation: Conversation, last: Completion | None) -> str:
    """What a command other than /exit says."""
    if command == "/clear":
        conversation.clear()
        return "forgotten"
    if command == "/stats":
        return stats_text(conversation, last)
    if command == "/help":
        return "\n".join([*(f"{name:<8}{text}" for name, text in COMMANDS.items()), KEYS])
    return f"there is no {command.split()[0]}; /help says what there is, and a space before / sends it as text"


def _answer(
    conversation: Conversation, said: str, files: Files, screen: Screen, keyboard: Keyboard, ctrl_c: CtrlC,
    hide_thinking: bool,
) -> Completion | None:  # fmt: skip
    """Show the answer to `said` with `files`, which are then said. None where there is none."""
    try:
        reply = conversation.say(said, images=files.images, videos=files.videos, audio=files.audio)
        files.forget()
        try:
            with keyboard.unechoed():  # once more, as a shell may have set the terminal anew after Ctrl-Z
                _stream(reply, screen, keyboard, ctrl_c, hide_thinking)
        finally:
            reply.close()
    except ContextFull as e:
        screen.line(f"{e}\n{context_hint(conversation)}")
        return None
    except KerngenError as e:  # of this answer; the next one may be none
        screen.line(f"{type(e).__name__}: {e}")
        return None
    finally:
        screen.show_plainly()
    if (made := reply.completion) is not None:
        screen.line(after(made, conversation))
    return made


def _stream(reply: Reply, screen: Screen, keyboard: Keyboard, ctrl_c: CtrlC, hide_thinking: bool) -> None:
    before = Piece("")
    for piece in reply:
        if keyboard.keep_typed():
            ctrl_c.count = max(ctrl_c.count, 1)
        if piece.text:
            if piece.is_thought and hide_thinking:
                if not before.is_thought:
                    screen.show("thinking …", dim=True)
            else:
                if piece.is_thought != before.is_thought:
                    screen.end_line()
                screen.stream(piece.text, dim=piece.is_thought)
            before = piece
        if ctrl_c.count:
            reply.stop()


def after(made: Completion, conversation: Conversation) -> str:
    """The line below an answer."""
    stats = made.stats
    rate = f", {stats.tokens_per_s:.1f}/s" if stats.tokens_per_s else ""
    used = conversation.num_tokens if made.text else stats.num_prompt_tokens + stats.num_tokens
    parts = [f"{stats.num_tokens} tokens{rate}", f"{used:,} of {conversation.context:,} in context"]
    if made.stop_reason in ("cancelled", "length"):
        parts.insert(0, ENDS[made.stop_reason])
    elif made.stop_reason == "context":
        parts.append(f"it is full: the answer ends here\n{context_hint(conversation)}")
    if not made.text:
        parts.append("nothing was said, so the question is not kept")
    return " · ".join(parts)


def context_hint(conversation: Conversation) -> str:
    hint = "/clear forgets the conversation and makes room"
    if (most := conversation.session.config.max_positions) > conversation.context:
        hint += f"; --context TOKENS at the start gives more, {most:,} at most"
    return hint


def stats_text(conversation: Conversation, last: Completion | None) -> str:
    """What /stats says."""
    turns = sum(m["role"] == "assistant" for m in conversation.messages)
    lines = [f"context: {conversation.num_tokens:,} of {conversation.context:,} tokens, answers in it: {turns}"]
    if last is None:
        return f"{lines[0]}\nno answer yet"
    stats = last.stats
    lines.append(
        f"last prompt: {stats.num_prompt_tokens:,} tokens, {stats.num_cached_tokens:,} of them from the cache, "
        f"the first answer token after {stats.prefill_s:.3f} s"
    )
    lines.append(f"last answer: {stats.num_tokens} tokens, {stats.tokens_per_s:.1f}/s, {ENDS[last.stop_reason]}")
    if stats.num_draft_tokens:
        lines.append(f"drafting: {stats.acceptance_length:.2f} tokens accepted a step, in {stats.num_steps} steps")
    ops = conversation.session.ops
    return "\n".join([*lines, *chosen_lines(ops.sources(), ops.outside())])
