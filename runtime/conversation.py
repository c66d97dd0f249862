"""A chat: turns that follow each other in one context, each answer in pieces, told apart into thought and said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kerngen.errors import DeviceError, UsageError
from kerngen.runtime.backend import explaining_memory
from kerngen.runtime.chat import THINKING
from kerngen.runtime.completion import Answer, Completion
from kerngen.runtime.engine import Engine, Handle, Request
from kerngen.runtime.media.given import said_with
from kerngen.runtime.sampling import Sampling
from kerngen.runtime.session import Session
from kerngen.runtime.text import THOUGHT, TextCodec, TextStream

DEFAULT_CONTEXT = 32_768  # tokens of a chat, or a server's sequence, unless more is asked for: a cache is made at once


class ContextFull(UsageError):
    """A message that does not fit behind the turns that are there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. Empty after a step that made nothing to show."""

    text: str
    is_thought: bool = False


class Parts:
    """Splits an answer into what is thought and what is said, as its tokens come.

    A thought stands between the tokens of a channel, whose name is its first line; stop strings end what is said. An
    answer that begins with that line is a thought, though the token before it is missing.
    prompt: what the answer follows, where a template may have opened the channel.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], prompt: Sequence[int]) -> None:
        self._codec = codec
        self._open, self._close = codec.channel_ids or (-1, -1)
        self._answer = Answer(codec, stop)
        self._said: list[int] = []
        self._pieces: deque[Piece] = deque()
        self._thought: TextStream | None = None
        self._name: str | None = None  # of the channel, None once it is complete
        self._held: list[int] = []  # with which the answer begins, while they may be a thought's first line
        self._first, self._first_text = codec.stream(), ""
        self._may_begin = codec.channel_ids is not None
        if codec.open_thought(prompt) is not None:
            self._thought, self._may_begin = codec.stream(), False

    def ends_with(self, token: int) -> bool:
        """Takes the next token; whether a stop string is complete with it."""
        if self._may_begin and token not in (self._open, self._close):
            return self._begin(token)
        if self._may_begin:
            if token == self._open or self._first_text != THOUGHT.rstrip():
                self._say_held()
            self._may_begin = False
        if token == self._open:
            self._end_thought()
            self._thought, self._name = self._codec.stream(), ""
        elif token == self._close:
            self._end_thought()
        elif self._thought is not None:
            self._think(self._thought.push([token]))
        else:
            return self._say(token)
        return False

    def _begin(self, token: int) -> bool:
        """Takes one of the answer's first tokens; whether a stop string is complete with it."""
        self._held.append(token)
        self._first_text += self._first.push([token])
        if self._first_text.startswith(THOUGHT):
            self._may_begin, self._thought = False, self._first
            self._add(self._first_text.removeprefix(THOUGHT), is_thought=True)
        elif not THOUGHT.startswith(self._first_text):
            return self._say_held()
        return False

    def _say_held(self) -> bool:
        """The first tokens are no thought's; whether a stop string is complete with them."""
        self._may_begin = False
        ends = [self._say(token) for token in self._held]
        return any(ends)

    def _say(self, token: int) -> bool:
        self._said.append(token)
        is_end = self._answer.ends_with(token)
        self._add(self._answer.news())
        return is_end

    def news(self) -> Piece:
        """The oldest piece that was not shown, or an empty one."""
        return self._pieces.popleft() if self._pieces else Piece("")

    def finish(self, handle: Handle) -> Completion:
        """What is said in all; the rest of it is among the pieces. tokens, stats: the thoughts' included."""
        if self._may_begin:
            self._say_held()
        self._end_thought()
        made = handle.generation
        rest, said = self._answer.finish(replace(made, tokens=self._said))
        self._add(rest)
        return replace(said, tokens=made.tokens)

    @property
    def has_news(self) -> bool:
        return bool(self._pieces)

    def _add(self, text: str, *, is_thought: bool = False) -> None:
        if text:
            self._pieces.append(Piece(text, is_thought))

    def _think(self, text: str) -> None:
        if self._name is not None:
            name, newline, text = (self._name + text).partition("\n")
            self._name = None if newline else name
        self._add(text, is_thought=True)

    def _end_thought(self) -> None:
        if self._thought is not None:
            self._think(self._thought.finish())
        self._thought = self._name = None


class Conversation:
    """The turns of a chat with `session`, and the context that they fill.

    system: what the model is told first. max_new_tokens: of an answer, None for as many as the context holds. context:
    tokens of all turns together, None for as many as the model and the memory take, DEFAULT_CONTEXT at most; the cache
    for them is allocated here, and keeps the turns, so that only what is new is computed. think: ask the model to.
    max_soft_tokens: of each image, as in Session.encode_media.
    Raises UsageError for what cannot be right, CheckpointError where there is no chat template or it fails, DeviceError
    where there is no memory.
    """

    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        context: int | None = None,
        think: bool = False,
        max_soft_tokens: int | None = None,
    ) -> None:
        self.session, self._sampling = session, sampling or Sampling()
        self._max_new_tokens, self._stop = max_new_tokens, tuple(stop)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._variables: dict[str, Any] = {THINKING: True} if think else {}
        self._max_soft_tokens = max_soft_tokens
        self.messages: list[dict[str, Any]] = list(self._first)
        self.num_tokens = 0  # of the context that the turns fill
        session.encode([*self._first, {"role": "user", "content": "?"}], **self._variables)  # the template, tried
        if think and not session.codec.template_reads(THINKING):
            raise UsageError(f"the chat template of {session.folder} knows no thinking: it does not read {THINKING}")
        self.context = session.max_len = _room(session) if context is None else context
        try:
            with explaining_memory(session.ops.device):
                session.reserve(self.context)
        except DeviceError as e:
            raise DeviceError(f"{e.message}; a context of {self.context:,} tokens was to be allocated",
                              hint="a smaller --context; kerngen run --plan says what fits") from e  # fmt: skip

    def clear(self) -> None:
        """Forget all turns but the system's."""
        self.messages, self.num_tokens = list(self._first), 0

    def say(
        self, text: str, *, images: Sequence[Any] = (), videos: Sequence[Any] = (), audio: Sequence[Any] = ()
    ) -> Reply:
        """The answer to `text` with `images`, `videos` and `audio` before it, which joins the turns with them. Raises
        UsageError, ContextFull where it does not fit.
        """
        session = self.session
        messages = [*self.messages, *said_with(text, {"image": images, "video": videos, "audio": audio}, session.media)]
        said = session.encode_media(messages, max_soft_tokens=self._max_soft_tokens, **self._variables)
        ids = list(said.ids)
        if (room := self.context - len(ids)) < 1:
            raise ContextFull(
                f"with this message the conversation has {len(ids):,} tokens; its context holds {self.context:,}"
            )
        wanted = self._max_new_tokens or room + 1
        parts = Parts(session.codec, self._stop, ids)
        request = Request(ids, min(wanted, room), self._sampling, session.stop_ids, parts.ends_with, media=said.media)
        with explaining_memory(session.ops.device):
            engine = session.reserve(self.context)
        return Reply(self, engine, engine.submit(request), parts, messages, is_cut=wanted > room)


class Reply(Iterator[Piece]):
    """An answer in pieces, an empty one after a step without. Once it ends, or is stopped, it is a turn of the chat.

    An answer that says nothing is none: its question is forgotten with it. Where it is an error, too.
    completion: None until it ends; its stop_reason is "stop", "length", "context" (it is full) or "cancelled".
    """

    def __init__(self, conversation: Conversation, engine: Engine, handle: Handle, parts: Parts,
                 messages: list[dict[str, Any]], *, is_cut: bool) -> None:  # fmt: skip
        self._conversation, self._engine, self._handle, self._parts = conversation, engine, handle, parts
        self._messages, self._is_cut = messages, is_cut
        self.completion: Completion | None = None

    def __next__(self) -> Piece:
        handle = self._handle
        if not self._parts.has_news:
            if self.completion is not None:
                raise StopIteration
            if handle.error is not None:
                raise handle.error
            if handle.is_done:
                self._finish()
            else:
                with explaining_memory(self._conversation.session.ops.device):
                    self._engine.step()
        return self._parts.news()

    def stop(self) -> None:
        """End it where it is, as a turn of the chat; what is left of its pieces may still be read."""
        self.close()
        if self.completion is None and self._handle.error is None:
            self._finish()

    def close(self) -> None:
        """End it where it is, if it has not ended, and forget it."""
        self._engine.cancel(self._handle)

    def _finish(self) -> None:
        conversation, made = self._conversation, self._parts.finish(self._handle)
        if made.stop_reason == "length" and self._is_cut:
            made = replace(made, stop_reason="context")
        self.completion = made
        if made.text:
            conversation.messages = [*self._messages, {"role": "assistant", "content": made.text}]
            conversation.num_tokens = made.stats.num_prompt_tokens + made.stats.num_tokens


def _room(session: Session) -> int:
    """Tokens that a chat may hold where nobody says it."""
    most = min(session.config.max_positions, DEFAULT_CONTEXT)
    if session.ops.device.type != "cuda":
        return most
    free = torch.cuda.mem_get_info(session.ops.device)[0]
    fits = session.cache_shape.most_tokens(session.cache_budget)
    if fits < 1:
        raise DeviceError(f"{free / 1e9:.1f} GB are free on {session.ops.device}: no room for a context",
                          hint="a W4A16 checkpoint, or a larger GPU; kerngen run --plan says what fits")  # fmt: skip
    return min(most, fits)
