"""`kerngen run` on a terminal: a chat. What it shows and heeds; the turns are runtime/conversation.py's."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from rich.cells import cell_len

from kerngen.cli.model_options import chosen_lines
from kerngen.cli.tables import fitted
from kerngen.errors import KerngenError
from kerngen.runtime.config import in_int4
from kerngen.runtime.conversation import ContextFull, Conversation, Piece, Reply

if TYPE_CHECKING:
    from kerngen.runtime.completion import Completion

readline: ModuleType | None
try:
    import readline
except ImportError:  # a Python that was built without it: lines cannot be edited
    readline = None

PASTE_S = 0.02  # what follows a line this soon was not typed
DIM, PLAIN = "\x1b[2m", "\x1b[22m"
# A model may write what a terminal takes for a command: to move, to set a title, to answer as if it were typed.
_UNSHOWN = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
COMMANDS = {
    "/help": "this",
    "/stats": "what the last answer took, and what the context holds",
    "/clear": "forget the conversation",
    "/exit": "end, as Ctrl-D does",
}
KEYS = (
    "A line that ends in \\ goes on in the next one. What is pasted is one message. A space before / makes it text.\n"
    "Ctrl-C stops an answer and keeps what it says so far; a second Ctrl-C ends."
)
ENDS = {"stop": "complete", "length": "ended by --max-new-tokens", "context": "ended where the context was full",
        "cancelled": "stopped"}  # fmt: skip


class Interrupted(Exception):
    """Ctrl-C while a line was typed."""


class CtrlC:
    """Counts Ctrl-C since a line was last entered. While a line is read it raises, while an answer is made it does not:
    the engine is between two steps when it stops. The second one that finds an answer still not stopped ends all.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_reading = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_reading and readline is not None and readline.get_line_buffer():
            self.count = 0  # it takes back what was typed, and no more
            raise Interrupted
        self.count += 1
        if self.is_reading:
            raise Interrupted
        if self.count > 1:
            raise KeyboardInterrupt

    @contextmanager
    def heeded(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Words:
    """Text that comes in pieces, broken between words where a line of `width` cells ends.

    A word waits until it is whole, or fills half a line. An ideograph is a word by itself.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._blanks = self._word = ""

    def add(self, text: str) -> str:
        """What may be written now."""
        written = ""
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if part == "\n":
                written += self.flush() + part
                self._column, self._blanks = 0, ""
            elif part.isspace():
                written += self.flush()
                self._blanks += part
            else:
                for char in part:
                    self._word += char
                    if cell_len(char) > 1 or 2 * cell_len(self._word) > self.width:
                        written += self.flush()
        return written

    def flush(self) -> str:
        """The word that waits, on the next line where this one has no room for it."""
        if not self._word:
            return ""
        word, blanks = self._word, self._blanks
        self._word = self._blanks = ""
        cells, gap = cell_len(word), len(blanks.expandtabs())
        if self._column and self._column + gap + cells > self.width:
            self._column = cells
            return f"\n{word}"
        self._column += gap + cells
        return blanks + word


@contextmanager
def unechoed() -> Iterator[None]:
    """Within it, keys are not shown: what is typed ahead, or Ctrl-C, would stand in the middle of an answer. The next
    line that is read shows them.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):  # no terminal
        yield
        return
    within = [*before]
    within[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, within)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Screen:
    """The terminal: lines that are typed, and text in two shades."""

    def __init__(self, ctrl_c: CtrlC) -> None:
        self._ctrl_c = ctrl_c
        self._has_shades = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
        self._is_dim = False
        self._column = 0  # 0 at the start of a line
        self._words: Words | None = None  # of an answer
        self._waiting: str | None = None  # a command that was pasted behind a message
        if readline is not None:
            readline.parse_and_bind("tab: self-insert")  # not the names of files

    def show(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        if dim != self._is_dim and self._has_shades:
            sys.stdout.write(DIM if dim else PLAIN)
        self._is_dim = dim
        sys.stdout.write(text.translate(_UNSHOWN))
        sys.stdout.flush()
        self._column = 0 if text.endswith("\n") else 1

    def stream(self, text: str, *, dim: bool = False) -> None:
        """A piece of an answer, in lines that end between words where this is a terminal."""
        if not sys.stdout.isatty():
            self.show(text, dim=dim)
            return
        if self._words is None:
            self._words = Words(shutil.get_terminal_size().columns)
        self.show(self._words.add(text), dim=dim)

    def _end_words(self) -> None:
        if self._words is not None:
            self.show(self._words.flush(), dim=self._is_dim)
            self._words = None

    def line(self, text: str, *, dim: bool = True) -> None:
        """`text` on lines of its own, as long as the terminal is wide."""
        self.end_line()
        self.show("".join(f"{fitted(line)}\n" for line in text.splitlines()), dim=dim)
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

    def read(self) -> str:
        """A message: a line and those that a trailing backslash or a paste joins. Raises EOFError, Interrupted."""
        self.end_line()
        if self._waiting is not None:
            command, self._waiting = self._waiting, None
            return command
        self._ctrl_c.is_reading = True
        try:
            lines = [self._line("> ")]
            while True:
                if lines[-1].endswith("\\"):
                    lines[-1] = lines[-1][:-1]
                    lines.append(self._line(". "))
                elif not lines[0].startswith("/") and select.select([sys.stdin], [], [], PASTE_S)[0]:
                    lines.append(self._line(""))
                    if lines[-1] in COMMANDS:
                        self._waiting = lines.pop()
                        return "\n".join(lines)
                else:
                    return "\n".join(lines)
        finally:
            self._ctrl_c.is_reading = False

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        self._ctrl_c.count = 0
        return line


def chat(conversation: Conversation, *, hide_thinking: bool = False) -> None:
    """Read, answer, until Ctrl-D, /exit or a second Ctrl-C (KeyboardInterrupt)."""
    ctrl_c = CtrlC()
    screen = Screen(ctrl_c)
    screen.line(title(conversation))
    last: Completion | None = None
    with ctrl_c.heeded():
        while True:
            try:
                said = screen.read()
            except EOFError:
                screen.show("\n")
                return
            except Interrupted:
                screen.show("\n")
                if ctrl_c.count > 1:
                    raise KeyboardInterrupt from None
                screen.line("Ctrl-C again or /exit ends" if ctrl_c.count else "")
                continue
            except UnicodeDecodeError as e:
                screen.line(f"that is not UTF-8: {e}")
                continue
            if said.startswith("/"):
                if said.strip() == "/exit":
                    return
                if said.strip() == "/clear":
                    last = None
                screen.line(obey(said.strip(), conversation, last))
            elif said.strip():
                last = _answer(conversation, said.strip(), screen, ctrl_c, hide_thinking) or last


def title(conversation: Conversation) -> str:
    session = conversation.session
    drafting = ""
    if session.drafter_folder is not None:
        drafting = f", drafting with {session.drafter_folder.name}{in_int4(session.draft_weights)}"
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
    conversation: Conversation, said: str, screen: Screen, ctrl_c: CtrlC, hide_thinking: bool
) -> Completion | None:
    """Show the answer to `said`. None where there is none."""
    try:
        reply = conversation.say(said)
        try:
            with unechoed():
                _stream(reply, screen, ctrl_c, hide_thinking)
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


def _stream(reply: Reply, screen: Screen, ctrl_c: CtrlC, hide_thinking: bool) -> None:
    before = Piece("")
    for piece in reply:
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
