"""Parses Gemma-4's output as its tokens come: reasoning, content, tool calls.

A call is <|tool_call>call:NAME{key:value,…}<tool_call|>: keys bare, strings between two tokens <|"|> with nothing
escaped in them, numbers, true, false and null as in JSON, objects and arrays of the same. Several calls follow each
other with nothing between them. A thought is <|channel>thought, a newline, and text up to <channel|>. Sources: the chat
template as vLLM carries it (examples/tool_chat_template_gemma4.jinja: format_argument, strip_thinking), how vLLM
(tool_parsers/gemma4_tool_parser.py, reasoning/gemma4_reasoning_parser.py) and llama.cpp (models/templates) read both,
and https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from kerngen.runtime.serve.call_arguments import Arguments
from kerngen.runtime.text import THOUGHT, TextCodec

MAX_HEAD_CHARS = 256  # of call:NAME
_HEAD = re.compile(r"\s*:?\s*call:\s*([^\s{}\[\],\"]+)\s*")
_PART_OF_HEAD = re.compile(r"\s*:?\s*(c|ca|cal|call|call:\s*[^\s{}\[\],\"]*\s*)?")


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of call `index`, from 0. id, name: with the first of a call, then None. arguments: a piece of their JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


class Output:
    """Takes the tokens of one answer, and gives what they say in pieces. No tokens make it fail.

    prompt: what the answer follows, where a template may have opened a thought. calls: False where the request has no
    tools, so that the tokens of calls mean nothing. tools: names of functions. However the tokens are cut up, the
    pieces join to the same.

    A control token is told by its id: text that looks like one is text. Those that mean nothing where they stand are
    left out, so content never has one. An answer that begins with a thought's first line is a thought, though the token
    before it is missing. Where only its last token is there, an empty line follows what came before it.

    A call that is none (no call:NAME{) is content; the beginning of one, at which the answer ends, is nothing. Right
    behind a thought, call:NAME{ of one of `tools` is a call without its token, too.

    A call in which something cannot be read, or which ends early, keeps what it has, then the rest as it was written,
    and has_unread_call says so: its arguments are JSON exactly if the call could be read and is complete. What could be
    read: commas too many between members and behind the last; a key with nothing is an empty string; keys and strings
    may have plain quotation marks, as in JSON, or single ones; None, True and False; 108. and .5; other words are
    strings. Brackets that are missing where the call's last token stands are added, and those too many left out.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int] = (),
        *,
        calls: bool = True,
        tools: Collection[str] = (),
        new_id: Callable[[], str] = lambda: f"call_{uuid4().hex[:24]}",
    ) -> None:
        self._codec, self._new_id = codec, new_id
        self._open, self._close = codec.channel_ids or (-1, -1)
        self._call, self._end, self._quote = (codec.call_ids if calls else None) or (-1, -1, -1)
        self._bare_calls = [f"call:{name}{{" for name in tools] if calls and codec.call_ids is not None else []
        self._deltas: list[Delta] = []
        self._stream = codec.stream()
        self._part: _Content | _Thought | _Call = _Content(self, [THOUGHT] if codec.channel_ids is not None else [])
        self._last_said, self._is_border_due = "", False  # of the content: its last character
        self.num_calls = 0
        self.has_unread_call = False
        if (begin := codec.open_thought(prompt)) is not None:
            self._part = _Thought(self)
            self._part.text(codec.decode(prompt[begin:]))
            self._deltas.clear()

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """What `ids` complete; pieces that follow each other and are of one kind are one."""
        for token in ids:
            if token in (self._open, self._close, self._call, self._end, self._quote) and token >= 0:
                self._part.text(self._stream.finish())
                self._stream = self._codec.stream()
                self._take(token)
            else:
                self._part.text(self._stream.push([token]))
        return self._news()

    def finish(self) -> list[Delta]:
        """What was held back: it may have been a number that goes on, half a character, or half a call."""
        self._part.text(self._stream.finish())
        self._stream = self._codec.stream()
        self._part.end()
        self.go_on_with(_Content(self))
        return self._news()

    def _take(self, token: int) -> None:
        if token == self._quote:
            self._part.quote()
        elif token == self._open:
            self.go_on_with(_Thought(self))
        elif token == self._call:
            self.go_on_with(_Call(self))
        elif token == (self._end if isinstance(self._part, _Call) else self._close):
            self._part.close()
            self.go_on_with(_Content(self, self._bare_calls if token == self._close else ()))

    def go_on_with(self, part: _Content | _Thought | _Call, text: str = "") -> None:
        """`part`, which begins with `text`, follows what was read."""
        self._part.leave()
        self._part = part
        part.text(text)

    def go_on_behind_call(self, text: str) -> None:
        """With `text`, behind a call that had no token before it: so may the next one."""
        self.go_on_with(_Content(self, self._bare_calls), text)

    def begin_call(self, name: str) -> int:
        """The number of the call that begins here."""
        self.num_calls += 1
        self.add(ToolCallDelta(self.num_calls - 1, self._new_id(), name, ""))
        return self.num_calls - 1

    def say(self, text: str) -> None:
        if not text:
            return
        if self._is_border_due and self._last_said != "\n" and text[0] != "\n":
            text = "\n\n" + text
        self._last_said, self._is_border_due = text[-1], False
        self.add(ContentDelta(text))

    def end_unopened_thought(self) -> None:
        """What was said was a thought, if anything was: what follows is apart from it."""
        self._is_border_due = bool(self._last_said)

    def add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if isinstance(delta, ToolCallDelta):
            if isinstance(last, ToolCallDelta) and delta.id is None and last.index == delta.index:
                self._deltas[-1] = replace(last, arguments=last.arguments + delta.arguments)
            elif delta.id is not None or delta.arguments:
                self._deltas.append(delta)
        elif not delta.text:
            pass
        elif isinstance(last, ReasoningDelta | ContentDelta) and type(last) is type(delta):
            self._deltas[-1] = replace(last, text=last.text + delta.text)
        else:
            self._deltas.append(delta)

    def _news(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class _Content:
    """beginnings: texts with which, at its start, a thought (THOUGHT) or a call begins whose token is missing."""

    def __init__(self, output: Output, beginnings: Collection[str] = ()) -> None:
        self._output, self._beginnings = output, beginnings
        self._held = ""  # what may be such a beginning

    def text(self, text: str) -> None:
        if not self._beginnings:
            return self._output.say(text)
        held = self._held = self._held + text
        found = held if THOUGHT in self._beginnings else held.lstrip()
        if beginning := next((b for b in self._beginnings if found.startswith(b)), None):
            self._beginnings, self._held = (), ""
            if beginning == THOUGHT:
                return self._output.go_on_with(_Thought(self._output), found)
            name = beginning.removeprefix("call:").removesuffix("{")
            return self._output.go_on_with(_BareCall(self._output, name), found.removeprefix(beginning))
        if not any(b.startswith(found) for b in self._beginnings):
            self.leave()
        return None

    def quote(self) -> None:
        self.leave()

    def close(self) -> None:
        """An end of a thought that did not begin."""
        if THOUGHT in self._beginnings and self._held == THOUGHT.rstrip():
            self._held = ""
        self.leave()
        self._output.end_unopened_thought()

    def leave(self) -> None:
        """What is held was no beginning."""
        self._output.say(self._held)
        self._beginnings, self._held = (), ""

    def end(self) -> None:
        """The answer ends here."""


class _Thought(_Content):
    _name: str | None = ""  # None once it is known whether the first line is the channel's

    def text(self, text: str) -> None:
        if self._name is not None:
            text = self._name + text
            self._name = text if THOUGHT.startswith(text) and text != THOUGHT else None
            text = "" if self._name is not None else text.removeprefix(THOUGHT)
        self._output.add(ReasoningDelta(text))

    def quote(self) -> None:
        pass

    def close(self) -> None:
        pass

    def leave(self) -> None:
        if self._name and self._name != THOUGHT.rstrip():
            self._output.add(ReasoningDelta(self._name))


class _Call(_Content):
    """What follows <|tool_call>: first call:NAME{, then arguments, or, where that is not so, content."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._head: str | None = ""  # None once it is complete
        self._arguments: Arguments | None = None
        self._index = 0

    def text(self, text: str) -> None:
        if self._head is not None:
            self._head, brace, text = (self._head + text).partition("{")
            if not brace:
                if len(self._head) > MAX_HEAD_CHARS:
                    self._is_none()
                return
            match = _HEAD.fullmatch(self._head)
            if match is None or len(self._head) > MAX_HEAD_CHARS:
                self._is_none()
                text = brace + text
            else:
                self._head, self._arguments = None, Arguments()
                self._index = self._output.begin_call(match[1])
                self._add(brace)
        if self._arguments is None:
            self._output.say(text)
        else:
            self._add(self._arguments.push(text))

    def quote(self) -> None:
        if self._head is not None:
            self._is_none()
        if self._arguments is not None:
            self._add(self._arguments.quote())

    def close(self) -> None:
        if self._arguments is not None:
            self._add(self._arguments.close())

    def leave(self) -> None:
        if self._head is not None:
            self._is_none()
        if self._arguments is not None:
            self._add(self._arguments.finish())
            self._output.has_unread_call |= not self._arguments.is_complete

    def end(self) -> None:
        if self._head is not None and _PART_OF_HEAD.fullmatch(self._head):
            self._head = None

    def _is_none(self) -> None:
        self._output.say(self._head or "")
        self._head = None

    def _add(self, text: str) -> None:
        self._output.add(ToolCallDelta(self._index, None, None, text))


class _BareCall(_Call):
    """The arguments of function `name`, whose call has no token before it, and may have none behind it."""

    def __init__(self, output: Output, name: str) -> None:
        super().__init__(output)
        self._head, self._arguments = None, Arguments()
        self._index = output.begin_call(name)
        self._add("{")

    def text(self, text: str) -> None:
        assert self._arguments is not None
        for at, c in enumerate(text, 1):
            self._add(self._arguments.push(c))
            if self._arguments.is_complete:
                return self._output.go_on_behind_call(text[at:])
        return None
