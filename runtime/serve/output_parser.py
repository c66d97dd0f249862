"""Parses Gemma-4's output as its tokens come: reasoning, content, tool calls.

A call is <|tool_call>call:NAME{key:value,…}<tool_call|>: keys bare, strings between two tokens <|"|> with nothing
escaped in them, numbers, true, false and null as in JSON, objects and arrays of the same. Several calls follow each
other with nothing between them. A thought is <|channel>thought, a newline, and text up to <channel|>. Sources: the chat
template as vLLM carries it (examples/tool_chat_template_gemma4.jinja: format_argument, strip_thinking), how vLLM
(tool_parsers/gemma4_tool_parser.py, reasoning/gemma4_reasoning_parser.py) and llama.cpp (models/templates) read both,
and https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from kerngen.runtime.text import CALL, END_OF_CALL, QUOTE, TextCodec

THOUGHT = "thought\n"  # a thought's channel, its first line, which is no part of it
MAX_HEAD_CHARS = 256  # of call:NAME
_HEAD = re.compile(r"\s*call:\s*([^\s{}\[\],\"]+)\s*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SPACE = " \t\n\r"


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
    tools, so that the tokens of calls mean nothing. However the tokens are cut up, the pieces join to the same.

    A control token is told by its id: text that looks like one is text. Those that mean nothing where they stand are
    left out. A call that is none (no call:NAME{) is content, its control tokens written out. A call in which something
    cannot be read, or which ends early, keeps what it has, then the rest as it was written: its arguments are JSON
    exactly if the call could be read and is complete. What could be read: a comma may follow the last member; keys and
    strings may have plain quotation marks, as in JSON; None is null; other words are strings.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int] = (),
        *,
        calls: bool = True,
        new_id: Callable[[], str] = lambda: f"call_{uuid4().hex[:24]}",
    ) -> None:
        self._codec, self._new_id = codec, new_id
        self._open, self._close = codec.channel_ids or (-1, -1)
        self._call, self._end, self._quote = (codec.call_ids if calls else None) or (-1, -1, -1)
        self._deltas: list[Delta] = []
        self._stream = codec.stream()
        self._part: _Content | _Thought | _Call = _Content(self)
        self.num_calls = 0
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
        self._go_on_with(_Content(self))
        return self._news()

    def _take(self, token: int) -> None:
        if token == self._quote:
            self._part.quote()
        elif token == self._open:
            self._go_on_with(_Thought(self))
        elif token == self._call:
            self._go_on_with(_Call(self))
        elif token == (self._end if isinstance(self._part, _Call) else self._close):
            self._part.close()
            self._go_on_with(_Content(self))

    def _go_on_with(self, part: _Content | _Thought | _Call) -> None:
        self._part.leave()
        self._part = part

    def begin_call(self, name: str) -> int:
        """The number of the call that begins here."""
        self.num_calls += 1
        self.add(ToolCallDelta(self.num_calls - 1, self._new_id(), name, ""))
        return self.num_calls - 1

    def say(self, text: str) -> None:
        self.add(ContentDelta(text))

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
    def __init__(self, output: Output) -> None:
        self._output = output

    def text(self, text: str) -> None:
        self._output.say(text)

    def quote(self) -> None:
        pass

    def close(self) -> None:
        pass

    def leave(self) -> None:
        pass


class _Thought(_Content):
    _name: str | None = ""  # None once it is known whether the first line is the channel's

    def text(self, text: str) -> None:
        if self._name is not None:
            text = self._name + text
            self._name = text if THOUGHT.startswith(text) and text != THOUGHT else None
            text = "" if self._name is not None else text.removeprefix(THOUGHT)
        self._output.add(ReasoningDelta(text))

    def leave(self) -> None:
        if self._name and self._name != THOUGHT.rstrip():
            self._output.add(ReasoningDelta(self._name))


class _Call(_Content):
    """What follows <|tool_call>: first call:NAME{, then arguments, or, where that is not so, content."""

    def __init__(self, output: Output) -> None:
        super().__init__(output)
        self._head: str | None = ""  # None once it is complete
        self._arguments: _Arguments | None = None
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
                self._head, self._arguments = None, _Arguments()
                self._index = self._output.begin_call(match[1])
                self._add(brace)
        if self._arguments is None:
            self._output.say(text)
        else:
            self._add(self._arguments.push(text))

    def quote(self) -> None:
        if self._head is not None:
            self._is_none()
        if self._arguments is None:
            self._output.say(QUOTE)
        else:
            self._add(self._arguments.quote())

    def close(self) -> None:
        if self._head is not None:
            self._is_none()
        if self._arguments is None:
            self._output.say(END_OF_CALL)

    def leave(self) -> None:
        if self._head is not None:
            self._is_none()
        if self._arguments is not None:
            self._add(self._arguments.finish())

    def _is_none(self) -> None:
        self._output.say(CALL + (self._head or ""))
        self._head = None

    def _add(self, text: str) -> None:
        self._output.add(ToolCallDelta(self._index, None, None, text))


class _Arguments:
    """Gemma-4's arguments, behind their first brace, to JSON text in pieces; each piece is final.

    Where the syntax is broken the rest is given as it is. No JSON can go on with it there, so the whole is none.
    """

    def __init__(self) -> None:
        self._nested = ["{"]
        self._take = self._start  # what reads the next character
        self._is_key = True  # of what is read: a key, or a value
        self._comma = False  # before what begins next
        self._bare = ""  # a key or a value without the tokens around it, held until it ends
        self._escaped = False  # the next character, in plain quotation marks

    def push(self, text: str) -> str:
        pieces = []
        for at, c in enumerate(text):
            if self._take == self._string:  # up to a token: all of it
                pieces.append(_escaped(text[at:]))
                break
            if self._take == self._raw:
                pieces.append(text[at:])
                break
            pieces.append(self._take(c))
        return "".join(pieces)

    def quote(self) -> str:
        """The token around strings."""
        if self._take == self._start:
            self._take = self._string
            return self._lead() + '"'
        if self._take == self._string:
            self._take = self._colon if self._is_key else self._after
            return '"'
        return self._break(QUOTE)

    def finish(self) -> str:
        """What is held where the call ends; nothing where it is complete."""
        bare, self._bare = self._bare, ""
        return bare

    def _start(self, c: str) -> str:
        """Where a key or a value may begin, or, in its stead, what holds it may end."""
        if c in _SPACE:
            return ""
        if c in "}]" and c == self._closer and self._is_key == (c == "}"):
            return self._end(c)
        if c == '"':
            self._take, self._bare = self._plain, c
            return self._lead()
        if c in "{[" and not self._is_key:
            lead = self._lead()
            self._nested.append(c)
            self._is_key = c == "{"
            return lead + c
        if c in "{}[],":
            return self._break(c)
        self._take = self._word
        return self._lead() + self._word(c)

    def _word(self, c: str) -> str:
        """A key up to its colon, or a value up to what ends it."""
        if self._is_key and c == ":":
            return self._end_bare(_quoted(self._bare.strip())) + self._colon(c)
        if not self._is_key and c in ",]}":
            word = self._bare.strip()
            if word == "None":  # as older templates write null
                word = "null"
            is_json = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
            return self._end_bare(word if is_json else _quoted(word)) + self._after(c)
        if c in "{}[],":
            return self._break(c)
        self._bare += c
        return ""

    def _plain(self, c: str) -> str:
        """A key or a value in plain quotation marks, as in JSON."""
        self._bare += c
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            try:
                text = json.dumps(json.loads(self._bare, strict=False))
            except ValueError:
                return self._break("")
            return self._end_bare(text)
        return ""

    def _end_bare(self, text: str) -> str:
        self._bare = ""
        self._take = self._colon if self._is_key else self._after
        return text

    def _string(self, c: str) -> str:
        return _escaped(c)

    def _colon(self, c: str) -> str:
        if c in _SPACE:
            return ""
        if c != ":":
            return self._break(c)
        self._take, self._is_key = self._start, False
        return c

    def _after(self, c: str) -> str:
        if c in _SPACE:
            return ""
        if c == ",":
            self._take, self._comma, self._is_key = self._start, True, self._closer == "}"
            return ""
        return self._end(c) if c == self._closer else self._break(c)

    @property
    def _closer(self) -> str:
        return {"{": "}", "[": "]"}[self._nested[-1]] if self._nested else ""

    def _end(self, c: str) -> str:
        self._nested.pop()
        self._comma = False
        self._take = self._after if self._nested else self._done
        return c

    def _done(self, c: str) -> str:
        return "" if c in _SPACE else self._break(c)

    def _lead(self) -> str:
        comma, self._comma = "," if self._comma else "", False
        return comma

    def _break(self, c: str) -> str:
        self._take = self._raw
        return self._lead() + self.finish() + c

    def _raw(self, c: str) -> str:
        return c


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
