"""What is typed into a chat: messages, edited with prompt_toolkit, and what comes while an answer is made."""

from __future__ import annotations

import asyncio
import select
import signal
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, get_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal


class Interrupted(Exception):
    """Ctrl-C while a message was typed."""


class CtrlC:
    """Counts Ctrl-C since a message was last entered: while an answer is made as a signal, at the prompt as a key.

    An answer looks at the count between two steps of the engine, and stops. The second one that finds it still not
    stopped ends all.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    @contextmanager
    def heeded(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Keyboard:
    """The keys of a terminal. history: what was typed before, oldest first. commands: names, to be completed."""

    def __init__(self, history: Sequence[str], commands: Mapping[str, str]) -> None:
        output = get_app_session().output
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # what a terminal answers late would stand in what is typed
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=lambda width, line, wraps: "  " if wraps else ". ",
            history=InMemoryHistory(history),
            completer=_Commands(commands),
            complete_style=CompleteStyle.READLINE_LIKE,  # takes no room of the screen before there is something to show
            complete_while_typing=False,
            enable_suspend=True,
            interrupt_exception=Interrupted,
            key_bindings=_bindings(),
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
        )

    def read(self) -> str:
        """A message. Raises EOFError after Ctrl-D, Interrupted after Ctrl-C."""
        return self._session.prompt(pre_run=self._feed)

    def _feed(self) -> None:
        """Feed what was typed ahead once the history is there: prompt_toolkit would before, and lose an Up."""
        app = self._session.app
        self._session.default_buffer.load_history_if_not_yet_loaded()
        ahead = get_typeahead(app.input)

        def feed() -> None:
            app.key_processor.feed_multiple(ahead)
            app.key_processor.process_keys()

        asyncio.get_running_loop().call_soon(feed)

    @property
    def typed(self) -> str:
        """What was typed when `read` ended."""
        return self._session.default_buffer.text

    def keep_typed(self) -> bool:
        """Keep for the next `read` what was typed meanwhile, so that the terminal always has room for a Ctrl-C.

        Returns whether there was a Ctrl-C among it: right behind Enter it is a key still, and no signal.
        """
        keys = self._session.input
        ahead = get_typeahead(keys)
        while not keys.closed and select.select([keys.fileno()], [], [], 0)[0]:
            ahead += keys.read_keys()
        kept = [key for key in ahead if key.key is not Keys.ControlC]
        store_typeahead(keys, kept)
        return len(kept) < len(ahead)

    @contextmanager
    def unechoed(self) -> Iterator[None]:
        """Within it, keys are not shown: what is typed ahead, or Ctrl-C, would stand in the middle of an answer.

        They come as `read` gets them, key by key, and what is pasted is marked as such. Ctrl-C alone is a signal, at
        which the terminal forgets nothing that was typed.
        """
        try:
            before = termios.tcgetattr(sys.stdin)
        except (termios.error, OSError, ValueError):  # no terminal
            yield
            return
        within = [*before[:6], [*before[6]]]
        within[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
        within[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        within[3] |= termios.ISIG | termios.NOFLSH
        within[6][termios.VMIN], within[6][termios.VTIME] = 1, 0
        termios.tcsetattr(sys.stdin, termios.TCSANOW, within)
        self._mark_pastes(True)
        try:
            yield
        finally:
            self._mark_pastes(False)
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)

    def _mark_pastes(self, are_marked: bool) -> None:
        if is_dumb_terminal():
            return
        output = self._session.output
        if are_marked:
            output.enable_bracketed_paste()
        else:
            output.disable_bracketed_paste()
        output.flush()


class _Commands(Completer):
    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        begun = document.text_before_cursor
        for name in self._commands:
            if begun and name.startswith(begun):
                yield Completion(name, start_position=-len(begun))


def _bindings() -> KeyBindings:
    """Keys that do something else here than in prompt_toolkit. Enter sends, wherever the cursor is."""
    bindings = KeyBindings()
    is_typing = has_focus(DEFAULT_BUFFER)  # and no search

    @bindings.add("enter", filter=is_typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=is_typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @Condition
    def is_text() -> bool:
        return not get_app().current_buffer.text.startswith("/")

    @bindings.add("tab", filter=is_typing & is_text)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\t")

    return bindings
